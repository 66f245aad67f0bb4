//! From a checked GpuPool to its objects. Pure. The third step.
//!
//! ```text
//! GpuPool
//!   |- ConfigMap NAME-broker-ca      authorities that clients accept
//!   |- ServiceAccounts NAME-broker, NAME-judge; rights of the broker: who calls, and whose pod is it
//!   |- StatefulSet, Service NAME-broker
//!   |- StatefulSet NAME-judge, PodDisruptionBudget
//!   `- NetworkPolicies               agents and judges to the broker, nothing to a judge
//! ```

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use super::dereference::{ACCESS_KEY, Credentials, Facts, SECRET_KEY, tls_secret};
use super::validate::{Card, ValidPool, overlay};
use crate::api::pool::Device;
use crate::operator::apply::{self, Built};
use crate::operator::broker::Address;
use crate::operator::context::Settings;
use crate::operator::{names, pods};

/// What a pool comes to.
#[derive(Clone, Debug)]
pub struct Objects {
    pub all: Vec<Built>,
}

/// Everything but the Secrets, which hold what is drawn. `bundle` is the PEM of the authorities. Judges are told an address
/// and no name, so they come once the broker's Service has its `ip`. Neither comes, and what is there is left as it is, while
/// the credentials of the bucket aren't there.
///
/// # Errors
/// When an object lacks a field that every object has.
pub fn build(
    pool: &ValidPool,
    owner: &OwnerReference,
    settings: &Settings,
    bundle: &str,
    facts: &Facts,
) -> Result<Objects, apply::Error> {
    let mut all = vec![
        config_map(pool, owner, settings, &names::authority(&pool.name), json!({ "ca.crt": bundle })),
        account(pool, owner, settings, "broker"),
        account(pool, owner, settings, "judge"),
    ];
    all.extend(rights(pool, owner, settings, facts));
    all.push(service(pool, owner, settings));
    if facts.credentials.usable() {
        all.push(broker(pool, owner, settings, &facts.credentials));
        all.extend(facts.ip.as_deref().map(|ip| judges(pool, owner, settings, ip)));
    }
    if pool.spec.replicas > 1 {
        all.push(budget(pool, owner, settings));
    }
    all.extend(policies(pool, owner, settings));
    Ok(Objects { all: all.into_iter().map(Built::new).collect::<Result<_, _>>()? })
}

/// Metadata of a part in the operator's namespace.
fn metadata(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, name: &str, component: &str) -> Value {
    json!({
        "name": name,
        "namespace": settings.namespace,
        "labels": names::labels(component, &pool.name),
        "ownerReferences": [owner],
    })
}

fn config_map(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, name: &str, data: Value) -> Value {
    let metadata = metadata(pool, owner, settings, name, "broker");
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data })
}

fn account(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, component: &str) -> Value {
    let name = format!("{}-{component}", pool.name);
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(pool, owner, settings, &name, component),
        "automountServiceAccountToken": false,
    })
}

/// The broker may ask who a token is, and whose pod a caller's is: in the namespaces that the pool is for, and its own.
fn rights(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, facts: &Facts) -> Vec<Value> {
    let group = "rbac.authorization.k8s.io/v1";
    let api = "rbac.authorization.k8s.io";
    let name = format!("kernelfleet-{}-broker", pool.name);
    let callers = format!("{name}-callers");
    let subject =
        json!([{ "kind": "ServiceAccount", "name": names::broker(&pool.name), "namespace": settings.namespace }]);
    let labelled =
        |name: &str| json!({ "name": name, "labels": names::labels("broker", &pool.name), "ownerReferences": [owner] });
    let role = |name: &str, rules: Value| json!({ "apiVersion": group, "kind": "ClusterRole", "metadata": labelled(name), "rules": rules });
    let cluster = |name: &str| {
        json!({
            "apiVersion": group,
            "kind": "ClusterRoleBinding",
            "metadata": labelled(name),
            "roleRef": { "apiGroup": api, "kind": "ClusterRole", "name": name },
            "subjects": subject,
        })
    };
    let review =
        json!([{ "apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"] }]);
    let whose = json!([
        { "apiGroups": [""], "resources": ["pods"], "verbs": ["get"] },
        { "apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["get"] },
    ]);
    let mut all = vec![role(&name, review), cluster(&name), role(&callers, whose)];
    let Some(namespaces) = &pool.namespaces else {
        all.push(cluster(&callers));
        return all;
    };
    let mut bound: Vec<&str> = namespaces.iter().filter(|n| !facts.lacks(n)).map(String::as_str).collect();
    bound.push(&settings.namespace);
    bound.sort_unstable();
    bound.dedup();
    for namespace in bound {
        let mut metadata = labelled(&callers);
        metadata["namespace"] = namespace.into();
        all.push(json!({
            "apiVersion": group,
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": { "apiGroup": api, "kind": "ClusterRole", "name": callers },
            "subjects": subject,
        }));
    }
    all
}

