//! Confinement of hostile children: users, files, system calls, limits.
//!
//! Knows how a process gives up its rights for good. Must not know what runs in it. The order in the child:
//! new session, death with its parent, limits, user, no new privileges, Landlock, seccomp; after the last step
//! only the program itself runs. Everything that needs memory is made before the fork.
//!
//! The agent's sandbox is built on it: `client` (in the agent), `keeper` (starts and ends episodes), `episode` (the
//! confined server: `jobs`, `files`, `export`). `docs/sandbox.md` says what holds by what.

pub mod client;
mod cut;
mod episode;
mod export;
mod files;
mod jobs;
pub mod keeper;
pub mod refused;
mod root;
pub mod seccomp;
mod tree;
mod wire;
pub mod workspace;

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
    Scope,
};
use serde_json::{Value, json};

/// Users that children run as where we may switch: above those of people and services, below `nobody`.
const FIRST_USER: u32 = 61_000;
const USERS: u32 = 4_000;

/// Resource limits of a child. `None` leaves what is inherited.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub address_space: Option<u64>,
    /// Private writable memory, bytes.
    pub data: Option<u64>,
    /// Largest file, bytes.
    pub fsize: u64,
    pub nproc: Option<u64>,
    pub nofile: u64,
    /// Processor seconds.
    pub cpu: Option<u64>,
}

/// What a child may do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Confinement {
    /// User and group to become; `None` where the host does not allow it.
    pub user: Option<(u32, u32)>,
    /// Hierarchies it may read and execute from.
    pub read: Vec<PathBuf>,
    /// Hierarchies and devices it may also write.
    pub write: Vec<PathBuf>,
    /// A raw array of `sock_filter`.
    pub seccomp: Option<Vec<u8>>,
    pub limits: Limits,
    pub cwd: Option<PathBuf>,
    pub env: BTreeMap<String, String>,
}

/// What this host lets a child be confined by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probe {
    pub root: bool,
    /// Version of Landlock, 0 where there is none.
    pub landlock: i32,
}

impl Probe {
    #[must_use]
    pub fn here() -> Self {
        // SAFETY: plain system calls without memory; the first asks for the version only.
        let (landlock, uid) = unsafe {
            (libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, 1u32), libc::geteuid())
        };
        Self { root: uid == 0, landlock: i32::try_from(landlock).unwrap_or(0).max(0) }
    }
}

/// A user that no process has now; `None` when we may not switch.
#[must_use]
pub fn new_user() -> Option<(u32, u32)> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    if !Probe::here().root {
        return None;
    }
    // Two judges on one machine begin at different places; the look at the processes keeps them apart.
    let base = std::process::id().wrapping_mul(97);
    let taken: HashSet<u32> = std::fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.metadata().ok().map(|m| m.uid()))
        .collect();
    (0..USERS).find_map(|_| {
        let uid = FIRST_USER + (base.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed))) % USERS;
        (!taken.contains(&uid)).then_some((uid, uid))
    })
}

/// Whether any user can read this file or enter this folder, all folders above it included.
#[must_use]
pub fn world_readable(path: &Path) -> bool {
    let Ok(path) = path.canonicalize() else { return false };
    path.ancestors().enumerate().all(|(depth, part)| {
        std::fs::metadata(part).is_ok_and(|m| {
            let need = if depth == 0 && !m.is_dir() { 0o4 } else { 0o1 };
            m.permissions().mode() & need == need
        })
    })
}

impl Confinement {
    /// With a user of its own where the host allows it.
    #[must_use]
    pub fn new_user() -> Self {
        Self { user: new_user(), ..Self::default() }
    }

