//! Arguments of the tools. Their descriptions are what a model reads.
//!
//! Knows names and types alone.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Bash {
    /// The command to run.
    pub command: String,
    /// Milliseconds after which it is killed, 600000 at most.
    pub timeout: Option<u64>,
    /// What the command does, in five to ten words.
    #[allow(dead_code, reason = "for who reads the trajectory")]
    pub description: Option<String>,
    /// Runs it in the background; BashOutput reads what it prints.
    pub run_in_background: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BashOutput {
    /// Name of the background command.
    pub bash_id: String,
    /// Regular expression: only lines that match are given.
    pub filter: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct KillBash {
    /// Name of the background command.
    pub shell_id: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Read {
    /// File in the workspace.
    pub file_path: String,
    /// Line to begin with, from 1.
    pub offset: Option<u64>,
    /// Number of lines.
    pub limit: Option<u64>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Write {
    /// File in the workspace.
    pub file_path: String,
    /// All of its text.
    pub content: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// File in the workspace.
    pub file_path: String,
    /// Text to replace, exactly as in the file.
    pub old_string: String,
    /// Text to put there.
    pub new_string: String,
    /// Replaces every occurrence.
    pub replace_all: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MultiEdit {
    /// File in the workspace.
    pub file_path: String,
    /// Edits in order.
    pub edits: Vec<OneEdit>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OneEdit {
    /// Text to replace, exactly as in the file.
    pub old_string: String,
    /// Text to put there.
    pub new_string: String,
    /// Replaces every occurrence.
    pub replace_all: Option<bool>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Glob {
    /// Pattern such as `**/*.cu`.
    pub pattern: String,
    /// Folder to look in; the workspace if absent.
    pub path: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputMode {
    Content,
    #[default]
    FilesWithMatches,
    Count,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Grep {
    /// Regular expression.
    pub pattern: String,
    /// File or folder to look in; the workspace if absent.
    pub path: Option<String>,
    /// Files to look in, such as `*.cu`.
    pub glob: Option<String>,
    /// What is given.
    pub output_mode: Option<OutputMode>,
    /// Lines after each match.
    #[serde(rename = "-A")]
    pub after: Option<u64>,
    /// Lines before each match.
    #[serde(rename = "-B")]
    pub before: Option<u64>,
    /// Lines around each match.
    #[serde(rename = "-C")]
    pub context: Option<u64>,
    /// Line numbers.
    #[serde(rename = "-n")]
    pub numbers: Option<bool>,
    /// Upper and lower case are the same.
    #[serde(rename = "-i")]
    pub case_insensitive: Option<bool>,
    /// Kind of file: `py`, `cpp`, `cuda`, `c`, `sh`, `md`, `json`.
    #[serde(rename = "type")]
    pub kind: Option<String>,
    /// Most lines or files that are given.
    pub head_limit: Option<u64>,
    /// The pattern may span lines.
    pub multiline: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TodoStatus {
    Pending,
    InProgress,
    Completed,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Todo {
    /// What is to be done.
    pub content: String,
    pub status: TodoStatus,
    /// The same as something that is being done.
    #[serde(rename = "activeForm")]
    pub active_form: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TodoWrite {
    /// The whole list.
    pub todos: Vec<Todo>,
}
