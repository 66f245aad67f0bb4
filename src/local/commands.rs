//! The subcommands: arguments in, text on standard output and an exit status out.
//!
//! Knows how the modules are put together. Exit statuses: 0 done (whatever the reward), 1 a fault of the
//! program, 2 a request that can't be served, 130 interrupted.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::choose::{Chosen, PolicyArguments};
use super::court::{Real, Unstarted, options, placed};
use super::environment::{self, Environment};
use super::progress::{self, Progress, Stage};
use super::run::{Settings, Trouble};
use super::summary::{Summary, summarise};
use super::terminal::{err, out};
use super::{candidate, choose, doctor, export, render, run};
use crate::agent::report;
use crate::api::job::{self, OptimizationJob};
use crate::api::manifest::{self, Manifest};
use crate::judge::{
    self, Candidate, Device, Effort, Judge, Options, PathChoice, Precision, Slice, TaskSource, Tolerance, Verdict,
};
use crate::task::{init, source, syntax};

/// How a subcommand ended, when not well.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Request(String),
    #[error("{0}")]
    Fault(String),
    #[error("interrupted; tasks that are finished are kept, the same command goes on from there")]
    Interrupted,
}

impl Failure {
    /// The exit status.
    #[must_use]
    pub const fn status(&self) -> u8 {
        match self {
            Self::Fault(_) => 1,
            Self::Request(_) => 2,
            Self::Interrupted => 130,
        }
    }

    fn request(error: impl std::fmt::Display) -> Self {
        Self::Request(error.to_string())
    }

    fn fault(error: impl std::fmt::Display) -> Self {
        Self::Fault(error.to_string())
    }
}

impl From<Trouble> for Failure {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Request(text) => Self::Request(text),
            Trouble::Fault(text) => Self::Fault(text),
        }
    }
}

/// What is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    #[default]
    Table,
    Json,
}

fn print<T: Serialize>(output: Output, value: &T, table: impl FnOnce() -> String) -> Result<(), Failure> {
    out(&match output {
        Output::Table => table(),
        Output::Json => serde_json::to_string_pretty(value).map_err(Failure::fault)?,
    });
    Ok(())
}

/// `auto` is the card if there is one.
#[must_use]
pub fn pick(device: Option<Device>) -> Device {
    device.unwrap_or_else(|| if doctor::gpus().is_empty() { Device::Cpu } else { Device::Cuda })
}

/// A judge for a command of one task: what it waits for and, of an evaluation, what it is at are shown by `stage`. `before`
/// says what of the command has been done already, in front of the phase.
pub(super) fn judge_telling(
    environment: &Environment,
    options: Options,
    stage: &Arc<Stage>,
    before: impl Fn() -> String + Send + Sync + 'static,
) -> Result<Arc<Judge>, judge::Error> {
    stage.say(progress::STARTING);
    let waits = Arc::clone(stage);
    let judge = Judge::start(&environment.toolchain, options, Slice::telling(move |text| waits.note(text)))?;
    let phases = Arc::clone(stage);
    judge.telling(move |name| {
        if let Some(phase) = progress::phase(name) {
            phases.say(&format!("{}{phase}", before()));
        }
    });
    Ok(judge)
}

/// Why a judge did not start, for commands that can be told another device.
fn no_judge(error: judge::Error) -> Failure {
    match error {
        judge::Error::Request { code, message } if code == "no_gpu" => {
            Failure::Request(format!("{message}; --device cpu judges on this machine's processor"))
        }
        other => Failure::from(Trouble::from(other)),
    }
}

/// What a judge of this device needs here.
///
/// # Errors
/// When something is missing, with what to do.
pub fn ready(device: Device) -> Result<Environment, Failure> {
    let environment = environment::discover().map_err(Failure::request)?;
    match device {
        Device::Cpu if environment.toolchain.cxx.is_none() => Err(Failure::Request(
            "no c++, which builds kernels for the cpu device; install g++ or set KERNELFLEET_CXX (`kernelfleet doctor` says more)".into(),
        )),
        Device::Cuda if environment.toolchain.nvcc.is_none() => Err(Failure::Request(
            "no nvcc, which builds kernels for the cuda device; `make env` installs it, or set KERNELFLEET_NVCC".into(),
        )),
        _ => Ok(environment),
    }
}

/// `kernelfleet doctor`.
///
/// # Errors
/// `Request` when no device can judge here.
pub fn doctor(output: Output) -> Result<(), Failure> {
    let report = doctor::examine(&environment::discover());
    print(output, &report, || doctor::render(&report))?;
    if report.devices.is_empty() {
        return Err(Failure::Request("no device can judge here; see what is MISSING above".into()));
    }
    Ok(())
}

/// `kernelfleet crds`.
///
/// # Errors
/// When the folder can't be written.
pub fn crds(write: Option<&Path>, reference: Option<&Path>) -> Result<(), Failure> {
    if let Some(file) = reference {
        std::fs::write(file, crate::api::reference::page()).map_err(Failure::request)?;
        if write.is_none() {
            return Ok(());
        }
    }
    let definitions = crate::api::definitions().map_err(Failure::fault)?;
    let Some(folder) = write else {
        let all: String = definitions.iter().map(|(_, text)| format!("---\n{text}")).collect();
        out(all.trim_end());
        return Ok(());
    };
    for (name, text) in definitions {
        std::fs::create_dir_all(folder).map_err(Failure::request)?;
        std::fs::write(folder.join(name), text).map_err(Failure::request)?;
    }
    Ok(())
}

