//! Jobs and episodes: which pod counts, what it may ask, how it ends.
//!
//! A pod that comes after another pod of the same index begins a new generation; what the older one did is void. A
//! pod that was superseded stays so, whenever its messages arrive.

use std::collections::{BTreeMap, BTreeSet};

use super::kept::{
    Change, Ending, Episode, EpisodeState, Evaluation, EvaluationState, Job, JobState, Judged, Op, Registration,
    Seconds, Task, Usage,
};
use super::tally::Tally;
use super::{
    Asking, Core, EpisodeEntry, FINALS, JobEntry, MOST_CARRIED, MOST_KEYS, MOST_PENDING, MOST_SAID, MOST_STORED, Pod,
    Refused,
};

/// An episode, as its pod needs to know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Begun {
    pub job: Job,
    pub task: usize,
    pub index: u32,
    pub attempt: u32,
    pub generation: u32,
    pub lines: u64,
    pub device: Registration,
}

/// What is to be evaluated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    pub op: Op,
    /// Digests.
    pub candidates: Vec<String>,
    /// Of all candidates together.
    pub bytes: u64,
}

/// What a caller wants to be kept, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wants {
    /// A new evaluation with its candidates.
    Evaluation(u64),
    /// An episode's last judgement with its candidate: room is kept for it.
    Final(u64),
    /// Lines of a trajectory.
    Lines(u64),
}

impl Wants {
    /// An evaluation with candidates of so many bytes.
    #[must_use]
    pub const fn evaluation(op: Op, bytes: u64) -> Self {
        if matches!(op, Op::Final) { Self::Final(bytes) } else { Self::Evaluation(bytes) }
    }
}

/// How an evaluation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    pub id: u64,
    pub state: EvaluationState,
    /// Evaluations of its job before it.
    pub ahead: usize,
}

/// A job with all its episodes, for facts and metrics.
#[derive(Debug)]
pub struct Facts<'a> {
    pub job: &'a Job,
    pub usage: &'a Usage,
    pub queued: usize,
    /// The generation that counts, and the highest counts of those before it.
    pub episodes: Vec<(&'a Episode, &'a Tally)>,
}

impl Core {
    /// Makes a job known, or reopens it if it was suspended.
    ///
    /// # Errors
    /// `JobDiffers` once an episode has begun.
    pub fn put_job(&mut self, mut job: Job, now: Seconds) -> Result<(), Refused> {
        self.settle(now);
        if let Some(entry) = self.jobs.get(&job.uid) {
            job.state = entry.job.state;
            let same = entry.job == job;
            let begun = self.episodes.range((job.uid.clone(), 0)..=(job.uid.clone(), u32::MAX)).next().is_some();
            if !same && (begun || job.state == JobState::Closed) {
                return Err(Refused::JobDiffers(job.uid));
            }
            if same && job.state != JobState::Suspended {
                return Ok(());
            }
        }
        if job.state == JobState::Suspended {
            job.state = JobState::Open;
        }
        self.changes.push(Change::Job(job.clone()));
        self.spaces.entry(job.namespace.clone()).or_default();
        match self.jobs.get_mut(&job.uid) {
            Some(entry) => entry.job = job,
            None => {
                let entry = JobEntry { usage: Usage::default(), queue: BTreeSet::new(), passed: 0, job };
                self.jobs.insert(entry.job.uid.clone(), entry);
            }
        }
        Ok(())
    }

    /// Ends the work on a job: nothing of it is begun any more, what waits is dropped, what runs is cancelled. A job that
    /// isn't known is closed already.
    pub fn close_job(&mut self, uid: &str, keep: bool, now: Seconds) {
        self.settle(now);
        let Some(entry) = self.jobs.get_mut(uid) else { return };
        let state = if keep { JobState::Suspended } else { JobState::Closed };
        if entry.job.state != JobState::Closed && entry.job.state != state {
            entry.job.state = state;
            self.changes.push(Change::Job(entry.job.clone()));
        }
        let of = |row: &Evaluation| row.job == uid;
        let pending: Vec<u64> = self.evaluations.values().filter(|(row, _)| of(row)).map(|(row, _)| row.id).collect();
        for id in pending {
            self.cancel(id);
        }
        self.dispatch(now);
    }

