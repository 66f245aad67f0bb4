//! One evaluation: record, build, admit, run, compare, measure, reward.
//!
//! Knows the order of the steps and whose fault each failure is. Must not know how a process does its part.
//! A candidate's failure is a verdict of -1 with the line or launch; a task's is a request error; all else is
//! a fault of the judge.

pub(super) mod ahead;
mod constants;
mod correct;
mod evidence;
mod images;
mod measure;
mod record;
pub(super) mod remember;
mod run;

use std::sync::Arc;
use std::time::Instant;

use super::cache::digest;
use super::session::{Error, Fixed, Session, secret_seed};
use super::timing::Random;
use super::verdict::{Against, Grade, LaunchEvidence, Measurement, PROCEDURE, Reason, Times, Verdict};
use super::{Candidate, Device, Effort, build, timing};
use evidence::Evidence;
use record::Recording;
use remember::Entry;

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

/// Caps of one evaluation.
struct Budget {
    inputs: usize,
    parameter_sets: usize,
    scaled: bool,
    blocks: usize,
    block: usize,
    seconds: f64,
    width: f64,
    /// Timed sets are compared too, by chance.
    compare: bool,
    compile: bool,
}

impl Budget {
    fn of(session: &Session, effort: Effort) -> Self {
        let options = &session.fixed.judge.options;
        let stateful = !session.fixed.state.is_empty();
        let cpu = options.device == Device::Cpu;
        match effort {
            Effort::Screen => Self {
                inputs: if cpu { 2 } else { 1 },
                parameter_sets: 1,
                scaled: false,
                blocks: if cpu { 2 } else { 1 },
                block: if cpu { 4 } else { 10 },
                // Beside others' work on a card an interval doesn't become narrow.
                seconds: if cpu { 1.5 } else { 0.0 },
                width: 0.02,
                compare: cpu,
                compile: false,
            },
            Effort::Verify | Effort::Final => Self {
                inputs: options.inputs,
                parameter_sets: if stateful { 2 } else { 1 },
                scaled: true,
                blocks: if cpu { 8 } else { 3 },
                block: if cpu { 4 } else { 10 },
                seconds: options.measure_seconds.unwrap_or(if cpu { 10.0 } else { 4.0 }),
                width: 0.01,
                compare: true,
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
    let recording = evidence.time("record", |e| record::record(fixed, candidate, e))?;
    let plan_text = serde_json::to_vec(&recording.plan).unwrap_or_default();
    evidence.digests.insert("plan".into(), digest([plan_text.as_slice()]));
    record::check_plan(fixed, &recording)?;
    let images = evidence.time("build", |e| images::build_all(fixed, candidate, &recording.plan, e))?;
    Ok((recording, images))
}

/// What a candidate comes to before anything runs: for exports.
pub(super) fn artifacts(fixed: &Fixed, candidate: &Candidate) -> Result<super::Artifacts, Error> {
    let _turn = fixed.judge.quietly();
    let ready = ready(fixed, candidate);
    match ready.outcome {
        Ok((recording, images)) => {
            Ok(super::Artifacts { plan: recording.plan, images, digests: ready.evidence.digests })
        }
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Candidate(reason)) => Err(Error::request(&reason.code, reason.message)),
    }
}

/// What a build comes to: the steps of the plan, or why there is none.
pub(super) fn compile(fixed: &Fixed, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Error> {
    let _turn = fixed.judge.quietly();
    match ready(fixed, candidate).outcome {
        Ok((recording, _)) => Ok(Ok(evidence::steps(&recording.plan))),
        Err(Stop::Candidate(reason)) => Ok(Err(*reason)),
        Err(Stop::Error(error)) => Err(error),
    }
}

/// Judges `candidate` on the open task.
pub(super) fn evaluate(session: &mut Session, candidate: &Candidate, effort: Effort) -> Result<Verdict, Error> {
    let start = Instant::now();
    ahead::prepare(session);
    session.prepare()?;
    let prepare = start.elapsed().as_secs_f64();
    let mut ready = {
        let fixed = Arc::clone(&session.fixed);
        let _turn = fixed.judge.quietly();
        ready(&fixed, candidate)
    };
    ready.evidence.phases.insert("prepare".into(), prepare);
    ready.seconds += prepare;
    finish(session, ready, effort, false)
}

/// Runs, compares and measures what `ready` made, unless a verdict on the same is remembered. With `more` to come, the
/// next one's runner is started meanwhile.
pub(super) fn finish(session: &mut Session, ready: Ready, effort: Effort, more: bool) -> Result<Verdict, Error> {
    let start = Instant::now();
    let Ready { outcome, mut evidence, seconds } = ready;
    let (recording, images) = match outcome {
        Ok(made) => made,
        Err(stop) => return ended(session, Err(stop), evidence, seconds),
    };
    let fixed = Arc::clone(&session.fixed);
    let plan = &recording.plan;
    let known = fixed.judge.options.remembered.map(|share| (share, remember::key(&fixed, &recording, &images, effort)));
    let mut stored = None;
    if let Some((share, key)) = &known
        && let Some(entry) = fixed.judge.cache.get::<Entry>(remember::KIND, key)
    {
        if !remember::again(*share, &mut Random::new(secret_seed()?)) {
            let now = ended(session, Ok(()), evidence, seconds + start.elapsed().as_secs_f64())?;
            return Ok(entry.told(plan, now));
        }
        stored = Some(entry);
    }
    let done = steps(session, &recording, &images, effort, more, &mut evidence);
    let fresh = ended(session, done, evidence, seconds + start.elapsed().as_secs_f64())?;
    let Some((_, key)) = known else { return Ok(fresh) };
    let (verdict, keep) = match stored {
        None => {
            let keep = fresh.counts();
            (fresh, keep)
        }
        Some(entry) => entry.against(plan, fresh),
    };
    if keep {
        fixed.judge.cache.put(remember::KIND, &key, &Entry::new(&verdict, plan));
    }
    Ok(verdict)
}

/// The verdict on an evaluation that ended so.
fn ended(session: &Session, done: Result<(), Stop>, mut evidence: Evidence, seconds: f64) -> Result<Verdict, Error> {
    evidence.phases.insert("total".into(), seconds);
    let failure = match done {
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
    more: bool,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    let budget = Budget::of(session, effort);
    // On the CPU everything that runs is a measurement's neighbour; on a card only measurement is exclusive.
    let judge = Arc::clone(&session.fixed.judge);
    let cpu = judge.options.device == Device::Cpu;
    let mut held = if cpu { judge.slice.hold() } else { judge.slice.share() };
    let mut run = evidence.time("load", |e| run::load_plan(session, recording, images, more, e))?;
    evidence.time("correct", |e| correct::correctness(session, recording, &mut run, &budget, e))?;
    if effort == Effort::Verify {
        return constants::unchanged(session, recording, &mut run);
    }
    // A screening only ranks a sweep; it does not empty the device for that.
    if !cpu && effort == Effort::Final {
        drop(held);
        if budget.compile && session.baseline.is_none() {
            let _beside = judge.slice.pausable(session.host.pid);
            evidence.time("compile", |_| measure::prepare_compile(session))?;
        }
        held = evidence.time("wait", |_| judge.slice.hold());
    }
    // From here on other processes wait too: on the CPU only now, so that what is wrong is found beside their work.
    if (cpu || effort == Effort::Final) && !evidence.time("wait", |_| held.alone()) {
        evidence.shared("another kernelfleet did not give the device free for a long time and worked meanwhile");
    }
    if !cpu && effort == Effort::Final {
        evidence.time("wait", |e| measure::settle(&mut run, e))?;
    }
    let start = Instant::now();
    // A screening doesn't hold the device, so it stops the next runner itself.
    if let Some(spare) = session.spare.as_ref().filter(|_| effort == Effort::Screen) {
        spare.freeze();
    }
    let measured = evidence.time("measure", |e| measure::measure(session, &mut run, &budget, e));
    if let Some(spare) = session.spare.as_ref().filter(|_| effort == Effort::Screen) {
        spare.thaw();
    }
    measured?;
    constants::unchanged(session, recording, &mut run)?;
    if !cpu && effort == Effort::Screen {
        evidence.keep_undisturbed();
        evidence.measurement = Some(Measurement::Shared);
        evidence.notes.push("a screening beside other work: for ranking only".into());
    }
    if budget.compile {
        evidence.time("compile", |e| measure::against_compile(session, e))?;
    }
    evidence.time("profile", |e| evidence::profile(&mut run, &recording.plan, e));
    evidence.phases.insert("held".into(), start.elapsed().as_secs_f64());
    drop(held);
    drop(run);
    evidence::sanity(session, &recording.plan, evidence)
}
