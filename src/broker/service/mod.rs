//! The shell around the core: connections in, rows and objects out.
//!
//! Every call is a step: the core is locked and called with the present time, what it changed goes to the ledger in the same
//! order, whoever waited is told. No reply goes out before what it says is kept. Must not decide anything.

mod agents;
mod forget;
mod gate;
mod http;
pub mod identify;
mod judges;
mod operator;
pub mod serve;
mod tls;
mod uploads;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};
use tonic::metadata::MetadataValue;
use tonic::{Code, Request, Status};

use super::core::kept::{Evaluation, Job, Lease, Seconds, Task};
use super::core::{Core, Granted, Refused, Ticket, Wake};
use super::ledger::{Ledger, Record};
use super::objects::{self, Objects, SMALL};
use identify::{Caller, Identify};

/// Largest message of an agent or a judge: the candidates of a batch, or what they came to.
pub(super) const MOST_MESSAGE: usize = 64 << 20;
/// Largest message of the operator: a task with its recorded trajectory.
pub(super) const MOST_CONTROL: usize = 512 << 20;
/// Most calls of one connection at once.
pub(super) const MOST_STREAMS: u32 = 256;
/// Most bytes of contents that are remembered.
const MOST_REMEMBERED: usize = 64 << 20;

/// Content that is evaluated: a lease with all that its judge needs to know.
#[derive(Clone, Debug)]
struct Work {
    lease: Lease,
    evaluation: Evaluation,
    task: Task,
    /// `api::job::Judge` of the job.
    judge: String,
    waited: Seconds,
}

/// Who waits for a lease or a slice.
enum Waiting {
    Pull(oneshot::Sender<(u64, Option<Box<Work>>)>, Seconds),
    Acquire(oneshot::Sender<(u64, Option<Granted>)>),
}

/// What a call was given and may not have reached whoever called.
enum Given {
    Lease(u64),
    Slice(u64),
}

struct State {
    core: Core,
    waiting: HashMap<Ticket, Waiting>,
    given: HashMap<Ticket, Given>,
    answered: HashMap<u64, Arc<Notify>>,
    next_ticket: Ticket,
}

#[derive(Default)]
struct Remembered {
    contents: BTreeMap<String, Arc<Vec<u8>>>,
    bytes: usize,
}

/// A broker.
pub struct Broker {
    state: Mutex<State>,
    ledger: Ledger,
    objects: Objects,
    identify: Arc<dyn Identify>,
    started: Instant,
    remembered: Mutex<Remembered>,
    pool: String,
    /// Trajectories may have grown: objects are to be made of them.
    grown: Notify,
    /// Held together by those who name content until their row is kept, alone by whoever removes content that nobody names.
    naming: tokio::sync::RwLock<()>,
    stopping: tokio::sync::watch::Sender<bool>,
}

impl std::fmt::Debug for Broker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Broker").field("pool", &self.pool).finish_non_exhaustive()
    }
}

impl Broker {
    /// A broker over an opened ledger.
    #[must_use]
    pub fn new(core: Core, ledger: Ledger, objects: Objects, identify: Arc<dyn Identify>, pool: String) -> Arc<Self> {
        let state =
            State { core, waiting: HashMap::new(), given: HashMap::new(), answered: HashMap::new(), next_ticket: 0 };
        Arc::new(Self {
            state: Mutex::new(state),
            ledger,
            objects,
            identify,
            started: Instant::now(),
            remembered: Mutex::new(Remembered::default()),
            pool,
            grown: Notify::new(),
            naming: tokio::sync::RwLock::new(()),
            stopping: tokio::sync::watch::channel(false).0,
        })
    }

