//! The built-in policy as a run sees it.

use super::environment::Environment;
use super::run::{Episode, Policy};
use crate::api::job::OptimizationJob;
use crate::judge::{Device, TaskSource};
use crate::task::graph::Graph;

/// The optimiser that comes with kernelfleet.
#[derive(Clone, Debug)]
pub struct Builtin {
    device: Device,
}

impl Builtin {
    /// For one job on one device.
    #[must_use]
    pub fn new(device: Device, _environment: &Environment, _job: &OptimizationJob) -> Self {
        Self { device }
    }
}

impl Policy for Builtin {
    fn begin(&self, _task: &TaskSource, _graph: &Graph) -> Result<Box<dyn Episode>, String> {
        Err(format!("the built-in policy knows no family of operators yet ({:?})", self.device))
    }
}
