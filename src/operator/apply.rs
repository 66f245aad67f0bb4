//! Server-side apply of what was built, and nothing where it is there already; objects that many share.
//!
//! Knows the digest that it leaves on each object, and owners. Must not know what an object is for.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, Patch, PatchParams, Preconditions};
use kube::{Client, ResourceExt};
use sha2::{Digest, Sha256};

use super::names;
use crate::hex::hex;

/// Why an object isn't as it was built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{kind} {name} is there already and belongs to somebody else; delete or rename it")]
    Taken { kind: String, name: String },
    #[error("{kind} {name} can't be applied: {source}")]
    Api { kind: String, name: String, source: Box<kube::Error> },
    #[error("{kind} {name} was built without a field that every object has: {source}")]
    Encode { kind: String, name: String, source: serde_json::Error },
}

impl Error {
    /// Whether nothing can be made in the object's namespace, since that is being deleted or is gone.
    #[must_use]
    pub fn no_namespace(&self) -> bool {
        matches!(self, Self::Api { source, .. } if no_namespace(source))
    }
}

/// Whether the server refuses to make something in a namespace that is being deleted or is gone. Pure.
#[must_use]
pub fn no_namespace(error: &kube::Error) -> bool {
    let kube::Error::Api(status) = error else { return false };
    let caused = |reason: &str| status.details.iter().flat_map(|d| &d.causes).any(|c| c.reason == reason);
    match status.code {
        403 => caused("NamespaceTerminating") || status.message.contains("because it is being terminated"),
        404 => status.details.as_ref().is_some_and(|d| d.kind == "namespaces"),
        _ => false,
    }
}

/// An object to be applied.
#[derive(Clone, Debug)]
pub struct Built {
    pub resource: ApiResource,
    pub object: DynamicObject,
}

