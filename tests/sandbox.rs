//! The agent's sandbox from inside: what works there, and what hostile code can't do.
//!
//! Every test runs in each way that this host can confine: with namespaces and without. The last one runs all of
//! them again as a user without rights. What a host lacks is said on standard output.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use kernelfleet::sandbox::Probe;
use kernelfleet::sandbox::client::{Bounds, Options, Sandbox};
use kernelfleet::sandbox::workspace::{Error, ExportLimits, Ran, Search, Workspace};

const SOON: Duration = Duration::from_secs(20);
const MIB: u64 = 1 << 20;

fn options() -> Options {
    Options::new(env!("CARGO_BIN_EXE_kernelfleet").into())
}

/// Runs a test in every way to confine that this host has.
fn each(options: &Options, test: impl Fn(&mut Sandbox)) {
    for namespaces in [true, false] {
        if !namespaces && Probe::here().landlock == 0 {
            println!("skipped without namespaces: this kernel has no Landlock");
            continue;
        }
        let mut sandbox = Sandbox::start(&Options { namespaces, ..options.clone() }).unwrap();
        let has = sandbox.isolation().contains(&"pid-namespace".to_owned());
        if namespaces && !has {
            println!("skipped with namespaces: {:?}", sandbox.notes());
            continue;
        }
        println!("isolation: {}", sandbox.isolation().join(" "));
        test(&mut sandbox);
    }
}

fn holds(sandbox: &Sandbox, what: &str) -> bool {
    sandbox.isolation().iter().any(|i| i == what)
}

fn run(sandbox: &mut Sandbox, command: &str) -> Ran {
    let ran = sandbox.run(command, SOON).unwrap();
    assert!(!ran.timed_out, "{command}: {}", ran.output);
    ran
}

fn say(sandbox: &mut Sandbox, command: &str) -> String {
    let ran = run(sandbox, command);
    assert_eq!(ran.status, Some(0), "{command}: {}", ran.output);
    ran.output
}

/// Compiles a program in the workspace; whether there is a compiler.
fn compile(sandbox: &mut Sandbox, name: &str, source: &str) -> bool {
    sandbox.write(&format!("{name}.c"), source.as_bytes()).unwrap();
    let ran = run(sandbox, &format!("command -v cc && cc -pthread -o {name} {name}.c -lrt"));
    if ran.status != Some(0) && ran.output.is_empty() {
        println!("skipped: there is no C compiler here");
        return false;
    }
    assert_eq!(ran.status, Some(0), "{}", ran.output);
    true
}

/// Processes of the whole host whose arguments contain a word.
fn with_word(word: &str) -> Vec<i32> {
    std::fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|pid| {
            std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).contains(word))
        })
        .collect()
}

