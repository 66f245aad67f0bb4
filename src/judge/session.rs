//! A judge at work: zygotes kept warm, one reference host a task, candidates in, verdicts out.
//!
//! Knows who is asked for what and in which order a task is opened. How one candidate is evaluated is in
//! `evaluate`; what the answers mean is in the contract.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::build::extension::Framework;
use super::build::{Builder, Built};
use super::cache::{BASELINE, Baseline, Cache, digest};
use super::confinement;
use super::counters::Kernel;
use super::leash::Leash;
use super::process::{self, Forked, Zygote, python_command};
use super::turns::{self, Turns};
use super::verdict::{LaunchEvidence, PROCEDURE, Reason};
use super::{Candidate, Device, Effort, Options, Precision, TaskSource, Toolchain, Verdict, device, evaluate};
use crate::task::graph::Graph;

/// Why there is no verdict.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// What was asked can't be judged: the task or the machine is the reason. Exit status 2.
    #[error("{message}")]
    Request { code: String, message: String },
    /// The judge itself failed. Exit status 1.
    #[error("fault of the judge: {0}")]
    Fault(String),
}

impl Error {
    pub(super) fn request(code: &str, message: impl Into<String>) -> Self {
        Self::Request { code: code.to_owned(), message: message.into() }
    }
}

/// The right to use the device, among all judges that are given the same one: exclusive for measurement, shared for
/// verification. Who measures waits until nobody else works; who works waits for measurements, also for those that
/// have waited long. A reference host that compiles or checks for seconds is not waited for: it is stopped meanwhile.
/// Judges of other processes on the same device take turns with it (`turns`).
#[derive(Default)]
pub struct Slice {
    users: Mutex<Users>,
    changed: Condvar,
    turns: OnceLock<Turns>,
    told: Mutex<Option<turns::Told>>,
    arbiter: Option<Arc<dyn Arbiter>>,
    memory: Arc<Memory>,
}

/// Who grants exclusive use of a device that other processes share, instead of turns with them. It is asked on the thread
/// that evaluates, when nobody else works here any more, so that what is granted is spent on measuring alone.
pub trait Arbiter: Send + Sync + std::fmt::Debug {
    /// Returns when the device is granted; false when it no longer matters, since the evaluation was ended.
    fn acquire(&self) -> bool;
    /// Gives it back.
    fn release(&self);
}

impl std::fmt::Debug for Slice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slice").field("users", &self.users).field("turns", &self.turns).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Users {
    sharing: usize,
    exclusive: bool,
    /// Since when the first of those that wait to measure has waited, and how many wait.
    waiting: Option<(Instant, usize)>,
    /// Processes that are stopped while somebody measures.
    pausable: Vec<i32>,
}

/// After so long a wait for the device, no new work begins before the measurement.
const PATIENCE: Duration = Duration::from_millis(500);

/// A held slice; given back when dropped.
#[derive(Debug)]
pub struct Held<'a> {
    slice: &'a Slice,
    exclusive: bool,
    turn: Turn,
}

/// What a slice holds among the processes of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Shared,
    Alone,
    /// As `Alone`, but another process did not end in time and works beside it.
    Beside,
}

impl Held<'_> {
    /// Waits until no other process works on the device either. `false` where one did not end.
    pub(super) fn alone(&mut self) -> bool {
        if self.turn == Turn::Shared {
            self.turn = match self.slice.turns.get() {
                None => Turn::Alone,
                Some(turns) => {
                    turns.leave();
                    if turns.hold() { Turn::Alone } else { Turn::Beside }
                }
            };
        }
        self.turn == Turn::Alone
    }

    /// Lets those that wait to measure go first, between steps that leave nothing at work on the device. Of no effect
    /// for who measures.
    pub(super) fn breathe(&mut self) {
        let elsewhere = || self.slice.turns.get().is_some_and(Turns::wanted);
        let mut users = self.slice.users();
        if self.exclusive || (users.waiting.is_none() && !elsewhere()) {
            return;
        }
        users.sharing = users.sharing.saturating_sub(1);
        drop(users);
        self.slice.turns.get().inspect(|turns| turns.leave());
        self.slice.changed.notify_all();
        let mut users = self.slice.users();
        while users.exclusive || users.waiting.is_some() {
            users = self.slice.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        users.sharing += 1;
        drop(users);
        self.slice.turns.get().inspect(|turns| turns.share());
    }
}

/// A process that is stopped while somebody measures; runs on when dropped.
#[derive(Debug)]
pub struct Paused<'a> {
    slice: &'a Slice,
    pid: i32,
}

impl Slice {
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// One whose exclusive use is granted elsewhere too.
    #[must_use]
    pub fn under(arbiter: Arc<dyn Arbiter>) -> Arc<Self> {
        Arc::new(Self { arbiter: Some(arbiter), ..Self::default() })
    }

    /// What is called when the device's memory is promised away and more is wanted: closes a task that is open without
    /// being worked on, and says whether there was one. To be set once.
    pub fn on_pressure(&self, relief: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.memory.relief.set(Relief(Box::new(relief)));
    }

