//! Leader election on a `coordination.k8s.io` Lease: one replica of the operator works, the others wait.
//!
//! A holder writes its name and the time into the Lease every `RETRY`; who has seen no change for `DURATION`, by its own
//! clock, may take it. Every write replaces the Lease at the version that was read, so that two can't both succeed. A
//! holder that couldn't write for `RENEW` stops, before another may begin.

use std::time::{Duration, Instant};

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::Client;
use kube::api::{Api, PostParams};

/// How long a Lease holds without a renewal.
pub const DURATION: Duration = Duration::from_secs(15);
/// How long a holder tries to renew before it stops.
pub const RENEW: Duration = Duration::from_secs(10);
/// How often it is tried.
pub const RETRY: Duration = Duration::from_secs(2);
/// Longest that one request may take; with it a holder can't miss its own end.
const REQUEST: Duration = Duration::from_secs(5);

/// What one look at the Lease comes to.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// It is ours or free: write this.
    Write(Box<LeaseSpec>),
    /// Another holds it.
    Wait { holder: String },
}

/// What was seen of the Lease, and when, by the own clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    pub holder: String,
    pub renewed: Option<MicroTime>,
    pub transitions: i32,
    pub at: Instant,
}

/// Decides what to do with a Lease as read. `seen` is what was there before; it keeps its time while nothing changes.
#[must_use]
pub fn decide(
    identity: &str,
    lease: Option<&LeaseSpec>,
    seen: Option<&Seen>,
    now: Instant,
    clock: Timestamp,
) -> (Step, Option<Seen>) {
    let spec = |acquired: Option<MicroTime>, transitions: i32| {
        Box::new(LeaseSpec {
            acquire_time: acquired.or(Some(MicroTime(clock))),
            holder_identity: Some(identity.to_owned()),
            lease_duration_seconds: Some(i32::try_from(DURATION.as_secs()).unwrap_or(15)),
            lease_transitions: Some(transitions),
            renew_time: Some(MicroTime(clock)),
            ..LeaseSpec::default()
        })
    };
    let Some(lease) = lease else { return (Step::Write(spec(None, 0)), None) };
    let holder = lease.holder_identity.clone().unwrap_or_default();
    let transitions = lease.lease_transitions.unwrap_or(0);
    if holder == identity {
        return (Step::Write(spec(lease.acquire_time.clone(), transitions)), None);
    }
    if holder.is_empty() {
        return (Step::Write(spec(None, transitions.saturating_add(1))), None);
    }
    let same = seen.filter(|s| s.holder == holder && s.renewed == lease.renew_time && s.transitions == transitions);
    let current = same.cloned().unwrap_or(Seen {
        holder: holder.clone(),
        renewed: lease.renew_time.clone(),
        transitions,
        at: now,
    });
    if now.saturating_duration_since(current.at) > DURATION {
        return (Step::Write(spec(None, transitions.saturating_add(1))), Some(current));
    }
    (Step::Wait { holder }, Some(current))
}

/// One contender for a Lease.
#[derive(Debug)]
pub struct Elector {
    api: Api<Lease>,
    name: String,
    identity: String,
    seen: Option<Seen>,
}

