//! The service for the operator: jobs in, facts out.

use std::collections::BTreeSet;
use std::sync::Arc;

use tonic::{Request, Response, Status, Streaming};

use super::agents::candidate;
use super::identify::Caller;
use super::{Broker, denied, status};
use crate::broker::core::kept::{Job, JobState, Task};
use crate::broker::facts;
use crate::broker::ledger::Record;
use crate::wire::v1::control_server::Control;
use crate::wire::v1::put_job_request::Part;
use crate::wire::v1::{
    CloseJobReply, CloseJobRequest, GetJobRequest, GetPoolRequest, GetResultRequest, JobFacts, JobHead, JobTask,
    JudgeFacts, PoolFacts, PutJobReply, PutJobRequest, Result as JobResult,
};

/// Most tasks of a job.
const MOST_TASKS: u32 = 100_000;
/// Longest source of a task.
const MOST_SOURCE: usize = 4 << 20;

/// The service, with the broker that it is a face of.
#[derive(Clone, Debug)]
pub(super) struct Operator(pub(super) Arc<Broker>);

impl Operator {
    fn operator<T>(request: &Request<T>) -> Result<(), Status> {
        match Broker::caller(request)? {
            Caller::Operator => Ok(()),
            other => Err(denied(&other, "the operator")),
        }
    }

    async fn task(&self, task: JobTask, records: &mut Vec<Record>) -> Result<Task, Status> {
        let JobTask { name, source, replay } = task;
        if name.is_empty() || name.len() > 253 {
            return Err(Status::invalid_argument(format!("task.name: {name:?} isn't of 1 to 253 bytes")));
        }
        if source.len() > MOST_SOURCE {
            return Err(Status::invalid_argument(format!(
                "task {name}: its source has {} bytes; at most {MOST_SOURCE} are allowed",
                source.len()
            )));
        }
        let source = self.0.keep(source.into_bytes(), records).await?;
        let replay = if replay.is_empty() { None } else { Some(self.0.keep(replay, records).await?) };
        Ok(Task { name, source, replay })
    }
}

fn check_head(head: JobHead) -> Result<(Job, u32), Status> {
    let JobHead { namespace, name, uid, spec_json, batch_job, tasks } = head;
    for (field, text) in [("namespace", &namespace), ("name", &name), ("uid", &uid)] {
        if text.is_empty() || text.len() > 253 || text.contains(['/', '\\']) || text.contains("..") {
            return Err(Status::invalid_argument(format!("head.{field}: {text:?} isn't a name")));
        }
    }
    let spec: serde_json::Value = serde_json::from_str(&spec_json)
        .map_err(|e| Status::invalid_argument(format!("head.spec_json isn't JSON: {e}")))?;
    let attempts =
        match &spec["agent"]["attempts"] {
            serde_json::Value::Null => 1,
            given => given.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|n| (1..=256).contains(n)).ok_or_else(
                || Status::invalid_argument(format!("head.spec_json: agent.attempts: {given} isn't from 1 to 256")),
            )?,
        };
    if tasks == 0 || tasks > MOST_TASKS {
        return Err(Status::invalid_argument(format!("head.tasks: {tasks} isn't from 1 to {MOST_TASKS}")));
    }
    let state = JobState::Open;
    Ok((Job { uid, namespace, name, spec: spec_json, batch_job, attempts, tasks: Vec::new(), state }, tasks))
}

