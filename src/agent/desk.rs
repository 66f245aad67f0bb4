//! The desk between a workspace and the judge: takes what the files in `utils/` send, asks the judge, answers.
//!
//! Knows the socket, its messages and their limits. Must not know how anything is judged. What comes over the socket
//! is hostile: it can ask for judgements of sources, and for nothing else.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::report;
use super::trajectory::{Recorder, What};
use crate::judge::cache::digest;
use crate::judge::counters::Kernel;
use crate::judge::verdict::{LaunchEvidence, Reason};
use crate::judge::{Candidate, Verdict};

/// Most files of a candidate.
pub const MAX_FILES: usize = 256;
/// Most bytes of all its files together.
pub const MAX_BYTES: usize = 8 << 20;
/// Longest request: the files with all that JSON adds.
const MAX_REQUEST: usize = 3 * MAX_BYTES;
/// Longest that a client may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a build came to.
#[derive(Clone, Debug)]
pub enum Compiled {
    /// Steps of the plan, kernels by name with the line that launches them.
    Built(Vec<LaunchEvidence>),
    Refused(Reason),
}

/// Why a request got no answer: the task or the judge is at fault, never the candidate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unjudged(pub String);

/// What an agent can ask of a judge about its task.
pub trait Assessor: Send {
    /// Records and builds.
    ///
    /// # Errors
    /// When the task or the judge is at fault.
    fn compile(&mut self, candidate: &Candidate) -> Result<Compiled, Unjudged>;
    /// Whether it is correct, on all that the contract asks for; nothing is timed.
    ///
    /// # Errors
    /// As `compile`.
    fn verify(&mut self, candidate: &Candidate) -> Result<Verdict, Unjudged>;
    /// A verdict in full, with evidence for each launch. It counts as an attempt at the task.
    ///
    /// # Errors
    /// As `compile`.
    fn profile(&mut self, candidate: &Candidate) -> Result<Verdict, Unjudged>;
    /// What the reference runs, with times.
    ///
    /// # Errors
    /// As `compile`.
    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Unjudged>;
    /// Hardware counters of a candidate's launches, or of the reference's kernels; why there are none.
    ///
    /// # Errors
    /// As `compile`.
    fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Unjudged>;
    /// The final judgement of the best candidate, under fresh seeds. `last` is what the workspace holds at the end.
    ///
    /// # Errors
    /// As `compile`.
    fn finish(&mut self, last: Option<&Candidate>) -> Result<Option<Verdict>, Unjudged>;
    /// Where the task stands.
    fn standing(&self) -> Standing;
}

/// Where a task stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Reward of the best verdict so far.
    pub reward: Option<i32>,
    /// Its speedups, as a sentence has them.
    pub speedups: String,
    /// More than 5 % faster than every baseline there is.
    pub goal: bool,
    /// The job's own target.
    pub reached: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Op {
    Compile,
    Verify,
    Profile,
    Reference,
    /// Of the candidate; of the reference.
    Counters,
    ReferenceCounters,
}

impl Op {
    const fn word(self) -> &'static str {
        match self {
            Self::Compile => "compile",
            Self::Verify => "verify",
            Self::Profile => "profile",
            Self::Reference => "reference",
            Self::Counters => "counters",
            Self::ReferenceCounters => "reference_counters",
        }
    }
}

/// What a client sends: one line of JSON.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    op: Op,
    #[serde(default)]
    files: BTreeMap<String, String>,
}

/// What it gets: one line of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// For people and models.
    pub text: String,
    /// Exit status of the client: 0 well, 1 not correct, 2 not understood, 3 the judge failed.
    pub status: u8,
    /// The verdict, or what the build came to.
    pub answer: Value,
}

/// Files of a candidate, or why they are none.
///
/// # Errors
/// One sentence for the model.
pub fn candidate(files: BTreeMap<String, String>) -> Result<Candidate, String> {
    if !files.contains_key("model_new.py") {
        return Err("there is no model_new.py, the file that defines ModelNew".into());
    }
    if files.len() > MAX_FILES {
        return Err(format!("{} files; a candidate has at most {MAX_FILES}", files.len()));
    }
    let bytes: usize = files.values().map(String::len).sum();
    if bytes > MAX_BYTES {
        return Err(format!("{bytes} bytes; a candidate has at most {} MiB", MAX_BYTES >> 20));
    }
    let inside = |name: &str| {
        !name.is_empty() && name.len() <= 200 && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
    };
    match files.keys().find(|name| !inside(name)) {
        Some(name) => Err(format!("`{}` is no name of a candidate's file", name.chars().take(80).collect::<String>())),
        None => Ok(Candidate { files }),
    }
}

