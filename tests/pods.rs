//! The roles of pods as real processes that talk over TLS: broker, judge, sandbox, agent, gateway. Needs `make env`.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/pods.rs"]
mod pods;
#[path = "common/server.rs"]
#[allow(dead_code)]
mod server;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pods::{House, Process, root, until};
use serde_json::{Value, json};
use server::{Act, Server, bash, call, say, usage};

const CHAIN: &str = r#"import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        for _ in range(4):
            x = torch.abs(x + 0.25) * 1.5 - 0.75
        return x


def get_inputs():
    return [torch.randn(512, 2048)]


def get_init_inputs():
    return []
"#;

const ROWS: &str = r#"import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x * 0.5, dim=1)


def get_inputs():
    return [torch.randn(256, 1024)]


def get_init_inputs():
    return []
"#;

const MODEL: &str = r#"import torch
from torch import nn

import kernelfleet_ext as kf

k = kf.load("kernels/chain.cpp")


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        k.chain(x, y, x.numel())
        return y
"#;

const KERNEL: &str = r#"#include <cmath>
#include <cstdint>

static inline float step(float v) { return std::fabs(v + 0.25f) * 1.5f - 0.75f; }

extern "C" void chain(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) y[i] = step(step(step(step(x[i]))));
}
"#;

/// One house at a time: each measures, and none should measure another.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Judges a candidate as local mode does.
fn judged_here(house: &House, files: &std::collections::BTreeMap<String, String>, task: &str) -> Value {
    let folder = house.path("candidate");
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    std::fs::write(house.path("task.py"), task).unwrap();
    let output = house
        .program("judge")
        .args(["--device", "cpu", "-o", "json", "--candidate"])
        .arg(&folder)
        .arg("--task")
        .arg(house.path("task.py"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn command(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default()
}

fn gone(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
}

#[test]
fn episodes_in_pods_end_as_on_one_machine_whichever_part_is_killed_meanwhile() {
    let _alone = alone();
    let house = House::new();
    let judge = house.judge("judge-1");
    until("a judge registers", || (house.pool().judges == 1).then_some(()));
    house.put("job", &json!({"agent": {"maxTurns": 2}}), &[("chain", CHAIN, b""), ("rows", ROWS, b"")]);

    let mut agent = house.agent("job", 0, "pod-0", &[], None);
    assert_eq!(agent.ended().code(), Some(0));
    let facts = house.facts("job");
    assert_eq!(
        (facts.tasks, facts.episodes, facts.succeeded, facts.correct, facts.running),
        (2, 2, 1, 1, 0),
        "{facts:?}"
    );
    let (verdict, files) = house.result("job", "chain");
    assert_eq!(verdict["correct"], true, "{verdict}");
    let here = judged_here(&house, &files, CHAIN);
    assert_eq!((&here["correct"], &here["digests"]["plan"]), (&verdict["correct"], &verdict["digests"]["plan"]));

    // A pod that comes when its episode is over has nothing to do.
    let began = Instant::now();
    assert_eq!(house.agent("job", 0, "pod-0-late", &[], None).ended().code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(20));

    // A pod that is told to end does so at once, and another one goes on with the episode from its beginning.
    let mut first = house.agent("job", 1, "pod-1", &[], None);
    until("the second episode runs", || (house.facts("job").running == 1).then_some(()));
    first.signal("TERM");
    assert_eq!(first.ended().code(), Some(143));
    let mut second = house.agent("job", 1, "pod-1-again", &[], None);

    // The process that the judge's hosts are forked from is killed in the middle of an evaluation, as for want of memory: another
    // takes its place, and nobody is told anything of the candidate.
    // Those that run, the zygote first.
    let hosts = || {
        let mut found: Vec<i32> =
            judge.below().into_iter().filter(|pid| command(*pid).contains("kernelfleet_host") && !gone(*pid)).collect();
        found.sort_unstable();
        found
    };
    until("an evaluation runs", || (house.pool().leased > 0 && hosts().len() > 1).then_some(()));
    let before = hosts();
    assert!(Command::new("kill").args(["-KILL", &before[0].to_string()]).status().unwrap().success());
    until("a host is forked from another one", || {
        let now = hosts();
        (now.len() > 1 && now.iter().all(|pid| !before.contains(pid))).then_some(())
    });

    // The judge is killed in the middle of an evaluation: nothing of it stays, and another judge takes it over.
    until("an evaluation runs", || (house.pool().leased > 0 && judge.below().len() > 2).then_some(()));
    let below = judge.below();
    drop(judge);
    until("all that the judge had started is gone", || below.iter().all(|pid| gone(*pid)).then_some(()));
    // Its container is started again in the same pod. (Another pod's judge gets the card when the lease is over: until then
    // nobody knows whether the first one still works on it.)
    let mut judge = house.judge("judge-1");
    assert_eq!(second.ended().code(), Some(0));
    let facts = house.facts("job");
    assert_eq!((facts.succeeded, facts.failed, facts.faulted, facts.correct), (2, 0, 0, 2), "{facts:?}");
    assert!(facts.slice_seconds > 0.0);

    // A judge that is told to end leaves nothing.
    let below = judge.below();
    judge.signal("TERM");
    assert_eq!(judge.ended().code(), Some(0));
    until("the judge's processes are gone", || below.iter().all(|pid| gone(*pid)).then_some(()));
}

const KEY: &str = "sk-of-the-endpoint-0123456789";

/// A gateway in front of a scripted endpoint.
fn gateway(house: &House, server: &Server) -> (Process, String, String) {
    std::fs::write(house.path("key"), KEY).unwrap();
    std::fs::write(house.path("gateway-token"), "pod-of-the-lab\n").unwrap();
    let known = json!([{"token": "pod-of-the-lab", "namespace": "lab", "pod": "any"}]);
    std::fs::write(house.path("gateway-tokens.json"), known.to_string()).unwrap();
    let free = || {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        (free.local_addr().unwrap().to_string(), free)
    };
    // Both at once, so that they differ.
    let ((listen, one), (metrics, other)) = (free(), free());
    drop((one, other));
    let process = house
        .program("gateway")
        .args(["--listen", &listen, "--metrics", &metrics, "--upstream", &server.url(), "--models", "scripted,other"])
        .arg("--key-file")
        .arg(house.path("key"))
        .arg("--tokens")
        .arg(house.path("gateway-tokens.json"))
        .spawn()
        .unwrap();
    let process = Process(process);
    until("the gateway is ready", || (get(&metrics, "/readyz", "").0 == 200).then_some(()));
    (process, listen, metrics)
}

/// A request by hand: status and body.
fn http(address: &str, method: &str, path: &str, token: &str, body: &str) -> (u16, String) {
    let Ok(mut stream) = TcpStream::connect(address) else { return (0, String::new()) };
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: gateway\r\nauthorization: Bearer {token}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )
    .unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    let status = text.split_whitespace().nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    (status, text)
}

fn get(address: &str, path: &str, token: &str) -> (u16, String) {
    http(address, "GET", path, token, "")
}

/// An episode that is good enough, and looks around.
fn acts(look: &str) -> Vec<Act> {
    vec![
        bash(look),
        call("Write", json!({"file_path": "kernels/chain.cpp", "content": KERNEL})),
        call("Read", json!({"file_path": "model_new.py"})),
        call("Write", json!({"file_path": "model_new.py", "content": MODEL})),
        call("Read", json!({"file_path": "utils/compile.sh"})),
        bash("bash utils/compile.sh && python3 utils/verification.py && python3 utils/profiling.py"),
        say("Done."),
    ]
}

/// Everything that the broker keeps.
fn objects(house: &House) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let walk = walkdir::WalkDir::new(house.path("objects"));
    let files = walk.into_iter().map(|e| e.unwrap()).filter(|e| e.file_type().is_file());
    files.map(|e| (e.path().to_owned(), std::fs::read(e.path()).unwrap())).collect()
}

#[test]
fn models_and_recordings_write_kernels_in_a_pods_sandbox_and_get_at_nothing_else() {
    let _alone = alone();
    let house = House::new();
    let _judge = house.judge("judge-1");
    // Another user than the agent, without any right, in a folder: what a restricted pod has.
    let (sandbox_user, agent_user) = if root() { (Some(65_533), Some(65_532)) } else { (None, None) };
    let secret = house.path("token-pod-0").display().to_string();
    let look = format!(
        "(echo x >> utils/compile.sh) 2>/dev/null || echo SEALED; (mv utils/compile.sh gone) 2>/dev/null || echo KEPT; \
         cat {secret} 2>/dev/null || echo CLOSED; \
         python3 -c 'import socket; socket.socket(socket.AF_INET)' 2>/dev/null || echo ALONE; echo $KERNELFLEET_SOCKET"
    );
    let server = Server::playing(acts(&look));
    let (mut gateway, address, measured) = gateway(&house, &server);
    until("a judge registers", || (house.pool().judges == 1).then_some(()));

    let spec = json!({"agent": {"maxTurns": 20}, "policy": {"endpoint": {"name": "here", "model": "scripted"}}});
    house.put("asked", &spec, &[("chain", CHAIN, b"")]);
    let (mut sandbox, mut flags) = house.sandbox("asked", sandbox_user);
    flags.extend(["--gateway".into(), format!("http://{address}/v1"), "--gateway-token-file".into()]);
    flags.push(house.path("gateway-token").display().to_string());
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut agent = house.agent("asked", 0, "pod-0", &flags, agent_user);
    assert_eq!(agent.ended().code(), Some(0));
    sandbox.signal("TERM");
    assert_eq!(sandbox.ended().code(), Some(0));

    let requests = server.requests();
    let answers: Vec<&str> = requests.last().unwrap()["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|m| m["role"] == "tool")
        .map(|m| m["content"].as_str().unwrap())
        .collect();
    let looked: Vec<&str> = answers[0].lines().collect();
    assert_eq!(looked[..4], ["SEALED", "KEPT", "CLOSED", "ALONE"], "{looked:?}");
    assert!(answers[4].contains("Asks the judge"), "the tools can be read: {}", answers[4]);
    assert!(answers[5].contains("CORRECT, reward"), "{}", answers[5]);
    let facts = house.facts("asked");
    let turns = u64::try_from(requests.len()).unwrap();
    let read: u64 = (1..=turns).map(|n| usage(n).0).sum();
    let written: u64 = (1..=turns).map(|n| usage(n).1).sum();
    assert_eq!((facts.succeeded, facts.turns, facts.tokens_read, facts.tokens_written), (1, turns, read, written));
    assert_eq!(house.result("asked", "chain").1["kernels/chain.cpp"], KERNEL);

    // The endpoint saw its key and no caller's token; the agents saw no key; counts are the endpoint's own.
    let seen = server.state.lock().unwrap().authorizations.clone();
    assert!(seen.iter().all(|a| *a == format!("Bearer {KEY}")), "{seen:?}");
    assert!(objects(&house).iter().all(|(_, bytes)| !String::from_utf8_lossy(bytes).contains(KEY)));
    for path in ["/metrics", "/healthz", "/readyz"] {
        assert_eq!(get(&address, path, "").0, 404, "{path} is no agent's");
    }
    assert_eq!(get(&measured, "/v1/models", "pod-of-the-lab").0, 404);
    let metrics = get(&measured, "/metrics", "").1;
    for line in [
        format!("kernelfleet_gateway_tokens_total{{kind=\"prompt\"}} {read}"),
        format!("kernelfleet_gateway_tokens_total{{kind=\"completion\"}} {written}"),
        format!("kernelfleet_gateway_requests_total{{outcome=\"answered\"}} {turns}"),
        "kernelfleet_gateway_requests 0".into(),
    ] {
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    let ask = |token: &str, model: &str| {
        let body = json!({"model": model, "messages": []}).to_string();
        http(&address, "POST", "/v1/chat/completions", token, &body)
    };
    let before = requests.len();
    assert_eq!(ask("sandboxed", "scripted").0, 401);
    let (status, text) = ask("pod-of-the-lab", "gpt-expensive");
    assert!(status == 404 && text.contains("none of this endpoint's: scripted, other"), "{text}");
    assert_eq!(get(&address, "/v1/models", "sandboxed").0, 401);
    assert!(get(&address, "/v1/models", "pod-of-the-lab").1.contains("\"id\":\"other\""));
    assert_eq!(server.requests().len(), before);

    // The recording plays again in another pod, in namespaces where this machine allows them.
    let recorded = until("the trajectory is kept", || {
        let all = objects(&house);
        let found = all.into_iter().find(|(_, bytes)| {
            let text = String::from_utf8_lossy(bytes);
            text.starts_with("{\"at\"") && text.contains("\"kind\":\"end\"")
        });
        found.map(|(_, bytes)| bytes)
    });
    let spec = json!({"agent": {"maxTurns": 20}, "policy": {"replay": {"configMap": "recorded"}}});
    house.put("replayed", &spec, &[("chain", CHAIN, &recorded)]);
    let (_sandbox, flags) = house.sandbox("replayed", None);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    assert_eq!(house.agent("replayed", 0, "pod-1", &flags, None).ended().code(), Some(0));
    let facts = house.facts("replayed");
    assert_eq!((facts.succeeded, facts.correct), (1, 1), "{facts:?}");
    assert_eq!(house.result("replayed", "chain").1["kernels/chain.cpp"], KERNEL);

    gateway.signal("TERM");
    assert_eq!(gateway.ended().code(), Some(0));
}

#[test]
fn a_lease_that_is_over_takes_its_processes_along_and_says_nothing_of_anybody() {
    let _alone = alone();
    let house = House::with(&["--lease-seconds", "0.2"]);
    let mut judge = house.judge("judge-1");
    until("a judge registers", || (house.pool().judges == 1).then_some(()));
    let idle = judge.below();
    house.put("job", &json!({"agent": {"maxTurns": 2}}), &[("chain", CHAIN, b"")]);
    let mut agent = house.agent("job", 0, "pod-0", &[], None);
    // A new pod may fare better.
    assert_eq!(agent.ended().code(), Some(3));
    let facts = house.facts("job");
    assert_eq!((facts.succeeded, facts.failed, facts.faulted), (0, 0, 0), "{facts:?}");
    until("the sessions' processes are gone", || {
        let left: Vec<i32> = judge.below().into_iter().filter(|pid| !idle.contains(pid) && !gone(*pid)).collect();
        left.is_empty().then_some(())
    });
    assert!(judge.0.try_wait().unwrap().is_none(), "the judge goes on");
    assert_eq!(house.pool().leased, 0);
}

#[test]
fn a_pod_that_is_called_wrongly_says_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| {
        let output = Command::new(pods::EXE).args(arguments).env_clear().output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = run(&["agent"]);
    assert!(code == Some(2) && text.contains("--broker <URL>"), "{text}");
    let missing = folder.path().join("ca").display().to_string();
    let (code, text) = run(&["agent", "--broker", "https://127.0.0.1:1", "--broker-ca-file", &missing]);
    assert!(code == Some(1) && text.contains(&missing) && text.contains("can't be read"), "{text}");
    let (code, text) = run(&["gateway", "--upstream", "http://127.0.0.1:1/v1", "--models", "m"]);
    assert!(code == Some(2) && text.contains("--namespace"), "{text}");
    let (code, text) = run(&["seal", "--to", &missing]);
    assert!(code == Some(1) && text.contains("can't be sealed"), "{text}");
}
