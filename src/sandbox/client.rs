//! The agent's handle on its sandbox.
//!
//! Knows the keeper that it starts and the channel of the episode that the keeper began. Must not know how either is
//! confined, and believes nothing of what an episode answers without a bound: what leaves is checked here again.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::export;
use super::wire::{Answer, Began, Channel, Order, Request, Settings};
use super::workspace::{Entry, Error, ExportLimits, JobOutput, MAX_TIMEOUT, Match, Ran, Search, Workspace};

/// Name of the hidden subcommand.
pub const COMMAND: &str = "sandbox-server";
/// Time that the sandbox itself may take for anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// How much a sandbox may use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Processes and threads.
    pub processes: u64,
    /// Of all processes together, bytes; what is over it is killed. Files in memory are not among it but the disk's.
    pub memory: u64,
    /// Largest file, bytes.
    pub file: u64,
    /// All files of the workspace, of `/tmp` and of the home folder, bytes.
    pub disk: u64,
    /// Number of those files.
    pub files: u64,
    /// Open files of one process.
    pub open_files: u64,
    /// Bytes of a command's output that are kept.
    pub output: usize,
    /// Background commands.
    pub jobs: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            processes: 256,
            memory: 8 << 30,
            file: 1 << 30,
            disk: 2 << 30,
            files: 100_000,
            open_files: 1024,
            output: 30_000,
            jobs: 16,
        }
    }
}

/// A sandbox to be started.
#[derive(Clone, Debug)]
pub struct Options {
    /// This program.
    pub program: PathBuf,
    /// The toolchain, read-only, beyond the folders of the system.
    pub read: Vec<PathBuf>,
    /// Folders of programs that are found before those of the system.
    pub path: Vec<PathBuf>,
    /// A listening socket that is reachable from inside; its path there is in `KERNELFLEET_SOCKET`. The sandbox's user
    /// becomes its owner. Where there are no namespaces, that user must be able to enter the folders above it.
    pub socket: Option<PathBuf>,
    pub env: BTreeMap<String, String>,
    pub bounds: Bounds,
    /// Namespaces are made where the host allows them; `false` never makes any.
    pub namespaces: bool,
    /// Starts even where nothing keeps the host's files from being read. For hosts that are themselves sandboxes.
    pub weak: bool,
    /// Where the sandbox's own folder is made; the system's folder for temporary files if absent.
    pub folder: Option<PathBuf>,
    /// A workspace that is mounted: it is emptied and never removed. Without mount namespaces only.
    pub workspace: Option<PathBuf>,
    /// A folder that is the workspace's `utils` and that nobody can write: where there are no mount namespaces, one that
    /// is mounted there already.
    pub sealed: Option<PathBuf>,
}

impl Options {
    #[must_use]
    pub fn new(program: PathBuf) -> Self {
        Self {
            program,
            read: Vec::new(),
            path: Vec::new(),
            socket: None,
            env: BTreeMap::new(),
            bounds: Bounds::default(),
            namespaces: true,
            weak: false,
            folder: None,
            workspace: None,
            sealed: None,
        }
    }

    pub(super) fn settings(&self, folder: PathBuf) -> Settings {
        Settings {
            folder,
            read: self.read.clone(),
            path: self.path.clone(),
            socket: self.socket.clone(),
            env: self.env.clone(),
            bounds: self.bounds.clone(),
            namespaces: self.namespaces,
            weak: self.weak,
            workspace: self.workspace.clone(),
            sealed: self.sealed.clone(),
        }
    }
}

/// A sandbox that runs. Everything in it ends when this is dropped.
#[derive(Debug)]
pub struct Sandbox {
    orders: Channel,
    episode: Channel,
    began: Began,
    /// None where somebody else has started it.
    _keeper: Option<Keeper>,
    /// After the keeper: it is removed when nothing writes into it any more.
    _folder: Option<tempfile::TempDir>,
}

