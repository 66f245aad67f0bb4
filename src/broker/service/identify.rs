//! Who calls: a bound token is looked up, and nothing in a message says it.
//!
//! On a cluster a TokenReview gives the pod, the pod's owners give its Job and its OptimizationJob. Without one, a file
//! lists tokens. Must not know what a caller may do.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Mutex;

use futures::future::BoxFuture;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Api, Client};
use serde::Deserialize;

use crate::bound::{self, Account, Remembered, Unknown};

/// Audience of the tokens.
pub const AUDIENCE: &str = "kernelfleet-broker";
/// The annotation, and the label, that an Indexed Job gives its pods.
const INDEX: &str = "batch.kubernetes.io/job-completion-index";

/// Who calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    Agent(Agent),
    Judge { pod: String, pod_uid: String },
    Operator,
}

/// An agent's pod.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Agent {
    pub namespace: String,
    pub pod: String,
    pub pod_uid: String,
    /// UID of its OptimizationJob.
    pub job_uid: String,
    pub index: u32,
}

/// Says who calls.
pub trait Identify: Send + Sync {
    fn identify<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Caller, Unknown>>;
}

// ---- A file of tokens

#[derive(Deserialize)]
#[serde(tag = "role", rename_all = "lowercase", deny_unknown_fields)]
enum Role {
    Agent {
        token: String,
        #[serde(flatten)]
        agent: AgentFields,
    },
    #[serde(rename_all = "camelCase")]
    Judge {
        token: String,
        #[serde(default)]
        pod: String,
        pod_uid: String,
    },
    Operator {
        token: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AgentFields {
    namespace: String,
    pod: String,
    pod_uid: String,
    job_uid: String,
    index: u32,
}

/// Tokens of a file: a JSON list of `{"token", "role": "operator"}`, `{"token", "role": "judge", "podUid"}` and
/// `{"token", "role": "agent", "namespace", "pod", "podUid", "jobUid", "index"}`. It is read again when a token isn't known.
#[derive(Debug)]
pub struct Tokens {
    path: PathBuf,
    known: Mutex<BTreeMap<String, Caller>>,
}

impl Tokens {
    /// Reads the file.
    ///
    /// # Errors
    /// One sentence, when it can't be read.
    pub fn open(path: PathBuf) -> Result<Self, String> {
        let known = Self::read(&path)?;
        Ok(Self { path, known: Mutex::new(known) })
    }

    fn read(path: &std::path::Path) -> Result<BTreeMap<String, Caller>, String> {
        let failed = |e: &dyn std::fmt::Display| format!("--tokens {}: {e}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| failed(&e))?;
        let roles: Vec<Role> = serde_json::from_str(&text).map_err(|e| failed(&e))?;
        Ok(roles
            .into_iter()
            .map(|role| match role {
                Role::Operator { token } => (token, Caller::Operator),
                Role::Judge { token, pod, pod_uid } => {
                    (token, Caller::Judge { pod: if pod.is_empty() { pod_uid.clone() } else { pod }, pod_uid })
                }
                Role::Agent { token, agent: AgentFields { namespace, pod, pod_uid, job_uid, index } } => {
                    (token, Caller::Agent(Agent { namespace, pod, pod_uid, job_uid, index }))
                }
            })
            .collect())
    }
}

impl Identify for Tokens {
    fn identify<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Caller, Unknown>> {
        Box::pin(async move {
            let known = || self.known.lock().ok().and_then(|k| k.get(token).cloned());
            if let Some(caller) = known() {
                return Ok(caller);
            }
            let fresh = Self::read(&self.path).map_err(Unknown::Unavailable)?;
            if let Ok(mut known) = self.known.lock() {
                *known = fresh;
            }
            known().ok_or_else(|| Unknown::Refused("the token isn't one of this broker's --tokens".to_owned()))
        })
    }
}

// ---- A cluster

/// Service accounts of those that aren't agents: `namespace:name`.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    pub judges: Vec<String>,
    pub operators: Vec<String>,
}

/// Reviews tokens at the API server.
pub struct Cluster {
    client: Client,
    accounts: Accounts,
    remembered: Remembered<Caller>,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cluster").field("accounts", &self.accounts).finish_non_exhaustive()
    }
}

impl Cluster {
    #[must_use]
    pub fn new(client: Client, accounts: Accounts) -> Self {
        Self { client, accounts, remembered: Remembered::default() }
    }

