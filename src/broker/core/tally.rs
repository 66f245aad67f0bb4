//! Counts by name: what metrics are made of, kept with the rows that they belong to.
//!
//! Knows adding, and histograms as counts a bucket. Must not know what is counted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Bounds of waits and of phases, seconds.
pub const SECONDS: [f64; 12] = [0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0];

/// Most different counts of one tally; what would be one more is counted under `OTHER`.
const MOST_COUNTS: usize = 1024;
const OTHER: &str = "other";

/// Counts by family and label. A key is `family|label`, of a histogram `family|label|bucket`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tally(BTreeMap<String, f64>);

impl Tally {
    /// Adds to a counter.
    pub fn add(&mut self, family: &str, label: &str, by: f64) {
        *self.count_of(format!("{family}|{label}")) += by;
    }

    /// A count by its key; beyond the bound the family's own that takes all others.
    fn count_of(&mut self, key: String) -> &mut f64 {
        if self.0.len() < MOST_COUNTS || self.0.contains_key(&key) {
            return self.0.entry(key).or_default();
        }
        let family = key.split('|').next().unwrap_or_default();
        self.0.entry(format!("{family}|{OTHER}")).or_default()
    }

    /// Adds an observation to a histogram with these bounds.
    pub fn observe(&mut self, family: &str, label: &str, bounds: &[f64], value: f64) {
        let bucket = bounds.iter().position(|b| value <= *b).unwrap_or(bounds.len());
        self.add(family, &format!("{label}|{bucket}"), 1.0);
        self.add(family, &format!("{label}|sum"), value);
    }

    /// A counter.
    #[must_use]
    pub fn get(&self, family: &str, label: &str) -> f64 {
        self.0.get(&format!("{family}|{label}")).copied().unwrap_or(0.0)
    }

    /// A counter of whole things.
    #[must_use]
    pub fn count(&self, family: &str, label: &str) -> u64 {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts, never negative")]
        let count = self.get(family, label) as u64;
        count
    }

    /// Labels and values of a family, as they were added.
    pub fn family(&self, family: &str) -> impl Iterator<Item = (&str, f64)> {
        let prefix = format!("{family}|");
        self.0.iter().filter_map(move |(k, v)| k.strip_prefix(&prefix).map(|label| (label, *v)))
    }

    /// All of a family together.
    #[must_use]
    pub fn sum(&self, family: &str) -> f64 {
        self.family(family).map(|x| x.1).sum()
    }

    /// Adds another.
    pub fn merge(&mut self, other: &Self) {
        for (key, value) in &other.0 {
            *self.count_of(key.clone()) += value;
        }
    }

    /// The larger one of each count.
    pub fn highest(&mut self, other: &Self) {
        for (key, value) in &other.0 {
            let mine = self.count_of(key.clone());
            *mine = mine.max(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_counts_what_lies_on_a_bound_below_it() {
        let mut tally = Tally::default();
        for value in [0.01, 0.02, 1e9] {
            tally.observe("wait", "shared", &SECONDS, value);
        }
        let read: Vec<_> = tally.family("wait").map(|(l, v)| (l.to_owned(), v)).collect();
        assert_eq!(read[..3], [("shared|0".into(), 1.0), ("shared|1".into(), 1.0), ("shared|12".into(), 1.0)]);
    }

    #[test]
    fn a_tally_has_a_bound_and_its_sum_none() {
        let mut tally = Tally::default();
        for number in 0..10_000 {
            tally.add("words", &format!("w{number}"), 1.0);
        }
        let mut twice = tally.clone();
        twice.merge(&tally);
        assert_eq!((tally.0.len(), twice.0.len()), (MOST_COUNTS + 1, MOST_COUNTS + 1));
        assert_eq!((tally.sum("words"), twice.sum("words")), (10_000.0, 20_000.0));
    }

    #[test]
    fn what_a_void_generation_counted_is_counted_on_when_its_successor_goes_beyond() {
        let (mut void, mut current) = (Tally::default(), Tally::default());
        void.add("turns", "done", 5.0);
        void.add("turns", "fault", 1.0);
        current.add("turns", "done", 7.0);
        void.highest(&current);
        assert_eq!((void.count("turns", "done"), void.count("turns", "fault")), (7, 1));
    }
}
