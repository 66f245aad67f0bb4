//! Which policy a job gets on this machine: built in, a model behind an endpoint, or recorded trajectories.
//!
//! Knows manifests, arguments and where keys are kept. Must not know how a policy works.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::doctor;
use super::environment::Environment;
use super::episodes::{Episodes, Who, Workspaces, limits};
use super::policy::Builtin;
use super::run::{Policy, task_folder};
use crate::agent::author::Endpoint;
use crate::agent::trajectory::{self, Line};
use crate::api::job::OptimizationJob;
use crate::api::manifest::Manifest;
use crate::gateway::chat::Sampling;
use crate::gateway::tokens::Prices;
use crate::gateway::{Gateway, Key, Settings};
use crate::judge::cache::digest;
use crate::judge::{Device, TaskSource};
use crate::sandbox::client::{Options, Sandbox};

/// What the command line says about who writes the kernels.
#[derive(Clone, Debug, Default)]
pub struct PolicyArguments {
    /// Address of an OpenAI-compatible endpoint, up to and with its version.
    pub endpoint: Option<String>,
    pub model: Option<String>,
    /// File that holds the endpoint's key; else `KERNELFLEET_API_KEY` or `KERNELFLEET_API_KEY_FILE`.
    pub key_file: Option<PathBuf>,
    /// Answers come whole.
    pub no_stream: bool,
    /// Ask for token ids.
    pub token_ids: bool,
    pub temperature: Option<f64>,
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    /// Of a million tokens, read and written.
    pub prices: Option<(f64, f64)>,
    /// Seconds of silence after which an attempt is given up.
    pub silence: Option<u64>,
    /// Most tokens of one answer.
    pub reply_tokens: Option<u64>,
    /// A trajectory, or a folder of results that holds one a task.
    pub replay: Option<PathBuf>,
}

/// A policy and all of it that decides an outcome.
pub struct Chosen {
    pub policy: Box<dyn Policy>,
    pub identity: Value,
    /// What it is, for people.
    pub about: String,
    /// A model thinks while others measure.
    pub thinks: bool,
}

/// Chooses for one job.
///
/// # Errors
/// Names the field or argument and what to do.
pub fn choose(
    job: &OptimizationJob,
    manifest: &Manifest,
    arguments: &PolicyArguments,
    tasks: &[TaskSource],
    device: Device,
    environment: &Environment,
) -> Result<Chosen, String> {
    let name = job.metadata.name.as_deref().unwrap_or("job");
    if let Some(path) = &arguments.replay {
        return recorded(job, &from_files(path, tasks)?, device, environment);
    }
    if let Some(url) = &arguments.endpoint {
        return endpoint(job, url, arguments, device, environment);
    }
    if let Some(policy) = &job.spec.policy.endpoint {
        return Err(format!(
            "{name}: spec.policy.endpoint: a local run knows no ModelEndpoint `{}`; say where it is: --endpoint URL (and its key in KERNELFLEET_API_KEY or --key-file)",
            policy.name
        ));
    }
    if arguments.model.is_some() {
        return Err("--model names a model of an endpoint; say where that is: --endpoint URL".into());
    }
    if let Some(policy) = &job.spec.policy.replay {
        let data = manifest.config_maps.get(&policy.config_map).ok_or_else(|| {
            format!(
                "{name}: spec.policy.replay.configMap: the file holds no ConfigMap `{}`; put it there as another document, or use --replay PATH",
                policy.config_map
            )
        })?;
        let mut all = BTreeMap::new();
        for (key, text) in data {
            if let Some(task) = key.strip_suffix(".jsonl") {
                let lines = trajectory::parse(Path::new(key), text.as_bytes()).map_err(|e| e.to_string())?;
                all.insert(task.to_owned(), lines);
            }
        }
        return recorded(job, &all, device, environment);
    }
    Ok(Chosen {
        policy: Box::new(Builtin::new(device)),
        identity: json!(job.spec.policy),
        about: "the built-in policy".into(),
        thinks: false,
    })
}

fn from_files(path: &Path, tasks: &[TaskSource]) -> Result<BTreeMap<String, Vec<Line>>, String> {
    let read = |path: &Path| trajectory::read(path).map_err(|e| e.to_string());
    if path.is_file() {
        let [task] = tasks else {
            return Err(format!(
                "--replay: {} is one trajectory, the job has {} tasks; name a folder of results",
                path.display(),
                tasks.len()
            ));
        };
        return Ok([(task.name.clone(), read(path)?)].into());
    }
    let mut all = BTreeMap::new();
    for task in tasks {
        let file = task_folder(path, &task.name).join("trajectory.jsonl");
        if file.is_file() {
            all.insert(task.name.clone(), read(&file)?);
        }
    }
    if all.is_empty() {
        return Err(format!("--replay: {} holds no <task>/trajectory.jsonl of any task of the job", path.display()));
    }
    Ok(all)
}

fn recorded(
    job: &OptimizationJob,
    all: &BTreeMap<String, Vec<Line>>,
    device: Device,
    environment: &Environment,
) -> Result<Chosen, String> {
    let text = serde_json::to_vec(all).map_err(|e| e.to_string())?;
    let identity = json!({"replay": digest([text.as_slice()]), "context": job.spec.agent.context_tokens});
    let policy = episodes(job, Who::Replay(all.clone()), device, environment);
    let about = format!("{} recorded trajectories", all.len());
    Ok(Chosen { policy: Box::new(policy), identity, about, thinks: true })
}

