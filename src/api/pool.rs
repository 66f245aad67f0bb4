//! GpuPool: cards of one kind, the judges on them and the broker that shares them out.
//!
//! Knows the fields, their bounds and their defaults. Must not know who acts on them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NameReference;

/// Cards of one kind, the judges on them, and the broker that hands out their time.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kernelfleet.dev",
    version = "v1alpha1",
    kind = "GpuPool",
    plural = "gpupools",
    shortname = "gpool",
    category = "kernelfleet",
    status = "GpuPoolStatus",
    derive = "PartialEq",
    validation = Rule::new("self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("a pool's name has at most 40 lower-case letters, digits and -, since the names of its parts begin with it"),
    printcolumn = r#"{"name":"Device","type":"string","jsonPath":".spec.device"}"#,
    printcolumn = r#"{"name":"Judges","type":"integer","jsonPath":".spec.replicas"}"#,
    printcolumn = r#"{"name":"Ready","type":"integer","jsonPath":".status.judgesReady"}"#,
    printcolumn = r#"{"name":"Queued","type":"integer","jsonPath":".status.queued"}"#,
    printcolumn = r#"{"name":"Busy","type":"number","jsonPath":".status.busy"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Hardware","type":"string","jsonPath":".status.hardware","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("self.device == oldSelf.device").message("device can't be changed; make a new GpuPool"))]
#[x_kube(validation = Rule::new("self.device == 'cuda' || (!has(self.resourceName) && !has(self.resourceClaimTemplate) && !has(self.arch))").message("arch, resourceName and resourceClaimTemplate are for device: cuda"))]
#[x_kube(validation = Rule::new("!(has(self.resourceName) && has(self.resourceClaimTemplate))").message("a judge gets its card by resourceName or by resourceClaimTemplate, not by both"))]
#[x_kube(validation = Rule::new("self.device == 'cuda' || self.sharing == 'Exclusive'").message("sharing is for device: cuda"))]
#[x_kube(validation = Rule::new("has(self.storage) == has(oldSelf.storage)").message("storage can't be added or taken away, since the ledger would be lost; make a new GpuPool"))]
#[x_kube(validation = Rule::new("has(self.objectStore) == has(oldSelf.objectStore)").message("objectStore can't be added or taken away, since the objects would be lost; make a new GpuPool"))]
pub struct GpuPoolSpec {
    /// Where candidates run: on CUDA cards, or on the CPU for trying things out.
    pub device: Device,
    /// Compute capability that its cards must have, such as `sm_90`: the pool isn't `Ready` while judges find another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 5, max = 8), regex(pattern = r"^sm_[0-9]{2,3}[af]?$"))]
    pub arch: Option<String>,
    /// Resource of the device plugin that a judge asks for; `nvidia.com/gpu` if neither this nor `resourceClaimTemplate`
    /// is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_name: Option<String>,
    /// ResourceClaimTemplate (DRA) of the operator's namespace that gives a judge its card.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub resource_claim_template: Option<String>,
    /// Whether other pods may be on the same card. Measurements are exclusive in any case among this pool's judges; with
    /// another value than `Exclusive` nobody keeps others away, and `MeasurementsTrusted` says so.
    #[serde(default)]
    pub sharing: Sharing,
    /// Judges, one a card.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: i32,
    /// Evaluations that one judge works on at once, so that one's compilation overlaps another's measurement; 4 on a card
    /// and 1 on the CPU if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub evaluations_per_judge: Option<i32>,
    /// Bounds of one slice of a card.
    #[serde(default)]
    pub slices: Slices,
    /// How the time of the cards is shared out.
    #[serde(default)]
    pub fair_share: FairShare,
    /// Volume of the broker's ledger. Without one the ledger lies in the pod and is lost with it: for trying things out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub storage: Option<Storage>,
    /// Bucket of the broker's objects: trajectories, results, contents that are too large for the ledger. Without one they
    /// lie on the ledger's volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStore>,
    /// How long ledger and objects keep a job after its OptimizationJob was deleted; 30 days if nothing is said.
    #[serde(default = "retention_seconds")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub retention_seconds: i32,
    /// Namespaces whose jobs may use the pool; `*` is all of them.
    #[serde(default = "everywhere")]
    #[schemars(length(min = 1, max = 256), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "set"))]
    pub allowed_namespaces: Vec<String>,
    /// What is laid over the judges' pods, as a PodTemplateSpec: lists of things with a name are merged by name, the
    /// judge's container is `judge`. It isn't checked: this object belongs to whoever runs the cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::anything")]
    pub pod_template: Option<BTreeMap<String, serde_json::Value>>,
}

/// Where candidates run.
#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Cuda,
    Cpu,
}

impl Device {
    /// The word that flags and messages use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
        }
    }
}

/// Whether others may be on a card.
#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Sharing {
    /// The device plugin gives whole cards.
    #[default]
    Exclusive,
    /// A judge gets a MIG instance: its own compute and memory, a shared memory bus and power budget.
    Mig,
    /// The device plugin gives the same card to several pods.
    TimeSlicing,
}

impl Sharing {
    /// The word that flags and messages use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exclusive => "Exclusive",
            Self::Mig => "Mig",
            Self::TimeSlicing => "TimeSlicing",
        }
    }
}

