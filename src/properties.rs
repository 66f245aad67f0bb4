//! How the crate's properties are tested: with the same cases in every run, so that a test that passed for one passes for all.
//! New ones are looked for with `KERNELFLEET_FRESH_SEEDS` set, as `make soak-properties` does.

use proptest::prelude::ProptestConfig;
use proptest::test_runner::{FileFailurePersistence, RngSeed};

/// Set, it lets each run draw cases of its own; `PROPTEST_CASES` says how many.
const FRESH: &str = "KERNELFLEET_FRESH_SEEDS";
/// Where the cases of an ordinary run begin.
const SEED: u64 = 0x6b66_6c65_6574;

fn config(cases: Option<u32>) -> ProptestConfig {
    // The defaults read `PROPTEST_CASES` and `PROPTEST_RNG_SEED`.
    let defaults = ProptestConfig::default();
    let asked = std::env::var_os("PROPTEST_CASES").is_some();
    ProptestConfig {
        cases: cases.filter(|_| !asked).unwrap_or(defaults.cases),
        rng_seed: if std::env::var_os(FRESH).is_some() { defaults.rng_seed } else { RngSeed::Fixed(SEED) },
        ..defaults
    }
}

/// Of properties whose failures need no file: the usual number of cases.
pub fn usual() -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..config(None) }
}

/// So many cases, after the ones that once failed: their seeds lie in a file of the package.
pub fn kept(cases: u32, found: &'static str) -> ProptestConfig {
    ProptestConfig { failure_persistence: Some(Box::new(FileFailurePersistence::Direct(found))), ..config(Some(cases)) }
}

#[cfg(test)]
mod tests {
    use proptest::strategy::{Strategy, ValueTree};
    use proptest::test_runner::TestRunner;

    use super::*;

    #[test]
    fn an_ordinary_run_draws_the_same_cases_each_time() {
        if std::env::var_os(FRESH).is_some() {
            return;
        }
        let drawn = || {
            let mut runner = TestRunner::new(kept(10, "tests/regressions/simulation.txt"));
            [(); 8].map(|()| (0u64..u64::MAX).new_tree(&mut runner).unwrap().current())
        };
        assert_eq!(drawn(), drawn());
    }
}
