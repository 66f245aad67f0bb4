//! `kernelfleet judge-worker`: a judge in a pod. It pulls evaluations from the broker, so it needs no address.
//!
//! Knows leases, what is kept warm, and that a slice ends by time. Must not know how anything is judged, nor whose
//! evaluations they are.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;
use tonic::Code;

use super::broker_client::{self, Broker, Error, ask};
use super::health::Health;
use super::leases::{Leases, Over};
use super::{card, health};
use crate::api::job;
use crate::hex::hex;
use crate::judge::{Arbiter, Candidate, Device, Effort, Judge, Leash, Slice, TaskSource, Verdict, verdict::PROCEDURE};
use crate::local::court::{self, Open, Real};
use crate::local::environment::Environment;
use crate::local::run::{Bench, Trouble};
use crate::wire::v1::evaluate_reply::State;
use crate::wire::v1::{
    AcquireReply, AcquireRequest, CompleteRequest, Lease, Op, PullRequest, RegisterRequest, ReleaseRequest,
    RenewRequest,
};

/// How long a pull waits for work; a judge that is told to end waits no longer for one.
const PULL: Duration = Duration::from_secs(5);
/// How long a call for exclusive use waits before it is made again.
const ACQUIRE: Duration = Duration::from_secs(10);
/// How long after it was told to wait it asks again to share the card.
const AGAIN: Duration = Duration::from_millis(500);
/// How long a call is tried once the judge is to end.
const LAST_CALL: Duration = Duration::from_secs(3);
/// How often leases are looked at.
const LOOK: Duration = Duration::from_millis(100);
/// Judges that are kept, each of its own choices (precision, tolerance, ..).
const JUDGES: usize = 16;

/// What a judge pod is given.
#[derive(Clone, Debug)]
pub struct Arguments {
    pub broker: broker_client::Settings,
    pub device: Device,
    /// Evaluations at once.
    pub slots: usize,
    /// What an exclusive slice is of, where the device has no name of its own.
    pub card: Option<String>,
    /// Tasks whose reference host is kept.
    pub warm: usize,
    pub listen: std::net::SocketAddr,
    /// What evaluations under way may take once the pod is to end.
    pub grace: Duration,
}

/// Why a judge ended badly.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Setup(String),
}

thread_local! {
    /// The lease that this thread works on.
    static WORKING: Cell<Option<(u64, u64)>> = const { Cell::new(None) };
}

/// A task that is open and not worked on, the latest last.
struct Kept {
    judge: String,
    task: String,
    open: Open,
    leash: Leash,
}

