//! `kernelfleet run`: the tasks of a job, one after another or overlapped, to a folder of results.
//!
//! Knows the order of work on a task (check, let the policy work, judge the best in full), what is kept where, and
//! what a second start may skip. Must not know how a candidate is written or judged: those are the two traits.

use std::collections::VecDeque;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::candidate;
use super::progress::Progress;
use super::summary::{Outcome, State};
use crate::agent::trajectory::Tail;
use crate::api::job::{Baseline, Target};
use crate::hex::hex;
use crate::judge::counters::Kernel;
use crate::judge::verdict::{LaunchEvidence, Measurement, PROCEDURE, Reason, Verdict};
use crate::judge::{Candidate, Effort, TaskSource};
use crate::task::graph::Graph;

/// Why a judge gave no verdict.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Trouble {
    /// The task or the machine is the reason; judging again would say the same.
    #[error("{0}")]
    Request(String),
    /// The judge's own failure.
    #[error("{0}")]
    Fault(String),
}

/// A judge that opens tasks.
pub trait Court: Sync {
    /// Makes a task ready: its reference host runs.
    ///
    /// # Errors
    /// `Request` when the task can't be judged.
    fn open(&self, task: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble>;
}

/// One open task of a judge.
pub trait Bench: Send {
    /// Refusals of the contract, one sentence each; none means that the task is accepted.
    ///
    /// # Errors
    /// When the check itself could not run.
    fn check(&mut self) -> Result<Vec<String>, Trouble>;
    /// The reference's operator graph.
    ///
    /// # Errors
    /// When the reference can't be traced.
    fn trace(&mut self) -> Result<Graph, Trouble>;
    /// What candidates are told of the device; null where nothing is known.
    fn properties(&self) -> Value {
        Value::Null
    }
    /// Judges candidates in order, telling each verdict as it comes.
    ///
    /// # Errors
    /// When there is no verdict; a wrong candidate is a verdict.
    fn judge(
        &mut self,
        candidates: &[Candidate],
        effort: Effort,
        told: &mut dyn FnMut(usize, Verdict),
    ) -> Result<(), Trouble>;
    /// Records and builds a candidate: the steps of its plan, or why there is none.
    ///
    /// # Errors
    /// When that could not be tried.
    fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble>;
    /// What the reference runs.
    ///
    /// # Errors
    /// When it can't be run.
    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble>;
    /// Hardware counters of a candidate's launches, or of the reference's kernels; why there are none.
    ///
    /// # Errors
    /// When that could not be tried.
    fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble>;
}

/// Writes candidates.
pub trait Policy: Sync {
    /// Works on a task until it has nothing more to try: asks `work` for judgements, which keeps the best.
    ///
    /// # Errors
    /// What it can't do, or what the judge met.
    fn work(&self, work: &mut Work<'_>) -> Result<(), Halt>;
}

/// Why a policy ended before it had anything to show.
#[derive(Clone, Debug)]
pub enum Halt {
    /// One sentence that says what it can't do.
    Declined(String),
    Trouble(Trouble),
}

impl From<Trouble> for Halt {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

/// Candidates a batch at a time: the work of a policy that needs no more than their verdicts.
pub trait Episode {
    /// The next candidates, each with one clause on what it does; none at its end. What may be judged
    /// without knowing the verdicts of the others comes at once: a card's judge overlaps their work.
    fn next(&mut self) -> Vec<(Candidate, String)>;
    /// What became of the `index`th of the last batch.
    fn learn(&mut self, index: usize, verdict: &Verdict);
}

/// What a run is given beside its judge and policy.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Folder of this job's results.
    pub folder: PathBuf,
    /// Everything beside a task's source that decides its outcome, for the key of a record.
    pub identity: String,
    /// Candidates a task.
    pub most_attempts: usize,
    pub target: Option<Target>,
    /// Tasks at once. One on the CPU device, where whoever else works is measured too.
    pub workers: usize,
    /// When a sweep ends, whatever is left to try; the best is judged in full after it.
    pub until: Option<Instant>,
}

/// A kept outcome: what a second start needs not do again.
#[derive(Serialize, Deserialize)]
struct Record {
    key: String,
    outcome: Outcome,
}

/// Works on all tasks; returns the outcomes in the order of `tasks`, `None` for those that `stop` cut off.
pub fn run(
    tasks: &[TaskSource],
    court: &dyn Court,
    policy: &dyn Policy,
    settings: &Settings,
    progress: &Progress,
    stop: &AtomicBool,
) -> Vec<Option<Outcome>> {
    let results: Mutex<Vec<Option<Outcome>>> = Mutex::new(vec![None; tasks.len()]);
    let queue: Mutex<VecDeque<usize>> = Mutex::new((0..tasks.len()).collect());
    let alone: Mutex<VecDeque<usize>> = Mutex::default();
    let work = |queue: &Mutex<VecDeque<usize>>, last: bool| {
        loop {
            let next = queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
            let Some(index) = next else { return };
            if stop.load(Ordering::Relaxed) {
                return;
            }
            let Some(task) = tasks.get(index) else { return };
            let outcome = one(task, court, policy, settings, progress, stop, last);
            if !last && outcome.as_ref().is_some_and(|o| o.state == State::Failed) {
                alone.lock().unwrap_or_else(PoisonError::into_inner).push_back(index);
                continue;
            }
            if let Some(outcome) = outcome {
                let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(place) = results.get_mut(index) {
                    *place = Some(outcome);
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..settings.workers.clamp(1, tasks.len().max(1)) {
            scope.spawn(|| work(&queue, settings.workers == 1));
        }
    });
    // What failed beside others, for want of memory most of all, has the device to itself now.
    work(&alone, true);
    results.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Works on one task, as `run` does on each: `None` when `stop` cut it off.
pub fn single(
    task: &TaskSource,
    court: &dyn Court,
    policy: &dyn Policy,
    settings: &Settings,
    progress: &Progress,
    stop: &AtomicBool,
) -> Option<Outcome> {
    one(task, court, policy, settings, progress, stop, true)
}

/// Whether nothing of an outcome rests on a measurement that others disturbed.
fn trusted(outcome: &Outcome) -> bool {
    outcome.verdict.as_ref().is_none_or(Verdict::trusted)
}

/// Tasks without a kept outcome, or with one that is to be measured again: what a start has to do.
#[must_use]
pub fn pending<'a>(tasks: &'a [TaskSource], settings: &Settings) -> Vec<&'a TaskSource> {
    let done = |task: &TaskSource| {
        kept(&task_folder(&settings.folder, &task.name), &key(task, settings)).is_some_and(|o| trusted(&o))
    };
    tasks.iter().filter(|task| !done(task)).collect()
}

/// The key under which an outcome stays valid.
fn key(task: &TaskSource, settings: &Settings) -> String {
    let mut hash = Sha256::new();
    for part in [PROCEDURE, env!("CARGO_PKG_VERSION"), &settings.identity, &task.source] {
        hash.update(u64::try_from(part.len()).unwrap_or(0).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(&hash.finalize())
}

/// The folder of one task's results.
#[must_use]
pub fn task_folder(folder: &Path, name: &str) -> PathBuf {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().map(safe).collect();
    folder.join(name.trim_start_matches('.'))
}

fn one(
    task: &TaskSource,
    court: &dyn Court,
    policy: &dyn Policy,
    settings: &Settings,
    progress: &Progress,
    stop: &AtomicBool,
    last: bool,
) -> Option<Outcome> {
    let folder = task_folder(&settings.folder, &task.name);
    let key = key(task, settings);
    let before = kept(&folder, &key);
    progress.begin(&task.name);
    if let Some(mut outcome) = before {
        outcome.before = true;
        if !trusted(&outcome) {
            again(task, court, progress, &folder, &key, &mut outcome);
            if stop.load(Ordering::Relaxed) {
                return None;
            }
        }
        progress.done(&outcome);
        return Some(outcome);
    }
    let began = Instant::now();
    let mut attempts = 0;
    let mut outcome = match go(task, court, policy, settings, progress, stop, &folder, &mut attempts) {
        Ok(outcome) => outcome?,
        Err(trouble) => Outcome {
            state: match trouble {
                Trouble::Request(_) => State::Refused,
                Trouble::Fault(_) => State::Failed,
            },
            ..empty(task, Some(trouble.to_string()))
        },
    };
    // Who interrupts ends the judge's processes; whatever comes out then says nothing of the task.
    if stop.load(Ordering::Relaxed) {
        return None;
    }
    outcome.attempts = attempts;
    outcome.seconds = began.elapsed().as_secs_f64();
    // A fault is tried again by the next start; all else is done.
    if outcome.state != State::Failed
        && let Err(error) = keep(&folder, &Record { key, outcome: outcome.clone() })
    {
        progress.note(&format!("{}: the result could not be kept in {}: {error}", task.name, folder.display()));
    }
    if !last && outcome.state == State::Failed {
        let why = outcome.reason.as_deref().unwrap_or("a fault");
        progress.note(&format!("{}: {why}; it is tried again at the end, alone", task.name));
        progress.leave(&task.name);
    } else {
        progress.done(&outcome);
    }
    Some(outcome)
}

/// Judges the best of an earlier start once more, since others disturbed its measurement then. Where that can't be done,
/// or is disturbed again, the old verdict stays, with its mark.
fn again(task: &TaskSource, court: &dyn Court, progress: &Progress, folder: &Path, key: &str, outcome: &mut Outcome) {
    progress.say(&task.name, "others disturbed its measurement before; judging the best once more");
    let judged = candidate::read(&folder.join("best")).map_err(|e| Trouble::Fault(e.to_string())).and_then(|best| {
        let mut verdict = None;
        let mut bench = court.open(task)?;
        bench.judge(std::slice::from_ref(&best), Effort::Final, &mut |_, v| verdict = Some(v))?;
        let verdict = verdict.ok_or_else(|| Trouble::Fault("the judge gave no verdict".into()))?;
        if !verdict.counts() {
            return Ok(());
        }
        outcome.verdict = Some(verdict.clone());
        let record = Record { key: key.to_owned(), outcome: outcome.clone() };
        keep_judged(folder, task, &best, &verdict).and_then(|()| keep(folder, &record)).map_err(disk)
    });
    if let Err(trouble) = judged {
        progress.note(&format!("{}: the best could not be judged once more: {trouble}", task.name));
    }
}

fn empty(task: &TaskSource, reason: Option<String>) -> Outcome {
    Outcome {
        task: task.name.clone(),
        state: State::Judged,
        reason,
        idea: None,
        verdict: None,
        attempts: 0,
        episode: None,
        seconds: 0.0,
        before: false,
    }
}

/// A candidate that was judged, what it does, and what was said of it.
#[derive(Clone, Debug)]
pub struct Judged {
    pub candidate: Candidate,
    pub idea: String,
    pub verdict: Verdict,
}

/// The work on one task: what a policy may ask for, and what is kept of the answers.
pub struct Work<'a> {
    pub task: &'a TaskSource,
    /// The folder of the task's results.
    pub folder: &'a Path,
    pub progress: &'a Progress,
    pub stop: &'a AtomicBool,
    settings: &'a Settings,
    bench: Box<dyn Bench + 'a>,
    log: std::fs::File,
    attempts: usize,
    best: Option<Judged>,
    wrong: Option<Judged>,
    reached: bool,
    last: Option<Judged>,
    /// How the policy's episode ended, where it has one.
    pub episode: Option<Tail>,
}

impl std::fmt::Debug for Work<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("task", &self.task.name).field("attempts", &self.attempts).finish_non_exhaustive()
    }
}

fn disk(error: std::io::Error) -> Trouble {
    Trouble::Fault(format!("results can't be written: {error}"))
}

/// `Ok(None)` when the run was stopped.
#[allow(clippy::too_many_arguments)]
fn go(
    task: &TaskSource,
    court: &dyn Court,
    policy: &dyn Policy,
    settings: &Settings,
    progress: &Progress,
    stop: &AtomicBool,
    folder: &Path,
    attempts: &mut usize,
) -> Result<Option<Outcome>, Trouble> {
    std::fs::create_dir_all(folder).map_err(disk)?;
    std::fs::write(folder.join(TASK), &task.source).map_err(disk)?;
    let log = std::fs::File::create(folder.join("attempts.jsonl")).map_err(disk)?;
    progress.say(&task.name, "opening");
    let mut bench = court.open(task)?;
    progress.say(&task.name, "checking");
    let refusals = bench.check()?;
    if !refusals.is_empty() {
        return Ok(Some(Outcome { state: State::Refused, ..empty(task, Some(refusals.join("; "))) }));
    }
    let mut work = Work {
        task,
        folder,
        progress,
        stop,
        settings,
        bench,
        log,
        attempts: 0,
        best: None,
        wrong: None,
        reached: false,
        last: None,
        episode: None,
    };
    let worked = policy.work(&mut work);
    *attempts = work.attempts;
    if work.stopped() {
        return Ok(None);
    }
    match worked {
        Ok(()) => {}
        Err(Halt::Trouble(trouble)) => return Err(trouble),
        Err(Halt::Declined(reason)) => {
            let episode = work.episode.take();
            return Ok(Some(Outcome { state: State::Declined, episode, ..empty(task, Some(reason)) }));
        }
    }
    work.finish()?;
    let episode = work.episode.take();
    let Some(Judged { candidate, idea, verdict }) = work.last.take() else {
        let reason = match &episode {
            None => "the policy wrote no candidate".to_owned(),
            Some(tail) => format!("no candidate was judged; the episode ended ({}): {}", tail.end.word(), tail.reason),
        };
        return Ok(Some(Outcome { state: State::Declined, episode, ..empty(task, Some(reason)) }));
    };
    keep_judged(folder, task, &candidate, &verdict).map_err(disk)?;
    Ok(Some(Outcome { idea: Some(idea), verdict: Some(verdict), episode, ..empty(task, None) }))
}

/// The task's file in a folder of results.
pub(super) const TASK: &str = "task.py";
/// The record of a task's end in there.
pub(super) const OUTCOME: &str = "outcome.json";

/// How a task ended whose results lie in `folder`, if a run left them there.
pub(super) fn ended(folder: &Path) -> Option<Outcome> {
    Some(recorded(folder)?.outcome)
}

fn recorded(folder: &Path) -> Option<Record> {
    serde_json::from_str(&std::fs::read_to_string(folder.join(OUTCOME)).ok()?).ok()
}

/// Keeps a judged candidate as `kernelfleet export` takes it: `task.py`, `best/` and `verdict.json`.
///
/// # Errors
/// When the disk refuses.
pub fn keep_judged(folder: &Path, task: &TaskSource, candidate: &Candidate, verdict: &Verdict) -> std::io::Result<()> {
    std::fs::write(folder.join(TASK), &task.source)?;
    candidate::write(&folder.join("best"), candidate)?;
    let text = serde_json::to_string_pretty(verdict).map_err(std::io::Error::other)?;
    replace(&folder.join("verdict.json"), &text)
}

impl Work<'_> {
    /// Whether the run was interrupted.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn over(&self) -> bool {
        self.stopped() || self.settings.until.is_some_and(|until| Instant::now() >= until)
    }

