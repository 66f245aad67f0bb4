//! Stub judges and agents around a core in simulated time: messages that are late, lost or doubled, processes that die, a
//! broker that dies and comes back with what it had kept. Every run follows from its seed.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use proptest::prelude::*;

use super::kept::{Change, Ending, EpisodeState, EvaluationState, Job, JobState, Kept, Op, Registration, Task};
use super::tally::Tally;
use super::{Ask, Completion, Core, Granted, Pod, Refused, Settings, Wake};
use crate::properties;

/// Where seeds that once failed lie.
const FOUND: &str = "tests/regressions/simulation.txt";

/// splitmix64: a sequence of numbers that a seed decides.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

pub(super) fn job(namespace: &str, name: &str, tasks: usize, attempts: u32) -> Job {
    let task = |n: usize| Task { name: format!("t{n}"), source: format!("{name}-{n}"), replay: None };
    Job {
        uid: format!("{namespace}/{name}"),
        namespace: namespace.into(),
        name: name.into(),
        spec: "{}".into(),
        batch_job: name.into(),
        attempts,
        tasks: (0..tasks).map(task).collect(),
        state: JobState::Open,
    }
}

pub(super) fn card(name: String, slots: u32) -> Registration {
    Registration { device: "cpu".into(), card: name, slots, ..Registration::default() }
}

pub(super) fn done() -> Completion {
    let mut tally = Tally::default();
    tally.add("verdicts", "correct", 1.0);
    Completion {
        state: EvaluationState::Done,
        answer: "[]".into(),
        message: String::new(),
        judged: None,
        tally,
        phases: BTreeMap::new(),
    }
}

pub(super) fn ending() -> Ending {
    Ending { digest: "d".into(), state: "judged".into(), reason: None, end: None, seconds: 1.0 }
}

// ---- Messages ----------------------------------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Request {
    Begin(Pod),
    Evaluate(Pod, String),
    Append(Pod, u64, usize),
    Finish(Pod),
    Register(String, String, String, u32),
    Pull(String, u64),
    Renew(String, u64, Vec<u64>),
    Acquire(String, u64, u64, u64),
    Release(String, u64, u64, u64),
    Withdraw(String, u64, u64),
    Complete(String, u64, u64),
}

#[derive(Clone, Debug)]
enum Reply {
    Refused(Refused),
    Begun(u64),
    Stands(EvaluationState),
    Lines(u64),
    Finished,
    Session(u64),
    Lease(Option<(u64, f64, f64)>),
    Over(Vec<u64>),
    Slice(Option<Granted>),
    Shared(bool),
    Well,
}

#[derive(Clone, Debug)]
enum Event {
    Arrive(u64, Who, Request),
    Answer(u64, Who, Reply),
    /// The client gives up waiting.
    Late(u64, Who),
    Commit,
    Tick,
    WaitOver(u64),
    Step(Who, u64),
    KillBroker,
    KillJudge(usize),
    KillAgent(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Judge(usize, u64),
    Agent(usize, u64),
}

struct Timed(f64, u64, Event);

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.1 == other.1
    }
}
impl Eq for Timed {}
impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Timed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

// ---- Clients -----------------------------------------------------------------------------------------------------

/// What one of a judge's threads does with its lease, as in `judge::session::Slice`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Doing {
    /// It records or builds, off the card.
    Away,
    Shares,
    /// It waits within its judge, to share the card or to have it alone.
    WantsShare,
    WantsAlone,
    /// The judge's turn is its.
    Turn,
    /// The work is done; its answer is under way.
    Ends,
}

struct Work {
    doing: Doing,
    /// The judge's own end of it.
    ends: f64,
    /// It was killed; whoever waits within the judge learns of that when its turn comes.
    over: bool,
    steps: u32,
}

/// What the one thread of a judge that holds its `Slice` alone waits for, or does. All others are off the card.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    Asks,
    Alone {
        slice: u64,
        until: f64,
    },
    /// It gives its slice back; it goes on once the broker has heard of it.
    Leaves,
    /// It asks to share the card again, since nothing that it knows of wants it alone.
    Withdraws,
}

#[derive(Clone, Copy, Debug)]
struct Turn {
    owner: u64,
    /// The lease through which it is asked for: its own, or an heir.
    through: u64,
    number: u64,
    stage: Stage,
}

struct Judge {
    pod: String,
    card: String,
    slots: u32,
    /// Counts its processes: messages to an older one are lost.
    life: u64,
    session: Option<u64>,
    work: BTreeMap<u64, Work>,
    turn: Option<Turn>,
    /// Askings for the card.
    asked: u64,
}

struct Agent {
    pod: Pod,
    life: u64,
    keys: usize,
    next: usize,
    lines: u64,
    finished: bool,
}

struct Plan {
    loss: f64,
    doubling: f64,
    slow: f64,
    kills: usize,
    until: f64,
}

struct World {
    dice: Dice,
    plan: Plan,
    now: f64,
    /// When the broker's clock began.
    epoch: f64,
    count: u64,
    events: BinaryHeap<Reverse<Timed>>,
    core: Option<Core>,
    kept: Kept,
    /// Steps that aren't committed: changes, and the replies that wait for them.
    open: Vec<(Vec<Change>, Vec<(u64, Who, Reply)>)>,
    tickets: BTreeMap<u64, (u64, Who, bool, f64)>,
    /// Calls that are waited for: when each was made, and what it asks.
    waiting: BTreeMap<u64, (f64, Request)>,
    judges: Vec<Judge>,
    agents: Vec<Agent>,
    jobs: Vec<Job>,
    settings: Settings,
}

const LINES: u64 = 6;
/// No lease: a judge that may not share the card yet asks again.
const AGAIN: u64 = u64::MAX;

impl World {
    /// Up to five judges on up to three cards.
    fn new(seed: u64, plan: Plan) -> Self {
        let mut dice = Dice(seed);
        let cards = 1 + dice.below(3);
        let judges = (0..1 + dice.below(5)).map(|n| (n % cards, 1 + (dice.next() % 3) as u32)).collect();
        Self::of(dice, plan, 40.0, judges)
    }

