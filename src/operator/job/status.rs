//! From what was seen of an OptimizationJob to its status. Pure. The last step.

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::build::queue;
use super::validate;
use crate::api::job::{
    Baseline, BestKernels, Episodes, MOST_RESULTS, OptimizationJob, OptimizationJobSpec, OptimizationJobStatus, Rates,
    Speedups, Target, TaskResult, Tokens,
};
use crate::operator::conditions::{Said, cut, get, is_true, set, whole};
use crate::operator::names;
use crate::wire::v1::{Best, JobFacts};

/// Least and most seconds between two writes of mere progress: a status isn't a metric.
pub const PROGRESS: (i64, i64) = (30, 600);
/// Between these it is this part of the time that the job has run: who looks at a long run sees nothing much older.
const PART: i64 = 8;

/// What a pass over the job came to.
#[derive(Clone, Debug)]
pub enum Seen {
    /// It can't start: something is missing or wrong.
    Refused(validate::Error),
    /// Another's object has the name of one of its own, or the server refuses one.
    Blocked { reason: &'static str, message: String },
    /// It could start, but is suspended.
    Held,
    /// It has started.
    Started(Box<Progress>),
}

/// How far a started job is.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// `None` where the Job was taken away to be suspended in a queue.
    pub batch: Option<Job>,
    /// What the broker says, or why it says nothing.
    pub said: Option<Result<JobFacts, String>>,
    pub trouble: Option<String>,
    /// Where the best kernels were put, once it has ended.
    pub best: Option<BestKernels>,
    /// Every task has reached the target: the attempts that are left aren't needed.
    pub reached: bool,
    pub lacks: Option<Lacks>,
}

/// What episodes wait for: the pool or the endpoint isn't ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lacks {
    /// `PoolNotReady`, `EndpointNotReady`.
    pub state: &'static str,
    pub why: String,
    /// The broker isn't there either.
    pub broker: bool,
}

/// How a Job has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Every episode was finished.
    Finished,
    /// Every task has reached the target before its last attempt.
    Reached,
    /// Some episodes ended by faults alone, but every task has a finished one.
    SomeFaulted(String),
    /// A task has no finished episode.
    Failed { reason: &'static str, message: String },
}

/// How a Job has ended, if it has. `attempts` are the episodes of a task, whose indices are neighbours.
#[must_use]
pub fn end(batch: &Job, attempts: i32) -> Option<End> {
    let status = batch.status.as_ref()?;
    let is = |kind: &str| status.conditions.iter().flatten().find(|c| c.type_ == kind && c.status == "True");
    if is("Complete").is_some() {
        return Some(End::Finished);
    }
    let failed = is("Failed")?;
    let indices = status.failed_indexes.as_deref().unwrap_or_default();
    let name = batch.metadata.name.clone().unwrap_or_default();
    let hint = format!("kubectl logs -l batch.kubernetes.io/job-name={name} -c agent --tail=20 says more");
    if failed.reason.as_deref() != Some("FailedIndexes") {
        let reason = failed.reason.clone().unwrap_or_default();
        let message = format!("the Job failed: {reason}: {}", failed.message.clone().unwrap_or_default());
        return Some(End::Failed { reason: "JobFailed", message });
    }
    let ranges = ranges(indices);
    let faulted: i64 = ranges.iter().map(|(a, b)| b - a + 1).sum();
    let lost = tasks_without_end(&ranges, i64::from(attempts.max(1)));
    let shown = cut(indices, 100);
    if lost == 0 {
        return Some(End::SomeFaulted(format!("{faulted} episodes ended by faults (indices {shown}); {hint}")));
    }
    let message = format!("{lost} tasks have no finished episode: the indices {shown} ended by faults; {hint}");
    Some(End::Failed { reason: "EpisodesFaulted", message })
}

/// `1,3-5` as pairs of first and last.
fn ranges(text: &str) -> Vec<(i64, i64)> {
    let parse = |t: &str| t.trim().parse::<i64>().ok();
    text.split(',')
        .filter_map(|part| match part.split_once('-') {
            Some((a, b)) => Some((parse(a)?, parse(b)?)),
            None => parse(part).map(|n| (n, n)),
        })
        .collect()
}