struct Worker {
    arguments: Arguments,
    environment: Environment,
    broker: Arc<Broker>,
    leases: Arc<Leases>,
    slice: Arc<Slice>,
    /// By the usual choices: from its processes, which outlive every lease, all judges fork.
    first: Arc<Judge>,
    judges: Mutex<VecDeque<(String, Arc<Judge>)>>,
    kept: Mutex<VecDeque<Kept>>,
    /// Number of the registration.
    session: AtomicU64,
    registering: Mutex<()>,
    health: Arc<Health>,
    card: card::Card,
    stop: &'static AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Judges until `stop` is set.
///
/// # Errors
/// When the device or the toolchain is missing, or the settings are wrong.
pub fn main(arguments: Arguments, environment: Environment, stop: &'static AtomicBool) -> Result<(), Failure> {
    let setup = |e: &dyn std::fmt::Display| Failure::Setup(e.to_string());
    let broker = Arc::new(Broker::new(arguments.broker.clone()).map_err(|e| setup(&e))?);
    let health = Arc::new(Health::default());
    let _serving = health::serve(arguments.listen, Arc::clone(&health)).map_err(|e| setup(&e))?;
    let leases = Arc::new(Leases::default());
    let slice = Slice::under(Arc::new(Granted {
        broker: Arc::clone(&broker),
        leases: Arc::clone(&leases),
        asked: AtomicU64::new(0),
        stop,
    }));
    let options = court::options(&job::Judge::default(), arguments.device);
    let judge = Judge::start(&environment.toolchain, options, Arc::clone(&slice)).map_err(|e| setup(&e))?;
    if !warmed(&judge, stop) {
        // Told to end before anything was asked of it.
        return Ok(());
    }
    let card = card::Card::of(judge.facts(), arguments.card.as_deref());
    let worker = Arc::new(Worker {
        judges: Mutex::default(),
        first: judge,
        kept: Mutex::default(),
        session: AtomicU64::new(0),
        registering: Mutex::default(),
        arguments,
        environment,
        broker,
        leases,
        slice,
        health,
        card,
        stop,
    });
    let weak = Arc::downgrade(&worker);
    worker.slice.on_pressure(move || Weak::upgrade(&weak).is_some_and(|worker| worker.give_up_one()));
    worker.serve();
    Ok(())
}

/// Warms a judge; no, if `stop` is set before it is through: then nobody waits for it any more.
fn warmed(judge: &Arc<Judge>, stop: &AtomicBool) -> bool {
    let warming = {
        let judge = Arc::clone(judge);
        std::thread::spawn(move || judge.warm())
    };
    while !warming.is_finished() {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        std::thread::sleep(LOOK);
    }
    true
}

/// What a judge's choices are told apart by.
fn key(judge: &job::Judge) -> String {
    serde_json::to_string(&(judge.precision, judge.tolerance, &judge.libraries, judge.inputs)).unwrap_or_default()
}

/// How an evaluation ended.
struct Answer {
    state: State,
    json: String,
    message: String,
    phases: BTreeMap<String, f64>,
}

impl Answer {
    fn of(done: Result<(String, BTreeMap<String, f64>), Trouble>) -> Self {
        let not = |state, message| Self { state, json: String::new(), message, phases: BTreeMap::new() };
        match done {
            Ok((json, phases)) => Self { state: State::Done, json, message: String::new(), phases },
            Err(Trouble::Request(message)) => not(State::Refused, message),
            Err(Trouble::Fault(message)) => not(State::Fault, message),
        }
    }
}

impl Worker {
    fn serve(&self) {
        if !self.register(0) {
            return;
        }
        let working = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..self.arguments.slots.max(1) {
                working.fetch_add(1, Ordering::SeqCst);
                scope.spawn(|| {
                    self.slot();
                    working.fetch_sub(1, Ordering::SeqCst);
                });
            }
            scope.spawn(|| self.renewals(&working));
            self.watch(&working);
        });
        lock(&self.kept).clear();
        lock(&self.judges).clear();
    }

    /// Ends what is over its time, whether the broker is heard or not, until the slots have ended.
    fn watch(&self, working: &AtomicU64) {
        let mut ending: Option<Instant> = None;
        while working.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(LOOK);
            let now = Instant::now();
            self.leases.expire(now);
            if self.stop.load(Ordering::Relaxed) {
                let began = *ending.get_or_insert(now);
                self.broker.hurry(LAST_CALL);
                if now.duration_since(began) >= self.arguments.grace {
                    self.leases.kill_all(Over::Ending);
                }
            }
        }
    }

    /// Tells the broker what is worked on, until the slots have ended.
    fn renewals(&self, working: &AtomicU64) {
        let mut renewed = Instant::now();
        while working.load(Ordering::SeqCst) > 0 {
            std::thread::sleep(LOOK);
            if renewed.elapsed() >= self.health.renew() {
                renewed = Instant::now();
                self.renew();
            }
        }
    }

    fn renew(&self) {
        let session = self.session.load(Ordering::SeqCst);
        let request = RenewRequest { session, leases: self.leases.ids() };
        match ask!(self.broker, judges.renew, Duration::ZERO, &request) {
            Ok(reply) => {
                self.health.heard();
                for id in reply.over {
                    self.leases.kill(id, Over::Broker);
                }
            }
            Err(error) => self.failed(session, &error),
        }
    }

    /// After a call that was not answered: a registration that is void is made again.
    fn failed(&self, session: u64, error: &Error) {
        tracing::warn!(%error, "a call failed");
        if matches!(error.code(), Some(Code::Aborted | Code::NotFound)) {
            self.register(session);
        }
    }

    /// Registers, unless somebody has since `old`; false when the judge is to end.
    fn register(&self, old: u64) -> bool {
        let _one = lock(&self.registering);
        if self.session.load(Ordering::SeqCst) != old {
            return true;
        }
        // What was leased is lost, so nothing of it may run on.
        self.leases.kill_all(Over::Broker);
        let request = RegisterRequest {
            device: match self.arguments.device {
                Device::Cpu => "cpu".into(),
                Device::Cuda => "cuda".into(),
            },
            card: self.card.name.clone(),
            arch: self.card.arch.clone(),
            properties_json: self.card.properties.to_string(),
            hardware: self.card.hardware.clone(),
            versions_json: serde_json::json!(self.environment.toolchain.versions).to_string(),
            procedure: PROCEDURE.to_owned(),
            slots: u32::try_from(self.arguments.slots).unwrap_or(1),
            instance: instance(),
            started: crate::agent::trajectory::now(),
        };
        while !self.stop.load(Ordering::Relaxed) {
            match ask!(self.broker, judges.register, Duration::ZERO, &request) {
                Ok(reply) => {
                    self.session.store(reply.session, Ordering::SeqCst);
                    self.health.registered(reply.renew_seconds);
                    tracing::info!(session = reply.session, card = self.card.name, "registered with the broker");
                    return true;
                }
                Err(error) => {
                    tracing::warn!(%error, "the broker does not register this judge");
                    std::thread::sleep(Duration::from_secs(2));
                }
            }
        }
        false
    }

    /// Works on one lease after another.
    fn slot(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let asked = Instant::now();
            let session = self.session.load(Ordering::SeqCst);
            let request = PullRequest {
                session,
                wait_seconds: PULL.as_secs_f64(),
                warm: self.warm(),
                unhealthy: self.card.unhealthy(),
            };
            match ask!(self.broker, judges.pull, PULL, &request) {
                Ok(reply) => {
                    self.health.heard();
                    if let Some(lease) = reply.lease {
                        self.work(session, &lease, asked + seconds(lease.waited));
                    } else if !request.unhealthy.is_empty() {
                        std::thread::sleep(Duration::from_secs(1));
                    }
                }
                Err(error) => {
                    self.failed(session, &error);
                    std::thread::sleep(Duration::from_millis(500));
                }
            }
        }
    }

    /// Works on a lease that counts from `from`.
    fn work(&self, session: u64, lease: &Lease, from: Instant) {
        let began = Instant::now();
        WORKING.set(Some((session, lease.id)));
        let done = std::panic::catch_unwind(AssertUnwindSafe(|| self.evaluate(session, lease, from)));
        WORKING.set(None);
        let answer = done.unwrap_or_else(|_| Answer::of(Err(Trouble::Fault("the judge's own thread died".into()))));
        let answer = match self.leases.end(lease.id) {
            // Whatever came out of processes that were killed says nothing of the candidate.
            Some(over) => Answer::of(Err(Trouble::Fault(over.to_string()))),
            None => answer,
        };
        let op = lease.op().as_str_name();
        tracing::info!(
            lease = lease.id,
            op,
            task = lease.task_name,
            state = answer.state.as_str_name(),
            seconds = began.elapsed().as_secs_f64(),
            message = answer.message,
            "evaluated"
        );
        let request = CompleteRequest {
            session,
            lease: lease.id,
            state: answer.state.into(),
            answer_json: answer.json,
            message: answer.message,
            phases: answer.phases.into_iter().collect(),
        };
        if let Err(error) = ask!(self.broker, judges.complete, Duration::ZERO, &request) {
            self.failed(session, &error);
        }
    }

    fn evaluate(&self, session: u64, lease: &Lease, from: Instant) -> Answer {
        let choices: job::Judge = match serde_json::from_str(&lease.judge_json) {
            Ok(choices) => choices,
            Err(e) => return Answer::of(Err(Trouble::Fault(format!("the job's choices are not understood: {e}")))),
        };
        let key = key(&choices);
        let kept = self.take(&key, &lease.task_digest);
        let leash = kept.as_ref().map_or_else(Leash::new, |kept| kept.leash.clone());
        self.leases.begin((session, lease.id), leash.clone(), seconds(lease.seconds), from);
        let _entered = leash.enter();
        let open = match kept {
            Some(kept) => Ok(kept.open),
            None => self.open(&key, &choices, lease),
        };
        let mut open = match open {
            Ok(open) => open,
            Err(trouble) => return Answer::of(Err(trouble)),
        };
        let done = asked(&mut open, lease);
        if !leash.is_over() && !matches!(done, Err(Trouble::Fault(_))) {
            self.keep(Kept { judge: key, task: lease.task_digest.clone(), open, leash });
        }
        Answer::of(done)
    }

    fn open(&self, key: &str, choices: &job::Judge, lease: &Lease) -> Result<Open, Trouble> {
        let judge = self.judge(key, choices);
        let court = Real { judge, modules: self.environment.python.modules.clone() };
        court.opened(&TaskSource {
            name: lease.task_name.clone(),
            path: format!("{}.py", lease.task_name).into(),
            source: lease.task_source.clone(),
        })
    }

    /// The judge of these choices; the one that was used last comes last.
    fn judge(&self, key: &str, choices: &job::Judge) -> Arc<Judge> {
        let mut judges = lock(&self.judges);
        if let Some(at) = judges.iter().position(|(known, _)| known == key)
            && let Some(found) = judges.remove(at)
        {
            let judge = Arc::clone(&found.1);
            judges.push_back(found);
            return judge;
        }
        let judge = self.first.by(court::options(choices, self.arguments.device));
        judges.push_back((key.to_owned(), Arc::clone(&judge)));
        if judges.len() > JUDGES {
            judges.pop_front();
        }
        judge
    }

    /// Tasks that are open. One whose host has ended, as all do with the process that they are forked from, is closed.
    fn warm(&self) -> Vec<String> {
        let mut kept = lock(&self.kept);
        let (alive, ended): (Vec<Kept>, Vec<Kept>) = kept.drain(..).partition(|kept| kept.open.alive());
        let tasks = alive.iter().map(|kept| kept.task.clone()).collect();
        kept.extend(alive);
        drop(kept);
        drop(ended);
        tasks
    }

    /// A task that is open already.
    fn take(&self, judge: &str, task: &str) -> Option<Kept> {
        loop {
            let mut kept = lock(&self.kept);
            let at = kept.iter().rposition(|k| k.judge == judge && k.task == task)?;
            let found = kept.remove(at);
            drop(kept);
            if found.as_ref().is_some_and(|found| found.open.alive()) {
                return found;
            }
        }
    }

    fn keep(&self, open: Kept) {
        if !open.open.alive() {
            return;
        }
        let mut kept = lock(&self.kept);
        kept.push_back(open);
        let over: Vec<Kept> =
            if kept.len() > self.arguments.warm { kept.pop_front().into_iter().collect() } else { Vec::new() };
        drop(kept);
        drop(over);
    }

    /// Closes the task that was longest not worked on; false when there is none.
    fn give_up_one(&self) -> bool {
        let oldest = lock(&self.kept).pop_front();
        oldest.is_some()
    }
}

