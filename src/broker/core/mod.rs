//! The state machine of a broker: jobs, episodes, the queue, slices of cards.
//!
//! Knows time only as an argument and the world only as calls. Must not know networks, disks or clocks. What must outlive
//! the broker comes out as `Change`s, whom to tell as `Wake`s; both are taken after each call. A reply may go out once
//! the changes are kept.
//!
//! ```text
//!   put_job, begin, append, finish   episodes.rs   generations: one pod of an index counts
//!   evaluate ----------------------> queue.rs      namespaces by weight, jobs within, first come within a job
//!                                      | dispatch
//!   register, pull, renew, complete  slices.rs     leases: shared slices
//!   acquire, release                 slices.rs     exclusive slices, one a card over all its judges
//! ```

mod episodes;
pub mod kept;
mod queue;
#[cfg(test)]
mod simulation;
mod slices;
pub mod tally;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use episodes::{Ask, Asked, Begun, Facts, Wants};
use kept::{
    Change, Episode, EpisodeState, Evaluation, EvaluationState, Exclusive, Job, Kept, Lease, LeaseState, Op,
    Registration, Seconds, Share, Usage,
};
pub use slices::{Completion, Granted, JudgeNow, PoolNow};
use tally::Tally;

/// What a pool's operator chooses.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Weight of a namespace; 1 where nothing is said.
    pub weights: BTreeMap<String, f64>,
    /// Longest that a lease lasts.
    pub lease_seconds: Seconds,
    /// Longest that an exclusive slice lasts.
    pub exclusive_seconds: Seconds,
    /// How often a judge renews.
    pub renew_seconds: Seconds,
}

impl Default for Settings {
    fn default() -> Self {
        Self { weights: BTreeMap::new(), lease_seconds: 900.0, exclusive_seconds: 60.0, renew_seconds: 5.0 }
    }
}

impl Settings {
    fn weight(&self, namespace: &str) -> f64 {
        self.weights.get(namespace).copied().filter(|w| *w > 0.0).unwrap_or(1.0)
    }

    /// A judge that wasn't heard of for so long is lost.
    #[must_use]
    pub fn silence(&self) -> Seconds {
        3.0 * self.renew_seconds
    }
}

/// Most evaluations of one episode that wait at once.
pub const MOST_PENDING: usize = 64;
/// Most evaluations of one episode at all: each of their keys is remembered for as long as it runs.
pub const MOST_KEYS: usize = 4096;
/// So many more may be last judgements, for which room is kept.
const FINALS: usize = 16;
/// Most bytes of candidates that one episode may store, each time that they are sent.
pub const MOST_STORED: u64 = 256 << 20;
/// Most bytes of its trajectory's lines. With token ids a line has those of its whole context, up to 7 bytes each: this is enough
/// for 1,000 turns of a million tokens that grow evenly.
pub const MOST_SAID: u64 = 4 << 30;
/// Most bytes of the candidates of one evaluation.
pub const MOST_CARRIED: u64 = 48 << 20;
/// An evaluation over which judges were lost this often is a fault: it may be what loses them.
const MOST_LOSSES: u32 = 8;
/// Weight of time that ran out.
const LOSS_BY_TIME: u32 = 4;

/// An agent's pod, as its token says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    pub uid: String,
    /// UID of its OptimizationJob.
    pub job: String,
    pub index: u32,
}

/// Whoever waits for something.
pub type Ticket = u64;

/// Whom to tell.
#[derive(Clone, Debug, PartialEq)]
pub enum Wake {
    /// A pull has its lease.
    Pulled(Ticket, u64),
    /// A lease has its exclusive slice.
    Acquired(Ticket, Granted),
    /// The session of whoever waits is over, or its lease is.
    Over(Ticket),
    /// An evaluation isn't pending any more.
    Answered(u64),
}

