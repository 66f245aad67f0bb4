//! The service for agents: whose pod calls is known by its token; it sees its own episode and nothing else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::identify::{Agent, Caller};
use super::{Broker, denied, status};
use crate::broker::core::kept::{EvaluationState, Op};
use crate::broker::core::tally::Tally;
use crate::broker::core::{Ask, Asked, Pod, Refused, Wants};
use crate::broker::facts;
use crate::broker::ledger::Record;
use crate::broker::objects::digest;
use crate::wire::v1::episodes_server::Episodes;
use crate::wire::v1::evaluate_reply::State;
use crate::wire::v1::{
    AppendReply, AppendRequest, BeginRequest, Candidate, Episode, EvaluateReply, EvaluateRequest, FinishReply,
    FinishRequest, Op as WireOp,
};

/// Most files, and bytes, of a candidate.
const MOST_FILES: usize = 256;
const MOST_BYTES: usize = 8 << 20;
/// Most candidates of one evaluation.
const MOST_CANDIDATES: usize = 64;
/// Longest path in a candidate.
const MOST_PATH: usize = 255;
/// Longest line of a trajectory.
const MOST_LINE: usize = 4 << 20;
/// Longest that a call waits.
const MOST_WAIT: f64 = 60.0;

/// The service, with the broker that it is a face of.
#[derive(Clone, Debug)]
pub(super) struct Agents(pub(super) Arc<Broker>);

impl Agents {
    fn agent<T>(request: &Request<T>) -> Result<(Agent, Pod), Status> {
        match Broker::caller(request)? {
            Caller::Agent(agent) => {
                let pod = Pod { uid: agent.pod_uid.clone(), job: agent.job_uid.clone(), index: agent.index };
                Ok((agent, pod))
            }
            other => Err(denied(&other, "agents")),
        }
    }
}

/// Seconds of a request, bounded.
pub(super) fn wait(seconds: f64) -> Duration {
    Duration::from_secs_f64(if seconds.is_finite() { seconds.clamp(0.0, MOST_WAIT) } else { 0.0 })
}

pub(super) const fn op(op: WireOp) -> Option<Op> {
    match op {
        WireOp::Unspecified => None,
        WireOp::Check => Some(Op::Check),
        WireOp::Trace => Some(Op::Trace),
        WireOp::Reference => Some(Op::Reference),
        WireOp::Counters => Some(Op::Counters),
        WireOp::Compile => Some(Op::Compile),
        WireOp::Verify => Some(Op::Verify),
        WireOp::Screen => Some(Op::Screen),
        WireOp::Final => Some(Op::Final),
    }
}

fn check_key(key: &str) -> Result<(), Status> {
    let well = (1..=64).contains(&key.len()) && key.chars().all(|c| c.is_ascii_graphic());
    if well {
        return Ok(());
    }
    Err(Status::invalid_argument("key: 1 to 64 visible ASCII characters are allowed"))
}

/// The candidate's files as they are kept: their JSON, in the order of their paths.
fn check_candidate(number: usize, candidate: &Candidate) -> Result<Vec<u8>, Status> {
    let refused = |why: String| Err(Status::invalid_argument(format!("candidates[{number}].files: {why}")));
    if candidate.files.is_empty() || candidate.files.len() > MOST_FILES {
        return refused(format!("{} files; 1 to {MOST_FILES} are allowed", candidate.files.len()));
    }
    let mut bytes = 0;
    for (path, text) in &candidate.files {
        bytes += path.len() + text.len();
        let parts = path.split('/').all(|p| !p.is_empty() && p != "." && p != "..");
        if !parts || path.len() > MOST_PATH || path.chars().any(char::is_control) || path.contains('\\') {
            return refused(format!("{path:?} isn't a path inside the candidate's folder"));
        }
    }
    if bytes > MOST_BYTES {
        return refused(format!("{bytes} bytes; at most {MOST_BYTES} are allowed"));
    }
    let sorted: BTreeMap<&String, &String> = candidate.files.iter().collect();
    serde_json::to_vec(&sorted).map_err(|e| Status::internal(e.to_string()))
}

fn check_ask(op: Op, candidates: usize) -> Result<(), Status> {
    let (least, most) = match op {
        Op::Check | Op::Trace | Op::Reference => (0, 0),
        Op::Counters => (0, 1),
        // An episode's score is one candidate's, which follows no other in its process.
        Op::Compile | Op::Final => (1, 1),
        Op::Verify | Op::Screen => (1, MOST_CANDIDATES),
    };
    if (least..=most).contains(&candidates) {
        return Ok(());
    }
    Err(Status::invalid_argument(format!("candidates: {candidates} are given; {} takes {least} to {most}", op.word())))
}

