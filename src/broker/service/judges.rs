//! The service for judges: they register, pull, renew and answer; nothing is sent to them unasked.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::{Code, Request, Response, Status};

use super::agents::{candidate, wait};
use super::identify::Caller;
use super::{Broker, Guard, Waiting, Work, denied, status};
use crate::broker::core::kept::{EvaluationState, Judged, Op, Registration};
use crate::broker::core::tally::Tally;
use crate::broker::core::{Completion, Refused};
use crate::broker::facts;
use crate::wire::v1::evaluate_reply::State;
use crate::wire::v1::judges_server::Judges;
use crate::wire::v1::{
    AcquireReply, AcquireRequest, CompleteReply, CompleteRequest, Lease, Op as WireOp, PullReply, PullRequest,
    RegisterReply, RegisterRequest, ReleaseReply, ReleaseRequest, RenewReply, RenewRequest,
};

/// Longest answer.
const MOST_ANSWER: usize = 32 << 20;
/// Longest text of another field.
const MOST_TEXT: usize = 1 << 20;

/// The service, with the broker that it is a face of.
#[derive(Clone, Debug)]
pub(super) struct JudgeService(pub(super) Arc<Broker>);

impl JudgeService {
    /// Judges are pods of a StatefulSet, of which at most one of a name runs: a pod that replaces another takes its place at
    /// once, and what the older one had leased is free.
    fn judge<T>(request: &Request<T>) -> Result<String, Status> {
        match Broker::caller(request)? {
            Caller::Judge { pod, .. } => Ok(pod),
            other => Err(denied(&other, "judges")),
        }
    }

    /// What a judge needs to know of its lease.
    async fn lease(&self, work: Work) -> Result<Lease, Status> {
        let broker = &self.0;
        let mut candidates = Vec::new();
        for digest in &work.evaluation.candidates {
            candidates.push(candidate(&broker.content(digest).await?)?);
        }
        let op = match work.evaluation.op {
            Op::Check => WireOp::Check,
            Op::Trace => WireOp::Trace,
            Op::Reference => WireOp::Reference,
            Op::Counters => WireOp::Counters,
            Op::Compile => WireOp::Compile,
            Op::Verify => WireOp::Verify,
            Op::Screen => WireOp::Screen,
            Op::Final => WireOp::Final,
        };
        let exclusive_seconds = broker.lock().core.settings().exclusive_seconds;
        Ok(Lease {
            id: work.lease.id,
            seconds: work.lease.seconds,
            exclusive_seconds,
            op: op.into(),
            task_name: work.task.name,
            task_source: broker.text(&work.task.source).await?,
            task_digest: work.task.source,
            judge_json: work.judge,
            candidates,
            waited: work.waited,
        })
    }
}