impl Built {
    /// An object as JSON, with its apiVersion, kind and metadata.
    ///
    /// # Errors
    /// When it lacks one of them.
    pub fn new(value: serde_json::Value) -> Result<Self, Error> {
        let kind = value["kind"].as_str().unwrap_or_default().to_owned();
        let name = value["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let version = value["apiVersion"].as_str().unwrap_or_default().to_owned();
        let object = serde_json::from_value(value);
        let object = object.map_err(|source| Error::Encode { kind: kind.clone(), name, source })?;
        let (group, version) = version.rsplit_once('/').unwrap_or(("", &version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
        Ok(Self { resource, object })
    }

    /// The same with the digest of its content on it.
    fn marked(&self) -> (DynamicObject, String) {
        let text = serde_json::to_vec(&self.object).unwrap_or_default();
        let digest = hex(&Sha256::digest(&text)[..12]);
        let mut object = self.object.clone();
        object.annotations_mut().insert(names::APPLIED.into(), digest.clone());
        (object, digest)
    }
}

/// How an object was left: what changes with the next edit of somebody else.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Left {
    /// Of kinds whose spec is counted; a status or a label of others changes nothing of ours.
    Generation(i64),
    /// Of kinds that have none (ConfigMap, Service, ServiceAccount, roles and their bindings): its resourceVersion.
    Version(String),
}

impl Left {
    fn of(metadata: &ObjectMeta) -> Self {
        match metadata.generation {
            Some(generation) => Self::Generation(generation),
            None => Self::Version(metadata.resource_version.clone().unwrap_or_default()),
        }
    }
}

/// How objects were left, by UID.
#[derive(Debug, Default)]
struct Memory(HashMap<String, Left>);

impl Memory {
    /// Whether an object is as it was left. One that isn't known yet, since the operator has begun a moment ago, is taken
    /// as it is by its generation; one without is applied once, which changes nothing where nothing was changed.
    fn unchanged(&mut self, metadata: &ObjectMeta) -> bool {
        let seen = Left::of(metadata);
        let uid = metadata.uid.clone().unwrap_or_default();
        match (self.0.get(&uid), &seen) {
            (Some(left), _) => *left == seen,
            (None, Left::Version(_)) => false,
            (None, Left::Generation(_)) => {
                self.0.insert(uid, seen);
                true
            }
        }
    }

    fn remember(&mut self, metadata: &ObjectMeta) {
        if self.0.len() > 100_000 {
            self.0.clear();
        }
        self.0.insert(metadata.uid.clone().unwrap_or_default(), Left::of(metadata));
    }
}

/// Remembers how it left what it applied, so that a change by other hands is noticed and undone.
#[derive(Debug, Default)]
pub struct Applier {
    memory: Mutex<Memory>,
}

impl Applier {
    /// Makes the object what was built. `true` where something had to be written.
    ///
    /// # Errors
    /// When the name is taken by somebody else's object, or the server refuses.
    pub async fn ensure(&self, client: &Client, built: &Built) -> Result<bool, Error> {
        let (object, digest) = built.marked();
        let name = object.name_any();
        let kind = built.resource.kind.clone();
        let failed = |e: kube::Error| Error::Api { kind: kind.clone(), name: name.clone(), source: Box::new(e) };
        let api: Api<DynamicObject> = match object.namespace() {
            Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &built.resource),
            None => Api::all_with(client.clone(), &built.resource),
        };
        if let Some(live) = api.get_metadata_opt(&name).await.map_err(failed)? {
            let owned = |uid: &str| live.owner_references().iter().any(|o| o.uid == uid);
            let ours = match object.owner_references().first() {
                Some(owner) => owned(&owner.uid),
                None => live.labels().get("app.kubernetes.io/managed-by").is_some_and(|m| m == names::MANAGER),
            };
            if !ours {
                return Err(Error::Taken { kind, name });
            }
            let same = live.annotations().get(names::APPLIED) == Some(&digest);
            if same && self.memory().unchanged(&live.metadata) {
                return Ok(false);
            }
        }
        let parameters = PatchParams::apply(names::MANAGER).force();
        let live = api.patch(&name, &parameters, &Patch::Apply(&object)).await.map_err(failed)?;
        self.memory().remember(&live.metadata);
        Ok(true)
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long an object that many share is believed to be as it was seen. A watch says sooner that it was changed.
const FRESH: Duration = Duration::from_secs(20);

/// Kinds of objects that are shared.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    ConfigMap,
    NetworkPolicy,
}

/// Objects that many share and nobody owns: looked at once for all, and taken away with the last who needs them.
#[derive(Debug, Default)]
pub struct Shared {
    /// Digest of what was seen, and when, by kind, namespace and name. Held over a request, so that nothing is taken away
    /// from who has just looked.
    seen: tokio::sync::Mutex<HashMap<String, (String, Instant)>>,
    /// Namespaces of which a watch has told something since.
    changed: Mutex<HashSet<String>>,
    /// UIDs of those that need nothing any more, though a watch may still show them.
    left: Mutex<HashSet<String>>,
}

impl Shared {
    /// As `Applier::ensure`; nothing is asked of what was seen a moment ago.
    ///
    /// # Errors
    /// As `Applier::ensure`.
    pub async fn ensure(&self, applier: &Applier, client: &Client, built: &Built) -> Result<(), Error> {
        let namespace = built.object.namespace().unwrap_or_default();
        let key = key(&built.resource.kind, &namespace, &built.object.name_any());
        let (_, digest) = built.marked();
        let mut seen = self.seen.lock().await;
        if self.changed.lock().unwrap_or_else(PoisonError::into_inner).remove(&namespace) {
            let part = format!("/{namespace}/");
            seen.retain(|key, _| !key.contains(&part));
        }
        if seen.get(&key).is_some_and(|(d, at)| *d == digest && at.elapsed() < FRESH) {
            return Ok(());
        }
        applier.ensure(client, built).await?;
        seen.insert(key, (digest, Instant::now()));
        Ok(())
    }

    /// Deletes one, unless it is needed when its turn comes.
    ///
    /// # Errors
    /// When the server refuses.
    pub async fn remove(
        &self,
        client: &Client,
        kind: Kind,
        namespace: &str,
        name: &str,
        needed: impl FnOnce() -> bool,
    ) -> Result<(), Error> {
        let (word, resource) = match kind {
            Kind::ConfigMap => ("ConfigMap", ApiResource::erase::<ConfigMap>(&())),
            Kind::NetworkPolicy => ("NetworkPolicy", ApiResource::erase::<NetworkPolicy>(&())),
        };
        let failed = |e: kube::Error| Error::Api { kind: word.into(), name: name.into(), source: Box::new(e) };
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource);
        let mut seen = self.seen.lock().await;
        if needed() {
            return Ok(());
        }
        seen.remove(&key(word, namespace, name));
        let Some(live) = api.get_metadata_opt(name).await.map_err(failed)? else { return Ok(()) };
        if live.labels().get("app.kubernetes.io/managed-by").is_none_or(|m| m != names::MANAGER) {
            return Ok(());
        }
        let preconditions = Some(Preconditions { uid: live.uid(), resource_version: None });
        match api.delete(name, &DeleteParams { preconditions, ..DeleteParams::default() }).await {
            Ok(_) => Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
            Err(error) => Err(failed(error)),
        }
    }

    /// One that shared needs nothing any more. Those that aren't `there` are forgotten.
    pub fn left(&self, uid: &str, there: impl Fn(&str) -> bool) {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.retain(|uid| there(uid));
        left.insert(uid.to_owned());
    }

    /// Whether one that is still seen needs nothing any more.
    #[must_use]
    pub fn has_left(&self, uid: &str) -> bool {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).contains(uid)
    }

