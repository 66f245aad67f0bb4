//! Who is next: fair share by slice seconds, namespaces by weight, jobs within a namespace, first come within a job.
//!
//! Start-time fair queueing on two levels. A namespace's virtual time advances by seconds over weight; whoever has the
//! least is next. What a lease will cost is estimated at its grant, so that many judges who pull at once don't all serve
//! the same job, and corrected when it ends. Who begins to wait starts at the present virtual time: no credit is saved up
//! while idle, no debt is owed for others' past. What was granted and comes back goes on from where it began to wait. Both
//! hold over a restart, so what is decided here is kept. A job that has nothing to run is not in the way of any other.

use super::kept::{Change, EvaluationState, Op, Seconds};
use super::{Core, JobEntry};

/// How far down a queue a warm task is looked for.
const LOOK: usize = 64;
/// How often the oldest evaluation of the job whose turn it is may be passed over for a warm one.
const MOST_PASSED: u32 = 8;
/// Weight of the newest cost in an estimate.
const NEWEST: f64 = 0.1;

impl Core {
    /// Puts a new evaluation into its job's queue. A job that had nothing to run begins at the present virtual time, if it
    /// isn't beyond it, and so does its namespace.
    pub(super) fn enqueue(&mut self, id: u64) {
        let Some(uid) = self.evaluations.get(&id).map(|(row, _)| row.job.clone()) else { return };
        if let Some(job) = self.jobs.get_mut(&uid) {
            let space = self.spaces.entry(job.job.namespace.clone()).or_default();
            let before = (space.tag, job.usage.tag);
            if space.waiting.is_empty() {
                space.tag = space.tag.max(self.virtual_now);
            }
            if job.queue.is_empty() {
                job.usage.tag = job.usage.tag.max(space.virtual_now);
                job.passed = 0;
            }
            if before != (space.tag, job.usage.tag) {
                self.keep_usage(&uid);
            }
        }
        self.requeue(id);
    }

    /// Puts an evaluation that was taken from its judge back into its job's queue, at the tag that it had.
    pub(super) fn requeue(&mut self, id: u64) {
        let Some((row, lease)) = self.evaluations.get_mut(&id) else { return };
        row.state = EvaluationState::Queued;
        *lease = None;
        self.changes.push(Change::Evaluation(row.clone()));
        let uid = row.job.clone();
        self.answer_state(id, EvaluationState::Queued);
        let Some(job) = self.jobs.get_mut(&uid) else { return };
        if job.queue.insert(id) {
            self.queued += 1;
        }
        self.spaces.entry(job.job.namespace.clone()).or_default().waiting.insert(uid);
    }

    /// Takes an evaluation out of its job's queue.
    pub(super) fn dequeue(&mut self, uid: &str, id: u64) {
        let Some(job) = self.jobs.get_mut(uid) else { return };
        if job.queue.remove(&id) {
            self.queued -= 1;
        }
        if job.queue.is_empty()
            && let Some(space) = self.spaces.get_mut(&job.job.namespace)
        {
            space.waiting.remove(uid);
        }
    }

    /// The evaluation that is next, and its job. With a list of warm tasks, one of those within what is fair.
    pub(super) fn pick(&mut self, warm: Option<&[String]>) -> Option<u64> {
        let waiting = self.spaces.values().filter(|s| !s.waiting.is_empty());
        let space = waiting.min_by(|a, b| a.tag.total_cmp(&b.tag))?;
        let tag = |uid: &String| self.jobs.get(uid).map_or(f64::INFINITY, |j| j.usage.tag);
        let first = space.waiting.iter().min_by(|a, b| tag(a).total_cmp(&tag(b)))?.clone();
        let job = self.jobs.get(&first)?;
        let head = *job.queue.first()?;
        let mut chosen = head;
        if let Some(warm) = warm.filter(|w| !w.is_empty() && job.passed < MOST_PASSED) {
            let limit = job.usage.tag + 2.0 * self.estimates.iter().copied().fold(0.0, f64::max);
            let others = space.waiting.iter().filter(|uid| **uid != first && tag(uid) <= limit);
            let in_order = std::iter::once(&first).chain(others);
            chosen = in_order.filter_map(|uid| self.warm_one(self.jobs.get(uid)?, warm)).next().unwrap_or(head);
        }
        let job = self.jobs.get_mut(&first)?;
        job.passed = if chosen == head { 0 } else { job.passed + 1 };
        Some(chosen)
    }

    fn warm_one(&self, job: &JobEntry, warm: &[String]) -> Option<u64> {
        let is_warm = |id: &&u64| {
            let task = self.evaluations.get(id).and_then(|(row, _)| job.job.tasks.get(row.task));
            task.is_some_and(|t| warm.contains(&t.source))
        };
        job.queue.iter().take(LOOK).find(is_warm).copied()
    }

    /// What an evaluation will cost, as far as one can tell.
    pub(super) fn estimate(&self, op: Op) -> Seconds {
        self.estimates.get(op as usize).copied().unwrap_or(1.0)
    }

    pub(super) fn learn(&mut self, op: Op, cost: Seconds) {
        if let Some(estimate) = self.estimates.get_mut(op as usize) {
            *estimate += NEWEST * (cost - *estimate);
        }
    }

    /// Charges a job at a grant.
    pub(super) fn charge(&mut self, uid: &str, estimate: Seconds) {
        let Some(job) = self.jobs.get_mut(uid) else { return };
        let weight = self.settings.weight(&job.job.namespace);
        let space = self.spaces.entry(job.job.namespace.clone()).or_default();
        if self.virtual_now < space.tag {
            self.virtual_now = space.tag;
            self.changes.push(Change::VirtualNow(space.tag));
        }
        space.virtual_now = space.virtual_now.max(job.usage.tag);
        space.tag += estimate / weight;
        job.usage.tag += estimate;
    }

    /// Corrects what was charged, by seconds.
    pub(super) fn correct(&mut self, uid: &str, by: Seconds) {
        let Some(job) = self.jobs.get_mut(uid) else { return };
        let weight = self.settings.weight(&job.job.namespace);
        let space = self.spaces.entry(job.job.namespace.clone()).or_default();
        space.tag += by / weight;
        job.usage.tag += by;
    }

    /// How many evaluations of a job wait.
    #[must_use]
    pub fn waiting(&self, uid: &str) -> usize {
        self.jobs.get(uid).map_or(0, |j| j.queue.len())
    }
}
