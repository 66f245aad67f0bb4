//! ModelEndpoint: its gateway, which has the key mounted so that the operator needs no right to read it. Five steps.

pub mod apply;
pub mod build;
pub mod dereference;
pub mod status;
pub mod validate;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::controller::Action;

use super::context::{Context, Guarded, patch_status};
use super::names;
use crate::api::ModelEndpoint;

/// Why a reconciliation is tried again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Dereference(#[from] dereference::Error),
    #[error(transparent)]
    Apply(#[from] apply::Error),
    #[error("the status can't be written: {0}")]
    Status(Box<kube::Error>),
}

/// How often what is quiet is looked at.
const QUIET: Duration = Duration::from_secs(300);

/// One pass over an endpoint.
///
/// # Errors
/// As each step says; the pass is repeated with growing waits.
pub async fn reconcile(endpoint: Arc<Guarded<ModelEndpoint>>, context: Arc<Context>) -> Result<Action, Error> {
    let endpoint = match &endpoint.0 {
        Ok(endpoint) => endpoint,
        Err(invalid) if invalid.metadata.deletion_timestamp.is_some() => {
            apply::leave(&context, &invalid.metadata).await?;
            return Ok(Action::await_change());
        }
        Err(invalid) => {
            context.unreadable::<ModelEndpoint>(invalid).await;
            return Ok(Action::await_change());
        }
    };
    if endpoint.metadata.deletion_timestamp.is_some() {
        apply::leave(&context, &endpoint.metadata).await?;
        return Ok(Action::await_change());
    }
    let (name, namespace) = (endpoint.name_any(), endpoint.namespace().unwrap_or_default());
    let mut failed = None;
    let checked = match validate::validate(endpoint) {
        Err(error) => Err(error),
        Ok(valid) => {
            // Only what has a gateway has something to be taken back.
            apply::finalizer(&context, &endpoint.metadata, true).await?;
            let objects = build::build(&valid, &names::owner(endpoint), &context.settings);
            let applied = match objects {
                Ok(objects) => apply::apply(&context, &objects).await,
                Err(error) => Err(error.into()),
            };
            failed = applied.err();
            Ok(())
        }
    };
    let facts = dereference::dereference(&context, &namespace, &name).await?;
    let why = failed.as_ref().map(|e| (e.reason(), e.to_string()));
    let status = status::status(endpoint, &checked, why, &facts, Timestamp::now());
    if endpoint.status.as_ref() != Some(&status) {
        let api: Api<ModelEndpoint> = Api::namespaced(context.client.clone(), &namespace);
        patch_status(&api, &name, &status).await.map_err(|e| Error::Status(Box::new(e)))?;
    }
    match failed {
        Some(error) if !error.no_namespace() => Err(error.into()),
        _ => Ok(Action::requeue(QUIET)),
    }
}
