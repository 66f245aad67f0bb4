//! Verdicts as texts for a model: what is wrong and where, or what the time is spent on. Pure.
//!
//! Knows the words of the measurement contract. Must not know how anything was measured.

use std::fmt::Write;

use crate::judge::Verdict;
use crate::judge::counters::Kernel;
use crate::judge::verdict::{FASTER, Interval, LaunchEvidence, Measurement, Reason};

fn time(us: f64) -> String {
    if us < 1e3 { format!("{us:.1} us") } else { format!("{:.3} ms", us / 1e3) }
}

fn place(file: Option<&str>, line: Option<u32>) -> String {
    match (file, line) {
        (Some(file), Some(line)) => format!("{file}:{line}: "),
        (Some(file), None) => format!("{file}: "),
        _ => String::new(),
    }
}

/// A reason with its place, its code and what to do.
pub fn refused(reason: &Reason) -> String {
    let mut text = format!("FAILED [{}]\n", reason.code);
    let place = place(reason.file.as_deref(), reason.line);
    let place = if reason.message.contains(place.trim_end_matches([' ', ':'])) { String::new() } else { place };
    let _ = writeln!(text, "{place}{}", reason.message.trim_end());
    if let Some(launch) = &reason.launch {
        let _ = writeln!(text, "in the launch of {launch}");
    }
    if let Some(hint) = &reason.hint {
        let _ = writeln!(text, "hint: {}", hint.trim_end());
    }
    text
}

/// A build that went well.
pub fn built(launches: &[LaunchEvidence]) -> String {
    let mut text = format!("OK: recorded and built; the plan has {} launches and library calls\n", launches.len());
    for launch in launches {
        let _ = writeln!(text, "  {}  ({})", launch.name, launch.line.as_deref().unwrap_or("?"));
    }
    text
}

/// A verdict on correctness.
pub fn verified(verdict: &Verdict) -> String {
    match &verdict.reason {
        Some(reason) if !verdict.correct => refused(reason),
        _ => format!("CORRECT on {} input sets (tolerance {})\n", verdict.compared, verdict.tolerance),
    }
}

fn against(name: &str, time_us: Option<Interval>, speedup: Option<Interval>) -> Option<String> {
    let (t, s) = (time_us?, speedup?);
    let faster = if s.low > FASTER {
        "more than 5 % faster"
    } else if s.median > FASTER {
        "faster, but the interval is too wide to be sure of 5 %"
    } else {
        "not 5 % faster"
    };
    Some(format!(
        "{name:<14} {:>12}   speedup {:.3}x (95 %: {:.3} to {:.3}): {faster}",
        time(t.median),
        s.median,
        s.low,
        s.high
    ))
}

