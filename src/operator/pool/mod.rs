//! GpuPool: certificates, broker, judges, rights, policies. Five steps, a file each.

pub mod apply;
pub mod build;
pub mod certificates;
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
use crate::api::GpuPool;

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

/// How often a pool's broker is asked how it is.
const LOOK: Duration = Duration::from_secs(20);
/// How soon what is on its way is looked at again.
const SOON: Duration = Duration::from_secs(2);

/// One pass over a pool.
///
/// # Errors
/// As each step says; the pass is repeated with growing waits.
pub async fn reconcile(pool: Arc<Guarded<GpuPool>>, context: Arc<Context>) -> Result<Action, Error> {
    let pool = match &pool.0 {
        Ok(pool) => pool,
        Err(invalid) => {
            context.unreadable::<GpuPool>(invalid).await;
            return Ok(Action::await_change());
        }
    };
    if pool.metadata.deletion_timestamp.is_some() {
        // What it owns goes with it.
        return Ok(Action::await_change());
    }
    let name = pool.name_any();
    let owner = names::owner(pool);
    let now = Timestamp::now();
    let mut facts =
        dereference::dereference(&context, &name, &pool.spec.allowed_namespaces, pool.spec.credentials()).await?;
    if let Some(uid) = &facts.stuck {
        apply::unstick(&context, pool, uid).await;
    }
    let valid = validate::validate(pool);
    let (checked, failed) = match valid {
        Err(error) => (Err(error), None),
        Ok(valid) => match carry_out(&context, &valid, &owner, &facts, now).await {
            Ok(ending) => {
                facts.ending_namespaces.extend(ending);
                (Ok(()), None)
            }
            Err(error) => (Ok(()), Some(error)),
        },
    };
    if facts.broker.is_none() && failed.is_none() && checked.is_ok() {
        facts =
            dereference::dereference(&context, &name, &pool.spec.allowed_namespaces, pool.spec.credentials()).await?;
    }
    let why = failed.as_ref().map(|e| (e.reason(), e.to_string()));
    let status = status::status(pool, &context.settings.namespace, &checked, why, &facts, now);
    if status::due(pool.status.as_ref(), &status) {
        let api: Api<GpuPool> = Api::all(context.client.clone());
        patch_status::<GpuPool>(&api, &name, &status).await.map_err(|e| Error::Status(Box::new(e)))?;
    }
    match failed {
        Some(error) => Err(error.into()),
        None if facts.judges.is_none() && checked.is_ok() && facts.credentials.usable() => Ok(Action::requeue(SOON)),
        None => Ok(Action::requeue(LOOK)),
    }
}

async fn carry_out(
    context: &Context,
    pool: &validate::ValidPool,
    owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference,
    facts: &dereference::Facts,
    now: Timestamp,
) -> Result<Vec<String>, apply::Error> {
    let authorities = apply::keys(context, &pool.name, owner, facts, now).await?;
    let bundle = authorities.bundle();
    let credentials = facts.credentials.keyed(&authorities.current.key);
    let facts = dereference::Facts { credentials, ..facts.clone() };
    let objects = build::build(pool, owner, &context.settings, &bundle, &facts)?;
    let ending = apply::objects(context, &objects).await?;
    apply::prune(&context.client, &pool.name, &objects).await?;
    Ok(ending)
}