    /// Whether the job's target is reached.
    #[must_use]
    pub const fn reached(&self) -> bool {
        self.reached
    }

    /// The best correct candidate so far.
    #[must_use]
    pub const fn best(&self) -> Option<&Judged> {
        self.best.as_ref()
    }

    /// The job's target.
    #[must_use]
    pub const fn target(&self) -> Option<&Target> {
        self.settings.target.as_ref()
    }

    /// What candidates are told of the device; null where nothing is known.
    #[must_use]
    pub fn properties(&self) -> Value {
        self.bench.properties()
    }

    /// The reference's operator graph.
    ///
    /// # Errors
    /// As `Bench::trace`.
    pub fn trace(&mut self) -> Result<Graph, Trouble> {
        self.bench.trace()
    }

    /// As `Bench::compile`; no attempt.
    ///
    /// # Errors
    /// As there.
    pub fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble> {
        self.bench.compile(candidate)
    }

    /// As `Bench::reference`.
    ///
    /// # Errors
    /// As there.
    pub fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble> {
        self.bench.reference()
    }

    /// As `Bench::counters`.
    ///
    /// # Errors
    /// As there.
    pub fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble> {
        self.bench.counters(candidate)
    }

    /// Whether a candidate is correct; no attempt, and nothing is kept of it.
    ///
    /// # Errors
    /// As `Bench::judge`.
    pub fn verify(&mut self, candidate: &Candidate) -> Result<Verdict, Trouble> {
        let mut verdict = None;
        self.bench.judge(std::slice::from_ref(candidate), Effort::Verify, &mut |_, v| verdict = Some(v))?;
        verdict.ok_or_else(|| Trouble::Fault("the judge gave no verdict".into()))
    }

