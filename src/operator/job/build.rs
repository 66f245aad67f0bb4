//! From a checked OptimizationJob to its objects. Pure. The third step.
//!
//! ```text
//! OptimizationJob
//!   |- shared by the jobs of a namespace, and gone with the last of them:
//!   |    ConfigMap kernelfleet-pool-POOL               authorities of the broker's certificate, kept fresh while pods run
//!   |    NetworkPolicy kernelfleet-pool-POOL           to the broker, nothing else, not even names
//!   |    NetworkPolicy kernelfleet-endpoint-ENDPOINT   to the gateway, where a job has one
//!   `- Job NAME (Indexed)          index = task x attempts + attempt; made once, never changed but for its pace
//!        pod: seal (init), sandbox (native sidecar, hostile), agent
//! ```
//! They are shared since a write for each job would be most of what a job costs the API server, and a policy for each job a
//! filter more on every node.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use super::validate::{ValidJob, lasting};
use crate::api::job::OptimizationJobSpec;
use crate::operator::apply::{self, Built};
use crate::operator::context::Settings;
use crate::operator::{names, pods};
use crate::wire::v1::put_job_request::Part;
use crate::wire::v1::{JobHead, JobTask, PutJobRequest};

/// Episodes at once where the spec says nothing.
pub const PARALLELISM: i32 = 64;
/// How often an index begins again after faults before it counts as failed.
const BACKOFF_PER_INDEX: i32 = 10;
/// Seconds that an agent has beyond its own deadline before its pod is ended.
const DEADLINE_GRACE: i64 = 120;
/// Where the Job's controller tells a pod how many of its index have failed before it.
const FAILURES: &str = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']";
/// Kueue's label for its queue.
pub const QUEUE: &str = "kueue.x-k8s.io/queue-name";
/// Users of the containers: two, so that neither can touch the other's processes.
const AGENT: i64 = 10001;
const SANDBOX: i64 = 10002;

/// What a job comes to.
#[derive(Clone, Debug)]
pub struct Objects {
    /// Applied, and kept as they are; shared with other jobs of the namespace.
    pub kept: Vec<Built>,
    /// Created once.
    pub batch: Built,
}

/// Episodes at once.
#[must_use]
pub fn parallelism(spec: &OptimizationJobSpec, episodes: i32) -> i32 {
    spec.agent.parallelism.unwrap_or(PARALLELISM).min(episodes).max(1)
}

/// Whether another decides when the Job's pods may run.
#[must_use]
pub fn queue(spec: &OptimizationJobSpec) -> Option<&str> {
    spec.agent.scheduling.as_ref().and_then(|s| s.queue_name.as_deref())
}

/// What the broker is told of the job: the head, then its tasks.
#[must_use]
pub fn parts(job: &ValidJob) -> Vec<PutJobRequest> {
    let head = JobHead {
        namespace: job.namespace.clone(),
        name: job.name.clone(),
        uid: job.uid.clone(),
        spec_json: serde_json::to_string(&lasting(&job.spec)).unwrap_or_default(),
        batch_job: job.name.clone(),
        tasks: u32::try_from(job.tasks.len()).unwrap_or(u32::MAX),
    };
    let mut parts = vec![PutJobRequest { part: Some(Part::Head(head)) }];
    for task in &job.tasks {
        let replay = task.replay.clone().unwrap_or_default().into_bytes();
        let task = JobTask { name: task.name.clone(), source: task.source.clone(), replay };
        parts.push(PutJobRequest { part: Some(Part::Task(task)) });
    }
    parts
}

/// The objects of a job.
///
/// # Errors
/// When an object lacks a field that every object has.
pub fn build(job: &ValidJob, owner: &OwnerReference, settings: &Settings) -> Result<Objects, apply::Error> {
    let pool = &job.spec.judge.gpu_pool;
    let mut kept = vec![
        Built::new(authorities(pool, &job.namespace, &job.broker.authorities))?,
        Built::new(policy(pool, job, settings))?,
    ];
    if let (Some(ip), Some(policy)) = (&job.gateway, &job.spec.policy.endpoint) {
        kept.push(Built::new(to_gateway(&policy.name, &job.namespace, ip))?);
    }
    Ok(Objects { kept, batch: Built::new(batch(job, owner, settings))? })
}

