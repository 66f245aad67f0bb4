//! Judges, leases and exclusive slices.
//!
//! A lease is a shared slice of a card: one evaluation at one judge for bounded time. An exclusive slice belongs to a
//! judge, of which a card may have several, each with several leases. It is asked for through one of the judge's leases
//! and granted when no exclusive slice of that card runs and every other judge with a lease there waits for one too. A
//! judge that has asked keeps all of its leases off the card until it is granted one; which of them waits for what is its
//! own affair, so that two judges never wait for each other's leases. Where the lease through which it asked is over, it
//! asks again through another that is live, its heir; where it knows of none, it withdraws before anything of it goes on. That
//! has to wait while another judge has the card alone: a new lease may be on its way to it.
//! Where another judge of a card waits for it or has it, no new lease begins there.
//!
//! A judge counts its askings. It has one slice at a time, so that a number says of all before it that they are over,
//! whenever a message of theirs arrives.
//!
//! Slices end by time. A lease that isn't renewed is taken from its judge and evaluated elsewhere, but goes on holding its
//! card (a ghost) until its time is over or its judge says otherwise, for its work may be running.

use std::collections::{BTreeMap, BTreeSet};

use super::kept::{
    Change, Episode, EpisodeState, Evaluation, EvaluationState, Exclusive, Judge, Judged, Lease, LeaseState, Op,
    Registration, Seconds,
};
use super::tally::{SECONDS, Tally};
use super::{Core, Held, JudgeEntry, LOSS_BY_TIME, LeaseEntry, MOST_LOSSES, Parked, Refused, Ticket, Waiter, Wake};

/// An exclusive slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Granted {
    pub slice: u64,
    /// How long it lasts from its grant.
    pub seconds: Seconds,
    /// From the asking to the grant.
    pub waited: Seconds,
}

/// What a judge's work came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    /// `Done`, `Refused` or `Fault`.
    pub state: EvaluationState,
    pub answer: String,
    pub message: String,
    /// The best verdict of a final judgement.
    pub judged: Option<Judged>,
    /// What is counted of the episode: verdicts.
    pub tally: Tally,
    /// Seconds a phase.
    pub phases: BTreeMap<String, f64>,
}

impl Completion {
    /// The judge, or the broker, failed: it says nothing of the candidate.
    #[must_use]
    pub fn fault(message: String) -> Self {
        let (answer, tally, phases) = (String::new(), Tally::default(), BTreeMap::new());
        Self { state: EvaluationState::Fault, answer, message, judged: None, tally, phases }
    }
}

/// How a lease ends.
enum End {
    Complete(Box<Completion>),
    /// The judge is lost; the weight of the loss.
    Lost(u32),
    /// As lost, but the work may be running still.
    Silent,
    /// It never reached its judge.
    Returned,
    /// Its judge has ended the work, which nobody wants.
    Cancelled,
}

/// A judge, for facts.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgeNow {
    pub pod: String,
    pub card: String,
    pub unhealthy: String,
    /// Judges that share its card.
    pub sharing: u32,
}

/// The pool, for facts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PoolNow {
    pub judges: Vec<JudgeNow>,
    pub queued: usize,
    pub leased: usize,
    /// Share of the last five minutes in which a card was held.
    pub busy: f64,
    pub device: Option<Registration>,
}

impl Core {
    /// A judge says what it is. With an instance that is the newest of its pod already, nothing changes. A new one has
    /// lost what its pod had leased. `started` tells a new one from a late message of one that is dead.
    ///
    /// # Errors
    /// `Session` for an instance that another one of its pod came after.
    pub fn register(
        &mut self,
        pod: &str,
        (instance, started): (&str, f64),
        registration: Registration,
        now: Seconds,
    ) -> Result<u64, Refused> {
        self.settle(now);
        let mut before = Vec::new();
        if let Some(judge) = self.judges.get_mut(pod) {
            if !instance.is_empty() && judge.row.instance == instance {
                judge.seen = now;
                return Ok(judge.row.session);
            }
            let late = started > 0.0 && started < judge.row.started;
            if late || !instance.is_empty() && judge.row.before.iter().any(|b| b == instance) {
                return Err(Refused::Session(judge.row.session));
            }
            before.clone_from(&judge.row.before);
            if !judge.row.instance.is_empty() {
                before.push(judge.row.instance.clone());
                let surplus = before.len().saturating_sub(32);
                before.drain(..surplus);
            }
        }
        self.free_pod(pod, now);
        let session = self.number();
        let registration = Registration { slots: registration.slots.clamp(1, 64), ..registration };
        self.card(&registration.card, now);
        if self.device.as_ref() != Some(&registration) {
            self.changes.push(Change::Device(registration.clone()));
            self.device = Some(registration.clone());
        }
        let instance = instance.to_owned();
        let row = Judge { pod: pod.to_owned(), session, instance, started, before, over: 0, registration };
        self.changes.push(Change::Judge(row.clone()));
        self.judges.insert(pod.to_owned(), JudgeEntry::new(row, now));
        self.due = self.due.min(now + self.settings.silence());
        self.dispatch(now);
        Ok(session)
    }

