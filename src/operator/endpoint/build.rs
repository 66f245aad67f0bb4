//! From a checked ModelEndpoint to its gateway. Pure. The third step.
//!
//! One gateway, since its limits are of all agents together. It is replaced, not doubled.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use super::validate::ValidEndpoint;
use crate::operator::apply::{self, Built};
use crate::operator::context::Settings;
use crate::operator::{names, pods};

/// User of the gateway.
const GATEWAY: i64 = 10004;

/// The objects of an endpoint.
///
/// # Errors
/// When an object lacks a field that every object has.
pub fn build(
    endpoint: &ValidEndpoint,
    owner: &OwnerReference,
    settings: &Settings,
) -> Result<Vec<Built>, apply::Error> {
    let all = vec![
        account(endpoint, owner),
        binding(endpoint),
        service(endpoint, owner),
        deployment(endpoint, owner, settings),
        policy(endpoint, owner),
    ];
    all.into_iter().map(Built::new).collect()
}

fn metadata(endpoint: &ValidEndpoint, owner: &OwnerReference) -> Value {
    json!({
        "name": names::gateway(&endpoint.name),
        "namespace": endpoint.namespace,
        "labels": names::labels("gateway", &endpoint.name),
        "ownerReferences": [owner],
    })
}

fn account(endpoint: &ValidEndpoint, owner: &OwnerReference) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(endpoint, owner),
        "automountServiceAccountToken": false,
    })
}

/// Name of the gateway's right, unlike that of any other namespace.
#[must_use]
pub fn binding_name(namespace: &str, endpoint: &str) -> String {
    format!("kernelfleet:{namespace}:{}", names::gateway(endpoint))
}

/// It may ask who a token is, and nothing else; the role comes with the chart. What is of the whole cluster can't be owned
/// by what is in a namespace: a finalizer takes it away.
fn binding(endpoint: &ValidEndpoint) -> Value {
    let name = binding_name(&endpoint.namespace, &endpoint.name);
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": { "name": name, "labels": names::labels("gateway", &endpoint.name) },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "kernelfleet-token-reviewer" },
        "subjects": [{ "kind": "ServiceAccount", "name": names::gateway(&endpoint.name), "namespace": endpoint.namespace }],
    })
}

fn service(endpoint: &ValidEndpoint, owner: &OwnerReference) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(endpoint, owner),
        "spec": {
            "type": "ClusterIP",
            "selector": names::selector("gateway", &endpoint.name),
            // By number: a gateway of an earlier release has its ports by other names and goes on until it is replaced.
            "ports": [
                { "name": "models", "port": names::GATEWAY_PORT, "targetPort": names::GATEWAY_PORT, "protocol": "TCP" },
                { "name": "http", "port": names::GATEWAY_HTTP_PORT, "targetPort": names::GATEWAY_HTTP_PORT, "protocol": "TCP" },
            ],
        },
    })
}

