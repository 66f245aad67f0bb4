//! One evaluation: record, build, admit, run, compare, measure, reward.
//!
//! Knows the order of the steps and whose fault each failure is. Must not know how a process does its part.
//! A candidate's failure is a verdict of -1 with the line or launch; a task's is a request error; all else is
//! a fault of the judge.

pub(super) mod ahead;
mod constants;
mod correct;
pub(super) mod counted;
mod evidence;
mod images;
mod measure;
mod process;
mod record;
pub(super) mod remember;
mod run;
mod subject;

use std::sync::Arc;
use std::time::Instant;

use super::cache::digest;
use super::device::EXPOSED;
use super::session::{Error, Fixed, Session, secret_seed};
use super::timing::Random;
use super::verdict::{Against, Grade, LaunchEvidence, Measurement, PROCEDURE, Reason, Times, Verdict};
use super::{Candidate, Device, Effort, PathChoice, build, timing};
use evidence::Evidence;
use record::Recording;
use remember::{Entry, Places};
use subject::{Planned, Subject};

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
    /// With so many the interval may stay wide, or have a threshold in it (`timing::settled`).
    samples: usize,
    /// Timed sets are compared too, by chance.
    compare: bool,
    /// The device is held meanwhile: clocks must agree, and a baseline that was taken so counts.
    alone: bool,
    compile: bool,
}

impl Budget {
    fn of(session: &Session, effort: Effort, summed: bool) -> Self {
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
                samples: usize::MAX,
                compare: cpu,
                alone: cpu,
                compile: false,
            },
            Effort::Verify | Effort::Final => Self {
                inputs: options.inputs,
                parameter_sets: if stateful { 2 } else { 1 },
                scaled: true,
                // Where a block is one figure, more of them make an interval.
                blocks: if cpu || summed { 8 } else { 3 },
                block: if cpu { 4 } else { 10 },
                seconds: options.measure_seconds.unwrap_or(if cpu { 10.0 } else { 4.0 }),
                width: 0.01,
                samples: if cpu || summed { usize::MAX } else { 300 },
                compare: true,
                alone: true,
                compile: options.compile,
            },
        }
    }
}

/// A candidate that can be run.
enum Made {
    /// Recorded and built.
    Plan(Recording, Vec<build::Built>),
    /// To run as it is; its extensions lie in the cache.
    Process(Candidate),
}

/// A candidate that is recorded and built, or the reason why not, with what that took.
pub(super) struct Ready {
    outcome: Result<Made, Stop>,
    grade: Grade,
    evidence: Evidence,
    seconds: f64,
}

/// Records, checks and builds a candidate: CPU work that needs no reference host and no slice.
pub(super) fn ready(fixed: &Fixed, candidate: &Candidate) -> Ready {
    let start = Instant::now();
    let mut evidence = Evidence { told: fixed.judge.phases(), ..Evidence::default() };
    let files: Vec<u8> = serde_json::to_vec(&candidate.files).unwrap_or_default();
    evidence.digests.insert("task".into(), fixed.digest.clone());
    evidence.digests.insert("candidate".into(), digest([files.as_slice()]));
    let options = &fixed.judge.options;
    let by_process = match options.path {
        PathChoice::Plan => false,
        PathChoice::Process => true,
        PathChoice::Auto => candidate.is_extension(),
    };
    let by_plan = options.device == Device::Cuda && !by_process;
    let exposed = fixed.judge.device.exposed;
    let grade = if by_plan && !exposed { Grade::Enforced } else { Grade::Observed };
    if by_plan && exposed {
        evidence.notes.push(EXPOSED.to_owned());
    }
    let outcome = if by_process {
        let made = evidence.time("build", |e| process::build(fixed, candidate, e));
        made.map(|()| Made::Process(candidate.clone()))
    } else {
        ready_steps(fixed, candidate, &mut evidence)
    };
    Ready { outcome, grade, evidence, seconds: start.elapsed().as_secs_f64() }
}

fn ready_steps(fixed: &Fixed, candidate: &Candidate, evidence: &mut Evidence) -> Result<Made, Stop> {
    let recording = evidence.time("record", |e| record::record(fixed, candidate, e)).map_err(other_path)?;
    let plan_text = serde_json::to_vec(&recording.plan).unwrap_or_default();
    evidence.digests.insert("plan".into(), digest([plan_text.as_slice()]));
    record::check_plan(fixed, &recording)?;
    let images = evidence.time("build", |e| images::build_all(fixed, candidate, &recording.plan, e))?;
    Ok(Made::Plan(recording, images))
}

/// What no plan can say may be judged as it is: the refusal says how.
fn other_path(stop: Stop) -> Stop {
    const HOW: &str = "`kernelfleet judge --path process` judges it as it is, with grade `observed`";
    match stop {
        Stop::Candidate(mut reason) if reason.code == "not_expressible" && reason.message.contains("process path") => {
            reason.hint = Some(reason.hint.map_or_else(|| HOW.to_owned(), |hint| format!("{hint}; {HOW}")));
            Stop::Candidate(reason)
        }
        other => other,
    }
}

