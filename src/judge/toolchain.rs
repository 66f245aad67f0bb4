//! What a judge needs of this machine: interpreters, compilers, libraries, folders.
//!
//! Plain data. `local::environment` finds it; the judge must not look for anything itself.

use std::path::PathBuf;
use std::time::Duration;

/// Where nvcc is and what it needs to find its parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nvcc {
    pub path: PathBuf,
    /// Arguments in front of all others, such as `-I` of the runtime's headers.
    pub args: Vec<String>,
    /// Folders that it reads: its own tree.
    pub read: Vec<PathBuf>,
}

/// Shared libraries of the CUDA side, the very files that PyTorch loads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaLibraries {
    pub cublas: Option<PathBuf>,
    pub cublaslt: Option<PathBuf>,
    pub cudnn: Option<PathBuf>,
    /// With these two cuDNN compiles kernels; PyTorch loads them before it, since it doesn't find them itself.
    pub nvrtc: Option<PathBuf>,
    pub nvrtc_builtins: Option<PathBuf>,
}

impl CudaLibraries {
    /// Those that are here, by the names that a runner knows.
    #[must_use]
    pub fn named(&self) -> std::collections::BTreeMap<String, String> {
        [
            ("cublas", &self.cublas),
            ("cublaslt", &self.cublaslt),
            ("cudnn", &self.cudnn),
            ("nvrtc", &self.nvrtc),
            ("nvrtc-builtins", &self.nvrtc_builtins),
        ]
        .into_iter()
        .filter_map(|(name, path)| Some((name.to_owned(), path.as_ref()?.display().to_string())))
        .collect()
    }
}

/// Whether the runner of a card gets a filter of system calls. The drivers of cards differ in what they call, so this can
/// be tried on a new one before it is relied on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunnerFilter {
    #[default]
    Off,
    On,
    /// On, and each call that it refuses is logged as a warning and named in the runner's errors.
    Log,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Toolchain {
    /// Interpreter with PyTorch.
    pub python: PathBuf,
    /// Folders that the interpreter reads: its environment and the installation that it was made from.
    pub python_read: Vec<PathBuf>,
    /// `agent-image/` of this program: `python/`, `include/`, `export/`.
    pub agent_image: PathBuf,
    pub nvcc: Option<Nvcc>,
    /// NVIDIA's Nsight Compute, for counters; without it there are none.
    pub ncu: Option<PathBuf>,
    /// `c++`, for the CPU device.
    pub cxx: Option<PathBuf>,
    pub libraries: CudaLibraries,
    /// Builds, baselines and verdicts, by content.
    pub cache: PathBuf,
    /// This program: runners are subcommands of it.
    pub program: PathBuf,
    /// CPU threads for reference and candidate on the CPU device.
    pub threads: usize,
    /// Threads of OpenMP, the reference's and a candidate's alike, sleep while they wait for each other instead of spinning:
    /// for a machine that has other work.
    pub passive: bool,
    pub runner_filter: RunnerFilter,
    /// Longest that an interval of measurements is waited for to become narrow; the judge's own choice if nothing is said.
    pub measure: Option<Duration>,
    /// `torch`, `cuda`, `cudnn`, `nvcc`, `cxx`, `python`, ...
    pub versions: std::collections::BTreeMap<String, String>,
}
