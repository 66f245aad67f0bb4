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

/// The definitions as files: name in `crds/` and YAML text.
///
/// # Errors
/// When a schema can't be written as YAML, which a test rules out.
pub fn definitions() -> Result<Vec<(&'static str, String)>, serde_saphyr::ser_error::Error> {
    let value = serde_json::to_value(OptimizationJob::crd()).unwrap_or_default();
    let text = serde_saphyr::to_string(&value)?;
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
