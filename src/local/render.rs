//! Verdicts and summaries for people: tables that explain themselves, and one plain sentence each. Pure.

use std::fmt::Write;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use super::summary::{Outcome, Pair, State, Summary};
use crate::judge::verdict::{FASTER, Interval, Measurement, Reason, Verdict};

/// What the rewards mean; under every table.
pub const LEGEND: &str = "\
reward -1  wrong, or not a candidate at all
        1  correct on every input set
        2  also faster than eager PyTorch: the lower bound of the speedup is over 1.0526 (5 % less time)
        3  also faster than torch.compile";

/// Under a table with marked figures.
const MARKED: &str = "\
~          others used the device while this was measured: no figure with this mark is to be trusted, nor a reward that
           follows from it; when the machine is quiet the same `run` measures it again, or `judge` on the folder best/";

/// Marks a figure that is not to be trusted.
fn marked(verdict: &Verdict, figure: String) -> String {
    if verdict.trusted() { figure } else { format!("~{figure}") }
}

/// What the rewards mean, and the mark where one is used.
fn legend<'a>(mut verdicts: impl Iterator<Item = &'a Verdict>) -> String {
    if verdicts.all(Verdict::trusted) { LEGEND.to_owned() } else { format!("{LEGEND}\n{MARKED}") }
}

/// The reward with its mark.
#[must_use]
pub fn reward(verdict: &Verdict) -> String {
    marked(verdict, verdict.reward.to_string())
}

/// `1.2 ms`, three significant digits.
#[must_use]
pub fn time(us: f64) -> String {
    time_of(us, 0)
}

/// As `time`, with `more` digits.
fn time_of(us: f64, more: usize) -> String {
    let (value, unit) = if us < 1e3 {
        (us, "us")
    } else if us < 1e6 {
        (us / 1e3, "ms")
    } else {
        (us / 1e6, "s")
    };
    let digits = if value < 10.0 {
        2
    } else if value < 100.0 {
        1
    } else {
        0
    } + more;
    format!("{value:.digits$} {unit}")
}

/// `2.41x`
#[must_use]
pub fn times(speedup: f64) -> String {
    if speedup < 100.0 { format!("{speedup:.2}x") } else { format!("{speedup:.0}x") }
}

fn span(interval: &Interval) -> String {
    let range = range(interval, |x, digits| format!("{x:.*}", 2 + digits));
    range.map_or_else(|| times(interval.median), |range| format!("{} ({range})", times(interval.median)))
}

/// Both ends of an interval, with as many digits as tell them apart. None where a single figure was taken: that has no
/// interval, and one from itself to itself would look like certainty.
fn range(interval: &Interval, shown: impl Fn(f64, usize) -> String) -> Option<String> {
    if (interval.high - interval.low).abs() <= f64::EPSILON * interval.median.abs() {
        return None;
    }
    let ends = |digits| (shown(interval.low, digits), shown(interval.high, digits));
    let (low, high) = (0..3).map(ends).find(|(low, high)| low != high).unwrap_or_else(|| ends(0));
    Some(format!("{low} to {high}"))
}

/// `1 task`, `2 tasks`.
#[must_use]
pub fn count(number: usize, noun: &str) -> String {
    if number == 1 { format!("1 {noun}") } else { format!("{number} {noun}s") }
}

/// Names in a sentence, the first eight of many.
#[must_use]
pub fn names(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN { format!("{shown} and {} more", names.len() - SHOWN) } else { shown }
}

