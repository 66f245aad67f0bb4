//! Reads how an endpoint's gateway is. The first step.

use k8s_openapi::api::apps::v1::Deployment;
use kube::api::Api;

use crate::operator::context::Context;
use crate::operator::names;

/// Why it can't be read.
#[derive(Debug, thiserror::Error)]
#[error("the API server can't be asked for the gateway: {source}")]
pub struct Error {
    source: Box<kube::Error>,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    pub gateway: Option<Deployment>,
}

/// Reads it. Never the key: its Secret is mounted, and whether it is there the pods tell.
///
/// # Errors
/// When the API server can't be asked.
pub async fn dereference(context: &Context, namespace: &str, endpoint: &str) -> Result<Facts, Error> {
    let api: Api<Deployment> = Api::namespaced(context.client.clone(), namespace);
    let gateway = api.get_opt(&names::gateway(endpoint)).await.map_err(|e| Error { source: Box::new(e) })?;
    Ok(Facts { gateway })
}
