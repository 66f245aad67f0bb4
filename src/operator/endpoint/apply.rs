//! Makes an endpoint's gateway what was built. The fourth step.

use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams};

use super::build::binding_name;
use crate::api::ModelEndpoint;
use crate::operator::apply::{self, Built};
use crate::operator::context::Context;
use crate::operator::finalizer;

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

impl Error {
    /// One word for the condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        if self.no_namespace() { "NamespaceTerminating" } else { "ApplyFailed" }
    }

    /// Whether the endpoint's namespace is being deleted: it goes with it, and trying again changes nothing.
    #[must_use]
    pub fn no_namespace(&self) -> bool {
        matches!(self, Self::Object(error) if error.no_namespace())
    }
}

/// Puts the finalizer on, or takes it away.
///
/// # Errors
/// When the object can't be written.
pub async fn finalizer(context: &Context, metadata: &ObjectMeta, on: bool) -> Result<(), Error> {
    let set = finalizer::set::<ModelEndpoint>(&context.client, metadata, FINALIZER, on);
    set.await.map_err(|source| Error::Api { what: "the finalizer", source: Box::new(source) })
}

/// Takes back what doesn't go with the endpoint. Its metadata are enough: the name of the gateway's right is made of them.
///
/// # Errors
/// When it can't be deleted.
pub async fn leave(context: &Context, metadata: &ObjectMeta) -> Result<(), Error> {
    if !finalizer::has(metadata, FINALIZER) {
        return Ok(());
    }
    let api: Api<ClusterRoleBinding> = Api::all(context.client.clone());
    let word = |text: &Option<String>| text.clone().unwrap_or_default();
    let name = binding_name(&word(&metadata.namespace), &word(&metadata.name));
    match api.delete(&name, &DeleteParams::default()).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        Err(source) => return Err(Error::Api { what: "the gateway's right", source: Box::new(source) }),
    }
    finalizer(context, metadata, false).await
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
