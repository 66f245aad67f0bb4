//! Hardware counters of kernels, as NVIDIA's `ncu` counts them: for who optimises, never part of a verdict.
//!
//! Knows the program's arguments and what it writes. Must not know what runs under it. Counted kernels are run several times
//! each with caches emptied in between and at whatever clocks the card has: their times say less than a verdict's.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;

use serde::{Deserialize, Serialize};

/// Most kernels of one call that are counted.
const MOST: usize = 64;

/// Most of its own words that are told, characters.
const SAID: usize = 1000;

/// What is counted: the name under which it is told, and the counter.
const METRICS: [(&str, &str); 15] = [
    ("time_ns", "gpu__time_duration.sum"),
    ("compute_percent", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    ("memory_percent", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
    ("dram_percent", "dram__throughput.avg.pct_of_peak_sustained_elapsed"),
    ("dram_read_bytes", "dram__bytes_read.sum"),
    ("dram_write_bytes", "dram__bytes_write.sum"),
    ("l2_hit_percent", "lts__t_sector_hit_rate.pct"),
    ("l1_hit_percent", "l1tex__t_sector_hit_rate.pct"),
    ("occupancy_percent", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    ("issue_percent", "smsp__issue_active.avg.pct_of_peak_sustained_active"),
    ("load_efficiency_percent", "smsp__sass_average_data_bytes_per_sector_mem_global_op_ld.pct"),
    ("store_efficiency_percent", "smsp__sass_average_data_bytes_per_sector_mem_global_op_st.pct"),
    ("shared_conflicts", "l1tex__data_bank_conflicts_pipe_lsu.sum"),
    ("tensor_percent", "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active"),
    ("instructions", "smsp__inst_executed.sum"),
];

/// What a warp waits for, as the counters' names have it: cycles for each instruction that is issued.
const STALLS: [&str; 16] = [
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "no_instruction",
    "not_selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
];

fn stall(what: &str) -> String {
    format!("smsp__average_warps_issue_stalled_{what}_per_issue_active.ratio")
}

/// One kernel of a call, in the order in which they ran.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    pub name: String,
    /// `(x, y, z)` as `ncu` writes it.
    pub grid: String,
    pub block: String,
    /// By the names of `METRICS`; what this card doesn't count is left out.
    pub counters: BTreeMap<String, f64>,
    /// Cycles that a warp waits for each instruction it issues, by what it waits for; those that are 0 are left out.
    pub stalls: BTreeMap<String, f64>,
}

/// Arguments that stand before the program's own: kernels between the start and the stop of its profiler are counted, the
/// card's clocks stay as they are.
#[must_use]
pub(super) fn arguments(log: &Path) -> Vec<OsString> {
    let stalls: Vec<String> = STALLS.iter().map(|what| stall(what)).collect();
    let metrics: Vec<&str> =
        METRICS.iter().map(|(_, metric)| *metric).chain(stalls.iter().map(String::as_str)).collect();
    let count = MOST.to_string();
    let metrics = metrics.join(",");
    let given = [
        "--target-processes",
        "application-only",
        "--profile-from-start",
        "off",
        "--clock-control",
        "none",
        "--launch-count",
        count.as_str(),
        "--metrics",
        metrics.as_str(),
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--log-file",
    ];
    given.into_iter().map(OsString::from).chain([log.as_os_str().to_owned()]).collect()
}

/// Kernels of what `ncu` has written.
///
/// # Errors
/// Its own words, where it counted nothing.
pub(super) fn parse(log: &str) -> Result<Vec<Kernel>, String> {
    let Some(start) = log.find("\"ID\",") else { return Err(complaint(log)) };
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(log.get(start..).unwrap_or("").as_bytes());
    let bad = |e: &dyn std::fmt::Display| format!("what ncu wrote is not understood: {e}");
    let header = reader.headers().map_err(|e| bad(&e))?.clone();
    let mut kernels = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|e| bad(&e))?;
        let text = |column: &str| {
            let at = header.iter().position(|name| name == column)?;
            record.get(at).filter(|text| !text.is_empty())
        };
        // The second line has the units.
        let Some(name) = text("Kernel Name") else { continue };
        let number = |column: &str| text(column)?.replace(',', "").parse::<f64>().ok().filter(|v| v.is_finite());
        kernels.push(Kernel {
            name: name.chars().take(200).collect(),
            grid: text("Grid Size").unwrap_or_default().to_owned(),
            block: text("Block Size").unwrap_or_default().to_owned(),
            counters: METRICS.iter().filter_map(|(key, m)| Some(((*key).to_owned(), number(m)?))).collect(),
            stalls: STALLS
                .iter()
                .filter_map(|what| Some(((*what).to_owned(), number(&stall(what)).filter(|v| *v > 0.0)?)))
                .collect(),
        });
    }
    if kernels.is_empty() { Err(complaint(log)) } else { Ok(kernels) }
}