    /// Forgets a closed job and all that it came to. Says whether nothing is left of it: a job that isn't closed stays, and
    /// so does one over which a judge may still be at work.
    pub fn forget_job(&mut self, uid: &str, now: Seconds) -> bool {
        self.settle(now);
        let Some(entry) = self.jobs.get(uid) else { return true };
        let works = self.leases.values().any(|l| l.row.job == uid)
            || self.cards.values().any(|c| c.exclusive.as_ref().is_some_and(|held| held.row.job == uid))
            || self.evaluations.values().any(|(row, _)| row.job == uid);
        if entry.job.state != JobState::Closed || works {
            return false;
        }
        self.jobs.remove(uid);
        self.episodes.retain(|(job, _), _| job != uid);
        self.changes.push(Change::JobGone(uid.to_owned()));
        true
    }

    /// Begins the episode of a pod, or says again what it was given.
    ///
    /// # Errors
    /// `UnknownJob`, `Index`, `Superseded`, `Finished`, `Closed`, `NoJudge`.
    pub fn begin(&mut self, pod: &Pod, now: Seconds) -> Result<Begun, Refused> {
        self.settle(now);
        let job = self.jobs.get(&pod.job).ok_or_else(|| Refused::UnknownJob(pod.job.clone()))?.job.clone();
        let indexes = job.indexes();
        let (task, attempt) = job.place(pod.index).ok_or(Refused::Index { index: pod.index, indexes })?;
        let device = self.device.clone();
        let mut older = None;
        if let Some(entry) = self.episodes.get(&(pod.job.clone(), pod.index)) {
            if entry.pods.contains(&pod.uid) {
                return Err(Refused::Superseded(pod.index));
            }
            if entry.row.state == EpisodeState::Finished {
                return Err(Refused::Finished(pod.index));
            }
            older = Some((entry.row.generation, entry.row.pod == pod.uid, entry.row.lines));
        }
        if job.state != JobState::Open {
            return Err(Refused::Closed(job.name));
        }
        let device = device.ok_or(Refused::NoJudge)?;
        let begun = |generation, lines| Begun {
            job: job.clone(),
            task,
            index: pod.index,
            attempt,
            generation,
            lines,
            device: device.clone(),
        };
        let generation = match older {
            Some((generation, true, lines)) => return Ok(begun(generation, lines)),
            Some((generation, false, _)) => generation + 1,
            None => 1,
        };
        let (void, pods) = self.void(pod);
        let row = Episode {
            job: pod.job.clone(),
            index: pod.index,
            generation,
            pod: pod.uid.clone(),
            state: EpisodeState::Running,
            lines: 0,
            tally: Tally::default(),
            judged: None,
            ending: None,
            began: now,
            stored: 0,
            said: 0,
        };
        self.changes.push(Change::Episode(row.clone()));
        let entry = EpisodeEntry { row, void, pods, keys: BTreeMap::new() };
        self.episodes.insert((pod.job.clone(), pod.index), entry);
        self.dispatch(now);
        Ok(begun(generation, 0))
    }

    /// Voids the generation before: its counts go aside, its evaluations are dropped.
    fn void(&mut self, pod: &Pod) -> (Tally, BTreeSet<String>) {
        let Some(mut older) = self.episodes.remove(&(pod.job.clone(), pod.index)) else {
            return (Tally::default(), BTreeSet::new());
        };
        older.row.state = EpisodeState::Void;
        self.changes.push(Change::Episode(older.row.clone()));
        for asking in older.keys.values().filter(|a| a.state.pending()) {
            self.cancel(asking.id);
        }
        older.void.highest(&older.row.tally);
        older.pods.insert(older.row.pod);
        (older.void, older.pods)
    }

