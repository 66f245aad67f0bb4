//! What a job comes to, and what messages count: pure functions over rows and texts.
//!
//! Void generations are never counted. Knows the words of verdicts, trajectories and outcomes; must not know who asks.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::core::Facts;
use super::core::kept::{Ending, EpisodeState, JobState, Judged, Op, Speedup};
use super::core::tally::Tally;
use super::objects::digest;
use crate::judge::verdict::FASTER;
use crate::wire::v1::{Best, JobFacts};

/// Most results that a status names.
const MOST_BEST: usize = 64;
/// Reasons of verdicts that are ways to cheat, recognised.
pub const EXPLOITS: [&str; 6] =
    ["input_read", "plan_differs", "constants_changed", "fork", "forged_reply", "unwritten_output"];
/// Whose fault it was that there was no turn (`agent::rules::FaultOf`); another word is the machine's.
const FAULTS: [&str; 3] = ["endpoint", "model", "machine"];
/// Longest word of how an episode ended.
const MOST_END: usize = 64;
/// Verdicts by their reward.
pub const VERDICTS: [&str; 4] = ["not_correct", "correct", "faster_than_eager", "faster_than_compile"];

#[derive(Deserialize)]
struct VerdictWords {
    reward: i32,
    correct: bool,
    #[serde(default)]
    reason: Option<ReasonWords>,
    grade: String,
    #[serde(default)]
    measurement: String,
    #[serde(default)]
    speedup: Against,
    #[serde(default)]
    cached: bool,
}

#[derive(Deserialize)]
struct ReasonWords {
    code: String,
    message: String,
}

#[derive(Default, Deserialize)]
struct Against {
    eager: Option<Speedup>,
    compile: Option<Speedup>,
}

/// The word of a reward.
#[must_use]
pub const fn verdict_word(reward: i32) -> &'static str {
    match reward {
        1 => "correct",
        2 => "faster_than_eager",
        3.. => "faster_than_compile",
        _ => "not_correct",
    }
}

/// What an answer of a judge counts, and the best of its verdicts if it is a final judgement. `minimum` is the lowest
/// grade that the job takes.
///
/// # Errors
/// One sentence, when it isn't an answer to this request.
pub fn answer(
    op: Op,
    text: &str,
    candidates: &[String],
    minimum: Option<&str>,
) -> Result<(Tally, Option<Judged>), String> {
    let mut tally = Tally::default();
    if !matches!(op, Op::Verify | Op::Screen | Op::Final) {
        serde_json::from_str::<IgnoredAny>(text).map_err(|e| format!("answer_json isn't JSON: {e}"))?;
        return Ok((tally, None));
    }
    let verdicts: Vec<VerdictWords> =
        serde_json::from_str(text).map_err(|e| format!("answer_json isn't a list of verdicts: {e}"))?;
    if verdicts.len() != candidates.len() {
        return Err(format!("answer_json has {} verdicts for {} candidates", verdicts.len(), candidates.len()));
    }
    let mut best: Option<Judged> = None;
    for (place, verdict) in verdicts.into_iter().enumerate() {
        tally.add("verdicts", verdict_word(verdict.reward), 1.0);
        if verdict.cached {
            tally.add("cache_hits", "", 1.0);
        }
        if let Some(reason) = verdict.reason.as_ref().filter(|r| EXPLOITS.contains(&r.code.as_str())) {
            tally.add("exploits", &reason.code, 1.0);
        }
        let low = minimum == Some("enforced") && verdict.grade != "enforced";
        let judged = Judged {
            reward: if low { -1 } else { verdict.reward },
            correct: verdict.correct && !low,
            reason: match verdict.reason {
                Some(reason) => Some(reason.message),
                None if low => Some(format!("its grade is {}, and the job asks for enforced", verdict.grade)),
                None => None,
            },
            grade: verdict.grade,
            // Words are a closed set.
            measurement: match verdict.measurement {
                word if matches!(word.as_str(), "exclusive" | "shared") => word,
                _ => String::new(),
            },
            eager: verdict.speedup.eager,
            compile: verdict.speedup.compile,
            candidate: candidates.get(place).cloned().unwrap_or_default(),
            place,
        };
        if best.as_ref().is_none_or(|b| judged.rank() > b.rank()) {
            best = Some(judged);
        }
    }
    Ok((tally, best.filter(|_| op == Op::Final)))
}

#[derive(Deserialize)]
struct LineWords {
    kind: String,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    calls: Vec<IgnoredAny>,
    #[serde(default)]
    usage: Option<UsageWords>,
    #[serde(default)]
    of: Option<String>,
}