/// A word that no other process has in its arguments.
fn word() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}.{:06}", 900_000 + std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed) + 1)
}

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !done() {
        assert!(Instant::now() < end, "not within {SOON:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_shell_keeps_its_folder_its_variables_and_its_functions() {
    each(&options(), |sandbox| {
        let folder = sandbox.folder().to_str().unwrap().to_owned();
        assert_eq!(say(sandbox, "pwd"), format!("{folder}\n"));
        say(sandbox, "mkdir sub; cd sub; A=1; export B='two words'; f() { echo $A-$B; }; set -o pipefail");
        assert_eq!(say(sandbox, "f; pwd"), format!("1-two words\n{folder}/sub\n"));
        assert_eq!(run(sandbox, "false | true").status, Some(1));
        assert_eq!(run(sandbox, "echo out; echo err >&2; (exit 7)").status, Some(7));
        assert_eq!(say(sandbox, "echo out; echo err >&2"), "out\nerr\n");
        assert_eq!(say(sandbox, "cat <<'X'\nit's $A\nX\n"), "it's $A\n");
        assert_eq!(say(sandbox, "read x || echo nothing to read"), "nothing to read\n");
        assert_eq!(say(sandbox, "exec >/dev/null 2>&1; break; continue"), "");
        assert_eq!(say(sandbox, "f"), "1-two words\n");
        let wrong = run(sandbox, "if then");
        assert!(wrong.status != Some(0) && wrong.output.contains("syntax error"), "{wrong:?}");
        assert_eq!(say(sandbox, "f"), "1-two words\n");
        let signalled = run(sandbox, "bash -c 'kill -9 $$'");
        assert_eq!(signalled.status, Some(137), "{signalled:?}");
    });
}

#[test]
fn a_command_that_ends_the_shell_is_answered_and_the_next_one_has_a_new_shell() {
    each(&options(), |sandbox| {
        say(sandbox, "mkdir a; cd a; A=1");
        for (command, status) in [("echo last; exit 3", 3), ("set -e; false", 1), ("kill -9 $$", 137)] {
            let ran = run(sandbox, command);
            assert_eq!(ran.status, Some(status), "{ran:?}");
            assert!(ran.output.contains("the shell has ended"), "{ran:?}");
            let folder = sandbox.folder().join("a");
            assert_eq!(say(sandbox, "pwd; echo [$A]"), format!("{}\n[]\n", folder.display()));
        }
    });
}

#[test]
fn what_is_late_is_killed_with_its_daemons_and_the_shell_begins_anew_where_it_was() {
    each(&options(), |sandbox| {
        let word = word();
        let late = format!(
            "mkdir -p sub; cd sub; setsid sleep {word} & (setsid setsid sleep {word} &) ; echo begun; sleep {word}"
        );
        let ran = sandbox.run(&late, Duration::from_secs(1)).unwrap();
        // Less some rounding.
        assert!(ran.timed_out && ran.status.is_none() && ran.seconds > 0.99, "{ran:?}");
        assert!(ran.output.starts_with("begun\n") && ran.output.contains("not done within 1 s"), "{ran:?}");
        assert_eq!(with_word(&word), Vec::<i32>::new());
        assert_eq!(say(sandbox, "pwd"), format!("{}/sub\n", sandbox.folder().to_path_buf().display()));
    });
}

#[test]
fn a_background_command_is_heard_bit_by_bit_and_killed_whole() {
    each(&options(), |sandbox| {
        say(sandbox, "mkdir there; cd there; export V='a\nb'");
        let id = sandbox.start("pwd; echo \"$V\"; until [ -e go ]; do sleep 0.01; done; echo end; exit 4").unwrap();
        let mut heard = String::new();
        until("its first words", || {
            let new = sandbox.output(&id).unwrap();
            heard += &new.output;
            assert!(new.running && new.status.is_none());
            heard.ends_with("b\n")
        });
        assert_eq!(heard, format!("{}/there\na\nb\n", sandbox.folder().display()));
        assert_eq!(sandbox.output(&id).unwrap().output, "");
        sandbox.write("there/go", b"").unwrap();
        heard.clear();
        until("its end", || {
            let new = sandbox.output(&id).unwrap();
            heard += &new.output;
            !new.running
        });
        let last = sandbox.output(&id).unwrap();
        assert_eq!((heard.as_str(), last.status), ("end\n", Some(4)));

        let word = word();
        let id = sandbox.start(&format!("(setsid sleep {word} &); setsid sleep {word} & exec sleep {word}")).unwrap();
        until("three processes", || with_word(&word).len() >= 3);
        sandbox.kill(&id).unwrap();
        assert_eq!(with_word(&word), Vec::<i32>::new());
        assert_eq!(sandbox.output(&id), Err(Error::NoSuchJob { id: id.clone() }));
        assert_eq!(sandbox.kill("x"), Err(Error::NoSuchJob { id: "x".into() }));
        // Output that nobody asks for is kept in bounds, and a command that closes its output still ends.
        let id = sandbox.start("exec >/dev/null 2>&1; sleep 0.05; exit 9").unwrap();
        until("a silent end", || sandbox.output(&id).unwrap().status == Some(9));
    });
    let few = Options { bounds: Bounds { jobs: 2, ..Bounds::default() }, ..options() };
    each(&few, |sandbox| {
        let first = sandbox.start("sleep 100").unwrap();
        sandbox.start("sleep 100").unwrap();
        assert_eq!(sandbox.start("sleep 100"), Err(Error::TooManyJobs { limit: 2 }));
        sandbox.kill(&first).unwrap();
        sandbox.start("sleep 100").unwrap();
    });
}

#[test]
fn output_is_cut_in_the_middle_and_a_gigabyte_of_it_costs_no_memory() {
    each(&options(), |sandbox| {
        let ran = run(sandbox, "seq 1 100000");
        assert!(ran.output.starts_with("1\n2\n3\n") && ran.output.ends_with("\n99999\n100000\n"));
        assert_eq!(ran.cut, 588_895 - 30_000);
        assert!(ran.output.contains(&format!("[... {} bytes left out here ...]", ran.cut)));
        let ran = sandbox.run("head -c 1000000000 /dev/zero | tr '\\0' x", Duration::from_secs(120)).unwrap();
        assert_eq!((ran.status, ran.cut), (Some(0), 1_000_000_000 - 30_000));
        if holds(sandbox, "pid-namespace") {
            let peak: u64 = say(sandbox, "awk '/VmHWM/ {print $2}' /proc/1/status").trim().parse().unwrap();
            assert!(peak < 40_000, "the server used {peak} kB");
        }
    });
}

#[test]
fn files_are_read_and_written_inside_and_nowhere_else() {
    let outside = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(outside.path(), "secret").unwrap();
    std::fs::set_permissions(outside.path(), std::fs::Permissions::from_mode(0o666)).unwrap();
    let secret = outside.path().to_str().unwrap();
    each(&options(), |sandbox| {
        let root = sandbox.folder().to_str().unwrap().to_owned();
        sandbox.write("a/b/c.txt", b"one").unwrap();
        assert_eq!(sandbox.read(&format!("{root}/a/b/c.txt"), 3).unwrap(), b"one");
        assert_eq!(sandbox.read("a/../a/./b/c.txt", 3).unwrap(), b"one");
        assert_eq!(sandbox.read("a/b/c.txt", 2), Err(Error::TooLarge { path: "a/b/c.txt".into(), bytes: 3, limit: 2 }));
        assert_eq!(sandbox.read("none", 1), Err(Error::NotFound { path: "none".into() }));
        assert!(matches!(sandbox.read("a", 1), Err(Error::NotAFile { .. })));
        assert!(matches!(sandbox.write("a", b""), Err(Error::NotAFile { .. })));
        assert!(matches!(sandbox.write("a/b/c.txt/d", b""), Err(Error::Denied { .. })));
        say(sandbox, "printf '#!/bin/sh\\necho old' > tool; chmod 750 tool");
        sandbox.write("tool", b"#!/bin/sh\necho new").unwrap();
        assert_eq!(say(sandbox, "./tool; stat -c %a tool"), "new\n750\n");
        let about = sandbox.stat("a/b/c.txt").unwrap();
        assert_eq!((about.path.as_str(), about.bytes, about.folder), ("a/b/c.txt", 3, false));
        let names: Vec<_> = sandbox.list(".").unwrap().into_iter().map(|e| (e.path, e.folder)).collect();
        assert_eq!(names, [("a".into(), true), ("tool".into(), false)]);
        assert!(matches!(sandbox.list("tool"), Err(Error::NotAFolder { .. })));

        // Links: inside they are followed, outside they lead nowhere.
        say(
            sandbox,
            &format!(
                "ln -s a/b/c.txt rel; ln -s {root}/a abs; ln -s {secret} out; ln -s / top; ln -s ../../../../../../etc up; ln -s loop loop; ln -s none dangling"
            ),
        );
        assert_eq!(sandbox.read("rel", 10).unwrap(), b"one");
        assert_eq!(sandbox.read("abs/b/c.txt", 10).unwrap(), b"one");
        sandbox.write("rel", b"two").unwrap();
        sandbox.write("abs/b/new", b"three").unwrap();
        assert_eq!(say(sandbox, "readlink rel; cat a/b/c.txt a/b/new"), "a/b/c.txt\ntwothree");
        for path in ["out", "top/etc/passwd", "up/passwd", secret, "/etc/passwd", "../../../etc/passwd", "/"] {
            assert!(matches!(sandbox.read(path, 1000), Err(Error::Outside { .. })), "{path}");
            assert!(matches!(sandbox.write(path, b"x"), Err(Error::Outside { .. })), "{path}");
            assert!(matches!(sandbox.stat(path), Err(Error::Outside { .. })), "{path}");
            let search =
                Search { pattern: "root|secret".into(), path: Some(path.into()), limit: 9, ..Search::default() };
            assert!(matches!(sandbox.grep(&search), Err(Error::Outside { .. })), "{path}");
        }
        for path in ["loop", "dangling", "a\0b"] {
            assert!(sandbox.write(path, b"x").is_err_and(|e| !e.is_fault()), "{path}");
        }
        assert_eq!(std::fs::read(secret).unwrap(), b"secret");
        // What is no file neither hangs nor is read.
        say(sandbox, "mkfifo pipe");
        assert!(matches!(sandbox.read("pipe", 10), Err(Error::NotAFile { .. })));
        assert!(matches!(sandbox.write("pipe", b"x"), Err(Error::NotAFile { .. })));
        assert_eq!(say(sandbox, "ls -A | grep kernelfleet || true"), "");
    });
}

#[test]
fn globs_and_searches_find_files_below_the_workspace() {
    each(&options(), |sandbox| {
        for (path, text) in [
            ("kernels/a.cu", "__global__ void f() {\n  int X;\n}\n"),
            ("kernels/deep/b.cu", "x\n"),
            ("model.py", "import torch\n# X\n"),
            (".hidden/c.cu", "X"),
        ] {
            sandbox.write(path, text.as_bytes()).unwrap();
        }
        say(sandbox, "ln -s / away; mkfifo pipe; printf 'X\\0' > binary; touch -d '2001-01-01' kernels/a.cu");
        let mut glob = |pattern: &str, path: Option<&str>| {
            sandbox.glob(pattern, path).map(|found| found.into_iter().map(|e| e.path).collect::<Vec<_>>())
        };
        let root_of_all = glob("**/*.cu", None).unwrap();
        assert_eq!(root_of_all.last().unwrap(), "kernels/a.cu", "the oldest is the last");
        assert_eq!(root_of_all.len(), 3);
        assert_eq!(glob("*.cu", Some("kernels")).unwrap(), ["kernels/a.cu"]);
        assert_eq!(glob("kernels/*.{cu,cuh}", None).unwrap(), ["kernels/a.cu"]);
        assert_eq!(glob("*.rs", None).unwrap(), Vec::<String>::new());
        assert!(matches!(glob("[", None), Err(Error::Pattern { .. })));
        assert!(matches!(glob("*", Some("nowhere")), Err(Error::NotFound { .. })));
        let root = sandbox.folder().display().to_string();
        assert_eq!(sandbox.glob(&format!("{root}/*.py"), None).unwrap()[0].path, "model.py");

        let mut grep = |search: Search| {
            let found = sandbox.grep(&Search { limit: search.limit.max(1), ..search })?;
            Ok::<_, Error>(found.into_iter().map(|m| format!("{}:{}:{}", m.path, m.line, m.text)).collect::<Vec<_>>())
        };
        let search = |pattern: &str| Search { pattern: pattern.into(), limit: 100, ..Search::default() };
        assert_eq!(grep(search("X$")).unwrap(), [".hidden/c.cu:1:X", "model.py:2:# X"]);
        let in_cu = Search { glob: Some("*.cu".into()), case_insensitive: true, ..search("x") };
        assert_eq!(grep(in_cu).unwrap(), [".hidden/c.cu:1:X", "kernels/a.cu:2:  int X;", "kernels/deep/b.cu:1:x"]);
        let by_path = Search { glob: Some("kernels/**".into()), ..search("x") };
        assert_eq!(grep(by_path).unwrap(), ["kernels/deep/b.cu:1:x"]);
        let across = Search { multiline: true, path: Some("kernels/a.cu".into()), ..search(r"\{.*\}") };
        assert_eq!(grep(across).unwrap(), ["kernels/a.cu:1:__global__ void f() {\n  int X;\n}"]);
        assert_eq!(grep(Search { limit: 1, ..search("X") }).unwrap().len(), 1);
        assert!(matches!(grep(search("(")), Err(Error::Pattern { .. })));
    });
}

#[test]
fn files_leave_only_as_plain_files_within_limits() {
    each(&options(), |sandbox| {
        let template = BTreeMap::from([
            ("model_new.py".to_owned(), b"class ModelNew: pass".to_vec()),
            ("kernels/a.cu".to_owned(), vec![7; 1000]),
            ("utils/x.sh".to_owned(), b"#!/bin/sh\necho run".to_vec()),
        ]);
        sandbox.reset(&template).unwrap();
        assert_eq!(say(sandbox, "utils/x.sh"), "run\n");
        assert_eq!(sandbox.export(&ExportLimits::default()).unwrap(), template);
        let some = ExportLimits {
            paths: vec!["model_new.py".into(), "kernels/".into(), "no".into()],
            ..ExportLimits::default()
        };
        assert_eq!(sandbox.export(&some).unwrap().into_keys().collect::<Vec<_>>(), ["kernels/a.cu", "model_new.py"]);
        for (make, why) in [
            ("ln -s a.cu kernels/bad", "is a link"),
            ("ln -s /etc/passwd kernels/bad", "is a link"),
            ("ln -s / kernels/bad", "is a link"),
            ("mkfifo kernels/bad", "pipe"),
            ("ln kernels/a.cu kernels/bad", "hard link"),
            ("touch $'kernels/bad\\n'", "not a name"),
            ("touch $'kernels/bad\\xff'", "UTF-8"),
            ("touch $'kernels/bad\\e[2J'", "not a name"),
            ("head -c 5000 /dev/zero > kernels/bad", "of a file"),
            ("for i in 1 2 3 4; do head -c 1000 /dev/zero > kernels/bad$i; done", "in all"),
            ("touch kernels/bad{1..9}", "more than 8 files"),
            ("mkdir -p kernels/bad$(printf '/d%.0s' {1..40})", "too deep"),
            ("touch kernels/bad; chmod 0 kernels/bad", "can't be opened"),
        ] {
            say(sandbox, make);
            let limits = ExportLimits { paths: some.paths.clone(), files: 8, file_bytes: 4000, bytes: 4500 };
            match sandbox.export(&limits) {
                Err(Error::Export(said)) => assert!(said.contains(why), "{make}: {said}"),
                other => panic!("{make}: {other:?}"),
            }
            say(sandbox, "rm -rf kernels/bad*");
            assert!(sandbox.export(&limits).is_ok());
        }
        for path in ["/etc", "../x", "kernels/../../x", "a\nb"] {
            let limits = ExportLimits { paths: vec![path.into()], ..ExportLimits::default() };
            assert!(matches!(sandbox.export(&limits), Err(Error::Export(_))), "{path}");
        }
        if compile(sandbox, "bind", BIND) {
            say(sandbox, "./bind kernels/bad");
            assert!(matches!(sandbox.export(&some), Err(Error::Export(said)) if said.contains("socket")));
        }
    });
}

/// Leaves a socket as a file.
const BIND: &str = r#"
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
int main(int argc, char** argv) {
    struct sockaddr_un at = {AF_UNIX};
    strcpy(at.sun_path, argv[1]);
    return bind(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr*)&at, sizeof at) != 0;
}
"#;

