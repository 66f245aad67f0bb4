//! The process path: a candidate that runs as it is, in a process of its own, watched.
//!
//! Knows what is asked of such a process and what its answers say of the candidate. Must not believe them: an output counts
//! for what lies in memory when the process stands still, a time for what the supervisor's clock says until then.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::correct::{PLAIN, decided, draw};
use super::evidence::Evidence;
use super::run::limit;
use super::subject::Subject;
use super::{Stop, incorrect, reason};
use crate::judge::build::{BuildError, Built, extension, symbols};
use crate::judge::process::{self, Forked, Refused};
use crate::judge::runner::client::{memory_file, memory_of};
use crate::judge::session::{Error, Fixed, MINUTES, Session, secret_seed, task_error};
use crate::judge::timing;
use crate::judge::verdict::Reason;
use crate::judge::wire::Frame;
use crate::judge::{Candidate, Device, Judge};

/// Longest that a candidate may take to be imported, constructed and given its weights, builds not counted.
const LOAD: Duration = Duration::from_secs(120);
/// Most extensions of a candidate.
const EXTENSIONS: usize = 16;
/// Calls of the candidate that does nothing: to begin with, and before each block; on a card, where their mean counts, more.
const NULLS: (usize, usize) = (15, 5);
const NULLS_ON_CARD: (usize, usize) = (40, 10);
/// Least and most memory for tensors, bytes. On the CPU what isn't touched costs nothing.
const POOL: (u64, u64) = (512 << 20, 12 << 30);
/// Seconds that a process may take to stand still.
const STOP: Duration = Duration::from_secs(10);

/// What a process may dispatch: memory, views, and what tensors are. Everything that computes is the candidate's to write.
const HARMLESS: &[&str] = &[
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "zeros",
    "zeros_like",
    "new_zeros",
    "ones",
    "ones_like",
    "new_ones",
    "full",
    "full_like",
    "new_full",
    "fill_",
    "zero_",
    "resize_",
    "set_",
    "view",
    "view_as",
    "_unsafe_view",
    "reshape",
    "reshape_as",
    "_reshape_alias",
    "as_strided",
    "as_strided_",
    "expand",
    "expand_as",
    "permute",
    "transpose",
    "transpose_",
    "t",
    "t_",
    "numpy_T",
    "mT",
    "squeeze",
    "squeeze_",
    "unsqueeze",
    "unsqueeze_",
    "select",
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unbind",
    "unflatten",
    "flatten",
    "movedim",
    "swapaxes",
    "swapdims",
    "diagonal",
    "unfold",
    "detach",
    "detach_",
    "alias",
    "contiguous",
    "to",
    "view_as_real",
    "view_as_complex",
    "real",
    "type_as",
    "is_contiguous",
    "size",
    "stride",
    "numel",
    "dim",
    "storage_offset",
    "is_nonzero_static",
    "is_floating_point",
    "is_complex",
    "is_conj",
    "is_neg",
    "is_same_size",
    "is_pinned",
    "is_set_to",
    "result_type",
    "can_cast",
    "requires_grad_",
    "_version",
    "data",
    "set_data",
    "record_stream",
    "lift_fresh",
    "resolve_conj",
    "resolve_neg",
    "_has_compatible_shallow_copy_type",
    "scalar_tensor",
];

/// Namespaces of operators that PyTorch brings: those of other names are the candidate's own.
const FRAMEWORK: &[&str] = &[
    "aten",
    "prim",
    "prims",
    "quantized",
    "mkldnn",
    "mkl",
    "onednn",
    "mkldnn_prepacked",
    "xnnpack",
    "prepacked",
    "sparse",
    "inductor",
    "rngprims",
    "torchvision",
    "c10d",
    "_c10d_functional",
    "symm_mem",
    "fbgemm",
    "nvprims",
    "cuda",
    "cublas",
    "debugprims",
    "higher_order",
    "triton",
    "_quantized",
    "_test",
    "static_runtime",
];

/// A candidate in its process, which stands still whenever it isn't asked: neither an empty call nor a baseline is taken
/// beside it.
pub(super) struct Process<'a> {
    candidate: &'a Candidate,
    judge: Arc<Judge>,
    child: Option<Forked>,
    /// The candidate that does nothing, in a process that has met no other: what a hostile one would say of an empty call is
    /// worth nothing.
    null: Option<Forked>,
    shared: Shared,
    limit: Duration,
    nulls: Nulls,
    /// What the candidate's process said of its last call, for who looks why it is slow; nothing is decided by it.
    said_us: Vec<Vec<f64>>,
    /// On a card: how long copying outputs took after the answer, of empty calls and of the candidate's, microseconds.
    tails: (Vec<f64>, Vec<f64>),
    last: Option<Called>,
    output_bytes: u64,
    /// The reference host has what was last returned.
    shown: bool,
    /// Work of a call on the card as its profiler sees it, microseconds.
    device_us: Option<f64>,
}