    /// Ends all that a pod held: its processes are gone.
    fn free_pod(&mut self, pod: &str, now: Seconds) {
        self.drop_pulls(|p| p.pod == pod);
        let cards: Vec<String> = self.cards.keys().cloned().collect();
        for card in cards {
            if self.cards.get(&card).and_then(|c| c.exclusive.as_ref()).is_some_and(|h| h.row.pod == pod) {
                self.end_exclusive(&card, now);
            }
        }
        let held: Vec<u64> = self.leases.values().filter(|l| l.row.pod == pod).map(|l| l.row.id).collect();
        for id in held {
            self.end_lease(id, End::Lost(1), now);
        }
    }

    fn judge(&mut self, pod: &str, session: u64, now: Seconds) -> Result<&mut JudgeEntry, Refused> {
        let judge = self.judges.get_mut(pod).filter(|j| j.row.session == session).ok_or(Refused::Session(session))?;
        judge.seen = now;
        Ok(judge)
    }

    /// Asks for the next evaluation; `Wake::Pulled` tells of it.
    ///
    /// # Errors
    /// `Session`.
    pub fn pull(
        &mut self,
        (pod, session): (&str, u64),
        ticket: Ticket,
        warm: Vec<String>,
        unhealthy: String,
        now: Seconds,
    ) -> Result<(), Refused> {
        self.settle(now);
        let judge = self.judge(pod, session, now)?;
        judge.warm = warm;
        judge.unhealthy = unhealthy;
        self.pulls.push_back(Parked { ticket, pod: pod.to_owned() });
        self.dispatch(now);
        Ok(())
    }

    /// Nobody waits with this ticket any more.
    pub fn leave(&mut self, ticket: Ticket, now: Seconds) {
        if let Some(at) = self.pulls.iter().position(|p| p.ticket == ticket)
            && let Some(parked) = self.pulls.remove(at)
            && let Some(judge) = self.judges.get_mut(&parked.pod)
        {
            judge.seen = now;
        }
        for waiter in self.cards.values_mut().flat_map(|c| &mut c.waiters) {
            if waiter.ticket.is_some_and(|t| t.0 == ticket) {
                waiter.ticket = None;
            }
        }
    }

    /// A lease that was granted can't be told to its judge.
    pub fn hand_back(&mut self, lease: u64, now: Seconds) {
        self.settle(now);
        if self.leases.get(&lease).is_some_and(|l| l.row.state == LeaseState::Live) {
            self.end_lease(lease, End::Returned, now);
        }
        self.dispatch(now);
    }

    /// What a lease is about is lost, so that no judge can be told of it: its evaluation is a fault, since a next try would
    /// meet the same.
    pub fn fail(&mut self, lease: u64, message: String, now: Seconds) {
        self.settle(now);
        if self.leases.get(&lease).is_some_and(|l| l.row.state == LeaseState::Live) {
            self.end_lease(lease, End::Complete(Box::new(Completion::fault(message))), now);
        }
        self.dispatch(now);
    }

    /// An exclusive slice that was granted can't be told to its judge.
    pub fn hand_back_slice(&mut self, slice: u64, now: Seconds) {
        self.settle(now);
        let of = |held: &Held| held.row.id == slice;
        let card = self.cards.iter().find(|(_, c)| c.exclusive.as_ref().is_some_and(of)).map(|(name, _)| name.clone());
        if let Some(card) = card {
            self.end_exclusive(&card, now);
        }
        self.dispatch(now);
    }

    /// A judge works on these leases. Gives those that are over; it ends each by completing it, whatever it says. That one isn't
    /// named proves nothing: the message may be an old one.
    ///
    /// # Errors
    /// `Session`.
    pub fn renew(&mut self, (pod, session): (&str, u64), leases: &[u64], now: Seconds) -> Result<Vec<u64>, Refused> {
        self.settle(now);
        self.judge(pod, session, now)?;
        let mut over = Vec::new();
        for id in leases {
            match self.leases.get_mut(id).filter(|l| l.row.session == session && l.row.state == LeaseState::Live) {
                Some(lease) => {
                    lease.renewed = now;
                    if lease.row.cancelled {
                        over.push(*id);
                    }
                }
                None => over.push(*id),
            }
        }
        self.dispatch(now);
        Ok(over)
    }

