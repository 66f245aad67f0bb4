//! The keeper of a sandbox: begins episodes in confinement, and ends them so that nothing is left.
//!
//! Knows namespaces, users and folders. Meets nothing hostile: it talks to the agent alone, hands over the channel of
//! each episode, and only ever kills what runs there. It ends when its channel closes.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use super::client::Options;
use super::files::Files;
use super::jobs::{Caps, Jobs, Program};
use super::wire::{Began, Channel, Order, Settings};
use super::{
    Confinement, Limits, Probe, drop_bounding, drop_capabilities, episode, keep_capabilities, kill_user, new_user,
    root, seccomp, tree,
};

/// What a sandbox's programs may read of `/proc` where they can't have one of their own.
const FACTS: [&str; 4] = ["/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/loadavg"];

const NAMESPACES: i32 = libc::CLONE_NEWNS
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWCGROUP;

/// Capabilities that root keeps as a keeper: files and processes of its sandbox's user, namespaces and mounts.
/// By their numbers: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, KILL, SETGID, SETUID, SETPCAP, SYS_ADMIN.
const KEPT: [u32; 9] = [0, 1, 2, 3, 5, 6, 7, 8, 21];

/// How episodes are begun on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// In namespaces, with these flags of `clone`.
    Namespaces(i32),
    /// In a folder of the host.
    Plain,
}

#[derive(Debug)]
struct Keeper {
    settings: Settings,
    mode: Mode,
    user: Option<(u32, u32)>,
    notes: Vec<String>,
    episode: Option<i32>,
    /// What the episode's files hang on, where they are in memory.
    files: Option<OwnedFd>,
    /// What earlier ones left: out of everybody's reach, to be freed when there is time.
    waste: Vec<Waste>,
}

#[derive(Debug)]
enum Waste {
    /// Freed when it is dropped.
    Files {
        _hold: OwnedFd,
    },
    Folder(PathBuf),
}

/// The hidden subcommand `sandbox-server`: serves its agent on descriptor 3.
pub fn main() -> std::process::ExitCode {
    // SAFETY: descriptor 3 is ours by the protocol; the other calls take plain numbers.
    let channel = unsafe {
        if libc::fcntl(3, libc::F_SETFD, libc::FD_CLOEXEC) < 0 {
            eprintln!("kernelfleet {}: started by a sandbox, with a socket on descriptor 3", super::client::COMMAND);
            return std::process::ExitCode::FAILURE;
        }
        libc::setsid();
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::umask(0o022);
        libc::syscall(libc::SYS_close_range, 4u32, u32::MAX, 0u32);
        UnixStream::from(OwnedFd::from_raw_fd(3))
    };
    serve(Channel::new(channel), None);
    std::process::ExitCode::SUCCESS
}

/// Set by SIGTERM, which also ends the channel that is served, by its number.
static STOP: AtomicBool = AtomicBool::new(false);
static SERVED: AtomicI32 = AtomicI32::new(-1);

extern "C" fn stop(_: i32) {
    STOP.store(true, Ordering::SeqCst);
    let served = SERVED.load(Ordering::SeqCst);
    if served >= 0 {
        // SAFETY: `shutdown` may be called in a signal handler; the number is that of a socket until it is taken back.
        unsafe { libc::shutdown(served, libc::SHUT_RDWR) };
    }
}