fn service(pool: &ValidPool, owner: &OwnerReference, settings: &Settings) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(pool, owner, settings, &names::broker(&pool.name), "broker"),
        "spec": {
            "type": "ClusterIP",
            "selector": names::selector("broker", &pool.name),
            "ports": [
                { "name": "grpc", "port": names::BROKER_PORT, "targetPort": "grpc", "protocol": "TCP" },
                { "name": "http", "port": names::BROKER_HTTP_PORT, "targetPort": "http", "protocol": "TCP" },
            ],
        },
    })
}

/// A user that isn't root, as `restricted` wants it.
fn plain(uid: i64) -> Value {
    json!({
        "runAsNonRoot": true,
        "runAsUser": uid,
        "runAsGroup": uid,
        "fsGroup": uid,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": { "type": "RuntimeDefault" },
    })
}

/// What no container of ours may do.
fn locked() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "readOnlyRootFilesystem": true,
        "capabilities": { "drop": ["ALL"] },
    })
}

/// Where the broker's volume is.
const LEDGER: &str = "/var/lib/kernelfleet";

fn broker_arguments(pool: &ValidPool, settings: &Settings) -> Vec<String> {
    let spec = &pool.spec;
    let mut arguments = vec![
        format!("--pool={}", pool.name),
        format!("--listen=0.0.0.0:{}", names::BROKER_PORT),
        format!("--metrics=0.0.0.0:{}", names::BROKER_HTTP_PORT),
        "--cert=/etc/kernelfleet/tls/tls.crt".into(),
        "--key=/etc/kernelfleet/tls/tls.key".into(),
        format!("--ledger={LEDGER}/ledger.db"),
    ];
    match &spec.object_store {
        None => arguments.push(format!("--storage=file://{LEDGER}/objects")),
        Some(store) => {
            // Another pool's broker removes what it alone named: each has a folder of its own.
            arguments.push(format!("--storage={}/{}", store.url, pool.name));
            arguments.extend(store.endpoint.iter().map(|e| format!("--storage-endpoint={e}")));
            arguments.extend(store.region.iter().map(|r| format!("--storage-region={r}")));
        }
    }
    arguments.extend([
        format!("--lease-seconds={}", spec.slices.max_seconds),
        format!("--exclusive-seconds={}", spec.slices.max_exclusive_seconds),
        format!("--retention-seconds={}", spec.retention_seconds),
        format!("--operator-account={}", settings.account(&settings.service_account)),
        format!("--judge-account={}", settings.account(&names::judge(&pool.name))),
    ]);
    arguments.extend(spec.fair_share.weights.iter().map(|(name, weight)| format!("--weight={name}={weight}")));
    arguments
}

/// What the broker knows besides: the credentials of its bucket, by reference.
fn broker_environment(pool: &ValidPool) -> Vec<Value> {
    let mut environment = vec![json!({ "name": "KERNELFLEET_LOG_FORMAT", "value": "json" })];
    if let Some(secret) = pool.spec.credentials() {
        for (name, key) in [("AWS_ACCESS_KEY_ID", ACCESS_KEY), ("AWS_SECRET_ACCESS_KEY", SECRET_KEY)] {
            environment.push(
                json!({ "name": name, "valueFrom": { "secretKeyRef": { "name": secret, "key": key, "optional": false } } }),
            );
        }
    }
    environment
}

