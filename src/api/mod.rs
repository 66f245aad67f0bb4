//! Custom resources of the group `kernelfleet.dev`, one file a kind, and how manifests are read. Knows nobody.

pub mod endpoint;
pub mod job;
pub mod manifest;
pub mod pool;
pub mod reference;
pub mod schema;
pub mod taskset;

use kube::CustomResourceExt;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

pub use endpoint::{ModelEndpoint, ModelEndpointSpec};
pub use job::{OptimizationJob, OptimizationJobSpec};
pub use pool::{GpuPool, GpuPoolSpec};
pub use taskset::{TaskSet, TaskSetSpec};

/// Group of every resource here.
pub const GROUP: &str = "kernelfleet.dev";
/// Their version.
pub const API_VERSION: &str = "kernelfleet.dev/v1alpha1";

/// Something with a name and a namespace.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NameReference {
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Its namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
}

/// The definition of OptimizationJob as the API server takes it.
#[must_use]
pub fn optimization_job() -> serde_json::Value {
    definition::<OptimizationJob>()
}

fn definition<K: CustomResourceExt>() -> serde_json::Value {
    let mut value = serde_json::to_value(K::crd()).unwrap_or_default();
    prune(&mut value);
    let schema = &mut value["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    if let Some(description) = schema["properties"]["spec"]["description"].as_str().map(str::to_owned) {
        schema["description"] = description.into();
    }
    value
}

/// A list of conditions: a map by type, all of it bounded, since rules read it and rules have a budget.
fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 16,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": { "type": "string", "minLength": 1, "maxLength": 63, "description": "What is said to be so or not." },
                "status": { "type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it is so." },
                "observedGeneration": {
                    "type": "integer", "format": "int64", "minimum": 0,
                    "description": "Generation of the spec that this is said of."
                },
                "lastTransitionTime": {
                    "type": "string", "format": "date-time", "description": "When the status last changed."
                },
                "reason": { "type": "string", "minLength": 1, "maxLength": 128, "description": "Why, in one word." },
                "message": { "type": "string", "maxLength": 4096, "description": "Why, and what to do next." }
            }
        }
    })
}

/// A mapping that nobody checks.
fn anything(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// `additionalProperties: false` is forbidden in a definition; unknown fields are refused by the server's strict
/// validation and by `schema::check`.
fn prune(value: &mut serde_json::Value) {
    match value {
        serde_json::Value::Object(map) => {
            if map.get("additionalProperties") == Some(&serde_json::Value::Bool(false)) {
                map.remove("additionalProperties");
            }
            map.values_mut().for_each(prune);
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(prune),
        _ => {}
    }
}

/// The definitions as files: name in `crds/` and YAML text.
///
/// # Errors
/// When a schema can't be written as YAML, which a test rules out.
pub fn definitions() -> Result<Vec<(&'static str, String)>, serde_saphyr::ser_error::Error> {
    let header = "# Generated from src/api by `kernelfleet crds --write crds`; a test compares them.\n";
    all().into_iter().map(|(name, value)| Ok((name, format!("{header}{}", serde_saphyr::to_string(&value)?)))).collect()
}

/// Every definition with the name of its file.
fn all() -> Vec<(&'static str, serde_json::Value)> {
    vec![
        ("gpupools.yaml", definition::<GpuPool>()),
        ("modelendpoints.yaml", definition::<ModelEndpoint>()),
        ("optimizationjobs.yaml", definition::<OptimizationJob>()),
        ("tasksets.yaml", definition::<TaskSet>()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_in_crds_are_those_of_the_types() {
        for (name, text) in definitions().unwrap() {
            let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("crds").join(name);
            let kept = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(kept == text, "{} has drifted from src/api: run `make crds`", path.display());
        }
    }
}
