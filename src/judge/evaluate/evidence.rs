//! Evidence: what is known of a candidate, launch by launch, and what of it can't be.
//!
//! Knows figures that were taken. Must not know how to take a verdict from them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use serde_json::json;

use super::run::Run;
use super::{Stop, incorrect};
use crate::judge::Device;
use crate::judge::session::{MINUTES, Phases, Session};
use crate::judge::timing;
use crate::judge::verdict::{Against, Interval, LaunchEvidence, Measurement};
use crate::plan::{self, Library, Op, Plan};

/// What is known of the candidate so far; becomes the verdict whatever happens.
#[derive(Clone, Default)]
pub(super) struct Evidence {
    pub(super) phases: BTreeMap<String, f64>,
    pub(super) isolation: BTreeSet<String>,
    pub(super) notes: Vec<String>,
    pub(super) audit: Vec<String>,
    pub(super) digests: BTreeMap<String, String>,
    pub(super) launches: Vec<LaunchEvidence>,
    pub(super) compared: usize,
    pub(super) candidate_us: Vec<f64>,
    pub(super) eager_us: Vec<f64>,
    pub(super) eager_wall: Option<f64>,
    /// What eager's samples are multiplied by where it was faster when its cached baseline was measured: 1 at most.
    pub(super) eager_factor: Option<f64>,
    /// The reference was timed without a graph for want of memory.
    pub(super) short: bool,
    pub(super) speedup: Against<Interval>,
    pub(super) compile: Option<Interval>,
    pub(super) measurement: Option<Measurement>,
    /// Who is told of each phase as it begins.
    pub(super) told: Phases,
}

impl Evidence {
    /// Keeps the samples that others' work on the device disturbed least: a third of each side, the fastest.
    pub(super) fn keep_undisturbed(&mut self) {
        for samples in [&mut self.candidate_us, &mut self.eager_us] {
            samples.sort_by(f64::total_cmp);
            samples.truncate(samples.len().div_ceil(3));
        }
        self.speedup.eager = timing::speedup(&self.eager_us, &self.candidate_us, 4);
    }

    /// Others had the device while this was measured: what follows from the figures is not to be trusted.
    pub(super) fn shared(&mut self, why: &str) {
        self.measurement = Some(Measurement::Shared);
        self.notes.push(format!("{why}: the figures are not to be trusted"));
    }

    /// No graph of the reference could be made for want of memory: its times are larger than they need be, and no
    /// baseline for later.
    pub(super) fn out_of_memory(&mut self, what: &str) {
        if !self.short {
            self.notes.push(format!(
                "{what} could not be captured as a graph for want of memory and is timed without: run it again, with fewer \
                 tasks at once"
            ));
        }
        self.short = true;
    }

    pub(super) fn time<T>(&mut self, phase: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        self.told.tell(phase);
        let start = Instant::now();
        let done = work(self);
        *self.phases.entry(phase.to_owned()).or_default() += start.elapsed().as_secs_f64();
        done
    }
}

pub(super) fn profile(run: &mut Run, plan: &Plan, evidence: &mut Evidence) {
    if run.cpu && run.runner.cont().is_err() {
        return;
    }
    let times = run.runner.profile(0, 5, run.limit).unwrap_or_default();
    let whole: f64 = times.iter().map(|t| t.time_us).sum();
    evidence.launches = plan
        .nodes
        .iter()
        .enumerate()
        .filter(|(_, node)| !matches!(node.op, Op::Fill(_)))
        .map(|(index, node)| {
            let time = times.iter().find(|t| t.node == index).map(|t| t.time_us);
            let facts = run.loaded.launches.iter().find(|l| l.node == index);
            LaunchEvidence {
                name: run.names[index].0.clone(),
                time_us: time,
                share: time.map(|t| t / whole.max(1e-9)),
                registers: facts.map(|f| f.registers),
                shared_bytes: facts.map(|f| f.shared_bytes),
                local_bytes: facts.map(|f| f.local_bytes),
                occupancy: facts.map(|f| f.occupancy),
                bytes: touched(plan, &node.op),
                roofline: None,
                line: node.line.clone(),
            }
        })
        .collect();
}

/// The launches and library calls of a plan of which nothing is known but what they are.
pub(super) fn steps(plan: &Plan) -> Vec<LaunchEvidence> {
    let steps = plan.nodes.iter().zip(super::run::names(plan)).filter(|(node, _)| !matches!(node.op, Op::Fill(_)));
    steps
        .map(|(node, (name, line))| LaunchEvidence {
            name,
            time_us: None,
            share: None,
            registers: None,
            shared_bytes: None,
            local_bytes: None,
            occupancy: None,
            bytes: touched(plan, &node.op),
            roofline: None,
            line,
        })
        .collect()
}

/// Bytes of the buffers that a step is given, each counted once.
fn touched(plan: &Plan, op: &Op) -> u64 {
    let mut buffers: BTreeSet<usize> = BTreeSet::new();
    match op {
        Op::Launch(launch) => buffers.extend(launch.args.iter().filter_map(|a| match a {
            plan::Arg::Pointer { buffer, .. } => Some(*buffer),
            _ => None,
        })),
        Op::Fill(fill) => buffers.extend([fill.buffer]),
        Op::Library(Library::Matmul { a, b, bias, out }) => {
            buffers.extend([a.buffer, b.buffer, out.buffer]);
            buffers.extend(bias.iter().map(|t| t.buffer));
        }
        Op::Library(Library::Conv { x, weight, bias, out, .. }) => {
            buffers.extend([x.buffer, weight.buffer, out.buffer]);
            buffers.extend(bias.iter().map(|t| t.buffer));
        }
    }
    buffers.into_iter().filter_map(|b| plan.buffers.get(b)).map(|b| b.bytes).sum()
}

/// Refuses what can't be: outputs written faster than the card copies. Marks what a person should look at.
pub(super) fn sanity(session: &mut Session, output_bytes: u64, evidence: &mut Evidence) -> Result<(), Stop> {
    let Some(time) = timing::median(&evidence.candidate_us) else { return Ok(()) };
    let cuda = session.fixed.judge.options.device == Device::Cuda;
    let floor = session.host.ask(&json!({"op": "floor"}), &[], MINUTES).map(|frame| frame.body).unwrap_or_default();
    if let (Some(rate), Some(cache)) = (floor["copy_gbps"].as_f64(), floor["l2_bytes"].as_f64()) {
        for launch in &mut evidence.launches {
            let bytes = launch.bytes as f64;
            // What the last cache holds needs no memory, and its rate says nothing of it.
            if let Some(us) = launch.time_us.filter(|us| *us > 0.0 && bytes > cache && rate > 0.0) {
                launch.roofline = Some((bytes / us / 1e3 / rate).min(1.0));
            }
        }
        let floor = (output_bytes as f64 - cache).max(0.0) / (rate * 1e3);
        if cuda && time < floor {
            return Err(incorrect(
                "impossible",
                format!("{time:.1} us is less than the {floor:.1} us that writing its outputs takes on this card"),
            ));
        }
        if cuda && floor > 0.0 && time < 1.1 * floor {
            evidence.audit.push("within 10 % of the time that writing the outputs takes".into());
        }
    }
    if evidence.speedup.eager.is_some_and(|x| x.median > 10.0) {
        evidence.audit.push("more than ten times as fast as eager".into());
    }
    Ok(())
}
