//! What every controller has at hand.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::core::error_boundary::InvalidObject;
use kube::runtime::events::{Event, EventType, Recorder};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::apply::{Applier, Shared};
use super::backoff::Backoff;
use super::broker::Brokers;
use super::metrics::Metrics;
use super::names;
use crate::api::{GpuPool, ModelEndpoint, OptimizationJob};

/// An object, or why it can't be read: one that can't be blocks nobody else.
pub type Guarded<K> = DeserializeGuard<K>;

/// What the operator was told at its start.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Its own namespace, where brokers and judges run.
    pub namespace: String,
    /// Its own service account.
    pub service_account: String,
    /// Image of agents, brokers and gateways.
    pub image: String,
    /// Image of sandboxes.
    pub sandbox_image: String,
    /// Image of judges.
    pub judge_image: String,
    /// `Always`, `IfNotPresent`, `Never`.
    pub pull_policy: String,
    /// Names of Secrets that images are pulled with, in the namespace of each pod.
    pub pull_secrets: Vec<String>,
}

impl Settings {
    /// A service account of the operator's namespace, as a broker's flags name it.
    #[must_use]
    pub fn account(&self, name: &str) -> String {
        format!("{}:{name}", self.namespace)
    }
}

/// What every controller has at hand.
pub struct Context {
    pub client: Client,
    pub settings: Settings,
    pub brokers: Brokers,
    pub applier: Applier,
    pub shared: Shared,
    /// How long what failed waits, by UID.
    pub backoff: Backoff,
    pub metrics: Metrics,
    pub recorder: Recorder,
    pub pools: Store<Guarded<GpuPool>>,
    pub endpoints: Store<Guarded<ModelEndpoint>>,
    pub jobs: Store<Guarded<OptimizationJob>>,
    pub troubles: Troubles,
    /// When an object's progress was last written, by UID.
    pub written: Mutex<HashMap<String, Timestamp>>,
}

/// Why a job's pods don't run, as found a moment ago, by the job's UID: a list of pods is dear where there are many, and
/// every change of a Job is a pass.
#[derive(Debug, Default)]
pub struct Troubles(Mutex<HashMap<String, (Instant, Option<String>)>>);

impl Troubles {
    /// How long it is believed.
    const FRESH: Duration = Duration::from_secs(20);

    /// What was found; the outer `None` where it is to be looked at.
    #[must_use]
    pub fn get(&self, uid: &str) -> Option<Option<String>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(uid).filter(|(at, _)| at.elapsed() < Self::FRESH).map(|(_, found)| found.clone())
    }

    /// Keeps what was found.
    pub fn set(&self, uid: &str, found: Option<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (at, _)| at.elapsed() < Self::FRESH);
        known.insert(uid.to_owned(), (Instant::now(), found));
    }
}

/// What is found of another object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found<T> {
    Missing,
    /// It is there, but nobody can read it.
    Unreadable(String),
    Is(T),
}

impl Context {
    /// A pool by its name.
    #[must_use]
    pub fn pool(&self, name: &str) -> Found<GpuPool> {
        find(&self.pools, &ObjectRef::new(name))
    }

    /// An endpoint by its name.
    #[must_use]
    pub fn endpoint(&self, namespace: &str, name: &str) -> Found<ModelEndpoint> {
        find(&self.endpoints, &ObjectRef::new(name).within(namespace))
    }

    /// Tells the story of an object, for `kubectl describe`.
    pub async fn event(&self, about: &ObjectReference, warning: bool, reason: &str, action: &str, note: &str) {
        let event = Event {
            type_: if warning { EventType::Warning } else { EventType::Normal },
            reason: reason.into(),
            note: Some(super::conditions::cut(note, 900)),
            action: action.into(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, about).await {
            tracing::debug!(%error, "an event can't be written");
        }
    }

    /// Says of an object that nobody can read it: in the log and as an event.
    pub async fn unreadable<K: Resource<DynamicType = ()>>(&self, object: &InvalidObject) {
        let metadata = &object.metadata;
        let about = reference::<K>(metadata);
        let note = format!(
            "it can't be read: {}; correct it, or make it anew under the present definition of {}",
            object.error,
            K::kind(&())
        );
        tracing::warn!(kind = %K::kind(&()), name = ?metadata.name, namespace = ?metadata.namespace, error = object.error, "an object can't be read");
        self.event(&about, true, "Unreadable", "Read", &note).await;
    }
}

/// What an event of an object refers to, by its metadata alone.
#[must_use]
pub fn reference<K: Resource<DynamicType = ()>>(metadata: &ObjectMeta) -> ObjectReference {
    ObjectReference {
        api_version: Some(K::api_version(&()).into_owned()),
        kind: Some(K::kind(&()).into_owned()),
        name: metadata.name.clone(),
        namespace: metadata.namespace.clone(),
        uid: metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

fn find<K>(store: &Store<Guarded<K>>, at: &ObjectRef<Guarded<K>>) -> Found<K>
where
    K: Resource<DynamicType = ()> + Clone + 'static,
{
    match store.get(at).as_deref() {
        None => Found::Missing,
        Some(DeserializeGuard(Err(invalid))) => Found::Unreadable(invalid.error.clone()),
        Some(DeserializeGuard(Ok(object))) => Found::Is(object.clone()),
    }
}

/// Writes a status, under a manager of its own.
///
/// # Errors
/// When the server refuses.
pub async fn patch_status<K>(api: &Api<K>, name: &str, status: &impl Serialize) -> Result<K, kube::Error>
where
    K: Resource<DynamicType = ()> + DeserializeOwned,
{
    let body = json!({
        "apiVersion": K::api_version(&()),
        "kind": K::kind(&()),
        "metadata": { "name": name },
        "status": status,
    });
    api.patch_status(name, &PatchParams::apply(names::STATUS_MANAGER).force(), &Patch::Apply(body)).await
}

#[cfg(test)]
pub mod tests {
    use super::Settings;

    /// Settings as a chart gives them.
    pub fn settings() -> Settings {
        Settings {
            namespace: "kernelfleet".into(),
            service_account: "kernelfleet-operator".into(),
            image: "registry.example.com/kernelfleet:1.2.3".into(),
            sandbox_image: "registry.example.com/sandbox:1.2.3".into(),
            judge_image: "registry.example.com/judge:1.2.3".into(),
            pull_policy: "IfNotPresent".into(),
            pull_secrets: vec!["pull".into()],
        }
    }
}