    async fn find(&self, token: &str) -> Result<Caller, Unknown> {
        let user = bound::review(&self.client, AUDIENCE, token).await?;
        let account = Account::of(&user)?;
        if self.accounts.operators.contains(&account.name) {
            return Ok(Caller::Operator);
        }
        let (pod, pod_uid) = account.pod()?;
        if self.accounts.judges.contains(&account.name) {
            return Ok(Caller::Judge { pod, pod_uid });
        }
        let found = Api::<Pod>::namespaced(self.client.clone(), &account.namespace).get_opt(&pod).await;
        let found = found.map_err(|e| unavailable(&format!("pod {}/{pod} can't be read", account.namespace), &e))?;
        let found = found.filter(|p| p.metadata.uid.as_deref() == Some(&pod_uid));
        let found = found.ok_or_else(|| refused(format!("pod {}/{pod} is gone", account.namespace)))?;
        let index = completion_index(&found.metadata)
            .ok_or_else(|| refused(format!("pod {}/{pod} has no {INDEX}", account.namespace)))?;
        let owner = controller(&found.metadata, "Job")
            .ok_or_else(|| refused(format!("pod {}/{pod} isn't a Job's", account.namespace)))?;
        let job = Api::<Job>::namespaced(self.client.clone(), &account.namespace).get_opt(&owner.name).await;
        let job =
            job.map_err(|e| unavailable(&format!("job {}/{} can't be read", account.namespace, owner.name), &e))?;
        let job = job.filter(|j| j.metadata.uid.as_ref() == Some(&owner.uid));
        let job = job.ok_or_else(|| refused(format!("job {}/{} is gone", account.namespace, owner.name)))?;
        let owner =
            controller(&job.metadata, "OptimizationJob").filter(|o| o.api_version.starts_with(crate::api::GROUP));
        let owner = owner
            .ok_or_else(|| refused(format!("pod {}/{pod} doesn't belong to an OptimizationJob", account.namespace)))?;
        Ok(Caller::Agent(Agent { namespace: account.namespace, pod, pod_uid, job_uid: owner.uid.clone(), index }))
    }
}

impl Identify for Cluster {
    fn identify<'a>(&'a self, token: &'a str) -> BoxFuture<'a, Result<Caller, Unknown>> {
        Box::pin(async move {
            if let Some(caller) = self.remembered.get(token) {
                return Ok(caller);
            }
            let caller = self.find(token).await?;
            self.remembered.put(token, caller.clone());
            Ok(caller)
        })
    }
}

fn refused(why: String) -> Unknown {
    Unknown::Refused(why)
}

fn unavailable(what: &str, error: &kube::Error) -> Unknown {
    Unknown::Unavailable(format!("{what}: {error}"))
}

fn completion_index(meta: &ObjectMeta) -> Option<u32> {
    let annotation = meta.annotations.as_ref().and_then(|a| a.get(INDEX));
    annotation.or_else(|| meta.labels.as_ref().and_then(|l| l.get(INDEX)))?.parse().ok()
}

fn controller<'a>(meta: &'a ObjectMeta, kind: &str) -> Option<&'a OwnerReference> {
    let owners = meta.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|o| o.kind == kind && o.controller == Some(true))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::UserInfo;

    use super::*;

    #[tokio::test]
    async fn tokens_of_a_file_are_known_also_those_that_are_added_later() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokens.json");
        std::fs::write(
            &path,
            r#"[{"token": "o", "role": "operator"}, {"token": "j", "role": "judge", "podUid": "u"}]"#,
        )
        .unwrap();
        let tokens = Tokens::open(path.clone()).unwrap();
        assert_eq!(tokens.identify("o").await.unwrap(), Caller::Operator);
        assert_eq!(tokens.identify("j").await.unwrap(), Caller::Judge { pod: "u".into(), pod_uid: "u".into() });
        assert!(matches!(tokens.identify("a").await, Err(Unknown::Refused(_))));
        let agent = r#"[{"token": "a", "role": "agent", "namespace": "n", "pod": "p", "podUid": "pu", "jobUid": "ju", "index": 3}]"#;
        std::fs::write(&path, agent).unwrap();
        let Caller::Agent(agent) = tokens.identify("a").await.unwrap() else { panic!("no agent") };
        assert_eq!((agent.job_uid.as_str(), agent.index), ("ju", 3));
        std::fs::write(&path, "{").unwrap();
        let why = Tokens::open(path).unwrap_err();
        assert!(why.contains("tokens.json: "), "{why}");
    }

    #[test]
    fn a_pod_is_known_by_its_annotation_or_label_and_by_its_controller_alone() {
        let owner = |kind: &str, controller| OwnerReference {
            kind: kind.into(),
            controller: Some(controller),
            uid: "u".into(),
            ..OwnerReference::default()
        };
        let mut meta = ObjectMeta { owner_references: Some(vec![owner("Job", false)]), ..ObjectMeta::default() };
        assert!(controller(&meta, "Job").is_none());
        meta.owner_references = Some(vec![owner("Job", true)]);
        assert!(controller(&meta, "Job").is_some() && controller(&meta, "OptimizationJob").is_none());
        assert_eq!(completion_index(&meta), None);
        meta.labels = Some([(INDEX.to_owned(), "7".to_owned())].into());
        assert_eq!(completion_index(&meta), Some(7));
    }

    #[test]
    fn a_token_that_isnt_bound_to_a_pod_is_refused_and_so_is_a_person() {
        let user = |name: &str| UserInfo { username: Some(name.into()), ..UserInfo::default() };
        assert!(matches!(Account::of(&user("alice")), Err(Unknown::Refused(why)) if why.contains("alice")));
        let account = Account::of(&user("system:serviceaccount:n:agent")).unwrap();
        assert_eq!((account.name.as_str(), account.namespace.as_str()), ("n:agent", "n"));
        assert!(matches!(account.pod(), Err(Unknown::Refused(why)) if why.contains("projected token")));
    }
}
