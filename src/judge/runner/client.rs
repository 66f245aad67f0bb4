//! The supervisor's handle on a runner process: start, ask, stop, continue, end.
//!
//! A CPU runner is hostile: every answer may be forged, late or missing, and turns into a typed error here,
//! never into a panic or a wait without end. On the CPU this file makes the shared memory files of
//! workspaces and derived constants (sealed, so that nobody can shrink them under a reader); on CUDA the
//! runner makes and exports them. It must not know what a time or an output means for a verdict.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    Arithmetic, BUFFERS_PER_FRAME, CPU_COMMAND, CUDA_COMMAND, Fault, Item, LaunchInfo, NodeTime, NullSamples,
    REFUSED_CALLS, Sample, output_buffers,
};
use crate::judge::leash::{Leash, Member};
use crate::judge::process;
use crate::judge::wire::{Channel, Error as WireError, Frame};
use crate::plan::{BufferKind, Device, Plan};

/// Why a runner gave no result.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process is gone, by a signal or by its own exit.
    #[error("the runner ended during `{op}`: {}", ending(*.signal, *.code))]
    Crashed { op: String, signal: Option<i32>, code: Option<i32> },
    /// No answer in time; the process still lives and should be killed.
    #[error("the runner gave no answer to `{op}` within {seconds:.1} s")]
    Timeout { op: String, seconds: f64 },
    /// The runner answered that it failed.
    #[error(transparent)]
    Refused(#[from] Fault),
    /// An answer that was not asked for, or that breaks the protocol (`forged_reply`).
    #[error("the runner broke the protocol during `{op}`: {why}")]
    Forged { op: String, why: String },
    /// The supervisor's own side failed.
    #[error("{doing}: {source}")]
    Io { doing: String, source: std::io::Error },
}

impl Error {
    /// The code under which a verdict names it.
    #[must_use]
    pub fn code(&self) -> &str {
        match self {
            Self::Crashed { .. } => "crashed",
            Self::Timeout { .. } => "timeout",
            Self::Refused(fault) => &fault.code,
            Self::Forged { .. } => "forged_reply",
            Self::Io { .. } => "judge_failed",
        }
    }
}

/// Numbers of system calls of this architecture, with their first arguments.
fn calls(list: &[(u32, u32)]) -> String {
    let each: Vec<String> = list.iter().map(|(n, argument)| format!("{n}({argument:#x}, ..)")).collect();
    format!("system calls {} of {}", each.join(", "), std::env::consts::ARCH)
}

fn ending(signal: Option<i32>, code: Option<i32>) -> String {
    match (signal, code) {
        (Some(signal), _) => match nix::sys::signal::Signal::try_from(signal) {
            Ok(nix::sys::signal::Signal::SIGSYS) => {
                "killed by SIGSYS: it made a system call that its filter refuses".into()
            }
            Ok(name) => format!("killed by {name}"),
            Err(_) => format!("killed by signal {signal}"),
        },
        (None, Some(code)) => format!("it exited with status {code}"),
        (None, None) => "its end can't be told".to_owned(),
    }
}

fn io(doing: &str, source: std::io::Error) -> Error {
    Error::Io { doing: doing.to_owned(), source }
}

/// A buffer shared with a runner: what is sent, or what came back.
#[derive(Debug)]
pub struct Exported {
    /// Index into `plan.buffers`.
    pub buffer: usize,
    pub fd: OwnedFd,
    pub bytes: u64,
}