    /// Asks for the card for a judge alone, through one of its leases; `Wake::Acquired` tells of it. One that has it already is
    /// told so. `number` counts the judge's askings: one that comes late, after its slice was granted and ended or after a
    /// newer one, is refused; a newer one says that the slices before are over. 0 isn't counted.
    ///
    /// # Errors
    /// `Session`, `LeaseOver`, `SliceOver`.
    pub fn acquire(
        &mut self,
        (pod, session): (&str, u64),
        (lease, number): (u64, u64),
        ticket: Ticket,
        now: Seconds,
    ) -> Result<(), Refused> {
        self.settle(now);
        let judge = self.judge(pod, session, now)?;
        let (asked, served) = (judge.asked, judge.served);
        let entry = self.leases.get_mut(&lease);
        let entry = entry.filter(|l| l.row.session == session && l.row.state == LeaseState::Live && !l.row.cancelled);
        let entry = entry.ok_or(Refused::LeaseOver(lease))?;
        entry.renewed = now;
        let name = entry.row.card.clone();
        let held = self.card(&name, now).exclusive.as_ref().filter(|h| h.row.pod == pod);
        let same = |h: &&Held| if number == 0 { h.row.lease == lease } else { h.row.number == number };
        if let Some(held) = held.filter(same) {
            let granted = Granted { slice: held.row.id, seconds: held.ends - now, waited: 0.0 };
            self.wakes.push(Wake::Acquired(ticket, granted));
            return Ok(());
        }
        if number > 0 && (number < asked || number <= served) {
            return Err(Refused::SliceOver(lease, number));
        }
        if number > 0 && held.is_some() {
            self.end_exclusive(&name, now);
        }
        if let Some(judge) = self.judges.get_mut(pod) {
            judge.asked = asked.max(number);
        }
        self.wait_alone(&name, (pod, lease, number), ticket, now);
        self.dispatch(now);
        Ok(())
    }

    /// A judge waits for its card alone; whoever waited for it before hears that this is over.
    fn wait_alone(&mut self, card: &str, (pod, lease, number): (&str, u64, u64), ticket: Ticket, now: Seconds) {
        let waiters = &mut self.card(card, now).waiters;
        let Some(waiter) = waiters.iter_mut().find(|w| w.pod == pod) else {
            waiters.push(Waiter { pod: pod.to_owned(), lease, number, since: now, ticket: Some((ticket, now)) });
            return;
        };
        (waiter.lease, waiter.number) = (lease, number);
        if let Some((older, _)) = waiter.ticket.replace((ticket, now)) {
            self.wakes.push(Wake::Over(older));
        }
    }

    /// Gives an exclusive slice back. Of a lease without one, or of an older one, it says nothing.
    ///
    /// # Errors
    /// `Session`.
    pub fn release(
        &mut self,
        (pod, session): (&str, u64),
        lease: u64,
        slice: u64,
        now: Seconds,
    ) -> Result<(), Refused> {
        self.settle(now);
        self.judge(pod, session, now)?;
        let Some(name) = self.leases.get(&lease).filter(|l| l.row.session == session).map(|l| l.row.card.clone())
        else {
            return Ok(());
        };
        let held = self.cards.get(&name).and_then(|c| c.exclusive.as_ref());
        if held.is_some_and(|h| h.row.lease == lease && (slice == 0 || h.row.id == slice)) {
            self.end_exclusive(&name, now);
        }
        self.dispatch(now);
        Ok(())
    }

    /// A judge waits for none of its askings up to this number any more, through whichever lease they were, if its work may be
    /// on the card: not while another judge has it alone. Says whether it may.
    ///
    /// # Errors
    /// `Session`.
    pub fn withdraw(&mut self, (pod, session): (&str, u64), number: u64, now: Seconds) -> Result<bool, Refused> {
        self.settle(now);
        let name = self.judge(pod, session, now)?.row.registration.card.clone();
        if self.card(&name, now).exclusive.as_ref().is_some_and(|h| h.row.pod != pod) {
            return Ok(false);
        }
        let judge = self.judge(pod, session, now)?;
        judge.asked = judge.asked.max(number);
        judge.served = judge.served.max(number);
        let over = judge.row.over < number;
        judge.row.over = judge.row.over.max(number);
        let row = over.then(|| judge.row.clone());
        self.changes.extend(row.map(Change::Judge));
        let card = self.card(&name, now);
        let ended = card.exclusive.as_ref().is_some_and(|h| h.row.pod == pod && h.row.number <= number);
        let waits = card.waiters.iter().position(|w| w.pod == pod && w.number <= number);
        let waiter = waits.map(|at| card.waiters.remove(at));
        self.wakes.extend(waiter.and_then(|w| w.ticket).map(|t| Wake::Over(t.0)));
        if ended {
            self.end_exclusive(&name, now);
        }
        self.dispatch(now);
        Ok(true)
    }

