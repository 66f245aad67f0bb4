//! Scripts of single faults: what a simulation meets among a thousand other things, by name.

use super::kept::{EvaluationState, Job, JobState, Kept, Op};
use super::simulation::{card, done, ending, job};
use super::tally::Tally;
use super::{Ask, Core, Granted, MOST_CARRIED, MOST_KEYS, MOST_SAID, MOST_STORED, Pod, Refused, Settings, Wake, Wants};

/// Judges of one card, each with two slots, and a job with an episode for each of its tasks.
struct Script {
    core: Core,
    kept: Kept,
    sessions: Vec<u64>,
    job: Job,
    ticket: u64,
    keys: u64,
}

impl Script {
    fn new(judges: usize) -> Self {
        let job = job("a", "one", 8, 1);
        let core = Core::new(Settings::default());
        let mut script = Self { core, kept: Kept::default(), sessions: Vec::new(), job, ticket: 0, keys: 0 };
        for n in 0..judges {
            let session = script.core.register(&Self::judge(n), ("i", 1.0), card("card".into(), 2), 0.0).unwrap();
            script.sessions.push(session);
        }
        script.core.put_job(script.job.clone(), 0.0).unwrap();
        for index in 0..script.job.indexes() {
            script.core.begin(&script.pod(index), 0.0).unwrap();
        }
        script
    }

    fn judge(n: usize) -> String {
        format!("judge-{n}")
    }

    fn pod(&self, index: u32) -> Pod {
        Pod { uid: format!("{}-{index}", self.job.uid), job: self.job.uid.clone(), index }
    }

    fn ask(&mut self, index: u32, now: f64) -> u64 {
        self.keys += 1;
        let ask = Ask { op: Op::Final, candidates: vec!["c".into()], bytes: 1 };
        self.core.evaluate(&self.pod(index), &self.keys.to_string(), Some(ask), now).unwrap().id
    }

    /// An evaluation that is leased by a judge.
    fn lease(&mut self, judge: usize, now: f64) -> u64 {
        self.ask(0, now);
        self.ticket += 1;
        let by = (Self::judge(judge), self.sessions[judge]);
        self.core.pull((&by.0, by.1), self.ticket, vec![], String::new(), now).unwrap();
        let ticket = self.ticket;
        let pulled = |wake| if let Wake::Pulled(t, lease) = wake { (t == ticket).then_some(lease) } else { None };
        self.core.take_wakes().into_iter().find_map(pulled).unwrap()
    }

    fn acquire(&mut self, judge: usize, lease: u64, number: u64, now: f64) -> Result<u64, Refused> {
        self.ticket += 1;
        let by = (Self::judge(judge), self.sessions[judge]);
        self.core.acquire((&by.0, by.1), (lease, number), self.ticket, now).map(|()| self.ticket)
    }

    fn release(&mut self, judge: usize, lease: u64, slice: u64, now: f64) {
        let by = (Self::judge(judge), self.sessions[judge]);
        self.core.release((&by.0, by.1), lease, slice, now).unwrap();
    }

    fn complete(&mut self, judge: usize, lease: u64, now: f64) {
        let by = (Self::judge(judge), self.sessions[judge]);
        self.core.complete((&by.0, by.1), lease, done(), now).unwrap();
    }

    fn renew(&mut self, judge: usize, leases: &[u64], now: f64) {
        let by = (Self::judge(judge), self.sessions[judge]);
        self.core.renew((&by.0, by.1), leases, now).unwrap();
    }

    /// Slices that were granted since the last time, by their tickets.
    fn granted(&mut self) -> Vec<(u64, Granted)> {
        let of = |wake| if let Wake::Acquired(ticket, granted) = wake { Some((ticket, granted)) } else { None };
        self.core.take_wakes().into_iter().filter_map(of).collect()
    }

    /// Another broker goes on from what is kept; its clock begins so much later, and may be wrong by `off`.
    fn restart(&mut self, now: f64, off: f64) {
        self.keep();
        let by = now + off;
        self.kept.evaluations.values_mut().for_each(|e| e.enqueued -= by);
        self.kept.leases.values_mut().for_each(|l| (l.granted, l.ended) = (l.granted - by, l.ended.map(|t| t - by)));
        self.kept
            .exclusives
            .values_mut()
            .for_each(|s| (s.granted, s.ended) = (s.granted - by, s.ended.map(|t| t - by)));
        self.core = Core::restore(Settings::default(), self.kept.clone(), 0.0);
    }

    fn keep(&mut self) {
        self.core.take_changes().into_iter().for_each(|c| self.kept.apply(c));
    }

