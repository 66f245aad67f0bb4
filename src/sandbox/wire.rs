//! Frames between an agent and its sandbox: JSON, raw bytes beside it, at most one descriptor.
//!
//! Knows the framing and the messages; must not know who acts on them. What comes out of an episode may be forged:
//! lengths are bounded before anything is allocated.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::client::Bounds;
use super::workspace::{Error, ExportLimits, Search};

/// Largest JSON body.
const MAX_TEXT: usize = 16 << 20;
/// Largest file that crosses at once.
pub const MAX_RAW: usize = 256 << 20;

/// What a keeper is told: everything about its sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Settings {
    /// A folder of the host that is this sandbox's own; where there are no mount namespaces, all lies in it.
    pub folder: PathBuf,
    pub read: Vec<PathBuf>,
    pub path: Vec<PathBuf>,
    pub socket: Option<PathBuf>,
    pub env: BTreeMap<String, String>,
    pub bounds: Bounds,
    pub namespaces: bool,
    pub weak: bool,
    /// A workspace that is emptied and never removed: it is mounted.
    #[serde(default)]
    pub workspace: Option<PathBuf>,
    /// A folder that is shown as the workspace's `utils`, and that nobody can write.
    #[serde(default)]
    pub sealed: Option<PathBuf>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Order {
    Start(Settings),
    /// Instead of the above, where whoever keeps the sandbox has chosen its settings.
    Begin,
    /// Ends what runs and begins anew.
    Reset,
}

/// A keeper's answer; the channel of the new episode is the frame's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub struct Began {
    /// As seen inside.
    pub workspace: PathBuf,
    pub isolation: Vec<String>,
    pub notes: Vec<String>,
    /// The workspace's `utils` are there already and can't be written.
    #[serde(default)]
    pub sealed: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Request {
    Run { command: String, seconds: f64 },
    Start { command: String },
    Output { id: String },
    Kill { id: String },
    Read { path: String, limit: u64 },
    Write { path: String, executable: bool },
    Stat { path: String },
    List { path: String },
    Glob { pattern: String, path: Option<String> },
    Grep { search: Search },
    Export { limits: ExportLimits },
}

/// What an episode answers: any number of files, then the end.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    File { path: String },
    Done(serde_json::Value),
    Refused(Error),
}

#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}

/// A frame as received.
#[derive(Debug)]
pub struct Frame<T> {
    pub body: T,
    pub raw: Vec<u8>,
    pub fd: Option<OwnedFd>,
}

impl Channel {
    pub fn new(stream: UnixStream) -> Self {
        Self { stream }
    }

    /// Tells the other end that nothing more comes.
    pub fn close(&self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    pub fn send(&mut self, body: &impl Serialize, raw: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let text = serde_json::to_vec(body)?;
        if text.len() > MAX_TEXT || raw.len() > MAX_RAW {
            return Err(io::Error::other(format!("{} and {} bytes are over the limit", text.len(), raw.len())));
        }
        let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes();
        let head = [size(text.len()), size(raw.len())].concat();
        let fds: Vec<RawFd> = fd.iter().map(AsRawFd::as_raw_fd).collect();
        let control = [ControlMessage::ScmRights(&fds)];
        let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &control };
        let sent = loop {
            match sendmsg::<()>(self.as_raw_fd(), &[IoSlice::new(&head)], control, MsgFlags::MSG_NOSIGNAL, None) {
                Err(nix::errno::Errno::EINTR) => {}
                other => break other?,
            }
        };
        // Rust ignores SIGPIPE, so a peer that is gone is an error here.
        self.stream.write_all(&head[sent..])?;
        self.stream.write_all(&text)?;
        self.stream.write_all(raw)
    }

    /// Receives a frame before `end`, or waits for ever.
    pub fn receive<T: DeserializeOwned>(&mut self, end: Option<Instant>) -> io::Result<Frame<T>> {
        let mut head = [0u8; 8];
        let mut fd = None;
        let mut have = 0;
        while have < head.len() {
            self.ready(end)?;
            let mut space = nix::cmsg_space!([RawFd; 4]);
            let mut slices = [IoSliceMut::new(&mut head[have..])];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            match recvmsg::<()>(self.stream.as_raw_fd(), &mut slices, Some(&mut space), flags) {
                Ok(message) => {
                    for control in message.cmsgs()? {
                        if let ControlMessageOwned::ScmRights(raw) = control {
                            // SAFETY: the kernel has just installed these descriptors for us alone.
                            fd = raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).next_back().or(fd);
                        }
                    }
                    if message.bytes == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    have += message.bytes;
                }
                Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        let size = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let (text, raw) = (size(0), size(4));
        if text > MAX_TEXT || raw > MAX_RAW {
            return Err(io::Error::other(format!("a frame of {text} and {raw} bytes is over the limit")));
        }
        let text = self.bytes(text, end)?;
        let raw = self.bytes(raw, end)?;
        Ok(Frame { body: serde_json::from_slice(&text)?, raw, fd })
    }

    fn bytes(&mut self, count: usize, end: Option<Instant>) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        // Memory grows with what comes, not with what is announced.
        while bytes.len() < count {
            self.ready(end)?;
            let chunk = (count - bytes.len()).min(1 << 16);
            let from = bytes.len();
            bytes.resize(from + chunk, 0);
            let got = match self.stream.read(&mut bytes[from..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
                Err(e) => return Err(e),
            };
            bytes.truncate(from + got);
        }
        Ok(bytes)
    }

    fn ready(&self, end: Option<Instant>) -> io::Result<()> {
        let Some(end) = end else { return Ok(()) };
        loop {
            let left = end.saturating_duration_since(Instant::now());
            if left == Duration::ZERO {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let millis = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
            let mut poll = libc::pollfd { fd: self.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: `poll` is one valid pollfd for the length given.
            if unsafe { libc::poll(&raw mut poll, 1, millis) } > 0 {
                return Ok(());
            }
        }
    }
}
