//! Statistics of measurements: medians, paired bootstrap intervals, when to stop, which reward follows.
//!
//! Pure. Knows numbers and the rules of the contract; must not know where a sample came from.

use super::verdict::{FASTER, Interval};

/// Resamples of a bootstrap: enough that the ends of a 95 % interval are stable to a few per mille of its width.
const RESAMPLES: usize = 1000;

/// A small generator (SplitMix64) so that a bootstrap is a function of its arguments.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..bound`; `bound` must not be 0.
    pub fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.next_u64()) * bound as u128;
        (wide >> 64) as usize
    }
}

/// Median; `None` of nothing.
#[must_use]
pub fn median(samples: &[f64]) -> Option<f64> {
    let mut finite: Vec<f64> = samples.iter().copied().filter(|x| x.is_finite()).collect();
    (!finite.is_empty()).then(|| median_of(&mut finite))
}

/// Mean; 0 of nothing.
#[must_use]
pub fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len().max(1) as f64
}

fn resample(samples: &[f64], picks: &[usize], scratch: &mut Vec<f64>) -> f64 {
    scratch.clear();
    scratch.extend(picks.iter().map(|&i| samples[i]));
    median_of(scratch)
}

/// Median of what is not empty; its order is lost.
fn median_of(values: &mut [f64]) -> f64 {
    let n = values.len();
    let (below, &mut middle, _) = values.select_nth_unstable_by(n / 2, f64::total_cmp);
    if n % 2 == 1 {
        return middle;
    }
    let under = below.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    f64::midpoint(under, middle)
}

fn percentiles(mut values: Vec<f64>, centre: f64) -> Interval {
    values.sort_by(f64::total_cmp);
    let at = |q: f64| values[((values.len() - 1) as f64 * q).round() as usize];
    Interval { median: centre, low: at(0.025).min(centre), high: at(0.975).max(centre) }
}

/// Median with its 95 % bootstrap interval.
#[must_use]
pub fn interval(samples: &[f64], seed: u64) -> Option<Interval> {
    let centre = median(samples)?;
    let mut random = Random::new(seed);
    let mut scratch = Vec::with_capacity(samples.len());
    let values = (0..RESAMPLES)
        .map(|_| {
            let picks: Vec<usize> = samples.iter().map(|_| random.below(samples.len())).collect();
            resample(samples, &picks, &mut scratch)
        })
        .collect();
    Some(percentiles(values, centre))
}

/// Speedup = median of the baseline over median of the candidate, with its interval. Samples of equal index
/// were taken on the same inputs, so a resample takes both (paired); of unequal number, each on its own.
#[must_use]
pub fn speedup(baseline: &[f64], candidate: &[f64], seed: u64) -> Option<Interval> {
    let centre = median(baseline)? / median(candidate)?;
    let paired = baseline.len() == candidate.len();
    let mut random = Random::new(seed);
    let mut scratch = Vec::new();
    let values = (0..RESAMPLES)
        .map(|_| {
            let picks: Vec<usize> = candidate.iter().map(|_| random.below(candidate.len())).collect();
            let below = resample(candidate, &picks, &mut scratch);
            let above = if paired {
                resample(baseline, &picks, &mut scratch)
            } else {
                let picks: Vec<usize> = baseline.iter().map(|_| random.below(baseline.len())).collect();
                resample(baseline, &picks, &mut scratch)
            };
            above / below
        })
        .collect();
    Some(percentiles(values, centre))
}

/// Half the width of an interval over its median.
#[must_use]
pub fn relative_width(interval: &Interval) -> f64 {
    (interval.high - interval.low) / (2.0 * interval.median)
}

/// Reward of a correct candidate: 1, 2 (faster than eager), 3 (also than compile). A missing compile
/// baseline can't give 3.
#[must_use]
pub fn reward(eager: Option<&Interval>, compile: Option<&Interval>) -> i32 {
    let faster = |x: Option<&Interval>| x.is_some_and(|x| x.low > FASTER);
    match (faster(eager), faster(compile)) {
        (true, true) => 3,
        (true, false) => 2,
        (false, _) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_middle_of_the_two() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[]), None);
    }

    #[test]
    fn a_paired_speedup_of_noise_common_to_both_is_exact() {
        let candidate: Vec<f64> = (0..30).map(|i| 100.0 + f64::from(i % 7)).collect();
        let baseline: Vec<f64> = candidate.iter().map(|x| 2.0 * x).collect();
        let found = speedup(&baseline, &candidate, 1).unwrap();
        assert!((found.low - 2.0).abs() < 1e-12 && (found.high - 2.0).abs() < 1e-12);
    }

    #[test]
    fn independent_noise_widens_the_interval() {
        let mut random = Random::new(3);
        let mut draw = || 100.0 + 20.0 * (random.below(1000) as f64 / 1000.0);
        let candidate: Vec<f64> = (0..30).map(|_| draw()).collect();
        let baseline: Vec<f64> = (0..30).map(|_| draw()).collect();
        let found = speedup(&baseline, &candidate, 1).unwrap();
        assert!(found.low < 1.0 + 0.02 && found.high > 1.0 - 0.02 && relative_width(&found) > 0.01, "{found:?}");
    }

    #[test]
    fn a_reward_needs_the_lower_bound_above_one_over_095() {
        let at = |low| Interval { median: low + 0.01, low, high: low + 0.02 };
        assert_eq!(reward(Some(&at(1.0526)), None), 1);
        assert_eq!(reward(Some(&at(1.0527)), None), 2);
        assert_eq!(reward(Some(&at(1.0527)), Some(&at(1.2))), 3);
        assert_eq!(reward(Some(&at(1.0)), Some(&at(1.2))), 1);
    }
}
