#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use super::*;

/// Tries what a hostile child would; each line says what and whether it was refused.
const PROBE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static void say(const char* what, long result) { printf("%s %s\n", what, result < 0 ? "refused" : "done"); fflush(stdout); }
static void* thread(void* x) { return x; }

int main(int argc, char** argv) {
    pid_t parent = atoi(argv[1]);
    char buffer[64];
    struct iovec here = {buffer, 8}, there = {(void*)0x1000, 8};
    pthread_t t;
    say("thread", -pthread_create(&t, 0, thread, 0));
    pid_t child = fork();
    if (child == 0) _exit(0);
    say("fork", child);
    if (child > 0) waitpid(child, 0, 0);
    say("inet", socket(AF_INET, SOCK_STREAM, 0));
    say("unix", socket(AF_UNIX, SOCK_STREAM, 0));
    say("shadow", open("/etc/shadow", O_RDONLY));
    say("environment", open("/proc/1/environ", O_RDONLY));
    say("create", open("/tmp/kernelfleet-escaped", O_CREAT | O_WRONLY, 0600));
    say("ptrace", ptrace(PTRACE_ATTACH, parent, 0, 0));
    say("peek", syscall(SYS_process_vm_readv, parent, &here, 1, &there, 1, 0));
    say("kill", kill(parent, 0));
    say("tgkill", syscall(SYS_tgkill, parent, parent, 0));
    say("namespace", unshare(CLONE_NEWUSER));
    say("root", setuid(0));
    say("uring", syscall(SYS_io_uring_setup, 1, buffer));
    say("inherited", fcntl(9, F_GETFD));
    say("dump", open("core", O_CREAT | O_WRONLY, 0600));
    execl("/bin/true", "true", (char*)0);
    say("exec", -1);
    return 0;
}
"#;

/// The probe as a program in a folder that any user can enter; `None` where there is no compiler.
fn probe() -> Option<tempfile::TempDir> {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(folder.path().join("probe.c"), PROBE).unwrap();
    let built = Command::new("cc").args(["-o", "probe", "probe.c", "-pthread"]).current_dir(folder.path()).status();
    if !built.is_ok_and(|s| s.success()) {
        println!("skipped: there is no C compiler here");
        return None;
    }
    Some(folder)
}

fn confinement(program: Vec<u8>, more: &[&Path]) -> Confinement {
    let read = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null"].map(PathBuf::from);
    Confinement {
        read: read.into_iter().chain(more.iter().map(|p| p.to_path_buf())).collect(),
        write: vec![PathBuf::from("/dev/null")],
        seccomp: Some(program),
        limits: Limits { fsize: 1 << 20, nofile: 64, cpu: Some(10), ..Limits::default() },
        env: [("PATH".to_owned(), "/usr/bin:/bin".to_owned())].into(),
        ..Confinement::new_user()
    }
}

fn shell(script: &str) -> Output {
    let mut command = Command::new("/bin/sh");
    command.args(["-c", script]);
    confinement(seccomp::builder(), &[]).apply(&mut command).unwrap();
    command.output().unwrap()
}

/// What the probe could do under a filter, by name.
fn done(program: Vec<u8>) -> Option<BTreeMap<String, bool>> {
    let folder = probe()?;
    let held = std::fs::File::open("/etc/hostname").unwrap();
    // SAFETY: duplicates a descriptor that is open to a number that this test alone uses.
    assert!(unsafe { libc::dup2(held.as_raw_fd(), 9) } == 9);
    let mut command = Command::new(folder.path().join("probe"));
    command.arg(std::process::id().to_string());
    confinement(program, &[folder.path()]).apply(&mut command).unwrap();
    let output = command.output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("thread done"), "{said}{}", String::from_utf8_lossy(&output.stderr));
    Some(said.lines().filter_map(|l| l.split_once(' ')).map(|(n, r)| (n.to_owned(), r == "done")).collect())
}

#[test]
fn a_runner_can_do_nothing_but_compute() {
    for (program, unix) in [(seccomp::runner_cpu(), false), (seccomp::runner_cuda(), true)] {
        let Some(mut done) = done(program) else { return };
        assert_eq!(done.remove("unix"), Some(unix));
        let could: Vec<&str> = done.iter().filter(|d| *d.1).map(|d| d.0.as_str()).collect();
        let mut expected = vec!["thread"];
        if Probe::here().landlock < 6 && !Probe::here().root {
            expected.push("tgkill");
        }
        assert_eq!(could.iter().filter(|c| !expected.contains(c)).collect::<Vec<_>>(), Vec::<&&str>::new());
    }
}