#[derive(Clone, Copy, Default, Deserialize)]
struct UsageWords {
    #[serde(default)]
    prompt: u64,
    #[serde(default)]
    completion: u64,
}

#[expect(clippy::cast_precision_loss, reason = "counts of tokens lie far below 2^53")]
fn count_tokens(tally: &mut Tally, usage: UsageWords) {
    tally.add("tokens", "read", usage.prompt as f64);
    tally.add("tokens", "written", usage.completion as f64);
}

/// What a line of a trajectory counts: a turn by what it came to, and its tokens.
///
/// # Errors
/// One sentence, when it is no line.
pub fn line(text: &str) -> Result<Tally, String> {
    if text.contains('\n') {
        return Err("it holds a line break".to_owned());
    }
    let words: LineWords = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let mut tally = Tally::default();
    match words.kind.as_str() {
        "turn" => {
            let outcome = match (&words.refusal, words.calls.is_empty()) {
                (Some(_), _) => "refused",
                (None, false) => "called",
                (None, true) => "answered",
            };
            tally.add("turns", outcome, 1.0);
            count_tokens(&mut tally, words.usage.unwrap_or_default());
        }
        "fault" => {
            let of = words.of.as_deref().filter(|of| FAULTS.contains(of));
            tally.add("faults", of.unwrap_or("machine"), 1.0);
        }
        _ => {}
    }
    Ok(tally)
}

#[derive(Deserialize)]
struct OutcomeWords {
    state: String,
    #[serde(default)]
    reason: Option<String>,
    #[serde(default)]
    attempts: u32,
    #[serde(default)]
    episode: Option<TailWords>,
    #[serde(default)]
    seconds: f64,
}

#[derive(Deserialize)]
struct TailWords {
    end: String,
    turns: u32,
    #[serde(default)]
    usage: UsageWords,
}

/// How an agent says that its episode ended, and what that counts where no line of a trajectory did.
///
/// # Errors
/// One sentence, when it is no outcome.
pub fn outcome(text: &str) -> Result<(Ending, Tally), String> {
    let words: OutcomeWords = serde_json::from_str(text).map_err(|e| format!("outcome_json isn't an outcome: {e}"))?;
    if !["judged", "declined", "refused", "failed"].contains(&words.state.as_str()) {
        return Err(format!("outcome_json: state {:?} isn't judged, declined, refused or failed", words.state));
    }
    let mut tally = Tally::default();
    let turns = words.episode.as_ref().map_or(words.attempts, |e| e.turns);
    if turns > 0 {
        tally.add("turns", "called", f64::from(turns));
    }
    if let Some(episode) = &words.episode {
        count_tokens(&mut tally, episode.usage);
    }
    let ending = Ending {
        digest: digest(text.as_bytes()),
        state: words.state,
        reason: words.reason.map(|r| r.chars().take(4096).collect()),
        end: words.episode.map(|e| e.end.chars().take(MOST_END).collect()),
        seconds: words.seconds,
    };
    Ok((ending, tally))
}

/// What a finished episode counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    Succeeded,
    Failed,
    /// The judge failed; it says nothing of anybody.
    Faulted,
}

/// How an episode counts, once it is finished.
#[must_use]
pub fn finished(episode: &super::core::kept::Episode) -> Option<Finished> {
    let ending = episode.ending.as_ref().filter(|_| episode.state == EpisodeState::Finished)?;
    Some(match &episode.judged {
        Some((_, judged)) if judged.correct => Finished::Succeeded,
        None if ending.state == "failed" => Finished::Faulted,
        _ => Finished::Failed,
    })
}

/// The best final judgement of each task, by its place, with the episode's index. Tasks without one are absent.
#[must_use]
pub fn best<'a>(facts: &'a Facts<'_>) -> BTreeMap<usize, (u32, &'a Judged)> {
    let mut best: BTreeMap<usize, (u32, &Judged)> = BTreeMap::new();
    for (episode, _) in facts.episodes.iter().filter(|(e, _)| e.state == EpisodeState::Finished) {
        let place = facts.job.place(episode.index);
        if let (Some((task, _)), Some((_, judged))) = (place, &episode.judged)
            && best.get(&task).is_none_or(|(_, other)| judged.rank() > other.rank())
        {
            best.insert(task, (episode.index, judged));
        }
    }
    best
}

/// Rates and means over tasks, by the best episode of each.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub correct: u32,
    pub faster_eager: u32,
    pub faster_compile: u32,
    /// Correct ones that were measured while others used the device.
    pub untrusted: u32,
    /// Geometric means of median speedups of correct tasks.
    pub geomean_eager: Option<f64>,
    pub geomean_compile: Option<f64>,
}