    /// Gives a folder to the child's user, closed to others. Where we may not give away (root in a container without
    /// `CAP_CHOWN`), it stays ours and is the group's of the child, which is nobody else's either.
    ///
    /// # Errors
    /// When the folder can't be changed.
    pub fn own(&self, folder: &Path) -> io::Result<()> {
        std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))?;
        let Some((uid, gid)) = self.user else { return Ok(()) };
        match std::os::unix::fs::chown(folder, Some(uid), Some(gid)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => lend(folder, gid),
            done => done,
        }
    }

    /// Empties a folder that was the child's after the child's end, as the child's user where root may not look into what
    /// others have closed (in a container without `CAP_DAC_OVERRIDE`).
    pub fn empty(&self, folder: &Path) {
        let Some((uid, gid)) = self.user.filter(|_| !overrides()) else { return };
        let theirs = |path: &PathBuf| std::fs::symlink_metadata(path).is_ok_and(|m| m.uid() == uid);
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).filter(theirs);
        let entries: Vec<PathBuf> = entries.collect();
        if !entries.is_empty() {
            let _ = Command::new("/bin/rm").args(["-rf", "--"]).args(entries).uid(uid).gid(gid).status();
        }
    }

    /// What will hold of a child made by `apply`.
    #[must_use]
    pub fn holds(&self) -> Vec<String> {
        let mut found = vec!["limits".to_owned()];
        if Probe::here().landlock > 0 {
            found.push("landlock".into());
        }
        if self.seccomp.is_some() {
            found.push("seccomp".into());
        }
        if self.user.is_some() {
            found.push("users".into());
        }
        found
    }

    /// The record that a zygote applies after its fork (`docs/interfaces.md`).
    #[must_use]
    pub fn to_wire(&self, threads: usize) -> Value {
        json!({
            "confine": {
                "uid": self.user.map(|u| u.0), "gid": self.user.map(|u| u.1),
                "seccomp": self.seccomp.as_deref().map(base64),
                "read": self.read, "write": self.write,
                "limits": {
                    "as": self.limits.address_space, "data": self.limits.data, "fsize": self.limits.fsize,
                    "nproc": self.limits.nproc, "nofile": self.limits.nofile, "cpu": self.limits.cpu, "core": 0,
                },
            },
            "cwd": self.cwd, "env": self.env, "threads": threads,
        })
    }

    /// The rules on files; `None` where the kernel has none.
    fn ruleset(&self) -> io::Result<Option<OwnedFd>> {
        let other = |e: landlock::RulesetError| io::Error::other(e.to_string());
        if Probe::here().landlock == 0 {
            return Ok(None);
        }
        let abi = ABI::V6;
        let mut ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(abi))
            .map_err(other)?
            .scope(Scope::from_all(abi))
            .map_err(other)?
            .create()
            .map_err(other)?;
        for (paths, access) in [(&self.read, AccessFs::from_read(abi)), (&self.write, AccessFs::from_all(abi))] {
            for path in paths {
                let Ok(fd) = PathFd::new(path) else { continue };
                let whole = std::fs::metadata(path).is_ok_and(|m| m.is_dir());
                let access = if whole { access } else { access & AccessFs::from_file(abi) };
                ruleset = ruleset.add_rule(PathBeneath::new(fd, access)).map_err(other)?;
            }
        }
        Ok(ruleset.into())
    }

    /// Confines what `command` will start. The environment is replaced by the confinement's. The child dies with the
    /// thread that starts it, so that must be one that lives as long.
    ///
    /// # Errors
    /// When the rules can't be made; nothing is started then.
    pub fn apply(&self, command: &mut Command) -> io::Result<()> {
        command.env_clear().envs(&self.env);
        if let Some(cwd) = &self.cwd {
            command.current_dir(cwd);
        }
        let prepared = self.prepared()?;
        // SAFETY: the closure makes system calls only, on memory made before the fork.
        unsafe {
            command.pre_exec(move || prepared.confine_self());
        }
        Ok(())
    }

    /// Confines the process that calls, which must have one thread and lead no session.
    ///
    /// # Errors
    /// When a step fails; some may have been taken then, so the process must end.
    pub fn apply_here(&self) -> io::Result<()> {
        self.prepared()?.confine_self()
    }

    fn prepared(&self) -> io::Result<Prepared> {
        let limits: Vec<(libc::__rlimit_resource_t, u64)> = [
            (libc::RLIMIT_AS, self.limits.address_space),
            (libc::RLIMIT_DATA, self.limits.data),
            (libc::RLIMIT_FSIZE, Some(self.limits.fsize)),
            (libc::RLIMIT_NPROC, self.limits.nproc),
            (libc::RLIMIT_NOFILE, Some(self.limits.nofile)),
            (libc::RLIMIT_CPU, self.limits.cpu),
            (libc::RLIMIT_CORE, Some(0)),
        ]
        .into_iter()
        .filter_map(|(what, value)| Some((what, value?)))
        .collect();
        // The kernel copies the program; its memory must be aligned as `sock_filter` is.
        let program: Vec<u64> = self
            .seccomp
            .as_deref()
            .unwrap_or_default()
            .chunks_exact(8)
            .map(|c| u64::from_ne_bytes([c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7]]))
            .collect();
        Ok(Prepared { limits, user: self.user, ruleset: self.ruleset()?, program })
    }
}