#[test]
fn a_file_that_turns_into_a_link_while_it_leaves_brings_nothing_from_outside() {
    each(&options(), |sandbox| {
        if !compile(sandbox, "swap", SWAP) {
            return;
        }
        say(sandbox, "mkdir kernels real; echo mine > kernels/a; echo mine > real/group; ln -s /etc dir2");
        sandbox.start("./swap kernels/a kernels/b").unwrap();
        sandbox.start("ln -s /usr/include swapped; exec ./swap real swapped").unwrap();
        let limits = ExportLimits { paths: vec!["kernels".into(), "real".into()], ..ExportLimits::default() };
        let (mut good, mut refused) = (0, 0);
        for _ in 0..300 {
            match sandbox.export(&limits) {
                Ok(files) => {
                    good += 1;
                    assert!(files.values().all(|f| f == b"mine\n"), "{files:?}");
                }
                Err(Error::Export(_)) => refused += 1,
                Err(other) => panic!("{other}"),
            }
            if let Ok(bytes) = sandbox.read("kernels/a", 1000) {
                assert_eq!(bytes, b"mine\n");
            }
        }
        println!("{good} exports, {refused} refused");
    });
}

/// Exchanges two names for ever; the second begins as a link out.
const SWAP: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <unistd.h>
int main(int argc, char** argv) {
    symlink("/etc/passwd", argv[2]);
    for (;;) renameat2(-100, argv[1], -100, argv[2], RENAME_EXCHANGE);
}
"#;