/// Keeps a sandbox for whoever connects at `socket`, one after another, until SIGTERM: for an agent that is in another
/// container. While an agent is served nobody else can connect, and while somebody can, nothing of an agent's runs. The
/// process must have one thread.
///
/// # Errors
/// When the socket can't be made.
pub fn wait(socket: &Path, options: &Options) -> io::Result<()> {
    let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
    let settings = options.settings(folder);
    // SAFETY: plain numbers; the handler makes system calls and touches atomics alone.
    unsafe {
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::umask(0o022);
        for signal in [libc::SIGTERM, libc::SIGINT] {
            libc::signal(signal, stop as *const () as libc::sighandler_t);
        }
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
    }
    while !STOP.load(Ordering::SeqCst) {
        let Some(stream) = accept(socket)? else { break };
        // Another descriptor of the same connection, so that its number is nobody else's until it is taken back.
        let served = stream.try_clone()?;
        SERVED.store(served.as_raw_fd(), Ordering::SeqCst);
        if !STOP.load(Ordering::SeqCst) {
            tracing::info!("an agent is here");
            serve(Channel::new(stream), Some(settings.clone()));
            tracing::info!("the agent is gone");
        }
        SERVED.store(-1, Ordering::SeqCst);
        drop(served);
    }
    Ok(())
}

/// The next that connects; `None` when told to end.
fn accept(socket: &Path) -> io::Result<Option<UnixStream>> {
    let failed = |e: io::Error| io::Error::new(e.kind(), format!("{} can't be listened at: {e}", socket.display()));
    if let Err(error) = fs::remove_file(socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(failed(error));
    }
    let listener = UnixListener::bind(socket).map_err(failed)?;
    // The agent is another user.
    fs::set_permissions(socket, fs::Permissions::from_mode(0o666)).map_err(failed)?;
    let mut found = None;
    while found.is_none() && !STOP.load(Ordering::SeqCst) {
        let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is one valid pollfd for the length given.
        if unsafe { libc::poll(&raw mut poll, 1, 1000) } > 0 {
            found = Some(listener.accept().map_err(failed)?.0);
        }
    }
    let _ = fs::remove_file(socket);
    Ok(found)
}

fn serve(mut channel: Channel, chosen: Option<Settings>) {
    let Ok(first) = channel.receive::<Order>(None) else { return };
    let settings = match (first.body, chosen) {
        (Order::Start(settings), None) => settings,
        (Order::Begin, Some(settings)) => settings,
        _ => return,
    };
    let own = settings.workspace.is_none();
    if let Err(error) = keep_capabilities(&KEPT) {
        let _ = channel.send(&Err::<Began, _>(note("the keeper's capabilities", &error)), &[], None);
        return;
    }
    let mut keeper = Keeper {
        settings,
        mode: Mode::Plain,
        user: None,
        notes: Vec::new(),
        episode: None,
        files: None,
        waste: Vec::new(),
    };
    let mut began = keeper.first();
    loop {
        let sent = match began {
            Ok((began, fd)) => channel.send(&Ok::<_, String>(began), &[], Some(fd.as_fd())),
            Err(error) => channel.send(&Err::<Began, _>(error.to_string()), &[], None),
        };
        keeper.free();
        if sent.is_err() || channel.receive::<Order>(None).is_err() {
            keeper.end();
            keeper.free();
            // The agent removes its folder itself, unless it is gone.
            if own {
                let _ = fs::remove_dir_all(&keeper.settings.folder);
            }
            return;
        }
        keeper.end();
        began = keeper.begin();
    }
}

fn note(what: &str, error: &io::Error) -> String {
    format!("{what}: {error}")
}

impl Keeper {
    /// Finds the best that this host allows, and begins the first episode with it.
    fn first(&mut self) -> io::Result<(Began, OwnedFd)> {
        let root = Probe::here().root;
        if self.settings.namespaces {
            self.user = new_user();
            let more = if root { 0 } else { libc::CLONE_NEWUSER };
            self.mode = Mode::Namespaces(NAMESPACES | more);
            match self.begin() {
                Ok(began) => return Ok(began),
                Err(error) => self.notes.push(note("no namespaces", &error)),
            }
            self.end();
        }
        self.mode = Mode::Plain;
        self.user = new_user();
        if root {
            // Never as root, though it could read more: what Landlock does not cover, rights of files say, is the owner's.
            let closed = self.settings.read.iter().filter(|p| p.exists() && !super::world_readable(p));
            self.notes
                .extend(closed.map(|p| format!("{} is closed to others, and so to the sandbox's user", p.display())));
        } else {
            self.notes.push("commands run as the agent's own user and can change rights of its files".into());
        }
        if Probe::here().landlock == 0 {
            let why =
                "this host allows neither namespaces nor Landlock, so nothing keeps files of the host from being read";
            if !self.settings.weak {
                return Err(io::Error::other(why));
            }
            self.notes.push(why.into());
        }
        self.begin()
    }