/// Why a call is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("this broker knows no job {0}; the operator makes jobs known before their pods start")]
    UnknownJob(String),
    #[error("task {0} isn't one of the job's")]
    UnknownTask(String),
    #[error("task {0} has no final verdict yet")]
    NoResult(String),
    #[error("completion index {index} lies outside the job, which has room for {indexes} episodes")]
    Index { index: u32, indexes: u32 },
    #[error("a newer pod of completion index {0} has begun; what this one did is void")]
    Superseded(u32),
    #[error("episode {0} is finished")]
    Finished(u32),
    #[error("job {0} is closed: no further evaluation is begun")]
    Closed(String),
    #[error("episode {0} hasn't begun; call Begin first")]
    NotBegun(u32),
    #[error("key {0:?} names another evaluation of this episode; a key is the same evaluation for ever")]
    KeyReused(String),
    #[error("no evaluation has key {0:?}; say what to evaluate")]
    UnknownKey(String),
    #[error("{MOST_PENDING} evaluations of this episode are waiting already; wait for one of them")]
    TooMany,
    #[error("episode {0} has asked for {MOST_KEYS} evaluations, which is all that one may ask for")]
    TooManyKeys(u32),
    #[error("the evaluation carries {0} bytes of candidates; at most {MOST_CARRIED} are allowed")]
    TooLarge(u64),
    #[error("episode {index} has stored {stored} bytes, and {bytes} more are too many; it may store {most}")]
    Budget { index: u32, stored: u64, bytes: u64, most: u64 },
    #[error("lines from {first} on can't be added: {lines} lines are kept, number {lines} is the next")]
    Gap { first: u64, lines: u64 },
    #[error("the episode ended in other words before; an end is said once")]
    OtherEnd,
    #[error("job {0} differs from what is kept, and an episode of it has begun; make a new job instead")]
    JobDiffers(String),
    #[error("session {0} isn't the newest of this pod; register again")]
    Session(u64),
    #[error("lease {0} is over; end its work")]
    LeaseOver(u64),
    #[error("slice {1} of lease {0} is over; ask for the next one")]
    SliceOver(u64, u64),
    #[error("no judge of this pool has registered yet; wait for one")]
    NoJudge,
}

#[derive(Debug)]
struct JobEntry {
    job: Job,
    usage: Usage,
    queue: BTreeSet<u64>,
    /// How often its oldest evaluation was passed over for a warm one.
    passed: u32,
}

/// A namespace in the fair share.
#[derive(Debug, Default)]
struct Space {
    /// Its virtual time: seconds charged over its weight, never behind `virtual_now` when it begins to wait.
    tag: f64,
    /// Virtual time of the jobs within.
    virtual_now: f64,
    /// Jobs that wait.
    waiting: BTreeSet<String>,
}

#[derive(Debug)]
struct Asking {
    id: u64,
    op: Op,
    candidates: Vec<String>,
    state: EvaluationState,
}

#[derive(Debug)]
struct EpisodeEntry {
    row: Episode,
    /// Highest counts of generations that are void.
    void: Tally,
    /// Their pods.
    pods: BTreeSet<String>,
    keys: BTreeMap<String, Asking>,
}

#[derive(Debug)]
struct JudgeEntry {
    row: kept::Judge,
    seen: Seconds,
    unhealthy: String,
    warm: Vec<String>,
    leases: BTreeSet<u64>,
    /// Highest number of its session's askings for the card alone, and of those that were granted.
    asked: u64,
    served: u64,
}

impl JudgeEntry {
    fn new(row: kept::Judge, seen: Seconds) -> Self {
        let (warm, leases, asked, served) = (Vec::new(), BTreeSet::new(), row.over, row.over);
        Self { row, seen, unhealthy: String::new(), warm, leases, asked, served }
    }
}

#[derive(Debug)]
struct LeaseEntry {
    row: Lease,
    ends: Seconds,
    renewed: Seconds,
    /// Seconds of its exclusive slices that are over.
    exclusive: Seconds,
}

#[derive(Debug)]
struct Held {
    row: Exclusive,
    ends: Seconds,
}

/// A judge that waits for its card alone. All of its work is off the card until it has been granted.
#[derive(Debug)]
struct Waiter {
    pod: String,
    /// For which of its leases it asks: that one is charged.
    lease: u64,
    number: u64,
    since: Seconds,
    ticket: Option<(Ticket, Seconds)>,
}

#[derive(Debug)]
struct Card {
    leases: BTreeSet<u64>,
    exclusive: Option<Held>,
    /// One a judge, in the order of their first asking.
    waiters: Vec<Waiter>,
    busy: slices::Busy,
}

