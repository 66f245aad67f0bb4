//! From an OptimizationJob's spec and what it refers to, to a checked type: what the schema can't say. Pure. The second
//! step.

use std::collections::BTreeSet;

use super::dereference::{Facts, Source, Texts};
use crate::api::job::{Grade, OptimizationJob, OptimizationJobSpec};
use crate::judge::EXPOSED;
use crate::operator::broker::Address;
use crate::operator::conditions;
use crate::operator::context::Found;
use crate::operator::pool::status::{HOST_MEMORY, TRUSTED};
use crate::task::{source::MAX_BYTES, syntax};

/// Episodes that an Indexed Job can have with a limit for each index.
pub const MOST_EPISODES: usize = 100_000;
/// Refused tasks that a message names.
const MOST_NAMED: usize = 8;

/// Why a job can't be carried out, now or ever.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("there is no GpuPool `{0}`; waiting for it. kubectl get gpupools lists those that there are")]
    NoPool(String),
    #[error("the GpuPool `{name}` can't be read: {what}; waiting until it is mended")]
    UnreadablePool { name: String, what: String },
    #[error("the GpuPool `{pool}` is not for the namespace {namespace}; its owner adds it to spec.allowedNamespaces")]
    NotAllowed { pool: String, namespace: String },
    #[error("the GpuPool `{0}` has no broker yet; waiting for it. kubectl describe gpupool {0} says how far it is")]
    NoBroker(String),
    #[error(
        "spec.judge.minimumGrade: the GpuPool `{0}` can't give `enforced`: {EXPOSED}. Waiting for that; `observed` or another \
         pool needs no waiting"
    )]
    NotEnforced(String),
    #[error("there is no ModelEndpoint `{0}` in this namespace; waiting for it")]
    NoEndpoint(String),
    #[error("the ModelEndpoint `{name}` can't be read: {what}; waiting until it is mended")]
    UnreadableEndpoint { name: String, what: String },
    #[error(
        "the ModelEndpoint `{0}` has no gateway yet; waiting for it. kubectl describe modelendpoint {0} says how far it is"
    )]
    NoGateway(String),
    #[error("spec.policy.endpoint.model: the ModelEndpoint `{endpoint}` has no model `{model}`; it has {has}")]
    NoModel { endpoint: String, model: String, has: String },
    #[error("there is no ConfigMap `{name}` in this namespace, which {field} names; waiting for it")]
    NoConfigMap { name: String, field: &'static str },
    #[error("the ConfigMap `{name}`, which {field} names, can't be used: {what}")]
    BadConfigMap { name: String, field: &'static str, what: String },
    #[error("there is no TaskSet `{0}` in this namespace; waiting for it")]
    NoTaskSet(String),
    #[error("the TaskSet `{set}` has its tasks in {source_word}, which is not supported yet; put them into ConfigMaps")]
    Unsupported { set: String, source_word: &'static str },
    #[error("{0} holds no task: each key that ends in .py is one")]
    NoTasks(String),
    #[error("spec.tasks.taskSet.selector.names: the TaskSet has no task `{0}`")]
    NotInSet(String),
    #[error("{refused} of {tasks} tasks can't be used: {first}")]
    Tasks { refused: usize, tasks: usize, first: String },
    #[error("two tasks have the name `{0}`")]
    Twice(String),
    #[error(
        "{tasks} tasks with {attempts} attempts are {episodes} episodes, {MOST_EPISODES} is the most; split the job"
    )]
    TooMany { tasks: usize, attempts: i32, episodes: usize },
    #[error(
        "spec.policy.replay: the ConfigMap `{map}` has no trajectory of these tasks: {tasks}; it has one key `<task>.jsonl` each"
    )]
    NoTrajectory { map: String, tasks: String },
    #[error("spec.agent.resources.{field}: `{value}` is not a quantity such as 500m, 2 or 4Gi")]
    Quantity { field: &'static str, value: String },
}

