//! Finalizers, put on and taken away by metadata alone: an object whose spec nobody can read is released all the same.
//!
//! Knows metadata. Must not know what is to be done before an object may go.

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, Patch, PatchParams};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::names;

/// Whether an object has a finalizer.
#[must_use]
pub fn has(metadata: &ObjectMeta, finalizer: &str) -> bool {
    metadata.finalizers.iter().flatten().any(|f| f == finalizer)
}

/// Whether an object is being deleted and waits for a finalizer to be taken away. Pure.
#[must_use]
pub fn waits(metadata: &ObjectMeta, finalizer: &str) -> bool {
    metadata.deletion_timestamp.is_some() && has(metadata, finalizer)
}

/// The finalizers that an object is to have; `None` where it has them already. Pure.
fn changed(metadata: &ObjectMeta, finalizer: &str, on: bool) -> Option<Vec<String>> {
    if has(metadata, finalizer) == on {
        return None;
    }
    let mut finalizers = metadata.finalizers.clone().unwrap_or_default();
    if on {
        finalizers.push(finalizer.to_owned());
    } else {
        finalizers.retain(|f| f != finalizer);
    }
    Some(finalizers)
}

/// Puts a finalizer on, or takes it away. To put one on belongs to who has read the object and made something for it.
///
/// # Errors
/// When the object can't be written.
pub async fn set<K>(client: &Client, metadata: &ObjectMeta, finalizer: &str, on: bool) -> Result<(), kube::Error>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + std::fmt::Debug + DeserializeOwned,
{
    let Some(finalizers) = changed(metadata, finalizer, on) else { return Ok(()) };
    let api: Api<K> = Api::namespaced(client.clone(), metadata.namespace.as_deref().unwrap_or_default());
    // With the version that was read, so that another's finalizer isn't lost.
    let change = json!({ "metadata": { "finalizers": finalizers, "resourceVersion": metadata.resource_version } });
    let parameters = PatchParams { field_manager: Some(names::MANAGER.into()), ..PatchParams::default() };
    let name = metadata.name.as_deref().unwrap_or_default();
    match api.patch_metadata(name, &parameters, &Patch::Merge(change)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 && !on => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::api::OptimizationJob;
    use crate::operator::context::Guarded;

    fn object(finalizers: &Value) -> Guarded<OptimizationJob> {
        // As a newer version's: nothing in this spec is known here.
        let object = json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "OptimizationJob",
            "metadata": { "name": "new", "namespace": "lab", "finalizers": finalizers,
                "deletionTimestamp": "2027-01-15T08:00:00Z" },
            "spec": { "swarm": true },
        });
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn an_object_that_nobody_can_read_is_released_by_its_metadata() {
        let ours = object(&json!(["example.com/other", names::FINALIZER]));
        assert!(ours.0.is_err());
        assert!(waits(ours.meta(), names::FINALIZER));
        assert_eq!(changed(ours.meta(), names::FINALIZER, false), Some(vec!["example.com/other".into()]));
        let others = object(&json!(["example.com/other"]));
        assert!(!waits(others.meta(), names::FINALIZER), "there is nothing of ours to be taken away");
        assert_eq!(changed(others.meta(), names::FINALIZER, false), None);
    }

    #[test]
    fn a_finalizer_is_put_on_once() {
        let mut metadata = ObjectMeta::default();
        let one = changed(&metadata, names::FINALIZER, true);
        assert_eq!(one, Some(vec![names::FINALIZER.to_owned()]));
        metadata.finalizers = one;
        assert_eq!(changed(&metadata, names::FINALIZER, true), None);
    }
}
