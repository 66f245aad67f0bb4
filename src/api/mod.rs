//! Custom resources of the group `kernelfleet.dev`, one file a kind, and how manifests are read. Knows nobody.

pub mod job;
pub mod manifest;
pub mod schema;

use kube::CustomResourceExt;

pub use job::{OptimizationJob, OptimizationJobSpec};

/// Group of every resource here.
pub const GROUP: &str = "kernelfleet.dev";
/// Their version.
pub const API_VERSION: &str = "kernelfleet.dev/v1alpha1";

/// The definition of OptimizationJob as the API server takes it.
#[must_use]
pub fn optimization_job() -> serde_json::Value {
    let mut value = serde_json::to_value(OptimizationJob::crd()).unwrap_or_default();
    prune(&mut value);
    value
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
    let text = serde_saphyr::to_string(&optimization_job())?;
    let header = "# Generated from src/api by `kernelfleet crds --write crds`; a test compares them.\n";
    Ok(vec![("optimizationjobs.yaml", format!("{header}{text}"))])
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