/// What a candidate comes to before anything runs: for exports.
pub(super) fn artifacts(fixed: &Fixed, candidate: &Candidate) -> Result<super::Artifacts, Error> {
    let _turn = fixed.judge.quietly();
    let ready = ready(fixed, candidate);
    match ready.outcome {
        Ok(Made::Plan(recording, images)) => {
            Ok(super::Artifacts { plan: recording.plan, images, digests: ready.evidence.digests })
        }
        Ok(Made::Process(_)) => Err(Error::request(
            "not_a_plan",
            "a candidate that is judged in a process of its own is a package already: nothing is left to export",
        )),
        Err(Stop::Error(error)) => Err(error),
        Err(Stop::Candidate(reason)) => Err(Error::request(&reason.code, reason.message)),
    }
}

/// What a build comes to: the steps of the plan, or why there is none.
pub(super) fn compile(fixed: &Fixed, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Error> {
    let _turn = fixed.judge.quietly();
    match ready(fixed, candidate).outcome {
        Ok(Made::Plan(recording, _)) => Ok(Ok(evidence::steps(&recording.plan))),
        Ok(Made::Process(_)) => Ok(Ok(Vec::new())),
        Err(Stop::Candidate(reason)) => Ok(Err(*reason)),
        Err(Stop::Error(error)) => Err(error),
    }
}

/// Judges `candidate` on the open task.
pub(super) fn evaluate(session: &mut Session, candidate: &Candidate, effort: Effort) -> Result<Verdict, Error> {
    let start = Instant::now();
    session.fixed.judge.phases().tell("prepare");
    ahead::prepare(session);
    session.meet(effort == Effort::Final)?;
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
    let Ready { outcome, grade, mut evidence, seconds } = ready;
    let made = match outcome {
        Ok(made) => made,
        Err(stop) => return ended(session, Err(stop), grade, evidence, seconds),
    };
    let fixed = Arc::clone(&session.fixed);
    let known = fixed.judge.options.remembered.map(|share| (share, made.key(&fixed, effort)));
    let places = made.places();
    let mut stored = None;
    if let Some((share, key)) = &known
        && let Some(entry) = fixed.judge.cache.get::<Entry>(remember::KIND, key)
    {
        if !remember::again(*share, &mut Random::new(secret_seed()?)) {
            let now = ended(session, Ok(()), grade, evidence, seconds + start.elapsed().as_secs_f64())?;
            return Ok(entry.told(&places, now));
        }
        stored = Some(entry);
    }
    // Only a plan takes the runner that another candidate has left.
    let worn = session.worn.is_some() && matches!(made, Made::Plan(..));
    let before = worn.then(|| evidence.clone());
    let began = Instant::now();
    let mut done = steps(session, &made, effort, more, &mut evidence);
    if let Some(before) = before.filter(|_| doubtful(&done)) {
        let first = std::mem::replace(&mut done, Ok(()));
        evidence = before;
        evidence.phases.insert("again".into(), began.elapsed().as_secs_f64());
        done = steps(session, &made, effort, more, &mut evidence);
        // What was found first and not again may be another candidate's doing, or this one's by chance: a person may look.
        if let (Err(Stop::Candidate(reason)), Ok(())) = (first, &done) {
            evidence.audit.push(format!(
                "refused after another candidate of its batch ({}: {}), accepted in a process of its own",
                reason.code, reason.message
            ));
        }
    }
    // Against a reference that found no memory for its graph a speedup says too much: nothing is to come of it later.
    let short = evidence.short;
    let fresh = ended(session, done, grade, evidence, seconds + start.elapsed().as_secs_f64())?;
    let Some((_, key)) = known else { return Ok(fresh) };
    let (verdict, keep) = match stored {
        None => {
            let keep = fresh.counts();
            (fresh, keep)
        }
        Some(entry) => entry.against(&places, fresh),
    };
    // Nor is a verdict from a context that another candidate had used told to one that asks alone.
    if keep && !short && !worn {
        fixed.judge.cache.put(remember::KIND, &key, &Entry::new(&verdict, &places));
    }
    Ok(verdict)
}

impl Made {
    /// The name under which a verdict on it is remembered.
    fn key(&self, fixed: &Fixed, effort: Effort) -> String {
        match self {
            Self::Plan(recording, images) => remember::key(fixed, recording, images, effort),
            Self::Process(candidate) => remember::key_of_files(fixed, candidate, effort),
        }
    }

    /// Where each step was recorded; nothing where there are no steps.
    fn places(&self) -> Places {
        match self {
            Self::Plan(recording, _) => Places::of(&recording.plan),
            Self::Process(_) => Places::default(),
        }
    }

    /// Gives it to what runs it.
    fn start<'a>(
        &'a self,
        session: &mut Session,
        more: bool,
        evidence: &mut Evidence,
    ) -> Result<Box<dyn Subject + 'a>, Stop> {
        Ok(match self {
            Self::Plan(recording, images) => {
                Box::new(Planned { run: run::load_plan(session, recording, images, more, evidence)?, recording })
            }
            Self::Process(candidate) => Box::new(process::Process::new(session, candidate)?),
        })
    }
}

