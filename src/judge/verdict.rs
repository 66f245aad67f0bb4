//! The verdict: what a judge says of a candidate, with its evidence.
//!
//! Knows the words of the measurement contract. Must not know how any figure was obtained.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Version of the rules in `docs/measuring.md`; every verdict names it.
pub const PROCEDURE: &str = "kernelfleet/4";

/// 1 / 0.95: the lower bound of a speedup must lie above it to count as faster.
pub const FASTER: f64 = 1.0 / 0.95;

/// A figure with its 95 % interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

/// How strong the construction is that a verdict rests on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    Enforced,
    Observed,
}

/// Whether the card was ours alone while it was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Measurement {
    Exclusive,
    Shared,
    /// Nothing was timed.
    None,
}

/// Why a candidate is not correct, or what else a reader must know.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    /// One word of a closed set, for machines: `mismatch`, `framework_operator`, ...
    pub code: String,
    /// One sentence for people: what, where, and what to do.
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<u32>,
    /// Name of the kernel or library call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub launch: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// A figure against each baseline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Against<T> {
    pub eager: Option<T>,
    pub compile: Option<T>,
}

impl<T> Default for Against<T> {
    fn default() -> Self {
        Self { eager: None, compile: None }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Times {
    pub candidate: Option<Interval>,
    pub eager: Option<Interval>,
    pub compile: Option<Interval>,
    /// Wall time of eager, where its device time is what counts.
    pub eager_wall: Option<f64>,
}

/// Evidence of one launch or library call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchEvidence {
    pub name: String,
    pub time_us: Option<f64>,
    /// Share of the sum over all launches, 0 to 1.
    pub share: Option<f64>,
    pub registers: Option<u32>,
    pub shared_bytes: Option<u64>,
    pub local_bytes: Option<u64>,
    /// Resident warps over the most that fit, 0 to 1.
    pub occupancy: Option<f64>,
    /// Bytes of the buffers it is given, each counted once.
    pub bytes: u64,
    /// Their rate over what a large copy reaches, 0 to 1, where they are more than the last cache holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub roofline: Option<f64>,
    pub line: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// -1 not correct; 1 correct; 2 also faster than eager; 3 also faster than `torch.compile`.
    pub reward: i32,
    pub correct: bool,
    pub reason: Option<Reason>,
    pub grade: Grade,
    /// What confined the hostile parts: `namespaces`, `users`, `landlock`, `seccomp`, `limits`.
    pub isolation: Vec<String>,
    pub measurement: Measurement,
    /// Why `measurement` is not `exclusive`, an interval is wide, a baseline is missing, ...
    pub notes: Vec<String>,
    pub speedup: Against<Interval>,
    pub time_us: Times,
    /// Counted samples of the candidate.
    pub samples: usize,
    /// Outputs that were compared.
    pub compared: usize,
    pub launches: Vec<LaunchEvidence>,
    pub device: BTreeMap<String, serde_json::Value>,
    pub versions: BTreeMap<String, String>,
    pub precision: String,
    pub tolerance: String,
    pub procedure: String,
    pub phases_seconds: BTreeMap<String, f64>,
    /// Content addresses: `task`, `candidate`, `plan`, `image`.
    pub digests: BTreeMap<String, String>,
    /// Reasons to look at this verdict by hand: very fast, near the floor.
    #[serde(default)]
    pub audit: Vec<String>,
    /// It is an earlier candidate's, which had the same plan and images.
    #[serde(default)]
    pub cached: bool,
}

impl Verdict {
    /// Whether its figures are to be trusted: nobody else is known to have used the device while they were taken.
    #[must_use]
    pub fn trusted(&self) -> bool {
        self.measurement != Measurement::Shared
    }

    /// Whether it says something of the candidate that holds another time: not when others had the device while it was
    /// measured, and not when it came too late or the clocks told different times, which may be their doing too.
    #[must_use]
    pub fn counts(&self) -> bool {
        self.trusted() && self.reason.as_ref().is_none_or(|r| !matches!(r.code.as_str(), "timeout" | "clocks_disagree"))
    }
}
