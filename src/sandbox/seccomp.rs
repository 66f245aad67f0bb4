//! System call filters, as data: one list of refusals a role, assembled into a classic BPF program.
//!
//! Knows numbers of system calls and the filter's instructions. Must not know who runs under a filter. Every
//! program kills a foreign ABI, hides io_uring and `clone3` (so that libc falls back to `clone`, whose flags can
//! be read), and then refuses what the role has no use for. What is not named is allowed: the files and the
//! signals that a child may reach are Landlock's and the user's business.

use libc::{c_long, sock_filter};

const LD_W_ABS: u16 = 0x20;
const JEQ_K: u16 = 0x15;
const JGE_K: u16 = 0x35;
const JSET_K: u16 = 0x45;
const RET_K: u16 = 0x06;
const ALLOW: u32 = 0x7fff_0000;
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const TRAP: u32 = 0x0003_0000;
/// Offsets in `struct seccomp_data`.
const NR: u32 = 0;
const ARCH: u32 = 4;
const ARG0: u32 = 16;
const ARG1: u32 = 24;

#[cfg(target_arch = "x86_64")]
const AUDIT_ARCH: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const AUDIT_ARCH: u32 = 0xC000_00B7;
/// System calls of the x32 ABI carry this bit.
const X32: u32 = 0x4000_0000;

/// What no child has a use for: other processes' memory, kernel features with a large surface, mounts, keys.
const NOBODY: &[c_long] = &[
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kcmp,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_keyctl,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsmount,
    libc::SYS_fsconfig,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_fanotify_init,
    libc::SYS_kexec_file_load,
    libc::SYS_syslog,
    libc::SYS_vhangup,
    libc::SYS_move_pages,
    libc::SYS_migrate_pages,
    libc::SYS_process_mrelease,
    libc::SYS_unshare,
    libc::SYS_setns,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_quotactl,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_mq_open,
    libc::SYS_msgget,
    libc::SYS_semget,
    libc::SYS_shmget,
    libc::SYS_setuid,
    libc::SYS_setgid,
    libc::SYS_setreuid,
    libc::SYS_setregid,
    libc::SYS_setresuid,
    libc::SYS_setresgid,
    libc::SYS_setgroups,
    libc::SYS_personality,
];