/// A verdict in full.
pub fn profiled(verdict: &Verdict) -> String {
    if !verdict.correct {
        return verified(verdict);
    }
    let mut text = format!("CORRECT, reward {}\n", verdict.reward);
    if let Some(t) = verdict.time_us.candidate {
        let _ = writeln!(text, "{:<14} {:>12}", "candidate", time(t.median));
    }
    for line in [
        against("eager", verdict.time_us.eager, verdict.speedup.eager),
        against("torch.compile", verdict.time_us.compile, verdict.speedup.compile),
    ]
    .into_iter()
    .flatten()
    {
        let _ = writeln!(text, "{line}");
    }
    if !verdict.launches.is_empty() {
        let _ = writeln!(text, "\nlaunches (each timed alone):");
        text.push_str(&launches(&verdict.launches));
    }
    if verdict.measurement == Measurement::Shared {
        text.push_str("\nthe machine was shared while this was measured: the figures are rough\n");
    }
    for note in &verdict.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

/// A line a launch: what it takes and what holds it back.
fn launches(launches: &[LaunchEvidence]) -> String {
    let mut text = String::new();
    for launch in launches {
        let _ = write!(text, "  {}", launch.name);
        let mut facts = Vec::new();
        if let Some(us) = launch.time_us {
            facts.push(time(us));
        }
        if let Some(share) = launch.share {
            facts.push(format!("{:.0} % of the time", share * 100.0));
        }
        if launch.bytes > 0 {
            facts.push(format!("{:.2} MB", launch.bytes as f64 / 1e6));
            if let Some(us) = launch.time_us.filter(|t| *t > 0.0) {
                facts.push(format!("{:.1} GB/s", launch.bytes as f64 / us / 1e3));
            }
        }
        if let Some(share) = launch.roofline {
            facts.push(format!("{:.0} % of what memory can do", share * 100.0));
        }
        if let Some(registers) = launch.registers {
            facts.push(format!("{registers} registers"));
        }
        if let Some(shared) = launch.shared_bytes {
            facts.push(format!("{shared} B shared"));
        }
        if let Some(local) = launch.local_bytes.filter(|l| *l > 0) {
            facts.push(format!("{local} B local (spills)"));
        }
        if let Some(occupancy) = launch.occupancy {
            facts.push(format!("occupancy {:.0} %", occupancy * 100.0));
        }
        let line = launch.line.as_ref().map(|l| format!("  ({l})")).unwrap_or_default();
        let _ = writeln!(text, ": {}{line}", facts.join(", "));
    }
    text
}

/// What the reference runs.
pub fn reference(all: &[LaunchEvidence]) -> String {
    if all.is_empty() {
        return "the reference could not be profiled here\n".into();
    }
    format!("the reference (eager PyTorch) runs:\n{}", launches(all))
}

/// Counters of kernels, with what their warps wait for most.
pub fn counted(kernels: &[Kernel], reference: bool) -> String {
    let whose = if reference { "the reference (eager PyTorch) runs" } else { "kernels of one run" };
    let mut text = format!("{whose}, counted by ncu with cold caches (times are a verdict's to say):\n");
    for kernel in kernels {
        let _ = writeln!(text, "  {}  grid {} block {}", kernel.name, kernel.grid, kernel.block);
        let of = |name: &str| kernel.counters.get(name).copied();
        let mut lines = Vec::new();
        let percent = [
            ("compute_percent", "of its arithmetic"),
            ("memory_percent", "of its memory system"),
            ("dram_percent", "of the card's memory"),
            ("occupancy_percent", "of all warps at work"),
            ("issue_percent", "of cycles issue"),
            ("tensor_percent", "of tensor cores"),
            ("l1_hit_percent", "hits in L1"),
            ("l2_hit_percent", "hits in L2"),
            ("load_efficiency_percent", "of loaded sectors used"),
            ("store_efficiency_percent", "of stored sectors used"),
        ];
        let shares = percent.iter().filter_map(|(name, what)| Some(format!("{:.0} % {what}", of(name)?)));
        lines.push(shares.collect::<Vec<_>>().join(", "));
        let mut facts = Vec::new();
        if let Some(ns) = of("time_ns") {
            facts.push(time(ns / 1e3));
        }
        if let (Some(read), Some(written)) = (of("dram_read_bytes"), of("dram_write_bytes")) {
            facts.push(format!("{:.2} MB read, {:.2} MB written", read / 1e6, written / 1e6));
        }
        if let Some(conflicts) = of("shared_conflicts").filter(|c| *c > 0.0) {
            facts.push(format!("{conflicts:.0} bank conflicts"));
        }
        if let Some(instructions) = of("instructions") {
            facts.push(format!("{instructions:.0} instructions"));
        }
        lines.push(facts.join(", "));
        let mut stalls: Vec<(&String, &f64)> = kernel.stalls.iter().collect();
        stalls.sort_by(|a, b| b.1.total_cmp(a.1));
        let worst: Vec<String> = stalls.iter().take(3).map(|(what, cycles)| format!("{what} {cycles:.1}")).collect();
        if !worst.is_empty() {
            lines.push(format!("cycles waited for each instruction: {}", worst.join(", ")));
        }
        for line in lines.iter().filter(|l| !l.is_empty()) {
            let _ = writeln!(text, "    {line}");
        }
    }
    text
}
