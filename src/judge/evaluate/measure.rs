//! Measurement: candidate and baselines in turns on the same inputs.
//!
//! Knows the order of blocks and when to stop. Must not know how a process takes a time.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::correct::{PLAIN, compare, draw, eager};
use super::evidence::Evidence;
use super::run::{RUNNER, Run};
use super::subject::{Subject, on_cpu};
use super::{Budget, Stop};
use crate::judge::cache::{BASELINE, Baseline};
use crate::judge::session::{MINUTES, Session, secret_seed, task_error};
use crate::judge::timing::{self, Random};
use crate::judge::verdict::{FASTER, Interval, Measurement};
use crate::judge::{Device, load, process};

/// An empty plan that takes longer than this on the host's clock, in microseconds, shares the device (whose time
/// slices are about 2 ms).
const IDLE_US: f64 = 700.0;

/// Waits until the device answers empty plans evenly: what a stopped host had put on it is done.
pub(super) fn settle(run: &mut Run, evidence: &mut Evidence) -> Result<(), Stop> {
    let start = Instant::now();
    loop {
        let (nulls, _) = run.runner.null(8, RUNNER).map_err(|e| run.failure(e))?;
        let worst = nulls.wall_us.iter().copied().fold(0.0, f64::max);
        if worst < IDLE_US {
            return Ok(());
        }
        if start.elapsed() > Duration::from_secs(2) {
            evidence.shared(&format!("others used the card before the measurement (an empty plan took {worst:.0} us)"));
            return Ok(());
        }
    }
}

pub(super) fn measure(
    session: &mut Session,
    subject: &mut dyn Subject,
    budget: &Budget,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    let mut random = Random::new(secret_seed()?);
    let start = Instant::now();
    evidence.measurement.get_or_insert(Measurement::Exclusive);
    if session.fixed.judge.device.display {
        evidence.shared("the card drives a display too");
    }
    let mut pids = own(session);
    pids.push(subject.pid());
    let load = on_cpu(session).then(|| load::Load::begin(&pids));
    let mut walls = Vec::new();
    let (mut block, mut looked) = (0, 0);
    loop {
        subject.block(session)?;
        measure_block(session, subject, budget, block, &mut random, evidence, &mut walls)?;
        block += 1;
        let samples = evidence.candidate_us.len();
        let over = start.elapsed().as_secs_f64() > budget.seconds;
        // A look costs more than a block where there are many samples, and one block more changes little then.
        if block >= budget.blocks && (over || samples >= looked + looked / 8) {
            looked = samples;
            let found = timing::speedup(&evidence.eager_us, &evidence.candidate_us, 3);
            let speedups: Vec<Interval> = found.into_iter().chain(over_cached(session, evidence)).collect();
            // Without a figure nothing is settled, whatever the cached baseline is.
            let settled = found.is_some() && timing::settled(&speedups, budget.width, samples >= budget.samples);
            if over || settled {
                if let Some(x) = found.filter(|x| timing::relative_width(x) > budget.width) {
                    evidence.notes.push(format!(
                        "the interval is wide: {:.1} % after {samples} samples",
                        100.0 * timing::relative_width(&x),
                    ));
                }
                break;
            }
        }
    }
    if let Some(share) = load.and_then(|l| l.foreign(&pids))
        && share > load::TOLERATED
    {
        evidence
            .shared(&format!("other programs used {:.0} % of the processors while this was measured", 100.0 * share));
    }
    if let Some(null) = subject.null_us()
        && timing::median(&evidence.candidate_us).is_some_and(|t| t < 3.0 * null)
    {
        evidence.notes.push(format!(
            "the candidate takes less than three round trips of the clock ({null:.0} us): too little work for a verdict on speed here"
        ));
    }
    subject.cross_check(evidence)?;
    evidence.eager_wall = timing::median(&walls);
    let baseline = &evidence.eager_us;
    evidence.speedup.eager = timing::speedup(baseline, &evidence.candidate_us, 4);
    Ok(())
}

/// Processes of a session that work for a measurement, beside its runner.
fn own(session: &Session) -> Vec<u32> {
    let mut pids = vec![session.host.pid.unsigned_abs(), std::process::id()];
    pids.extend(session.helper.iter().map(|h| h.pid.unsigned_abs()));
    pids
}

