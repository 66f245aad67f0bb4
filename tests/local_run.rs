//! A manifest in, kernels out, on the CPU device of this machine: the whole way with real parts. Needs `make env`.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/warm.rs"]
mod warm;

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

const JOB: &str = r#"
apiVersion: kernelfleet.dev/v1alpha1
kind: OptimizationJob
metadata: {name: small}
spec:
  agent: {maxTurns: 2}
  tasks:
    inline:
      - name: chain
        source: |
          import torch
          from torch import nn

          class Model(nn.Module):
              def forward(self, x):
                  return torch.tanh(x) * torch.sigmoid(x) + 1.5 * x

          def get_inputs():
              return [torch.randn(256, 4096)]

          def get_init_inputs():
              return []
      - name: broken
        source: |
          import torch
          class Model(torch.nn.Module):
              def forward(self, x)
                  return x
"#;

/// Rows of numbers that differ little from each other where inputs are scaled down (sums that round at each step, or a
/// rounded mean, are off by more than the reference is), and operators that the policy makes of simpler ones.
const CORRECT: &str = r#"
apiVersion: kernelfleet.dev/v1alpha1
kind: OptimizationJob
metadata: {name: correct}
spec:
  agent: {maxTurns: 1}
  tasks:
    inline:
      - name: sums
        source: |
          import torch
          from torch import nn

          class Model(nn.Module):
              def __init__(self):
                  super().__init__()
                  self.norm = nn.GroupNorm(1, 4)
                  self.offset = nn.Parameter(torch.randn(4, 1, 1))

              def forward(self, x):
                  y = torch.sigmoid(x + self.offset)
                  return self.norm(y) + (y - y.mean((2, 3), keepdim=True))

          def get_inputs():
              return [torch.rand(4, 4, 128, 256)]

          def get_init_inputs():
              return []
      - name: composed
        source: |
          import torch
          import torch.nn.functional as F
          from torch import nn

          class Model(nn.Module):
              def __init__(self):
                  super().__init__()
                  self.weight = nn.Parameter(torch.rand(5) + 0.5)
                  self.slope = nn.PReLU(5)

              def forward(self, x, target):
                  shift = torch.tensor([0.5, -1.0, 2.0, 0.25, 3.0], device=x.device).view(5, 1, 1)
                  return (
                      F.avg_pool2d(x + shift, 3, 2, 1, ceil_mode=True, count_include_pad=False),
                      F.adaptive_avg_pool2d(x, (5, 7)),
                      F.adaptive_max_pool2d(x, (6, 4)),
                      F.cross_entropy(x, target, weight=self.weight, ignore_index=2, reduction="none"),
                      torch.cumsum(x > 0.5, 2),
                      (x > 0.25).sum(1),
                      torch.clamp(x, shift * x, x.flip(3)),
                      F.pad(self.slope(x), (2, 1, 0, 3), mode="reflect"),
                      torch.roll(F.pixel_shuffle(x[:, :4], 2), 3, 2),
                      torch.std_mean(F.logsigmoid(x), 3),
                      torch.linalg.vector_norm(x, 3, 1),
                  )

          def get_inputs():
              return [torch.randn(16, 5, 13, 18), torch.randint(0, 5, (16, 13, 18))]

          def get_init_inputs():
              return []
"#;

fn program(home: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kernelfleet"));
    // No figure counts here: tests need not wait for each other's measurements, nor for anybody else's.
    command.env("KERNELFLEET_CACHE", warm::cache(home)).env("KERNELFLEET_LOCKS", home);
    command.env("KERNELFLEET_MEASURE_SECONDS", "1");
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    command
}

fn run(home: &Path, manifest: &str) -> Output {
    let job = home.join("job.yaml");
    std::fs::write(&job, manifest).unwrap();
    let results = home.join("results");
    let arguments =
        ["run", job.to_str().unwrap(), "--device", "cpu", "-o", "json", "--results", results.to_str().unwrap()];
    program(home).args(arguments).output().unwrap()
}

