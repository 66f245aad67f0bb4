//! Commands: the persistent shell, what runs in the background, and how they end.
//!
//! Knows processes and pipes. Must not know who asks. Each command tree hangs below a process of ours (its holder)
//! that collects whatever is orphaned in it, so that a tree can be ended whole, daemons included. All is done by one
//! thread in one loop, so a fork is a fork.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsString};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use super::cut::Cut;
use super::tree::{self, Table};
use super::workspace::{Error, JobOutput, Ran};

/// Longest command.
const COMMAND: usize = 1 << 20;
/// How often memory is looked at.
const TICK: Duration = Duration::from_millis(250);
/// Time that a tree gets to end once it is killed.
const PATIENCE: Duration = Duration::from_secs(2);
const ENDED: &str = "\n[the shell has ended with this command; the next one begins a new shell in the same folder]\n";
/// In place of a descriptor: the one that output goes to.
const OUTPUT: RawFd = -2;
/// Read of a pipe that is always full, before anything else gets its turn.
const ROUND: usize = 1 << 20;

/// What a command's process starts with.
#[derive(Debug)]
pub struct Program {
    pub bash: PathBuf,
    pub env: BTreeMap<String, String>,
    /// Confines commands further than the server: rules of Landlock, where they are needed.
    pub ruleset: Option<OwnedFd>,
    pub workspace: PathBuf,
}

/// Limits of all commands together.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    pub output: usize,
    pub jobs: usize,
    pub memory: u64,
    pub processes: u64,
    /// Of the folders in `watched`, where no file system bounds them.
    pub disk: u64,
    pub files: u64,
    /// Whether the server may signal all that it can see: nothing but this sandbox's is in its reach.
    pub alone: bool,
}

#[derive(Debug)]
struct Tree {
    holder: i32,
    output: OwnedFd,
    /// What the holder says: the exit status of the command, once.
    status: OwnedFd,
    ended: Option<i32>,
    said: Cut,
    /// Nobody holds the other end of `output` any more.
    silent: bool,
}

#[derive(Debug)]
struct Shell {
    tree: Tree,
    script: std::fs::File,
    /// A record after each command: status and folder.
    reply: OwnedFd,
    record: Vec<u8>,
    pid: i32,
}

#[derive(Debug)]
pub struct Jobs {
    program: Program,
    caps: Caps,
    watched: Vec<PathBuf>,
    shell: Option<Shell>,
    folder: PathBuf,
    jobs: BTreeMap<u64, Tree>,
    last: u64,
    looked: Instant,
}

fn cstring(bytes: impl Into<Vec<u8>>) -> io::Result<CString> {
    CString::new(bytes).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))
}

fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(pipe2(OFlag::O_CLOEXEC)?)
}