    /// Ends a lease with its answer. Of a lease that is over, the answer still counts if nobody else works on it.
    ///
    /// # Errors
    /// `Session`.
    pub fn complete(
        &mut self,
        (pod, session): (&str, u64),
        lease: u64,
        completion: Completion,
        now: Seconds,
    ) -> Result<(), Refused> {
        self.settle(now);
        self.judge(pod, session, now)?;
        if self.leases.get(&lease).is_some_and(|l| l.row.session == session) {
            self.end_lease(lease, End::Complete(Box::new(completion)), now);
        }
        self.dispatch(now);
        Ok(())
    }

    /// The evaluation of a lease, for its judge.
    #[must_use]
    pub fn leased(&self, lease: u64) -> Option<(&Lease, &Evaluation)> {
        let lease = &self.leases.get(&lease)?.row;
        Some((lease, &self.evaluations.get(&lease.evaluation)?.0))
    }

    /// Ends a card's exclusive slice. Nothing is charged for it: it lies within its lease, and what goes on after the end of a
    /// lease is nobody's.
    fn end_exclusive(&mut self, card: &str, at: Seconds) {
        let Some(mut held) = self.cards.get_mut(card).and_then(|c| c.exclusive.take()) else { return };
        let at = at.min(held.ends).max(held.row.granted);
        held.row.ended = Some(at);
        if let Some(lease) = self.leases.get_mut(&held.row.lease).filter(|l| l.row.state == LeaseState::Live) {
            lease.exclusive += at - held.row.granted;
        }
        self.changes.push(Change::Exclusive(held.row));
    }

    fn end_lease(&mut self, id: u64, how: End, now: Seconds) {
        let Some(entry) = self.leases.get(&id) else { return };
        let (name, was) = (entry.row.card.clone(), entry.row.state);
        // It ended when its time was over, however late that is seen, and never before it began, whatever clocks did.
        let at = now.min(entry.ends).max(entry.row.granted);
        let stays = matches!(how, End::Silent);
        let held = self.cards.get(&name).and_then(|c| c.exclusive.as_ref()).filter(|h| h.row.lease == id);
        let mut alone = 0.0;
        match held {
            Some(held) if stays => alone = (at - held.row.granted).max(0.0),
            Some(_) => self.end_exclusive(&name, at),
            None => {}
        }
        let Some(entry) = self.leases.get_mut(&id) else { return };
        alone += entry.exclusive;
        if was == LeaseState::Live {
            entry.row.ended = Some(at);
        }
        entry.row.state = if stays { LeaseState::Ghost } else { LeaseState::Ended };
        let row = entry.row.clone();
        self.changes.push(Change::Lease(row.clone()));
        if !stays {
            self.leases.remove(&id);
        }
        self.leave_card(&row, stays);
        if let Some(judge) = self.judges.get_mut(&row.pod) {
            judge.leases.remove(&id);
        }
        if was == LeaseState::Live {
            self.charge_lease(&row, at - row.granted, alone, &how);
            if let Some(card) = self.cards.get_mut(&name) {
                card.busy.end(at);
            }
        }
        self.settle_evaluation(&row, how, now);
    }

    /// Nobody waits for a card through this lease any more; one that isn't a ghost has left it.
    fn leave_card(&mut self, lease: &Lease, stays: bool) {
        let over = &mut self.wakes;
        let Some(card) = self.cards.get_mut(&lease.card) else { return };
        if !stays {
            card.leases.remove(&lease.id);
        }
        card.waiters.retain(|w| {
            if w.lease == lease.id {
                over.extend(w.ticket.map(|t| Wake::Over(t.0)));
            }
            w.lease != lease.id
        });
    }