#[derive(Debug)]
struct Keeper(Child);

impl Drop for Keeper {
    fn drop(&mut self) {
        // It has been told by the end of its channel, and ends what runs before it ends.
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        // The keeper, which is waited for next, ends when it hears this.
        self.orders.close();
    }
}

impl Sandbox {
    /// Starts a sandbox with an empty workspace.
    ///
    /// # Errors
    /// When the program can't be started, or the host allows no confinement that is worth the name.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let failed = |what: &str, e: &dyn std::fmt::Display| Error::Failed(format!("{what}: {e}"));
        let mut builder = tempfile::Builder::new();
        builder.prefix("kernelfleet-sandbox-");
        let folder = match &options.folder {
            Some(parent) => builder.tempdir_in(parent),
            None => builder.tempdir(),
        }
        .map_err(|e| failed("no folder for the sandbox can be made", &e))?;
        // Its user must get through to what is its own.
        std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o711))
            .map_err(|e| failed("the sandbox's folder can't be opened to its user", &e))?;
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = Command::new(&options.program);
        command
            .arg(COMMAND)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        super::descriptor_three(&mut command, theirs.into());
        let child = command.spawn().map_err(|e| failed(&format!("{} can't be started", options.program.display()), &e));
        drop(command);
        let mut keeper = Keeper(child?);
        let settings = options.settings(folder.path().to_owned());
        let mut orders = Channel::new(ours);
        match begin(&mut orders, &Order::Start(settings)) {
            Ok((began, episode)) => Ok(Self { orders, episode, began, _keeper: Some(keeper), _folder: Some(folder) }),
            Err(error) => {
                let _ = keeper.0.kill();
                Err(error)
            }
        }
    }

    /// The sandbox that is kept behind a socket, another container's, with an empty workspace. Waits for the socket.
    ///
    /// # Errors
    /// When nobody listens within `patience`, or the host allows no confinement that is worth the name.
    pub fn connect(socket: &Path, patience: Duration) -> Result<Self, Error> {
        let end = Instant::now() + patience;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() >= end => {
                    return Err(Error::Gone(format!("nobody keeps one at {}: {error}", socket.display())));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(20)),
            }
        };
        let mut orders = Channel::new(stream);
        let (began, episode) = begin(&mut orders, &Order::Begin)?;
        Ok(Self { orders, episode, began, _keeper: None, _folder: None })
    }

    /// The workspace as commands see it.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.began.workspace
    }

    /// What holds here: `users`, `landlock`, `seccomp`, `limits`, `pid-namespace`, ...
    #[must_use]
    pub fn isolation(&self) -> &[String] {
        &self.began.isolation
    }

    /// What the host did not allow, and why.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.began.notes
    }

    fn ask<T: DeserializeOwned>(&mut self, request: &Request, patience: Duration) -> Result<T, Error> {
        self.ask_with(request, &[], patience).map(|a| a.0)
    }

    /// Sends a request with bytes beside it; the answer and the bytes beside that.
    fn ask_with<T: DeserializeOwned>(
        &mut self,
        request: &Request,
        raw: &[u8],
        patience: Duration,
    ) -> Result<(T, Vec<u8>), Error> {
        self.episode.send(request, raw, None).map_err(|e| gone(&e))?;
        let frame = self.episode.receive(Some(Instant::now() + patience)).map_err(|e| gone(&e))?;
        match frame.body {
            Answer::Done(value) => {
                let value = serde_json::from_value(value).map_err(|e| gone(&e.into()))?;
                Ok((value, frame.raw))
            }
            Answer::Refused(error) => Err(error),
            Answer::File { .. } => Err(gone(&io::Error::other("it sent a file that nobody asked for"))),
        }
    }
}