/// Arguments of `kernelfleet judge`.
#[derive(Clone, Debug)]
pub struct JudgeArguments {
    pub task: PathBuf,
    pub candidate: Option<PathBuf>,
    pub batch: Option<PathBuf>,
    pub device: Option<Device>,
    /// What the form of a candidate decides if nothing is said on the CPU device; `Plan` on a card.
    pub path: Option<PathChoice>,
    /// Verdicts below the grade `enforced` don't count.
    pub enforced: bool,
    pub precision: Precision,
    pub tolerance: Tolerance,
    pub libraries: Vec<String>,
    pub inputs: usize,
    /// Judges every candidate, whatever is remembered of it.
    pub no_cache: bool,
    /// Share of remembered verdicts that are judged anew and compared.
    pub recheck: f64,
    /// Folder that task, candidate and verdict are kept in, as `export` takes them.
    pub keep: Option<PathBuf>,
    pub output: Output,
}

/// `kernelfleet judge`.
///
/// # Errors
/// `Request` when there is nothing to judge, `Fault` when the judge failed. A verdict of any reward is no error.
pub fn judge(arguments: &JudgeArguments) -> Result<(), Failure> {
    let task = one_task(&arguments.task)?;
    let candidates: Vec<(String, Candidate)> = match (&arguments.candidate, &arguments.batch) {
        (Some(folder), None) => {
            vec![(folder.display().to_string(), candidate::read(folder).map_err(Failure::request)?)]
        }
        (None, Some(folder)) => {
            let candidates = candidate::read_batch(folder).map_err(Failure::request)?;
            let left_out = candidate::left_out(folder);
            if !left_out.is_empty() {
                err(&format!("kernelfleet: left out, as there is no model_new.py: {}", render::names(&left_out)));
            }
            candidates
        }
        _ => return Err(Failure::Request("one of --candidate DIR and --batch DIR says what is judged".into())),
    };
    let kept = keep_folders(arguments, &task, &candidates)?;
    let device = pick(arguments.device);
    let path = path(arguments, device)?;
    let environment = ready(device)?;
    refuse_by_syntax(&task, &environment)?;
    let options = Options {
        device,
        path,
        precision: arguments.precision,
        tolerance: arguments.tolerance,
        libraries: arguments.libraries.clone(),
        inputs: arguments.inputs,
        measure_seconds: None,
        remembered: (!arguments.no_cache).then_some(arguments.recheck),
        ..Options::default()
    };
    let verdicts = judge_candidates(&environment, options, arguments.enforced, &task, &candidates)?;
    for (folder, ((_, candidate), (_, verdict))) in kept.iter().zip(candidates.iter().zip(&verdicts)) {
        run::keep_judged(folder, &task, candidate, verdict)
            .and_then(|()| export::keep_name(folder, &task.name))
            .map_err(|e| Failure::Fault(format!("the result can't be kept in {}: {e}", folder.display())))?;
        let next = if verdict.correct && !verdict.digests.contains_key("plan") {
            "it runs as it is, so there is nothing to export".to_owned()
        } else if verdict.correct {
            format!("next: kernelfleet export --result {} -o PACKAGE", folder.display())
        } else {
            "only a correct candidate can be exported".to_owned()
        };
        err(&format!("kept in {}; {next}", folder.display()));
    }
    match (&arguments.batch, verdicts.first()) {
        (None, Some((_, verdict))) => print(arguments.output, verdict, || render::verdict(&task.name, verdict)),
        _ => {
            let value: Vec<Value> =
                verdicts.iter().map(|(name, verdict)| json!({"candidate": name, "verdict": verdict})).collect();
            print(arguments.output, &value, || render::batch(&task.name, &verdicts))
        }
    }
}

/// The task of a file that names one.
fn one_task(file: &Path) -> Result<TaskSource, Failure> {
    let tasks = source::find(&[file.to_owned()], None).map_err(Failure::request)?;
    let [task] = tasks.as_slice() else {
        let text = format!("{} names {} tasks, one task file is wanted", file.display(), tasks.len());
        return Err(Failure::Request(text));
    };
    Ok(TaskSource { name: task.name.clone(), path: task.path.clone(), source: task.source.clone() })
}

/// `kernelfleet counters`: of a candidate's kernels, or of the reference's.
///
/// # Errors
/// `Request` where nothing can be counted, `Fault` when the judge failed.
pub fn counters(task: &Path, folder: Option<&Path>, precision: Precision, output: Output) -> Result<(), Failure> {
    let task = one_task(task)?;
    let candidate = folder.map(candidate::read).transpose().map_err(Failure::request)?;
    // Said before anything else that a card needs: who has none can't mend the rest.
    if doctor::gpus().is_empty() {
        return Err(Failure::Request(
            "there is no NVIDIA card here, and only a card has these counters; `kernelfleet doctor` says what was looked for"
                .into(),
        ));
    }
    let environment = ready(Device::Cuda)?;
    refuse_by_syntax(&task, &environment)?;
    let failed = |e: judge::Error| Failure::from(Trouble::from(e));
    let options = Options { device: Device::Cuda, path: PathChoice::Plan, precision, ..Options::default() };
    let stage = Arc::new(Stage::default());
    let judge = judge_telling(&environment, options, &stage, String::new).map_err(failed)?;
    stage.say(&format!("opening {}", task.name));
    let mut session = judge.open(&task).map_err(failed)?;
    stage.say("counting");
    let kernels = session.counters(candidate.as_ref()).map_err(failed)?;
    stage.end();
    let kernels = kernels.map_err(|reason| Failure::Request(report::refused(&reason).trim_end().to_owned()))?;
    print(output, &kernels, || report::counted(&kernels, candidate.is_none()))
}

