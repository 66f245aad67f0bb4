//! Reads what an OptimizationJob refers to and how far it is: pool, endpoint, tasks, its Job, its broker's facts. The
//! first step.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Service};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::api::{Api, ListParams};

use super::status::Lacks;
use crate::api::{GpuPool, ModelEndpoint, OptimizationJob, TaskSet};
use crate::operator::broker::Address;
use crate::operator::conditions;
use crate::operator::context::{Context, Found};
use crate::operator::names;
use crate::wire::v1::JobFacts;

/// Why something can't be read.
#[derive(Debug, thiserror::Error)]
#[error("the API server can't be asked for {what}: {source}")]
pub struct Error {
    what: String,
    source: Box<kube::Error>,
}

/// Texts of a ConfigMap.
pub type Texts = BTreeMap<String, String>;

/// Where the tasks are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the spec itself.
    Inline,
    /// In ConfigMaps, in this order.
    ConfigMaps(Vec<(String, Found<Texts>)>),
    /// The TaskSet isn't there.
    NoSet(String),
    /// The TaskSet has a source that isn't supported.
    Unsupported { set: String, source: &'static str },
}

/// What was read.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The Job has been made, or the status says that it was.
    pub started: bool,
    pub pool: Found<GpuPool>,
    pub broker: Option<Address>,
    /// With the ClusterIP of its gateway, where it has one.
    pub endpoint: Option<(Found<ModelEndpoint>, Option<String>)>,
    /// `None` once the broker has them.
    pub source: Option<Source>,
    pub replay: Option<Found<Texts>>,
    pub batch: Option<Job>,
    /// Why pods don't run, in the words of the first that doesn't.
    pub trouble: Option<String>,
    /// What the broker says of the job once it knows it, or why it says nothing.
    pub said: Option<Result<JobFacts, String>>,
}

/// Why a pool isn't ready, where that means that nothing is judged; one whose parts are being replaced goes on.
const NO_JUDGE: [&str; 4] = ["Starting", "BrokerNotReady", "JudgesNotReady", "NoJudges"];
/// Those of them that say that its broker isn't there.
const NO_BROKER: [&str; 2] = ["Starting", "BrokerNotReady"];
/// Why an endpoint isn't ready, where it has no gateway; one whose spec was made worse keeps that of before.
const NO_GATEWAY: [&str; 2] = ["Starting", "GatewayNotReady"];

impl Facts {
    /// The pool or the endpoint that isn't ready, so that episodes wait for it.
    #[must_use]
    pub fn lacks(&self) -> Option<Lacks> {
        let unready = |conditions: &[Condition], reasons: &[&str]| {
            let ready = conditions::get(conditions, "Ready");
            ready.filter(|c| c.status == "False" && reasons.contains(&c.reason.as_str())).cloned()
        };
        if let Found::Is(pool) = &self.pool
            && let Some(said) = pool.status.as_ref().and_then(|s| unready(&s.conditions, &NO_JUDGE))
        {
            let name = pool.metadata.name.clone().unwrap_or_default();
            let why = format!(
                "the GpuPool `{name}` is not ready: {}; kubectl describe gpupool {name} says more",
                said.message
            );
            let broker = NO_BROKER.contains(&said.reason.as_str());
            return Some(Lacks { state: "PoolNotReady", why, broker });
        }
        if let Some((Found::Is(endpoint), _)) = &self.endpoint
            && let Some(said) = endpoint.status.as_ref().and_then(|s| unready(&s.conditions, &NO_GATEWAY))
        {
            let name = endpoint.metadata.name.clone().unwrap_or_default();
            let hint = format!("kubectl describe modelendpoint {name} says more");
            let why = format!("the ModelEndpoint `{name}` is not ready: {}; {hint}", said.message);
            return Some(Lacks { state: "EndpointNotReady", why, broker: false });
        }
        None
    }
}

