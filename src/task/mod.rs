//! Tasks: the problem files, their form and their operator graph. Knows nobody.

pub mod graph;
