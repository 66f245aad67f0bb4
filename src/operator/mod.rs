//! The operator: custom resources in, pods and the rest out, status back. It holds nothing that it couldn't rebuild.
//!
//! ```text
//!  GpuPool ----------> pool       certificates, broker, judges, rights, policies
//!  ModelEndpoint ----> endpoint   gateway
//!  TaskSet ----------> taskset    its status
//!  OptimizationJob --> job        known to its broker, NetworkPolicy, Indexed Job, results, status
//! ```
//! Every controller is the same five steps, a file each: dereference (read other objects) -> validate (pure: spec to a
//! checked type) -> build (pure: checked type to objects) -> apply (server-side apply, one field manager) -> status (pure:
//! what was observed to conditions; one patch). Only the first and the fourth take a client.

pub mod apply;
pub mod backoff;
pub mod broker;
pub mod conditions;
pub mod context;
pub mod endpoint;
pub mod fetch;
pub mod finalizer;
pub mod job;
pub mod lease;
pub mod metrics;
pub mod names;
pub mod pods;
pub mod pool;
pub mod results;
pub mod serve;
pub mod taskset;

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::api::{Api, PartialObjectMeta};
use kube::runtime::controller::{Action, Config};
use kube::runtime::events::{Recorder, Reporter};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::runtime::{Controller, watcher};
use kube::{Client, Resource, ResourceExt};
use tokio::sync::watch;

use crate::api::{GpuPool, ModelEndpoint, OptimizationJob, TaskSet};
use context::{Context, Guarded, Settings};
use metrics::Metrics;

/// What the role is started with.
#[derive(Clone, Debug)]
pub struct Arguments {
    pub settings: Settings,
    /// Token of the audience `kernelfleet-broker`.
    pub broker_token_file: PathBuf,
    pub listen: SocketAddr,
    /// Name of the Lease; `None` where nobody else may be running.
    pub lease: Option<String>,
    /// Unlike that of any other replica.
    pub identity: String,
    /// Reconciliations of one kind at once.
    pub workers: u16,
}

/// Why the operator ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the API server can't be reached: {0}. Where does the kubeconfig point, and does its user have the rights of the chart's ClusterRole?"
    )]
    Client(Box<kube::Error>),
    #[error("no configuration for an API server: {0}. In a pod its service account is used, elsewhere KUBECONFIG")]
    Config(#[from] kube::config::InferConfigError),
    #[error(
        "the API server doesn't know {0}: apply the definitions first (kernelfleet crds | kubectl apply -f -, or the chart)"
    )]
    Definition(String),
    #[error("{listen} can't be listened on: {source}")]
    Listen { listen: SocketAddr, source: std::io::Error },
    #[error("metrics can't be registered: {0}")]
    Metrics(#[from] prometheus::Error),
    #[error("the lease was lost; another replica goes on")]
    Lost,
    #[error("signals can't be waited for: {0}")]
    Signal(std::io::Error),
    #[error("the event loop can't be started: {0}")]
    Runtime(std::io::Error),
}

/// Runs the operator until it is told to stop, or loses its lease.
///
/// # Errors
/// When it can't start, or its lease is lost.
pub fn run(arguments: Arguments) -> Result<(), Error> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(Error::Runtime)?;
    runtime.block_on(main(arguments))
}

async fn main(arguments: Arguments) -> Result<(), Error> {
    let mut config = kube::Config::infer().await?;
    config.read_timeout = Some(Duration::from_secs(295));
    config.connect_timeout = Some(Duration::from_secs(10));
    let client = Client::try_from(config).map_err(|e| Error::Client(Box::new(e)))?;
    let metrics = Metrics::new()?;
    let ready = serve::Ready::default();
    let mut server = tokio::spawn(serve::serve(arguments.listen, metrics.clone(), ready.clone()));
    let listen = arguments.listen;
    let stop = stop_signal()?;
    let work = async {
        defined::<OptimizationJob>(&client).await?;
        defined::<GpuPool>(&client).await?;
        defined::<ModelEndpoint>(&client).await?;
        defined::<TaskSet>(&client).await?;
        ready.set();
        lead(&arguments, client, metrics, stop).await
    };
    tokio::select! {
        end = work => end,
        served = &mut server => {
            let source = served.map_or_else(|e| std::io::Error::other(e.to_string()), |s| {
                s.err().unwrap_or_else(|| std::io::Error::other("the server ended"))
            });
            Err(Error::Listen { listen, source })
        }
    }
}