    /// Judges by their cards and slots.
    fn of(mut dice: Dice, plan: Plan, lease_seconds: f64, judges: Vec<(usize, u32)>) -> Self {
        let settings = Settings { lease_seconds, exclusive_seconds: 6.0, renew_seconds: 2.0, ..Settings::default() };
        let jobs = vec![job("a", "one", 3, 2), job("a", "two", 2, 1), job("b", "three", 4, 1)];
        let judges = (0..)
            .zip(judges)
            .map(|(n, (card, slots)): (usize, _)| Judge {
                pod: format!("judge-{n}"),
                card: format!("card-{card}"),
                slots,
                life: 0,
                session: None,
                work: BTreeMap::new(),
                turn: None,
                asked: 0,
            })
            .collect();
        let mut agents = Vec::new();
        for job in &jobs {
            for index in 0..job.indexes() {
                let pod = Pod { uid: format!("{}-{index}-0", job.uid), job: job.uid.clone(), index };
                agents.push(Agent { pod, life: 0, keys: 1 + dice.below(4), next: 0, lines: 0, finished: false });
            }
        }
        let core = Core::new(settings.clone());
        let mut world = Self {
            dice,
            plan,
            now: 0.0,
            epoch: 0.0,
            count: 0,
            events: BinaryHeap::new(),
            core: Some(core),
            kept: Kept::default(),
            open: Vec::new(),
            tickets: BTreeMap::new(),
            waiting: BTreeMap::new(),
            judges,
            agents,
            jobs,
            settings,
        };
        world.put_jobs();
        for n in 0..world.judges.len() {
            world.begin_judge(n);
        }
        for n in 0..world.agents.len() {
            world.begin_agent(n);
        }
        for _ in 0..world.plan.kills {
            let at = world.dice.between(0.0, world.plan.until);
            let event = match world.dice.below(3) {
                0 => Event::KillBroker,
                1 => Event::KillJudge(world.dice.below(world.judges.len())),
                _ => Event::KillAgent(world.dice.below(world.agents.len())),
            };
            world.at(at, event);
        }
        world.at(0.3, Event::Tick);
        world
    }

    fn put_jobs(&mut self) {
        let now = self.now - self.epoch;
        let Some(core) = &mut self.core else { return };
        for job in self.jobs.clone() {
            core.put_job(job, now).unwrap();
        }
        self.kept_step(vec![]);
    }

    fn at(&mut self, time: f64, event: Event) {
        self.count += 1;
        self.events.push(Reverse(Timed(time.max(self.now), self.count, event)));
    }

    fn calm(&self) -> bool {
        self.now > self.plan.until
    }

    fn delay(&mut self) -> f64 {
        let slow = !self.calm() && self.dice.unit() < self.plan.slow;
        if slow { self.dice.between(0.1, 12.0) } else { self.dice.between(0.001, 0.1) }
    }

    fn chance(&mut self, p: f64) -> bool {
        !self.calm() && self.dice.unit() < p
    }

    // ---- The network

    fn send(&mut self, who: Who, request: Request) {
        self.count += 1;
        let rpc = self.count;
        self.waiting.insert(rpc, (self.now, request.clone()));
        for _ in 0..1 + usize::from(self.chance(self.plan.doubling)) {
            if !self.chance(self.plan.loss) {
                let at = self.now + self.delay();
                self.at(at, Event::Arrive(rpc, who, request.clone()));
            }
        }
        self.at(self.now + 8.0, Event::Late(rpc, who));
    }

    fn alive(&self, who: Who) -> bool {
        match who {
            Who::Judge(n, life) => self.judges[n].life == life,
            Who::Agent(n, life) => self.agents[n].life == life,
        }
    }

    /// Takes what a step of the core has done; the replies go out once it is kept.
    fn kept_step(&mut self, mut replies: Vec<(u64, Who, Reply)>) {
        let now = self.now - self.epoch;
        let Some(core) = &mut self.core else { return };
        let mut wakes = core.take_wakes();
        while let Some(wake) = wakes.pop() {
            match wake {
                Wake::Pulled(ticket, lease) => match self.tickets.remove(&ticket) {
                    Some((rpc, who, true, arrived)) => {
                        let (row, _) = core.leased(lease).unwrap();
                        replies.push((rpc, who, Reply::Lease(Some((lease, row.seconds, self.now - arrived)))));
                    }
                    _ => {
                        core.hand_back(lease, now);
                        wakes.extend(core.take_wakes());
                    }
                },
                Wake::Acquired(ticket, granted) => {
                    let (rpc, who, ..) = self.tickets.remove(&ticket).unwrap();
                    replies.push((rpc, who, Reply::Slice(Some(granted))));
                }
                Wake::Over(ticket) => {
                    if let Some((rpc, who, pulls, _)) = self.tickets.remove(&ticket) {
                        replies.push((rpc, who, if pulls { Reply::Lease(None) } else { Reply::Slice(None) }));
                    }
                }
                Wake::Answered(_) => {}
            }
        }
        let changes = core.take_changes();
        self.open.push((changes, replies));
        if self.open.len() == 1 {
            let at = self.now + self.dice.between(0.0, 0.05);
            self.at(at, Event::Commit);
        }
    }

