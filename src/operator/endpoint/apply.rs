//! Makes an endpoint's gateway what was built. The fourth step.

use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::json;

use super::build::binding_name;
use crate::api::ModelEndpoint;
use crate::operator::apply::{self, Built};
use crate::operator::context::Context;
use crate::operator::names;

/// Finalizer of an endpoint: its gateway's right is of the whole cluster and can't be owned by what is in a namespace.
const FINALIZER: &str = "kernelfleet.dev/gateway";

/// Why something isn't as it was built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Object(#[from] apply::Error),
    #[error("{what} can't be written: {source}")]
    Api { what: &'static str, source: Box<kube::Error> },
}

/// Puts the finalizer on, or takes it away.
///
/// # Errors
/// When the object can't be written.
pub async fn finalizer(context: &Context, endpoint: &ModelEndpoint, on: bool) -> Result<(), Error> {
    let mut finalizers = endpoint.finalizers().to_vec();
    if finalizers.iter().any(|f| f == FINALIZER) == on {
        return Ok(());
    }
    if on {
        finalizers.push(FINALIZER.into());
    } else {
        finalizers.retain(|f| f != FINALIZER);
    }
    let api: Api<ModelEndpoint> = Api::namespaced(context.client.clone(), &endpoint.namespace().unwrap_or_default());
    let version = endpoint.resource_version();
    let change = json!({ "metadata": { "finalizers": finalizers, "resourceVersion": version } });
    let parameters = PatchParams { field_manager: Some(names::MANAGER.into()), ..PatchParams::default() };
    match api.patch_metadata(&endpoint.name_any(), &parameters, &Patch::Merge(change)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 && !on => Ok(()),
        Err(source) => Err(Error::Api { what: "the finalizer", source: Box::new(source) }),
    }
}

/// Takes back what doesn't go with the endpoint.
///
/// # Errors
/// When it can't be deleted.
pub async fn leave(context: &Context, endpoint: &ModelEndpoint) -> Result<(), Error> {
    let api: Api<ClusterRoleBinding> = Api::all(context.client.clone());
    let name = binding_name(&endpoint.namespace().unwrap_or_default(), &endpoint.name_any());
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(source) => return Err(Error::Api { what: "the gateway's right", source: Box::new(source) }),
    }
    finalizer(context, endpoint, false).await
}

/// Applies the objects, in their order.
///
/// # Errors
/// At the first that the server refuses or somebody else has.
pub async fn apply(context: &Context, objects: &[Built]) -> Result<(), Error> {
    for built in objects {
        context.applier.ensure(&context.client, built).await?;
    }
    Ok(())
}