/// Tasks all of whose indices are in the ranges.
fn tasks_without_end(ranges: &[(i64, i64)], attempts: i64) -> i64 {
    ranges
        .iter()
        .map(|(first, last)| {
            let from = (first + attempts - 1).div_euclid(attempts);
            let to = (last + 1).div_euclid(attempts);
            (to - from).max(0)
        })
        .sum()
}

/// Whether every task may have reached the target, so that a look at the verdicts is worth it: only further attempts could be
/// spared, and only of a job whose best results are all told.
#[must_use]
pub fn promising(spec: &OptimizationJobSpec, facts: &JobFacts) -> bool {
    let Some(target) = &spec.target else { return false };
    let all = facts.tasks > 0 && usize::try_from(facts.tasks).is_ok_and(|n| n == facts.best.len());
    let median = |b: &Best| match target.baseline {
        Baseline::Eager => b.speedup_eager,
        Baseline::Compile => b.speedup_compile,
    };
    spec.agent.attempts > 1 && all && facts.best.iter().all(|b| median(b) >= target.speedup)
}

/// Whether a verdict, as JSON, reaches the target by the lower bound of its speedup.
#[must_use]
pub fn reaches(target: &Target, verdict: &str) -> bool {
    let Ok(verdict) = serde_json::from_str::<serde_json::Value>(verdict) else { return false };
    let baseline = match target.baseline {
        Baseline::Eager => "eager",
        Baseline::Compile => "compile",
    };
    verdict["correct"] == true && verdict["speedup"][baseline]["low"].as_f64().is_some_and(|low| low >= target.speedup)
}

/// Whether the status says that the job is over.
#[must_use]
pub fn over(status: Option<&OptimizationJobStatus>) -> bool {
    status.is_some_and(|s| is_true(&s.conditions, "Succeeded") || is_true(&s.conditions, "Failed"))
}

/// The status that follows.
#[must_use]
pub fn status(job: &OptimizationJob, seen: &Seen, now: Timestamp) -> OptimizationJobStatus {
    let generation = job.metadata.generation;
    let mut status = job.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let say = |status: &mut OptimizationJobStatus, kind: &str, said: &Said| {
        set(&mut status.conditions, kind, said, generation, now);
    };
    match seen {
        Seen::Refused(error) => {
            let message = error.to_string();
            let valid = if error.waits() {
                Said::unknown(error.reason(), &message)
            } else {
                Said::no(error.reason(), &message)
            };
            say(&mut status, "Validated", &valid);
            say(&mut status, "Started", &Said::no(error.reason(), "no pod has been made"));
            say(&mut status, "Progressing", &Said::no(error.reason(), message));
            say(&mut status, "Suspended", &suspended(job));
        }
        Seen::Blocked { reason, message } => {
            say(&mut status, "Validated", &Said::yes("Valid", "the spec can be carried out"));
            if !is_true(&status.conditions, "Started") {
                say(&mut status, "Started", &Said::no(reason, "no pod has been made"));
            }
            say(&mut status, "Progressing", &Said::no(reason, message.clone()));
            say(&mut status, "Suspended", &suspended(job));
        }
        Seen::Held => {
            say(&mut status, "Validated", &Said::yes("Valid", "the spec can be carried out"));
            say(&mut status, "Started", &Said::no("Suspended", "no pod has been made"));
            let message = "spec.suspend is true; set it to false to start";
            say(&mut status, "Progressing", &Said::no("Suspended", message));
            say(&mut status, "Suspended", &suspended(job));
        }
        Seen::Started(progress) => started(job, &mut status, progress, now),
    }
    status
}

fn suspended(job: &OptimizationJob) -> Said {
    if job.spec.suspend {
        Said::yes("Suspended", "spec.suspend is true")
    } else {
        Said::no("NotSuspended", "spec.suspend is false")
    }
}

