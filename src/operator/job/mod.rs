//! OptimizationJob: known to its broker, carried out by an Indexed Job, told of in its status. Five steps, a file each.

pub mod apply;
pub mod build;
pub mod dereference;
pub mod status;
pub mod validate;

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, Preconditions};
use kube::runtime::controller::Action;
use kube::{Resource, ResourceExt};

use super::context::{Context, Found, Guarded, patch_status, reference};
use super::{finalizer, names};
use crate::api::OptimizationJob;
use crate::api::job::{MANAGER, OptimizationJobStatus};
use apply::Leaving;
use status::{Progress, Seen};

/// Why a reconciliation is tried again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Dereference(#[from] dereference::Error),
    #[error(transparent)]
    Apply(#[from] apply::Error),
    #[error("the status can't be written: {0}")]
    Status(Box<kube::Error>),
    #[error("the job can't be deleted after its time: {0}")]
    Expire(Box<kube::Error>),
    #[error("the controllers are ending")]
    Ending,
}

/// How often a running job's broker is asked for figures.
const FIGURES: Duration = Duration::from_secs(30);
/// How often what waits is looked at, beside the events that end the wait.
const WAIT: Duration = Duration::from_secs(60);
/// How soon what failed by a passing fault is tried again.
const AGAIN: Duration = Duration::from_secs(5);
/// How long a broker that doesn't answer, or a pod that doesn't go, holds up a deletion.
const GIVE_UP: i64 = 120;

/// One pass over a job.
///
/// # Errors
/// As each step says; the pass is repeated with growing waits.
pub async fn reconcile(job: Arc<Guarded<OptimizationJob>>, context: Arc<Context>) -> Result<Action, Error> {
    let job = match &job.0 {
        Ok(job) => job,
        Err(invalid) if finalizer::waits(&invalid.metadata, names::FINALIZER) => {
            context.pools.wait_until_ready().await.map_err(|_| Error::Ending)?;
            context.endpoints.wait_until_ready().await.map_err(|_| Error::Ending)?;
            return finalize(&context, &Leaving::unread(&context, &invalid.metadata), Timestamp::now()).await;
        }
        Err(invalid) => {
            context.unreadable::<OptimizationJob>(invalid).await;
            return Ok(Action::await_change());
        }
    };
    if job.spec.managed_by.as_deref().is_some_and(|m| m != MANAGER) {
        return Ok(Action::await_change());
    }
    context.pools.wait_until_ready().await.map_err(|_| Error::Ending)?;
    context.endpoints.wait_until_ready().await.map_err(|_| Error::Ending)?;
    let now = Timestamp::now();
    if job.metadata.deletion_timestamp.is_some() {
        return finalize(&context, &Leaving::of(job), now).await;
    }
    if status::over(job.status.as_ref()) {
        return expire(&context, job, now).await;
    }
    let facts = dereference::dereference(&context, job).await?;
    let (seen, after) = pass(&context, job, facts).await;
    // Apart from passes that failed: this one ends with a status.
    let blocked = format!("{}/blocked", job.uid().unwrap_or_default());
    let after = if matches!(seen, Seen::Blocked { .. }) {
        context.backoff.failed(&blocked).min(WAIT)
    } else {
        context.backoff.forget(&blocked);
        after
    };
    let new = status::status(job, &seen, now);
    write(&context, job, &new, now).await?;
    if status::over(Some(&new)) {
        return Ok(Action::requeue(Duration::from_secs(1)));
    }
    Ok(Action::requeue(after))
}