    /// Whether what a pod wants is to be kept: its generation counts and runs, and there is room for it; a new evaluation only
    /// while the job is open. To be asked before anything is written.
    ///
    /// # Errors
    /// `UnknownJob`, `NotBegun`, `Superseded`, `Finished`, `Closed`, `TooLarge`, `TooMany`, `TooManyKeys`, `Budget`.
    pub fn admit(&self, pod: &Pod, wants: Wants) -> Result<(), Refused> {
        let job = &self.jobs.get(&pod.job).ok_or_else(|| Refused::UnknownJob(pod.job.clone()))?.job;
        let entry = self.episodes.get(&(pod.job.clone(), pod.index)).ok_or(Refused::NotBegun(pod.index))?;
        entry.is_of(pod)?;
        if !Self::is_running(&entry.row) {
            return Err(Refused::Finished(pod.index));
        }
        let (bytes, has, most) = match wants {
            Wants::Evaluation(bytes) => (bytes, entry.row.stored, MOST_STORED),
            Wants::Final(bytes) => (bytes, entry.row.stored, MOST_STORED + MOST_CARRIED),
            Wants::Lines(bytes) => (bytes, entry.row.said, MOST_SAID),
        };
        if !matches!(wants, Wants::Lines(_)) {
            if job.state != JobState::Open {
                return Err(Refused::Closed(job.name.clone()));
            }
            if bytes > MOST_CARRIED {
                return Err(Refused::TooLarge(bytes));
            }
            let reserve = if matches!(wants, Wants::Final(_)) { FINALS } else { 0 };
            if entry.keys.len() >= MOST_KEYS + reserve {
                return Err(Refused::TooManyKeys(pod.index));
            }
            if entry.keys.values().filter(|a| a.state.pending()).count() >= MOST_PENDING {
                return Err(Refused::TooMany);
            }
        }
        if has.saturating_add(bytes) > most {
            return Err(Refused::Budget { index: pod.index, stored: has, bytes, most });
        }
        Ok(())
    }

    fn episode(&mut self, pod: &Pod) -> Result<&mut EpisodeEntry, Refused> {
        if !self.jobs.contains_key(&pod.job) {
            return Err(Refused::UnknownJob(pod.job.clone()));
        }
        let entry = self.episodes.get_mut(&(pod.job.clone(), pod.index)).ok_or(Refused::NotBegun(pod.index))?;
        entry.is_of(pod)?;
        Ok(entry)
    }

    fn running(&mut self, pod: &Pod) -> Result<&mut EpisodeEntry, Refused> {
        let entry = self.episode(pod)?;
        if Self::is_running(&entry.row) { Ok(entry) } else { Err(Refused::Finished(pod.index)) }
    }

    /// Whether a pod's episode has an evaluation of this key.
    #[must_use]
    pub fn knows(&self, pod: &Pod, key: &str) -> bool {
        let entry = self.episodes.get(&(pod.job.clone(), pod.index));
        entry.is_some_and(|e| e.row.pod == pod.uid && e.keys.contains_key(key))
    }

    /// Asks for an evaluation, or how the one with this key stands.
    ///
    /// # Errors
    /// As `admit`, and `KeyReused`, `UnknownKey`.
    pub fn evaluate(&mut self, pod: &Pod, key: &str, ask: Option<Ask>, now: Seconds) -> Result<Asked, Refused> {
        self.settle(now);
        let name = self.jobs.get(&pod.job).map(|j| j.job.name.clone()).unwrap_or_default();
        let task = self.jobs.get(&pod.job).and_then(|j| j.job.place(pod.index)).map_or(0, |p| p.0);
        let entry = self.running(pod)?;
        if let Some(known) = entry.keys.get(key) {
            if ask.is_some_and(|a| a.op != known.op || a.candidates != known.candidates) {
                return Err(Refused::KeyReused(key.to_owned()));
            }
            let (id, state) = (known.id, known.state);
            if state == EvaluationState::Dropped {
                return Err(Refused::Closed(name));
            }
            return Ok(self.asked(pod, id, state));
        }
        let Some(ask) = ask else {
            self.admit(pod, Wants::Evaluation(0))?;
            return Err(Refused::UnknownKey(key.to_owned()));
        };
        self.admit(pod, Wants::evaluation(ask.op, ask.bytes))?;
        let generation = self.store(pod, ask.bytes)?;
        let id = self.number();
        let row = Evaluation {
            id,
            job: pod.job.clone(),
            index: pod.index,
            generation,
            key: key.to_owned(),
            op: ask.op,
            task,
            candidates: ask.candidates.clone(),
            state: EvaluationState::Queued,
            enqueued: now,
            losses: 0,
        };
        let asking = Asking { id, op: ask.op, candidates: ask.candidates, state: EvaluationState::Queued };
        self.running(pod)?.keys.insert(key.to_owned(), asking);
        self.evaluations.insert(id, (row, None));
        self.enqueue(id);
        self.dispatch(now);
        let state = self.evaluations.get(&id).map_or(EvaluationState::Queued, |(row, _)| row.state);
        Ok(self.asked(pod, id, state))
    }