fn deployment(endpoint: &ValidEndpoint, owner: &OwnerReference, settings: &Settings) -> Value {
    let spec = &endpoint.spec;
    let models: Vec<&str> = spec.models.iter().map(|m| m.name.as_str()).collect();
    let mut args = vec![
        format!("--listen=0.0.0.0:{}", names::GATEWAY_PORT),
        format!("--metrics=0.0.0.0:{}", names::GATEWAY_HTTP_PORT),
        format!("--upstream={}", spec.base_url),
        format!("--models={}", models.join(",")),
        format!("--namespace={}", endpoint.namespace),
    ];
    let limits = [
        ("requests-per-minute", spec.limits.requests_per_minute),
        ("tokens-per-minute", spec.limits.tokens_per_minute),
        ("concurrency", spec.limits.concurrency),
    ];
    args.extend(limits.iter().filter_map(|(flag, value)| value.map(|v| format!("--{flag}={v}"))));
    args.push(format!("--silence={}", spec.silence_seconds));
    args.extend(spec.token_ids.then(|| "--token-ids".to_owned()));
    args.extend((!spec.stream).then(|| "--no-stream".to_owned()));
    let mut mounts = vec![
        json!({ "name": "api", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount", "readOnly": true }),
        json!({ "name": "tmp", "mountPath": "/tmp" }),
    ];
    let mut volumes = vec![
        json!({ "name": "api", "projected": { "sources": [
            { "serviceAccountToken": { "path": "token", "expirationSeconds": 3600 } },
            { "configMap": { "name": "kube-root-ca.crt", "items": [{ "key": "ca.crt", "path": "ca.crt" }] } },
            { "downwardAPI": { "items": [{ "path": "namespace", "fieldRef": { "apiVersion": "v1", "fieldPath": "metadata.namespace" } }] } },
        ] } }),
        json!({ "name": "tmp", "emptyDir": { "sizeLimit": "64Mi" } }),
    ];
    if let Some(secret) = &spec.api_key_secret {
        args.push("--key-file=/etc/kernelfleet/key/key".into());
        mounts.push(json!({ "name": "key", "mountPath": "/etc/kernelfleet/key", "readOnly": true }));
        volumes.push(json!({ "name": "key", "secret": {
            "secretName": secret.name, "items": [{ "key": secret.key, "path": "key" }] } }));
    }
    json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(endpoint, owner),
        "spec": {
            "replicas": 1,
            "strategy": { "type": "Recreate" },
            "selector": { "matchLabels": names::selector("gateway", &endpoint.name) },
            "template": {
                "metadata": { "labels": names::labels("gateway", &endpoint.name) },
                "spec": {
                    "serviceAccountName": names::gateway(&endpoint.name),
                    "automountServiceAccountToken": false,
                    "enableServiceLinks": false,
                    "terminationGracePeriodSeconds": 30,
                    "imagePullSecrets": pods::pull(settings),
                    "tolerations": pods::tolerations(),
                    "securityContext": {
                        "runAsNonRoot": true, "runAsUser": GATEWAY, "runAsGroup": GATEWAY, "fsGroup": GATEWAY,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "containers": [{
                        "name": "gateway",
                        "image": settings.image,
                        "terminationMessagePolicy": "FallbackToLogsOnError",
                        "imagePullPolicy": settings.pull_policy,
                        "command": ["kernelfleet", "gateway"],
                        "args": args,
                        "env": [{ "name": "KERNELFLEET_LOG_FORMAT", "value": "json" }],
                        "ports": [
                            { "name": "models", "containerPort": names::GATEWAY_PORT, "protocol": "TCP" },
                            { "name": "http", "containerPort": names::GATEWAY_HTTP_PORT, "protocol": "TCP" },
                        ],
                        "livenessProbe": { "httpGet": { "path": "/healthz", "port": "http" }, "periodSeconds": 10, "failureThreshold": 6 },
                        "readinessProbe": { "httpGet": { "path": "/readyz", "port": "http" }, "periodSeconds": 3 },
                        "resources": { "requests": { "cpu": "50m", "memory": "64Mi" }, "limits": { "memory": "512Mi" } },
                        "securityContext": {
                            "allowPrivilegeEscalation": false,
                            "readOnlyRootFilesystem": true,
                            "capabilities": { "drop": ["ALL"] },
                        },
                        "volumeMounts": mounts,
                    }],
                    "volumes": volumes,
                },
            },
        },
    })
}

/// Agents of its namespace reach its models, and whoever measures its metrics; where it goes itself is its owner's to say.
fn policy(endpoint: &ValidEndpoint, owner: &OwnerReference) -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(endpoint, owner),
        "spec": {
            "podSelector": { "matchLabels": names::selector("gateway", &endpoint.name) },
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{ "podSelector": { "matchLabels": {
                        "app.kubernetes.io/name": "kernelfleet", "app.kubernetes.io/component": "agent" } } }],
                    "ports": [{ "port": names::GATEWAY_PORT, "protocol": "TCP" }],
                },
                // Metrics and health. Agents' own policy doesn't let them out to it.
                { "ports": [{ "port": names::GATEWAY_HTTP_PORT, "protocol": "TCP" }] },
            ],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::context::tests::settings;
    use crate::operator::endpoint::validate::validate;

    #[test]
    fn an_endpoint_is_a_gateway_with_the_key_mounted() {
        let endpoint = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "ModelEndpoint",
            "metadata": { "name": "gpt", "namespace": "team-a", "uid": "77aa" },
            "spec": {
                "baseUrl": "https://api.example.com/v1", "models": [{ "name": "large" }, { "name": "small" }],
                "apiKeySecret": { "name": "openai" }, "limits": { "requestsPerMinute": 60 },
                "tokenIds": true, "stream": false,
            },
        }))
        .unwrap();
        let built = build(&validate(&endpoint).unwrap(), &names::owner(&endpoint), &settings()).unwrap();
        let documents = built.iter().map(|b| serde_saphyr::to_string(&b.object).unwrap());
        insta::assert_snapshot!(documents.collect::<Vec<_>>().join("---\n"));
    }
}
