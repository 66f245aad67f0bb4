//! What a gateway has passed on, for Prometheus.
//!
//! Knows counters and their names. Must not know what was asked.

use prometheus::{Encoder, IntCounterVec, IntGauge, Opts, Registry, TextEncoder};

use crate::gateway::tokens::Usage;

/// Counters of a gateway since its start.
#[derive(Clone, Debug)]
pub struct Counts {
    registry: Registry,
    tokens: IntCounterVec,
    requests: IntCounterVec,
    retries: IntCounterVec,
    /// Requests that wait or are being answered.
    pub under_way: IntGauge,
}

/// How a request ended, as the label `outcome` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Answered,
    /// The answer broke off.
    Cut,
    /// The caller did not wait for it.
    Left,
    /// The endpoint won't serve it.
    Refused,
    /// The endpoint failed at all attempts.
    Unavailable,
    /// The caller is unknown, or asked for what this gateway doesn't serve.
    Denied,
}

impl Outcome {
    const ALL: [Self; 6] = [Self::Answered, Self::Cut, Self::Left, Self::Refused, Self::Unavailable, Self::Denied];

    const fn word(self) -> &'static str {
        match self {
            Self::Answered => "answered",
            Self::Cut => "cut",
            Self::Left => "left",
            Self::Refused => "refused",
            Self::Unavailable => "unavailable",
            Self::Denied => "denied",
        }
    }
}

impl Counts {
    /// # Errors
    /// When two have the same name.
    pub fn new() -> Result<Self, prometheus::Error> {
        let registry = Registry::new_custom(Some("kernelfleet".into()), None)?;
        let counter = |name: &str, help: &str, label: &str| {
            let counter = IntCounterVec::new(Opts::new(name, help), &[label])?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let tokens = counter("gateway_tokens_total", "Tokens that models read and wrote, by kind", "kind")?;
        let requests = counter("gateway_requests_total", "Requests of agents, by how they ended", "outcome")?;
        let retries =
            counter("gateway_retries_total", "Attempts at the endpoint that failed and were made again", "path")?;
        let under_way = IntGauge::new("gateway_requests", "Requests that wait or are being answered")?;
        registry.register(Box::new(under_way.clone()))?;
        // A series that begins with its first event hides that event from rates.
        for kind in ["prompt", "cached", "completion"] {
            tokens.with_label_values(&[kind]);
        }
        for outcome in Outcome::ALL {
            requests.with_label_values(&[outcome.word()]);
        }
        Ok(Self { registry, tokens, requests, retries, under_way })
    }

    /// A request ended so.
    pub fn ended(&self, outcome: Outcome) {
        self.requests.with_label_values(&[outcome.word()]).inc();
    }

    /// Attempts that failed before an answer came.
    pub fn retried(&self, path: &str, count: u32) {
        self.retries.with_label_values(&[path]).inc_by(u64::from(count));
    }

    /// What an answer took.
    pub fn used(&self, usage: &Usage) {
        self.tokens.with_label_values(&["prompt"]).inc_by(usage.prompt);
        self.tokens.with_label_values(&["cached"]).inc_by(usage.cached);
        self.tokens.with_label_values(&["completion"]).inc_by(usage.completion);
    }

    /// All of them as text.
    ///
    /// # Errors
    /// When one can't be written.
    pub fn text(&self) -> Result<String, prometheus::Error> {
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}