/// A channel that says `true` once the process is to end.
fn stop_signal() -> Result<watch::Receiver<bool>, Error> {
    use tokio::signal::unix::{SignalKind, signal};
    let (send, receive) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate()).map_err(Error::Signal)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Error::Signal)?;
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping");
        let _ = send.send(true);
    });
    Ok(receive)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    let _ = stop.wait_for(|s| *s).await;
}

/// Whether the API server knows a kind; asked until it can be reached.
async fn defined<K>(client: &Client) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let one = kube::api::ListParams::default().limit(1);
    loop {
        match api.list_metadata(&one).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => {
                return Err(Error::Definition(K::kind(&()).into_owned()));
            }
            Err(error @ kube::Error::Api(_)) => return Err(Error::Client(Box::new(error))),
            Err(error) => {
                tracing::warn!(%error, "the API server can't be reached, trying again");
                tokio::time::sleep(Duration::from_secs(2)).await;
            }
        }
    }
}

/// Waits for the lease, works while it is held, and gives it back.
async fn lead(
    arguments: &Arguments,
    client: Client,
    metrics: Metrics,
    stop: watch::Receiver<bool>,
) -> Result<(), Error> {
    let Some(lease) = &arguments.lease else {
        metrics.lead(true);
        controllers(arguments, client, metrics, stop).await;
        return Ok(());
    };
    let mut elector = lease::Elector::new(client.clone(), &arguments.settings.namespace, lease, &arguments.identity);
    tokio::select! {
        () = elector.acquire() => {}
        () = stopped(stop.clone()) => return Ok(()),
    }
    metrics.lead(true);
    let release = lease::Elector::new(client.clone(), &arguments.settings.namespace, lease, &arguments.identity);
    // A task of its own: whatever the controllers are at, the lease is renewed beside it.
    let mut keeper = tokio::spawn(async move { elector.keep().await });
    let lost = tokio::select! {
        _ = &mut keeper => true,
        () = controllers(arguments, client, metrics.clone(), stop) => false,
    };
    keeper.abort();
    metrics.lead(false);
    if lost {
        // Whatever was under way ends with the process: another replica has begun.
        return Err(Error::Lost);
    }
    release.release().await;
    Ok(())
}