/// Bounds of one slice.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("self.maxExclusiveSeconds <= self.maxSeconds").message("maxExclusiveSeconds is at most maxSeconds"))]
pub struct Slices {
    /// Longest that one evaluation may take.
    #[serde(default = "max_seconds")]
    #[schemars(range(min = 1, max = 86_400))]
    pub max_seconds: i32,
    /// Longest that it may have the card for itself at a stretch.
    #[serde(default = "max_exclusive_seconds")]
    #[schemars(range(min = 1, max = 3_600))]
    pub max_exclusive_seconds: i32,
}

impl Default for Slices {
    fn default() -> Self {
        Self { max_seconds: max_seconds(), max_exclusive_seconds: max_exclusive_seconds() }
    }
}

/// How time is shared out.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FairShare {
    /// Weight of a namespace; 1 where nothing is said. A namespace of weight 3 gets three times the seconds of one of
    /// weight 1 while both wait.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 256, "additionalProperties" = { "type": "number", "minimum": 0.01, "maximum": 1000.0 }))]
    pub weights: BTreeMap<String, f64>,
}

/// The ledger's volume.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("self == oldSelf").message("storage can't be changed: enlarge the PersistentVolumeClaim itself"))]
pub struct Storage {
    /// Such as `20Gi`.
    #[schemars(length(min = 1, max = 32))]
    #[x_kube(validation = Rule::new("isQuantity(self)").message("not a quantity such as 20Gi"))]
    pub size: String,
    /// StorageClass; the cluster's default if nothing is said. Its volumes must be local or block storage: SQLite's
    /// log is not safe on network file systems.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub storage_class_name: Option<String>,
}

/// A bucket that speaks S3.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("self.url == oldSelf.url").message("objectStore.url can't be changed, since the objects would be lost; make a new GpuPool"))]
#[x_kube(validation = Rule::new("has(self.endpoint) || has(self.region)").message("region is wanted where no endpoint is said: that is Amazon's S3, whose buckets each belong to a region"))]
pub struct ObjectStore {
    /// Such as `s3://bucket/prefix`. Objects lie below it in a folder that has the pool's name, so that pools of one cluster
    /// may have the same; pools of two clusters may not.
    #[schemars(length(min = 8, max = 512))]
    #[x_kube(validation = Rule::new("self.matches('^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9][A-Za-z0-9._-]*)*$')").message("an address such as s3://bucket or s3://bucket/prefix is wanted"))]
    pub url: String,
    /// Address of a server that isn't Amazon's, such as `https://minio.example.com:9000`; its buckets are asked for by path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 8, max = 512))]
    #[x_kube(validation = Rule::new("isURL(self) && (url(self).getScheme() == 'https' || url(self).getScheme() == 'http') && url(self).getHostname() != ''").message("an address such as https://host:9000 is wanted"))]
    #[x_kube(validation = Rule::new("!self.contains('@') && !self.contains('?') && !self.contains('#')").message("the address holds no user, query or fragment; a key belongs into credentialsSecret"))]
    pub endpoint: Option<String>,
    /// Region of the bucket; `us-east-1` if an endpoint and no region is said, which is what most other servers take.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub region: Option<String>,
    /// Secret of the operator's namespace with the keys `access-key-id` and `secret-access-key`; the broker alone gets
    /// them. Without it the broker goes by its service account's own identity on Amazon (IRSA or EKS Pod Identity).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub credentials_secret: Option<CredentialsSecret>,
}

/// Where the credentials are.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CredentialsSecret {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// What the operator has seen.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPoolStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Validated`, `Ready`, `MeasurementsTrusted`, `Healthy`.
    #[serde(default)]
    #[schemars(schema_with = "super::conditions")]
    pub conditions: Vec<Condition>,
    /// Judges whose pods are ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judges_ready: Option<i32>,
    /// Judges that the broker has heard of lately; not said while it is silent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub judges_registered: Option<i32>,
    /// The card, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub hardware: Option<String>,
    /// Evaluations that wait; not said while the broker is silent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<i32>,
    /// Evaluations that are being worked on; not said while the broker is silent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased: Option<i32>,
    /// Share of the last five minutes in which a card was held, 0 to 1, over all cards; not said while the
    /// broker is silent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Judges whose card isn't well, at most 32.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub unhealthy: Vec<Unhealthy>,
    /// The broker's Service, in the operator's namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub broker: Option<NameReference>,
}

/// A judge whose card isn't well.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Unhealthy {
    /// Pod of the judge.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// UUID of the card.
    #[schemars(length(max = 128))]
    pub card: String,
    /// What is wrong.
    #[schemars(length(max = 256))]
    pub message: String,
}

fn one() -> i32 {
    1
}
fn retention_seconds() -> i32 {
    2_592_000
}
fn max_seconds() -> i32 {
    1200
}
// Loading, correctness and `torch.compile` of a large task on a slow CPU are within it.
fn max_exclusive_seconds() -> i32 {
    300
}
fn everywhere() -> Vec<String> {
    vec!["*".into()]
}

impl GpuPoolSpec {
    /// Secret with the credentials of the bucket, if the spec names one.
    #[must_use]
    pub fn credentials(&self) -> Option<&str> {
        let secret = self.object_store.as_ref()?.credentials_secret.as_ref()?;
        Some(&secret.name)
    }

    /// Whether jobs of a namespace may use the pool.
    #[must_use]
    pub fn allows(&self, namespace: &str) -> bool {
        self.allowed_namespaces.iter().any(|n| n == "*" || n == namespace)
    }
}