    /// Waits for other processes are told to `told`, and not logged.
    #[must_use]
    pub fn telling(told: impl Fn(&str) + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self { told: Mutex::new(Some(Box::new(told))), ..Self::default() })
    }

    /// From now on it takes turns with the slices of other processes on the same device.
    fn among_processes(&self, device: &device::Facts) {
        if self.turns.get().is_some() || self.arbiter.is_some() {
            return;
        }
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner).take();
        let told = told.unwrap_or_else(|| Box::new(|text| tracing::warn!("{text}")));
        let text = |key: &str| device.description.get(key).and_then(Value::as_str);
        let (id, name) = match text("uuid") {
            Some(uuid) => (uuid, text("name").unwrap_or("the card")),
            None => ("cpu", "the CPU"),
        };
        match Turns::new(&turns::folder(), id, name, told) {
            Ok(turns) => {
                let _ = self.turns.set(turns);
            }
            Err(error) => tracing::warn!(
                %error, folder = %turns::folder().display(),
                "no turns with other processes on this device; name a folder that can be written in {}", turns::FOLDER
            ),
        }
    }

    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody measures, nor has waited long to measure.
    pub fn share(&self) -> Held<'_> {
        let mut users = self.users();
        while users.exclusive || users.waiting.is_some_and(|(since, _)| since.elapsed() > PATIENCE) {
            users = self.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        users.sharing += 1;
        drop(users);
        self.turns.get().inspect(|turns| turns.share());
        Held { slice: self, exclusive: false, turn: Turn::Shared }
    }

    /// Waits until nobody else of this process uses the device; then what is `pausable` is stopped. Other processes
    /// share it until `Held::alone`.
    pub fn hold(&self) -> Held<'_> {
        let mut users = self.users();
        let (since, count) = users.waiting.unwrap_or_else(|| (Instant::now(), 0));
        users.waiting = Some((since, count + 1));
        while users.exclusive || users.sharing > 0 {
            users = self.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        users.waiting = users.waiting.and_then(|(since, count)| (count > 1).then_some((since, count - 1)));
        users.exclusive = true;
        for &pid in &users.pausable {
            process::signal(pid, libc::SIGSTOP);
        }
        drop(users);
        let turn = match &self.arbiter {
            Some(arbiter) if arbiter.acquire() => Turn::Alone,
            Some(_) => Turn::Beside,
            None => {
                self.turns.get().inspect(|turns| turns.share());
                Turn::Shared
            }
        };
        Held { slice: self, exclusive: true, turn }
    }

    /// Lets `pid` use the device beside everybody but measurements, for which it is stopped. What it had put on the
    /// device by then may still run for a moment: who measures looks for an idle device first.
    pub fn pausable(&self, pid: i32) -> Paused<'_> {
        let mut users = self.users();
        while users.exclusive {
            users = self.changed.wait(users).unwrap_or_else(PoisonError::into_inner);
        }
        users.pausable.push(pid);
        drop(users);
        self.turns.get().inspect(|turns| turns.share());
        Paused { slice: self, pid }
    }

    /// As `pausable`, without waiting: while somebody measures, `pid` is stopped from the start. Until `leave`.
    pub(super) fn join(&self, pid: i32) {
        let mut users = self.users();
        users.pausable.push(pid);
        if users.exclusive {
            process::signal(pid, libc::SIGSTOP);
        }
    }

    /// `pid` is no longer stopped for measurements, and runs on.
    pub(super) fn leave(&self, pid: i32) {
        let mut users = self.users();
        if let Some(at) = users.pausable.iter().position(|&p| p == pid) {
            users.pausable.swap_remove(at);
        }
        process::signal(pid, libc::SIGCONT);
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Some(arbiter) = self.slice.arbiter.as_ref().filter(|_| self.exclusive) {
            arbiter.release();
        }
        self.slice.turns.get().inspect(|turns| if self.turn == Turn::Shared { turns.leave() } else { turns.release() });
        let mut users = self.slice.users();
        if self.exclusive {
            users.exclusive = false;
            for &pid in &users.pausable {
                process::signal(pid, libc::SIGCONT);
            }
        } else {
            users.sharing = users.sharing.saturating_sub(1);
        }
        drop(users);
        self.slice.changed.notify_all();
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.slice.leave(self.pid);
        self.slice.turns.get().inspect(|turns| turns.leave());
    }
}

/// A judge of one device. Sessions of several threads may share it.
#[derive(Debug)]
pub struct Judge {
    pub(super) toolchain: Toolchain,
    pub(super) options: Options,
    pub(super) slice: Arc<Slice>,
    pub(super) builder: Builder,
    pub(super) cache: Cache,
    pub(super) device: device::Facts,
    /// Which build of the judge this is: no verdict of another is remembered.
    pub(super) version: String,
    memory: Arc<Memory>,
    zygotes: Arc<Zygotes>,
    told: OnceLock<Phases>,
}

/// What a judge forks its children from; judges of other choices on the same device fork from the same.
#[derive(Debug)]
struct Zygotes {
    hosts: Mutex<Zygote>,
    recorders: Mutex<Zygote>,
    /// Started when the first candidate needs a process of its own.
    processes: Mutex<Option<Processes>>,
    /// Whether that of the hosts was warmed, and is to be again if it has to be started anew.
    warm: AtomicBool,
}

impl Zygotes {
    fn warm(&self) {
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let warmed = hosts.ask(&json!({"op": "warm"}), MINUTES);
        if let Err(error) = &warmed {
            tracing::warn!(%error, "the host zygote could not be warmed");
        }
        // One that ends of it isn't warmed again: whatever is open in a host ends with it.
        self.warm.store(warmed.is_ok(), Ordering::Relaxed);
    }
}