impl Elector {
    /// `identity` is unlike that of any other replica.
    #[must_use]
    pub fn new(client: Client, namespace: &str, name: &str, identity: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: name.into(), identity: identity.into(), seen: None }
    }

    /// Tries once. `true`: the Lease is held.
    async fn attempt(&mut self) -> Result<bool, kube::Error> {
        let live = self.api.get_opt(&self.name).await?;
        let spec = live.as_ref().and_then(|l| l.spec.as_ref());
        let (step, seen) = decide(&self.identity, spec, self.seen.as_ref(), Instant::now(), Timestamp::now());
        self.seen = seen;
        let Step::Write(spec) = step else { return Ok(false) };
        let written = match live {
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.api.create(&PostParams::default(), &Lease { metadata, spec: Some(*spec) }).await
            }
            // With the resourceVersion that was read: whoever was faster wins.
            Some(lease) => {
                let lease = Lease { spec: Some(*spec), ..lease };
                self.api.replace(&self.name, &PostParams::default(), &lease).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits until the Lease is held.
    pub async fn acquire(&mut self) {
        loop {
            match tokio::time::timeout(REQUEST, self.attempt()).await {
                Ok(Ok(true)) => {
                    tracing::info!(lease = self.name, identity = self.identity, "leading");
                    return;
                }
                Ok(Ok(false)) => {}
                Ok(Err(error)) => tracing::warn!(%error, lease = self.name, "the lease can't be read or written"),
                Err(_) => tracing::warn!(lease = self.name, "the API server does not answer"),
            }
            tokio::time::sleep(RETRY).await;
        }
    }

    /// Keeps the Lease; returns when it is lost.
    pub async fn keep(&mut self) {
        let mut renewed = Instant::now();
        loop {
            tokio::time::sleep(RETRY).await;
            let left = RENEW.saturating_sub(renewed.elapsed()).min(REQUEST);
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(true)) => renewed = Instant::now(),
                Ok(Ok(false)) => {
                    if self.seen.as_ref().is_some_and(|s| s.holder != self.identity) {
                        tracing::error!(lease = self.name, "another replica leads now");
                        return;
                    }
                }
                Ok(Err(error)) => tracing::warn!(%error, lease = self.name, "the lease can't be renewed"),
                Err(_) => {}
            }
            if renewed.elapsed() >= RENEW {
                tracing::error!(lease = self.name, "the lease could not be renewed in time");
                return;
            }
        }
    }

    /// Gives the Lease back, so that another replica needn't wait for its end.
    pub async fn release(&self) {
        let Ok(Some(lease)) = self.api.get_opt(&self.name).await else { return };
        let held = lease.spec.as_ref().and_then(|s| s.holder_identity.as_deref()) == Some(self.identity.as_str());
        if !held {
            return;
        }
        let spec = lease.spec.clone().map(|s| LeaseSpec {
            holder_identity: None,
            renew_time: Some(MicroTime(Timestamp::now())),
            lease_duration_seconds: Some(1),
            ..s
        });
        if let Err(error) = self.api.replace(&self.name, &PostParams::default(), &Lease { spec, ..lease }).await {
            tracing::warn!(%error, "the lease can't be given back");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(by: &str, renewed: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(by.into()),
            renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
            lease_transitions: Some(3),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn a_free_lease_is_taken_and_an_own_one_renewed() {
        let now = Instant::now();
        let clock = Timestamp::from_second(100).unwrap();
        let (step, _) = decide("a", None, None, now, clock);
        let Step::Write(spec) = step else { panic!("not taken") };
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("a"), Some(0)));
        let (step, _) = decide("a", Some(&held("a", 90)), None, now, clock);
        let Step::Write(spec) = step else { panic!("not renewed") };
        assert_eq!((spec.lease_transitions, spec.renew_time.clone().unwrap().0), (Some(3), clock));
        let (step, _) = decide("a", Some(&held("", 90)), None, now, clock);
        let Step::Write(spec) = step else { panic!("not taken after a release") };
        assert_eq!(spec.lease_transitions, Some(4));
    }

    #[test]
    fn anothers_lease_is_taken_only_after_it_stood_still_by_the_own_clock() {
        let now = Instant::now();
        let clock = Timestamp::from_second(100_000).unwrap();
        // Its time lies far in the past by our clock, which says nothing.
        let (step, seen) = decide("a", Some(&held("b", 5)), None, now, clock);
        assert_eq!(step, Step::Wait { holder: "b".into() });
        let later = now + DURATION;
        let (step, seen) = decide("a", Some(&held("b", 5)), seen.as_ref(), later, clock);
        assert_eq!(step, Step::Wait { holder: "b".into() });
        // A renewal begins the wait anew.
        let (step, renewed) = decide("a", Some(&held("b", 6)), seen.as_ref(), later + RETRY, clock);
        assert_eq!(step, Step::Wait { holder: "b".into() });
        let (step, _) = decide("a", Some(&held("b", 6)), renewed.as_ref(), later + RETRY + DURATION, clock);
        assert_eq!(step, Step::Wait { holder: "b".into() });
        let (step, _) = decide("a", Some(&held("b", 5)), seen.as_ref(), later + RETRY, clock);
        let Step::Write(spec) = step else { panic!("not taken over") };
        assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("a"), Some(4)));
    }
}
