//! Recording: `ModelNew` becomes a plan, once a parameter set, and the plan must fit the task.
//!
//! Knows the recorder's answers and what the task offers a plan. Must not know how a plan is built or run.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use serde_json::json;

use super::evidence::Evidence;
use super::{Stop, incorrect, remember};
use crate::judge::Candidate;
use crate::judge::process;
use crate::judge::runner::Item;
use crate::judge::session::{Error, Fixed, ParameterSet};
use crate::judge::verdict::Reason;
use crate::plan::{self, BufferKind, Library, Op, Plan};

pub(super) struct Recording {
    pub(super) plan: Plan,
    /// Derived constants of each parameter set.
    pub(super) constants: Vec<Constants>,
    /// Digest of what derives them; empty where there are none.
    pub(super) derivation: String,
}

pub(super) struct Constants {
    pub(super) fd: Option<OwnedFd>,
    pub(super) items: Vec<Item>,
}

pub(super) fn record(fixed: &Fixed, candidate: &Candidate, evidence: &mut Evidence) -> Result<Recording, Stop> {
    let mut plans: Vec<Plan> = Vec::new();
    let mut constants = Vec::new();
    for set in fixed.sets().iter() {
        let (plan, of_set) = record_once(fixed, candidate, set, evidence)?;
        if let Some(first) = plans.first()
            && *first != plan
        {
            return Err(incorrect(
                "plan_differs",
                format!(
                    "two recordings of the same candidate differ ({}): a plan may depend on shapes and parameters' shapes alone, \
                     not on chance, time or values",
                    difference(first, &plan)
                ),
            ));
        }
        plans.push(plan);
        constants.push(of_set);
    }
    let plan = plans.pop().ok_or_else(|| Error::Fault("no parameter set".into()))?;
    let derivation = remember::derivation(candidate, &plan);
    Ok(Recording { plan, constants, derivation })
}

/// Names the first thing that two plans differ in.
fn difference(a: &Plan, b: &Plan) -> String {
    if a.nodes.len() != b.nodes.len() {
        return format!("{} steps against {}", a.nodes.len(), b.nodes.len());
    }
    if let Some((i, (x, _))) = a.nodes.iter().zip(&b.nodes).enumerate().find(|(_, (x, y))| x != y) {
        return format!("step {i}, recorded at {}", x.line.as_deref().unwrap_or("?"));
    }
    if a.buffers != b.buffers { "their buffers".into() } else { "their outputs".into() }
}

fn record_once(
    fixed: &Fixed,
    candidate: &Candidate,
    set: &ParameterSet,
    evidence: &mut Evidence,
) -> Result<(Plan, Constants), Stop> {
    let judge = &fixed.judge;
    let mut recorder = judge.fork_recorder().map_err(|e| Error::Fault(e.to_string()))?;
    evidence.isolation.extend(recorder.isolation.iter().cloned());
    let seconds = judge.options.record_seconds;
    let mut body = json!({
        "op": "record", "device": judge.options.device, "files": candidate.files, "init": fixed.described["init"],
        "inputs": fixed.inputs, "state": set.tensors, "libraries": judge.options.libraries,
        "properties": judge.device.properties, "limits": {"nodes": 20_000, "seconds": seconds},
    });
    let fds: Vec<BorrowedFd<'_>> = set.fd.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        body["fd"] = json!(0);
    }
    let mut frame = match recorder.ask(&body, &fds, Duration::from_secs(seconds)) {
        Ok(frame) => frame,
        Err(process::Error::Refused(refused)) => return Err(Stop::Candidate(Box::new(refusal(&refused)))),
        Err(process::Error::Gone { timeout: true, .. }) => {
            let why = format!("the recording of model_new.py did not end within {seconds} s");
            return Err(incorrect("timeout", why));
        }
        Err(process::Error::Gone { what, .. }) => {
            return Err(incorrect(
                "crash",
                format!(
                    "model_new.py ended the recording process ({what}): it crashed, exited or used too much memory"
                ),
            ));
        }
        Err(other) => return Err(Error::Fault(other.to_string()).into()),
    };
    let plan: Plan = serde_json::from_value(frame.body["plan"].clone())
        .map_err(|e| incorrect("plan_invalid", format!("the recorded plan can't be read: {e}")))?;
    let items = frame.body["constants"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|c| Some(Item { offset: c["offset"].as_u64()?, bytes: c["bytes"].as_u64()? }))
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| incorrect("plan_invalid", "the recording describes its constants badly"))?;
    let fd = if frame.fds.is_empty() { None } else { Some(frame.fds.remove(0)) };
    Ok((plan, Constants { fd, items }))
}

fn refusal(refused: &process::Refused) -> Reason {
    let text = |key: &str| refused.body[key].as_str().map(str::to_owned);
    let source = text("source").map(|s| format!(" (`{}`)", s.trim())).unwrap_or_default();
    Reason {
        code: refused.code.clone(),
        message: format!("{}{source}", refused.message),
        file: text("file"),
        line: refused.body["line"].as_u64().and_then(|l| u32::try_from(l).ok()),
        launch: None,
        hint: text("hint"),
    }
}

/// A plan must be valid by itself and fit the task: its inputs, parameters and constants are the task's.
pub(super) fn check_plan(fixed: &Fixed, recording: &Recording) -> Result<(), Stop> {
    let plan = &recording.plan;
    plan::validate(plan, &plan::Limits::default()).map_err(|problem| incorrect("plan_invalid", problem.to_string()))?;
    if plan.device != fixed.judge.options.device {
        return Err(incorrect("plan_invalid", "the plan is for another device"));
    }
    let bad = |what: String| Err(incorrect("plan_invalid", what));
    for (i, buffer) in plan.buffers.iter().enumerate() {
        match &buffer.kind {
            BufferKind::Input(index) => {
                let input = fixed.inputs.get(*index).filter(|v| v["kind"] != "value");
                if input.and_then(|v| v["bytes"].as_u64()) != Some(buffer.bytes) {
                    return bad(format!("buffer {i} is not the task's input {index}"));
                }
            }
            BufferKind::Parameter(name) => {
                let known = fixed.state.iter().find(|t| t.name.as_deref() == Some(name));
                if known.map(|t| t.bytes) != Some(buffer.bytes) {
                    return bad(format!("buffer {i} is not the task's parameter {name}"));
                }
            }
            BufferKind::Constant(index) => {
                if recording.constants.iter().any(|c| c.items.get(*index).map(|x| x.bytes) != Some(buffer.bytes)) {
                    return bad(format!("buffer {i} is not the recorded constant {index}"));
                }
            }
            BufferKind::Workspace => {}
        }
    }
    for node in &plan.nodes {
        if let Op::Library(call) = &node.op {
            let name = match call {
                Library::Matmul { .. } => "matmul",
                Library::Conv { .. } => "conv",
            };
            if !fixed.judge.options.libraries.iter().any(|l| l == name) {
                return Err(incorrect(
                    "library_not_allowed",
                    format!("this job does not allow the library call {name}"),
                ));
            }
        }
    }
    Ok(())
}
