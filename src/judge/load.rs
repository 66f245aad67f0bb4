//! Whether a CPU measurement had the processors to itself.
//!
//! Knows the kernel's counters. Must not know what is measured. What the processors did that we may use, less what our
//! own processes did, is what others took.

use std::fs;

/// Share of the processors that others may use before a measurement counts as shared.
pub(super) const TOLERATED: f64 = 0.05;

/// Counters at the beginning, in clock ticks.
pub(super) struct Load {
    busy: u64,
    whole: u64,
    own: u64,
}

/// Busy and whole ticks of a line of `/proc/stat`.
fn ticks(line: &str) -> Option<(u64, u64)> {
    let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|x| x.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let whole: u64 = ticks.iter().take(8).sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((whole - idle, whole))
}

/// Busy and whole ticks since boot of the processors that are `usable`; of all where none of them is named.
fn sum(text: &str, usable: impl Fn(usize) -> bool) -> Option<(u64, u64)> {
    let named = text.lines().filter(|line| {
        let number = line.strip_prefix("cpu").and_then(|rest| rest.split(' ').next()?.parse().ok());
        number.is_some_and(&usable)
    });
    let several: Vec<(u64, u64)> = named.filter_map(ticks).collect();
    if several.is_empty() {
        return ticks(text.lines().next()?);
    }
    Some(several.iter().fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1)))
}

fn machine() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    // SAFETY: an all-zero `cpu_set_t` is a valid empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for writes of its size.
    let known = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) } == 0;
    // SAFETY: the index is below the size of the set.
    sum(&text, |cpu| known && cpu < libc::CPU_SETSIZE as usize && unsafe { libc::CPU_ISSET(cpu, &set) })
}

/// User and system ticks of a process, its threads included.
fn process(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after = text.rsplit_once(')').map_or("", |x| x.1);
    after.split_whitespace().skip(11).take(2).filter_map(|x| x.parse::<u64>().ok()).sum()
}

impl Load {
    pub(super) fn begin(pids: &[u32]) -> Self {
        let (busy, whole) = machine().unwrap_or((0, 0));
        Self { busy, whole, own: pids.iter().map(|p| process(*p)).sum() }
    }

    /// Share of the processors' time that went to others since `begin`; `None` where the kernel doesn't tell, or
    /// within a tenth of a second, which its clock is too coarse for.
    pub(super) fn foreign(&self, pids: &[u32]) -> Option<f64> {
        let (busy, whole) = machine()?;
        let own: u64 = pids.iter().map(|p| process(*p)).sum();
        let (busy, whole) = (busy.saturating_sub(self.busy), whole.saturating_sub(self.whole));
        if whole < 20 {
            return None;
        }
        Some(busy.saturating_sub(own.saturating_sub(self.own)) as f64 / whole as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str =
        "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 90 0 10 0 0 0 0 0 0 0\ncpu1 10 0 40 800 50 0 0 100 0 0\nintr 5\n";

    #[test]
    fn only_the_processors_that_may_be_used_are_counted_and_stolen_time_is_somebody_elses() {
        assert_eq!(sum(STAT, |cpu| cpu == 0), Some((100, 100)));
        assert_eq!(sum(STAT, |cpu| cpu == 1), Some((150, 1000)));
        assert_eq!(sum(STAT, |_| true), Some((250, 1100)));
        assert_eq!(sum(STAT, |_| false), Some((150, 1000)), "the machine's own line");
    }

    #[test]
    fn a_busy_neighbour_is_seen_and_our_own_work_is_not() {
        let spin = || std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let mut child = spin();
        let pids = [child.id(), std::process::id()];
        let (ours, theirs) = (Load::begin(&pids), Load::begin(&pids[1..]));
        // However busy the machine is, after a fifth of a second of its own the neighbour must show.
        while process(child.id()) < 20 || ours.foreign(&pids).is_none() {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let (ours, theirs) = (ours.foreign(&pids).unwrap(), theirs.foreign(&pids[1..]).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(theirs > ours, "{ours} without it, {theirs} with it");
    }
}
