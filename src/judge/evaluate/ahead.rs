//! The next runner, made ahead: a process and its context on a card take longer than most evaluations' other steps.
//!
//! Knows when one may be started and that it must not disturb a measurement. Must not know what will run in it. It is
//! confined before its program starts, as any other, and serves one candidate; in a batch, where all are one caller's,
//! a card's serves the next one too, unless the last one was refused (`docs/measuring.md`, "Run").

use std::sync::Arc;

use super::Stop;
use super::run::RUNNER;
use crate::judge::runner::client::Runner;
use crate::judge::session::{Error, Judge, Session, Slice};
use crate::judge::{Device, confinement, process};

/// A runner that waits for its candidate. While somebody measures it is stopped, whatever it is at.
#[derive(Debug)]
pub(in crate::judge) struct Spare {
    /// First, so that nobody signals a process that is gone.
    waiting: Waiting,
    runner: Runner,
    isolation: Vec<String>,
}

/// Its entry among those that are stopped for measurements.
#[derive(Debug)]
struct Waiting {
    slice: Arc<Slice>,
    pid: i32,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.slice.leave(self.pid);
    }
}

impl Spare {
    /// Keeps it from working beside a measurement that doesn't hold the device for itself.
    pub(super) fn freeze(&self) {
        process::signal(self.waiting.pid, libc::SIGSTOP);
    }

    pub(super) fn thaw(&self) {
        process::signal(self.waiting.pid, libc::SIGCONT);
    }
}

/// A card's runner whose plan was judged and is gone: the next candidate of its batch may follow.
#[derive(Debug)]
pub(in crate::judge) struct Worn {
    runner: Runner,
    isolation: Vec<String>,
}

/// A runner for a candidate.
pub(super) struct Taken {
    pub(super) runner: Runner,
    pub(super) isolation: Vec<String>,
    /// Another candidate was there before.
    pub(super) worn: bool,
}

/// Candidates that one runner serves at most: its limits, of processor time among them, are for a few.
const SERVED: usize = 16;

/// Keeps a card's runner, whose candidate was accepted, for the next one of the batch.
pub(super) fn keep(session: &mut Session, mut runner: Runner, isolation: Vec<String>) {
    session.served += 1;
    if session.fixed.judge.options.device == Device::Cuda && session.served < SERVED && runner.unload(RUNNER).is_ok() {
        session.worn = Some(Worn { runner, isolation });
    }
}

/// A confined runner, and what confines it.
fn start(judge: &Judge, beside_helper: bool) -> Result<(Runner, Vec<String>), Stop> {
    let fault = |what: &str, e: &dyn std::fmt::Display| Stop::Error(Error::Fault(format!("{what}: {e}")));
    let confinement = confinement::runner(&judge.toolchain, judge.options.device, beside_helper);
    let mut confined = Ok(());
    let runner = Runner::spawn(&judge.toolchain.program, judge.options.device, |command| {
        confined = confinement.apply(command);
    })
    .map_err(|e| fault("the runner can't be started", &e))?;
    confined.map_err(|e| fault("the runner can't be confined", &e))?;
    Ok((runner, confinement.holds()))
}

/// Starts a runner for the next candidate, unless one waits already. A failure shows when the candidate needs
/// its runner.
pub(in crate::judge) fn prepare(session: &mut Session) {
    let judge = Arc::clone(&session.fixed.judge);
    if session.spare.is_some() {
        return;
    }
    if let Ok((runner, isolation)) = start(&judge, false)
        && let Ok(pid) = i32::try_from(runner.pid())
    {
        judge.slice.join(pid);
        session.spare = Some(Spare { waiting: Waiting { slice: Arc::clone(&judge.slice), pid }, runner, isolation });
    }
}

/// The runner for a candidate: the one that the last of its batch has left, the one that waits, if it is well, or a new
/// one. Beside a library helper it is always a new one, since its environment differs.
pub(super) fn take(session: &mut Session, beside_helper: bool) -> Result<Taken, Stop> {
    if let Some(Worn { runner, isolation }) = session.worn.take() {
        return Ok(Taken { runner, isolation, worn: true });
    }
    session.served = 0;
    if let Some(Spare { mut runner, isolation, waiting }) = session.spare.take() {
        drop(waiting);
        if !beside_helper && runner.hello(RUNNER).is_ok() {
            return Ok(Taken { runner, isolation, worn: false });
        }
    }
    let (runner, isolation) = start(&session.fixed.judge, beside_helper)?;
    Ok(Taken { runner, isolation, worn: false })
}