/// Tries what hostile code would; each line is a thing that could be done.
const PROBE: &str = r#"
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mount.h>
#include <sys/msg.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#define TRY(what, call) do { errno = 0; if ((long)(call) >= 0) printf("%s\n", what); fflush(stdout); } while (0)
static char stack[1 << 16];
static int nothing(void* x) { return 0; }
static long i386(void) {
#ifdef __x86_64__
    long r = 102, call = 1; static int args[3] = {AF_INET, SOCK_STREAM, 0};
    __asm__ volatile("int $0x80" : "+a"(r) : "b"(call), "c"(args) : "memory");
    return r;
#else
    return -1;
#endif
}
/* In a child, since a filter may kill it. */
static long apart(long (*what)(void)) {
    int status; pid_t child = fork();
    if (child == 0) _exit(what() >= 0 ? 0 : 1);
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}
static long x32(void) { return syscall(0x40000000 + 41, AF_INET, SOCK_STREAM, 0); }
int main(int argc, char** argv) {
    char text[64]; pid_t other = atoi(argv[1]);
    for (int family = 0; family < 64; family++)
        for (int type = 1; type <= 10; type++) {
            int fd = socket(family, type, 0), pair[2];
            if (fd >= 0) { sprintf(text, "socket %d", family); puts(text); close(fd); }
            if (socketpair(family, type, 0, pair) == 0) { sprintf(text, "pair %d", family); puts(text); close(pair[0]); close(pair[1]); }
        }
    TRY("io_uring", syscall(425, 8, calloc(1, 256)));
    TRY("x32", apart(x32));
    TRY("i386", apart(i386));
    TRY("ptrace attach", ptrace(PTRACE_ATTACH, getppid(), 0, 0));
    TRY("ptrace seize server", ptrace(PTRACE_SEIZE, 1, 0, 0));
    struct iovec here = {text, 8}, there = {(void*)0x1000, 8};
    TRY("process_vm_readv", syscall(SYS_process_vm_readv, getppid(), &here, 1, &there, 1, 0));
    TRY("pidfd_open", syscall(434, getppid(), 0));
    TRY("memory of the server", open("/proc/1/mem", O_RDWR));
    TRY("environment of the server", open("/proc/1/environ", O_RDONLY));
    TRY("descriptors of the server", open("/proc/1/fd/3", O_RDWR));
    struct rlimit none = {0, 0};
    TRY("limits of the parent", prlimit(getppid(), RLIMIT_NOFILE, &none, 0));
    TRY("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    TRY("add_key", syscall(SYS_add_key, "user", "x", "y", 1, -3));
    TRY("bpf", syscall(SYS_bpf, 0, memset(stack, 0, 128), 64));
    TRY("perf", syscall(SYS_perf_event_open, memset(stack, 0, 128), 0, -1, -1, 0));
    TRY("userfaultfd", syscall(SYS_userfaultfd, 0));
    TRY("userfaultfd of user mode", syscall(SYS_userfaultfd, 1));
    TRY("mount", mount("tmpfs", "/tmp", "tmpfs", 0, 0));
    TRY("umount", umount2("/proc", MNT_DETACH));
    TRY("open_tree", syscall(428, -100, "/", 1));
    TRY("fsopen", syscall(430, "tmpfs", 0));
    TRY("unshare", unshare(CLONE_NEWUSER));
    TRY("unshare net", unshare(CLONE_NEWNET));
    TRY("clone", clone(nothing, stack + sizeof stack, CLONE_NEWUSER | SIGCHLD, 0));
    unsigned long how[11] = {CLONE_NEWUSER, 0, 0, 0, SIGCHLD};
    TRY("clone3", syscall(435, how, sizeof how));
    TRY("setns", syscall(SYS_setns, open("/proc/1/ns/net", O_RDONLY), 0));
    TRY("chroot", chroot("/tmp"));
    TRY("mknod", mknod("device", S_IFCHR | 0666, (1 << 8) | 1));
    TRY("mknod block", mknod("block", S_IFBLK | 0666, (254 << 8)));
    TRY("memfd", syscall(SYS_memfd_create, "x", 0));
    TRY("setuid", setuid(0));
    TRY("setgid", setgid(0));
    TRY("handle", syscall(SYS_name_to_handle_at, -100, "/", stack, &here, 0));
    TRY("shm", shmget(4242, 4096, IPC_CREAT | 0666));
    TRY("sem", semget(4242, 1, IPC_CREAT | 0666));
    TRY("msg", msgget(4242, IPC_CREAT | 0666));
    TRY("mq", mq_open("/kernelfleet", O_CREAT | O_RDWR, 0666, 0));
    TRY("time", syscall(SYS_clock_settime, 0, stack));
    TRY("reboot", syscall(SYS_reboot, 0, 0, 0, 0));
    TRY("signal another", kill(other, 0));
    TRY("signal its group", kill(-other, 0));
    TRY("signal its thread", syscall(SYS_tgkill, other, other, 0));
    TRY("queue for another", syscall(SYS_rt_sigqueueinfo, other, SIGTERM, memset(stack, 255, 128)));
    for (int pid = 1; pid < 33000; pid++) {
        struct stat about;
        sprintf(text, "/proc/%d", pid);
        if (stat(text, &about) == 0 && about.st_uid != getuid()) { printf("process %d of %d\n", pid, about.st_uid); }
    }
    return 0;
}
"#;

#[test]
fn hostile_code_opens_local_sockets_and_nothing_else() {
    each(&options(), |sandbox| {
        if !compile(sandbox, "probe", PROBE) {
            return;
        }
        let said = say(sandbox, &format!("./probe {}", std::process::id()));
        // Where there is no namespace, that a process exists is seen, and nothing of it.
        let seen = holds(sandbox, "pid-namespace");
        let mut could: Vec<&str> = said.lines().filter(|l| seen || !l.starts_with("process ")).collect();
        could.dedup();
        could.sort_unstable();
        could.dedup();
        assert_eq!(could, ["pair 1", "socket 1"]);
    });
}

#[test]
fn nothing_outside_is_read_written_or_seen() {
    let outside = tempfile::tempdir().unwrap();
    std::fs::set_permissions(outside.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let secret = outside.path().join("secret");
    std::fs::write(&secret, "the secret").unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o666)).unwrap();
    let home = std::env::var("HOME").unwrap_or_else(|_| "/root".into());
    each(&options(), |sandbox| {
        let mut other = Sandbox::start(&Options { namespaces: holds(sandbox, "pid-namespace"), ..options() }).unwrap();
        other.write("theirs", b"the secret").unwrap();
        say(&mut other, "echo the secret > /tmp/theirs || true; chmod -R 777 .");
        let me = std::process::id();
        let mut paths = vec![
            "/etc/shadow".to_owned(),
            "/etc/ssh".into(),
            "/etc/hostname".into(),
            "/root".into(),
            "/boot".into(),
            "/sys".into(),
            "/var/log".into(),
            "/home/user".into(),
            "/dev/mem".into(),
            "/dev/vda".into(),
            "/dev/tty".into(),
            "/dev/mqueue".into(),
            home.clone(),
            secret.display().to_string(),
            outside.path().display().to_string(),
            env!("CARGO_MANIFEST_DIR").to_owned(),
            format!("/proc/{me}/environ"),
            format!("/proc/{me}/cwd/"),
            format!("/proc/{me}/root/"),
            format!("/proc/{me}/maps"),
            "/proc/kmsg".into(),
            "/proc/kcore".into(),
        ];
        if !holds(sandbox, "pid-namespace") {
            // Each in its own folder of the host, whose path is known.
            paths.push(other.folder().join("theirs").display().to_string());
            paths.push("/etc/passwd".into());
            paths.push("/tmp".into());
            paths.push("/dev/shm".into());
        }
        for path in paths {
            let ran = run(sandbox, &format!("ls -A '{path}' && cat '{path}'/* '{path}'"));
            let read = run(sandbox, &format!("cat '{path}' | head -c 100 | wc -c"));
            assert!(
                ran.status != Some(0) && read.output.trim_end().ends_with('0'),
                "{path}: {} {}",
                ran.output,
                read.output
            );
        }
        for path in ["/usr/x", "/bin/x", "/etc/x", "/x", "/proc/x", "/dev/x", "/run/x", "/lib/x", &format!("{home}/x")]
        {
            assert_ne!(run(sandbox, &format!("echo x > {path}")).status, Some(0), "{path}");
        }
        assert_ne!(run(sandbox, &format!("echo x > {}", secret.display())).status, Some(0));
        assert_ne!(run(sandbox, "chmod 777 /usr/bin/env || touch /usr/bin/env").status, Some(0));
        assert_eq!(run(sandbox, "grep -rs 'the secret' /tmp /home /dev/shm /run /var . 2>/dev/null").output, "");
        // Nothing of ours came along: variables, descriptors.
        let environment = say(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '");
        assert_eq!(environment.trim(), "HOME LANG LOGNAME PATH PWD SHELL SHLVL TERM TMPDIR USER _");
        if holds(sandbox, "pid-namespace") {
            let open = say(sandbox, "ls -l /proc/self/fd | awk 'NR > 1 {print $9, $11}'");
            assert!(
                open.lines().all(|l| l.starts_with("0 /dev/null") || l.contains(" pipe:") || l.contains("/proc/")),
                "{open}"
            );
            let uids = say(sandbox, "stat -c %u /proc/[0-9]* | sort -u; id -u");
            assert_eq!(uids.lines().collect::<std::collections::BTreeSet<_>>().len(), 1, "{uids}");
            let count: usize = say(sandbox, "ls -d /proc/[0-9]* | wc -l").trim().parse().unwrap();
            assert!(count < 10, "{count} processes are seen");
        }
        assert!(secret.metadata().unwrap().len() == 10);
        // Abstract sockets have no path that rights could hang on.
        if compile(sandbox, "abstract", ABSTRACT) && compile(&mut other, "abstract", ABSTRACT) {
            let id = other.start("./abstract listen").unwrap();
            until("it listens", || other.output(&id).unwrap().output.contains("listening"));
            assert_ne!(run(sandbox, "./abstract connect").status, Some(0));
            let own = if holds(sandbox, "pid-namespace") { Some(0) } else { Some(1) };
            assert_eq!(run(&mut other, "./abstract connect").status, own, "commands of one sandbox");
        }
    });
}

const ABSTRACT: &str = r#"
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int main(int argc, char** argv) {
    struct sockaddr_un at = {AF_UNIX, "\0kernelfleet-test"};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (argv[1][0] == 'c') return connect(fd, (struct sockaddr*)&at, sizeof at) != 0;
    if (bind(fd, (struct sockaddr*)&at, sizeof at) || listen(fd, 5)) return 1;
    puts("listening");
    fflush(stdout);
    pause();
}
"#;

#[test]
fn a_kill_of_everything_kills_the_sandboxs_own_and_it_goes_on() {
    each(&options(), |sandbox| {
        let job = sandbox.start("sleep 1000").unwrap();
        for command in ["kill -9 -1", "kill -STOP -1", "setsid bash -c 'kill -9 -1'; sleep 0.2; kill -9 $$"] {
            let ran = sandbox.run(command, Duration::from_secs(3)).unwrap();
            assert!(ran.output.len() < 2000, "{}", ran.output);
            assert_eq!(say(sandbox, "echo still here"), "still here\n", "{command}");
        }
        sandbox.kill(&job).unwrap();
    });
}

/// Forks without end, leaves its session each time, ignores what it can.
const BOMB: &str = r#"
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
    for (int s = 1; s < 65; s++) signal(s, SIG_IGN);
    for (;;) { if (fork() == 0) setsid(); }
}
"#;