    /// Judges candidates as attempts at the task: each is written down, and the best is kept.
    ///
    /// # Errors
    /// As `Bench::judge`, or when the disk refuses.
    pub fn attempt(
        &mut self,
        part: &[(Candidate, String)],
        effort: Effort,
        told: &mut dyn FnMut(usize, &Verdict),
    ) -> Result<(), Trouble> {
        let candidates: Vec<Candidate> = part.iter().map(|(c, _)| c.clone()).collect();
        let mut written = Ok(());
        let Self { bench, log, attempts, best, wrong, reached, settings, .. } = self;
        bench.judge(&candidates, effort, &mut |index, verdict| {
            let Some((candidate, idea)) = part.get(index) else { return };
            *attempts += 1;
            let files = &candidate.files;
            let line = json!({"attempt": *attempts, "idea": idea, "verdict": verdict, "files": files});
            if let Err(e) = writeln!(log, "{line}") {
                written = Err(e);
            }
            told(index, &verdict);
            let judged = Judged { candidate: candidate.clone(), idea: idea.clone(), verdict };
            if judged.verdict.correct {
                *reached |= reaches(&judged.verdict, settings.target.as_ref());
                if best.as_ref().is_none_or(|b| score(&judged.verdict) > score(&b.verdict)) {
                    *best = Some(judged);
                }
            } else if wrong.is_none() {
                *wrong = Some(judged);
            }
        })?;
        written.map_err(disk)
    }

