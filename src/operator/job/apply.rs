//! Carries out what was built for an OptimizationJob: makes it known to its broker, makes its objects, steers its pace,
//! fetches what is best, and takes leave. The fourth step.

use std::collections::BTreeMap;

use k8s_openapi::ByteString;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions, PropagationPolicy};
use serde_json::{Value, json};

use super::build::{Objects, parallelism, parts, queue};
use super::status::{promising, reaches};
use super::validate::ValidJob;
use crate::api::job::{BestKernels, OptimizationJobSpec};
use crate::api::{ModelEndpoint, OptimizationJob};
use crate::operator::context::{Context, Guarded};
use crate::operator::{apply, broker, finalizer, names, results};
use crate::wire::v1::JobFacts;

/// Why something couldn't be carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Broker(#[from] broker::Error),
    #[error(transparent)]
    Object(#[from] apply::Error),
    #[error("{what} can't be written: {source}")]
    Api { what: String, source: Box<kube::Error> },
    #[error("the best kernels can't be packed: {0}")]
    Pack(#[from] results::Error),
}

impl Error {
    /// One word for the condition.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Broker(broker::Error::Refused { .. }) => "BrokerRefused",
            Self::Broker(_) => "BrokerUnreachable",
            Self::Object(apply::Error::Taken { .. }) => "NameTaken",
            _ if self.no_namespace() => "NamespaceTerminating",
            Self::Object(_) | Self::Api { .. } => "ApplyFailed",
            Self::Pack(_) => "ResultsNotKept",
        }
    }

    /// Whether the job's namespace is being deleted, so that nothing can be made in it.
    fn no_namespace(&self) -> bool {
        match self {
            Self::Object(error) => error.no_namespace(),
            Self::Api { source, .. } => apply::no_namespace(source),
            Self::Broker(_) | Self::Pack(_) => false,
        }
    }
}

fn api(what: &str) -> impl FnOnce(kube::Error) -> Error {
    let what = what.to_owned();
    move |e| Error::Api { what, source: Box::new(e) }
}

/// What is to be done with the Job so that it follows the spec.
#[derive(Clone, Debug, PartialEq)]
pub enum Steer {
    Nothing,
    /// A merge patch.
    Change(Value),
    /// A queue admits whole Jobs: to be suspended, it leaves the queue, and is made anew on resumption. What is finished is
    /// the broker's to know.
    Remove,
}

/// Decides it. Only a change of the spec changes the Job: what others did to it in between (Kueue, a person) stays.
#[must_use]
pub fn steer(spec: &OptimizationJobSpec, batch: &Job) -> Steer {
    let completions = batch.spec.as_ref().and_then(|s| s.completions).unwrap_or(1);
    let annotation = |key: &str| batch.annotations().get(key).map(String::as_str);
    let suspend = spec.suspend.to_string();
    let pace = parallelism(spec, completions);
    if queue(spec).is_some() && spec.suspend {
        return Steer::Remove;
    }
    let mut change = json!({});
    if annotation(names::SUSPEND) != Some(&suspend) {
        change["metadata"]["annotations"][names::SUSPEND] = suspend.into();
        change["spec"]["suspend"] = spec.suspend.into();
    }
    if annotation(names::PARALLELISM) != Some(&pace.to_string()) {
        change["metadata"]["annotations"][names::PARALLELISM] = pace.to_string().into();
        change["spec"]["parallelism"] = pace.into();
    }
    if change.as_object().is_some_and(serde_json::Map::is_empty) { Steer::Nothing } else { Steer::Change(change) }
}

/// Whether a Job is this object's own.
#[must_use]
pub fn owns(job: &OptimizationJob, batch: &Job) -> bool {
    is_owned(job.metadata.uid.as_deref().unwrap_or_default(), batch)
}

fn is_owned(uid: &str, batch: &Job) -> bool {
    batch.owner_references().iter().any(|o| o.uid == uid)
}