/// What empty calls took, microseconds.
#[derive(Debug, Default)]
struct Nulls {
    /// Medians on the CPU, means on a card: of the first calls, then of each block.
    each: Vec<f64>,
    /// Most that is taken off on a card: the least mean of those that were measured before the candidate was there, and
    /// with the card held.
    cap: Option<f64>,
    /// Every empty call on a card.
    every: Vec<f64>,
}

impl Nulls {
    /// Calls on the CPU.
    fn add_on_cpu(&mut self, times: &[f64]) {
        self.each.extend(timing::median(times));
    }

    /// Calls on a card; `caps`: nothing that is to be measured has a part in them.
    fn add_on_card(&mut self, times: Vec<f64>, caps: bool) {
        let mean = timing::mean(&times);
        self.each.push(mean);
        if caps {
            self.cap = Some(self.cap.map_or(mean, |cap| cap.min(mean)));
        }
        self.every.extend(times);
    }

    /// What is taken off each call. On the CPU the least that an empty one was seen to take, so that a noisy clock takes
    /// from the candidate and gives it nothing. On a card empty calls vary as much as many a kernel takes: what this
    /// block's took on average, from a candidate's block of the same minutes, but never more than the cap.
    fn taken_off(&self, cpu: bool) -> f64 {
        if cpu {
            let least = self.each.iter().copied().fold(f64::INFINITY, f64::min);
            return if least.is_finite() { least } else { 0.0 };
        }
        match (self.cap, self.each.last()) {
            (Some(cap), Some(last)) => cap.min(*last),
            _ => 0.0,
        }
    }

    /// The least time that can be told from none: on the CPU the spread of empty calls, on a card two standard errors of
    /// what is taken off.
    fn resolution(&self, cpu: bool) -> f64 {
        if cpu {
            let most = self.each.iter().copied().fold(0.0, f64::max);
            return (most - self.taken_off(cpu)).max(1.0);
        }
        let centre = timing::mean(&self.every);
        let variance = timing::mean(&self.every.iter().map(|x| (x - centre).powi(2)).collect::<Vec<_>>());
        let error = (variance / (self.every.len().max(1) as f64)).sqrt();
        (2.0 * error).max(1.0)
    }
}

/// Memory that the candidate and the reference host both have.
struct Shared {
    /// Tensors of the candidate lie in its first part, those of the one that does nothing in its last.
    pool: OwnedFd,
    bytes: u64,
    null_bytes: u64,
    /// Where inputs are read, on a card; on the CPU they are the session's.
    inputs: Vec<Option<(OwnedFd, u64)>>,
}

/// An answer to `run`.
#[derive(Debug, Deserialize)]
struct Called {
    outputs: Vec<Output>,
    structure: Value,
    #[serde(default)]
    operators: BTreeMap<String, u64>,
    #[serde(default)]
    threads: i64,
    /// How a tensor left PyTorch, or the library that was opened.
    #[serde(default)]
    left: Option<String>,
    /// Microseconds of `forward`, of the wait for the card and of the rest, as it says itself.
    #[serde(default)]
    took_us: Vec<f64>,
    id: Option<u64>,
}

/// An answer to `trace`.
#[derive(Debug, Deserialize)]
struct Traced {
    launches: Vec<Value>,
    /// Of the last of the calls that the profiler saw.
    outputs: Vec<Output>,
    structure: Value,
}

/// Where an output lies, as the process says.
#[derive(Clone, Debug, Deserialize)]
struct Output {
    dtype: String,
    shape: Vec<u64>,
    strides: Vec<i64>,
    #[serde(default)]
    offset: u64,
    #[serde(default)]
    input: Option<usize>,
}

fn fault(what: &str, error: &dyn std::fmt::Display) -> Stop {
    Stop::Error(Error::Fault(format!("{what}: {error}")))
}

/// What the end or the refusal of such a process says of the candidate in it. `doing`: what it was at; `said`: the end of what
/// it wrote to its standard error.
fn failure(error: process::Error, doing: &str, said: &str) -> Stop {
    match error {
        process::Error::Refused(refused) => Stop::Candidate(Box::new(told(&refused))),
        process::Error::Gone { timeout: true, .. } => incorrect("timeout", format!("{doing} did not end in time")),
        process::Error::Gone { what, .. } if what.contains("bad answer") => {
            incorrect("forged_reply", format!("while {doing} the process {what}"))
        }
        process::Error::Gone { .. } => {
            let why = format!("{doing} ended its process: it crashed, exited or used too much memory");
            incorrect("crash", with_words(why, said))
        }
        process::Error::Orphaned { .. } | process::Error::Start { .. } => Stop::Error(Error::Fault(error.to_string())),
    }
}

/// A message with the last words of a process, if it had any.
fn with_words(message: String, said: &str) -> String {
    if said.is_empty() { message } else { format!("{message}; its standard error ends with: {said}") }
}

/// What a candidate's process may refuse for.
const CODES: [&str; 7] = ["exception", "syntax", "constructor", "state_dict", "no_model_new", "structure", "memory"];