impl Error {
    /// One word for the condition.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::NoPool(_) => "PoolNotFound",
            Self::UnreadablePool { .. } => "PoolUnreadable",
            Self::NotAllowed { .. } => "NamespaceNotAllowed",
            Self::NoBroker(_) => "PoolNotReady",
            Self::NotEnforced(_) => "PoolNotEnforcing",
            Self::NoEndpoint(_) => "EndpointNotFound",
            Self::UnreadableEndpoint { .. } => "EndpointUnreadable",
            Self::NoGateway(_) => "EndpointNotReady",
            Self::NoModel { .. } => "ModelNotFound",
            Self::NoConfigMap { .. } => "ConfigMapNotFound",
            Self::BadConfigMap { .. } => "ConfigMapInvalid",
            Self::NoTaskSet(_) => "TaskSetNotFound",
            Self::Unsupported { .. } => "TaskSetNotSupported",
            Self::NoTasks(_) => "NoTasks",
            Self::NotInSet(_) => "TaskNotFound",
            Self::Tasks { .. } | Self::Twice(_) => "TasksInvalid",
            Self::TooMany { .. } => "TooManyEpisodes",
            Self::NoTrajectory { .. } => "TrajectoryNotFound",
            Self::Quantity { .. } => "Invalid",
        }
    }

    /// Whether it ends by something appearing, and not by a correction of the spec.
    #[must_use]
    pub const fn waits(&self) -> bool {
        matches!(
            self,
            Self::NoPool(_)
                | Self::UnreadablePool { .. }
                | Self::NoBroker(_)
                | Self::NotEnforced(_)
                | Self::NoEndpoint(_)
                | Self::UnreadableEndpoint { .. }
                | Self::NoGateway(_)
                | Self::NoConfigMap { .. }
                | Self::NoTaskSet(_)
        )
    }
}

/// One task that parses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub name: String,
    pub source: String,
    /// The trajectory to be played, with the policy `replay`.
    pub replay: Option<String>,
}

/// What a sandbox may use, in bytes where the sandbox itself is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    pub cpu: String,
    pub memory: String,
    pub disk: String,
    pub memory_bytes: u64,
    pub disk_bytes: u64,
}

/// A job that can be started.
#[derive(Clone, Debug)]
pub struct ValidJob {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub spec: OptimizationJobSpec,
    pub tasks: Vec<Task>,
    /// Tasks times attempts.
    pub episodes: i32,
    pub broker: Address,
    /// ClusterIP of the gateway, with the policy `endpoint`.
    pub gateway: Option<String>,
    pub resources: Resources,
}

/// Checks a job that has not started yet.
///
/// # Errors
/// Says what is missing or wrong, and what to do.
pub fn validate(job: &OptimizationJob, facts: &Facts) -> Result<ValidJob, Error> {
    let spec = &job.spec;
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    let resources = resources(spec)?;
    let mut tasks = tasks(spec, facts.source.as_ref())?;
    let attempts = spec.agent.attempts.max(1);
    let episodes = tasks.len().saturating_mul(usize::try_from(attempts).unwrap_or(1));
    if episodes > MOST_EPISODES {
        return Err(Error::TooMany { tasks: tasks.len(), attempts, episodes });
    }
    let broker = broker(spec, &namespace, facts)?;
    graded(spec, facts)?;
    let gateway = gateway(spec, facts)?;
    if let Some(policy) = &spec.policy.replay {
        let texts = texts(&policy.config_map, "spec.policy.replay.configMap", facts.replay.as_ref())?;
        for task in &mut tasks {
            task.replay = texts.get(&format!("{}.jsonl", task.name)).cloned();
        }
        let missing: Vec<&str> = tasks.iter().filter(|t| t.replay.is_none()).map(|t| t.name.as_str()).collect();
        if !missing.is_empty() {
            return Err(Error::NoTrajectory { map: policy.config_map.clone(), tasks: listed(&missing) });
        }
    }
    Ok(ValidJob {
        name: job.metadata.name.clone().unwrap_or_default(),
        namespace,
        uid: job.metadata.uid.clone().unwrap_or_default(),
        spec: spec.clone(),
        tasks,
        episodes: i32::try_from(episodes).unwrap_or(i32::MAX),
        broker,
        gateway,
        resources,
    })
}

/// Checks a job that has started: its tasks are the broker's by now.
///
/// # Errors
/// As `validate`.
pub fn validate_started(job: &OptimizationJob, facts: &Facts) -> Result<ValidJob, Error> {
    let spec = &job.spec;
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    let said = facts.said.as_ref().and_then(|s| s.as_ref().ok()).filter(|f| f.known);
    let tasks = said.map(|f| i32::try_from(f.tasks).unwrap_or(i32::MAX)).or(job.status.as_ref().and_then(|s| s.tasks));
    Ok(ValidJob {
        name: job.metadata.name.clone().unwrap_or_default(),
        uid: job.metadata.uid.clone().unwrap_or_default(),
        spec: spec.clone(),
        tasks: Vec::new(),
        episodes: tasks.unwrap_or(1).saturating_mul(spec.agent.attempts.max(1)),
        broker: broker(spec, &namespace, facts)?,
        gateway: gateway(spec, facts)?,
        resources: resources(spec)?,
        namespace,
    })
}

