//! When a request may be sent, and what follows a failure: one budget for all agents of the process. Pure.
//!
//! Knows rates, waiting and retries; time and chance are arguments. Must not know HTTP or what is asked.

use std::time::Duration;

/// What an endpoint may be asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    pub requests_per_minute: Option<u32>,
    pub tokens_per_minute: Option<u32>,
    /// Requests at once.
    pub concurrency: usize,
    /// Attempts at one request that may fail by the server's or the network's fault.
    pub tries: u32,
    /// Attempts at one request that may be answered with "too many requests".
    pub rate_tries: u32,
    /// Attempts at one request that may find no server: one that is down is told soon, unlike one that is busy.
    pub unreachable_tries: u32,
    /// Attempts at one request whose key may be refused, where the key is in a file that changes: it may just be changing.
    pub key_tries: u32,
    /// Wait before the first retry after a refused key, doubled like the others: a Secret's file follows within a minute or two.
    pub key_wait: Duration,
    /// Retries of all agents together; beyond it they wait, so that a server in trouble isn't stormed.
    pub retries_per_minute: u32,
    /// Wait before the first retry; each further one waits twice as long.
    pub first_wait: Duration,
    pub most_wait: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            requests_per_minute: None,
            tokens_per_minute: None,
            concurrency: 64,
            tries: 6,
            rate_tries: 20,
            unreachable_tries: 5,
            key_tries: 6,
            key_wait: Duration::from_secs(5),
            retries_per_minute: 120,
            first_wait: Duration::from_millis(500),
            most_wait: Duration::from_secs(60),
        }
    }
}

/// How an attempt failed, as far as it matters for the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failed {
    /// 429.
    Rate,
    /// 5xx, a connection that broke, a stream that was cut, a hang.
    Trouble,
    /// No connection could be made: nobody listens, no such name.
    Unreachable,
    /// 401, by a key that may change.
    Denied,
}

/// What is left of a rate: a bucket that fills steadily. It may go below zero, when more was used than announced.
#[derive(Clone, Debug)]
struct Bucket {
    capacity: f64,
    level: f64,
    at: Duration,
}

impl Bucket {
    fn a_minute(rate: u32) -> Self {
        // A burst of six seconds' worth: a full minute's at once is what rate limits are there to prevent.
        let capacity = (f64::from(rate) / 10.0).max(1.0);
        Self { capacity, level: capacity, at: Duration::ZERO }
    }

    /// Wait until `amount` is there; more than the bucket holds counts as a full bucket.
    fn wait(&mut self, now: Duration, amount: f64, rate: u32) -> Duration {
        let a_second = f64::from(rate).max(1e-3) / 60.0;
        self.level = (self.level + now.saturating_sub(self.at).as_secs_f64() * a_second).min(self.capacity);
        self.at = self.at.max(now);
        let missing = amount.min(self.capacity) - self.level;
        if missing <= 1e-9 { Duration::ZERO } else { Duration::from_secs_f64(missing / a_second) }
    }
}

/// The state of an endpoint's budget. Times are counted from any fixed moment.
#[derive(Debug)]
pub struct Budget {
    limits: Limits,
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    retries: Bucket,
    /// Nobody sends before: the server said so.
    closed_until: Duration,
    random: u64,
}

/// Attempts at one request so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    pub trouble: u32,
    pub rate: u32,
    pub unreachable: u32,
    pub denied: u32,
}

impl Tries {
    #[must_use]
    pub const fn failed(&self) -> u32 {
        self.trouble + self.rate + self.unreachable + self.denied
    }
}

impl Budget {
    #[must_use]
    pub fn new(limits: Limits, seed: u64) -> Self {
        Self {
            requests: limits.requests_per_minute.map(Bucket::a_minute),
            tokens: limits.tokens_per_minute.map(Bucket::a_minute),
            retries: Bucket { capacity: f64::from(limits.retries_per_minute.max(6)) / 6.0, ..Bucket::a_minute(1) },
            closed_until: Duration::ZERO,
            random: seed,
            limits,
        }
        .filled()
    }

    fn filled(mut self) -> Self {
        self.retries.level = self.retries.capacity;
        self
    }

    /// Asks for leave to send a request of about `tokens`. `Err` is how long to wait before asking again.
    ///
    /// # Errors
    /// Where it is too early.
    pub fn admit(&mut self, now: Duration, tokens: u64, retry: bool) -> Result<(), Duration> {
        let mut wait = self.closed_until.saturating_sub(now);
        #[allow(clippy::cast_precision_loss)]
        let tokens = tokens as f64;
        if let (Some(bucket), Some(rate)) = (&mut self.requests, self.limits.requests_per_minute) {
            wait = wait.max(bucket.wait(now, 1.0, rate));
        }
        if let (Some(bucket), Some(rate)) = (&mut self.tokens, self.limits.tokens_per_minute) {
            wait = wait.max(bucket.wait(now, tokens, rate));
        }
        if retry {
            wait = wait.max(self.retries.wait(now, 1.0, self.limits.retries_per_minute));
        }
        if !wait.is_zero() {
            return Err(wait);
        }
        if let Some(bucket) = &mut self.requests {
            bucket.level -= 1.0;
        }
        if let Some(bucket) = &mut self.tokens {
            bucket.level -= tokens;
        }
        if retry {
            self.retries.level -= 1.0;
        }
        Ok(())
    }

    /// A request that announced `announced` tokens took `used`.
    #[allow(clippy::cast_precision_loss)]
    pub fn used(&mut self, announced: u64, used: u64) {
        if let Some(bucket) = &mut self.tokens {
            bucket.level += announced as f64 - used as f64;
        }
    }

