//! `kernelfleet agent`: one episode in a pod.
//!
//! Knows how an episode of the broker becomes the work on one task of a local run, and what the pod's end means. Must
//! not know the order of that work, nor how anything is judged.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::bench::Remote;
use super::broker_client::{self, Broker, Error, ask};
use super::tail::Tail;
use crate::agent::author::Endpoint;
use crate::agent::trajectory;
use crate::api::job::{self, OptimizationJobSpec, Tasks};
use crate::gateway::chat::Sampling;
use crate::gateway::{self, Gateway};
use crate::judge::{Device, TaskSource};
use crate::local::episodes::{Episodes, Who, limits};
use crate::local::policy::Builtin;
use crate::local::progress::Progress;
use crate::local::run::{self, Policy, Settings};
use crate::local::summary::{Outcome, State};
use crate::sandbox::client::Sandbox;
use crate::wire::v1::{BeginRequest, Episode, FinishRequest};

/// After so many failures of its index a fault ends the episode: another pod would hardly fare better.
const MOST_FAILURES: u32 = 3;

/// How long the sandbox is waited for: its container starts before the agent's.
const SANDBOX: Duration = Duration::from_secs(60);

/// How long the pod of a job that is closed waits for its end.
const TAKEN_AWAY: Duration = Duration::from_secs(30);

/// Attempts at a gateway that isn't reachable, with growing waits: some ten minutes.
const GATEWAY_TRIES: u32 = 20;

/// What an agent pod is given.
#[derive(Clone, Debug)]
pub struct Arguments {
    pub broker: broker_client::Settings,
    /// Attempts and trajectory are kept here until the broker has them.
    pub folder: PathBuf,
    /// Where the sandbox is kept, for policies that use one.
    pub sandbox: PathBuf,
    /// Where its tools find the desk.
    pub desk: PathBuf,
    /// Where models are asked, up to and with the version.
    pub gateway: Option<String>,
    pub gateway_token_file: PathBuf,
    /// Pods of this completion index that failed before this one. Without it, every generation before counts as failed.
    pub failures: Option<u32>,
}

/// How the pod ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The episode is finished, whatever its reward.
    Finished,
    /// The pod was called wrongly.
    Misused(String),
    /// Something failed that a new pod may not meet, or the episode is another pod's.
    Fault(String),
}

impl End {
    /// The exit status.
    #[must_use]
    pub const fn status(&self) -> u8 {
        match self {
            Self::Finished => 0,
            Self::Misused(_) => 1,
            Self::Fault(_) => 3,
        }
    }
}

impl From<Error> for End {
    fn from(error: Error) -> Self {
        match error {
            Error::Settings(text) => Self::Misused(text),
            other => Self::Fault(other.to_string()),
        }
    }
}

/// Plays the episode that this pod is for.
#[must_use]
pub fn main(arguments: &Arguments) -> End {
    match play(arguments) {
        Ok(()) => End::Finished,
        Err(end) => end,
    }
}

fn play(arguments: &Arguments) -> Result<(), End> {
    let broker = Broker::new(arguments.broker.clone())?;
    let episode = match ask!(broker, episodes.begin, Duration::ZERO, &BeginRequest {}) {
        Ok(episode) => episode,
        Err(error) => return void(error),
    };
    tracing::info!(
        job = episode.job_name,
        task = episode.task_name,
        index = episode.index,
        generation = episode.generation,
        "an episode begins"
    );
    // What an earlier process of this pod wrote can't be gone on from: a new pod begins anew.
    if episode.lines > 0 {
        return Err(End::Fault(format!(
            "{} lines of this episode are kept already, by a process that is gone",
            episode.lines
        )));
    }
    let job = Job::read(&episode)?;
    let folder = tempfile::Builder::new()
        .prefix("episode-")
        .tempdir_in(&arguments.folder)
        .map_err(|e| End::Misused(format!("{} can't be written: {e}", arguments.folder.display())))?;
    let remote = Remote::new(&broker, job.properties.clone());
    let policy: Box<dyn Policy> = job.policy(&episode, arguments)?;
    let stop = AtomicBool::new(false);
    let agent = &job.spec.agent;
    let settings = Settings {
        folder: folder.path().to_owned(),
        identity: String::new(),
        most_attempts: usize::try_from(agent.max_turns).unwrap_or(1),
        target: job.spec.target.clone(),
        workers: if job.device == Device::Cuda { 2 } else { 1 },
        until: agent
            .active_deadline_seconds
            .and_then(|s| u64::try_from(s).ok())
            .map(|s| Instant::now() + Duration::from_secs(s)),
    };
    let trajectory = run::task_folder(folder.path(), &job.task.name).join("trajectory.jsonl");
    let tail = Tail::new(&broker, trajectory);
    let outcome = std::thread::scope(|scope| {
        let sending = scope.spawn(|| tail.send());
        let outcome = run::single(&job.task, &remote, policy.as_ref(), &settings, &Progress::silent(), &stop);
        tail.end();
        let sent =
            sending.join().unwrap_or_else(|_| Err(End::Fault("the thread that sends the trajectory died".into())));
        sent.map(|()| outcome)
    });
    if let Some(error) = remote.void() {
        return void(error);
    }
    let outcome = outcome?.ok_or_else(|| End::Fault("stopped".into()))?;
    let failures = arguments.failures.unwrap_or_else(|| episode.generation.saturating_sub(1));
    finish(&broker, failures, &outcome)
}