/// Some names, and how many more there are.
fn listed(names: &[&str]) -> String {
    let mut text = names.iter().take(MOST_NAMED).copied().collect::<Vec<_>>().join(", ");
    if names.len() > MOST_NAMED {
        text.push_str(&format!(" and {} more", names.len() - MOST_NAMED));
    }
    text
}

fn broker(spec: &OptimizationJobSpec, namespace: &str, facts: &Facts) -> Result<Address, Error> {
    let name = &spec.judge.gpu_pool;
    match &facts.pool {
        Found::Missing => Err(Error::NoPool(name.clone())),
        Found::Unreadable(what) => Err(Error::UnreadablePool { name: name.clone(), what: what.clone() }),
        Found::Is(pool) if !pool.spec.allows(namespace) => {
            Err(Error::NotAllowed { pool: name.clone(), namespace: namespace.into() })
        }
        Found::Is(_) => facts.broker.clone().ok_or_else(|| Error::NoBroker(name.clone())),
    }
}

/// Refuses a job that would get reward -1 for everything, whatever it writes.
fn graded(spec: &OptimizationJobSpec, facts: &Facts) -> Result<(), Error> {
    let Found::Is(pool) = &facts.pool else { return Ok(()) };
    let conditions = pool.status.as_ref().map_or(&[][..], |status| &status.conditions);
    let exposed = conditions::get(conditions, TRUSTED).is_some_and(|c| c.status == "False" && c.reason == HOST_MEMORY);
    if spec.judge.minimum_grade == Grade::Enforced && exposed {
        return Err(Error::NotEnforced(spec.judge.gpu_pool.clone()));
    }
    Ok(())
}

fn gateway(spec: &OptimizationJobSpec, facts: &Facts) -> Result<Option<String>, Error> {
    let Some(policy) = &spec.policy.endpoint else { return Ok(None) };
    let name = policy.name.clone();
    match &facts.endpoint {
        None | Some((Found::Missing, _)) => Err(Error::NoEndpoint(name)),
        Some((Found::Unreadable(what), _)) => Err(Error::UnreadableEndpoint { name, what: what.clone() }),
        Some((Found::Is(endpoint), ip)) => {
            if !endpoint.spec.models.iter().any(|m| m.name == policy.model) {
                let has: Vec<&str> = endpoint.spec.models.iter().map(|m| m.name.as_str()).collect();
                return Err(Error::NoModel { endpoint: name, model: policy.model.clone(), has: listed(&has) });
            }
            ip.clone().map(Some).ok_or(Error::NoGateway(name))
        }
    }
}

fn texts<'a>(name: &str, field: &'static str, found: Option<&'a Found<Texts>>) -> Result<&'a Texts, Error> {
    match found {
        None | Some(Found::Missing) => Err(Error::NoConfigMap { name: name.into(), field }),
        Some(Found::Unreadable(what)) => Err(Error::BadConfigMap { name: name.into(), field, what: what.clone() }),
        Some(Found::Is(texts)) => Ok(texts),
    }
}