/// A confinement whose memory is made: what is left is system calls.
struct Prepared {
    limits: Vec<(libc::__rlimit_resource_t, u64)>,
    user: Option<(u32, u32)>,
    ruleset: Option<OwnedFd>,
    program: Vec<u64>,
}

impl Prepared {
    fn confine_self(&self) -> io::Result<()> {
        confine_self(&self.limits, self.user, self.ruleset.as_ref(), &self.program)
    }
}

/// Gives a command its end of a socket as descriptor 3.
pub fn descriptor_three(command: &mut Command, end: OwnedFd) {
    // SAFETY: the closure only calls dup2 and fcntl, which are async-signal-safe, on descriptors it owns.
    unsafe {
        command.pre_exec(move || {
            let fd = end.as_raw_fd();
            let done = if fd == 3 { libc::fcntl(3, libc::F_SETFD, 0) } else { libc::dup2(fd, 3) };
            if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
    }
}

/// Opens what a hostile process may have left in place of a file: never what a link names, and nothing that isn't a plain file.
///
/// # Errors
/// When there is no such file.
pub fn plain_file(path: &Path) -> io::Result<std::fs::File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC;
    let file = std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    Ok(file)
}

/// Lets a command run with what processors others leave: for work that nobody's clock is to notice. Before `apply`.
pub fn in_background(command: &mut Command) {
    // SAFETY: the closure only calls setpriority, which is async-signal-safe; a refusal leaves all as it was.
    unsafe {
        command.pre_exec(|| {
            libc::setpriority(libc::PRIO_PROCESS, 0, 19);
            Ok(())
        });
    }
}

fn checked(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// `_LINUX_CAPABILITY_VERSION_3`: effective, permitted and inheritable, each as a low and a high word.
const CAPABILITY_VERSION: u32 = 0x2008_0522;

/// Root without its powers: for programs that only root can read. Runs in the forked child.
fn drop_capabilities() -> io::Result<()> {
    drop_bounding()?;
    keep_capabilities(&[])
}

/// Leaves of the capabilities held those that are named by number, all below 32; makes system calls only.
fn keep_capabilities(kept: &[u32]) -> io::Result<()> {
    let header = [CAPABILITY_VERSION, 0];
    let mut sets = [0u32; 6];
    let mask = kept.iter().fold(0, |mask, capability| mask | 1u32 << capability);
    // SAFETY: system calls on two arrays of the sizes that version 3 has.
    unsafe {
        if libc::syscall(libc::SYS_capget, header.as_ptr(), sets.as_mut_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
        let sets = [sets[0] & mask, sets[1] & mask, 0, 0, 0, 0];
        if libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Empties the bounding set: an exec would give root all that is in it.
fn drop_bounding() -> io::Result<()> {
    // SAFETY: system calls on plain numbers.
    unsafe {
        for capability in 0..64 {
            if libc::prctl(libc::PR_CAPBSET_READ, capability, 0, 0, 0) < 0 {
                break;
            }
            checked(libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0))?;
        }
    }
    Ok(())
}

/// Runs in the forked child.
fn confine_self(
    limits: &[(libc::__rlimit_resource_t, u64)],
    user: Option<(u32, u32)>,
    ruleset: Option<&OwnedFd>,
    program: &[u64],
) -> io::Result<()> {
    // SAFETY: system calls on plain numbers and on memory that outlives them; all are async-signal-safe.
    unsafe {
        checked(libc::setsid())?;
        for (what, value) in limits {
            let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            checked(libc::getrlimit(*what, &raw mut now))?;
            let value = (*value).min(now.rlim_max);
            let wanted = libc::rlimit { rlim_cur: value, rlim_max: value };
            checked(libc::setrlimit(*what, &raw const wanted))?;
        }
        // Nothing that was open here is open in the program: 0 to 2 are its own, 3 is its channel.
        libc::syscall(libc::SYS_close_range, 4u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if let Some((uid, gid)) = user {
            checked(libc::setgroups(0, std::ptr::null()))?;
            checked(libc::setresgid(gid, gid, gid))?;
            checked(libc::setresuid(uid, uid, uid))?;
        } else if libc::geteuid() == 0 {
            drop_capabilities()?;
        }
        checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0))?;
        checked(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        if let Some(ruleset) = ruleset
            && libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0u32) < 0
        {
            return Err(io::Error::last_os_error());
        }
        if !program.is_empty() {
            let filter = libc::sock_fprog {
                len: u16::try_from(program.len()).unwrap_or(0),
                filter: program.as_ptr().cast::<libc::sock_filter>().cast_mut(),
            };
            checked(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter, 0, 0))?;
        }
    }
    Ok(())
}

/// Whether we may read and remove what is others'.
fn overrides() -> bool {
    static MAY: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *MAY.get_or_init(|| {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
        // CAP_DAC_OVERRIDE is number 1.
        effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()).is_none_or(|set| set & 2 != 0)
    })
}

/// Makes a folder of ours the group's. The owner of a file may do that if they are of the group, for which it is enough to
/// be allowed to choose one's groups.
fn lend(folder: &Path, gid: u32) -> io::Result<()> {
    static ONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let ours = nix::unistd::getgroups()?;
    let mut with = ours.clone();
    with.push(nix::unistd::Gid::from_raw(gid));
    nix::unistd::setgroups(&with)?;
    let lent = std::os::unix::fs::chown(folder, None, Some(gid))
        .and_then(|()| std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o770)));
    nix::unistd::setgroups(&ours)?;
    lent
}

