//! A trajectory for people, turn by turn. Pure.
//!
//! Knows how to show. Must not know how an episode is played.

use std::fmt::Write;

use serde_json::Value;

use super::render;
use crate::agent::trajectory::{Line, What, Word};
use crate::judge::Verdict;

/// Lines of a text that are shown where not all is asked for.
const LINES: usize = 12;
/// Characters of such a line.
const WIDTH: usize = 160;

/// A text, each line behind a margin; what a terminal would act on is shown as what it is.
fn quoted(text: &str, margin: &str, full: bool, out: &mut String) {
    let all: Vec<&str> = text.trim_end().lines().collect();
    let most = if full { usize::MAX } else { LINES };
    for line in all.iter().take(most) {
        let mut shown: String = line.chars().take(if full { usize::MAX } else { WIDTH }).collect();
        if shown.len() < line.len() {
            shown.push_str(" ...");
        }
        let shown: String = shown.chars().map(|c| if c.is_control() && c != '\t' { '\u{fffd}' } else { c }).collect();
        let _ = writeln!(out, "{margin}{shown}");
    }
    if all.len() > most {
        let _ = writeln!(out, "{margin}... {} more lines", all.len() - most);
    }
}

/// The arguments of a call, a line each.
fn arguments(text: &str, full: bool, out: &mut String) {
    match serde_json::from_str::<Value>(text) {
        Ok(Value::Object(map)) => {
            for (name, value) in map {
                let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                if value.contains('\n') {
                    let _ = writeln!(out, "     {name}:");
                    quoted(&value, "       ", full, out);
                } else {
                    quoted(&format!("{name}: {value}"), "     ", full, out);
                }
            }
        }
        _ => quoted(text, "     ", full, out),
    }
}

/// The whole episode.
#[must_use]
pub fn story(lines: &[Line], full: bool) -> String {
    let mut out = String::new();
    for line in lines {
        match &line.what {
            What::Episode(head) => {
                let _ = writeln!(
                    out,
                    "{} on {}, {} turns, {} tokens of context",
                    head.task, head.device, head.turns, head.context_tokens
                );
                let _ = writeln!(out, "{}", head.policy);
            }
            What::Message { role, content, .. } => {
                let _ = writeln!(out, "\n<- {role}");
                quoted(content, "   ", full, &mut out);
            }
            What::Turn { turn, reply, seconds, retries, cost } => {
                let about = if reply.usage.estimated { "about " } else { "" };
                let _ = write!(
                    out,
                    "\n== turn {turn}, {:.0} s: {about}{} tokens read, {} written, {seconds:.1} s",
                    line.at, reply.usage.prompt, reply.usage.completion
                );
                if *retries > 0 {
                    let _ = write!(out, ", {retries} failed attempts before");
                }
                if let Some(cost) = cost {
                    let _ = write!(out, ", cost {cost:.4}");
                }
                out.push('\n');
                if let Some(reasoning) = &reply.reasoning {
                    quoted(&reasoning.text, " ~ ", full, &mut out);
                }
                quoted(&reply.content, "   ", full, &mut out);
                if let Some(refusal) = &reply.refusal {
                    quoted(refusal, " ! ", full, &mut out);
                }
                for call in &reply.calls {
                    let _ = writeln!(out, "-> {}", call.name);
                    arguments(&call.arguments, full, &mut out);
                }
            }
            What::Result { tool, outcome, content, seconds, .. } => {
                let word = match outcome {
                    Word::Done => "",
                    Word::Failed => ", failed",
                    Word::Malformed => ", no call that could be run",
                    Word::Fault => ", the sandbox failed",
                };
                let _ = writeln!(out, "<- {tool}{word} ({seconds:.1} s)");
                quoted(content, "   ", full, &mut out);
            }
            What::Judged { op, cached, seconds, answer, .. } => {
                let what = match serde_json::from_value::<Verdict>(answer.clone()) {
                    Ok(verdict) => format!("reward {}. {}", verdict.reward, render::sentence(&verdict)),
                    Err(_) => match answer["reason"]["message"].as_str() {
                        Some(message) => message.lines().next().unwrap_or_default().to_owned(),
                        None => "done".into(),
                    },
                };
                let known = if *cached { ", as before" } else { "" };
                let _ = writeln!(out, "## {op} ({seconds:.1} s{known}): {what}");
            }
            What::Fault { of, message, .. } => {
                let _ = writeln!(out, "!! fault ({of:?}): {message}");
            }
            What::End(tail) => {
                let about = if tail.usage.estimated { "about " } else { "" };
                let _ = writeln!(
                    out,
                    "\n== end: {} ({})\n   {} turns, {} faults, {} judged, {about}{} tokens read and {} written, {:.0} s{}",
                    tail.end.word(),
                    tail.reason,
                    tail.turns,
                    tail.faults,
                    tail.judged,
                    tail.usage.prompt,
                    tail.usage.completion,
                    tail.seconds,
                    tail.reward.map(|r| format!(", reward {r}")).unwrap_or_default()
                );
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::agent::trajectory;

    #[test]
    fn an_episode_that_a_small_model_played_is_told_turn_by_turn() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/evidence/episode-smollm2.jsonl");
        let text = story(&trajectory::read(&path).unwrap(), false);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn what_a_terminal_would_act_on_is_shown_and_not_done() {
        let mut out = String::new();
        quoted("a\u{1b}[2Jb\r", "> ", true, &mut out);
        assert_eq!(out, "> a\u{fffd}[2Jb\n");
    }
}
