//! Whole episodes: a scripted endpoint over HTTP, the real sandbox, real files, the real judge on the CPU device.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/server.rs"]
mod server;
#[path = "common/warm.rs"]
mod warm;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kernelfleet::agent::rules::{End, FaultOf};
use kernelfleet::agent::trajectory::{self, Line, Tail, What, Word};
use kernelfleet::gateway::tokens::Usage;
use serde_json::{Value, json};
use server::{Act, Server, bash, call, say, usage};

const TASK: &str = r#"import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4096))

    def forward(self, x):
        for _ in range(4):
            x = (x + self.bias).abs() * 1.5 - 0.75
        return x


def get_inputs():
    return [torch.randn(256, 4096)]


def get_init_inputs():
    return []
"#;

const MODEL: &str = r#"import torch
from torch import nn

import kernelfleet_ext as kf

k = kf.load("kernels/chain.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4096))

    def forward(self, x):
        y = torch.empty_like(x)
        k.chain(x, self.bias, y, x.shape[0], x.shape[1])
        return y
"#;

const KERNEL: &str = r#"#include <cmath>
#include <cstdint>

static inline float step(float v, float b) { return std::fabs(v + b) * 1.5f - 0.75f; }

extern "C" void chain(const float* x, const float* bias, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float* a = x + r * columns;
        float* b = y + r * columns;
#pragma omp simd
        for (int64_t c = 0; c < columns; c++) b[c] = step(step(step(step(a[c], bias[c]), bias[c]), bias[c]), bias[c]);
    }
}
"#;

/// A first version: right, by one thread, a pass over memory a step.
const FIRST: &str = r#"#include <cmath>
#include <cstdint>

static inline float step(float v, float b) { return std::fabs(v + b) * 1.5f - 0.75f; }

extern "C" void chain(const float* x, const float* bias, float* y, int64_t rows, int64_t columns) {
    for (int i = 0; i < 4; i++)
        for (int64_t j = 0; j < rows * columns; j++) y[j] = step(i ? y[j] : x[j], bias[j % columns]);
}
"#;

/// A folder with a job of one task.
struct Home {
    folder: tempfile::TempDir,
    /// Of those that measure one at a time: none should wait for another's figures in the middle of an episode.
    _alone: Option<MutexGuard<'static, ()>>,
}

static ALONE: Mutex<()> = Mutex::new(());

impl Home {
    /// For episodes with a kernel to measure.
    fn measuring(agent: &str) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { _alone: Some(alone), ..Self::new(agent) }
    }

    fn new(agent: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source: String = TASK.lines().map(|l| format!("          {l}\n")).collect();
        let job = format!(
            "apiVersion: kernelfleet.dev/v1alpha1\nkind: OptimizationJob\nmetadata: {{name: job}}\nspec:\n  tasks:\n    inline:\n      - name: chain\n        source: |\n{source}  policy:\n    endpoint: {{name: here, model: scripted}}\n  agent: {agent}\n"
        );
        std::fs::write(folder.path().join("job.yaml"), job).unwrap();
        Self { folder, _alone: None }
    }

    fn path(&self, inside: &str) -> PathBuf {
        self.folder.path().join(inside)
    }

    fn program(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelfleet"));
        command
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .env("KERNELFLEET_CACHE", warm::cache(self.folder.path()))
            // How fast a kernel is here, is no matter.
            .env("KERNELFLEET_MEASURE_SECONDS", "1")
            .env("NO_PROXY", "127.0.0.1")
            .env_remove("KERNELFLEET_API_KEY");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = self.program();
        command.args(["run", self.path("job.yaml").to_str().unwrap(), "--device", "cpu", "-o", "json", "--results"]);
        command.arg(self.path("results")).args(arguments).env("KERNELFLEET_API_KEY", KEY).output().unwrap()
    }

    /// Plays an episode; its trajectory.
    fn play(&self, server: &Server, more: &[&str]) -> (Output, Vec<Line>) {
        let url = server.url();
        let output = self.run(&[&["--endpoint", &url, "--fresh"], more].concat());
        let lines = trajectory::read(&self.path("results/job/chain/trajectory.jsonl"))
            .unwrap_or_else(|e| panic!("{e}: {}", says(&output)));
        (output, lines)
    }
}

const KEY: &str = "sk-test-0123456789";

