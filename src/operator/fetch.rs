//! `kernelfleet results`: fetches the best kernels of a job with the caller's own rights.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::Api;
use kube::{Client, Config};

use super::{names, results};
use crate::api::OptimizationJob;

/// Why there is nothing to unpack.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no configuration for an API server: {0}; set KUBECONFIG")]
    Config(#[from] kube::config::InferConfigError),
    #[error("the API server can't be asked: {0}")]
    Api(#[from] kube::Error),
    #[error(
        "there is no OptimizationJob `{name}` in the namespace {namespace}; kubectl get optimizationjobs -A lists them"
    )]
    NoJob { name: String, namespace: String },
    #[error("the job `{name}` has no kernels to fetch: {why}")]
    Nothing { name: String, why: String },
    #[error(transparent)]
    Archive(#[from] results::Error),
    #[error("the event loop can't be started: {0}")]
    Runtime(std::io::Error),
}

/// What was fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Folders, one a task.
    pub folders: Vec<PathBuf>,
    /// Tasks whose kernels didn't fit.
    pub left_out: i32,
}

/// Fetches `JOB-best` and unpacks it, a folder a task. The namespace is that of the kubeconfig's context if none is said.
///
/// # Errors
/// When the job or its kernels aren't there, or an archive can't be trusted.
pub fn results(name: &str, namespace: Option<&str>, folder: &Path) -> Result<Fetched, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
    runtime.block_on(fetch(name, namespace, folder))
}

async fn fetch(name: &str, namespace: Option<&str>, folder: &Path) -> Result<Fetched, Error> {
    let config = Config::infer().await?;
    let namespace = namespace.map_or_else(|| config.default_namespace.clone(), str::to_owned);
    let client = Client::try_from(config)?;
    let jobs: Api<OptimizationJob> = Api::namespaced(client.clone(), &namespace);
    let job = jobs.get_opt(name).await?;
    let job = job.ok_or_else(|| Error::NoJob { name: name.into(), namespace: namespace.clone() })?;
    let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
    let Some(map) = maps.get_opt(&names::best(name)).await? else {
        let state = job.status.as_ref().and_then(|s| super::conditions::get(&s.conditions, "Progressing"));
        let why = match state {
            Some(c) => format!("its state is {}: {}", c.reason, c.message),
            None => "the operator hasn't seen it yet".into(),
        };
        return Err(Error::Nothing { name: name.into(), why });
    };
    let mut folders = Vec::new();
    for (key, archive) in map.binary_data.unwrap_or_default() {
        folders.push(results::unpack(&key, &archive.0, folder)?);
    }
    let left_out = job.status.and_then(|s| s.best).map_or(0, |b| b.left_out);
    Ok(Fetched { folders, left_out })
}
