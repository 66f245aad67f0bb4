//! One machine: `kernelfleet run` and its sisters, on the same modules that a cluster uses.

pub mod environment;
