//! The built-in policy as a run sees it: what it proposes, swept a batch at a time.
//!
//! Knows the order of a sweep: the defaults of every form (if they are wrong, so are other block sizes), every other
//! value of each parameter of the fastest form, then the best values together. Must not know how kernels are written.

use std::collections::BTreeMap;

use super::run::{Episode, Halt, Policy, Work};
use crate::agent::builtin::{Facts, Form, Variant, propose};
use crate::judge::{Candidate, Device, Verdict};

/// Kernels that move what they are given at this share of the memory's rate have nothing left that block sizes
/// could give.
const STREAMING: f64 = 0.88;

/// A variant must be faster than the defaults by this factor for its value to count.
const BETTER: f64 = 0.99;

/// The optimiser that comes with kernelfleet.
#[derive(Clone, Debug)]
pub struct Builtin {
    device: Device,
    facts: Facts,
}

impl Builtin {
    /// For a device, wherever it is: what is known of it is asked of the judge.
    #[must_use]
    pub fn new(device: Device) -> Self {
        Self { device, facts: Facts::default() }
    }
}

impl Policy for Builtin {
    fn work(&self, work: &mut Work<'_>) -> Result<(), Halt> {
        let graph = work.trace()?;
        let mut facts = self.facts.clone();
        let properties = work.properties();
        if let Some(count) = properties["multi_processor_count"].as_i64() {
            facts.multiprocessors = count;
        }
        if let Some(threads) = properties["threads"].as_i64() {
            facts.threads = threads;
        }
        let proposal =
            propose(work.task, &graph, self.device, &facts).map_err(|declined| Halt::Declined(declined.to_string()))?;
        Ok(work.sweep(&mut Sweep::new(proposal.forms))?)
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
    forms: Vec<Form>,
    stage: Stage,
    /// What is being judged, and of which form each is.
    batch: Vec<(usize, Variant)>,
    /// The fastest form and the time of its defaults, microseconds.
    base: Option<(usize, f64)>,
    /// The defaults of the fastest form are bound by memory alone.
    streaming: bool,
    /// Best value of each parameter that beats the defaults, with its time.
    best: BTreeMap<String, (i64, f64)>,
}

impl Sweep {
    const fn new(forms: Vec<Form>) -> Self {
        Self { forms, stage: Stage::Defaults, batch: Vec::new(), base: None, streaming: false, best: BTreeMap::new() }
    }
}

impl Episode for Sweep {
    fn next(&mut self) -> Vec<(Candidate, String)> {
        self.batch = match (self.stage, self.base) {
            (Stage::Defaults, _) => {
                self.stage = Stage::Others;
                self.forms.iter().map(|form| form.variant(&BTreeMap::new())).enumerate().collect()
            }
            (Stage::Others, Some((fastest, _))) if !self.streaming => {
                self.stage = Stage::Together;
                self.forms[fastest].candidates().into_iter().skip(1).map(|variant| (fastest, variant)).collect()
            }
            (Stage::Together, Some((fastest, _))) if self.best.len() > 1 => {
                self.stage = Stage::End;
                let chosen = self.best.iter().map(|(name, (value, _))| (name.clone(), *value)).collect();
                vec![(fastest, self.forms[fastest].variant(&chosen))]
            }
            _ => Vec::new(),
        };
        let idea = |form: &Form, variant: &Variant| {
            let mut words = form.covered.join(", ");
            let parameters = Some(variant.parameters.as_str()).filter(|&text| text != "defaults");
            let details: Vec<&str> = form.label.into_iter().chain(parameters).collect();
            if !details.is_empty() {
                words.push_str(&format!(" ({})", details.join(", ")));
            }
            words
        };
        self.batch.iter().map(|(form, v)| (Candidate { files: v.files.clone() }, idea(&self.forms[*form], v))).collect()
    }

