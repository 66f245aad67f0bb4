//! Reads what a GpuPool's parts come from and how they are: its keys, its StatefulSets, its broker. The first step.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{Namespace, Pod, Secret, Service};
use kube::api::{Api, PartialObjectMeta};
use sha2::{Digest, Sha256};

use super::certificates::{self, Authorities, Pair};
use crate::hex::hex;
use crate::operator::context::Context;
use crate::operator::names;
use crate::wire::v1::PoolFacts;

/// Why the facts can't be read.
#[derive(Debug, thiserror::Error)]
#[error("the API server can't be asked for {what}: {source}")]
pub struct Error {
    what: String,
    source: Box<kube::Error>,
}

/// What was read.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Why a Secret of the pool's certificates can't be used; nothing is made before it can.
    pub unreadable: Option<String>,
    pub authorities: Option<Authorities>,
    /// The broker's certificate and the fingerprint of who signed it.
    pub certificate: Option<(Pair, String)>,
    pub broker: Option<StatefulSet>,
    pub judges: Option<StatefulSet>,
    /// UID of the broker's pod where it stands in the way of the one that is to replace it.
    pub stuck: Option<String>,
    /// ClusterIP of the broker's Service.
    pub ip: Option<String>,
    /// What the broker says, or why it says nothing.
    pub said: Option<Result<PoolFacts, String>>,
    /// Namespaces of the spec that don't exist.
    pub missing_namespaces: Vec<String>,
    /// Namespaces of the spec that are being deleted: nothing can be made in them any more.
    pub ending_namespaces: Vec<String>,
    pub credentials: Credentials,
}

/// Key of a credentials' Secret: who calls.
pub const ACCESS_KEY: &str = "access-key-id";
/// Key of a credentials' Secret: what only it knows.
pub const SECRET_KEY: &str = "secret-access-key";

fn digest(parts: &[&[u8]]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
        digest.update(part);
    }
    hex(&digest.finalize()[..12])
}

/// What is known of the Secret with the bucket's credentials. Never what it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Credentials {
    /// The spec names none.
    #[default]
    Unnamed,
    /// There is no such Secret.
    Missing,
    /// It has no such key, or nothing under it.
    Without(&'static str),
    /// The API server doesn't give it.
    Unreadable(String),
    /// Both keys are there; a digest of what is under them, and of nothing else.
    There(String),
}

impl Credentials {
    /// Whether a broker can be started.
    #[must_use]
    pub const fn usable(&self) -> bool {
        matches!(self, Self::Unnamed | Self::There(_))
    }

    fn of(secret: Option<&Secret>) -> Self {
        let Some(secret) = secret else { return Self::Missing };
        let value = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).filter(|v| !v.0.is_empty());
        match (value(ACCESS_KEY), value(SECRET_KEY)) {
            (None, _) => Self::Without(ACCESS_KEY),
            (_, None) => Self::Without(SECRET_KEY),
            (Some(access), Some(secret)) => Self::There(digest(&[&access.0, &secret.0])),
        }
    }

    /// The same, with the digest by a key that is in Secrets alone: who reads the annotation of a pod can't try out what
    /// it might be of.
    #[must_use]
    pub fn keyed(&self, key: &str) -> Self {
        match self {
            Self::There(of) => Self::There(digest(&[key.as_bytes(), of.as_bytes()])),
            other => other.clone(),
        }
    }
}

impl Facts {
    /// Whether nothing can be made in a namespace.
    #[must_use]
    pub fn lacks(&self, namespace: &str) -> bool {
        self.missing_namespaces.iter().chain(&self.ending_namespaces).any(|n| n == namespace)
    }
}