fn endpoint(
    job: &OptimizationJob,
    url: &str,
    arguments: &PolicyArguments,
    device: Device,
    environment: &Environment,
) -> Result<Chosen, String> {
    let of_job = job.spec.policy.endpoint.as_ref();
    let model = arguments.model.clone().or_else(|| of_job.map(|p| p.model.clone())).ok_or_else(|| {
        "--endpoint: which of its models? say --model NAME, or spec.policy.endpoint.model in the manifest".to_owned()
    })?;
    let mut settings = Settings::new(url);
    settings.key = key(arguments, |name| std::env::var(name).ok())?;
    settings.stream = !arguments.no_stream;
    settings.token_ids = arguments.token_ids;
    settings.limits.requests_per_minute = arguments.requests_per_minute;
    settings.limits.tokens_per_minute = arguments.tokens_per_minute;
    settings.prices = arguments.prices.map(|(prompt, completion)| Prices { prompt, completion, cached: None });
    if let Some(seconds) = arguments.silence {
        settings.silence = Duration::from_secs(seconds.max(1));
    }
    // What nobody chose is left to the server.
    let temperature = arguments.temperature.or_else(|| of_job.map(|p| p.sampling.temperature));
    let sampling = Sampling { temperature, top_p: of_job.map(|p| p.sampling.top_p), seed: None };
    let gateway = Arc::new(Gateway::new(settings).map_err(|e| format!("--endpoint: {e}"))?);
    let identity = json!({
        "endpoint": gateway.settings().base_url, "model": model, "sampling": sampling, "attempts": job.spec.agent.attempts,
        "context": job.spec.agent.context_tokens, "deadline": job.spec.agent.active_deadline_seconds,
        "reply": arguments.reply_tokens,
    });
    let about = format!("{model} at {}", gateway.settings().base_url);
    let mut policy = episodes(job, Who::Endpoint(Endpoint { gateway, model, sampling }), device, environment);
    if let Some(tokens) = arguments.reply_tokens {
        policy.limits.reply_tokens = tokens.max(64);
    }
    Ok(Chosen { policy: Box::new(policy), identity, about, thinks: true })
}

/// The endpoint's key: a file that is named, else the environment.
fn key(arguments: &PolicyArguments, variable: impl Fn(&str) -> Option<String>) -> Result<Option<Key>, String> {
    if let Some(file) = &arguments.key_file {
        return Key::from_file(file).map(Some).map_err(|e| format!("--key-file: {e}"));
    }
    if let Some(text) = variable("KERNELFLEET_API_KEY").filter(|t| !t.is_empty()) {
        return Key::new(&text).map(Some).map_err(|e| format!("KERNELFLEET_API_KEY: {e}"));
    }
    if let Some(file) = variable("KERNELFLEET_API_KEY_FILE").filter(|t| !t.is_empty()) {
        return Key::from_file(Path::new(&file)).map(Some).map_err(|e| format!("KERNELFLEET_API_KEY_FILE: {e}"));
    }
    Ok(None)
}

fn episodes(job: &OptimizationJob, who: Who, device: Device, environment: &Environment) -> Episodes {
    Episodes {
        who,
        limits: limits(&job.spec.agent),
        attempts: usize::try_from(job.spec.agent.attempts).unwrap_or(1),
        device,
        hardware: hardware(device, environment),
        libraries: job.spec.judge.libraries.iter().map(|l| l.name().to_owned()).collect(),
        workspaces: workspaces(environment),
        desk: None,
    }
}

fn hardware(device: Device, environment: &Environment) -> String {
    match device {
        Device::Cuda => doctor::gpus().first().cloned().unwrap_or_else(|| "an NVIDIA GPU".into()),
        Device::Cpu => {
            let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            let name = text.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':').map(|p| p.1.trim()));
            format!("{} with {} threads", name.unwrap_or("a CPU"), environment.toolchain.threads)
        }
    }
}

/// Sandboxes with the toolchain to read and nothing of the user's environment.
fn workspaces(environment: &Environment) -> Workspaces {
    let toolchain = &environment.toolchain;
    let mut options = Options::new(toolchain.program.clone());
    options.read.extend(toolchain.python_read.iter().cloned());
    options.path.extend(toolchain.python.parent().map(Path::to_path_buf));
    if let Some(nvcc) = &toolchain.nvcc {
        options.read.extend(nvcc.read.iter().cloned());
        options.path.extend(nvcc.path.parent().map(Path::to_path_buf));
    }
    options.env.insert("LANG".into(), "C.UTF-8".into());
    Box::new(move |socket| {
        let options = Options { socket: Some(socket.to_path_buf()), ..options.clone() };
        Ok(Box::new(Sandbox::start(&options)?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_from_the_file_that_is_named_else_from_the_environment() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key");
        std::fs::write(&file, "from-file\n").unwrap();
        let none = |_: &str| None;
        let text = |key: Option<Key>| key.map(|k| k.redact("from-file from-env from-env-file"));
        let named = PolicyArguments { key_file: Some(file.clone()), ..PolicyArguments::default() };
        assert!(text(key(&named, |_| Some("from-env".into())).unwrap()).unwrap().starts_with("[key] from-env"));
        let plain = PolicyArguments::default();
        let direct = |name: &str| (name == "KERNELFLEET_API_KEY").then(|| "from-env".to_owned());
        assert!(text(key(&plain, direct).unwrap()).unwrap().starts_with("from-file [key]"));
        let by_file = |name: &str| (name == "KERNELFLEET_API_KEY_FILE").then(|| file.display().to_string());
        assert!(text(key(&plain, by_file).unwrap()).unwrap().starts_with("[key]"));
        assert!(key(&plain, none).unwrap().is_none());
        let missing = PolicyArguments { key_file: Some("/no/key".into()), ..PolicyArguments::default() };
        assert!(key(&missing, none).unwrap_err().contains("--key-file: /no/key can't be read"));
    }
}