/// Runs every controller until they are told to stop; each ends what it is at.
async fn controllers(arguments: &Arguments, client: Client, metrics: Metrics, stop: watch::Receiver<bool>) {
    let ours = || watcher::Config::default().labels(&format!("app.kubernetes.io/managed-by={}", names::MANAGER));
    let config = || Config::default().concurrency(arguments.workers).debounce(Duration::from_millis(300));
    let all = watcher::Config::default;

    let jobs = Controller::new(Api::<Guarded<OptimizationJob>>::all(client.clone()), all());
    let pools = Controller::new(Api::<Guarded<GpuPool>>::all(client.clone()), all());
    let endpoints = Controller::new(Api::<Guarded<ModelEndpoint>>::all(client.clone()), all());
    let sets = Controller::new(Api::<Guarded<TaskSet>>::all(client.clone()), all());
    let (job_store, pool_store, set_store) = (jobs.store(), pools.store(), sets.store());

    let reporter = Reporter { controller: names::MANAGER.into(), instance: Some(arguments.identity.clone()) };
    let context = Arc::new(Context {
        client: client.clone(),
        settings: arguments.settings.clone(),
        brokers: broker::Brokers::new(
            client.clone(),
            &arguments.settings.namespace,
            arguments.broker_token_file.clone(),
        ),
        applier: apply::Applier::default(),
        shared: apply::Shared::default(),
        backoff: backoff::Backoff::default(),
        metrics,
        recorder: Recorder::new(client.clone(), reporter),
        pools: pool_store,
        endpoints: endpoints.store(),
        jobs: job_store.clone(),
        troubles: context::Troubles::default(),
        written: Mutex::new(HashMap::new()),
    });

    let owned = client.clone();
    // Tasks may lie in any ConfigMap; of what is in them nothing is held.
    let maps = || Api::<PartialObjectMeta<ConfigMap>>::all(client.clone());
    // What a pool owns is in a namespace and the pool is not, which `owns` doesn't see.
    let pools = pools
        .watches(Api::<PartialObjectMeta<StatefulSet>>::all(owned.clone()), ours(), |object| pool_of(&object))
        .watches(Api::<PartialObjectMeta<Service>>::all(owned.clone()), ours(), |object| pool_of(&object))
        .watches(Api::<PartialObjectMeta<NetworkPolicy>>::all(owned.clone()), ours(), |object| pool_of(&object))
        .with_config(config())
        .graceful_shutdown_on(stopped(stop.clone()))
        .run(
            |object, context| watched("gpupool", object.clone(), pool::reconcile(object, context.clone()), context),
            retry::<GpuPool, _>,
            context.clone(),
        )
        .for_each(|_| async {});
    let endpoints = endpoints
        .owns(Api::<Deployment>::all(owned.clone()), ours())
        .with_config(config())
        .graceful_shutdown_on(stopped(stop.clone()))
        .run(
            |object, context| {
                watched("modelendpoint", object.clone(), endpoint::reconcile(object, context.clone()), context)
            },
            retry::<ModelEndpoint, _>,
            context.clone(),
        )
        .for_each(|_| async {});
    let users = set_store.clone();
    let sets = sets
        .watches(maps(), all(), move |map| sets_of(&users, &map))
        .with_config(config())
        .graceful_shutdown_on(stopped(stop.clone()))
        .run(
            |object, context| watched("taskset", object.clone(), taskset::reconcile(object, context.clone()), context),
            retry::<TaskSet, _>,
            context.clone(),
        )
        .for_each(|_| async {});
    let (of_pool, of_endpoint, of_set) = (job_store.clone(), job_store.clone(), job_store);
    let (of_map, of_policy) = (context.clone(), context.clone());
    let jobs = jobs
        .owns(Api::<Job>::all(owned.clone()), ours())
        .watches(Api::<PartialObjectMeta<NetworkPolicy>>::all(owned.clone()), ours(), move |policy| {
            sharing(&of_policy, &policy)
        })
        .watches(maps(), all(), move |map| jobs_of_map(&of_map, &set_store, &map))
        .watches(Api::<Guarded<GpuPool>>::all(owned.clone()), all(), move |pool| {
            let name = pool.name_any();
            waiting(&of_pool, |job| job.spec.judge.gpu_pool == name)
        })
        .watches(Api::<Guarded<ModelEndpoint>>::all(owned.clone()), all(), move |endpoint| {
            let (namespace, name) = (endpoint.namespace(), endpoint.name_any());
            waiting(&of_endpoint, |job| {
                job.namespace() == namespace && job.spec.policy.endpoint.as_ref().is_some_and(|p| p.name == name)
            })
        })
        .watches(Api::<Guarded<TaskSet>>::all(owned.clone()), all(), move |set| {
            let (namespace, name) = (set.namespace(), set.name_any());
            waiting(&of_set, |job| {
                job.namespace() == namespace && job.spec.tasks.task_set.as_ref().is_some_and(|t| t.name == name)
            })
        })
        .with_config(config())
        .graceful_shutdown_on(stopped(stop))
        .run(
            |object, context| {
                watched("optimizationjob", object.clone(), job::reconcile(object, context.clone()), context)
            },
            retry::<OptimizationJob, _>,
            context,
        )
        .for_each(|_| async {});
    // A task each: who has many objects holds up nobody else.
    let tasks = [tokio::spawn(pools), tokio::spawn(endpoints), tokio::spawn(sets), tokio::spawn(jobs)];
    futures::future::join_all(tasks).await;
}

/// The pool that owns an object.
fn pool_of(object: &impl ResourceExt) -> Option<ObjectRef<Guarded<GpuPool>>> {
    let owner = object.owner_references().iter().find(|o| o.kind == GpuPool::kind(&()))?;
    Some(ObjectRef::new(&owner.name))
}

/// Jobs that haven't started and fulfil a condition: what they wait for may have come.
fn waiting(
    jobs: &Store<Guarded<OptimizationJob>>,
    wanted: impl Fn(&OptimizationJob) -> bool,
) -> Vec<ObjectRef<Guarded<OptimizationJob>>> {
    let find = |job: Arc<Guarded<OptimizationJob>>| {
        let inner = job.0.as_ref().ok()?;
        let started = inner.status.as_ref().is_some_and(|s| conditions::is_true(&s.conditions, "Started"));
        (!started && wanted(inner)).then(|| ObjectRef::from_obj(job.as_ref()))
    };
    jobs.state().into_iter().filter_map(find).collect()
}