/// Which path candidates take; none whose verdicts wouldn't count.
fn path(arguments: &JudgeArguments, device: Device) -> Result<PathChoice, Failure> {
    let usual = if device == Device::Cpu { PathChoice::Auto } else { PathChoice::Plan };
    match (arguments.path.unwrap_or(usual), device) {
        (_, Device::Cpu) if arguments.enforced => Err(Failure::Request(
            "--minimum-grade enforced: verdicts of the cpu device are `observed`; use a GPU, or accept `observed`".into(),
        )),
        (PathChoice::Process, _) if arguments.enforced => Err(Failure::Request(
            "--minimum-grade enforced: verdicts of the process path are `observed`; use --path plan, or accept `observed`"
                .into(),
        )),
        (PathChoice::Auto, _) if arguments.enforced => Ok(PathChoice::Plan),
        (path, _) => Ok(path),
    }
}

/// Where each candidate is kept, if it is: in a new or empty folder, or in place of an earlier verdict on the same task.
fn keep_folders(
    arguments: &JudgeArguments,
    task: &TaskSource,
    candidates: &[(String, Candidate)],
) -> Result<Vec<PathBuf>, Failure> {
    let Some(keep) = &arguments.keep else { return Ok(Vec::new()) };
    let folders: Vec<PathBuf> = match &arguments.batch {
        Some(_) => candidates.iter().map(|(name, _)| keep.join(name)).collect(),
        None => vec![keep.clone()],
    };
    for folder in &folders {
        let empty = std::fs::read_dir(folder).map_or(!folder.exists(), |mut entries| entries.next().is_none());
        if !empty && !export::kept_of(folder, task) {
            return Err(Failure::Request(format!(
                "--keep: {0} is there already and holds something else than an earlier verdict on this task; name a new folder, or remove {0}",
                folder.display()
            )));
        }
        std::fs::create_dir_all(folder)
            .map_err(|e| Failure::Request(format!("--keep: {} can't be made: {e}", folder.display())))?;
    }
    Ok(folders)
}

/// Refuses to judge where no verdict would have the grade that is asked for.
fn graded(device: &judge::Facts, enforced: bool) -> Result<(), Failure> {
    if enforced && device.exposed {
        return Err(Failure::Request(format!("the minimum grade is `enforced`: {}", judge::EXPOSED)));
    }
    Ok(())
}

/// The call into the judge: one task, each candidate in full, in the order given.
fn judge_candidates(
    environment: &Environment,
    options: Options,
    enforced: bool,
    task: &TaskSource,
    candidates: &[(String, Candidate)],
) -> Result<Vec<(String, Verdict)>, Failure> {
    let failed = |e: judge::Error| Failure::from(Trouble::from(e));
    let stage = Arc::new(Stage::default());
    let (done, all, name) = (Arc::new(AtomicUsize::new(0)), candidates.len(), task.name.clone());
    let judged = Arc::clone(&done);
    let before = move || match all {
        1 => format!("{name}: "),
        _ => format!("{name}: {} of {all} judged, ", judged.load(Ordering::Relaxed)),
    };
    let compiles = options.compile;
    let judge = judge_telling(environment, options, &stage, before).map_err(no_judge)?;
    graded(judge.facts(), enforced)?;
    // Of many candidates one is near a threshold, and on the CPU an import is dear.
    if compiles && (all > 2 || judge.device() == Device::Cpu) {
        judge.warm();
    }
    stage.say(&format!("{}: opening", task.name));
    let mut session = judge.open(task).map_err(failed)?;
    let only: Vec<Candidate> = candidates.iter().map(|(_, c)| c.clone()).collect();
    let mut verdicts = Vec::new();
    let ended = session.judge_batch(&only, Effort::Final, |index, verdict| {
        done.fetch_add(1, Ordering::Relaxed);
        if let Some((name, _)) = candidates.get(index) {
            tracing::info!(candidate = name, reward = verdict.reward, "judged");
            verdicts.push((index, (name.clone(), verdict)));
        }
    });
    stage.end();
    verdicts.sort_by_key(|(index, _)| *index);
    if let Err(error) = ended {
        // What was judged by then is nobody's to lose.
        for (_, (name, verdict)) in verdicts.iter().filter(|_| all > 1) {
            err(&format!("judged before: {name}: reward {}. {}", render::reward(verdict), render::sentence(verdict)));
        }
        return Err(failed(error));
    }
    Ok(verdicts.into_iter().map(|(_, judged)| judged).collect())
}

/// What needs no Python to be seen is said at once.
fn refuse_by_syntax(task: &TaskSource, environment: &Environment) -> Result<(), Failure> {
    let refusals = syntax::check(&task.source, Some(&environment.python.modules));
    if refusals.is_empty() {
        return Ok(());
    }
    Err(Failure::Request(refusals.iter().map(|r| placed(&task.path, r)).collect::<Vec<_>>().join("\n")))
}

/// Arguments of `kernelfleet run`.
#[derive(Clone, Debug)]
pub struct RunArguments {
    pub file: PathBuf,
    pub tasks: Vec<PathBuf>,
    pub root: Option<PathBuf>,
    pub device: Option<Device>,
    pub results: PathBuf,
    pub output: Output,
    /// Forgets earlier results of the same job.
    pub fresh: bool,
    pub policy: PolicyArguments,
}