    /// Charges a lease that ends: its length as it is kept, once, and nothing beside it.
    fn charge_lease(&mut self, lease: &Lease, seconds: Seconds, alone: Seconds, how: &End) {
        let exclusive = alone.clamp(0.0, seconds);
        self.correct(&lease.job, seconds - lease.estimate);
        if let Some(job) = self.jobs.get_mut(&lease.job) {
            job.usage.charged += seconds;
            job.usage.tally.add("slice_seconds", "shared", seconds - exclusive);
            if exclusive > 0.0 {
                job.usage.tally.add("slice_seconds", "exclusive", exclusive);
            }
            if let End::Complete(completion) = how {
                for (phase, seconds) in &completion.phases {
                    job.usage.tally.observe("phase", phase, &SECONDS, *seconds);
                }
            }
        }
        self.keep_usage(&lease.job);
    }

    /// What the end of a lease means for its evaluation.
    fn settle_evaluation(&mut self, lease: &Lease, how: End, now: Seconds) {
        let Some((row, at)) = self.evaluations.get_mut(&lease.evaluation) else { return };
        let is_mine = *at == Some(lease.id);
        // What a judge that was silent says late is an answer as long as no other works on it; that it failed is none, since it
        // had to end when it heard that its lease was over.
        let taken = |completion: &Completion| is_mine || (at.is_none() && completion.state != EvaluationState::Fault);
        match how {
            End::Complete(completion) if taken(&completion) && !lease.cancelled => {
                let op = row.op;
                self.answer(lease.evaluation, *completion);
                self.learn(op, (now - lease.granted).max(0.0));
            }
            _ if !is_mine || lease.cancelled => {}
            End::Returned | End::Cancelled | End::Complete(_) => self.requeue(lease.evaluation),
            End::Silent => self.lost(lease, 1),
            End::Lost(weight) => self.lost(lease, weight),
        }
    }

    fn lost(&mut self, lease: &Lease, weight: u32) {
        let Some((row, _)) = self.evaluations.get_mut(&lease.evaluation) else { return };
        row.losses += weight;
        if row.losses < MOST_LOSSES {
            self.requeue(lease.evaluation);
            return;
        }
        let message = format!(
            "the evaluation was given up: judges were lost over it, or didn't end it within {} s",
            lease.seconds
        );
        self.answer(lease.evaluation, Completion::fault(message));
    }

    /// Gives an evaluation its answer.
    fn answer(&mut self, id: u64, completion: Completion) {
        let Some((row, _)) = self.evaluations.get(&id) else { return };
        let uid = row.job.clone();
        self.dequeue(&uid, id);
        let Some((mut row, _)) = self.evaluations.remove(&id) else { return };
        row.state = completion.state;
        let of = self.episodes.get_mut(&(row.job.clone(), row.index));
        if let Some(episode) = of.filter(|e| e.row.generation == row.generation) {
            episode.row.tally.merge(&completion.tally);
            let newer = episode.row.judged.as_ref().is_none_or(|(at, _)| *at < id);
            if let Some(judged) = completion.judged.filter(|_| newer && row.op == Op::Final) {
                episode.row.judged = Some((id, judged));
            }
            self.changes.push(Change::Episode(episode.row.clone()));
        }
        self.answer_state(id, completion.state);
        if let Some(episode) = self.episodes.get_mut(&(row.job.clone(), row.index))
            && let Some(asking) = episode.keys.get_mut(&row.key).filter(|a| a.id == id)
        {
            asking.state = completion.state;
        }
        self.changes.push(Change::Evaluation(row));
        let (answer, message) = (completion.answer, completion.message);
        self.changes.push(Change::Answer { evaluation: id, answer, message });
        self.wakes.push(Wake::Answered(id));
    }

    /// Says to whoever asks by key how an evaluation stands.
    pub(super) fn answer_state(&mut self, id: u64, state: EvaluationState) {
        let Some((row, _)) = self.evaluations.get(&id) else { return };
        if let Some(episode) = self.episodes.get_mut(&(row.job.clone(), row.index))
            && let Some(asking) = episode.keys.get_mut(&row.key).filter(|a| a.id == id)
        {
            asking.state = state;
        }
    }

    /// Nobody wants this evaluation any more. A judge that works on it is told.
    pub(super) fn cancel(&mut self, id: u64) {
        let Some((row, _)) = self.evaluations.get(&id) else { return };
        let uid = row.job.clone();
        self.dequeue(&uid, id);
        self.answer_state(id, EvaluationState::Dropped);
        let Some((mut row, lease)) = self.evaluations.remove(&id) else { return };
        row.state = EvaluationState::Dropped;
        self.changes.push(Change::Evaluation(row));
        self.wakes.push(Wake::Answered(id));
        if let Some(entry) = lease.and_then(|l| self.leases.get_mut(&l)) {
            entry.row.cancelled = true;
            self.changes.push(Change::Lease(entry.row.clone()));
            let (name, id) = (entry.row.card.clone(), entry.row.id);
            let over = &mut self.wakes;
            if let Some(card) = self.cards.get_mut(&name) {
                for waiter in card.waiters.iter_mut().filter(|w| w.lease == id) {
                    over.extend(waiter.ticket.take().map(|t| Wake::Over(t.0)));
                }
            }
        }
    }