#[test]
fn a_program_that_watches_tells_what_its_filter_refused_and_goes_on() {
    const NAME: &str = "sandbox::tests::a_program_that_watches_tells_what_its_filter_refused_and_goes_on";
    if std::env::var_os("KERNELFLEET_TEST_WATCHES").is_some() {
        refused::watch().unwrap();
        // SAFETY: system calls on plain numbers; the filter refuses the first three.
        let results = unsafe {
            [
                libc::unshare(libc::CLONE_NEWUSER),
                libc::socket(libc::AF_NETLINK, libc::SOCK_RAW, 0),
                libc::unshare(libc::CLONE_NEWUSER),
                libc::socket(libc::AF_UNIX, libc::SOCK_STREAM, 0),
            ]
        };
        println!("results {:?}", results.map(|r| r >= 0));
        println!("calls {:?}", refused::calls());
        return;
    }
    // The child is this very test, under the filter of a card's runner.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", NAME, "--nocapture", "--test-threads", "1"]);
    let confinement = Confinement {
        read: vec![PathBuf::from("/")],
        write: vec![PathBuf::from("/dev/null")],
        seccomp: Some(seccomp::runner_cuda_told()),
        limits: Limits { fsize: 1 << 20, nofile: 64, ..Limits::default() },
        env: [("KERNELFLEET_TEST_WATCHES".to_owned(), "1".to_owned())].into(),
        ..Confinement::default()
    };
    confinement.apply(&mut command).unwrap();
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{:?} {said}{}", output.status, String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("results [false, false, false, true]"), "{said}");
    let expected = format!(
        "calls [({}, {}), ({}, {})]",
        libc::SYS_unshare,
        libc::CLONE_NEWUSER,
        libc::SYS_socket,
        libc::AF_NETLINK
    );
    assert!(said.contains(&expected), "{said}");
}

#[test]
fn a_child_with_processes_still_reaches_nobody_else() {
    for (program, unix) in [(seccomp::builder(), false), (seccomp::host(), true)] {
        let Some(mut done) = done(program) else { return };
        assert!(done.remove("thread").is_some_and(|d| d) && done.remove("fork").is_some_and(|d| d));
        assert_eq!(done.remove("unix"), Some(unix));
        // The exec worked, so the probe did not come back to say so.
        assert_eq!(done.remove("exec"), None);
        assert_eq!(done.iter().filter(|d| *d.1).map(|d| d.0.as_str()).collect::<Vec<_>>(), Vec::<&str>::new());
    }
}

#[test]
fn a_process_that_forbids_programs_starts_none() {
    let mut command = Command::new("/bin/true");
    // SAFETY: the closure makes system calls and one small allocation, which glibc allows in a forked child.
    unsafe { command.pre_exec(seccomp::forbid_programs) };
    assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(libc::EPERM));
}

#[test]
fn a_confined_child_runs_programs_and_reads_nothing_else() {
    assert_eq!(shell("echo fine").stdout, b"fine\n");
    if Probe::here().landlock == 0 {
        println!("skipped: this kernel has no Landlock");
        return;
    }
    for path in ["/etc/passwd", "/proc/1/environ", "/root", "/tmp"] {
        assert!(!shell(&format!("ls {path} && cat {path}")).status.success(), "{path} could be read");
    }
    assert!(!shell("echo x > /tmp/escaped").status.success());
}

#[test]
fn a_confined_child_signals_nobody_outside() {
    let id = std::process::id();
    assert!(!shell(&format!("kill -0 {id}")).status.success());
}

#[test]
fn root_without_a_user_of_its_own_has_no_capabilities() {
    if !Probe::here().root {
        println!("skipped: only root has capabilities to lose");
        return;
    }
    let mut command = Command::new("/bin/grep");
    command.args(["Cap", "/proc/self/status"]);
    let confinement = Confinement { user: None, ..confinement(seccomp::builder(), &[Path::new("/proc")]) };
    confinement.apply(&mut command).unwrap();
    let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
    assert_eq!(said.lines().count(), 5, "{said}");
    assert!(said.lines().all(|l| l.ends_with("0000000000000000")), "{said}");
}

fn processes_of(uid: u32) -> usize {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    // What has ended and waits for its parent runs nothing any more.
    entries
        .filter(|e| e.metadata().is_ok_and(|m| m.uid() == uid))
        .filter(|e| std::fs::read_to_string(e.path().join("stat")).is_ok_and(|s| !s.contains(") Z ")))
        .count()
}

#[test]
fn what_leaves_its_session_and_what_forks_without_end_is_killed_all_the_same() {
    for script in ["setsid sleep 100 & sleep 100", "f() { f & f & }; f; sleep 100"] {
        let mut confinement = confinement(seccomp::builder(), &[]);
        let Some((uid, _)) = confinement.user else {
            println!("skipped: only root gives children users of their own");
            return;
        };
        confinement.limits.nproc = Some(40);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]).stdout(Stdio::null()).stderr(Stdio::null());
        confinement.apply(&mut command).unwrap();
        let mut child = command.spawn().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while processes_of(uid) < 3 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(processes_of(uid) >= 2, "{script}: the processes did not start");
        kill_all(i32::try_from(child.id()).unwrap(), Some(uid));
        child.wait().unwrap();
        while processes_of(uid) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(processes_of(uid), 0, "{script}");
    }
}

#[test]
fn children_get_users_that_no_process_has() {
    let Some((first, _)) = new_user() else { return };
    let (second, _) = new_user().unwrap();
    assert_ne!(first, second);
    assert_eq!(processes_of(first) + processes_of(second), 0);
}

#[test]
fn base64_pads() {
    assert_eq!(base64(b"foobar"), "Zm9vYmFy");
    assert_eq!(base64(b"foob"), "Zm9vYg==");
    assert_eq!(base64(b"fooba"), "Zm9vYmE=");
}

#[test]
fn a_link_a_pipe_and_a_folder_are_no_plain_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    std::fs::write(at("file"), "text").unwrap();
    std::os::unix::fs::symlink(at("file"), at("link")).unwrap();
    nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    assert_eq!(std::io::read_to_string(plain_file(&at("file")).unwrap()).unwrap(), "text");
    for name in ["link", "pipe", "folder", "nothing"] {
        assert!(plain_file(&at(name)).is_err(), "{name}");
    }
}