/// `kernelfleet run`.
///
/// # Errors
/// `Request` for a manifest that can't be run, `Fault` when a task met a fault of the judge, `Interrupted`.
pub fn run(arguments: &RunArguments) -> Result<(), Failure> {
    let manifest = manifest::read(&arguments.file).map_err(Failure::request)?;
    let device = pick(arguments.device);
    let jobs: Vec<(&OptimizationJob, Given)> = manifest
        .jobs
        .iter()
        .map(|job| Ok((job, tasks_of(job, &manifest, arguments)?)))
        .collect::<Result<_, Failure>>()?;
    for (job, _) in &jobs {
        runnable(job, device)?;
    }
    let environment = ready(device)?;
    let stop = interrupts();
    let (mut failed, mut refused, mut tasks) = (0, 0, 0);
    let mut values = Vec::new();
    let chosen: Vec<Chosen> = jobs
        .iter()
        .map(|(job, given)| {
            choose::choose(job, &manifest, &arguments.policy, &given.tasks, device, &environment)
                .map_err(Failure::Request)
        })
        .collect::<Result<_, Failure>>()?;
    for ((job, given), chosen) in jobs.iter().zip(&chosen) {
        let (value, text, summary) = one_job(job, given, chosen, device, &environment, arguments, stop)?;
        failed += summary.failed;
        refused += summary.refused;
        tasks += summary.tasks;
        if arguments.output == Output::Table {
            print(Output::Table, &value, || text)?;
        }
        values.push(value);
    }
    if arguments.output == Output::Json {
        match values.as_slice() {
            [one] => print(Output::Json, one, String::new)?,
            several => print(Output::Json, &several, String::new)?,
        }
    }
    if failed > 0 {
        return Err(Failure::Fault(format!(
            "{} not judged because the judge or the endpoint failed; start again to try again",
            if failed == 1 { "1 task was".to_owned() } else { format!("{failed} tasks were") }
        )));
    }
    if refused > 0 && refused == tasks {
        return Err(Failure::Request("every task was refused, so there was nothing to do".into()));
    }
    Ok(())
}

/// What a local run can't do is said before anything starts.
fn runnable(job: &OptimizationJob, device: Device) -> Result<(), Failure> {
    let name = job.metadata.name.as_deref().unwrap_or("job");
    let refuse = |field: &str, why: &str| Err(Failure::Request(format!("{name}: {field}: {why}")));
    if job.spec.suspend {
        return refuse("spec.suspend", "the job is suspended; set it to false to run it");
    }
    if job.spec.judge.minimum_grade == job::Grade::Enforced && device == Device::Cpu {
        return refuse(
            "spec.judge.minimumGrade",
            "verdicts of the cpu device are `observed`; use a GPU, or accept `observed`",
        );
    }
    Ok(())
}

/// The tasks of a job, and what of those that were named it leaves out, a sentence each.
#[derive(Debug)]
struct Given {
    tasks: Vec<TaskSource>,
    left_out: Vec<String>,
}

/// What a selector takes of the tasks that were found, in their order, and what it leaves out.
fn select(found: Vec<source::Found>, selector: &job::TaskSelector) -> (Vec<source::Found>, Vec<String>) {
    let mut told = Vec::new();
    let given = found.len();
    let mut tell = |left: &[source::Found], field: &str| {
        if !left.is_empty() {
            let names: Vec<String> = left.iter().map(|f| f.name.clone()).collect();
            told.push(format!(
                "{} given, {} left out by spec.tasks.taskSet.selector.{field}: {}",
                render::count(given, "task"),
                names.len(),
                render::names(&names)
            ));
        }
    };
    let wanted = |f: &source::Found| selector.names.as_ref().is_none_or(|names| names.contains(&f.name));
    let (mut found, others): (Vec<_>, Vec<_>) = found.into_iter().partition(wanted);
    tell(&others, "names");
    if let Some(limit) = selector.limit {
        let rest = found.split_off(usize::try_from(limit).unwrap_or(usize::MAX).min(found.len()));
        tell(&rest, &format!("limit: {limit}"));
    }
    (found, told)
}

/// The tasks of a job, from the manifest, from ConfigMaps of the same file, or from `--tasks`.
fn tasks_of(job: &OptimizationJob, manifest: &Manifest, arguments: &RunArguments) -> Result<Given, Failure> {
    let mut tasks = Vec::new();
    let mut left_out = Vec::new();
    let add = |name: &str, path: PathBuf, source: &str| TaskSource { name: name.into(), path, source: source.into() };
    for task in job.spec.tasks.inline.iter().flatten() {
        tasks.push(add(&task.name, PathBuf::from(format!("{}.py", task.name)), &task.source));
    }
    if let Some(reference) = &job.spec.tasks.config_map {
        let data = manifest.config_maps.get(&reference.name).ok_or_else(|| {
            Failure::Request(format!(
                "{}: spec.tasks.configMap.name: the file holds no ConfigMap `{}`; a local run reads it from the same file, put it there as another document",
                arguments.file.display(),
                reference.name
            ))
        })?;
        for (key, text) in data {
            if let Some(name) = key.strip_suffix(".py") {
                tasks.push(add(name, PathBuf::from(key), text));
            }
        }
    }
    if let Some(set) = &job.spec.tasks.task_set {
        if arguments.tasks.is_empty() {
            return Err(Failure::Request(format!(
                "{}: spec.tasks.taskSet: a local run has no TaskSet `{}`; name its files with --tasks",
                arguments.file.display(),
                set.name
            )));
        }
        let selector = set.selector.clone().unwrap_or_default();
        let found = source::find(&arguments.tasks, arguments.root.as_deref()).map_err(Failure::request)?;
        let (wanted, told) = select(found, &selector);
        left_out = told;
        tasks.extend(wanted.into_iter().map(|f| TaskSource { name: f.name, path: f.path, source: f.source }));
    } else {
        let found = source::find(&arguments.tasks, arguments.root.as_deref()).map_err(Failure::request)?;
        tasks.extend(found.into_iter().map(|f| TaskSource { name: f.name, path: f.path, source: f.source }));
    }
    if tasks.is_empty() {
        let why: String = left_out.iter().map(|line| format!("; {line}")).collect();
        return Err(Failure::Request(format!("{}: the job has no tasks{why}", arguments.file.display())));
    }
    let mut folders: Vec<PathBuf> = tasks.iter().map(|t| run::task_folder(Path::new(""), &t.name)).collect();
    folders.sort();
    if let Some(pair) = folders.windows(2).find(|w| w.first() == w.last()) {
        let name = pair.first().map(|p| p.display().to_string()).unwrap_or_default();
        return Err(Failure::Request(format!("two tasks are called {name}; give one another name")));
    }
    Ok(Given { tasks, left_out })
}

