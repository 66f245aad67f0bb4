//! Tasks: the problem files, their form and their operator graph. Knows nobody.

pub mod graph;
pub mod init;
pub mod source;
pub mod syntax;
