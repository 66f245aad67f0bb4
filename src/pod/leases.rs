//! The leases that a judge works on: until when, under which leash, and which have exclusive use of the card.
//!
//! Knows time and what is to be killed; time is an argument. Must not know calls, nor what is evaluated.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::judge::Leash;

/// Why a lease ended before its work did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Over {
    #[error("the lease of {0:.0?} is over")]
    Time(Duration),
    #[error("the exclusive slice of {0:.0?} is over")]
    Exclusive(Duration),
    #[error("the broker has ended the lease")]
    Broker,
    #[error("the judge ends")]
    Ending,
}

#[derive(Debug)]
struct Lease {
    /// Number of the registration that it was given to.
    session: u64,
    leash: Leash,
    seconds: Duration,
    until: Instant,
    exclusive: Option<Exclusive>,
    over: Option<Over>,
}

#[derive(Clone, Copy, Debug)]
struct Exclusive {
    slice: u64,
    until: Instant,
    seconds: Duration,
}

/// All leases of one registration.
#[derive(Debug, Default)]
pub struct Leases(Mutex<BTreeMap<u64, Lease>>);

impl Leases {
    fn held(&self) -> MutexGuard<'_, BTreeMap<u64, Lease>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Work on a lease of a registration begins, which counts from `from`.
    pub fn begin(&self, (session, id): (u64, u64), leash: Leash, seconds: Duration, from: Instant) {
        let lease = Lease { session, leash, seconds, until: from + seconds, exclusive: None, over: None };
        self.held().insert(id, lease);
    }

    /// Its work has ended; why it was killed before, if it was.
    pub fn end(&self, id: u64) -> Option<Over> {
        self.held().remove(&id)?.over
    }

    /// Whether it was killed, or is none of these.
    #[must_use]
    pub fn is_over(&self, id: u64) -> bool {
        self.held().get(&id).is_none_or(|lease| lease.over.is_some())
    }

    /// One that is worked on and isn't over, with its registration: who waits for the card asks on through it.
    #[must_use]
    pub fn heir(&self) -> Option<(u64, u64)> {
        self.held().iter().find(|(_, lease)| lease.over.is_none()).map(|(id, lease)| (lease.session, *id))
    }

    /// It has the card alone, in a slice of this number, for so long from `from`.
    pub fn exclusive(&self, id: u64, slice: u64, seconds: Duration, from: Instant) {
        if let Some(lease) = self.held().get_mut(&id) {
            lease.exclusive = Some(Exclusive { slice, until: from + seconds, seconds });
        }
    }

    /// It gives the card back; the number of its slice.
    pub fn shared(&self, id: u64) -> Option<u64> {
        Some(self.held().get_mut(&id)?.exclusive.take()?.slice)
    }

    /// Leases that are worked on.
    #[must_use]
    pub fn ids(&self) -> Vec<u64> {
        self.held().keys().copied().collect()
    }

    /// Kills the work on a lease.
    pub fn kill(&self, id: u64, why: Over) {
        let leash = self.held().get_mut(&id).map(|lease| {
            lease.over.get_or_insert(why);
            lease.leash.clone()
        });
        if let Some(leash) = leash {
            leash.end();
        }
    }

    /// Kills the work on all.
    pub fn kill_all(&self, why: Over) {
        for id in self.ids() {
            self.kill(id, why);
        }
    }

    /// Kills what is over its time.
    pub fn expire(&self, now: Instant) {
        let due: Vec<(u64, Over)> = self
            .held()
            .iter()
            .filter(|(_, lease)| lease.over.is_none())
            .filter_map(|(id, lease)| match lease.exclusive {
                _ if now >= lease.until => Some((*id, Over::Time(lease.seconds))),
                Some(slice) if now >= slice.until => Some((*id, Over::Exclusive(slice.seconds))),
                _ => None,
            })
            .collect();
        for (id, why) in due {
            self.kill(id, why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_and_an_exclusive_slice_within_it_end_by_time() {
        let seconds = Duration::from_secs;
        let (leases, now) = (Leases::default(), Instant::now());
        let leashes = [Leash::new(), Leash::new(), Leash::new()];
        for (id, leash) in (1..).zip(&leashes) {
            leases.begin((9, id), leash.clone(), seconds(100 * id), now);
        }
        leases.exclusive(2, 7, seconds(30), now + seconds(20));
        leases.exclusive(3, 8, seconds(30), now + seconds(20));
        assert_eq!((leases.shared(3), leases.shared(3)), (Some(8), None));
        leases.expire(now + seconds(49));
        assert!([1, 2, 3].iter().all(|id| !leases.is_over(*id)));
        leases.expire(now + seconds(50));
        assert_eq!([1, 2, 3].map(|id| leases.is_over(id)), [false, true, false]);
        assert_eq!(leases.heir(), Some((9, 1)));
        leases.expire(now + seconds(101));
        assert_eq!(leases.heir(), Some((9, 3)));
        assert_eq!(leashes.each_ref().map(Leash::is_over), [true, true, false]);
        assert_eq!(leases.end(1), Some(Over::Time(seconds(100))));
        assert_eq!(leases.end(2), Some(Over::Exclusive(seconds(30))));
        assert_eq!((leases.end(3), leases.end(4)), (None, None));
        assert!(leases.is_over(3), "what is not worked on is over");
        assert_eq!(leases.heir(), None);
    }
}
