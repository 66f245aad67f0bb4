//! TaskSet: a named, content-addressed set of tasks that jobs refer to.
//!
//! Knows the fields, their bounds and their defaults. Must not know who acts on them.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A named set of tasks.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[kube(
    group = "kernelfleet.dev",
    version = "v1alpha1",
    kind = "TaskSet",
    plural = "tasksets",
    shortname = "tset",
    category = "kernelfleet",
    namespaced,
    status = "TaskSetStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Tasks","type":"integer","jsonPath":".status.tasks"}"#,
    printcolumn = r#"{"name":"Refused","type":"integer","jsonPath":".status.refused"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Digest","type":"string","jsonPath":".status.digest","priority":1}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("[has(self.configMap), has(self.oci), has(self.persistentVolumeClaim), has(self.objectStore)].filter(x, x).size() == 1").message("exactly one of configMap, oci, persistentVolumeClaim, objectStore says where the tasks are"))]
pub struct TaskSetSpec {
    /// ConfigMaps of the same namespace: each key that ends in `.py` is a task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMaps>,
    /// An OCI artifact. Not supported yet: the condition `Ready` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oci: Option<Oci>,
    /// A folder of a volume. Not supported yet: the condition `Ready` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// A prefix of an object store. Not supported yet: the condition `Ready` says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_store: Option<ObjectStore>,
}

/// Tasks of several ConfigMaps: one of them holds at most a megabyte.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMaps {
    /// Their names. Tasks come in this order, within a ConfigMap in the order of their names.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub names: Vec<String>,
}

/// An OCI artifact.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Oci {
    /// Such as `registry.example.com/tasks/kernelbench@sha256:...`.
    #[schemars(length(min = 1, max = 1024))]
    pub reference: String,
}

/// A folder of a volume.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VolumeClaim {
    /// Name of the PersistentVolumeClaim.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// Folder in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub path: Option<String>,
}

/// A prefix of an object store.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ObjectStore {
    /// Such as `s3://bucket/prefix`.
    #[schemars(length(min = 1, max = 2048))]
    pub url: String,
}

/// What the operator has seen.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskSetStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`.
    #[serde(default)]
    #[schemars(schema_with = "super::conditions")]
    pub conditions: Vec<Condition>,
    /// Tasks that can be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<i32>,
    /// Content address of the set: of its tasks' names and sources, in order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub digest: Option<String>,
    /// Files that are no tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<i32>,
    /// How many files each kind of refusal met.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub refusals: BTreeMap<String, i32>,
}