    /// Ends what is over by `now`.
    pub(super) fn settle(&mut self, now: Seconds) {
        if now < self.due {
            return;
        }
        let silence = self.settings.silence();
        let over: Vec<(String, Seconds)> = self
            .cards
            .iter()
            .filter_map(|(n, c)| c.exclusive.as_ref().filter(|h| h.ends <= now).map(|h| (n.clone(), h.ends)))
            .collect();
        for (card, at) in over {
            self.end_exclusive(&card, at);
        }
        let ended: Vec<(u64, LeaseState)> =
            self.leases.values().filter(|l| l.ends <= now).map(|l| (l.row.id, l.row.state)).collect();
        for (id, state) in ended {
            let how = if state == LeaseState::Live { End::Lost(LOSS_BY_TIME) } else { End::Cancelled };
            self.end_lease(id, how, now);
        }
        let silent = |l: &&LeaseEntry| l.row.state == LeaseState::Live && l.renewed + silence <= now;
        let silent: Vec<u64> = self.leases.values().filter(silent).map(|l| l.row.id).collect();
        for id in silent {
            self.end_lease(id, End::Silent, now);
        }
        let parked = |pod: &str| self.pulls.iter().any(|p| p.pod == pod);
        let holds = |pod: &str| self.leases.values().any(|l| l.row.pod == pod);
        let gone = |j: &&JudgeEntry| j.seen + silence <= now && !parked(&j.row.pod) && !holds(&j.row.pod);
        let gone: Vec<String> = self.judges.values().filter(gone).map(|j| j.row.pod.clone()).collect();
        for pod in gone {
            self.judges.remove(&pod);
            self.changes.push(Change::JudgeGone(pod));
        }
        let slices = self.cards.values().filter_map(|c| c.exclusive.as_ref().map(|h| h.ends));
        let leases = self.leases.values().map(|l| match l.row.state {
            LeaseState::Live => l.ends.min(l.renewed + silence),
            _ => l.ends,
        });
        let next = slices.chain(leases).fold(f64::INFINITY, f64::min);
        self.due = next.min(now + silence / 3.0).max(now);
    }

    /// Gives out what is free.
    pub(super) fn dispatch(&mut self, now: Seconds) {
        let contended: Vec<String> = self
            .cards
            .iter()
            .filter(|(_, c)| c.exclusive.is_none() && !c.waiters.is_empty())
            .map(|(n, _)| n.clone())
            .collect();
        for card in contended {
            self.grant_exclusive(&card, now);
        }
        while self.queued > 0 {
            let mut able = self.pulls.iter().enumerate().filter(|(_, p)| self.able(&p.pod));
            let Some((first, parked)) = able.next() else { return };
            let several = able.any(|(_, other)| other.pod != parked.pod);
            let warm = if several { None } else { self.judges.get(&parked.pod).map(|j| j.warm.clone()) };
            let Some(evaluation) = self.pick(warm.as_deref()) else { return };
            let at = if several { self.best_judge(evaluation).unwrap_or(first) } else { first };
            let Some(parked) = self.pulls.remove(at) else { return };
            self.grant(evaluation, &parked, now);
        }
    }

    /// Whether a judge may begin another evaluation.
    fn able(&self, pod: &str) -> bool {
        let Some(judge) = self.judges.get(pod) else { return false };
        let slots = judge.row.registration.slots as usize;
        if judge.leases.len() >= slots || !judge.unhealthy.is_empty() {
            return false;
        }
        let Some(card) = self.cards.get(&judge.row.registration.card) else { return true };
        let held_by_other = card.exclusive.as_ref().is_some_and(|h| h.row.pod != pod);
        !held_by_other && !card.waiters.iter().any(|w| w.pod != pod)
    }

    /// Of several judges that could take it, one where its task is warm, else the one with least to do.
    fn best_judge(&self, evaluation: u64) -> Option<usize> {
        let (row, _) = self.evaluations.get(&evaluation)?;
        let source = &self.jobs.get(&row.job)?.job.tasks.get(row.task)?.source;
        let able = self.pulls.iter().enumerate().filter(|(_, p)| self.able(&p.pod));
        able.min_by_key(|(at, p)| {
            let judge = self.judges.get(&p.pod);
            let warm = judge.is_some_and(|j| j.warm.contains(source));
            (!warm, judge.map_or(usize::MAX, |j| j.leases.len()), *at)
        })
        .map(|(at, _)| at)
    }