    /// Plays an episode of batches to its end: no more candidates, no more attempts, or the target.
    ///
    /// # Errors
    /// As `attempt`.
    pub fn sweep(&mut self, episode: &mut dyn Episode) -> Result<(), Trouble> {
        while self.attempts < self.settings.most_attempts && !self.reached && !self.over() {
            let mut batch = episode.next();
            batch.truncate(self.settings.most_attempts - self.attempts);
            if batch.is_empty() {
                break;
            }
            // On the CPU, and where a stop must be heeded soon, small steps; a card's judge overlaps within one.
            let step = if self.settings.workers > 1 { 8 } else { 1 };
            for first in (0..batch.len()).step_by(step) {
                if self.over() || self.reached {
                    break;
                }
                let part = batch.get(first..batch.len().min(first + step)).unwrap_or_default();
                if let Some((_, idea)) = part.first() {
                    self.progress.say(&self.task.name, &format!("candidate {}: {idea}", self.attempts + 1));
                }
                self.attempt(part, Effort::Screen, &mut |index, verdict| episode.learn(first + index, verdict))?;
            }
        }
        Ok(())
    }

    /// The final judgement of the best candidate, under fresh seeds: that is the score, not the luckiest screening.
    /// Of candidates that were all wrong the first is judged. `None` where there is none. The same candidate is judged
    /// so once.
    ///
    /// # Errors
    /// As `Bench::judge`.
    pub fn finish(&mut self) -> Result<Option<&Judged>, Trouble> {
        if let Some(chosen) = self.best.as_ref().or(self.wrong.as_ref())
            && self.last.as_ref().is_none_or(|last| last.candidate != chosen.candidate)
        {
            self.progress.say(&self.task.name, "judging the best in full");
            let mut verdict = None;
            let candidate = std::slice::from_ref(&chosen.candidate);
            self.bench.judge(candidate, Effort::Final, &mut |_, v| verdict = Some(v))?;
            let verdict = verdict.ok_or_else(|| Trouble::Fault("the judge gave no verdict".into()))?;
            self.last = Some(Judged { verdict, ..chosen.clone() });
        }
        Ok(self.last.as_ref())
    }
}

