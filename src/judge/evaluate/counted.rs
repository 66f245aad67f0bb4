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
use super::record::Recording;
use super::run::{RUNNER, load_into};
use super::{Made, Stop, ready, reason};
use crate::judge::build::Built;
use crate::judge::counters::{self, Kernel};
use crate::judge::leash::{Leash, Member};
use crate::judge::process::{self, descriptor_three, python_command};
use crate::judge::runner::client::Runner;
use crate::judge::session::{Error, Held, Judge, MINUTES, Session, secret_seed, task_error};
use crate::judge::verdict::Reason;
use crate::judge::wire::Channel;
use crate::judge::{Candidate, Device, TaskSource, confinement};
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

/// Where the program writes, and what confines it and what it counts. What these leave, processes and files, goes with it; what
/// works in it is to be dropped before.
struct Place {
    folder: tempfile::TempDir,
    confined: Confinement,
}

impl Place {
    /// `inner`: what would confine in that folder what is counted.
    fn new(ncu: &Path, inner: impl FnOnce(&Path) -> Confinement) -> Result<Self, Error> {
        let fault = |e: std::io::Error| Error::Fault(format!("no folder for counters: {e}"));
        let folder = tempfile::Builder::new().prefix("kernelfleet-counters-").tempdir().map_err(fault)?;
        let confined = confinement::counted(inner(folder.path()), ncu, folder.path());
        let place = Self { folder, confined };
        place.confined.own(place.folder.path()).map_err(fault)?;
        Ok(place)
    }

    fn user(&self) -> Option<u32> {
        self.confined.user.map(|user| user.0)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("counters.csv")
    }

    /// What the program wrote. Hostile code may write in that folder too: a link, a pipe or a file without end is no log.
    fn written(&self) -> String {
        let mut text = Vec::new();
        let _ = sandbox::plain_file(&self.log()).and_then(|file| file.take(MOST_LOG).read_to_end(&mut text));
        String::from_utf8_lossy(&text).into_owned()
    }

    /// What was counted, or why nothing was: the program's own words, where it has some.
    fn told(&self, done: Result<(), Stop>) -> Counted {
        let log = self.written();
        let kernels = match done {
            Ok(()) => counters::parse(&log),
            Err(stop) => match (counters::refusal(&log), stop) {
                (Some(why), _) => Err(why),
                (None, Stop::Candidate(reason)) => return Ok(Err(*reason)),
                (None, Stop::Error(error)) => return Err(error),
            },
        };
        Ok(kernels.map_err(|why| reason("no_counters", why)))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        sandbox::kill_of(self.user());
        self.confined.empty(self.folder.path());
    }
}

/// Counters of a candidate's launches and library calls, in their order.
pub(in crate::judge) fn candidate(session: &mut Session, candidate: &Candidate) -> Counted {
    let judge = Arc::clone(&session.fixed.judge);
    let ncu = match counter(&judge) {
        Ok(ncu) => ncu,
        Err(reason) => return Ok(Err(*reason)),
    };
    session.meet(false)?;
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
    let place = Place::new(&ncu, |_| confinement::runner(&judge.toolchain, Device::Cuda, false))?;
    let done = count_candidate(session, &ncu, &place, &recording, &images);
    place.told(done)
}

/// Runs a plan once under the program that counts. The card is held for that run alone: others work on it while the program,
/// the runner and the plan come up.
fn count_candidate(
    session: &mut Session,
    ncu: &Path,
    place: &Place,
    recording: &Recording,
    images: &[Built],
) -> Result<(), Stop> {
    let judge = Arc::clone(&session.fixed.judge);
    let beside = judge.slice.share();
    draw(session, 0, PLAIN)?;
    let mut command = Command::new(ncu);
    command.args(counters::arguments(&place.log()));
    let mut applied = Ok(());
    let runner = Runner::spawn_under(command, &judge.toolchain.program, |c| applied = place.confined.apply(c))
        .map_err(|e| Error::Fault(format!("ncu can't be started: {e}")))?;
    applied.map_err(|e| Error::Fault(format!("ncu can't be confined: {e}")))?;
    let mut run = load_into(session, runner, recording, images)?;
    drop(beside);
    let seed = secret_seed()?;
    {
        let _held = alone(&judge);
        run.runner.observe(0, seed, COUNT).map_err(|e| run.failure(e))?;
    }
    if run.runner.end(WRITE) { Ok(()) } else { Err(late()) }
}

/// The card for what is counted.
fn alone(judge: &Judge) -> Held<'_> {
    let mut held = judge.slice.hold();
    held.alone();
    held
}