fn started(job: &OptimizationJob, status: &mut OptimizationJobStatus, progress: &Progress, now: Timestamp) {
    let generation = job.metadata.generation;
    let say = |status: &mut OptimizationJobStatus, kind: &str, said: &Said| {
        set(&mut status.conditions, kind, said, generation, now);
    };
    say(status, "Validated", &Said::yes("Valid", "the spec can be carried out"));
    if !is_true(&status.conditions, "Started") {
        say(status, "Started", &Said::yes("JobCreated", "the Job of its episodes has been made; the spec is frozen"));
    }
    let batch = progress.batch.as_ref();
    status.batch_job = job.metadata.name.clone();
    if status.tasks.is_none() {
        let completions = batch.and_then(|b| b.spec.as_ref()).and_then(|s| s.completions);
        status.tasks = completions.map(|c| c / job.spec.agent.attempts.max(1));
    }
    let running = batch.and_then(|b| b.status.as_ref()).and_then(|s| s.start_time.clone());
    // The Job's controller says so a moment after the Job was made; that alone would be a second write.
    let free = batch.filter(|b| b.spec.as_ref().and_then(|s| s.suspend) != Some(true));
    if status.start_time.is_none() {
        status.start_time = running.or_else(|| free.and_then(|b| b.metadata.creation_timestamp.clone()));
    }
    if let Some(Ok(facts)) = &progress.said
        && facts.known
    {
        fill(status, facts);
        // The broker isn't told that pods were taken away: what they were at begins again.
        let gone = batch.is_none_or(|b| b.status.as_ref().is_none_or(|s| s.active.unwrap_or(0) == 0));
        if let Some(episodes) = status.episodes.as_mut().filter(|_| job.spec.suspend && gone) {
            episodes.pending += std::mem::take(&mut episodes.running);
        }
    }
    if let Some(best) = &progress.best {
        status.best = Some(best.clone());
    }
    let attempts = job.spec.agent.attempts;
    let end = if progress.reached { Some(End::Reached) } else { batch.and_then(|b| end(b, attempts)) };
    match end {
        Some(end) => ended(job, status, &end, progress, now),
        None => {
            let moves = moving(job, progress);
            say(status, "Progressing", &moves);
            say(status, "Suspended", &suspended(job));
        }
    }
}

/// What a job is doing that hasn't ended.
fn moving(job: &OptimizationJob, progress: &Progress) -> Said {
    if job.spec.suspend {
        return Said::no("Suspended", "spec.suspend is true; what was finished stays, set it to false to go on");
    }
    let Some(batch) = &progress.batch else {
        return match &progress.said {
            Some(Err(why)) => Said::yes("BrokerUnreachable", format!("{why}; no pod is made until it answers")),
            _ => Said::yes("Starting", "the Job of its episodes is being made"),
        };
    };
    if batch.spec.as_ref().and_then(|s| s.suspend) == Some(true) {
        return match queue(&job.spec) {
            Some(queue) => {
                let name = job.metadata.name.clone().unwrap_or_default();
                Said::yes(
                    "Queued",
                    format!("waits in Kueue's queue {queue}; kubectl get workloads says where job {name} stands"),
                )
            }
            None => Said::no("SuspendedByOthers", "its Job was suspended by somebody else; whoever did it resumes it"),
        };
    }
    if let Some(trouble) = &progress.trouble {
        return Said::yes("PodsWaiting", format!("no pod runs: {}", cut(trouble, 800)));
    }
    // That a broker isn't heard is no news where it isn't there.
    if let Some(Lacks { state, why, .. }) =
        progress.lacks.as_ref().filter(|l| l.broker || !matches!(progress.said, Some(Err(_))))
    {
        return Said::yes(state, format!("episodes wait: {}", cut(why, 800)));
    }
    match &progress.said {
        Some(Err(why)) => Said::yes("BrokerUnreachable", format!("{why}; pods go on, figures will follow")),
        // No count in here: a message that changes with each episode is a write for each episode.
        _ => Said::yes("Running", "episodes are under way; status.episodes counts them"),
    }
}