fn told(refused: &Refused) -> Reason {
    let text = |key: &str| refused.body[key].as_str().map(str::to_owned);
    let mut message: String = refused.message.chars().take(4000).collect();
    if let Some(source) = text("source").filter(|s| !s.trim().is_empty()) {
        message.push_str(&format!(" (`{}`)", source.trim()));
    }
    // It is hostile: that it names a fault of the judge makes it none.
    let known = CODES.contains(&refused.code.as_str());
    Reason {
        file: text("file"),
        line: refused.body["line"].as_u64().and_then(|l| u32::try_from(l).ok()),
        ..reason(if known { &refused.code } else { "exception" }, message)
    }
}

/// What is built by now of a candidate's extensions, for the clock of its phase.
struct Builds {
    left: usize,
}

impl Builds {
    /// Answers a request for a build, if the reply is one; the reply that comes in the end.
    fn serve(
        &mut self,
        judge: &Judge,
        framework: &extension::Framework,
        child: &mut Forked,
        mut frame: Frame,
    ) -> Result<(), Stop> {
        while frame.body["build"].is_object() {
            if self.left == 0 {
                return Err(incorrect("build_failed", format!("a candidate has at most {EXTENSIONS} extensions")));
            }
            self.left -= 1;
            let spec: extension::Spec = serde_json::from_value(frame.body["build"].clone())
                .map_err(|e| incorrect("build_failed", format!("what is to be built can't be read: {e}")))?;
            let options = &judge.options;
            let built = judge
                .builder
                .extension(options.device, &judge.device.arch, framework, &spec, &options.libraries)
                .map_err(|error| match error {
                    BuildError::Refused { message, file, line } => {
                        Stop::Candidate(Box::new(Reason { file, line, ..reason("build_failed", message) }))
                    }
                    BuildError::Fault(message) => Stop::Error(Error::Fault(message)),
                })?;
            if let Some(forbidden) = symbols::forbidden(&built.image) {
                let why = format!("the extension {} needs {}: {}", spec.name, forbidden.symbol, forbidden.why);
                return Err(incorrect(forbidden.code, why));
            }
            let image = lent(&built)?;
            let answer = child.ask(&json!({"op": "built"}), &[image.as_fd()], LOAD);
            frame = answer.map_err(|e| failure(e, "the import of model_new.py", &child.said()))?;
        }
        Ok(())
    }
}

/// A library as a descriptor.
fn lent(built: &Built) -> Result<OwnedFd, Stop> {
    memory_of(c"library", &built.image).map_err(|e| fault("no memory for a library", &e))
}

/// Builds a candidate's extensions, in a process without a device that imports and constructs it once. On a card what else
/// fails there may be for want of one and is looked at again when it runs.
pub(super) fn build(fixed: &Fixed, candidate: &Candidate, evidence: &mut Evidence) -> Result<(), Stop> {
    let judge = &fixed.judge;
    let (mut child, framework, _) = judge.fork_process(true)?;
    evidence.isolation.extend(child.isolation.iter().cloned());
    let body = json!({
        "op": "load", "device": judge.options.device, "files": candidate.files, "init": fixed.described["init"],
        "build_only": true,
    });
    let cuda = judge.options.device == Device::Cuda;
    let done = match child.ask(&body, &[], LOAD) {
        Ok(frame) => Builds { left: EXTENSIONS }.serve(judge, &framework, &mut child, frame),
        Err(error) => Err(failure(error, "the import of model_new.py", &child.said())),
    };
    match done {
        Err(Stop::Candidate(reason)) if cuda && reason.code != "build_failed" => Ok(()),
        done => done,
    }
}

impl<'a> Process<'a> {
    /// Memory for what is to run; the process itself begins with a parameter set.
    pub(super) fn new(session: &mut Session, candidate: &'a Candidate) -> Result<Self, Stop> {
        let judge = Arc::clone(&session.fixed.judge);
        let described = &session.fixed.described;
        let bytes = |tensors: &Value| -> u64 {
            tensors.as_array().into_iter().flatten().filter_map(|t| t["bytes"].as_u64()).fold(0, u64::saturating_add)
        };
        let output_bytes = bytes(&described["outputs"]["tensors"]);
        let state = session.fixed.state.iter().fold(0u64, |sum, t| sum.saturating_add(t.bytes));
        let wanted = output_bytes.saturating_add(state).saturating_add(bytes(&described["inputs"]));
        let round = |n: u64| n.saturating_add(4 << 20) >> 21 << 21;
        let null_bytes = round(output_bytes.min(POOL.1).saturating_mul(2));
        let pool_bytes = round(wanted.saturating_mul(8).clamp(POOL.0, POOL.1)) + null_bytes;
        let shared = share(session, pool_bytes, null_bytes)?;
        let limit = limit(session.eager_us);
        Ok(Self {
            candidate,
            judge,
            child: None,
            null: None,
            shared,
            limit,
            nulls: Nulls::default(),
            said_us: Vec::new(),
            tails: (Vec::new(), Vec::new()),
            last: None,
            output_bytes,
            shown: false,
            device_us: None,
        })
    }

    fn on_cpu(&self) -> bool {
        self.judge.options.device == Device::Cpu
    }

