//! Correctness: the candidate on fresh inputs of every kind against the reference.
//!
//! Knows input sets and the words for a mismatch. Must not know what a time means.

use std::time::Instant;

use serde_json::{Value, json};

use super::evidence::Evidence;
use super::run::{RUNNER, Run};
use super::subject::Subject;
use super::{Budget, Stop, reason};
use crate::judge::runner::client::Error as RunnerError;
use crate::judge::session::{Error, Held, MINUTES, Session, secret_seed, task_error};
use crate::judge::timing;

/// One input set of the correctness phase.
#[derive(Clone, Copy)]
pub(super) struct Transform {
    kind: &'static str,
    factor: f64,
}

/// As the task's `get_inputs` draws them but for a secret few places, which are negated, shifted or scaled where the task bears
/// that: no place of a set tells what another one holds, in timed sets neither.
pub(super) const PLAIN: Transform = Transform { kind: "mixed", factor: 1.0 };
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

/// Draws plain sets into several slots, each under a seed of its own.
pub(super) fn draw_plain(session: &mut Session, slots: &[usize]) -> Result<(), Stop> {
    let seeds = slots.iter().map(|_| secret_seed()).collect::<Result<Vec<_>, _>>()?;
    let body = json!({"op": "draw", "slots": slots, "seeds": seeds, "transform": {"kind": PLAIN.kind}});
    session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    Ok(())
}

/// Times of the reference, microseconds, as the host took them.
#[derive(Debug, Default)]
pub(super) struct Timed {
    /// A slot each.
    pub(super) times: Vec<f64>,
    /// Median on the host's clock, where it took one.
    pub(super) wall: Option<f64>,
    /// Taken of a CUDA graph.
    pub(super) graph: bool,
    /// No graph could be made for want of memory: it would have been faster.
    pub(super) short: bool,
}

impl Timed {
    /// From a reply to `eager` or `compile`.
    pub(super) fn of(body: &Value) -> Self {
        let list =
            |key: &str| -> Vec<f64> { body[key].as_array().into_iter().flatten().filter_map(Value::as_f64).collect() };
        let flag = |key: &str| body[key].as_bool().unwrap_or(false);
        let wall = timing::median(&list("wall_us"));
        Self { times: list("time_us"), wall, graph: flag("graph"), short: flag("short") }
    }
}

pub(super) fn eager(session: &mut Session, slots: &[usize]) -> Result<Timed, Stop> {
    let asked = session.beside_nobody(|host| host.ask(&json!({"op": "eager", "slots": slots}), &[], MINUTES));
    let frame = asked.map_err(|e| task_error(&session.fixed.task, e))?;
    let timed = Timed::of(&frame.body);
    if timed.times.len() != slots.len() {
        return Err(Error::Fault("the reference host gave no time for a sample".into()).into());
    }
    Ok(timed)
}

/// Wall microseconds of a request to a stopped CPU runner, until every thread of it has stopped again: what still
/// works after the answer works on frozen time.
pub(super) fn clocked(run: &mut Run, work: impl FnOnce(&mut Run) -> Result<(), RunnerError>) -> Result<f64, Stop> {
    let start = Instant::now();
    let ended = work(run).and_then(|()| run.runner.stop(RUNNER));
    let wall = start.elapsed().as_secs_f64() * 1e6;
    ended.map_err(|e| run.failure(e))?;
    Ok(wall)
}

pub(super) fn compare(session: &mut Session, slot: usize, subject: &mut dyn Subject, what: &str) -> Result<(), Stop> {
    subject.show(session)?;
    decided(session, slot, subject.only(), what)
}

/// Whether what is bound for `slot` is what the reference gives. `only`: the launch that a mismatch must be of.
pub(super) fn decided(session: &mut Session, slot: usize, only: Option<String>, what: &str) -> Result<(), Stop> {
    let body = json!({"op": "compare", "slot": slot, "tolerance": session.fixed.judge.options.tolerance});
    let frame = session.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&session.fixed.task, e))?;
    if frame.body["match"].as_bool() == Some(true) {
        return Ok(());
    }
    let mut found = reason("mismatch", mismatch(&frame.body["detail"], what));
    found.launch = only;
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
    subject: &mut dyn Subject,
    budget: &Budget,
    held: &mut Held<'_>,
    evidence: &mut Evidence,
) -> Result<(), Stop> {
    subject.calibrate(session)?;
    for set in 0..budget.parameter_sets {
        subject.select(session, set)?;
        let plain = std::iter::repeat_n(PLAIN, budget.inputs);
        let scaled: &[Transform] = if budget.scaled { &SCALED } else { &SCALED[2..3] };
        for (i, transform) in plain.chain(scaled.iter().copied()).enumerate() {
            held.breathe();
            let usable = draw(session, 0, transform)?;
            if !usable && transform.kind != PLAIN.kind {
                continue;
            }
            session.eager_us = eager(session, &[0])?.times[0];
            subject.bound_by(session.eager_us);
            subject.sample(session, 0)?;
            let what = match transform.kind {
                "mixed" => format!("input set {} of parameter set {}", i + 1, set + 1),
                "scale" => format!("inputs scaled by {:e}", transform.factor),
                "shift" => format!("inputs shifted by {}", transform.factor),
                _ => "negated inputs".to_owned(),
            };
            compare(session, 0, subject, &what)?;
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
