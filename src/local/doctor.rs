//! `kernelfleet doctor`: what this machine has, what is missing, and the command that mends it.
//!
//! Knows how to look. Must not change anything.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::environment::{Environment, Error};
use crate::judge::{self, Device};
use crate::sandbox::Probe;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Ok,
    /// Works with less: a weaker isolation, one device only.
    Limited,
    Missing,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub name: String,
    pub state: State,
    pub detail: String,
    /// The command, or the one sentence, that mends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mend: Option<String>,
}

/// What `doctor` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Devices that a judge can use here.
    pub devices: Vec<String>,
    pub findings: Vec<Finding>,
}

/// Looks at everything.
#[must_use]
pub fn examine(environment: &Result<Environment, Error>) -> Report {
    let mut findings = Vec::new();
    match environment {
        Ok(e) => {
            let torch = e.python.torch.clone().unwrap_or_default();
            findings
                .push(ok("python", format!("{} at {}, torch {torch}", e.python.version, e.toolchain.python.display())));
            findings.push(if e.python.headers {
                ok("python headers", "Python.h is there".into())
            } else {
                let mend = "Debian, Ubuntu: apt-get install python3-dev";
                limited("python headers", "no Python.h: torch.compile can't be measured on the CPU device".into(), mend)
            });
            findings.push(match &e.toolchain.cxx {
                Some(path) => {
                    let version = e.toolchain.versions.get("cxx").cloned().unwrap_or_default();
                    ok("c++", format!("{version} at {}", path.display()))
                }
                None => missing(
                    "c++",
                    "no c++: no kernels for the CPU device".into(),
                    "Debian, Ubuntu: apt-get install g++; or set KERNELFLEET_CXX",
                ),
            });
            findings.push(match &e.toolchain.nvcc {
                Some(nvcc) => {
                    let version = e.toolchain.versions.get("nvcc").cloned().unwrap_or_default();
                    ok("nvcc", format!("{version} at {}", nvcc.path.display()))
                }
                None => limited(
                    "nvcc",
                    "no nvcc: no kernels for the cuda device".into(),
                    "make env installs it; or set KERNELFLEET_NVCC",
                ),
            });
            let libraries = &e.toolchain.libraries;
            let absent: Vec<&str> =
                [("cuBLAS", &libraries.cublas), ("cuBLASLt", &libraries.cublaslt), ("cuDNN", &libraries.cudnn)]
                    .into_iter()
                    .filter_map(|(n, p)| p.is_none().then_some(n))
                    .collect();
            findings.push(if absent.is_empty() && libraries.nvrtc_builtins.is_none() {
                let detail = "NVRTC not found: cuDNN can't compile kernels, and chooses others than PyTorch's".into();
                limited("cuda libraries", detail, "make env installs PyTorch's CUDA build")
            } else if absent.is_empty() {
                ok("cuda libraries", "cuBLAS, cuBLASLt, cuDNN and NVRTC as PyTorch loads them".into())
            } else {
                let detail = format!("{} not found: no library calls on the cuda device", absent.join(", "));
                limited("cuda libraries", detail, "make env installs PyTorch's CUDA build")
            });
            findings.push(ok("cache", e.toolchain.cache.display().to_string()));
        }
        Err(error) => findings.push(missing("python", error.to_string(), "make env")),
    }
    let gpus = gpus();
    let usable = !gpus.is_empty();
    findings.push(if usable {
        ok("gpu", gpus.join("; "))
    } else if Path::new("/proc/driver/nvidia/version").exists() {
        let mend = "nvidia-smi should list the card; in a container, start it with --gpus all";
        limited("gpu", "a driver is loaded, but no card can be used: the cpu device only".into(), mend)
    } else {
        limited("gpu", "no NVIDIA card: the cpu device only".into(), "nothing to do, or use a machine with a card")
    });
    if let (Ok(e), true) = (environment, usable) {
        match judge::Facts::find(&e.toolchain, Device::Cuda) {
            Ok(facts) if facts.exposed => {
                let mend = "set uvm_disable_hmm=1 for the module nvidia-uvm, or take verdicts of grade observed";
                findings.push(limited("host memory", judge::EXPOSED.to_owned(), mend));
            }
            Ok(_) => findings.push(ok("host memory", "out of device code's reach".into())),
            Err(error) => {
                findings.push(limited("host memory", error.to_string(), "see the findings above and the driver's log"));
            }
        }
        findings.push(match &e.toolchain.ncu {
            Some(path) => ok("ncu", path.display().to_string()),
            None => limited(
                "ncu",
                "no ncu: no hardware counters of kernels".into(),
                "install Nsight Compute, or name its program with KERNELFLEET_NCU",
            ),
        });
    }
    findings.extend(isolation(Probe::here()));
    findings.extend(resources());
    let mut devices = Vec::new();
    if let Ok(e) = environment {
        if e.toolchain.cxx.is_some() {
            devices.push("cpu".to_owned());
        }
        if usable && e.toolchain.nvcc.is_some() {
            devices.push("cuda".to_owned());
        }
    }
    Report { devices, findings }
}

