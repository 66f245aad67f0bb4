//! Metrics, made anew at each scrape from what the core knows, which is what the ledger keeps: a counter outlives its process.
//!
//! A counter never falls: what a void generation counted is counted on only where its successor goes beyond it. Series of a job
//! that is closed for good are gone. Knows names and labels of the board (never a task, a pod or an episode).

use std::collections::BTreeMap;

use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};

use super::core::kept::{EpisodeState, JobState, Speedup};
use super::core::tally::{SECONDS, Tally};
use super::core::{Facts, PoolNow};
use super::facts::{self, EXPLOITS, Finished, VERDICTS};

/// Bounds of turns an episode.
const TURNS: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 150.0, 200.0, 500.0];
/// Bounds of speedups.
const SPEEDUPS: [f64; 12] = [0.25, 0.5, 0.8, 0.95, 1.0, 1.0526, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0];

/// Families under construction.
struct Families {
    pool: String,
    families: BTreeMap<&'static str, MetricFamily>,
}

type Labels<'a> = &'a [(&'a str, &'a str)];

impl Families {
    fn add(
        &mut self,
        name: &'static str,
        help: &str,
        kind: MetricType,
        labels: Labels<'_>,
        fill: impl FnOnce(&mut Metric),
    ) {
        let family = self.families.entry(name).or_insert_with(|| {
            let mut family = MetricFamily::default();
            family.set_name(format!("kernelfleet_{name}"));
            family.set_help(help.to_owned());
            family.set_field_type(kind);
            family
        });
        let pair = |(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        };
        let pool = [("pool", self.pool.as_str())];
        let mut metric = Metric::default();
        metric.set_label(labels.iter().chain(&pool).map(pair).collect());
        fill(&mut metric);
        family.mut_metric().push(metric);
    }

    fn counter(&mut self, name: &'static str, help: &str, labels: Labels<'_>, value: f64) {
        self.add(name, help, MetricType::COUNTER, labels, |metric| {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        });
    }

    fn gauge(&mut self, name: &'static str, help: &str, labels: Labels<'_>, value: f64) {
        self.add(name, help, MetricType::GAUGE, labels, |metric| {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        });
    }

    /// The histogram of a family and label of a tally.
    fn histogram(
        &mut self,
        name: &'static str,
        help: &str,
        labels: Labels<'_>,
        bounds: &[f64],
        from: (&Tally, &str, &str),
    ) {
        let (tally, family, label) = from;
        let of = |bucket: usize| tally.count(family, &format!("{label}|{bucket}"));
        let mut below = 0;
        let mut buckets = Vec::with_capacity(bounds.len());
        for (number, bound) in bounds.iter().enumerate() {
            below += of(number);
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(*bound);
            bucket.set_cumulative_count(below);
            buckets.push(bucket);
        }
        let count = below + of(bounds.len());
        let sum = tally.get(family, &format!("{label}|sum"));
        self.add(name, help, MetricType::HISTOGRAM, labels, |metric| {
            let mut histogram = Histogram::default();
            histogram.set_bucket(buckets);
            histogram.set_sample_count(count);
            histogram.set_sample_sum(sum);
            metric.set_histogram(histogram);
        });
    }
}

/// All families of a pool.
pub fn families<'a>(pool: &str, now: &PoolNow, jobs: impl Iterator<Item = Facts<'a>>) -> Vec<MetricFamily> {
    let mut out = Families { pool: pool.to_owned(), families: BTreeMap::new() };
    let mut phases = Tally::default();
    // A job that was deleted and made again under the same name: the one that isn't closed yet beside it has had its time.
    let mut shown: BTreeMap<(String, String), Facts<'a>> = BTreeMap::new();
    for facts in jobs {
        phases.merge(&facts.usage.tally);
        if facts.job.state != JobState::Closed {
            let name = (facts.job.namespace.clone(), facts.job.name.clone());
            let latest = |f: &Facts<'_>| f.episodes.iter().map(|(e, _)| e.began).fold(f64::NEG_INFINITY, f64::max);
            match shown.get(&name) {
                Some(other) if latest(other) >= latest(&facts) => {}
                _ => drop(shown.insert(name, facts)),
            }
        }
    }
    for facts in shown.values() {
        job(&mut out, facts);
    }
    let names: std::collections::BTreeSet<String> =
        phases.family("phase").filter_map(|(l, _)| l.split_once('|').map(|x| x.0.to_owned())).collect();
    for phase in names {
        let help = "Seconds that judges spent on an evaluation, by phase.";
        out.histogram("judge_phase_seconds", help, &[("phase", &phase)], &SECONDS, (&phases, "phase", &phase));
    }
    out.gauge(
        "gpu_busy_ratio",
        "Share of the last five minutes in which a card was held, over all cards.",
        &[],
        now.busy,
    );
    #[expect(clippy::cast_precision_loss, reason = "a count of judges")]
    let (well, all) = (now.judges.iter().filter(|j| j.unhealthy.is_empty()).count() as f64, now.judges.len() as f64);
    let healthy = if all > 0.0 { well / all } else { 0.0 };
    out.gauge(
        "gpu_healthy",
        "Share of registered judges whose card is well; 0 where none is registered.",
        &[],
        healthy,
    );
    out.families.into_values().collect()
}

