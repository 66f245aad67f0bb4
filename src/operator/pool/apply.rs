//! Makes a GpuPool's parts what was built: its keys first, then its objects, and away with what it has no more. The
//! fourth step.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::api::rbac::v1::{ClusterRoleBinding, RoleBinding};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, ListParams, PartialObjectMeta, PostParams, Preconditions,
};
use kube::{Client, Resource, ResourceExt};

use super::build::Objects;
use super::certificates::{self, Authorities, Step};
use super::dereference::{Facts, tls_secret};
use crate::api::GpuPool;
use crate::operator::apply;
use crate::operator::context::{Context, reference};
use crate::operator::names;

/// Why something isn't as it was built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Unreadable(String),
    #[error(transparent)]
    Certificate(#[from] certificates::Error),
    #[error(transparent)]
    Object(#[from] apply::Error),
    #[error("the Secret {name} can't be written: {source}")]
    Secret { name: String, source: Box<kube::Error> },
    #[error("what the pool has no more can't be deleted: {source}")]
    Prune { source: Box<kube::Error> },
}

impl Error {
    /// One word for the condition.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Unreadable(_) => "SecretUnreadable",
            Self::Certificate(_) | Self::Object(_) | Self::Secret { .. } | Self::Prune { .. } => "ApplyFailed",
        }
    }
}

/// Advances the authorities and the broker's certificate, and writes them where they changed.
///
/// # Errors
/// When a Secret can't be read or written, or a key can't be drawn.
pub async fn keys(
    context: &Context,
    pool: &str,
    owner: &OwnerReference,
    facts: &Facts,
    now: Timestamp,
) -> Result<Authorities, Error> {
    if let Some(why) = &facts.unreadable {
        return Err(Error::Unreadable(why.clone()));
    }
    let kept = facts.authorities.clone();
    let authorities = if certificates::plan(kept.as_ref(), now) == Step::Keep
        && let Some(kept) = kept
    {
        kept
    } else {
        let fresh = certificates::advance(facts.authorities.clone(), pool, now)?;
        let name = names::authority(pool);
        write(context, pool, owner, &name, fresh.data(), facts.authorities.is_some()).await?;
        tracing::info!(pool, "the pool's certificate authorities have changed");
        fresh
    };
    let fresh = facts.certificate.as_ref();
    if fresh.is_none_or(|(pair, signer)| certificates::stale(pair, signer, &authorities, now)) {
        // The broker reads the file again when it changes.
        let pair = certificates::certificate(&authorities, now)?;
        let mut data = BTreeMap::new();
        certificates::write(&mut data, "tls", &pair);
        data.insert("signer".into(), certificates::fingerprint(&authorities.current.certificate));
        write(context, pool, owner, &tls_secret(pool), data, facts.certificate.is_some()).await?;
    }
    Ok(authorities)
}

/// A first write creates, so that two operators can't both make an authority; later ones replace.
async fn write(
    context: &Context,
    pool: &str,
    owner: &OwnerReference,
    name: &str,
    data: BTreeMap<String, String>,
    there: bool,
) -> Result<(), Error> {
    let api: Api<Secret> = Api::namespaced(context.client.clone(), &context.settings.namespace);
    let failed = |e: kube::Error| Error::Secret { name: name.into(), source: Box::new(e) };
    let secret = Secret {
        metadata: ObjectMeta {
            name: Some(name.into()),
            namespace: Some(context.settings.namespace.clone()),
            labels: Some(names::labels("broker", pool)),
            owner_references: Some(vec![owner.clone()]),
            ..ObjectMeta::default()
        },
        data: Some(data.into_iter().map(|(k, v)| (k, ByteString(v.into_bytes()))).collect()),
        ..Secret::default()
    };
    if there {
        let live = api.get(name).await.map_err(failed)?;
        let mut secret = secret;
        secret.metadata.resource_version = live.resource_version();
        api.replace(name, &PostParams::default(), &secret).await.map_err(failed)?;
    } else {
        api.create(&PostParams::default(), &secret).await.map_err(failed)?;
    }
    Ok(())
}

/// Applies the objects, in their order. Answers namespaces that have begun to go meanwhile: the others are served.
///
/// # Errors
/// At the first that the server refuses or somebody else has.
pub async fn objects(context: &Context, objects: &Objects) -> Result<Vec<String>, Error> {
    let mut ending = Vec::new();
    for built in &objects.all {
        let namespace = built.object.namespace().filter(|n| *n != context.settings.namespace);
        match (context.applier.ensure(&context.client, built).await, namespace) {
            (Ok(_), _) => {}
            (Err(error), Some(namespace)) if error.no_namespace() => ending.push(namespace),
            (Err(error), _) => return Err(error.into()),
        }
    }
    Ok(ending)
}

/// Deletes the broker's pod that stands in the way of its successor, by the UID that was seen. What it says is for
/// whoever looks: the next pass tries again.
pub async fn unstick(context: &Context, pool: &GpuPool, uid: &str) {
    let name = names::broker_pod(&pool.name_any());
    let api: Api<Pod> = Api::namespaced(context.client.clone(), &context.settings.namespace);
    let preconditions = Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None });
    match api.delete(&name, &DeleteParams { preconditions, ..DeleteParams::default() }).await {
        Ok(_) => {
            let note = format!("pod {name} never became ready and is of a form that was corrected since: deleted");
            let about = reference::<GpuPool>(&pool.metadata);
            context.event(&about, false, "BrokerPodReplaced", "Reconcile", &note).await;
        }
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
        Err(error) => tracing::warn!(pod = name, %error, "the broker's pod stands in the way and can't be deleted"),
    }
}

/// Takes back the broker's rights in namespaces that the pool is no more for.
///
/// # Errors
/// When they can't be listed or deleted.
pub async fn prune(client: &Client, pool: &str, objects: &Objects) -> Result<(), Error> {
    prune_kind::<RoleBinding>(client, pool, objects).await?;
    prune_kind::<ClusterRoleBinding>(client, pool, objects).await
}

async fn prune_kind<K>(client: &Client, pool: &str, objects: &Objects) -> Result<(), Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let failed = |source| Error::Prune { source: Box::new(source) };
    let api: Api<K> = Api::all(client.clone());
    let selector = format!(
        "app.kubernetes.io/managed-by={},app.kubernetes.io/component=broker,app.kubernetes.io/instance={pool}",
        names::MANAGER
    );
    let found: kube::core::ObjectList<PartialObjectMeta<K>> =
        api.list_metadata(&ListParams::default().labels(&selector)).await.map_err(failed)?;
    for binding in found.items {
        let name = binding.name_any();
        let kept = objects.all.iter().any(|b| {
            b.resource.kind == K::kind(&())
                && b.object.namespace() == binding.namespace()
                && b.object.name_any() == name
        });
        if kept {
            continue;
        }
        let kind = ApiResource::erase::<K>(&());
        let api: Api<DynamicObject> = match binding.namespace() {
            Some(namespace) => Api::namespaced_with(client.clone(), &namespace, &kind),
            None => Api::all_with(client.clone(), &kind),
        };
        match api.delete(&name, &DeleteParams::default()).await {
            Ok(_) => {}
            // It has gone with its namespace.
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(())
}
