//! ModelEndpoint: a language model that jobs of the same namespace may ask, made by whoever owns its key.
//!
//! Knows the fields, their bounds and their defaults. Must not know who acts on them.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::NameReference;

/// A language model behind the OpenAI protocol, for the jobs of its namespace. A job names the endpoint and never meets
/// its key.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kernelfleet.dev",
    version = "v1alpha1",
    kind = "ModelEndpoint",
    plural = "modelendpoints",
    shortname = "mep",
    category = "kernelfleet",
    namespaced,
    status = "ModelEndpointStatus",
    derive = "PartialEq",
    validation = Rule::new("self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("an endpoint's name has at most 40 lower-case letters, digits and -, since the names of its gateway begin with it"),
    printcolumn = r#"{"name":"URL","type":"string","jsonPath":".spec.baseUrl"}"#,
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.conditions[?(@.type==\"Ready\")].reason"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelEndpointSpec {
    /// Address up to and with the version: `https://host/v1`. The key belongs into `apiKeySecret`, not in here.
    #[schemars(length(min = 8, max = 2048))]
    #[x_kube(validation = Rule::new("isURL(self) && (url(self).getScheme() == 'https' || url(self).getScheme() == 'http') && url(self).getHostname() != ''").message("an address such as https://host/v1 is wanted"))]
    #[x_kube(validation = Rule::new("!self.contains('@') && !self.contains('?') && !self.contains('#')").message("the address holds no user, query or fragment; a key belongs into apiKeySecret"))]
    pub base_url: String,
    /// Secret of the same namespace with the key; none for servers that want none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub api_key_secret: Option<KeySecret>,
    /// Models that jobs may ask for.
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
    pub models: Vec<Model>,
    /// Limits of all agents together.
    #[serde(default)]
    pub limits: Limits,
    /// Whether the server gives token ids and log-probabilities, and agents keep them (vLLM, SGLang).
    #[serde(default)]
    pub token_ids: bool,
    /// Whether answers are asked for as a stream, so that a server that hangs is noticed soon.
    #[serde(default = "yes")]
    pub stream: bool,
    /// Seconds of silence after which an attempt is given up.
    #[serde(default = "silence")]
    #[schemars(range(min = 1, max = 3_600))]
    pub silence_seconds: i32,
}

/// Where the key is.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KeySecret {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its key.
    #[serde(default = "api_key")]
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// One model.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// As the server knows it.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Limits of all agents together.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// Requests a minute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub requests_per_minute: Option<i32>,
    /// Tokens a minute, read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_000_000_000))]
    pub tokens_per_minute: Option<i32>,
    /// Requests at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub concurrency: Option<i32>,
}

/// What the operator has seen.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelEndpointStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Ready`.
    #[serde(default)]
    #[schemars(schema_with = "super::conditions")]
    pub conditions: Vec<Condition>,
    /// The gateway's Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<NameReference>,
}

fn yes() -> bool {
    true
}
fn silence() -> i32 {
    180
}
fn api_key() -> String {
    "api-key".into()
}
