//! One machine: `kernelfleet run` and its sisters, on the same modules that a cluster uses.

// `terminal` prints: a closed pipe is no panic.
#![deny(clippy::print_stdout, clippy::print_stderr)]

pub mod candidate;
pub mod choose;
pub mod commands;
pub mod court;
pub mod doctor;
pub mod environment;
pub mod episodes;
pub mod export;
pub mod policy;
pub mod progress;
pub mod render;
pub mod run;
pub mod story;
pub mod summary;
pub mod terminal;