fn broker(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, credentials: &Credentials) -> Value {
    let name = names::broker(&pool.name);
    let mut volumes = vec![
        json!({ "name": "tls", "secret": { "secretName": tls_secret(&pool.name), "defaultMode": 288, "items": [
            { "key": "tls.crt", "path": "tls.crt" }, { "key": "tls.key", "path": "tls.key" }] } }),
        json!({ "name": "tmp", "emptyDir": { "sizeLimit": "1Gi" } }),
        json!({ "name": "api", "projected": { "defaultMode": 288, "sources": [
            { "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } },
            { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
            { "downwardAPI": { "items": [{ "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" } }] } },
        ] } }),
    ];
    let mut spec = json!({
        "replicas": 1,
        "serviceName": name,
        "selector": { "matchLabels": names::selector("broker", &pool.name) },
        "updateStrategy": { "type": "RollingUpdate" },
        "persistentVolumeClaimRetentionPolicy": { "whenDeleted": "Retain", "whenScaled": "Retain" },
    });
    match &pool.spec.storage {
        None => volumes.push(json!({ "name": "ledger", "emptyDir": {} })),
        Some(storage) => {
            let mut claim = json!({
                "accessModes": ["ReadWriteOnce"],
                "resources": { "requests": { "storage": storage.size } },
            });
            if let Some(class) = &storage.storage_class_name {
                claim["storageClassName"] = class.as_str().into();
            }
            spec["volumeClaimTemplates"] = json!([{
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": { "name": "ledger", "labels": names::selector("broker", &pool.name) },
                "spec": claim,
            }]);
        }
    }
    spec["template"] = json!({
        "metadata": { "labels": names::labels("broker", &pool.name) },
        "spec": {
            "serviceAccountName": name,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 30,
            "securityContext": plain(10003),
            "imagePullSecrets": pods::pull(settings),
            "tolerations": pods::tolerations(),
            "containers": [{
                "name": "broker",
                "image": settings.image,
                // What it can't use it says as it ends: kubectl describe shows that.
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "imagePullPolicy": settings.pull_policy,
                "command": ["kernelfleet", "broker"],
                "args": broker_arguments(pool, settings),
                "env": broker_environment(pool),
                "ports": [
                    { "name": "grpc", "containerPort": names::BROKER_PORT, "protocol": "TCP" },
                    { "name": "http", "containerPort": names::BROKER_HTTP_PORT, "protocol": "TCP" },
                ],
                "livenessProbe": { "httpGet": { "path": "/healthz", "port": "http" }, "periodSeconds": 10, "failureThreshold": 6 },
                "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 2 },
                "resources": { "requests": { "cpu": "100m", "memory": "128Mi" }, "limits": { "memory": "2Gi" } },
                "securityContext": locked(),
                "volumeMounts": [
                    { "name": "ledger", "mountPath": LEDGER },
                    { "name": "tls", "mountPath": "/etc/kernelfleet/tls", "readOnly": true },
                    { "name": "tmp", "mountPath": "/tmp" },
                    { "name": "api", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true },
                ],
            }],
            "volumes": volumes,
        },
    });
    if let Credentials::There(version) = credentials {
        spec["template"]["metadata"]["annotations"] = json!({ names::CREDENTIALS: version });
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pool, owner, settings, &name, "broker"),
        "spec": spec,
    })
}