fn nonblocking(fd: &OwnedFd) -> io::Result<()> {
    nix::fcntl::fcntl(fd, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// What there is to read, at most `ROUND` bytes; whether the other end is closed.
fn drain(fd: &OwnedFd, mut took: impl FnMut(&[u8])) -> bool {
    let mut buffer = [0u8; 1 << 16];
    let mut total = 0;
    while total < ROUND {
        match nix::unistd::read(fd, &mut buffer) {
            Ok(0) => return true,
            Ok(n) => {
                took(&buffer[..n]);
                total += n;
            }
            Err(nix::errno::Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
    false
}

impl Program {
    /// Starts bash below a holder. `fds` are given to it under the numbers beside them.
    fn start(
        &self,
        arguments: &[&str],
        folder: &Path,
        fds: &[(RawFd, RawFd)],
        limit: usize,
    ) -> io::Result<(Tree, i32)> {
        let (output, output_end) = pipe()?;
        let (status, status_end) = pipe()?;
        nonblocking(&output)?;
        nonblocking(&status)?;
        let path = cstring(self.bash.as_os_str().as_bytes())?;
        let words: Vec<CString> =
            std::iter::once("bash").chain(arguments.iter().copied()).map(cstring).collect::<io::Result<_>>()?;
        let env: Vec<CString> = self
            .env
            .iter()
            .map(|(k, v)| format!("{k}={v}"))
            .chain([format!("PWD={}", folder.display())])
            .map(cstring)
            .collect::<io::Result<_>>()?;
        let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
            strings.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
        };
        let (words, env) = (pointers(&words), pointers(&env));
        let folder = cstring(folder.as_os_str().as_bytes())?;
        let fallback = cstring(self.workspace.as_os_str().as_bytes())?;
        let ruleset = self.ruleset.as_ref().map(AsRawFd::as_raw_fd);
        // SAFETY: this process has one thread. The children make system calls only, on memory made above.
        unsafe {
            match libc::fork() {
                -1 => Err(io::Error::last_os_error()),
                0 => {
                    libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
                    libc::setsid();
                    let command = libc::fork();
                    if command == 0 {
                        exec(output_end.as_raw_fd(), fds, ruleset, &folder, &fallback, &path, &words, &env);
                    }
                    hold(command, status_end.as_raw_fd());
                }
                holder => {
                    let mut tree = Tree { holder, output, status, ended: None, said: Cut::new(limit), silent: false };
                    drop(status_end);
                    // The holder says first what it started.
                    let pid = tree.first_word().unwrap_or(-1);
                    if pid <= 0 {
                        tree::signal(holder, libc::SIGKILL);
                        return Err(io::Error::from_raw_os_error(libc::EAGAIN));
                    }
                    Ok((tree, pid))
                }
            }
        }
    }
}

/// The command's own process, up to its program. Makes system calls only.
///
/// # Safety
/// To be called in a forked child of a process with one thread; the pointers must end with a null.
#[allow(clippy::too_many_arguments)]
unsafe fn exec(
    output: RawFd,
    fds: &[(RawFd, RawFd)],
    ruleset: Option<RawFd>,
    folder: &CString,
    fallback: &CString,
    path: &CString,
    words: &[*const libc::c_char],
    env: &[*const libc::c_char],
) -> ! {
    // SAFETY: as this function.
    unsafe {
        libc::setsid();
        // As a program expects them; the server ignores both.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
        // Descriptors may lie where others are to be: all go up first.
        let high = |fd: RawFd| libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 300);
        let output = high(output);
        let mut ok = output >= 0;
        let mut moved = [(-1, -1); 4];
        for (slot, (from, to)) in moved.iter_mut().zip(fds) {
            *slot = (if *from == OUTPUT { output } else { high(*from) }, *to);
        }
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
        ok &= libc::dup2(null, 0) == 0 && libc::dup2(output, 1) == 1 && libc::dup2(output, 2) == 2;
        for (from, to) in moved.into_iter().filter(|m| m.0 >= 0) {
            ok &= libc::dup2(from, to) == to;
        }
        if libc::chdir(folder.as_ptr()) != 0 {
            ok &= libc::chdir(fallback.as_ptr()) == 0;
        }
        if let Some(ruleset) = ruleset {
            ok &= libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0u32) == 0;
        }
        if ok {
            libc::execve(path.as_ptr(), words.as_ptr(), env.as_ptr());
        }
        libc::_exit(127)
    }
}

/// Collects all that ends below, says how the command ended, and lives as long as anything is left.
///
/// # Safety
/// To be called in a forked child of a process with one thread.
unsafe fn hold(command: libc::pid_t, status: RawFd) -> ! {
    // SAFETY: system calls on plain numbers and on arrays that live.
    unsafe {
        let say = |word: i32| libc::write(status, word.to_ne_bytes().as_ptr().cast(), 4);
        say(command);
        if command < 0 {
            libc::_exit(1);
        }
        // Nothing is kept open but the line to the server: ends of pipes must close with the commands.
        if libc::dup2(status, 3) == 3 {
            libc::syscall(libc::SYS_close_range, 4u32, u32::MAX, 0u32);
        }
        let mut at = 0;
        loop {
            let pid = libc::waitpid(-1, &raw mut at, 0);
            if pid < 0 && *libc::__errno_location() != libc::EINTR {
                libc::_exit(0);
            }
            if pid == command && (libc::WIFEXITED(at) || libc::WIFSIGNALED(at)) {
                let word = tree::exit_status(at).to_ne_bytes();
                libc::write(3, word.as_ptr().cast(), 4);
            }
        }
    }
}

impl Tree {
    /// Waits for the holder's first word.
    fn first_word(&mut self) -> Option<i32> {
        let mut poll = libc::pollfd { fd: self.status.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut poll, 1, 10_000) };
        let mut word = [0u8; 4];
        matches!(nix::unistd::read(&self.status, &mut word), Ok(4)).then(|| i32::from_ne_bytes(word))
    }

    /// Takes what has come.
    fn pump(&mut self) {
        let said = &mut self.said;
        self.silent |= drain(&self.output, |bytes| said.push(bytes));
        if self.ended.is_none() {
            let mut word = Vec::new();
            let closed = drain(&self.status, |bytes| word.extend_from_slice(bytes));
            if let Ok(word) = <[u8; 4]>::try_from(word.as_slice()) {
                self.ended = Some(i32::from_ne_bytes(word));
                // What it said before it ended lies in the pipe.
                let said = &mut self.said;
                drain(&self.output, |bytes| said.push(bytes));
            } else if closed {
                // The holder itself was killed.
                self.ended = Some(128 + libc::SIGKILL);
            }
        }
    }
}

impl Jobs {
    pub fn new(program: Program, caps: Caps, watched: Vec<PathBuf>) -> Self {
        let folder = program.workspace.clone();
        let (jobs, looked) = (BTreeMap::new(), Instant::now());
        Self { program, caps, watched, shell: None, folder, jobs, last: 0, looked }
    }

    /// Waits until something has come or a tick is over; takes it. `channel` is watched as well: whether it is ready.
    pub fn turn(&mut self, channel: RawFd, events: i16, longest: Duration) -> bool {
        let mut polls = vec![libc::pollfd { fd: channel, events, revents: 0 }];
        let mut watch = |fd: RawFd| polls.push(libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        let trees = self.shell.iter().map(|s| &s.tree).chain(self.jobs.values());
        for tree in trees.filter(|t| t.ended.is_none()) {
            if !tree.silent {
                watch(tree.output.as_raw_fd());
            }
            watch(tree.status.as_raw_fd());
        }
        if let Some(shell) = self.shell.as_ref().filter(|s| s.tree.ended.is_none()) {
            watch(shell.reply.as_raw_fd());
        }
        let running = polls.len() > 1;
        // What has ended may have left something that still talks.
        let wait = if running || !self.jobs.is_empty() { longest.min(TICK) } else { longest };
        let millis = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX);
        let count = polls.len() as libc::nfds_t;
        // SAFETY: `polls` holds as many as are announced.
        unsafe { libc::poll(polls.as_mut_ptr(), count, millis) };
        self.pump();
        if self.looked.elapsed() >= TICK {
            self.look();
            self.looked = Instant::now();
        }
        polls[0].revents != 0
    }

    fn pump(&mut self) {
        if let Some(shell) = &mut self.shell {
            shell.tree.pump();
            let record = &mut shell.record;
            drain(&shell.reply, |bytes| {
                // Records are short; what is longer is no record.
                let room = 8192usize.saturating_sub(record.len());
                record.extend_from_slice(&bytes[..bytes.len().min(room)]);
            });
        }
        for tree in self.jobs.values_mut() {
            tree.pump();
        }
        self.reap();
    }

    /// Collects holders that have ended, and forgets their numbers, which may be given to others.
    fn reap(&mut self) {
        let trees = self.shell.iter_mut().map(|s| &mut s.tree).chain(self.jobs.values_mut());
        let mut holders: Vec<&mut i32> = trees.map(|t| &mut t.holder).collect();
        tree::reap(|pid| {
            for holder in holders.iter_mut().filter(|h| ***h == pid) {
                **holder = tree::NOBODY;
            }
        });
    }

    fn holders(&self) -> BTreeSet<i32> {
        self.shell.iter().map(|s| s.tree.holder).chain(self.jobs.values().map(|t| t.holder)).collect()
    }

    /// Kills what hangs below no holder of ours: theirs was killed.
    fn end_strays(&self, table: &Table) {
        let me = i32::try_from(std::process::id()).unwrap_or(0);
        let holders = self.holders();
        for stray in table.children(me).filter(|p| !holders.contains(p)) {
            for pid in table.below(stray) {
                tree::signal(pid, libc::SIGKILL);
            }
            tree::signal(stray, libc::SIGKILL);
        }
    }

    /// Ends what uses more memory or disk than all may, and strays.
    fn look(&mut self) {
        let table = Table::now();
        let me = i32::try_from(std::process::id()).unwrap_or(0);
        let holders = self.holders();
        self.end_strays(&table);
        let all = table.below(me);
        let mut why = None;
        if tree::memory(&all) > self.caps.memory
            && tree::shared_memory(&all).is_none_or(|exact| exact > self.caps.memory)
        {
            why = Some(format!("more than {} MiB of memory were used", self.caps.memory >> 20));
        }
        if !self.watched.is_empty() && all.len() > holders.len() * 2 {
            let (bytes, files) = usage(&self.watched);
            if bytes > self.caps.disk || files > self.caps.files {
                why = Some(format!(
                    "the files were more than {} MiB or more than {}",
                    self.caps.disk >> 20,
                    self.caps.files
                ));
            }
        }
        let Some(why) = why else { return };
        let largest = holders.iter().copied().max_by_key(|h| tree::memory(&table.below(*h)));
        let Some(holder) = largest else { return };
        tree::kill_below(holder, PATIENCE);
        let note = format!("\n[killed with all that it had started: {why}]\n");
        if let Some(shell) = self.shell.as_mut().filter(|s| s.tree.holder == holder) {
            shell.tree.said.push(note.as_bytes());
        }
        for tree in self.jobs.values_mut().filter(|t| t.holder == holder) {
            tree.said.push(note.as_bytes());
        }
    }

    fn check(command: &str) -> Result<(), Error> {
        let denied = |why: &str| Err(Error::Denied { path: "the command".into(), why: why.into() });
        if command.contains('\0') {
            return denied("it contains a zero byte");
        }
        if command.len() > COMMAND {
            return denied("it is longer than 1 MiB; write a file and run that");
        }
        Ok(())
    }

    fn new_shell(&mut self) -> io::Result<()> {
        let (script_end, script) = pipe()?;
        let (reply, reply_end) = pipe()?;
        nonblocking(&reply)?;
        // 0: what it reads. 251: what it says after each command. 252: the output, whatever a command does to 1 and 2.
        let fds = [(script_end.as_raw_fd(), 0), (reply_end.as_raw_fd(), 251), (OUTPUT, 252)];
        let arguments = ["--noprofile", "--norc", "-s"];
        let (tree, pid) = self.program.start(&arguments, &self.folder, &fds, self.caps.output)?;
        self.shell = Some(Shell { tree, script: script.into(), reply, record: Vec::new(), pid });
        Ok(())
    }

    /// Runs a command in the shell. Fails as gone when the other end of `channel` closes.
    pub fn run(&mut self, command: &str, timeout: Duration, channel: RawFd) -> Result<Ran, Error> {
        Self::check(command)?;
        let start = Instant::now();
        if self.shell.as_ref().is_none_or(|s| s.tree.ended.is_some()) {
            self.end_shell();
            self.new_shell().map_err(|e| no_process(&e))?;
        }
        let end = start + timeout;
        // Commands get no descriptor of the shell's own, and what they do to 0 to 2 ends with them.
        let line = format!(
            "eval {} </dev/null >&252 2>&252 251>&- 252>&-\nprintf '%s %s\\0' \"$?\" \"$PWD\" >&251\n",
            quoted(command)
        );
        let mut line = line.as_bytes();
        if let Some(shell) = &mut self.shell {
            shell.record.clear();
            nix::fcntl::fcntl(&shell.script, nix::fcntl::FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
                .map_err(io::Error::from)?;
        }
        loop {
            if let Some(shell) = self.shell.as_mut().filter(|_| !line.is_empty()) {
                match shell.script.write(line) {
                    Ok(n) => line = &line[n..],
                    Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                    // It has ended; that is seen below.
                    Err(_) => line = &[],
                }
            }
            let left = end.saturating_duration_since(Instant::now());
            let wait = if line.is_empty() { left } else { left.min(Duration::from_millis(1)) };
            if self.turn(channel, libc::POLLRDHUP, wait) {
                return Err(Error::Gone("nobody waits for it".into()));
            }
            let Some(shell) = &mut self.shell else { return Err(Error::Gone("the shell".into())) };
            let mut ran = Ran { seconds: start.elapsed().as_secs_f64(), ..Ran::default() };
            if let Some(at) = shell.record.iter().position(|b| *b == 0) {
                let record = String::from_utf8_lossy(&shell.record[..at]).into_owned();
                let (status, folder) = record.split_once(' ').unwrap_or((&record, ""));
                ran.status = status.parse().ok();
                if folder.starts_with('/') {
                    self.folder = folder.into();
                }
                // All that the command said itself lies in the pipe by now.
                shell.tree.pump();
                if tree::doomed(shell.tree.holder) {
                    // The command killed all that it could.
                    self.end_shell();
                    self.note(ENDED);
                } else {
                    tree::signal(shell.tree.holder, libc::SIGCONT);
                    self.crowded();
                }
                return Ok(self.told(ran));
            }
            if let Some(status) = shell.tree.ended {
                ran.status = Some(status);
                self.end_shell();
                self.note(ENDED);
                return Ok(self.told(ran));
            }
            if Instant::now() >= end {
                ran.timed_out = true;
                let place = std::fs::read_link(format!("/proc/{}/cwd", shell.pid));
                if let Some(place) = place.ok().filter(|p| p.is_dir()) {
                    self.folder = place;
                }
                self.end_shell();
                let note = format!(
                    "\n[not done within {:.0} s: killed with all that it had started; the next command begins a new shell in {}]\n",
                    timeout.as_secs_f64(),
                    self.folder.display()
                );
                self.note(&note);
                return Ok(self.told(ran));
            }
        }
    }

    fn note(&mut self, note: &str) {
        if let Some(shell) = &mut self.shell {
            shell.tree.said.push(note.as_bytes());
        }
    }

    fn told(&mut self, mut ran: Ran) -> Ran {
        if let Some(shell) = &mut self.shell {
            (ran.output, ran.cut) = shell.tree.said.take();
        }
        ran
    }

    /// What is left of a shell: dead, its output still to be told.
    fn end_shell(&mut self) {
        let Some(holder) = self.shell.as_ref().map(|s| s.tree.holder) else { return };
        self.end(holder);
        if let Some(shell) = &mut self.shell {
            shell.tree.pump();
            shell.tree.ended.get_or_insert(128 + libc::SIGKILL);
        }
    }

    /// Kills a tree with its holder.
    fn end(&mut self, holder: i32) {
        let clean = tree::kill_below(holder, PATIENCE);
        tree::signal(holder, libc::SIGKILL);
        if !clean && self.caps.alone {
            // What forks faster than it is stopped: all that there is ends at once, other commands too.
            // SAFETY: a signal to all that this process may signal, which is this sandbox; not to itself.
            unsafe { libc::kill(-1, libc::SIGKILL) };
        }
        self.reap();
        self.end_strays(&Table::now());
    }

    /// A command that left next to no room for the next one has to go.
    fn crowded(&mut self) {
        let table = Table::now();
        let me = i32::try_from(std::process::id()).unwrap_or(0);
        let tasks = table.threads(&table.below(me));
        let Some(holder) = self.shell.as_ref().map(|s| s.tree.holder) else { return };
        if tasks as u64 * 10 >= self.caps.processes * 9 && table.below(holder).len() > 1 {
            self.end_shell();
            let note = format!(
                "\n[{tasks} processes and threads were left, of {} that may be: killed with the shell; the next command begins a new one]\n",
                self.caps.processes
            );
            self.note(&note);
        }
    }

    pub fn start(&mut self, command: &str) -> Result<String, Error> {
        Self::check(command)?;
        let running = self.jobs.values().filter(|t| t.ended.is_none()).count();
        if running >= self.caps.jobs {
            return Err(Error::TooManyJobs { limit: self.caps.jobs });
        }
        // Those that have ended are kept to be asked, but not without end.
        while self.jobs.len() >= self.caps.jobs * 4 {
            let Some(oldest) = self.jobs.iter().find(|(_, t)| t.ended.is_some()).map(|(id, _)| *id) else { break };
            if let Some(tree) = self.jobs.remove(&oldest) {
                self.end(tree.holder);
            }
        }
        let mut folder = self.folder.clone();
        let mut env = None;
        if let Some(shell) = self.shell.as_ref().filter(|s| s.tree.ended.is_none()) {
            if let Ok(place) = std::fs::read_link(format!("/proc/{}/cwd", shell.pid)) {
                folder = place;
            }
            env = self.exported();
        }
        let before = env.map(|env| std::mem::replace(&mut self.program.env, env));
        let started = self.program.start(&["--noprofile", "--norc", "-c", command], &folder, &[], self.caps.output);
        if let Some(before) = before {
            self.program.env = before;
        }
        let (tree, _) = started.map_err(|e| no_process(&e))?;
        self.last += 1;
        self.jobs.insert(self.last, tree);
        Ok(self.last.to_string())
    }

    /// What the shell exports by now, as it says itself; `None` if it doesn't say it at once.
    fn exported(&mut self) -> Option<BTreeMap<String, String>> {
        let shell = self.shell.as_mut()?;
        shell.record.clear();
        let ask = "/usr/bin/env -0 >&251; printf '\\0' >&251\n";
        shell.script.write_all(ask.as_bytes()).ok()?;
        let end = Instant::now() + Duration::from_secs(2);
        let mut answer: Vec<u8> = Vec::new();
        while !(answer == [0] || answer.ends_with(&[0, 0])) {
            let left = end.saturating_duration_since(Instant::now());
            let mut poll = libc::pollfd { fd: shell.reply.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one valid pollfd.
            let ready = unsafe { libc::poll(&raw mut poll, 1, i32::try_from(left.as_millis()).unwrap_or(0)) };
            if ready <= 0 || answer.len() > 1 << 20 {
                return None;
            }
            if drain(&shell.reply, |bytes| answer.extend_from_slice(bytes)) {
                return None;
            }
        }
        let words = answer.split(|b| *b == 0).filter_map(|w| {
            let word = OsString::from_vec(w.to_vec()).into_string().ok()?;
            word.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned()))
        });
        let env: BTreeMap<_, _> =
            words.filter(|(k, _)| !matches!(k.as_str(), "PWD" | "OLDPWD" | "SHLVL" | "_")).collect();
        (!env.is_empty()).then_some(env)
    }

    fn id(&self, id: &str) -> Result<u64, Error> {
        id.parse().ok().filter(|n| self.jobs.contains_key(n)).ok_or_else(|| Error::NoSuchJob { id: id.into() })
    }

    pub fn output(&mut self, id: &str) -> Result<JobOutput, Error> {
        let number = self.id(id)?;
        self.pump();
        let Some(tree) = self.jobs.get_mut(&number) else { return Err(Error::NoSuchJob { id: id.into() }) };
        let (output, cut) = tree.said.take();
        Ok(JobOutput { output, running: tree.ended.is_none(), status: tree.ended, cut })
    }

    pub fn kill(&mut self, id: &str) -> Result<(), Error> {
        let number = self.id(id)?;
        if let Some(tree) = self.jobs.remove(&number) {
            self.end(tree.holder);
        }
        Ok(())
    }
}

fn no_process(error: &io::Error) -> Error {
    if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) {
        let why = "the sandbox may start no more processes; kill what runs in the background";
        return Error::Denied { path: "the command".into(), why: why.into() };
    }
    Error::Failed(error.to_string())
}

/// As one word of a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Bytes and number of files below some folders. What is laid so deep that it can't be looked at is too much.
fn usage(folders: &[PathBuf]) -> (u64, u64) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (mut bytes, mut files) = (0, 0);
    for found in folders.iter().flat_map(walkdir::WalkDir::new) {
        match found.map_err(|e| (e.path().map(Path::to_owned), e.into_io_error().and_then(|e| e.raw_os_error()))) {
            Ok(entry) => {
                files += 1;
                bytes += entry.metadata().map_or(0, |about| about.blocks() * 512);
            }
            // Closed by its owner, who is ours as well: open for the next look.
            Err((Some(path), Some(libc::EACCES))) => {
                let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700));
            }
            Err((_, Some(libc::ENAMETOOLONG))) => return (u64::MAX, u64::MAX),
            Err(_) => {}
        }
    }
    (bytes, files)
}