/// Counts the best judgements.
pub fn rates<'a>(best: impl Iterator<Item = &'a Judged> + Clone) -> Rates {
    let correct = best.filter(|j| j.correct);
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let faster = |of: fn(&Judged) -> Option<Speedup>| {
        count(correct.clone().filter(|j| of(j).is_some_and(|s| s.low > FASTER)).count())
    };
    let mean = |of: fn(&Judged) -> Option<Speedup>| {
        let logs: Vec<f64> = correct.clone().filter_map(of).map(|s| s.median.max(f64::MIN_POSITIVE).ln()).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of tasks")]
        let number = logs.len() as f64;
        (!logs.is_empty()).then(|| (logs.iter().sum::<f64>() / number).exp())
    };
    Rates {
        correct: count(correct.clone().count()),
        faster_eager: faster(|j| j.eager),
        faster_compile: faster(|j| j.compile),
        untrusted: count(correct.clone().filter(|j| j.measurement == "shared").count()),
        geomean_eager: mean(|j| j.eager),
        geomean_compile: mean(|j| j.compile),
    }
}

/// Facts for a status.
#[must_use]
pub fn job(facts: &Facts<'_>) -> JobFacts {
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let mut tally = Tally::default();
    let mut declined: BTreeMap<usize, bool> = BTreeMap::new();
    let mut endings: BTreeMap<usize, (u32, &super::core::kept::Ending, u32)> = BTreeMap::new();
    let (mut running, mut succeeded, mut failed, mut faulted) = (0, 0, 0, 0);
    for (episode, _) in &facts.episodes {
        tally.merge(&episode.tally);
        match finished(episode) {
            None => running += 1,
            Some(Finished::Succeeded) => succeeded += 1,
            Some(Finished::Failed) => failed += 1,
            Some(Finished::Faulted) => faulted += 1,
        }
        if let (Some((task, _)), Some(ending)) = (facts.job.place(episode.index), &episode.ending) {
            *declined.entry(task).or_insert(false) |= ending.state == "declined";
            let ended = endings.get(&task).map_or(0, |e| e.2) + u32::from(finished(episode).is_some());
            endings.insert(task, (episode.index, ending, ended));
        }
    }
    let best = best(facts);
    let rates = rates(best.values().map(|b| b.1));
    let median = |s: Option<Speedup>| s.map_or(0.0, |s| s.median);
    let mut ranked: Vec<_> = best.iter().collect();
    ranked.sort_by(|a, b| b.1.1.rank().total_cmp(&a.1.1.rank()));
    let name = |task: usize| facts.job.tasks.get(task).map(|t| t.name.clone()).unwrap_or_default();
    // Of a task that came to nothing a person asks for the reason; one with attempts left hasn't yet.
    let nothing = endings.iter().filter(|(task, e)| !best.contains_key(task) && e.2 >= facts.job.attempts);
    let without = nothing.map(|(task, (index, ending, _))| Best {
        task: name(*task),
        episode: *index,
        reason: match &ending.reason {
            Some(reason) => format!("{}: {reason}", ending.state),
            None => ending.state.clone(),
        },
        ..Best::default()
    });
    let named = ranked.into_iter().map(|(task, (index, judged))| Best {
        task: name(*task),
        episode: *index,
        reward: judged.reward,
        grade: judged.grade.clone(),
        measurement: judged.measurement.clone(),
        speedup_eager: median(judged.eager),
        speedup_compile: median(judged.compile),
        candidate: judged.candidate.clone(),
        reason: judged.reason.clone().unwrap_or_default(),
    });
    JobFacts {
        known: true,
        closed: facts.job.state != JobState::Open,
        tasks: count(facts.job.tasks.len()),
        episodes: facts.job.indexes(),
        running,
        succeeded,
        failed,
        faulted,
        turns: turns(&tally),
        tokens_read: tally.count("tokens", "read"),
        tokens_written: tally.count("tokens", "written"),
        correct: rates.correct,
        declined: count(declined.iter().filter(|(task, declined)| **declined && !best.contains_key(task)).count()),
        faster_eager: rates.faster_eager,
        faster_compile: rates.faster_compile,
        geomean_eager: rates.geomean_eager.unwrap_or_default(),
        geomean_compile: rates.geomean_compile.unwrap_or_default(),
        untrusted: rates.untrusted,
        best: listed(named.collect(), without.collect()),
        queued: count(facts.queued),
        slice_seconds: facts.usage.charged,
    }
}