/// Who is told what an evaluation is at, if anybody is.
#[derive(Clone, Default)]
pub(super) struct Phases(Option<Arc<dyn Fn(&str) + Send + Sync>>);

impl Phases {
    pub(super) fn tell(&self, phase: &str) {
        if let Some(told) = &self.0 {
            told(phase);
        }
    }
}

impl std::fmt::Debug for Phases {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Phases")
    }
}

/// What candidates' own processes are made from.
#[derive(Debug)]
struct Processes {
    zygote: Zygote,
    framework: Framework,
    native: Built,
}

/// Device memory that open tasks have been promised, in bytes.
#[derive(Debug, Default)]
struct Memory {
    used: Mutex<u64>,
    freed: Condvar,
    relief: OnceLock<Relief>,
}

struct Relief(Box<dyn Fn() -> bool + Send + Sync>);

impl std::fmt::Debug for Relief {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Relief")
    }
}

/// A promise of device memory; given back when dropped.
#[derive(Debug)]
struct Reservation {
    memory: Arc<Memory>,
    bytes: u64,
}

impl Memory {
    /// Waits until `bytes` fit beside what is promised; `bytes` must not be over `most`.
    fn reserve(self: &Arc<Self>, bytes: u64, most: u64) -> Result<Reservation, Error> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        while *used + bytes > most && *used > 0 {
            if Leash::current().is_some_and(|leash| leash.is_over()) {
                return Err(Error::Fault("ended while it waited for the card's memory".into()));
            }
            drop(used);
            let relieved = self.relief.get().is_some_and(|relief| relief.0());
            used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
            if !relieved && *used + bytes > most {
                let waited = self.freed.wait_timeout(used, Duration::from_secs(1));
                used = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        *used += bytes;
        Ok(Reservation { memory: Arc::clone(self), bytes })
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut used = self.memory.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(self.bytes);
        self.memory.freed.notify_all();
    }
}

/// A tensor as the processes describe it.
#[derive(Clone, Debug, serde::Deserialize, serde::Serialize)]
pub(super) struct WireTensor {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub bytes: u64,
    #[serde(flatten)]
    pub rest: BTreeMap<String, Value>,
}

/// A parameter set: its seed and its bytes for the recorder.
#[derive(Debug)]
pub(super) struct ParameterSet {
    pub seed: u64,
    pub tensors: Value,
    pub fd: Option<OwnedFd>,
}

/// What is fixed about an open task: enough to record and build candidates without its host.
#[derive(Debug)]
pub(super) struct Fixed {
    pub judge: Arc<Judge>,
    pub task: TaskSource,
    /// Reply of `open`.
    pub described: Value,
    pub inputs: Vec<Value>,
    pub state: Vec<WireTensor>,
    /// Drawn anew for each judgement in full (`Session::meet`).
    pub sets: Mutex<Arc<[ParameterSet]>>,
    pub digest: String,
}

impl Fixed {
    pub(super) fn sets(&self) -> Arc<[ParameterSet]> {
        Arc::clone(&self.sets.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A task that is open in a reference host.
#[derive(Debug)]
pub struct Session {
    pub(super) fixed: Arc<Fixed>,
    pub(super) host: Forked,
    pub(super) current_set: usize,
    /// A candidate has met the parameter sets: it may have learnt them, and what it said of them been read.
    met: bool,
    pub(super) parameter_fds: BTreeMap<String, (OwnedFd, u64)>,
    pub(super) input_fds: Vec<Vec<Option<(OwnedFd, u64)>>>,
    pub(super) slots: usize,
    pub(super) helper: Option<Forked>,
    /// The next candidate's runner, started ahead.
    pub(super) spare: Option<evaluate::ahead::Spare>,
    /// The runner of the last candidate of a batch, for the next one.
    pub(super) worn: Option<evaluate::ahead::Worn>,
    /// Candidates that the present runner has served.
    pub(super) served: usize,
    #[expect(dead_code, reason = "held for its end")]
    reserved: Option<Reservation>,
    pub(super) baseline: Option<Baseline>,
    /// Whether its host has compiled the reference.
    pub(super) compiled: bool,
    /// Eager of one run, microseconds, as last seen: bounds what a candidate may take.
    pub(super) eager_us: f64,
}

pub(super) const MINUTES: Duration = Duration::from_secs(600);

/// A fault in a helper process is a fault of the judge; a refusal about the task is a request error.
pub(super) fn task_error(task: &TaskSource, error: process::Error) -> Error {
    match error {
        // Other tasks may hold what is missing now; one that can never fit is refused by its estimate.
        process::Error::Refused(refused) if refused.code == "memory" => Error::Fault(format!(
            "{}: {}: run it again, with fewer tasks at once",
            task.path.display(),
            refused.message
        )),
        process::Error::Refused(refused) => {
            let line = refused.body["line"].as_u64().map(|l| format!(":{l}")).unwrap_or_default();
            Error::Request {
                code: refused.code,
                message: format!("{}{line}: {}", task.path.display(), refused.message),
            }
        }
        process::Error::Gone { timeout: true, what, .. } => {
            Error::request("timeout", format!("{}: the reference host {what}", task.path.display()))
        }
        process::Error::Gone { what, .. } => Error::request(
            "crash",
            format!(
                "{}: the reference host {what}: the task crashes it or needs more memory than there is",
                task.path.display()
            ),
        ),
        other => Error::Fault(other.to_string()),
    }
}

/// What PyTorch is told in the zygotes of hosts and of candidates' processes: what is measured in either has the same.
fn framework_environment(toolchain: &Toolchain) -> BTreeMap<String, String> {
    let mut env: BTreeMap<String, String> = [
        // Recycled memory, for eager as for a candidate: page faults must not be what is measured.
        ("MALLOC_MMAP_THRESHOLD_", "17179869184".to_owned()),
        ("MALLOC_TRIM_THRESHOLD_", "17179869184".to_owned()),
        ("MALLOC_TOP_PAD_", "268435456".to_owned()),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "1".to_owned()),
        ("CUDA_MODULE_LOADING", "LAZY".to_owned()),
        ("OMP_NUM_THREADS", toolchain.threads.to_string()),
    ]
    .into_iter()
    .map(|(k, v)| (k.to_owned(), v))
    .collect();
    if toolchain.passive {
        env.insert("OMP_WAIT_POLICY".into(), "passive".into());
    }
    env
}

/// The zygote of reference hosts and library helpers.
fn start_hosts(toolchain: &Toolchain, device: Device) -> Result<Zygote, process::Error> {
    let python_path = toolchain.agent_image.join("python");
    let mut env = framework_environment(toolchain);
    if device == Device::Cpu {
        env.insert("CUDA_VISIBLE_DEVICES".into(), String::new());
        let kept = toolchain.cache.join("compiler").display().to_string();
        env.insert("KERNELFLEET_COMPILER_CACHE".into(), kept);
    }
    Zygote::start("reference host zygote", python_command(&toolchain.python, "kernelfleet_host", &python_path, &env))
}

fn start_recorders(toolchain: &Toolchain) -> Result<Zygote, process::Error> {
    let env: BTreeMap<String, String> =
        [("CUDA_VISIBLE_DEVICES".to_owned(), String::new()), ("OMP_NUM_THREADS".to_owned(), "1".to_owned())].into();
    let python_path = toolchain.agent_image.join("python");
    Zygote::start("recorder zygote", python_command(&toolchain.python, "kernelfleet_recorder", &python_path, &env))
}

impl Judge {
    /// Starts the zygotes (about 2 s each, at the same time).
    ///
    /// # Errors
    /// `Request` when the device asked for is not here, `Fault` when a zygote does not start.
    pub fn start(toolchain: &Toolchain, options: Options, slice: Arc<Slice>) -> Result<Arc<Self>, Error> {
        let device = device::Facts::find(toolchain, options.device)?;
        slice.among_processes(&device);
        // On the CPU whatever works is the neighbour of another process's measurement, the start of this judge too.
        let turn = quietly(&slice, options.device);
        let fault = |e: process::Error| Error::Fault(e.to_string());
        let (hosts, recorders) = std::thread::scope(|scope| {
            let hosts = scope.spawn(|| start_hosts(toolchain, options.device));
            let recorders = start_recorders(toolchain);
            (hosts.join(), recorders)
        });
        let hosts = hosts.map_err(|_| Error::Fault("the thread that starts the hosts died".into()))?.map_err(fault)?;
        drop(turn);
        let zygotes = Zygotes {
            hosts: Mutex::new(hosts),
            recorders: Mutex::new(recorders.map_err(fault)?),
            processes: Mutex::new(None),
            warm: AtomicBool::new(false),
        };
        let version = evaluate::remember::version(toolchain);
        Ok(Self::of(toolchain, options, slice, device, version, Arc::new(zygotes)))
    }

    /// A judge on this one's device, with its processes and whatever these are warmed for, that judges by other choices.
    #[must_use]
    pub fn by(&self, mut options: Options) -> Arc<Self> {
        options.device = self.options.device;
        let (slice, zygotes) = (Arc::clone(&self.slice), Arc::clone(&self.zygotes));
        Self::of(&self.toolchain, options, slice, self.device.clone(), self.version.clone(), zygotes)
    }

    fn of(
        toolchain: &Toolchain,
        mut options: Options,
        slice: Arc<Slice>,
        device: device::Facts,
        version: String,
        zygotes: Arc<Zygotes>,
    ) -> Arc<Self> {
        options.measure_seconds = options.measure_seconds.or(toolchain.measure.map(|d| d.as_secs_f64()));
        Arc::new(Self {
            memory: Arc::clone(&slice.memory),
            builder: Builder::new(toolchain, &toolchain.cache.join("builds")),
            cache: Cache::new(&toolchain.cache),
            toolchain: toolchain.clone(),
            options,
            slice,
            device,
            version,
            zygotes,
            told: OnceLock::new(),
        })
    }

    /// Each phase of an evaluation is told as it begins, by its name in `phases_seconds`. To be set once.
    pub fn telling(&self, told: impl Fn(&str) + Send + Sync + 'static) {
        let _ = self.told.set(Phases(Some(Arc::new(told))));
    }

    pub(super) fn phases(&self) -> Phases {
        self.told.get().cloned().unwrap_or_default()
    }

    /// The device that it judges on.
    #[must_use]
    pub const fn device(&self) -> Device {
        self.options.device
    }

    /// What it is.
    #[must_use]
    pub const fn facts(&self) -> &device::Facts {
        &self.device
    }

    pub(super) fn fork_recorder(&self) -> Result<Forked, process::Error> {
        let scratch = scratch().map_err(|source| process::Error::Start { role: "recorder".into(), source })?;
        let confinement = confinement::recorder(&self.toolchain, scratch.path());
        confinement.own(scratch.path()).map_err(|source| process::Error::Start { role: "recorder".into(), source })?;
        let mut zygote = self.zygotes.recorders.lock().unwrap_or_else(PoisonError::into_inner);
        let mut forked = zygote.forked(
            || start_recorders(&self.toolchain),
            |zygote| zygote.fork("recorder", &confinement, 1, &json!({})),
        )?;
        forked.scratch = Some(scratch);
        Ok(forked)
    }

    /// A process for a candidate; with what its extensions are built against and the native part that it loads. `built`: it
    /// only says what is to be built, without a device.
    pub(super) fn fork_process(&self, built: bool) -> Result<(Forked, Framework, Built), Error> {
        let fault = |e: &dyn std::fmt::Display| Error::Fault(format!("a candidate's process can't be started: {e}"));
        let mut processes = self.zygotes.processes.lock().unwrap_or_else(PoisonError::into_inner);
        if processes.is_none() {
            *processes = Some(self.start_processes()?);
        }
        let Some(Processes { zygote, framework, native }) = processes.as_mut() else {
            return Err(Error::Fault("no candidate's process".into()));
        };
        let scratch = scratch().map_err(|e| fault(&e))?;
        let confinement = confinement::process(&self.toolchain, self.options.device, built, scratch.path());
        confinement.own(scratch.path()).map_err(|e| fault(&e))?;
        let fork =
            |zygote: &mut Zygote| zygote.fork("candidate's process", &confinement, self.toolchain.threads, &json!({}));
        let mut forked = zygote.forked(|| self.start_process_zygote(), fork).map_err(|e| fault(&e))?;
        forked.scratch = Some(scratch);
        Ok((forked, framework.clone(), native.clone()))
    }

    fn start_process_zygote(&self) -> Result<Zygote, process::Error> {
        let env = framework_environment(&self.toolchain);
        let python_path = self.toolchain.agent_image.join("python");
        let command = python_command(&self.toolchain.python, "kernelfleet_process", &python_path, &env);
        Zygote::start("zygote of candidates' processes", command)
    }

    fn start_processes(&self) -> Result<Processes, Error> {
        let fault = |e: process::Error| Error::Fault(e.to_string());
        let mut zygote = self.start_process_zygote().map_err(fault)?;
        let said = zygote.ask(&json!({"op": "ping"}), Duration::from_secs(60)).map_err(fault)?.body;
        let text = |key: &str| said["versions"][key].as_str().unwrap_or_default().to_owned();
        let framework = Framework {
            version: format!("{} {}", text("torch"), text("python")),
            root: text("torch_root").into(),
            python: text("python_include").into(),
            abi: text("abi"),
        };
        let native = self.builder.native(&framework).map_err(|e| Error::Fault(e.to_string()))?;
        Ok(Processes { zygote, framework, native })
    }

    fn fork_host(&self, role: &str) -> Result<Forked, process::Error> {
        let scratch = scratch().map_err(|source| process::Error::Start { role: role.into(), source })?;
        let confinement = confinement::host(&self.toolchain, self.options.device, scratch.path());
        confinement.own(scratch.path()).map_err(|source| process::Error::Start { role: role.into(), source })?;
        let anew = Cell::new(false);
        let again = || start_hosts(&self.toolchain, self.options.device).inspect(|_| anew.set(true));
        let mut zygote = self.zygotes.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        let forked = zygote.forked(again, |zygote| {
            zygote.fork(&format!("reference {role}"), &confinement, self.toolchain.threads, &json!({"role": role}))
        });
        drop(zygote);
        if anew.get() && self.zygotes.warm.load(Ordering::Relaxed) {
            // The host that was asked for is there: whoever asks for the next one waits, if anybody.
            let (zygotes, slice, device) = (Arc::clone(&self.zygotes), Arc::clone(&self.slice), self.options.device);
            let warming = std::thread::Builder::new().spawn(move || {
                let _turn = quietly(&slice, device);
                zygotes.warm();
            });
            if let Err(error) = warming {
                tracing::warn!(%error, "the host zygote is not warmed again");
            }
        }
        let mut forked = forked?;
        forked.scratch = Some(scratch);
        Ok(forked)
    }

    /// Imports what `torch.compile` needs into the host zygote, so that no host does (2 to 7 s; on the CPU device 5 s
    /// more the first time on a machine).
    pub fn warm(&self) {
        let _turn = self.quietly();
        self.zygotes.warm();
    }

    /// On the CPU a share of the device, for work that would disturb a measurement there; on a card none is needed.
    pub(super) fn quietly(&self) -> Option<Held<'_>> {
        quietly(&self.slice, self.options.device)
    }

    /// Opens a task in a reference host of its own.
    ///
    /// # Errors
    /// `Request` when the task is refused, with its file and line.
    pub fn open(self: &Arc<Self>, task: &TaskSource) -> Result<Session, Error> {
        let mut host = self.fork_host("host").map_err(|e| Error::Fault(e.to_string()))?;
        // `torch.compile` reads the file that code names: the host gets a copy where it may read.
        let mut given = task.clone();
        if let Some(scratch) = &host.scratch {
            let name = task.path.file_name().unwrap_or_else(|| std::ffi::OsStr::new("task.py"));
            given.path = scratch.path().join(name);
            std::fs::write(&given.path, &task.source)
                .map_err(|e| Error::Fault(format!("the task can't be laid out for its host: {e}")))?;
        }
        let fail = |e| task_error(task, e);
        let mut slots = 1;
        let mut reserved = None;
        if self.options.device == Device::Cuda {
            let mut body = self.open_request(&given, 1);
            body["op"] = json!("estimate");
            let estimate = host.ask(&body, &[], MINUTES).map_err(fail)?.body;
            let number = |key: &str| estimate[key].as_u64().unwrap_or(0);
            let set = number("input_bytes") + number("output_bytes");
            slots = usize::try_from((6u64 << 30) / set.max(1)).unwrap_or(1).clamp(1, 10);
            // The check keeps copies in double precision beside the sets that are measured on, the runner its own
            // workspaces, each process a context.
            let need = number("parameter_bytes") * 5 + number("peak_bytes") * 4 + set * (slots as u64 + 2) + (2 << 30);
            let most = self.device.memory_bytes.saturating_sub(4 << 30);
            if number("parameter_bytes") + number("peak_bytes") > most {
                return Err(Error::request(
                    "memory",
                    format!(
                        "{} needs about {} GiB, the card has {}",
                        task.name,
                        number("peak_bytes") >> 30,
                        most >> 30
                    ),
                ));
            }
            reserved = Some(self.memory.reserve(need.min(most), most)?);
        }
        let _shared = self.slice.share();
        let described = host.ask(&self.open_request(&given, slots), &[], MINUTES).map_err(fail)?.body;
        let inputs = described["inputs"].as_array().cloned().unwrap_or_default();
        let state: Vec<WireTensor> = serde_json::from_value(described["state"].clone())
            .map_err(|e| Error::Fault(format!("the reference host described its state badly: {e}")))?;
        let digest = digest([
            task.source.as_bytes(),
            self.device.class.as_bytes(),
            format!("{:?}", self.options.precision).as_bytes(),
            serde_json::to_vec(&self.toolchain.versions).unwrap_or_default().as_slice(),
            PROCEDURE.as_bytes(),
            self.toolchain.threads.to_string().as_bytes(),
        ]);
        let baseline = self.cache.get(BASELINE, &digest);
        let (judge, task, sets) = (Arc::clone(self), task.clone(), Mutex::new(Arc::from([])));
        let fixed = Arc::new(Fixed { judge, task, described, inputs, state, sets, digest });
        Ok(Session {
            fixed,
            host,
            current_set: usize::MAX,
            met: false,
            parameter_fds: BTreeMap::new(),
            input_fds: Vec::new(),
            slots: 1,
            helper: None,
            spare: None,
            worn: None,
            served: 0,
            reserved,
            baseline,
            compiled: false,
            eager_us: 0.0,
        })
    }

    pub(super) fn open_request(&self, task: &TaskSource, slots: usize) -> Value {
        let precision = match self.options.precision {
            Precision::Reference => "reference",
            Precision::Tf32 => "tf32",
            Precision::Half => "half",
        };
        json!({
            "op": "open", "source": task.source, "path": task.path.display().to_string(),
            "device": self.options.device, "precision": precision, "threads": self.toolchain.threads, "slots": slots,
        })
    }
}

/// As `Judge::quietly`.
fn quietly(slice: &Slice, device: Device) -> Option<Held<'_>> {
    (device == Device::Cpu).then(|| slice.share())
}

fn scratch() -> std::io::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("kernelfleet-").tempdir()
}