/// The jobs that share an object: it may have been changed or taken away.
fn sharing(context: &Context, object: &impl ResourceExt) -> Vec<ObjectRef<Guarded<OptimizationJob>>> {
    let labels = object.labels();
    let is = |key: &str, value: &str| labels.get(key).is_some_and(|v| v == value);
    if !is("app.kubernetes.io/component", "agent") || !is("app.kubernetes.io/managed-by", names::MANAGER) {
        return Vec::new();
    }
    let (Some(namespace), Some(instance)) = (object.namespace(), labels.get("app.kubernetes.io/instance")) else {
        return Vec::new();
    };
    context.shared.forget(&namespace);
    let find = |job: Arc<Guarded<OptimizationJob>>| {
        let inner = job.0.as_ref().ok()?;
        let shares = inner.spec.judge.gpu_pool == *instance
            || inner.spec.policy.endpoint.as_ref().is_some_and(|p| p.name == *instance);
        let here = inner.namespace().as_deref() == Some(&namespace);
        (here && shares).then(|| ObjectRef::from_obj(job.as_ref()))
    };
    context.jobs.state().into_iter().filter_map(find).collect()
}

fn jobs_of_map(
    context: &Context,
    sets: &Store<Guarded<TaskSet>>,
    map: &PartialObjectMeta<ConfigMap>,
) -> Vec<ObjectRef<Guarded<OptimizationJob>>> {
    let (namespace, name) = (map.namespace(), map.name_any());
    // One that a job has made itself: it may have gone.
    if let Some(owner) = map.owner_references().iter().find(|o| o.kind == OptimizationJob::kind(&())) {
        return vec![ObjectRef::new(&owner.name).within(namespace.as_deref().unwrap_or_default())];
    }
    let sharing = sharing(context, map);
    if !sharing.is_empty() {
        return sharing;
    }
    let in_set = |job: &OptimizationJob| {
        let set = job.spec.tasks.task_set.as_ref()?;
        let found = sets.get(&ObjectRef::new(&set.name).within(namespace.as_deref().unwrap_or_default()))?;
        let source = found.0.as_ref().ok()?.spec.config_map.as_ref()?;
        Some(source.names.contains(&name))
    };
    waiting(&context.jobs, |job| {
        job.namespace() == namespace
            && (job.spec.tasks.config_map.as_ref().is_some_and(|m| m.name == name)
                || job.spec.policy.replay.as_ref().is_some_and(|r| r.config_map == name)
                || in_set(job).unwrap_or(false))
    })
}

fn sets_of(sets: &Store<Guarded<TaskSet>>, map: &PartialObjectMeta<ConfigMap>) -> Vec<ObjectRef<Guarded<TaskSet>>> {
    let (namespace, name) = (map.namespace(), map.name_any());
    let find = |set: Arc<Guarded<TaskSet>>| {
        let inner = set.0.as_ref().ok()?;
        let names = &inner.spec.config_map.as_ref()?.names;
        (inner.namespace() == namespace && names.contains(&name)).then(|| ObjectRef::from_obj(set.as_ref()))
    };
    sets.state().into_iter().filter_map(find).collect()
}

/// Counts a reconciliation, and says why it failed.
async fn watched<K: Resource, E: std::error::Error>(
    controller: &'static str,
    object: Arc<K>,
    work: impl Future<Output = Result<Action, E>>,
    context: Arc<Context>,
) -> Result<Action, E> {
    let running = context.metrics.begin(controller);
    let end = work.await;
    match &end {
        Err(error) => {
            tracing::warn!(controller, name = ?object.meta().name, %error, "a reconciliation failed and is tried again");
        }
        Ok(_) => context.backoff.forget(object.meta().uid.as_deref().unwrap_or_default()),
    }
    running.end(end.is_err());
    end
}

/// Waits grow with each failure in a row.
fn retry<K: Resource, E>(object: Arc<Guarded<K>>, _error: &E, context: Arc<Context>) -> Action {
    Action::requeue(context.backoff.failed(object.meta().uid.as_deref().unwrap_or_default()))
}