fn begin(orders: &mut Channel, order: &Order) -> Result<(Began, Channel), Error> {
    orders.send(order, &[], None).map_err(|e| gone(&e))?;
    let frame = orders.receive::<Result<Began, String>>(Some(Instant::now() + PATIENCE)).map_err(|e| gone(&e))?;
    let began = frame.body.map_err(Error::Failed)?;
    let fd = frame.fd.ok_or_else(|| Error::Gone("it gave no channel".into()))?;
    Ok((began, Channel::new(UnixStream::from(fd))))
}

fn gone(error: &io::Error) -> Error {
    Error::Gone(match error.kind() {
        io::ErrorKind::TimedOut => "it gives no answer".into(),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            "its server has ended".into()
        }
        _ => error.to_string(),
    })
}

impl Workspace for Sandbox {
    fn run(&mut self, command: &str, timeout: Duration) -> Result<Ran, Error> {
        let timeout = timeout.min(MAX_TIMEOUT);
        self.ask(&Request::Run { command: command.into(), seconds: timeout.as_secs_f64() }, timeout + PATIENCE)
    }

    fn start(&mut self, command: &str) -> Result<String, Error> {
        self.ask(&Request::Start { command: command.into() }, PATIENCE)
    }

    fn output(&mut self, id: &str) -> Result<JobOutput, Error> {
        self.ask(&Request::Output { id: id.into() }, PATIENCE)
    }

    fn kill(&mut self, id: &str) -> Result<(), Error> {
        self.ask(&Request::Kill { id: id.into() }, PATIENCE)
    }

    fn read(&mut self, path: &str, limit: u64) -> Result<Vec<u8>, Error> {
        self.ask_with::<()>(&Request::Read { path: path.into(), limit }, &[], PATIENCE).map(|a| a.1)
    }

    fn write(&mut self, path: &str, bytes: &[u8]) -> Result<(), Error> {
        let request = Request::Write { path: path.into(), executable: false };
        self.ask_with(&request, bytes, PATIENCE).map(|a| a.0)
    }

    fn stat(&mut self, path: &str) -> Result<Entry, Error> {
        self.ask(&Request::Stat { path: path.into() }, PATIENCE)
    }

    fn list(&mut self, path: &str) -> Result<Vec<Entry>, Error> {
        self.ask(&Request::List { path: path.into() }, PATIENCE)
    }

    fn glob(&mut self, pattern: &str, path: Option<&str>) -> Result<Vec<Entry>, Error> {
        self.ask(&Request::Glob { pattern: pattern.into(), path: path.map(str::to_owned) }, PATIENCE)
    }

    fn grep(&mut self, search: &Search) -> Result<Vec<Match>, Error> {
        self.ask(&Request::Grep { search: search.clone() }, PATIENCE)
    }

    fn export(&mut self, limits: &ExportLimits) -> Result<BTreeMap<String, Vec<u8>>, Error> {
        self.episode.send(&Request::Export { limits: limits.clone() }, &[], None).map_err(|e| gone(&e))?;
        let end = Instant::now() + PATIENCE;
        let mut taken = export::Taken::new(limits);
        loop {
            let frame = self.episode.receive(Some(end)).map_err(|e| gone(&e))?;
            match frame.body {
                // A server that breaks the rules that it was given is not one to read on from.
                Answer::File { path } => {
                    if let Err(error) = taken.add(path, frame.raw) {
                        self.episode.close();
                        return Err(error);
                    }
                }
                Answer::Done(_) => return Ok(taken.files),
                Answer::Refused(error) => return Err(error),
            }
        }
    }

    fn reset(&mut self, template: &BTreeMap<String, Vec<u8>>) -> Result<(), Error> {
        (self.began, self.episode) = begin(&mut self.orders, &Order::Reset)?;
        for (path, bytes) in template {
            if self.began.sealed && path.starts_with("utils/") {
                continue;
            }
            let request = Request::Write { path: path.clone(), executable: bytes.starts_with(b"#!") };
            self.ask_with::<()>(&request, bytes, PATIENCE)?;
        }
        Ok(())
    }
}
