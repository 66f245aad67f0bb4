//! Measurement: candidate and baselines in turns on the same inputs.
//!
//! Knows the order of blocks and when to stop. Must not know how a process takes a time.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::json;

use super::correct::{PLAIN, Timed, compare, draw, draw_plain, eager};
use super::evidence::Evidence;
use super::run::{RUNNER, Run};
use super::subject::{Subject, on_cpu};
use super::{Budget, Stop, incorrect};
use crate::judge::cache::{BASELINE, Baseline, COMPILED_EACH};
use crate::judge::runner::client::memory_of;
use crate::judge::session::{MINUTES, Session, secret_seed, task_error};
use crate::judge::timing::{self, Random};
use crate::judge::verdict::{FASTER, Interval, Measurement};
use crate::judge::{Device, load, process};

/// An empty plan that takes longer than this on the host's clock, in microseconds, shares the device (whose time
/// slices are about 2 ms).
const IDLE_US: f64 = 700.0;

/// So many blocks with clocks that disagree are left out before it is asked whether that is the rule.
const APART: usize = 3;

/// Below this share of what was measured now, a cached baseline of eager is told of.
const NOTED: f64 = 0.98;

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
    let mut apart = Apart::default();
    loop {
        subject.block(session)?;
        if let Some(why) = measure_block(session, subject, budget, block, &mut random, evidence, &mut walls)? {
            apart.again(block, why)?;
            continue;
        }
        block += 1;
        let samples = evidence.candidate_us.len();
        let over = start.elapsed().as_secs_f64() > budget.seconds;
        // A look costs more than a block where there are many samples, and one block more changes little then.
        if block >= budget.blocks && (over || samples >= looked + looked / 8) {
            looked = samples;
            let found = timing::speedup(&baseline(session, subject, budget, evidence), &evidence.candidate_us, 3);
            let speedups: Vec<Interval> =
                found.into_iter().chain(over_cached(session, subject.summed(), evidence)).collect();
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
    apart.told(evidence);
    subject.cross_check(evidence)?;
    evidence.eager_wall = timing::median(&walls);
    let smaller = baseline(session, subject, budget, evidence);
    evidence.speedup.eager = timing::speedup(&smaller, &evidence.candidate_us, 4);
    if let Some(factor) = evidence.eager_factor.filter(|factor| *factor < NOTED) {
        evidence.notes.push(format!(
            "eager was {:.1} % faster when its baseline was measured: the smaller one counts",
            100.0 * (1.0 - factor)
        ));
    }
    Ok(())
}

/// Eager's samples as they count: where the cached baseline is the smaller one, as much smaller.
fn baseline(session: &Session, subject: &dyn Subject, budget: &Budget, evidence: &mut Evidence) -> Vec<f64> {
    let cached = session.baseline.as_ref().filter(|_| budget.alone);
    let factor = cached.and_then(|b| drift(b, subject.summed(), &evidence.eager_us));
    evidence.eager_factor = factor.map(|drift| drift.recip().min(1.0));
    evidence.eager_us.iter().map(|x| x * evidence.eager_factor.unwrap_or(1.0)).collect()
}

/// Blocks on which two clocks did not agree.
#[derive(Debug, Default)]
struct Apart {
    blocks: usize,
    why: String,
}

impl Apart {
    /// Leaves a block out, which is measured again. That other work on the host disturbs a clock happens now and then; where
    /// it is the rule, the candidate is refused. `agreed`: blocks that count so far.
    fn again(&mut self, agreed: usize, why: String) -> Result<(), Stop> {
        self.blocks += 1;
        self.why = why;
        if self.blocks < APART || self.blocks <= agreed {
            return Ok(());
        }
        let of = self.blocks + agreed;
        let why = format!("two clocks disagree on {} of {of} blocks of samples: {}", self.blocks, self.why);
        Err(incorrect("clocks_disagree", why))
    }

    fn told(self, evidence: &mut Evidence) {
        if self.blocks > 0 {
            let why =
                format!("blocks that were left out, since two clocks disagreed on them: {}: {}", self.blocks, self.why);
            evidence.audit.push(why);
        }
    }
}

/// Why the two clocks of a block of runs disagree, if they do: device events are in a context with hostile device code, so their
/// sum must agree with the host's clock, less what as many empty plans take on it. Microseconds; work of the driver shows in
/// the host's clock too.
pub(super) fn disagreement(device: f64, host: f64, null: f64, runs: u64) -> Option<String> {
    let host = host - null * runs as f64;
    (host > 1.5 * device + 50.0 * runs as f64).then(|| {
        format!("the host's clock saw {host:.0} us where device events sum to {device:.0} us over {runs} runs")
    })
}

/// Processes of a session that work for a measurement, beside its runner.
fn own(session: &Session) -> Vec<u32> {
    let mut pids = vec![session.host.pid.unsigned_abs(), std::process::id()];
    pids.extend(session.helper.iter().map(|h| h.pid.unsigned_abs()));
    pids
}

/// Measures a block; why it isn't counted, where two clocks disagree on it.
fn measure_block(
    session: &mut Session,
    subject: &mut dyn Subject,
    budget: &Budget,
    block: usize,
    random: &mut Random,
    evidence: &mut Evidence,
    walls: &mut Vec<f64>,
) -> Result<Option<String>, Stop> {
    let mut left = budget.block;
    let (mut candidate_us, mut eager_us) = (Vec::new(), Vec::new());
    while left > 0 {
        let count = left.min(session.slots);
        left -= count;
        let slots: Vec<usize> = (0..count).collect();
        draw_plain(session, &slots)?;
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
        let Timed { times, wall, short, .. } = match baseline {
            Some(done) => done,
            None => eager(session, &slots)?,
        };
        for slot in chosen {
            compare(session, slot, subject, "a timed input set")?;
            evidence.compared += 1;
        }
        eager_us.extend(times);
        walls.extend(wall);
        if short {
            evidence.out_of_memory("the reference");
        }
    }
    if budget.alone
        && let Some(why) = subject.apart(timing::mean(&candidate_us))?
    {
        if evidence.measurement != Some(Measurement::Shared) {
            return Ok(Some(why));
        }
        // Beside others' work a clock says what they do, too: a person may look, once.
        if evidence.audit.is_empty() {
            evidence.audit.push(why);
        }
    }
    if subject.summed() {
        // Work can be moved from one call to another, not out of their sum.
        let least = subject.resolution();
        let candidate = (timing::mean(&candidate_us) - subject.taken_off()).max(least);
        (candidate_us, eager_us) = (vec![candidate], vec![timing::mean(&eager_us)]);
    }
    evidence.candidate_us.extend(candidate_us);
    evidence.eager_us.extend(eager_us);
    Ok(None)
}

/// Measures `torch.compile`, or takes it from the cache scaled by eager's drift.
/// `seconds`: most that its samples may take.
pub(super) fn against_compile(
    session: &mut Session,
    summed: bool,
    seconds: f64,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    if evidence.eager_us.is_empty() {
        return Ok(());
    }
    let mut fresh = false;
    if session.baseline.is_none() {
        session.baseline = Some(measure_compile(session, seconds, evidence)?);
        fresh = true;
    }
    loop {
        let Some(baseline) = session.baseline.clone() else { return Ok(()) };
        if baseline.compile_us.is_empty() {
            let why = baseline.compile_error.unwrap_or_else(|| "unknown".into());
            evidence.notes.push(format!("torch.compile has no baseline here: {why}; reward 3 can't be given"));
            return Ok(());
        }
        let scaled = drifted(&baseline, summed, &evidence.eager_us);
        let found = timing::speedup_apart(&scaled, &evidence.candidate_us, 5);
        if near(found.as_ref()) && !fresh {
            session.baseline = Some(measure_compile(session, seconds, evidence)?);
            fresh = true;
            continue;
        }
        evidence.compile = timing::interval(&scaled, 6);
        evidence.speedup.compile = found;
        return Ok(());
    }
}

/// Eager now over eager when the baseline was measured; `summed`: now by means over blocks.
fn drift(baseline: &Baseline, summed: bool, eager_us: &[f64]) -> Option<f64> {
    let then = if summed { baseline.eager_mean_us } else { baseline.eager_us };
    let drift = timing::median(eager_us)? / then;
    (drift.is_finite() && drift > 0.0).then_some(drift)
}

/// The cached baseline, scaled by eager's drift since, but never up: a machine that is slower now, or was made so, makes
/// no baseline larger.
fn drifted(baseline: &Baseline, summed: bool, eager_us: &[f64]) -> Vec<f64> {
    let drift = drift(baseline, summed, eager_us).unwrap_or(1.0).min(1.0);
    baseline.compile_us.iter().map(|x| x * drift).collect()
}

/// Over `torch.compile` by the cached baseline, where there is one.
fn over_cached(session: &Session, summed: bool, evidence: &Evidence) -> Option<Interval> {
    let baseline = session.baseline.as_ref().filter(|b| !b.compile_us.is_empty())?;
    timing::speedup_apart(&drifted(baseline, summed, &evidence.eager_us), &evidence.candidate_us, 5)
}

/// So near to where a reward changes that a cached baseline doesn't settle it.
fn near(found: Option<&Interval>) -> bool {
    found.is_some_and(|x| (x.median / FASTER - 1.0).abs() < 0.1)
}

/// Whether the cached baseline leaves open which reward is due, so that it is measured anew.
pub(super) fn undecided(session: &Session, summed: bool, evidence: &Evidence) -> bool {
    near(over_cached(session, summed, evidence).as_ref())
}

/// Compiles the reference (the host keeps it), so that only its timing needs the card for itself.
pub(super) fn prepare_compile(session: &mut Session) -> Result<(), Stop> {
    draw(session, 0, PLAIN)?;
    session.compiled = true;
    // On the CPU the compiler's libraries are not among what can be kept, and they are what takes time.
    let keeps = session.fixed.judge.options.device == Device::Cuda;
    let fixed = Arc::clone(&session.fixed);
    let (cache, key) = (&fixed.judge.cache, &fixed.digest);
    let kept = keeps.then(|| cache.compiled(key)).flatten();
    let kept = kept.and_then(|bytes| Some((memory_of(c"artifacts", &bytes).ok()?, bytes.len())));
    let mut body = json!({"op": "compile", "slots": [0], "keep": keeps});
    let mut fds = Vec::new();
    if let Some((file, bytes)) = &kept {
        body["artifacts"] = json!(bytes);
        fds.push(file.as_fd());
    }
    match session.host.ask(&body, &fds, MINUTES) {
        Ok(frame) => {
            if let (Some(bytes), Some(fd)) = (frame.body["artifacts"].as_u64(), frame.fds.into_iter().next())
                && bytes <= COMPILED_EACH
            {
                let mut made = vec![0; usize::try_from(bytes).unwrap_or(0)];
                if File::from(fd).read_exact_at(&mut made, 0).is_ok() {
                    cache.put_compiled(key, made);
                }
            }
            Ok(())
        }
        Err(error) => {
            // It may be what was kept that ends a compiler or its process.
            if kept.is_some() && !matches!(error, process::Error::Orphaned { .. }) {
                cache.drop_compiled(key);
            }
            match error {
                // A failure is told when its times are asked for.
                process::Error::Refused(_) => Ok(()),
                other => Err(task_error(&session.fixed.task, other).into()),
            }
        }
    }
}

/// Samples of `torch.compile` that are taken between two looks at them, and the most on a card.
const ROUND: usize = 12;
const ROUNDS: usize = 20;
/// Half of the relative width of their interval that is narrow enough.
const NARROW: f64 = 0.005;

fn measure_compile(session: &mut Session, seconds: f64, evidence: &mut Evidence) -> Result<Baseline, Stop> {
    let cpu = session.fixed.judge.options.device == Device::Cpu;
    if cpu && session.baseline.is_none() {
        // The compiler's own processes are nobody's foreign load, so they are done before it is looked for.
        prepare_compile(session)?;
    }
    // A slot may be timed more than once: what `torch.compile` makes keeps no memo.
    let slots: Vec<usize> = (0..ROUND).map(|i| i % session.slots).collect();
    draw_plain(session, &(0..session.slots).collect::<Vec<_>>())?;
    let mut compiled = Baseline::default();
    let mut eager_us = Vec::new();
    let pids = own(session);
    let load = cpu.then(|| load::Load::begin(&pids));
    let start = Instant::now();
    for round in 1..=ROUNDS {
        match session.beside_nobody(|host| host.ask(&json!({"op": "compile", "slots": slots}), &[], MINUTES)) {
            Ok(frame) => {
                let Timed { times, graph, short, .. } = Timed::of(&frame.body);
                compiled.compile_us.extend(times);
                compiled.compile_graph = graph;
                if short {
                    evidence.out_of_memory("torch.compile's code");
                }
            }
            Err(process::Error::Refused(refused)) => compiled.compile_error = Some(refused.message),
            Err(other) => return Err(task_error(&session.fixed.task, other).into()),
        }
        let around = eager(session, &slots)?;
        if around.short {
            evidence.out_of_memory("the reference");
        }
        eager_us.extend(around.times);
        compiled.eager_graph = around.graph;
        // A short kernel's samples differ by per cents, and against a baseline of a few of them nothing is ever settled.
        let wide = timing::interval(&compiled.compile_us, round as u64)
            .is_some_and(|found| timing::relative_width(&found) > NARROW);
        let over = start.elapsed().as_secs_f64() > seconds;
        if cpu || over || compiled.compile_error.is_some() || !wide {
            break;
        }
    }
    compiled.eager_us = timing::median(&eager_us).unwrap_or(0.0);
    compiled.eager_mean_us = timing::mean(&eager_us);
    let foreign = load.and_then(|l| l.foreign(&pids)).filter(|share| *share > load::TOLERATED);
    if let Some(share) = foreign {
        evidence.shared(&format!(
            "other programs used {:.0} % of the processors while torch.compile was measured",
            100.0 * share
        ));
    }
    if kept(&compiled, evidence) {
        session.fixed.judge.cache.put(BASELINE, &session.fixed.digest, &compiled);
    }
    Ok(compiled)
}

/// Whether a baseline is one for later. What failed may have failed for want of room or time, what was timed without a graph for
/// want of room is slower than it is, and what others disturbed is no baseline: the next session tries again.
fn kept(baseline: &Baseline, evidence: &Evidence) -> bool {
    baseline.compile_error.is_none() && !evidence.short && evidence.measurement != Some(Measurement::Shared)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Baseline {
        Baseline { eager_us: 100.0, eager_mean_us: 110.0, compile_us: vec![80.0, 90.0], ..Baseline::default() }
    }

    #[test]
    fn a_cached_baseline_is_scaled_down_by_eagers_drift_and_never_up() {
        assert_eq!(drifted(&quiet(), false, &[50.0]), [40.0, 45.0]);
        assert_eq!(drifted(&quiet(), false, &[200.0]), [80.0, 90.0], "eager is slower now, or was made so");
        assert_eq!(drifted(&quiet(), true, &[55.0]), [40.0, 45.0], "means are held against a mean");
        assert_eq!(drifted(&Baseline { eager_us: 0.0, ..quiet() }, false, &[50.0]), [80.0, 90.0]);
    }

    #[test]
    fn what_was_timed_without_a_graph_for_want_of_memory_or_beside_others_is_not_kept() {
        let mut evidence = Evidence::default();
        assert!(kept(&quiet(), &evidence));
        assert!(!kept(&Baseline { compile_error: Some("no".into()), ..quiet() }, &evidence));
        evidence.out_of_memory("the reference");
        evidence.out_of_memory("the reference");
        assert!(!kept(&quiet(), &evidence));
        assert_eq!(evidence.notes.len(), 1, "it is told once");
        let mut shared = Evidence::default();
        shared.shared("others worked");
        assert!(!kept(&quiet(), &shared));
    }

    #[test]
    fn clocks_that_disagree_now_and_then_cost_a_block_and_as_a_rule_the_verdict() {
        assert_eq!(disagreement(1000.0, 3000.0, 100.0, 10), None);
        let why = disagreement(200.0, 6000.0, 100.0, 10).unwrap();
        assert!(why.contains("saw 5000 us where device events sum to 200 us over 10 runs"), "{why}");
        let mut apart = Apart::default();
        for agreed in [3, 5, 20] {
            assert!(apart.again(agreed, why.clone()).is_ok());
        }
        let mut evidence = Evidence::default();
        apart.told(&mut evidence);
        assert_eq!(evidence.audit.len(), 1);
        let mut apart = Apart::default();
        assert!(apart.again(0, why.clone()).is_ok() && apart.again(0, why.clone()).is_ok());
        let Err(Stop::Candidate(reason)) = apart.again(1, why) else { panic!("it is the rule") };
        assert_eq!(reason.code, "clocks_disagree");
        assert!(reason.message.contains("on 3 of 4 blocks"), "{}", reason.message);
    }
}
