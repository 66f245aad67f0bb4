//! Loading: a plan and its images in a runner, its outputs bound in the reference host.
//!
//! Knows which buffer is whose and what a runner's failure says of the candidate. Must not know what is run on them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::correct::clocked;
use super::evidence::Evidence;
use super::images::place;
use super::record::Recording;
use super::{Stop, ahead, incorrect, reason};
use crate::judge::runner::Arithmetic;
use crate::judge::runner::client::{Error as RunnerError, Exported, LoadRequest, Loaded, Runner, memory_of};
use crate::judge::session::{Error, MINUTES, Session, secret_seed, task_error};
use crate::judge::verdict::Reason;
use crate::judge::{Device, Precision, build, process};
use crate::plan::{BufferKind, Library, Op, Plan};

/// A candidate that is loaded in a runner.
pub(super) struct Run {
    pub(super) runner: Runner,
    pub(super) cpu: bool,
    /// Least round trip of an empty plan before the candidate's library was there, microseconds (CPU).
    pub(super) null_us: f64,
    /// Longest that one run may take.
    pub(super) limit: Duration,
    /// Runs of a block.
    pub(super) samples: u64,
    /// Device microseconds and the host clock's, of the runs of a block on a card.
    pub(super) clocks: (f64, f64),
    /// Name and line of every node, for messages.
    pub(super) names: Vec<(String, Option<String>)>,
    pub(super) loaded: Loaded,
    /// Sums of the derived constants before the first run on them, by buffer.
    pub(super) constants: Vec<(usize, Value)>,
}

pub(super) fn names(plan: &Plan) -> Vec<(String, Option<String>)> {
    plan.nodes
        .iter()
        .map(|node| {
            let name = match &node.op {
                Op::Launch(launch) => launch.kernel.clone(),
                Op::Fill(_) => "fill".into(),
                Op::Library(Library::Matmul { .. }) => "matmul".into(),
                Op::Library(Library::Conv { .. }) => "conv".into(),
            };
            (name, node.line.clone())
        })
        .collect()
}

impl Run {
    /// What a runner's failure says of the candidate.
    pub(super) fn failure(&self, error: RunnerError) -> Stop {
        let at = |code: &str, message: String, node: Option<usize>| {
            let named = node.and_then(|n| self.names.get(n));
            let (file, line) = place(named.and_then(|n| n.1.as_deref()));
            Stop::Candidate(Box::new(Reason {
                file,
                line,
                launch: named.map(|n| n.0.clone()),
                ..reason(code, message)
            }))
        };
        // With a single launch there is no doubt which one it was.
        let only = if self.names.len() == 1 { Some(0) } else { None };
        match error {
            RunnerError::Refused(fault) => {
                let (code, message) = spoken(&fault.code, &fault.message);
                let mut stop = at(&code, message, fault.node.or(only));
                if let Stop::Candidate(reason) = &mut stop
                    && reason.launch.is_none()
                {
                    reason.launch = fault.kernel.map(|name| printable(&name, 200));
                }
                stop
            }
            RunnerError::Crashed { .. } => at("crash", format!("the kernels ended their process: {error}"), only),
            RunnerError::Timeout { seconds, .. } => {
                at("timeout", format!("one run did not end within {seconds:.1} s"), only)
            }
            RunnerError::Forged { .. } => at("forged_reply", error.to_string(), only),
            RunnerError::Io { .. } => Stop::Error(Error::Fault(error.to_string())),
        }
    }
}

/// What a runner says of itself is a candidate's word on the CPU: no code that means something else to the judge, and nothing
/// that a terminal acts on.
fn spoken(code: &str, message: &str) -> (String, String) {
    const OURS: [&str; 4] = ["timeout", "clocks_disagree", "forged_reply", "crash"];
    let plain = code.len() <= 40 && code.chars().all(|c| c.is_ascii_lowercase() || c == '_') && !code.is_empty();
    if plain && !OURS.contains(&code) {
        return (code.to_owned(), printable(message, 4000));
    }
    ("forged_reply".to_owned(), format!("the runner answered with a code that is none: {}", printable(code, 40)))
}

