//! Eight agents at once, 200 turns each, against one scripted endpoint: no turn is lost, memory is bounded.
//!
//! `make soak-agents`. The judge is not part of it: no candidate is sent. The endpoint's server lies in this process
//! too, so the memory that is told is more than the agents' own.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/server.rs"]
#[allow(dead_code)]
mod server;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use kernelfleet::agent::author::Endpoint;
use kernelfleet::agent::desk::{Assessor, Compiled, Standing, Unjudged};
use kernelfleet::agent::episode::{Limits, Setting, Socket, play};
use kernelfleet::agent::kit::Brief;
use kernelfleet::agent::rules::End;
use kernelfleet::agent::trajectory::{self, What};
use kernelfleet::gateway::chat::Sampling;
use kernelfleet::gateway::{Gateway, Settings};
use kernelfleet::judge::counters::Kernel;
use kernelfleet::judge::verdict::{LaunchEvidence, Reason};
use kernelfleet::judge::{Candidate, Device, TaskSource, Verdict};
use kernelfleet::sandbox::client::{Options, Sandbox};
use serde_json::json;
use server::{Act, Server, call};

const AGENTS: usize = 8;
const TURNS: u32 = 200;

/// There is no judge here, and none is asked.
struct Nobody;

impl Assessor for Nobody {
    fn compile(&mut self, _: &Candidate) -> Result<Compiled, Unjudged> {
        Err(Unjudged("no judge".into()))
    }
    fn verify(&mut self, _: &Candidate) -> Result<Verdict, Unjudged> {
        Err(Unjudged("no judge".into()))
    }
    fn counters(&mut self, _: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Unjudged> {
        Err(Unjudged("no judge".into()))
    }
    fn profile(&mut self, _: &Candidate) -> Result<Verdict, Unjudged> {
        Err(Unjudged("no judge".into()))
    }
    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Unjudged> {
        Err(Unjudged("no judge".into()))
    }
    fn finish(&mut self, _: Option<&Candidate>) -> Result<Option<Verdict>, Unjudged> {
        Ok(None)
    }
    fn standing(&self) -> Standing {
        Standing::default()
    }
}

/// Kilobytes of this process: now, or at most so far.
fn kilobytes(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with(field)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// What an agent does in its `n`th turn: files grow, commands run, about 100,000 tokens are read in the end.
fn act(n: u32) -> Act {
    let text = format!("// turn {n}\n{}", "float x = 1.0f; // some code\n".repeat(20));
    match n % 5 {
        0 => call("Write", json!({"file_path": format!("kernels/f{n}.cpp"), "content": text})),
        1 => call("Bash", json!({"command": format!("echo {n}; seq 300")})),
        2 => call("Glob", json!({"pattern": "kernels/*.cpp"})),
        3 => call("Grep", json!({"pattern": format!("turn {}", n - 3), "output_mode": "content"})),
        _ => call("Read", json!({"file_path": format!("kernels/f{}.cpp", n - 4)})),
    }
}

#[test]
#[ignore = "minutes; make soak-agents"]
fn eight_agents_of_two_hundred_turns_lose_none_and_take_little_memory() {
    // The number of tool results says which turn a conversation is in. Every 50th request is refused once.
    let mut refused = 0;
    let server = Server::new(move |number, request| {
        if number % 50 == 49 {
            refused += 1;
            let status = if refused % 2 == 0 { 429 } else { 503 };
            return Act::Status(status, vec![("retry-after", "0.05".into())], "{}".into());
        }
        let messages = request["messages"].as_array().unwrap();
        act(u32::try_from(messages.iter().filter(|m| m["role"] == "tool").count()).unwrap())
    });
    {
        let mut state = server.state.lock().unwrap();
        state.keep = false;
        // A scripted count would not grow with the conversation.
        state.counts = false;
    }
    let gateway = Arc::new(Gateway::new(Settings::new(&server.url())).unwrap());
    let folder = tempfile::tempdir().unwrap();
    let before = kilobytes("VmRSS");
    let began = Instant::now();
    let stop = AtomicBool::new(false);
    let ends: Vec<_> = std::thread::scope(|scope| {
        let agents: Vec<_> = (0..AGENTS)
            .map(|agent| {
                let (gateway, folder, stop) = (Arc::clone(&gateway), folder.path(), &stop);
                scope.spawn(move || {
                    let socket = Socket::new().unwrap();
                    let mut options = Options::new(env!("CARGO_BIN_EXE_kernelfleet").into());
                    options.socket = Some(socket.path().to_path_buf());
                    let mut sandbox = Sandbox::start(&options).unwrap();
                    let mut author = Endpoint { gateway, model: "scripted".into(), sampling: Sampling::default() };
                    let task = TaskSource { name: format!("t{agent}"), path: "t.py".into(), source: "x = 1\n".into() };
                    let setting = Setting {
                        task: &task,
                        brief: Brief {
                            device: Device::Cpu,
                            hardware: "a CPU".into(),
                            libraries: vec![],
                            turns: TURNS,
                            target: None,
                        },
                        limits: Limits { turns: TURNS, ..Limits::default() },
                        trajectory: folder.join(format!("{agent}.jsonl")),
                        stop,
                        say: &|_| {},
                    };
                    play(&setting, &mut author, &mut sandbox, &socket, &mut Nobody).unwrap().tail
                })
            })
            .collect();
        agents.into_iter().map(|a| a.join().unwrap()).collect()
    });
    let seconds = began.elapsed().as_secs_f64();
    let peak = kilobytes("VmHWM");
    let an_agent = (peak - before) / AGENTS as u64;
    let retries: u32 = ends.iter().map(|e| e.retries).sum();
    let tokens = ends.iter().map(|e| e.usage.prompt).max().unwrap() / u64::from(TURNS);
    println!(
        "{AGENTS} agents, {TURNS} turns each in {seconds:.0} s, {retries} attempts made again; a request reads {tokens} tokens on average; \
         {before} kB before, {peak} kB at most: {an_agent} kB an agent, the endpoint's own share included"
    );
    for (agent, end) in ends.iter().enumerate() {
        assert_eq!((end.end, end.turns, end.faults), (End::Turns, TURNS, 0), "{end:?}");
        let lines = trajectory::read(&folder.path().join(format!("{agent}.jsonl"))).unwrap();
        let turns: Vec<u32> = lines
            .iter()
            .filter_map(|l| match &l.what {
                What::Turn { turn, .. } => Some(*turn),
                _ => None,
            })
            .collect();
        assert_eq!(turns, (1..=TURNS).collect::<Vec<_>>());
        let results = lines.iter().filter(|l| matches!(l.what, What::Result { .. })).count();
        assert_eq!(results, TURNS as usize);
    }
    assert_eq!(server.state.lock().unwrap().answered, u64::from(TURNS) * AGENTS as u64);
    assert!(retries > 0 && peak / (AGENTS as u64) < 30_000 && an_agent < 30_000, "{an_agent} kB an agent");
}