fn ended(job: &OptimizationJob, status: &mut OptimizationJobStatus, end: &End, progress: &Progress, now: Timestamp) {
    let generation = job.metadata.generation;
    let say = |status: &mut OptimizationJobStatus, kind: &str, said: &Said| {
        set(&mut status.conditions, kind, said, generation, now);
    };
    if let Some(Err(why)) = &progress.said {
        let message = format!("all episodes have ended, but their results can't be had: {why}; it is tried again");
        say(status, "Progressing", &Said::yes("BrokerUnreachable", message));
        return;
    }
    let mut figures = format!(
        "{} of {} tasks correct, {} faster than eager",
        status.correct.unwrap_or(0),
        status.tasks.unwrap_or(0),
        status.faster_than_eager.unwrap_or(0)
    );
    if let Some(declined) = status.declined.filter(|n| *n > 0) {
        figures.push_str(&format!(", {declined} declined (status.results says why)"));
    }
    if let Some(untrusted) = status.untrusted.filter(|n| *n > 0) {
        let what = format!(", {untrusted} measured while others used the device: their speedups are not to be trusted");
        figures.push_str(&what);
    }
    let name = job.metadata.name.clone().unwrap_or_default();
    let fetch = match &status.best {
        Some(_) => {
            format!("; kubectl get configmap {} or `kernelfleet results {name}` has the kernels", names::best(&name))
        }
        None => String::new(),
    };
    let (succeeded, reason, message) = match end {
        End::Finished => (true, "Finished", format!("{figures}{fetch}")),
        End::Reached => (true, "TargetReached", format!("every task has reached spec.target; {figures}{fetch}")),
        End::SomeFaulted(what) => (true, "FinishedWithFaults", format!("{figures}; {what}{fetch}")),
        End::Failed { reason, message } => (false, *reason, format!("{message}; {figures}")),
    };
    let (yes, no) = if succeeded { ("Succeeded", "Failed") } else { ("Failed", "Succeeded") };
    say(status, yes, &Said::yes(reason, &message));
    say(status, no, &Said::no(reason, ""));
    say(status, "Progressing", &Said::no(yes, message));
    say(status, "Suspended", &Said::no("NotSuspended", "the job is over"));
    if status.completion_time.is_none() {
        status.completion_time = Some(Time(whole(now)));
    }
}