/// Reads everything.
///
/// # Errors
/// When the API server can't be asked.
pub async fn dereference(context: &Context, job: &OptimizationJob) -> Result<Facts, Error> {
    let namespace = job.metadata.namespace.clone().unwrap_or_default();
    let name = job.metadata.name.clone().unwrap_or_default();
    let uid = job.metadata.uid.clone().unwrap_or_default();
    let failed = |what: String| move |e: kube::Error| Error { what, source: Box::new(e) };
    let pool_name = &job.spec.judge.gpu_pool;
    let pool = context.pool(pool_name);
    let broker = match &pool {
        Found::Is(_) => {
            context.brokers.address(pool_name).await.map_err(failed(format!("the broker of {pool_name}")))?
        }
        _ => None,
    };
    let endpoint = match &job.spec.policy.endpoint {
        None => None,
        Some(policy) => {
            let endpoint = context.endpoint(&namespace, &policy.name);
            let services: Api<Service> = Api::namespaced(context.client.clone(), &namespace);
            let service = names::gateway(&policy.name);
            let found = services.get_opt(&service).await.map_err(failed(format!("Service {service}")))?;
            let ip = found.and_then(|s| s.spec).and_then(|s| s.cluster_ip).filter(|ip| !ip.is_empty());
            Some((endpoint, ip))
        }
    };
    let jobs: Api<Job> = Api::namespaced(context.client.clone(), &namespace);
    let batch = jobs.get_opt(&name).await.map_err(failed(format!("Job {name}")))?;
    let owned = batch.as_ref().is_some_and(|b| super::apply::owns(job, b));
    let started = owned || job.status.as_ref().is_some_and(|s| conditions::is_true(&s.conditions, "Started"));
    let trouble = match &batch {
        Some(batch) if waits(batch, Timestamp::now()) => match context.troubles.get(&uid) {
            Some(known) => known,
            None => {
                let found = trouble(context, &namespace, &name).await.map_err(failed("pods".into()))?;
                context.troubles.set(&uid, found.clone());
                found
            }
        },
        _ => None,
    };
    let said = match (&pool, &broker) {
        _ if !started => None,
        (Found::Missing, _) => None,
        (_, None) => Some(Err(format!("the pool {pool_name} has no broker at present"))),
        (_, Some(_)) => Some(context.brokers.job(pool_name, &uid).await.map_err(|e| e.to_string())),
    };
    // A broker that has lost its ledger is told again.
    let forgotten = matches!(&said, Some(Ok(facts)) if !facts.known);
    let (mut source, mut replay) = (None, None);
    if !started || forgotten {
        source = Some(tasks(context, job, &namespace).await?);
        if let Some(policy) = &job.spec.policy.replay {
            replay = Some(config_map(&context.client, &namespace, &policy.config_map).await?);
        }
    }
    Ok(Facts { started, pool, broker, endpoint, source, replay, batch, trouble, said })
}

/// Where the tasks of a job are, with their texts.
async fn tasks(context: &Context, job: &OptimizationJob, namespace: &str) -> Result<Source, Error> {
    let tasks = &job.spec.tasks;
    if tasks.inline.is_some() {
        return Ok(Source::Inline);
    }
    let mut maps = Vec::new();
    if let Some(reference) = &tasks.config_map {
        maps.push(reference.name.clone());
    }
    if let Some(reference) = &tasks.task_set {
        let sets: Api<TaskSet> = Api::namespaced(context.client.clone(), namespace);
        let found = sets.get_opt(&reference.name).await;
        let found = found.map_err(|e| Error { what: format!("TaskSet {}", reference.name), source: Box::new(e) })?;
        let Some(set) = found else { return Ok(Source::NoSet(reference.name.clone())) };
        match set.spec.config_map {
            Some(source) => maps.extend(source.names),
            None => {
                let source = unsupported(&set.spec);
                return Ok(Source::Unsupported { set: reference.name.clone(), source });
            }
        }
    }
    let mut found = Vec::new();
    for name in maps {
        let texts = config_map(&context.client, namespace, &name).await?;
        found.push((name, texts));
    }
    Ok(Source::ConfigMaps(found))
}

/// The word of a source that nobody reads yet.
#[must_use]
pub fn unsupported(spec: &crate::api::TaskSetSpec) -> &'static str {
    if spec.oci.is_some() {
        "oci"
    } else if spec.persistent_volume_claim.is_some() {
        "persistentVolumeClaim"
    } else {
        "objectStore"
    }
}

/// The texts of a ConfigMap; what is binary is read as text where it is that.
///
/// # Errors
/// When the API server can't be asked.
pub async fn config_map(client: &kube::Client, namespace: &str, name: &str) -> Result<Found<Texts>, Error> {
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let found = api.get_opt(name).await;
    let found = found.map_err(|e| Error { what: format!("ConfigMap {name}"), source: Box::new(e) })?;
    let Some(map) = found else { return Ok(Found::Missing) };
    let mut texts = map.data.unwrap_or_default();
    for (key, bytes) in map.binary_data.into_iter().flatten() {
        match String::from_utf8(bytes.0) {
            Ok(text) => {
                texts.insert(key, text);
            }
            Err(_) => return Ok(Found::Unreadable(format!("its key {key} is no text"))),
        }
    }
    Ok(Found::Is(texts))
}

