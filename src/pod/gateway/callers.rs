//! Who may ask a gateway: pods of its namespace, known by bound tokens.
//!
//! Knows tokens and namespaces. Must not know what is asked.

use std::collections::BTreeMap;
use std::path::Path;

use k8s_openapi::api::authentication::v1::UserInfo;
use kube::Client;
use serde::Deserialize;

pub use crate::bound::Unknown;
use crate::bound::{self, Account, Remembered};

/// Audience of the tokens.
pub const AUDIENCE: &str = "kernelfleet-gateway";
/// Says who calls: `namespace/pod`.
pub enum Callers {
    /// Tokens of a file, with the pods that they stand for.
    Known(BTreeMap<String, String>),
    Reviewed(Review),
}

impl std::fmt::Debug for Callers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Known(_) => "Known",
            Self::Reviewed(_) => "Reviewed",
        })
    }
}

/// Reviews tokens at the API server.
pub struct Review {
    pub client: Client,
    /// The only namespace whose pods are let in.
    pub namespace: String,
    remembered: Remembered<String>,
}

impl Review {
    #[must_use]
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace, remembered: Remembered::default() }
    }

    async fn find(&self, token: &str) -> Result<String, Unknown> {
        pod(&bound::review(&self.client, AUDIENCE, token).await?, &self.namespace)
    }
}

/// Whose pod a review speaks of. Pure.
fn pod(user: &UserInfo, namespace: &str) -> Result<String, Unknown> {
    let account = Account::of(user).ok().filter(|a| a.namespace == namespace).ok_or_else(|| {
        let name = user.username.as_deref().unwrap_or_default();
        Unknown::Refused(format!("{name:?} isn't of the namespace {namespace}, which this endpoint belongs to"))
    })?;
    let (pod, _) = account.pod()?;
    Ok(format!("{namespace}/{pod}"))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    token: String,
    namespace: String,
    pod: String,
}

impl Callers {
    /// Tokens of a file: a JSON list of `{"token", "namespace", "pod"}`.
    ///
    /// # Errors
    /// Names the file and what is wrong in it.
    pub fn from_file(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|e| format!("--tokens {}: {e}", path.display()))?;
        let known: Vec<Known> = serde_json::from_str(&text).map_err(|e| format!("--tokens {}: {e}", path.display()))?;
        Ok(Self::Known(known.into_iter().map(|k| (k.token, format!("{}/{}", k.namespace, k.pod))).collect()))
    }

    /// Whose token this is.
    ///
    /// # Errors
    /// When it is nobody's, or nobody can say now.
    pub async fn who(&self, token: &str) -> Result<String, Unknown> {
        match self {
            Self::Known(known) => {
                known.get(token).cloned().ok_or_else(|| Unknown::Refused("the token isn't one of --tokens".into()))
            }
            Self::Reviewed(review) => {
                if let Some(who) = review.remembered.get(token) {
                    return Ok(who);
                }
                let who = review.find(token).await?;
                review.remembered.put(token, who.clone());
                Ok(who)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::authentication::v1::TokenReviewStatus;

    use super::*;

    fn pod(status: &TokenReviewStatus, namespace: &str) -> Result<String, String> {
        let user = bound::user(status.clone(), AUDIENCE);
        user.and_then(|user| super::pod(&user, namespace)).map_err(|unknown| unknown.to_string())
    }

    fn review(user: &str, audience: &str, bound: bool) -> TokenReviewStatus {
        let of_pod =
            |key: &str, value: &str| (format!("authentication.kubernetes.io/pod-{key}"), vec![value.to_owned()]);
        TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![audience.to_owned()]),
            user: Some(UserInfo {
                username: Some(user.to_owned()),
                extra: bound.then(|| [of_pod("name", "agent-3"), of_pod("uid", "u")].into()),
                ..UserInfo::default()
            }),
            error: None,
        }
    }

    #[test]
    fn pods_of_the_endpoints_namespace_are_let_in_and_nobody_else() {
        let ours = "system:serviceaccount:lab:agents";
        assert_eq!(pod(&review(ours, AUDIENCE, true), "lab").unwrap(), "lab/agent-3");
        assert!(pod(&review(ours, "kernelfleet-broker", true), "lab").unwrap_err().contains("audience"));
        assert!(pod(&review("system:serviceaccount:labor:agents", AUDIENCE, true), "lab").is_err());
        assert!(pod(&review("alice", AUDIENCE, true), "lab").unwrap_err().contains("namespace lab"));
        assert!(pod(&review(ours, AUDIENCE, false), "lab").unwrap_err().contains("projected token"));
        let no = TokenReviewStatus { authenticated: Some(false), ..review(ours, AUDIENCE, true) };
        assert!(pod(&no, "lab").is_err());
    }
}