    /// What is charged, which is what the ledger says that the leases took; and what is told of it.
    fn charged(&mut self) -> f64 {
        self.keep();
        let lengths: f64 = self.kept.leases.values().map(|l| l.ended.map_or(0.0, |t| t - l.granted)).sum();
        let usage = &self.kept.usage[&self.job.uid];
        assert!((usage.charged - lengths).abs() < 1e-9, "{} s for leases of {lengths} s", usage.charged);
        assert!((usage.charged - usage.tally.sum("slice_seconds")).abs() < 1e-9, "{usage:?}");
        usage.charged
    }
}

// ---- Exclusive slices --------------------------------------------------------------------------------------------

#[test]
fn two_judges_with_two_leases_each_have_their_card_alone_one_after_the_other() {
    let mut script = Script::new(2);
    let (a, b) = ([script.lease(0, 0.0), script.lease(0, 0.0)], [script.lease(1, 0.0), script.lease(1, 0.0)]);
    let first = script.acquire(0, a[0], 1, 1.0).unwrap();
    assert!(script.granted().is_empty(), "the other judge is at work");
    // Its other lease waits within the judge, and the broker never hears of it.
    let second = script.acquire(1, b[1], 1, 1.0).unwrap();
    let granted = script.granted();
    assert_eq!(granted.iter().map(|g| g.0).collect::<Vec<_>>(), [first]);
    script.release(0, a[0], granted[0].1.slice, 2.0);
    assert!(script.granted().is_empty(), "the first judge's other lease goes on");
    script.acquire(0, a[1], 2, 3.0).unwrap();
    assert_eq!(script.granted().iter().map(|g| g.0).collect::<Vec<_>>(), [second], "whoever came first");
}

#[test]
fn a_judge_asks_on_through_an_heir_when_the_lease_that_asked_is_over() {
    let mut script = Script::new(2);
    let (a, b) = (script.lease(0, 0.0), [script.lease(1, 0.0), script.lease(1, 0.0)]);
    script.acquire(1, b[0], 1, 1.0).unwrap();
    script.complete(1, b[0], 2.0);
    // Until it has asked on, it may be at work for all that is known.
    script.acquire(0, a, 1, 3.0).unwrap();
    assert!(script.granted().is_empty());
    script.acquire(1, b[1], 2, 4.0).unwrap();
    assert_eq!(script.granted().len(), 1);
    // A late copy of the first asking changes nothing.
    assert_eq!(script.acquire(1, b[1], 1, 5.0), Err(Refused::SliceOver(b[1], 1)));
    assert_eq!(script.acquire(1, b[0], 1, 5.0), Err(Refused::LeaseOver(b[0])));
}

#[test]
fn an_asking_that_is_withdrawn_lets_nobody_else_measure_however_late_its_copies_come() {
    for restarts in [false, true] {
        let mut script = Script::new(2);
        let (a, b) = (script.lease(0, 0.0), [script.lease(1, 0.0), script.lease(1, 0.0)]);
        script.acquire(1, b[0], 1, 1.0).unwrap();
        let by = (Script::judge(1), script.sessions[1]);
        assert!(script.core.withdraw((&by.0, by.1), 1, 2.0).unwrap());
        if restarts {
            script.restart(2.0, 0.0);
        }
        assert_eq!(script.acquire(1, b[0], 1, 3.0), Err(Refused::SliceOver(b[0], 1)));
        script.acquire(0, a, 1, 3.0).unwrap();
        assert!(script.granted().is_empty(), "the judge's work goes on");
        script.complete(1, b[0], 4.0);
        script.complete(1, b[1], 4.0);
        assert_eq!(script.granted().len(), 1);
    }
}

#[test]
fn a_judge_that_waited_shares_its_card_again_only_when_nobody_has_it_alone() {
    let mut script = Script::new(2);
    let (a, b) = (script.lease(0, 0.0), [script.lease(1, 0.0), script.lease(1, 0.0)]);
    script.acquire(1, b[0], 1, 1.0).unwrap();
    script.acquire(0, a, 1, 1.0).unwrap();
    let granted = script.granted();
    script.release(1, b[0], granted[0].1.slice, 2.0);
    script.acquire(1, b[0], 2, 3.0).unwrap();
    let slice = script.granted()[0].1.slice;
    // The first lease is over, and the judge hasn't heard of the second one yet.
    script.complete(1, b[0], 4.0);
    let by = (Script::judge(1), script.sessions[1]);
    assert!(!script.core.withdraw((&by.0, by.1), 2, 5.0).unwrap());
    script.release(0, a, slice, 6.0);
    assert!(script.core.withdraw((&by.0, by.1), 2, 7.0).unwrap());
}

