//! One evaluation: record, build, admit, run, compare, measure, reward.
//!
//! Knows the order of the steps and whose fault each failure is. Must not know how a process does its part.
//! A candidate's failure is a verdict of -1 with the line or launch; a task's is a request error; all else is
//! a fault of the judge.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::cache::{Baseline, digest};
use super::process;
use super::runner::client::{
    Error as RunnerError, Exported, LoadRequest, Loaded, Runner, memory_file, write_constants,
};
use super::runner::{Arithmetic, Item};
use super::session::{Error, Fixed, MINUTES, Session, secret_seed, task_error};
use super::timing::{self, Random};
use super::verdict::{
    Against, FASTER, Grade, Interval, LaunchEvidence, Measurement, PROCEDURE, Reason, Times, Verdict,
};
use super::{Candidate, Device, Effort, Precision, admit, build, confinement, load};
use crate::plan::{self, BufferKind, Library, Op, Plan};

/// What ends an evaluation before its end.
pub(super) enum Stop {
    /// The candidate is not correct.
    Candidate(Box<Reason>),
    Error(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

fn reason(code: &str, message: impl Into<String>) -> Reason {
    Reason { code: code.to_owned(), message: message.into(), file: None, line: None, launch: None, hint: None }
}

fn incorrect(code: &str, message: impl Into<String>) -> Stop {
    Stop::Candidate(Box::new(reason(code, message)))
}

/// What is known of the candidate so far; becomes the verdict whatever happens.
#[derive(Default)]
struct Evidence {
    phases: BTreeMap<String, f64>,
    isolation: BTreeSet<String>,
    notes: Vec<String>,
    audit: Vec<String>,
    digests: BTreeMap<String, String>,
    launches: Vec<LaunchEvidence>,
    compared: usize,
    candidate_us: Vec<f64>,
    eager_us: Vec<f64>,
    eager_wall: Option<f64>,
    speedup: Against<Interval>,
    compile: Option<Interval>,
    measurement: Option<Measurement>,
}

impl Evidence {
    fn time<T>(&mut self, phase: &str, work: impl FnOnce(&mut Self) -> T) -> T {
        let start = Instant::now();
        let done = work(self);
        *self.phases.entry(phase.to_owned()).or_default() += start.elapsed().as_secs_f64();
        done
    }
}

struct Recording {
    plan: Plan,
    /// Derived constants of each parameter set.
    constants: Vec<Constants>,
}

struct Constants {
    fd: Option<OwnedFd>,
    items: Vec<Item>,
}

/// Caps of one evaluation.
struct Budget {
    inputs: usize,
    parameter_sets: usize,
    scaled: bool,
    blocks: usize,
    block: usize,
    seconds: f64,
    width: f64,
    compile: bool,
}

impl Budget {
    fn of(session: &Session, effort: Effort) -> Self {
        let options = &session.fixed.judge.options;
        let stateful = !session.fixed.state.is_empty();
        let cpu = options.device == Device::Cpu;
        match effort {
            Effort::Screen => Self {
                inputs: 2,
                parameter_sets: 1,
                scaled: false,
                blocks: if cpu { 2 } else { 1 },
                block: if cpu { 4 } else { 10 },
                seconds: 1.5,
                width: 0.02,
                compile: false,
            },
            Effort::Final => Self {
                inputs: options.inputs,
                parameter_sets: if stateful { 2 } else { 1 },
                scaled: true,
                blocks: if cpu { 8 } else { 3 },
                block: if cpu { 4 } else { 10 },
                seconds: options.measure_seconds.unwrap_or(if cpu { 10.0 } else { 4.0 }),
                width: 0.01,
                compile: options.compile,
            },
        }
    }
}

/// A candidate that is recorded and built, or the reason why not, with what that took.
pub(super) struct Ready {
    outcome: Result<(Recording, Vec<build::Built>), Stop>,
    evidence: Evidence,
    seconds: f64,
}

/// Records, checks and builds a candidate: CPU work that needs no reference host and no slice.
pub(super) fn ready(fixed: &Fixed, candidate: &Candidate) -> Ready {
    let start = Instant::now();
    let mut evidence = Evidence::default();
    let files: Vec<u8> = serde_json::to_vec(&candidate.files).unwrap_or_default();
    evidence.digests.insert("task".into(), fixed.digest.clone());
    evidence.digests.insert("candidate".into(), digest([files.as_slice()]));
    let outcome = ready_steps(fixed, candidate, &mut evidence);
    Ready { outcome, evidence, seconds: start.elapsed().as_secs_f64() }
}

fn ready_steps(
    fixed: &Fixed,
    candidate: &Candidate,
    evidence: &mut Evidence,
) -> Result<(Recording, Vec<build::Built>), Stop> {
    let recording = evidence.time("record", |e| record(fixed, candidate, e))?;
    let plan_text = serde_json::to_vec(&recording.plan).unwrap_or_default();
    evidence.digests.insert("plan".into(), digest([plan_text.as_slice()]));
    check_plan(fixed, &recording)?;
    let images = evidence.time("build", |e| build_all(fixed, candidate, &recording.plan, e))?;
    Ok((recording, images))
}

/// What a candidate comes to before anything runs: for exports.
pub(super) fn artifacts(fixed: &Fixed, candidate: &Candidate) -> Result<super::Artifacts, Error> {
    let ready = ready(fixed, candidate);
    match ready.outcome {
        Ok((recording, images)) => {
            Ok(super::Artifacts { plan: recording.plan, images, digests: ready.evidence.digests })
        }
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Candidate(reason)) => Err(Error::request(&reason.code, reason.message)),
    }
}

/// Judges `candidate` on the open task.
pub(super) fn evaluate(session: &mut Session, candidate: &Candidate, effort: Effort) -> Result<Verdict, Error> {
    let start = Instant::now();
    session.prepare()?;
    let prepare = start.elapsed().as_secs_f64();
    let mut ready = ready(&Arc::clone(&session.fixed), candidate);
    ready.evidence.phases.insert("prepare".into(), prepare);
    ready.seconds += prepare;
    finish(session, ready, effort)
}

/// Runs, compares and measures what `ready` made.
pub(super) fn finish(session: &mut Session, ready: Ready, effort: Effort) -> Result<Verdict, Error> {
    let start = Instant::now();
    let Ready { outcome, mut evidence, seconds } = ready;
    let ended = outcome.and_then(|(recording, images)| steps(session, &recording, &images, effort, &mut evidence));
    evidence.phases.insert("total".into(), seconds + start.elapsed().as_secs_f64());
    let failure = match ended {
        Ok(()) => None,
        Err(Stop::Candidate(reason)) => Some(*reason),
        Err(Stop::Error(error)) => return Err(error),
    };
    Ok(verdict(session, evidence, failure))
}

fn verdict(session: &Session, evidence: Evidence, failure: Option<Reason>) -> Verdict {
    let judge = &session.fixed.judge;
    let options = &judge.options;
    let correct = failure.is_none();
    let (eager, compile) = (evidence.speedup.eager, evidence.speedup.compile);
    Verdict {
        reward: if correct { timing::reward(eager.as_ref(), compile.as_ref()) } else { -1 },
        correct,
        reason: failure,
        grade: if options.device == Device::Cuda { Grade::Enforced } else { Grade::Observed },
        isolation: evidence.isolation.into_iter().collect(),
        measurement: evidence.measurement.unwrap_or(Measurement::None),
        notes: evidence.notes,
        speedup: if correct { evidence.speedup } else { Against::default() },
        time_us: Times {
            candidate: timing::interval(&evidence.candidate_us, 1),
            eager: timing::interval(&evidence.eager_us, 2),
            compile: evidence.compile,
            eager_wall: evidence.eager_wall,
        },
        samples: evidence.candidate_us.len(),
        compared: evidence.compared,
        launches: evidence.launches,
        device: judge.device.description.clone(),
        versions: judge.toolchain.versions.clone(),
        precision: serde_json::to_value(options.precision)
            .ok()
            .and_then(|v| v.as_str().map(str::to_owned))
            .unwrap_or_default(),
        tolerance: serde_json::to_value(options.tolerance)
            .ok()
            .and_then(|v| v.as_str().map(str::to_owned))
            .unwrap_or_default(),
        procedure: PROCEDURE.to_owned(),
        phases_seconds: evidence.phases,
        digests: evidence.digests,
        audit: evidence.audit,
        cached: false,
    }
}

fn steps(
    session: &mut Session,
    recording: &Recording,
    images: &[build::Built],
    effort: Effort,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    let budget = Budget::of(session, effort);
    // On the CPU everything that runs is a measurement's neighbour; on a card only measurement is exclusive.
    let judge = Arc::clone(&session.fixed.judge);
    let cpu = judge.options.device == Device::Cpu;
    let mut held = if cpu { judge.slice.hold() } else { judge.slice.share() };
    let mut run = evidence.time("load", |e| load_plan(session, recording, images, e))?;
    evidence.time("correct", |e| correctness(session, recording, &mut run, &budget, e))?;
    if budget.compile && !cpu && session.baseline.is_none() {
        evidence.time("compile", |_| prepare_compile(session))?;
    }
    // A screening only ranks a sweep; it does not empty the device for that.
    if !cpu && effort == Effort::Final {
        drop(held);
        held = evidence.time("wait", |_| judge.slice.hold());
    }
    let start = Instant::now();
    evidence.time("measure", |e| measure(session, &mut run, &budget, e))?;
    if !cpu && effort == Effort::Screen {
        evidence.measurement = Some(Measurement::Shared);
        evidence.notes.push("a screening beside other work: for ranking only".into());
    }
    if budget.compile {
        evidence.time("compile", |e| against_compile(session, e))?;
    }
    evidence.time("profile", |e| profile(&mut run, &recording.plan, e));
    evidence.phases.insert("held".into(), start.elapsed().as_secs_f64());
    drop(held);
    drop(run);
    sanity(session, &recording.plan, evidence)
}

// ---------------------------------------------------------------- record

fn record(fixed: &Fixed, candidate: &Candidate, evidence: &mut Evidence) -> Result<Recording, Stop> {
    let mut plans: Vec<Plan> = Vec::new();
    let mut constants = Vec::new();
    for set in fixed.sets() {
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
    plans.pop().map(|plan| Recording { plan, constants }).ok_or_else(|| Error::Fault("no parameter set".into()).into())
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
    set: &super::session::ParameterSet,
    evidence: &mut Evidence,
) -> Result<(Plan, Constants), Stop> {
    let judge = &fixed.judge;
    let mut recorder = judge.fork_recorder().map_err(|e| Error::Fault(e.to_string()))?;
    evidence.isolation.extend(recorder.isolation.iter().cloned());
    let mut body = json!({
        "op": "record", "device": judge.options.device, "files": candidate.files, "init": fixed.described["init"],
        "inputs": fixed.inputs, "state": set.tensors, "libraries": judge.options.libraries,
        "properties": judge.device.properties, "limits": {"nodes": 20_000, "seconds": 60},
    });
    let fds: Vec<BorrowedFd<'_>> = set.fd.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        body["fd"] = json!(0);
    }
    let mut frame = match recorder.ask(&body, &fds, Duration::from_secs(60)) {
        Ok(frame) => frame,
        Err(process::Error::Refused(refused)) => return Err(Stop::Candidate(Box::new(refusal(&refused)))),
        Err(process::Error::Gone { timeout: true, .. }) => {
            return Err(incorrect("timeout", "the recording of model_new.py did not end within 60 s"));
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
fn check_plan(fixed: &Fixed, recording: &Recording) -> Result<(), Stop> {
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

// ---------------------------------------------------------------- build and admit

fn build_all(
    fixed: &Fixed,
    candidate: &Candidate,
    plan: &Plan,
    evidence: &mut Evidence,
) -> Result<Vec<build::Built>, Stop> {
    let judge = &fixed.judge;
    let used: BTreeSet<usize> = plan
        .nodes
        .iter()
        .filter_map(|n| if let Op::Launch(launch) = &n.op { Some(launch.module) } else { None })
        .collect();
    let mut images = Vec::with_capacity(plan.modules.len());
    for (index, module) in plan.modules.iter().enumerate() {
        if !used.contains(&index) {
            images.push(build::Built::empty());
            continue;
        }
        let built = judge.builder.build(judge.options.device, &judge.device.arch, &candidate.files, module);
        let built = built.map_err(|error| match error {
            build::BuildError::Refused { message, file, line } => {
                Stop::Candidate(Box::new(Reason { file, line, ..reason("build_failed", message) }))
            }
            build::BuildError::Fault(message) => Stop::Error(Error::Fault(message)),
        })?;
        if judge.options.device == Device::Cuda {
            let image = admit::admit(&built.image, &judge.device.arch).map_err(|refused| {
                Stop::Candidate(Box::new(Reason {
                    file: Some(module.path.clone()),
                    ..reason("image_refused", refused.to_string())
                }))
            })?;
            for node in &plan.nodes {
                if let Op::Launch(launch) = &node.op
                    && launch.module == index
                {
                    admit::check_launch(&image, launch).map_err(|refused| {
                        let (file, line) = place(node.line.as_deref());
                        Stop::Candidate(Box::new(Reason {
                            file,
                            line,
                            launch: Some(launch.kernel.clone()),
                            ..reason("launch_invalid", refused.to_string())
                        }))
                    })?;
                }
            }
        }
        images.push(built);
    }
    let all: Vec<&[u8]> = images.iter().map(|b| b.digest.as_bytes()).collect();
    evidence.digests.insert("image".into(), digest(all));
    Ok(images)
}

fn place(line: Option<&str>) -> (Option<String>, Option<u32>) {
    match line.and_then(|l| l.rsplit_once(':')) {
        Some((file, number)) => (Some(file.to_owned()), number.parse().ok()),
        None => (None, None),
    }
}

// ---------------------------------------------------------------- load

/// A candidate that is loaded in a runner.
struct Run {
    runner: Runner,
    cpu: bool,
    /// Typical round trip of an empty plan, microseconds (CPU).
    null_us: f64,
    /// Longest that one run may take.
    limit: Duration,
    samples: u64,
    /// Device microseconds and the host clock's, of all counted runs on a card.
    clocks: (f64, f64),
    /// Name and line of every node, for messages.
    names: Vec<(String, Option<String>)>,
    loaded: Loaded,
}

fn names(plan: &Plan) -> Vec<(String, Option<String>)> {
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
    fn failure(&self, error: RunnerError) -> Stop {
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
                let mut stop = at(&fault.code, fault.message, fault.node.or(only));
                if let Stop::Candidate(reason) = &mut stop
                    && reason.launch.is_none()
                {
                    reason.launch = fault.kernel;
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

/// The most that a request to a runner other than `run` may take.
const RUNNER: Duration = Duration::from_secs(60);

fn load_plan(
    session: &mut Session,
    recording: &Recording,
    images: &[build::Built],
    evidence: &mut Evidence,
) -> Result<Run, Stop> {
    let judge = Arc::clone(&session.fixed.judge);
    let cpu = judge.options.device == Device::Cpu;
    let plan = &recording.plan;
    let needs_helper = cpu && plan.nodes.iter().any(|n| matches!(n.op, Op::Library(_)));
    let confinement = confinement::runner(&judge.toolchain, judge.options.device, needs_helper);
    evidence.isolation.extend(confinement.holds());
    let fault = |what: &str, e: &dyn std::fmt::Display| Stop::Error(Error::Fault(format!("{what}: {e}")));
    let mut confined = Ok(());
    let runner = Runner::spawn(&judge.toolchain.program, judge.options.device, |command| {
        confined = confinement.apply(command);
    })
    .map_err(|e| fault("the runner can't be started", &e))?;
    confined.map_err(|e| fault("the runner can't be confined", &e))?;
    let mut run = Run {
        runner,
        cpu,
        null_us: 0.0,
        limit: limit(session.eager_us),
        samples: 0,
        clocks: (0.0, 0.0),
        names: names(plan),
        loaded: Loaded::default(),
    };
    session.select(0)?;
    let images = images
        .iter()
        .map(|b| {
            let fd = memory_file(c"image", b.image.len() as u64)?;
            std::os::unix::fs::FileExt::write_all_at(&std::fs::File::from(fd.try_clone()?), &b.image, 0)?;
            Ok(fd)
        })
        .collect::<std::io::Result<Vec<OwnedFd>>>()
        .map_err(|e| fault("no memory for the images", &e))?;
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(|e| fault("no socket for the helper", &e))?;
    let constants = &recording.constants[0];
    let libraries = &judge.toolchain.libraries;
    let libraries = [("cublas", &libraries.cublas), ("cublaslt", &libraries.cublaslt), ("cudnn", &libraries.cudnn)];
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
        libraries: libraries
            .into_iter()
            .filter_map(|(name, path)| Some((name.to_owned(), path.as_ref()?.display().to_string())))
            .collect(),
        precision: Arithmetic { matmul_tf32: precision == Precision::Tf32, conv_tf32: precision != Precision::Half },
        seed: secret_seed()?,
        helper: needs_helper.then(|| theirs.as_fd()),
    };
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

fn plan_bytes(plan: &Plan) -> u64 {
    plan.buffers.iter().fold(0, |sum, b| sum.saturating_add(b.bytes))
}

fn limit(eager_us: f64) -> Duration {
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

// ---------------------------------------------------------------- correct

/// One input set of the correctness phase.
#[derive(Clone, Copy)]
struct Transform {
    kind: &'static str,
    factor: f64,
}

const PLAIN: Transform = Transform { kind: "none", factor: 1.0 };
/// Beyond half's range both ways, shifted and of the other sign (`docs/measuring.md`, "Correct").
const SCALED: [Transform; 4] = [
    Transform { kind: "scale", factor: 1e5 },
    Transform { kind: "scale", factor: 1e-6 },
    Transform { kind: "shift", factor: -0.5 },
    Transform { kind: "negate", factor: -1.0 },
];

fn draw(session: &mut Session, slot: usize, transform: Transform) -> Result<bool, Stop> {
    let seed = secret_seed()?;
    let body = json!({
        "op": "draw", "slot": slot, "seed": seed, "transform": {"kind": transform.kind, "factor": transform.factor},
    });
    let frame = session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    let yes = |key: &str| frame.body[key].as_bool().unwrap_or(true);
    Ok(yes("finite") && yes("applicable"))
}

fn eager(session: &mut Session, slots: &[usize]) -> Result<(Vec<f64>, Option<f64>), Stop> {
    let frame = session
        .host
        .ask(&json!({"op": "eager", "slots": slots}), &[], MINUTES)
        .map_err(|e| task_error(&session.fixed.task, e))?;
    let list = |key: &str| -> Vec<f64> {
        frame.body[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect()
    };
    let times = list("time_us");
    if times.len() != slots.len() {
        return Err(Error::Fault("the reference host gave no time for a sample".into()).into());
    }
    Ok((times, timing::median(&list("wall_us"))))
}

/// Runs the candidate once on a slot; microseconds.
fn sample(session: &mut Session, run: &mut Run, slot: usize) -> Result<f64, Stop> {
    run.samples += 1;
    let seed = secret_seed()?;
    if !run.cpu {
        let (sample, _) = run.runner.run(slot, seed, run.limit).map_err(|e| run.failure(e))?;
        run.clocks.0 += sample.time_us;
        run.clocks.1 += sample.wall_us;
        return Ok(sample.time_us);
    }
    session
        .host
        .ask(&json!({"op": "poison", "seed": seed}), &[], MINUTES)
        .map_err(|e| task_error(&session.fixed.task, e))?;
    session.host.freeze();
    let ended = clocked(run, |run| run.runner.run(slot, seed, run.limit).map(|_| ()));
    session.host.thaw();
    Ok((ended? - run.null_us).max(0.1))
}

/// Wall microseconds of a request to a stopped CPU runner, until every thread of it has stopped again: what still
/// works after the answer works on frozen time.
fn clocked(run: &mut Run, work: impl FnOnce(&mut Run) -> Result<(), RunnerError>) -> Result<f64, Stop> {
    let start = Instant::now();
    let ended = work(run).and_then(|()| run.runner.stop(RUNNER));
    let wall = start.elapsed().as_secs_f64() * 1e6;
    ended.map_err(|e| run.failure(e))?;
    Ok(wall)
}

fn compare(session: &mut Session, slot: usize, run: &Run, what: &str) -> Result<(), Stop> {
    let body = json!({"op": "compare", "slot": slot, "tolerance": session.fixed.judge.options.tolerance});
    let frame = session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    if frame.body["match"].as_bool() == Some(true) {
        return Ok(());
    }
    let detail = &frame.body["detail"];
    let rule = detail["rule"].as_str().unwrap_or("?");
    let figure = |key: &str| detail[key].as_f64().map_or_else(|| "?".to_owned(), |x| format!("{x:.3e}"));
    let place = if detail["index"].is_array() { format!(" at {}", detail["index"]) } else { String::new() };
    let message = match rule {
        "nan" => {
            format!("output {} has NaN or infinity where the reference has not{place}, on {what}", detail["output"])
        }
        "input" => format!("an input was changed in a way that the reference does not change it, on {what}"),
        "state" => format!(
            "a parameter or buffer of the state dict was changed as the reference does not change it, on {what}"
        ),
        "exact" => {
            format!("output {} differs from the reference{place}, on {what}; it has to be equal", detail["output"])
        }
        _ => format!(
            "output {} is off by {} where {} is allowed (rule {rule}{place}), on {what}",
            detail["output"],
            figure("value"),
            figure("limit")
        ),
    };
    let mut found = reason("mismatch", message);
    if run.names.len() == 1 {
        found.launch = Some(run.names[0].0.clone());
    }
    Err(Stop::Candidate(Box::new(found)))
}

fn correctness(
    session: &mut Session,
    recording: &Recording,
    run: &mut Run,
    budget: &Budget,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    if run.cpu {
        let mut nulls = Vec::new();
        for _ in 0..15 {
            nulls.push(clocked(run, |run| run.runner.null(1, run.limit).map(|_| ()))?);
        }
        run.null_us = timing::median(&nulls).unwrap_or(0.0);
    }
    for set in 0..budget.parameter_sets {
        if set > 0 {
            session.select(set)?;
            let constants = &recording.constants[set];
            if let Some(fd) = &constants.fd {
                let written = if run.cpu {
                    write_constants(&recording.plan, &run.loaded.constants, fd.as_fd(), &constants.items)
                } else {
                    run.runner.constants(fd.as_fd(), &constants.items, RUNNER)
                };
                written.map_err(|e| run.failure(e))?;
            }
        }
        let plain = std::iter::repeat_n(PLAIN, budget.inputs);
        let scaled: &[Transform] = if budget.scaled { &SCALED } else { &SCALED[2..3] };
        for (i, transform) in plain.chain(scaled.iter().copied()).enumerate() {
            let usable = draw(session, 0, transform)?;
            if !usable && transform.kind != "none" {
                continue;
            }
            let (times, _) = eager(session, &[0])?;
            session.eager_us = times[0];
            run.limit = limit(session.eager_us);
            sample(session, run, 0)?;
            let what = match transform.kind {
                "none" => format!("input set {} of parameter set {}", i + 1, set + 1),
                "scale" => format!("inputs scaled by {:e}", transform.factor),
                "shift" => format!("inputs shifted by {}", transform.factor),
                _ => "negated inputs".to_owned(),
            };
            compare(session, 0, run, &what)?;
            evidence.compared += 1;
        }
    }
    Ok(())
}

// ---------------------------------------------------------------- measure

fn measure(session: &mut Session, run: &mut Run, budget: &Budget, evidence: &mut Evidence) -> Result<(), Stop> {
    let mut random = Random::new(secret_seed()?);
    let start = Instant::now();
    evidence.measurement = Some(Measurement::Exclusive);
    let mut pids = vec![run.runner.pid(), session.host.pid.unsigned_abs(), std::process::id()];
    pids.extend(session.helper.iter().map(|h| h.pid.unsigned_abs()));
    let load = run.cpu.then(|| load::Load::begin(&pids));
    let mut walls = Vec::new();
    let mut block = 0;
    loop {
        if !run.cpu {
            // No global of the device carries anything from one block into the next.
            run.runner.reload(RUNNER).map_err(|e| run.failure(e))?;
        }
        measure_block(session, run, budget, block, &mut random, evidence, &mut walls)?;
        block += 1;
        if block >= budget.blocks {
            let found = timing::speedup(&evidence.eager_us, &evidence.candidate_us, 3);
            let wide = found.is_none_or(|x| timing::relative_width(&x) > budget.width);
            let over = start.elapsed().as_secs_f64() > budget.seconds;
            if !wide || over {
                if wide && let Some(x) = found {
                    evidence.notes.push(format!(
                        "the interval is wide: {:.1} % after {} samples",
                        100.0 * timing::relative_width(&x),
                        evidence.candidate_us.len()
                    ));
                }
                break;
            }
        }
    }
    if let Some(share) = load.and_then(|l| l.foreign(&pids))
        && share > load::TOLERATED
    {
        evidence.measurement = Some(Measurement::Shared);
        evidence.notes.push(format!(
            "other programs used {:.0} % of the processors while this was measured: the figures are not to be trusted",
            100.0 * share
        ));
    }
    if run.cpu {
        let fast = timing::median(&evidence.candidate_us).is_some_and(|t| t < 3.0 * run.null_us);
        if fast {
            evidence.notes.push(format!(
                "the candidate takes less than three round trips of the clock ({:.0} us): too little work for a verdict on speed here",
                run.null_us
            ));
        }
    } else {
        cross_check(run, evidence)?;
    }
    evidence.eager_wall = timing::median(&walls);
    let baseline = &evidence.eager_us;
    evidence.speedup.eager = timing::speedup(baseline, &evidence.candidate_us, 4);
    Ok(())
}

/// Device events live in a context with hostile device code: their sum is held against the host's clock, less what
/// as many empty plans take on it. A gap is a reason to look, since work of the driver shows in it too.
fn cross_check(run: &mut Run, evidence: &mut Evidence) -> Result<(), Stop> {
    let (nulls, _) = run.runner.null(10, RUNNER).map_err(|e| run.failure(e))?;
    let null = timing::median(&nulls.wall_us).unwrap_or(0.0);
    let host = run.clocks.1 - null * run.samples as f64;
    if host > 1.5 * run.clocks.0 + 50.0 * run.samples as f64 {
        evidence.audit.push(format!(
            "the host's clock saw {host:.0} us where device events sum to {:.0} us over {} runs",
            run.clocks.0, run.samples
        ));
    }
    Ok(())
}

fn measure_block(
    session: &mut Session,
    run: &mut Run,
    budget: &Budget,
    block: usize,
    random: &mut Random,
    evidence: &mut Evidence,
    walls: &mut Vec<f64>,
) -> Result<(), Stop> {
    let mut left = budget.block;
    while left > 0 {
        let count = left.min(session.slots);
        left -= count;
        let slots: Vec<usize> = (0..count).collect();
        for &slot in &slots {
            draw(session, slot, PLAIN)?;
        }
        // The order alternates, so that neither side always has the warmer machine.
        let eager_first = (block + left).is_multiple_of(2);
        let mut baseline = None;
        if eager_first {
            baseline = Some(eager(session, &slots)?);
        }
        let mut chosen = Vec::new();
        for &slot in &slots {
            evidence.candidate_us.push(sample(session, run, slot)?);
            if random.below(4) == 0 {
                if eager_first || count > 1 {
                    compare(session, slot, run, "a timed input set")?;
                    evidence.compared += 1;
                } else {
                    chosen.push(slot);
                }
            }
        }
        let (times, wall) = match baseline {
            Some(done) => done,
            None => eager(session, &slots)?,
        };
        for slot in chosen {
            compare(session, slot, run, "a timed input set")?;
            evidence.compared += 1;
        }
        evidence.eager_us.extend(times);
        walls.extend(wall);
    }
    Ok(())
}

/// Measures `torch.compile`, or takes it from the cache scaled by eager's drift.
fn against_compile(session: &mut Session, evidence: &mut Evidence) -> Result<(), Stop> {
    let Some(eager_now) = timing::median(&evidence.eager_us) else { return Ok(()) };
    let mut fresh = false;
    if session.baseline.is_none() {
        session.baseline = Some(measure_compile(session)?);
        fresh = true;
    }
    loop {
        let Some(baseline) = session.baseline.clone() else { return Ok(()) };
        if baseline.compile_us.is_empty() {
            let why = baseline.compile_error.unwrap_or_else(|| "unknown".into());
            evidence.notes.push(format!("torch.compile has no baseline here: {why}; reward 3 can't be given"));
            return Ok(());
        }
        let drift = eager_now / baseline.eager_at_compile_us;
        let scaled: Vec<f64> = baseline.compile_us.iter().map(|x| x * drift).collect();
        let found = timing::speedup(&scaled, &evidence.candidate_us, 5);
        let near = found.as_ref().is_some_and(|x| (x.median / FASTER - 1.0).abs() < 0.1);
        if near && !fresh {
            session.baseline = Some(measure_compile(session)?);
            fresh = true;
            continue;
        }
        evidence.compile = timing::interval(&scaled, 6);
        evidence.speedup.compile = found;
        return Ok(());
    }
}

/// Compiles the reference (the host keeps it), so that only its timing needs the card for itself.
fn prepare_compile(session: &mut Session) -> Result<(), Stop> {
    draw(session, 0, PLAIN)?;
    match session.host.ask(&json!({"op": "compile", "slots": [0]}), &[], MINUTES) {
        // A failure is told when its times are asked for.
        Ok(_) | Err(process::Error::Refused(_)) => Ok(()),
        Err(other) => Err(task_error(&session.fixed.task, other).into()),
    }
}

fn measure_compile(session: &mut Session) -> Result<Baseline, Stop> {
    // A slot may be timed more than once: what `torch.compile` makes keeps no memo.
    let slots: Vec<usize> = (0..12).map(|i| i % session.slots).collect();
    for slot in 0..session.slots {
        draw(session, slot, PLAIN)?;
    }
    let mut compiled = Baseline::default();
    match session.host.ask(&json!({"op": "compile", "slots": slots}), &[], MINUTES) {
        Ok(frame) => {
            compiled.compile_us =
                frame.body["time_us"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        }
        Err(process::Error::Refused(refused)) => compiled.compile_error = Some(refused.message),
        Err(other) => return Err(task_error(&session.fixed.task, other).into()),
    }
    let mut around = Vec::new();
    around.extend(eager(session, &slots)?.0);
    compiled.eager_us = timing::median(&around).unwrap_or(0.0);
    compiled.eager_at_compile_us = compiled.eager_us;
    session.fixed.judge.cache.put("baseline", &session.fixed.digest, &compiled);
    Ok(compiled)
}

// ---------------------------------------------------------------- evidence

fn profile(run: &mut Run, plan: &Plan, evidence: &mut Evidence) {
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
                line: node.line.clone(),
            }
        })
        .collect();
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
fn sanity(session: &mut Session, plan: &Plan, evidence: &mut Evidence) -> Result<(), Stop> {
    let Some(time) = timing::median(&evidence.candidate_us) else { return Ok(()) };
    if session.fixed.judge.options.device == Device::Cuda
        && let Ok(frame) = session.host.ask(&json!({"op": "floor"}), &[], MINUTES)
        && let (Some(rate), Some(l2)) = (frame.body["copy_gbps"].as_f64(), frame.body["l2_bytes"].as_f64())
    {
        let outputs: BTreeSet<usize> = plan.outputs.iter().map(|o| o.buffer).collect();
        let bytes: u64 = outputs.iter().map(|o| plan.buffers[*o].bytes).sum();
        let floor = (bytes as f64 - l2).max(0.0) / (rate * 1e3);
        if time < floor {
            return Err(incorrect(
                "impossible",
                format!("{time:.1} us is less than the {floor:.1} us that writing its outputs takes on this card"),
            ));
        }
        if floor > 0.0 && time < 1.1 * floor {
            evidence.audit.push("within 10 % of the time that writing the outputs takes".into());
        }
    }
    if evidence.speedup.eager.is_some_and(|x| x.median > 10.0) {
        evidence.audit.push("more than ten times as fast as eager".into());
    }
    Ok(())
}