fn one_job(
    job: &OptimizationJob,
    given: &Given,
    chosen: &Chosen,
    device: Device,
    environment: &Environment,
    arguments: &RunArguments,
    stop: &'static AtomicBool,
) -> Result<(Value, String, Summary), Failure> {
    let name = job.metadata.name.clone().unwrap_or_else(|| "job".into());
    let tasks = given.tasks.as_slice();
    let folder = run::task_folder(&arguments.results, &name);
    if arguments.fresh && folder.exists() {
        forget(&folder)?;
    }
    std::fs::create_dir_all(&folder)
        .map_err(|e| Failure::Request(format!("the results folder {} can't be made: {e}", folder.display())))?;
    let options = options(&job.spec.judge, device);
    let device_word = match device {
        Device::Cpu => "cpu",
        Device::Cuda => "cuda",
    };
    let identity = json!({
        "judge": {"precision": options.precision, "tolerance": options.tolerance, "libraries": options.libraries, "inputs": options.inputs},
        "policy": chosen.identity, "turns": job.spec.agent.max_turns, "target": job.spec.target,
        "device": device_word, "versions": environment.toolchain.versions,
    });
    let settings = Settings {
        folder: folder.clone(),
        identity: identity.to_string(),
        most_attempts: usize::try_from(job.spec.agent.max_turns).unwrap_or(1),
        target: job.spec.target.clone(),
        workers: workers(job, chosen, device, environment.toolchain.threads),
        until: None,
    };
    for line in &given.left_out {
        err(&format!("{name}: {line}"));
    }
    err(&format!(
        "{name}: {} on the {device_word} device by {}, results in {} (Ctrl-C keeps what is done, the same command goes on)",
        render::count(tasks.len(), "task"),
        chosen.about,
        folder.display()
    ));
    let began = Instant::now();
    let progress = Arc::new(Progress::new(tasks.len()));
    let told = Arc::clone(&progress);
    let slice = Slice::telling(move |text| told.note(text));
    // Where every task is done, or refused by its syntax, nothing needs to be started.
    let modules = &environment.python.modules;
    let wanted = run::pending(tasks, &settings).into_iter().any(|t| syntax::check(&t.source, Some(modules)).is_empty());
    let court: Box<dyn run::Court> = if wanted {
        progress.start(progress::STARTING);
        let judge = Judge::start(&environment.toolchain, options, slice).map_err(no_judge)?;
        graded(judge.facts(), job.spec.judge.minimum_grade == job::Grade::Enforced)?;
        if tasks.len() > 2 || device == Device::Cpu {
            judge.warm();
        }
        Box::new(Real { judge, modules: modules.clone() })
    } else {
        Box::new(Unstarted { modules: modules.clone() })
    };
    let finished = AtomicBool::new(false);
    let outcomes = std::thread::scope(|scope| {
        // A judgement may take a minute; who interrupts does not want to wait for its end. Without its processes
        // the judge gives up at once, and what it has on disk goes away in the usual way.
        scope.spawn(|| {
            let wait = |patience: Duration| {
                let began = Instant::now();
                while began.elapsed() < patience && !finished.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(20));
                }
            };
            while !stop.load(Ordering::Relaxed) && !finished.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(50));
            }
            wait(Duration::from_millis(300));
            for _ in 0..20 {
                if !finished.load(Ordering::Relaxed) {
                    end_children();
                    wait(Duration::from_millis(250));
                }
            }
            if !finished.load(Ordering::Relaxed) {
                progress.end();
                err(&format!("kernelfleet: {}", Failure::Interrupted));
                std::process::exit(i32::from(Failure::Interrupted.status()));
            }
        });
        let outcomes = run::run(tasks, court.as_ref(), chosen.policy.as_ref(), &settings, &progress, stop);
        finished.store(true, Ordering::Relaxed);
        outcomes
    });
    progress.end();
    if outcomes.iter().any(Option::is_none) {
        return Err(Failure::Interrupted);
    }
    let outcomes: Vec<_> = outcomes.into_iter().flatten().collect();
    let mut summary = summarise(&outcomes, began.elapsed().as_secs_f64());
    summary.earlier = run::earlier(&folder, tasks);
    let value = serde_json::to_value(&summary).map_err(Failure::fault)?;
    let written = run::replace(&folder.join("report.md"), &render::report(&name, &outcomes, &summary)).and_then(|()| {
        run::replace(
            &folder.join("summary.json"),
            &serde_json::to_string_pretty(&summary).map_err(std::io::Error::other)?,
        )
    });
    written.map_err(|e| Failure::Fault(format!("the report can't be written in {}: {e}", folder.display())))?;
    let text = format!(
        "{}\n\nkernels, verdicts and report.md are in {}",
        render::run(&name, &outcomes, &summary),
        folder.display()
    );
    Ok((value, text, summary))
}

/// Tasks at once. On the CPU device whoever else works is measured too, so there it is more than one only where the
/// job says so and a model thinks most of the time; on a card episodes of a model overlap as the job says.
fn workers(job: &OptimizationJob, chosen: &Chosen, device: Device, threads: usize) -> usize {
    let asked = job.spec.agent.parallelism.and_then(|most| usize::try_from(most).ok());
    match (device, chosen.thinks) {
        (Device::Cpu, false) => 1,
        (Device::Cpu, true) => asked.unwrap_or(1).clamp(1, 64),
        (Device::Cuda, false) => asked.unwrap_or(usize::MAX).min(threads * 3 / 4).clamp(1, 12),
        (Device::Cuda, true) => asked.unwrap_or(8).clamp(1, 64),
    }
}