/// Metadata of what jobs share: nobody owns it.
fn shared(name: &str, namespace: &str, instance: &str) -> Value {
    json!({ "name": name, "namespace": namespace, "labels": names::labels("agent", instance) })
}

fn metadata(name: &str, namespace: &str, job: &str, owner: &OwnerReference) -> Value {
    json!({
        "name": name,
        "namespace": namespace,
        "labels": names::labels("agent", job),
        "ownerReferences": [owner],
    })
}

/// The ConfigMap with the authorities, which is kept fresh while pods run.
fn authorities(pool: &str, namespace: &str, bundle: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": shared(&names::agents(pool), namespace, pool),
        "data": { "ca.crt": bundle },
    })
}

/// Labels of agents' pods, with one more.
fn agents_with(key: &str, value: &str) -> Value {
    json!({ "matchLabels": {
        "app.kubernetes.io/name": "kernelfleet",
        "app.kubernetes.io/component": "agent",
        key: value,
    } })
}

/// Agent pods reach their broker, and are reached by nobody: by the pods behind the Service, and by its address, since
/// implementations differ in when they look.
fn policy(pool: &str, job: &ValidJob, settings: &Settings) -> Value {
    let egress = json!([{
        "to": [
            {
                "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": settings.namespace } },
                "podSelector": { "matchLabels": names::selector("broker", pool) },
            },
            { "ipBlock": { "cidr": single(&job.broker.ip) } },
        ],
        "ports": [{ "port": job.broker.port, "protocol": "TCP" }],
    }]);
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": shared(&names::agents(pool), &job.namespace, pool),
        "spec": {
            "podSelector": agents_with(names::POOL, pool),
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [],
            "egress": egress,
        },
    })
}

/// Agent pods of an endpoint's jobs reach its gateway besides; what policies let out adds up.
fn to_gateway(endpoint: &str, namespace: &str, ip: &str) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": shared(&names::to_gateway(endpoint), namespace, endpoint),
        "spec": {
            "podSelector": agents_with(names::ENDPOINT, endpoint),
            "policyTypes": ["Egress"],
            "egress": [{
                "to": [
                    { "podSelector": { "matchLabels": names::selector("gateway", endpoint) } },
                    { "ipBlock": { "cidr": single(ip) } },
                ],
                "ports": [{ "port": names::GATEWAY_PORT, "protocol": "TCP" }],
            }],
        },
    })
}

/// The network of one address.
fn single(ip: &str) -> String {
    if ip.contains(':') { format!("{ip}/128") } else { format!("{ip}/32") }
}

fn batch(job: &ValidJob, owner: &OwnerReference, settings: &Settings) -> Value {
    let spec = &job.spec;
    let parallelism = parallelism(spec, job.episodes);
    let mut metadata = metadata(&job.name, &job.namespace, &job.name, owner);
    metadata["annotations"] = json!({
        names::SUSPEND: spec.suspend.to_string(),
        names::PARALLELISM: parallelism.to_string(),
    });
    if let Some(queue) = queue(spec) {
        metadata["labels"][QUEUE] = queue.into();
    }
    json!({
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": job.episodes,
            "parallelism": parallelism,
            // Kueue admits by taking this away.
            "suspend": spec.suspend || queue(spec).is_some(),
            "backoffLimitPerIndex": BACKOFF_PER_INDEX,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": { "rules": [
                { "action": "Ignore", "onPodConditions": [{ "type": "DisruptionTarget", "status": "True" }] },
                // Called wrongly: another pod would be, too.
                { "action": "FailIndex", "onExitCodes": { "containerName": "agent", "operator": "In", "values": [1, 2] } },
            ] },
            "template": {
                "metadata": { "labels": pod_labels(job) },
                "spec": pod(job, settings),
            },
        },
    })
}

fn pod_labels(job: &ValidJob) -> Value {
    let mut labels = json!(names::labels("agent", &job.name));
    labels[names::POOL] = job.spec.judge.gpu_pool.as_str().into();
    if let Some(policy) = &job.spec.policy.endpoint {
        labels[names::ENDPOINT] = policy.name.as_str().into();
    }
    labels
}

fn locked(uid: i64) -> Value {
    json!({
        "runAsNonRoot": true,
        "runAsUser": uid,
        "runAsGroup": uid,
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
        "seccompProfile": { "type": "RuntimeDefault" },
    })
}