/// What a runner is given for one evaluation. Descriptors stay the supervisor's.
pub struct LoadRequest<'a> {
    pub plan: &'a Plan,
    /// One image a module.
    pub images: Vec<BorrowedFd<'a>>,
    /// `[slot][input]`, with bytes; `None` for inputs that are Python values.
    pub inputs: Vec<Vec<Option<(BorrowedFd<'a>, u64)>>>,
    pub parameters: BTreeMap<String, (BorrowedFd<'a>, u64)>,
    /// Memory file of the derived constants, as the recorder made it.
    pub constants: Option<(BorrowedFd<'a>, Vec<Item>)>,
    pub libraries: BTreeMap<String, String>,
    pub precision: Arithmetic,
    pub seed: u64,
    /// CPU: the runner's end of the library helper's socket.
    pub helper: Option<BorrowedFd<'a>>,
}

/// A loaded plan, as the supervisor sees it.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Workspaces that hold an output.
    pub outputs: Vec<Exported>,
    /// CPU: the other workspaces, to be poisoned by the supervisor. CUDA: empty, the runner poisons.
    pub workspaces: Vec<Exported>,
    /// CPU: the derived constants, to be hashed and rewritten by the supervisor. CUDA: see `snapshot`.
    pub constants: Vec<Exported>,
    pub launches: Vec<LaunchInfo>,
}

/// A running runner. Dropping it kills it.
#[derive(Debug)]
pub struct Runner {
    channel: Channel,
    child: Child,
    member: Member,
    device: Device,
    stopped: bool,
    over: bool,
    /// Number of the last request; an honest runner echoes it, so that an answer that was forged early is
    /// found out when the true one comes in the next one's place.
    id: u64,
    /// CUDA: system calls that its filter has refused, as last told.
    refused: Vec<(u32, u32)>,
}

impl Runner {
    /// Starts `program` as a runner for `device`. `configure` sets environment, user and confinement; what it
    /// adds with `pre_exec` runs after the socket lies on descriptor 3 and may close all others above it.
    ///
    /// # Errors
    /// `Io` when the process can't be started.
    pub fn spawn(program: &Path, device: Device, configure: impl FnOnce(&mut Command)) -> Result<Self, Error> {
        let mut command = Command::new(program);
        command.arg(match device {
            Device::Cpu => CPU_COMMAND,
            Device::Cuda => CUDA_COMMAND,
        });
        Self::start(command, device, configure)
    }

    /// Starts `program` as a runner of a card under another one, `counter`, that ends when it does.
    ///
    /// # Errors
    /// As `spawn`.
    pub fn spawn_under(
        mut counter: Command,
        program: &Path,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Self, Error> {
        counter.arg(program).arg(CUDA_COMMAND);
        Self::start(counter, Device::Cuda, configure)
    }

    fn start(mut command: Command, device: Device, configure: impl FnOnce(&mut Command)) -> Result<Self, Error> {
        let (channel, theirs) = Channel::pair().map_err(|e| io("making a runner's socket", e))?;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        process::descriptor_three(&mut command, theirs.into());
        configure(&mut command);
        let child =
            command.spawn().map_err(|e| io(&format!("starting {} as a runner", command.get_program().display()), e))?;
        // The command owns the child's end: while it lived, the end of the child would not close the socket.
        drop(command);
        let member = Leash::join(i32::try_from(child.id()).unwrap_or(0), None);
        Ok(Self { channel, child, member, device, stopped: false, over: false, id: 0, refused: Vec::new() })
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the runner is up (on CUDA: its context exists).
    ///
    /// # Errors
    /// As [`Error`].
    pub fn hello(&mut self, timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("hello", json!({}), &[], timeout).map(|_| ())
    }

    /// Gives the runner its plan, images and buffers.
    ///
    /// # Errors
    /// `Refused` with `symbol`, `image`, `arguments`, `plan`, `memory`, `library_failed`, ...; else as [`Error`].
    pub fn load(&mut self, request: &LoadRequest<'_>, timeout: Duration) -> Result<Loaded, Error> {
        let deadline = Instant::now() + timeout;
        let left = |deadline: Instant| deadline.saturating_duration_since(Instant::now());
        let own = match self.device {
            Device::Cpu => owned_buffers(request)?,
            Device::Cuda => Vec::new(),
        };
        let mut fds = Frames::default();
        let mut named = Vec::new();
        for (name, (fd, bytes)) in &request.parameters {
            named.push((Some(name.as_str()), 0, *fd, *bytes));
        }
        for exported in &own {
            named.push((None, exported.buffer, exported.fd.as_fd(), exported.bytes));
        }
        for chunk in named.chunks(BUFFERS_PER_FRAME) {
            let mut parameters = serde_json::Map::new();
            let mut buffers = Vec::new();
            for &(name, buffer, fd, bytes) in chunk {
                let index = fds.add(fd);
                match name {
                    Some(name) => {
                        parameters.insert(name.to_owned(), json!({"fd": index, "bytes": bytes}));
                    }
                    None => buffers.push(json!({"buffer": buffer, "fd": index, "bytes": bytes})),
                }
            }
            let body = json!({"parameters": parameters, "buffers": buffers});
            self.ask::<Value>("buffers", body, &fds.0, left(deadline))?;
            fds.0.clear();
        }
        let images: Vec<usize> = request.images.iter().map(|&fd| fds.add(fd)).collect();
        let mut inputs = Vec::with_capacity(request.inputs.len());
        for slot in &request.inputs {
            let slot: Vec<Value> = slot
                .iter()
                .map(|input| input.map_or(Value::Null, |(fd, bytes)| json!({"fd": fds.add(fd), "bytes": bytes})))
                .collect();
            inputs.push(slot);
        }
        let constants = match (&request.constants, self.device) {
            (Some((fd, items)), Device::Cuda) => json!({"fd": fds.add(*fd), "items": items}),
            _ => Value::Null,
        };
        let helper = request.helper.map_or(Value::Null, |fd| json!(fds.add(fd)));
        let body = json!({
            "plan": request.plan, "images": images, "slots": request.inputs.len(), "inputs": inputs,
            "constants": constants, "libraries": request.libraries, "precision": request.precision,
            "seed": request.seed, "helper": helper,
        });
        let mut frame = self.ask_frame("load", body, &fds.0, left(deadline))?;
        match self.device {
            Device::Cpu => {
                no_descriptors("load", &frame)?;
                Ok(sort_owned(request.plan, own))
            }
            Device::Cuda => {
                #[derive(Deserialize)]
                struct Body {
                    outputs: Vec<super::SharedBuffer>,
                    launches: Vec<LaunchInfo>,
                }
                let body: Body = decode("load", std::mem::take(&mut frame.body))?;
                let outputs = exported("load", body.outputs, frame.fds)?;
                let listed: Vec<usize> = outputs.iter().map(|o| o.buffer).collect();
                if listed != output_buffers(request.plan) {
                    return Err(forged("load", "the outputs it lists aren't the plan's"));
                }
                Ok(Loaded { outputs, launches: body.launches, ..Loaded::default() })
            }
        }
    }

    /// CUDA: ends the plan, so that another can be loaded into the same context; what its device code could have written
    /// over is made anew.
    ///
    /// # Errors
    /// As [`Error`]; then the process is of no use any more.
    pub fn unload(&mut self, timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("unload", json!({}), &[], timeout).map(|_| ())
    }

    /// CUDA: copies the derived constants of another parameter set in. On the CPU write `Loaded::constants`
    /// instead ([`write_constants`]).
    ///
    /// # Errors
    /// As [`Error`].
    pub fn constants(&mut self, fd: BorrowedFd<'_>, items: &[Item], timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("constants", json!({"fd": 0, "items": items}), &[fd], timeout).map(|_| ())
    }

    /// Runs the plan once on `slot`. On the CPU the runner may be stopped; it is continued after the request
    /// lies in its socket, and `wall` is from there to the answer.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn run(&mut self, slot: usize, seed: u64, timeout: Duration) -> Result<(Sample, Duration), Error> {
        self.timed("run", json!({"slot": slot, "seed": seed}), timeout)
    }

    /// Runs the empty plan `count` times on the device's clock.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn null(&mut self, count: usize, timeout: Duration) -> Result<(NullSamples, Duration), Error> {
        self.timed("null", json!({"count": count}), timeout)
    }

    /// Times each node alone: the median of `count`.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn profile(&mut self, slot: usize, count: usize, timeout: Duration) -> Result<Vec<NodeTime>, Error> {
        #[derive(Deserialize)]
        struct Body {
            launches: Vec<NodeTime>,
        }
        Ok(self.ask::<Body>("profile", json!({"slot": slot, "count": count}), &[], timeout)?.launches)
    }

    /// CUDA: runs node by node, waiting after each; a failing one is named in the `Refused` error. For use in
    /// a fresh process after `run` failed, since a failed context answers nothing more.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn attribute(&mut self, slot: usize, seed: u64, timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("attribute", json!({"slot": slot, "seed": seed}), &[], timeout).map(|_| ())
    }

    /// CUDA: runs node by node between start and stop of the profiler that the runner is started under, if any.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn observe(&mut self, slot: usize, seed: u64, timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("observe", json!({"slot": slot, "seed": seed}), &[], timeout).map(|_| ())
    }

    /// CUDA: loads the modules anew, so that no global of the device survives from one block into the next.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn reload(&mut self, timeout: Duration) -> Result<(), Error> {
        self.ask::<Value>("reload", json!({}), &[], timeout).map(|_| ())
    }

    /// CUDA: copies of buffers (all constants if `buffers` is empty), for hashing by another process.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn snapshot(&mut self, buffers: &[usize], timeout: Duration) -> Result<Vec<Exported>, Error> {
        #[derive(Deserialize)]
        struct Body {
            buffers: Vec<super::SharedBuffer>,
        }
        let mut frame = self.ask_frame("snapshot", json!({"buffers": buffers}), &[], timeout)?;
        let body: Body = decode("snapshot", std::mem::take(&mut frame.body))?;
        exported("snapshot", body.buffers, frame.fds)
    }

    /// CUDA: what the card is.
    ///
    /// # Errors
    /// As [`Error`].
    pub fn device(&mut self, timeout: Duration) -> Result<super::cuda::DeviceInfo, Error> {
        self.ask("device", json!({}), &[], timeout)
    }

    /// CUDA: bytes read and written a second by a large device-to-device copy, in 1e9 (a copied byte counts
    /// twice).
    ///
    /// # Errors
    /// As [`Error`].
    pub fn copy_rate(&mut self, timeout: Duration) -> Result<f64, Error> {
        #[derive(Deserialize)]
        struct Body {
            copy_gbps: f64,
        }
        Ok(self.ask::<Body>("copy_rate", json!({}), &[], timeout)?.copy_gbps)
    }

    /// Stops every thread of the runner and returns when all have stopped. What it can't stop are helpers
    /// outside the process (children, kernel queues): confinement must not let the candidate make any.
    ///
    /// # Errors
    /// `Crashed`, or `Timeout` when a thread hangs in the kernel.
    pub fn stop(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.stopped {
            return Ok(());
        }
        self.signal(libc::SIGSTOP).map_err(|e| io("stopping the runner", e))?;
        let end = Instant::now() + timeout;
        let mut naps = 0u32;
        loop {
            // The kernel reports a stop to the parent once the last thread has stopped.
            match self.state(libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT)? {
                Some(libc::CLD_STOPPED) => {
                    self.state(libc::WSTOPPED)?;
                    self.stopped = true;
                    return self.must_be_silent("stop");
                }
                Some(_) => return Err(self.crashed("stop")),
                None if Instant::now() >= end => {
                    return Err(Error::Timeout { op: "stop".into(), seconds: timeout.as_secs_f64() });
                }
                None => {
                    // A stop takes microseconds; spin first, then be polite.
                    naps += 1;
                    if naps > 200 {
                        std::thread::sleep(Duration::from_micros(50));
                    }
                }
            }
        }
    }

    /// Lets a stopped runner go on.
    ///
    /// # Errors
    /// `Io` when the process is gone.
    pub fn cont(&mut self) -> Result<(), Error> {
        self.signal(libc::SIGCONT).map_err(|e| io("continuing the runner", e))?;
        self.stopped = false;
        Ok(())
    }

    /// Kills the process (and its process group, where it leads one) and waits for its end.
    pub fn kill(&mut self) {
        if self.over {
            return;
        }
        self.over = true;
        self.member.leave();
        if let Ok(pid) = libc::pid_t::try_from(self.child.id()) {
            // SAFETY: signals a process group by number. The child isn't reaped yet, so that its number can't
            // have been given to another; where it leads no group the call fails without effect.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Asks the runner to end, and kills it where it doesn't.
    pub fn close(mut self) {
        let _ = self.ask::<Value>("close", json!({}), &[], Duration::from_secs(2));
        self.kill();
    }

    /// Asks the runner to end and waits until it and what it was started under have; whether they did in time.
    pub fn end(mut self, timeout: Duration) -> bool {
        let _ = self.ask::<Value>("close", json!({}), &[], Duration::from_secs(2));
        let end = Instant::now() + timeout;
        while Instant::now() < end {
            if let Ok(Some(_)) = self.state(libc::WEXITED | libc::WNOWAIT) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        false
    }

    fn signal(&self, signal: i32) -> std::io::Result<()> {
        let pid = libc::pid_t::try_from(self.child.id()).map_err(std::io::Error::other)?;
        // SAFETY: the child isn't reaped before `kill` sets `over`, so the number is still its own.
        if self.over || unsafe { libc::kill(pid, signal) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }

    /// What `waitid` says without blocking: the child's code, or nothing new.
    fn state(&self, options: i32) -> Result<Option<i32>, Error> {
        // SAFETY: an all-zero siginfo is a valid value.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `info` is valid for writes.
        let done = unsafe { libc::waitid(libc::P_PID, self.child.id(), &raw mut info, options | libc::WNOHANG) };
        if done != 0 {
            let error = std::io::Error::last_os_error();
            if error.kind() == std::io::ErrorKind::Interrupted {
                return Ok(None);
            }
            return Err(io("asking for the runner's state", error));
        }
        // SAFETY: waitid filled in the fields of a child's state, or left them zero.
        Ok(if unsafe { info.si_pid() } == 0 { None } else { Some(info.si_code) })
    }

    /// The end of a process whose socket is closed.
    fn crashed(&mut self, op: &str) -> Error {
        let end = Instant::now() + Duration::from_secs(2);
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.over = true;
                    self.member.leave();
                    return Error::Crashed { op: op.into(), signal: status.signal(), code: status.code() };
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Err(_) => break,
            }
        }
        // It closed its socket and lives on: nothing more will come from it.
        Error::Crashed { op: op.into(), signal: None, code: None }
    }

    /// Bytes that nobody asked for?
    fn must_be_silent(&mut self, op: &str) -> Result<(), Error> {
        let mut byte = 0u8;
        // SAFETY: `byte` is valid for one byte; nothing is taken from the socket.
        let got =
            unsafe { libc::recv(self.channel.raw(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
        match got {
            0 => Err(self.crashed(op)),
            n if n > 0 => Err(forged(op, "it answered without having been asked")),
            _ => match std::io::Error::last_os_error() {
                e if e.kind() == std::io::ErrorKind::ConnectionReset => Err(self.crashed(op)),
                _ => Ok(()),
            },
        }
    }

    fn send(&mut self, op: &str, mut body: Value, fds: &[BorrowedFd<'_>]) -> Result<(), Error> {
        if self.over {
            return Err(Error::Crashed { op: op.into(), signal: None, code: None });
        }
        self.must_be_silent(op)?;
        if let Value::Object(map) = &mut body {
            self.id += 1;
            map.insert("op".into(), json!(op));
            map.insert("id".into(), json!(self.id));
        }
        self.channel.send(&body, fds).map_err(|e| self.failed(op, e))
    }

    fn receive(&mut self, op: &str, timeout: Duration) -> Result<Frame, Error> {
        let mut frame = self.channel.receive(Some(timeout)).map_err(|e| self.failed(op, e))?;
        self.must_be_silent(op)?;
        self.note_refused(op, &mut frame);
        if frame.body.get("id").and_then(Value::as_u64) != Some(self.id) {
            return Err(forged(op, "its answer isn't to the last request"));
        }
        let ok = frame.body.get("ok").and_then(Value::as_bool);
        match ok {
            Some(true) => Ok(frame),
            Some(false) => {
                no_descriptors(op, &frame)?;
                let mut fault: Fault = decode(op, frame.body)?;
                truncate(&mut fault.code, 64);
                truncate(&mut fault.message, 4096);
                if !self.refused.is_empty() {
                    fault.message.push_str(&format!("; its filter refused {}", calls(&self.refused)));
                }
                Err(Error::Refused(fault))
            }
            None => Err(forged(op, "its answer has no `ok`")),
        }
    }

    /// A runner on a card, which is our own program, says what its filter refused; a CPU runner is not asked.
    fn note_refused(&mut self, op: &str, frame: &mut Frame) {
        let said = frame.body.as_object_mut().and_then(|body| body.remove(REFUSED_CALLS));
        if let (Device::Cuda, Some(Ok(now))) = (self.device, said.map(serde_json::from_value::<Vec<(u32, u32)>>))
            && now != self.refused
        {
            tracing::warn!(op, calls = calls(&now), "the filter of a card's runner refused system calls");
            self.refused = now;
        }
    }

    fn failed(&mut self, op: &str, error: WireError) -> Error {
        match error {
            WireError::Closed => self.crashed(op),
            WireError::Timeout(seconds) => Error::Timeout { op: op.into(), seconds },
            WireError::Malformed(why) => forged(op, &why),
            WireError::Io(source) => io(&format!("talking to the runner (`{op}`)"), source),
        }
    }

    fn ask_frame(&mut self, op: &str, body: Value, fds: &[BorrowedFd<'_>], timeout: Duration) -> Result<Frame, Error> {
        let start = Instant::now();
        self.send(op, body, fds)?;
        if self.stopped {
            self.cont()?;
        }
        let frame = self.receive(op, timeout);
        tracing::debug!(role = "runner", op, seconds = start.elapsed().as_secs_f64(), "answered");
        frame
    }

    fn ask<T: DeserializeOwned>(
        &mut self,
        op: &str,
        request: Value,
        fds: &[BorrowedFd<'_>],
        timeout: Duration,
    ) -> Result<T, Error> {
        let frame = self.ask_frame(op, request, fds, timeout)?;
        no_descriptors(op, &frame)?;
        decode(op, frame.body)
    }

    fn timed<T: DeserializeOwned>(
        &mut self,
        op: &str,
        request: Value,
        timeout: Duration,
    ) -> Result<(T, Duration), Error> {
        let start = if self.stopped {
            self.send(op, request, &[])?;
            let start = Instant::now();
            self.cont()?;
            start
        } else {
            let start = Instant::now();
            self.send(op, request, &[])?;
            start
        };
        let frame = self.receive(op, timeout)?;
        let wall = start.elapsed();
        tracing::debug!(role = "runner", op, seconds = wall.as_secs_f64(), "answered");
        no_descriptors(op, &frame)?;
        Ok((decode(op, frame.body)?, wall))
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Writes the derived constants of a parameter set into the CPU runner's buffers. The runner must be stopped.
///
/// # Errors
/// `Io` when `constants` lacks one or can't be read.
pub fn write_constants(
    plan: &Plan,
    buffers: &[Exported],
    constants: BorrowedFd<'_>,
    items: &[Item],
) -> Result<(), Error> {
    for exported in buffers {
        if let Some(BufferKind::Constant(n)) = plan.buffers.get(exported.buffer).map(|b| &b.kind) {
            let item = items.get(*n).ok_or_else(|| {
                io("copying derived constants", std::io::Error::other(format!("there is no constant {n}")))
            })?;
            copy_into(constants, *item, exported).map_err(|e| io("copying derived constants", e))?;
        }
    }
    Ok(())
}

fn copy_into(source: BorrowedFd<'_>, item: Item, target: &Exported) -> std::io::Result<()> {
    if item.bytes > target.bytes {
        return Err(std::io::Error::other(format!("{} bytes don't fit into {}", item.bytes, target.bytes)));
    }
    let source = File::from(source.try_clone_to_owned()?);
    let file = File::from(target.fd.try_clone()?);
    let mut block = vec![0u8; 1 << 20];
    let mut done = 0u64;
    while done < item.bytes {
        let size = usize::try_from((item.bytes - done).min(block.len() as u64)).map_err(std::io::Error::other)?;
        let Some(part) = block.get_mut(..size) else { break };
        source.read_exact_at(part, item.offset + done)?;
        file.write_all_at(part, done)?;
        done += size as u64;
    }
    Ok(())
}

/// A memory file of `bytes` rounded up to a page, that nobody can shrink or grow.
///
/// # Errors
/// When memory is short.
pub fn memory_file(name: &std::ffi::CStr, bytes: u64) -> std::io::Result<OwnedFd> {
    // SAFETY: `name` is a valid C string; the call makes a new descriptor.
    let raw = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if raw < 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: `raw` was just made and belongs to nobody else.
    let fd = unsafe { OwnedFd::from_raw_fd(raw) };
    let file = File::from(fd);
    file.set_len(bytes.div_ceil(4096).max(1) * 4096)?;
    // SAFETY: acts on a descriptor that is open.
    let sealed =
        unsafe { libc::fcntl(raw, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) };
    if sealed != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(file.into())
}

/// Such a file that begins with `bytes`.
///
/// # Errors
/// As `memory_file`.
pub fn memory_of(name: &std::ffi::CStr, bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let file = File::from(memory_file(name, bytes.len() as u64)?);
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}

/// Memory files for every workspace and constant of a CPU plan; constants are filled.
fn owned_buffers(request: &LoadRequest<'_>) -> Result<Vec<Exported>, Error> {
    let mut own = Vec::new();
    for (buffer, planned) in request.plan.buffers.iter().enumerate() {
        let name = match planned.kind {
            BufferKind::Workspace => c"workspace",
            BufferKind::Constant(_) => c"constant",
            _ => continue,
        };
        let fd = memory_file(name, planned.bytes).map_err(|e| io("making a workspace", e))?;
        own.push(Exported { buffer, fd, bytes: planned.bytes });
    }
    match &request.constants {
        Some((fd, items)) => write_constants(request.plan, &own, *fd, items)?,
        None if request.plan.buffers.iter().any(|b| matches!(b.kind, BufferKind::Constant(_))) => {
            return Err(io(
                "making a runner's buffers",
                std::io::Error::other("the plan has constants, none were given"),
            ));
        }
        None => {}
    }
    Ok(own)
}

fn sort_owned(plan: &Plan, own: Vec<Exported>) -> Loaded {
    let outputs = output_buffers(plan);
    let mut loaded = Loaded::default();
    for exported in own {
        if outputs.contains(&exported.buffer) {
            loaded.outputs.push(exported);
        } else if matches!(plan.buffers.get(exported.buffer).map(|b| &b.kind), Some(BufferKind::Constant(_))) {
            loaded.constants.push(exported);
        } else {
            loaded.workspaces.push(exported);
        }
    }
    loaded
}

#[derive(Default)]
struct Frames<'a>(Vec<BorrowedFd<'a>>);

impl<'a> Frames<'a> {
    fn add(&mut self, fd: BorrowedFd<'a>) -> usize {
        self.0.push(fd);
        self.0.len() - 1
    }
}

fn exported(op: &str, list: Vec<super::SharedBuffer>, fds: Vec<OwnedFd>) -> Result<Vec<Exported>, Error> {
    if list.len() != fds.len() {
        return Err(forged(op, "buffers and descriptors differ in number"));
    }
    let mut fds = super::Fds::new(fds);
    list.into_iter()
        .map(|shared| {
            let fd = fds.take(shared.fd).map_err(|_| forged(op, "a descriptor is named twice"))?;
            Ok(Exported { buffer: shared.buffer, fd, bytes: shared.bytes })
        })
        .collect()
}

fn no_descriptors(op: &str, frame: &Frame) -> Result<(), Error> {
    if frame.fds.is_empty() { Ok(()) } else { Err(forged(op, "it sent descriptors that nobody asked for")) }
}

fn decode<T: DeserializeOwned>(op: &str, body: Value) -> Result<T, Error> {
    serde_json::from_value(body).map_err(|e| forged(op, &format!("its answer can't be read: {e}")))
}

fn forged(op: &str, why: &str) -> Error {
    let mut why = why.to_owned();
    truncate(&mut why, 512);
    Error::Forged { op: op.into(), why }
}

fn truncate(text: &mut String, limit: usize) {
    if text.len() > limit {
        let mut end = limit;
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
}
