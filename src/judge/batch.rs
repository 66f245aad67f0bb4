//! Many candidates of one task on a card: recorded and built beside each other, checked beside each other in sessions that
//! share recordings, builds and baselines, measured one after another.
//!
//! Knows how many work at once and who waits for whom. Must not know what an evaluation does.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};

use super::evaluate::{self, Ready};
use super::leash::Leash;
use super::session::{Error, Fixed, Session};
use super::{Candidate, Device, Effort, Verdict};

/// So many candidates are worth a further session, whose host takes seconds to open.
const A_SESSION: usize = 8;
/// Sessions beside the first: more only wait for their turns to measure.
const MOST_BESIDE: usize = 5;
/// Processors that one session keeps busy, its candidates' builds included.
const PROCESSORS: usize = 2;
/// Without a baseline after so many candidates, none of them correct, the other sessions begin all the same.
const WITHOUT: usize = 4;

/// Candidates that are recorded and built, with their places in the batch; nothing more once the batch has failed.
struct Queue {
    built: Mutex<Option<Receiver<(usize, Ready)>>>,
    taken: AtomicUsize,
    all: usize,
}

impl Queue {
    /// The next one, its place, and whether more will come.
    fn take(&self) -> Option<(usize, Ready, bool)> {
        let built = self.built.lock().unwrap_or_else(PoisonError::into_inner);
        let (index, ready) = built.as_ref()?.recv().ok()?;
        let taken = self.taken.fetch_add(1, Ordering::Relaxed) + 1;
        Some((index, ready, taken < self.all))
    }

    /// Nobody takes more, and nobody builds more.
    fn close(&self) {
        *self.built.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl Session {
    /// Judges candidates of one task, telling each verdict as it comes, in any order. On a card candidates are recorded
    /// and built while those before them run, and many of them are checked beside each other; on the CPU they are judged
    /// one after another. Builds and baselines are shared.
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
        self.prepare()?;
        let fixed = Arc::clone(&self.fixed);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        // Screenings are measured beside other work as it is: more of it would only blur their ranking.
        let most = if effort == Effort::Screen { 0 } else { MOST_BESIDE };
        let beside = (candidates.len() / A_SESSION).min(processors / PROCESSORS).min(most);
        let (sender, built) = sync_channel(4 + 2 * beside);
        let queue = Queue { built: Mutex::new(Some(built)), taken: AtomicUsize::new(0), all: candidates.len() };
        let (results, verdicts) = channel();
        let next = AtomicUsize::new(0);
        let leash = Leash::current();
        let (fixed, queue, next, leash) = (&fixed, &queue, &next, &leash);
        std::thread::scope(|scope| {
            for _ in 0..=beside {
                let sender = sender.clone();
                scope.spawn(move || {
                    let _entered = leash.as_ref().map(Leash::enter);
                    build(fixed, candidates, next, &sender);
                });
            }
            drop(sender);
            let mut others = Vec::new();
            for _ in 0..beside {
                let (start, started) = channel();
                others.push(start);
                let results = results.clone();
                scope.spawn(move || {
                    let _entered = leash.as_ref().map(Leash::enter);
                    // Nothing is sent where the first session has ended before.
                    let Ok(baseline) = started.recv() else { return };
                    match Self::beside(fixed, baseline).and_then(|o| o.map(|mut s| s.prepare().map(|()| s)).transpose())
                    {
                        Ok(Some(mut session)) => work(&mut session, queue, effort, &results, |_| ()),
                        Ok(None) => tracing::info!("no memory on the card for one more session of a batch"),
                        // The others do its part.
                        Err(error) => tracing::info!(%error, "one session less for a batch"),
                    }
                });
            }
            scope.spawn(move || {
                let _entered = leash.as_ref().map(Leash::enter);
                let compile = self.fixed.judge.options.compile && effort == Effort::Final;
                let mut judged = 0;
                work(self, queue, effort, &results, |session| {
                    judged += 1;
                    if !compile || session.baseline.is_some() || judged >= WITHOUT {
                        for other in others.drain(..) {
                            let _ = other.send(session.baseline.clone());
                        }
                    }
                });
            });
            for (index, verdict) in verdicts {
                match verdict {
                    Ok(verdict) => told(index, verdict),
                    Err(error) => {
                        queue.close();
                        return Err(error);
                    }
                }
            }
            Ok(())
        })
    }
}

/// Records and builds what nobody else has begun, until all is done or nobody takes it.
fn build(fixed: &Fixed, candidates: &[Candidate], next: &AtomicUsize, sender: &SyncSender<(usize, Ready)>) {
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(candidate) = candidates.get(index) else { return };
        if sender.send((index, evaluate::ready(fixed, candidate))).is_err() {
            return;
        }
    }
}

/// Judges what is built until nothing more comes; `after` each.
fn work(
    session: &mut Session,
    queue: &Queue,
    effort: Effort,
    results: &Sender<(usize, Result<Verdict, Error>)>,
    mut after: impl FnMut(&Session),
) {
    while let Some((index, ready, more)) = queue.take() {
        let verdict = evaluate::finish(session, ready, effort, more);
        let failed = verdict.is_err();
        if results.send((index, verdict)).is_err() || failed {
            return;
        }
        after(session);
    }
}