    fn serve(&mut self, rpc: u64, who: Who, request: Request) {
        let now = self.now - self.epoch;
        let Some(core) = &mut self.core else { return };
        let arrived = self.now;
        let park = |world: &mut BTreeMap<_, _>, pulls: bool| {
            world.insert(rpc, (rpc, who, pulls, arrived));
        };
        let refused = |e| Some(Reply::Refused(e));
        // A doubled request that waits would take the other's ticket: the second one is a call of its own.
        if self.tickets.contains_key(&rpc) {
            return;
        }
        let mut wait = false;
        let reply = match request {
            Request::Begin(pod) => core.begin(&pod, now).map_or_else(refused, |b| Some(Reply::Begun(b.lines))),
            Request::Evaluate(pod, key) => {
                let ask = Ask { op: Op::Verify, candidates: vec![key.clone()], bytes: 1 };
                core.evaluate(&pod, &key, Some(ask), now).map_or_else(refused, |a| Some(Reply::Stands(a.state)))
            }
            Request::Append(pod, first, count) => {
                let mut turn = Tally::default();
                turn.add("turns", "done", 1.0);
                let lines = vec![(turn, 1); count];
                core.append(&pod, first, &lines, now).map_or_else(refused, |(_, lines, _)| Some(Reply::Lines(lines)))
            }
            Request::Finish(pod) => {
                core.finish(&pod, ending(), &Tally::default(), now).map_or_else(refused, |_| Some(Reply::Finished))
            }
            Request::Register(pod, instance, name, slots) => core
                .register(&pod, (&instance, instance.parse().unwrap()), card(name, slots), now)
                .map_or_else(refused, |s| Some(Reply::Session(s))),
            Request::Pull(pod, session) => {
                park(&mut self.tickets, true);
                let pulled = core.pull((&pod, session), rpc, vec![], String::new(), now);
                wait = pulled.is_ok();
                pulled.map_or_else(refused, |()| None)
            }
            Request::Renew(pod, session, leases) => {
                core.renew((&pod, session), &leases, now).map_or_else(refused, |over| Some(Reply::Over(over)))
            }
            Request::Acquire(pod, session, lease, number) => {
                park(&mut self.tickets, false);
                let asked = core.acquire((&pod, session), (lease, number), rpc, now);
                wait = asked.is_ok();
                asked.map_or_else(refused, |()| None)
            }
            Request::Release(pod, session, lease, slice) => {
                core.release((&pod, session), lease, slice, now).map_or_else(refused, |()| Some(Reply::Well))
            }
            Request::Withdraw(pod, session, number) => {
                core.withdraw((&pod, session), number, now).map_or_else(refused, |may| Some(Reply::Shared(may)))
            }
            Request::Complete(pod, session, lease) => {
                core.complete((&pod, session), lease, done(), now).map_or_else(refused, |()| Some(Reply::Well))
            }
        };
        if wait {
            self.at(self.now + 3.0, Event::WaitOver(rpc));
        } else if reply.is_some() {
            self.tickets.remove(&rpc);
        }
        self.kept_step(reply.map(|r| (rpc, who, r)).into_iter().collect());
    }

    // ---- What clients do

    fn begin_judge(&mut self, n: usize) {
        let judge = &mut self.judges[n];
        judge.life += 1;
        judge.session = None;
        judge.work.clear();
        judge.turn = None;
        judge.asked = 0;
        let request = Request::Register(judge.pod.clone(), judge.life.to_string(), judge.card.clone(), judge.slots);
        self.send(Who::Judge(n, self.judges[n].life), request);
    }

    fn begin_agent(&mut self, n: usize) {
        let agent = &mut self.agents[n];
        agent.life += 1;
        agent.next = 0;
        agent.lines = 0;
        agent.pod.uid = format!("{}-{}-{}", agent.pod.job, agent.pod.index, agent.life);
        let request = Request::Begin(agent.pod.clone());
        self.send(Who::Agent(n, self.agents[n].life), request);
    }

    fn answer(&mut self, rpc: u64, who: Who, reply: Reply) {
        let Some((asked, request)) = self.waiting.remove(&rpc) else { return };
        match who {
            Who::Judge(n, _) => self.judge_answer(n, who, reply, asked, request),
            Who::Agent(n, _) => self.agent_answer(n, who, reply),
        }
    }

    fn judge_answer(&mut self, n: usize, who: Who, reply: Reply, asked: f64, request: Request) {
        match (reply, request) {
            (Reply::Refused(Refused::LeaseOver(_)), Request::Acquire(_, _, lease, number)) => {
                self.over(n, lease);
                // Its work may have come to its end meanwhile.
                if self.asks(n, number) {
                    self.ask_on(n);
                }
            }
            // Only of the asking that it waits for now: it has given up the others.
            (Reply::Refused(Refused::SliceOver(..)), Request::Acquire(_, _, lease, number)) if self.asks(n, number) => {
                self.acquire(n, lease);
            }
            (Reply::Refused(Refused::SliceOver(..)), _) => {}
            // Another session of its pod: all work ends, a new process registers.
            (Reply::Refused(_), _) => self.begin_judge(n),
            (Reply::Session(session), _) => {
                self.judges[n].session = Some(session);
                for _ in 0..self.judges[n].slots {
                    self.pull(n);
                }
                self.at(self.now + 2.0, Event::Step(who, 0));
            }
            (Reply::Lease(Some((lease, seconds, waited))), _) => {
                let ends = asked + waited + seconds;
                self.judges[n].work.insert(lease, Work { doing: Doing::Away, ends, over: false, steps: 0 });
                self.soon(who, lease, 0.05, 3.0);
                self.at(ends, Event::Step(who, lease));
                // Another slot is asked for when this one's work ends.
            }
            (Reply::Lease(None), _) => self.pull(n),
            (Reply::Over(over), _) => over.into_iter().for_each(|lease| self.over(n, lease)),
            (Reply::Slice(granted), Request::Acquire(_, _, lease, number)) if self.asks(n, number) => match granted {
                Some(granted) => self.granted(n, lease, granted, asked),
                None => self.send_acquire(n),
            },
            (Reply::Well, Request::Release(..)) => self.turn_over(n),
            (Reply::Shared(true), _) => self.turn_over(n),
            (Reply::Shared(false), _) => self.soon(who, AGAIN, 0.3, 0.5),
            (Reply::Well, Request::Complete(_, _, lease)) if self.judges[n].work.remove(&lease).is_some() => {
                self.pull(n);
            }
            _ => {}
        }
    }