/// Reads everything; what isn't there yet is `None`. `secret` is the Secret with the bucket's credentials.
///
/// # Errors
/// When the API server can't be asked.
pub async fn dereference(
    context: &Context,
    pool: &str,
    namespaces: &[String],
    secret: Option<&str>,
) -> Result<Facts, Error> {
    let namespace = &context.settings.namespace;
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: kube::Error| Error { what, source: Box::new(e) }
    };
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), namespace);
    let mut unreadable = None;
    let name = names::authority(pool);
    let found = read(&secrets, &name).await.map_err(failed("the authority's Secret"))?;
    let authorities = found.and_then(|kept| {
        let kept = kept.map(|secret| Authorities::read(&name, &text(&secret)));
        kept.transpose().map_err(|e| e.to_string())
    });
    let authorities = authorities.unwrap_or_else(|why| {
        unreadable = Some(why);
        None
    });
    let name = tls_secret(pool);
    let found = read(&secrets, &name).await.map_err(failed("the broker's certificate"))?;
    let certificate = found.unwrap_or_else(|why| {
        unreadable.get_or_insert(why);
        None
    });
    let certificate = certificate.and_then(|secret| {
        let data = text(&secret);
        let signer = data.get("signer").cloned().unwrap_or_default();
        // A broken one is replaced: nothing but its own clients depends on it.
        certificates::read(&name, &data, "tls").ok().map(|pair| (pair, signer))
    });
    let credentials = match secret {
        None => Credentials::Unnamed,
        Some(name) => match read(&secrets, name).await.map_err(failed("the Secret of spec.objectStore"))? {
            Ok(found) => Credentials::of(found.as_ref()),
            Err(why) => Credentials::Unreadable(why),
        },
    };
    let sets: Api<StatefulSet> = Api::namespaced(context.client.clone(), namespace);
    let broker = sets.get_opt(&names::broker(pool)).await.map_err(failed("the broker"))?;
    let stuck = match broker.as_ref().filter(|set| ready_replicas(set) == 0) {
        None => None,
        Some(set) => {
            let pods: Api<Pod> = Api::namespaced(context.client.clone(), namespace);
            let pod = pods.get_opt(&names::broker_pod(pool)).await.map_err(failed("the broker's pod"))?;
            pod.filter(|pod| stands_in_the_way(set, pod)).and_then(|pod| pod.metadata.uid)
        }
    };
    let judges = sets.get_opt(&names::judge(pool)).await.map_err(failed("the judges"))?;
    let services: Api<Service> = Api::namespaced(context.client.clone(), namespace);
    let service = services.get_opt(&names::broker(pool)).await.map_err(failed("the broker's Service"))?;
    let ip = service.and_then(|s| s.spec).and_then(|s| s.cluster_ip).filter(|ip| !ip.is_empty());
    let ready = broker.as_ref().is_some_and(|set| ready_replicas(set) > 0);
    let said = if ready { Some(context.brokers.pool(pool).await.map_err(|e| e.to_string())) } else { None };
    let (mut missing_namespaces, mut ending_namespaces) = (Vec::new(), Vec::new());
    let all: Api<Namespace> = Api::all(context.client.clone());
    for name in namespaces.iter().filter(|n| *n != "*") {
        let found: Option<PartialObjectMeta<Namespace>> =
            all.get_metadata_opt(name).await.map_err(failed("a namespace"))?;
        match found {
            None => missing_namespaces.push(name.clone()),
            Some(found) if found.metadata.deletion_timestamp.is_some() => ending_namespaces.push(name.clone()),
            Some(_) => {}
        }
    }
    Ok(Facts {
        unreadable,
        authorities,
        certificate,
        broker,
        stuck,
        judges,
        ip,
        said,
        missing_namespaces,
        ending_namespaces,
        credentials,
    })
}

/// Replicas of a StatefulSet that are ready, whatever their form.
#[must_use]
pub fn ready_replicas(set: &StatefulSet) -> i32 {
    set.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0)
}

/// Whether a pod stands in the way of its successor: it isn't ready, and is of another form than its StatefulSet's present
/// one. A StatefulSet that makes its pods in order waits for it to become ready before it replaces it, which it never does
/// if that form was broken ("forced rollback" in Kubernetes' documentation). Pure.
#[must_use]
pub fn stands_in_the_way(set: &StatefulSet, pod: &Pod) -> bool {
    let Some(status) = &set.status else { return false };
    let seen = status.observed_generation >= set.metadata.generation;
    let uid = set.metadata.uid.as_deref();
    let ours = pod.metadata.owner_references.iter().flatten().any(|o| Some(o.uid.as_str()) == uid);
    let conditions = pod.status.iter().flat_map(|s| s.conditions.iter().flatten());
    let ready = conditions.into_iter().any(|c| c.type_ == "Ready" && c.status == "True");
    let form = pod.metadata.labels.as_ref().and_then(|l| l.get("controller-revision-hash"));
    let old = form.is_some() && status.update_revision.is_some() && form != status.update_revision.as_ref();
    seen && ours && old && !ready && pod.metadata.deletion_timestamp.is_none()
}