#[tonic::async_trait]
impl Control for Operator {
    async fn put_job(&self, request: Request<Streaming<PutJobRequest>>) -> Result<Response<PutJobReply>, Status> {
        Self::operator(&request)?;
        let mut parts = request.into_inner();
        let first = parts.message().await?.and_then(|p| p.part);
        let Some(Part::Head(head)) = first else {
            return Err(Status::invalid_argument("the head comes first"));
        };
        let (mut job, tasks) = check_head(head)?;
        let _naming = self.0.naming.read().await;
        let mut records = Vec::new();
        let mut names = BTreeSet::new();
        while let Some(part) = parts.message().await? {
            let Some(Part::Task(task)) = part.part else {
                return Err(Status::invalid_argument("there is one head, and tasks after it"));
            };
            if job.tasks.len() >= tasks as usize {
                return Err(Status::invalid_argument(format!("head.tasks says {tasks}; more have come")));
            }
            if !names.insert(task.name.clone()) {
                return Err(Status::invalid_argument(format!("two tasks are called {:?}", task.name)));
            }
            job.tasks.push(self.task(task, &mut records).await?);
        }
        if job.tasks.len() != tasks as usize {
            return Err(Status::invalid_argument(format!("head.tasks says {tasks}; {} have come", job.tasks.len())));
        }
        self.0.call(records, |core, now| core.put_job(job, now)).await?;
        Ok(Response::new(PutJobReply {}))
    }

    async fn get_job(&self, request: Request<GetJobRequest>) -> Result<Response<JobFacts>, Status> {
        Self::operator(&request)?;
        let uid = request.into_inner().uid;
        let (found, batch) = self.0.step(vec![], |core, _| core.facts(&uid).map(|f| facts::job(&f)));
        self.0.kept(batch).await?;
        Ok(Response::new(found.unwrap_or_default()))
    }

    async fn close_job(&self, request: Request<CloseJobRequest>) -> Result<Response<CloseJobReply>, Status> {
        Self::operator(&request)?;
        let CloseJobRequest { uid, keep } = request.into_inner();
        let ((), batch) = self.0.step(vec![], |core, now| core.close_job(&uid, keep, now));
        self.0.kept(batch).await?;
        Ok(Response::new(CloseJobReply {}))
    }

    async fn get_result(&self, request: Request<GetResultRequest>) -> Result<Response<JobResult>, Status> {
        Self::operator(&request)?;
        let GetResultRequest { uid, task } = request.into_inner();
        let broker = &self.0;
        let (found, batch) = broker.step(vec![], |core, _| {
            core.result(&uid, &task).map(|(job, place, _, evaluation, judged)| {
                (job.tasks.get(place).map(|t| t.source.clone()), evaluation, judged.clone())
            })
        });
        broker.kept(batch).await?;
        let (source, evaluation, judged) = found.map_err(|e| status(&e))?;
        let answer = broker.ledger.answer(evaluation).map_err(|e| Status::unavailable(e.to_string()))?;
        let verdict_json = verdict(&answer.unwrap_or_default().0, judged.place)?;
        let files = broker.content(&judged.candidate).await?;
        Ok(Response::new(JobResult {
            verdict_json,
            candidate: Some(candidate(&files)?),
            task_source: broker.text(&source.unwrap_or_default()).await?,
        }))
    }

    async fn get_pool(&self, request: Request<GetPoolRequest>) -> Result<Response<PoolFacts>, Status> {
        Self::operator(&request)?;
        let (pool, batch) = self.0.step(vec![], |core, now| {
            core.tick(now);
            core.pool(now)
        });
        self.0.kept(batch).await?;
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let device = pool.device.unwrap_or_default();
        Ok(Response::new(PoolFacts {
            judges: count(pool.judges.len()),
            queued: count(pool.queued),
            leased: count(pool.leased),
            busy: pool.busy,
            device: device.device,
            hardware: device.hardware,
            properties_json: device.properties,
            objects_failing: self.0.objects.failing().unwrap_or_default(),
            each: pool
                .judges
                .into_iter()
                .map(|j| JudgeFacts { pod: j.pod, card: j.card, unhealthy: j.unhealthy, sharing: j.sharing })
                .collect(),
        }))
    }
}

/// One verdict of an answer, as it was given.
pub(super) fn verdict(answer: &str, place: usize) -> Result<String, Status> {
    let verdicts: Vec<serde_json::Value> =
        serde_json::from_str(answer).map_err(|e| Status::data_loss(format!("the verdict can't be read: {e}")))?;
    let one = verdicts.get(place).ok_or_else(|| Status::data_loss("the verdict isn't there"))?;
    Ok(one.to_string())
}
