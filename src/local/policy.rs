//! The built-in policy as a run sees it: what it proposes, swept a batch at a time.
//!
//! Knows the order of a sweep: the defaults alone (if they are wrong, so are other block sizes), every other value
//! of each parameter, then the best values together. Must not know how kernels are written.

use std::collections::BTreeMap;

use super::environment::Environment;
use super::run::{Episode, Policy};
use crate::agent::builtin::{Facts, Proposal, Variant, propose};
use crate::judge::{Candidate, Device, TaskSource, Verdict};
use crate::task::graph::Graph;

/// A variant must be faster than the defaults by this factor for its value to count.
const BETTER: f64 = 0.99;

/// The optimiser that comes with kernelfleet.
#[derive(Clone, Debug)]
pub struct Builtin {
    device: Device,
    facts: Facts,
}

impl Builtin {
    /// For one device of this machine.
    #[must_use]
    pub fn new(device: Device, environment: &Environment) -> Self {
        let threads = i64::try_from(environment.toolchain.threads).unwrap_or(1);
        Self { device, facts: Facts { threads, ..Facts::default() } }
    }
}

impl Policy for Builtin {
    fn begin(&self, task: &TaskSource, graph: &Graph) -> Result<Box<dyn Episode>, String> {
        let proposal = propose(task, graph, self.device, &self.facts).map_err(|declined| declined.to_string())?;
        Ok(Box::new(Sweep { proposal, stage: Stage::Defaults, batch: Vec::new(), base: None, best: BTreeMap::new() }))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Defaults,
    Others,
    Together,
    End,
}

struct Sweep {
    proposal: Proposal,
    stage: Stage,
    batch: Vec<Variant>,
    /// Time of the defaults, microseconds.
    base: Option<f64>,
    /// Best value of each parameter that beats the defaults, with its time.
    best: BTreeMap<String, (i64, f64)>,
}

impl Episode for Sweep {
    fn next(&mut self) -> Vec<(Candidate, String)> {
        self.batch = match self.stage {
            Stage::Defaults => {
                self.stage = Stage::Others;
                self.proposal.candidates.iter().take(1).cloned().collect()
            }
            Stage::Others if self.base.is_some() && self.proposal.candidates.len() > 1 => {
                self.stage = Stage::Together;
                self.proposal.candidates.iter().skip(1).cloned().collect()
            }
            Stage::Together if self.best.len() > 1 => {
                self.stage = Stage::End;
                let chosen = self.best.iter().map(|(name, (value, _))| (name.clone(), *value)).collect();
                vec![self.proposal.variant(&chosen)]
            }
            _ => Vec::new(),
        };
        let covered = self.proposal.covered.join(", ");
        let idea = |variant: &Variant| {
            if variant.parameters == "defaults" {
                covered.clone()
            } else {
                format!("{covered} ({})", variant.parameters)
            }
        };
        self.batch.iter().map(|v| (Candidate { files: v.files.clone() }, idea(v))).collect()
    }

    fn learn(&mut self, index: usize, verdict: &Verdict) {
        let Some(time) = verdict.time_us.candidate.filter(|_| verdict.correct).map(|i| i.median) else { return };
        let Some(variant) = self.batch.get(index) else { return };
        if self.stage == Stage::Others {
            self.base = Some(time);
            return;
        }
        let Some((name, value)) = variant.parameters.split_once('=') else { return };
        let Ok(value) = value.parse::<i64>() else { return };
        let beats = self.base.is_some_and(|base| time < base * BETTER);
        if beats && self.best.get(name).is_none_or(|(_, known)| time < *known) {
            self.best.insert(name.to_owned(), (value, time));
        }
    }
}