    fn pull(&mut self, n: usize) {
        let judge = &self.judges[n];
        let Some(session) = judge.session else { return };
        self.send(Who::Judge(n, judge.life), Request::Pull(judge.pod.clone(), session));
    }

    fn soon(&mut self, who: Who, lease: u64, least: f64, most: f64) {
        let at = self.now + self.dice.between(least, most);
        self.at(at, Event::Step(who, lease));
    }

    // ---- A judge's slice (`judge::session::Slice` and `pod::judge::Granted`)

    /// Whether it waits for the answer to this asking.
    fn asks(&self, n: usize, number: u64) -> bool {
        self.judges[n].turn.is_some_and(|t| t.stage == Stage::Asks && t.number == number)
    }

    /// Asks for the card through a lease, under a new number.
    fn acquire(&mut self, n: usize, lease: u64) {
        let judge = &mut self.judges[n];
        judge.asked += 1;
        let Some(turn) = &mut judge.turn else { return };
        (turn.through, turn.number, turn.stage) = (lease, judge.asked, Stage::Asks);
        self.send_acquire(n);
    }

    fn send_acquire(&mut self, n: usize) {
        let judge = &self.judges[n];
        let (Some(session), Some(turn)) = (judge.session, judge.turn) else { return };
        let request = Request::Acquire(judge.pod.clone(), session, turn.through, turn.number);
        self.send(Who::Judge(n, judge.life), request);
    }

    fn granted(&mut self, n: usize, lease: u64, granted: Granted, asked: f64) {
        let (now, judge) = (self.now, &mut self.judges[n]);
        let Some(turn) = &mut judge.turn else { return };
        let (owner, life) = (turn.owner, judge.life);
        let until = asked + granted.waited + granted.seconds;
        let work = judge.work.get(&owner).filter(|w| !w.over && w.ends > now);
        let Some(until) = work.map(|w| until.min(w.ends)).filter(|until| *until > now) else {
            self.give_back(n, lease, granted.slice);
            return;
        };
        turn.stage = Stage::Alone { slice: granted.slice, until };
        let at = (now + self.dice.between(0.1, 9.0)).min(until);
        self.at(at, Event::Step(Who::Judge(n, life), owner));
    }

    fn give_back(&mut self, n: usize, lease: u64, slice: u64) {
        let judge = &mut self.judges[n];
        let (Some(session), Some(turn)) = (judge.session, &mut judge.turn) else { return };
        turn.stage = Stage::Leaves;
        let (who, request) = (Who::Judge(n, judge.life), Request::Release(judge.pod.clone(), session, lease, slice));
        self.send(who, request);
    }

    /// The broker has heard that this judge doesn't have the card alone: its leases go on.
    fn turn_over(&mut self, n: usize) {
        let judge = &mut self.judges[n];
        let Some(turn) = judge.turn.take_if(|t| matches!(t.stage, Stage::Leaves | Stage::Withdraws)) else { return };
        let who = Who::Judge(n, judge.life);
        if let Some(work) = judge.work.get_mut(&turn.owner) {
            work.doing = Doing::Away;
            self.soon(who, turn.owner, 0.01, 3.0);
        }
        self.next_turn(n);
    }

    /// Whoever waits within a judge goes on, if it can: one that wants the card alone before those that share it.
    fn next_turn(&mut self, n: usize) {
        let who = Who::Judge(n, self.judges[n].life);
        while self.judges[n].turn.is_none() {
            let judge = &mut self.judges[n];
            let of = |doing| judge.work.iter().find(|(_, w)| w.doing == doing).map(|(id, w)| (*id, w.over));
            let (alone, share) = (of(Doing::WantsAlone), of(Doing::WantsShare));
            let shared = judge.work.values().any(|w| w.doing == Doing::Shares);
            let (id, over) = match (alone, share) {
                (Some(_), _) if shared => return,
                (Some(found), _) | (None, Some(found)) => found,
                (None, None) => return,
            };
            let Some(work) = judge.work.get_mut(&id) else { return };
            if over {
                work.doing = Doing::Away;
                self.end(n, id);
            } else if alone.is_some() {
                work.doing = Doing::Turn;
                judge.turn = Some(Turn { owner: id, through: id, number: 0, stage: Stage::Asks });
                self.acquire(n, id);
            } else {
                work.doing = Doing::Shares;
                self.soon(who, id, 0.1, 6.0);
            }
        }
    }

    /// A lease is over, by the judge's own clock or because the broker says so: its processes are killed.
    fn over(&mut self, n: usize, lease: u64) {
        let judge = &mut self.judges[n];
        let Some(work) = judge.work.get_mut(&lease).filter(|w| !w.over && w.doing != Doing::Ends) else { return };
        work.over = true;
        let doing = work.doing;
        match judge.turn {
            Some(Turn { owner, through, stage: Stage::Alone { slice, .. }, .. }) if owner == lease => {
                self.give_back(n, through, slice);
            }
            Some(Turn { through, stage: Stage::Asks, .. }) if through == lease => self.ask_on(n),
            _ => {}
        }
        if matches!(doing, Doing::Away | Doing::Shares) {
            self.end(n, lease);
        }
    }

    /// The lease through which it asks is over: it asks through another one, or says that it waits no longer.
    fn ask_on(&mut self, n: usize) {
        let judge = &mut self.judges[n];
        let live = |(_, w): &(&u64, &Work)| !w.over && w.ends > self.now && w.doing != Doing::Ends;
        if let Some(heir) = judge.work.iter().find(live).map(|(id, _)| *id) {
            return self.acquire(n, heir);
        }
        let (Some(session), Some(turn)) = (judge.session, &mut judge.turn) else { return };
        turn.stage = Stage::Withdraws;
        let number = turn.number;
        let (who, request) = (Who::Judge(n, judge.life), Request::Withdraw(judge.pod.clone(), session, number));
        self.send(who, request);
    }