fn job(out: &mut Families, facts: &Facts<'_>) {
    let (namespace, name) = (facts.job.namespace.as_str(), facts.job.name.as_str());
    let with = |label: &'static str, value: &'static str| [("namespace", namespace), ("job", name), (label, value)];
    let plain = [("namespace", namespace), ("job", name)];
    let mut counted = Tally::default();
    let mut ended = Tally::default();
    let mut states: BTreeMap<&'static str, u32> =
        ["pending", "running", "succeeded", "failed", "faulted"].into_iter().map(|s| (s, 0)).collect();
    for (episode, void) in &facts.episodes {
        let mut highest = (*void).clone();
        highest.highest(&episode.tally);
        counted.merge(&highest);
        let state = match facts::finished(episode) {
            None => "running",
            Some(Finished::Succeeded) => "succeeded",
            Some(Finished::Failed) => "failed",
            Some(Finished::Faulted) => "faulted",
        };
        *states.entry(state).or_default() += 1;
        if episode.state != EpisodeState::Finished {
            continue;
        }
        ended.observe("turns", "", &TURNS, episode.tally.sum("turns"));
        if let Some((_, judged)) = episode.judged.as_ref().filter(|(_, j)| j.correct) {
            for (baseline, speedup) in [("eager", judged.eager), ("compile", judged.compile)] {
                if let Some(Speedup { median, .. }) = speedup {
                    ended.observe("speedup", baseline, &SPEEDUPS, median);
                }
            }
        }
    }
    let seen: u32 = states.values().sum();
    *states.entry("pending").or_default() += facts.job.indexes().saturating_sub(seen);
    for (state, number) in states {
        out.gauge("episodes", "Episodes of a job, by state.", &with("state", state), f64::from(number));
    }
    let turns = "Turns of agents, by what they came to.";
    for outcome in ["called", "answered", "refused"] {
        out.counter("agent_turns_total", turns, &with("outcome", outcome), counted.get("turns", outcome));
    }
    out.counter("agent_turns_total", turns, &with("outcome", "unanswered"), counted.get("faults", "endpoint"));
    out.histogram("episode_turns", "Turns of finished episodes.", &plain, &TURNS, (&ended, "turns", ""));
    for kind in ["read", "written"] {
        let help = "Tokens that models read and wrote.";
        out.counter("tokens_total", help, &with("kind", kind), counted.get("tokens", kind));
    }
    for verdict in VERDICTS {
        let help = "Verdicts on candidates.";
        out.counter("verdicts_total", help, &with("verdict", verdict), counted.get("verdicts", verdict));
    }
    let hits = counted.get("cache_hits", "");
    out.counter("verdict_cache_hits_total", "Verdicts that were an earlier candidate's.", &plain, hits);
    for kind in EXPLOITS {
        let help = "Candidates that tried to cheat and were recognised, by how.";
        out.counter("exploits_total", help, &with("kind", kind), counted.get("exploits", kind));
    }
    let best = facts::best(facts);
    let rates = facts::rates(best.values().map(|b| b.1));
    #[expect(clippy::cast_precision_loss, reason = "a count of tasks")]
    let tasks = facts.job.tasks.len().max(1) as f64;
    let help = "Share of a job's tasks whose best candidate is correct.";
    out.gauge("job_pass_ratio", help, &plain, f64::from(rates.correct) / tasks);
    for (baseline, faster, mean) in
        [("eager", rates.faster_eager, rates.geomean_eager), ("compile", rates.faster_compile, rates.geomean_compile)]
    {
        let labels = with("baseline", baseline);
        let help = "Share of a job's tasks whose best candidate is more than 5 % faster than a baseline.";
        out.gauge("job_faster_ratio", help, &labels, f64::from(faster) / tasks);
        if let Some(mean) = mean {
            let help = "Geometric mean of the speedups of a job's correct tasks over a baseline.";
            out.gauge("job_speedup_geomean", help, &labels, mean);
        }
        let help = "Speedups of finished episodes' correct candidates over a baseline.";
        out.histogram("speedup", help, &labels, &SPEEDUPS, (&ended, "speedup", baseline));
    }
    let used = &facts.usage.tally;
    for kind in ["shared", "exclusive"] {
        let labels = with("kind", kind);
        let help = "Seconds that slices of a card were waited for.";
        out.histogram("gpu_slice_wait_seconds", help, &labels, &SECONDS, (used, "slice_wait", kind));
        let help = "Seconds of slices of a card that were used.";
        out.counter("gpu_slice_seconds_total", help, &labels, used.get("slice_seconds", kind));
    }
}

