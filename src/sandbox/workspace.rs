//! What an agent can do in its sandbox, as a trait: the loop and its tools know this and nothing below it.
//!
//! Knows commands, files and how they fail. Must not know how anything is confined, nor what a tool says to a model.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Time that a command gets where nobody asks for another.
pub const TIMEOUT: Duration = Duration::from_secs(120);
/// Longest time that a command may ask for.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(600);

/// A command that ran in the persistent shell.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// Standard output and error as they came, cut in the middle where they were too long.
    pub output: String,
    /// Exit status, 128 + n after signal n; `None` when it did not end by itself.
    pub status: Option<i32>,
    /// All it had started was killed and the shell begun anew in the folder it was in.
    pub timed_out: bool,
    pub seconds: f64,
    /// Bytes left out of `output`.
    pub cut: u64,
}

/// What a background command said since it was last asked.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobOutput {
    pub output: String,
    pub running: bool,
    pub status: Option<i32>,
    /// Bytes left out of `output`.
    pub cut: u64,
}

/// A file or a folder.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Relative to the workspace.
    pub path: String,
    pub bytes: u64,
    /// Seconds since the epoch.
    pub modified: f64,
    pub folder: bool,
}

/// A line that a search found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Match {
    /// Relative to the workspace.
    pub path: String,
    /// Counted from 1.
    pub line: u64,
    /// Without its end; of a long line the beginning.
    pub text: String,
}

/// A search for a regular expression in files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Search {
    pub pattern: String,
    /// File or folder to look in; the workspace if absent.
    pub path: Option<String>,
    /// Files to look in, by name (`*.cu`) or path (`kernels/**`).
    pub glob: Option<String>,
    pub case_insensitive: bool,
    /// The pattern may span lines; `.` matches their ends.
    pub multiline: bool,
    /// Most matches.
    pub limit: usize,
}

/// What may leave a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportLimits {
    /// Files or folders to take, relative to the workspace; what does not exist is left out. All of it if empty.
    pub paths: Vec<String>,
    pub files: usize,
    /// Of one file.
    pub file_bytes: u64,
    /// Of all files.
    pub bytes: u64,
}

impl Default for ExportLimits {
    fn default() -> Self {
        Self { paths: Vec::new(), files: 256, file_bytes: 4 << 20, bytes: 8 << 20 }
    }
}

/// Why something could not be done. All but the last two are the agent's own mistakes and worth telling it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Error {
    #[error("{path} does not exist")]
    NotFound { path: String },
    #[error("{path} is {what}, not a file")]
    NotAFile { path: String, what: String },
    #[error("{path} is not a folder")]
    NotAFolder { path: String },
    #[error("{path} is outside the workspace, or a link that leads out of it; only files in the workspace can be used")]
    Outside { path: String },
    #[error("{path} can't be used: {why}")]
    Denied { path: String, why: String },
    #[error("{path} has {bytes} bytes; the limit is {limit}")]
    TooLarge { path: String, bytes: u64, limit: u64 },
    #[error("there is no background command {id}")]
    NoSuchJob { id: String },
    #[error("{limit} background commands run already; kill one first")]
    TooManyJobs { limit: usize },
    #[error("the pattern {pattern} is not valid: {why}")]
    Pattern { pattern: String, why: String },
    #[error("the files can't be taken: {0}")]
    Export(String),
    #[error("the sandbox is gone: {0}")]
    Gone(String),
    #[error("the sandbox failed: {0}")]
    Failed(String),
}

impl Error {
    /// Whether the sandbox is at fault and not its user.
    #[must_use]
    pub fn is_fault(&self) -> bool {
        matches!(self, Self::Gone(_) | Self::Failed(_))
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

/// What an agent can do in its sandbox. Paths are relative to the workspace or absolute inside it.
///
/// Every call fails with `Error::Gone` once the sandbox has ended, and with an error that is no fault for a mistake
/// of the caller.
#[allow(clippy::missing_errors_doc)]
pub trait Workspace: Send {
    /// Runs a command in the persistent shell: folder, variables and functions stay for the next. At most
    /// [`MAX_TIMEOUT`].
    fn run(&mut self, command: &str, timeout: Duration) -> Result<Ran, Error>;
    /// Starts a command in the background, in the folder and environment of the shell; its name is for `output`.
    fn start(&mut self, command: &str) -> Result<String, Error>;
    /// What is new since the last call.
    fn output(&mut self, id: &str) -> Result<JobOutput, Error>;
    /// Kills a background command and all that it started. One that has ended is forgotten.
    fn kill(&mut self, id: &str) -> Result<(), Error>;
    /// A whole file of at most `limit` bytes.
    fn read(&mut self, path: &str, limit: u64) -> Result<Vec<u8>, Error>;
    /// Writes a whole file at once, with the folders above it.
    fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), Error>;
    fn stat(&mut self, path: &str) -> Result<Entry, Error>;
    /// What a folder holds, by name.
    fn list(&mut self, path: &str) -> Result<Vec<Entry>, Error>;
    /// Files whose path below `path` matches, the newest first.
    fn glob(&mut self, pattern: &str, path: Option<&str>) -> Result<Vec<Entry>, Error>;
    /// Matching lines, by path and line.
    fn grep(&mut self, search: &Search) -> Result<Vec<Match>, Error>;
    /// The regular files of the workspace. Names that would leave a folder, links, devices and what is over the
    /// limits are refused as a whole.
    fn export(&mut self, limits: &ExportLimits) -> Result<BTreeMap<String, Vec<u8>>, Error>;
    /// Ends all processes, removes all they left, and fills the workspace with `template`.
    fn reset(&mut self, template: &BTreeMap<String, Vec<u8>>) -> Result<(), Error>;
}
