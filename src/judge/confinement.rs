//! What each child of a judge may read, write and call.
//!
//! Policy only: which folders, users and limits go with which role. How they are enforced is `sandbox`'s.

use std::path::{Path, PathBuf};

use super::toolchain::RunnerFilter;
use super::{Device, Toolchain};
use crate::sandbox::{self, Confinement, Limits, seccomp};

const GIB: u64 = 1 << 30;

/// Folders of the system that any program needs to start and to resolve its libraries.
fn system() -> Vec<PathBuf> {
    [
        "/usr",
        "/lib",
        "/lib64",
        "/bin",
        "/sbin",
        "/etc/ld.so.cache",
        "/etc/ld.so.conf",
        "/etc/ld.so.conf.d",
        "/etc/alternatives",
    ]
    .into_iter()
    .map(PathBuf::from)
    .filter(|p| p.exists())
    .collect()
}

/// A user of its own, where we may switch and where that user can read what it must.
fn base<'a>(needs: impl IntoIterator<Item = &'a PathBuf>) -> Confinement {
    if needs.into_iter().all(|p| sandbox::world_readable(p)) { Confinement::new_user() } else { Confinement::default() }
}

/// A recorder: hostile Python, no processes, nothing to write but its own folder.
pub(super) fn recorder(toolchain: &Toolchain, scratch: &Path) -> Confinement {
    let mut read = system();
    read.extend(toolchain.python_read.iter().cloned());
    read.push(toolchain.agent_image.join("python"));
    read.extend(
        ["/dev/null", "/dev/urandom", "/dev/zero", "/proc/self", "/proc/cpuinfo", "/proc/meminfo"].map(PathBuf::from),
    );
    Confinement {
        read,
        write: vec![scratch.to_owned(), PathBuf::from("/dev/null")],
        seccomp: Some(seccomp::recorder()),
        limits: Limits {
            data: Some(16 * GIB),
            // Derived constants leave in a memfd, which this limit counts as a file.
            fsize: 16 * GIB,
            nproc: None,
            nofile: 64,
            cpu: Some(120),
            ..Limits::default()
        },
        cwd: Some(scratch.to_owned()),
        ..base(python(toolchain).iter())
    }
}

/// A candidate's own process: hostile Python and hostile host code. It starts no processes and reaches no socket; on a card it
/// needs the driver's device files. `built`: it only says what is to be built, without a device.
pub(super) fn process(toolchain: &Toolchain, device: Device, built: bool, scratch: &Path) -> Confinement {
    let cuda = device == Device::Cuda && !built;
    let own = recorder(toolchain, scratch);
    let (mut read, mut write) = (own.read, own.write);
    read.push(PathBuf::from("/sys/devices/system"));
    if cuda {
        read.extend(["/proc", "/sys", "/usr/local/cuda", "/usr/local/nvidia"].map(PathBuf::from));
        write.extend(device_files());
        // The driver names its threads when it starts; its own folder there isn't known yet.
        write.push(PathBuf::from("/proc/self"));
    }
    let temp = scratch.display().to_string();
    let mut env: std::collections::BTreeMap<String, String> =
        ["TMPDIR", "HOME", "TORCH_EXTENSIONS_DIR"].into_iter().map(|k| (k.to_owned(), temp.clone())).collect();
    if !cuda {
        env.insert("CUDA_VISIBLE_DEVICES".into(), String::new());
    }
    Confinement {
        read,
        write,
        seccomp: Some(if cuda { seccomp::process_cuda() } else { seccomp::recorder() }),
        limits: Limits {
            // The driver reserves addresses, which this limit counts.
            data: (!cuda).then_some(16 * GIB),
            fsize: 16 * GIB,
            nofile: 1024,
            cpu: Some(600),
            ..own.limits
        },
        env,
        cwd: own.cwd,
        user: own.user,
    }
}

/// A reference host: task sources come from models too. It compiles, so it may start processes; on CUDA it
/// needs the driver's device files.
pub(super) fn host(toolchain: &Toolchain, device: Device, scratch: &Path) -> Confinement {
    let mut read = system();
    read.extend(toolchain.python_read.iter().cloned());
    read.push(toolchain.agent_image.join("python"));
    read.extend(
        ["/proc", "/sys/devices/system", "/dev/urandom", "/dev/zero", "/etc/passwd", "/etc/nsswitch.conf"]
            .map(PathBuf::from),
    );
    let mut write = vec![scratch.to_owned(), PathBuf::from("/dev/null")];
    if device == Device::Cuda {
        read.extend(
            ["/sys", "/usr/local/cuda", "/usr/local/nvidia", "/etc/OpenCL", "/run/nvidia-persistenced"]
                .map(PathBuf::from),
        );
        write.extend(device_files());
        write.push(PathBuf::from("/dev/shm"));
        // The driver names its threads there when it starts; the child itself resolves the link.
        write.push(PathBuf::from("/proc/self"));
    }
    let temp = scratch.display().to_string();
    Confinement {
        read,
        write,
        seccomp: Some(seccomp::host()),
        // Parameters leave in a memfd, which this limit counts as a file: those of KernelBench's level 3 take 8 GB.
        limits: Limits { data: None, fsize: 64 * GIB, nproc: None, nofile: 4096, cpu: None, ..Limits::default() },
        cwd: Some(scratch.to_owned()),
        env: [
            ("TMPDIR", temp.clone()),
            ("HOME", temp.clone()),
            ("TORCHINDUCTOR_CACHE_DIR", format!("{temp}/inductor")),
            ("TRITON_CACHE_DIR", format!("{temp}/triton")),
        ]
        .into_iter()
        .map(|(k, v)| (k.to_owned(), v))
        .collect(),
        ..base(python(toolchain).iter())
    }
}

