//! What must outlive a broker: rows, and the changes that a step makes to them.
//!
//! Knows the shape of what is kept. Must not know how it is stored: `Kept` is the meaning, the ledger is one way to have it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::tally::Tally;

/// Seconds since the broker's start; what happened before it is negative.
pub type Seconds = f64;

/// What an evaluation asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    Check,
    Trace,
    Reference,
    Counters,
    Compile,
    Verify,
    Screen,
    Final,
}

impl Op {
    pub const ALL: [Self; 8] = [
        Self::Check,
        Self::Trace,
        Self::Reference,
        Self::Counters,
        Self::Compile,
        Self::Verify,
        Self::Screen,
        Self::Final,
    ];

    /// The word that the ledger uses.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::Trace => "trace",
            Self::Reference => "reference",
            Self::Counters => "counters",
            Self::Compile => "compile",
            Self::Verify => "verify",
            Self::Screen => "screen",
            Self::Final => "final",
        }
    }
}

/// A task of a job. Its texts are objects, named by their digests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Task {
    pub name: String,
    pub source: String,
    pub replay: Option<String>,
}

/// Whether evaluations of a job are begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    Open,
    /// May come back.
    Suspended,
    /// Never comes back.
    Closed,
}

/// A job as the operator made it known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Job {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// `api::job::OptimizationJobSpec` without its tasks.
    pub spec: String,
    pub batch_job: String,
    /// Episodes a task: `spec.agent.attempts`.
    pub attempts: u32,
    pub tasks: Vec<Task>,
    pub state: JobState,
}

impl Job {
    /// Task and attempt of a completion index.
    #[must_use]
    pub fn place(&self, index: u32) -> Option<(usize, u32)> {
        let attempts = self.attempts.max(1);
        let task = (index / attempts) as usize;
        (task < self.tasks.len()).then_some((task, index % attempts))
    }

    /// Episodes that it has room for.
    #[must_use]
    pub fn indexes(&self) -> u32 {
        u32::try_from(self.tasks.len()).unwrap_or(u32::MAX).saturating_mul(self.attempts.max(1))
    }
}

/// What a job has used of the cards.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Its virtual time within its namespace.
    pub tag: f64,
    /// Slice seconds.
    pub charged: Seconds,
    /// Slice seconds, waits, phases: what is used up whatever becomes of the episode.
    pub tally: Tally,
}

/// A namespace in the fair share.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// Its virtual time.
    pub tag: f64,
    /// Virtual time over its jobs; a ledger of before it was kept doesn't say.
    pub within: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EpisodeState {
    Running,
    /// Another pod of the same index came after it.
    Void,
    Finished,
}

/// What a final verdict says, as far as facts and metrics go.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judged {
    pub reward: i32,
    pub correct: bool,
    pub grade: String,
    /// `exclusive`, or `shared` where others used the device meanwhile; a ledger of before it was kept doesn't say.
    #[serde(default)]
    pub measurement: String,
    pub eager: Option<Speedup>,
    pub compile: Option<Speedup>,
    /// Why it isn't correct.
    pub reason: Option<String>,
    /// Digest of the candidate, as an object.
    pub candidate: String,
    /// Its place in the answer.
    pub place: usize,
}

/// A speedup: median and lower bound of its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Speedup {
    pub median: f64,
    pub low: f64,
}

/// How an episode ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    /// Digest of the agent's words: the same words again are no error.
    pub digest: String,
    /// `judged`, `declined`, `refused`, `failed`.
    pub state: String,
    pub reason: Option<String>,
    /// How the policy's episode ended, where it has one: `solved`, `turns`, ...
    pub end: Option<String>,
    pub seconds: Seconds,
}

/// One generation of an episode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Episode {
    pub job: String,
    pub index: u32,
    pub generation: u32,
    /// UID of its pod.
    pub pod: String,
    pub state: EpisodeState,
    /// Lines of its trajectory that are kept.
    pub lines: u64,
    /// Turns, tokens, verdicts.
    pub tally: Tally,
    /// The last final judgement: its evaluation and what it says.
    pub judged: Option<(u64, Judged)>,
    pub ending: Option<Ending>,
    pub began: Seconds,
    /// Bytes of the candidates that it has sent.
    pub stored: u64,
    /// Bytes of its lines.
    pub said: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvaluationState {
    Queued,
    Leased,
    Done,
    Refused,
    Fault,
    /// Its episode or job is over.
    Dropped,
}

impl EvaluationState {
    /// Whether an answer is still to come.
    #[must_use]
    pub const fn pending(self) -> bool {
        matches!(self, Self::Queued | Self::Leased)
    }
}

/// One evaluation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    pub id: u64,
    pub job: String,
    pub index: u32,
    pub generation: u32,
    pub key: String,
    pub op: Op,
    /// Index into the job's tasks.
    pub task: usize,
    /// Digests of candidates, as objects.
    pub candidates: Vec<String>,
    pub state: EvaluationState,
    pub enqueued: Seconds,
    /// How often a judge was lost over it; time that ran out weighs more.
    pub losses: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseState {
    Live,
    /// Taken from a judge that is silent: its work may still be running.
    Ghost,
    Ended,
}