    fn plain(&self) -> bool {
        self.mode == Mode::Plain
    }

    fn place(&self, name: &str) -> PathBuf {
        self.settings.folder.join(name)
    }

    fn workspace(&self) -> PathBuf {
        match &self.settings.workspace {
            _ if !self.plain() => root::WORKSPACE.into(),
            Some(mounted) => mounted.clone(),
            None => self.place("workspace"),
        }
    }

    /// What commands may write in a folder of the host.
    fn places(&self) -> [PathBuf; 3] {
        [self.workspace(), self.place("home"), self.place("tmp")]
    }

    /// Whether the workspace's `utils` can't be written, whoever tries.
    fn sealed(&self) -> bool {
        let Some(sealed) = &self.settings.sealed else { return false };
        !self.plain() || (*sealed == self.workspace().join(root::SEALED) && mounted_read_only(sealed))
    }

    /// Who lives in the sandbox.
    fn who(&self) -> (u32, u32) {
        // SAFETY: calls without arguments that can't fail.
        self.user.unwrap_or_else(|| unsafe { (libc::geteuid(), libc::getegid()) })
    }

    fn begin(&mut self) -> io::Result<(Began, OwnedFd)> {
        let who = self.who();
        if self.plain() {
            for path in self.places() {
                if self.settings.workspace.as_ref() == Some(&path) {
                    empty(&path, self.sealed().then_some(root::SEALED))?;
                    continue;
                }
                clear(&path)?;
                fs::create_dir(&path)?;
                fs::set_permissions(&path, fs::Permissions::from_mode(0o700))?;
                if self.user.is_some() {
                    chown(&path, Some(who.0), Some(who.1))?;
                }
            }
        }
        if let (Some(socket), Some((uid, gid))) = (&self.settings.socket, self.user) {
            chown(socket, Some(uid), Some(gid)).map_err(|e| io::Error::other(note("the socket", &e)))?;
        }
        let (ours, theirs) = UnixStream::pair()?;
        let (ready, ready_end) = UnixStream::pair()?;
        let flags = match self.mode {
            Mode::Namespaces(flags) => flags,
            Mode::Plain => 0,
        };
        // SAFETY: this process has one thread, so the child is a whole process; without a stack it goes on with a
        // copy of this one, as after fork.
        let pid = unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) };
        if pid < 0 {
            return Err(io::Error::last_os_error());
        }
        if pid == 0 {
            let _ = self.child(theirs.into(), ready_end.into(), who);
            // SAFETY: ends this process at once.
            unsafe { libc::_exit(1) };
        }
        let pid = i32::try_from(pid).unwrap_or(0);
        self.episode = Some(pid);
        drop((theirs, ready_end));
        let frame = Channel::new(ready)
            .receive::<Result<(), String>>(None)
            .map_err(|e| io::Error::other(note("the episode's server ended before it was ready", &e)))?;
        frame.body.map_err(io::Error::other)?;
        self.files = frame.fd;
        let began = Began {
            workspace: self.workspace(),
            isolation: self.holds(),
            notes: self.notes.clone(),
            sealed: self.sealed(),
        };
        Ok((began, ours.into()))
    }

    /// The episode's process: confines itself, says that it is ready, serves.
    fn child(&self, channel: OwnedFd, ready: OwnedFd, who: (u32, u32)) -> io::Result<()> {
        // SAFETY: plain descriptors; those below 5 are named by nobody else in this process from here on.
        let (ready, channel) = unsafe {
            for signal in [libc::SIGTERM, libc::SIGINT] {
                libc::signal(signal, libc::SIG_DFL);
            }
            let high = libc::fcntl(ready.as_raw_fd(), libc::F_DUPFD_CLOEXEC, 10);
            if high < 0 || libc::dup3(channel.as_raw_fd(), 3, libc::O_CLOEXEC) != 3 {
                return Err(io::Error::last_os_error());
            }
            if libc::dup3(high, 4, libc::O_CLOEXEC) != 4 {
                return Err(io::Error::last_os_error());
            }
            libc::syscall(libc::SYS_close_range, 5u32, u32::MAX, 0u32);
            // What these owned is closed or moved by now, and must not be closed again.
            std::mem::forget((channel, ready));
            (UnixStream::from(OwnedFd::from_raw_fd(4)), UnixStream::from(OwnedFd::from_raw_fd(3)))
        };
        let mapped = match self.mode {
            Mode::Namespaces(flags) if flags & libc::CLONE_NEWUSER != 0 => map(who),
            _ => Ok(()),
        };
        let mut ready = Channel::new(ready);
        let begun = mapped.and_then(|()| self.confine()).and_then(|(program, hold)| {
            let files = Files::open(&self.workspace())?;
            std::env::set_current_dir(files.root())?;
            Ok((program, hold, files))
        });
        match begun {
            Ok((program, hold, files)) => {
                let watched = if self.plain() { self.places().to_vec() } else { vec![] };
                let jobs = Jobs::new(program, self.caps(), watched);
                ready.send(&Ok::<(), String>(()), &[], hold.as_ref().map(AsFd::as_fd))?;
                drop((ready, hold));
                episode::serve(Channel::new(channel), &files, jobs);
                if !self.plain() {
                    // The first process of its namespace: all others end with it.
                    std::process::exit(0);
                }
                Ok(())
            }
            Err(error) => ready.send(&Err::<(), _>(error.to_string()), &[], None),
        }
    }

    fn caps(&self) -> Caps {
        let bounds = &self.settings.bounds;
        Caps {
            output: bounds.output,
            jobs: bounds.jobs,
            memory: bounds.memory,
            processes: bounds.processes,
            disk: bounds.disk,
            files: bounds.files,
            alone: !self.plain() || self.user.is_some() || Probe::here().landlock >= 6,
        }
    }

    /// Gives up all that the episode's server and its commands must not have. Returns what its files hang on, too.
    fn confine(&self) -> io::Result<(Program, Option<OwnedFd>)> {
        let step = |what: &str, done: io::Result<()>| done.map_err(|e| io::Error::other(note(what, &e)));
        let bounds = &self.settings.bounds;
        let mut env = self.settings.env.clone();
        let mut read: Vec<PathBuf> = root::SYSTEM.iter().map(PathBuf::from).collect();
        read.extend(self.settings.read.iter().cloned());
        // A link in the way is followed, so the real place must be readable too.
        read.extend(self.settings.read.iter().filter_map(|p| p.canonicalize().ok()));
        let (mut write, home, temp, socket);
        let plain = self.plain();
        let mut hold = None;
        if plain {
            write = self.places().to_vec();
            (home, temp) = (self.place("home"), self.place("tmp"));
            socket = self.settings.socket.clone();
            write.extend(root::DEVICES.map(PathBuf::from));
            read.extend(FACTS.map(PathBuf::from));
        } else {
            let entered = root::enter(&self.settings, self.who());
            hold = Some(entered.map_err(|e| io::Error::other(note("the file tree", &e)))?);
            let name = c"sandbox";
            // SAFETY: a name of seven bytes that lives.
            unsafe { libc::sethostname(name.as_ptr(), 7) };
            write = root::writable();
            (home, temp) = (root::HOME.into(), PathBuf::from("/tmp"));
            socket = self.settings.socket.as_ref().map(|_| root::SOCKET.into());
            // All that is in the tree was put there to be read.
            read = vec!["/".into()];
        }
        let path: Vec<String> = self
            .settings
            .path
            .iter()
            .map(|p| p.display().to_string())
            .chain(["/usr/local/bin:/usr/bin:/bin".to_owned()])
            .collect();
        for (key, value) in [
            ("PATH", path.join(":")),
            ("HOME", home.display().to_string()),
            ("TMPDIR", temp.display().to_string()),
            ("USER", "agent".into()),
            ("LOGNAME", "agent".into()),
            ("SHELL", "/bin/bash".into()),
            ("TERM", "dumb".into()),
            ("LANG", "C.UTF-8".into()),
        ] {
            env.entry(key.into()).or_insert(value);
        }
        if let Some(socket) = socket {
            env.insert("KERNELFLEET_SOCKET".into(), socket.display().to_string());
        }
        let bash = ["/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash"].map(PathBuf::from);
        let bash = bash.into_iter().find(|p| p.exists()).ok_or_else(|| io::Error::other("there is no bash here"))?;

        let of_commands = Confinement { read: read.clone(), write: write.clone(), ..Confinement::default() };
        let ruleset = if plain { of_commands.ruleset()? } else { None };
        if plain {
            // The server looks at processes; its commands may not.
            read.push("/proc".into());
        }
        let counted = self.user.is_some() || matches!(self.mode, Mode::Namespaces(f) if f & libc::CLONE_NEWUSER != 0);
        // Where others run as the same user, theirs are counted too.
        let others = if counted { 2 } else { tasks_of(self.who().0) };
        let confinement = Confinement {
            user: self.user,
            read,
            write,
            seccomp: Some(seccomp::sandbox()),
            limits: Limits {
                data: Some(bounds.memory),
                fsize: bounds.file,
                // The server and the processes that hold commands.
                nproc: Some(bounds.processes + others + bounds.jobs as u64 + 2),
                nofile: bounds.open_files.max(512),
                ..Limits::default()
            },
            ..Confinement::default()
        };
        if !plain {
            // A user of its own loses the others with the change.
            step("capabilities", if self.user.is_some() { drop_bounding() } else { drop_capabilities() })?;
        }
        step("the confinement", confinement.apply_here())?;
        // SAFETY: plain numbers.
        unsafe {
            libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
            libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
            // A file over the limit is an error to tell and no reason to end.
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        }
        Ok((Program { bash, env, ruleset, workspace: self.workspace() }, hold))
    }

    fn holds(&self) -> Vec<String> {
        let probe = Probe::here();
        let mut found = vec!["seccomp", "limits"];
        if self.user.is_some() {
            found.push("users");
        }
        if probe.landlock > 0 {
            found.push("landlock");
        }
        if probe.landlock >= 6 {
            found.push("signals");
        }
        if let Mode::Namespaces(flags) = self.mode {
            found.extend(["mount-namespace", "pid-namespace", "net-namespace", "ipc-namespace", "disk"]);
            if flags & libc::CLONE_NEWUSER != 0 {
                found.push("user-namespace");
            }
        }
        found.sort_unstable();
        found.into_iter().map(str::to_owned).collect()
    }

    /// Kills all that runs and removes what it left; returns when it is gone.
    fn end(&mut self) {
        let Some(pid) = self.episode.take() else { return };
        let end = Instant::now() + Duration::from_secs(20);
        tree::signal(pid, libc::SIGKILL);
        if self.plain() {
            let me = i32::try_from(std::process::id()).unwrap_or(0);
            loop {
                if let Some((uid, _)) = self.user {
                    kill_user(uid);
                }
                // The first process of a container inherits its orphans and sees nobody else's.
                let clean = tree::kill_below(me, Duration::from_secs(2));
                tree::reap(|_| {});
                if (clean && tree::Table::now().children(me).next().is_none()) || Instant::now() > end {
                    break;
                }
            }
            self.set_aside();
            if let Some((uid, _)) = self.user {
                for folder in ["/dev/shm", "/tmp", "/var/tmp", "/dev/mqueue"] {
                    sweep(Path::new(folder), uid);
                }
            }
        } else {
            let mut status = 0;
            // Returns when every process of the namespace has ended.
            // SAFETY: waitpid writes into `status`, which lives.
            while unsafe { libc::waitpid(pid, &raw mut status, 0) } < 0
                && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
            {}
            self.waste.extend(self.files.take().map(|hold| Waste::Files { _hold: hold }));
        }
    }

    /// Moves an episode's folders to where its user can't follow.
    fn set_aside(&mut self) {
        let old = self.place("old");
        for path in self.places() {
            // What is mounted stays where it is, and is emptied before the next episode.
            if self.settings.workspace.as_ref() == Some(&path) {
                continue;
            }
            let aside = old.join(path.file_name().unwrap_or_default());
            let moved = fs::create_dir_all(&old)
                .and_then(|()| fs::set_permissions(&old, fs::Permissions::from_mode(0o700)))
                .and_then(|()| fs::rename(&path, &aside));
            match moved {
                Ok(()) => self.waste.push(Waste::Folder(aside)),
                Err(_) => drop(clear(&path)),
            }
        }
    }

    /// Frees what earlier episodes left.
    fn free(&mut self) {
        for waste in self.waste.drain(..) {
            if let Waste::Folder(path) = waste {
                let _ = clear(&path);
            }
        }
    }
}

