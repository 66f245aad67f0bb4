//! Names and labels of what the operator makes. Pure.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::Resource;

/// Field manager of everything that the operator applies.
pub const MANAGER: &str = "kernelfleet-operator";
/// Field manager of statuses.
pub const STATUS_MANAGER: &str = "kernelfleet-operator-status";
/// Audience of tokens for a broker.
pub const BROKER_AUDIENCE: &str = "kernelfleet-broker";
/// Audience of tokens for a gateway.
pub const GATEWAY_AUDIENCE: &str = "kernelfleet-gateway";
/// Name that a broker's certificate is for, whatever its address.
pub const BROKER_NAME: &str = "broker.kernelfleet";
/// Port of every broker.
pub const BROKER_PORT: u16 = 8443;
/// Port of a broker's metrics and health.
pub const BROKER_HTTP_PORT: u16 = 8080;
/// Port of every gateway where models are asked.
pub const GATEWAY_PORT: u16 = 8080;
/// Port of a gateway's metrics and health.
pub const GATEWAY_HTTP_PORT: u16 = 8081;
/// Finalizer of an OptimizationJob: its broker is to be told that it ends.
pub const FINALIZER: &str = "kernelfleet.dev/broker";
/// Label of an agent's pod: the pool of its judges.
pub const POOL: &str = "kernelfleet.dev/pool";
/// Label of an agent's pod: the endpoint of its model, if it has one.
pub const ENDPOINT: &str = "kernelfleet.dev/endpoint";
/// Digest of what was applied last.
pub const APPLIED: &str = "kernelfleet.dev/applied";
/// On the broker's pod: a digest of its credentials, by a key that is in Secrets alone, so that new ones come with a new pod.
pub const CREDENTIALS: &str = "kernelfleet.dev/credentials-version";
/// Value of `spec.suspend` that the operator set last on a Job.
pub const SUSPEND: &str = "kernelfleet.dev/suspend";
/// Value of `spec.parallelism` that the operator set last on a Job.
pub const PARALLELISM: &str = "kernelfleet.dev/parallelism";

/// Labels of everything that belongs to one object.
#[must_use]
pub fn labels(component: &str, instance: &str) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("app.kubernetes.io/name".into(), "kernelfleet".into()),
        ("app.kubernetes.io/component".into(), component.into()),
        ("app.kubernetes.io/instance".into(), instance.into()),
        ("app.kubernetes.io/managed-by".into(), MANAGER.into()),
    ])
}

/// Labels that select what belongs to one object.
#[must_use]
pub fn selector(component: &str, instance: &str) -> BTreeMap<String, String> {
    let mut labels = labels(component, instance);
    labels.remove("app.kubernetes.io/managed-by");
    labels
}

/// What an object's parts refer to, so that they go with it.
#[must_use]
pub fn owner<K: Resource<DynamicType = ()>>(object: &K) -> OwnerReference {
    OwnerReference {
        api_version: K::api_version(&()).into_owned(),
        block_owner_deletion: Some(true),
        controller: Some(true),
        kind: K::kind(&()).into_owned(),
        name: object.meta().name.clone().unwrap_or_default(),
        uid: object.meta().uid.clone().unwrap_or_default(),
    }
}

/// The broker of a pool: StatefulSet, Service, ServiceAccount.
#[must_use]
pub fn broker(pool: &str) -> String {
    format!("{pool}-broker")
}

/// The one pod of a pool's broker.
#[must_use]
pub fn broker_pod(pool: &str) -> String {
    format!("{}-0", broker(pool))
}

/// The judges of a pool: StatefulSet, ServiceAccount.
#[must_use]
pub fn judge(pool: &str) -> String {
    format!("{pool}-judge")
}

/// The certificates of a pool's authorities (ConfigMap), and their keys (Secret).
#[must_use]
pub fn authority(pool: &str) -> String {
    format!("{pool}-broker-ca")
}

/// The gateway of an endpoint.
#[must_use]
pub fn gateway(endpoint: &str) -> String {
    format!("{endpoint}-gateway")
}

/// What agents of a pool need in their namespace, made once for all of its jobs there: ConfigMap and NetworkPolicy.
#[must_use]
pub fn agents(pool: &str) -> String {
    format!("kernelfleet-pool-{pool}")
}

/// What lets agents out to the gateway of an endpoint, made once for all of its jobs: NetworkPolicy.
#[must_use]
pub fn to_gateway(endpoint: &str) -> String {
    format!("kernelfleet-endpoint-{endpoint}")
}

/// The ConfigMap with a job's best kernels.
#[must_use]
pub fn best(job: &str) -> String {
    format!("{job}-best")
}
