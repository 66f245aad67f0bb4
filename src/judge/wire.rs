//! Frames between the processes of a judge: length-prefixed JSON with descriptors beside it.
//!
//! Knows the framing of `docs/interfaces.md` and nothing of what the messages mean. A peer may be
//! hostile: lengths and counts are bounded before anything is allocated.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};
use serde_json::Value;

/// Largest accepted JSON body.
pub const MAX_BYTES: usize = 64 << 20;
/// Most descriptors in one frame.
pub const MAX_FDS: usize = 250;

/// Most descriptors that the kernel sends at once: with room for them all none is cut off, and all that came are closed.
const SCM_MAX_FD: usize = 253;

/// How long an end that must not be late looks for an answer before it sleeps: waking up takes as long as many a kernel.
const AWAKE: Duration = Duration::from_millis(50);

/// Why a frame could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the process at the other end is gone")]
    Closed,
    #[error("no answer within {0:.1} s")]
    Timeout(f64),
    #[error("malformed frame: {0}")]
    Malformed(String),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// One end of a channel.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    awake: bool,
}

/// A frame as received.
#[derive(Debug)]
pub struct Frame {
    pub body: Value,
    pub fds: Vec<OwnedFd>,
}

/// Whether something can be read of a descriptor within so many milliseconds; an interruption says no earlier.
pub(super) fn readable(fd: RawFd, millis: i32) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: `poll` is one valid pollfd for the length given.
    unsafe { libc::poll(&raw mut poll, 1, millis) > 0 }
}

impl Channel {
    #[must_use]
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, awake: false }
    }

    /// A connected pair: ours, and the end for a child.
    ///
    /// # Errors
    /// When the system has no socket left.
    pub fn pair() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((Self { stream: ours, awake: false }, theirs))
    }

    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    /// Whether it looks for answers without sleep at first: for what is on a clock.
    pub fn stay_awake(&mut self, yes: bool) {
        self.awake = yes;
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// When the peer is gone or the frame is over the limits.
    pub fn send(&mut self, body: &Value, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        let text = serde_json::to_vec(body).map_err(|e| Error::Malformed(e.to_string()))?;
        if text.len() > MAX_BYTES || fds.len() > MAX_FDS {
            return Err(Error::Malformed(format!(
                "{} bytes and {} descriptors are over the limit",
                text.len(),
                fds.len()
            )));
        }
        let mut frame = Vec::with_capacity(8 + text.len());
        frame.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        frame.extend_from_slice(&u32::try_from(fds.len()).unwrap_or(u32::MAX).to_le_bytes());
        frame.extend_from_slice(&text);
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let mut sent = 0;
        while sent < frame.len() {
            let control = [ControlMessage::ScmRights(&raw)];
            let control: &[ControlMessage<'_>] = if sent == 0 && !raw.is_empty() { &control } else { &[] };
            match sendmsg::<()>(
                self.stream.as_raw_fd(),
                &[IoSlice::new(&frame[sent..])],
                control,
                MsgFlags::MSG_NOSIGNAL,
                None,
            ) {
                Ok(n) => sent += n,
                Err(nix::errno::Errno::EINTR) => {}
                Err(nix::errno::Errno::EPIPE | nix::errno::Errno::ECONNRESET) => return Err(Error::Closed),
                Err(e) => return Err(Error::Io(e.into())),
            }
        }
        Ok(())
    }

    /// Receives one frame; waits at most `timeout` (for ever if `None`).
    ///
    /// # Errors
    /// `Closed` at end of file, `Timeout`, `Malformed` when the peer breaks the framing.
    pub fn receive(&mut self, timeout: Option<Duration>) -> Result<Frame, Error> {
        let deadline = timeout.map(|t| (Instant::now() + t, t));
        if self.awake {
            let end = Instant::now() + timeout.map_or(AWAKE, |t| t.min(AWAKE));
            while !self.readable(0) && Instant::now() < end {}
        }
        let mut fds = Vec::new();
        let mut head = [0u8; 8];
        self.fill(&mut head, &mut fds, deadline)?;
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if length > MAX_BYTES || count > MAX_FDS {
            return Err(Error::Malformed(format!(
                "a frame of {length} bytes and {count} descriptors is over the limit"
            )));
        }
        let mut text = vec![0u8; length];
        self.fill(&mut text, &mut fds, deadline)?;
        if fds.len() != count {
            return Err(Error::Malformed(format!("{count} descriptors announced, {} came", fds.len())));
        }
        let body = serde_json::from_slice(&text).map_err(|e| Error::Malformed(e.to_string()))?;
        Ok(Frame { body, fds })
    }

    /// Whether something lies there, or the other end is gone, within so many milliseconds.
    fn readable(&self, millis: i32) -> bool {
        readable(self.stream.as_raw_fd(), millis)
    }

    fn fill(
        &self,
        mut buffer: &mut [u8],
        fds: &mut Vec<OwnedFd>,
        deadline: Option<(Instant, Duration)>,
    ) -> Result<(), Error> {
        while !buffer.is_empty() {
            if let Some((end, whole)) = deadline {
                let left = end.saturating_duration_since(Instant::now());
                let millis = i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX);
                if !self.readable(millis) {
                    if Instant::now() >= end {
                        return Err(Error::Timeout(whole.as_secs_f64()));
                    }
                    continue;
                }
            }
            let mut space = nix::cmsg_space!([RawFd; SCM_MAX_FD]);
            let mut slices = [IoSliceMut::new(buffer)];
            let got =
                match recvmsg::<()>(self.stream.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC)
                {
                    Ok(message) => {
                        let controls = message.cmsgs();
                        for control in
                            controls.map_err(|e| Error::Malformed(format!("descriptors that don't fit: {e}")))?
                        {
                            if let ControlMessageOwned::ScmRights(raw) = control {
                                // SAFETY: the kernel has just installed these descriptors for us alone.
                                fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                            }
                        }
                        message.bytes
                    }
                    Err(nix::errno::Errno::EINTR) => continue,
                    Err(nix::errno::Errno::ECONNRESET) => return Err(Error::Closed),
                    Err(e) => return Err(Error::Io(e.into())),
                };
            if got == 0 {
                return Err(Error::Closed);
            }
            if fds.len() > MAX_FDS {
                return Err(Error::Malformed(format!("more than {MAX_FDS} descriptors")));
            }
            buffer = &mut buffer[got..];
        }
        Ok(())
    }

    /// Sends a request and waits for its reply.
    ///
    /// # Errors
    /// As `send` and `receive`.
    pub fn call(&mut self, body: &Value, fds: &[BorrowedFd<'_>], timeout: Option<Duration>) -> Result<Frame, Error> {
        self.send(body, fds)?;
        self.receive(timeout)
    }
}
