//! Agents: who writes candidates, and how.
//!
//! `builtin` needs no model. An `episode` is the loop of a model (its `author`) with its `tools`, a judge behind its
//! `desk`, recorded as a `trajectory`.

pub mod author;
pub mod builtin;
mod conversation;
pub mod desk;
pub mod episode;
pub mod kit;
pub mod report;
pub mod rules;
pub mod tools;
pub mod trajectory;