/// What a screening is ranked by: the lower bound of the speedup over eager, or the time alone where both were timed
/// beside other work on a card.
fn score(verdict: &Verdict) -> f64 {
    let card = verdict.device.get("kind").is_some_and(|kind| kind == "cuda");
    match (verdict.measurement, verdict.time_us.candidate) {
        (Measurement::Shared, Some(time)) if card => 1.0 / time.median.max(1e-3),
        _ => verdict.speedup.eager.map_or(0.0, |i| i.low),
    }
}

fn reaches(verdict: &Verdict, target: Option<&Target>) -> bool {
    target.is_some_and(|t| {
        let speedup = match t.baseline {
            Baseline::Eager => verdict.speedup.eager,
            Baseline::Compile => verdict.speedup.compile,
        };
        speedup.is_some_and(|i| i.low >= t.speedup)
    })
}

fn kept(folder: &Path, key: &str) -> Option<Outcome> {
    let record = recorded(folder)?;
    (record.key == key).then_some(record.outcome)
}

fn keep(folder: &Path, record: &Record) -> std::io::Result<()> {
    let text = serde_json::to_string_pretty(record).map_err(std::io::Error::other)?;
    replace(&folder.join(OUTCOME), &text)
}

/// Tasks of a job's folder that an earlier start has done and that are not among `tasks`, by name.
#[must_use]
pub fn earlier(folder: &Path, tasks: &[TaskSource]) -> Vec<String> {
    let now: Vec<PathBuf> = tasks.iter().map(|t| task_folder(folder, &t.name)).collect();
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut names: Vec<String> =
        entries.filter(|path| !now.contains(path)).filter_map(|path| Some(ended(&path)?.task)).collect();
    names.sort();
    names
}