/// Maps the user of the new namespace that we are in to who we were outside.
fn map(who: (u32, u32)) -> io::Result<()> {
    let write = |file: &str, text: String| {
        fs::write(format!("/proc/self/{file}"), text).map_err(|e| io::Error::other(note(file, &e)))
    };
    // What can't be dumped is root's in `/proc`. Nothing hostile runs here yet.
    // SAFETY: plain numbers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    write("setgroups", "deny".into())?;
    write("uid_map", format!("{0} {0} 1", who.0))?;
    write("gid_map", format!("{0} {0} 1", who.1))
}

/// Tasks that run as a user and are visible here.
fn tasks_of(uid: u32) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let ours = entries.filter(|e| e.metadata().is_ok_and(|m| m.uid() == uid));
    ours.map(|e| fs::read_dir(e.path().join("task")).map_or(1, |t| t.count() as u64)).sum()
}

/// Removes a folder of the sandbox, however deep it is and whatever rights its user took from its parts: each folder
/// in it is moved to the top before it is emptied. Nobody runs in it any more.
fn clear(path: &Path) -> io::Result<()> {
    if path.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound) {
        return Ok(());
    }
    let mut left = vec![path.to_owned()];
    let mut count = 0u64;
    while let Some(folder) = left.pop() {
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                // A folder that moves is written to, for the name of the one above it.
                fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o700))?;
                let top = path.with_extension(format!("gone{count}"));
                count += 1;
                fs::rename(entry.path(), &top)?;
                left.push(top);
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        fs::remove_dir(&folder)?;
    }
    Ok(())
}

/// Removes all that a folder holds, beside the entry `kept`.
fn empty(folder: &Path, kept: Option<&str>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if kept.is_some_and(|kept| entry.file_name() == kept) {
            continue;
        }
        if entry.file_type()?.is_dir() { clear(&entry.path())? } else { fs::remove_file(entry.path())? }
    }
    Ok(())
}

/// Whether a folder is a file system of its own, or a part of one, that can't be written.
fn mounted_read_only(folder: &Path) -> bool {
    nix::sys::statvfs::statvfs(folder).is_ok_and(|s| s.flags().contains(nix::sys::statvfs::FsFlags::ST_RDONLY))
}

/// Removes what a user of ours left in a folder of the host.
fn sweep(folder: &Path, uid: u32) {
    use std::os::unix::fs::MetadataExt;
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.metadata().is_ok_and(|m| m.uid() == uid) {
            let path = entry.path();
            let _ = if path.is_dir() && !path.is_symlink() { clear(&path) } else { fs::remove_file(&path) };
        }
    }
}