/// Removes earlier results, and only those: a folder that holds anything else is left alone.
fn forget(folder: &Path) -> Result<(), Failure> {
    let entries = std::fs::read_dir(folder).map_err(Failure::request)?;
    for entry in entries {
        let path = entry.map_err(Failure::request)?.path();
        if path.join("outcome.json").is_file() {
            std::fs::remove_dir_all(&path).map_err(Failure::request)?;
        }
    }
    Ok(())
}

static STOP: AtomicBool = AtomicBool::new(false);

/// The flag that Ctrl-C and SIGTERM set; a second one ends at once.
pub fn interrupts() -> &'static AtomicBool {
    extern "C" fn note(_: i32) {
        if STOP.swap(true, Ordering::Relaxed) {
            // SAFETY: `_exit` may be called in a signal handler.
            unsafe { libc::_exit(130) }
        }
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler touches an atomic and calls `_exit`, both safe in a signal handler.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
    &STOP
}

/// Kills the processes that this one has started; their own children die with them.
fn end_children() {
    let own = std::process::id();
    let numbers = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in numbers.filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok()) {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The name in parentheses may hold anything; the parent is the second field after it.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1));
        if parent.and_then(|p| p.parse::<u32>().ok()) == Some(own) {
            // SAFETY: a signal to a child that is not reaped yet, so that the number is still its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
        }
    }
}

/// Arguments of `kernelfleet task check`.
#[derive(Clone, Debug)]
pub struct CheckArguments {
    pub paths: Vec<PathBuf>,
    pub root: Option<PathBuf>,
    pub device: Option<Device>,
    pub r#static: bool,
    /// Longest that what refuses one task is looked for.
    pub seconds: f64,
    pub output: Output,
}

/// What `task check` says of one task.
#[derive(Clone, Debug, Serialize)]
struct Checked {
    task: String,
    path: PathBuf,
    accepted: bool,
    refusals: Vec<syntax::Refusal>,
    /// Whether it was run, or tried to be: what has a flaw by syntax isn't.
    #[serde(skip)]
    ran: bool,
    /// What running it showed: times, memory, operators, the reference's own error.
    #[serde(skip_serializing_if = "Option::is_none")]
    facts: Option<Value>,
}

/// `kernelfleet task check`.
///
/// # Errors
/// `Request` when a task is refused or can't be read, `Fault` when the judge failed.
pub fn check(arguments: &CheckArguments) -> Result<(), Failure> {
    let tasks = source::find_each(&arguments.paths, arguments.root.as_deref());
    let environment = environment::discover();
    let device = pick(arguments.device);
    let modules = environment.as_ref().ok().map(|e| e.python.modules.as_slice());
    // What only has flaws that need no process to be seen is told without starting any.
    let sound = |t: &Result<source::Found, source::Error>| {
        t.as_ref().is_ok_and(|t| syntax::check(&t.source, modules).is_empty())
    };
    let stage = Arc::new(Stage::default());
    let all = tasks.len();
    let judge = if arguments.r#static || !tasks.iter().any(sound) {
        None
    } else {
        let environment = environment.as_ref().map_err(Failure::request)?;
        let options = Options { device, ..Options::default() };
        Some(judge_telling(environment, options, &stage, String::new).map_err(no_judge)?)
    };
    let mut checked = Vec::new();
    let mut faults = Vec::new();
    for task in tasks {
        let task = match task {
            Ok(task) => task,
            Err(error) => {
                let path = error.path().to_path_buf();
                let message = error.problem();
                checked.push(Checked {
                    task: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
                    path,
                    accepted: false,
                    refusals: vec![syntax::Refusal { code: "unreadable".into(), message, line: None }],
                    ran: false,
                    facts: None,
                });
                continue;
            }
        };
        let mut line = Checked {
            refusals: syntax::check(&task.source, modules),
            task: task.name.clone(),
            path: task.path.clone(),
            accepted: false,
            ran: false,
            facts: None,
        };
        if line.refusals.is_empty()
            && let Some(judge) = &judge
        {
            let task = TaskSource { name: task.name, path: task.path, source: task.source };
            line.ran = true;
            stage.say(&format!("checking {} ({} of {all})", task.name, checked.len() + 1));
            match judge.open(&task).and_then(|mut session| session.check(arguments.seconds)) {
                Ok(mut facts) => {
                    for refusal in facts["refusals"].as_array().into_iter().flatten() {
                        line.refusals.push(syntax::Refusal {
                            code: refusal["code"].as_str().unwrap_or("refused").into(),
                            message: refusal["message"].as_str().unwrap_or_default().into(),
                            line: refusal["line"].as_u64().and_then(|l| usize::try_from(l).ok()),
                        });
                    }
                    if let Some(map) = facts.as_object_mut() {
                        map.retain(|k, _| !["ok", "refusals", "accepted"].contains(&k.as_str()));
                    }
                    line.facts = Some(facts);
                }
                Err(judge::Error::Request { code, message }) => {
                    line.refusals.push(syntax::Refusal { code, message, line: None });
                }
                Err(judge::Error::Fault(message)) => {
                    faults.push(format!("{}: {message}", line.task));
                    line.refusals.push(syntax::Refusal { code: "fault".into(), message, line: None });
                }
            }
        }
        line.accepted = line.refusals.is_empty();
        checked.push(line);
    }
    stage.end();
    print(arguments.output, &checked, || checked_table(&checked))?;
    if let Some(fault) = faults.first() {
        return Err(Failure::Fault(format!(
            "{} of {} met a fault of the judge; {fault}",
            faults.len(),
            render::count(checked.len(), "task")
        )));
    }
    let refused = checked.iter().filter(|c| !c.accepted).count();
    if refused > 0 {
        return Err(Failure::Request(format!("{refused} of {} refused", render::count(checked.len(), "task"))));
    }
    Ok(())
}

