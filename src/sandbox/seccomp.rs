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
/// Offsets in `struct seccomp_data`.
const NR: u32 = 0;
const ARCH: u32 = 4;
const ARG0: u32 = 16;

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
const SIGNALS: &[c_long] = &[libc::SYS_setsid, libc::SYS_setpgid, libc::SYS_kill, libc::SYS_tkill];

/// Programs are started by name of these.
const EXEC: &[c_long] = &[libc::SYS_execve, libc::SYS_execveat];

#[derive(Clone, Copy)]
struct Role {
    /// May start processes and programs.
    processes: bool,
    /// May open local sockets; others it never may.
    unix: bool,
}

fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

fn refuse(program: &mut Vec<sock_filter>, call: c_long, errno: i32) {
    program.push(instruction(JEQ_K, 0, 1, number(call)));
    program.push(instruction(RET_K, 0, 0, ERRNO | number(c_long::from(errno))));
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
    if !role.processes {
        for call in SIGNALS.iter().chain(EXEC) {
            refuse(&mut program, *call, libc::EPERM);
        }
        #[cfg(target_arch = "x86_64")]
        for call in [libc::SYS_fork, libc::SYS_vfork] {
            refuse(&mut program, call, libc::EPERM);
        }
        // A clone that makes no thread is a fork.
        program.extend([
            instruction(JEQ_K, 0, 4, number(libc::SYS_clone)),
            instruction(LD_W_ABS, 0, 0, ARG0),
            instruction(JSET_K, 1, 0, number(c_long::from(libc::CLONE_THREAD))),
            instruction(RET_K, 0, 0, ERRNO | number(c_long::from(libc::EPERM))),
            instruction(RET_K, 0, 0, ALLOW),
        ]);
    }
    // Sockets: local ones or none, and pairs.
    let family = if role.unix { number(c_long::from(libc::AF_UNIX)) } else { u32::MAX };
    program.extend([
        instruction(JEQ_K, 0, 4, number(libc::SYS_socket)),
        instruction(LD_W_ABS, 0, 0, ARG0),
        instruction(JEQ_K, 1, 0, family),
        instruction(RET_K, 0, 0, ERRNO | number(c_long::from(libc::EPERM))),
        instruction(RET_K, 0, 0, ALLOW),
        instruction(RET_K, 0, 0, ALLOW),
    ]);
    program
}

/// A recording of a candidate: Python, no processes, no sockets.
#[must_use]
pub fn recorder() -> Vec<u8> {
    bytes(&program(Role { processes: false, unix: false }))
}

/// A compiler on hostile sources.
#[must_use]
pub fn builder() -> Vec<u8> {
    bytes(&program(Role { processes: true, unix: false }))
}

/// A candidate's library on the CPU: threads, no processes, no sockets.
#[must_use]
pub fn runner_cpu() -> Vec<u8> {
    bytes(&program(Role { processes: false, unix: false }))
}

/// The GPU runner: the driver may open local sockets.
#[must_use]
pub fn runner_cuda() -> Vec<u8> {
    bytes(&program(Role { processes: false, unix: true }))
}

/// A reference host: it compiles, so it starts processes.
#[must_use]
pub fn host() -> Vec<u8> {
    bytes(&program(Role { processes: true, unix: true }))
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