fn says(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn tail(lines: &[Line]) -> Tail {
    match &lines.last().unwrap().what {
        What::End(tail) => (**tail).clone(),
        other => panic!("{other:?}"),
    }
}

fn results(lines: &[Line]) -> Vec<(String, Word, String)> {
    let results = lines.iter().filter_map(|l| match &l.what {
        What::Result { tool, outcome, content, .. } => Some((tool.clone(), *outcome, content.clone())),
        _ => None,
    });
    results.collect()
}

fn judged(lines: &[Line]) -> Vec<(String, Value)> {
    let judged = lines.iter().filter_map(|l| match &l.what {
        What::Judged { op, answer, .. } => Some((op.clone(), answer.clone())),
        _ => None,
    });
    judged.collect()
}

/// What the server counts for the first `n` answers.
fn counted(n: u64) -> Usage {
    let sum = (1..=n).map(usage).fold((0, 0), |s, u| (s.0 + u.0, s.1 + u.1));
    Usage { prompt: sum.0, completion: sum.1, cached: 0, estimated: false }
}

/// Reads the template, writes kernel and model.
fn written() -> Vec<Act> {
    vec![
        call("Write", json!({"file_path": "kernels/chain.cpp", "content": KERNEL})),
        call("Read", json!({"file_path": "model_new.py"})),
        call("Write", json!({"file_path": "/workspace/model_new.py", "content": MODEL})),
    ]
}

#[test]
fn a_good_episode_reads_writes_mends_profiles_and_solves_its_task() {
    let home = Home::measuring("{maxTurns: 40}");
    let broken = FIRST.replace("int i = 0;", "int i = 0");
    let mut acts = vec![
        Act::Say(
            "I begin with the rules.".into(),
            vec![("Read".into(), json!({"file_path": "SKILL.md"})), ("Read".into(), json!({"file_path": "model.py"}))],
        ),
        call("TodoWrite", json!({"todos": [{"content": "fuse", "status": "in_progress", "activeForm": "fusing"}]})),
        bash("python3 utils/profiling.py --reference"),
        call("Write", json!({"file_path": "model_new.py", "content": MODEL})),
        call("Read", json!({"file_path": "model_new.py"})),
        call("Write", json!({"file_path": "model_new.py", "content": MODEL})),
        call("Write", json!({"file_path": "kernels/chain.cpp", "content": broken})),
        bash("bash utils/compile.sh"),
        call(
            "Edit",
            json!({"file_path": "kernels/chain.cpp", "old_string": "int i = 0 ", "new_string": "int i = 0; "}),
        ),
        bash("bash utils/compile.sh && python3 utils/verification.py"),
        call("Edit", json!({"file_path": "kernels/chain.cpp", "old_string": "- 0.75f", "new_string": "- 0.76f"})),
        bash("python3 utils/verification.py"),
        call(
            "MultiEdit",
            json!({"file_path": "kernels/chain.cpp", "edits": [
            {"old_string": "0.76f", "new_string": "0.77f"}, {"old_string": "0.77f", "new_string": "0.75f"}]}),
        ),
        bash("python3 utils/profiling.py && python3 utils/profiling.py --counters"),
        call("Write", json!({"file_path": "kernels/chain.cpp", "content": KERNEL})),
        call("Grep", json!({"pattern": "simd", "output_mode": "content", "path": "kernels"})),
        call("Glob", json!({"pattern": "kernels/*.cpp"})),
        bash("cd kernels && python3 ../utils/profiling.py"),
    ];
    let calls = acts.len();
    acts.push(say("Done: one pass over memory."));
    let server = Server::playing(acts);
    let (output, lines) = home.play(&server, &["--prices", "1,2"]);
    assert!(output.status.success(), "{}", says(&output));
    let tail = tail(&lines);
    let turns = u32::try_from(calls + 1).unwrap();
    // Whether torch.compile is beaten is this machine's affair: if not, the model is told once and says so again.
    let solved = profiled_goal(&lines);
    let (turns, ends) = if solved { (turns, [End::Solved; 2]) } else { (turns + 1, [End::Stopped, End::Solved]) };
    assert_eq!((tail.turns, tail.faults, tail.usage), (turns, 0, counted(u64::from(turns))), "{tail:?}");
    // Nor how much faster than eager it is while others use the processors.
    assert!(tail.reward.unwrap() >= 1, "{tail:?}");
    assert!(ends.contains(&tail.end), "{tail:?}");
    assert!((tail.cost.unwrap() - (tail.usage.prompt + 2 * tail.usage.completion) as f64 / 1e6).abs() < 1e-9);

    let results = results(&lines);
    let texts: Vec<&str> = results.iter().map(|r| r.2.as_str()).collect();
    assert!(texts[0].contains("kernelfleet_ext"), "{}", texts[0]);
    assert!(texts[1].contains("     7\t        super().__init__()"), "{}", texts[1]);
    assert!(texts[3].contains("aten::"), "the reference's operators: {}", texts[3]);
    assert!(texts[4].contains("has not been read yet; use Read"), "{}", texts[4]);
    assert!(texts[8].contains("kernels/chain.cpp:7") && texts[8].contains("exit status 1"), "{}", texts[8]);
    assert!(texts[10].contains("OK: recorded and built") && texts[10].contains("CORRECT on"), "{}", texts[10]);
    assert!(texts[12].contains("FAILED [mismatch]") && texts[12].contains("is off by"), "{}", texts[12]);
    assert!(texts[14].contains("CORRECT, reward"), "{}", texts[14]);
    assert!(texts[14].contains("[no_counters]") && texts[14].contains("on the CPU there are none"), "{}", texts[14]);
    assert!(texts[16].starts_with("kernels/chain.cpp:11:#pragma omp simd"), "{}", texts[16]);
    assert_eq!(texts[17], "kernels/chain.cpp");
    assert!(texts[18].contains("CORRECT, reward") && texts[18].contains("chain: "), "{}", texts[18]);

    for line in &lines {
        if let What::Judged { op, seconds, .. } = &line.what {
            println!("{op}: {seconds:.1} s at {:.1}", line.at);
        }
    }
    let ops: Vec<String> = judged(&lines).into_iter().map(|j| j.0).collect();
    assert_eq!(ops, ["reference", "compile", "compile", "verify", "verify", "profile", "counters", "profile", "final"]);

    // The results folder is what a sweep's is, with the trajectory; the key is in none of it.
    let folder = home.path("results/job/chain");
    assert_eq!(std::fs::read_to_string(folder.join("best/kernels/chain.cpp")).unwrap(), KERNEL);
    let outcome: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("outcome.json")).unwrap()).unwrap();
    assert_eq!(outcome["outcome"]["episode"]["end"], tail.end.word());
    assert_eq!(outcome["outcome"]["attempts"], 2);
    assert_eq!(server.state.lock().unwrap().authorizations[0], format!("Bearer {KEY}"));
    no_key_below(&home.path("results"));
    assert!(!says(&output).contains(KEY));

    // What is done is not done again.
    let before = server.requests().len();
    let again = home.run(&["--endpoint", &server.url()]);
    assert!(again.status.success() && server.requests().len() == before, "{}", says(&again));

    // The recording plays again without a model, from a ConfigMap of the manifest too, and shows in a terminal.
    let recorded = home.path("recorded.jsonl");
    std::fs::copy(folder.join("trajectory.jsonl"), &recorded).unwrap();
    let replayed = home.run(&["--replay", recorded.to_str().unwrap(), "--fresh"]);
    assert!(replayed.status.success(), "{}", says(&replayed));
    let lines = trajectory::read(&folder.join("trajectory.jsonl")).unwrap();
    let second = self::tail(&lines);
    assert!([End::Solved, End::Stopped, End::Turns].contains(&second.end), "{second:?}");
    assert!((turns - 1..=turns).contains(&second.turns) && second.reward.unwrap() >= 1, "{second:?}");
    let shown = home.program().arg("replay").arg(&recorded).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("== turn 19") && shown.contains("== end: ") && shown.contains("-> MultiEdit"), "{shown}");
}