/// A name that no other process has.
fn instance() -> String {
    let mut bytes = [0; 16];
    match getrandom::fill(&mut bytes) {
        Ok(()) => hex(&bytes),
        Err(_) => format!("{}-{:?}", std::process::id(), Instant::now()),
    }
}

fn seconds(of: f64) -> Duration {
    Duration::try_from_secs_f64(of).unwrap_or(Duration::from_secs(3600))
}

/// Asks an open task what the lease wants to know.
fn asked(open: &mut Open, lease: &Lease) -> Result<(String, BTreeMap<String, f64>), Trouble> {
    let candidates: Vec<Candidate> =
        lease.candidates.iter().map(|c| Candidate { files: c.files.clone().into_iter().collect() }).collect();
    let one = || candidates.first().ok_or_else(|| Trouble::Request("there is no candidate".into()));
    let mut phases = BTreeMap::new();
    let text = match lease.op() {
        Op::Check => json(&open.check()?)?,
        Op::Trace => json(&open.trace()?)?,
        Op::Reference => json(&open.reference()?)?,
        Op::Counters => json(&open.counters(candidates.first())?)?,
        Op::Compile => json(&open.compile(one()?)?)?,
        op @ (Op::Verify | Op::Screen | Op::Final) => {
            let effort = match op {
                Op::Verify => Effort::Verify,
                Op::Screen => Effort::Screen,
                _ => Effort::Final,
            };
            one()?;
            let mut verdicts: BTreeMap<usize, Verdict> = BTreeMap::new();
            open.judge(&candidates, effort, &mut |place, verdict| {
                for (phase, seconds) in &verdict.phases_seconds {
                    *phases.entry(phase.clone()).or_insert(0.0) += seconds;
                }
                verdicts.insert(place, verdict);
            })?;
            json(&in_order(verdicts, candidates.len())?)?
        }
        Op::Unspecified => return Err(Trouble::Request("the evaluation does not say what is asked".into())),
    };
    Ok((text, phases))
}