    fn now(&self) -> Seconds {
        self.started.elapsed().as_secs_f64()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One step. Gives its result and the batch that has to be kept before anybody hears of it.
    fn step<T>(&self, records: Vec<Record>, what: impl FnOnce(&mut Core, Seconds) -> T) -> (T, u64) {
        let mut state = self.lock();
        let now = self.now();
        let result = what(&mut state.core, now);
        (result, self.after(&mut state, records, now))
    }

    /// Hands on what the core has done: rows to the ledger, news to whoever waits for them.
    fn after(&self, state: &mut State, mut records: Vec<Record>, now: Seconds) -> u64 {
        let mut pulled = Vec::new();
        let mut acquired = Vec::new();
        loop {
            let wakes = state.core.take_wakes();
            if wakes.is_empty() {
                break;
            }
            for wake in wakes {
                match wake {
                    Wake::Pulled(ticket, lease) => {
                        let waiting = state.waiting.remove(&ticket);
                        match (waiting, Self::work(state, lease)) {
                            (Some(Waiting::Pull(to, arrived)), Some(mut work)) if !to.is_closed() => {
                                work.waited = now - arrived;
                                state.given.insert(ticket, Given::Lease(lease));
                                pulled.push((to, Some(Box::new(work))));
                            }
                            _ => state.core.hand_back(lease, now),
                        }
                    }
                    Wake::Acquired(ticket, granted) => {
                        if let Some(Waiting::Acquire(to)) = state.waiting.remove(&ticket) {
                            state.given.insert(ticket, Given::Slice(granted.slice));
                            acquired.push((to, Some(granted)));
                        }
                    }
                    Wake::Over(ticket) => match state.waiting.remove(&ticket) {
                        Some(Waiting::Pull(to, _)) => pulled.push((to, None)),
                        Some(Waiting::Acquire(to)) => acquired.push((to, None)),
                        None => {}
                    },
                    Wake::Answered(evaluation) => {
                        if let Some(notify) = state.answered.remove(&evaluation) {
                            notify.notify_waiters();
                        }
                    }
                }
            }
        }
        records.extend(state.core.take_changes().into_iter().map(|c| Record::Change(Box::new(c))));
        let batch = self.ledger.submit(records);
        // Whoever has gone meanwhile leaves its ticket behind, and what it was given is taken back by that.
        for (to, work) in pulled {
            let _ = to.send((batch, work));
        }
        for (to, granted) in acquired {
            let _ = to.send((batch, granted));
        }
        batch
    }

    fn work(state: &State, lease: u64) -> Option<Work> {
        let (row, evaluation) = state.core.leased(lease)?;
        let job = state.core.job(&row.job)?;
        let (task, judge) = (job.tasks.get(evaluation.task)?.clone(), judge_json(job));
        Some(Work { lease: row.clone(), evaluation: evaluation.clone(), task, judge, waited: 0.0 })
    }

    /// Waits until a batch is kept.
    async fn kept(&self, batch: u64) -> Result<(), Status> {
        self.ledger.committed(batch).await.map_err(|e| Status::unavailable(e.to_string()))
    }

    /// A step whose refusal is a status, kept.
    async fn call<T>(
        &self,
        records: Vec<Record>,
        what: impl FnOnce(&mut Core, Seconds) -> Result<T, Refused>,
    ) -> Result<T, Status> {
        let (result, batch) = self.step(records, what);
        self.kept(batch).await?;
        result.map_err(|e| status(&e))
    }

    /// A step that may have to wait: what it waits for comes to the ticket.
    fn wait_for<T>(
        &self,
        waiting: Waiting,
        what: impl FnOnce(&mut Core, Ticket, Seconds) -> Result<T, Refused>,
    ) -> (Ticket, Result<T, Refused>, u64) {
        let mut state = self.lock();
        let now = self.now();
        state.next_ticket += 1;
        let ticket = state.next_ticket;
        state.waiting.insert(ticket, waiting);
        let result = what(&mut state.core, ticket, now);
        if result.is_err() {
            state.waiting.remove(&ticket);
        }
        let batch = self.after(&mut state, Vec::new(), now);
        (ticket, result, batch)
    }

    /// What comes to a ticket until then; nothing once the broker stops.
    async fn given<T>(
        &self,
        ticket: Ticket,
        receiver: &mut oneshot::Receiver<T>,
        until: tokio::time::Instant,
    ) -> Option<T> {
        let given = tokio::select! {
            biased;
            given = &mut *receiver => given.ok(),
            () = tokio::time::sleep_until(until) => None,
            () = self.stopped() => None,
        };
        // Once it has left, nobody can give it anything; what it was given in this moment counts.
        given.or_else(|| {
            self.leave(ticket);
            receiver.try_recv().ok()
        })
    }

    /// Waits no longer.
    fn leave(&self, ticket: Ticket) {
        let mut state = self.lock();
        if state.waiting.remove(&ticket).is_some() {
            let now = self.now();
            state.core.leave(ticket, now);
            self.after(&mut state, Vec::new(), now);
        }
    }

    /// Who calls, as the gate has found.
    fn caller<T>(request: &Request<T>) -> Result<Caller, Status> {
        let caller = request.extensions().get::<Caller>().cloned();
        caller.ok_or_else(|| Status::internal("nobody has asked who calls"))
    }

    /// Content by its digest.
    async fn content(&self, digest: &str) -> Result<Arc<Vec<u8>>, Status> {
        if let Some(found) = self.remembered().contents.get(digest) {
            return Ok(found.clone());
        }
        let failed = |e: &dyn std::fmt::Display| Status::unavailable(e.to_string());
        let found = match self.ledger.blob(digest).map_err(|e| failed(&e))? {
            Some(found) => Some(found),
            None => self.objects.get(&objects::blob(digest)).await.map_err(|e| failed(&e))?,
        };
        // Others may write to a bucket; what they make of a candidate isn't what was submitted.
        if found.as_ref().is_some_and(|bytes| objects::digest(bytes) != digest) {
            return Err(Status::data_loss(format!("content {digest} isn't what was written")));
        }
        let found = found.ok_or_else(|| Status::data_loss(format!("content {digest} isn't kept any more")))?;
        let found = Arc::new(found);
        self.remember(digest, &found);
        Ok(found)
    }

    async fn text(&self, digest: &str) -> Result<String, Status> {
        let content = self.content(digest).await?;
        String::from_utf8(content.to_vec()).map_err(|_| Status::data_loss(format!("content {digest} isn't text")))
    }

    /// Makes content durable; who calls holds `naming` until a row names it. Small content goes with the next batch, other
    /// content lies in the store by now.
    async fn keep(&self, bytes: Vec<u8>, records: &mut Vec<Record>) -> Result<String, Status> {
        let digest = objects::digest(&bytes);
        if self.remembered().contents.contains_key(&digest) {
            return Ok(digest);
        }
        let shared = Arc::new(bytes);
        if shared.len() <= SMALL {
            records.push(Record::Blob { digest: digest.clone(), bytes: shared.to_vec() });
        } else {
            let put = self.objects.put(&objects::blob(&digest), shared.to_vec()).await;
            put.map_err(|e| Status::unavailable(e.to_string()))?;
            self.remember(&digest, &shared);
        }
        Ok(digest)
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers content that is durable.
    fn remember(&self, digest: &str, content: &Arc<Vec<u8>>) {
        let mut remembered = self.remembered();
        if remembered.bytes + content.len() > MOST_REMEMBERED {
            *remembered = Remembered::default();
        }
        if remembered.contents.insert(digest.to_owned(), content.clone()).is_none() {
            remembered.bytes += content.len();
        }
    }

    /// Waits until the broker stops.
    async fn stopped(&self) {
        let mut stopping = self.stopping.subscribe();
        let _ = stopping.wait_for(|s| *s).await;
    }
}

fn judge_json(job: &Job) -> String {
    let spec: serde_json::Value = serde_json::from_str(&job.spec).unwrap_or_default();
    match &spec["judge"] {
        serde_json::Value::Null => "{}".to_owned(),
        judge => judge.to_string(),
    }
}

/// A refusal as a status, with a word for programs in `kernelfleet-reason`.
fn status(refused: &Refused) -> Status {
    let (code, word) = match refused {
        Refused::UnknownJob(_) | Refused::UnknownTask(_) | Refused::NoResult(_) | Refused::UnknownKey(_) => {
            (Code::NotFound, "")
        }
        Refused::Index { .. } => (Code::OutOfRange, ""),
        Refused::Superseded(_) => (Code::FailedPrecondition, "superseded"),
        Refused::Finished(_) => (Code::FailedPrecondition, "finished"),
        Refused::Closed(_) => (Code::FailedPrecondition, "closed"),
        Refused::NotBegun(_) => (Code::FailedPrecondition, "not_begun"),
        Refused::KeyReused(_) => (Code::InvalidArgument, ""),
        Refused::TooLarge(_) => (Code::InvalidArgument, "too_large"),
        Refused::TooManyKeys(_) | Refused::Budget { .. } => (Code::InvalidArgument, "budget"),
        Refused::TooMany => (Code::ResourceExhausted, ""),
        Refused::Gap { .. } => (Code::FailedPrecondition, "gap"),
        Refused::OtherEnd => (Code::FailedPrecondition, "other_end"),
        Refused::JobDiffers(_) => (Code::FailedPrecondition, "differs"),
        Refused::Session(_) => (Code::Aborted, "session"),
        Refused::LeaseOver(_) => (Code::FailedPrecondition, "lease_over"),
        Refused::SliceOver(..) => (Code::FailedPrecondition, "slice_over"),
        Refused::NoJudge => (Code::Unavailable, "no_judge"),
    };
    let mut status = Status::new(code, refused.to_string());
    if !word.is_empty() {
        status.metadata_mut().insert("kernelfleet-reason", MetadataValue::from_static(word));
    }
    status
}

/// A call of somebody whose call it isn't.
fn denied(caller: &Caller, whose: &str) -> Status {
    let who = match caller {
        Caller::Agent(agent) => format!("agent {}/{}", agent.namespace, agent.pod),
        Caller::Judge { pod, .. } => format!("judge {pod}"),
        Caller::Operator => "the operator".to_owned(),
    };
    Status::permission_denied(format!("this call is for {whose} alone; the token is that of {who}"))
}

/// A call that waits. However it ends before its reply is on its way, the core takes back what it was given.
struct Guard<'a> {
    broker: &'a Broker,
    ticket: Ticket,
}

impl Guard<'_> {
    /// The reply goes out.
    fn delivered(&self) {
        self.broker.lock().given.remove(&self.ticket);
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        let mut state = self.broker.lock();
        let now = self.broker.now();
        match state.given.remove(&self.ticket) {
            Some(Given::Lease(lease)) => state.core.hand_back(lease, now),
            Some(Given::Slice(slice)) => state.core.hand_back_slice(slice, now),
            None if state.waiting.remove(&self.ticket).is_some() => state.core.leave(self.ticket, now),
            None => return,
        }
        self.broker.after(&mut state, Vec::new(), now);
    }
}