/// Writes a file whole or not at all.
///
/// # Errors
/// When the disk refuses.
pub fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let beside = path.with_extension("partial");
    let mut file = std::fs::File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

#[cfg(test)]
mod tests {
    use super::super::render::tests::sample;
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// A judge whose verdicts are written in the candidates, so that the order of work can be seen.
    #[derive(Default)]
    struct Paper {
        opened: AtomicUsize,
        judged: AtomicUsize,
        stop: AtomicBool,
        stop_after: Option<usize>,
        /// Others disturb every measurement.
        disturbed: bool,
        /// So much that nothing ends in time.
        late: bool,
    }

    struct Page<'a>(&'a Paper, String);

    impl Court for Paper {
        fn open(&self, task: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble> {
            self.opened.fetch_add(1, Ordering::Relaxed);
            match task.source.as_str() {
                "broken" => Err(Trouble::Request("line 3: no class Model".into())),
                "fault" => Err(Trouble::Fault("the reference host ended".into())),
                _ => Ok(Box::new(Page(self, task.source.clone()))),
            }
        }
    }

    impl Bench for Page<'_> {
        fn compile(&mut self, _: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble> {
            Ok(Ok(vec![]))
        }
        fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble> {
            Ok(vec![])
        }
        fn counters(&mut self, _: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble> {
            Ok(Ok(vec![]))
        }
        fn check(&mut self) -> Result<Vec<String>, Trouble> {
            Ok(if self.1 == "zeros" { vec!["zeros would pass".into()] } else { vec![] })
        }
        fn trace(&mut self) -> Result<Graph, Trouble> {
            Ok(Graph {
                inputs: vec![],
                parameters: vec![],
                nodes: vec![],
                outputs: vec![],
                structure: crate::plan::Structure::Tensor,
            })
        }
        fn judge(
            &mut self,
            candidates: &[Candidate],
            _: Effort,
            told: &mut dyn FnMut(usize, Verdict),
        ) -> Result<(), Trouble> {
            for (i, candidate) in candidates.iter().enumerate() {
                let n = self.0.judged.fetch_add(1, Ordering::Relaxed) + 1;
                if self.0.stop_after == Some(n) {
                    self.0.stop.store(true, Ordering::Relaxed);
                }
                let speedup: f64 = candidate.files["model_new.py"].parse().unwrap();
                let mut verdict = if speedup > 0.0 { sample(2, speedup) } else { sample(-1, 0.0) };
                if self.0.disturbed && verdict.correct {
                    verdict.measurement = Measurement::Shared;
                }
                if self.0.late {
                    verdict = sample(-1, 0.0);
                    if let Some(reason) = &mut verdict.reason {
                        reason.code = "timeout".into();
                    }
                }
                told(i, verdict);
            }
            Ok(())
        }
    }

    struct Listed;
    struct List(VecDeque<&'static str>);

    impl Policy for Listed {
        fn work(&self, work: &mut Work<'_>) -> Result<(), Halt> {
            let mut list = match work.task.source.as_str() {
                "attention" => return Err(Halt::Declined("attention is not a family that it knows".into())),
                "wrong" => List(["0", "0"].into()),
                _ => List(["2", "0", "4", "3"].into()),
            };
            Ok(work.sweep(&mut list)?)
        }
    }

    impl Episode for List {
        fn next(&mut self) -> Vec<(Candidate, String)> {
            let batch = self.0.drain(..);
            let candidate = |t: &str| Candidate { files: [("model_new.py".to_owned(), t.to_owned())].into() };
            batch.map(|t| (candidate(t), format!("variant {t}"))).collect()
        }
        fn learn(&mut self, _: usize, _: &Verdict) {}
    }

    fn task(source: &str) -> TaskSource {
        TaskSource { name: source.into(), path: "x.py".into(), source: source.into() }
    }

    fn settings(folder: &Path) -> Settings {
        Settings {
            folder: folder.into(),
            identity: "a".into(),
            most_attempts: 200,
            target: None,
            workers: 1,
            until: None,
        }
    }

    fn go(tasks: &[&str], paper: &Paper, settings: &Settings) -> Vec<Option<Outcome>> {
        let tasks: Vec<_> = tasks.iter().map(|t| task(t)).collect();
        run(&tasks, paper, &Listed, settings, &Progress::silent(), &paper.stop)
    }

    #[test]
    fn the_best_candidate_is_judged_in_full_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let outcomes = go(&["softmax"], &Paper::default(), &settings(folder.path()));
        let outcome = outcomes[0].clone().unwrap();
        assert_eq!((outcome.attempts, outcome.idea.as_deref()), (4, Some("variant 4")));
        let best = candidate::read(&folder.path().join("softmax/best")).unwrap();
        assert_eq!(best.files["model_new.py"], "4");
        let log = std::fs::read_to_string(folder.path().join("softmax/attempts.jsonl")).unwrap();
        assert_eq!(log.lines().count(), 4);
        let verdict: Verdict =
            serde_json::from_str(&std::fs::read_to_string(folder.path().join("softmax/verdict.json")).unwrap())
                .unwrap();
        assert_eq!(verdict.reward, 2);
    }

    #[test]
    fn what_is_done_is_not_done_again_and_what_changed_is() {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = settings(folder.path());
        let tasks = ["softmax", "attention", "zeros", "wrong", "fault"];
        let first = Paper::default();
        let before = go(&tasks, &first, &settings);
        assert_eq!(first.opened.load(Ordering::Relaxed), 5);
        let second = Paper::default();
        let after = go(&tasks, &second, &settings);
        // Only the fault is tried again.
        assert_eq!(second.opened.load(Ordering::Relaxed), 1);
        assert!(after[..4].iter().flatten().all(|o| o.before));
        let same = after.into_iter().map(|o| o.map(|o| Outcome { before: false, ..o })).collect::<Vec<_>>();
        assert_eq!(before[..4], same[..4]);
        settings.identity = "b".into();
        let third = Paper::default();
        go(&tasks, &third, &settings);
        assert_eq!(third.opened.load(Ordering::Relaxed), 5);
        // A start with other tasks leaves these where they are, and can name them.
        assert_eq!(earlier(folder.path(), &[task("softmax")]), ["attention", "wrong", "zeros"]);
        assert!(earlier(folder.path(), &tasks.map(task)).is_empty());
    }

    #[test]
    fn what_others_disturbed_is_measured_again_by_the_next_start_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        let disturbed = || Paper { disturbed: true, ..Paper::default() };
        let measurement = |o: &[Option<Outcome>]| o[0].as_ref().unwrap().verdict.as_ref().unwrap().measurement;
        let tasks = ["softmax", "attention"];
        assert_eq!(measurement(&go(&tasks, &disturbed(), &settings)), Measurement::Shared);
        let still = disturbed();
        let outcomes = go(&tasks, &still, &settings);
        assert_eq!((still.judged.load(Ordering::Relaxed), measurement(&outcomes)), (1, Measurement::Shared));
        let late = Paper { late: true, ..Paper::default() };
        assert_eq!(measurement(&go(&tasks, &late, &settings)), Measurement::Shared, "a timeout is no better verdict");
        let quiet = Paper::default();
        let outcomes = go(&tasks, &quiet, &settings);
        assert_eq!((quiet.judged.load(Ordering::Relaxed), measurement(&outcomes)), (1, Measurement::Exclusive));
        assert_eq!(outcomes[0].as_ref().map(|o| (o.attempts, o.before)), Some((4, true)));
        let third = Paper::default();
        assert_eq!(measurement(&go(&tasks, &third, &settings)), Measurement::Exclusive);
        assert_eq!(third.opened.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn every_end_of_a_task_has_its_state_and_a_reason() {
        let folder = tempfile::tempdir().unwrap();
        let outcomes =
            go(&["attention", "zeros", "broken", "fault", "wrong"], &Paper::default(), &settings(folder.path()));
        let ends: Vec<_> =
            outcomes.into_iter().flatten().map(|o| (o.state, o.reason, o.verdict.map(|v| v.reward))).collect();
        assert_eq!(ends[0], (State::Declined, Some("attention is not a family that it knows".into()), None));
        assert_eq!(ends[1], (State::Refused, Some("zeros would pass".into()), None));
        assert_eq!(ends[2], (State::Refused, Some("line 3: no class Model".into()), None));
        assert_eq!(ends[3], (State::Failed, Some("the reference host ended".into()), None));
        assert_eq!(ends[4], (State::Judged, None, Some(-1)));
    }

    /// A judge that fails while several tasks are open.
    #[derive(Default)]
    struct Crowded {
        paper: Paper,
        open: AtomicUsize,
    }

    struct Seat<'a>(&'a Crowded, Box<dyn Bench + 'a>);

    impl Drop for Seat<'_> {
        fn drop(&mut self) {
            self.0.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl Court for Crowded {
        fn open(&self, task: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble> {
            self.open.fetch_add(1, Ordering::SeqCst);
            let seat = Seat(self, self.paper.open(task)?);
            std::thread::sleep(std::time::Duration::from_millis(50));
            if self.open.load(Ordering::SeqCst) > 1 {
                return Err(Trouble::Fault("no memory".into()));
            }
            Ok(Box::new(seat))
        }
    }

    impl Bench for Seat<'_> {
        fn check(&mut self) -> Result<Vec<String>, Trouble> {
            self.1.check()
        }
        fn trace(&mut self) -> Result<Graph, Trouble> {
            self.1.trace()
        }
        fn judge(
            &mut self,
            candidates: &[Candidate],
            effort: Effort,
            told: &mut dyn FnMut(usize, Verdict),
        ) -> Result<(), Trouble> {
            self.1.judge(candidates, effort, told)
        }
        fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble> {
            self.1.compile(candidate)
        }
        fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble> {
            self.1.reference()
        }
        fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble> {
            self.1.counters(candidate)
        }
    }

    #[test]
    fn what_failed_beside_others_is_tried_again_alone() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { workers: 4, ..settings(folder.path()) };
        let tasks: Vec<_> = ["a", "b", "c", "d"].iter().map(|t| task(t)).collect();
        let stop = AtomicBool::new(false);
        let outcomes = run(&tasks, &Crowded::default(), &Listed, &settings, &Progress::silent(), &stop);
        let judged = outcomes.iter().flatten().filter(|o| o.state == State::Judged).count();
        assert_eq!(judged, 4);
    }

    #[test]
    fn a_stopped_run_keeps_what_was_done_and_the_next_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let settings = settings(folder.path());
        // Five judgements end the first task; the sixth is the second task's first.
        let paper = Paper { stop_after: Some(6), ..Paper::default() };
        let outcomes = go(&["a", "b", "c"], &paper, &settings);
        assert_eq!(outcomes.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, false]);
        let paper = Paper::default();
        let outcomes = go(&["a", "b", "c"], &paper, &settings);
        assert!(outcomes.iter().all(Option::is_some));
        assert_eq!(paper.opened.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn a_target_and_the_number_of_turns_end_the_search() {
        let folder = tempfile::tempdir().unwrap();
        let mut with = settings(folder.path());
        with.target = Some(Target { baseline: Baseline::Eager, speedup: 1.5 });
        assert_eq!(go(&["a"], &Paper::default(), &with)[0].as_ref().unwrap().attempts, 1);
        with.target = None;
        with.most_attempts = 2;
        with.identity = "other".into();
        assert_eq!(go(&["a"], &Paper::default(), &with)[0].as_ref().unwrap().attempts, 2);
    }

    #[test]
    fn names_of_tasks_never_leave_the_results_folder() {
        assert_eq!(task_folder(Path::new("r"), "../x/y"), Path::new("r/_x_y"));
    }
}