fn checked_table(checked: &[Checked]) -> String {
    let mut text = String::new();
    for line in checked {
        if line.accepted {
            let number = |key: &str| line.facts.as_ref().and_then(|f| f[key].as_f64());
            let mut facts = Vec::new();
            if let Some(us) = number("eager_us") {
                facts.push(format!("eager {}", render::time(us)));
            }
            if let Some(n) = line.facts.as_ref().and_then(|f| f["memory_bytes"].as_u64()) {
                facts.push(format!("memory {}", render::bytes(n)));
            }
            text.push_str(&format!(
                "accepted  {}{}{}\n",
                line.task,
                if facts.is_empty() { "" } else { ": " },
                facts.join(", ")
            ));
        } else {
            for refusal in &line.refusals {
                text.push_str(&format!(
                    "REFUSED   {}: {} [{}]\n",
                    line.task,
                    placed(&line.path, refusal),
                    refusal.code
                ));
            }
        }
    }
    let accepted = checked.iter().filter(|c| c.accepted).count();
    let how = match checked.iter().filter(|c| c.ran).count() {
        0 => "checked by syntax only".to_owned(),
        ran if ran == checked.len() => "run on this machine".to_owned(),
        ran => format!("{ran} of them run on this machine"),
    };
    text.push_str(&format!(
        "\n{}, {how}: {accepted} accepted, {} refused",
        render::count(checked.len(), "task"),
        checked.len() - accepted
    ));
    text
}

/// Arguments of `kernelfleet task init`.
#[derive(Clone, Debug)]
pub struct InitArguments {
    pub request: init::Request,
    pub file: PathBuf,
    pub force: bool,
}

/// `kernelfleet task init`.
///
/// # Errors
/// `Request` when the module can't be imported or the file is there already.
pub fn init(arguments: &InitArguments) -> Result<(), Failure> {
    let request = &arguments.request;
    // Before the seconds that PyTorch takes to come up.
    if arguments.file.exists() && !arguments.force {
        return Err(Failure::Request(format!("{} is there already; --force overwrites it", arguments.file.display())));
    }
    let local = local(&request.module)?;
    let text = init::render(request, local.as_ref()).map_err(Failure::Request)?;
    let environment = environment::discover().map_err(Failure::request)?;
    let python = &environment.toolchain.python;
    if let Some(local) = &local {
        let class = request.module.rsplit([':', '.']).next().unwrap_or_default();
        if let Some(why) = local.refusal(class, &environment.python.modules) {
            return Err(Failure::Request(why));
        }
    } else {
        let (package, _) = init::split(&request.module).map_err(Failure::Request)?;
        let top = package.split('.').next().unwrap_or(&package);
        if Path::new(top).is_dir() {
            return Err(Failure::Request(format!(
                "{top} is a folder here, and a task is one file: put the class and what it needs into one file and name that, --module ./file.py:Class"
            )));
        }
        if !environment.python.modules.iter().any(|m| m == top) {
            return Err(Failure::Request(format!(
                "the package {top} is not installed in the environment that tasks run in ({}), and there is no {top}.py here; if it is a package that you know, install it there",
                python.display()
            )));
        }
    }
    usable(python, request, &text)?;
    std::fs::write(&arguments.file, text).map_err(Failure::request)?;
    err(&format!("wrote {0}; next: kernelfleet task check {0}", arguments.file.display()));
    Ok(())
}

/// The file that a module's name means, if it is one: `./layers.py:Gate`, or `layers:Gate` beside a `layers.py`.
fn local(module: &str) -> Result<Option<init::Local>, Failure> {
    let path = match init::file(module) {
        Some((path, _)) => PathBuf::from(path),
        None => {
            let (package, _) = init::split(module).map_err(Failure::Request)?;
            let path = PathBuf::from(format!("{}.py", package.replace('.', "/")));
            if !path.is_file() {
                return Ok(None);
            }
            path
        }
    };
    let text = std::fs::read_to_string(&path)
        .map_err(|e| Failure::Request(format!("{} can't be read: {e}", path.display())))?;
    Ok(Some(init::Local { name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(), text }))
}

