//! Server-side apply of what was built, and nothing where it is there already.
//!
//! Knows the digest that it leaves on each object, and owners. Must not know what an object is for.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use kube::{Client, ResourceExt};
use sha2::{Digest, Sha256};

use super::names;

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
        let digest: String = Sha256::digest(&text).iter().take(12).map(|b| format!("{b:02x}")).collect();
        let mut object = self.object.clone();
        object.annotations_mut().insert(names::APPLIED.into(), digest.clone());
        (object, digest)
    }
}

/// Remembers the generation of what it applied, so that a change by other hands is noticed and undone.
#[derive(Debug, Default)]
pub struct Applier {
    generations: Mutex<HashMap<String, i64>>,
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
            let uid = live.uid().unwrap_or_default();
            if same && self.unchanged(&uid, live.metadata.generation) {
                return Ok(false);
            }
        }
        let parameters = PatchParams::apply(names::MANAGER).force();
        let live = api.patch(&name, &parameters, &Patch::Apply(&object)).await.map_err(failed)?;
        self.remember(&live.uid().unwrap_or_default(), live.metadata.generation);
        Ok(true)
    }

    /// Whether the object has the generation that it was left with; one that isn't known yet is taken as it is.
    fn unchanged(&self, uid: &str, generation: Option<i64>) -> bool {
        let Some(generation) = generation else { return true };
        let mut known = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
        *known.entry(uid.to_owned()).or_insert(generation) == generation
    }

    fn remember(&self, uid: &str, generation: Option<i64>) {
        if let Some(generation) = generation {
            let mut known = self.generations.lock().unwrap_or_else(PoisonError::into_inner);
            if known.len() > 100_000 {
                known.clear();
            }
            known.insert(uid.to_owned(), generation);
        }
    }
}