fn late() -> Stop {
    Stop::Candidate(Box::new(reason("no_counters", "ncu did not end in time")))
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
    let place = Place::new(&ncu, |at| confinement::host(&judge.toolchain, Device::Cuda, at))?;
    if place.user().is_none() {
        // What its task's Python could reach there as this judge's user is this judge.
        let why = "a reference is counted under a user of its own alone: the judge must be root, and the driver must let \
                   everybody count (NVreg_RestrictProfilingToAdminUsers=0)";
        return Ok(Err(reason("no_counters", why)));
    }
    let done = count_reference(&judge, &session.fixed.task, &ncu, &place);
    place.told(done)
}

/// Runs the reference once under the program that counts; the card is held for that call alone.
fn count_reference(judge: &Judge, task: &TaskSource, ncu: &Path, place: &Place) -> Result<(), Stop> {
    let fault = |what: &str, e: &dyn std::fmt::Display| Error::Fault(format!("{what}: {e}"));
    let mut given = task.clone();
    given.path = place.folder.path().join(task.path.file_name().unwrap_or_else(|| std::ffi::OsStr::new("task.py")));
    std::fs::write(&given.path, &task.source).map_err(|e| fault("the task can't be laid out", &e))?;
    let path = judge.toolchain.agent_image.join("python");
    let python = python_command(&judge.toolchain.python, "kernelfleet_host.observe", &path, &place.confined.env);
    let mut command = Command::new(ncu);
    command.args(counters::arguments(&place.log())).arg(python.get_program()).args(python.get_args());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let (channel, theirs) = Channel::pair().map_err(|e| fault("no socket for a counted reference host", &e))?;
    descriptor_three(&mut command, theirs.into());
    place.confined.apply(&mut command).map_err(|e| fault("ncu can't be confined", &e))?;
    for (name, value) in python.get_envs() {
        if let Some(value) = value {
            command.env(name, value);
        }
    }
    let beside = judge.slice.share();
    let child = command.spawn().map_err(|e| fault("ncu can't be started", &e))?;
    drop(command);
    let user = place.user();
    let member = Leash::join(i32::try_from(child.id()).unwrap_or(0), user);
    let mut host = Host { channel, child, member, user };
    let fail = |e| task_error(task, e);
    host.ask(&judge.open_request(&given, 1), MINUTES).map_err(fail)?;
    let seed = secret_seed()?;
    host.ask(&json!({"op": "draw", "slot": 0, "seed": seed, "transform": {"kind": "none"}}), RUNNER).map_err(fail)?;
    drop(beside);
    {
        let _held = alone(judge);
        host.ask(&json!({"op": "observe", "slot": 0, "seed": seed}), COUNT).map_err(fail)?;
    }
    let _ = host.ask(&json!({"op": "close"}), RUNNER);
    let end = Instant::now() + WRITE;
    while !matches!(host.child.try_wait(), Ok(Some(_)) | Err(_)) {
        if Instant::now() >= end {
            return Err(late());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> Place {
        let folder = tempfile::tempdir().unwrap();
        Place { folder, confined: Confinement::default() }
    }

    fn said(place: &Place, log: &str, done: Result<(), Stop>) -> String {
        std::fs::write(place.log(), log).unwrap();
        match place.told(done) {
            Ok(Ok(kernels)) => format!("{} kernels", kernels.len()),
            Ok(Err(reason)) => format!("{}: {}", reason.code, reason.message),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_failure_under_ncu_is_told_in_its_own_words_where_it_has_some() {
        let place = place();
        let broke = || Err(Stop::Error(Error::Fault("the runner ended during `load`".into())));
        let device = "==PROF== Connected\n==ERROR== No CUDA device found.\n";
        assert_eq!(said(&place, device, broke()), "no_counters: ncu counted nothing: No CUDA device found.");
        assert!(said(&place, "==ERROR== ERR_NVGPUCTRPERM - x\n", broke()).contains("only administrators"));
        assert_eq!(said(&place, "", broke()), "fault of the judge: the runner ended during `load`");
        let wrong = Err(Stop::Candidate(Box::new(reason("crash", "the kernels ended their process"))));
        assert_eq!(said(&place, "==PROF== Connected\n", wrong), "crash: the kernels ended their process");
        assert_eq!(said(&place, "", Ok(())), "no_counters: ncu counted nothing");
    }

    #[test]
    fn a_place_is_gone_with_its_guard_on_every_path() {
        let place = place();
        let folder = place.folder.path().to_owned();
        std::fs::create_dir(folder.join("left")).unwrap();
        drop(place);
        assert!(!folder.exists());
    }
}
