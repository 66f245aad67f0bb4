//! Who may ask a gateway: pods of its namespace, known by bound tokens.
//!
//! Knows tokens and namespaces. Must not know what is asked.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use serde::Deserialize;

use crate::judge::cache::digest;

/// Audience of the tokens.
pub const AUDIENCE: &str = "kernelfleet-gateway";
/// How long an answer of the API server is believed.
const BELIEVED: Duration = Duration::from_secs(25);
/// Most answers that are remembered.
const MOST_REMEMBERED: usize = 50_000;

/// Why nobody is let in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unknown {
    Refused(String),
    /// Nobody can say now.
    Unavailable(String),
}

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
    remembered: Mutex<BTreeMap<String, (Instant, String)>>,
}

impl Review {
    #[must_use]
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace, remembered: Mutex::default() }
    }

    async fn find(&self, token: &str) -> Result<String, Unknown> {
        let review = TokenReview {
            spec: TokenReviewSpec { audiences: Some(vec![AUDIENCE.to_owned()]), token: Some(token.to_owned()) },
            ..TokenReview::default()
        };
        let reviewed = Api::<TokenReview>::all(self.client.clone()).create(&PostParams::default(), &review).await;
        let reviewed = reviewed.map_err(|e| Unknown::Unavailable(format!("the token can't be reviewed: {e}")))?;
        pod(&reviewed.status.unwrap_or_default(), &self.namespace).map_err(Unknown::Refused)
    }
}

/// Whose pod a review speaks of. Pure.
fn pod(status: &TokenReviewStatus, namespace: &str) -> Result<String, String> {
    let meant = status.audiences.iter().flatten().any(|a| a == AUDIENCE);
    if status.authenticated != Some(true) || !meant {
        let why = status.error.as_deref().unwrap_or("it was refused");
        return Err(format!("the token isn't valid for the audience {AUDIENCE}: {why}"));
    }
    let user = status.user.clone().unwrap_or_default();
    let name = user.username.unwrap_or_default();
    let of = name.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':')).map(|(of, _)| of);
    if of != Some(namespace) {
        return Err(format!("{name:?} isn't of the namespace {namespace}, which this endpoint belongs to"));
    }
    let pod = user.extra.as_ref().and_then(|e| e.get("authentication.kubernetes.io/pod-name")).and_then(|v| v.first());
    let pod = pod.ok_or_else(|| format!("the token of {name} isn't bound to a pod; use a projected token"))?;
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
                let key = digest([token.as_bytes()]);
                let known = {
                    let remembered = review.remembered.lock().unwrap_or_else(PoisonError::into_inner);
                    remembered.get(&key).filter(|(at, _)| at.elapsed() < BELIEVED).map(|(_, who)| who.clone())
                };
                if let Some(who) = known {
                    return Ok(who);
                }
                let who = review.find(token).await?;
                let mut remembered = review.remembered.lock().unwrap_or_else(PoisonError::into_inner);
                if remembered.len() >= MOST_REMEMBERED {
                    remembered.retain(|_, (at, _)| at.elapsed() < BELIEVED);
                }
                remembered.insert(key, (Instant::now(), who.clone()));
                Ok(who)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::api::authentication::v1::UserInfo;

    fn review(user: &str, audience: &str, bound: bool) -> TokenReviewStatus {
        let name = ("authentication.kubernetes.io/pod-name".to_owned(), vec!["agent-3".to_owned()]);
        TokenReviewStatus {
            authenticated: Some(true),
            audiences: Some(vec![audience.to_owned()]),
            user: Some(UserInfo {
                username: Some(user.to_owned()),
                extra: bound.then(|| [name].into()),
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