#[test]
fn an_asking_that_was_answered_is_over_after_a_restart_too_through_whichever_lease_it_comes() {
    let mut script = Script::new(2);
    let (a, b) = (script.lease(0, 0.0), [script.lease(1, 0.0), script.lease(1, 0.0)]);
    script.complete(0, a, 0.5);
    script.acquire(1, b[0], 5, 1.0).unwrap();
    let slice = script.granted()[0].1.slice;
    script.release(1, b[0], slice, 2.0);
    script.complete(1, b[0], 2.0);
    script.restart(2.0, 0.0);
    assert_eq!(script.acquire(1, b[1], 4, 3.0), Err(Refused::SliceOver(b[1], 4)));
    assert_eq!(script.acquire(1, b[1], 5, 3.0), Err(Refused::SliceOver(b[1], 5)));
    assert!(script.acquire(1, b[1], 6, 3.0).is_ok());
}

#[test]
fn a_newer_asking_says_that_the_slice_before_is_over() {
    let mut script = Script::new(1);
    let a = [script.lease(0, 0.0), script.lease(0, 0.0)];
    script.acquire(0, a[0], 1, 1.0).unwrap();
    assert_eq!(script.granted().len(), 1);
    // Its release is lost.
    script.acquire(0, a[1], 2, 2.0).unwrap();
    assert_eq!(script.granted().len(), 1);
    script.keep();
    let ended: Vec<_> = script.kept.exclusives.values().map(|s| s.ended).collect();
    assert_eq!(ended, [Some(2.0), None]);
}

#[test]
fn what_is_handed_back_by_somebody_else_or_too_late_changes_nothing() {
    let mut script = Script::new(2);
    let (a, b) = (script.lease(0, 0.0), script.lease(1, 0.0));
    script.acquire(1, b, 1, 1.0).unwrap();
    script.acquire(0, a, 1, 1.0).unwrap();
    let slice = script.granted()[0].1.slice;
    script.keep();
    let before = script.kept.clone();
    // Another judge's slice, one that never was, a lease that is nobody's.
    script.release(0, b, slice, 2.0);
    script.release(0, a, slice, 2.0);
    script.release(1, b, slice + 7, 2.0);
    script.release(1, 999, slice, 2.0);
    script.complete(0, b, 2.0);
    script.core.hand_back(999, 2.0);
    script.core.hand_back_slice(999, 2.0);
    script.keep();
    assert_eq!(script.kept, before);
    // A lease that is taken from a silent judge isn't handed back any more, and one that is over neither.
    let late = script.core.settings().silence() + 3.0;
    script.core.tick(late);
    script.keep();
    let before = script.kept.clone();
    script.core.hand_back(a, late);
    script.core.hand_back(b, late);
    script.keep();
    assert_eq!(script.kept, before);
}

// ---- Charges -----------------------------------------------------------------------------------------------------

#[test]
fn a_slice_that_outlives_its_silent_lease_is_charged_no_further_than_the_lease() {
    let mut script = Script::new(1);
    let a = script.lease(0, 0.0);
    script.acquire(0, a, 1, 10.0).unwrap();
    script.renew(0, &[a], 12.0);
    // Silent for three renewals: the lease is taken away, and the slice holds the card until its time is over.
    let silent = 12.0 + script.core.settings().silence();
    script.core.tick(silent);
    assert_eq!(script.charged(), silent);
    script.core.tick(100.0);
    assert_eq!(script.charged(), silent);
    script.complete(0, a, 101.0);
    assert_eq!(script.charged(), silent);
}

#[test]
fn what_a_lease_took_over_a_restart_is_charged_once() {
    for off in [0.0, 3.0, -3.0] {
        let mut script = Script::new(1);
        let a = script.lease(0, 0.0);
        script.acquire(0, a, 1, 1.0).unwrap();
        let slice = script.granted()[0].1.slice;
        script.release(0, a, slice, 3.0);
        script.acquire(0, a, 2, 4.0).unwrap();
        script.restart(5.0, off);
        script.acquire(0, a, 2, 2.0).unwrap();
        script.complete(0, a, 6.0);
        assert!((script.charged() - 11.0 - off).abs() < 1e-9);
        script.complete(0, a, 7.0);
        script.restart(7.0, 0.0);
        script.core.tick(1.0);
        assert!((script.charged() - 11.0 - off).abs() < 1e-9);
    }
}

