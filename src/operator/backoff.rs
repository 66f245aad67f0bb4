//! How long what failed waits until it is tried again: longer with each failure, and not all at the same time.
//!
//! Knows how often each object has failed. Must not know why.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The first wait.
const FIRST: Duration = Duration::from_secs(5);
/// The longest wait.
const MOST: Duration = Duration::from_secs(300);

/// Failures in a row, by object.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: Mutex<HashMap<String, u32>>,
}

impl Backoff {
    /// It failed: how long it waits.
    pub fn failed(&self, object: &str) -> Duration {
        let mut failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(object.to_owned()).or_default();
        *count = count.saturating_add(1);
        wait(object, *count)
    }

    /// It succeeded, or is gone.
    pub fn forget(&self, object: &str) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).remove(object);
    }
}

/// The wait after so many failures in a row: doubled with each, up to five minutes, and by up to a quarter shorter, by a share
/// that is the object's own, so that what failed together isn't tried again together.
fn wait(object: &str, failures: u32) -> Duration {
    let doubled = FIRST.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(MOST);
    let mut hash = DefaultHasher::new();
    (object, failures).hash(&mut hash);
    let share = u32::try_from(hash.finish() % 1024).unwrap_or(0);
    doubled - doubled / 4 * share / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_five_minutes_and_begin_anew_after_a_success() {
        let backoff = Backoff::default();
        let mut most = FIRST;
        for _ in 0..40 {
            let wait = backoff.failed("a");
            assert!(wait <= most && wait >= most / 4 * 3, "{wait:?} of {most:?}");
            most = (most * 2).min(MOST);
        }
        backoff.forget("a");
        assert!(backoff.failed("a") <= FIRST);
    }

    #[test]
    fn what_failed_together_is_not_tried_again_together() {
        let backoff = Backoff::default();
        let waits: std::collections::HashSet<Duration> = (0..100).map(|n| backoff.failed(&n.to_string())).collect();
        assert!(waits.len() > 50, "{waits:?}");
    }
}