    /// A thread says what its lease came to.
    fn end(&mut self, n: usize, lease: u64) {
        let judge = &mut self.judges[n];
        let (Some(session), Some(work)) = (judge.session, judge.work.get_mut(&lease)) else { return };
        if std::mem::replace(&mut work.doing, Doing::Ends) != Doing::Ends {
            let (who, request) = (Who::Judge(n, judge.life), Request::Complete(judge.pod.clone(), session, lease));
            self.send(who, request);
            self.next_turn(n);
        }
    }

    /// A judge goes on with a lease; lease 0 is its renewing.
    fn judge_step(&mut self, n: usize, who: Who, lease: u64) {
        let (now, judge) = (self.now, &mut self.judges[n]);
        let Some(session) = judge.session else { return };
        if lease == 0 {
            let request = Request::Renew(judge.pod.clone(), session, judge.work.keys().copied().collect());
            self.send(who, request);
            self.at(now + 2.0, Event::Step(who, 0));
            return;
        }
        if lease == AGAIN && judge.turn.is_some_and(|t| t.stage == Stage::Withdraws) {
            return self.ask_on(n);
        }
        let Some(work) = judge.work.get_mut(&lease) else { return };
        if work.ends <= now {
            self.over(n, lease);
        }
        let judge = &mut self.judges[n];
        let Some(work) = judge.work.get_mut(&lease) else { return };
        match (work.doing, judge.turn) {
            (Doing::Away, _) if work.over => self.end(n, lease),
            (Doing::Away, _) => {
                work.steps += 1;
                let (again, alone) = (work.steps < 6 && self.dice.unit() < 0.7, self.dice.unit() < 0.6);
                if !again {
                    return self.end(n, lease);
                }
                work.doing = if alone { Doing::WantsAlone } else { Doing::WantsShare };
                self.next_turn(n);
            }
            (Doing::Shares, _) => {
                work.doing = Doing::Away;
                self.soon(who, lease, 0.01, 2.0);
                self.next_turn(n);
            }
            (Doing::Turn, Some(Turn { owner, through, stage: Stage::Alone { slice, until }, .. }))
                if owner == lease =>
            {
                // A slice whose time is over takes its lease with it.
                work.over |= until <= now;
                self.give_back(n, through, slice);
            }
            _ => {}
        }
    }

    fn agent_answer(&mut self, n: usize, who: Who, reply: Reply) {
        match reply {
            Reply::Begun(lines) => {
                self.agents[n].lines = lines;
                self.agent_next(n);
            }
            Reply::Stands(state) if state.pending() => self.at(self.now + 1.0, Event::Step(who, 0)),
            Reply::Stands(_) => {
                self.agents[n].next += 1;
                self.agent_next(n);
            }
            Reply::Lines(lines) => {
                self.agents[n].lines = lines;
                self.agent_next(n);
            }
            Reply::Finished | Reply::Refused(Refused::Finished(_)) => self.agents[n].finished = true,
            // Its pod is superseded, or no judge is there: it ends, and Kubernetes starts another one.
            Reply::Refused(_) => {
                self.agents[n].life += 1;
                let at = self.now + 1.0;
                self.at(at, Event::KillAgent(n));
            }
            _ => {}
        }
    }

    fn agent_next(&mut self, n: usize) {
        let agent = &self.agents[n];
        let (who, pod) = (Who::Agent(n, agent.life), agent.pod.clone());
        let request = if agent.next < agent.keys {
            Request::Evaluate(pod, format!("key-{}", agent.next))
        } else if agent.lines < LINES {
            Request::Append(pod, agent.lines, 2)
        } else {
            Request::Finish(pod)
        };
        self.send(who, request);
    }

    // ---- Time

    fn step(&mut self) -> bool {
        let Some(Reverse(Timed(at, _, event))) = self.events.pop() else { return false };
        self.now = at;
        let now = self.now - self.epoch;
        match event {
            Event::Arrive(rpc, who, request) => self.serve(rpc, who, request),
            Event::Answer(rpc, who, reply) if self.alive(who) => self.answer(rpc, who, reply),
            Event::Late(rpc, who) if self.alive(who) => {
                if let Some((_, request)) = self.waiting.remove(&rpc) {
                    self.send(who, request);
                }
            }
            Event::Answer(..) | Event::Late(..) => {}
            Event::Commit => {
                for (changes, replies) in std::mem::take(&mut self.open) {
                    changes.into_iter().for_each(|c| self.kept.apply(c));
                    for (rpc, who, reply) in replies {
                        if !self.chance(self.plan.loss) {
                            let at = self.now + self.delay();
                            self.at(at, Event::Answer(rpc, who, reply));
                        }
                    }
                }
            }
            Event::Tick => {
                if let Some(core) = &mut self.core {
                    core.tick(now);
                    self.kept_step(vec![]);
                }
                self.at(self.now + 0.3, Event::Tick);
            }
            Event::WaitOver(ticket) => {
                if let Some((rpc, who, pulls, _)) = self.tickets.remove(&ticket) {
                    if let Some(core) = &mut self.core {
                        core.leave(ticket, now);
                    }
                    let none = if pulls { Reply::Lease(None) } else { Reply::Slice(None) };
                    self.kept_step(vec![(rpc, who, none)]);
                }
            }
            Event::Step(who, lease) if self.alive(who) => match who {
                Who::Judge(n, _) => self.judge_step(n, who, lease),
                Who::Agent(n, _) => self.agent_next(n),
            },
            Event::Step(..) => {}
            Event::KillBroker => {
                // What isn't committed is lost, and so are the replies that waited for it.
                let some = self.dice.below(self.open.len() + 1);
                for (changes, _) in std::mem::take(&mut self.open).into_iter().take(some) {
                    changes.into_iter().for_each(|c| self.kept.apply(c));
                }
                self.tickets.clear();
                self.shift(self.now - self.epoch);
                self.epoch = self.now;
                self.core = Some(Core::restore(self.settings.clone(), self.kept.clone(), 0.0));
                self.put_jobs();
            }
            Event::KillJudge(n) => {
                if self.dice.unit() < 0.3 {
                    self.judges[n].pod.push('x');
                }
                self.begin_judge(n);
            }
            Event::KillAgent(n) if !self.agents[n].finished => self.begin_agent(n),
            Event::KillAgent(_) => {}
        }
        true
    }