/// Starts a job: every step may be repeated, and a crash between two leaves nothing that the next pass doesn't find.
///
/// # Errors
/// At the first step that fails.
pub async fn start(
    context: &Context,
    job: &OptimizationJob,
    valid: &ValidJob,
    objects: &Objects,
) -> Result<Job, Error> {
    finalizer(context, &job.metadata, true).await?;
    tell(context, valid).await?;
    keep(context, objects).await?;
    create(context, job, objects).await
}

/// Makes the job known to its broker.
///
/// # Errors
/// When the broker can't be reached or refuses.
pub async fn tell(context: &Context, valid: &ValidJob) -> Result<(), Error> {
    Ok(context.brokers.put_job(&valid.spec.judge.gpu_pool, parts(valid)).await?)
}

/// Keeps what the pods need as it is built.
///
/// # Errors
/// When it can't be written.
pub async fn keep(context: &Context, objects: &Objects) -> Result<(), Error> {
    for built in &objects.kept {
        context.shared.ensure(&context.applier, &context.client, built).await?;
    }
    Ok(())
}

/// Takes away what a job that goes has shared with others of its namespace, where there is no other.
///
/// # Errors
/// When it can't be deleted.
pub async fn leave(context: &Context, job: &Leaving) -> Result<(), Error> {
    let jobs = context.jobs.state();
    // Two that go at once are both still in what was watched: each has to know that the other needs nothing more.
    context.shared.left(job.uid(), |uid| jobs.iter().any(|j| j.uid().as_deref() == Some(uid)));
    let needed = |of: &Use<'_>| {
        let other = |j: &Guarded<OptimizationJob>| {
            j.namespace().as_deref() == Some(job.namespace())
                && j.uid().is_some_and(|uid| !context.shared.has_left(&uid))
        };
        context.jobs.state().iter().any(|j| other(j) && of.is_of(j))
    };
    let mut gone = Vec::new();
    for pool in &job.pools {
        let agents = names::agents(pool);
        gone.push((apply::Kind::ConfigMap, agents.clone(), Use::Pool(pool)));
        gone.push((apply::Kind::NetworkPolicy, agents, Use::Pool(pool)));
    }
    for endpoint in &job.endpoints {
        gone.push((apply::Kind::NetworkPolicy, names::to_gateway(endpoint), Use::Endpoint(endpoint)));
    }
    for (kind, name, of) in gone {
        context.shared.remove(&context.client, kind, job.namespace(), &name, || needed(&of)).await?;
    }
    Ok(())
}

/// What a shared object is for.
enum Use<'a> {
    Pool(&'a str),
    Endpoint(&'a str),
}

impl Use<'_> {
    /// Whether a job is of those that share it. One that can't be read may have pods that need it.
    fn is_of(&self, job: &Guarded<OptimizationJob>) -> bool {
        let Ok(OptimizationJob { spec, .. }) = &job.0 else { return true };
        match self {
            Self::Pool(pool) => spec.judge.gpu_pool == *pool,
            Self::Endpoint(name) => spec.policy.endpoint.as_ref().is_some_and(|p| p.name == *name),
        }
    }
}

/// Creates the Job. One that is there already is ours or in the way.
///
/// # Errors
/// When the name is another's, or the server refuses.
pub async fn create(context: &Context, job: &OptimizationJob, objects: &Objects) -> Result<Job, Error> {
    let namespace = job.namespace().unwrap_or_default();
    let name = job.name_any();
    let jobs: Api<Job> = Api::namespaced(context.client.clone(), &namespace);
    let what = format!("Job {name}");
    let value = serde_json::to_value(&objects.batch.object).unwrap_or_default();
    let batch: Job = serde_json::from_value(value).map_err(|source| apply::Error::Encode {
        kind: "Job".into(),
        name: name.clone(),
        source,
    })?;
    let parameters = PostParams { field_manager: Some(names::MANAGER.into()), ..PostParams::default() };
    match jobs.create(&parameters, &batch).await {
        Ok(batch) => Ok(batch),
        // A repeated request, or a pass that ended before it could say so.
        Err(kube::Error::Api(status)) if status.code == 409 => {
            let live = jobs.get_opt(&name).await.map_err(api(&what))?;
            match live {
                Some(live) if owns(job, &live) => Ok(live),
                _ => Err(apply::Error::Taken { kind: "Job".into(), name }.into()),
            }
        }
        Err(error) => Err(api(&what)(error)),
    }
}