#[test]
fn a_job_gives_a_verified_kernel_a_report_and_a_package_and_is_not_done_twice() {
    let home = tempfile::tempdir().unwrap();
    let first = run(home.path(), JOB);
    let said = String::from_utf8_lossy(&first.stderr).into_owned();
    assert!(first.status.success(), "{said}");
    let summary: serde_json::Value = serde_json::from_slice(&first.stdout).unwrap();
    assert_eq!(
        (&summary["tasks"], &summary["refused"], &summary["failed"]),
        (&2.into(), &1.into(), &0.into()),
        "{said}"
    );
    let chain = &summary["results"][0];
    assert!(chain["reward"].as_i64().unwrap() >= 1, "{chain}\n{said}");
    assert!(chain["speedup"]["eager"].as_f64().unwrap() > 0.0);
    let broken = summary["results"][1]["reason"].as_str().unwrap();
    assert!(broken.contains("broken.py:3") && broken.contains("syntax error"), "{broken}");

    let folder = home.path().join("results/small/chain");
    for name in ["task.py", "attempts.jsonl", "verdict.json", "outcome.json", "best/model_new.py"] {
        assert!(folder.join(name).is_file(), "{name}");
    }
    let report = std::fs::read_to_string(home.path().join("results/small/report.md")).unwrap();
    assert!(report.contains("| chain |"));

    let began = Instant::now();
    let second = run(home.path(), JOB);
    assert!(second.status.success());
    assert!(String::from_utf8_lossy(&second.stderr).contains("chain: done before"));
    let again: serde_json::Value = serde_json::from_slice(&second.stdout).unwrap();
    assert_eq!(again["before"], serde_json::json!({"tasks": 2, "attempts": chain["attempts"]}));
    // On a busy machine the best is measured once more.
    if chain["measurement"] == "exclusive" {
        assert_eq!(again["results"], summary["results"]);
        assert!(began.elapsed() < Duration::from_secs(10), "nothing was to do, so nothing was started");
    }

    let package = home.path().join("my_chain");
    let exported = program(home.path())
        .args(["export", "--result", folder.to_str().unwrap(), "-o", package.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".kernelfleet/python/bin/python");
    let check = "import torch\nfrom my_chain import Model, _reference\nm = Model().eval(); x = torch.randn(256, 4096)\nwith torch.no_grad():\n    assert m.why_reference(x) is None, m.why_reference(x)\n    torch.testing.assert_close(m(x), _reference.Model()(x))\n    assert m.why_reference(x) is None, m.why_reference(x)\n    assert 'shape' in m.why_reference(x[:2])";
    let used = Command::new(python).args(["-c", check]).current_dir(home.path()).output().unwrap();
    assert!(used.status.success(), "{}", String::from_utf8_lossy(&used.stderr));

    // Other tasks into the same folder: the report doesn't pretend that they are all.
    let other = JOB.replace("name: chain", "name: other").replace("torch", "no.such");
    let third = run(home.path(), &other);
    let summary: serde_json::Value = serde_json::from_slice(&third.stdout).unwrap();
    assert_eq!(summary["earlier"], serde_json::json!(["chain"]), "{summary}");
    let report = std::fs::read_to_string(home.path().join("results/small/report.md")).unwrap();
    assert!(report.contains("of earlier starts and not counted here: chain."), "{report}");
}

/// Runs the example of a package's README as it stands; what it prints.
fn example(package: &Path) -> String {
    let readme = std::fs::read_to_string(package.join("README.md")).unwrap();
    let code = readme.split("```python\n").nth(1).and_then(|rest| rest.split("```").next()).unwrap();
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".kernelfleet/python/bin/python");
    let used = Command::new(python).args(["-c", code]).current_dir(package.parent().unwrap()).output().unwrap();
    assert!(used.status.success(), "{code}{}", String::from_utf8_lossy(&used.stderr));
    String::from_utf8_lossy(&used.stdout).into_owned()
}

