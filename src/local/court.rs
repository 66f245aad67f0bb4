//! A judge of this process as the work on tasks sees it: `Court` and `Bench` on `judge::Session`.
//!
//! Knows what a job's choices mean for a judge, and whose fault an error is. Must not know the order of the work.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::run::{Bench, Court, Trouble};
use crate::api::job;
use crate::judge::counters::Kernel;
use crate::judge::verdict::{LaunchEvidence, Reason};
use crate::judge::{
    self, Candidate, Device, Effort, Judge, Options, PathChoice, Precision, TaskSource, Tolerance, Verdict,
};
use crate::task::graph::Graph;
use crate::task::syntax;

impl From<judge::Error> for Trouble {
    fn from(error: judge::Error) -> Self {
        match error {
            judge::Error::Request { .. } => Self::Request(error.to_string()),
            judge::Error::Fault(_) => Self::Fault(error.to_string()),
        }
    }
}

/// A judge that opens tasks in reference hosts of its own.
#[derive(Debug)]
pub struct Real {
    pub judge: Arc<Judge>,
    /// What tasks can import.
    pub modules: Vec<String>,
}

impl Real {
    /// As `Court::open`, for whoever keeps what is open.
    ///
    /// # Errors
    /// As there.
    pub fn opened(&self, task: &TaskSource) -> Result<Open, Trouble> {
        by_syntax(task, &self.modules)?;
        Ok(Open(self.judge.open(task)?))
    }
}

/// What needs no process to be seen is refused without one.
fn by_syntax(task: &TaskSource, modules: &[String]) -> Result<(), Trouble> {
    let refusals = syntax::check(&task.source, Some(modules));
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Trouble::Request(refusals.iter().map(|r| placed(&task.path, r)).collect::<Vec<_>>().join("; ")))
}

/// Refuses tasks by their syntax where no judge is started, since no task gets any further.
#[derive(Debug)]
pub struct Unstarted {
    /// What tasks can import.
    pub modules: Vec<String>,
}

impl Court for Unstarted {
    fn open(&self, task: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble> {
        by_syntax(task, &self.modules)?;
        Err(Trouble::Fault("the judge was not started".into()))
    }
}

impl Court for Real {
    fn open(&self, task: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble> {
        Ok(Box::new(self.opened(task)?))
    }
}

/// How long a run looks for what refuses a task; `task check` takes longer.
const CHECK_SECONDS: f64 = 8.0;

/// A task that is open in a judge of this process.
#[derive(Debug)]
pub struct Open(judge::Session);

impl Open {
    /// Whether its reference host can be asked anything: what has crashed stays so.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.0.alive()
    }
}

impl Bench for Open {
    fn check(&mut self) -> Result<Vec<String>, Trouble> {
        let answer = self.0.check(CHECK_SECONDS)?;
        tracing::debug!(phases = %answer["phases_seconds"], notes = %answer["notes"], "checked");
        Ok(refusals(&answer))
    }

    fn trace(&mut self) -> Result<Graph, Trouble> {
        Ok(self.0.trace()?)
    }

    fn properties(&self) -> Value {
        self.0.properties().clone()
    }

    fn judge(
        &mut self,
        candidates: &[Candidate],
        effort: Effort,
        told: &mut dyn FnMut(usize, Verdict),
    ) -> Result<(), Trouble> {
        Ok(self.0.judge_batch(candidates, effort, told)?)
    }

    fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble> {
        Ok(self.0.compile(candidate)?)
    }

    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble> {
        Ok(self.0.reference()?)
    }

    fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble> {
        Ok(self.0.counters(candidate)?)
    }
}

/// Sentences of the host's answer to `check`.
fn refusals(answer: &Value) -> Vec<String> {
    let list = answer["refusals"].as_array().into_iter().flatten();
    list.map(|r| r["message"].as_str().or_else(|| r["code"].as_str()).unwrap_or("refused").to_owned()).collect()
}

/// A refusal with its place in the task's file.
#[must_use]
pub fn placed(path: &Path, refusal: &syntax::Refusal) -> String {
    match refusal.line {
        Some(line) => format!("{}:{line}: {}", path.display(), refusal.message),
        None => format!("{}: {}", path.display(), refusal.message),
    }
}

/// How a job wants its candidates judged.
#[must_use]
pub fn options(judge: &job::Judge, device: Device) -> Options {
    Options {
        device,
        // On a card only when a person asks for it: the process path has not been shown there.
        path: if device == Device::Cpu && judge.minimum_grade == job::Grade::Observed {
            PathChoice::Auto
        } else {
            PathChoice::Plan
        },
        precision: match judge.precision {
            job::Precision::Reference => Precision::Reference,
            job::Precision::Tf32 => Precision::Tf32,
            job::Precision::Half => Precision::Half,
        },
        tolerance: match judge.tolerance {
            job::Tolerance::Contract => Tolerance::Contract,
            job::Tolerance::Kernelbench => Tolerance::Kernelbench,
            job::Tolerance::CudaAgent => Tolerance::CudaAgent,
        },
        libraries: judge.libraries.iter().map(|l| l.name().to_owned()).collect(),
        inputs: usize::try_from(judge.inputs).unwrap_or(5),
        measure_seconds: None,
        ..Options::default()
    }
}
