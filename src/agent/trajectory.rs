//! Trajectories: what was said, called, answered, judged, line by line as JSON (`docs/trajectory.md`).
//!
//! Knows the lines, their file, and that no key may be in it. Must not know why a line is written.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::rules::{End, FaultOf};
use crate::gateway::Key;
use crate::gateway::chat::Reply;
use crate::gateway::tokens::Usage;

/// Version of the lines; a reader refuses others.
pub const SCHEMA: u32 = 1;
/// Longest line that is read.
const MOST_LINE: usize = 64 << 20;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Seconds since the episode began.
    pub at: f64,
    #[serde(flatten)]
    pub what: What,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum What {
    /// The first line.
    Episode(Box<Head>),
    /// Something that was said to the model beside results of calls. Turn 0 is the prompt.
    Message { turn: u32, role: String, content: String },
    /// An answer of the model.
    Turn {
        turn: u32,
        #[serde(flatten)]
        reply: Box<Reply>,
        seconds: f64,
        retries: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cost: Option<f64>,
    },
    /// What a call came to.
    Result { turn: u32, call: String, tool: String, outcome: Word, content: String, seconds: f64 },
    /// A request that the judge answered.
    Judged {
        turn: u32,
        /// `compile`, `verify`, `profile`, `reference`, `final`.
        op: String,
        /// Digest of the candidate's files.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        candidate: Option<String>,
        /// The same files were judged before, and that was the answer.
        #[serde(default)]
        cached: bool,
        seconds: f64,
        /// A verdict, or what a build came to.
        answer: Value,
    },
    /// A turn that came to nothing.
    Fault { turn: u32, of: FaultOf, message: String },
    /// The last line.
    End(Box<Tail>),
}

/// How a call went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Word {
    Done,
    Failed,
    Malformed,
    /// The sandbox failed.
    Fault,
}

/// What an episode begins with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Head {
    pub schema: u32,
    pub version: String,
    pub task: String,
    /// Digest of the task's source.
    pub source: String,
    pub device: String,
    /// Who writes: `{"endpoint": {"url", "model", "sampling"}}` or `{"replay": {..}}`.
    pub policy: Value,
    pub turns: u32,
    pub context_tokens: u64,
    /// Seconds since the epoch.
    pub started: f64,
    /// Names of the tools, in order.
    pub tools: Vec<String>,
}

/// What an episode comes to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tail {
    pub end: End,
    /// One sentence.
    pub reason: String,
    pub turns: u32,
    pub faults: u32,
    /// Attempts at the endpoint that failed and were made again.
    pub retries: u32,
    pub usage: Usage,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
    /// Requests that were judged, the final judgement not counted.
    pub judged: u32,
    /// Of the final judgement.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reward: Option<i32>,
    pub seconds: f64,
}

/// Writes a trajectory; each line is on disk's way before the next step.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    key: Option<Key>,
    began: Instant,
}

impl Recorder {
    /// Begins a file.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn create(path: &Path, key: Option<Key>) -> std::io::Result<Self> {
        Ok(Self { file: File::create(path)?, key, began: Instant::now() })
    }

    /// Seconds since the beginning.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Writes one line.
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn write(&mut self, what: What) -> std::io::Result<()> {
        let at = (self.seconds() * 1e3).round() / 1e3;
        let mut text = serde_json::to_string(&Line { at, what }).map_err(std::io::Error::other)?;
        if let Some(key) = &self.key {
            text = key.redact(&text);
        }
        text.push('\n');
        self.file.write_all(text.as_bytes())
    }
}

/// Seconds since the epoch.
#[must_use]
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Why a file is no trajectory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} can't be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}:{line}: not a line of a trajectory: {why}")]
    Line { path: PathBuf, line: usize, why: String },
    #[error("{path} is a trajectory of version {found}; this program reads version {SCHEMA}")]
    Schema { path: PathBuf, found: u32 },
    #[error("{0} does not begin as a trajectory does (`kind: episode`)")]
    Head(PathBuf),
}

/// Reads a trajectory. A last line that was cut in the middle of being written is left out.
///
/// # Errors
/// Names file and line.
pub fn read(path: &Path) -> Result<Vec<Line>, Error> {
    let failed = |source| Error::Read { path: path.to_path_buf(), source };
    parse(path, BufReader::new(File::open(path).map_err(failed)?))
}

/// As `read`, from anything; `path` is for messages.
///
/// # Errors
/// As `read`.
pub fn parse(path: &Path, mut from: impl BufRead) -> Result<Vec<Line>, Error> {
    let mut lines = Vec::new();
    let mut text = String::new();
    for number in 1.. {
        text.clear();
        let count = std::io::Read::take(&mut from, MOST_LINE as u64)
            .read_line(&mut text)
            .map_err(|source| Error::Read { path: path.to_path_buf(), source })?;
        if count == 0 {
            break;
        }
        match serde_json::from_str(&text) {
            Ok(line) => lines.push(line),
            Err(_) if !text.ends_with('\n') && number > 1 => break,
            Err(error) => {
                return Err(Error::Line { path: path.to_path_buf(), line: number, why: error.to_string() });
            }
        }
    }
    match lines.first() {
        Some(Line { what: What::Episode(head), .. }) if head.schema == SCHEMA => Ok(lines),
        Some(Line { what: What::Episode(head), .. }) => {
            Err(Error::Schema { path: path.to_path_buf(), found: head.schema })
        }
        _ => Err(Error::Head(path.to_path_buf())),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn head() -> What {
        What::Episode(Box::new(Head {
            schema: SCHEMA,
            version: "0".into(),
            task: "t".into(),
            source: "d".into(),
            device: "cpu".into(),
            policy: Value::Null,
            turns: 200,
            context_tokens: 131_072,
            started: 0.0,
            tools: vec!["Bash".into()],
        }))
    }

    #[test]
    fn lines_come_back_as_they_were_written_and_without_the_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.jsonl");
        let mut recorder = Recorder::create(&path, Some(Key::new("sk-secret-123").unwrap())).unwrap();
        let reply = Reply { content: "my key is sk-secret-123".into(), ..Reply::default() };
        let turn = What::Turn { turn: 1, reply: Box::new(reply), seconds: 0.5, retries: 0, cost: None };
        recorder.write(head()).unwrap();
        recorder.write(turn).unwrap();
        recorder.write(What::Fault { turn: 1, of: FaultOf::Model, message: "sk-secret-123".into() }).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(!text.contains("sk-secret") && text.contains("my key is [key]"), "{text}");
        let lines = read(&path).unwrap();
        assert_eq!((lines.len(), &lines[0].what), (3, &head()));
        // Cut off while it was written: what is whole is kept.
        std::fs::write(&path, text.trim_end().strip_suffix('}').unwrap()).unwrap();
        assert_eq!(read(&path).unwrap().len(), 2);
    }

    #[test]
    fn a_file_that_is_none_says_where() {
        let parse = |text: &str| parse(Path::new("t.jsonl"), text.as_bytes()).unwrap_err().to_string();
        assert!(parse("{}\n").starts_with("t.jsonl:1: not a line"));
        assert!(parse("").contains("does not begin"));
        let mut other = serde_json::to_value(Line { at: 0.0, what: head() }).unwrap();
        other["schema"] = 9.into();
        assert!(parse(&format!("{other}\n")).contains("of version 9; this program reads version 1"));
    }
}