/// A Secret, `None` where there is none, or why the API server refuses to give it. That is for a person to mend; that the
/// server can't be asked isn't.
async fn read(api: &Api<Secret>, name: &str) -> Result<Result<Option<Secret>, String>, kube::Error> {
    match api.get_opt(name).await {
        Ok(found) => Ok(Ok(found)),
        Err(error) => refusal(name, &error).map(Err).ok_or(error),
    }
}

/// What a refusal says, if it is one. Pure.
fn refusal(name: &str, error: &kube::Error) -> Option<String> {
    let kube::Error::Api(status) = error else { return None };
    let passing = matches!(status.code, 408 | 429 | 500..);
    (!passing).then(|| format!("the Secret {name} can't be read: {}", status.message))
}

/// Secret with the broker's certificate.
#[must_use]
pub fn tls_secret(pool: &str) -> String {
    format!("{pool}-broker-tls")
}

fn text(secret: &Secret) -> BTreeMap<String, String> {
    let data = secret.data.iter().flatten();
    data.map(|(k, v)| (k.clone(), String::from_utf8_lossy(&v.0).into_owned())).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_broken_pod_of_the_form_before_stands_in_the_way_of_the_corrected_one() {
        let set = |observed: i64| -> StatefulSet {
            serde_json::from_value(json!({
                "metadata": { "uid": "set", "generation": 3 },
                "status": { "replicas": 1, "observedGeneration": observed, "currentRevision": "b-1", "updateRevision": "b-2" },
            }))
            .unwrap()
        };
        let pod = |form: &str, ready: &str, owner: &str, deleted: Option<&str>| -> Pod {
            serde_json::from_value(json!({
                "metadata": {
                    "labels": { "controller-revision-hash": form }, "deletionTimestamp": deleted,
                    "ownerReferences": [{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "b", "uid": owner }],
                },
                "status": { "conditions": [{ "type": "Ready", "status": ready }] },
            }))
            .unwrap()
        };
        assert!(stands_in_the_way(&set(3), &pod("b-1", "False", "set", None)));
        assert!(!stands_in_the_way(&set(2), &pod("b-1", "False", "set", None)), "its controller hasn't looked yet");
        assert!(!stands_in_the_way(&set(3), &pod("b-2", "False", "set", None)), "it is the present form that starts");
        assert!(!stands_in_the_way(&set(3), &pod("b-1", "True", "set", None)), "the StatefulSet replaces it itself");
        assert!(!stands_in_the_way(&set(3), &pod("b-1", "False", "other", None)));
        assert!(!stands_in_the_way(&set(3), &pod("b-1", "False", "set", Some("2027-01-15T08:00:00Z"))));
    }

    #[test]
    fn credentials_are_both_keys_of_a_secret_and_change_with_them_alone() {
        let of = |data: serde_json::Value, version: &str| {
            let secret = json!({"metadata": {"resourceVersion": version}, "data": data});
            Credentials::of(Some(&serde_json::from_value(secret).unwrap()))
        };
        assert_eq!(Credentials::of(None), Credentials::Missing);
        assert_eq!(of(json!(null), "7"), Credentials::Without("access-key-id"));
        assert_eq!(
            of(json!({"access-key-id": "YQ==", "secret-access-key": ""}), "7"),
            Credentials::Without("secret-access-key")
        );
        let there = of(json!({"access-key-id": "YQ==", "secret-access-key": "YQ=="}), "7");
        assert!(matches!(&there, Credentials::There(digest) if digest.len() == 24));
        let noted = json!({"access-key-id": "YQ==", "secret-access-key": "YQ==", "note": "YQ=="});
        assert_eq!(of(noted, "8"), there, "a broker isn't replaced for what it doesn't use");
        assert_ne!(of(json!({"access-key-id": "YQ==", "secret-access-key": "Yg=="}), "9"), there);
        assert_ne!(there.keyed("a"), there.keyed("b"));
        assert_eq!(there.keyed("a"), there.keyed("a"));
        assert_eq!(Credentials::Missing.keyed("a"), Credentials::Missing);
    }

    #[test]
    fn a_secret_that_is_refused_is_told_and_a_server_that_is_away_is_asked_again() {
        let refused = |code: u16| {
            let status = json!({ "code": code, "message": "secrets \"bucket\" is forbidden" });
            refusal("bucket", &kube::Error::Api(serde_json::from_value(status).unwrap()))
        };
        assert_eq!(refused(403).unwrap(), "the Secret bucket can't be read: secrets \"bucket\" is forbidden");
        assert_eq!((refused(503), refused(429)), (None, None));
    }
}