#[test]
fn an_interrupted_episode_ends_soon_and_leaves_nothing() {
    use std::io::BufRead;
    let home = Home::new("{maxTurns: 5}");
    // The second answer never comes, and something runs in the sandbox meanwhile.
    let first = call("Bash", json!({"command": "sleep 1000", "run_in_background": true}));
    let server = Server::playing(vec![first, Act::Hang]);
    let temp = home.path("tmp");
    std::fs::create_dir(&temp).unwrap();
    let mut child = home
        .program()
        .args([
            "run",
            home.path("job.yaml").to_str().unwrap(),
            "--device",
            "cpu",
            "--endpoint",
            &server.url(),
            "--results",
        ])
        .arg(home.path("results"))
        .env("TMPDIR", &temp)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().any(|l| l.unwrap().contains("chain: turn 2")));
    let began = std::time::Instant::now();
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let rest: Vec<String> = lines.map(|l| l.unwrap()).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    assert!(began.elapsed() < std::time::Duration::from_secs(15), "{rest:?}");
    let left: Vec<_> = std::fs::read_dir(&temp).unwrap().map(|e| e.unwrap().path()).collect();
    assert!(left.is_empty(), "{left:?}");
    let lines = trajectory::read(&home.path("results/job/chain/trajectory.jsonl")).unwrap();
    assert_eq!((tail(&lines).end, tail(&lines).turns), (End::Interrupted, 1));
    assert!(!home.path("results/job/chain/outcome.json").exists());
}