    /// A process that has loaded this candidate with a parameter set, or the one that does nothing.
    fn loaded(&self, session: &Session, set: Option<usize>) -> Result<Forked, Stop> {
        let (mut child, framework, native) = self.judge.fork_process(false)?;
        let native = lent(&native)?;
        let mut fds: Vec<BorrowedFd<'_>> = vec![native.as_fd(), self.shared.pool.as_fd()];
        let inputs = if self.on_cpu() { session.input_fds.first() } else { Some(&self.shared.inputs) };
        let mut places = Vec::new();
        for input in inputs.into_iter().flatten() {
            places.push(match input {
                Some((fd, bytes)) => {
                    fds.push(fd.as_fd());
                    json!({"fd": fds.len() - 1, "bytes": bytes})
                }
                None => Value::Null,
            });
        }
        let fixed = &session.fixed;
        let own = self.shared.bytes - self.shared.null_bytes;
        let (from, room) = if set.is_some() { (0, own) } else { (own, self.shared.null_bytes) };
        let mut body = json!({
            "op": "load", "device": self.judge.options.device, "init": fixed.described["init"], "inputs": fixed.inputs,
            "slot": places, "native": 0, "files": {},
            "pool": {"fd": 1, "whole": self.shared.bytes, "from": from, "bytes": room},
        });
        let sets = fixed.sets();
        match set.map(|set| sets.get(set)) {
            None => {
                body["null"] = json!(true);
                body["outputs"] = fixed.described["outputs"].clone();
            }
            Some(None) => return Err(Error::Fault("no such parameter set".into()).into()),
            Some(Some(set)) => {
                body["files"] = json!(self.candidate.files);
                body["state"] = set.tensors.clone();
                if let Some(fd) = &set.fd {
                    fds.push(fd.as_fd());
                    body["state_fd"] = json!(fds.len() - 1);
                }
            }
        }
        let doing = "the import, construction or loading of ModelNew";
        let answer = child.ask(&body, &fds, LOAD);
        let frame =
            answer.map_err(|e| if set.is_some() { failure(e, doing, &child.said()) } else { ours(e, &child) })?;
        Builds { left: EXTENSIONS }.serve(&self.judge, &framework, &mut child, frame)?;
        still(&child)?;
        Ok(child)
    }

    /// One call of a process on the supervisor's clock, microseconds: on the CPU until it stands still, on a card until the
    /// reference host has its own copy of the outputs; how much of it was after the answer.
    fn timed(
        session: &mut Session,
        child: &mut Forked,
        slot: usize,
        from: u64,
        limit: Duration,
    ) -> Result<(Called, f64, f64), Stop> {
        if session.fixed.judge.options.device == Device::Cpu {
            session.host.freeze();
            let called = Self::call(child, limit);
            session.host.thaw();
            return called.map(|(called, wall)| (called, wall, 0.0));
        }
        // A process that stood still or slept answers later by more than many a kernel takes. It has no new inputs yet: what
        // it does here is of no use to it.
        child.thaw();
        child.ask(&json!({"op": "ready"}), &[], limit).map_err(|e| failure(e, CALL, &child.said()))?;
        tell(session, &json!({"op": "release", "slot": slot}))?;
        child.stay_awake(true);
        session.host.stay_awake(true);
        let timed = Self::handed_over(session, child, slot, from, limit);
        session.host.stay_awake(false);
        child.stay_awake(false);
        let timed = timed?;
        still(child)?;
        tell(session, &json!({"op": "returned", "slot": slot}))?;
        Ok(timed)
    }

    /// What is timed on a card: a call, and the copy of what it returned.
    fn handed_over(
        session: &mut Session,
        child: &mut Forked,
        slot: usize,
        from: u64,
        limit: Duration,
    ) -> Result<(Called, f64, f64), Stop> {
        let start = Instant::now();
        let (called, answered) = Self::call_running(child, limit)?;
        let copied = snapshot(session, slot, from, &called.outputs, &called.structure);
        let wall = start.elapsed().as_secs_f64() * 1e6;
        copied?;
        Ok((called, wall, wall - answered))
    }

    /// Empty calls, beside which the candidate stands still. `caps`: no more than these is taken off on a card.
    fn empty_calls(&mut self, session: &mut Session, count: usize, caps: bool) -> Result<(), Stop> {
        let from = self.shared.bytes - self.shared.null_bytes;
        let mut null = match self.null.take() {
            Some(null) => null,
            None => self.loaded(session, None)?,
        };
        let mut times = Vec::with_capacity(count);
        for _ in 0..count {
            let timed = Self::timed(session, &mut null, 0, from, Duration::from_secs(20));
            let (_, wall, tail) = timed.map_err(|stop| not_its(stop, &null))?;
            times.push(wall);
            self.tails.0.push(tail);
        }
        self.null = Some(null);
        if self.on_cpu() {
            self.nulls.add_on_cpu(&times)
        } else {
            self.nulls.add_on_card(times, caps)
        }
        Ok(())
    }