#[tonic::async_trait]
impl Episodes for Agents {
    async fn begin(&self, request: Request<BeginRequest>) -> Result<Response<Episode>, Status> {
        let (agent, pod) = Self::agent(&request)?;
        let broker = &self.0;
        let namespace = agent.namespace.clone();
        let begun = broker
            .call(vec![], |core, now| {
                // A job of another namespace isn't known to this pod.
                if core.job(&pod.job).is_some_and(|j| j.namespace != namespace) {
                    return Err(Refused::UnknownJob(pod.job.clone()));
                }
                core.begin(&pod, now)
            })
            .await?;
        let task = begun.job.tasks.get(begun.task).cloned();
        let task = task.ok_or_else(|| Status::internal("the episode has no task"))?;
        let replay = match &task.replay {
            Some(digest) => broker.content(digest).await?.to_vec(),
            None => Vec::new(),
        };
        Ok(Response::new(Episode {
            job_namespace: begun.job.namespace,
            job_name: begun.job.name,
            job_uid: begun.job.uid,
            index: begun.index,
            attempt: begun.attempt,
            generation: begun.generation,
            task_name: task.name,
            task_source: broker.text(&task.source).await?,
            spec_json: begun.job.spec,
            device: begun.device.device,
            properties_json: begun.device.properties,
            hardware: begun.device.hardware,
            replay,
            lines: begun.lines,
        }))
    }

    async fn evaluate(&self, request: Request<EvaluateRequest>) -> Result<Response<EvaluateReply>, Status> {
        let (_, pod) = Self::agent(&request)?;
        let request = request.into_inner();
        check_key(&request.key)?;
        let broker = &self.0;
        let until = Instant::now() + wait(request.wait_seconds);
        let mut records = Vec::new();
        let naming = broker.naming.read().await;
        let ask = match op(request.op()) {
            None if request.candidates.is_empty() => None,
            None => return Err(Status::invalid_argument("op: candidates are given, but not what to do with them")),
            Some(op) => {
                check_ask(op, request.candidates.len())?;
                let contents = request.candidates.iter().enumerate().map(|(n, c)| check_candidate(n, c));
                let contents = contents.collect::<Result<Vec<_>, Status>>()?;
                Some(broker.ask(&pod, &request.key, op, contents, &mut records).await?)
            }
        };
        let mut asked = broker.call(records, |core, now| core.evaluate(&pod, &request.key, ask, now)).await?;
        drop(naming);
        while asked.state.pending() {
            let (again, notify) = self.stands(&pod, &request.key, asked.id)?;
            asked = again;
            let Some(notify) = notify else { continue };
            let answered = notify.notified();
            tokio::pin!(answered);
            answered.as_mut().enable();
            // It may have been answered between the look and the listening.
            asked = self.stands(&pod, &request.key, asked.id)?.0;
            if !asked.state.pending() {
                break;
            }
            tokio::select! {
                () = &mut answered => {}
                () = tokio::time::sleep_until(until) => break,
                () = broker.stopped() => break,
            }
        }
        self.reply(asked).await.map(Response::new)
    }

    async fn append(&self, request: Request<AppendRequest>) -> Result<Response<AppendReply>, Status> {
        let (_, pod) = Self::agent(&request)?;
        let AppendRequest { first, lines } = request.into_inner();
        let mut counts = Vec::with_capacity(lines.len());
        for (number, line) in lines.iter().enumerate() {
            let refused =
                |why: String| Status::invalid_argument(format!("lines[{number}] isn't a line of a trajectory: {why}"));
            if line.len() > MOST_LINE {
                return Err(refused(format!("{} bytes; at most {MOST_LINE} are allowed", line.len())));
            }
            counts.push(facts::line(line).map_err(refused)?);
        }
        let broker = &self.0;
        let (appended, batch, grown) = broker.append(pod, first, &lines, counts);
        broker.kept(batch).await?;
        if grown {
            broker.grown.notify_one();
        }
        appended.map(|lines| Response::new(AppendReply { lines })).map_err(|e| status(&e))
    }

    async fn finish(&self, request: Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        let (_, pod) = Self::agent(&request)?;
        let (ending, tally) = facts::outcome(&request.into_inner().outcome_json).map_err(Status::invalid_argument)?;
        self.0.put_result(&pod).await?;
        let reward = self.0.call(vec![], |core, now| core.finish(&pod, ending, &tally, now)).await?;
        self.0.grown.notify_one();
        Ok(Response::new(FinishReply { reward }))
    }
}

impl Broker {
    /// What is asked under a key. Its contents are kept if they are new and admitted; nothing of any other is written.
    async fn ask(
        &self,
        pod: &Pod,
        key: &str,
        op: Op,
        contents: Vec<Vec<u8>>,
        records: &mut Vec<Record>,
    ) -> Result<Ask, Status> {
        let bytes = contents.iter().map(|c| c.len() as u64).sum();
        let known = {
            let state = self.lock();
            let known = state.core.knows(pod, key);
            if !known {
                state.core.admit(pod, Wants::evaluation(op, bytes)).map_err(|e| status(&e))?;
            }
            known
        };
        let mut candidates = Vec::new();
        for content in contents {
            candidates.push(if known { digest(&content) } else { self.keep(content, records).await? });
        }
        Ok(Ask { op, candidates, bytes })
    }