/// Whether a profile in the episode reached the goal.
fn profiled_goal(lines: &[Line]) -> bool {
    let verdicts = judged(lines).into_iter().filter(|j| j.0 == "profile");
    let mut verdicts = verdicts.map(|j| serde_json::from_value(j.1).unwrap());
    verdicts.any(|v| kernelfleet::agent::episode::reaches_goal(&v))
}

#[test]
fn a_recording_in_a_config_map_plays_again_and_what_is_missing_is_named() {
    let home = Home::new("{maxTurns: 5}");
    let server = Server::playing(vec![bash("echo recorded"), say("I stop."), say("I stop.")]);
    let (_, lines) = home.play(&server, &[]);
    assert_eq!(tail(&lines).end, End::Stopped);
    let recorded = std::fs::read_to_string(home.path("results/job/chain/trajectory.jsonl")).unwrap();
    let job = std::fs::read_to_string(home.path("job.yaml")).unwrap();
    let replay = job.replace("endpoint: {name: here, model: scripted}", "replay: {configMap: recordings}");
    std::fs::write(home.path("job.yaml"), &replay).unwrap();
    let missing = home.run(&[]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(says(&missing).contains("spec.policy.replay.configMap: the file holds no ConfigMap `recordings`"));
    let quoted: String = recorded.lines().map(|l| format!("    {l}\n")).collect();
    let map = format!(
        "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {{name: recordings}}\ndata:\n  chain.jsonl: |\n{quoted}"
    );
    std::fs::write(home.path("job.yaml"), format!("{replay}{map}")).unwrap();
    let output = home.run(&["--fresh"]);
    assert!(output.status.success(), "{}", says(&output));
    let again = trajectory::read(&home.path("results/job/chain/trajectory.jsonl")).unwrap();
    assert_eq!((tail(&again).end, tail(&again).turns, tail(&again).usage), (End::Stopped, 3, tail(&lines).usage));
    assert_eq!(results(&again), results(&lines));
    assert_eq!(server.requests().len(), 3, "the second time nobody was asked");
}

fn no_key_below(folder: &Path) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            no_key_below(&path);
        } else {
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            assert!(!text.contains(KEY), "the key is in {}", path.display());
        }
    }
}

/// Plays one list of acts an episode: a conversation that begins is the next episode.
fn episodes(mut lists: Vec<Vec<Act>>) -> Server {
    lists.reverse();
    let mut now: Vec<Act> = vec![];
    Server::new(move |_, request| {
        if now.is_empty() {
            assert_eq!(
                request["messages"].as_array().unwrap().len(),
                2,
                "an episode went on for longer than its script"
            );
            now = lists.pop().unwrap_or_else(|| panic!("an episode more than there are scripts"));
            now.reverse();
        }
        now.pop().unwrap()
    })
}

