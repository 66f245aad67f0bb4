//! Counters of what a candidate's kernels do, or the reference's: once more, under a program that counts.
//!
//! Knows how to start both under it. Must not know what a counter means; nothing here is part of a verdict.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::correct::{PLAIN, draw};
use super::run::{RUNNER, load_into};
use super::{Made, Stop, ready, reason};
use crate::judge::counters::{self, Kernel};
use crate::judge::leash::{Leash, Member};
use crate::judge::process::{self, descriptor_three, python_command};
use crate::judge::runner::client::Runner;
use crate::judge::session::{Error, Judge, MINUTES, Session, secret_seed, task_error};
use crate::judge::verdict::Reason;
use crate::judge::wire::Channel;
use crate::judge::{Candidate, Device, confinement};
use crate::sandbox::{self, Confinement};

/// Longest that counting may take once all is loaded: each kernel runs dozens of times, with caches emptied.
const COUNT: Duration = Duration::from_secs(180);
/// Longest that the program may take to write down what it counted.
const WRITE: Duration = Duration::from_secs(60);

/// Most that is read of what it wrote, bytes.
const MOST_LOG: u64 = 16 << 20;

type Counted = Result<Result<Vec<Kernel>, Reason>, Error>;

/// The program that counts, or why there is none.
fn counter(judge: &Judge) -> Result<PathBuf, Box<Reason>> {
    if judge.options.device == Device::Cpu {
        return Err(Box::new(reason("no_counters", "counters are a card's; on the CPU there are none")));
    }
    judge.toolchain.ncu.clone().ok_or_else(|| {
        let hint = "install Nsight Compute, or name its program with KERNELFLEET_NCU".to_owned();
        Box::new(Reason { hint: Some(hint), ..reason("no_counters", "there is no ncu on this judge") })
    })
}

/// A folder for what the program writes, the file in it, and what confines it there; `inner`: what would confine in that folder
/// what is counted.
fn laid_out(
    ncu: &Path,
    inner: impl FnOnce(&Path) -> Confinement,
) -> Result<(tempfile::TempDir, PathBuf, Confinement), Error> {
    let fault = |e: std::io::Error| Error::Fault(format!("no folder for counters: {e}"));
    let folder = tempfile::Builder::new().prefix("kernelfleet-counters-").tempdir().map_err(fault)?;
    let confined = confinement::counted(inner(folder.path()), ncu, folder.path());
    confined.own(folder.path()).map_err(fault)?;
    let log = folder.path().join("counters.csv");
    Ok((folder, log, confined))
}

/// What was counted, from the program's own file.
fn read(log: &Path) -> Result<Vec<Kernel>, Box<Reason>> {
    // Hostile code may write in that folder too: a link, a pipe or a file without end is no log.
    let mut text = Vec::new();
    let _ = sandbox::plain_file(log).and_then(|file| file.take(MOST_LOG).read_to_end(&mut text));
    counters::parse(&String::from_utf8_lossy(&text)).map_err(|why| Box::new(reason("no_counters", why)))
}

/// Counters of a candidate's launches and library calls, in their order.
pub(in crate::judge) fn candidate(session: &mut Session, candidate: &Candidate) -> Counted {
    let judge = Arc::clone(&session.fixed.judge);
    let ncu = match counter(&judge) {
        Ok(ncu) => ncu,
        Err(reason) => return Ok(Err(*reason)),
    };
    session.prepare()?;
    let fixed = Arc::clone(&session.fixed);
    let (recording, images) = match ready(&fixed, candidate).outcome {
        Ok(Made::Plan(recording, images)) => (recording, images),
        Ok(Made::Process(_)) => {
            let why = "only plans are counted: a candidate that runs in its own process has none";
            return Ok(Err(reason("no_counters", why)));
        }
        Err(Stop::Candidate(reason)) => return Ok(Err(*reason)),
        Err(Stop::Error(error)) => return Err(error),
    };
    let mut held = judge.slice.hold();
    held.alone();
    let counted = (|| {
        draw(session, 0, PLAIN)?;
        let runner = |_: &Path| confinement::runner(&judge.toolchain, Device::Cuda, false);
        let (_folder, log, confined) = laid_out(&ncu, runner)?;
        let mut command = Command::new(&ncu);
        command.args(counters::arguments(&log));
        let mut applied = Ok(());
        let runner = Runner::spawn_under(command, &judge.toolchain.program, |c| applied = confined.apply(c))
            .map_err(|e| Error::Fault(format!("ncu can't be started: {e}")))?;
        applied.map_err(|e| Error::Fault(format!("ncu can't be confined: {e}")))?;
        let mut run = load_into(session, runner, &recording, &images)?;
        let seed = secret_seed()?;
        run.runner.observe(0, seed, COUNT).map_err(|e| run.failure(e))?;
        if !run.runner.end(WRITE) {
            return Ok(Err(Box::new(reason("no_counters", "ncu did not end in time"))));
        }
        Ok(read(&log))
    })();
    drop(held);
    match counted {
        Ok(counted) => Ok(counted.map_err(|reason| *reason)),
        Err(Stop::Candidate(reason)) => Ok(Err(*reason)),
        Err(Stop::Error(error)) => Err(error),
    }
}