/// One plain sentence: what this verdict says.
#[must_use]
pub fn sentence(verdict: &Verdict) -> String {
    if !verdict.correct {
        let why = verdict.reason.as_ref().map_or_else(|| "no reason was given".to_owned(), place);
        return format!("Not correct: {}", stop(&why));
    }
    let (Some(eager), Some(time_us)) = (verdict.speedup.eager, verdict.time_us.candidate) else {
        return "Correct on every input set; nothing was timed.".into();
    };
    let mut text = format!("Correct; takes {}", time(time_us.median));
    let against = |name: &str, i: &Interval| {
        if i.low > FASTER {
            format!("{} as fast as {name}", times(i.median))
        } else if i.median > FASTER {
            format!("{} as fast as {name}, but the interval reaches down to {:.2}", times(i.median), i.low)
        } else if i.median > 1.0 / FASTER {
            format!("about as fast as {name} ({})", times(i.median))
        } else if i.high >= 1.0 / FASTER {
            format!("slower than {name} ({}), but the interval reaches up to {:.2}", times(i.median), i.high)
        } else {
            format!("slower than {name} ({})", times(i.median))
        }
    };
    let _ = write!(text, ", {}", against("eager PyTorch", &eager));
    match verdict.speedup.compile {
        Some(compile) => {
            let _ = write!(text, ", {}", against("torch.compile", &compile));
        }
        None => text.push_str(", torch.compile was not measured"),
    }
    text.push('.');
    // Where eager was faster as its baseline was measured, that counts, and the time beside it doesn't say so.
    if let Some(shown) = verdict.time_us.eager.map(|t| t.median)
        && eager.median * time_us.median < 0.95 * shown
    {
        let counts = time(eager.median * time_us.median);
        let _ = write!(text, " Eager counts as {counts}, the less that it took when its baseline was measured.");
    }
    if !verdict.trusted() {
        text.push_str(" Not to be trusted: others used the device while it was measured.");
    }
    text
}

fn place(reason: &Reason) -> String {
    let mut text = reason.message.trim_end_matches('.').to_owned();
    match (&reason.file, reason.line) {
        (Some(file), Some(line)) if !text.contains(file.as_str()) => {
            let _ = write!(text, " ({file}:{line})");
        }
        (Some(file), None) if !text.contains(file.as_str()) => {
            let _ = write!(text, " ({file})");
        }
        _ => {}
    }
    if let Some(launch) = &reason.launch
        && !text.contains(launch.as_str())
    {
        let _ = write!(text, ", in {launch}");
    }
    if let Some(hint) = &reason.hint {
        let _ = write!(text, "; {}", hint.trim_end_matches('.'));
    }
    text
}

fn stop(text: &str) -> String {
    // A compiler's caret ends a message as it is.
    if text.ends_with(['.', '!', '?', '^', '~']) { text.to_owned() } else { format!("{text}.") }
}

fn table(head: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(head);
    table
}

fn lines(table: &Table) -> String {
    table.to_string().lines().map(str::trim_end).collect::<Vec<_>>().join("\n")
}

