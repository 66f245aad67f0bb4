//! Processes of one session, held together so that another thread can end them all: a slice ends by time.
//!
//! Knows which processes work under which leash: those that are started on a thread that has entered it. Must not know
//! why they are ended, nor what they do.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::sandbox;

/// What ends together.
#[derive(Clone, Debug, Default)]
pub struct Leash(Arc<Mutex<Held>>);

#[derive(Debug, Default)]
struct Held {
    over: bool,
    processes: Vec<(i32, Option<u32>)>,
}

thread_local! {
    static ENTERED: RefCell<Option<Leash>> = const { RefCell::new(None) };
}

/// While it lives, processes that this thread starts are under the leash.
#[derive(Debug)]
pub struct Entered {
    before: Option<Leash>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        ENTERED.with_borrow_mut(|now| *now = self.before.take());
    }
}

/// A process under a leash, or under none.
#[derive(Debug)]
pub(super) struct Member {
    leash: Option<Leash>,
    pid: i32,
}

impl Leash {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// That of this thread, for another one that works for it.
    #[must_use]
    pub fn current() -> Option<Self> {
        ENTERED.with_borrow(Clone::clone)
    }

    /// Puts what this thread starts under the leash.
    #[must_use]
    pub fn enter(&self) -> Entered {
        Entered { before: ENTERED.with_borrow_mut(|now| now.replace(self.clone())) }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Kills all processes under it with their process groups and users, and whatever is put under it from now on.
    pub fn end(&self) {
        let mut held = self.held();
        held.over = true;
        for &(pid, uid) in &held.processes {
            sandbox::kill_all(pid, uid);
        }
    }

    /// Whether it was ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.held().over
    }

    /// Puts a process under the leash of this thread.
    pub(super) fn join(pid: i32, uid: Option<u32>) -> Member {
        let leash = Self::current();
        if let Some(leash) = &leash {
            let mut held = leash.held();
            held.processes.push((pid, uid));
            if held.over {
                sandbox::kill_all(pid, uid);
            }
        }
        Member { leash, pid }
    }
}

impl Member {
    /// To be said before the process is waited for: its number may be another's after that.
    pub(super) fn leave(&mut self) {
        if let Some(leash) = self.leash.take() {
            leash.held().processes.retain(|(pid, _)| *pid != self.pid);
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> (Child, i32) {
        let child = Command::new("sleep").arg("60").process_group(0).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        (child, pid)
    }

    #[test]
    fn what_was_started_under_a_leash_ends_with_it_and_nothing_else_does() {
        let leash = Leash::new();
        let (mut free, free_pid) = sleeper();
        let _none = Leash::join(free_pid, None);
        let entered = leash.enter();
        let (mut held, held_pid) = sleeper();
        let _member = Leash::join(held_pid, None);
        let other = Leash::current().unwrap();
        drop(entered);
        assert!(Leash::current().is_none());
        std::thread::spawn(move || other.end()).join().unwrap();
        assert!(!held.wait().unwrap().success());
        assert!(free.try_wait().unwrap().is_none());
        assert!(leash.is_over());
        // What comes late is ended at once.
        let _entered = leash.enter();
        let (mut late, late_pid) = sleeper();
        let _member = Leash::join(late_pid, None);
        assert!(!late.wait().unwrap().success());
        free.kill().unwrap();
        free.wait().unwrap();
    }
}
