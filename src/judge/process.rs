//! Zygotes and the children they fork: start, talk, stop, kill.
//!
//! Knows processes, sockets and deadlines. Must not know what is asked of a child. A child is a process of
//! another session and, where the host allows it, another user; killing it kills all of both.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::leash::{Leash, Member};
use super::wire::{self, Channel, Frame};
pub use crate::sandbox::descriptor_three;
use crate::sandbox::{self, Confinement};

/// Most that is read of a child's standard error, bytes.
const SAID: u64 = 1200;

/// What a child answered, when it answered no.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Refused {
    pub code: String,
    pub message: String,
    pub body: Value,
}

/// Why a request to a child failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the {role} {what}")]
    Gone { role: String, what: String, timeout: bool },
    /// It ended since its zygote did, which says nothing of what it was at.
    #[error("the {role} ended with the process that it was forked from")]
    Orphaned { role: String },
    #[error("the {role} can't be started: {source}")]
    Start { role: String, source: io::Error },
}

impl Error {
    /// Code of a refusal, `timeout`, or `gone`.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Refused(r) => &r.code,
            Self::Gone { timeout: true, .. } => "timeout",
            Self::Gone { .. } | Self::Orphaned { .. } | Self::Start { .. } => "gone",
        }
    }
}

/// A trusted Python process that has imported what its children need.
#[derive(Debug)]
pub struct Zygote {
    role: String,
    channel: Channel,
    child: Child,
    life: Arc<Life>,
}

/// Whether a process has ended, as it can be seen after somebody has waited for it and its number is another's.
#[derive(Debug)]
struct Life {
    pid: i32,
    /// None where the kernel, or what confines us, has no such descriptors: then its number is looked at.
    fd: Option<OwnedFd>,
}

/// How long something that was killed with its zygote is older than what can be seen of that, at most.
const AFTERMATH: Duration = Duration::from_millis(200);