/// The desk of one episode.
pub struct Desk<'a> {
    assessor: Mutex<&'a mut dyn Assessor>,
    recorder: &'a Mutex<Recorder>,
    known: Mutex<BTreeMap<(Op, String), Reply>>,
    standing: Mutex<Standing>,
    /// The turn that is being worked on.
    pub turn: AtomicU32,
    /// Requests that were judged.
    pub judged: AtomicU32,
    /// The judge's own failure, if the last request met one.
    fault: Mutex<Option<String>>,
    closed: AtomicBool,
}

impl std::fmt::Debug for Desk<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("turn", &self.turn).field("judged", &self.judged).finish_non_exhaustive()
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<'a> Desk<'a> {
    pub fn new(assessor: &'a mut dyn Assessor, recorder: &'a Mutex<Recorder>) -> Self {
        let standing = Mutex::new(assessor.standing());
        Self {
            assessor: Mutex::new(assessor),
            recorder,
            known: Mutex::default(),
            standing,
            turn: AtomicU32::new(0),
            judged: AtomicU32::new(0),
            fault: Mutex::default(),
            closed: AtomicBool::new(false),
        }
    }

    /// Where the task stands; never waits for a judgement.
    #[must_use]
    pub fn standing(&self) -> Standing {
        lock(&self.standing).clone()
    }

    /// A failure of the judge since this was last asked.
    #[must_use]
    pub fn fault(&self) -> Option<String> {
        lock(&self.fault).take()
    }

    /// Serves clients, one after another, until `close`.
    pub fn serve(&self, listener: &UnixListener) {
        loop {
            let Ok((stream, _)) = listener.accept() else {
                if self.closed.load(Ordering::Acquire) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            self.client(stream);
        }
    }

    /// Makes `serve` return, once it has answered whom it is answering. `path` is where it listens.
    pub fn close(&self, path: &Path) {
        self.closed.store(true, Ordering::Release);
        // Wakes it; who finds nobody listening needs not wake anybody.
        let _ = UnixStream::connect(path);
    }

    fn client(&self, mut stream: UnixStream) {
        let reply = match self.request(&mut stream) {
            Ok(Some(request)) => self.answer(request),
            Ok(None) => return,
            Err(text) => Reply { text, status: 2, answer: Value::Null },
        };
        let Ok(mut text) = serde_json::to_vec(&reply) else { return };
        text.push(b'\n');
        // A client that does not read, or is gone, has had its chance.
        let _ = stream.set_write_timeout(Some(PATIENCE));
        let _ = stream.write_all(&text);
    }

    /// Reads a request; `None` where the client says nothing at all.
    fn request(&self, stream: &mut UnixStream) -> Result<Option<Request>, String> {
        let end = Instant::now() + PATIENCE;
        let mut text = Vec::new();
        let mut buffer = [0; 1 << 16];
        while text.last() != Some(&b'\n') {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || self.closed.load(Ordering::Acquire) {
                return Err("the request did not come within its time".into());
            }
            // Short waits, so that a client that says nothing does not hold up the episode's end.
            let _ = stream.set_read_timeout(Some(left.min(Duration::from_millis(200))));
            match stream.read(&mut buffer) {
                Ok(0) if text.is_empty() => return Ok(None),
                Ok(0) => break,
                Ok(n) => text.extend_from_slice(buffer.get(..n).unwrap_or_default()),
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
                Err(e) => return Err(format!("the request can't be read: {e}")),
            }
            if text.len() > MAX_REQUEST {
                return Err(format!("the files are too large: a candidate has at most {} MiB", MAX_BYTES >> 20));
            }
        }
        serde_json::from_slice(&text).map(Some).map_err(|e| format!("the request is not understood: {e}"))
    }

    fn answer(&self, request: Request) -> Reply {
        let op = request.op;
        let candidate = match op {
            Op::Reference | Op::ReferenceCounters => None,
            _ => match candidate(request.files) {
                Ok(candidate) => Some(candidate),
                Err(text) => return Reply { text, status: 2, answer: Value::Null },
            },
        };
        let name = candidate.as_ref().map(|c| digest([serde_json::to_vec(&c.files).unwrap_or_default().as_slice()]));
        let key = (op, name.clone().unwrap_or_default());
        let began = Instant::now();
        // The same files again would only draw again; the answer stands.
        let known = lock(&self.known).get(&key).cloned();
        let cached = known.is_some();
        let reply = match known {
            Some(reply) => reply,
            None => {
                let reply = match self.judge(op, candidate.as_ref()) {
                    Ok(reply) => {
                        lock(&self.known).insert(key, reply.clone());
                        reply
                    }
                    Err(error) => {
                        let text = format!("{error}. This says nothing about the candidate; try again.");
                        *lock(&self.fault) = Some(error.to_string());
                        Reply { text, status: 3, answer: json!({"fault": error.to_string()}) }
                    }
                };
                self.judged.fetch_add(1, Ordering::Relaxed);
                reply
            }
        };
        let line = What::Judged {
            turn: self.turn.load(Ordering::Relaxed),
            op: op.word().to_owned(),
            candidate: name,
            cached,
            seconds: began.elapsed().as_secs_f64(),
            answer: reply.answer.clone(),
        };
        if let Err(error) = lock(self.recorder).write(line) {
            tracing::warn!(%error, "a line of the trajectory could not be written");
        }
        reply
    }

    fn judge(&self, op: Op, candidate: Option<&Candidate>) -> Result<Reply, Unjudged> {
        let mut assessor = lock(&self.assessor);
        let given = candidate;
        let none = Candidate::default();
        let candidate = candidate.unwrap_or(&none);
        let reply = match op {
            Op::Compile => match assessor.compile(candidate)? {
                Compiled::Built(launches) => {
                    let answer = json!({"built": true, "launches": launches});
                    Reply { text: report::built(&launches), status: 0, answer }
                }
                Compiled::Refused(reason) => {
                    let answer = json!({"built": false, "reason": reason});
                    Reply { text: report::refused(&reason), status: 1, answer }
                }
            },
            Op::Verify => {
                let verdict = assessor.verify(candidate)?;
                Reply { text: report::verified(&verdict), status: u8::from(!verdict.correct), answer: json!(verdict) }
            }
            Op::Profile => {
                let verdict = assessor.profile(candidate)?;
                Reply { text: report::profiled(&verdict), status: u8::from(!verdict.correct), answer: json!(verdict) }
            }
            Op::Reference => {
                let launches = assessor.reference()?;
                let answer = json!({"launches": launches});
                Reply { text: report::reference(&launches), status: 0, answer }
            }
            Op::Counters | Op::ReferenceCounters => match assessor.counters(given)? {
                Ok(kernels) => {
                    let answer = json!({"kernels": kernels});
                    Reply { text: report::counted(&kernels, given.is_none()), status: 0, answer }
                }
                Err(reason) => {
                    let answer = json!({"reason": reason});
                    Reply { text: report::refused(&reason), status: 1, answer }
                }
            },
        };
        *lock(&self.standing) = assessor.standing();
        Ok(reply)
    }

    /// The final judgement, recorded. `last` is what the workspace holds.
    ///
    /// # Errors
    /// As `Assessor::finish`.
    pub fn finish(&self, last: Option<&Candidate>) -> Result<Option<Verdict>, Unjudged> {
        let began = Instant::now();
        let verdict = lock(&self.assessor).finish(last)?;
        if let Some(verdict) = &verdict {
            let line = What::Judged {
                turn: self.turn.load(Ordering::Relaxed),
                op: "final".into(),
                candidate: verdict.digests.get("candidate").cloned(),
                cached: false,
                seconds: began.elapsed().as_secs_f64(),
                answer: json!(verdict),
            };
            if let Err(error) = lock(self.recorder).write(line) {
                tracing::warn!(%error, "a line of the trajectory could not be written");
            }
        }
        Ok(verdict)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[(&str, usize)]) -> BTreeMap<String, String> {
        names.iter().map(|(n, size)| ((*n).to_owned(), "x".repeat(*size))).collect()
    }

    #[test]
    fn what_is_no_candidate_is_told_by_name() {
        assert!(candidate(files(&[("model_new.py", 1), ("kernels/a.cu", 1)])).is_ok());
        for (given, says) in [
            (files(&[("kernels/a.cu", 1)]), "no model_new.py"),
            (files(&[("model_new.py", 1), ("../x", 1)]), "`../x` is no name"),
            (files(&[("model_new.py", 1), ("/etc/x", 1)]), "`/etc/x` is no name"),
            (files(&[("model_new.py", MAX_BYTES + 1)]), "at most 8 MiB"),
            (
                (0..300).map(|i| (format!("f{i}"), String::new())).chain(files(&[("model_new.py", 1)])).collect(),
                "301 files",
            ),
        ] {
            let why = candidate(given).unwrap_err();
            assert!(why.contains(says), "{why}");
        }
    }
}
