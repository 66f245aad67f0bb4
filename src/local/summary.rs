//! What a run comes to: counts, rates, means. Pure.
//!
//! Knows the words of the measurement contract. Must not know how a verdict was obtained or how a summary is shown.

use serde::{Deserialize, Serialize};

use crate::judge::verdict::{FASTER, Interval, Measurement, Verdict};

/// How the work on a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// A candidate was judged in full.
    Judged,
    /// The policy said what it can't do.
    Declined,
    /// The task itself can't be judged: it is malformed, or anything would pass.
    Refused,
    /// The judge failed; the task says nothing about anybody.
    Failed,
}

/// The end of one task, as kept in its results folder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub task: String,
    pub state: State,
    /// Why there is no verdict, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What the best candidate does, in the policy's words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idea: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
    /// Candidates that were judged, the final judgement not counted.
    pub attempts: usize,
    /// How the policy's episode ended, where it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episode: Option<crate::agent::trajectory::Tail>,
    pub seconds: f64,
    /// An earlier start did the work.
    #[serde(skip)]
    pub before: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pair<T> {
    pub eager: T,
    pub compile: T,
}

/// Judged tasks whose measurement is `shared`, and how many of them count as faster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    pub tasks: usize,
    pub faster: Pair<usize>,
}

/// Tasks that were done before, and their candidates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    pub tasks: usize,
    pub attempts: usize,
}

/// Geometric means of median speedups, of correct tasks, and of all where a failed one counts as 1.
/// `None` where no task has that speedup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Means {
    pub correct: Option<f64>,
    pub all: Option<f64>,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    pub task: String,
    pub state: State,
    /// -1, 1, 2, 3; absent where nothing was judged.
    pub reward: Option<i32>,
    pub grade: Option<crate::judge::verdict::Grade>,
    /// `shared`: others used the device meanwhile, and neither speedup nor reward is to be trusted.
    pub measurement: Option<Measurement>,
    pub speedup: Pair<Option<f64>>,
    pub reason: Option<String>,
    pub attempts: usize,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub tasks: usize,
    pub correct: usize,
    pub declined: usize,
    /// Tasks that the policy tried and got wrong, or that were refused or failed.
    pub refused: usize,
    pub failed: usize,
    /// Tasks whose best verdict's lower bound lies over 1/0.95.
    pub faster: Pair<usize>,
    /// What of these counts rests on measurements that others disturbed.
    pub shared: Shared,
    pub geomean: Pair<Means>,
    pub attempts: usize,
    /// What of this an earlier start did.
    pub before: Before,
    pub seconds: f64,
    pub results: Vec<Line>,
    /// Tasks whose outcomes of earlier starts lie in the same folder; nothing above counts them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub earlier: Vec<String>,
}

/// Adds up. `seconds` is the wall time of the run.
#[must_use]
pub fn summarise(outcomes: &[Outcome], seconds: f64) -> Summary {
    let correct = |o: &Outcome| o.verdict.as_ref().is_some_and(|v| v.correct);
    let state = |s: State| outcomes.iter().filter(|o| o.state == s).count();
    let eager = |o: &Outcome| o.verdict.as_ref().filter(|v| v.correct).and_then(|v| v.speedup.eager);
    let compile = |o: &Outcome| o.verdict.as_ref().filter(|v| v.correct).and_then(|v| v.speedup.compile);
    let is_faster = |i: Option<Interval>| i.is_some_and(|i| i.low > FASTER);
    let faster = |of: &dyn Fn(&Outcome) -> Option<Interval>| outcomes.iter().filter(|o| is_faster(of(o))).count();
    let shared: Vec<&Outcome> = outcomes.iter().filter(|o| o.verdict.as_ref().is_some_and(|v| !v.trusted())).collect();
    let shared_faster = |of: &dyn Fn(&Outcome) -> Option<Interval>| shared.iter().filter(|o| is_faster(of(o))).count();
    let means = |of: &dyn Fn(&Outcome) -> Option<Interval>| {
        let logs: Vec<f64> =
            outcomes.iter().filter_map(|o| of(o).map(|i| i.median.max(f64::MIN_POSITIVE).ln())).collect();
        let sum: f64 = logs.iter().sum();
        let mean = |n: usize| {
            #[expect(clippy::cast_precision_loss, reason = "counts of tasks")]
            let n = n as f64;
            (!logs.is_empty()).then(|| (sum / n).exp())
        };
        Means { correct: mean(logs.len()), all: mean(outcomes.len()) }
    };
    Summary {
        tasks: outcomes.len(),
        correct: outcomes.iter().filter(|o| correct(o)).count(),
        declined: state(State::Declined),
        refused: state(State::Refused),
        failed: state(State::Failed),
        faster: Pair { eager: faster(&eager), compile: faster(&compile) },
        shared: Shared {
            tasks: shared.len(),
            faster: Pair { eager: shared_faster(&eager), compile: shared_faster(&compile) },
        },
        geomean: Pair { eager: means(&eager), compile: means(&compile) },
        attempts: outcomes.iter().map(|o| o.attempts).sum(),
        before: Before {
            tasks: outcomes.iter().filter(|o| o.before).count(),
            attempts: outcomes.iter().filter(|o| o.before).map(|o| o.attempts).sum(),
        },
        seconds,
        results: outcomes.iter().map(line).collect(),
        earlier: Vec::new(),
    }
}

fn line(outcome: &Outcome) -> Line {
    let verdict = outcome.verdict.as_ref();
    let speedup = |of: fn(&Verdict) -> Option<Interval>| verdict.and_then(of).map(|i| i.median);
    Line {
        task: outcome.task.clone(),
        state: outcome.state,
        reward: verdict.map(|v| v.reward),
        grade: verdict.map(|v| v.grade),
        measurement: verdict.map(|v| v.measurement),
        speedup: Pair { eager: speedup(|v| v.speedup.eager), compile: speedup(|v| v.speedup.compile) },
        reason: outcome.reason.clone().or_else(|| verdict.and_then(|v| v.reason.as_ref()).map(|r| r.message.clone())),
        attempts: outcome.attempts,
    }
}