    /// Adds lines. They go into the batch of the rows that count them, so the core says first which are new.
    fn append(&self, pod: Pod, first: u64, lines: &[String], counts: Vec<Tally>) -> (Result<u64, Refused>, u64, bool) {
        let mut state = self.lock();
        let now = self.now();
        let sizes = lines.iter().map(|l| l.len() as u64 + 1);
        let counted: Vec<(Tally, u64)> = counts.into_iter().zip(sizes).collect();
        let appended = state.core.append(&pod, first, &counted, now);
        let mut records = Vec::new();
        if let Ok((skipped, kept, generation)) = &appended
            && let Some(fresh) = lines.get(*skipped..).filter(|l| !l.is_empty())
        {
            let text = fresh.iter().flat_map(|l| [l.as_str(), "\n"]).collect();
            let first = kept - fresh.len() as u64;
            records.push(Record::Lines { job: pod.job, index: pod.index, generation: *generation, first, text });
        }
        let grown = !records.is_empty();
        (appended.map(|a| a.1), self.after(&mut state, records, now), grown)
    }
}

impl Agents {
    /// How an evaluation stands, and who tells when it is answered.
    fn stands(&self, pod: &Pod, key: &str, id: u64) -> Result<(Asked, Option<Arc<Notify>>), Status> {
        let mut state = self.0.lock();
        let now = self.0.now();
        let asked = state.core.evaluate(pod, key, None, now);
        self.0.after(&mut state, Vec::new(), now);
        let asked = asked.map_err(|e| status(&e))?;
        let notify = asked.state.pending().then(|| state.answered.entry(id).or_default().clone());
        Ok((asked, notify))
    }

    async fn reply(&self, asked: Asked) -> Result<EvaluateReply, Status> {
        let state = match asked.state {
            EvaluationState::Queued | EvaluationState::Leased => {
                let ahead = u32::try_from(asked.ahead).unwrap_or(u32::MAX);
                return Ok(EvaluateReply { state: State::Pending.into(), ahead, ..EvaluateReply::default() });
            }
            EvaluationState::Done => State::Done,
            EvaluationState::Refused => State::Refused,
            EvaluationState::Fault | EvaluationState::Dropped => State::Fault,
        };
        // What the answer rests on is kept before it goes out.
        self.0.kept(self.0.ledger.submit(vec![])).await?;
        let lost = |why: String| (State::Fault, String::new(), why);
        let (state, answer_json, message) = match self.0.ledger.answer(asked.id) {
            Ok(Some((answer, message))) => (state, answer, message),
            // One that was dropped has none.
            Ok(None) if state == State::Fault => lost(String::new()),
            Ok(None) => lost(format!("the answer of evaluation {} isn't kept any more", asked.id)),
            Err(error) if error.may_pass() => return Err(Status::unavailable(error.to_string())),
            Err(error) => lost(format!("the answer of evaluation {} can't be read: {error}", asked.id)),
        };
        Ok(EvaluateReply { state: state.into(), answer_json, message, ahead: 0 })
    }
}

/// The files of a kept candidate.
pub(super) fn candidate(bytes: &[u8]) -> Result<Candidate, Status> {
    let files =
        serde_json::from_slice(bytes).map_err(|e| Status::data_loss(format!("a candidate can't be read: {e}")))?;
    Ok(Candidate { files })
}

/// The digest that names a candidate.
#[cfg(test)]
fn candidate_digest(candidate: &Candidate) -> String {
    digest(&check_candidate(0, candidate).unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(path: &str) -> Candidate {
        Candidate { files: [(path.to_owned(), "x".to_owned())].into() }
    }

    #[test]
    fn paths_that_leave_the_folder_are_refused_by_name() {
        for path in ["../x", "/x", "a//b", "a/./b", "", "a\nb", "a\\b", &"x".repeat(256)] {
            let why = check_candidate(3, &with(path)).unwrap_err();
            assert!(why.message().starts_with("candidates[3].files: "), "{why}");
        }
        assert!(check_candidate(0, &with("kernels/x.cu")).is_ok());
        assert!(check_candidate(0, &Candidate::default()).unwrap_err().message().contains("0 files; 1 to 256"));
    }

    #[test]
    fn a_candidate_is_named_by_its_files_alone() {
        let two =
            |order: [&str; 2]| Candidate { files: order.into_iter().map(|p| (p.to_owned(), p.to_owned())).collect() };
        assert_eq!(candidate_digest(&two(["a", "b"])), candidate_digest(&two(["b", "a"])));
        assert_ne!(candidate_digest(&with("a")), candidate_digest(&with("b")));
    }

    #[test]
    fn keys_and_counts_of_candidates_are_bounded() {
        assert!(check_key("k-1").is_ok() && check_key("").is_err() && check_key(&"k".repeat(65)).is_err());
        assert!(
            check_ask(Op::Trace, 1).is_err()
                && check_ask(Op::Compile, 2).is_err()
                && check_ask(Op::Final, 0).is_err()
                && check_ask(Op::Final, 2).is_err()
        );
        assert_eq!((wait(-1.0), wait(f64::NAN), wait(1e9)), (Duration::ZERO, Duration::ZERO, Duration::from_secs(60)));
    }
}