#[test]
fn a_fork_bomb_is_contained_and_the_server_answers_afterwards() {
    let few = Options { bounds: Bounds { processes: 64, ..Bounds::default() }, ..options() };
    each(&few, |sandbox| {
        let mut commands =
            vec!["bomb() { bomb | bomb & }; bomb; sleep 100".to_owned(), "bomb() { bomb | bomb & }; bomb".into()];
        if compile(sandbox, "bomb", BOMB) {
            commands.extend(["./bomb".to_owned(), "(setsid ./bomb &) ; sleep 0.3".into()]);
        }
        for command in commands {
            let start = Instant::now();
            let ran = sandbox.run(&command, Duration::from_secs(2)).unwrap();
            assert!(ran.output.len() < 40_000);
            let mut again = sandbox.run("echo alive", Duration::from_secs(5)).unwrap();
            if again.timed_out {
                again = sandbox.run("echo alive", Duration::from_secs(5)).unwrap();
            }
            assert!(again.output.contains("alive\n"), "{command}: {ran:?} {again:?}");
            assert!(start.elapsed() < Duration::from_secs(25), "{command} held it for {:?}", start.elapsed());
        }
        sandbox.start("bomb() { bomb | bomb & }; bomb; sleep 100").unwrap();
        sandbox.reset(&BTreeMap::new()).unwrap();
        assert_eq!(say(sandbox, "echo alive"), "alive\n");
    });
}