/// Seconds that pods have to become ready before somebody asks why they don't.
const PATIENCE: i64 = 10;

/// Whether a Job has pods of which none is ready, and has had them for a while.
fn waits(batch: &Job, now: Timestamp) -> bool {
    batch.status.as_ref().is_some_and(|s| {
        let since = s.start_time.as_ref().map_or(now, |t| t.0);
        s.active.unwrap_or(0) > 0 && s.ready.unwrap_or(0) == 0 && now.as_second() - since.as_second() >= PATIENCE
    })
}

/// What the first pods of a Job that don't run say of themselves.
async fn trouble(context: &Context, namespace: &str, job: &str) -> Result<Option<String>, kube::Error> {
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
    let list = ListParams::default().labels(&format!("batch.kubernetes.io/job-name={job}")).limit(5);
    let found = pods.list(&list).await?;
    Ok(found.items.iter().find_map(complaint))
}

/// Why a pod doesn't run. Pure.
#[must_use]
pub fn complaint(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let name = pod.metadata.name.clone().unwrap_or_default();
    if let Some(condition) =
        status.conditions.iter().flatten().find(|c| c.type_ == "PodScheduled" && c.status == "False")
    {
        return Some(format!("pod {name} can't be scheduled: {}", condition.message.clone().unwrap_or_default()));
    }
    let containers = status.init_container_statuses.iter().flatten().chain(status.container_statuses.iter().flatten());
    containers
        .filter_map(|c| Some((c, c.state.as_ref()?.waiting.as_ref()?)))
        .filter(|(_, w)| !matches!(w.reason.as_deref(), None | Some("PodInitializing" | "ContainerCreating")))
        .map(|(c, w)| {
            let message = w.message.as_ref().map(|m| format!(": {m}")).unwrap_or_default();
            format!("pod {name}, container {}: {}{message}", c.name, w.reason.clone().unwrap_or_default())
        })
        .next()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pool_without_judges_and_an_endpoint_without_gateway_are_what_episodes_wait_for() {
        let of = |kind: &str, spec: serde_json::Value, reason: &str| {
            let condition = json!({
                "type": "Ready", "status": "False", "reason": reason, "message": "none of 1 judges is ready",
                "lastTransitionTime": "2027-01-15T08:00:00Z",
            });
            json!({ "apiVersion": "kernelfleet.dev/v1alpha1", "kind": kind, "metadata": { "name": "x" }, "spec": spec,
                "status": { "conditions": [condition] } })
        };
        let facts = |pool: &str, endpoint: &str| Facts {
            started: true,
            pool: Found::Is(serde_json::from_value(of("GpuPool", json!({ "device": "cpu" }), pool)).unwrap()),
            broker: None,
            endpoint: Some((
                Found::Is(
                    serde_json::from_value(of(
                        "ModelEndpoint",
                        json!({ "baseUrl": "http://x", "models": [] }),
                        endpoint,
                    ))
                    .unwrap(),
                ),
                None,
            )),
            source: None,
            replay: None,
            batch: None,
            trouble: None,
            said: None,
        };
        let Lacks { state, why, broker } = facts("JudgesNotReady", "GatewayNotReady").lacks().unwrap();
        assert_eq!((state, broker), ("PoolNotReady", false));
        assert!(facts("BrokerNotReady", "GatewayNotReady").lacks().unwrap().broker);
        assert!(why.contains("none of 1 judges is ready; kubectl describe gpupool x says more"), "{why}");
        assert_eq!(facts("JudgesUpdating", "GatewayNotReady").lacks().unwrap().state, "EndpointNotReady");
        assert_eq!(facts("JudgesUpdating", "GatewayUpdating").lacks(), None, "those of the form before go on");
        assert_eq!(facts("BrokerUnreachable", "Invalid").lacks(), None, "pods may reach what the operator doesn't");
    }

    #[test]
    fn pods_have_a_moment_to_become_ready_before_they_are_looked_at() {
        let start: Timestamp = "2027-01-15T08:00:00Z".parse().unwrap();
        let at = |seconds| start.checked_add(jiff::SignedDuration::from_secs(seconds)).unwrap();
        let batch = |ready: i32| -> Job {
            let status = json!({ "active": 2, "ready": ready, "startTime": "2027-01-15T08:00:00Z" });
            serde_json::from_value(json!({ "metadata": { "name": "demo" }, "status": status })).unwrap()
        };
        assert!(!waits(&batch(0), at(5)) && waits(&batch(0), at(10)));
        assert!(!waits(&batch(1), at(60)), "one runs");
    }
}