/// A verdict with its evidence.
#[must_use]
pub fn verdict(task: &str, verdict: &Verdict) -> String {
    let mut text = String::new();
    let _ = writeln!(text, "{task}: reward {}. {}\n", reward(verdict), sentence(verdict));
    let mut rows = table(&["", "time", "95 % interval", "speedup", "95 % interval"]);
    let mut row = |name: &str, time_us: Option<Interval>, speedup: Option<Interval>| {
        let Some(t) = time_us else { return };
        let dash = || "-".to_owned();
        let (s, r) = speedup.map_or_else(Default::default, |s| {
            let ends = range(&s, |x, digits| format!("{x:.*}", 2 + digits));
            (marked(verdict, times(s.median)), ends.unwrap_or_else(dash))
        });
        let ends = range(&t, time_of).unwrap_or_else(dash);
        rows.add_row([name.to_owned(), marked(verdict, time(t.median)), ends, s, r]);
    };
    row("candidate", verdict.time_us.candidate, None);
    row("eager", verdict.time_us.eager, verdict.speedup.eager);
    row("torch.compile", verdict.time_us.compile, verdict.speedup.compile);
    if !rows.is_empty() {
        let _ = writeln!(text, "{}\n", lines(&rows));
    }
    if !verdict.launches.is_empty() {
        let mut rows = table(&["launch", "time", "share", "registers", "shared", "occupancy", "buffers", "line"]);
        for launch in &verdict.launches {
            let dash = || "-".to_owned();
            rows.add_row([
                launch.name.clone(),
                launch.time_us.map_or_else(dash, time),
                launch.share.map_or_else(dash, |s| format!("{:.0} %", s * 100.0)),
                launch.registers.map_or_else(dash, |r| r.to_string()),
                launch.shared_bytes.map_or_else(dash, bytes),
                launch.occupancy.map_or_else(dash, |o| format!("{:.0} %", o * 100.0)),
                bytes(launch.bytes),
                launch.line.clone().unwrap_or_default(),
            ]);
        }
        let _ = writeln!(text, "{}\n", lines(&rows));
    }
    let measured = match verdict.measurement {
        Measurement::Exclusive => "exclusive",
        Measurement::Shared => "shared",
        Measurement::None => "none",
    };
    let grade = match verdict.grade {
        crate::judge::verdict::Grade::Enforced => "enforced",
        crate::judge::verdict::Grade::Observed => "observed",
    };
    let _ = writeln!(
        text,
        "grade {grade}, measurement {measured}, {} samples, {} outputs compared, precision {}, tolerance {}, {}",
        verdict.samples, verdict.compared, verdict.precision, verdict.tolerance, verdict.procedure
    );
    let _ = writeln!(text, "confined by {}", list(&verdict.isolation));
    if verdict.cached {
        let _ = writeln!(text, "remembered: an earlier candidate had the same plan and images; --no-cache judges anew");
    }
    for note in &verdict.notes {
        let _ = writeln!(text, "note: {}", stop(note));
    }
    for audit in &verdict.audit {
        let _ = writeln!(text, "look at this by hand: {}", stop(audit));
    }
    let _ = write!(text, "\n{}", legend(std::iter::once(verdict)));
    text
}

fn list(words: &[String]) -> String {
    if words.is_empty() { "nothing".into() } else { words.join(", ") }
}

/// `16.8 MB`
#[must_use]
pub fn bytes(n: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "shown with three digits")]
    let x = n as f64;
    if n < 1000 {
        format!("{n} B")
    } else if n < 1_000_000 {
        format!("{:.1} kB", x / 1e3)
    } else if n < 1_000_000_000 {
        format!("{:.1} MB", x / 1e6)
    } else {
        format!("{:.1} GB", x / 1e9)
    }
}

/// A batch: a line a candidate.
#[must_use]
pub fn batch(task: &str, verdicts: &[(String, Verdict)]) -> String {
    let mut rows = table(&["candidate", "reward", "eager", "compile", "says"]);
    for (name, verdict) in verdicts {
        let speedup = |i: Option<Interval>| i.map_or_else(|| "-".to_owned(), |i| marked(verdict, times(i.median)));
        let says = sentence(verdict);
        rows.add_row([
            name.clone(),
            reward(verdict),
            speedup(verdict.speedup.eager),
            speedup(verdict.speedup.compile),
            says,
        ]);
    }
    right(&mut rows, &[1, 2, 3]);
    format!("{task}\n\n{}\n\n{}", lines(&rows), legend(verdicts.iter().map(|(_, v)| v)))
}