    fn learn(&mut self, index: usize, verdict: &Verdict) {
        let Some(time) = verdict.time_us.candidate.filter(|_| verdict.correct).map(|i| i.median) else { return };
        let Some((form, variant)) = self.batch.get(index) else { return };
        if self.stage == Stage::Others {
            if self.base.is_none_or(|(_, known)| time < known) {
                self.base = Some((*form, time));
                self.streaming = streams(verdict, time);
            }
            return;
        }
        let Some((name, value)) = variant.parameters.split_once('=') else { return };
        let Ok(value) = value.parse::<i64>() else { return };
        let beats = self.base.is_some_and(|(_, base)| time < base * BETTER);
        if beats && self.best.get(name).is_none_or(|(_, known)| time < *known) {
            self.best.insert(name.to_owned(), (value, time));
        }
    }
}

/// Whether all that its launches touch, each tensor once a launch, went by at nearly the memory's rate.
fn streams(verdict: &Verdict, time_us: f64) -> bool {
    let rate = verdict.device.get("memory_gbps").and_then(serde_json::Value::as_f64).unwrap_or(0.0);
    let bytes: u64 = verdict.launches.iter().map(|launch| launch.bytes).sum();
    rate > 0.0 && bytes as f64 > STREAMING * rate * 1e3 * time_us
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::judge::TaskSource;
    use crate::judge::verdict::{Against, Grade, Interval, Measurement, PROCEDURE, Times};
    use crate::task::graph::Graph;

    fn sweep() -> Sweep {
        let meta = json!({"dtype": "float32", "shape": [64, 1000], "strides": [1000, 1]});
        let graph: Graph = serde_json::from_value(json!({
            "inputs": [{"id": "t0", "dtype": "float32", "shape": [64, 1000], "strides": [1000, 1]}],
            "parameters": [], "outputs": ["t1"], "structure": "tensor",
            "nodes": [{"id": "t1", "ids": ["t1"], "op": "aten._softmax.default",
                       "args": [{"t": "t0"}, 1, false], "outputs": [meta]}],
        }))
        .unwrap();
        let source = "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n    def forward(self, x):\n        return torch.softmax(x, 1)\n";
        let task = TaskSource { name: "t".into(), path: "t.py".into(), source: source.into() };
        let proposal = crate::agent::builtin::propose(&task, &graph, Device::Cuda, &Facts::default()).unwrap();
        assert!(proposal.forms[0].candidates().len() > 2, "there is something to sweep");
        Sweep::new(proposal.forms)
    }

    fn verdict(time: Option<f64>) -> Verdict {
        let interval = time.map(|t| Interval { median: t, low: t, high: t });
        Verdict {
            reward: if time.is_some() { 1 } else { -1 },
            correct: time.is_some(),
            reason: None,
            grade: Grade::Enforced,
            isolation: vec![],
            measurement: Measurement::Shared,
            notes: vec![],
            speedup: Against::default(),
            time_us: Times { candidate: interval, ..Times::default() },
            samples: 1,
            compared: 1,
            launches: vec![],
            device: BTreeMap::new(),
            versions: BTreeMap::new(),
            precision: String::new(),
            tolerance: String::new(),
            procedure: PROCEDURE.into(),
            phases_seconds: BTreeMap::new(),
            digests: BTreeMap::new(),
            audit: vec![],
            cached: false,
        }
    }

    #[test]
    fn a_sweep_ends_where_the_defaults_are_wrong() {
        let mut sweep = sweep();
        assert_eq!(sweep.next().len(), 1);
        sweep.learn(0, &verdict(None));
        assert!(sweep.next().is_empty());
    }

    #[test]
    fn every_form_is_tried_and_the_fastest_is_swept() {
        for (times, fastest) in [([Some(10.0), Some(8.0)], 1), ([Some(8.0), Some(10.0)], 0), ([None, Some(10.0)], 1)] {
            let mut sweep = sweep();
            let other = sweep.forms[0].clone();
            sweep.forms.push(other);
            assert_eq!(sweep.next().len(), 2);
            for (index, time) in times.into_iter().enumerate() {
                sweep.learn(index, &verdict(time));
            }
            assert!(!sweep.next().is_empty());
            assert!(sweep.batch.iter().all(|(form, _)| *form == fastest));
        }
    }

    #[test]
    fn a_kernel_at_the_rate_of_the_memory_is_not_swept() {
        for (gbps, swept) in [(3000.0, false), (6000.0, true)] {
            let mut sweep = sweep();
            sweep.next();
            let mut found = verdict(Some(10.0));
            found.device.insert("memory_gbps".into(), json!(gbps));
            let launch = json!({"name": "k", "time_us": 10.0, "share": 1.0, "registers": null, "shared_bytes": null,
                "local_bytes": null, "occupancy": null, "bytes": 28_000_000, "line": null});
            found.launches.push(serde_json::from_value(launch).unwrap());
            sweep.learn(0, &found);
            assert_eq!(!sweep.next().is_empty(), swept);
        }
    }

    #[test]
    fn what_helped_alone_is_tried_together_and_then_it_ends() {
        let mut sweep = sweep();
        sweep.next();
        sweep.learn(0, &verdict(Some(10.0)));
        let others = sweep.next().len();
        assert!(others > 1);
        for index in 0..others {
            sweep.learn(index, &verdict(Some(8.0)));
        }
        let together = sweep.next();
        assert_eq!(together.len(), usize::from(sweep.best.len() > 1));
        assert!(sweep.next().is_empty());
    }
}