    /// Counts what an episode has stored; gives its generation.
    fn store(&mut self, pod: &Pod, bytes: u64) -> Result<u32, Refused> {
        let entry = self.running(pod)?;
        entry.row.stored += bytes;
        let row = entry.row.clone();
        let generation = row.generation;
        if bytes > 0 {
            self.changes.push(Change::Episode(row));
        }
        Ok(generation)
    }

    fn asked(&self, pod: &Pod, id: u64, state: EvaluationState) -> Asked {
        let queue = self.jobs.get(&pod.job).map(|j| &j.queue);
        let ahead = if state == EvaluationState::Queued { queue.map_or(0, |q| q.range(..id).count()) } else { 0 };
        Asked { id, state, ahead }
    }

    /// Adds lines to a trajectory, given what each counts and its bytes. Says how many of them were there already, and how many lines
    /// are kept now.
    ///
    /// # Errors
    /// `UnknownJob`, `NotBegun`, `Superseded`, `Finished`, `Gap`, `Budget`.
    pub fn append(
        &mut self,
        pod: &Pod,
        first: u64,
        lines: &[(Tally, u64)],
        now: Seconds,
    ) -> Result<(usize, u64, u32), Refused> {
        self.settle(now);
        let entry = self.running(pod)?;
        let kept = entry.row.lines;
        if first > kept {
            return Err(Refused::Gap { first, lines: kept });
        }
        let skipped = usize::try_from(kept - first).unwrap_or(usize::MAX).min(lines.len());
        let fresh = lines.get(skipped..).unwrap_or_default();
        if fresh.is_empty() {
            return Ok((skipped, kept, entry.row.generation));
        }
        let bytes = fresh.iter().map(|(_, bytes)| bytes).sum();
        self.admit(pod, Wants::Lines(bytes))?;
        let entry = self.running(pod)?;
        for (tally, _) in fresh {
            entry.row.tally.merge(tally);
        }
        entry.row.said += bytes;
        entry.row.lines = kept + fresh.len() as u64;
        let (lines, generation) = (entry.row.lines, entry.row.generation);
        let row = entry.row.clone();
        self.changes.push(Change::Episode(row));
        Ok((skipped, lines, generation))
    }

    /// Ends an episode. `tally` is what counts where no line of a trajectory said it. Gives the reward.
    ///
    /// # Errors
    /// `UnknownJob`, `NotBegun`, `Superseded`, `OtherEnd`; `Closed` for a job that never comes back.
    pub fn finish(&mut self, pod: &Pod, ending: Ending, tally: &Tally, now: Seconds) -> Result<i32, Refused> {
        self.settle(now);
        let entry = self.episode(pod)?;
        let reward = entry.row.judged.as_ref().map_or(-1, |(_, j)| j.reward);
        if let Some(kept) = &entry.row.ending {
            return if kept.digest == ending.digest { Ok(reward) } else { Err(Refused::OtherEnd) };
        }
        if entry.row.tally.sum("turns") == 0.0 {
            entry.row.tally.merge(tally);
        }
        entry.row.ending = Some(ending);
        entry.row.state = EpisodeState::Finished;
        let row = entry.row.clone();
        let pending: Vec<u64> = entry.keys.values().filter(|a| a.state.pending()).map(|a| a.id).collect();
        entry.keys = BTreeMap::new();
        self.changes.push(Change::Episode(row));
        for id in pending {
            self.cancel(id);
        }
        self.dispatch(now);
        Ok(reward)
    }