/// A shared slice: one evaluation at one judge.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lease {
    pub id: u64,
    pub evaluation: u64,
    pub job: String,
    pub pod: String,
    pub session: u64,
    pub card: String,
    pub granted: Seconds,
    pub seconds: Seconds,
    /// What was charged at its grant.
    pub estimate: Seconds,
    /// The evaluation isn't wanted any more.
    pub cancelled: bool,
    pub state: LeaseState,
    pub ended: Option<Seconds>,
}

/// An exclusive slice of a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exclusive {
    pub id: u64,
    pub lease: u64,
    pub job: String,
    pub pod: String,
    pub card: String,
    pub granted: Seconds,
    pub seconds: Seconds,
    /// The asking that it answers, as the judge counts them; 0 if it doesn't.
    pub number: u64,
    pub ended: Option<Seconds>,
}

/// What a judge says of itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// `cpu` or `cuda`.
    pub device: String,
    pub card: String,
    pub arch: String,
    pub properties: String,
    pub hardware: String,
    pub versions: String,
    pub procedure: String,
    pub slots: u32,
}

/// A judge: a pod, and the newest process in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Judge {
    pub pod: String,
    pub session: u64,
    /// What the process calls itself; empty if it doesn't.
    pub instance: String,
    /// When the process started, as it says itself: seconds since 1970, 0 if it doesn't.
    pub started: f64,
    /// Processes of the pod before it.
    pub before: Vec<String>,
    /// Of this session's askings for the card alone those up to this number are waited for no longer, as it said itself.
    pub over: u64,
    pub registration: Registration,
}

/// A change of what is kept. Each says the whole row, so that applying one twice is applying it once.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The next number that was never given.
    Next(u64),
    Job(Job),
    Usage(String, Usage),
    Share(String, Share),
    /// Virtual time over all namespaces.
    VirtualNow(f64),
    Episode(Episode),
    Evaluation(Evaluation),
    /// Its answer or its message.
    Answer {
        evaluation: u64,
        answer: String,
        message: String,
    },
    Lease(Lease),
    Exclusive(Exclusive),
    Judge(Judge),
    JudgeGone(String),
    /// All rows of a job that is closed: nobody will ask for them.
    JobGone(String),
    /// What the pool's judges are, for agents that come when none is there.
    Device(Registration),
}

/// All that is kept.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    pub next: u64,
    pub jobs: BTreeMap<String, Job>,
    pub usage: BTreeMap<String, Usage>,
    pub shares: BTreeMap<String, Share>,
    pub virtual_now: Option<f64>,
    pub episodes: BTreeMap<(String, u32, u32), Episode>,
    pub evaluations: BTreeMap<u64, Evaluation>,
    pub answers: BTreeMap<u64, (String, String)>,
    pub leases: BTreeMap<u64, Lease>,
    pub exclusives: BTreeMap<u64, Exclusive>,
    pub judges: BTreeMap<String, Judge>,
    pub device: Option<Registration>,
}

impl Kept {
    /// Takes a change in.
    pub fn apply(&mut self, change: Change) {
        match change {
            Change::Next(next) => self.next = next,
            Change::Job(job) => drop(self.jobs.insert(job.uid.clone(), job)),
            Change::Usage(job, usage) => drop(self.usage.insert(job, usage)),
            Change::Share(namespace, share) => drop(self.shares.insert(namespace, share)),
            Change::VirtualNow(now) => self.virtual_now = Some(now),
            Change::Episode(e) => drop(self.episodes.insert((e.job.clone(), e.index, e.generation), e)),
            Change::Evaluation(e) => drop(self.evaluations.insert(e.id, e)),
            Change::Answer { evaluation, answer, message } => {
                self.answers.insert(evaluation, (answer, message));
            }
            Change::Lease(lease) => drop(self.leases.insert(lease.id, lease)),
            Change::Exclusive(slice) => drop(self.exclusives.insert(slice.id, slice)),
            Change::Judge(judge) => drop(self.judges.insert(judge.pod.clone(), judge)),
            Change::JudgeGone(pod) => drop(self.judges.remove(&pod)),
            Change::JobGone(job) => self.forget(&job),
            Change::Device(device) => self.device = Some(device),
        }
    }

    fn forget(&mut self, job: &str) {
        self.jobs.remove(job);
        self.usage.remove(job);
        self.episodes.retain(|(of, ..), _| of != job);
        let (evaluations, answers) = (&mut self.evaluations, &mut self.answers);
        evaluations.retain(|id, e| {
            let stays = e.job != job;
            if !stays {
                answers.remove(id);
            }
            stays
        });
        self.leases.retain(|_, l| l.job != job);
        self.exclusives.retain(|_, s| s.job != job);
    }
}