#[derive(Debug)]
struct Parked {
    ticket: Ticket,
    pod: String,
}

/// The state machine.
#[derive(Debug)]
pub struct Core {
    settings: Settings,
    next: u64,
    jobs: BTreeMap<String, JobEntry>,
    spaces: BTreeMap<String, Space>,
    virtual_now: f64,
    queued: usize,
    episodes: BTreeMap<(String, u32), EpisodeEntry>,
    /// Those that are pending, with the lease that works on each.
    evaluations: BTreeMap<u64, (Evaluation, Option<u64>)>,
    judges: BTreeMap<String, JudgeEntry>,
    leases: BTreeMap<u64, LeaseEntry>,
    cards: BTreeMap<String, Card>,
    pulls: VecDeque<Parked>,
    estimates: [f64; Op::ALL.len()],
    device: Option<Registration>,
    /// When `settle` has something to do at the earliest.
    due: Seconds,
    changes: Vec<Change>,
    wakes: Vec<Wake>,
}

impl Core {
    /// A broker that has seen nothing.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self::restore(settings, Kept::default(), 0.0)
    }

    /// A broker that goes on from what is kept. Slices that were running may be running still: each holds its card for
    /// its whole length from now, unless its judge says otherwise.
    #[must_use]
    pub fn restore(settings: Settings, kept: Kept, now: Seconds) -> Self {
        let mut core = Self {
            settings,
            next: kept.next.max(1),
            jobs: BTreeMap::new(),
            spaces: kept.shares.iter().map(|(n, s)| (n.clone(), Space { tag: s.tag, ..Space::default() })).collect(),
            virtual_now: 0.0,
            queued: 0,
            episodes: BTreeMap::new(),
            evaluations: BTreeMap::new(),
            judges: BTreeMap::new(),
            leases: BTreeMap::new(),
            cards: BTreeMap::new(),
            pulls: VecDeque::new(),
            estimates: [1.0; Op::ALL.len()],
            device: kept.device,
            due: now,
            changes: Vec::new(),
            wakes: Vec::new(),
        };
        for (uid, job) in kept.jobs {
            let usage = kept.usage.get(&uid).cloned().unwrap_or_default();
            core.spaces.entry(job.namespace.clone()).or_default();
            core.jobs.insert(uid, JobEntry { job, usage, queue: BTreeSet::new(), passed: 0 });
        }
        core.restore_episodes(kept.episodes);
        for row in kept.evaluations.into_values() {
            core.restore_evaluation(row);
        }
        for (pod, row) in kept.judges {
            core.judges.insert(pod, JudgeEntry::new(row, now));
        }
        core.restore_slices(kept.leases, kept.exclusives, now);
        core.restore_virtual_time(kept.virtual_now, &kept.shares);
        core
    }

    fn restore_episodes(&mut self, rows: BTreeMap<(String, u32, u32), Episode>) {
        // In order of generations: each newer one takes the older one's place.
        for ((job, index, _), row) in rows {
            let (void, pods) = match self.episodes.remove(&(job.clone(), index)) {
                Some(mut older) => {
                    older.void.highest(&older.row.tally);
                    older.pods.insert(older.row.pod);
                    (older.void, older.pods)
                }
                None => (Tally::default(), BTreeSet::new()),
            };
            self.episodes.insert((job, index), EpisodeEntry { row, void, pods, keys: BTreeMap::new() });
        }
    }

    fn restore_evaluation(&mut self, row: Evaluation) {
        let Some(episode) = self.episodes.get_mut(&(row.job.clone(), row.index)) else { return };
        if episode.row.generation != row.generation || episode.row.state != EpisodeState::Running {
            return;
        }
        let asking = Asking { id: row.id, op: row.op, candidates: row.candidates.clone(), state: row.state };
        episode.keys.insert(row.key.clone(), asking);
        if row.state == EvaluationState::Queued
            && let Some(job) = self.jobs.get_mut(&row.job)
        {
            job.queue.insert(row.id);
            self.queued += 1;
            self.spaces.entry(job.job.namespace.clone()).or_default().waiting.insert(row.job.clone());
        }
        if row.state.pending() {
            self.evaluations.insert(row.id, (row, None));
        }
    }

    fn restore_slices(&mut self, leases: BTreeMap<u64, Lease>, exclusives: BTreeMap<u64, Exclusive>, now: Seconds) {
        for row in leases.into_values().filter(|l| l.state != LeaseState::Ended) {
            if row.state == LeaseState::Live
                && let Some((_, lease)) = self.evaluations.get_mut(&row.evaluation)
            {
                *lease = Some(row.id);
            }
            let card = self.card(&row.card, now);
            card.leases.insert(row.id);
            if row.state == LeaseState::Live {
                card.busy.begin(now);
                if let Some(judge) = self.judges.get_mut(&row.pod) {
                    judge.leases.insert(row.id);
                }
            }
            let ends = now + row.seconds;
            self.leases.insert(row.id, LeaseEntry { ends, renewed: now, exclusive: 0.0, row });
        }
        for row in exclusives.into_values() {
            // Numbers are drawn in order: what has a higher one than its judge's session was granted in that session.
            if let Some(judge) = self.judges.get_mut(&row.pod).filter(|j| j.row.session < row.id) {
                judge.served = judge.served.max(row.number);
                judge.asked = judge.asked.max(row.number);
            }
            if let Some(ended) = row.ended {
                if let Some(lease) = self.leases.get_mut(&row.lease) {
                    lease.exclusive += ended - row.granted;
                }
            } else {
                let ends = now + row.seconds;
                let name = row.card.clone();
                self.card(&name, now).exclusive = Some(Held { row, ends });
            }
        }
    }

    /// Virtual times as they are kept; of a ledger that doesn't say, as the tags of those that wait have them.
    fn restore_virtual_time(&mut self, virtual_now: Option<f64>, shares: &BTreeMap<String, Share>) {
        let of = |tags: &mut dyn Iterator<Item = (f64, bool)>| {
            let (mut waiting, mut all) = (f64::INFINITY, 0.0_f64);
            for (tag, waits) in tags {
                all = all.max(tag);
                waiting = if waits { waiting.min(tag) } else { waiting };
            }
            if waiting.is_finite() { waiting } else { all }
        };
        let told = || of(&mut self.spaces.values().map(|s| (s.tag, !s.waiting.is_empty())));
        self.virtual_now = virtual_now.unwrap_or_else(told);
        for (name, space) in &mut self.spaces {
            let jobs = self.jobs.values().filter(|j| j.job.namespace == *name);
            let told = || of(&mut jobs.map(|j| (j.usage.tag, !j.queue.is_empty())));
            space.virtual_now = shares.get(name).and_then(|s| s.within).unwrap_or_else(told);
        }
    }

    /// Other weights hold from now on.
    pub fn set_weights(&mut self, weights: BTreeMap<String, f64>) {
        self.settings.weights = weights;
    }

    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What has to be kept since the last time it was taken.
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// Whom to tell since the last time they were taken.
    pub fn take_wakes(&mut self) -> Vec<Wake> {
        std::mem::take(&mut self.wakes)
    }

    /// Lets time pass: what is over by `now` ends, what became free is given out.
    pub fn tick(&mut self, now: Seconds) {
        self.settle(now);
        self.dispatch(now);
    }

    /// When time has something to do at the earliest.
    #[must_use]
    pub const fn due(&self) -> Seconds {
        self.due
    }

    fn number(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.changes.push(Change::Next(self.next));
        number
    }

    fn card(&mut self, name: &str, now: Seconds) -> &mut Card {
        self.cards.entry(name.to_owned()).or_insert_with(|| Card {
            leases: BTreeSet::new(),
            exclusive: None,
            waiters: Vec::new(),
            busy: slices::Busy::new(now),
        })
    }

    fn keep_usage(&mut self, job: &str) {
        if let Some(entry) = self.jobs.get(job) {
            self.changes.push(Change::Usage(job.to_owned(), entry.usage.clone()));
            if let Some(space) = self.spaces.get(&entry.job.namespace) {
                let share = Share { tag: space.tag, within: Some(space.virtual_now) };
                self.changes.push(Change::Share(entry.job.namespace.clone(), share));
            }
        }
    }
}