impl Life {
    fn of(child: &Child) -> Self {
        // SAFETY: a system call on plain numbers that gives a descriptor of ours alone, or -1; the child isn't reaped before
        // `child` is used again.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
        let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0);
        // SAFETY: as above.
        let fd = fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        Self { pid: i32::try_from(child.id()).unwrap_or(0), fd }
    }

    /// Whether it has, or does within `wait`.
    fn ended(&self, wait: Duration) -> bool {
        let end = Instant::now() + wait;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let seen = match &self.fd {
                Some(fd) => wire::readable(fd.as_raw_fd(), i32::try_from(left.as_millis()).unwrap_or(i32::MAX)),
                None => !runs(self.pid),
            };
            if seen || Instant::now() >= end {
                return seen;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The letter for what a process or a thread is at, by its folder in /proc; none where it is gone.
fn state(folder: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(folder.join("stat")).unwrap_or_default();
    // The name before the state may hold anything but is closed by the last bracket.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a process is there and has not ended.
fn runs(pid: i32) -> bool {
    state(Path::new(&format!("/proc/{pid}"))).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}

/// Sends a request and takes `ok` apart.
pub(super) fn ask(
    role: &str,
    channel: &mut Channel,
    body: &Value,
    fds: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Frame, Error> {
    let op = body["op"].as_str().unwrap_or("?");
    let start = Instant::now();
    let frame = channel.call(body, fds, Some(timeout)).map_err(|e| gone(role, op, &e))?;
    tracing::debug!(role, op, seconds = start.elapsed().as_secs_f64(), "answered");
    answer(frame)
}

/// What a failure to exchange a frame says of the process at the other end.
fn gone(role: &str, op: &str, error: &wire::Error) -> Error {
    let what = match error {
        wire::Error::Closed => format!("ended during `{op}`"),
        wire::Error::Timeout(s) => format!("gave no answer to `{op}` within {s:.0} s"),
        other => format!("sent a bad answer to `{op}`: {other}"),
    };
    Error::Gone { role: role.to_owned(), what, timeout: matches!(error, wire::Error::Timeout(_)) }
}

fn answer(frame: Frame) -> Result<Frame, Error> {
    if frame.body["ok"].as_bool() == Some(true) {
        return Ok(frame);
    }
    let text = |key: &str| frame.body[key].as_str().unwrap_or_default().to_owned();
    let code = if frame.body["code"].is_string() { text("code") } else { "malformed".to_owned() };
    Err(Refused { code, message: text("message"), body: frame.body.clone() }.into())
}

impl Zygote {
    /// Starts `python -m module` and waits until it answers.
    ///
    /// # Errors
    /// When it can't be started or does not answer within two minutes; its standard error is in the message.
    pub fn start(role: &str, mut command: Command) -> Result<Self, Error> {
        let start = |source| Error::Start { role: role.to_owned(), source };
        let (channel, theirs) = Channel::pair().map_err(start)?;
        descriptor_three(&mut command, theirs.into());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(start)?;
        drop(command);
        let stderr = child.stderr.take();
        let life = Arc::new(Life::of(&child));
        let mut zygote = Self { role: role.to_owned(), channel, child, life };
        match ask(role, &mut zygote.channel, &json!({"op": "ping"}), &[], Duration::from_secs(120)) {
            Ok(_) => {
                if let Some(pipe) = stderr {
                    // Drained for ever, so that a zygote that warns can't block.
                    std::thread::spawn(move || io::copy(&mut io::BufReader::new(pipe), &mut io::sink()));
                }
                Ok(zygote)
            }
            Err(error) => {
                let _ = zygote.child.kill();
                let mut said = String::new();
                if let Some(mut pipe) = stderr {
                    let _ = io::Read::read_to_string(&mut pipe, &mut said);
                }
                let tail: Vec<&str> = said.lines().rev().take(5).collect();
                let tail = tail.into_iter().rev().collect::<Vec<_>>().join(" | ");
                Err(Error::Gone { role: role.to_owned(), what: format!("{error}; it said: {tail}"), timeout: false })
            }
        }
    }

    /// Whether it is gone, as after the system took its memory, or is so in a moment: nothing can be forked from it any more.
    fn ended(&self) -> bool {
        self.life.ended(AFTERMATH)
    }

    /// What `fork` gives; where that fails since this zygote has ended, of the one that `again` starts in its place.
    ///
    /// # Errors
    /// As `fork` and `again`.
    pub fn forked(
        &mut self,
        again: impl FnOnce() -> Result<Self, Error>,
        fork: impl Fn(&mut Self) -> Result<Forked, Error>,
    ) -> Result<Forked, Error> {
        match fork(self) {
            Err(Error::Gone { .. } | Error::Orphaned { .. }) if self.ended() => {
                tracing::warn!(role = self.role, "has ended and is started anew");
                *self = again()?;
                fork(self)
            }
            done => done,
        }
    }

    /// # Errors
    /// When the zygote is gone or refuses. One that is late is ended, with its children: whoever asked next would get the answer
    /// to this.
    pub fn ask(&mut self, body: &Value, timeout: Duration) -> Result<Frame, Error> {
        self.ask_with(body, &[], timeout)
    }

    fn ask_with(&mut self, body: &Value, fds: &[BorrowedFd<'_>], timeout: Duration) -> Result<Frame, Error> {
        let asked = ask(&self.role, &mut self.channel, body, fds, timeout);
        if matches!(asked, Err(Error::Gone { .. })) {
            let _ = self.child.kill();
        }
        asked
    }

    /// Forks a child under `confinement`, with more keys of the request in `extra` (`role`).
    ///
    /// # Errors
    /// When the zygote is gone or the child does not confirm its confinement.
    pub fn fork(
        &mut self,
        role: &str,
        confinement: &Confinement,
        threads: usize,
        extra: &Value,
    ) -> Result<Forked, Error> {
        let (channel, theirs) = Channel::pair().map_err(|source| Error::Start { role: role.to_owned(), source })?;
        let mut body = confinement.to_wire(threads);
        body["op"] = json!("fork");
        if let (Some(body), Some(extra)) = (body.as_object_mut(), extra.as_object()) {
            body.extend(extra.clone());
        }
        let frame = self.ask_with(&body, &[theirs.as_fd()], Duration::from_secs(60))?;
        drop(theirs);
        let pid = i32::try_from(frame.body["pid"].as_i64().unwrap_or(0)).unwrap_or(0);
        if pid <= 1 {
            return Err(Error::Gone {
                role: role.to_owned(),
                what: "was forked without a process id".into(),
                timeout: false,
            });
        }
        let mut forked = Forked {
            role: role.to_owned(),
            channel,
            pid,
            user: confinement.user,
            member: Leash::join(pid, confinement.user.map(|u| u.0)),
            life: Arc::clone(&self.life),
            lost: false,
            isolation: Vec::new(),
            scratch: None,
        };
        let hello = forked.ask(&json!({"op": "hello"}), &[], Duration::from_secs(60))?;
        forked.isolation = serde_json::from_value(hello.body["isolation"].clone()).unwrap_or_default();
        Ok(forked)
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A child of a zygote; killed with everything it started when dropped.
#[derive(Debug)]
pub struct Forked {
    role: String,
    channel: Channel,
    pub pid: i32,
    user: Option<(u32, u32)>,
    member: Member,
    /// Its zygote's.
    life: Arc<Life>,
    /// It gave no answer, or none that could be read: the next one that is read may be of an earlier question.
    lost: bool,
    pub isolation: Vec<String>,
    /// Its working folder, removed after it.
    pub scratch: Option<tempfile::TempDir>,
}

impl Forked {
    /// Sends a request with descriptors and waits for the reply.
    ///
    /// # Errors
    /// `Refused` with the child's words; `Gone` when it ended or is late, `Orphaned` when its zygote has ended.
    pub fn ask(&mut self, body: &Value, fds: &[BorrowedFd<'_>], timeout: Duration) -> Result<Frame, Error> {
        let asked = ask(&self.role, &mut self.channel, body, fds, timeout);
        asked.map_err(|e| self.seen(e))
    }

    /// A zygote takes its children along: that they end then is nobody's doing but the machine's.
    fn seen(&mut self, error: Error) -> Error {
        if let Error::Gone { timeout, .. } = error {
            self.lost = true;
            if !timeout && self.life.ended(AFTERMATH) {
                return Error::Orphaned { role: self.role.clone() };
            }
        }
        error
    }

    /// Whether its zygote has ended, and it with it.
    #[must_use]
    pub fn orphaned(&self) -> bool {
        self.life.ended(Duration::ZERO)
    }

    /// Whether it can be asked anything: it has answered all that it was asked, and has not ended.
    #[must_use]
    pub fn alive(&self) -> bool {
        !self.lost && !self.orphaned() && runs(self.pid) && self.peeked() != Some(0)
    }

    /// How much lies in its socket, at most one byte; none where nothing does, 0 where it has closed its end.
    fn peeked(&self) -> Option<isize> {
        let mut byte = 0u8;
        // SAFETY: `byte` is valid for one byte; nothing is taken from the socket.
        let got =
            unsafe { libc::recv(self.channel.raw(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        (got >= 0).then_some(got)
    }

    /// Whether its answers are looked for without sleep at first: for what is on a clock.
    pub fn stay_awake(&mut self, yes: bool) {
        self.channel.stay_awake(yes);
    }

    /// Asks a process that stands still. Returns its answer and the microseconds from when it was let go until all its
    /// threads stood still again: what works on after the answer works on frozen time.
    ///
    /// # Errors
    /// As `ask`; `Gone` as late where a thread can't be stopped.
    pub fn clocked(&mut self, body: &Value, timeout: Duration) -> Result<(Frame, f64), Error> {
        let op = body["op"].as_str().unwrap_or("?");
        if let Err(error) = self.channel.send(body, &[]) {
            return Err(self.seen(gone(&self.role, op, &error)));
        }
        let start = Instant::now();
        self.thaw();
        let received = self.channel.receive(Some(timeout));
        let still = self.stand_still(Duration::from_secs(10));
        let microseconds = start.elapsed().as_secs_f64() * 1e6;
        let frame = received.map_err(|e| self.seen(gone(&self.role, op, &e)))?;
        if !still {
            return Err(self.seen(gone(&self.role, op, &wire::Error::Timeout(10.0))));
        }
        Ok((answer(frame)?, microseconds))
    }

    /// Stops it and waits until all its threads have stopped, or it has ended; false where one does not stop in time.
    pub fn stand_still(&self, timeout: Duration) -> bool {
        self.freeze();
        let end = Instant::now() + timeout;
        let mut naps = 0u32;
        while !stopped(self.pid) {
            if Instant::now() >= end {
                return false;
            }
            // A stop takes microseconds; look again at once first, then be polite.
            naps += 1;
            if naps > 200 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        true
    }

    /// Whether nothing lies in its socket that nobody asked for.
    #[must_use]
    pub fn silent(&self) -> bool {
        self.peeked() != Some(1)
    }

    /// The end of what it wrote to the file `stderr` of its folder, on one line; nothing where there is none. It is hostile.
    #[must_use]
    pub fn said(&self) -> String {
        let Some(scratch) = &self.scratch else { return String::new() };
        let read = || -> io::Result<Vec<u8>> {
            let mut file = sandbox::plain_file(&scratch.path().join("stderr"))?;
            let bytes = file.metadata()?.len();
            io::Seek::seek(&mut file, io::SeekFrom::Start(bytes.saturating_sub(SAID)))?;
            let mut text = Vec::new();
            io::Read::read_to_end(&mut io::Read::take(file, SAID), &mut text)?;
            Ok(text)
        };
        let text = read().unwrap_or_default();
        let lines: Vec<String> = String::from_utf8_lossy(&text)
            .lines()
            .map(|line| line.trim().replace(|c: char| c.is_control(), " "))
            .filter(|line| !line.is_empty())
            .collect();
        lines.join(" | ")
    }

    /// Its threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.pid)).map_or(0, |tasks| tasks.flatten().count())
    }

    /// Stops all its threads (no effect on a process that is gone).
    pub fn freeze(&self) {
        signal(self.pid, libc::SIGSTOP);
    }

    /// Lets it run again.
    pub fn thaw(&self) {
        signal(self.pid, libc::SIGCONT);
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        self.member.leave();
        sandbox::kill_all(self.pid, self.user.map(|u| u.0));
        if let Some(scratch) = &self.scratch {
            Confinement { user: self.user, ..Confinement::default() }.empty(scratch.path());
        }
    }
}

/// Whether no thread of a process runs or will: each is stopped or has ended.
fn stopped(pid: i32) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return true };
    tasks.flatten().all(|task| state(&task.path()).is_none_or(|state| matches!(state, 'T' | 't' | 'Z' | 'X')))
}

pub(super) fn signal(pid: i32, number: i32) {
    // SAFETY: kill takes plain numbers; a pid that is gone gives an error, which is what we want to ignore.
    unsafe { libc::kill(pid, number) };
}

/// The environment of a Python zygote: nothing of ours but what is named.
#[must_use]
pub fn python_command(
    python: &PathBuf,
    module: &str,
    python_path: &PathBuf,
    env: &BTreeMap<String, String>,
) -> Command {
    let mut command = Command::new(python);
    command
        .args(["-B", "-s", "-m", module])
        .env_clear()
        .env("PYTHONPATH", python_path)
        .env("PYTHONUNBUFFERED", "1")
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("USER", "kernelfleet")
        .env("LANG", "C.UTF-8")
        .envs(env);
    command
}