fn printable(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// Empty plans that a CPU runner is asked for before it loads one.
const NULLS: usize = 15;

/// The most that a request to a runner other than `run` may take.
pub(super) const RUNNER: Duration = Duration::from_secs(60);

pub(super) fn load_plan(
    session: &mut Session,
    recording: &Recording,
    images: &[build::Built],
    more: bool,
    evidence: &mut Evidence,
) -> Result<Run, Stop> {
    let ahead::Taken { runner, isolation, worn } = ahead::take(session, needs_helper(session, &recording.plan))?;
    evidence.isolation.extend(isolation);
    // Beside one that is to serve the next candidate too, one is enough: for when this candidate is refused.
    if more && !worn {
        ahead::prepare(session);
    }
    load_into(session, runner, recording, images)
}

/// Whether library calls run in a process beside the runner.
fn needs_helper(session: &Session, plan: &Plan) -> bool {
    let cpu = session.fixed.judge.options.device == Device::Cpu;
    cpu && plan.nodes.iter().any(|n| matches!(n.op, Op::Library(_)))
}

/// Gives a plan to a runner that has none.
pub(super) fn load_into(
    session: &mut Session,
    runner: Runner,
    recording: &Recording,
    images: &[build::Built],
) -> Result<Run, Stop> {
    let judge = Arc::clone(&session.fixed.judge);
    let cpu = judge.options.device == Device::Cpu;
    let plan = &recording.plan;
    let needs_helper = needs_helper(session, plan);
    let fault = |what: &str, e: &dyn std::fmt::Display| Stop::Error(Error::Fault(format!("{what}: {e}")));
    let mut run = Run {
        runner,
        cpu,
        null_us: 0.0,
        limit: limit(session.eager_us),
        samples: 0,
        clocks: (0.0, 0.0),
        names: names(plan),
        loaded: Loaded::default(),
        constants: Vec::new(),
    };
    session.select(0)?;
    let images = images
        .iter()
        .map(|b| memory_of(c"image", &b.image))
        .collect::<std::io::Result<Vec<OwnedFd>>>()
        .map_err(|e| fault("no memory for the images", &e))?;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|e| fault("no socket for the helper", &e))?;
    let constants = &recording.constants[0];
    let precision = judge.options.precision;
    let request = LoadRequest {
        plan,
        images: images.iter().map(AsFd::as_fd).collect(),
        inputs: session
            .input_fds
            .iter()
            .map(|slot| slot.iter().map(|i| i.as_ref().map(|(fd, bytes)| (fd.as_fd(), *bytes))).collect())
            .collect(),
        parameters: session.parameter_fds.iter().map(|(n, (fd, bytes))| (n.clone(), (fd.as_fd(), *bytes))).collect(),
        constants: constants.fd.as_ref().map(|fd| (fd.as_fd(), constants.items.clone())),
        libraries: judge.toolchain.libraries.named(),
        precision: Arithmetic { matmul_tf32: precision == Precision::Tf32, conv_tf32: precision != Precision::Half },
        seed: secret_seed()?,
        helper: needs_helper.then(|| theirs.as_fd()),
    };
    if cpu {
        run.null_us = empty_calls(&mut run)?;
    }
    run.loaded = match run.runner.load(&request, RUNNER) {
        Ok(loaded) => loaded,
        // A plan of honest size that finds no memory met other work on the card: no verdict on the candidate.
        Err(RunnerError::Refused(f)) if f.code == "memory" && plan_bytes(plan) < judge.device.memory_bytes / 2 => {
            return Err(Error::Fault(format!("{}: run it again, with fewer tasks at once", f.message)).into());
        }
        Err(e) => return Err(run.failure(e)),
    };
    drop(request);
    drop(theirs);
    if needs_helper {
        load_helper(session, plan, &run, &ours)?;
    }
    if cpu {
        run.runner.stop(RUNNER).map_err(|e| run.failure(e))?;
    }
    // The host maps the output buffers to compare them in its own process.
    let mut fds: Vec<BorrowedFd<'_>> = Vec::new();
    let mut outputs = Vec::new();
    for output in &plan.outputs {
        let mut entry = json!({
            "bytes": plan.buffers[output.buffer].bytes, "offset": output.offset, "dtype": output.dtype,
            "shape": output.shape, "strides": output.strides,
        });
        match &plan.buffers[output.buffer].kind {
            BufferKind::Input(i) => entry["input"] = json!(i),
            BufferKind::Parameter(name) => entry["parameter"] = json!(name),
            _ => {
                let own = run.loaded.outputs.iter().chain(&run.loaded.constants);
                let shared = own.into_iter().find(|b| b.buffer == output.buffer);
                entry["fd"] = json!(fds.len());
                fds.push(shared.ok_or_else(|| Error::Fault("an output is not shared".into()))?.fd.as_fd());
            }
        }
        outputs.push(entry);
    }
    // Workspaces are poisoned too, so that nothing of an earlier sample is left in them.
    let mut scratch = Vec::new();
    for Exported { fd, bytes, .. } in &run.loaded.workspaces {
        scratch.push(json!({"fd": fds.len(), "bytes": bytes}));
        fds.push(fd.as_fd());
    }
    let body = json!({"op": "bind", "outputs": outputs, "structure": plan.structure, "workspaces": scratch});
    session.host.ask(&body, &fds, MINUTES).map_err(|e| match e {
        process::Error::Refused(r) if matches!(r.code.as_str(), "shape" | "dtype" | "structure") => {
            incorrect(&r.code, r.message)
        }
        other => Stop::Error(task_error(&session.fixed.task, other)),
    })?;
    Ok(run)
}

