//! kernelfleet: language-model agents write CUDA kernels, every attempt is measured honestly.
//!
//! Arrows point one way: `api`, `bound`, `hex`, `task`, `plan` and `wire` know nobody; `sandbox`, `gateway`, `judge`, `agent` and `broker`
//! know those; `local`, `pod` and `operator` are at the top. See `docs/architecture.md`.

pub mod agent;
pub mod api;
pub mod bound;
pub mod broker;
pub mod gateway;
pub mod hex;
pub mod judge;
pub mod local;
pub mod operator;
pub mod plan;
pub mod pod;
#[cfg(test)]
mod properties;
pub mod sandbox;
pub mod task;
pub mod wire;
