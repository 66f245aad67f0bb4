//! Trees of processes: who descends from whom, what they use, and how all of one ends.
//!
//! Knows `/proc` and signals. Must not know why a tree has to end. A tree is stopped before it is killed, so that
//! what forks without end does not outrun the walk.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// In place of a number: no process has it, and none descends from it.
pub const NOBODY: i32 = -1;

#[derive(Clone, Copy, Debug)]
struct Process {
    parent: i32,
    threads: usize,
    dead: bool,
}

/// All processes that are visible here.
#[derive(Debug)]
pub struct Table(BTreeMap<i32, Process>);

impl Table {
    pub fn now() -> Self {
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        Self(
            entries
                .filter_map(|entry| {
                    let pid: i32 = entry.file_name().to_str()?.parse().ok()?;
                    let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
                    // The name may hold anything, so the fields are those behind its last parenthesis.
                    let mut fields = stat.rsplit_once(") ")?.1.split(' ');
                    let state = fields.next()?;
                    let parent = fields.next()?.parse().ok()?;
                    let threads = fields.nth(15)?.parse().ok()?;
                    // A process whose first thread has ended looks dead while others run.
                    let dead = matches!(state, "Z" | "X") && threads <= 1;
                    Some((pid, Process { parent, threads, dead }))
                })
                .collect(),
        )
    }

    /// All that descends from `root` and still runs; not `root` itself.
    pub fn below(&self, root: i32) -> BTreeSet<i32> {
        let mut found = BTreeSet::from([root]);
        loop {
            let more: Vec<i32> = self
                .0
                .iter()
                .filter(|(p, at)| !found.contains(p) && found.contains(&at.parent))
                .map(|p| *p.0)
                .collect();
            if more.is_empty() {
                break;
            }
            found.extend(more);
        }
        found.retain(|p| *p != root && self.0.get(p).is_some_and(|at| !at.dead));
        found
    }

    pub fn children(&self, of: i32) -> impl Iterator<Item = i32> {
        self.0.iter().filter(move |(_, at)| at.parent == of && !at.dead).map(|p| *p.0)
    }

    /// Tasks of the processes given.
    pub fn threads(&self, of: &BTreeSet<i32>) -> usize {
        of.iter().filter_map(|p| self.0.get(p)).map(|at| at.threads).sum()
    }
}

/// Memory that is no file's: private and shared, kept and swapped; what a fork shares is counted once each.
pub fn memory(processes: &BTreeSet<i32>) -> u64 {
    let sum = |text: String, keys: &[&str]| -> u64 {
        text.lines()
            .filter_map(|l| l.split_once(':'))
            .filter(|(key, _)| keys.contains(key))
            .filter_map(|(_, value)| value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
            .sum::<u64>()
            * 1024
    };
    processes
        .iter()
        .filter_map(|p| std::fs::read_to_string(format!("/proc/{p}/status")).ok())
        .map(|text| sum(text, &["RssAnon", "RssShmem", "VmSwap"]))
        .sum()
}

/// Memory that shared pages divide by their users: exact and slow, for when the quick sum is over a limit.
pub fn shared_memory(processes: &BTreeSet<i32>) -> Option<u64> {
    let mut total = 0;
    for p in processes {
        let Ok(text) = std::fs::read_to_string(format!("/proc/{p}/smaps_rollup")) else {
            // Gone meanwhile, or not ours to look at: then the quick sum counts.
            if std::path::Path::new(&format!("/proc/{p}")).exists() {
                return None;
            }
            continue;
        };
        for line in text.lines() {
            if let Some(value) = line.strip_prefix("Pss:").or_else(|| line.strip_prefix("SwapPss:")) {
                total += value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? * 1024;
            }
        }
    }
    Some(total)
}

/// Whether a process has ended or is about to, for a signal that can't be caught.
pub fn doomed(pid: i32) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let field = |key: &str| text.lines().find_map(|l| l.strip_prefix(key)).map_or("", str::trim);
    let killed = ["SigPnd:", "ShdPnd:"]
        .iter()
        .any(|key| u64::from_str_radix(field(key), 16).is_ok_and(|pending| pending & 1 << (libc::SIGKILL - 1) != 0));
    killed || field("State:").starts_with(['Z', 'X'])
}

pub fn signal(pid: i32, number: i32) {
    if pid > 1 {
        // SAFETY: kill takes plain numbers; a process that is gone gives an error that we want to ignore.
        unsafe { libc::kill(pid, number) };
    }
}

/// Kills all that descends from `root`, which must collect what it inherits; whether nothing was left in time.
pub fn kill_below(root: i32, patience: Duration) -> bool {
    if root == NOBODY {
        return true;
    }
    let end = Instant::now() + patience;
    let mut stopped = BTreeSet::new();
    loop {
        let fresh: Vec<i32> = Table::now().below(root).difference(&stopped).copied().collect();
        if fresh.is_empty() || Instant::now() >= end {
            break;
        }
        for pid in fresh {
            signal(pid, libc::SIGSTOP);
            stopped.insert(pid);
        }
    }
    loop {
        let left = Table::now().below(root);
        if left.is_empty() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        for pid in left {
            signal(pid, libc::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Collects children that have ended, and calls back with each one.
pub fn reap(mut ended: impl FnMut(i32)) {
    loop {
        let mut status = 0;
        // SAFETY: waitpid writes into `status`, which lives.
        let pid = unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) };
        if pid <= 0 {
            return;
        }
        ended(pid);
    }
}

/// Exit status, or 128 + signal.
pub fn exit_status(status: i32) -> i32 {
    if libc::WIFSIGNALED(status) { 128 + libc::WTERMSIG(status) } else { libc::WEXITSTATUS(status) }
}
