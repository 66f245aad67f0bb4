//! What a person sees while a run works: bars on a terminal, plain lines elsewhere, on standard error.
//!
//! Knows how to show. Must not know what is done.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::render::{outcome_sentence, reward};
use super::summary::Outcome;
use super::terminal::err;

/// What is said while a judge starts: nothing else is seen of it for so long.
pub const STARTING: &str = "starting the judge (up to 20 s)";

/// Shows the work on a number of tasks.
#[derive(Debug)]
pub struct Progress(Kind);

#[derive(Debug)]
enum Kind {
    Silent,
    Lines { total: usize, done: Mutex<usize> },
    Bars { all: MultiProgress, whole: ProgressBar, tasks: Mutex<HashMap<String, ProgressBar>> },
}

impl Progress {
    /// Bars where standard error is a terminal, else lines.
    #[must_use]
    pub fn new(total: usize) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self(Kind::Lines { total, done: Mutex::new(0) });
        }
        let all = MultiProgress::new();
        let whole = all.add(ProgressBar::new(u64::try_from(total).unwrap_or(0)));
        whole.set_style(style("{bar:30} {pos}/{len} tasks, {elapsed} {msg}"));
        whole.enable_steady_tick(Duration::from_secs(1));
        Self(Kind::Bars { all, whole, tasks: Mutex::default() })
    }

    /// Shows nothing.
    #[must_use]
    pub fn silent() -> Self {
        Self(Kind::Silent)
    }

    /// What is being done before there is work on any task.
    pub fn start(&self, what: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Lines { .. } => err(what),
            Kind::Bars { whole, .. } => whole.set_message(what.to_owned()),
        }
    }

    /// Work on a task begins.
    pub fn begin(&self, task: &str) {
        if let Kind::Bars { all, whole, tasks } = &self.0 {
            whole.set_message("");
            let bar = all.insert_before(whole, ProgressBar::new_spinner());
            bar.set_style(style("  {spinner} {prefix} {elapsed} {msg}"));
            bar.set_prefix(task.to_owned());
            bar.enable_steady_tick(Duration::from_millis(200));
            tasks.lock().unwrap_or_else(PoisonError::into_inner).insert(task.to_owned(), bar);
        }
    }

    /// What is being done for a task now.
    pub fn say(&self, task: &str, what: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Lines { .. } => err(&format!("{task}: {what}")),
            Kind::Bars { tasks, .. } => {
                if let Some(bar) = tasks.lock().unwrap_or_else(PoisonError::into_inner).get(task) {
                    bar.set_message(what.to_owned());
                }
            }
        }
    }

    /// A line that stays.
    pub fn note(&self, text: &str) {
        match &self.0 {
            Kind::Silent => {}
            Kind::Lines { .. } => err(text),
            Kind::Bars { whole, .. } => whole.println(text),
        }
    }

    /// A task has ended.
    pub fn done(&self, outcome: &Outcome) {
        let said = outcome.verdict.as_ref().map_or_else(String::new, |v| format!("reward {}. ", reward(v)));
        let when = if outcome.before { "done before. ".to_owned() } else { format!("{:.0} s. ", outcome.seconds) };
        let text = format!("{}: {when}{said}{}", outcome.task, outcome_sentence(outcome));
        match &self.0 {
            Kind::Silent => {}
            Kind::Lines { total, done } => {
                let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                *done += 1;
                err(&format!("[{done}/{total}] {text}"));
            }
            Kind::Bars { whole, tasks, .. } => {
                if let Some(bar) = tasks.lock().unwrap_or_else(PoisonError::into_inner).remove(&outcome.task) {
                    bar.finish_and_clear();
                }
                whole.println(text);
                whole.inc(1);
            }
        }
    }

    /// A task waits for another try.
    pub fn leave(&self, task: &str) {
        if let Kind::Bars { tasks, .. } = &self.0
            && let Some(bar) = tasks.lock().unwrap_or_else(PoisonError::into_inner).remove(task)
        {
            bar.finish_and_clear();
        }
    }

    /// Takes the bars away.
    pub fn end(&self) {
        if let Kind::Bars { whole, .. } = &self.0 {
            whole.finish_and_clear();
        }
    }
}

/// Shows what a command of one task is at: a bar on a terminal, else a line where that changes. It is gone when dropped.
#[derive(Debug)]
pub struct Stage {
    bar: Option<ProgressBar>,
    last: Mutex<String>,
}

impl Default for Stage {
    fn default() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            bar.set_style(style("{spinner} {elapsed} {msg}"));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, last: Mutex::default() }
    }
}

impl Stage {
    /// What is being done now.
    pub fn say(&self, what: &str) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if *last == what {
            return;
        }
        what.clone_into(&mut last);
        match &self.bar {
            Some(bar) => bar.set_message(what.to_owned()),
            None => err(what),
        }
    }

    /// A line that stays.
    pub fn note(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None => err(text),
        }
    }

    /// Takes the bar away: what comes next is the answer.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.end();
    }
}

/// A phase of an evaluation in words; nothing for those that pass in a moment, or whose waits are told by themselves.
#[must_use]
pub fn phase(name: &str) -> Option<&'static str> {
    Some(match name {
        "prepare" => "drawing parameters",
        "record" => "recording",
        "build" => "building",
        "load" | "correct" => "checking",
        "measure" => "measuring",
        "compile" => "measuring torch.compile",
        _ => return None,
    })
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