/// Kills a child that leads its own session, its process group, and everything of its user if it has one of its
/// own.
pub fn kill_all(pid: i32, uid: Option<u32>) {
    if pid <= 1 {
        return;
    }
    // SAFETY: signals to numbers; what is gone gives an error that we want to ignore.
    unsafe {
        libc::kill(-pid, libc::SIGKILL);
        libc::kill(pid, libc::SIGKILL);
    }
    kill_of(uid);
}

/// Kills all that still runs under a user of ours; of no effect for any other.
pub fn kill_of(uid: Option<u32>) {
    if let Some(uid) = uid.filter(|uid| (FIRST_USER..FIRST_USER + USERS).contains(uid)) {
        kill_user(uid);
    }
}

/// Kills all processes of a user of ours at once, those too that are forking: a process that became this user
/// signals all that it may.
fn kill_user(uid: u32) {
    // SAFETY: the child makes system calls on plain numbers only. It signals nobody unless it has become the user,
    // which is one of our range and so neither root nor a person.
    unsafe {
        let helper = libc::fork();
        if helper == 0 {
            let became = libc::syscall(libc::SYS_setresuid, uid, uid, uid) == 0;
            if became && libc::getuid() == uid && libc::geteuid() == uid && uid >= FIRST_USER {
                libc::kill(-1, libc::SIGKILL);
            }
            libc::_exit(0);
        }
        if helper > 0 {
            let mut status = 0;
            while libc::waitpid(helper, &raw mut status, 0) < 0 && *libc::__errno_location() == libc::EINTR {}
        }
    }
}

fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0u32, |w, b| (w << 8) | u32::from(*b)) << (8 * (3 - chunk.len()));
        for i in 0..4 {
            let sextet = (word >> (18 - 6 * i)) & 63;
            text.push(if i <= chunk.len() { char::from(ALPHABET[sextet as usize]) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests;