fn right(table: &mut Table, columns: &[usize]) {
    for column in columns {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
}

/// The sentence of a task in the table of a run.
#[must_use]
pub fn outcome_sentence(outcome: &Outcome) -> String {
    let text = verdict_sentence(outcome);
    match &outcome.episode {
        None => text,
        Some(tail) => {
            format!("{text} The episode ended after {} turns: {}.", tail.turns, tail.end.word().replace('_', " "))
        }
    }
}

fn verdict_sentence(outcome: &Outcome) -> String {
    match (outcome.state, &outcome.verdict) {
        (State::Judged, Some(verdict)) => match &outcome.idea {
            Some(idea) if verdict.correct => format!("{} {}", sentence(verdict), stop(&capital(idea))),
            _ => sentence(verdict),
        },
        (State::Declined, _) => {
            format!("Declined by the policy: {}", stop(outcome.reason.as_deref().unwrap_or("no reason")))
        }
        (State::Refused, _) => format!("Task refused: {}", stop(outcome.reason.as_deref().unwrap_or("no reason"))),
        (State::Failed | State::Judged, _) => {
            format!("Not judged: {}", stop(outcome.reason.as_deref().unwrap_or("no reason")))
        }
    }
}

fn capital(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |c| c.to_uppercase().chain(chars).collect())
}

/// The table of a run.
#[must_use]
pub fn run(job: &str, outcomes: &[Outcome], summary: &Summary) -> String {
    let mut rows = table(&["task", "reward", "kernel", "eager", "speedup", "compile", "speedup", "tried"]);
    for outcome in outcomes {
        let verdict = outcome.verdict.as_ref();
        let dash = || "-".to_owned();
        let mark = |figure: String| verdict.map_or_else(|| figure.clone(), |v| marked(v, figure.clone()));
        let t = |i: Option<Interval>| i.map_or_else(dash, |i| mark(time(i.median)));
        let s = |i: Option<Interval>| i.map_or_else(dash, |i| mark(times(i.median)));
        let said = verdict.map_or_else(
            || match outcome.state {
                State::Declined => "declined".to_owned(),
                State::Refused => "refused".to_owned(),
                State::Failed | State::Judged => "failed".to_owned(),
            },
            reward,
        );
        rows.add_row([
            outcome.task.clone(),
            said,
            t(verdict.and_then(|v| v.time_us.candidate)),
            t(verdict.and_then(|v| v.time_us.eager)),
            s(verdict.and_then(|v| v.speedup.eager)),
            t(verdict.and_then(|v| v.time_us.compile)),
            s(verdict.and_then(|v| v.speedup.compile)),
            outcome.attempts.to_string(),
        ]);
    }
    right(&mut rows, &[1, 2, 3, 4, 5, 6, 7]);
    let mut text = format!("{job}\n\n{}\n\n", lines(&rows));
    for outcome in outcomes {
        let _ = writeln!(text, "{}: {}", outcome.task, outcome_sentence(outcome));
    }
    let _ = writeln!(text, "\n{}", totals(summary));
    let _ = write!(text, "\n{}", legend(outcomes.iter().filter_map(|o| o.verdict.as_ref())));
    text
}

/// Counts and means in one paragraph.
#[must_use]
pub fn totals(summary: &Summary) -> String {
    let mean = |m: Option<f64>| m.map_or_else(|| "-".to_owned(), times);
    let Pair { eager, compile } = summary.geomean;
    let mut text = format!(
        "{}: {} correct, {} declined, {} refused, {} failed; faster than eager {}, than torch.compile {}.",
        count(summary.tasks, "task"),
        summary.correct,
        summary.declined,
        summary.refused,
        summary.failed,
        summary.faster.eager,
        summary.faster.compile
    );
    if summary.shared.tasks > 0 {
        let _ = write!(
            text,
            "\nOf these {} {} marked ~ and not to be trusted: {} of those faster than eager, {} than torch.compile.",
            summary.shared.tasks,
            if summary.shared.tasks == 1 { "is" } else { "are" },
            summary.shared.faster.eager,
            summary.shared.faster.compile
        );
    }
    let _ = write!(
        text,
        "\nGeometric mean of the speedup over eager: {} of correct tasks, {} of all (a failed one counts as 1); over torch.compile: {} and {}.",
        mean(eager.correct),
        mean(eager.all),
        mean(compile.correct),
        mean(compile.all)
    );
    let before = summary.before;
    let now = summary.attempts - before.attempts;
    let _ = write!(text, "\n{} judged in {:.0} s.", count(now, "candidate"), summary.seconds);
    if before.tasks > 0 {
        let _ = write!(
            text,
            " {} {} done before, with {}.",
            count(before.tasks, "task"),
            if before.tasks == 1 { "was" } else { "were" },
            count(before.attempts, "candidate")
        );
    }
    if !summary.earlier.is_empty() {
        let _ =
            write!(text, "\nIn the same folder, of earlier starts and not counted here: {}.", names(&summary.earlier));
    }
    text
}