#[test]
fn a_full_disk_is_the_sandboxs_own_and_leaves_the_server_answering() {
    let small = Bounds { disk: 32 * MIB, file: 24 * MIB, files: 2000, ..Bounds::default() };
    each(&Options { bounds: small, ..options() }, |sandbox| {
        let large = run(sandbox, "head -c 25M /dev/zero > large; ls -s --block-size=M large");
        assert!(large.output.contains("24M large") || large.output.contains("File size limit"), "{large:?}");
        if holds(sandbox, "disk") {
            let full = run(sandbox, "head -c 20M /dev/zero > more");
            assert!(full.status != Some(0) && full.output.contains("No space left"), "{full:?}");
            let many = run(sandbox, "rm more; for i in $(seq 3000); do : > /tmp/$i || break; done 2>&1 | tail -n 1");
            assert!(many.output.contains("No space left"), "{many:?}");
            say(sandbox, "rm -rf /tmp/*; head -c 8M /dev/zero > rest || true");
            sandbox.write("kept", b"old").unwrap_or(());
            let refused = sandbox.write("kept", &vec![1; 8 * MIB as usize]);
            assert!(matches!(&refused, Err(Error::Denied { why, .. }) if why.contains("disk is full")), "{refused:?}");
        } else {
            let full =
                sandbox.run("for i in $(seq 100); do head -c 20M /dev/zero > more$i; sleep 0.1; done", SOON).unwrap();
            assert!(full.output.contains("the files were more than 32 MiB"), "{full:?}");
        }
        let large = sandbox.write("large", &vec![1; 25 * MIB as usize]);
        assert!(matches!(large, Err(Error::Denied { .. })), "{large:?}");
        // Too deep to be walked by name, and closed.
        let deep = "import os\nfor i in range(1500):\n  try: os.mkdir('d' * 200); os.chdir('d' * 200)\n  except OSError: break\nos.chmod('.', 0)\n";
        if !run(sandbox, &format!("command -v /usr/bin/python3 && timeout 5 /usr/bin/python3 -c \"{deep}\""))
            .output
            .starts_with('/')
        {
            println!("skipped: there is no /usr/bin/python3 to make deep folders with");
        }
        sandbox.reset(&BTreeMap::new()).unwrap();
        sandbox.write("fits", &vec![1; MIB as usize]).unwrap();
        assert_eq!(say(sandbox, "ls"), "fits\n");
    });
}