#[test]
fn a_clock_that_was_set_back_makes_no_lease_end_before_it_began() {
    let mut script = Script::new(1);
    let a = script.lease(0, 5.0);
    script.acquire(0, a, 1, 5.5).unwrap();
    script.restart(6.0, -100.0);
    script.complete(0, a, 1.0);
    assert_eq!(script.charged(), 0.0);
    script.keep();
    assert!(script.kept.exclusives.values().all(|s| s.ended.unwrap() >= s.granted));
}

#[test]
fn a_lease_whose_end_is_seen_late_is_charged_to_its_end() {
    let mut script = Script::new(1);
    let a = script.lease(0, 0.0);
    (1..=89).for_each(|n| script.renew(0, &[a], 10.0 * f64::from(n)));
    script.core.tick(2000.0);
    assert_eq!(script.charged(), 900.0);
}

#[test]
fn a_void_lease_is_charged_once_to_when_its_judge_ends_it() {
    let mut script = Script::new(1);
    let a = script.lease(0, 0.0);
    script.core.begin(&Pod { uid: "newer".into(), ..script.pod(0) }, 4.0).unwrap();
    assert_eq!(script.charged(), 0.0);
    script.complete(0, a, 6.0);
    script.complete(0, a, 7.0);
    script.core.close_job(&script.job.uid.clone(), false, 8.0);
    assert_eq!(script.charged(), 6.0);
}

// ---- Fair share --------------------------------------------------------------------------------------------------

/// A job that has used a hundred seconds of the one card, and one of another namespace that has been idle.
fn used_and_idle() -> (Script, Pod) {
    let mut script = Script::new(1);
    let idle = job("b", "idle", 1, 1);
    script.core.put_job(idle.clone(), 0.0).unwrap();
    let pod = Pod { uid: "idle".into(), job: idle.uid, index: 0 };
    script.core.begin(&pod, 0.0).unwrap();
    for n in 0..100 {
        let lease = script.lease(0, f64::from(n));
        script.complete(0, lease, f64::from(n + 1));
    }
    (script, pod)
}

fn tags(core: &Core) -> (f64, f64) {
    (core.spaces["a"].tag, core.spaces["b"].tag)
}

#[test]
fn who_waits_over_a_restart_begins_without_the_credit_of_idle_time() {
    let (mut script, idle) = used_and_idle();
    let ask = Ask { op: Op::Final, candidates: vec![], bytes: 0 };
    script.core.evaluate(&idle, "k", Some(ask), 100.0).unwrap();
    script.ask(0, 100.0);
    let before = (tags(&script.core), script.core.virtual_now);
    assert!(before.0.1 > before.0.0 - 3.0, "{before:?}");
    script.restart(101.0, 0.0);
    assert_eq!((tags(&script.core), script.core.virtual_now), before);
    // And whoever has been idle over the restart begins there, too.
    let (mut script, idle) = used_and_idle();
    script.restart(101.0, 0.0);
    let ask = Ask { op: Op::Final, candidates: vec![], bytes: 0 };
    script.core.evaluate(&idle, "k", Some(ask), 1.0).unwrap();
    assert_eq!(tags(&script.core).1, before.0.1);
}

#[test]
fn what_comes_back_from_a_lost_judge_keeps_the_tag_at_which_it_began_to_wait() {
    let (mut script, idle) = used_and_idle();
    let second = script.core.register("other", ("o", 1.0), card("other".into(), 1), 100.0).unwrap();
    let ask = Ask { op: Op::Final, candidates: vec![], bytes: 0 };
    script.core.evaluate(&idle, "k", Some(ask), 100.0).unwrap();
    let began = tags(&script.core).1;
    script.core.pull(("other", second), 7000, vec![], String::new(), 100.0).unwrap();
    script.core.take_wakes();
    // Others go on meanwhile.
    for n in 100..140 {
        script
            .core
            .renew(("other", second), &script.core.leases.keys().copied().collect::<Vec<_>>(), f64::from(n))
            .unwrap();
        let lease = script.lease(0, f64::from(n));
        script.complete(0, lease, f64::from(n + 1));
    }
    // The judge comes anew, having lost it: what it took is charged, and no more.
    let lease = *script.core.leases.keys().next().unwrap();
    let took = 140.0 - script.core.leases[&lease].row.granted;
    script.core.register("other", ("p", 2.0), card("other".into(), 1), 140.0).unwrap();
    assert_eq!(script.core.waiting(&idle.job), 1);
    assert!((tags(&script.core).1 - began - took).abs() < 1e-9, "{:?} {began} {took}", tags(&script.core));
}

