//! The first process of a container, where that is a judge: passes signals on and reaps what lost its parent.
//!
//! Knows processes alone. A child of a judge starts children of its own; when it is killed, they are process 1's, and a
//! process 1 that doesn't wait for them collects dead ones until the container has no number left for another.

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

/// Where this is process 1, forks: the child returns and does the work, the parent stays and ends as the child does. To be
/// called before a thread is started.
pub fn stand_above() {
    if std::process::id() != 1 {
        return;
    }
    let mut heard = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGCHLD] {
        heard.add(signal);
    }
    // Before the fork, so that none is missed.
    if heard.thread_block().is_err() {
        return;
    }
    // SAFETY: there is one thread, as the caller promises, so that the child may do whatever it could have done before.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { child }) => std::process::exit(watch(&heard, child)),
        // Without a second process the work is done in this one.
        Ok(ForkResult::Child) | Err(_) => {
            let _ = heard.thread_unblock();
        }
    }
}

/// Waits for all until `child` ends; its exit status, as a shell gives it.
fn watch(heard: &SigSet, child: Pid) -> i32 {
    loop {
        match heard.wait() {
            Ok(Signal::SIGCHLD) | Err(_) => {}
            Ok(signal) => {
                let _ = kill(child, signal);
            }
        }
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, status)) if pid == child => return status,
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == child => return 128 + signal as i32,
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => break,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => break,
            }
        }
    }
}