    /// What is kept, by the clock of a broker that starts so much later.
    fn shift(&mut self, by: f64) {
        self.kept.evaluations.values_mut().for_each(|e| e.enqueued -= by);
        self.kept.episodes.values_mut().for_each(|e| e.began -= by);
        for lease in self.kept.leases.values_mut() {
            lease.granted -= by;
            lease.ended = lease.ended.map(|t| t - by);
        }
        for slice in self.kept.exclusives.values_mut() {
            slice.granted -= by;
            slice.ended = slice.ended.map(|t| t - by);
        }
    }

    /// Nobody measures while somebody else uses the card.
    fn check_cards(&self) {
        let mut alone: BTreeMap<&str, Vec<(usize, u64)>> = BTreeMap::new();
        let mut shared: BTreeMap<&str, Vec<(usize, u64)>> = BTreeMap::new();
        for (n, judge) in self.judges.iter().enumerate() {
            if let Some(Turn { owner, stage: Stage::Alone { until, .. }, .. }) = judge.turn
                && until > self.now
            {
                alone.entry(&judge.card).or_default().push((n, owner));
            }
            let shares = judge.work.iter().filter(|(_, w)| w.doing == Doing::Shares && !w.over && w.ends > self.now);
            shared.entry(&judge.card).or_default().extend(shares.map(|(lease, _)| (n, *lease)));
        }
        for (card, slices) in alone {
            assert_eq!(slices.len(), 1, "at {}: exclusive slices of {card} overlap: {slices:?}", self.now);
            let beside = &shared[card];
            assert!(beside.is_empty(), "at {}: {card} is used beside {slices:?} by {beside:?}", self.now);
        }
    }

    fn run(&mut self) {
        while self.now < self.plan.until + 900.0 && !self.agents.iter().all(|a| a.finished) {
            assert!(self.step());
            self.check_cards();
        }
        // What is still under way comes to its end.
        let end = self.now + 2.0 * self.settings.lease_seconds.min(60.0);
        while self.now < end {
            assert!(self.step());
            self.check_cards();
        }
    }

    /// All that was asked for by the generations that count was answered once.
    fn check_end(&self) {
        for agent in &self.agents {
            assert!(agent.finished, "at {}: {:?} never ended", self.now, agent.pod);
            let key = (agent.pod.job.clone(), agent.pod.index);
            let rows = self.kept.episodes.range((key.0.clone(), key.1, 0)..=(key.0.clone(), key.1, u32::MAX));
            let rows: Vec<_> = rows.map(|(_, e)| e).collect();
            let (last, before) = rows.split_last().unwrap();
            assert_eq!(last.state, EpisodeState::Finished);
            assert!(before.iter().all(|e| e.state == EpisodeState::Void));
            let of = |e: &&super::Evaluation| e.job == key.0 && e.index == key.1 && e.generation == last.generation;
            let done: Vec<_> = self.kept.evaluations.values().filter(of).collect();
            let keys: BTreeSet<_> = done.iter().map(|e| &e.key).collect();
            assert_eq!((done.len(), keys.len()), (agent.keys, agent.keys), "{done:?}");
            // One over which judges were lost again and again is a fault, and says so.
            let (well, fault): (Vec<&super::Evaluation>, Vec<_>) =
                done.into_iter().partition(|e| e.state == EvaluationState::Done);
            let given_up = |e: &&super::Evaluation| e.state == EvaluationState::Fault && e.losses >= super::MOST_LOSSES;
            assert!(fault.iter().all(given_up), "{fault:?}");
            assert_eq!(last.tally.count("verdicts", "correct"), well.len() as u64);
            assert_eq!((last.lines, last.tally.count("turns", "done")), (LINES, LINES));
        }
        // What the leases took is charged once, to whom they were, and is told once.
        for (uid, usage) in &self.kept.usage {
            let leases = self.kept.leases.values().filter(|l| l.job == *uid);
            let lengths: f64 = leases.map(|l| l.ended.unwrap() - l.granted).sum();
            let (charged, tallied) = (usage.charged, usage.tally.sum("slice_seconds"));
            assert!((charged - lengths).abs() < 1e-6, "{charged} s are charged to {uid} for leases of {lengths} s");
            assert!((charged - tallied).abs() < 1e-6, "{charged} {tallied}");
        }
    }

    /// No two exclusive slices of a card overlap in what is kept.
    fn check_windows(&self) {
        let mut last: BTreeMap<&str, f64> = BTreeMap::new();
        for slice in self.kept.exclusives.values() {
            let before = last.insert(&slice.card, slice.ended.unwrap());
            assert!(before.is_none_or(|ended| ended <= slice.granted + 1e-6), "{slice:?} begins before {before:?}");
        }
    }

    /// Closed jobs, and they alone, are forgotten, and what is kept then is what a broker that starts knows.
    fn forget(mut self) {
        let mut core = self.core.take().unwrap_or_else(|| Core::restore(self.settings.clone(), self.kept.clone(), 0.0));
        let uids: Vec<String> = self.jobs.iter().map(|j| j.uid.clone()).collect();
        assert!(!core.forget_job(&uids[0], self.now));
        for uid in &uids[1..] {
            core.close_job(uid, false, self.now);
            assert!(core.forget_job(uid, self.now), "{uid}");
        }
        core.take_changes().into_iter().for_each(|c| self.kept.apply(c));
        let left = |job: &String| *job == uids[0];
        assert!(self.kept.jobs.keys().all(left) && self.kept.usage.keys().all(left));
        assert!(self.kept.episodes.keys().all(|(job, ..)| left(job)));
        assert!(self.kept.evaluations.values().all(|e| left(&e.job)));
        assert!(self.kept.leases.values().all(|l| left(&l.job)) && self.kept.exclusives.values().all(|s| left(&s.job)));
        let restored = Core::restore(self.settings, self.kept, 0.0);
        assert_eq!((restored.jobs.len(), restored.episodes.len()), (1, core.episodes.len()));
        assert_eq!(core.jobs.len(), 1);
    }
}