    fn grant(&mut self, evaluation: u64, parked: &Parked, now: Seconds) {
        let Some((row, _)) = self.evaluations.get(&evaluation) else { return };
        let (uid, op, waited) = (row.job.clone(), row.op, (now - row.enqueued).max(0.0));
        self.dequeue(&uid, evaluation);
        let Some(judge) = self.judges.get(&parked.pod) else { return };
        let (session, card) = (judge.row.session, judge.row.registration.card.clone());
        let (id, estimate) = (self.number(), self.estimate(op));
        self.charge(&uid, estimate);
        if let Some(job) = self.jobs.get_mut(&uid) {
            job.usage.tally.observe("slice_wait", "shared", &SECONDS, waited);
        }
        self.keep_usage(&uid);
        let lease = Lease {
            id,
            evaluation,
            job: uid,
            pod: parked.pod.clone(),
            session,
            card: card.clone(),
            granted: now,
            seconds: self.settings.lease_seconds,
            estimate,
            cancelled: false,
            state: LeaseState::Live,
            ended: None,
        };
        self.changes.push(Change::Lease(lease.clone()));
        if let Some((row, at)) = self.evaluations.get_mut(&evaluation) {
            row.state = EvaluationState::Leased;
            *at = Some(id);
            self.changes.push(Change::Evaluation(row.clone()));
        }
        self.answer_state(evaluation, EvaluationState::Leased);
        let card = self.card(&card, now);
        card.leases.insert(id);
        card.busy.begin(now);
        if let Some(judge) = self.judges.get_mut(&parked.pod) {
            judge.leases.insert(id);
            judge.seen = now;
        }
        let ends = now + lease.seconds;
        self.due = self.due.min(ends).min(now + self.settings.silence());
        self.leases.insert(id, LeaseEntry { row: lease, ends, renewed: now, exclusive: 0.0 });
        self.wakes.push(Wake::Pulled(parked.ticket, id));
    }

    fn grant_exclusive(&mut self, name: &str, now: Seconds) {
        let Some(card) = self.cards.get(name) else { return };
        // Judges with a lease on the card that don't stand aside.
        let at_work: BTreeSet<&str> = card
            .leases
            .iter()
            .filter_map(|l| self.leases.get(l).map(|l| l.row.pod.as_str()))
            .filter(|pod| card.waiters.iter().all(|w| w.pod != *pod))
            .collect();
        if !at_work.is_empty() {
            return;
        }
        let next = card
            .waiters
            .iter()
            .position(|w| w.ticket.is_some() && self.leases.get(&w.lease).is_some_and(|l| !l.row.cancelled));
        let Some(next) = next else { return };
        let slice = self.number();
        let longest = self.settings.exclusive_seconds;
        let Some(card) = self.cards.get_mut(name) else { return };
        let waiter = card.waiters.remove(next);
        let Some(lease) = self.leases.get_mut(&waiter.lease) else { return };
        let seconds = longest.min(lease.ends - now);
        if let Some(judge) = self.judges.get_mut(&waiter.pod) {
            judge.served = judge.served.max(waiter.number);
        }
        let row = Exclusive {
            id: slice,
            lease: waiter.lease,
            job: lease.row.job.clone(),
            pod: lease.row.pod.clone(),
            card: name.to_owned(),
            granted: now,
            seconds,
            number: waiter.number,
            ended: None,
        };
        let job = row.job.clone();
        self.changes.push(Change::Exclusive(row.clone()));
        card.exclusive = Some(Held { row, ends: now + seconds });
        self.due = self.due.min(now + seconds);
        if let Some(job) = self.jobs.get_mut(&job) {
            job.usage.tally.observe("slice_wait", "exclusive", &SECONDS, (now - waiter.since).max(0.0));
        }
        self.keep_usage(&job);
        if let Some((ticket, asked)) = waiter.ticket {
            let waited = (now - asked).max(0.0);
            self.wakes.push(Wake::Acquired(ticket, Granted { slice, seconds, waited }));
        }
    }

    fn drop_pulls(&mut self, which: impl Fn(&Parked) -> bool) {
        let over = &mut self.wakes;
        self.pulls.retain(|p| {
            let out = which(p);
            if out {
                over.push(Wake::Over(p.ticket));
            }
            !out
        });
    }

