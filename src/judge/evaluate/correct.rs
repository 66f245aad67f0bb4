//! Correctness: the candidate on fresh inputs of every kind against the reference.
//!
//! Knows input sets and the words for a mismatch. Must not know what a time means.

use std::os::fd::AsFd;
use std::time::Instant;

use serde_json::{Value, json};

use super::evidence::Evidence;
use super::record::Recording;
use super::run::{RUNNER, Run, limit};
use super::{Budget, Stop, constants, reason};
use crate::judge::runner::client::{Error as RunnerError, write_constants};
use crate::judge::session::{Error, MINUTES, Session, secret_seed, task_error};
use crate::judge::timing;

/// One input set of the correctness phase.
#[derive(Clone, Copy)]
pub(super) struct Transform {
    kind: &'static str,
    factor: f64,
}

pub(super) const PLAIN: Transform = Transform { kind: "none", factor: 1.0 };
/// Beyond half's range both ways, shifted and of the other sign (`docs/measuring.md`, "Correct").
const SCALED: [Transform; 4] = [
    Transform { kind: "scale", factor: 1e5 },
    Transform { kind: "scale", factor: 1e-6 },
    Transform { kind: "shift", factor: -0.5 },
    Transform { kind: "negate", factor: -1.0 },
];

pub(super) fn draw(session: &mut Session, slot: usize, transform: Transform) -> Result<bool, Stop> {
    let seed = secret_seed()?;
    let body = json!({
        "op": "draw", "slot": slot, "seed": seed, "transform": {"kind": transform.kind, "factor": transform.factor},
    });
    let frame = session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    let yes = |key: &str| frame.body[key].as_bool().unwrap_or(true);
    Ok(yes("finite") && yes("applicable"))
}

pub(super) fn eager(session: &mut Session, slots: &[usize]) -> Result<(Vec<f64>, Option<f64>), Stop> {
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
pub(super) fn sample(session: &mut Session, run: &mut Run, slot: usize) -> Result<f64, Stop> {
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

pub(super) fn compare(session: &mut Session, slot: usize, run: &Run, what: &str) -> Result<(), Stop> {
    let body = json!({"op": "compare", "slot": slot, "tolerance": session.fixed.judge.options.tolerance});
    let frame = session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    if frame.body["match"].as_bool() == Some(true) {
        return Ok(());
    }
    let mut found = reason("mismatch", mismatch(&frame.body["detail"], what));
    if run.names.len() == 1 {
        found.launch = Some(run.names[0].0.clone());
    }
    Err(Stop::Candidate(Box::new(found)))
}

/// One sentence on what a comparison found: which output, where, by how much.
fn mismatch(detail: &Value, what: &str) -> String {
    let rule = detail["rule"].as_str().unwrap_or("?");
    let figure = |key: &str| detail[key].as_f64().map_or_else(|| "?".to_owned(), |x| format!("{x:.3e}"));
    // A scalar has no place within it.
    let place = match detail["index"].as_array() {
        Some(index) if !index.is_empty() => format!(" at {}", detail["index"]),
        _ => String::new(),
    };
    let output = &detail["output"];
    match rule {
        "nan" => format!("output {output} has NaN or infinity where the reference has not{place}, on {what}"),
        "input" => format!("an input was changed in a way that the reference does not change it, on {what}"),
        "state" => format!(
            "a parameter or buffer of the state dict was changed as the reference does not change it, on {what}"
        ),
        "exact" => format!("output {output} differs from the reference{place}, on {what}; it has to be equal"),
        _ => {
            let how = match rule {
                "rms" => "root mean square over the whole tensor".to_owned(),
                "max" => "the largest error".to_owned(),
                "slab" => {
                    format!("within one row or channel{}", place.replace(['[', ']'], "").replace(" at", ", number"))
                }
                other => format!("{other}{place}"),
            };
            format!(
                "output {output} is off by {} where {} is allowed ({how}), on {what}",
                figure("value"),
                figure("limit")
            )
        }
    }
}

pub(super) fn correctness(
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
            constants::unchanged(session, recording, run)?;
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
        constants::note(session, recording, run)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_is_told_in_words_and_a_scalar_has_no_place() {
        let said = |detail: Value| mismatch(&detail, "input set 2");
        let figures = |rule: &str, index: Value| {
            said(json!({"rule": rule, "output": 0, "value": 0.5, "limit": 1e-6, "index": index}))
        };
        assert_eq!(
            figures("rms", json!([])),
            "output 0 is off by 5.000e-1 where 1.000e-6 is allowed (root mean square over the whole tensor), on input set 2"
        );
        assert!(figures("slab", json!([2673])).contains("(within one row or channel, number 2673)"));
        assert_eq!(
            said(json!({"rule": "exact", "output": 1, "index": []})),
            "output 1 differs from the reference, on input set 2; it has to be equal"
        );
        assert!(said(json!({"rule": "nan", "output": 0, "index": [5, 7]})).contains("has not at [5,7], on"));
    }
}
