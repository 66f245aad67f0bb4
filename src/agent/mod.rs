//! Policies that write candidates.

pub mod builtin;
