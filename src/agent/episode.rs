//! One episode: the author thinks, the tools act, the judge answers, until one of the ends.
//!
//! Knows the order of a turn and what follows each failure. Must not know where answers come from, how commands are
//! confined, or how candidates are judged.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::author::Author;
use super::conversation::Conversation;
use super::desk::{self, Assessor, Desk};
use super::kit::{self, Brief};
use super::rules::{End, FaultOf, Faults, Repeats, Steps, room};
use super::tools::{DEFINITIONS, Kind, Tools};
use super::trajectory::{Head, Recorder, SCHEMA, Tail, What, Word, now};
use crate::gateway::chat::{Finish, Reply};
use crate::gateway::tokens::Usage;
use crate::gateway::{self, Answer};
use crate::judge::cache::digest;
use crate::judge::{Candidate, Device, TaskSource, Verdict};
use crate::sandbox::workspace::{Error as SandboxError, ExportLimits, Workspace};

/// Calls of one answer that are run.
const CALLS: usize = 32;

/// What bounds an episode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub turns: u32,
    pub context_tokens: u64,
    /// Most tokens of one answer.
    pub reply_tokens: u64,
    pub deadline: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { turns: 200, context_tokens: 131_072, reply_tokens: 16_384, deadline: None }
    }
}

/// What an episode is given.
pub struct Setting<'a> {
    pub task: &'a TaskSource,
    pub brief: Brief,
    pub limits: Limits,
    /// Where the trajectory is written.
    pub trajectory: PathBuf,
    pub stop: &'a AtomicBool,
    /// Told what is being done, in a few words.
    pub say: &'a (dyn Fn(&str) + Sync),
}

impl std::fmt::Debug for Setting<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setting").field("task", &self.task.name).field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// How an episode went.
#[derive(Clone, Debug)]
pub struct Ended {
    pub tail: Tail,
    /// The final judgement of the best candidate.
    pub verdict: Option<Verdict>,
    /// The end says something about the endpoint or the machine, not about the model.
    pub not_the_model: bool,
}

/// Why there was no episode.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the trajectory can't be written: {0}")]
    Trajectory(#[from] std::io::Error),
    #[error("the sandbox can't be begun: {0}")]
    Sandbox(#[from] SandboxError),
    #[error(transparent)]
    Judge(#[from] desk::Unjudged),
}

/// The socket that a workspace's tools reach the desk by, in a folder of its own.
#[derive(Debug)]
pub struct Socket {
    pub listener: UnixListener,
    path: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Socket {
    /// Listens. Whoever may enter the sandbox may connect.
    ///
    /// # Errors
    /// When there is no room for it.
    pub fn new() -> std::io::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::Builder::new().prefix("kernelfleet-desk-").tempdir()?;
        let socket = Self::at(&folder.path().join("socket"))?;
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))?;
        Ok(Self { _folder: Some(folder), ..socket })
    }

    /// Listens at a path that the sandbox, another container, was told of. What was there is removed.
    ///
    /// # Errors
    /// When it can't be made there.
    pub fn at(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        let failed = |e: std::io::Error| std::io::Error::new(e.kind(), format!("{}: {e}", path.display()));
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666)).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), _folder: None })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The sources that a workspace holds.
///
/// # Errors
/// A sandbox that failed; `Ok(Err(..))` is a workspace that holds no candidate.
pub fn submission(workspace: &mut dyn Workspace) -> Result<Result<Candidate, String>, SandboxError> {
    let told = |e: SandboxError| if e.is_fault() { Err(e) } else { Ok(Err(e.to_string())) };
    let entries = match workspace.list(".") {
        Ok(entries) => entries,
        Err(error) => return told(error),
    };
    let mut paths: Vec<String> = vec!["kernels".into()];
    paths.extend(
        entries.into_iter().filter(|e| !e.folder && e.path.ends_with(".py") && e.path != "model.py").map(|e| e.path),
    );
    let limits = ExportLimits {
        paths,
        files: desk::MAX_FILES + 64,
        file_bytes: desk::MAX_BYTES as u64,
        bytes: 2 * desk::MAX_BYTES as u64,
    };
    let files = match workspace.export(&limits) {
        Ok(files) => files,
        Err(error) => return told(error),
    };
    let hidden = |path: &str| path.split('/').any(|p| p.starts_with('.') || p == "__pycache__");
    let mut texts = std::collections::BTreeMap::new();
    for (path, bytes) in files {
        if hidden(&path) {
            continue;
        }
        match String::from_utf8(bytes) {
            Ok(text) => texts.insert(path, text),
            Err(_) => return Ok(Err(format!("{path} is not UTF-8 text"))),
        };
    }
    Ok(desk::candidate(texts))
}