/// The results that are told: the best ones, and in the last quarter of the places those without, where there are so many.
fn listed(mut named: Vec<Best>, without: Vec<Best>) -> Vec<Best> {
    named.truncate(MOST_BEST - without.len().min(MOST_BEST / 4));
    named.extend(without);
    named.truncate(MOST_BEST);
    named
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a sum of counts")]
fn turns(tally: &Tally) -> u64 {
    tally.sum("turns") as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broker::core::kept::{Episode, Job, Task, Usage};

    const VERDICT: &str = r#"{"reward": 2, "correct": true, "reason": null, "grade": "observed",
        "speedup": {"eager": {"median": 2.0, "low": 1.9, "high": 2.1}, "compile": {"median": 1.0, "low": 0.9, "high": 1.1}}}"#;

    #[test]
    fn verdicts_are_counted_and_the_best_of_a_final_judgement_is_kept() {
        let wrong = r#"{"reward": -1, "correct": false, "grade": "observed", "cached": true,
            "reason": {"code": "plan_differs", "message": "no"}, "speedup": {"eager": null, "compile": null}}"#;
        let text = format!("[{wrong}, {VERDICT}]");
        let candidates = ["a".to_owned(), "b".to_owned()];
        let (tally, judged) = answer(Op::Final, &text, &candidates, None).unwrap();
        let judged = judged.unwrap();
        assert_eq!((judged.reward, judged.candidate.as_str(), judged.place), (2, "b", 1));
        let counts = |f, l| tally.count(f, l);
        assert_eq!((counts("verdicts", "not_correct"), counts("verdicts", "faster_than_eager")), (1, 1));
        assert_eq!((counts("cache_hits", ""), counts("exploits", "plan_differs")), (1, 1));
        assert!(answer(Op::Verify, &text, &candidates, None).unwrap().1.is_none());
        let graded = answer(Op::Final, &format!("[{VERDICT}]"), &candidates[..1], Some("enforced")).unwrap().1.unwrap();
        assert!(!graded.correct && graded.reward == -1 && graded.reason.unwrap().contains("asks for enforced"));
        assert!(answer(Op::Final, "[]", &candidates, None).unwrap_err().contains("0 verdicts for 2 candidates"));
        assert!(answer(Op::Trace, "{", &[], None).unwrap_err().contains("isn't JSON"));
    }

    #[test]
    fn lines_count_turns_by_what_they_came_to() {
        let turn = |more: &str| {
            let text = format!(
                r#"{{"at": 1.0, "kind": "turn", "turn": 1, "content": "", "finish": "stop",
                "usage": {{"prompt": 10, "completion": 3}}{more}}}"#
            )
            .replace('\n', "");
            line(&text).unwrap()
        };
        assert_eq!(turn("").count("turns", "answered"), 1);
        assert_eq!(turn(r#", "calls": [{"id": "1"}]"#).count("turns", "called"), 1);
        assert_eq!(turn(r#", "refusal": "no""#).count("turns", "refused"), 1);
        assert_eq!(turn("").count("tokens", "read"), 10);
        let fault = line(r#"{"at": 1, "kind": "fault", "turn": 1, "of": "endpoint", "message": ""}"#).unwrap();
        assert_eq!(fault.count("faults", "endpoint"), 1);
        let other = line(r#"{"at": 1, "kind": "fault", "turn": 1, "of": "whatever-0001", "message": ""}"#).unwrap();
        assert_eq!(other.sum("faults"), other.get("faults", "machine"), "words are a closed set");
        assert!(line("{}").is_err() && line("[1]\n").is_err());
    }

    fn episode(index: u32, state: EpisodeState, ending: Option<&str>, judged: Option<Judged>) -> Episode {
        let mut tally = Tally::default();
        tally.add("turns", "called", 2.0);
        tally.add("tokens", "read", 100.0);
        Episode {
            job: "j".into(),
            index,
            generation: 1,
            pod: "p".into(),
            state,
            lines: 0,
            tally,
            judged: judged.map(|j| (1, j)),
            ending: ending.map(|s| Ending {
                digest: String::new(),
                state: s.into(),
                reason: (s == "declined").then(|| "it doesn't attempt sort".into()),
                end: None,
                seconds: 0.0,
            }),
            began: 0.0,
            stored: 0,
            said: 0,
        }
    }

    fn judged(reward: i32, eager: f64) -> Judged {
        let speedup = |median: f64| Some(Speedup { median, low: median * 0.99 });
        Judged {
            reward,
            correct: reward > 0,
            grade: "observed".into(),
            measurement: if reward == 2 { "shared".into() } else { "exclusive".into() },
            eager: speedup(eager),
            compile: speedup(eager / 2.0),
            reason: None,
            candidate: format!("c{eager}"),
            place: 0,
        }
    }

    #[test]
    fn facts_are_those_of_the_best_finished_episode_of_each_task() {
        let task = |n: usize| Task { name: format!("t{n}"), source: String::new(), replay: None };
        let job_row = Job {
            uid: "j".into(),
            namespace: "n".into(),
            name: "n".into(),
            spec: "{}".into(),
            batch_job: "b".into(),
            attempts: 2,
            tasks: (0..5).map(task).collect(),
            state: JobState::Open,
        };
        let done = EpisodeState::Finished;
        let rows = [
            episode(0, done, Some("judged"), Some(judged(2, 2.0))),
            episode(1, done, Some("judged"), Some(judged(3, 8.0))),
            episode(2, done, Some("judged"), Some(judged(1, 0.5))),
            episode(3, EpisodeState::Running, None, Some(judged(3, 100.0))),
            episode(4, done, Some("declined"), None),
            episode(5, done, Some("declined"), None),
            episode(6, done, Some("failed"), None),
            episode(8, done, Some("judged"), Some(judged(-1, 9.0))),
        ];
        let (usage, void) = (Usage { charged: 12.5, ..Usage::default() }, Tally::default());
        let episodes = rows.iter().map(|e| (e, &void)).collect();
        let facts = job(&Facts { job: &job_row, usage: &usage, queued: 3, episodes });
        assert_eq!((facts.tasks, facts.episodes, facts.running), (5, 10, 1));
        assert_eq!((facts.succeeded, facts.failed, facts.faulted), (3, 3, 1));
        assert_eq!((facts.turns, facts.tokens_read, facts.declined), (16, 800, 1));
        assert_eq!((facts.correct, facts.faster_eager, facts.faster_compile), (2, 1, 1));
        assert!((facts.geomean_eager - 2.0).abs() < 1e-9 && (facts.geomean_compile - 1.0).abs() < 1e-9);
        let names: Vec<_> = facts.best.iter().map(|b| (b.task.as_str(), b.episode, b.reward)).collect();
        assert_eq!(names, [("t0", 1, 3), ("t1", 2, 1), ("t4", 8, -1), ("t2", 5, 0)], "t3 has an attempt left");
        assert_eq!(facts.best[3].reason, "declined: it doesn't attempt sort");
        assert_eq!((facts.untrusted, facts.best[0].measurement.as_str()), (0, "exclusive"));
        let one = [episode(0, done, Some("judged"), Some(judged(2, 2.0)))];
        let episodes = one.iter().map(|e| (e, &void)).collect();
        let facts = job(&Facts { job: &job_row, usage: &usage, queued: 3, episodes });
        assert_eq!((facts.untrusted, facts.best[0].measurement.as_str()), (1, "shared"));
        assert_eq!((facts.queued, facts.slice_seconds), (3, 12.5));
    }

    #[test]
    fn tasks_that_came_to_nothing_have_places_among_many_results() {
        let of = |prefix: &str, n: usize| -> Vec<Best> {
            (0..n).map(|i| Best { task: format!("{prefix}{i}"), ..Best::default() }).collect()
        };
        let named = |list: &[Best]| list.iter().filter(|b| b.task.starts_with('n')).count();
        let both = listed(of("n", 200), of("w", 100));
        assert_eq!((both.len(), named(&both)), (MOST_BEST, 48));
        let few = listed(of("n", 3), of("w", 100));
        assert_eq!((few.len(), named(&few)), (MOST_BEST, 3));
        assert_eq!(listed(of("n", 100), of("w", 2)).len(), MOST_BEST);
    }

    #[test]
    fn an_outcome_says_how_an_episode_ended_and_what_it_counts() {
        let text = r#"{"task": "t", "state": "judged", "attempts": 7, "seconds": 3.5}"#;
        let (ending, tally) = outcome(text).unwrap();
        assert_eq!((ending.state.as_str(), ending.seconds, tally.count("turns", "called")), ("judged", 3.5, 7));
        let long = format!(r#"{{"state": "judged", "episode": {{"end": "{}", "turns": 1}}}}"#, "x".repeat(1 << 16));
        assert_eq!(outcome(&long).unwrap().0.end.unwrap().len(), MOST_END);
        assert!(outcome(r#"{"state": "lost"}"#).unwrap_err().contains("isn't judged, declined"));
    }
}