#[cfg(test)]
mod tests {
    use prometheus::{Encoder, TextEncoder};

    use super::*;
    use crate::broker::core::kept::{Ending, Episode, Job, Judged, Task, Usage};

    fn text(state: JobState, void: &Tally) -> String {
        let task = |n: usize| Task { name: format!("t{n}"), source: String::new(), replay: None };
        let row = Job {
            uid: "j".into(),
            namespace: "ns".into(),
            name: "one".into(),
            spec: "{}".into(),
            batch_job: "b".into(),
            attempts: 1,
            tasks: (0..4).map(task).collect(),
            state,
        };
        let mut tally = Tally::default();
        tally.add("turns", "called", 3.0);
        tally.add("verdicts", "correct", 2.0);
        let speedup = Some(Speedup { median: 1.5, low: 1.4 });
        let judged = Judged {
            reward: 2,
            correct: true,
            grade: "observed".into(),
            measurement: "exclusive".into(),
            eager: speedup,
            compile: None,
            reason: None,
            candidate: String::new(),
            place: 0,
        };
        let ending = Ending { digest: String::new(), state: "judged".into(), reason: None, end: None, seconds: 1.0 };
        let episode = Episode {
            job: "j".into(),
            index: 0,
            generation: 2,
            pod: "p".into(),
            state: EpisodeState::Finished,
            lines: 0,
            tally,
            judged: Some((1, judged)),
            ending: Some(ending),
            began: 0.0,
            stored: 0,
            said: 0,
        };
        let mut used = Tally::default();
        used.observe("slice_wait", "shared", &SECONDS, 0.02);
        used.add("slice_seconds", "shared", 12.5);
        used.observe("phase", "build", &SECONDS, 0.7);
        let usage = Usage { tally: used, ..Usage::default() };
        let facts = Facts { job: &row, usage: &usage, queued: 0, episodes: vec![(&episode, void)] };
        let families = families("pool", &PoolNow { busy: 0.25, ..PoolNow::default() }, std::iter::once(facts));
        let mut bytes = Vec::new();
        TextEncoder::new().encode(&families, &mut bytes).unwrap();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn a_scrape_reads_as_the_board_expects_it() {
        insta::assert_snapshot!(text(JobState::Open, &Tally::default()));
    }

    #[test]
    fn a_counter_doesnt_fall_when_a_generation_is_void_and_a_closed_job_is_gone() {
        let mut void = Tally::default();
        void.add("turns", "called", 5.0);
        void.add("verdicts", "correct", 1.0);
        let open = text(JobState::Suspended, &void);
        assert!(
            open.contains(r#"agent_turns_total{namespace="ns",job="one",outcome="called",pool="pool"} 5"#),
            "{open}"
        );
        assert!(open.contains(r#"verdicts_total{namespace="ns",job="one",verdict="correct",pool="pool"} 2"#), "{open}");
        let closed = text(JobState::Closed, &void);
        assert!(
            !closed.contains("job=") && closed.contains(r#"judge_phase_seconds_count{phase="build",pool="pool"} 1"#)
        );
    }
}
