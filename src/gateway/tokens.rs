//! Tokens and what they cost.
//!
//! Knows counts and prices. Must not know any tokenizer: what a server does not count is estimated, and marked so.

use serde::{Deserialize, Serialize};

/// Tokens of one answer, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens that the model read.
    pub prompt: u64,
    /// Tokens that it wrote, its reasoning included.
    pub completion: u64,
    /// Of `prompt`, those that the server had in its cache.
    #[serde(default)]
    pub cached: u64,
    /// The server did not count; these were estimated from the length of the texts.
    #[serde(default)]
    pub estimated: bool,
}

impl Usage {
    /// Both together.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.prompt + self.completion
    }
}

impl std::ops::AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompt += other.prompt;
        self.completion += other.completion;
        self.cached += other.cached;
        self.estimated |= other.estimated;
    }
}

/// Bytes of source and prose that make one token, in common vocabularies; on the careful side for code.
const BYTES_A_TOKEN: f64 = 3.3;

/// How many tokens a text of that many bytes comes to.
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
pub fn estimate(bytes: usize) -> u64 {
    (bytes as f64 / BYTES_A_TOKEN).ceil() as u64
}

/// Prices, in any currency, of a million tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Prices {
    pub prompt: f64,
    pub completion: f64,
    /// Of a cached token; as `prompt` if nothing is said.
    pub cached: Option<f64>,
}

impl Prices {
    /// What an answer cost.
    #[must_use]
    #[allow(clippy::cast_precision_loss)]
    pub fn cost(&self, usage: &Usage) -> f64 {
        let cached = usage.cached.min(usage.prompt);
        let fresh = (usage.prompt - cached) as f64 * self.prompt;
        (fresh + cached as f64 * self.cached.unwrap_or(self.prompt) + usage.completion as f64 * self.completion) / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_tokens_have_their_own_price() {
        let usage = Usage { prompt: 1_000_000, completion: 500_000, cached: 400_000, estimated: false };
        let prices = Prices { prompt: 3.0, completion: 10.0, cached: Some(0.5) };
        assert!((prices.cost(&usage) - (1.8 + 0.2 + 5.0)).abs() < 1e-9);
        assert!((Prices { cached: None, ..prices }.cost(&usage) - 8.0).abs() < 1e-9);
    }

    #[test]
    fn a_sum_is_estimated_where_a_part_is() {
        let mut sum = Usage { prompt: 1, completion: 2, cached: 0, estimated: false };
        sum += Usage { prompt: 10, completion: 20, cached: 5, estimated: true };
        assert_eq!(sum, Usage { prompt: 11, completion: 22, cached: 5, estimated: true });
        assert_eq!((estimate(0), estimate(1), estimate(330)), (0, 1, 100));
    }
}
