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
    resampled(baseline, candidate, seed, baseline.len() == candidate.len())
}

/// The same where the baseline was measured by itself: whatever their numbers, no two samples belong together.
#[must_use]
pub fn speedup_apart(baseline: &[f64], candidate: &[f64], seed: u64) -> Option<Interval> {
    resampled(baseline, candidate, seed, false)
}

fn resampled(baseline: &[f64], candidate: &[f64], seed: u64, paired: bool) -> Option<Interval> {
    let centre = median(baseline)? / median(candidate)?;
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

/// How much wider than an interval of 95 % an interim look takes it: a normal deviate of 3.29 (two-sided 0.1 %) over 1.96.
/// Looks are many and stop at the first that is clear, so that each at 95 % would be wrong far more often than one in
/// twenty; at this level all of them together add little, and the last look keeps its 95 % (Haybittle 1971, Peto 1976).
const INTERIM: f64 = 3.29 / 1.96;

/// Whether an interim look may end a measurement. `speedups`: those by which a reward is decided, the measured one
/// first. Each must lie on one side of the threshold by an interval of 99.9 %; where there are `enough` samples it may as
/// well be no wider than `width` (relative, half of an interval) with the threshold in it: that near, more samples cost more
/// than they tell. The first must be no wider than `width` unless there are enough. The last look, at the end of the budget,
/// needs none of this.
#[must_use]
pub fn settled(speedups: &[Interval], width: f64, enough: bool) -> bool {
    let decided = |x: &Interval| {
        let low = (x.low - x.median).mul_add(INTERIM, x.median);
        let high = (x.high - x.median).mul_add(INTERIM, x.median);
        low > FASTER || high <= FASTER
    };
    let undecidable = |x: &Interval| enough && relative_width(x) <= width;
    speedups.iter().all(|x| decided(x) || undecidable(x))
        && speedups.first().is_some_and(|x| enough || relative_width(x) <= width)
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
    fn samples_that_were_taken_apart_are_no_pairs_though_as_many() {
        let candidate: Vec<f64> = (0..30).map(|i| 100.0 + f64::from(i % 7)).collect();
        let found = speedup_apart(&candidate, &candidate, 1).unwrap();
        assert!(found.low < 0.995 && found.high > 1.005, "{found:?}");
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
    fn an_interim_look_ends_nothing_that_is_near_a_threshold_or_wide() {
        let at = |low: f64, high: f64| Interval { median: f64::midpoint(low, high), low, high };
        assert!(settled(&[at(1.99, 2.01)], 0.01, false));
        assert!(!settled(&[], 1.0, true), "nothing was measured");
        assert!(!settled(&[at(1.9, 2.1)], 0.01, false), "it is wide");
        assert!(settled(&[at(1.9, 2.1)], 0.01, true), "it is wide, far from any threshold, and of many samples");
        // Above the threshold at 95 %, not at 99.9 %.
        assert!(!settled(&[at(1.053, 1.069)], 0.01, false));
        assert!(!settled(&[at(1.036, 1.052)], 0.01, false));
        assert!(!settled(&[at(1.99, 2.01), at(1.053, 1.069)], 0.01, false), "the other baseline leaves it open");
        // The threshold stays within: after many samples that is an end.
        assert!(!settled(&[at(1.048, 1.058)], 0.01, false));
        assert!(settled(&[at(1.044, 1.062)], 0.01, true));
        assert!(!settled(&[at(1.03, 1.08)], 0.01, true), "many samples, and still wide where it matters");
    }

    /// Share of candidates that are exactly at the threshold and called faster, where `stop` ends their measurement.
    fn called_faster(stop: impl Fn(&Interval, bool) -> bool) -> f64 {
        const TRIALS: usize = 4000;
        let mut random = Random::new(11);
        let mut normal = || (0..12).map(|_| random.below(1 << 30) as f64 / f64::from(1 << 30)).sum::<f64>() - 6.0;
        let faster = (0..TRIALS).filter(|_| {
            let (mut sum, mut count) = (0.0, 0.0);
            for look in 1..=50 {
                for _ in 0..10 {
                    sum += FASTER + 0.05 * normal();
                    count += 1.0;
                }
                let (median, half) = (sum / count, 1.96 * 0.05 / f64::sqrt(count));
                let found = Interval { median, low: median - half, high: median + half };
                if look == 50 || (look >= 3 && stop(&found, count >= 300.0)) {
                    return reward(Some(&found), None) > 1;
                }
            }
            false
        });
        faster.count() as f64 / TRIALS as f64
    }

    #[test]
    fn looking_again_and_again_doesnt_make_a_candidate_faster() {
        let each_at_95 = |x: &Interval, _: bool| x.low > FASTER || x.high <= FASTER;
        assert!(called_faster(each_at_95) > 0.08, "one look in each block is what inflates the error");
        let found = called_faster(|x, enough| settled(&[*x], 0.01, enough));
        assert!(found < 0.035, "{found} where one look would be wrong in 0.025");
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
