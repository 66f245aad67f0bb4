//! Whether a CPU measurement had the processors to itself.
//!
//! Knows the kernel's counters. Must not know what is measured. What all processors did, less what our own
//! processes did, is what others took.

use std::fs;

/// Share of all processors that others may use before a measurement counts as shared.
pub(super) const TOLERATED: f64 = 0.05;

/// Counters at the beginning, in clock ticks.
pub(super) struct Load {
    busy: u64,
    whole: u64,
    own: u64,
}

/// Busy and whole ticks of all processors since boot.
fn machine() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    let ticks: Vec<u64> = text.lines().next()?.split_whitespace().skip(1).filter_map(|x| x.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let whole: u64 = ticks.iter().take(8).sum();
    let idle = ticks.get(3)? + ticks.get(4)?;
    Some((whole - idle, whole))
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
