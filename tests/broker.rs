//! A real broker over TLS, with stub judges and agents as its clients.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/broker.rs"]
mod common;

use common::{Broker, candidate, job, registration, verdict};
use kernelfleet::wire::v1::evaluate_reply::State;
use kernelfleet::wire::v1::{
    AcquireRequest, AppendRequest, BeginRequest, CompleteRequest, EvaluateRequest, FinishRequest, GetJobRequest,
    GetPoolRequest, GetResultRequest, Op, PullRequest, ReleaseRequest,
};
use serde_json::json;
use tonic::{Code, Status};

fn reason(status: &Status) -> &str {
    status.metadata().get("kernelfleet-reason").map_or("", |v| v.to_str().unwrap())
}

fn evaluate(key: &str, op: Op, text: &str, wait_seconds: f64) -> EvaluateRequest {
    EvaluateRequest { key: key.into(), op: op.into(), candidates: vec![candidate(text)], wait_seconds }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_episode_goes_from_its_first_call_to_its_result() {
    let mut broker = Broker::start(&[]);
    broker.ready().await;
    let mut operator = broker.operator();
    operator.put_job(tokio_stream::iter(job("j", 2, 2))).await.unwrap();
    let mut agent = broker.agent("j", 3, "pod-3");
    // Nobody knows yet what the pool's judges are.
    let early = agent.begin(BeginRequest {}).await.unwrap_err();
    assert_eq!((early.code(), reason(&early)), (Code::Unavailable, "no_judge"));
    let mut judge = broker.judge("judge");
    let session = judge.register(registration("card", 2)).await.unwrap().into_inner().session;
    // The same process again is the same session.
    assert_eq!(judge.register(registration("card", 2)).await.unwrap().into_inner().session, session);
    let episode = agent.begin(BeginRequest {}).await.unwrap().into_inner();
    assert_eq!((episode.task_name.as_str(), episode.attempt, episode.generation), ("t1", 1, 1));
    assert_eq!((episode.task_source.as_str(), episode.device.as_str(), episode.lines), ("# task 1", "cpu", 0));

    let asking = tokio::spawn({
        let mut agent = agent.clone();
        async move { agent.evaluate(evaluate("final", Op::Final, "x = 1", 30.0)).await.unwrap().into_inner() }
    });
    let pulled = judge.pull(PullRequest { session, wait_seconds: 30.0, ..PullRequest::default() }).await.unwrap();
    let lease = pulled.into_inner().lease.unwrap();
    assert_eq!((lease.op(), lease.task_source.as_str()), (Op::Final, "# task 1"));
    assert_eq!(lease.candidates, [candidate("x = 1")]);
    assert_eq!(lease.judge_json, r#"{"inputs":3}"#);
    let acquire = AcquireRequest { session, lease: lease.id, wait_seconds: 5.0, number: 1 };
    let slice = judge.acquire(acquire).await.unwrap().into_inner();
    assert!(slice.granted && slice.seconds > 0.0 && slice.slice > 0);
    judge.release(ReleaseRequest { session, lease: lease.id, slice: slice.slice }).await.unwrap();
    let complete = CompleteRequest {
        session,
        lease: lease.id,
        state: State::Done.into(),
        answer_json: json!([verdict(2, 1.5)]).to_string(),
        phases: [("build".to_owned(), 0.5)].into(),
        ..CompleteRequest::default()
    };
    judge.complete(complete.clone()).await.unwrap();
    judge.complete(complete).await.unwrap();
    let answer = asking.await.unwrap();
    assert_eq!((answer.state(), answer.answer_json), (State::Done, json!([verdict(2, 1.5)]).to_string()));
    // The same key again is the same evaluation; another question under it is refused.
    assert_eq!(
        agent.evaluate(evaluate("final", Op::Final, "x = 1", 0.0)).await.unwrap().into_inner().state(),
        State::Done
    );
    let other = agent.evaluate(evaluate("final", Op::Final, "x = 2", 0.0)).await.unwrap_err();
    assert_eq!(other.code(), Code::InvalidArgument);

    let line = json!({"at": 1.0, "kind": "turn", "turn": 1, "content": "", "calls": [], "finish": "stop",
        "usage": {"prompt": 10, "completion": 4}})
    .to_string();
    let append = AppendRequest { first: 0, lines: vec![line.clone(), line.clone()] };
    assert_eq!(agent.append(append.clone()).await.unwrap().into_inner().lines, 2);
    assert_eq!(agent.append(append).await.unwrap().into_inner().lines, 2);
    let gap = agent.append(AppendRequest { first: 5, lines: vec![line.clone()] }).await.unwrap_err();
    assert_eq!(reason(&gap), "gap");
    let outcome = json!({"task": "t1", "state": "judged", "attempts": 1, "seconds": 2.0}).to_string();
    let finish = FinishRequest { outcome_json: outcome };
    assert_eq!(agent.finish(finish.clone()).await.unwrap().into_inner().reward, 2);
    assert_eq!(agent.finish(finish).await.unwrap().into_inner().reward, 2);
    let again = agent.begin(BeginRequest {}).await.unwrap_err();
    assert_eq!((again.code(), reason(&again)), (Code::FailedPrecondition, "finished"));

    let facts = operator.get_job(GetJobRequest { uid: "j".into() }).await.unwrap().into_inner();
    assert!(facts.known && !facts.closed);
    assert_eq!((facts.tasks, facts.episodes, facts.succeeded, facts.running), (2, 4, 1, 0));
    assert_eq!((facts.turns, facts.tokens_read, facts.tokens_written), (2, 20, 8));
    assert_eq!((facts.correct, facts.faster_eager, facts.best.len()), (1, 1, 1));
    assert!(facts.slice_seconds > 0.0);
    let result =
        operator.get_result(GetResultRequest { uid: "j".into(), task: "t1".into() }).await.unwrap().into_inner();
    assert_eq!(result.candidate, Some(candidate("x = 1")));
    assert_eq!(serde_json::from_str::<serde_json::Value>(&result.verdict_json).unwrap(), verdict(2, 1.5));
    let pool = operator.get_pool(GetPoolRequest {}).await.unwrap().into_inner();
    assert_eq!((pool.judges, pool.queued, pool.leased), (1, 0, 0));
    // The trajectory and the result have become objects.
    let objects = broker.folder.path().join("objects");
    let trajectory = objects.join("trajectories/j/3/1/00000000.jsonl");
    for _ in 0..200 {
        if trajectory.exists() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
    assert_eq!(std::fs::read_to_string(trajectory).unwrap(), format!("{line}\n{line}\n"));
    let result: serde_json::Value =
        serde_json::from_slice(&std::fs::read(objects.join("results/j/3/1.json")).unwrap()).unwrap();
    assert_eq!((&result["task"], &result["files"]["model_new.py"]), (&json!("t1"), &json!("x = 1")));
    assert_eq!(broker.stop(), Some(0));
}