fn number(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn large(n: u64) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// Three digits behind the point are what a person reads.
fn rounded(x: f64) -> f64 {
    if x.is_finite() { (x * 1000.0).round() / 1000.0 } else { 0.0 }
}

fn measured(x: f64) -> Option<f64> {
    (x.is_finite() && x > 0.0).then(|| rounded(x))
}

fn fill(status: &mut OptimizationJobStatus, facts: &JobFacts) {
    let ended =
        facts.running.saturating_add(facts.succeeded).saturating_add(facts.failed).saturating_add(facts.faulted);
    status.tasks = Some(number(facts.tasks));
    status.episodes = Some(Episodes {
        pending: number(facts.episodes.saturating_sub(ended)),
        running: number(facts.running),
        succeeded: number(facts.succeeded),
        failed: number(facts.failed),
        faulted: number(facts.faulted),
    });
    status.turns = Some(large(facts.turns));
    status.tokens = Some(Tokens { read: large(facts.tokens_read), written: large(facts.tokens_written) });
    status.correct = Some(number(facts.correct));
    status.declined = Some(number(facts.declined));
    status.faster_than_eager = Some(number(facts.faster_eager));
    status.faster_than_compile = Some(number(facts.faster_compile));
    let rate = |n: u32| if facts.tasks == 0 { 0.0 } else { rounded(f64::from(n) / f64::from(facts.tasks)) };
    status.rates = Some(Rates {
        correct: rate(facts.correct),
        faster_than_eager: rate(facts.faster_eager),
        faster_than_compile: rate(facts.faster_compile),
    });
    status.untrusted = Some(number(facts.untrusted));
    status.geomean = Some(Speedups { eager: measured(facts.geomean_eager), compile: measured(facts.geomean_compile) });
    status.gpu_seconds = Some(rounded(facts.slice_seconds));
    status.queued = Some(number(facts.queued));
    status.results = facts.best.iter().take(MOST_RESULTS).map(result).collect();
}

fn result(best: &Best) -> TaskResult {
    TaskResult {
        task: cut(&best.task, 253),
        episode: number(best.episode),
        reward: best.reward,
        grade: cut(&best.grade, 32),
        measurement: cut(&best.measurement, 32),
        speedup: Speedups { eager: measured(best.speedup_eager), compile: measured(best.speedup_compile) },
        candidate: cut(&best.candidate, 128),
        reason: cut(&best.reason, 256),
    }
}

/// Whether a status is to be written now: what it says has changed, or progress has and the last write is some time ago.
#[must_use]
pub fn due(
    old: Option<&OptimizationJobStatus>,
    new: &OptimizationJobStatus,
    last: Option<Timestamp>,
    now: Timestamp,
) -> bool {
    let Some(old) = old else { return true };
    if old == new {
        return false;
    }
    let words = |s: &OptimizationJobStatus| {
        let of = |c: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition| {
            (c.type_.clone(), c.status.clone(), c.reason.clone(), c.message.clone())
        };
        (s.conditions.iter().map(of).collect::<Vec<_>>(), s.observed_generation, s.best.clone())
    };
    let ran = new.start_time.as_ref().map_or(0, |s| now.as_second() - s.0.as_second());
    let interval = (ran / PART).clamp(PROGRESS.0, PROGRESS.1);
    words(old) != words(new) || last.is_none_or(|l| now.as_second() - l.as_second() >= interval)
}

/// Conditions that changed, as events: reason, message, and whether it is bad news.
#[must_use]
pub fn news(old: Option<&OptimizationJobStatus>, new: &OptimizationJobStatus) -> Vec<(String, String, bool)> {
    let before =
        |kind: &str| old.and_then(|s| get(&s.conditions, kind)).map(|c| (c.status.as_str(), c.reason.as_str()));
    let mut news = Vec::new();
    for kind in ["Started", "Progressing"] {
        let Some(condition) = get(&new.conditions, kind) else { continue };
        if before(kind) == Some((condition.status.as_str(), condition.reason.as_str())) {
            continue;
        }
        // That it hasn't started is what Progressing says, with the reason.
        if kind == "Started" && condition.status != "True" {
            continue;
        }
        const GOOD: [&str; 9] = [
            "JobCreated",
            "Running",
            "Starting",
            "Succeeded",
            "Suspended",
            "Queued",
            "PodsWaiting",
            "PoolNotReady",
            "EndpointNotReady",
        ];
        // The pass that makes the Job says so, which is news enough.
        if kind == "Progressing" && matches!(condition.reason.as_str(), "Running" | "Starting") && !news.is_empty() {
            continue;
        }
        let bad = !GOOD.contains(&condition.reason.as_str());
        news.push((condition.reason.clone(), condition.message.clone(), bad));
    }
    news
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::operator::job::validate::tests::job;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn batch(spec: &Value, status: &Value) -> Option<Job> {
        let mut value = json!({ "metadata": { "name": "demo" }, "spec": { "template": {} }, "status": status });
        crate::operator::pool::validate::overlay(&mut value, &json!({ "spec": spec }));
        serde_json::from_value(value).unwrap()
    }

    fn facts() -> JobFacts {
        let best = Best {
            task: "relu".into(),
            episode: 1,
            reward: 3,
            grade: "observed".into(),
            speedup_eager: 2.123_45,
            speedup_compile: 1.5,
            candidate: "sha256:ab".into(),
            reason: String::new(),
            measurement: "exclusive".into(),
        };
        JobFacts {
            known: true,
            tasks: 2,
            episodes: 4,
            running: 1,
            succeeded: 2,
            failed: 0,
            turns: 37,
            tokens_read: 1000,
            tokens_written: 200,
            correct: 1,
            faster_eager: 1,
            faster_compile: 1,
            geomean_eager: 2.123_45,
            geomean_compile: f64::NAN,
            slice_seconds: 12.345_678,
            best: vec![best],
            ..JobFacts::default()
        }
    }

    fn told(status: &OptimizationJobStatus) -> String {
        let line = |c: &k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition| {
            format!("{}={} {}: {}\n", c.type_, c.status, c.reason, c.message)
        };
        status.conditions.iter().map(line).collect()
    }

    #[test]
    fn a_jobs_conditions_tell_where_it_stands_and_what_to_do() {
        let plain = job(&json!({}));
        let held = job(&json!({ "suspend": true }));
        let queued = job(&json!({ "agent": { "scheduling": { "queueName": "gpus" } } }));
        let none = json!({});
        let running = json!({ "active": 2, "ready": 1, "startTime": "2027-01-15T08:00:00Z" });
        let done = |conditions: Value, failed: &str| json!({ "conditions": [conditions], "failedIndexes": failed, "startTime": "2027-01-15T08:00:00Z" });
        let complete = done(json!({ "type": "Complete", "status": "True" }), "");
        let failed = |indices: &str| {
            done(json!({ "type": "Failed", "status": "True", "reason": "FailedIndexes", "message": "x" }), indices)
        };
        let best = Some(BestKernels { config_map: "demo-best".into(), tasks: 1, left_out: 0 });
        let progress = |batch, said| Seen::Started(Box::new(Progress { batch, said, ..Progress::default() }));
        let good = || Some(Ok(facts()));
        let stories: Vec<(&str, &OptimizationJob, Seen)> = vec![
            ("no pool", &plain, Seen::Refused(validate::Error::NoPool("default".into()))),
            ("broken tasks", &plain, Seen::Refused(validate::Error::NoTasks("the ConfigMap tasks".into()))),
            ("suspended before it began", &held, Seen::Held),
            (
                "another's Job",
                &plain,
                Seen::Blocked { reason: "NameTaken", message: "Job demo is there already".into() },
            ),
            ("running", &plain, progress(batch(&none, &running), good())),
            ("suspended", &held, progress(batch(&json!({ "suspend": true }), &none), good())),
            ("in a queue", &queued, progress(batch(&json!({ "suspend": true }), &none), good())),
            ("suspended by another", &plain, progress(batch(&json!({ "suspend": true }), &none), good())),
            (
                "pods that wait",
                &plain,
                Seen::Started(Box::new(Progress {
                    batch: batch(&none, &running),
                    trouble: Some("pod demo-0 can't be scheduled: 0/1 nodes".into()),
                    said: good(),
                    ..Progress::default()
                })),
            ),
            (
                "a pool without judges",
                &plain,
                Seen::Started(Box::new(Progress {
                    batch: batch(&none, &running),
                    said: good(),
                    lacks: Some(Lacks {
                        state: "PoolNotReady",
                        why: "the GpuPool `default` is not ready: none of 1 judges is ready".into(),
                        broker: false,
                    }),
                    ..Progress::default()
                })),
            ),
            (
                "a pool whose broker starts",
                &plain,
                Seen::Started(Box::new(Progress {
                    batch: batch(&none, &running),
                    said: Some(Err("the broker of pool default can't be reached: x".into())),
                    lacks: Some(Lacks {
                        state: "PoolNotReady",
                        why: "the broker's pod is not ready".into(),
                        broker: true,
                    }),
                    ..Progress::default()
                })),
            ),
            (
                "measured beside others, and one declined",
                &plain,
                progress(batch(&none, &complete), Some(Ok(JobFacts { untrusted: 1, declined: 1, ..facts() }))),
            ),
            (
                "no broker",
                &plain,
                progress(batch(&none, &running), Some(Err("the broker of pool default can't be reached: x".into()))),
            ),
            (
                "finished",
                &plain,
                Seen::Started(Box::new(Progress {
                    batch: batch(&none, &complete),
                    said: good(),
                    best,
                    ..Progress::default()
                })),
            ),
            ("no broker and no Job", &plain, progress(None, Some(Err("the broker can't be reached: x".into())))),
            ("finished without broker", &plain, progress(batch(&none, &complete), Some(Err("unreachable".into())))),
            ("a task is lost", &plain, progress(batch(&none, &failed("1,3")), good())),
        ];
        let mut text = String::new();
        for (story, job, seen) in stories {
            text.push_str(&format!("# {story}\n{}", told(&status(job, &seen, at(0)))));
        }
        let twice = job(&json!({ "agent": { "attempts": 2 } }));
        let seen = progress(batch(&none, &failed("1-2")), good());
        text.push_str(&format!("# an attempt is lost, its task isn't\n{}", told(&status(&twice, &seen, at(0)))));
        insta::assert_snapshot!(text);
    }

    #[test]
    fn figures_are_the_brokers() {
        let seen = Seen::Started(Box::new(Progress {
            batch: batch(&json!({}), &json!({ "active": 1, "ready": 1 })),
            said: Some(Ok(facts())),
            ..Progress::default()
        }));
        let mut status = status(&job(&json!({})), &seen, at(0));
        status.conditions.clear();
        insta::assert_json_snapshot!(status);
    }

    #[test]
    fn further_attempts_are_spared_once_every_task_has_reached_the_target_by_the_lower_bound() {
        let spec = job(&json!({ "target": { "speedup": 2.0 }, "agent": { "attempts": 3 } })).spec;
        let one = JobFacts { tasks: 1, ..facts() };
        assert!(promising(&spec, &one));
        assert!(!promising(&spec, &facts()), "a task has no result yet");
        assert!(!promising(&job(&json!({ "target": { "speedup": 2.0 } })).spec, &one), "there is no further attempt");
        assert!(!promising(&job(&json!({ "agent": { "attempts": 3 } })).spec, &one), "there is no target");
        let target = spec.target.unwrap();
        let verdict =
            |low: f64| json!({ "correct": true, "speedup": { "eager": { "median": 2.5, "low": low } } }).to_string();
        assert!(reaches(&target, &verdict(2.0)) && !reaches(&target, &verdict(1.99)));
        assert!(
            !reaches(&target, "{") && !reaches(&target, r#"{"correct": false, "speedup": {"eager": {"low": 9.0}}}"#)
        );
        let seen = Seen::Started(Box::new(Progress { said: Some(Ok(one)), reached: true, ..Progress::default() }));
        let status = status(&job(&json!({})), &seen, at(0));
        assert!(
            told(&status).contains("Succeeded=True TargetReached: every task has reached spec.target"),
            "{}",
            told(&status)
        );
    }

    #[test]
    fn indices_of_whole_tasks_are_counted() {
        assert_eq!(ranges("1,3-5,7"), [(1, 1), (3, 5), (7, 7)]);
        assert_eq!(tasks_without_end(&[(1, 1), (3, 5)], 1), 4);
        assert_eq!(tasks_without_end(&[(1, 2)], 2), 0);
        assert_eq!(tasks_without_end(&[(1, 5)], 2), 2);
        assert_eq!(tasks_without_end(&[(0, 9)], 5), 2);
        assert_eq!(tasks_without_end(&[], 5), 0);
    }

    #[test]
    fn mere_progress_is_written_seldom_and_what_is_said_at_once() {
        let job = job(&json!({}));
        let running = batch(&json!({}), &json!({ "active": 1, "ready": 1 }));
        let seen = |said: JobFacts| {
            Seen::Started(Box::new(Progress { batch: running.clone(), said: Some(Ok(said)), ..Progress::default() }))
        };
        let old = status(&job, &seen(facts()), at(0));
        let mut later = job.clone();
        later.status = Some(old.clone());
        let same = status(&later, &seen(facts()), at(5));
        assert!(!due(Some(&old), &same, Some(at(0)), at(5)));
        let more = status(&later, &seen(JobFacts { turns: 38, ..facts() }), at(5));
        assert!(!due(Some(&old), &more, Some(at(0)), at(5)));
        assert!(due(Some(&old), &more, Some(at(0)), at(PROGRESS.0)));
        let old_job = OptimizationJobStatus { start_time: Some(Time(at(-3600))), ..more.clone() };
        assert!(!due(Some(&old), &old_job, Some(at(0)), at(400)), "a job of an hour is written every eighth of it");
        assert!(due(Some(&old), &old_job, Some(at(0)), at(600)));
        let blocked = status(&later, &Seen::Blocked { reason: "NameTaken", message: "x".into() }, at(5));
        assert!(due(Some(&old), &blocked, Some(at(0)), at(5)));
        assert_eq!(news(Some(&old), &blocked), [("NameTaken".into(), "x".into(), true)]);
        assert!(news(Some(&old), &more).is_empty());
    }

    #[test]
    fn a_status_stays_small_whatever_the_broker_says() {
        let long = Best { task: "t".repeat(5000), reason: "r".repeat(5000), ..Best::default() };
        let facts = JobFacts { best: vec![long; 500], ..facts() };
        let seen = Seen::Started(Box::new(Progress { said: Some(Ok(facts)), ..Progress::default() }));
        let status = status(&job(&json!({})), &seen, at(0));
        assert!(serde_json::to_string(&status).unwrap().len() < 64 << 10);
    }
}