fn status(code: u16, headers: Vec<(&'static str, String)>, message: &str) -> Act {
    Act::Status(code, headers, json!({"error": {"message": message}}).to_string())
}

#[test]
fn every_fault_ends_an_episode_as_it_is_named_with_exact_counts() {
    // Attempts at one task, each with its own script.
    let stop = || vec![say("I can't do it."), say("Really.")];
    let with = |acts: Vec<Act>| [acts, stop()].concat();
    let unknown = |i: usize| call(&format!("Launch{i}"), json!({}));
    let wrong = |name: &str, arguments: &str| Act::Say(String::new(), vec![(name.into(), json!(arguments))]);
    let mut model_faults = vec![
        wrong("Bash", "{\"command\": \"ls"),
        wrong("Bash", "{\"command\": 7}"),
        wrong("Read", "{\"path\": \"x\"}"),
        wrong("Bash", "[]"),
    ];
    model_faults.extend((0..6).map(unknown));
    let refusal = json!({"role": "assistant", "content": null, "refusal": "I won't write kernels."});
    let half = json!({"role": "assistant", "content": "", "tool_calls": [{"index": 0, "id": "c", "type": "function",
        "function": {"name": "Write", "arguments": "{\"file_path\": \"kernels/a.cpp\", \"content\": \"int"}}]});
    let flood = "head -c 29000 /dev/zero | tr '\\0' x";
    let two = Act::Say(
        String::new(),
        vec![("Bash".into(), json!({"command": flood})), ("Bash".into(), json!({"command": flood}))],
    );
    let lists = vec![
        with(vec![
            status(429, vec![("retry-after", "0.2".into())], "slow down"),
            status(500, vec![], "oops"),
            Act::Raw("<html>".into()),
            Act::Hang,
            Act::Cut,
            bash("echo fine"),
        ]),
        model_faults,
        vec![Act::Message(refusal, "stop")],
        vec![Act::Message(json!({"role": "assistant", "content": "I"}), "content_filter")],
        (0..8).map(|_| bash("ls utils")).collect(),
        with(vec![Act::Large(10 << 20), bash("echo smaller")]),
        with(vec![Act::Message(half, "length"), Act::Message(json!({"role": "assistant", "content": ""}), "stop")]),
        (0..12).map(|i| bash(&format!("echo {i}"))).collect(),
        vec![two],
        vec![status(400, vec![], "This model's maximum context length is 16384 tokens.")],
        vec![bash("sleep 300")],
        vec![status(401, vec![], &format!("Incorrect API key provided: {KEY}"))],
    ];
    let count = lists.len();
    let home =
        Home::new(&format!("{{maxTurns: 12, attempts: {count}, contextTokens: 16384, activeDeadlineSeconds: 40}}"));
    let server = episodes(lists);
    let url = server.url();
    let output = home.run(&["--endpoint", &url, "--silence", "9", "--reply-tokens", "4096"]);
    let said = says(&output);
    // The endpoint that refuses the key is a fault of this machine's, tried again by the next start.
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("the endpoint refuses the request") && said.contains("Incorrect API key provided: [key]"),
        "{said}"
    );
    let of = |n: usize| {
        let name = if n == 1 { "trajectory.jsonl".to_owned() } else { format!("trajectory-{n}.jsonl") };
        let lines = trajectory::read(&home.path(&format!("results/job/chain/{name}"))).unwrap();
        let end = tail(&lines);
        (lines, end)
    };
    let ends: Vec<(End, u32, u32, u32)> =
        (1..=count).map(|n| of(n).1).map(|t| (t.end, t.turns, t.faults, t.retries)).collect();
    let expected = [
        (End::Stopped, 3, 0, 5),
        (End::Faults, 10, 10, 0),
        (End::RefusedByModel, 1, 0, 0),
        (End::RefusedByModel, 1, 0, 0),
        (End::Loop, 8, 0, 0),
        (End::Stopped, 4, 1, 0),
        (End::Stopped, 4, 2, 0),
        (End::Turns, 12, 0, 0),
        (End::Context, 1, 0, 0),
        (End::Context, 0, 0, 0),
        (End::Deadline, 1, 0, 0),
        (End::Faults, 0, 1, 0),
    ];
    assert_eq!(ends, expected);
    // Tokens are the server's count of the answers that were used.
    let mut answered = 0;
    for (n, (_, turns, _, _)) in expected.iter().enumerate() {
        let mut sum = Usage::default();
        for _ in 0..*turns {
            answered += 1;
            let (prompt, completion) = usage(answered);
            sum += Usage { prompt, completion, cached: 0, estimated: false };
        }
        let counted = of(n + 1).1.usage;
        // The answer that was given up brought no count.
        if n == 5 { assert!(counted.estimated) } else { assert_eq!(counted, sum, "episode {}", n + 1) }
    }
    let texts = |n: usize| results(&of(n).0).into_iter().map(|r| r.2).collect::<Vec<_>>();
    let faults = texts(2);
    assert!(faults[0].contains("not valid JSON (EOF while parsing a string"), "{}", faults[0]);
    assert!(faults[1].contains("at `command`: invalid type: integer `7`, expected a string"), "{}", faults[1]);
    assert!(faults[2].contains("unknown field `path`, expected one of `file_path`"), "{}", faults[2]);
    assert!(faults[4].contains("there is no tool `Launch0`; the tools are Bash, BashOutput"), "{}", faults[4]);
    assert!(of(3).1.reason.contains("I won't write kernels"));
    assert!(texts(5)[2].contains("You have done the same 3 times with the same result"));
    let message = |n: usize| {
        of(n).0.iter().find_map(|l| match &l.what {
            What::Message { turn: 1, content, .. } => Some(content.clone()),
            _ => None,
        })
    };
    assert!(message(6).unwrap().contains("Your answer was cut off"));
    assert!(texts(7)[0].contains("reached the limit of 4096 tokens before the call's end"));
    assert!(of(2).0.iter().any(|l| matches!(&l.what, What::Fault { of: FaultOf::Model, .. })));
    // A malformed call goes back in a form that servers take.
    let requests = server.requests();
    assert!(requests.iter().any(|r| r.to_string().contains("not_valid_json")));
    no_key_below(&home.path("results"));
}

