//! Bash, BashOutput, KillBash.

use std::fmt::Write;
use std::time::Duration;

use super::arguments as a;
use super::{Done, mistake};
use crate::sandbox::workspace::{MAX_TIMEOUT, TIMEOUT, Workspace};

/// `BashOutput` waits that long for something new, so that who polls does not spend its turns on nothing.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn run(workspace: &mut dyn Workspace, arguments: &a::Bash, longest: Duration) -> Done {
    if arguments.command.trim().is_empty() {
        return mistake("`command` is empty");
    }
    if arguments.run_in_background == Some(true) {
        let id = workspace.start(&arguments.command)?;
        return Ok(format!("runs in the background as {id}; BashOutput with bash_id \"{id}\" reads what it prints"));
    }
    let asked = arguments.timeout.map_or(TIMEOUT, Duration::from_millis);
    let timeout = asked.min(longest).clamp(Duration::from_millis(1), MAX_TIMEOUT);
    let ran = workspace.run(&arguments.command, timeout)?;
    let mut text = ran.output.trim_end().to_owned();
    let mut note = |line: String| {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&line);
    };
    if ran.timed_out {
        note(format!(
            "the command was killed after {} ms; give a longer `timeout` (600000 at most) or `run_in_background`",
            timeout.as_millis()
        ));
        return mistake(text);
    }
    match ran.status {
        Some(0) => {}
        Some(status) => {
            note(format!("exit status {status}"));
            return mistake(text);
        }
        None => {
            note("the shell ended; the next command gets a new one".into());
            return mistake(text);
        }
    }
    Ok(if text.is_empty() { "(no output)".into() } else { text })
}

pub(super) fn output(workspace: &mut dyn Workspace, arguments: &a::BashOutput) -> Done {
    let filter = match &arguments.filter {
        None => None,
        Some(pattern) => match regex::Regex::new(pattern) {
            Ok(filter) => Some(filter),
            Err(error) => return mistake(format!("the filter {pattern} is not valid: {error}")),
        },
    };
    let end = std::time::Instant::now() + PATIENCE;
    let job = loop {
        let job = workspace.output(&arguments.bash_id)?;
        if !job.running || !job.output.is_empty() || std::time::Instant::now() >= end {
            break job;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let mut text = match &filter {
        None => job.output.trim_end().to_owned(),
        Some(filter) => job.output.lines().filter(|l| filter.is_match(l)).collect::<Vec<_>>().join("\n"),
    };
    if !text.is_empty() {
        text.push('\n');
    }
    let _ = match (job.running, job.status) {
        (true, _) => write!(text, "(running)"),
        (false, Some(status)) => write!(text, "(ended with exit status {status})"),
        (false, None) => write!(text, "(ended)"),
    };
    Ok(text)
}

pub(super) fn kill(workspace: &mut dyn Workspace, arguments: &a::KillBash) -> Done {
    workspace.kill(&arguments.shell_id)?;
    Ok(format!("{} is killed", arguments.shell_id))
}