fn tasks(spec: &OptimizationJobSpec, source: Option<&Source>) -> Result<Vec<Task>, Error> {
    let mut tasks = Vec::new();
    let where_from = match source {
        None | Some(Source::Inline) => {
            for task in spec.tasks.inline.iter().flatten() {
                tasks.push(Task { name: task.name.clone(), source: task.source.clone(), replay: None });
            }
            "spec.tasks.inline".to_owned()
        }
        Some(Source::NoSet(name)) => return Err(Error::NoTaskSet(name.clone())),
        Some(Source::Unsupported { set, source }) => {
            return Err(Error::Unsupported { set: set.clone(), source_word: source });
        }
        Some(Source::ConfigMaps(maps)) => {
            let set = spec.tasks.task_set.as_ref();
            let field = if set.is_some() { "the TaskSet" } else { "spec.tasks.configMap" };
            for (name, found) in maps {
                for (key, text) in texts(name, field, Some(found))? {
                    if let Some(name) = key.strip_suffix(".py") {
                        tasks.push(Task { name: name.to_owned(), source: text.clone(), replay: None });
                    }
                }
            }
            if let Some(selector) = set.and_then(|s| s.selector.as_ref()) {
                tasks = selected(tasks, selector)?;
            }
            let names: Vec<&str> = maps.iter().map(|(n, _)| n.as_str()).collect();
            format!("the ConfigMap {}", listed(&names))
        }
    };
    if tasks.is_empty() {
        return Err(Error::NoTasks(where_from));
    }
    let mut seen = BTreeSet::new();
    if let Some(twice) = tasks.iter().find(|t| !seen.insert(t.name.as_str())) {
        return Err(Error::Twice(twice.name.clone()));
    }
    let refusals: Vec<String> = tasks.iter().filter_map(refusal).collect();
    if refusals.is_empty() {
        return Ok(tasks);
    }
    let mut first = refusals.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join("; ");
    if refusals.len() > MOST_NAMED {
        first.push_str(&format!("; and {} more", refusals.len() - MOST_NAMED));
    }
    Err(Error::Tasks { refused: refusals.len(), tasks: tasks.len(), first })
}

fn selected(tasks: Vec<Task>, selector: &crate::api::job::TaskSelector) -> Result<Vec<Task>, Error> {
    if let Some(names) = &selector.names {
        let missing: Vec<&str> =
            names.iter().map(String::as_str).filter(|n| !tasks.iter().any(|t| t.name == *n)).collect();
        if !missing.is_empty() {
            return Err(Error::NotInSet(listed(&missing)));
        }
    }
    let wanted = |t: &Task| selector.names.as_ref().is_none_or(|n| n.contains(&t.name));
    let limit = selector.limit.and_then(|l| usize::try_from(l).ok()).unwrap_or(usize::MAX);
    Ok(tasks.into_iter().filter(wanted).take(limit).collect())
}

/// Why a task can't be used, in one sentence.
#[must_use]
pub fn refusal(task: &Task) -> Option<String> {
    let most = usize::try_from(MAX_BYTES).unwrap_or(usize::MAX);
    if task.name.is_empty() || task.name.len() > 200 {
        return Some(format!(
            "`{}`: a task's name has 1 to 200 characters",
            crate::operator::conditions::cut(&task.name, 40)
        ));
    }
    if task.source.len() > most {
        return Some(format!("{}: {} bytes, a task is at most {MAX_BYTES}", task.name, task.source.len()));
    }
    let refusals = syntax::check(&task.source, None);
    let first = refusals.first()?;
    let line = first.line.map(|l| format!(" line {l}:")).unwrap_or_default();
    Some(format!("{}:{line} {}", task.name, first.message))
}

/// Resources where nothing is said.
const CPU: &str = "250m";
const MEMORY: &str = "4Gi";
const DISK: &str = "4Gi";

fn resources(spec: &OptimizationJobSpec) -> Result<Resources, Error> {
    let said = spec.agent.resources.clone().unwrap_or_default();
    let (cpu, memory, disk) = (
        said.cpu.unwrap_or_else(|| CPU.into()),
        said.memory.unwrap_or_else(|| MEMORY.into()),
        said.ephemeral_storage.unwrap_or_else(|| DISK.into()),
    );
    let bytes = |field, value: &str| quantity(value).ok_or_else(|| Error::Quantity { field, value: value.into() });
    bytes("cpu", &cpu)?;
    let (memory_bytes, disk_bytes) = (bytes("memory", &memory)?, bytes("ephemeralStorage", &disk)?);
    Ok(Resources { cpu, memory, disk, memory_bytes, disk_bytes })
}

/// A Kubernetes quantity as a whole number, rounded up.
#[must_use]
pub fn quantity(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().ok().filter(|n: &f64| n.is_finite())?;
    let factor = match unit {
        "m" => 1e-3,
        "" => 1.0,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "Ki" => 1024.0,
        "Mi" => 1_048_576.0,
        "Gi" => 1_073_741_824.0,
        "Ti" => 1_099_511_627_776.0,
        "Pi" => 1_125_899_906_842_624.0,
        _ => {
            let exponent: i32 = unit.strip_prefix(['e', 'E'])?.parse().ok()?;
            10f64.powi(exponent)
        }
    };
    let value = (number * factor).ceil();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bounds are checked")]
    (value > 0.0 && value < 1e18).then_some(value as u64)
}