/// Plays an episode in a workspace whose `KERNELFLEET_SOCKET` is `socket`.
///
/// # Errors
/// When it could not begin, or its final judgement met a fault. Every other end is one of the ends.
pub fn play(
    setting: &Setting<'_>,
    author: &mut dyn Author,
    workspace: &mut dyn Workspace,
    socket: &Socket,
    assessor: &mut dyn Assessor,
) -> Result<Ended, Error> {
    let recorder = Mutex::new(Recorder::create(&setting.trajectory, author.key())?);
    let began = Instant::now();
    let head = Head {
        schema: SCHEMA,
        version: env!("CARGO_PKG_VERSION").into(),
        task: setting.task.name.clone(),
        source: digest([setting.task.source.as_bytes()]),
        device: match setting.brief.device {
            Device::Cpu => "cpu".into(),
            Device::Cuda => "cuda".into(),
        },
        policy: author.describe(),
        turns: setting.limits.turns,
        context_tokens: setting.limits.context_tokens,
        started: now(),
        tools: DEFINITIONS.iter().filter_map(|d| d["function"]["name"].as_str().map(str::to_owned)).collect(),
    };
    write(&recorder, What::Episode(Box::new(head)))?;
    workspace.reset(&kit::files(setting.task, setting.brief.device))?;
    let desk = Desk::new(assessor, &recorder);
    let overhead = DEFINITIONS.iter().map(|d| d.to_string().len()).sum();
    let mut play = Play {
        setting,
        recorder: &recorder,
        desk: &desk,
        conversation: Conversation::new(overhead),
        tools: Tools::default(),
        faults: Faults::default(),
        steps: Steps::default(),
        usage: Usage::default(),
        cost: None,
        turn: 0,
        retries: 0,
        told: false,
        until: setting.limits.deadline.map_or_else(|| began + Duration::from_secs(30 * 86_400), |d| began + d),
    };
    let ended = std::thread::scope(|scope| {
        scope.spawn(|| desk.serve(&socket.listener));
        let ended = play.go(author, workspace);
        desk.close(&socket.path);
        ended
    });
    let (end, reason) = ended?;
    (setting.say)("judging the best in full");
    // What still runs in the workspace would be measured too.
    let last = match submission(workspace) {
        Ok(Ok(candidate)) => Some(candidate),
        Ok(Err(_)) | Err(_) => None,
    };
    let _ = workspace.reset(&std::collections::BTreeMap::new());
    let verdict = if end == End::Interrupted { None } else { desk.finish(last.as_ref())? };
    // What a model wrote and never had judged may be what it set out to write.
    let end = if end == End::Stopped && desk_goal(&verdict) { End::Solved } else { end };
    let tail = Tail {
        end,
        reason,
        turns: play.turn,
        faults: play.faults.all,
        retries: play.retries,
        usage: play.usage,
        cost: play.cost,
        judged: desk.judged.load(Ordering::Relaxed),
        reward: verdict.as_ref().map(|v| v.reward),
        seconds: (began.elapsed().as_secs_f64() * 1e3).round() / 1e3,
    };
    let not_the_model = end == End::Faults && play.faults.not_the_model();
    write(&recorder, What::End(Box::new(tail.clone())))?;
    Ok(Ended { tail, verdict, not_the_model })
}