/// Whether the policy runs anything in a sandbox. The built-in one doesn't.
fn sandboxed(spec: &OptimizationJobSpec) -> bool {
    spec.policy.builtin.is_none()
}

fn pod(job: &ValidJob, settings: &Settings) -> Value {
    let spec = &job.spec;
    let mut volumes = vec![
        json!({ "name": "ca", "configMap": { "name": names::agents(&job.spec.judge.gpu_pool) } }),
        token("broker-token", names::BROKER_AUDIENCE),
        json!({ "name": "agent-tmp", "emptyDir": { "sizeLimit": "1Gi" } }),
    ];
    let mut init = Vec::new();
    if sandboxed(spec) {
        volumes.extend([
            json!({ "name": "link", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } }),
            json!({ "name": "sealed", "emptyDir": { "sizeLimit": "16Mi" } }),
            json!({ "name": "workspace", "emptyDir": { "sizeLimit": job.resources.disk } }),
            json!({ "name": "scratch", "emptyDir": { "sizeLimit": job.resources.disk } }),
        ]);
        init.extend([seal(settings), sandbox(job, settings)]);
    }
    if spec.policy.endpoint.is_some() {
        volumes.push(token("gateway-token", names::GATEWAY_AUDIENCE));
    }
    let mut pod = json!({
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        // Addresses are given; there is nothing to be looked up.
        "dnsPolicy": "None",
        "dnsConfig": { "nameservers": ["127.0.0.1"] },
        "terminationGracePeriodSeconds": 10,
        "imagePullSecrets": pods::pull(settings),
        "tolerations": pods::tolerations(),
        "securityContext": { "runAsNonRoot": true, "seccompProfile": { "type": "RuntimeDefault" } },
        "initContainers": init,
        "containers": [agent(job, settings)],
        "volumes": volumes,
    });
    if let Some(seconds) = spec.agent.active_deadline_seconds {
        pod["activeDeadlineSeconds"] = seconds.saturating_add(DEADLINE_GRACE).into();
    }
    if let Some(scheduling) = &spec.agent.scheduling {
        if !scheduling.node_selector.is_empty() {
            pod["nodeSelector"] = json!(scheduling.node_selector);
        }
        if let Some(class) = &scheduling.priority_class_name {
            pod["priorityClassName"] = class.as_str().into();
        }
    }
    pod
}

fn token(name: &str, audience: &str) -> Value {
    json!({ "name": name, "projected": { "sources": [
        { "serviceAccountToken": { "audience": audience, "expirationSeconds": 3600, "path": "token" } }] } })
}

fn seal(settings: &Settings) -> Value {
    json!({
        "name": "seal",
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["kernelfleet", "seal"],
        "args": ["--to=/sealed"],
        "securityContext": locked(AGENT),
        "resources": { "requests": { "cpu": "10m", "memory": "16Mi" }, "limits": { "memory": "64Mi" } },
        "volumeMounts": [{ "name": "sealed", "mountPath": "/sealed" }],
    })
}

fn sandbox(job: &ValidJob, settings: &Settings) -> Value {
    let resources = &job.resources;
    // What commands may use stays below what the kernel would end the container for.
    let share = |bytes: u64| (bytes / 8 * 7).to_string();
    json!({
        "name": "sandbox",
        "image": settings.sandbox_image,
        "imagePullPolicy": settings.pull_policy,
        "restartPolicy": "Always",
        "command": ["kernelfleet", "sandbox"],
        "env": [
            { "name": "KERNELFLEET_SANDBOX_MEMORY", "value": share(resources.memory_bytes) },
            { "name": "KERNELFLEET_SANDBOX_DISK", "value": share(resources.disk_bytes) },
        ],
        "securityContext": locked(SANDBOX),
        "resources": {
            "requests": { "cpu": resources.cpu, "memory": resources.memory, "ephemeral-storage": resources.disk },
            "limits": { "memory": resources.memory, "ephemeral-storage": resources.disk },
        },
        "volumeMounts": [
            { "name": "link", "mountPath": "/run/kernelfleet" },
            { "name": "workspace", "mountPath": "/workspace" },
            { "name": "sealed", "mountPath": "/workspace/utils", "readOnly": true },
            { "name": "scratch", "mountPath": "/tmp" },
        ],
    })
}

