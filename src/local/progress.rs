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

    /// Work on a task begins.
    pub fn begin(&self, task: &str) {
        if let Kind::Bars { all, whole, tasks } = &self.0 {
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
            Kind::Lines { .. } => eprintln!("{task}: {what}"),
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
            Kind::Lines { .. } => eprintln!("{text}"),
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
                eprintln!("[{done}/{total}] {text}");
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

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