    /// After a failure: how long to wait before the next attempt, `None` to give up. A server that says when to come
    /// back closes the endpoint for all until then.
    pub fn failed(
        &mut self,
        now: Duration,
        failed: Failed,
        tries: &mut Tries,
        retry_after: Option<Duration>,
    ) -> Option<Duration> {
        let (first, limits) = (self.limits.first_wait, &self.limits);
        let (count, most, first) = match failed {
            Failed::Rate => (&mut tries.rate, limits.rate_tries, first),
            Failed::Trouble => (&mut tries.trouble, limits.tries, first),
            Failed::Unreachable => (&mut tries.unreachable, limits.unreachable_tries, first),
            Failed::Denied => (&mut tries.denied, limits.key_tries, limits.key_wait),
        };
        *count += 1;
        let count = *count;
        let doubled = first.saturating_mul(1 << (count - 1).min(20)).min(self.limits.most_wait);
        // Half is certain, half is chance, so that agents that failed together don't come back together.
        let wait = retry_after.unwrap_or_else(|| doubled.mul_f64(0.5 + 0.5 * self.chance()));
        if failed == Failed::Rate || retry_after.is_some() {
            self.closed_until = self.closed_until.max(now + wait);
        }
        (count < most).then_some(wait)
    }

    /// A number in [0, 1): splitmix64.
    fn chance(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        #[allow(clippy::cast_precision_loss)]
        let part = ((z ^ (z >> 31)) >> 11) as f64;
        part / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    /// Sends as fast as it may until `end`; how many went out.
    fn sent(budget: &mut Budget, tokens: u64, retry: bool, end: f64) -> usize {
        let (mut now, mut count) = (0.0, 0);
        while now < end {
            match budget.admit(at(now), tokens, retry) {
                Ok(()) => count += 1,
                Err(wait) => now += wait.as_secs_f64().max(1e-6),
            }
        }
        count
    }

    #[test]
    fn a_rate_of_requests_holds_over_minutes() {
        let mut budget = Budget::new(Limits { requests_per_minute: Some(60), ..Limits::default() }, 1);
        let count = sent(&mut budget, 1, false, 300.0);
        assert!((300..=307).contains(&count), "{count}");
    }

    #[test]
    fn a_rate_of_tokens_holds_and_what_was_announced_wrongly_is_made_good() {
        let mut budget = Budget::new(Limits { tokens_per_minute: Some(6000), ..Limits::default() }, 1);
        let count = sent(&mut budget, 100, false, 60.0);
        assert!((60..=67).contains(&count), "{count}");
        let mut budget = Budget::new(Limits { tokens_per_minute: Some(6000), ..Limits::default() }, 1);
        budget.admit(at(0.0), 100, false).unwrap();
        budget.used(100, 1100);
        // 600 were there, 1100 are gone: 100 are due after 600 / 100 seconds.
        let wait = budget.admit(at(0.0), 100, false).unwrap_err();
        assert!((wait.as_secs_f64() - 6.0).abs() < 0.01, "{wait:?}");
    }

    #[test]
    fn a_server_that_says_when_to_come_back_is_left_alone_by_all_until_then() {
        let mut budget = Budget::new(Limits::default(), 1);
        let mut tries = Tries::default();
        let wait = budget.failed(at(10.0), Failed::Rate, &mut tries, Some(at(7.0)));
        assert_eq!((wait, tries), (Some(at(7.0)), Tries { rate: 1, ..Tries::default() }));
        assert_eq!(budget.admit(at(12.0), 1, false), Err(at(5.0)));
        assert_eq!(budget.admit(at(17.0), 1, false), Ok(()));
    }

    #[test]
    fn waits_double_with_jitter_and_end_with_the_tries() {
        let mut budget = Budget::new(Limits { tries: 5, most_wait: at(3.0), ..Limits::default() }, 7);
        let mut tries = Tries::default();
        let mut waits = Vec::new();
        while let Some(wait) = budget.failed(at(0.0), Failed::Trouble, &mut tries, None) {
            waits.push(wait.as_secs_f64());
        }
        assert_eq!((waits.len(), tries.trouble), (4, 5));
        for (wait, whole) in waits.iter().zip([0.5, 1.0, 2.0, 3.0]) {
            assert!((whole * 0.5..=whole).contains(wait), "{wait} of {whole}");
        }
        // Trouble of one request closes the endpoint for nobody else.
        assert_eq!(budget.admit(at(0.0), 1, false), Ok(()));
    }

    #[test]
    fn a_server_that_is_down_is_given_up_sooner_than_one_in_trouble() {
        let mut budget = Budget::new(Limits::default(), 7);
        let mut seconds = |failed: Failed| {
            let mut tries = Tries::default();
            let waits = std::iter::from_fn(|| budget.failed(at(0.0), failed, &mut tries, None));
            waits.map(|w| w.as_secs_f64()).sum::<f64>()
        };
        let (down, trouble, rate) = (seconds(Failed::Unreachable), seconds(Failed::Trouble), seconds(Failed::Rate));
        assert!(down < 7.6 && down < trouble && trouble < rate, "{down} {trouble} {rate}");
        let denied = seconds(Failed::Denied);
        assert!((60.0..150.0).contains(&denied), "the file of a Secret follows it within {denied} s");
    }

    #[test]
    fn retries_of_all_agents_share_one_budget_and_first_attempts_are_free_of_it() {
        let mut budget = Budget::new(Limits { retries_per_minute: 60, ..Limits::default() }, 1);
        let count = sent(&mut budget, 1, true, 60.0);
        assert!((65..=71).contains(&count), "{count}");
        while budget.admit(at(61.0), 1, true).is_ok() {}
        assert_eq!(budget.admit(at(61.0), 1, false), Ok(()));
    }
}