/// Takes memory in children that hold it: private, or shared with nobody.
const HOG: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int argc, char** argv) {
    int children = atoi(argv[1]); size_t bytes = (size_t)atoi(argv[2]) << 20;
    int flags = argv[3][0] == 's' ? MAP_SHARED | MAP_ANONYMOUS : MAP_PRIVATE | MAP_ANONYMOUS;
    for (int i = 0; i < children; i++)
        if (fork() == 0) {
            char* p = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
            if (p == MAP_FAILED) { puts("refused"); fflush(stdout); _exit(1); }
            memset(p, 1, bytes);
            pause();
        }
    pause();
}
"#;

#[test]
fn memory_is_bounded_for_one_process_and_for_all_together() {
    let small = Options { bounds: Bounds { memory: 256 * MIB, ..Bounds::default() }, ..options() };
    each(&small, |sandbox| {
        if !compile(sandbox, "hog", HOG) {
            return;
        }
        let one = sandbox.run("./hog 1 400 private", Duration::from_secs(1)).unwrap();
        assert!(one.output.contains("refused"), "{one:?}");
        for kind in ["private", "shared"] {
            let all = sandbox.run(&format!("./hog 6 100 {kind}"), SOON).unwrap();
            assert!(!all.timed_out && all.output.contains("more than 256 MiB of memory"), "{kind}: {all:?}");
        }
        // Pages that a fork shares are counted once.
        let shared = sandbox.run("./hog 2 100 private & sleep 0.5; kill $!; echo fine", SOON).unwrap();
        assert!(shared.output.ends_with("fine\n"), "{shared:?}");
    });
}

#[test]
fn nothing_is_left_after_a_reset() {
    each(&options(), |sandbox| {
        let (first, second) = (word(), word());
        sandbox.reset(&BTreeMap::from([("kept.txt".to_owned(), b"1".to_vec())])).unwrap();
        if compile(sandbox, "probe", PROBE) {
            run(sandbox, "./probe 1");
        }
        run(
            sandbox,
            "mkdir -p deep/er; echo x | tee deep/er/f ~/f $TMPDIR/f /dev/shm/f .hidden >/dev/null; chmod 0 deep; ln -s / top; export LEFT=1; cd /tmp",
        );
        run(
            sandbox,
            &format!(
                "(setsid setsid nohup sleep {first} &); sleep {first} & disown; (sleep {first} | sleep {first} &)"
            ),
        );
        sandbox.start(&format!("trap '' TERM INT HUP; sleep {second}; sleep {second}")).unwrap();
        until("its processes", || with_word(&first).len() >= 4 && !with_word(&second).is_empty());

        sandbox.reset(&BTreeMap::from([("new.txt".to_owned(), b"2".to_vec())])).unwrap();
        assert_eq!((with_word(&first), with_word(&second)), (vec![], vec![]));
        let files = "find . ~ $TMPDIR /dev/shm -type f -o -type l -o -type p 2>/dev/null; pwd; echo [$LEFT]";
        assert_eq!(run(sandbox, files).output, format!("./new.txt\n{}\n[]\n", sandbox.folder().display()));
        assert_eq!(sandbox.output("1"), Err(Error::NoSuchJob { id: "1".into() }));
        if holds(sandbox, "pid-namespace") {
            assert_eq!(say(sandbox, "cat /proc/sysvipc/* | grep -vc key || true"), "0\n");
        }
        // On the host: no queue, no segment, no file of a user that sandboxes have.
        for kind in ["shm", "sem", "msg"] {
            let table = std::fs::read_to_string(format!("/proc/sysvipc/{kind}")).unwrap_or_default();
            assert!(!table.lines().any(|l| l.split_whitespace().next() == Some("4242")), "{table}");
        }
        for folder in ["/dev/shm", "/tmp", "/dev/mqueue"] {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                assert!(entry.file_name() != "f" && entry.file_name() != "kernelfleet", "{:?}", entry.path());
            }
        }
    });
}

#[test]
fn a_sandbox_that_is_dropped_or_whose_keeper_is_killed_leaves_nothing() {
    each(&options(), |sandbox| {
        let word = word();
        let namespaces = holds(sandbox, "pid-namespace");
        let mut other = Sandbox::start(&Options { namespaces, ..options() }).unwrap();
        run(&mut other, &format!("(setsid sleep {word} &)"));
        let folder = other.folder().to_owned();
        until("its process", || !with_word(&word).is_empty());
        drop(other);
        assert_eq!(with_word(&word), Vec::<i32>::new());
        assert!(namespaces || !folder.exists(), "{}", folder.display());
        if namespaces {
            run(sandbox, &format!("(setsid sleep {word} &)"));
            // While it turns from the shell's child into what it runs it may be seen, and then not.
            let mut seen = Vec::new();
            until("its process", || {
                let before = std::mem::replace(&mut seen, with_word(&word));
                !seen.is_empty() && seen == before
            });
            let mut at = seen[0];
            while let Some(parent) = parent(at).filter(|p| *p != i32::try_from(std::process::id()).unwrap()) {
                at = parent;
            }
            // SAFETY: a signal to the keeper, a child of this test.
            unsafe { libc::kill(at, libc::SIGKILL) };
            until("the end of all", || with_word(&word).is_empty());
            assert!(matches!(sandbox.run("echo", SOON), Err(Error::Gone(_))));
            assert!(matches!(sandbox.reset(&BTreeMap::new()), Err(Error::Gone(_))));
        }
    });
}