fn judges(pool: &ValidPool, owner: &OwnerReference, settings: &Settings, ip: &str) -> Value {
    let name = names::judge(&pool.name);
    let cuda = pool.spec.device == Device::Cuda;
    let broker = Address { ip: ip.to_owned(), port: names::BROKER_PORT, authorities: String::new() };
    let shared = if cuda { "8Gi" } else { "2Gi" };
    let mut template = json!({
        "metadata": { "labels": names::labels("judge", &pool.name) },
        "spec": {
            "serviceAccountName": name,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "terminationGracePeriodSeconds": 30,
            "securityContext": { "seccompProfile": { "type": "RuntimeDefault" } },
            "imagePullSecrets": pods::pull(settings),
            "containers": [{
                "name": "judge",
                "image": settings.judge_image,
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "imagePullPolicy": settings.pull_policy,
                "command": ["kernelfleet", "judge-worker"],
                "env": [
                    { "name": "KERNELFLEET_BROKER", "value": broker.url() },
                    { "name": "KERNELFLEET_BROKER_CA_FILE", "value": "/etc/kernelfleet/broker/ca.crt" },
                    { "name": "KERNELFLEET_DEVICE", "value": pool.spec.device.name() },
                    { "name": "KERNELFLEET_LISTEN", "value": "0.0.0.0:8081" },
                    { "name": "KERNELFLEET_CACHE", "value": "/var/cache/kernelfleet" },
                    { "name": "KERNELFLEET_LOG_FORMAT", "value": "json" },
                    { "name": "KERNELFLEET_NODE", "valueFrom": { "fieldRef": { "apiVersion": "v1", "fieldPath": "spec.nodeName" } } },
                ],
                "ports": [{ "name": "http", "containerPort": 8081, "protocol": "TCP" }],
                "livenessProbe": { "httpGet": { "path": "/healthz", "port": "http" }, "periodSeconds": 10, "failureThreshold": 6 },
                "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 3 },
                "resources": { "requests": { "cpu": "500m", "memory": "1Gi" } },
                "securityContext": {
                    "runAsUser": 0,
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    // Its children are other users, and it ends them.
                    "capabilities": { "drop": ["ALL"], "add": ["SETUID", "SETGID", "KILL"] },
                },
                "volumeMounts": [
                    { "name": "ca", "mountPath": "/etc/kernelfleet/broker", "readOnly": true },
                    { "name": "broker-token", "mountPath": "/var/run/secrets/kernelfleet/broker", "readOnly": true },
                    { "name": "cache", "mountPath": "/var/cache/kernelfleet" },
                    { "name": "tmp", "mountPath": "/tmp" },
                    { "name": "shared", "mountPath": "/dev/shm" },
                ],
            }],
            "volumes": [
                { "name": "ca", "configMap": { "name": names::authority(&pool.name) } },
                { "name": "broker-token", "projected": { "sources": [{ "serviceAccountToken": {
                    "audience": names::BROKER_AUDIENCE, "expirationSeconds": 3600, "path": "token" } }] } },
                { "name": "cache", "emptyDir": {} },
                { "name": "tmp", "emptyDir": {} },
                { "name": "shared", "emptyDir": { "medium": "Memory", "sizeLimit": shared } },
            ],
        },
    });
    let judge = &mut template["spec"]["containers"][0];
    if let (Some(slots), Some(env)) = (pool.spec.evaluations_per_judge, judge["env"].as_array_mut()) {
        env.push(json!({ "name": "KERNELFLEET_SLOTS", "value": slots.to_string() }));
    }
    match &pool.card {
        Card::Cpu => {}
        Card::Resource(resource) => judge["resources"]["limits"] = json!({ resource.as_str(): "1" }),
        Card::Claim(claim) => {
            judge["resources"]["claims"] = json!([{ "name": "card" }]);
            template["spec"]["resourceClaims"] = json!([{ "name": "card", "resourceClaimTemplateName": claim }]);
        }
    }
    if let Some(over) = &pool.spec.pod_template {
        let over = over.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        overlay(&mut template, &Value::Object(over));
        // The overlay may say what it likes, but what selects the pods stays.
        let labels = names::labels("judge", &pool.name);
        overlay(&mut template, &json!({ "metadata": { "labels": labels } }));
    }
    pods::tolerate(&mut template["spec"]);
    json!({
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": metadata(pool, owner, settings, &name, "judge"),
        "spec": {
            "replicas": pool.spec.replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": { "matchLabels": names::selector("judge", &pool.name) },
            "template": template,
        },
    })
}

fn budget(pool: &ValidPool, owner: &OwnerReference, settings: &Settings) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(pool, owner, settings, &names::judge(&pool.name), "judge"),
        "spec": { "maxUnavailable": "25%", "selector": { "matchLabels": names::selector("judge", &pool.name) } },
    })
}