/// Least round trip of an empty plan, microseconds, of a CPU runner that has loaded nothing yet: what a library does when it
/// is loaded, or a handler that it leaves, can slow no call that is taken off its own. It is left to run.
fn empty_calls(run: &mut Run) -> Result<f64, Stop> {
    run.runner.stop(RUNNER).map_err(|e| run.failure(e))?;
    let mut least = f64::INFINITY;
    for _ in 0..NULLS {
        least = least.min(clocked(run, |run| run.runner.null(1, RUNNER).map(|_| ()))?);
    }
    run.runner.cont().map_err(|e| run.failure(e))?;
    Ok(least)
}

fn plan_bytes(plan: &Plan) -> u64 {
    plan.buffers.iter().fold(0, |sum, b| sum.saturating_add(b.bytes))
}

pub(super) fn limit(eager_us: f64) -> Duration {
    Duration::from_secs_f64((eager_us * 1e-6 * 100.0 + 5.0).clamp(5.0, 60.0))
}

/// Gives the library helper the plan, its buffers and its end of the runner's socket.
fn load_helper(
    session: &mut Session,
    plan: &Plan,
    run: &Run,
    end: &std::os::unix::net::UnixStream,
) -> Result<(), Stop> {
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut buffers: Vec<Value> = Vec::new();
    let lost = |e: std::io::Error| Stop::Error(Error::Fault(format!("a buffer can't be shared with the helper: {e}")));
    for (index, buffer) in plan.buffers.iter().enumerate() {
        let known = match &buffer.kind {
            BufferKind::Input(i) => session.input_fds[0].get(*i).and_then(|f| f.as_ref()).map(|f| f.0.as_fd()),
            BufferKind::Parameter(name) => session.parameter_fds.get(name).map(|f| f.0.as_fd()),
            _ => [&run.loaded.outputs, &run.loaded.workspaces, &run.loaded.constants]
                .into_iter()
                .flatten()
                .find(|b| b.buffer == index)
                .map(|b| b.fd.as_fd()),
        };
        buffers.push(match known {
            Some(fd) => {
                fds.push(fd.try_clone_to_owned().map_err(lost)?);
                json!({"fd": fds.len() - 1, "bytes": buffer.bytes})
            }
            None => Value::Null,
        });
    }
    let socket = fds.len();
    fds.push(end.as_fd().try_clone_to_owned().map_err(lost)?);
    let body = json!({"op": "load", "plan": plan, "buffers": buffers, "socket": socket});
    let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    session.helper()?.ask(&body, &borrowed, Duration::from_secs(120)).map_err(|e| match e {
        process::Error::Refused(r) => incorrect("library_failed", r.message),
        other => Stop::Error(Error::Fault(other.to_string())),
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runner_says_neither_what_a_terminal_acts_on_nor_what_the_judge_alone_finds() {
        let own = ("illegal_access".to_owned(), "at\u{fffd}x".to_owned());
        assert_eq!(spoken("illegal_access", "at\u{1b}x"), own);
        for code in ["\u{1b}[32maccepted", "", "Accepted", "timeout", "clocks_disagree", "crash", &"a".repeat(41)] {
            let (told, message) = spoken(code, "correct: yes");
            assert_eq!(told, "forged_reply", "{code:?}");
            assert!(!message.chars().any(char::is_control) && !message.contains("correct: yes"), "{message:?}");
        }
    }
}
