//! Read, Write, Edit, MultiEdit: a file is changed by who has seen it as it is now.

use std::fmt::Write;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::arguments as a;
use super::{Done, Tools, Trouble, mistake};
use crate::sandbox::workspace::{Error, Workspace};

/// Lines of one Read.
const LINES: u64 = 2000;
/// Characters of a line that are shown.
const LINE: usize = 2000;
/// Largest file that is read or edited.
const LIMIT: u64 = 16 << 20;
/// Lines around an edit that are shown.
const AROUND: usize = 4;

fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

fn text(path: &str, bytes: Vec<u8>) -> Result<String, Trouble> {
    String::from_utf8(bytes)
        .map_err(|_| Trouble::Mistake(format!("{path} is not UTF-8 text; look at it with Bash (file, xxd, cuobjdump)")))
}

/// Lines with their numbers, as all tools show them.
fn numbered(lines: &[&str], first: usize) -> String {
    let mut text = String::new();
    for (i, line) in lines.iter().enumerate() {
        let shown: String = line.chars().take(LINE).collect();
        let cut = if shown.len() < line.len() { " ..." } else { "" };
        let _ = writeln!(text, "{:>6}\t{shown}{cut}", first + i);
    }
    text
}

/// The text with one replacement, and where it is.
fn replaced(text: &str, old: &str, new: &str, all: bool) -> Result<(String, usize), String> {
    if old.is_empty() {
        return Err("`old_string` is empty; use Write for a new file".into());
    }
    if old == new {
        return Err("`old_string` and `new_string` are the same; nothing would change".into());
    }
    let count = text.matches(old).count();
    match (count, text.find(old)) {
        (0, _) | (_, None) => {
            let hint = if old.contains('\t')
                && old.lines().all(|l| l.trim_start().starts_with(|c: char| c.is_ascii_digit()))
            {
                "; leave out the line numbers that Read shows"
            } else {
                "; it must match exactly, white space included"
            };
            Err(format!("`old_string` is not in the file{hint}"))
        }
        (1, Some(at)) => Ok((text.replacen(old, new, 1), at)),
        (_, Some(at)) if all => Ok((text.replace(old, new), at)),
        (n, _) => Err(format!(
            "`old_string` is in the file {n} times; give more of the lines around it, or set `replace_all`"
        )),
    }
}

/// The lines around the byte `at`, `length` bytes of which are new.
fn around(text: &str, at: usize, length: usize) -> String {
    let line = text.get(..at).map_or(0, |t| t.matches('\n').count());
    let new = text.get(at..at + length).map_or(0, |t| t.matches('\n').count());
    let first = line.saturating_sub(AROUND);
    let lines: Vec<&str> = text.lines().skip(first).take(line - first + new.min(40) + 1 + AROUND).collect();
    numbered(&lines, first + 1)
}

impl Tools {
    pub(super) fn read(&mut self, workspace: &mut dyn Workspace, arguments: &a::Read) -> Done {
        let entry = workspace.stat(&arguments.file_path)?;
        if entry.folder {
            return mistake(format!("{} is a folder; Glob or Bash (ls) show what is in it", arguments.file_path));
        }
        let bytes = workspace.read(&arguments.file_path, LIMIT)?;
        let seen = digest(&bytes);
        let text = text(&arguments.file_path, bytes)?;
        self.seen.insert(entry.path, seen);
        if text.is_empty() {
            return Ok("(the file is empty)".into());
        }
        let offset = arguments.offset.unwrap_or(1).max(1);
        let limit = arguments.limit.unwrap_or(LINES).clamp(1, LINES);
        let size = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        let lines: Vec<&str> = text.lines().skip(size(offset) - 1).take(size(limit)).collect();
        let all = text.lines().count();
        if lines.is_empty() {
            return mistake(format!("{} has {all} lines; there is none at {offset}", arguments.file_path));
        }
        let mut shown = numbered(&lines, size(offset));
        let last = size(offset) - 1 + lines.len();
        if last < all {
            let _ = writeln!(shown, "({} more lines; go on with offset {})", all - last, last + 1);
        }
        Ok(shown)
    }