fn policies(pool: &ValidPool, owner: &OwnerReference, settings: &Settings) -> Vec<Value> {
    let namespaces = match &pool.namespaces {
        None => json!({}),
        Some(names) => json!({ "matchExpressions": [
            { "key": "kubernetes.io/metadata.name", "operator": "In", "values": names }] }),
    };
    let grpc = json!([{ "port": names::BROKER_PORT, "protocol": "TCP" }]);
    let broker = json!({ "matchLabels": names::selector("broker", &pool.name) });
    let judge = json!({ "matchLabels": names::selector("judge", &pool.name) });
    let agents =
        json!({ "matchLabels": { "app.kubernetes.io/name": "kernelfleet", "app.kubernetes.io/component": "agent" } });
    let operator = json!({ "matchLabels": { "app.kubernetes.io/name": "kernelfleet", "app.kubernetes.io/component": "operator" } });
    let policy = |name: &str, component: &str, spec: Value| {
        json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": metadata(pool, owner, settings, name, component),
            "spec": spec,
        })
    };
    vec![
        policy(
            &names::broker(&pool.name),
            "broker",
            json!({
                "podSelector": broker,
                "policyTypes": ["Ingress"],
                "ingress": [
                    { "from": [
                        { "namespaceSelector": namespaces, "podSelector": agents },
                        { "podSelector": judge },
                        { "podSelector": operator },
                    ], "ports": grpc },
                    // Metrics and health.
                    { "ports": [{ "port": names::BROKER_HTTP_PORT, "protocol": "TCP" }] },
                ],
            }),
        ),
        policy(
            &names::judge(&pool.name),
            "judge",
            json!({
                "podSelector": judge,
                "policyTypes": ["Ingress", "Egress"],
                // Health.
                "ingress": [{ "ports": [{ "port": 8081, "protocol": "TCP" }] }],
                "egress": [{ "to": [{ "podSelector": broker }], "ports": grpc }],
            }),
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::GpuPool;
    use crate::operator::context::tests::settings;
    use crate::operator::pool::validate::validate;

    fn built(spec: Value) -> String {
        built_with(spec, Credentials::Unnamed)
    }

    fn built_with(spec: Value, credentials: Credentials) -> String {
        let pool: GpuPool = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool",
            "metadata": { "name": "h100", "uid": "5a1f" }, "spec": spec,
        }))
        .unwrap();
        let valid = validate(&pool).unwrap();
        let facts = Facts {
            ip: Some("10.96.0.7".into()),
            missing_namespaces: vec!["gone".into()],
            ending_namespaces: vec!["ending".into()],
            credentials,
            ..Facts::default()
        };
        let objects = build(&valid, &names::owner(&pool), &settings(), "PEM\n", &facts).unwrap();
        let documents = objects.all.iter().map(|b| serde_saphyr::to_string(&b.object).unwrap());
        documents.collect::<Vec<_>>().join("---\n")
    }

    #[test]
    fn a_pool_of_cards_for_two_namespaces_with_a_volume_and_an_overlay() {
        insta::assert_snapshot!(built(json!({
            "device": "cuda", "replicas": 4, "evaluationsPerJudge": 4,
            "storage": { "size": "20Gi", "storageClassName": "local" },
            "allowedNamespaces": ["team-a", "team-b", "gone", "ending"],
            "fairShare": { "weights": { "team-a": 1.0, "team-b": 3.0 } },
            "podTemplate": { "spec": {
                "runtimeClassName": "nvidia",
                "tolerations": [{ "key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule" }],
                "containers": [{ "name": "judge", "env": [{ "name": "KERNELFLEET_PYTHON", "value": "/opt/python" }] }],
            } },
        })));
    }

    fn sets(text: &str) -> Vec<&str> {
        text.split("---\n").filter(|d| d.contains("kind: StatefulSet")).collect()
    }

    #[test]
    fn a_pool_with_a_bucket_has_its_credentials_by_reference_in_the_broker_alone() {
        let spec = json!({ "device": "cpu", "objectStore": {
            "url": "s3://fleet/objects", "endpoint": "https://minio.example.com:9000", "region": "eu-1",
            "credentialsSecret": { "name": "bucket" } } });
        let text = built_with(spec.clone(), Credentials::There("41".into()));
        assert_eq!(text.matches("secretKeyRef").count(), 2);
        let sets_of_it = sets(&text);
        let [broker, judges] = sets_of_it.as_slice() else { panic!("{text}") };
        assert!(!judges.contains("AWS_") && !judges.contains("bucket"), "{judges}");
        insta::assert_snapshot!(*broker);
        // Until there are credentials no pod is made, and what is there isn't touched.
        for credentials in [Credentials::Missing, Credentials::Without(SECRET_KEY)] {
            assert!(sets(&built_with(spec.clone(), credentials)).is_empty());
        }
    }

    #[test]
    fn a_bucket_without_a_secret_is_used_as_the_brokers_own_account() {
        let text = built(json!({ "device": "cpu", "objectStore": { "url": "s3://fleet", "region": "eu-central-1" } }));
        assert!(text.contains("--storage=s3://fleet/h100") && text.contains("--storage-region=eu-central-1"), "{text}");
        assert!(!text.contains("AWS_") && !text.contains("--storage-endpoint"), "{text}");
    }

    #[test]
    fn a_pool_on_the_cpu_for_everybody() {
        insta::assert_snapshot!(built(json!({ "device": "cpu" })));
    }
}