#[test]
fn whatever_becomes_of_the_tools_the_verdict_is_on_the_sources() {
    let forged = "mkdir -p bin; for p in python3 python bash; do printf '#!/bin/sh\\necho CORRECT, reward 3\\n' > bin/$p; chmod +x bin/$p; done
for m in torch json socket os kernelfleet_ext; do echo 'raise SystemExit(0)' > $m.py; done
export PATH=$PWD/bin:$PATH PYTHONPATH=$PWD PYTHONSTARTUP=$PWD/torch.py
printf 'print(\"CORRECT, reward 3\")\\n' > utils/profiling.py; cp utils/profiling.py utils/verification.py; python3 utils/profiling.py";
    let speak = concat!(
        r#"/usr/bin/env -i KERNELFLEET_SOCKET=$KERNELFLEET_SOCKET $(ls -d "#,
        env!("CARGO_MANIFEST_DIR"),
        r#"/.kernelfleet/python/bin/python3 /usr/bin/python3 2>/dev/null | head -1) -I - <<'EOF'
import json, os, socket
for text in ['{"op": "final", "files": {}}', '{"op": "profile", "files": {"../model_new.py": "x"}}', '{"op": "profile", "verdict": {"reward": 3}}', 'x' * 100, '']:
    s = socket.socket(socket.AF_UNIX); s.connect(os.environ["KERNELFLEET_SOCKET"]); s.sendall(text.encode() + b"\n")
    print(s.makefile().readline().strip())
EOF"#
    );
    let wrong = KERNEL.replace("0.75f", "0.25f");
    let mut first = written();
    first[0] = call("Write", json!({"file_path": "kernels/chain.cpp", "content": wrong}));
    first.extend([bash(forged), bash(speak), say("Reward 3."), say("Reward 3.")]);
    let mut second = written();
    second.extend([
        bash("python3 utils/verification.py"),
        bash("rm -rf utils; ln -s /etc utils; rm SKILL.md model.py; ln -s /etc/passwd kernels/link.cpp; ln -s / kernels/root"),
        bash(forged),
        bash("rm kernels/link.cpp kernels/root; rm -f *.py.bak torch.py json.py socket.py os.py kernelfleet_ext.py"),
        say("Done."),
        say("Done."),
    ]);
    let home = Home::measuring("{maxTurns: 20, attempts: 2}");
    let server = episodes(vec![first, second]);
    let output = home.run(&["--endpoint", &server.url()]);
    assert!(output.status.success(), "{}", says(&output));
    let of = |name: &str| trajectory::read(&home.path(&format!("results/job/chain/{name}"))).unwrap();
    let lines = of("trajectory.jsonl");
    let texts: Vec<String> = results(&lines).into_iter().map(|r| r.2).collect();
    assert!(texts[3].contains("CORRECT, reward 3"), "the forgery itself works: {}", texts[3]);
    let answers: Vec<&str> = texts[4].lines().collect();
    assert!(
        answers[0].contains("unknown variant `final`") && answers[0].contains("\"status\": 2")
            || answers[0].contains("\"status\":2"),
        "{answers:?}"
    );
    assert!(answers[1].contains("no model_new.py") && answers[2].contains("unknown field `verdict`"), "{answers:?}");
    assert_eq!((tail(&lines).end, tail(&lines).reward), (End::Stopped, Some(-1)), "{:?}", tail(&lines));
    let lines = of("trajectory-2.jsonl");
    assert!(tail(&lines).reward.unwrap() >= 1, "{:?}", tail(&lines));
    let verdict: Value =
        serde_json::from_str(&std::fs::read_to_string(home.path("results/job/chain/verdict.json")).unwrap()).unwrap();
    assert_eq!(verdict["correct"], true);
    let best = std::fs::read_to_string(home.path("results/job/chain/best/kernels/chain.cpp")).unwrap();
    assert_eq!(best, KERNEL);
}