/// A reference host that is started for this alone, under the program that counts.
struct Host {
    channel: Channel,
    child: std::process::Child,
    member: Member,
    user: Option<u32>,
}

impl Host {
    fn ask(&mut self, body: &Value, timeout: Duration) -> Result<(), process::Error> {
        process::ask("counted reference host", &mut self.channel, body, &[], timeout).map(|_| ())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.member.leave();
        sandbox::kill_all(i32::try_from(self.child.id()).unwrap_or(0), self.user);
        let _ = self.child.wait();
    }
}

/// Counters of the kernels that one call of the reference runs.
pub(in crate::judge) fn reference(session: &mut Session) -> Counted {
    let judge = Arc::clone(&session.fixed.judge);
    let ncu = match counter(&judge) {
        Ok(ncu) => ncu,
        Err(reason) => return Ok(Err(*reason)),
    };
    let task = session.fixed.task.clone();
    let fault = |what: &str, e: &dyn std::fmt::Display| Error::Fault(format!("{what}: {e}"));
    let (folder, log, confined) = laid_out(&ncu, |at| confinement::host(&judge.toolchain, Device::Cuda, at))?;
    if confined.user.is_none() {
        // What its task's Python could reach there as this judge's user is this judge.
        let why = "a reference is counted under a user of its own alone: the judge must be root, and the driver must let \
                   everybody count (NVreg_RestrictProfilingToAdminUsers=0)";
        return Ok(Err(reason("no_counters", why)));
    }
    let mut given = task.clone();
    given.path = folder.path().join(task.path.file_name().unwrap_or_else(|| std::ffi::OsStr::new("task.py")));
    std::fs::write(&given.path, &task.source).map_err(|e| fault("the task can't be laid out", &e))?;
    let path = judge.toolchain.agent_image.join("python");
    let python = python_command(&judge.toolchain.python, "kernelfleet_host.observe", &path, &confined.env);
    let mut command = Command::new(&ncu);
    command.args(counters::arguments(&log)).arg(python.get_program()).args(python.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (channel, theirs) = Channel::pair().map_err(|e| fault("no socket for a counted reference host", &e))?;
    descriptor_three(&mut command, theirs.into());
    confined.apply(&mut command).map_err(|e| fault("ncu can't be confined", &e))?;
    for (name, value) in python.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    let mut held = judge.slice.hold();
    held.alone();
    let child = command.spawn().map_err(|e| fault("ncu can't be started", &e))?;
    drop(command);
    let user = confined.user.map(|u| u.0);
    let member = Leash::join(i32::try_from(child.id()).unwrap_or(0), user);
    let mut host = Host { channel, child, member, user };
    let fail = |e| task_error(&task, e);
    host.ask(&judge.open_request(&given, 1), MINUTES).map_err(fail)?;
    let seed = secret_seed()?;
    host.ask(&json!({"op": "draw", "slot": 0, "seed": seed, "transform": {"kind": "none"}}), RUNNER).map_err(fail)?;
    host.ask(&json!({"op": "observe", "slot": 0, "seed": seed}), COUNT).map_err(fail)?;
    let _ = host.ask(&json!({"op": "close"}), RUNNER);
    let end = Instant::now() + WRITE;
    while !matches!(host.child.try_wait(), Ok(Some(_)) | Err(_)) && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(host);
    Ok(read(&log).map_err(|reason| *reason))
}