/// A seed from the system's generator. Bits of it reach PyTorch's generators one draw at a time; no two
/// seeds of an evaluation are related.
pub(super) fn secret_seed() -> Result<u64, Error> {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).map_err(|e| Error::Fault(format!("the system has no random numbers: {e}")))?;
    Ok(u64::from_le_bytes(bytes) >> 1)
}

impl Session {
    /// Whether its reference host can be asked anything.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.host.alive()
    }

    /// Whether what its host or its helper was forked from has ended, so that nothing that came of them since says anything of a
    /// candidate.
    pub(super) fn orphaned(&self) -> bool {
        self.host.orphaned() || self.helper.as_ref().is_some_and(Forked::orphaned)
    }

    /// What `kernelfleet_ext.properties()` says of the device.
    #[must_use]
    pub fn properties(&self) -> &serde_json::Value {
        &self.fixed.judge.device.properties
    }

    /// Operators of the task with their shapes.
    ///
    /// # Errors
    /// `Request` when the task can't be traced.
    pub fn trace(&mut self) -> Result<Graph, Error> {
        let reply =
            self.host.ask(&json!({"op": "trace"}), &[], MINUTES).map_err(|e| task_error(&self.fixed.task, e))?;
        serde_json::from_value(reply.body["graph"].clone())
            .or_else(|_| serde_json::from_value(reply.body))
            .map_err(|e| Error::Fault(format!("the operator graph of {} can't be read: {e}", self.fixed.task.name)))
    }

    /// Memory of the task without data, and its operators.
    ///
    /// # Errors
    /// `Request` when the task can't be run on shapes alone.
    pub fn estimate(&mut self) -> Result<Value, Error> {
        let mut body = self.fixed.judge.open_request(&self.fixed.task, 1);
        body["op"] = json!("estimate");
        Ok(self.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&self.fixed.task, e))?.body)
    }

    /// Every refusal of the contract for this task, looked for during at most about `seconds`.
    ///
    /// # Errors
    /// `Request` when the task can't be run.
    pub fn check(&mut self, seconds: f64) -> Result<Value, Error> {
        let judge = Arc::clone(&self.fixed.judge);
        let _beside = judge.slice.pausable(self.host.pid);
        let body = json!({"op": "check", "inputs": self.fixed.judge.options.inputs, "seconds": seconds});
        Ok(self.host.ask(&body, &[], MINUTES).map_err(|e| task_error(&self.fixed.task, e))?.body)
    }

    /// Shapes and types of the inputs and outputs, as the host described them.
    #[must_use]
    pub fn description(&self) -> &Value {
        &self.fixed.described
    }

    /// Plan and images of a candidate, without running it.
    ///
    /// # Errors
    /// `Request` when the candidate can't be recorded or built, with its reason.
    pub fn artifacts(&mut self, candidate: &Candidate) -> Result<super::Artifacts, Error> {
        self.meet(false)?;
        evaluate::artifacts(&self.fixed, candidate)
    }

    /// Records and builds a candidate: the steps of its plan, or why there is none.
    ///
    /// # Errors
    /// `Request` when the task is at fault, `Fault` when the judge is.
    pub fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Error> {
        self.meet(false)?;
        evaluate::compile(&self.fixed, candidate)
    }

    /// What the reference runs when it is called, the longest first: kernels on a card, operators on the CPU. Nothing
    /// where PyTorch's profiler does not work.
    ///
    /// # Errors
    /// `Request` when the task can't be run.
    pub fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Error> {
        self.prepare()?;
        let judge = Arc::clone(&self.fixed.judge);
        let mut held = judge.slice.hold();
        held.alone();
        let fail = |e| task_error(&self.fixed.task, e);
        let draw =
            json!({"op": "draw", "slot": 0, "seed": secret_seed()?, "transform": {"kind": "none", "factor": 1.0}});
        self.host.ask(&draw, &[], MINUTES).map_err(fail)?;
        let frame = match self.host.ask(&json!({"op": "profile", "slot": 0}), &[], MINUTES) {
            Ok(frame) => frame,
            Err(process::Error::Refused(refused)) if refused.code == "profiler" => return Ok(Vec::new()),
            Err(error) => return Err(fail(error)),
        };
        serde_json::from_value(frame.body["launches"].clone())
            .map_err(|e| Error::Fault(format!("the reference host described its profile badly: {e}")))
    }

    /// Hardware counters of a candidate's launches, or of the reference's kernels where none is given; why there are none.
    ///
    /// # Errors
    /// `Request` when the task can't be run, `Fault` when the judge is at fault.
    pub fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Error> {
        match candidate {
            Some(candidate) => evaluate::counted::candidate(self, candidate),
            None => evaluate::counted::reference(self),
        }
    }

    /// Judges one candidate.
    ///
    /// # Errors
    /// `Request` when the task is at fault, `Fault` when the judge is; a candidate's fault is a verdict.
    pub fn judge(&mut self, candidate: &Candidate, effort: Effort) -> Result<Verdict, Error> {
        evaluate::evaluate(self, candidate, effort)
    }

    /// Parameter sets and buffers for candidates that come now. `anew`: for a judgement in full, for which parameters are drawn
    /// that no candidate of this session has met.
    pub(super) fn meet(&mut self, anew: bool) -> Result<(), Error> {
        self.prepare()?;
        if anew && self.met {
            let judge = Arc::clone(&self.fixed.judge);
            let _shared = judge.slice.share();
            self.draw_sets()?;
        }
        self.met = true;
        Ok(())
    }

    /// Draws two parameter sets and makes the first the current one.
    fn draw_sets(&mut self) -> Result<(), Error> {
        let fixed = Arc::clone(&self.fixed);
        let mut sets = Vec::new();
        for _ in 0..2 {
            let seed = secret_seed()?;
            let asked = self.host.ask(&json!({"op": "state", "seed": seed}), &[], MINUTES);
            let mut frame = asked.map_err(|e| task_error(&fixed.task, e))?;
            let fd = if frame.fds.is_empty() { None } else { Some(frame.fds.remove(0)) };
            sets.push(ParameterSet { seed, tensors: frame.body["tensors"].clone(), fd });
        }
        *fixed.sets.lock().unwrap_or_else(PoisonError::into_inner) = sets.into();
        self.current_set = usize::MAX;
        self.select(0)
    }

    /// Draws the first parameter sets, shares parameter and input buffers: once a session.
    pub(super) fn prepare(&mut self) -> Result<(), Error> {
        if !self.input_fds.is_empty() {
            return Ok(());
        }
        let fixed = Arc::clone(&self.fixed);
        let (task, judge) = (&fixed.task, &fixed.judge);
        let _shared = judge.slice.share();
        let fail = |e| task_error(task, e);
        self.draw_sets()?;
        let frame = self.host.ask(&json!({"op": "inputs"}), &[], MINUTES).map_err(fail)?;
        let mut fds: Vec<Option<OwnedFd>> = frame.fds.into_iter().map(Some).collect();
        self.slots = frame.body["slots"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0).min(64);
        self.input_fds = (0..self.slots).map(|_| self.fixed.inputs.iter().map(|_| None).collect()).collect();
        for tensor in frame.body["tensors"].as_array().into_iter().flatten() {
            let number = |key: &str| tensor[key].as_u64().and_then(|n| usize::try_from(n).ok());
            let (Some(slot), Some(input)) = (number("slot"), number("input")) else { continue };
            let place = self.input_fds.get_mut(slot).and_then(|inputs| inputs.get_mut(input));
            let fd = number("fd").and_then(|i| fds.get_mut(i)?.take());
            if let (Some(place), Some(fd), Some(bytes)) = (place, fd, tensor["bytes"].as_u64()) {
                *place = Some((fd, bytes));
            }
        }
        if self.slots == 0 {
            return Err(Error::Fault("the reference host shared no slot".into()));
        }
        let missing =
            self.fixed.inputs.iter().zip(&self.input_fds[0]).any(|(i, fd)| i["kind"] != "value" && fd.is_none());
        if missing {
            return Err(Error::Fault("the reference host did not share all its inputs".into()));
        }
        Ok(())
    }

    /// Makes parameter set `index` the current one in the reference host.
    pub(super) fn select(&mut self, index: usize) -> Result<(), Error> {
        if self.current_set == index {
            return Ok(());
        }
        let seed =
            self.fixed.sets().get(index).map(|s| s.seed).ok_or_else(|| Error::Fault("no such parameter set".into()))?;
        let mut body = json!({"op": "parameters", "seed": seed});
        if self.parameter_fds.is_empty() {
            body["first"] = json!(0);
        }
        let ask =
            |host: &mut Forked, body: &Value| host.ask(body, &[], MINUTES).map_err(|e| task_error(&self.fixed.task, e));
        let mut frame = ask(&mut self.host, &body)?;
        // More tensors than a frame carries descriptors come in several.
        while self.parameter_fds.len() < self.fixed.state.len() {
            let before = self.parameter_fds.len();
            let mut fds: Vec<Option<OwnedFd>> = frame.fds.into_iter().map(Some).collect();
            for tensor in frame.body["tensors"].as_array().into_iter().flatten() {
                let slot = tensor["fd"].as_u64().and_then(|i| fds.get_mut(usize::try_from(i).ok()?)?.take());
                if let (Some(name), Some(fd), Some(bytes)) = (tensor["name"].as_str(), slot, tensor["bytes"].as_u64()) {
                    self.parameter_fds.insert(name.to_owned(), (fd, bytes));
                }
            }
            let now = self.parameter_fds.len();
            if now == before {
                return Err(Error::Fault("the reference host did not share all its parameters".into()));
            }
            if now == self.fixed.state.len() {
                break;
            }
            body["first"] = json!(now);
            frame = ask(&mut self.host, &body)?;
        }
        self.current_set = index;
        Ok(())
    }

    /// Asks the host for times, while the library helper stands still: a runner can leave it work to do beside them.
    pub(super) fn beside_nobody<T>(&mut self, ask: impl FnOnce(&mut Forked) -> T) -> T {
        self.helper.iter().for_each(Forked::freeze);
        let answer = ask(&mut self.host);
        self.helper.iter().for_each(Forked::thaw);
        answer
    }

    /// The helper that runs library calls on the CPU, forked when first needed.
    pub(super) fn helper(&mut self) -> Result<&mut Forked, Error> {
        if self.helper.is_none() {
            self.helper = Some(self.fixed.judge.fork_host("helper").map_err(|e| Error::Fault(e.to_string()))?);
        }
        self.helper.as_mut().ok_or_else(|| Error::Fault("no library helper".into()))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn state(pid: u32) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
    }

    fn becomes(pid: u32, wanted: bool) -> bool {
        (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            (state(pid) == 'T') == wanted
        })
    }

    #[test]
    fn who_compiles_is_stopped_while_somebody_measures() {
        let slice = Slice::new();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let beside = slice.pausable(i32::try_from(child.id()).unwrap());
        let held = slice.hold();
        assert!(becomes(child.id(), true));
        drop(held);
        assert!(becomes(child.id(), false));
        let held = slice.hold();
        drop(beside);
        assert!(becomes(child.id(), false), "what is no longer pausable runs on");
        drop(held);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn what_is_started_beside_a_measurement_is_stopped_until_its_end() {
        let slice = Slice::new();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let held = slice.hold();
        slice.join(pid);
        assert!(becomes(child.id(), true));
        drop(held);
        assert!(becomes(child.id(), false));
        let held = slice.hold();
        assert!(becomes(child.id(), true));
        slice.leave(pid);
        assert!(becomes(child.id(), false), "it is in use now");
        drop(held);
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn who_checks_lets_who_waits_to_measure_go_first() {
        let slice = Slice::new();
        let mut checking = slice.share();
        checking.breathe();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _held = slice.hold();
                order.lock().unwrap().push("measured");
            });
            while slice.users().waiting.is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            checking.breathe();
            order.lock().unwrap().push("went on");
        });
        assert_eq!(*order.lock().unwrap(), ["measured", "went on"]);
        assert_eq!(slice.users().sharing, 1);
    }

    #[test]
    fn a_measurement_that_has_waited_comes_before_new_work() {
        let slice = Slice::new();
        let working = slice.share();
        let order = Mutex::new(Vec::new());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _held = slice.hold();
                order.lock().unwrap().push("measured");
            });
            while slice.users().waiting.is_none_or(|(since, _)| since.elapsed() < PATIENCE) {
                std::thread::sleep(Duration::from_millis(20));
            }
            scope.spawn(|| {
                let _shared = slice.share();
                order.lock().unwrap().push("worked");
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(order.lock().unwrap().is_empty());
            drop(working);
        });
        assert_eq!(*order.lock().unwrap(), ["measured", "worked"]);
    }
}
