//! Evaluations a second through a real broker over TLS with stub judges and agents, and how long a free judge is waited for.
//!
//! `cargo bench --bench broker [-- SECONDS [FILE]]`: FILE, such as docs/evidence/broker.json, gets the figures with commit and
//! machine. Clients run in this process, on the same cores as the broker.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../common/broker.rs"]
mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{Broker, candidate, job, registration, verdict};
use kernelfleet::wire::v1::evaluate_reply::State;
use kernelfleet::wire::v1::{BeginRequest, CompleteRequest, EvaluateRequest, Lease, Op, PullRequest};
use serde_json::json;

/// Agents and slots of judges of the first figure.
const AGENTS: u32 = 64;
const JUDGES: u32 = 8;
const SLOTS: u32 = 8;

async fn judge(mut client: common::Judge, card: String, slots: u32, granted: Arc<dyn Fn(&Lease) + Send + Sync>) {
    let session = client.register(registration(&card, slots)).await.unwrap().into_inner().session;
    for _ in 0..slots {
        let (mut client, granted) = (client.clone(), Arc::clone(&granted));
        tokio::spawn(async move {
            loop {
                let pull = PullRequest { session, wait_seconds: 5.0, ..PullRequest::default() };
                // The broker is gone when the figures are there.
                let Ok(pulled) = client.pull(pull).await else { return };
                let Some(lease) = pulled.into_inner().lease else { continue };
                granted(&lease);
                let complete = CompleteRequest {
                    session,
                    lease: lease.id,
                    state: State::Done.into(),
                    answer_json: json!([verdict(2, 1.5)]).to_string(),
                    ..CompleteRequest::default()
                };
                if client.complete(complete).await.is_err() {
                    return;
                }
            }
        });
    }
}

fn evaluate(key: u64, text: String) -> EvaluateRequest {
    let candidates = vec![candidate(&text)];
    EvaluateRequest { key: key.to_string(), op: Op::Verify.into(), candidates, wait_seconds: 30.0 }
}

#[tokio::main]
async fn main() {
    // Cargo adds an option of its own.
    let said: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let seconds = said.first().map_or(10.0, |text| text.parse::<f64>().unwrap());
    let broker = Broker::start(&[]);
    broker.ready().await;
    broker.operator().put_job(tokio_stream::iter(job("j", AGENTS, 1))).await.unwrap();

    // How long until a free judge has it, one at a time: from before the call to the arrival at the judge.
    let began = Instant::now();
    let at = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&at);
    let micros = move || u64::try_from(began.elapsed().as_micros()).unwrap();
    let clock = micros;
    let granted = Arc::new(move |_: &Lease| seen.store(clock(), Ordering::SeqCst));
    judge(broker.judge("alone"), "card".into(), 1, granted).await;
    let mut agent = broker.agent("j", 0, "pod-0");
    agent.begin(BeginRequest {}).await.unwrap();
    let mut waits = Vec::new();
    let (until, mut key) = (Instant::now() + Duration::from_secs_f64(seconds), 0);
    while Instant::now() < until {
        key += 1;
        let asked = micros();
        let reply = agent.evaluate(evaluate(key, format!("# {key}"))).await.unwrap().into_inner();
        assert_eq!(reply.state(), State::Done);
        waits.push(at.load(Ordering::SeqCst) - asked);
        // The judge is free again.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    waits.sort_unstable();
    let share = |p: usize| Duration::from_micros(waits[(waits.len() * p / 100).min(waits.len() - 1)]);
    println!(
        "enqueue to grant, a judge free: median {:?}, 99th percentile {:?} of {}",
        share(50),
        share(99),
        waits.len()
    );

    // How many a second.
    for n in 0..JUDGES {
        judge(broker.judge(&format!("judge-{n}")), format!("card-{n}"), SLOTS, Arc::new(|_: &Lease| ())).await;
    }
    let done = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let mut agents = Vec::new();
    for n in 1..AGENTS {
        let mut agent = broker.agent("j", n, &format!("pod-{n}"));
        agent.begin(BeginRequest {}).await.unwrap();
        let (done, stop) = (Arc::clone(&done), Arc::clone(&stop));
        agents.push(tokio::spawn(async move {
            let mut key = 0;
            while !stop.load(Ordering::Relaxed) {
                key += 1;
                let asked = evaluate(key, format!("# {n} {key}"));
                assert_eq!(agent.evaluate(asked).await.unwrap().into_inner().state(), State::Done);
                done.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (first, start) = (done.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(Duration::from_secs_f64(seconds)).await;
    let (count, elapsed) = (done.load(Ordering::Relaxed) - first, start.elapsed().as_secs_f64());
    stop.store(true, Ordering::Relaxed);
    for agent in agents {
        agent.await.unwrap();
    }
    #[expect(clippy::cast_precision_loss, reason = "a count of seconds' work")]
    let rate = count as f64 / elapsed;
    println!("{rate:.0} evaluations/s with {AGENTS} agents and {JUDGES} judges of {SLOTS} slots");
    if let Some(file) = said.get(1) {
        let result = json!({
            "evaluations_a_second": rate, "agents": AGENTS, "judges": JUDGES, "slots": SLOTS, "seconds": elapsed,
            "grant_us": {"median": share(50).as_micros(), "p99": share(99).as_micros(), "count": waits.len()},
        });
        evidence(file, &result);
    }
}

/// Writes what was measured where and with what; `file` is from the repository's root.
fn evidence(file: &str, result: &serde_json::Value) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let git = std::process::Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root).output().unwrap();
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib: u64 = memory.split_whitespace().nth(1).unwrap().parse().unwrap();
    let evidence = json!({
        "stage": "broker",
        "command": "cargo bench --bench broker -- 10 docs/evidence/broker.json",
        "commit": String::from_utf8(git.stdout).unwrap().trim(),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
        "machine": format!("{} cores, {} GiB", std::thread::available_parallelism().unwrap(), kib >> 20),
        "result": result,
    });
    std::fs::write(root.join(file), serde_json::to_string_pretty(&evidence).unwrap() + "\n").unwrap();
}
