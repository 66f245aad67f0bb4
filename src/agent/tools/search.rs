//! Glob and Grep.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::arguments as a;
use super::{Done, mistake};
use crate::sandbox::workspace::{Search, Workspace};

/// Files that Glob gives.
const FILES: usize = 100;
/// Matches that are looked for.
const MATCHES: usize = 5000;
/// Lines or files that are given where nothing is said.
const HEAD: u64 = 250;
/// Largest file whose lines around a match are shown.
const LIMIT: u64 = 16 << 20;

pub(super) fn glob(workspace: &mut dyn Workspace, arguments: &a::Glob) -> Done {
    let found = workspace.glob(&arguments.pattern, arguments.path.as_deref())?;
    if found.is_empty() {
        return Ok("no file matches".into());
    }
    let mut text: String = found.iter().take(FILES).map(|e| format!("{}\n", e.path)).collect();
    if found.len() > FILES {
        let _ = write!(text, "({} more; use a narrower pattern)", found.len() - FILES);
    }
    Ok(text.trim_end().to_owned())
}

fn by_kind(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "py" | "python" => "*.py",
        "cpp" | "c++" => "*.{cpp,cc,cxx,h,hpp}",
        "c" => "*.{c,h}",
        "cuda" | "cu" => "*.{cu,cuh}",
        "sh" | "bash" => "*.sh",
        "md" | "markdown" => "*.md",
        "json" => "*.json",
        _ => return None,
    })
}

pub(super) fn grep(workspace: &mut dyn Workspace, arguments: &a::Grep) -> Done {
    let kind = match arguments.kind.as_deref() {
        None => None,
        Some(kind) => match by_kind(kind) {
            Some(glob) => Some(glob.to_owned()),
            None => {
                return mistake(format!(
                    "the type `{kind}` is not known: py, cpp, cuda, c, sh, md, json; or use `glob`"
                ));
            }
        },
    };
    let found = workspace.grep(&Search {
        pattern: arguments.pattern.clone(),
        path: arguments.path.clone(),
        glob: arguments.glob.clone().or(kind),
        case_insensitive: arguments.case_insensitive.unwrap_or(false),
        multiline: arguments.multiline.unwrap_or(false),
        limit: MATCHES,
    })?;
    if found.is_empty() {
        return Ok("nothing matches".into());
    }
    let mut files: BTreeMap<&str, Vec<(u64, &str)>> = BTreeMap::new();
    for hit in &found {
        files.entry(&hit.path).or_default().push((hit.line, &hit.text));
    }
    let lines: Vec<String> = match arguments.output_mode.unwrap_or_default() {
        a::OutputMode::FilesWithMatches => files.keys().map(|f| (*f).to_owned()).collect(),
        a::OutputMode::Count => files.iter().map(|(f, hits)| format!("{f}:{}", hits.len())).collect(),
        a::OutputMode::Content => {
            let before = arguments.before.or(arguments.context).unwrap_or(0).min(100);
            let after = arguments.after.or(arguments.context).unwrap_or(0).min(100);
            let numbers = arguments.numbers.unwrap_or(true);
            let mut lines = Vec::new();
            for (file, hits) in &files {
                let whole = if before + after > 0 { workspace.read(file, LIMIT).ok() } else { None };
                let whole = whole.map(|b| String::from_utf8_lossy(&b).into_owned());
                content(file, hits, whole.as_deref(), (before, after), numbers, &mut lines);
            }
            lines
        }
    };
    let head = usize::try_from(arguments.head_limit.unwrap_or(HEAD).max(1)).unwrap_or(usize::MAX);
    let mut text = lines.iter().take(head).map(String::as_str).collect::<Vec<_>>().join("\n");
    if lines.len() > head {
        let _ = write!(text, "\n({} more; use a narrower pattern or `head_limit`)", lines.len() - head);
    } else if found.len() == MATCHES {
        let _ = write!(text, "\n(only the first {MATCHES} matches were looked at)");
    }
    Ok(text)
}

/// Matching lines of a file and those around them, as grep writes them: `:` behind a match, `-` behind its neighbours.
fn content(
    file: &str,
    hits: &[(u64, &str)],
    whole: Option<&str>,
    (before, after): (u64, u64),
    numbers: bool,
    lines: &mut Vec<String>,
) {
    let line = |number: u64, mark: char, text: &str| {
        if numbers { format!("{file}{mark}{number}{mark}{text}") } else { format!("{file}{mark}{text}") }
    };
    let Some(whole) = whole else {
        lines.extend(hits.iter().map(|(number, text)| line(*number, ':', text)));
        return;
    };
    let all: Vec<&str> = whole.lines().collect();
    let count = u64::try_from(all.len()).unwrap_or(u64::MAX);
    let mut done = 0;
    for (number, _) in hits {
        let (first, last) = (number.saturating_sub(before).max(done + 1), (number + after).min(count));
        if first > done + 1 && !lines.is_empty() {
            lines.push("--".into());
        }
        for n in first..=last {
            let text = usize::try_from(n - 1).ok().and_then(|i| all.get(i)).copied().unwrap_or_default();
            let mark = if hits.iter().any(|(hit, _)| *hit == n) { ':' } else { '-' };
            let text: String = text.chars().take(500).collect();
            lines.push(line(n, mark, &text));
        }
        done = done.max(last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_around_matches_are_shown_once() {
        let whole = (1..=10).map(|i| format!("l{i}\n")).collect::<String>();
        let mut lines = Vec::new();
        content("f", &[(2, "l2"), (4, "l4"), (9, "l9")], Some(&whole), (1, 1), true, &mut lines);
        let text = lines.join("\n");
        assert_eq!(text, "f-1-l1\nf:2:l2\nf-3-l3\nf:4:l4\nf-5-l5\n--\nf-8-l8\nf:9:l9\nf-10-l10");
    }
}