    /// What runs on the card in a call on inputs that were never seen, as its profiler sees it; what those calls return is
    /// compared, so that nothing else was run for the profiler.
    fn trace(&mut self, session: &mut Session) -> Result<(), Stop> {
        let Some(child) = &mut self.child else { return Ok(()) };
        draw(session, 0, PLAIN)?;
        tell(session, &json!({"op": "release", "slot": 0}))?;
        child.thaw();
        let asked = child.ask(&json!({"op": "trace"}), &[], MINUTES);
        let failed = |child: &Forked, why: String| incorrect("trace_failed", with_words(why, &child.said()));
        let frame = asked.map_err(|e| match failure(e, "the profiler's look at ModelNew", "") {
            Stop::Candidate(reason) => failed(child, reason.message),
            error => error,
        })?;
        still(child)?;
        let traced: Traced = serde_json::from_value(frame.body)
            .map_err(|_| incorrect("forged_reply", "the answer to the profiler's look is none"))?;
        let seen = kernels(&traced.launches, &self.judge.options.libraries);
        self.device_us = Some(seen.map_err(|stop| match stop {
            Stop::Candidate(reason) if reason.code == "trace_failed" => failed(child, reason.message),
            other => other,
        })?);
        snapshot(session, 0, 0, &traced.outputs, &traced.structure)?;
        let left = tell(session, &json!({"op": "returned", "slot": 0}))?;
        // Of inputs that each call changes the last one returns what nobody computed for comparison.
        if left.body["repeats"].as_bool() == Some(false) {
            return Ok(());
        }
        decided(session, 0, None, "the calls that the profiler saw")
    }

    /// Asks a process that stands still, and stops it again.
    fn call(child: &mut Forked, limit: Duration) -> Result<(Called, f64), Stop> {
        let id = secret_seed()?;
        let answer = child.clocked(&json!({"op": "run", "id": id}), limit);
        let (frame, wall) = answer.map_err(|e| failure(e, CALL, &child.said()))?;
        Ok((honest(child, frame, id)?, wall))
    }

    /// Asks a process that runs on.
    fn call_running(child: &mut Forked, limit: Duration) -> Result<(Called, f64), Stop> {
        let id = secret_seed()?;
        let start = Instant::now();
        let answer = child.ask(&json!({"op": "run", "id": id}), &[], limit);
        let wall = start.elapsed().as_secs_f64() * 1e6;
        let frame = answer.map_err(|e| failure(e, CALL, &child.said()))?;
        Ok((honest(child, frame, id)?, wall))
    }
}

const CALL: &str = "a call of ModelNew";

/// An answer that was asked for, and nothing else.
fn honest(child: &Forked, frame: Frame, id: u64) -> Result<Called, Stop> {
    let forged = |why: &str| Err(incorrect("forged_reply", format!("{CALL} was answered falsely: {why}")));
    if !frame.fds.is_empty() {
        return forged("descriptors came that nobody asked for");
    }
    let Ok(called) = serde_json::from_value::<Called>(frame.body) else {
        return forged("the answer is none to a call");
    };
    if called.id != Some(id) {
        return forged("it is no answer to this call");
    }
    if !child.silent() {
        return forged("more than one answer came");
    }
    Ok(called)
}

impl Output {
    /// As the reference host is told of it. `fd`: of the pool; `from`: where the process's part of it begins.
    fn wire(&self, fd: Option<usize>, from: u64, bytes: u64) -> Value {
        let mut entry = json!({
            "bytes": bytes, "offset": self.offset, "dtype": self.dtype, "shape": self.shape, "strides": self.strides,
        });
        match self.input {
            Some(input) => entry["input"] = json!(input),
            None => {
                entry["offset"] = json!(self.offset.saturating_add(from).min(u64::MAX >> 1));
                if let Some(fd) = fd {
                    entry["fd"] = json!(fd);
                }
            }
        }
        entry
    }
}

/// Has the reference host copy what a process returned on a card; `from`: where that one's part of the pool begins.
fn snapshot(session: &mut Session, slot: usize, from: u64, outputs: &[Output], structure: &Value) -> Result<(), Stop> {
    let outputs: Vec<Value> = outputs.iter().map(|o| o.wire(None, from, u64::MAX >> 1)).collect();
    let body = json!({"op": "snapshot", "slot": slot, "outputs": outputs, "structure": structure});
    session.host.ask(&body, &[], MINUTES).map(|_| ()).map_err(|e| unlike(session, e))
}

/// Stops a process that has answered.
fn still(child: &Forked) -> Result<(), Stop> {
    if child.stand_still(STOP) { Ok(()) } else { Err(incorrect("timeout", "the process could not be stopped")) }
}

/// No candidate is to blame for what befalls the one that does nothing.
fn ours(error: process::Error, child: &Forked) -> Stop {
    fault("the candidate that does nothing failed", &with_words(error.to_string(), &child.said()))
}

/// As `ours`, of what was taken for a candidate's fault.
fn not_its(stop: Stop, child: &Forked) -> Stop {
    match stop {
        Stop::Candidate(reason) => {
            let what = format!("{}: {}", reason.code, reason.message);
            fault("the candidate that does nothing failed", &with_words(what, &child.said()))
        }
        error => error,
    }
}