#[tonic::async_trait]
impl Judges for JudgeService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<RegisterReply>, Status> {
        let pod = Self::judge(&request)?;
        let RegisterRequest {
            device,
            card,
            arch,
            properties_json,
            hardware,
            versions_json,
            procedure,
            slots,
            instance,
            started,
        } = request.into_inner();
        if !["cpu", "cuda"].contains(&device.as_str()) {
            return Err(Status::invalid_argument(format!("device: {device:?} is neither cpu nor cuda")));
        }
        if card.is_empty() {
            return Err(Status::invalid_argument("card: say the card's UUID, or the node's name for a CPU"));
        }
        let texts = [&card, &arch, &properties_json, &hardware, &versions_json, &procedure, &instance];
        if texts.iter().any(|t| t.len() > MOST_TEXT) {
            return Err(Status::invalid_argument(format!("a field is longer than {MOST_TEXT} bytes")));
        }
        let registration = Registration {
            device,
            card,
            arch,
            properties: properties_json,
            hardware,
            versions: versions_json,
            procedure,
            slots,
        };
        let renew_seconds = self.0.lock().core.settings().renew_seconds;
        let session =
            self.0.call(vec![], |core, now| core.register(&pod, (&instance, started), registration, now)).await?;
        Ok(Response::new(RegisterReply { session, renew_seconds }))
    }

    async fn pull(&self, request: Request<PullRequest>) -> Result<Response<PullReply>, Status> {
        let pod = Self::judge(&request)?;
        let PullRequest { session, wait_seconds, mut warm, mut unhealthy } = request.into_inner();
        warm.truncate(64);
        unhealthy.truncate(unhealthy.floor_char_boundary(4096));
        let broker = &self.0;
        let until = Instant::now() + wait(wait_seconds);
        let (sender, mut receiver) = oneshot::channel();
        let arrived = broker.now();
        let (ticket, pulled, batch) = broker.wait_for(Waiting::Pull(sender, arrived), |core, ticket, now| {
            core.pull((&pod, session), ticket, warm, unhealthy, now)
        });
        let guard = Guard { broker, ticket };
        if let Err(refused) = pulled {
            broker.kept(batch).await?;
            return Err(status(&refused));
        }
        let given = broker.given(ticket, &mut receiver, until).await;
        let Some((batch, work)) = given else { return Ok(Response::new(PullReply { lease: None })) };
        // Over: the session ended while it waited. The next call says so.
        let Some(work) = work else { return Ok(Response::new(PullReply { lease: None })) };
        broker.kept(batch).await?;
        let id = work.lease.id;
        let lease = match self.lease(*work).await {
            Err(lost) if lost.code() == Code::DataLoss => {
                tracing::error!(lease = id, "an evaluation is given up: {}", lost.message());
                let ((), batch) = broker.step(vec![], |core, now| core.fail(id, lost.message().to_owned(), now));
                broker.kept(batch).await?;
                None
            }
            lease => Some(lease?),
        };
        guard.delivered();
        Ok(Response::new(PullReply { lease }))
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<RenewReply>, Status> {
        let pod = Self::judge(&request)?;
        let RenewRequest { session, leases } = request.into_inner();
        let over = self.0.call(vec![], |core, now| core.renew((&pod, session), &leases, now)).await?;
        Ok(Response::new(RenewReply { over }))
    }

    async fn acquire(&self, request: Request<AcquireRequest>) -> Result<Response<AcquireReply>, Status> {
        let pod = Self::judge(&request)?;
        let AcquireRequest { session, lease, wait_seconds, number } = request.into_inner();
        let broker = &self.0;
        let none = AcquireReply { granted: false, seconds: 0.0, waited: 0.0, slice: 0 };
        if lease == 0 {
            let granted = broker.call(vec![], |core, now| core.withdraw((&pod, session), number, now)).await?;
            return Ok(Response::new(AcquireReply { granted, ..none }));
        }
        let until = Instant::now() + wait(wait_seconds);
        let (sender, mut receiver) = oneshot::channel();
        let (ticket, asked, batch) = broker.wait_for(Waiting::Acquire(sender), |core, ticket, now| {
            core.acquire((&pod, session), (lease, number), ticket, now)
        });
        let guard = Guard { broker, ticket };
        if let Err(refused) = asked {
            broker.kept(batch).await?;
            return Err(status(&refused));
        }
        let given = broker.given(ticket, &mut receiver, until).await;
        let Some((batch, granted)) = given else { return Ok(Response::new(none)) };
        let Some(granted) = granted else {
            // Taken over by a later asking, or the lease is over.
            let live = broker.lock().core.leased(lease).is_some();
            return if live { Ok(Response::new(none)) } else { Err(status(&Refused::LeaseOver(lease))) };
        };
        broker.kept(batch).await?;
        guard.delivered();
        Ok(Response::new(AcquireReply {
            granted: true,
            seconds: granted.seconds,
            waited: granted.waited,
            slice: granted.slice,
        }))
    }

    async fn release(&self, request: Request<ReleaseRequest>) -> Result<Response<ReleaseReply>, Status> {
        let pod = Self::judge(&request)?;
        let ReleaseRequest { session, lease, slice } = request.into_inner();
        self.0.call(vec![], |core, now| core.release((&pod, session), lease, slice, now)).await?;
        Ok(Response::new(ReleaseReply {}))
    }

    async fn complete(&self, request: Request<CompleteRequest>) -> Result<Response<CompleteReply>, Status> {
        let pod = Self::judge(&request)?;
        let request = request.into_inner();
        let (session, lease) = (request.session, request.lease);
        let state = match request.state() {
            State::Done => EvaluationState::Done,
            State::Refused => EvaluationState::Refused,
            State::Fault => EvaluationState::Fault,
            State::Unspecified | State::Pending => {
                return Err(Status::invalid_argument("state: a lease ends as done, refused or fault"));
            }
        };
        let CompleteRequest { answer_json, mut message, phases, .. } = request;
        message.truncate(message.floor_char_boundary(65_536));
        let broker = &self.0;
        let phase = |name: &String| name.len() <= 32 && name.chars().all(|c| c.is_ascii_lowercase() || c == '_');
        let phases = phases.into_iter().filter(|(n, s)| phase(n) && s.is_finite() && *s >= 0.0).take(32).collect();
        let completion = match broker.understood(lease, state, &answer_json) {
            Ok((tally, judged)) => Completion { state, answer: answer_json, message, judged, tally, phases },
            // Another judge of the same build would say the same, so nobody is asked again.
            Err(why) => {
                tracing::error!(lease, "a judge's answer can't be read: {why}");
                Completion { phases, ..Completion::fault(format!("the judge's answer can't be read: {why}")) }
            }
        };
        broker.call(vec![], |core, now| core.complete((&pod, session), lease, completion, now)).await?;
        Ok(Response::new(CompleteReply {}))
    }
}

impl Broker {
    /// What a judge's answer counts, and its best verdict. A lease that is over gets no answer, whatever is in it.
    fn understood(&self, lease: u64, said: EvaluationState, answer: &str) -> Result<(Tally, Option<Judged>), String> {
        if answer.len() > MOST_ANSWER {
            return Err(format!("it has {} bytes; at most {MOST_ANSWER} are allowed", answer.len()));
        }
        let known = {
            let state = self.lock();
            let known = state.core.leased(lease).filter(|_| said == EvaluationState::Done);
            known.map(|(row, e)| (minimum(state.core.job(&row.job)), e.op, e.candidates.clone()))
        };
        match known {
            Some((minimum, op, candidates)) => facts::answer(op, answer, &candidates, minimum.as_deref()),
            None => Ok((Tally::default(), None)),
        }
    }
}

fn minimum(job: Option<&crate::broker::core::kept::Job>) -> Option<String> {
    let spec: serde_json::Value = serde_json::from_str(&job?.spec).ok()?;
    spec["judge"]["minimumGrade"].as_str().map(str::to_owned)
}
