//! The broker of a GpuPool: tasks by index, evaluations by fair share, slices of cards, the ledger (`docs/broker.md`).
//!
//! `core` decides and knows no network, clock or disk; `ledger` and `objects` keep; `facts` reads what is known of a job;
//! `service` is the shell around them.

pub mod core;
pub mod facts;
pub mod ledger;
pub mod metrics;
pub mod objects;
pub mod service;

pub use service::serve::{Arguments, Error, main};