/// How a pod asks its gateway.
fn gateway_settings(url: &str, token: &Path) -> gateway::Settings {
    let mut settings = gateway::Settings::new(url);
    settings.key_file = Some(token.to_owned());
    // It tries again itself, for all agents together, and a request may wait there for its turn.
    settings.limits.tries = 3;
    // One that isn't there yet, or is moved to another node, is back within ten minutes or so; so is a broker.
    settings.limits.unreachable_tries = GATEWAY_TRIES;
    settings.silence = settings.attempt;
    settings
}

/// After a refusal: an episode that is over needs no pod. One that another pod goes on with does, and a pod that ends well
/// would end the index for that one too.
fn void(error: Error) -> Result<(), End> {
    tracing::info!(%error, reason = error.reason(), "the broker has nothing for this pod");
    match error.reason() {
        "finished" => Ok(()),
        // Suspended, or deleted: the pod is about to be taken away. Of a job that comes back the episode is not over.
        "closed" => {
            std::thread::sleep(TAKEN_AWAY);
            Err(error.into())
        }
        _ => Err(error.into()),
    }
}

/// Ends the episode in the broker, or leaves a fault to the next pod.
fn finish(broker: &Broker, failures: u32, outcome: &Outcome) -> Result<(), End> {
    let reason = outcome.reason.clone().unwrap_or_default();
    if outcome.state == State::Failed && failures < MOST_FAILURES {
        return Err(End::Fault(reason));
    }
    let text = serde_json::to_string(outcome).map_err(|e| End::Fault(format!("the outcome can't be written: {e}")))?;
    match ask!(broker, episodes.finish, Duration::ZERO, &FinishRequest { outcome_json: text }) {
        Ok(reply) => {
            tracing::info!(state = ?outcome.state, reward = reply.reward, reason, "the episode is finished");
            Ok(())
        }
        Err(error) => void(error),
    }
}

/// What the broker says of an episode, checked.
#[derive(Debug)]
struct Job {
    spec: OptimizationJobSpec,
    task: TaskSource,
    device: Device,
    properties: Value,
}

impl Job {
    fn read(episode: &Episode) -> Result<Self, End> {
        let wrong = |what: &str, why: &dyn std::fmt::Display| {
            End::Fault(format!("the broker's {what} is not understood: {why}"))
        };
        let mut spec: Value = serde_json::from_str(&episode.spec_json).map_err(|e| wrong("job", &e))?;
        // It comes without its tasks; an episode has one.
        spec["tasks"] = serde_json::to_value(Tasks::default()).map_err(|e| wrong("job", &e))?;
        let device = match episode.device.as_str() {
            "cpu" => Device::Cpu,
            "cuda" => Device::Cuda,
            other => return Err(wrong("device", &other)),
        };
        let properties = if episode.properties_json.is_empty() {
            Value::Null
        } else {
            serde_json::from_str(&episode.properties_json).map_err(|e| wrong("device", &e))?
        };
        Ok(Self {
            spec: serde_json::from_value(spec).map_err(|e| wrong("job", &e))?,
            task: TaskSource {
                name: episode.task_name.clone(),
                path: format!("{}.py", episode.task_name).into(),
                source: episode.task_source.clone(),
            },
            device,
            properties,
        })
    }

    fn policy(&self, episode: &Episode, arguments: &Arguments) -> Result<Box<dyn Policy>, End> {
        let who = match &self.spec.policy {
            job::Policy { endpoint: Some(of_job), .. } => {
                let url = arguments.gateway.as_deref().ok_or_else(|| {
                    End::Misused(
                        "the job's policy is an endpoint: where is its gateway? set KERNELFLEET_GATEWAY".into(),
                    )
                })?;
                let settings = gateway_settings(url, &arguments.gateway_token_file);
                let gateway = Gateway::new(settings).map_err(|e| End::Misused(format!("KERNELFLEET_GATEWAY: {e}")))?;
                let sampling = Sampling {
                    temperature: Some(of_job.sampling.temperature),
                    top_p: Some(of_job.sampling.top_p),
                    seed: None,
                };
                Who::Endpoint(Endpoint { gateway: Arc::new(gateway), model: of_job.model.clone(), sampling })
            }
            job::Policy { replay: Some(_), .. } => {
                let name = format!("{}.jsonl", self.task.name);
                let lines = trajectory::parse(Path::new(&name), episode.replay.as_slice())
                    .map_err(|e| End::Fault(e.to_string()))?;
                Who::Replay([(self.task.name.clone(), lines)].into())
            }
            _ => return Ok(Box::new(Builtin::new(self.device))),
        };
        let sandbox = arguments.sandbox.clone();
        Ok(Box::new(Episodes {
            who,
            limits: limits(&self.spec.agent),
            attempts: 1,
            device: self.device,
            hardware: episode.hardware.clone(),
            libraries: self.spec.judge.libraries.iter().map(|l| l.name().to_owned()).collect(),
            workspaces: Box::new(move |_| Ok(Box::new(Sandbox::connect(&sandbox, SANDBOX)?))),
            desk: Some(arguments.desk.clone()),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gateway::budget::{Budget, Failed, Tries};

    #[test]
    fn a_gateway_that_is_not_reachable_is_waited_for_some_ten_minutes() {
        let limits = gateway_settings("http://10.96.0.9:8080/v1", Path::new("token")).limits;
        let mut budget = Budget::new(limits, 7);
        let mut tries = Tries::default();
        let waits = std::iter::from_fn(|| budget.failed(Duration::ZERO, Failed::Unreachable, &mut tries, None));
        let minutes = waits.map(|w| w.as_secs_f64()).sum::<f64>() / 60.0;
        assert!((7.5..13.0).contains(&minutes), "{minutes}");
        assert_eq!(tries.unreachable, GATEWAY_TRIES);
    }
}
