//! Derived constants: computed once from parameters, and found by every run as they were.
//!
//! Knows where they lie on each device and when to look. Must not know what is in them: the reference host sums them
//! in its own process, under weights that nobody else knows.

use std::os::fd::{AsFd, BorrowedFd};

use serde_json::{Value, json};

use super::images::place;
use super::record::Recording;
use super::run::{RUNNER, Run};
use super::{Stop, reason};
use crate::judge::runner::client::{Error as RunnerError, Exported};
use crate::judge::session::{Error, MINUTES, Session, task_error};
use crate::judge::verdict::Reason;
use crate::plan::{Arg, BufferKind, Op, Plan};

/// Constants that are looked at in one request: each rides as a descriptor.
const AT_ONCE: usize = 200;

/// Sums of the constants as they are now, with the buffer of each.
fn sums(session: &mut Session, recording: &Recording, run: &mut Run) -> Result<Vec<(usize, Value)>, Stop> {
    let plan = &recording.plan;
    let buffers: Vec<usize> =
        (0..plan.buffers.len()).filter(|b| matches!(plan.buffers[*b].kind, BufferKind::Constant(_))).collect();
    let mut found = Vec::with_capacity(buffers.len());
    for part in buffers.chunks(AT_ONCE) {
        // On a card the runner copies them; on the CPU they are ours, and the runner stands still.
        let copies = if run.cpu { None } else { Some(snapshot(run, part)?) };
        let lying: Vec<&Exported> = match &copies {
            Some(copies) => copies.iter().collect(),
            None => run.loaded.constants.iter().filter(|c| part.contains(&c.buffer)).collect(),
        };
        if lying.len() != part.len() {
            return Err(Error::Fault("a derived constant of the plan is not in the runner".into()).into());
        }
        let sizes: Vec<u64> = lying.iter().map(|c| plan.buffers.get(c.buffer).map_or(0, |b| b.bytes)).collect();
        let fds: Vec<BorrowedFd<'_>> = lying.iter().map(|c| c.fd.as_fd()).collect();
        let body = json!({"op": "hash", "fds": sizes, "secret": true});
        let frame = session.host.ask(&body, &fds, MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
        let sums = frame.body["sums"].as_array().filter(|s| s.len() == lying.len());
        let sums = sums.ok_or_else(|| Error::Fault("the reference host summed no constants".into()))?;
        found.extend(lying.iter().zip(sums).map(|(c, sum)| (c.buffer, sum.clone())));
    }
    Ok(found)
}

fn snapshot(run: &mut Run, buffers: &[usize]) -> Result<Vec<Exported>, Stop> {
    run.runner.snapshot(buffers, RUNNER).map_err(|error| match error {
        // The copies are ours: that they find no room says nothing of the candidate.
        RunnerError::Refused(fault) if fault.code == "memory" => {
            Error::Fault(format!("{}: run it again, with fewer tasks at once", fault.message)).into()
        }
        other => run.failure(other),
    })
}

/// Notes what the constants are: after they were written and before the first run on them.
pub(super) fn note(session: &mut Session, recording: &Recording, run: &mut Run) -> Result<(), Stop> {
    run.constants = sums(session, recording, run)?;
    Ok(())
}

/// Refuses a candidate that has changed one since `note`.
pub(super) fn unchanged(session: &mut Session, recording: &Recording, run: &mut Run) -> Result<(), Stop> {
    if run.constants.is_empty() {
        return Ok(());
    }
    let now = sums(session, recording, run)?;
    match run.constants.iter().zip(&now).find(|(was, is)| was != is) {
        Some(((buffer, _), _)) => Err(Stop::Candidate(Box::new(changed(&recording.plan, *buffer)))),
        None => Ok(()),
    }
}

fn changed(plan: &Plan, buffer: usize) -> Reason {
    let given = |op: &Op| match op {
        Op::Launch(launch) => launch.args.iter().any(|a| matches!(a, Arg::Pointer { buffer: b, .. } if *b == buffer)),
        Op::Fill(_) | Op::Library(_) => false,
    };
    let mut users = plan.nodes.iter().filter(|n| given(&n.op));
    let (first, only) = (users.next(), users.next().is_none());
    let (file, line) = place(first.and_then(|n| n.line.as_deref()));
    let launch = first.filter(|_| only).and_then(|n| match &n.op {
        Op::Launch(launch) => Some(launch.kernel.clone()),
        _ => None,
    });
    let bytes = plan.buffers.get(buffer).map_or(0, |b| b.bytes);
    Reason {
        file,
        line,
        launch,
        hint: Some("let kernels write only to memory that forward makes with torch.empty or torch.zeros".into()),
        ..reason(
            "constants_changed",
            format!(
                "a tensor of {bytes} bytes that was computed before the kernels ran is another one after them: \
                 what is derived from parameters is constant, and nothing may be carried from one run to the next in it"
            ),
        )
    }
}