#[test]
fn the_candidate_of_the_examples_is_judged_kept_and_exported() {
    let home = tempfile::tempdir().unwrap();
    let kept = home.path().join("kept");
    let (folder, package) = (kept.to_str().unwrap(), home.path().join("my_norm"));
    let task = ["--task", "examples/tasks/rms_norm.py", "--candidate", "examples/candidates/rms_norm"];
    let judged = program(home.path())
        .arg("judge")
        .args(task)
        .args(["--device", "cpu", "--keep", folder, "-o", "json"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&judged.stderr).into_owned();
    assert!(judged.status.success(), "{said}");
    let verdict: serde_json::Value = serde_json::from_slice(&judged.stdout).unwrap();
    assert!(verdict["reward"].as_i64().unwrap() >= 1, "{verdict}");
    assert!(
        said.contains(&format!("kept in {folder}; next: kernelfleet export --result {folder} -o PACKAGE")),
        "{said}"
    );
    let exported = program(home.path()).args(["export", "--result", folder, "-o"]).arg(&package).output().unwrap();
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    assert!(package.join("candidate/kernels/rms_norm.cpp").is_file());
    let readme = std::fs::read_to_string(package.join("README.md")).unwrap();
    assert!(readme.starts_with("# my_norm\n\nrms_norm: Correct;"), "{readme}");
    assert_eq!(example(&package).trim(), "None");
    // It is told what it is at, and only on standard error.
    for phase in ["starting the judge", "rms_norm: opening", "rms_norm: recording", "rms_norm: building"] {
        assert!(said.contains(phase), "{phase}: {said}");
    }
    for phase in ["rms_norm: checking", "rms_norm: measuring", "rms_norm: measuring torch.compile"] {
        assert!(said.contains(phase), "{phase}: {said}");
    }
    // What is kept is replaced by a verdict on the same task alone.
    let judge = ["judge", "--task", "examples/tasks/softmax.py", "--candidate", "examples/candidates/rms_norm"];
    let other = program(home.path()).args(judge).args(["--keep", folder]).output().unwrap();
    assert_eq!(other.status.code(), Some(2));
}

#[test]
fn long_sums_of_nearly_equal_numbers_and_composed_operators_are_correct() {
    let home = tempfile::tempdir().unwrap();
    let done = run(home.path(), CORRECT);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{said}");
    let summary: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    for result in summary["results"].as_array().unwrap() {
        assert!(result["reward"].as_i64().unwrap() >= 1, "{summary}\n{said}");
    }
    assert_eq!(summary["tasks"], 2);
}

#[test]
fn an_interrupted_run_ends_soon_leaves_nothing_and_goes_on() {
    let home = tempfile::tempdir().unwrap();
    let job = home.path().join("job.yaml");
    std::fs::write(&job, JOB).unwrap();
    let temp = home.path().join("tmp");
    std::fs::create_dir(&temp).unwrap();
    let mut child = program(home.path())
        .args(["run", job.to_str().unwrap(), "--device", "cpu", "--results", home.path().join("r").to_str().unwrap()])
        .env("TMPDIR", &temp)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Once the task is opened there are processes and folders to leave behind.
    use std::io::BufRead;
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.by_ref().any(|l| l.unwrap().contains("chain: checking")));
    let pid = child.id().to_string();
    let began = Instant::now();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let rest: Vec<String> = lines.map(|l| l.unwrap()).collect();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130), "{rest:?}");
    assert!(began.elapsed() < Duration::from_secs(10));
    assert!(rest.iter().any(|l| l.contains("interrupted; tasks that are finished are kept")), "{rest:?}");
    assert_eq!(std::fs::read_dir(&temp).unwrap().count(), 0, "folders are left");
    assert!(!home.path().join("r/small/chain/outcome.json").exists());
}

#[test]
fn who_finds_another_judge_measuring_says_so_and_waits_for_its_turn() {
    use std::io::BufRead;
    use std::os::fd::AsRawFd;
    let home = tempfile::tempdir().unwrap();
    let lock = std::fs::File::create(home.path().join("kernelfleet-cpu.lock")).unwrap();
    // SAFETY: a call on an open descriptor that touches no memory.
    assert_eq!(unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) }, 0);
    let mut child = program(home.path())
        .args(["task", "check", "examples/tasks/softmax.py", "--device", "cpu", "--seconds", "1"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let pid = std::process::id();
    let wanted = format!("another kernelfleet (process {pid}) is at work on the CPU; waiting for its turn to end");
    // After what it is at.
    assert!(lines.by_ref().map_while(Result::ok).any(|said| said == wanted));
    assert!(child.try_wait().unwrap().is_none());
    drop(lock);
    assert!(child.wait().unwrap().success(), "{:?}", lines.collect::<Vec<_>>());
}

#[test]
fn an_endpoint_that_is_down_is_told_at_once_and_the_task_given_up_soon() {
    let home = tempfile::tempdir().unwrap();
    let job = home.path().join("job.yaml");
    let text = JOB.split("      - name: broken").next().unwrap();
    std::fs::write(&job, text).unwrap();
    // A port that nobody listens at.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("http://127.0.0.1:{port}/v1");
    let results = home.path().join("results");
    let done = program(home.path())
        .args(["run", job.to_str().unwrap(), "--device", "cpu", "--results", results.to_str().unwrap()])
        .args(["--endpoint", &url, "--model", "m"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{said}");
    let why = format!("the endpoint {url} can't be reached: Connection refused");
    assert!(said.contains(&format!("chain: turn 1: {why}")) && said.contains("attempt 2 in"), "{said}");
    assert_eq!(said.matches("chain: turn 1\n").count(), 1, "{said}");
    assert!(String::from_utf8_lossy(&done.stdout).contains(&format!("chain: Not judged: {why}")), "{said}");
}