    /// The pool as it is.
    #[must_use]
    pub fn pool(&self, now: Seconds) -> PoolNow {
        let on = |card: &str| self.judges.values().filter(|j| j.row.registration.card == card).count();
        let judges: Vec<JudgeNow> = self
            .judges
            .values()
            .map(|j| JudgeNow {
                pod: j.row.pod.clone(),
                card: j.row.registration.card.clone(),
                unhealthy: j.unhealthy.clone(),
                sharing: u32::try_from(on(&j.row.registration.card)).unwrap_or(u32::MAX),
            })
            .collect();
        let shares: Vec<f64> =
            self.cards.iter().filter(|(name, _)| on(name) > 0).map(|(_, card)| card.busy.share(now)).collect();
        #[expect(clippy::cast_precision_loss, reason = "a count of cards")]
        let busy = if shares.is_empty() { 0.0 } else { shares.iter().sum::<f64>() / shares.len() as f64 };
        PoolNow {
            judges,
            queued: self.queued,
            leased: self.leases.values().filter(|l| l.row.state == LeaseState::Live).count(),
            busy,
            device: self.device.clone(),
        }
    }

    /// Whether this generation of an episode is the one that counts and still runs.
    pub(super) fn is_running(episode: &Episode) -> bool {
        episode.state == EpisodeState::Running
    }
}

/// Buckets of the busy share.
const BUCKETS: usize = 60;
/// Seconds a bucket.
const BUCKET: Seconds = 5.0;

/// When a card was held, over the last five minutes.
#[derive(Debug)]
pub(super) struct Busy {
    first: Seconds,
    held: u32,
    since: Seconds,
    seconds: [Seconds; BUCKETS],
    /// Number of the newest bucket.
    newest: i64,
}

impl Busy {
    pub(super) fn new(now: Seconds) -> Self {
        Self { first: now, held: 0, since: now, seconds: [0.0; BUCKETS], newest: Self::number(now) }
    }

    #[expect(clippy::cast_possible_truncation, reason = "a count of buckets since the start")]
    fn number(at: Seconds) -> i64 {
        (at / BUCKET).floor() as i64
    }

    pub(super) fn begin(&mut self, now: Seconds) {
        if self.held == 0 {
            self.since = now;
        }
        self.held += 1;
    }

    fn end(&mut self, now: Seconds) {
        self.held = self.held.saturating_sub(1);
        if self.held == 0 {
            let since = self.since;
            self.add(since, now);
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "numbers of buckets are small")]
    fn add(&mut self, from: Seconds, to: Seconds) {
        let last = Self::number(to);
        let oldest = last - BUCKETS as i64 + 1;
        for number in (self.newest + 1).max(oldest)..=last {
            self.seconds[Self::place(number)] = 0.0;
        }
        self.newest = self.newest.max(last);
        for number in Self::number(from).max(oldest)..=last {
            let begin = number as f64 * BUCKET;
            self.seconds[Self::place(number)] += (to.min(begin + BUCKET) - from.max(begin)).max(0.0);
        }
    }

    fn place(number: i64) -> usize {
        number.rem_euclid(BUCKETS as i64) as usize
    }

    #[expect(clippy::cast_precision_loss, reason = "a count of buckets")]
    fn share(&self, now: Seconds) -> f64 {
        let window = (BUCKETS as f64 * BUCKET).min(now - self.first);
        if window <= 0.0 {
            return if self.held > 0 { 1.0 } else { 0.0 };
        }
        let oldest = (Self::number(now) - BUCKETS as i64 + 1).max(self.newest - BUCKETS as i64 + 1);
        let kept: f64 = (oldest..=self.newest).map(|n| self.seconds[Self::place(n)]).sum();
        let running = if self.held > 0 { now - self.since.max(now - window) } else { 0.0 };
        ((kept + running) / window).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::Busy;

    #[test]
    fn a_card_is_busy_by_the_time_it_was_held_in_the_last_five_minutes() {
        let mut busy = Busy::new(0.0);
        busy.begin(0.0);
        busy.end(30.0);
        assert!((busy.share(60.0) - 0.5).abs() < 1e-9);
        // Two leases at once hold it once.
        busy.begin(60.0);
        busy.begin(70.0);
        busy.end(80.0);
        busy.end(90.0);
        assert!((busy.share(120.0) - 0.5).abs() < 1e-9, "{}", busy.share(120.0));
        assert!(busy.share(1000.0).abs() < 1e-9);
        busy.begin(1000.0);
        assert!((busy.share(1150.0) - 0.5).abs() < 0.02, "{}", busy.share(1150.0));
    }
}