/// A runner. On the CPU the candidate's library is loaded into it; on a card it is our own program, which
/// holds no secret and meets hostile device code only.
/// `beside_helper`: threads that wait between parallel regions sleep, since a library helper works meanwhile;
/// otherwise they spin as those of the reference do, and are frozen between samples as the whole process is.
pub(super) fn runner(toolchain: &Toolchain, device: Device, beside_helper: bool) -> Confinement {
    let mut read = system();
    read.push(toolchain.program.clone());
    read.extend(["/proc", "/sys/devices/system", "/dev/urandom", "/dev/zero"].map(PathBuf::from));
    let mut write = vec![PathBuf::from("/dev/null")];
    let threads = toolchain.threads.to_string();
    let mut env: Vec<(String, String)> = [
        ("OMP_NUM_THREADS", threads.as_str()),
        ("OMP_PROC_BIND", "false"),
        ("PATH", "/usr/bin:/bin"),
        ("LANG", "C.UTF-8"),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v.to_owned()))
    .collect();
    if beside_helper || toolchain.passive {
        env.push(("OMP_WAIT_POLICY".into(), "passive".into()));
    }
    let limits = match device {
        Device::Cpu => Limits {
            data: Some(4 * GIB),
            // Workspaces and outputs are memfds, which this limit counts as files.
            fsize: 16 * GIB,
            nofile: 1024,
            cpu: Some(600),
            ..Limits::default()
        },
        Device::Cuda => {
            read.extend(["/sys", "/usr/local/cuda", "/usr/local/nvidia"].map(PathBuf::from));
            read.extend(toolchain.python_read.iter().cloned());
            write.extend(device_files());
            // The driver names its threads when it starts; its own folder there isn't known yet.
            write.push(PathBuf::from("/proc"));
            env.push(("CUDA_CACHE_DISABLE".into(), "1".into()));
            Limits { fsize: 1 << 30, nofile: 4096, cpu: Some(600), ..Limits::default() }
        }
    };
    Confinement {
        read,
        write,
        // On a card the runner is our own program, and which calls its driver makes is the driver's business.
        seccomp: match (device, toolchain.runner_filter) {
            (Device::Cpu, _) => Some(seccomp::runner_cpu()),
            (Device::Cuda, RunnerFilter::Off) => None,
            (Device::Cuda, RunnerFilter::On) => Some(seccomp::runner_cuda()),
            (Device::Cuda, RunnerFilter::Log) => Some(seccomp::runner_cuda_told()),
        },
        limits,
        env: env.into_iter().collect(),
        ..base([&toolchain.program])
    }
}

/// What is counted under `ncu`, as it is otherwise, with what that program needs: its own folders, and a reference host's filter
/// of system calls for both, since it starts what it counts and talks to it over local sockets and shared memory. Where the
/// driver lets only administrators count, no user of its own either: nothing that holds hostile host code may run so.
pub(super) fn counted(inner: Confinement, ncu: &Path, scratch: &Path) -> Confinement {
    let Confinement { mut read, mut write, mut env, mut user, .. } = inner;
    let folders = ["/etc", "/opt/nvidia", "/usr/local/cuda", "/proc", "/sys"].map(PathBuf::from);
    read.extend(folders.into_iter().filter(|p| p.exists()));
    read.extend(ncu.canonicalize().ok().as_deref().and_then(Path::parent).map(Path::to_path_buf));
    // In /proc the driver names its threads; a process's own folder there isn't known before it starts.
    write.extend([scratch.to_owned(), PathBuf::from("/dev/shm"), PathBuf::from("/proc")]);
    let temp = scratch.display().to_string();
    env.extend(["HOME", "TMPDIR"].map(|name| (name.to_owned(), temp.clone())));
    env.entry("PATH".into()).or_insert_with(|| "/usr/bin:/bin".into());
    let params = std::fs::read_to_string("/proc/driver/nvidia/params").unwrap_or_default();
    if !params.lines().any(|line| line.trim() == "RmProfilingAdminOnly: 0") {
        user = None;
    }
    let seccomp = Some(seccomp::host());
    Confinement { read, write, env, user, seccomp, cwd: Some(scratch.to_owned()), ..inner }
}

fn python(toolchain: &Toolchain) -> Vec<PathBuf> {
    let mut needs = toolchain.python_read.clone();
    needs.push(toolchain.agent_image.join("python"));
    needs
}

fn device_files() -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvidia")))
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_counted_runs_under_the_filter_of_a_reference_host() {
        let folder = tempfile::tempdir().unwrap();
        // A candidate's runner has another filter or none, a reference its own.
        for seccomp in [None, Some(seccomp::runner_cuda()), Some(seccomp::host())] {
            let inner = Confinement { seccomp, ..Confinement::default() };
            let outer = counted(inner, Path::new("/usr/bin/true"), folder.path());
            assert_eq!(outer.seccomp, Some(seccomp::host()));
            assert!(outer.write.contains(&folder.path().to_owned()));
        }
    }
}