/// The report of a run, Markdown.
#[must_use]
pub fn report(job: &str, outcomes: &[Outcome], summary: &Summary) -> String {
    let mut text = format!("# {job}\n\n{}\n\n", totals(summary));
    text.push_str("| task | reward | kernel | eager | speedup (95 %) | torch.compile | speedup (95 %) | grade |\n|---|--:|--:|--:|--:|--:|--:|---|\n");
    for outcome in outcomes {
        let verdict = outcome.verdict.as_ref();
        let dash = || "-".to_owned();
        let mark = |figure: String| verdict.map_or_else(|| figure.clone(), |v| marked(v, figure.clone()));
        let t = |i: Option<Interval>| i.map_or_else(dash, |i| mark(time(i.median)));
        let s = |i: Option<Interval>| i.map_or_else(dash, |i| mark(span(&i)));
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {} | {} | {} | {} |",
            outcome.task,
            verdict.map_or_else(dash, reward),
            t(verdict.and_then(|v| v.time_us.candidate)),
            t(verdict.and_then(|v| v.time_us.eager)),
            s(verdict.and_then(|v| v.speedup.eager)),
            t(verdict.and_then(|v| v.time_us.compile)),
            s(verdict.and_then(|v| v.speedup.compile)),
            verdict.map_or_else(dash, |v| match v.grade {
                crate::judge::verdict::Grade::Enforced => "enforced".into(),
                crate::judge::verdict::Grade::Observed => "observed".into(),
            }),
        );
    }
    text.push('\n');
    for outcome in outcomes {
        let _ = writeln!(text, "- **{}**: {}", outcome.task, outcome_sentence(outcome));
        for note in outcome.verdict.iter().flat_map(|v| v.notes.iter().chain(&v.audit)) {
            let _ = writeln!(text, "  - {}", stop(note));
        }
    }
    if let Some(verdict) = outcomes.iter().find_map(|o| o.verdict.as_ref()) {
        let _ =
            writeln!(text, "\nMeasured by procedure {}, confined by {}.", verdict.procedure, list(&verdict.isolation));
        let pairs =
            |map: Vec<(String, String)>| map.iter().map(|(k, v)| format!("{k} {v}")).collect::<Vec<_>>().join(", ");
        let device =
            verdict.device.iter().map(|(k, v)| (k.clone(), v.as_str().map_or_else(|| v.to_string(), str::to_owned)));
        let _ = writeln!(text, "Device: {}.", pairs(device.collect()));
        let versions = verdict.versions.iter().map(|(k, v)| (k.clone(), v.clone()));
        let _ = writeln!(text, "Versions: {}.", pairs(versions.collect()));
    }
    let legend = legend(outcomes.iter().filter_map(|o| o.verdict.as_ref()));
    let _ = writeln!(text, "\n```\n{legend}\n```");
    text
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::judge::verdict::{Against, Grade, LaunchEvidence, PROCEDURE, Times};

    pub(crate) fn sample(reward: i32, eager: f64) -> Verdict {
        let interval = |m: f64| Some(Interval { median: m, low: m * 0.99, high: m * 1.01 });
        let correct = reward > 0;
        Verdict {
            reward,
            correct,
            reason: (!correct).then(|| Reason {
                code: "framework_operator".into(),
                message: "torch.relu is a framework operator, which a plan can't hold".into(),
                file: Some("model_new.py".into()),
                line: Some(12),
                launch: None,
                hint: Some("write it as a kernel".into()),
            }),
            grade: Grade::Observed,
            isolation: vec!["users".into(), "landlock".into(), "seccomp".into(), "limits".into()],
            measurement: if correct { Measurement::Exclusive } else { Measurement::None },
            notes: vec![],
            speedup: if correct {
                Against { eager: interval(eager), compile: interval(eager / 2.0) }
            } else {
                Against::default()
            },
            time_us: if correct {
                Times {
                    candidate: interval(8_000.0),
                    eager: interval(8_000.0 * eager),
                    compile: interval(4_000.0 * eager),
                    eager_wall: None,
                }
            } else {
                Times::default()
            },
            samples: if correct { 80 } else { 0 },
            compared: if correct { 24 } else { 0 },
            launches: if correct {
                vec![LaunchEvidence {
                    name: "softmax".into(),
                    time_us: Some(7_900.0),
                    share: Some(1.0),
                    registers: None,
                    shared_bytes: None,
                    local_bytes: None,
                    occupancy: None,
                    roofline: None,
                    bytes: 134_217_728,
                    line: Some("model_new.py:9".into()),
                }]
            } else {
                vec![]
            },
            device: [("name".to_owned(), serde_json::json!("a CPU"))].into(),
            versions: [("torch".to_owned(), "2.11.0".to_owned())].into(),
            precision: "reference".into(),
            tolerance: "contract".into(),
            procedure: PROCEDURE.into(),
            phases_seconds: [].into(),
            digests: [].into(),
            audit: vec![],
            cached: false,
        }
    }

    fn outcomes() -> Vec<Outcome> {
        let judged = |task: &str, verdict| Outcome {
            task: task.into(),
            state: State::Judged,
            reason: None,
            idea: Some("one pass over each row".into()),
            verdict: Some(verdict),
            attempts: 6,
            episode: None,
            seconds: 20.0,
            before: false,
        };
        let without = |task: &str, state, reason: &str| Outcome {
            task: task.into(),
            state,
            reason: Some(reason.into()),
            idea: None,
            verdict: None,
            attempts: 0,
            episode: None,
            seconds: 1.0,
            before: false,
        };
        vec![
            judged("softmax", sample(3, 4.0)),
            judged("rms-norm", sample(2, 2.0)),
            judged("relu", sample(-1, 0.0)),
            without("attention", State::Declined, "scaled_dot_product_attention is not a family that it knows"),
            without("zeros", State::Refused, "zeros would pass"),
        ]
    }

    #[test]
    fn the_table_of_a_run_explains_itself() {
        let outcomes = outcomes();
        let summary = super::super::summary::summarise(&outcomes, 61.4);
        insta::assert_snapshot!(run("demo", &outcomes, &summary));
    }

    #[test]
    fn the_report_of_a_run_holds_intervals_versions_and_reasons() {
        let outcomes = outcomes();
        let summary = super::super::summary::summarise(&outcomes, 61.4);
        insta::assert_snapshot!(report("demo", &outcomes, &summary));
    }

    #[test]
    fn a_summary_as_json_has_counts_rates_and_means() {
        insta::assert_json_snapshot!(super::super::summary::summarise(&outcomes(), 61.4));
    }

    #[test]
    fn a_verdict_shows_times_launches_and_what_it_rests_on() {
        insta::assert_snapshot!("verdict_correct", verdict("softmax", &sample(3, 4.0)));
        insta::assert_snapshot!("verdict_wrong", verdict("relu", &sample(-1, 0.0)));
    }

    #[test]
    fn what_an_earlier_start_did_is_not_counted_as_done_now() {
        let mut outcomes = outcomes();
        outcomes[0].before = true;
        let said = totals(&super::super::summary::summarise(&outcomes, 3.0));
        assert!(said.ends_with("12 candidates judged in 3 s. 1 task was done before, with 6 candidates."), "{said}");
        let mut summary = super::super::summary::summarise(&outcomes[..1], 3.0);
        summary.earlier = (0..10).map(|i| format!("t{i}")).collect();
        let said = totals(&summary);
        assert!(said.starts_with("1 task: 1 correct"), "{said}");
        assert!(said.contains("not counted here: t0, t1, t2, t3, t4, t5, t6, t7 and 2 more."), "{said}");
        assert!(report("demo", &outcomes, &summary).contains("t7 and 2 more"));
        assert_eq!(serde_json::to_value(&summary).unwrap()["earlier"][9], "t9");
    }

    #[test]
    fn either_side_of_a_wide_interval_is_told_with_the_same_care() {
        let against = |low, median, high| {
            let mut verdict = sample(1, 1.0);
            verdict.speedup.compile = Some(Interval { median, low, high });
            sentence(&verdict)
        };
        assert!(
            against(0.87, 1.34, 1.5).contains("1.34x as fast as torch.compile, but the interval reaches down to 0.87")
        );
        assert!(
            against(0.42, 0.78, 1.18)
                .contains("slower than torch.compile (0.78x), but the interval reaches up to 1.18")
        );
        assert!(against(0.80, 0.96, 1.17).contains("about as fast as torch.compile (0.96x)."));
        assert!(against(0.70, 0.78, 0.90).contains("slower than torch.compile (0.78x)."));
    }

    #[test]
    fn a_single_figure_has_no_interval_and_a_narrow_one_shows_both_its_ends() {
        let mut one = sample(3, 4.0);
        one.time_us.compile = Some(Interval { median: 51_600.0, low: 51_600.0, high: 51_600.0 });
        one.speedup.compile = Some(Interval { median: 2.0, low: 2.0, high: 2.0 });
        one.time_us.eager = Some(Interval { median: 51_600.0, low: 51_590.0, high: 51_620.0 });
        let said = verdict("softmax", &one);
        let line = |name: &str| {
            let line = said.lines().find(|l| l.trim_start().starts_with(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line("torch.compile"), "torch.compile 51.6 ms - 2.00x -");
        assert!(line("eager").starts_with("eager 51.6 ms 51.59 ms to 51.62 ms 4.00x"), "{said}");
        assert_eq!(span(&Interval { median: 2.0, low: 2.0, high: 2.0 }), "2.00x");
    }

    #[test]
    fn what_others_disturbed_is_marked_wherever_it_is_told() {
        let mut shared = sample(3, 4.0);
        shared.measurement = Measurement::Shared;
        let mut outcomes = outcomes();
        outcomes[0].verdict = Some(shared.clone());
        let summary = super::super::summary::summarise(&outcomes, 61.4);
        insta::assert_snapshot!("marked_run", run("demo", &outcomes, &summary));
        insta::assert_snapshot!("marked_verdict", verdict("softmax", &shared));
        assert!(report("demo", &outcomes, &summary).contains("| softmax | ~3 | ~8.00 ms |"));
        let judged = batch("softmax", &[("a".to_owned(), shared), ("b".to_owned(), sample(2, 3.0))]);
        assert!(judged.contains(" ~3 ") && judged.contains("~4.00x") && judged.contains(MARKED), "{judged}");
        assert!(judged.contains(" 2 ") && judged.contains("  3.00x") && !judged.contains("~3.00x"), "{judged}");
        let json = serde_json::to_value(&summary).unwrap();
        assert_eq!(json["results"][0]["measurement"], "shared");
        assert_eq!(json["shared"], serde_json::json!({"tasks": 1, "faster": {"eager": 1, "compile": 1}}));
    }

    #[test]
    fn a_summary_of_nothing_has_no_means() {
        let summary = super::super::summary::summarise(&[], 0.0);
        assert_eq!(summary.geomean.eager.all, None);
    }
}