/// What confines hostile children here. Pure.
fn isolation(probe: Probe) -> Vec<Finding> {
    let users = if probe.root {
        ok("users", "children run as users of their own".into())
    } else {
        limited(
            "users",
            "not root: children run as you, and a hostile task could signal them or read what you can".into(),
            "run in a container as root, or trust the tasks and candidates",
        )
    };
    let landlock = match probe.landlock {
        0 => limited(
            "landlock",
            "not in this kernel: children see the files that their user can read".into(),
            "a kernel of 5.13 or later with lsm=landlock",
        ),
        version @ 1..=5 => ok("landlock", format!("version {version} (files)")),
        version => ok("landlock", format!("version {version} (files, signals, abstract sockets)")),
    };
    let seccomp = std::fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").unwrap_or_default();
    let seccomp = if seccomp.contains("kill_process") {
        ok("seccomp", "filters for each role".into())
    } else {
        limited("seccomp", "not in this kernel".into(), "a kernel with CONFIG_SECCOMP_FILTER")
    };
    vec![users, landlock, seccomp]
}

fn resources() -> Vec<Finding> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| -> u64 {
        let line = meminfo.lines().find(|l| l.starts_with(name)).unwrap_or("");
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0)
    };
    let available = kib("MemAvailable:") >> 20;
    let memory = if available >= 6 {
        ok("memory", format!("{available} GiB available"))
    } else {
        let detail = format!("{available} GiB available; a judge needs about 6");
        limited("memory", detail, "end something else, or keep to small tasks")
    };
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load: f64 = load.split(' ').next().and_then(|x| x.parse().ok()).unwrap_or(0.0);
    let busy = if load > 0.5 {
        let detail = format!("{cores} cores, load {load}: others work here, CPU timings will be wide");
        limited("cores", detail, "let them finish before a run on the cpu device")
    } else {
        ok("cores", format!("{cores} cores, idle"))
    };
    vec![memory, busy]
}

/// Names of usable cards. Without a device file nobody is asked.
#[must_use]
pub fn gpus() -> Vec<String> {
    if !Path::new("/dev/nvidiactl").exists() {
        return Vec::new();
    }
    let output = Command::new("nvidia-smi")
        .args(["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
            .lines()
            .map(|l| l.trim().to_owned())
            .filter(|l| !l.is_empty())
            .collect(),
        // No nvidia-smi in the image: the device files are what is known.
        _ => (0..16).map(|i| format!("/dev/nvidia{i}")).filter(|p| Path::new(p).exists()).collect(),
    }
}

fn ok(name: &str, detail: String) -> Finding {
    Finding { name: name.into(), state: State::Ok, detail, mend: None }
}

fn limited(name: &str, detail: String, mend: &str) -> Finding {
    Finding { name: name.into(), state: State::Limited, detail, mend: Some(mend.into()) }
}

fn missing(name: &str, detail: String, mend: &str) -> Finding {
    Finding { name: name.into(), state: State::Missing, detail, mend: Some(mend.into()) }
}

/// The report for people.
#[must_use]
pub fn render(report: &Report) -> String {
    let width = report.findings.iter().map(|f| f.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in &report.findings {
        let state = match finding.state {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Missing => "MISSING",
        };
        text.push_str(&format!("{:width$}  {state:7}  {}\n", finding.name, finding.detail));
        if let Some(mend) = &finding.mend {
            text.push_str(&format!("{:width$}           -> {mend}\n", ""));
        }
    }
    let devices = if report.devices.is_empty() { "none".to_owned() } else { report.devices.join(", ") };
    text.push_str(&format!("\ndevices that can judge here: {devices}"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_comes_with_what_mends_it() {
        let report = examine(&Err(Error::NoPython(vec!["/usr/bin/python3 has no torch".into()])));
        assert!(report.devices.is_empty());
        assert!(report.findings.iter().all(|f| f.state == State::Ok || f.mend.is_some()));
        assert!(render(&report).contains("-> make env"));
    }

    #[test]
    fn isolation_is_told_as_it_is() {
        insta::assert_debug_snapshot!(
            isolation(Probe { root: false, landlock: 0 })
                .iter()
                .take(2)
                .map(|f| (f.name.as_str(), f.state, f.detail.as_str()))
                .collect::<Vec<_>>()
        );
    }
}