    pub(super) fn write(&mut self, workspace: &mut dyn Workspace, arguments: &a::Write) -> Done {
        let existed = match workspace.stat(&arguments.file_path) {
            Ok(entry) if entry.folder => return mistake(format!("{} is a folder", arguments.file_path)),
            Ok(_) => {
                self.current(workspace, &arguments.file_path)?;
                true
            }
            Err(Error::NotFound { .. }) => false,
            Err(error) => return Err(error.into()),
        };
        self.put(workspace, &arguments.file_path, &arguments.content)?;
        let lines = arguments.content.lines().count();
        let did = if existed { "replaced" } else { "created" };
        Ok(format!("{did} {} ({lines} lines)", arguments.file_path))
    }

    pub(super) fn edit(&mut self, workspace: &mut dyn Workspace, arguments: a::Edit) -> Done {
        let a::Edit { file_path, old_string, new_string, replace_all } = arguments;
        let edits = vec![a::OneEdit { old_string, new_string, replace_all }];
        self.multi_edit(workspace, &a::MultiEdit { file_path, edits })
    }

    pub(super) fn multi_edit(&mut self, workspace: &mut dyn Workspace, arguments: &a::MultiEdit) -> Done {
        let path = &arguments.file_path;
        if arguments.edits.is_empty() {
            return mistake("`edits` is empty");
        }
        let mut text = text(path, self.current(workspace, path)?)?;
        let mut shown = String::new();
        for (i, edit) in arguments.edits.iter().enumerate() {
            let all = edit.replace_all.unwrap_or(false);
            let (next, at) = replaced(&text, &edit.old_string, &edit.new_string, all).map_err(|why| {
                let which = if arguments.edits.len() > 1 {
                    format!("edit {} of {}: ", i + 1, arguments.edits.len())
                } else {
                    String::new()
                };
                Trouble::Mistake(format!("{which}{why}; {path} is left as it was"))
            })?;
            text = next;
            if arguments.edits.len() == 1 {
                shown = around(&text, at, edit.new_string.len());
            }
        }
        self.put(workspace, path, &text)?;
        let count = arguments.edits.len();
        Ok(if shown.is_empty() {
            format!("{path}: {count} edits are done")
        } else {
            format!("{path} now reads\n{shown}")
        })
    }

    /// The bytes of a file that the model has seen as it is now.
    fn current(&self, workspace: &mut dyn Workspace, path: &str) -> Result<Vec<u8>, Trouble> {
        let entry = workspace.stat(path)?;
        let Some(seen) = self.seen.get(&entry.path) else {
            return mistake(format!("{path} has not been read yet; use Read before it is changed"));
        };
        let bytes = workspace.read(path, LIMIT)?;
        if digest(&bytes) != *seen {
            return mistake(format!("{path} has changed since it was read; use Read again"));
        }
        Ok(bytes)
    }

    fn put(&mut self, workspace: &mut dyn Workspace, path: &str, text: &str) -> Result<(), Trouble> {
        workspace.write(path, text.as_bytes())?;
        let entry = workspace.stat(path)?;
        self.seen.insert(entry.path, digest(text.as_bytes()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_replaced_where_it_is_alone() {
        assert_eq!(replaced("a b c", "b", "x", false).unwrap(), ("a x c".into(), 2));
        assert_eq!(replaced("b b", "b", "x", true).unwrap(), ("x x".into(), 0));
        for (text, old, new, says) in [
            ("a b b", "b", "x", "2 times; give more of the lines"),
            ("a", "b", "x", "not in the file; it must match exactly"),
            ("a", "     1\ta", "x", "leave out the line numbers"),
            ("a", "", "x", "is empty"),
            ("a", "a", "a", "are the same"),
        ] {
            let why = replaced(text, old, new, false).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn an_edit_shows_where_it_is() {
        let text: String = (1..=20).map(|i| format!("line {i}\n")).collect();
        let (next, at) = replaced(&text, "line 10", "line 10\nline 10a", false).unwrap();
        let shown = around(&next, at, "line 10\nline 10a".len());
        assert!(shown.starts_with("     6\tline 6\n") && shown.ends_with("    15\tline 14\n"), "{shown}");
    }
}
