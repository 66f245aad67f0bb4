//! A real broker over TLS, with stub judges and agents as its clients.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/broker.rs"]
mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Broker, candidate, evaluate, files, job, registration, until, verdict, whole_episode};
use kernelfleet::wire::v1::evaluate_reply::State;
use kernelfleet::wire::v1::{
    AcquireRequest, AppendRequest, BeginRequest, CloseJobRequest, CompleteRequest, EvaluateRequest, FinishRequest,
    GetJobRequest, GetPoolRequest, GetResultRequest, Op, PullRequest, RegisterRequest, ReleaseRequest, RenewRequest,
};
use serde_json::{Value, json};
use tonic::{Code, Request, Status};

fn reason(status: &Status) -> &str {
    status.metadata().get("kernelfleet-reason").map_or("", |v| v.to_str().unwrap())
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

#[tokio::test(flavor = "multi_thread")]
async fn whose_call_it_isnt_is_refused() {
    let broker = Broker::start(&[]);
    broker.ready().await;
    let (mut operator, mut judge) = (broker.operator(), broker.judge("judge"));
    operator.put_job(tokio_stream::iter(job("j", 1, 2))).await.unwrap();
    let session = judge.register(registration("card", 1)).await.unwrap().into_inner().session;
    // No token, an unknown one.
    let mut nobody = kernelfleet::wire::v1::control_client::ControlClient::new(broker.channel());
    let refused = nobody.get_pool(GetPoolRequest {}).await.unwrap_err();
    assert!(refused.code() == Code::Unauthenticated && refused.message().contains("there is no token"), "{refused}");
    let mut request = Request::new(GetPoolRequest {});
    request.metadata_mut().insert("authorization", "Bearer stranger".parse().unwrap());
    assert_eq!(nobody.get_pool(request).await.unwrap_err().code(), Code::Unauthenticated);
    // Each role has its own calls.
    let denied = |status: Status| {
        assert_eq!(status.code(), Code::PermissionDenied);
        status.message().to_owned()
    };
    let token = broker.agent_token("j", 0, "pod-0");
    let bearer = |token: &str| common::Bearer(token.to_owned());
    let control = |token: &str| {
        kernelfleet::wire::v1::control_client::ControlClient::with_interceptor(broker.channel(), bearer(token))
    };
    let judges = |token: &str| {
        kernelfleet::wire::v1::judges_client::JudgesClient::with_interceptor(broker.channel(), bearer(token))
    };
    let episodes = |token: &str| {
        kernelfleet::wire::v1::episodes_client::EpisodesClient::with_interceptor(broker.channel(), bearer(token))
    };
    let get = || GetJobRequest { uid: "j".into() };
    assert!(denied(control(&token).get_job(get()).await.unwrap_err()).contains("agent ns/pod-0"));
    denied(control("judge").get_job(get()).await.unwrap_err());
    denied(control(&token).put_job(tokio_stream::iter(job("k", 1, 1))).await.unwrap_err());
    denied(control(&token).close_job(CloseJobRequest { uid: "j".into(), keep: false }).await.unwrap_err());
    let result = GetResultRequest { uid: "j".into(), task: "t0".into() };
    denied(control(&token).get_result(result).await.unwrap_err());
    let pull = || PullRequest { session, ..PullRequest::default() };
    assert!(denied(judges(&token).pull(pull()).await.unwrap_err()).contains("for judges alone"));
    denied(judges("operator").register(RegisterRequest::default()).await.unwrap_err());
    denied(judges(&token).renew(RenewRequest { session, leases: vec![] }).await.unwrap_err());
    denied(judges(&token).acquire(AcquireRequest { session, ..AcquireRequest::default() }).await.unwrap_err());
    denied(judges(&token).release(ReleaseRequest { session, ..ReleaseRequest::default() }).await.unwrap_err());
    denied(judges(&token).complete(CompleteRequest { session, ..CompleteRequest::default() }).await.unwrap_err());
    denied(episodes("operator").begin(BeginRequest {}).await.unwrap_err());
    denied(episodes("judge").evaluate(evaluate("k", Op::Verify, "x", 0.0)).await.unwrap_err());
    denied(episodes("judge").append(AppendRequest::default()).await.unwrap_err());
    denied(episodes("judge").finish(FinishRequest::default()).await.unwrap_err());
    // A judge that speaks in another's session, an agent that asks for another's evaluation or for a job of its neighbours.
    let mut other = broker.judge("other");
    let aborted = other.pull(pull()).await.unwrap_err();
    assert_eq!((aborted.code(), reason(&aborted)), (Code::Aborted, "session"));
    let mut mine = episodes(&token);
    mine.begin(BeginRequest {}).await.unwrap();
    mine.evaluate(evaluate("k", Op::Verify, "x", 0.0)).await.unwrap();
    let mut neighbour = broker.agent("j", 1, "pod-1");
    let early = neighbour.evaluate(evaluate("k", Op::Verify, "x", 0.0)).await.unwrap_err();
    assert_eq!(reason(&early), "not_begun");
    neighbour.begin(BeginRequest {}).await.unwrap();
    let ask = EvaluateRequest { key: "k".into(), ..EvaluateRequest::default() };
    assert_eq!(neighbour.evaluate(ask).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(broker.agent("other-job", 0, "pod-x").begin(BeginRequest {}).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(broker.agent("j", 2, "pod-y").begin(BeginRequest {}).await.unwrap_err().code(), Code::OutOfRange);
    let mut parts = job("foreign", 1, 1);
    if let Some(kernelfleet::wire::v1::put_job_request::Part::Head(head)) = &mut parts[0].part {
        head.namespace = "elsewhere".into();
    }
    operator.put_job(tokio_stream::iter(parts)).await.unwrap();
    let foreign = broker.agent("foreign", 0, "pod-z").begin(BeginRequest {}).await.unwrap_err();
    assert_eq!(foreign.code(), Code::NotFound);
}

async fn scrape(broker: &Broker) -> String {
    let url = format!("http://127.0.0.1:{}/metrics", broker.metrics);
    let bytes = reqwest::get(url).await.unwrap().bytes().await.unwrap();
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_pod_voids_the_older_one_and_a_closed_job_ends_its_work() {
    let broker = Broker::start(&["--renew-seconds", "0.5"]);
    broker.ready().await;
    let (mut operator, mut judge) = (broker.operator(), broker.judge("judge"));
    operator.put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    let session = judge.register(registration("card", 1)).await.unwrap().into_inner().session;
    let (mut old, mut new) = (broker.agent("j", 0, "old"), broker.agent("j", 0, "new"));
    assert_eq!(old.begin(BeginRequest {}).await.unwrap().into_inner().generation, 1);
    old.evaluate(evaluate("k", Op::Verify, "x", 0.0)).await.unwrap();
    let pull = || PullRequest { session, wait_seconds: 10.0, ..PullRequest::default() };
    let lease = judge.pull(pull()).await.unwrap().into_inner().lease.unwrap();
    let line = json!({"at": 1.0, "kind": "turn", "turn": 1, "calls": [1], "usage": {"prompt": 1, "completion": 1}});
    old.append(AppendRequest { first: 0, lines: vec![line.to_string()] }).await.unwrap();
    let episode = new.begin(BeginRequest {}).await.unwrap().into_inner();
    assert_eq!((episode.generation, episode.lines), (2, 0));
    for status in [
        old.begin(BeginRequest {}).await.unwrap_err(),
        old.evaluate(evaluate("l", Op::Verify, "x", 0.0)).await.unwrap_err(),
        old.finish(FinishRequest { outcome_json: json!({"state": "judged"}).to_string() }).await.unwrap_err(),
    ] {
        assert_eq!((status.code(), reason(&status)), (Code::FailedPrecondition, "superseded"));
    }
    // Its lease is over; the answer that comes all the same counts nothing.
    let renewed = judge.renew(RenewRequest { session, leases: vec![lease.id] }).await.unwrap().into_inner();
    assert_eq!(renewed.over, [lease.id]);
    let complete = |lease| CompleteRequest {
        session,
        lease,
        state: State::Done.into(),
        answer_json: json!([verdict(3, 3.0)]).to_string(),
        ..CompleteRequest::default()
    };
    judge.complete(complete(lease.id)).await.unwrap();
    let facts = operator.get_job(GetJobRequest { uid: "j".into() }).await.unwrap().into_inner();
    assert_eq!((facts.turns, facts.running, facts.queued), (0, 1, 0));
    // The same key is another evaluation in the new generation.
    new.evaluate(evaluate("k", Op::Verify, "x", 0.0)).await.unwrap();
    let again = judge.pull(pull()).await.unwrap().into_inner().lease.unwrap();
    assert_ne!(again.id, lease.id);
    judge.complete(complete(again.id)).await.unwrap();
    let text = scrape(&broker).await;
    let series =
        |name: &str, labels: &str| format!("kernelfleet_{name}{{namespace=\"ns\",job=\"j\"{labels},pool=\"pool\"}}");
    assert!(text.contains(&format!("{} 1", series("verdicts_total", ",verdict=\"faster_than_compile\""))), "{text}");
    assert!(text.contains(&format!("{} 1", series("episodes", ",state=\"running\""))), "{text}");
    // Suspended: what waits is dropped, nothing new is taken. Put again: it comes back.
    new.evaluate(evaluate("m", Op::Verify, "y", 0.0)).await.unwrap();
    operator.close_job(CloseJobRequest { uid: "j".into(), keep: true }).await.unwrap();
    assert_eq!(reason(&new.evaluate(evaluate("n", Op::Verify, "y", 0.0)).await.unwrap_err()), "closed");
    assert!(operator.get_job(GetJobRequest { uid: "j".into() }).await.unwrap().into_inner().closed);
    operator.put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    new.evaluate(evaluate("n", Op::Verify, "y", 0.0)).await.unwrap();
    assert_eq!(reason(&operator.put_job(tokio_stream::iter(job("j", 2, 1))).await.unwrap_err()), "differs");
    // Closed for good: its series are gone, and it doesn't come back.
    operator.close_job(CloseJobRequest { uid: "j".into(), keep: false }).await.unwrap();
    assert!(!scrape(&broker).await.contains("job=\"j\""));
    operator.put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    assert_eq!(reason(&new.evaluate(evaluate("o", Op::Verify, "y", 0.0)).await.unwrap_err()), "closed");
    // A judge that falls silent is gone.
    for _ in 0..100 {
        if operator.get_pool(GetPoolRequest {}).await.unwrap().into_inner().judges == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("a silent judge stays registered");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_lost_or_cant_be_read_is_a_fault_with_its_reason() {
    let mut broker = Broker::start(&[]);
    broker.ready().await;
    let mut operator = broker.operator();
    operator.put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    let mut judge = broker.judge("judge");
    let session = judge.register(registration("card", 1)).await.unwrap().into_inner().session;
    let mut agent = broker.agent("j", 0, "pod");
    agent.begin(BeginRequest {}).await.unwrap();
    let pull = |wait_seconds| PullRequest { session, wait_seconds, ..PullRequest::default() };
    let ask = |key: &str| EvaluateRequest { key: key.into(), wait_seconds: 10.0, ..EvaluateRequest::default() };
    // A judge's answer that is none.
    agent.evaluate(evaluate("unread", Op::Verify, "x", 0.0)).await.unwrap();
    let lease = judge.pull(pull(10.0)).await.unwrap().into_inner().lease.unwrap().id;
    let answer_json = json!([verdict(1, 1.0), verdict(1, 1.0)]).to_string();
    let state = State::Done.into();
    judge.complete(CompleteRequest { session, lease, state, answer_json, ..CompleteRequest::default() }).await.unwrap();
    let reply = agent.evaluate(ask("unread")).await.unwrap().into_inner();
    assert_eq!(reply.state(), State::Fault);
    assert!(reply.message.contains("2 verdicts for 1 candidates"), "{reply:?}");
    // A candidate that lay in the store, and doesn't any more.
    agent.evaluate(evaluate("lost", Op::Verify, &"y".repeat(100_000), 0.0)).await.unwrap();
    let objects = broker.folder.path().join("objects");
    let blobs = files(&objects).into_iter().filter(|f| f.metadata().unwrap().len() > 90_000);
    blobs.for_each(|blob| std::fs::remove_file(blob).unwrap());
    // What it remembers goes with it.
    broker.kill_and_start();
    broker.ready().await;
    assert!(judge.pull(pull(2.0)).await.unwrap().into_inner().lease.is_none());
    let reply = agent.evaluate(ask("lost")).await.unwrap().into_inner();
    assert_eq!(reply.state(), State::Fault);
    assert!(reply.message.contains("isn't kept any more"), "{reply:?}");
    // An answer that isn't there.
    let ledger = rusqlite::Connection::open(broker.ledger()).unwrap();
    ledger.execute("UPDATE evaluations SET answer = x'ff', message = 5 WHERE key = 'unread'", []).unwrap();
    let reply = agent.evaluate(ask("unread")).await.unwrap().into_inner();
    assert_eq!(reply.state(), State::Fault);
    assert!(reply.message.contains("can't be read"), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_isnt_known_is_refused_before_its_message_is_read_and_what_is_too_much_before_it_is_kept() {
    let broker = Broker::start(&[]);
    broker.ready().await;
    broker.operator().put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    let mut judge = broker.judge("judge");
    judge.register(registration("card", 1)).await.unwrap();
    // A message whose end never comes: it is answered all the same.
    let never = tokio_stream::pending::<kernelfleet::wire::v1::PutJobRequest>();
    let mut stranger = kernelfleet::wire::v1::control_client::ControlClient::with_interceptor(
        broker.channel(),
        common::Bearer("stranger".into()),
    );
    let refused = tokio::time::timeout(Duration::from_secs(20), stranger.put_job(never)).await.unwrap().unwrap_err();
    assert_eq!(refused.code(), Code::Unauthenticated);
    let mut agent = broker.agent("j", 0, "pod");
    agent.begin(BeginRequest {}).await.unwrap();
    let mut many = evaluate("k", Op::Verify, "", 0.0);
    many.candidates = (0..8).map(|n| candidate(&format!("{n}{}", "x".repeat(7 << 20)))).collect();
    let refused = agent.evaluate(many).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::InvalidArgument, "too_large"));
    let kept = files(&broker.folder.path().join("objects"));
    assert!(kept.iter().all(|f| f.metadata().unwrap().len() < 1 << 20), "{kept:?}");
}

// ---- Killed at random points --------------------------------------------------------------------------------------

/// Calls until there is an answer: a broker that is away comes back.
macro_rules! call {
    ($client:expr, $method:ident, $request:expr) => {{
        let request = $request;
        loop {
            let mut client = $client.clone();
            let mut call = Request::new(request.clone());
            call.set_timeout(Duration::from_secs(5));
            match client.$method(call).await {
                Ok(reply) => break Ok(reply.into_inner()),
                Err(status)
                    if matches!(
                        status.code(),
                        Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled | Code::DeadlineExceeded
                    ) =>
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                Err(status) => break Err(status),
            }
        }
    }};
}

/// What a stub judge says of a candidate: its text decides.
fn judged(lease: &kernelfleet::wire::v1::Lease) -> String {
    let of = |c: &kernelfleet::wire::v1::Candidate| {
        let number = c.files["model_new.py"].bytes().map(u64::from).sum::<u64>();
        verdict(i32::try_from(number % 4).unwrap().max(1), 1.0 + f64::from(u32::try_from(number % 7).unwrap()))
    };
    Value::Array(lease.candidates.iter().map(of).collect()).to_string()
}

async fn stub_judge(client: common::Judge, card: String, ended: Arc<AtomicBool>) {
    let mut life = 0;
    while !ended.load(Ordering::Relaxed) {
        life += 1;
        let registration = RegisterRequest { instance: life.to_string(), ..registration(&card, 1) };
        let session = call!(client, register, registration).unwrap().session;
        let mut asked = 0;
        while !ended.load(Ordering::Relaxed) {
            let pull = PullRequest { session, wait_seconds: 0.5, ..PullRequest::default() };
            let Ok(pulled) = call!(client, pull, pull) else { break };
            let Some(lease) = pulled.lease else { continue };
            asked += 1;
            let acquire = AcquireRequest { session, lease: lease.id, wait_seconds: 1.0, number: asked };
            let slice = loop {
                match call!(client, acquire, acquire) {
                    Ok(reply) if reply.granted => break Some(reply.slice),
                    Ok(_) => {}
                    Err(_) => break None,
                }
            };
            tokio::time::sleep(Duration::from_millis(5)).await;
            if let Some(slice) = slice {
                let _ = call!(client, release, ReleaseRequest { session, lease: lease.id, slice });
            }
            let complete = CompleteRequest {
                session,
                lease: lease.id,
                state: State::Done.into(),
                answer_json: judged(&lease),
                ..CompleteRequest::default()
            };
            // Twice, as a network may do it.
            let _ = tokio::join!(async { call!(client, complete, complete.clone()) }, async {
                call!(client, complete, complete.clone())
            });
        }
    }
}

/// Asks until the answer is there.
async fn answer(client: &common::Agent, asked: &EvaluateRequest) -> kernelfleet::wire::v1::EvaluateReply {
    loop {
        let reply = call!(client, evaluate, asked.clone()).unwrap();
        if reply.state() != State::Pending {
            return reply;
        }
    }
}

async fn stub_agent(client: common::Agent) {
    call!(client, begin, BeginRequest {}).unwrap();
    for step in 0..6 {
        let op = if step == 5 { Op::Final } else { Op::Verify };
        let asked = evaluate(&format!("key-{step}"), op, &format!("candidate {step}"), 2.0);
        let (one, two) = tokio::join!(answer(&client, &asked), answer(&client, &asked));
        assert_eq!((one.state(), &one), (State::Done, &two), "{}", one.message);
        let line = json!({"at": f64::from(step), "kind": "turn", "turn": step, "calls": [1],
            "usage": {"prompt": 100 + step, "completion": step}});
        let lines = vec![line.to_string()];
        let append = AppendRequest { first: u64::try_from(step).unwrap(), lines };
        let (one, two) = tokio::join!(async { call!(client, append, append.clone()) }, async {
            call!(client, append, append.clone())
        });
        assert_eq!((one.unwrap().lines, two.unwrap().lines), (append.first + 1, append.first + 1));
    }
    let outcome = json!({"state": "judged", "attempts": 6, "seconds": 1.0}).to_string();
    call!(client, finish, FinishRequest { outcome_json: outcome }).unwrap();
}

/// What a ledger says, times and numbers of slices left out.
fn read_ledger(broker: &Broker) -> BTreeMap<String, String> {
    let ledger = rusqlite::Connection::open(broker.ledger()).unwrap();
    let mut rows = BTreeMap::new();
    let mut read = |sql: &str| {
        let mut statement = ledger.prepare(sql).unwrap();
        let pairs = statement.query_map([], |r| Ok((r.get::<_, String>(0)?, r.get::<_, String>(1)?))).unwrap();
        rows.extend(pairs.map(Result::unwrap));
    };
    read(
        "SELECT 'episode ' || job || '/' || idx || '/' || generation, state || lines || ' ' || turns || ' ' || tokens_read || ' ' \
          || tokens_written || tally || json_extract(judged, '$[1]') || ending FROM episodes",
    );
    read(
        "SELECT 'evaluation ' || job || '/' || idx || '/' || generation || '/' || key, op || state || candidates || answer || message \
          FROM evaluations",
    );
    rows
}

fn check_slices(broker: &Broker) {
    let ledger = rusqlite::Connection::open(broker.ledger()).unwrap();
    let mut statement = ledger.prepare("SELECT card, granted, ended FROM exclusives ORDER BY card, granted").unwrap();
    let slices = statement.query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?))).unwrap();
    let slices: Vec<(String, f64, f64)> = slices.map(Result::unwrap).collect();
    assert!(slices.len() >= 36);
    for pair in slices.windows(2) {
        // A broker's clock begins anew with each start, by the machine's: that is worth a few milliseconds.
        assert!(pair[0].0 != pair[1].0 || pair[0].2 <= pair[1].1 + 0.005, "{pair:?}");
    }
}

async fn run_episodes(kills: u32, seed: u64) -> (BTreeMap<String, String>, String) {
    let mut broker = Broker::start(&["--renew-seconds", "1", "--exclusive-seconds", "2", "--lease-seconds", "20"]);
    broker.ready().await;
    let operator = broker.operator();
    let mut put = operator.clone();
    put.put_job(tokio_stream::iter(job("j", 3, 2))).await.unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    // Two judges of three share a card.
    let judges: Vec<_> = (0..3)
        .map(|n| {
            let client = broker.judge(&format!("judge-{n}"));
            tokio::spawn(stub_judge(client, format!("card-{}", n / 2), Arc::clone(&ended)))
        })
        .collect();
    while operator.clone().get_pool(GetPoolRequest {}).await.unwrap().into_inner().judges < 3 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let agents: Vec<_> = (0..6).map(|n| tokio::spawn(stub_agent(broker.agent("j", n, &format!("pod-{n}"))))).collect();
    let mut dice = seed;
    for _ in 0..kills {
        dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        tokio::time::sleep(Duration::from_millis(20 + (dice >> 33) % 400)).await;
        broker.kill_and_start();
    }
    for agent in agents {
        agent.await.unwrap();
    }
    ended.store(true, Ordering::Relaxed);
    for judge in judges {
        judge.await.unwrap();
    }
    broker.ready().await;
    let text = scrape(&broker).await;
    let metrics = text.lines().filter(|l| l.starts_with("kernelfleet_") && !l.starts_with("kernelfleet_gpu"));
    let metrics = metrics.collect::<Vec<_>>().join("\n");
    assert_eq!(broker.stop(), Some(0));
    check_slices(&broker);
    (read_ledger(&broker), metrics)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_killed_again_and_again_comes_to_the_ledger_of_one_that_isnt() {
    let (whole, whole_metrics) = run_episodes(0, 0).await;
    assert_eq!(whole.len(), 6 + 36);
    let (killed, killed_metrics) = run_episodes(20, 7).await;
    for (key, row) in &whole {
        assert_eq!(Some(row), killed.get(key), "{key}");
    }
    assert_eq!(whole.len(), killed.len());
    assert_eq!(whole_metrics, killed_metrics);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_that_was_closed_is_forgotten_with_all_that_it_alone_named() {
    let mut broker = Broker::start(&["--retention-seconds", "1"]);
    broker.ready().await;
    let mut operator = broker.operator();
    let session = broker.judge("judge").register(registration("card", 1)).await.unwrap().into_inner().session;
    let (shared, own) = ("x".repeat(100_000), "y".repeat(100_000));
    // The tasks' sources are the same in all of them; two candidates are too large for the ledger.
    for (uid, text) in [("one", &shared), ("two", &shared), ("own", &own)] {
        operator.put_job(tokio_stream::iter(job(uid, 1, 1))).await.unwrap();
        whole_episode(&broker, session, uid, text).await;
    }
    let objects = broker.folder.path().join("objects");
    until("trajectories are objects", async || files(&objects.join("trajectories")).len() == 3).await;
    assert_eq!((files(&objects.join("blobs")).len(), files(&objects.join("results")).len()), (2, 3));
    let close = |uid: &str, keep| CloseJobRequest { uid: uid.into(), keep };
    // One that may come back isn't forgotten.
    operator.close_job(close("two", true)).await.unwrap();
    operator.close_job(close("one", false)).await.unwrap();
    operator.close_job(close("own", false)).await.unwrap();
    broker.kill_and_start();
    broker.ready().await;
    until("only one job is left", async || {
        let mut operator = broker.operator();
        let mut known = Vec::new();
        for uid in ["one", "two", "own"] {
            known.push(operator.get_job(GetJobRequest { uid: uid.into() }).await.unwrap().into_inner().known);
        }
        known == [false, true, false] && files(&objects).len() == 3
    })
    .await;
    assert!(objects.join("results/two/0/1.json").exists());
    // A copy of what is left is a ledger, and never takes a file's place.
    let copy = broker.folder.path().join("copy.db");
    let copied = |to: &std::path::Path| {
        let program = env!("CARGO_BIN_EXE_kernelfleet");
        let mut command = std::process::Command::new(program);
        command.args(["ledger-copy", "--ledger"]).arg(broker.ledger()).arg("--to").arg(to).output().unwrap()
    };
    assert!(copied(&copy).status.success());
    let again = copied(&copy);
    assert!(!again.status.success() && String::from_utf8_lossy(&again.stderr).contains("already exists"), "{again:?}");
    let opened = rusqlite::Connection::open(&copy).unwrap();
    assert_eq!(opened.query_row("SELECT uid FROM jobs", [], |r| r.get::<_, String>(0)).unwrap(), "two");
    let mut operator = broker.operator();
    let ask = GetResultRequest { uid: "two".into(), task: "t0".into() };
    let result = operator.get_result(ask).await.unwrap().into_inner();
    assert_eq!((result.candidate, result.task_source.as_str()), (Some(candidate(&shared)), "# task 0"));
    let ledger = rusqlite::Connection::open(broker.ledger()).unwrap();
    let count = |sql: &str| ledger.query_row(sql, [], |r| r.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT COUNT(*) FROM evaluations"), 1);
    assert_eq!(count("SELECT COUNT(*) FROM blobs"), 1);
    operator.close_job(close("two", false)).await.unwrap();
    until("nothing is left", async || files(&objects).is_empty()).await;
    let tables =
        ["jobs", "tasks", "usage", "episodes", "evaluations", "leases", "exclusives", "blobs", "lines", "uses"];
    for table in tables.into_iter().chain(["leftovers"]) {
        until(table, async || count(&format!("SELECT COUNT(*) FROM {table}")) == 0).await;
    }
    // The same content again is kept again.
    operator.put_job(tokio_stream::iter(job("next", 1, 1))).await.unwrap();
    let session = broker.judge("judge").register(registration("card", 1)).await.unwrap().into_inner().session;
    whole_episode(&broker, session, "next", &shared).await;
    let ask = GetResultRequest { uid: "next".into(), task: "t0".into() };
    assert_eq!(operator.get_result(ask).await.unwrap().into_inner().candidate, Some(candidate(&shared)));
}