/// Why `ncu` could not count, where it says so: its errors, on one line.
#[must_use]
pub(super) fn refusal(log: &str) -> Option<String> {
    log.contains("==ERROR== ").then(|| complaint(log))
}

/// What `ncu` says that it lacks, on one line.
fn complaint(log: &str) -> String {
    if log.contains("ERR_NVGPUCTRPERM") {
        return "the driver lets only administrators count: load it with NVreg_RestrictProfilingToAdminUsers=0".into();
    }
    let said: Vec<&str> =
        log.lines().filter_map(|l| l.strip_prefix("==ERROR== ").or(l.strip_prefix("==WARNING== "))).collect();
    let said: String = said.join(" ").chars().take(SAID).collect();
    if said.is_empty() { "ncu counted nothing".into() } else { format!("ncu counted nothing: {said}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_by_the_names_of_their_columns() {
        let metric = |key: &str| METRICS.iter().find(|(k, _)| *k == key).unwrap().1;
        let log = format!(
            "==PROF== Connected to process 7 (/usr/bin/x)\n\"ID\",\"Kernel Name\",\"Block Size\",\"Grid Size\",\"{}\",\"{}\",\"{}\",\"{}\"\n\
             \"\",\"\",\"\",\"\",\"ns\",\"%\",\"\",\"\"\n\
             \"0\",\"void f<4, a::b>(int, T2)\",\"(128, 1, 1)\",\"(32768, 1, 1)\",\"1,980,000\",\"41.5\",\"n/a\",\"2.25\"\n",
            metric("time_ns"),
            metric("dram_percent"),
            metric("tensor_percent"),
            stall("long_scoreboard"),
        );
        let kernels = parse(&log).unwrap();
        assert_eq!(kernels.len(), 1);
        let kernel = &kernels[0];
        assert_eq!((kernel.name.as_str(), kernel.grid.as_str()), ("void f<4, a::b>(int, T2)", "(32768, 1, 1)"));
        assert_eq!(kernel.counters["time_ns"], 1_980_000.0);
        assert_eq!(kernel.counters["dram_percent"], 41.5);
        assert!(!kernel.counters.contains_key("tensor_percent"), "what is no number is left out");
        assert_eq!(kernel.stalls, BTreeMap::from([("long_scoreboard".to_owned(), 2.25)]));
    }

    #[test]
    fn where_nothing_was_counted_it_says_why() {
        let refused = "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n";
        assert!(parse(refused).unwrap_err().contains("NVreg_RestrictProfilingToAdminUsers=0"));
        assert_eq!(
            parse("==WARNING== No kernels were profiled.\n").unwrap_err(),
            "ncu counted nothing: No kernels were profiled."
        );
        assert_eq!(parse("").unwrap_err(), "ncu counted nothing");
        assert!(refusal(refused).unwrap().contains("NVreg_RestrictProfilingToAdminUsers=0"));
        let none = "==PROF== Connected\n==ERROR== No CUDA device found.\n";
        assert_eq!(refusal(none).unwrap(), "ncu counted nothing: No CUDA device found.");
        assert_eq!(refusal("==WARNING== No kernels were profiled.\n"), None, "a failure before any kernel isn't ncu's");
    }
}
