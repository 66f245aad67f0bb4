//! Many candidates of one task on a card: recorded and built beside each other while those before them are judged.
//!
//! Knows how many are built at once and what is judged next. Must not know what an evaluation does. One is judged at a
//! time, and the next one in the same runner where it was accepted: what takes longest is a context, which the driver makes
//! one after another anyway, so that sessions beside each other were no faster (`docs/measuring.md`, "Measured").

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;

use super::evaluate;
use super::leash::Leash;
use super::session::{Error, Session};
use super::{Candidate, Device, Effort, Verdict};

/// Most candidates that are recorded and built beside each other, and processors for each.
const BUILDS: usize = 4;
const PROCESSORS: usize = 2;

impl Session {
    /// Judges candidates of one task, telling each verdict as it comes. On a card candidates are recorded and built
    /// while those before them run, and judged in the order in which they are built; on the CPU in the given order.
    /// Inputs' buffers, parameter sets and baselines are shared.
    ///
    /// # Errors
    /// As `judge`; verdicts told before stay told.
    pub fn judge_batch(
        &mut self,
        candidates: &[Candidate],
        effort: Effort,
        mut told: impl FnMut(usize, Verdict),
    ) -> Result<(), Error> {
        if self.fixed.judge.options.device == Device::Cpu || candidates.len() < 2 {
            for (index, candidate) in candidates.iter().enumerate() {
                told(index, self.judge(candidate, effort)?);
            }
            return Ok(());
        }
        evaluate::ahead::prepare(self);
        self.meet(effort == Effort::Final)?;
        let fixed = Arc::clone(&self.fixed);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let builds = (processors / PROCESSORS).clamp(1, BUILDS).min(candidates.len());
        let (sender, receiver) = sync_channel(builds);
        let (next, leash) = (AtomicUsize::new(0), Leash::current());
        let (fixed, next, leash) = (&fixed, &next, &leash);
        let ended = std::thread::scope(|scope| {
            for _ in 0..builds {
                let sender = sender.clone();
                scope.spawn(move || {
                    let _entered = leash.as_ref().map(Leash::enter);
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(candidate) = candidates.get(index) else { return };
                        if sender.send((index, evaluate::ready(fixed, candidate))).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(sender);
            for (judged, (index, ready)) in receiver.into_iter().enumerate() {
                told(index, evaluate::finish(self, ready, effort, judged + 1 < candidates.len())?);
            }
            Ok(())
        });
        // No candidate of another request follows in it.
        self.worn = None;
        ended
    }
}