/// Runs the task's text, constructs its model and calls it once: on tensors without data, and where that can't be done, on
/// real ones, whose error is then the answer. The module is the user's own choice and runs as the user, as it would in their
/// own program.
fn usable(python: &Path, request: &init::Request, text: &str) -> Result<(), Failure> {
    use std::io::Write;
    const QUESTION: &str = r#"
import sys
import torch
def say(word, error=""):
    print("\n" + word + "\n" + (f"{type(error).__name__}: {error}" if error else ""))
    sys.exit()
space = {"__name__": "task"}
try:
    exec(compile(sys.stdin.read(), "task.py", "exec"), space)
except BaseException as error:
    say("import", error)
found = space.get(sys.argv[1])
if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
    say("class")
try:
    space["Model"](*space["get_init_inputs"]())
except BaseException as error:
    say("constructor", error)
def call():
    with torch.no_grad():
        space["Model"](*space["get_init_inputs"]()).eval()(*space["get_inputs"]())
try:
    with torch.device("meta"):
        call()
except BaseException:
    try:
        call()
    except BaseException as error:
        say("forward", error)
say("ok")
"#;
    let class = request.module.rsplit([':', '.']).next().unwrap_or_default();
    let subject = if text.contains(" as Subject\n") { "Subject" } else { class };
    let mut child = Command::new(python)
        .args(["-c", QUESTION, subject])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(Failure::fault)?;
    if let Some(mut pipe) = child.stdin.take() {
        pipe.write_all(text.as_bytes()).map_err(Failure::fault)?;
    }
    let answer = child.wait_with_output().map_err(Failure::fault)?;
    let said = String::from_utf8_lossy(&answer.stdout);
    let words = ["ok", "import", "class", "constructor", "forward"];
    let mut lines = said.lines().skip_while(|l| !words.contains(l));
    let word = lines.next();
    let why = match word {
        Some(_) => lines.collect::<Vec<_>>().join(" "),
        // It was killed before it could say a word.
        None => format!("calling it ended Python ({})", answer.status),
    };
    let word = word.unwrap_or("import");
    let module = &request.module;
    Err(Failure::Request(match word {
        "ok" => return Ok(()),
        "class" => format!("{module} can't be used: it is no torch.nn.Module"),
        "constructor" => {
            let given = if request.arguments.is_empty() { "no arguments" } else { &request.arguments };
            format!("{module} can't be constructed with {given}: {}; say others with --arguments", why.trim())
        }
        "forward" => {
            let shapes: Vec<String> = request.shapes.iter().map(|s| format!("{s:?}")).collect();
            format!(
                "{module} can't be called with {} of {}: {}; say others with --shape, once for each tensor that forward gets",
                shapes.join(" and "),
                request.dtype,
                why.trim()
            )
        }
        _ if why.contains("cannot import name") => {
            let package = module.rsplit_once([':', '.']).map_or(module.as_str(), |(package, _)| package);
            format!("{module} can't be used: {package} has no torch.nn.Module called {class}")
        }
        _ => format!("{module} can't be used: {}", why.trim()),
    }))
}

/// `kernelfleet export`.
///
/// # Errors
/// `Request` when there is nothing to export or it is not what was judged.
pub fn export(result: &Path, package: &Path) -> Result<(), Failure> {
    let judged = export::read(result).map_err(Failure::request)?;
    let environment = ready(judged.device)?;
    let stage = Arc::new(Stage::default());
    export::export(&judged, &environment, package, &stage).map_err(|error| match error {
        export::Error::Judge(error) => Failure::from(Trouble::from(error)),
        other => Failure::request(other),
    })?;
    stage.end();
    let name = package.file_name().unwrap_or_default().to_string_lossy();
    err(&format!(
        "wrote {}; next: from {name} import Model (an example is in {})",
        package.display(),
        package.join("README.md").display()
    ));
    Ok(())
}

/// `kernelfleet replay`.
///
/// # Errors
/// `Request` when the file is no trajectory.
pub fn replay(path: &Path, full: bool) -> Result<(), Failure> {
    let path = &episode(path)?;
    let lines = crate::agent::trajectory::read(path).map_err(Failure::request)?;
    out(super::story::story(&lines, full).trim_end_matches('\n'));
    Ok(())
}

/// The trajectory that a path means: a file, or the only one of a folder of results.
fn episode(path: &Path) -> Result<PathBuf, Failure> {
    if !path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let mut folders = vec![path.to_path_buf()];
    folders.extend(std::fs::read_dir(path).map_err(Failure::request)?.filter_map(|e| Some(e.ok()?.path())));
    folders.sort();
    let found: Vec<PathBuf> = folders.iter().map(|f| f.join("trajectory.jsonl")).filter(|f| f.is_file()).collect();
    match found.as_slice() {
        [one] => Ok(one.clone()),
        [] => Err(Failure::Request(format!(
            "{} holds no trajectory.jsonl; a run records one a task where a model writes the kernels (--endpoint, --replay)",
            path.display()
        ))),
        several => {
            let list = several.iter().map(|f| format!("\n  kernelfleet replay {}", f.display())).collect::<String>();
            Err(Failure::Request(format!("{} holds several episodes, say which:{list}", path.display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(names: &[&str]) -> Vec<source::Found> {
        let one = |name: &&str| source::Found { name: (*name).into(), path: "x.py".into(), source: String::new() };
        names.iter().map(one).collect()
    }

    #[test]
    fn a_card_whose_code_reaches_the_host_gives_no_verdict_of_the_highest_grade() {
        let card = |exposed| judge::Facts {
            class: "card".into(),
            arch: "sm_90a".into(),
            memory_bytes: 1,
            display: false,
            exposed,
            description: std::collections::BTreeMap::default(),
            properties: json!({}),
        };
        assert!(graded(&card(false), true).is_ok() && graded(&card(true), false).is_ok());
        let Err(Failure::Request(why)) = graded(&card(true), true) else { panic!("it is no enforced one") };
        assert!(why.contains("uvm_disable_hmm=1"), "{why}");
    }

    #[test]
    fn what_a_selector_leaves_out_of_the_tasks_that_were_given_is_told() {
        let names = |found: &[source::Found]| found.iter().map(|f| f.name.clone()).collect::<Vec<_>>();
        let limit = job::TaskSelector { names: None, limit: Some(3) };
        let (taken, told) = select(found(&["a", "b", "c", "d"]), &limit);
        assert_eq!(names(&taken), ["a", "b", "c"]);
        assert_eq!(told, ["4 tasks given, 1 left out by spec.tasks.taskSet.selector.limit: 3: d"]);
        let (taken, told) = select(found(&["a"]), &limit);
        assert_eq!((names(&taken), told.len()), (vec!["a".to_owned()], 0));
        let named = job::TaskSelector { names: Some(vec!["b".into()]), limit: Some(3) };
        let (taken, told) = select(found(&["a", "b"]), &named);
        assert_eq!(names(&taken), ["b"]);
        assert_eq!(told, ["2 tasks given, 1 left out by spec.tasks.taskSet.selector.names: a"]);
        assert!(select(found(&["a"]), &job::TaskSelector::default()).1.is_empty());
    }
}