/// Features that a child may probe for; they look as if the kernel had none.
const ABSENT: &[c_long] =
    &[libc::SYS_clone3, libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// Ways to leave a session or to signal others: for children that start no processes.
const SIGNALS: &[c_long] = &[
    libc::SYS_setsid,
    libc::SYS_setpgid,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
];
/// Command of `fcntl` that chooses the signal for news of a file. (libc has no name for it.)
const F_SETSIG: u32 = 10;

/// Flags of `clone` that make a namespace: in one of its own a child would be root again.
const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET;

/// Programs are started by name of these.
const EXEC: &[c_long] = &[libc::SYS_execve, libc::SYS_execveat];

#[derive(Clone, Copy)]
struct Role {
    /// May start processes.
    processes: bool,
    /// May start a program in its place. A filter that is laid on before the program itself starts must allow that one.
    programs: bool,
    /// May open local sockets; others it never may.
    unix: bool,
    /// Is stopped whenever it isn't asked, and so may signal itself at no later time: a timer that sends SIGCONT would wake it.
    stopped: bool,
    /// Runs whatever an agent thinks of: no memory that is in no process and in no folder, and no limits of others.
    anything: bool,
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn refuse(program: &mut Vec<sock_filter>, call: c_long, errno: i32) {
    program.push(instruction(JEQ_K, 0, 1, number(call)));
    program.push(instruction(RET_K, 0, 0, ERRNO | number(c_long::from(errno))));
}

/// Refuses a call or allows it by the low word of one argument. `test` jumps over nothing to refuse, over one instruction to allow.
fn decide_by(program: &mut Vec<sock_filter>, call: c_long, argument: u32, test: sock_filter) {
    program.extend([
        instruction(JEQ_K, 0, 4, number(call)),
        instruction(LD_W_ABS, 0, 0, argument),
        test,
        instruction(RET_K, 0, 0, ERRNO | number(c_long::from(libc::EPERM))),
        instruction(RET_K, 0, 0, ALLOW),
    ]);
}

fn number(value: c_long) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn program(role: Role) -> Vec<sock_filter> {
    let mut program = vec![
        instruction(LD_W_ABS, 0, 0, ARCH),
        instruction(JEQ_K, 1, 0, AUDIT_ARCH),
        instruction(RET_K, 0, 0, KILL_PROCESS),
        instruction(LD_W_ABS, 0, 0, NR),
        instruction(JGE_K, 0, 1, X32),
        instruction(RET_K, 0, 0, KILL_PROCESS),
    ];
    for call in ABSENT {
        refuse(&mut program, *call, libc::ENOSYS);
    }
    for call in NOBODY {
        refuse(&mut program, *call, libc::EPERM);
    }
    #[cfg(target_arch = "x86_64")]
    for call in [libc::SYS_iopl, libc::SYS_ioperm, libc::SYS_modify_ldt] {
        refuse(&mut program, call, libc::EPERM);
    }
    if !role.programs {
        for call in EXEC {
            refuse(&mut program, *call, libc::EPERM);
        }
    }
    if !role.processes {
        for call in SIGNALS {
            refuse(&mut program, *call, libc::EPERM);
        }
        #[cfg(target_arch = "x86_64")]
        for call in [libc::SYS_fork, libc::SYS_vfork] {
            refuse(&mut program, call, libc::EPERM);
        }
        // A clone that makes no thread is a fork.
        let thread = instruction(JSET_K, 1, 0, number(c_long::from(libc::CLONE_THREAD)));
        decide_by(&mut program, libc::SYS_clone, ARG0, thread);
    }
    if role.stopped {
        refuse(&mut program, libc::SYS_timer_create, libc::EPERM);
        decide_by(&mut program, libc::SYS_fcntl, ARG1, instruction(JEQ_K, 0, 1, F_SETSIG));
    }
    if role.processes {
        let namespace = instruction(JSET_K, 0, 1, number(c_long::from(NAMESPACES)));
        decide_by(&mut program, libc::SYS_clone, ARG0, namespace);
    }
    if role.anything {
        for call in [libc::SYS_memfd_create, libc::SYS_memfd_secret] {
            refuse(&mut program, call, libc::ENOSYS);
        }
        // Limits of the caller itself, and pairs of local sockets.
        for (call, argument) in [(libc::SYS_prlimit64, 0), (libc::SYS_socketpair, libc::AF_UNIX)] {
            decide_by(&mut program, call, ARG0, instruction(JEQ_K, 1, 0, number(c_long::from(argument))));
        }
    }
    // Sockets: local ones or none, and pairs.
    let family = if role.unix { number(c_long::from(libc::AF_UNIX)) } else { u32::MAX };
    decide_by(&mut program, libc::SYS_socket, ARG0, instruction(JEQ_K, 1, 0, family));
    program.push(instruction(RET_K, 0, 0, ALLOW));
    program
}

/// A recording of a candidate: Python, no processes, no sockets.
#[must_use]
pub fn recorder() -> Vec<u8> {
    bytes(&program(Role { processes: false, programs: false, unix: false, stopped: true, anything: false }))
}

/// A candidate's own process on a card: as a recording, but the driver may open local sockets.
#[must_use]
pub fn process_cuda() -> Vec<u8> {
    bytes(&program(Role { processes: false, programs: false, unix: true, stopped: false, anything: false }))
}

/// A compiler on hostile sources.
#[must_use]
pub fn builder() -> Vec<u8> {
    bytes(&program(Role { processes: true, programs: true, unix: false, stopped: false, anything: false }))
}

/// A candidate's library on the CPU: threads, no processes, no sockets. The runner forbids programs itself, with
/// `forbid_programs`, before it loads the library.
#[must_use]
pub fn runner_cpu() -> Vec<u8> {
    bytes(&program(Role { processes: false, programs: true, unix: false, stopped: true, anything: false }))
}

/// The GPU runner: the driver may open local sockets.
#[must_use]
pub fn runner_cuda() -> Vec<u8> {
    bytes(&program(Role { processes: false, programs: true, unix: true, stopped: false, anything: false }))
}

/// As `runner_cuda`, but what it refuses arrives as a signal first: for a process that watches (`refused::watch`).
#[must_use]
pub fn runner_cuda_told() -> Vec<u8> {
    let mut program = program(Role { processes: false, programs: true, unix: true, stopped: false, anything: false });
    let refusal = number(c_long::from(libc::EPERM));
    for i in &mut program {
        if i.code == RET_K && i.k == ERRNO | refusal {
            i.k = TRAP | refusal;
        }
    }
    bytes(&program)
}

/// A reference host: it compiles, so it starts processes.
#[must_use]
pub fn host() -> Vec<u8> {
    bytes(&program(Role { processes: true, programs: true, unix: true, stopped: false, anything: false }))
}

/// An agent's commands: shells, compilers, interpreters, and the server that starts them.
#[must_use]
pub fn sandbox() -> Vec<u8> {
    bytes(&program(Role { processes: true, programs: true, unix: true, stopped: false, anything: true }))
}

/// Takes from this process, all its threads included, the right to start programs, and from others of its user
/// the right to read its memory. For good.
///
/// # Errors
/// When the kernel refuses the filter.
pub fn forbid_programs() -> std::io::Result<()> {
    let mut program = vec![instruction(LD_W_ABS, 0, 0, NR)];
    for call in EXEC {
        refuse(&mut program, *call, libc::EPERM);
    }
    program.push(instruction(RET_K, 0, 0, ALLOW));
    let filter = libc::sock_fprog { len: u16::try_from(program.len()).unwrap_or(0), filter: program.as_mut_ptr() };
    // SAFETY: the first two calls take numbers; the third reads `filter` and the program that it points to, both alive.
    unsafe {
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
            || libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) < 0
            || libc::syscall(
                libc::SYS_seccomp,
                libc::SECCOMP_SET_MODE_FILTER,
                libc::SECCOMP_FILTER_FLAG_TSYNC,
                &raw const filter,
            ) != 0
        {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The program as an array of `struct sock_filter`, in this machine's byte order.
fn bytes(program: &[sock_filter]) -> Vec<u8> {
    program
        .iter()
        .flat_map(|i| {
            let mut raw = [0u8; 8];
            raw[..2].copy_from_slice(&i.code.to_ne_bytes());
            raw[2] = i.jt;
            raw[3] = i.jf;
            raw[4..].copy_from_slice(&i.k.to_ne_bytes());
            raw
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a filter as the kernel would: what becomes of call `nr` with first argument `arg0`.
    fn decide(program: &[sock_filter], arch: u32, nr: u32, arg0: u32) -> u32 {
        let (mut at, mut word) = (0, 0);
        loop {
            let i = program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { i.jt } else { i.jf });
            match i.code {
                LD_W_ABS => {
                    word = match i.k {
                        NR => nr,
                        ARCH => arch,
                        // No filter looks at both.
                        ARG0 | ARG1 => arg0,
                        other => unreachable!("offset {other}"),
                    }
                }
                JEQ_K => at += jump(word == i.k),
                JGE_K => at += jump(word >= i.k),
                JSET_K => at += jump(word & i.k != 0),
                RET_K => return i.k,
                other => unreachable!("code {other}"),
            }
        }
    }

    const ROLES: [Role; 7] = [
        Role { processes: false, programs: false, unix: false, stopped: true, anything: false },
        Role { processes: false, programs: true, unix: false, stopped: true, anything: false },
        Role { processes: false, programs: true, unix: true, stopped: false, anything: false },
        Role { processes: true, programs: true, unix: false, stopped: false, anything: false },
        Role { processes: true, programs: true, unix: true, stopped: false, anything: false },
        Role { processes: true, programs: true, unix: true, stopped: false, anything: true },
        Role { processes: false, programs: false, unix: true, stopped: false, anything: false },
    ];

    fn call(role: Role, nr: c_long, arg0: i32) -> u32 {
        decide(&program(role), AUDIT_ARCH, number(nr), arg0.cast_unsigned())
    }

    fn refused(errno: i32) -> u32 {
        ERRNO | errno.cast_unsigned()
    }

    #[test]
    fn every_role_hides_what_no_child_has_a_use_for() {
        for role in ROLES {
            for nr in NOBODY {
                assert_eq!(call(role, *nr, 0), refused(libc::EPERM), "{nr}");
            }
            for nr in ABSENT {
                assert_eq!(call(role, *nr, 0), refused(libc::ENOSYS), "{nr}");
            }
            for nr in
                [libc::SYS_read, libc::SYS_mmap, libc::SYS_openat, libc::SYS_ioctl, libc::SYS_futex, libc::SYS_tgkill]
            {
                assert_eq!(call(role, nr, 0), ALLOW, "{nr}");
            }
            assert_eq!(decide(&program(role), 0x4000_0003, 11, 0), KILL_PROCESS, "a 32-bit call");
            assert_eq!(decide(&program(role), AUDIT_ARCH, X32 | 59, 0), KILL_PROCESS, "a call of the x32 ABI");
        }
    }

    #[test]
    fn what_is_stopped_has_no_clock_that_wakes_it() {
        for program in [recorder(), runner_cpu()] {
            let program: Vec<sock_filter> = program
                .chunks(8)
                .map(|i| {
                    let half = |at: usize| u16::from_ne_bytes([i[at], i[at + 1]]);
                    instruction(half(0), i[2], i[3], u32::from_ne_bytes([i[4], i[5], i[6], i[7]]))
                })
                .collect();
            assert_eq!(decide(&program, AUDIT_ARCH, number(libc::SYS_timer_create), 0), refused(libc::EPERM));
            assert_eq!(decide(&program, AUDIT_ARCH, number(libc::SYS_fcntl), F_SETSIG), refused(libc::EPERM));
            for usual in [libc::F_DUPFD_CLOEXEC, libc::F_SETFL, libc::F_GETFD, libc::F_ADD_SEALS] {
                assert_eq!(decide(&program, AUDIT_ARCH, number(libc::SYS_fcntl), number(usual.into())), ALLOW);
            }
        }
    }

    #[test]
    fn only_roles_with_processes_start_them_and_none_makes_a_namespace() {
        for role in ROLES {
            let may = if role.processes { ALLOW } else { refused(libc::EPERM) };
            for (nr, arg0) in [(libc::SYS_kill, 1), (libc::SYS_setsid, 0), (libc::SYS_clone, libc::SIGCHLD)] {
                assert_eq!(call(role, nr, arg0), may, "{nr}");
            }
            let may = if role.programs { ALLOW } else { refused(libc::EPERM) };
            for nr in [libc::SYS_execve, libc::SYS_execveat] {
                assert_eq!(call(role, nr, 0), may, "{nr}");
            }
            let thread = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_SIGHAND | libc::CLONE_THREAD;
            assert_eq!(call(role, libc::SYS_clone, thread), ALLOW);
            for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNET, libc::CLONE_NEWPID, libc::CLONE_NEWNS] {
                assert_eq!(call(role, libc::SYS_clone, flag | libc::SIGCHLD), refused(libc::EPERM));
            }
        }
    }

    #[test]
    fn sockets_are_local_or_none() {
        for role in ROLES {
            let unix = if role.unix { ALLOW } else { refused(libc::EPERM) };
            assert_eq!(call(role, libc::SYS_socket, libc::AF_UNIX), unix);
            for family in
                [libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK, libc::AF_PACKET, libc::AF_VSOCK, libc::AF_ALG]
            {
                assert_eq!(call(role, libc::SYS_socket, family), refused(libc::EPERM), "{family}");
            }
            assert_eq!(call(role, libc::SYS_socketpair, libc::AF_UNIX), ALLOW);
        }
    }

    #[test]
    fn an_agents_commands_hold_no_hidden_memory_and_change_no_limits_of_others() {
        let role = ROLES[5];
        assert_eq!(call(role, libc::SYS_memfd_create, 0), refused(libc::ENOSYS));
        assert_eq!(call(role, libc::SYS_memfd_secret, 0), refused(libc::ENOSYS));
        assert_eq!(call(role, libc::SYS_prlimit64, 0), ALLOW);
        assert_eq!(call(role, libc::SYS_prlimit64, 1), refused(libc::EPERM));
        assert_eq!(call(role, libc::SYS_socketpair, libc::AF_INET), refused(libc::EPERM));
        assert_eq!(call(ROLES[4], libc::SYS_memfd_create, 0), ALLOW);
    }
}