proptest! {
    #![proptest_config(properties::kept(100, FOUND))]

    #[test]
    fn whatever_dies_or_comes_late_no_slices_overlap_and_nothing_is_lost_or_doubled(
        seed in any::<u64>(), loss in 0.0..0.2, doubling in 0.0..0.3, slow in 0.0..0.3, kills in 0usize..40,
    ) {
        let mut world = World::new(seed, Plan { loss, doubling, slow, kills, until: 120.0 });
        world.run();
        world.check_end();
        world.check_windows();
        world.forget();
    }
}

#[test]
fn judges_of_several_slots_share_a_card_without_waiting_for_each_other_for_ever() {
    for seed in 0..100 {
        let calm = Plan { loss: 0.0, doubling: 0.0, slow: 0.0, kills: 0, until: 0.0 };
        // Leases last for longer than the whole run: whoever waited for the end of one would never be through.
        let mut world = World::of(Dice(seed), calm, 10_000.0, vec![(0, 3), (0, 2), (0, 3)]);
        world.run();
        world.check_end();
        assert!(world.kept.evaluations.values().all(|e| e.state == EvaluationState::Done && e.losses == 0));
        world.check_windows();
        let alone: BTreeSet<_> = world.kept.exclusives.values().map(|s| &s.pod).collect();
        assert!(alone.len() > 1, "judges had the card alone in turns");
    }
}

// ---- Fair shares -------------------------------------------------------------------------------------------------

/// Judges that take and end leases without any delay, on a queue that never runs dry unless it is meant to.
struct Line {
    core: Core,
    dice: Dice,
    now: f64,
    /// Ends of leases: time, lease, judge.
    ends: BinaryHeap<Reverse<Timed>>,
    keys: u64,
    sessions: Vec<u64>,
    ticket: u64,
    renewed: f64,
}

impl Line {
    fn new(seed: u64, weights: &[(&str, f64)], judges: usize) -> Self {
        let weights = weights.iter().map(|(n, w)| ((*n).to_owned(), *w)).collect();
        let mut core = Core::new(Settings { weights, ..Settings::default() });
        let sessions = (0..judges)
            .map(|n| core.register(&format!("judge-{n}"), ("", 0.0), card(format!("card-{n}"), 1), 0.0).unwrap())
            .collect();
        Self { core, dice: Dice(seed), now: 0.0, ends: BinaryHeap::new(), keys: 0, sessions, ticket: 0, renewed: 0.0 }
    }

    fn pod(job: &Job, index: u32) -> Pod {
        Pod { uid: format!("{}-{index}", job.uid), job: job.uid.clone(), index }
    }

    fn add(&mut self, job: &Job) {
        self.core.put_job(job.clone(), self.now).unwrap();
        for index in 0..job.indexes() {
            self.core.begin(&Self::pod(job, index), self.now).unwrap();
        }
    }

    fn ask(&mut self, job: &Job, index: u32) {
        self.keys += 1;
        let ask = Ask { op: Op::Verify, candidates: vec![], bytes: 0 };
        self.core.evaluate(&Self::pod(job, index), &self.keys.to_string(), Some(ask), self.now).unwrap();
    }

    fn pull(&mut self, judge: usize) {
        self.ticket += 1;
        let pod = format!("judge-{judge}");
        let ticket = self.ticket << 16 | judge as u64;
        self.core.pull((&pod, self.sessions[judge]), ticket, vec![], String::new(), self.now).unwrap();
    }

    /// Leases that were given out begin; their cost is drawn by `cost`.
    fn begin(&mut self, cost: &mut dyn FnMut(&mut Dice, &str) -> f64) {
        for wake in self.core.take_wakes() {
            if let Wake::Pulled(ticket, lease) = wake {
                let judge = (ticket & 0xFFFF) as usize;
                let namespace = self.core.leased(lease).unwrap().0.job.split('/').next().unwrap().to_owned();
                let at = self.now + cost(&mut self.dice, &namespace);
                self.ends.push(Reverse(Timed(at, lease, Event::KillJudge(judge))));
            }
        }
        self.core.take_changes();
    }

    /// The next lease ends; gives its job's uid.
    fn end(&mut self) -> Option<Pod> {
        let Reverse(Timed(at, lease, event)) = self.ends.pop()?;
        // Renewals in between, so that long ones aren't taken for lost.
        while self.renewed + 4.0 < at {
            self.renewed += 4.0;
            let now = self.renewed.max(self.now);
            for (n, session) in self.sessions.clone().into_iter().enumerate() {
                let mine = |l: &&super::LeaseEntry| l.row.session == session;
                let held: Vec<u64> = self.core.leases.values().filter(mine).map(|l| l.row.id).collect();
                self.core.renew((&format!("judge-{n}"), session), &held, now).unwrap();
            }
        }
        self.now = at;
        let Event::KillJudge(judge) = event else { unreachable!() };
        let (row, evaluation) = self.core.leased(lease).unwrap();
        let pod =
            Pod { uid: format!("{}-{}", row.job, evaluation.index), job: row.job.clone(), index: evaluation.index };
        let session = self.sessions[judge];
        self.core.complete((&format!("judge-{judge}"), session), lease, done(), at).unwrap();
        self.pull(judge);
        Some(pod)
    }

    fn charged(&self, namespace: &str) -> f64 {
        self.core.all_facts().filter(|f| f.job.namespace == namespace).map(|f| f.usage.charged).sum()
    }
}