    /// What was seen of a namespace's objects holds no more.
    pub fn forget(&self, namespace: &str) {
        self.changed.lock().unwrap_or_else(PoisonError::into_inner).insert(namespace.to_owned());
    }
}

fn key(kind: &str, namespace: &str, name: &str) -> String {
    format!("{kind}/{namespace}/{name}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn refused(status: Value) -> bool {
        no_namespace(&kube::Error::Api(serde_json::from_value(status).unwrap()))
    }

    fn metadata(uid: &str, generation: Option<i64>, version: &str) -> ObjectMeta {
        let uid = Some(uid.to_owned());
        ObjectMeta { uid, generation, resource_version: Some(version.into()), ..ObjectMeta::default() }
    }

    #[test]
    fn an_edit_of_an_object_that_counts_no_generations_is_seen_by_its_version() {
        let mut memory = Memory::default();
        assert!(!memory.unchanged(&metadata("map", None, "7")), "nobody knows what was done to it meanwhile");
        memory.remember(&metadata("map", None, "7"));
        assert!(memory.unchanged(&metadata("map", None, "7")), "nothing is written where nothing has changed");
        assert!(!memory.unchanged(&metadata("map", None, "8")), "somebody has edited it");
        memory.remember(&metadata("map", None, "9"));
        assert!(memory.unchanged(&metadata("map", None, "9")));
    }

    #[test]
    fn an_object_that_counts_generations_is_left_alone_while_its_status_changes() {
        let mut memory = Memory::default();
        assert!(memory.unchanged(&metadata("set", Some(1), "7")) && memory.unchanged(&metadata("set", Some(1), "8")));
        assert!(!memory.unchanged(&metadata("set", Some(2), "9")));
        memory.remember(&metadata("set", Some(3), "10"));
        assert!(memory.unchanged(&metadata("set", Some(3), "11")));
    }

    #[test]
    fn a_namespace_that_is_being_deleted_is_told_from_a_right_that_is_lacking() {
        // As the API server 1.34 answers.
        let message = "serviceaccounts \"m-gateway\" is forbidden: unable to create new content in namespace lab because it is being terminated";
        let causes = json!([{ "reason": "NamespaceTerminating", "message": "namespace lab is being terminated", "field": "metadata.namespace" }]);
        let status = |code: u16, message: &str, details: Value| json!({ "status": "Failure", "code": code, "reason": "Forbidden", "message": message, "details": details });
        assert!(refused(status(403, message, json!({ "kind": "serviceaccounts", "causes": causes }))));
        assert!(refused(status(403, message, json!({ "kind": "serviceaccounts" }))));
        assert!(!refused(status(403, "serviceaccounts is forbidden: User \"x\" cannot patch", json!({}))));
        assert!(refused(status(404, "namespaces \"lab\" not found", json!({ "name": "lab", "kind": "namespaces" }))));
        assert!(!refused(status(404, "jobs \"lab\" not found", json!({ "name": "lab", "kind": "jobs" }))));
    }
}