/// The head's spec for the broker: without tasks, and without what may change while the job runs.
#[must_use]
pub fn lasting(spec: &OptimizationJobSpec) -> OptimizationJobSpec {
    let OptimizationJobSpec {
        tasks: _,
        policy,
        agent,
        judge,
        target,
        suspend: _,
        ttl_seconds_after_finished: _,
        managed_by: _,
    } = spec.clone();
    OptimizationJobSpec {
        tasks: crate::api::job::Tasks::default(),
        policy,
        agent: crate::api::job::Agent { parallelism: None, ..agent },
        judge,
        target,
        suspend: false,
        ttl_seconds_after_finished: None,
        managed_by: None,
    }
}

#[cfg(test)]
pub mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::api::GpuPool;

    pub const GOOD: &str = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x\ndef get_inputs():\n    return []\ndef get_init_inputs():\n    return []\n";

    /// A job of two inline tasks, with more of a spec laid over it.
    pub fn job(over: &Value) -> OptimizationJob {
        let mut value = json!({
            "apiVersion": "kernelfleet.dev/v1alpha1",
            "kind": "OptimizationJob",
            "metadata": { "name": "demo", "namespace": "team-a", "uid": "0b5e", "generation": 3 },
            "spec": { "tasks": { "inline": [{ "name": "relu", "source": GOOD }, { "name": "gelu", "source": GOOD }] } },
        });
        crate::operator::pool::validate::overlay(&mut value, &json!({ "spec": over }));
        serde_json::from_value(value).unwrap()
    }

    /// Facts of a job whose pool is ready.
    pub fn facts() -> Facts {
        let pool: GpuPool = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool", "metadata": { "name": "default" },
            "spec": { "device": "cpu", "allowedNamespaces": ["team-a"] },
        }))
        .unwrap();
        Facts {
            started: false,
            pool: Found::Is(pool),
            broker: Some(Address { ip: "10.96.0.7".into(), port: 8443, authorities: "PEM\n".into() }),
            endpoint: None,
            source: Some(Source::Inline),
            replay: None,
            batch: None,
            trouble: None,
            said: None,
        }
    }

    /// Facts of a job whose pool has cards that reach their host's memory.
    fn exposed() -> Facts {
        let mut facts = facts();
        if let Found::Is(pool) = &mut facts.pool {
            let condition = json!({"type": TRUSTED, "status": "False", "reason": HOST_MEMORY, "message": "", "lastTransitionTime": "2026-11-30T00:00:00Z"});
            pool.status = Some(serde_json::from_value(json!({"conditions": [condition]})).unwrap());
        }
        facts
    }

    #[test]
    fn a_job_that_takes_what_is_observed_starts_on_any_card() {
        assert!(validate(&job(&json!({"judge": {"minimumGrade": "observed"}})), &exposed()).is_ok());
        assert!(validate(&job(&json!({"judge": {"minimumGrade": "enforced"}})), &facts()).is_ok());
    }

    fn maps(of: &[(&str, &[(&str, &str)])]) -> Option<Source> {
        let texts = |t: &[(&str, &str)]| {
            Found::Is(t.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Texts>())
        };
        Some(Source::ConfigMaps(of.iter().map(|(n, t)| ((*n).to_owned(), texts(t))).collect()))
    }

    #[test]
    fn each_reason_not_to_start_is_told_with_what_to_do() {
        let config = json!({ "tasks": { "inline": null, "configMap": { "name": "tasks" } } });
        let set =
            json!({ "tasks": { "inline": null, "taskSet": { "name": "kb", "selector": { "names": ["a", "c"] } } } });
        let endpoint = json!({ "policy": { "endpoint": { "name": "gpt", "model": "large" } } });
        let replay = json!({ "policy": { "replay": { "configMap": "recorded" } } });
        let found: ModelEndpointFound = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": { "name": "gpt" },
            "spec": { "baseUrl": "https://host/v1", "models": [{ "name": "small" }] },
        }))
        .unwrap();
        type ModelEndpointFound = crate::api::ModelEndpoint;
        let none = json!({});
        let many: Vec<Value> =
            (0..12).map(|i| json!({ "name": format!("t{i}"), "source": "import torch\n" })).collect();
        let cases: Vec<(&str, Value, Facts)> = vec![
            ("no pool", none.clone(), Facts { pool: Found::Missing, ..facts() }),
            (
                "a pool nobody can read",
                none.clone(),
                Facts { pool: Found::Unreadable("unknown field".into()), ..facts() },
            ),
            ("a pool without broker", none.clone(), Facts { broker: None, ..facts() }),
            ("a card that reaches its host's memory", json!({"judge": {"minimumGrade": "enforced"}}), exposed()),
            ("no endpoint", endpoint.clone(), Facts { endpoint: Some((Found::Missing, None)), ..facts() }),
            ("another model", endpoint.clone(), Facts { endpoint: Some((Found::Is(found.clone()), None)), ..facts() }),
            (
                "no ConfigMap",
                config.clone(),
                Facts { source: Some(Source::ConfigMaps(vec![("tasks".into(), Found::Missing)])), ..facts() },
            ),
            (
                "a ConfigMap without tasks",
                config.clone(),
                Facts { source: maps(&[("tasks", &[("README.md", "x")])]), ..facts() },
            ),
            ("broken tasks", json!({ "tasks": { "inline": many } }), facts()),
            ("no TaskSet", set.clone(), Facts { source: Some(Source::NoSet("kb".into())), ..facts() }),
            (
                "a source to come",
                set.clone(),
                Facts { source: Some(Source::Unsupported { set: "kb".into(), source: "oci" }), ..facts() },
            ),
            (
                "a task that the set hasn't",
                set.clone(),
                Facts { source: maps(&[("one", &[("a.py", GOOD), ("b.py", GOOD)])]), ..facts() },
            ),
            (
                "a task twice",
                set,
                Facts {
                    source: maps(&[("one", &[("a.py", GOOD), ("c.py", GOOD)]), ("two", &[("a.py", GOOD)])]),
                    ..facts()
                },
            ),
            (
                "no trajectory",
                replay,
                Facts { replay: Some(Found::Is(Texts::from([("relu.jsonl".into(), "{}".into())]))), ..facts() },
            ),
            ("too many episodes", json!({ "agent": { "attempts": 60_000 } }), facts()),
            ("no quantity", json!({ "agent": { "resources": { "memory": "4GB!" } } }), facts()),
        ];
        let mut text = String::new();
        for (story, over, facts) in cases {
            let error = validate(&job(&over), &facts).unwrap_err();
            let kind = if error.waits() { "waits" } else { "invalid" };
            text.push_str(&format!("# {story}\n{kind} {}: {error}\n", error.reason()));
        }
        insta::assert_snapshot!(text);
    }

    #[test]
    fn five_thousand_tasks_of_several_config_maps_are_a_job() {
        let set = json!({ "tasks": { "inline": null, "taskSet": { "name": "kb" } } });
        let map = |from: usize| {
            let texts = (from..from + 1000).map(|i| (format!("t{i}.py"), GOOD.to_owned())).collect();
            (format!("part-{from}"), Found::Is(texts))
        };
        let source = Some(Source::ConfigMaps((0..5).map(|i| map(i * 1000)).collect()));
        let valid = validate(&job(&set), &Facts { source, ..facts() }).unwrap();
        assert_eq!((valid.tasks.len(), valid.episodes), (5000, 5000));
    }

    #[test]
    fn another_namespace_is_told_whose_decision_it_is() {
        let mut other = job(&json!({}));
        other.metadata.namespace = Some("team-b".into());
        let error = validate(&other, &facts()).unwrap_err();
        assert_eq!(error.reason(), "NamespaceNotAllowed");
        assert!(!error.waits());
    }

    #[test]
    fn quantities_are_read_as_kubernetes_writes_them() {
        let cases = [
            ("4Gi", Some(4 << 30)),
            ("500m", Some(1)),
            ("2", Some(2)),
            ("1.5k", Some(1500)),
            ("1e3", Some(1000)),
            ("", None),
            ("x", None),
            ("4GB", None),
            ("0", None),
        ];
        for (text, bytes) in cases {
            assert_eq!(quantity(text), bytes, "{text}");
        }
    }

    #[test]
    fn the_brokers_head_holds_nothing_that_may_change() {
        let a = job(&json!({ "suspend": true, "ttlSecondsAfterFinished": 5, "agent": { "parallelism": 3 } }));
        let b = job(&json!({ "agent": { "parallelism": 9 }, "tasks": { "inline": [{ "name": "x", "source": "y" }] } }));
        assert_eq!(lasting(&a.spec), lasting(&b.spec));
        let c = job(&json!({ "agent": { "maxTurns": 3 } }));
        assert_ne!(lasting(&a.spec), lasting(&c.spec));
    }
}
