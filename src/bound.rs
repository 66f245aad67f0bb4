//! Bound tokens: what the API server says of one, whose pod it is, and for how long that is believed.
//!
//! Knows TokenReview. Must not know what a caller may do.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest, Sha256};

/// How long an answer of the API server is believed.
const BELIEVED: Duration = Duration::from_secs(25);
/// Most answers that are remembered.
const MOST_REMEMBERED: usize = 50_000;

/// Why nobody is known by a token.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unknown {
    /// The token says nobody that has to do with whom it was shown to.
    #[error("{0}")]
    Refused(String),
    /// Nobody can say now; ask again.
    #[error("{0}")]
    Unavailable(String),
}

/// Asks the API server whose token this is.
///
/// # Errors
/// `Refused` where it isn't valid for the audience, `Unavailable` where the server can't say.
pub async fn review(client: &Client, audience: &str, token: &str) -> Result<UserInfo, Unknown> {
    let review = TokenReview {
        spec: TokenReviewSpec { audiences: Some(vec![audience.to_owned()]), token: Some(token.to_owned()) },
        ..TokenReview::default()
    };
    let reviewed = Api::<TokenReview>::all(client.clone()).create(&PostParams::default(), &review).await;
    let reviewed = reviewed.map_err(|e| Unknown::Unavailable(format!("the token can't be reviewed: {e}")))?;
    user(reviewed.status.unwrap_or_default(), audience)
}

/// Of whom a review speaks. Pure.
///
/// # Errors
/// `Refused` where the token isn't valid for the audience.
pub fn user(status: TokenReviewStatus, audience: &str) -> Result<UserInfo, Unknown> {
    let meant = status.audiences.iter().flatten().any(|a| a == audience);
    match status.user {
        Some(user) if status.authenticated == Some(true) && meant => Ok(user),
        _ => {
            let why = status.error.as_deref().unwrap_or("it was refused");
            Err(Unknown::Refused(format!("the token isn't valid for the audience {audience}: {why}")))
        }
    }
}

/// A service account, as a review names it.
#[derive(Clone, Debug)]
pub struct Account {
    /// `namespace:name`.
    pub name: String,
    pub namespace: String,
    pod: Option<(String, String)>,
}

impl Account {
    /// # Errors
    /// `Refused` where the user is a person.
    pub fn of(user: &UserInfo) -> Result<Self, Unknown> {
        let username = user.username.clone().unwrap_or_default();
        let name = username.strip_prefix("system:serviceaccount:").unwrap_or_default();
        let (namespace, _) =
            name.split_once(':').ok_or_else(|| Unknown::Refused(format!("{username:?} isn't a service account")))?;
        let extra = |key: &str| user.extra.as_ref().and_then(|e| e.get(key)).and_then(|v| v.first()).cloned();
        let pod = extra("authentication.kubernetes.io/pod-name").zip(extra("authentication.kubernetes.io/pod-uid"));
        Ok(Self { name: name.to_owned(), namespace: namespace.to_owned(), pod })
    }

    /// Name and UID of the pod that the token is bound to.
    ///
    /// # Errors
    /// `Refused` where it is bound to none.
    pub fn pod(&self) -> Result<(String, String), Unknown> {
        self.pod.clone().ok_or_else(|| {
            Unknown::Refused(format!("the token of {} isn't bound to a pod; use a projected token", self.name))
        })
    }
}

/// Answers that are still believed, by the tokens' digests.
#[derive(Debug)]
pub struct Remembered<T>(Mutex<BTreeMap<[u8; 32], (Instant, T)>>);

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T: Clone> Remembered<T> {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<[u8; 32], (Instant, T)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was answered of a token lately.
    pub fn get(&self, token: &str) -> Option<T> {
        let key: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        self.lock().get(&key).filter(|(at, _)| at.elapsed() < BELIEVED).map(|(_, who)| who.clone())
    }

    /// Remembers an answer.
    pub fn put(&self, token: &str, who: T) {
        let mut remembered = self.lock();
        if remembered.len() >= MOST_REMEMBERED {
            remembered.retain(|_, (at, _)| at.elapsed() < BELIEVED);
        }
        remembered.insert(Sha256::digest(token.as_bytes()).into(), (Instant::now(), who));
    }
}