fn desk_goal(verdict: &Option<Verdict>) -> bool {
    verdict.as_ref().is_some_and(reaches_goal)
}

/// Whether a verdict is what the prompt asks for: more than 5 % faster than every baseline there is.
#[must_use]
pub fn reaches_goal(verdict: &Verdict) -> bool {
    verdict.reward >= 3 || (verdict.reward == 2 && verdict.speedup.compile.is_none())
}

fn write(recorder: &Mutex<Recorder>, what: What) -> std::io::Result<()> {
    recorder.lock().unwrap_or_else(PoisonError::into_inner).write(what)
}

/// An episode under way.
struct Play<'a> {
    setting: &'a Setting<'a>,
    recorder: &'a Mutex<Recorder>,
    desk: &'a Desk<'a>,
    conversation: Conversation,
    tools: Tools,
    faults: Faults,
    steps: Steps,
    usage: Usage,
    cost: Option<f64>,
    turn: u32,
    retries: u32,
    /// The model ended its work once and was told that the goal is not reached.
    told: bool,
    until: Instant,
}

type Over = (End, String);

impl Play<'_> {
    fn go(&mut self, author: &mut dyn Author, workspace: &mut dyn Workspace) -> Result<Over, Error> {
        self.say("system", kit::SYSTEM)?;
        self.say("user", &kit::prompt(&self.setting.brief))?;
        loop {
            if let Some(over) = self.over() {
                return Ok(over);
            }
            let limits = self.setting.limits;
            let Some(most) = room(limits.context_tokens, self.conversation.tokens(), limits.reply_tokens) else {
                let tokens = self.conversation.tokens();
                return Ok((End::Context, format!("{tokens} of {} tokens are used", limits.context_tokens)));
            };
            let (turn, say) = (self.turn + 1, self.setting.say);
            say(&format!("turn {turn}"));
            let told = |what: &str| say(&format!("turn {turn}: {what}"));
            let over = match author.next(self.conversation.messages(), most, self.until, self.setting.stop, &told) {
                Ok(Some(answer)) => self.turn(author, workspace, answer, most)?,
                Ok(None) => Some((End::Turns, format!("the recording ends after {} turns", self.turn))),
                Err(error) => self.unanswered(error)?,
            };
            if let Some(over) = over {
                return Ok(over);
            }
        }
    }

    /// What ends an episode whatever the model says.
    fn over(&self) -> Option<Over> {
        let limits = self.setting.limits;
        if self.setting.stop.load(Ordering::Relaxed) {
            return Some((End::Interrupted, "the run was interrupted".into()));
        }
        if Instant::now() >= self.until {
            let seconds = limits.deadline.unwrap_or_default().as_secs();
            return Some((End::Deadline, format!("{seconds} s are over")));
        }
        if self.turn >= limits.turns {
            return Some((End::Turns, format!("all {} turns are spent", limits.turns)));
        }
        None
    }

    fn say(&mut self, role: &str, content: &str) -> Result<(), Error> {
        self.conversation.say(role, content);
        write(self.recorder, What::Message { turn: self.turn, role: role.into(), content: content.into() })?;
        Ok(())
    }

    /// Notes a fault; the end if it is one too many.
    fn fault(&mut self, of: FaultOf, message: &str) -> Result<Option<Over>, Error> {
        write(self.recorder, What::Fault { turn: self.turn, of, message: message.into() })?;
        let last = self.faults.note(of);
        Ok(last.then(|| (End::Faults, format!("{} faults in a row; the last: {message}", super::rules::FAULTS))))
    }

    fn unanswered(&mut self, error: gateway::Error) -> Result<Option<Over>, Error> {
        Ok(match error {
            gateway::Error::Stopped => None,
            gateway::Error::Deadline(last) => {
                let seconds = self.setting.limits.deadline.unwrap_or_default().as_secs();
                Some((End::Deadline, format!("{seconds} s are over while an answer was waited for; {last}")))
            }
            gateway::Error::TooLong(why) => Some((End::Context, why)),
            // It would be refused again.
            refused @ gateway::Error::Refused(_) => {
                self.fault(FaultOf::Endpoint, &refused.to_string())?;
                Some((End::Faults, refused.to_string()))
            }
            gateway::Error::Unreachable { what, tries } if super::rules::given_up(self.turn, tries) => {
                self.retries += tries;
                self.fault(FaultOf::Endpoint, &what)?;
                Some((End::Faults, format!("{what} ({tries} attempts)")))
            }
            gateway::Error::Unavailable { what, tries } | gateway::Error::Unreachable { what, tries } => {
                self.retries += tries;
                let over = self.fault(FaultOf::Endpoint, &what)?;
                if over.is_none() {
                    (self.setting.say)(&format!("turn {}: {what}; asking again", self.turn + 1));
                }
                over
            }
        })
    }

    fn turn(
        &mut self,
        author: &dyn Author,
        workspace: &mut dyn Workspace,
        answer: Answer<Reply>,
        most: u64,
    ) -> Result<Option<Over>, Error> {
        let Answer { reply, seconds, retries } = answer;
        self.turn += 1;
        self.desk.turn.store(self.turn, Ordering::Relaxed);
        self.usage += reply.usage;
        self.retries += retries;
        let cost = author.cost(&reply);
        if let Some(cost) = cost {
            *self.cost.get_or_insert(0.0) += cost;
        }
        self.conversation.answer(&reply);
        let line = What::Turn { turn: self.turn, reply: Box::new(shortened(&reply)), seconds, retries, cost };
        write(self.recorder, line)?;
        if let Some(text) = &reply.refusal {
            return Ok(Some((End::RefusedByModel, text.chars().take(300).collect())));
        }
        if reply.finish == Finish::ContentFilter {
            return Ok(Some((End::RefusedByModel, "the endpoint's filter withheld the answer".into())));
        }
        if let Some(bytes) = reply.cut_at {
            let text = format!(
                "Your answer was cut off: it was longer than {bytes} bytes, and none of it was acted on. Answer in a few sentences with tool calls; write long files in parts."
            );
            return self.unusable(&text, "the answer was too long");
        }
        if reply.calls.is_empty() {
            return self.without_calls(&reply, most);
        }
        self.calls(workspace, &reply, most)
    }

    /// An answer that can't be used goes back with what is wrong.
    fn unusable(&mut self, text: &str, fault: &str) -> Result<Option<Over>, Error> {
        self.say("user", text)?;
        self.fault(FaultOf::Model, fault)
    }

    /// The model says that it is done, or says nothing that could be acted on.
    fn without_calls(&mut self, reply: &Reply, most: u64) -> Result<Option<Over>, Error> {
        if reply.finish == Finish::Length {
            let text = format!(
                "Your answer reached the limit of {most} tokens before its end. Go on with a tool call, and be brief."
            );
            return self.unusable(&text, "the answer reached the limit of tokens");
        }
        if reply.content.trim().is_empty() {
            return self.unusable("Your answer was empty. Go on with a tool call.", "the answer was empty");
        }
        self.faults.clear();
        let standing = self.desk.standing();
        if standing.goal {
            return Ok(Some((End::Solved, format!("the model says it is done; {}", standing.speedups))));
        }
        let best = match standing.reward {
            None => "no candidate was profiled yet".to_owned(),
            Some(reward) => format!("the best candidate so far has reward {reward} ({})", standing.speedups),
        };
        if self.told {
            return Ok(Some((End::Stopped, format!("the model ended its work: {best}"))));
        }
        self.told = true;
        let left = self.setting.limits.turns.saturating_sub(self.turn);
        let text = format!(
            "The goal is not reached: {best}. {left} turns are left. Go on with a tool call; answer without one again only if nothing more can be done."
        );
        self.say("user", &text)?;
        Ok(None)
    }

    fn calls(&mut self, workspace: &mut dyn Workspace, reply: &Reply, most: u64) -> Result<Option<Over>, Error> {
        let mut malformed = None;
        let mut sound = false;
        let mut step = DefaultHasher::new();
        let last = reply.calls.len() - 1;
        for (i, call) in reply.calls.iter().enumerate() {
            if i >= CALLS {
                let text = format!("not run: an answer may hold {CALLS} calls");
                self.result(call, Word::Malformed, text, 0.0)?;
                continue;
            }
            (self.setting.say)(&format!("turn {}: {}", self.turn, call.name));
            let began = Instant::now();
            let longest = self.until.saturating_duration_since(began);
            let (word, mut content) = match self.tools.call(workspace, call, longest) {
                Ok(outcome) => {
                    let word = match outcome.kind {
                        Kind::Done => Word::Done,
                        Kind::Failed => Word::Failed,
                        Kind::Malformed => Word::Malformed,
                    };
                    (word, outcome.content)
                }
                Err(error) => {
                    let seconds = began.elapsed().as_secs_f64();
                    self.result(call, Word::Fault, error.to_string(), seconds)?;
                    if self.setting.stop.load(Ordering::Relaxed) {
                        return Ok(None);
                    }
                    let over = self.fault(FaultOf::Machine, &error.to_string())?;
                    // Without its workspace an episode can't go on.
                    let gone = matches!(error, SandboxError::Gone(_)).then(|| (End::Faults, error.to_string()));
                    return Ok(over.or(gone));
                }
            };
            if word == Word::Malformed {
                if reply.finish == Finish::Length && i == last {
                    content = format!(
                        "{content}. The answer reached the limit of {most} tokens before the call's end; write long files in parts"
                    );
                }
                malformed = Some(content.clone());
            } else {
                sound = true;
            }
            (&call.name, &call.arguments, &content).hash(&mut step);
            // Who waits for a background command asks the same again, and rightly.
            let waits = reply.calls.iter().all(|c| c.name == "BashOutput") && word == Word::Done;
            if i == last && !waits {
                match self.steps.note(step.finish()) {
                    Repeats::No => {}
                    Repeats::Told(times) => {
                        content.push_str(&format!(
                            "\n\n(You have done the same {times} times with the same result. Do something else; the episode ends if this goes on.)"
                        ));
                    }
                    Repeats::End(times) => {
                        self.result(call, word, content, began.elapsed().as_secs_f64())?;
                        let what = format!("{} with the same arguments and the same result, {times} times", call.name);
                        return Ok(Some((End::Loop, what)));
                    }
                }
            }
            self.result(call, word, content, began.elapsed().as_secs_f64())?;
        }
        self.told = false;
        if let Some(fault) = self.desk.fault() {
            let over = self.fault(FaultOf::Machine, &fault)?;
            if over.is_some() {
                return Ok(over);
            }
        } else if sound {
            self.faults.clear();
        } else if let Some(text) = malformed {
            let over = self.fault(FaultOf::Model, &text)?;
            if over.is_some() {
                return Ok(over);
            }
        }
        let standing = self.desk.standing();
        Ok(standing
            .reached
            .then(|| (End::TargetReached, format!("the job's target is reached: {}", standing.speedups))))
    }

    fn result(
        &mut self,
        call: &crate::gateway::chat::Call,
        outcome: Word,
        content: String,
        seconds: f64,
    ) -> Result<(), Error> {
        self.conversation.result(&call.id, &content);
        let line = What::Result {
            turn: self.turn,
            call: call.id.clone(),
            tool: call.name.clone(),
            outcome,
            content,
            seconds: (seconds * 1e3).round() / 1e3,
        };
        write(self.recorder, line)?;
        Ok(())
    }
}

/// An answer as it is kept: of one that was cut off for its length, the beginning.
fn shortened(reply: &Reply) -> Reply {
    let mut kept = reply.clone();
    if kept.cut_at.is_some() {
        kept.content = kept.content.chars().take(10_000).collect();
        kept.reasoning = None;
        kept.calls.clear();
        kept.token_ids = None;
    }
    kept
}