/// Variable that turns the test below into an agent: the word that its sandbox's process is known by.
const AGENT: &str = "KERNELFLEET_TEST_AGENT";

#[test]
fn an_agent_that_is_killed_leaves_nothing() {
    if let Ok(word) = std::env::var(AGENT) {
        let namespaces = !word.starts_with('-');
        let mut sandbox = Sandbox::start(&Options { namespaces, ..options() }).unwrap();
        let word = word.trim_start_matches('-');
        run(&mut sandbox, &format!("(setsid sleep {word} &)"));
        sandbox.start(&format!("sleep {word}")).unwrap();
        // In the middle of a command, which nobody will wait for.
        sandbox.run(&format!("sleep {word}"), Duration::from_secs(600)).unwrap();
    }
    for mark in ["", "-"] {
        let word = word();
        let mut agent = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "an_agent_that_is_killed_leaves_nothing"])
            .env(AGENT, format!("{mark}{word}"))
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // Three `sleep`, and the shells that have the word in their own arguments.
        until("its processes", || with_word(&word).len() >= 3);
        agent.kill().unwrap();
        agent.wait().unwrap();
        until("the end of all", || with_word(&word).is_empty());
    }
}

fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}

/// Sends a line to the socket of the agent and prints the answer.
const CLIENT: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
int main(void) {
    struct sockaddr_un at = {AF_UNIX};
    strcpy(at.sun_path, getenv("KERNELFLEET_SOCKET"));
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr*)&at, sizeof at)) { perror("connect"); return 1; }
    char text[64];
    write(fd, "verify\n", 7);
    long n = read(fd, text, 64);
    fwrite(text, 1, n, stdout);
    return 0;
}
"#;

#[test]
fn the_agents_socket_is_reachable_from_inside_and_survives_a_reset() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
    let path = folder.path().join("tools.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut line = String::new();
            std::io::BufReader::new(&stream).read_line(&mut line).unwrap();
            if line == "end\n" {
                return;
            }
            stream.write_all(format!("heard {line}").as_bytes()).unwrap();
        }
    });
    each(&Options { socket: Some(path.clone()), ..options() }, |sandbox| {
        for _ in 0..2 {
            if compile(sandbox, "client", CLIENT) {
                assert_eq!(say(sandbox, "./client"), "heard verify\n");
            }
            assert_ne!(run(sandbox, "rm -f $KERNELFLEET_SOCKET; ln -s x $KERNELFLEET_SOCKET").status, Some(0));
            sandbox.reset(&BTreeMap::new()).unwrap();
        }
    });
    std::os::unix::net::UnixStream::connect(&path).unwrap().write_all(b"end\n").unwrap();
    agent.join().unwrap();
}

#[test]
fn a_toolchain_is_readable_wherever_it_lies_and_never_writable() {
    let folder = tempfile::tempdir().unwrap();
    let closed = folder.path().join("closed");
    let tools = closed.join("tools");
    std::fs::create_dir_all(&tools).unwrap();
    std::fs::write(tools.join("greet"), "#!/bin/sh\necho hello\n").unwrap();
    std::fs::set_permissions(tools.join("greet"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(closed.join("beside"), "secret").unwrap();
    std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700)).unwrap();
    let options = Options { read: vec![tools.clone()], path: vec![tools.clone()], ..options() };
    each(&options, |sandbox| {
        if Probe::here().root && !holds(sandbox, "pid-namespace") {
            // It is not copied, so its rights are what they are, and that is said.
            assert!(sandbox.notes().iter().any(|n| n.contains("is closed to others")), "{:?}", sandbox.notes());
        } else {
            assert_eq!(say(sandbox, "greet"), "hello\n");
        }
        let beside = closed.join("beside");
        assert_ne!(run(sandbox, &format!("cat {}", beside.display())).status, Some(0));
        let mut tries = vec!["echo x > new", "rm greet", "echo x >> greet", "ln -s x y"];
        if holds(sandbox, "pid-namespace") || holds(sandbox, "users") {
            tries.push("chmod 777 greet");
        }
        for try_it in tries {
            assert_ne!(run(sandbox, &format!("(cd {} && {try_it})", tools.display())).status, Some(0), "{try_it}");
        }
    });
}

#[test]
fn all_of_this_holds_without_root() {
    const INNER: &str = "KERNELFLEET_TEST_INNER";
    if std::env::var_os(INNER).is_some() || !Probe::here().root {
        println!("skipped: this is the run without root");
        return;
    }
    let test = std::env::current_exe().unwrap();
    for path in [&test, Path::new(env!("CARGO_BIN_EXE_kernelfleet"))] {
        if !kernelfleet::sandbox::world_readable(path) {
            println!("skipped: {} can't be run by others", path.display());
            return;
        }
    }
    use std::os::unix::process::CommandExt;
    let user = 12_345;
    let output = std::process::Command::new(&test)
        .args(["--test-threads=2", "--nocapture"])
        .env(INNER, "1")
        .env("HOME", "/nonexistent")
        .uid(user)
        .gid(user)
        .current_dir("/")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    for line in said
        .lines()
        .filter(|l| l.starts_with("isolation") || l.starts_with("skipped"))
        .collect::<std::collections::BTreeSet<_>>()
    {
        println!("as {user}: {line}");
    }
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
}
