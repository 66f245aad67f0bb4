//! kernelfleet: language-model agents write CUDA kernels, every attempt is measured honestly.
//!
//! Arrows point one way: `api`, `task` and `plan` know nobody; `sandbox`, `judge` and `agent` know those;
//! `local` is at the top. See `docs/architecture.md`.

pub mod agent;
pub mod api;
pub mod gateway;
pub mod judge;
pub mod local;
pub mod plan;
pub mod sandbox;
pub mod task;
