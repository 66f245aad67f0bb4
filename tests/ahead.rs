//! Runners that are started ahead of their candidates, by the real judge on the CPU device: each serves one candidate, a
//! dead one is replaced, and none is left. A judge of other choices starts no Python of its own. Alone in its file, since it counts this process's children. Needs `make env`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kernelfleet::judge::{Candidate, Device, Effort, Error, Judge, Options, Slice, TaskSource};
use kernelfleet::local::environment;

/// Children of this process that were started with `word`.
fn children(word: &str) -> Vec<u32> {
    below(std::process::id(), word)
}

/// Children of a process that show `word` as their command.
fn below(own: u32, word: &str) -> Vec<u32> {
    let own = own.to_string();
    let numbers = fs::read_dir("/proc").unwrap().filter_map(|e| e.unwrap().file_name().to_str()?.parse().ok());
    numbers
        .filter(|pid: &u32| {
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let stat = read("stat");
            let parent = stat.rsplit_once(") ").and_then(|x| x.1.split(' ').nth(1));
            parent == Some(own.as_str()) && read("cmdline").contains(word)
        })
        .collect()
}

fn kill(pid: u32) {
    // SAFETY: a signal to a process of this test, which the test's own judge hasn't waited for.
    assert_eq!(unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) }, 0);
}

/// Processor time of a process, hundredths of a second; 0 where it is gone.
fn ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map_or("", |x| x.1).split(' ');
    fields.skip(11).take(2).map(|field| field.parse::<u64>().unwrap()).sum()
}

const PRODUCT: &str = "import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1024, 1024)

    def forward(self, x):
        return self.fc(x)


def get_inputs():
    return [torch.randn(768, 1024)]


def get_init_inputs():
    return []
";

const PRODUCT_NEW: &str = "import torch.nn as nn
import kernelfleet_ext as kf


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(1024, 1024)

    def forward(self, x):
        return kf.linear(x, self.fc.weight, self.fc.bias)
";

fn runners() -> Vec<u32> {
    children("runner-cpu")
}

#[test]
fn a_runner_started_ahead_serves_the_next_candidate_and_a_dead_one_is_replaced() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/hostile/zeros");
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
    let task = TaskSource { name: "zeros".into(), path: folder.join("task.py"), source: read("task.py") };
    // Candidates that differ in what they write are different images, those that differ in a comment are not.
    let candidate = |value: &str, comment: &str| Candidate {
        files: [
            ("model_new.py".to_owned(), format!("# {comment}\n{}", read("model_new.py"))),
            ("kernels/k.cpp".to_owned(), read("kernels/k.cpp").replace("0.0f", value)),
        ]
        .into(),
    };
    let cache = tempfile::tempdir().unwrap();
    let mut found = environment::discover().expect("the environment of `make env`");
    found.toolchain.program = PathBuf::from(env!("CARGO_BIN_EXE_kernelfleet"));
    found.toolchain.cache = cache.path().to_owned();
    let options =
        Options { device: Device::Cpu, compile: false, inputs: 2, remembered: Some(0.0), ..Options::default() };
    let judge = Judge::start(&found.toolchain, options, Slice::new()).expect("a judge of the CPU device");
    let mut session = judge.open(&task).unwrap();
    let mut judged = |value: &str, comment: &str| {
        let verdict = session.judge(&candidate(value, comment), Effort::Final).unwrap();
        assert_eq!(verdict.reason.as_ref().map(|r| r.code.as_str()), Some("mismatch"), "{verdict:?}");
        (verdict.cached, runners())
    };
    assert_eq!(judged("0.0f", "a"), (false, vec![]), "it went with its candidate");
    // A remembered verdict needs no runner: the one that was started waits.
    let (cached, waiting) = judged("0.0f", "b");
    assert!(cached && waiting.len() == 1, "{waiting:?}");
    assert_eq!(judged("0.0f", "c"), (true, waiting.clone()), "there is one at most");
    assert_eq!(judged("1.0f", "a"), (false, vec![]), "the one that waited served");
    let (_, waiting) = judged("1.0f", "b");
    kill(waiting[0]);
    assert_eq!(judged("2.0f", "a"), (false, vec![]));
    let (cached, waiting) = judged("2.0f", "b");
    assert!(cached && waiting.len() == 1, "{waiting:?}");
    drop(session);
    assert_eq!(runners(), Vec::<u32>::new());

    // Other choices are another judge, which forks from the same processes and needs the first no more.
    let started = (children("kernelfleet_host"), children("kernelfleet_recorder"));
    assert_eq!((started.0.len(), started.1.len()), (1, 1), "{started:?}");
    let other = judge.by(Options { device: Device::Cpu, compile: false, inputs: 3, ..Options::default() });
    drop(judge);
    let verdict = other.open(&task).unwrap().judge(&candidate("3.0f", "a"), Effort::Final).unwrap();
    assert_eq!(verdict.reason.as_ref().map(|r| r.code.as_str()), Some("mismatch"), "{verdict:?}");
    assert!(!verdict.cached);
    assert_eq!((children("kernelfleet_host"), children("kernelfleet_recorder")), started);
    // One that the system ended, for want of memory say, is started anew. What was open in it ends with it, which isn't the task's
    // fault, as it would be if its own host had crashed.
    let (mut taken, mut crashed) = (other.open(&task).unwrap(), other.open(&task).unwrap());
    assert!(taken.alive() && crashed.alive());
    let hosts = below(started.0[0], "");
    assert_eq!(hosts.len(), 2, "{hosts:?}");
    kill(*hosts.iter().max().unwrap());
    assert!(crashed.judge(&candidate("5.0f", "a"), Effort::Final).is_err_and(|e| matches!(e, Error::Request { .. })));
    assert!(!crashed.alive() && taken.alive());
    for pid in [started.0[0], started.1[0]] {
        kill(pid);
    }
    let error = taken.judge(&candidate("5.0f", "a"), Effort::Final).unwrap_err();
    assert!(matches!(&error, Error::Fault(what) if what.contains("forked from")), "{error}");
    assert!(!taken.alive());
    drop((taken, crashed));
    let verdict = other.open(&task).unwrap().judge(&candidate("4.0f", "a"), Effort::Final).unwrap();
    assert_eq!(verdict.reason.as_ref().map(|r| r.code.as_str()), Some("mismatch"), "{verdict:?}");

    // A library helper ends with the process that it is forked from in the middle of a call, which only the runner sees: a fault too.
    let task = TaskSource { name: "product".into(), path: "product.py".into(), source: PRODUCT.to_owned() };
    let product = Candidate { files: [("model_new.py".to_owned(), PRODUCT_NEW.to_owned())].into() };
    let mut session = other.open(&task).unwrap();
    let zygote = children("kernelfleet_host")[0];
    let host = below(zygote, "");
    let error = std::thread::scope(|scope| {
        scope.spawn(|| {
            let multiplies = |pid: &u32| !host.contains(pid) && ticks(*pid) >= 3;
            let began = Instant::now();
            while !below(zygote, "").iter().any(multiplies) {
                assert!(began.elapsed() < Duration::from_secs(120), "no helper multiplies");
                std::thread::sleep(Duration::from_millis(2));
            }
            kill(zygote);
        });
        session.judge(&product, Effort::Verify).unwrap_err()
    });
    assert!(matches!(error, Error::Fault(_)), "{error}");
    drop(session);
    assert!(other.open(&task).unwrap().judge(&product, Effort::Verify).unwrap().correct);

    drop(other);
    assert_eq!((children("kernelfleet_host"), children("kernelfleet_recorder")), (vec![], vec![]));
}
