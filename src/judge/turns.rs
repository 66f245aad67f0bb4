//! Turns: judges of several processes work on one device one after another, as slices order those of one process.
//!
//! Knows lock files, one pair a device of the machine, and how long anybody waits. Must not know what is measured. A
//! lock is the kernel's (`flock`): it ends with its process, however that ends. Nobody waits without an end; who gives
//! up goes on beside the other, and is told so.

use std::fs::{File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Folder of the lock files, instead of `/tmp`.
pub const FOLDER: &str = "KERNELFLEET_LOCKS";

/// Longer than any measurement: who waits so long has met a process that hangs.
const LONGEST: Duration = Duration::from_secs(900);
/// After so long a person wants to know what is waited for.
const MOMENT: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);

/// Told, once a wait, what is waited for.
pub type Told = Box<dyn Fn(&str) + Send + Sync>;

/// A device's turns among the processes of a machine. Several may work at once, one measures alone.
pub(super) struct Turns {
    device: File,
    /// Held by who waits to measure, so that no new work begins before it. Opened once for those that pass and once
    /// for the one that waits: locks of one opening replace each other.
    gate: File,
    waiting: File,
    /// What the device is called in messages.
    name: String,
    state: Mutex<State>,
    longest: Duration,
    told: Told,
}

#[derive(Debug, Default)]
struct State {
    sharing: usize,
    /// This process measures, or waits to: its shares rest.
    measuring: bool,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Where the lock files lie: one place for all users of a machine.
pub(super) fn folder() -> PathBuf {
    std::env::var_os(FOLDER).map_or_else(|| PathBuf::from("/tmp"), PathBuf::from)
}

/// Opens a lock file that anybody may lock and nobody but its maker may write; a link is never followed.
fn open(path: &Path) -> io::Result<File> {
    let existing = || OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    match existing() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        other => return other,
    }
    match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
        Ok(file) => {
            file.set_permissions(Permissions::from_mode(0o644))?;
            Ok(file)
        }
        // Another process was faster.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => existing(),
        Err(error) => Err(error),
    }
}

/// Whether the lock was to be had at once.
fn lock(file: &File, how: libc::c_int) -> bool {
    // SAFETY: `flock` on an open descriptor touches no memory.
    unsafe { libc::flock(file.as_raw_fd(), how | libc::LOCK_NB) == 0 }
}

fn unlock(file: &File) {
    // SAFETY: as above.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_UN) };
}

/// The process that holds a lock on `file`, where the kernel tells.
fn holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let text = std::fs::read_to_string("/proc/locks").ok()?;
    text.lines().find_map(|line| {
        // 1: FLOCK  ADVISORY  WRITE 1234 08:01:393 0 EOF
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, _, pid, place, ..] = words.as_slice() else { return None };
        let same = place.rsplit(':').next()?.parse::<u64>().ok()? == inode;
        pid.parse().ok().filter(|pid| same && *pid != std::process::id())
    })
}

impl Turns {
    /// Turns on the device that `id` names among all of this machine, `name` to people.
    ///
    /// # Errors
    /// When the lock files can't be made or opened.
    pub(super) fn new(folder: &Path, id: &str, name: &str, told: Told) -> io::Result<Self> {
        let safe: String = id.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        let gate = folder.join(format!("kernelfleet-{safe}-next.lock"));
        Ok(Self {
            device: open(&folder.join(format!("kernelfleet-{safe}.lock")))?,
            gate: open(&gate)?,
            waiting: open(&gate)?,
            name: name.to_owned(),
            state: Mutex::default(),
            longest: LONGEST,
            told,
        })
    }

