//! The judge: a task and candidates in, verdicts out.
//!
//! This file is the interface that policies and `local` use; the steps are in the submodules.

pub mod admit;
mod batch;
pub mod build;
pub mod cache;
mod confinement;
pub mod counters;
mod device;
mod evaluate;
pub mod leash;
mod load;
pub mod process;
pub mod runner;
mod session;
pub mod timing;
pub mod toolchain;
mod trim;
mod turns;
pub mod verdict;
pub mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use crate::plan::Device;
pub use device::{EXPOSED, Facts};
pub use leash::Leash;
pub use session::{Arbiter, Error, Judge, Session, Slice};
pub use toolchain::Toolchain;
pub use verdict::Verdict;

/// Arithmetic that the baselines use and the comparison expects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// PyTorch's defaults: TF32 in cuDNN convolutions, not in matrix products.
    #[default]
    Reference,
    Tf32,
    Half,
}

/// Rule that outputs are compared by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "kebab-case")]
pub enum Tolerance {
    /// Derived from the reference's own error (`docs/measuring.md`).
    #[default]
    Contract,
    /// 1e-4 for float32, 1e-2 for half: only for tables that are compared with published ones.
    Kernelbench,
    /// 1e-2: likewise.
    CudaAgent,
}

/// A task file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TaskSource {
    /// Short name for tables: the file's stem.
    pub name: String,
    /// Where it came from, for messages.
    pub path: PathBuf,
    pub source: String,
}

/// The files of a candidate: path inside its folder -> text. `model_new.py` is required.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Candidate {
    pub files: BTreeMap<String, String>,
}

impl Candidate {
    /// Whether it is in a form that can't be a plan: an extension against PyTorch's headers, in KernelBench's form or in
    /// CUDA Agent's layout.
    #[must_use]
    pub fn is_extension(&self) -> bool {
        let texts = self.files.iter().filter(|(name, _)| name.ends_with(".py")).map(|(_, text)| text.as_str());
        let (mut extension, mut plan) = (false, false);
        for line in texts.flat_map(str::lines).map(str::trim_start).filter(|line| !line.starts_with('#')) {
            plan |= line.contains("kernelfleet_ext");
            extension |=
                line.contains("load_inline") || line.contains("cpp_extension") || line.contains("cuda_extension");
        }
        extension && !plan
    }
}

/// What a candidate comes to: its plan, an image a module of the plan, and their digests as verdicts name them.
#[derive(Clone, Debug)]
pub struct Artifacts {
    pub plan: crate::plan::Plan,
    pub images: Vec<build::Built>,
    pub digests: BTreeMap<String, String>,
}

/// Which way a candidate is judged (`docs/measuring.md`, "Two paths, two grades").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "lowercase")]
pub enum PathChoice {
    /// As a launch plan; what no plan can say is refused.
    #[default]
    Plan,
    /// In a process of its own, as it is.
    Process,
    /// In a process of its own where it is in a form that can't be a plan.
    Auto,
}

/// How a job wants its candidates judged.
#[derive(Clone, Debug)]
pub struct Options {
    pub device: Device,
    pub path: PathChoice,
    pub precision: Precision,
    pub tolerance: Tolerance,
    /// Library calls that a plan may make: `matmul`, `conv`.
    pub libraries: Vec<String>,
    /// Input sets for each parameter set.
    pub inputs: usize,
    /// Measure `torch.compile` too.
    pub compile: bool,
    /// Longest that measuring one candidate may go on beyond the least number of blocks, seconds.
    pub measure_seconds: Option<f64>,
    /// Longest that one recording of a candidate may take, seconds.
    pub record_seconds: u64,
    /// Verdicts on the same plan and images are remembered, and this share of them, 0 to 1, is judged anew all the
    /// same and compared; `None` judges every candidate.
    pub remembered: Option<f64>,
}

/// The usual share of remembered verdicts that are judged anew.
pub const JUDGED_ANEW: f64 = 0.05;

impl Default for Options {
    fn default() -> Self {
        Self {
            device: Device::Cpu,
            path: PathChoice::Plan,
            precision: Precision::Reference,
            tolerance: Tolerance::Contract,
            libraries: vec!["matmul".into(), "conv".into()],
            inputs: 5,
            compile: true,
            measure_seconds: None,
            record_seconds: 60,
            remembered: None,
        }
    }
}

/// How much is spent on one verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// For sweeps: the usual correctness, few samples, no compile baseline; the reward is provisional.
    Screen,
    /// All that correctness asks for, and nothing is timed; the reward says no more than 1.
    Verify,
    /// The contract in full.
    Final,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Candidate {
        Candidate { files: BTreeMap::from([("model_new.py".to_owned(), text.to_owned())]) }
    }

    #[test]
    fn a_candidate_that_builds_an_extension_cant_be_a_plan_and_one_that_only_talks_of_it_can() {
        for text in [
            "from torch.utils.cpp_extension import load_inline",
            "import torch.utils.cpp_extension",
            "import torch\nimport cuda_extension\n",
            "try:\n    import cuda_extension\nexcept ImportError:\n    pass",
        ] {
            assert!(of(text).is_extension(), "{text}");
        }
        for text in [
            "import kernelfleet_ext as kf",
            "# once with load_inline\nimport torch",
            "import kernelfleet_ext as kf  # no load_inline here",
        ] {
            assert!(!of(text).is_extension(), "{text}");
        }
    }
}