/// Does what is to be done, and says what was seen and when to look again.
async fn pass(context: &Context, job: &OptimizationJob, facts: dereference::Facts) -> (Seen, Duration) {
    let blocked = |error: &apply::Error| (Seen::Blocked { reason: error.reason(), message: error.to_string() }, AGAIN);
    let owner = names::owner(job);
    if !facts.started {
        let valid = match validate::validate(job, &facts) {
            Err(error) => return (Seen::Refused(error), WAIT),
            Ok(valid) => valid,
        };
        if job.spec.suspend {
            return (Seen::Held, WAIT);
        }
        let objects = match build::build(&valid, &owner, &context.settings) {
            Err(error) => return blocked(&error.into()),
            Ok(objects) => objects,
        };
        return match apply::start(context, job, &valid, &objects).await {
            Err(error) => blocked(&error),
            Ok(batch) => {
                // With it the first status is whole, and no second one follows until there is progress.
                let said = context.brokers.job(&valid.spec.judge.gpu_pool, &valid.uid).await.ok().map(Ok);
                let lacks = facts.lacks();
                (Seen::Started(Box::new(Progress { batch: Some(batch), said, lacks, ..Progress::default() })), FIGURES)
            }
        };
    }
    let mut progress = Progress {
        said: facts.said.clone(),
        trouble: facts.trouble.clone(),
        lacks: facts.lacks(),
        ..Progress::default()
    };
    let batch = match &facts.batch {
        Some(batch) if !apply::owns(job, batch) => {
            let error = super::apply::Error::Taken { kind: "Job".into(), name: job.name_any() };
            return blocked(&error.into());
        }
        batch => batch.clone(),
    };
    if let Some(batch) = &batch
        && status::end(batch, job.spec.agent.attempts).is_some()
    {
        progress.batch = Some(batch.clone());
        match finish(context, job, &owner, &facts).await {
            Ok(best) => progress.best = best,
            Err(error) => progress.said = Some(Err(error.to_string())),
        }
        return (Seen::Started(Box::new(progress)), AGAIN);
    }
    // Asked of a job without a Job, too: it may have been taken away for this, by a pass that ended before it could say so.
    if let Some(Ok(said)) = &facts.said {
        match apply::reached(context, job, said).await {
            Ok(false) => {}
            Ok(true) => match stop(context, job, &owner, &facts, batch.as_ref()).await {
                Ok(best) => {
                    let progress = Progress { best, reached: true, batch, ..progress };
                    return (Seen::Started(Box::new(progress)), AGAIN);
                }
                Err(error) => return blocked(&error),
            },
            Err(error) => progress.said = Some(Err(error.to_string())),
        }
    }
    if facts.source.is_some() {
        // The broker doesn't know the job any more: its ledger is new.
        let told = match validate::validate(job, &facts) {
            Ok(valid) => apply::tell(context, &valid).await.map_err(|e| e.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = told {
            progress.said =
                Some(Err(format!("the broker has lost its ledger, and can't be told of the job again: {why}")));
        }
    }
    // What the pods need is kept while they run; a pool that is away leaves it as it is.
    let objects = match validate::validate_started(job, &facts) {
        Ok(valid) => match build::build(&valid, &owner, &context.settings) {
            Err(error) => return blocked(&error.into()),
            Ok(objects) => Some(objects),
        },
        Err(error) => {
            progress.said = Some(Err(error.to_string()));
            None
        }
    };
    if let Some(objects) = &objects
        && !job.spec.suspend
        && let Err(error) = apply::keep(context, objects).await
    {
        return blocked(&error);
    }
    let batch = match (batch, &objects) {
        (Some(batch), _) => apply::follow(context, job, batch).await,
        // Taken away in a queue, or deleted by somebody: what is finished is the broker's to know, so it may be made anew.
        (None, Some(objects)) if apply::anew(&job.spec, progress.said.as_ref()) => {
            apply::create(context, job, objects).await.map(Some)
        }
        (None, _) => Ok(None),
    };
    match batch {
        Err(error) => blocked(&error),
        Ok(batch) => {
            progress.batch = batch;
            (Seen::Started(Box::new(progress)), FIGURES)
        }
    }
}

/// Every task has reached its target: the Job goes for good with its pods, and the job ends.
async fn stop(
    context: &Context,
    job: &OptimizationJob,
    owner: &OwnerReference,
    facts: &dereference::Facts,
    batch: Option<&Job>,
) -> Result<Option<crate::api::job::BestKernels>, apply::Error> {
    if let Some(batch) = batch {
        apply::stop(context, job, batch).await?;
    }
    finish(context, job, owner, facts).await
}

/// The job has ended: the best kernels are kept, the broker is told.
async fn finish(
    context: &Context,
    job: &OptimizationJob,
    owner: &OwnerReference,
    facts: &dereference::Facts,
) -> Result<Option<crate::api::job::BestKernels>, apply::Error> {
    let pool = job.spec.judge.gpu_pool.clone();
    if facts.pool == Found::Missing {
        // Its results have gone with it; that is told, and not waited for.
        return Ok(None);
    }
    let Some(Ok(said)) = &facts.said else { return Ok(None) };
    let best = apply::best(context, job, owner, said).await?;
    // Nothing more is begun; what it came to is shown until the object is deleted.
    context.brokers.close_job(&pool, &job.uid().unwrap_or_default(), true).await?;
    Ok(best)
}

/// Writes the status where that is due, and tells the news.
async fn write(
    context: &Context,
    job: &OptimizationJob,
    new: &OptimizationJobStatus,
    now: Timestamp,
) -> Result<(), Error> {
    let uid = job.uid().unwrap_or_default();
    let last = context.written.lock().unwrap_or_else(PoisonError::into_inner).get(&uid).copied();
    if !status::due(job.status.as_ref(), new, last, now) {
        return Ok(());
    }
    let api: Api<OptimizationJob> = Api::namespaced(context.client.clone(), &job.namespace().unwrap_or_default());
    patch_status(&api, &job.name_any(), new).await.map_err(|e| Error::Status(Box::new(e)))?;
    context.written.lock().unwrap_or_else(PoisonError::into_inner).insert(uid, now);
    let about = job.object_ref(&());
    for (reason, message, bad) in status::news(job.status.as_ref(), new) {
        context.event(&about, bad, &reason, "Reconcile", &message).await;
    }
    Ok(())
}

/// The object is being deleted: its pods go, its broker is told, and the finalizer is taken away.
async fn finalize(context: &Context, job: &Leaving, now: Timestamp) -> Result<Action, Error> {
    if !finalizer::has(&job.metadata, names::FINALIZER) {
        return Ok(Action::await_change());
    }
    let since = job.metadata.deletion_timestamp.as_ref().map_or(now, |t| t.0);
    let gone = job.pools.iter().all(|pool| context.pool(pool) == Found::Missing);
    let patient = now.as_second() - since.as_second() < GIVE_UP;
    match apply::close(context, job).await {
        // What they share with others, their NetworkPolicy above all, stays until they are gone.
        Ok(true) if patient => return Ok(Action::requeue(AGAIN)),
        Ok(_) => {}
        Err(error) => {
            if !gone && patient {
                tracing::info!(job = job.name(), %error, "a deletion waits for the broker");
                return Ok(Action::requeue(AGAIN));
            }
            tracing::warn!(job = job.name(), %error, "a job goes without its broker having been told");
            let note = format!("deleted without the broker having been told: {error}");
            let about = reference::<OptimizationJob>(&job.metadata);
            context.event(&about, true, "BrokerNotTold", "Delete", &note).await;
        }
    }
    if let Err(error) = apply::leave(context, job).await {
        tracing::warn!(job = job.name(), %error, "what the last job of a namespace shared can't be taken away");
    }
    apply::finalizer(context, &job.metadata, false).await?;
    context.written.lock().unwrap_or_else(PoisonError::into_inner).remove(job.uid());
    Ok(Action::await_change())
}

/// The job is over: it stays for as long as the spec says.
async fn expire(context: &Context, job: &OptimizationJob, now: Timestamp) -> Result<Action, Error> {
    let Some(ttl) = job.spec.ttl_seconds_after_finished else { return Ok(Action::await_change()) };
    let ended = job.status.as_ref().and_then(|s| s.completion_time.as_ref()).map_or(now, |t| t.0);
    let left = ended.as_second() + i64::from(ttl) - now.as_second();
    if let Ok(left) = u64::try_from(left)
        && left > 0
    {
        return Ok(Action::requeue(Duration::from_secs(left)));
    }
    let api: Api<OptimizationJob> = Api::namespaced(context.client.clone(), &job.namespace().unwrap_or_default());
    let parameters = DeleteParams {
        preconditions: Some(Preconditions { uid: job.uid(), resource_version: None }),
        ..DeleteParams::default()
    };
    match api.delete(&job.name_any(), &parameters).await {
        Ok(_) => Ok(Action::await_change()),
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(Action::await_change()),
        Err(error) => Err(Error::Expire(Box::new(error))),
    }
}