/// The verdict on an evaluation that ended so.
fn ended(
    session: &Session,
    done: Result<(), Stop>,
    grade: Grade,
    mut evidence: Evidence,
    seconds: f64,
) -> Result<Verdict, Error> {
    evidence.phases.insert("total".into(), seconds);
    let failure = match done {
        Ok(()) => None,
        // A runner is told by its library helper that it is gone, and not why.
        Err(Stop::Candidate(_)) if session.orphaned() => {
            return Err(Error::Fault("the reference host's zygote ended during the evaluation".into()));
        }
        Err(Stop::Candidate(reason)) => Some(*reason),
        Err(Stop::Error(error)) => return Err(error),
    };
    Ok(verdict(session, grade, evidence, failure))
}

fn verdict(session: &Session, grade: Grade, evidence: Evidence, failure: Option<Reason>) -> Verdict {
    let judge = &session.fixed.judge;
    let options = &judge.options;
    let correct = failure.is_none();
    let (eager, compile) = (evidence.speedup.eager, evidence.speedup.compile);
    Verdict {
        reward: if correct { timing::reward(eager.as_ref(), compile.as_ref()) } else { -1 },
        correct,
        reason: failure,
        grade,
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

/// Whether what came of a candidate in a runner that another one had used may be that one's doing: anything but its verdict.
fn doubtful(done: &Result<(), Stop>) -> bool {
    matches!(done, Err(Stop::Candidate(_) | Stop::Error(Error::Fault(_))))
}

fn steps(session: &mut Session, made: &Made, effort: Effort, more: bool, evidence: &mut Evidence) -> Result<(), Stop> {
    let budget = Budget::of(session, effort, matches!(made, Made::Process(_)));
    // On the CPU everything that runs is a measurement's neighbour; on a card only measurement is exclusive.
    let judge = Arc::clone(&session.fixed.judge);
    let cpu = judge.options.device == Device::Cpu;
    let mut held = if cpu { judge.slice.hold() } else { judge.slice.share() };
    let mut subject = evidence.time("load", |e| made.start(session, more, e))?;
    evidence.time("correct", |e| correct::correctness(session, subject.as_mut(), &budget, &mut held, e))?;
    if effort == Effort::Verify {
        subject.unchanged(session)?;
        if more {
            subject.leave(session, evidence);
        }
        return Ok(());
    }
    // A screening only ranks a sweep; it does not empty the device for that.
    if !cpu && effort == Effort::Final {
        evidence.time("profile", |_| subject.ahead(session))?;
        drop(held);
        if budget.compile && session.baseline.is_none() && !session.compiled {
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
        evidence.time("wait", |e| subject.settle(session, e))?;
    }
    let start = Instant::now();
    // A screening doesn't hold the device, so it stops the next runner itself.
    if let Some(spare) = session.spare.as_ref().filter(|_| effort == Effort::Screen) {
        spare.freeze();
    }
    let measured = evidence.time("measure", |e| measure::measure(session, subject.as_mut(), &budget, e));
    if let Some(spare) = session.spare.as_ref().filter(|_| effort == Effort::Screen) {
        spare.thaw();
    }
    measured?;
    subject.unchanged(session)?;
    if !cpu && effort == Effort::Screen {
        evidence.keep_undisturbed();
        evidence.measurement = Some(Measurement::Shared);
        evidence.notes.push("a screening beside other work: for ranking only".into());
    }
    let mut spent = start.elapsed();
    if budget.compile && !cpu && !session.compiled && measure::undecided(session, subject.summed(), evidence) {
        // Seconds of compilation, for which nobody else is to wait.
        drop(held);
        {
            let _beside = judge.slice.pausable(session.host.pid);
            evidence.time("compile", |_| measure::prepare_compile(session))?;
        }
        held = evidence.time("wait", |_| judge.slice.hold());
        if !evidence.time("wait", |_| held.alone()) {
            evidence.shared("another kernelfleet did not give the device free while torch.compile was measured");
        }
        evidence.time("wait", |e| subject.settle(session, e))?;
    }
    let start = Instant::now();
    if budget.compile {
        evidence.time("compile", |e| measure::against_compile(session, subject.summed(), budget.seconds / 2.0, e))?;
    }
    evidence.time("profile", |e| subject.profile(e));
    spent += start.elapsed();
    evidence.phases.insert("held".into(), spent.as_secs_f64());
    drop(held);
    let output_bytes = subject.output_bytes();
    evidence::sanity(session, output_bytes, evidence)?;
    if more {
        subject.leave(session, evidence);
    }
    Ok(())
}