/// A request to the reference host that only a fault of task or judge refuses.
fn tell(session: &mut Session, body: &Value) -> Result<Frame, Stop> {
    session.host.ask(body, &[], MINUTES).map_err(|e| match e {
        process::Error::Refused(r) if matches!(r.code.as_str(), "malformed" | "unknown_op" | "exception") => {
            let op = body["op"].as_str().unwrap_or("?");
            fault(&format!("the reference host refuses `{op}`"), &r.message)
        }
        other => Stop::Error(task_error(&session.fixed.task, other)),
    })
}

/// What the reference host says of outputs that can't be the task's.
fn unlike(session: &Session, error: process::Error) -> Stop {
    match error {
        process::Error::Refused(r) if matches!(r.code.as_str(), "memory" | "cuda") => {
            Stop::Error(task_error(&session.fixed.task, process::Error::Refused(r)))
        }
        process::Error::Refused(r) if matches!(r.code.as_str(), "shape" | "dtype") => incorrect(&r.code, r.message),
        // All else is said of how the candidate describes what it returned.
        process::Error::Refused(r) => incorrect("structure", r.message),
        other => Stop::Error(task_error(&session.fixed.task, other)),
    }
}

/// Memory for a candidate: ours on the CPU; on a card the reference host's, which makes and maps it.
fn share(session: &mut Session, bytes: u64, null_bytes: u64) -> Result<Shared, Stop> {
    if session.fixed.judge.options.device == Device::Cpu {
        let pool = memory_file(c"pool", bytes).map_err(|e| fault("no memory for a candidate's tensors", &e))?;
        return Ok(Shared { pool, bytes, null_bytes, inputs: Vec::new() });
    }
    let frame = tell(session, &json!({"op": "share", "bytes": bytes}))?;
    let mut fds: Vec<Option<OwnedFd>> = frame.fds.into_iter().map(Some).collect();
    let mut inputs: Vec<Option<(OwnedFd, u64)>> = session.fixed.inputs.iter().map(|_| None).collect();
    let mut pool = None;
    for record in frame.body["shared"].as_array().into_iter().flatten() {
        let number = |key: &str| record[key].as_u64().and_then(|n| usize::try_from(n).ok());
        let Some(fd) = number("fd").and_then(|i| fds.get_mut(i)?.take()) else { continue };
        match number("input").map(|i| inputs.get_mut(i)) {
            None => pool = Some(fd),
            Some(Some(place)) => *place = record["bytes"].as_u64().map(|bytes| (fd, bytes)),
            Some(None) => {}
        }
    }
    let pool = pool.ok_or_else(|| Error::Fault("the reference host shared no pool".into()))?;
    Ok(Shared { pool, bytes, null_bytes, inputs })
}

/// Kernels of libraries and of the framework, by what their names hold, with the library that allows them.
const LIBRARIES: [(&str, &str); 8] = [
    ("cudnn", "conv"),
    ("implicit_gemm", "conv"),
    ("cublas", "matmul"),
    ("cutlass", "matmul"),
    ("xmma", "matmul"),
    ("nvjet", "matmul"),
    ("gemvx", "matmul"),
    ("gemmk1", "matmul"),
];

/// Whether kernels that ran are the candidate's own or allowed; their device time, microseconds a call.
fn kernels(launches: &[Value], libraries: &[String]) -> Result<f64, Stop> {
    let mut sum = 0.0;
    for launch in launches {
        let (Some(name), Some(time)) = (launch["name"].as_str(), launch["time_us"].as_f64()) else { continue };
        sum += time;
        // Memory that is filled is allowed, as it is in a plan.
        if name.contains("at::native") && !name.contains("FillFunctor") {
            return Err(incorrect("framework_operator", format!("forward runs the framework's kernel {name}")));
        }
        let library = LIBRARIES.iter().find(|(part, _)| name.contains(part));
        if let Some((part, wanted)) = library
            && !libraries.iter().any(|l| l == wanted)
        {
            return Err(incorrect(
                "library_not_allowed",
                format!("forward runs {name}, a kernel of {part}, which this job does not allow"),
            ));
        }
    }
    if sum <= 0.0 {
        return Err(incorrect(
            "trace_failed",
            "the profiler saw no kernel: either nothing runs on the card, or what runs can't be seen",
        ));
    }
    Ok(sum)
}

/// What a call did that it may not.
fn watched(called: &Called, most_threads: usize, threads: usize) -> Result<(), Stop> {
    if !called.operators.contains_key("aten::empty") {
        return Err(incorrect(
            "trace_failed",
            "the record of dispatched operators is empty or was cut short: what the candidate did can't be seen",
        ));
    }
    for name in called.operators.keys() {
        // A name without a namespace is a class of the candidate's (torch.autograd.Function): what it calls has names of its own.
        let Some((space, base)) = name.split_once("::") else { continue };
        if FRAMEWORK.contains(&space) && !HARMLESS.contains(&base) {
            let hint = "write it in the extension: allocation and views are what the framework may be asked for";
            return Err(Stop::Candidate(Box::new(Reason {
                hint: Some(hint.into()),
                ..reason("framework_operator", format!("forward runs the framework's operator {name}"))
            })));
        }
    }
    if let Some(left) = &called.left {
        let how: String = left.chars().take(100).collect();
        let why =
            format!("the candidate hands a tensor to another library, or opens one ({how}), which nobody sees work");
        return Err(incorrect("library_not_allowed", why));
    }
    if called.threads > 0 {
        return Err(incorrect("thread_left", "forward returned while a Python thread that it had started still ran"));
    }
    if threads > most_threads {
        return Err(incorrect(
            "thread_left",
            format!("{threads} threads are left after a call; {most_threads} at most"),
        ));
    }
    Ok(())
}