    /// A job.
    #[must_use]
    pub fn job(&self, uid: &str) -> Option<&Job> {
        self.jobs.get(uid).map(|j| &j.job)
    }

    /// Whether this generation of an episode runs.
    #[must_use]
    pub fn runs(&self, job: &str, index: u32, generation: u32) -> bool {
        let entry = self.episodes.get(&(job.to_owned(), index));
        entry.is_some_and(|e| e.row.generation == generation && Self::is_running(&e.row))
    }

    /// The last final judgement of a pod's episode that runs: job, task, episode, evaluation.
    #[must_use]
    pub fn judged(&self, pod: &Pod) -> Option<(&Job, &Task, &Episode, u64, &Judged)> {
        let job = &self.jobs.get(&pod.job)?.job;
        let entry = self.episodes.get(&(pod.job.clone(), pod.index))?;
        let entry = Some(entry).filter(|e| e.row.pod == pod.uid && Self::is_running(&e.row))?;
        let (evaluation, judged) = entry.row.judged.as_ref()?;
        Some((job, job.tasks.get(job.place(pod.index)?.0)?, &entry.row, *evaluation, judged))
    }

    /// A job with its episodes.
    #[must_use]
    pub fn facts(&self, uid: &str) -> Option<Facts<'_>> {
        let entry = self.jobs.get(uid)?;
        let of = self.episodes.range((uid.to_owned(), 0)..=(uid.to_owned(), u32::MAX));
        let episodes = of.map(|(_, e)| (&e.row, &e.void)).collect();
        Some(Facts { job: &entry.job, usage: &entry.usage, queued: entry.queue.len(), episodes })
    }

    /// All jobs.
    pub fn all_facts(&self) -> impl Iterator<Item = Facts<'_>> {
        self.jobs.keys().filter_map(|uid| self.facts(uid))
    }

    /// The best final judgement of a task: that of its best finished episode.
    ///
    /// # Errors
    /// `UnknownJob`, `UnknownTask`, `NoResult`.
    pub fn result(&self, uid: &str, task: &str) -> Result<(&Job, usize, &Episode, u64, &Judged), Refused> {
        let facts = self.facts(uid).ok_or_else(|| Refused::UnknownJob(uid.to_owned()))?;
        let place = facts.job.tasks.iter().position(|t| t.name == task);
        let place = place.ok_or_else(|| Refused::UnknownTask(task.to_owned()))?;
        let of_task = facts.episodes.iter().filter(|(e, _)| facts.job.place(e.index).is_some_and(|p| p.0 == place));
        let finished = of_task.filter(|(e, _)| e.state == EpisodeState::Finished);
        let judged = finished.filter_map(|(e, _)| e.judged.as_ref().map(|(id, j)| (*e, *id, j)));
        let best = judged.max_by(|a, b| a.2.rank().total_cmp(&b.2.rank()));
        let (episode, id, judged) = best.ok_or_else(|| Refused::NoResult(task.to_owned()))?;
        Ok((facts.job, place, episode, id, judged))
    }
}

impl EpisodeEntry {
    /// Refuses a pod that isn't the one whose generation counts.
    fn is_of(&self, pod: &Pod) -> Result<(), Refused> {
        if self.pods.contains(&pod.uid) {
            return Err(Refused::Superseded(pod.index));
        }
        if self.row.pod == pod.uid { Ok(()) } else { Err(Refused::NotBegun(pod.index)) }
    }
}

impl Judged {
    /// Larger is better: the reward, then the speedup over eager.
    #[must_use]
    pub fn rank(&self) -> f64 {
        let speedup = self.eager.map_or(0.0, |s| s.median.max(0.0));
        // Speedups order what has the same reward.
        f64::from(self.reward) + speedup / (1.0 + speedup)
    }
}