/// Makes the Job follow the spec. `None`: it was taken away.
///
/// # Errors
/// When it can't be written.
pub async fn follow(context: &Context, job: &OptimizationJob, batch: Job) -> Result<Option<Job>, Error> {
    let namespace = job.namespace().unwrap_or_default();
    let jobs: Api<Job> = Api::namespaced(context.client.clone(), &namespace);
    let name = batch.name_any();
    let what = format!("Job {name}");
    match steer(&job.spec, &batch) {
        Steer::Nothing => Ok(Some(batch)),
        Steer::Change(change) => {
            let parameters = PatchParams { field_manager: Some(names::MANAGER.into()), ..PatchParams::default() };
            jobs.patch(&name, &parameters, &Patch::Merge(change)).await.map(Some).map_err(api(&what))
        }
        Steer::Remove => {
            remove(context, &namespace, &batch, PropagationPolicy::Background).await?;
            Ok(None)
        }
    }
}

/// Whether every task has reached the target, by its verdict.
///
/// # Errors
/// When the broker has no answer.
pub async fn reached(context: &Context, job: &OptimizationJob, facts: &JobFacts) -> Result<bool, Error> {
    let Some(target) = job.spec.target.as_ref().filter(|_| promising(&job.spec, facts)) else { return Ok(false) };
    for best in &facts.best {
        let uid = job.uid().unwrap_or_default();
        let result = context.brokers.result(&job.spec.judge.gpu_pool, &uid, &best.task).await?;
        if !reaches(target, &result.verdict_json) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a Job that isn't there may be made anew: not while the job is suspended, and where a target may have been
/// reached, which ends a job by taking its Job away, only once its broker has answered.
#[must_use]
pub fn anew(spec: &OptimizationJobSpec, said: Option<&Result<JobFacts, String>>) -> bool {
    !spec.suspend && (spec.target.is_none() || matches!(said, Some(Ok(_))))
}

/// Takes the Job of a job away that needs no more of its pods. It isn't suspended: in a queue `suspend` is Kueue's, which
/// would start it again. It is there until its pods are gone, so that a deletion waits for them.
///
/// # Errors
/// When it can't be deleted.
pub async fn stop(context: &Context, job: &OptimizationJob, batch: &Job) -> Result<(), Error> {
    if batch.metadata.deletion_timestamp.is_some() {
        return Ok(());
    }
    remove(context, &job.namespace().unwrap_or_default(), batch, PropagationPolicy::Foreground).await
}

/// Deletes a Job with its pods.
async fn remove(context: &Context, namespace: &str, batch: &Job, how: PropagationPolicy) -> Result<(), Error> {
    let jobs: Api<Job> = Api::namespaced(context.client.clone(), namespace);
    let name = batch.name_any();
    let parameters = DeleteParams {
        propagation_policy: Some(how),
        preconditions: Some(Preconditions { uid: batch.uid(), resource_version: None }),
        ..DeleteParams::default()
    };
    match jobs.delete(&name, &parameters).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(error) => Err(api(&format!("Job {name}"))(error)),
    }
}

/// Puts the finalizer on, or takes it away.
///
/// # Errors
/// When the object can't be written.
pub async fn finalizer(context: &Context, metadata: &ObjectMeta, on: bool) -> Result<(), Error> {
    let set = finalizer::set::<OptimizationJob>(&context.client, metadata, names::FINALIZER, on);
    set.await.map_err(api("the finalizer"))
}

/// A job that goes: what its metadata say, and who may know of it.
#[derive(Clone, Debug)]
pub struct Leaving {
    pub metadata: ObjectMeta,
    /// Pools whose broker may know it: its own, or all of them where nobody can read which.
    pub pools: Vec<String>,
    /// Endpoints that it may have used, likewise.
    pub endpoints: Vec<String>,
}

impl Leaving {
    /// One that can be read.
    #[must_use]
    pub fn of(job: &OptimizationJob) -> Self {
        Self {
            metadata: job.metadata.clone(),
            pools: vec![job.spec.judge.gpu_pool.clone()],
            endpoints: job.spec.policy.endpoint.iter().map(|p| p.name.clone()).collect(),
        }
    }

    /// One of which the metadata alone can be read.
    #[must_use]
    pub fn unread(context: &Context, metadata: &ObjectMeta) -> Self {
        let here = |e: &&std::sync::Arc<Guarded<ModelEndpoint>>| e.namespace() == metadata.namespace;
        Self {
            metadata: metadata.clone(),
            pools: context.pools.state().iter().map(|p| p.name_any()).collect(),
            endpoints: context.endpoints.state().iter().filter(here).map(|e| e.name_any()).collect(),
        }
    }

    fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    /// Its UID.
    #[must_use]
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

/// Ends a job that is being deleted: its Job with its pods, then its queue at the broker. Answers whether pods may be left.
///
/// # Errors
/// When the broker can't be told; the caller decides how long that is waited for.
pub async fn close(context: &Context, job: &Leaving) -> Result<bool, Error> {
    let name = job.name();
    let jobs: Api<Job> = Api::namespaced(context.client.clone(), job.namespace());
    let batch = jobs.get_opt(name).await.map_err(api(&format!("Job {name}")))?;
    let batch = batch.filter(|batch| is_owned(job.uid(), batch));
    if let Some(batch) = batch.as_ref().filter(|b| b.metadata.deletion_timestamp.is_none()) {
        // The Job is there for as long as a pod of it is.
        remove(context, job.namespace(), batch, PropagationPolicy::Foreground).await?;
    }
    // Each is told, also where another one can't be.
    let mut told = Ok(());
    for pool in &job.pools {
        told = told.and(context.brokers.close_job(pool, job.uid(), false).await);
    }
    told?;
    Ok(batch.is_some())
}

/// Puts the best kernels of an ended job into a ConfigMap, as many as fit.
///
/// # Errors
/// When the broker has no answer, or the ConfigMap can't be written.
pub async fn best(
    context: &Context,
    job: &OptimizationJob,
    owner: &OwnerReference,
    facts: &JobFacts,
) -> Result<Option<BestKernels>, Error> {
    let pool = &job.spec.judge.gpu_pool;
    let uid = job.uid().unwrap_or_default();
    let mut packed = results::Packed::default();
    for best in facts.best.iter().filter(|b| b.reward > 0).take(results::MOST_TASKS) {
        match context.brokers.result(pool, &uid, &best.task).await {
            Ok(result) => packed.add(&best.task, &result)?,
            Err(error @ broker::Error::Refused { .. }) => {
                tracing::warn!(job = job.name_any(), task = best.task, %error, "a result can't be had");
                packed.left_out += 1;
            }
            Err(error) => return Err(error.into()),
        }
    }
    packed.left_out += usize::try_from(facts.correct).unwrap_or(0).saturating_sub(packed.files.len() + packed.left_out);
    if packed.files.is_empty() {
        return Ok(None);
    }
    let name = names::best(&job.name_any());
    let kept = BestKernels {
        config_map: name.clone(),
        tasks: i32::try_from(packed.files.len()).unwrap_or(i32::MAX),
        left_out: i32::try_from(packed.left_out).unwrap_or(i32::MAX),
    };
    let files: BTreeMap<String, ByteString> = packed.files.into_iter().map(|(k, v)| (k, ByteString(v))).collect();
    let map = ConfigMap {
        metadata: ObjectMeta {
            name: Some(name),
            namespace: job.namespace(),
            labels: Some(names::labels("best", &job.name_any())),
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        binary_data: Some(files),
        ..ConfigMap::default()
    };
    let mut value = serde_json::to_value(&map).unwrap_or_default();
    value["apiVersion"] = "v1".into();
    value["kind"] = "ConfigMap".into();
    context.applier.ensure(&context.client, &apply::Built::new(value)?).await?;
    Ok(Some(kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::operator::job::validate::tests::job;

    fn batch(suspended: &str, parallelism: &str, live: bool) -> Job {
        serde_json::from_value(json!({
            "metadata": { "name": "demo", "annotations": { names::SUSPEND: suspended, names::PARALLELISM: parallelism } },
            "spec": { "completions": 10, "suspend": live, "template": {} },
        }))
        .unwrap()
    }

    #[test]
    fn the_job_follows_the_spec_and_what_others_did_stays() {
        let plain = job(&json!({})).spec;
        let held = job(&json!({ "suspend": true })).spec;
        let slow = job(&json!({ "agent": { "parallelism": 2 } })).spec;
        let queued = job(&json!({ "suspend": true, "agent": { "scheduling": { "queueName": "gpus" } } })).spec;
        assert_eq!(steer(&plain, &batch("false", "10", false)), Steer::Nothing);
        assert_eq!(steer(&plain, &batch("false", "10", true)), Steer::Nothing, "somebody else suspended it");
        assert_eq!(
            steer(&held, &batch("false", "10", false)),
            Steer::Change(
                json!({ "metadata": { "annotations": { names::SUSPEND: "true" } }, "spec": { "suspend": true } })
            )
        );
        assert_eq!(
            steer(&slow, &batch("false", "10", false)),
            Steer::Change(
                json!({ "metadata": { "annotations": { names::PARALLELISM: "2" } }, "spec": { "parallelism": 2 } })
            )
        );
        assert_eq!(steer(&queued, &batch("false", "10", false)), Steer::Remove);
    }

    #[test]
    fn a_job_that_may_have_reached_its_target_is_not_made_anew_while_its_broker_is_silent() {
        let plain = job(&json!({})).spec;
        let held = job(&json!({ "suspend": true })).spec;
        let aimed = job(&json!({ "target": { "speedup": 2.0 }, "agent": { "attempts": 3 } })).spec;
        let (said, silent) = (Ok(JobFacts::default()), Err("unreachable".to_owned()));
        assert!(anew(&plain, Some(&silent)) && anew(&plain, None) && !anew(&held, Some(&said)));
        assert!(anew(&aimed, Some(&said)) && !anew(&aimed, Some(&silent)) && !anew(&aimed, None));
    }

    #[test]
    fn what_a_job_that_cannot_be_read_may_share_stays() {
        let of = |value: Value| -> Guarded<OptimizationJob> { serde_json::from_value(value).unwrap() };
        let read = of(serde_json::to_value(job(&json!({}))).unwrap());
        assert!(Use::Pool("default").is_of(&read) && !Use::Pool("other").is_of(&read));
        let unread = of(json!({ "metadata": { "name": "new" }, "spec": { "swarm": true } }));
        assert!(Use::Pool("other").is_of(&unread) && Use::Endpoint("gpt").is_of(&unread));
    }

    #[test]
    fn another_objects_job_of_the_same_name_is_not_ours() {
        let job = job(&json!({}));
        let mut other = batch("false", "10", false);
        assert!(!owns(&job, &other));
        other.metadata.owner_references = Some(vec![names::owner(&job)]);
        assert!(owns(&job, &other));
    }
}