impl Subject for Process<'_> {
    fn calibrate(&mut self, session: &mut Session) -> Result<(), Stop> {
        session.select(0)?;
        if !self.on_cpu() {
            // What is handed to the empty calls is drawn as it is for every other.
            draw(session, 0, PLAIN)?;
        }
        self.empty_calls(session, if self.on_cpu() { NULLS.0 } else { NULLS_ON_CARD.0 }, true)
    }

    fn select(&mut self, session: &mut Session, set: usize) -> Result<(), Stop> {
        // Weights that were packed at a first call are packed anew: each set meets a candidate that has seen no other.
        self.child = None;
        self.last = None;
        session.select(set)?;
        self.child = Some(self.loaded(session, Some(set))?);
        Ok(())
    }

    fn bound_by(&mut self, eager_us: f64) {
        self.limit = limit(eager_us);
    }

    fn sample(&mut self, session: &mut Session, slot: usize) -> Result<f64, Stop> {
        let Some(child) = &mut self.child else { return Err(Error::Fault("no candidate runs".into()).into()) };
        if session.fixed.judge.options.device == Device::Cpu {
            tell(session, &json!({"op": "flush"}))?;
        }
        self.shown = false;
        let (called, wall, tail) = Self::timed(session, child, slot, 0, self.limit)?;
        self.tails.1.push(tail);
        self.said_us.push(called.took_us.iter().copied().take(4).collect());
        let most = 64 + 8 * self.judge.toolchain.threads;
        watched(&called, most, child.threads())?;
        self.last = Some(called);
        Ok(wall)
    }

    fn show(&mut self, session: &mut Session) -> Result<(), Stop> {
        let Some(called) = &self.last else { return Err(Error::Fault("nothing was run".into()).into()) };
        // On a card the copy that the clock waited for is what is compared.
        if self.on_cpu() && !self.shown {
            let outputs: Vec<Value> = called.outputs.iter().map(|o| o.wire(Some(0), 0, self.shared.bytes)).collect();
            let body = json!({"op": "bind", "outputs": outputs, "structure": called.structure, "workspaces": []});
            let bound = session.host.ask(&body, &[self.shared.pool.as_fd()], MINUTES);
            bound.map_err(|e| unlike(session, e))?;
        }
        self.shown = true;
        Ok(())
    }

    fn block(&mut self, session: &mut Session) -> Result<(), Stop> {
        self.empty_calls(session, if self.on_cpu() { NULLS.1 } else { NULLS_ON_CARD.1 }, false)
    }

    fn unchanged(&mut self, session: &mut Session) -> Result<(), Stop> {
        if self.on_cpu() || self.device_us.is_some() { Ok(()) } else { self.trace(session) }
    }

    /// The first look takes seconds, in which the profiler starts.
    fn ahead(&mut self, session: &mut Session) -> Result<(), Stop> {
        self.trace(session)
    }

    /// What empty calls took before was beside others' work, which must not be taken off.
    fn settle(&mut self, session: &mut Session, _: &mut Evidence) -> Result<(), Stop> {
        self.trace(session)?;
        self.empty_calls(session, NULLS_ON_CARD.0, true)
    }

    fn apart(&mut self, mean: f64) -> Result<Option<String>, Stop> {
        let Some(device) = self.device_us.filter(|_| !self.on_cpu()) else { return Ok(None) };
        let timed = (mean - self.taken_off()).max(0.0);
        // Empty calls vary by more than a small kernel takes.
        let least = device - 2.0 * self.nulls.resolution(false);
        Ok((least > 1.25 * timed + 20.0).then(|| {
            format!("the profiler saw {device:.0} us of work on the card in a call that was timed at {timed:.0} us")
        }))
    }

    fn cross_check(&mut self, evidence: &mut Evidence) -> Result<(), Stop> {
        let timed = timing::median(&evidence.candidate_us).unwrap_or(0.0);
        let median = |times: &[f64]| timing::median(times).unwrap_or(0.0);
        let late = median(&self.tails.1) - median(&self.tails.0);
        tracing::info!(
            timed,
            device = self.device_us,
            late,
            null_tail = median(&self.tails.0),
            nulls = ?self.nulls.each,
            said = ?self.said_us.iter().rev().take(12).collect::<Vec<_>>(),
            samples = ?evidence.candidate_us,
            eager = ?evidence.eager_us,
            "the clocks of a candidate's process, microseconds"
        );
        if !self.on_cpu() && late > (0.2 * timed).max(100.0) {
            return Err(incorrect(
                "early_done",
                format!("calls were answered before their work was done: the card was busy for {late:.0} us after it"),
            ));
        }
        Ok(())
    }

    fn profile(&mut self, _: &mut Evidence) {}

    fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, |c| c.pid.unsigned_abs())
    }

    fn null_us(&self) -> Option<f64> {
        self.on_cpu().then(|| self.taken_off())
    }

    fn taken_off(&self) -> f64 {
        self.nulls.taken_off(self.on_cpu())
    }

    /// No less than the profiler's device time: a kernel of the empty call's is taken off with it.
    fn resolution(&self) -> f64 {
        self.nulls.resolution(self.on_cpu()).max(self.device_us.unwrap_or(0.0))
    }

    fn only(&self) -> Option<String> {
        None
    }

    fn summed(&self) -> bool {
        true
    }

    fn output_bytes(&self) -> u64 {
        self.output_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn called(operators: &[&str], threads: i64) -> Called {
        Called {
            outputs: Vec::new(),
            structure: json!("tensor"),
            operators: operators.iter().map(|o| ((*o).to_owned(), 1)).collect(),
            threads,
            left: None,
            took_us: Vec::new(),
            id: None,
        }
    }

    fn code(called: &Called, threads: usize) -> String {
        match watched(called, 16, threads) {
            Err(Stop::Candidate(reason)) => reason.code,
            Err(Stop::Error(error)) => error.to_string(),
            Ok(()) => String::new(),
        }
    }

    #[test]
    fn no_more_is_taken_off_on_a_card_than_empty_calls_took_with_the_card_held() {
        let mut nulls = Nulls::default();
        // Before the candidate was there others used the card.
        nulls.add_on_card(vec![1500.0, 1700.0], true);
        assert_eq!(nulls.taken_off(false), 1600.0);
        nulls.add_on_card(vec![800.0, 900.0], true);
        assert_eq!(nulls.taken_off(false), 850.0);
        // A block beside which something of the candidate's works, and a quick one.
        nulls.add_on_card(vec![5000.0], false);
        assert_eq!(nulls.taken_off(false), 850.0);
        nulls.add_on_card(vec![700.0], false);
        assert_eq!(nulls.taken_off(false), 700.0);
    }

    #[test]
    fn on_the_cpu_the_least_empty_call_is_taken_off_and_their_spread_is_not_told_from_work() {
        let mut nulls = Nulls::default();
        for times in [[90.0], [70.0], [100.0]] {
            nulls.add_on_cpu(&times);
        }
        assert_eq!((nulls.taken_off(true), nulls.resolution(true)), (70.0, 30.0));
        assert_eq!(Nulls::default().taken_off(true), 0.0);
    }

    #[test]
    fn only_memory_and_views_may_be_dispatched() {
        assert_eq!(code(&called(&["aten::empty", "aten::empty_like", "aten::view", "aten::contiguous"], 0), 4), "");
        for operator in
            ["aten::mm", "aten::relu", "aten::clone", "aten::copy_", "mkldnn::_linear_pointwise", "prims::add"]
        {
            assert_eq!(code(&called(&["aten::empty", operator], 0), 4), "framework_operator", "{operator}");
        }
        assert_eq!(
            code(&called(&["aten::empty", "mine::relu"], 0), 4),
            "",
            "an operator that the candidate registered"
        );
        assert_eq!(code(&called(&["aten::empty", "LeakyFunction"], 0), 4), "", "a torch.autograd.Function of its own");
        assert_eq!(code(&called(&["aten::empty", "LeakyFunction", "aten::mm"], 0), 4), "framework_operator");
    }

    #[test]
    fn kernels_of_the_framework_and_of_libraries_are_known_by_name() {
        let seen = |name: &str| vec![json!({"name": name, "time_us": 12.5})];
        let said = |name: &str, libraries: &[&str]| {
            let libraries: Vec<String> = libraries.iter().map(|l| (*l).to_owned()).collect();
            match kernels(&seen(name), &libraries) {
                Err(Stop::Candidate(reason)) => reason.code,
                Err(Stop::Error(error)) => error.to_string(),
                Ok(time) => format!("{time}"),
            }
        };
        assert_eq!(said("void mine<128>(float*, float const*)", &[]), "12.5");
        assert_eq!(
            said("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", &[]),
            "12.5"
        );
        assert_eq!(said("void at::native::vectorized_elementwise_kernel<4, relu>", &["matmul"]), "framework_operator");
        assert_eq!(said("sm90_xmma_gemm_f32f32_tf32f32_f32", &["conv"]), "library_not_allowed");
        assert_eq!(said("sm90_xmma_gemm_f32f32_tf32f32_f32", &["matmul"]), "12.5");
        assert!(matches!(kernels(&[], &[]), Err(Stop::Candidate(r)) if r.code == "trace_failed"));
    }

    #[test]
    fn an_empty_record_and_threads_that_go_on_are_refused() {
        assert_eq!(code(&called(&[], 0), 4), "trace_failed");
        assert_eq!(code(&called(&["aten::view"], 0), 4), "trace_failed");
        assert_eq!(code(&called(&["aten::empty"], 1), 4), "thread_left");
        assert_eq!(code(&called(&["aten::empty"], 0), 17), "thread_left");
    }
}