/// What was told of each candidate, in the candidates' order, whichever was judged first.
fn in_order<T>(told: BTreeMap<usize, T>, candidates: usize) -> Result<Vec<T>, Trouble> {
    if told.len() == candidates && told.keys().copied().eq(0..candidates) {
        return Ok(told.into_values().collect());
    }
    Err(Trouble::Fault(format!("{} verdicts were told of {candidates} candidates", told.len())))
}

fn json(value: &impl Serialize) -> Result<String, Trouble> {
    serde_json::to_string(value).map_err(|e| Trouble::Fault(format!("the answer can't be written: {e}")))
}

/// Exclusive use of the card, as the broker grants it to this judge. While it is asked for, `Slice` keeps all that this judge
/// does off the card; the broker relies on that until it has granted a slice, or to share the card again, so the wait ends
/// in no other way. Where the lease that asks is over, it asks on through another one.
#[derive(Debug)]
struct Granted {
    broker: Arc<Broker>,
    leases: Arc<Leases>,
    /// Slices that were asked for: a number of its own for each.
    asked: AtomicU64,
    stop: &'static AtomicBool,
}

impl Granted {
    fn next(&self) -> u64 {
        self.asked.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// One call. The slice, if it was granted, and since when it counts.
    fn ask(&self, request: &mut AcquireRequest) -> Option<(AcquireReply, Instant)> {
        let asked = Instant::now();
        match ask!(self.broker, judges.acquire, ACQUIRE, &*request) {
            Ok(reply) if reply.granted => {
                let from = asked + seconds(reply.waited);
                return Some((reply, from));
            }
            Ok(_) => {}
            // The slice was granted, the answer was lost, and its time went by.
            Err(error) if error.reason() == "slice_over" => request.number = self.next(),
            // A lease that the broker does not know any more gives no right to anything.
            Err(Error::Refused { .. }) => self.leases.kill(request.lease, Over::Broker),
            Err(error) => {
                tracing::warn!(%error, "exclusive use was not granted");
                std::thread::sleep(AGAIN);
            }
        }
        None
    }

    /// Gives a slice back. One that is not given back ends by time.
    fn give_back(&self, session: u64, lease: u64, slice: u64) {
        let request = ReleaseRequest { session, lease, slice };
        if let Err(error) = ask!(self.broker, judges.release, Duration::ZERO, &request) {
            tracing::warn!(%error, "exclusive use could not be given back");
        }
    }

    /// A lease to ask on through, with its registration. None if nothing is asked for any more, and the card is shared again.
    fn heir(&self, last: &AcquireRequest) -> Option<(u64, u64)> {
        let shared = AcquireRequest { lease: 0, wait_seconds: 0.0, ..*last };
        loop {
            if let Some(heir) = self.leases.heir() {
                return Some(heir);
            }
            match ask!(self.broker, judges.acquire, Duration::ZERO, &shared) {
                Ok(reply) if reply.granted => return None,
                Ok(_) => {}
                // Nothing that was asked for in a session that is over is waited for.
                Err(Error::Refused { .. }) => return None,
                Err(error) => tracing::warn!(%error, "the card can't be shared again"),
            }
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            std::thread::sleep(AGAIN);
        }
    }
}

impl Arbiter for Granted {
    fn acquire(&self) -> bool {
        let Some((session, lease)) = WORKING.get().filter(|(_, lease)| !self.leases.is_over(*lease)) else {
            return false;
        };
        let wait_seconds = ACQUIRE.as_secs_f64();
        let mut request = AcquireRequest { session, lease, wait_seconds, number: self.next() };
        loop {
            if let Some((reply, from)) = self.ask(&mut request) {
                if !self.leases.is_over(lease) {
                    self.leases.exclusive(lease, reply.slice, seconds(reply.seconds), from);
                    return true;
                }
                // It was waited for to let this judge's other work go on.
                self.give_back(request.session, request.lease, reply.slice);
                return false;
            }
            if !self.leases.is_over(request.lease) {
                continue;
            }
            let Some((session, heir)) = self.heir(&request) else { return false };
            request = AcquireRequest { session, lease: heir, wait_seconds, number: self.next() };
        }
    }

    fn release(&self) {
        let Some((session, lease)) = WORKING.get() else { return };
        // Without a grant there is nothing to give back.
        let Some(slice) = self.leases.shared(lease) else { return };
        self.give_back(session, lease, slice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_answered_in_the_order_of_the_candidates_and_not_of_their_ends() {
        let told = [(2, "third"), (0, "first"), (1, "second")];
        assert_eq!(in_order(told.into(), 3).unwrap(), ["first", "second", "third"]);
        for (missing, candidates) in [(1, 3), (0, 2)] {
            let rest = told.into_iter().filter(|(place, _)| *place != missing).collect();
            assert!(matches!(in_order(rest, candidates), Err(Trouble::Fault(_))), "without {missing}");
        }
    }
}