fn agent(job: &ValidJob, settings: &Settings) -> Value {
    let mut env = vec![
        json!({ "name": "KERNELFLEET_BROKER", "value": job.broker.url() }),
        json!({ "name": "KERNELFLEET_BROKER_CA_FILE", "value": "/etc/kernelfleet/broker/ca.crt" }),
        json!({ "name": "KERNELFLEET_LOG_FORMAT", "value": "json" }),
        // Disrupted pods aren't in it.
        json!({ "name": "KERNELFLEET_FAILURES", "valueFrom": { "fieldRef": { "fieldPath": FAILURES } } }),
    ];
    let mut mounts = vec![
        json!({ "name": "ca", "mountPath": "/etc/kernelfleet/broker", "readOnly": true }),
        json!({ "name": "broker-token", "mountPath": "/var/run/secrets/kernelfleet/broker", "readOnly": true }),
        json!({ "name": "agent-tmp", "mountPath": "/tmp" }),
    ];
    if sandboxed(&job.spec) {
        mounts.push(json!({ "name": "link", "mountPath": "/run/kernelfleet" }));
    }
    if let Some(ip) = &job.gateway {
        let host = if ip.contains(':') { format!("[{ip}]") } else { ip.clone() };
        env.push(
            json!({ "name": "KERNELFLEET_GATEWAY", "value": format!("http://{host}:{}/v1", names::GATEWAY_PORT) }),
        );
        mounts.push(
            json!({ "name": "gateway-token", "mountPath": "/var/run/secrets/kernelfleet/gateway", "readOnly": true }),
        );
    }
    json!({
        "name": "agent",
        "image": settings.image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["kernelfleet", "agent"],
        "env": env,
        "securityContext": locked(AGENT),
        "resources": { "requests": { "cpu": "50m", "memory": "64Mi" }, "limits": { "memory": "512Mi" } },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::context::Found;
    use crate::operator::context::tests::settings;
    use crate::operator::job::dereference::Facts;
    use crate::operator::job::validate::tests::{facts, job};
    use crate::operator::job::validate::validate;

    fn built(over: &Value, facts: &Facts) -> String {
        let job = job(over);
        let valid = validate(&job, facts).unwrap();
        let objects = build(&valid, &names::owner(&job), &settings()).unwrap();
        let documents =
            objects.kept.iter().chain([&objects.batch]).map(|b| serde_saphyr::to_string(&b.object).unwrap());
        documents.collect::<Vec<_>>().join("---\n")
    }

    #[test]
    fn a_job_of_a_model_has_a_sandbox_and_reaches_broker_and_gateway() {
        let endpoint = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": { "name": "gpt" },
            "spec": { "baseUrl": "https://host/v1", "models": [{ "name": "large" }] },
        }))
        .unwrap();
        let over = json!({
            "policy": { "endpoint": { "name": "gpt", "model": "large" } },
            "agent": {
                "attempts": 2, "parallelism": 3, "activeDeadlineSeconds": 3600,
                "resources": { "cpu": "2", "memory": "8Gi" },
                "scheduling": { "nodeSelector": { "disk": "fast" }, "priorityClassName": "low" },
            },
        });
        let facts = Facts { endpoint: Some((Found::Is(endpoint), Some("10.96.0.9".into()))), ..facts() };
        insta::assert_snapshot!(built(&over, &facts));
    }

    #[test]
    fn the_built_in_policy_needs_no_sandbox_and_a_queue_decides_when() {
        let over = json!({ "agent": { "scheduling": { "queueName": "gpus" } } });
        insta::assert_snapshot!(built(&over, &facts()));
    }

    #[test]
    fn the_broker_is_told_the_head_and_then_each_task() {
        let job = job(&json!({ "suspend": true }));
        let parts = parts(&validate(&job, &facts()).unwrap());
        let Some(Part::Head(head)) = &parts[0].part else { panic!("no head") };
        assert_eq!((head.tasks, head.batch_job.as_str(), parts.len()), (2, "demo", 3));
        let spec: OptimizationJobSpec = serde_json::from_str(&head.spec_json).unwrap();
        assert!(spec.tasks.inline.is_none() && !spec.suspend && spec.policy.builtin.is_some());
    }
}