/// Device events live in a context with hostile device code: their sum is held against the host's clock, less what
/// as many empty plans take on it. A gap is a reason to look, since work of the driver shows in it too.
pub(super) fn cross_check(run: &mut Run, evidence: &mut Evidence) -> Result<(), Stop> {
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
    subject: &mut dyn Subject,
    budget: &Budget,
    block: usize,
    random: &mut Random,
    evidence: &mut Evidence,
    walls: &mut Vec<f64>,
) -> Result<(), Stop> {
    let mut left = budget.block;
    let (mut candidate_us, mut eager_us) = (Vec::new(), Vec::new());
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
            candidate_us.push(subject.sample(session, slot)?);
            if budget.compare && random.below(4) == 0 {
                if eager_first || count > 1 {
                    compare(session, slot, subject, "a timed input set")?;
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
            compare(session, slot, subject, "a timed input set")?;
            evidence.compared += 1;
        }
        eager_us.extend(times);
        walls.extend(wall);
    }
    if subject.summed() {
        // Work can be moved from one call to another, not out of their sum.
        let least = subject.resolution();
        let candidate = (timing::mean(&candidate_us) - subject.taken_off()).max(least);
        (candidate_us, eager_us) = (vec![candidate], vec![timing::mean(&eager_us)]);
    }
    evidence.candidate_us.extend(candidate_us);
    evidence.eager_us.extend(eager_us);
    Ok(())
}

/// Measures `torch.compile`, or takes it from the cache scaled by eager's drift.
pub(super) fn against_compile(session: &mut Session, evidence: &mut Evidence) -> Result<(), Stop> {
    let Some(eager_now) = timing::median(&evidence.eager_us) else { return Ok(()) };
    let mut fresh = false;
    if session.baseline.is_none() {
        session.baseline = Some(measure_compile(session, evidence)?);
        fresh = true;
    }
    loop {
        let Some(baseline) = session.baseline.clone() else { return Ok(()) };
        if baseline.compile_us.is_empty() {
            let why = baseline.compile_error.unwrap_or_else(|| "unknown".into());
            evidence.notes.push(format!("torch.compile has no baseline here: {why}; reward 3 can't be given"));
            return Ok(());
        }
        let scaled = drifted(&baseline, eager_now);
        let found = timing::speedup(&scaled, &evidence.candidate_us, 5);
        if near(found.as_ref()) && !fresh {
            session.baseline = Some(measure_compile(session, evidence)?);
            fresh = true;
            continue;
        }
        evidence.compile = timing::interval(&scaled, 6);
        evidence.speedup.compile = found;
        return Ok(());
    }
}

/// The cached baseline, scaled by eager's drift since.
fn drifted(baseline: &Baseline, eager_now: f64) -> Vec<f64> {
    let drift = eager_now / baseline.eager_at_compile_us;
    baseline.compile_us.iter().map(|x| x * drift).collect()
}

/// Over `torch.compile` by the cached baseline, where there is one.
fn over_cached(session: &Session, evidence: &Evidence) -> Option<Interval> {
    let baseline = session.baseline.as_ref().filter(|b| !b.compile_us.is_empty())?;
    let eager_now = timing::median(&evidence.eager_us)?;
    timing::speedup(&drifted(baseline, eager_now), &evidence.candidate_us, 5)
}

/// So near to where a reward changes that a cached baseline doesn't settle it.
fn near(found: Option<&Interval>) -> bool {
    found.is_some_and(|x| (x.median / FASTER - 1.0).abs() < 0.1)
}

/// Whether the cached baseline leaves open which reward is due, so that it is measured anew.
pub(super) fn undecided(session: &Session, evidence: &Evidence) -> bool {
    near(over_cached(session, evidence).as_ref())
}

/// Compiles the reference (the host keeps it), so that only its timing needs the card for itself.
pub(super) fn prepare_compile(session: &mut Session) -> Result<(), Stop> {
    draw(session, 0, PLAIN)?;
    session.compiled = true;
    match session.host.ask(&json!({"op": "compile", "slots": [0]}), &[], MINUTES) {
        // A failure is told when its times are asked for.
        Ok(_) | Err(process::Error::Refused(_)) => Ok(()),
        Err(other) => Err(task_error(&session.fixed.task, other).into()),
    }
}

fn measure_compile(session: &mut Session, evidence: &mut Evidence) -> Result<Baseline, Stop> {
    let cpu = session.fixed.judge.options.device == Device::Cpu;
    if cpu && session.baseline.is_none() {
        // The compiler's own processes are nobody's foreign load, so they are done before it is looked for.
        prepare_compile(session)?;
    }
    // A slot may be timed more than once: what `torch.compile` makes keeps no memo.
    let slots: Vec<usize> = (0..12).map(|i| i % session.slots).collect();
    for slot in 0..session.slots {
        draw(session, slot, PLAIN)?;
    }
    let mut compiled = Baseline::default();
    let pids = own(session);
    let load = cpu.then(|| load::Load::begin(&pids));
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
    let foreign = load.and_then(|l| l.foreign(&pids)).filter(|share| *share > load::TOLERATED);
    if let Some(share) = foreign {
        evidence.shared(&format!(
            "other programs used {:.0} % of the processors while torch.compile was measured",
            100.0 * share
        ));
    }
    // What failed may have failed for want of room or time, and what others disturbed is no baseline: the next session
    // tries again.
    if compiled.compile_error.is_none() && evidence.measurement != Some(Measurement::Shared) {
        session.fixed.judge.cache.put(BASELINE, &session.fixed.digest, &compiled);
    }
    Ok(compiled)
}
