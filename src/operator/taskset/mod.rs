//! TaskSet: counted, addressed by its content, and what is no task told of. Five steps, of which two have nothing to do:
//! a set has no objects.

pub mod dereference;
pub mod status;

use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::Api;
use kube::runtime::controller::Action;

use super::context::{Context, Guarded, patch_status};
use crate::api::TaskSet;

/// Why a reconciliation is tried again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Dereference(#[from] super::job::dereference::Error),
    #[error("the status can't be written: {0}")]
    Status(Box<kube::Error>),
}

/// How often what is quiet is looked at.
const QUIET: Duration = Duration::from_secs(600);

/// One pass over a set.
///
/// # Errors
/// When the API server can't be asked; the pass is repeated with growing waits.
pub async fn reconcile(set: Arc<Guarded<TaskSet>>, context: Arc<Context>) -> Result<Action, Error> {
    let set = match &set.0 {
        Ok(set) => set,
        Err(invalid) => {
            context.unreadable::<TaskSet>(invalid).await;
            return Ok(Action::await_change());
        }
    };
    let (name, namespace) = (set.name_any(), set.namespace().unwrap_or_default());
    let maps = dereference::dereference(&context.client, &namespace, &set.spec).await?;
    let status = status::status(set, maps.as_deref(), Timestamp::now());
    if set.status.as_ref() != Some(&status) {
        let api: Api<TaskSet> = Api::namespaced(context.client.clone(), &namespace);
        patch_status(&api, &name, &status).await.map_err(|e| Error::Status(Box::new(e)))?;
    }
    Ok(Action::requeue(QUIET))
}