// ---- Bounds ------------------------------------------------------------------------------------------------------

#[test]
fn what_an_episode_may_have_kept_is_bounded_and_refused_by_name() {
    let mut script = Script::new(1);
    let pod = script.pod(0);
    let admit = |script: &Script, wants| script.core.admit(&script.pod(0), wants);
    assert_eq!(admit(&script, Wants::Evaluation(MOST_CARRIED)), Ok(()));
    let large = admit(&script, Wants::Evaluation(MOST_CARRIED + 1)).unwrap_err();
    assert_eq!(large, Refused::TooLarge(MOST_CARRIED + 1));
    // Lines have a budget of their own, also over a restart.
    script.core.append(&pod, 0, &[(Tally::default(), MOST_SAID - 10)], 1.0).unwrap();
    script.ask(0, 1.0);
    script.restart(1.0, 0.0);
    assert_eq!(admit(&script, Wants::Lines(10)), Ok(()));
    let full = |stored, bytes, most| Err(Refused::Budget { index: 0, stored, bytes, most });
    assert_eq!(admit(&script, Wants::Lines(11)), full(MOST_SAID - 10, 11, MOST_SAID));
    let over = script.core.append(&pod, 1, &[(Tally::default(), 11)], 2.0);
    assert_eq!(over, Err(Refused::Budget { index: 0, stored: MOST_SAID - 10, bytes: 11, most: MOST_SAID }));
    // What is kept already costs nothing again, and another episode has a budget of its own.
    assert!(script.core.append(&pod, 0, &[(Tally::default(), MOST_SAID - 10)], 2.0).is_ok());
    assert_eq!(script.core.admit(&script.pod(1), Wants::Lines(MOST_SAID)), Ok(()));
    // So have candidates, of which the last one has room kept for it.
    for key in 0..MOST_STORED / MOST_CARRIED {
        let ask = Ask { op: Op::Compile, candidates: vec!["c".into()], bytes: MOST_CARRIED };
        script.core.evaluate(&pod, &format!("large {key}"), Some(ask), 3.0).unwrap();
    }
    let refused = admit(&script, Wants::Evaluation(MOST_CARRIED));
    assert!(matches!(refused, Err(Refused::Budget { most: MOST_STORED, .. })), "{refused:?}");
    assert_eq!(admit(&script, Wants::Final(MOST_CARRIED)), Ok(()));
}

#[test]
fn only_the_generation_that_counts_is_admitted_and_only_while_its_job_is_open() {
    let mut script = Script::new(1);
    let (older, newer) = (script.pod(0), Pod { uid: "newer".into(), ..script.pod(0) });
    assert_eq!(script.core.admit(&newer, Wants::Lines(1)), Err(Refused::NotBegun(0)));
    script.core.begin(&newer, 1.0).unwrap();
    assert_eq!(script.core.admit(&older, Wants::Lines(1)), Err(Refused::Superseded(0)));
    assert_eq!(script.core.admit(&newer, Wants::Evaluation(1)), Ok(()));
    let stranger = Pod { job: "none".into(), ..script.pod(0) };
    assert_eq!(script.core.admit(&stranger, Wants::Lines(1)), Err(Refused::UnknownJob("none".into())));
    script.core.close_job(&script.job.uid.clone(), true, 2.0);
    assert_eq!(script.core.admit(&newer, Wants::Evaluation(1)), Err(Refused::Closed(script.job.name.clone())));
    assert_eq!(script.core.job(&script.job.uid).unwrap().state, JobState::Suspended);
    script.core.finish(&newer, ending(), &Tally::default(), 3.0).unwrap();
    assert_eq!(script.core.admit(&newer, Wants::Lines(1)), Err(Refused::Finished(0)));
}

#[test]
fn an_episode_asks_for_so_many_evaluations_and_no_more() {
    let mut script = Script::new(1);
    for _ in 0..MOST_KEYS {
        let lease = script.lease(0, 0.0);
        script.complete(0, lease, 0.0);
    }
    assert_eq!(script.core.admit(&script.pod(0), Wants::Evaluation(0)), Err(Refused::TooManyKeys(0)));
    assert_eq!(script.core.admit(&script.pod(0), Wants::evaluation(Op::Final, 0)), Ok(()));
    // Keys that are known are answered.
    let asked = script.core.evaluate(&script.pod(0), "1", None, 0.0).unwrap();
    assert_eq!(asked.state, EvaluationState::Done);
}