    /// Waits for a lock; `false` when that took too long.
    fn wait(&self, file: &File, how: libc::c_int, since: Instant, said: &mut bool) -> bool {
        while !lock(file, how) {
            let waited = since.elapsed();
            if waited > self.longest {
                return false;
            }
            if waited > MOMENT.min(self.longest / 2) && !*said {
                *said = true;
                let who = holder(&self.device).map(|pid| format!(" (process {pid})")).unwrap_or_default();
                (self.told)(&format!(
                    "another kernelfleet{who} is at work on {}; waiting for its turn to end",
                    self.name
                ));
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes part in the device with all who work on it and none who measures.
    pub(super) fn share(&self) {
        let (since, mut said) = (Instant::now(), false);
        if self.wait(&self.gate, libc::LOCK_SH, since, &mut said) {
            unlock(&self.gate);
        }
        let mut state = self.state();
        if state.sharing == 0 && !state.measuring {
            self.wait(&self.device, libc::LOCK_SH, since, &mut said);
        }
        state.sharing += 1;
    }

    /// Whether somebody of another process waits to measure.
    pub(super) fn wanted(&self) -> bool {
        let free = lock(&self.gate, libc::LOCK_SH);
        if free {
            unlock(&self.gate);
        }
        !free
    }

    /// Ends one `share`.
    pub(super) fn leave(&self) {
        let mut state = self.state();
        state.sharing = state.sharing.saturating_sub(1);
        if state.sharing == 0 && !state.measuring {
            unlock(&self.device);
        }
    }

    /// Waits until no other process works on the device. Shares of this process must rest meanwhile. `false` when the
    /// other did not end: then the device isn't this process's alone.
    pub(super) fn hold(&self) -> bool {
        self.state().measuring = true;
        // Two that share and wait for each other would wait for ever.
        unlock(&self.device);
        let (since, mut said) = (Instant::now(), false);
        let alone = self.wait(&self.waiting, libc::LOCK_EX, since, &mut said)
            && self.wait(&self.device, libc::LOCK_EX, since, &mut said);
        unlock(&self.waiting);
        alone
    }

    /// Ends `hold`.
    pub(super) fn release(&self) {
        let mut state = self.state();
        state.measuring = false;
        // Nobody sleeps in the kernel for this lock, so that sharing it again takes no time.
        if state.sharing == 0 || !lock(&self.device, libc::LOCK_SH) {
            unlock(&self.device);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    fn turns(folder: &Path, told: &Arc<Mutex<Vec<String>>>) -> Turns {
        let told = Arc::clone(told);
        Turns::new(folder, "cpu", "the CPU", Box::new(move |text| told.lock().unwrap().push(text.to_owned()))).unwrap()
    }

    #[test]
    fn who_measures_is_alone_and_who_works_shares() {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::default();
        let (a, b) = (turns(folder.path(), &told), turns(folder.path(), &told));
        a.share();
        b.share();
        let measured = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let c = turns(folder.path(), &told);
                assert!(c.hold());
                measured.store(true, Ordering::SeqCst);
                c.release();
            });
            // It waits for both, and its wait lets no new work begin.
            while lock(&a.gate, libc::LOCK_SH) {
                unlock(&a.gate);
                std::thread::yield_now();
            }
            a.leave();
            assert!(!measured.load(Ordering::SeqCst));
            b.leave();
        });
        assert!(measured.load(Ordering::SeqCst));
    }

    #[test]
    fn shares_that_want_to_measure_do_not_wait_for_each_other_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::default();
        let (at_once, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let own = turns(folder.path(), &told);
                    own.share();
                    for _ in 0..5 {
                        assert!(own.hold());
                        most.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::yield_now();
                        at_once.fetch_sub(1, Ordering::SeqCst);
                        own.release();
                    }
                    own.leave();
                });
            }
        });
        assert_eq!(most.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn who_waits_too_long_is_told_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let told = Arc::default();
        let (first, mut second) = (turns(folder.path(), &told), turns(folder.path(), &told));
        second.longest = Duration::from_millis(100);
        assert!(first.hold());
        assert!(!second.hold());
        let said = told.lock().unwrap().clone();
        assert_eq!(said.len(), 1);
        assert!(said[0].contains("at work on the CPU; waiting for its turn to end"), "{said:?}");
        first.release();
        assert!(second.hold());
    }

    #[test]
    fn a_link_in_the_place_of_a_lock_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/hostname", folder.path().join("kernelfleet-cpu.lock")).unwrap();
        assert!(Turns::new(folder.path(), "cpu", "the CPU", Box::new(|_| ())).is_err());
    }
}