proptest! {
    #![proptest_config(properties::kept(40, FOUND))]

    #[test]
    fn while_both_wait_shares_of_seconds_are_as_their_weights(
        seed in any::<u64>(), judges in 1usize..20, skew in 0.2..5.0f64, late in 0.0..200.0f64,
    ) {
        let mut line = Line::new(seed, &[("b", 3.0)], judges);
        let (a, b) = (job("a", "one", 40, 1), job("b", "two", 40, 1));
        // Evaluations of the one cost more than the other's, and the one is there first.
        let mut cost = |dice: &mut Dice, namespace: &str| {
            dice.between(0.2, 3.0) * if namespace == "a" { skew } else { 1.0 }
        };
        line.add(&a);
        (0..40).for_each(|n| line.ask(&a, n));
        (0..judges).for_each(|n| line.pull(n));
        line.begin(&mut cost);
        let mut came = None;
        loop {
            let pod = line.end().unwrap();
            line.ask(if pod.job == a.uid { &a } else { &b }, pod.index);
            if came.is_none() && line.now > late {
                line.add(&b);
                (0..40).for_each(|n| line.ask(&b, n));
                came = Some((line.now, line.charged("a")));
            }
            line.begin(&mut cost);
            if let Some((at, _)) = came && line.now > at + 600.0 {
                break;
            }
        }
        let (used_a, used_b) = (line.charged("a") - came.unwrap().1, line.charged("b"));
        let ratio = used_b / used_a;
        prop_assert!((ratio - 3.0).abs() < 0.3, "{used_b:.1} : {used_a:.1} = {ratio:.2}");
    }

    #[test]
    fn a_job_with_a_long_queue_is_in_nobodys_way(seed in any::<u64>()) {
        let mut line = Line::new(seed, &[], 1);
        let (long, short) = (job("a", "long", 60, 1), job("a", "short", 1, 1));
        line.add(&long);
        line.add(&short);
        (0..60).for_each(|n| line.ask(&long, n));
        line.pull(0);
        let mut cost = |dice: &mut Dice, _: &str| dice.between(0.9, 1.1);
        line.begin(&mut cost);
        for _ in 0..10 {
            line.end();
            line.begin(&mut cost);
        }
        line.ask(&short, 0);
        line.begin(&mut cost);
        let served = (0..4).any(|_| {
            let pod = line.end().unwrap();
            line.begin(&mut cost);
            pod.job == short.uid
        });
        prop_assert!(served);
    }
}

#[test]
fn no_judge_of_128_is_idle_while_work_waits_and_shares_hold() {
    let mut line = Line::new(7, &[("b", 3.0)], 128);
    let jobs = [job("a", "one", 300, 1), job("b", "two", 250, 1), job("b", "three", 250, 1)];
    for job in &jobs {
        line.add(job);
        (0..job.indexes()).for_each(|n| line.ask(job, n));
    }
    // Half of the evaluations are short, some are very long.
    let mut cost = |dice: &mut Dice, _: &str| 0.5 * (dice.unit() * 4.0).exp();
    (0..128).for_each(|n| line.pull(n));
    line.begin(&mut cost);
    for _ in 0..30_000 {
        let pod = line.end().unwrap();
        let job = jobs.iter().find(|j| j.uid == pod.job).unwrap();
        line.ask(job, pod.index);
        line.begin(&mut cost);
        assert!(line.core.pulls.is_empty() || line.core.queued == 0, "a judge idles while work waits");
    }
    let (a, b) = (line.charged("a"), line.charged("b"));
    assert!((b / a - 3.0).abs() < 0.15, "{b} : {a}");
    let of = |uid: &str| line.core.facts(uid).unwrap().usage.charged;
    assert!((of("b/two") / of("b/three") - 1.0).abs() < 0.05);
}

#[test]
fn a_judge_that_was_silent_may_still_answer_and_not_say_that_it_failed() {
    for (said, then) in
        [(EvaluationState::Fault, EvaluationState::Queued), (EvaluationState::Done, EvaluationState::Done)]
    {
        let mut line = Line::new(1, &[], 1);
        let one = job("a", "one", 1, 1);
        line.add(&one);
        line.ask(&one, 0);
        line.pull(0);
        let pulled = |wake| if let Wake::Pulled(_, lease) = wake { Some(lease) } else { None };
        let lease = line.core.take_wakes().into_iter().find_map(pulled).unwrap();
        let late = line.core.settings().silence() + 1.0;
        line.core.tick(late);
        let completion = Completion { state: said, ..done() };
        line.core.complete(("judge-0", line.sessions[0]), lease, completion, late).unwrap();
        assert_eq!(line.core.evaluate(&Line::pod(&one, 0), "1", None, late).unwrap().state, then);
    }
}

#[test]
fn whoever_comes_late_waits_for_nobodys_past() {
    let mut line = Line::new(3, &[], 1);
    let (early, late) = (job("a", "one", 20, 1), job("b", "two", 20, 1));
    let mut cost = |dice: &mut Dice, _: &str| dice.between(0.5, 1.5);
    line.add(&early);
    (0..20).for_each(|n| line.ask(&early, n));
    line.pull(0);
    line.begin(&mut cost);
    for _ in 0..500 {
        let pod = line.end().unwrap();
        line.ask(&early, pod.index);
        line.begin(&mut cost);
    }
    // The late one neither gets 500 seconds in a row nor waits for them.
    line.add(&late);
    (0..20).for_each(|n| line.ask(&late, n));
    let before = (line.charged("a"), line.charged("b"));
    for _ in 0..40 {
        let pod = line.end().unwrap();
        line.ask(if pod.job == early.uid { &early } else { &late }, pod.index);
        line.begin(&mut cost);
    }
    let (a, b) = (line.charged("a") - before.0, line.charged("b") - before.1);
    assert!((a / b - 1.0).abs() < 0.3, "{a} {b}");
}
