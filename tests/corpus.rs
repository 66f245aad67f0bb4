//! Candidates of known worth, judged for real on the CPU device: honest ones of unusual make must be accepted,
//! hostile ones refused for the stated reason. A case is a folder under `tests/corpus/{honest,hostile}` with
//! `task.py`, the candidate's files, and `case.json` (`about`, `expect`: `correct`, `code`, `speedup_at_most` of what wins no
//! time by its trick); those under `tests/corpus/process` are in forms that can't be plans and run as they are. After every
//! hostile one of these an honest one is judged in the same judge.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use kernelfleet::judge::{Arbiter, Candidate, Device, Effort, Judge, Options, PathChoice, Slice, TaskSource, Verdict};
use kernelfleet::local::environment;
use serde_json::Value;

/// Lets every judge measure at once: but for the cases of `ALONE` no figure counts here, so that none has to wait for the
/// measurements of the others.
#[derive(Debug)]
struct AtOnce;

impl Arbiter for AtOnce {
    fn acquire(&self) -> bool {
        true
    }

    fn release(&self) {}
}

/// Held alone by a case whose figure counts, together by the others.
static ALONE: RwLock<()> = RwLock::new(());

/// Longest that a hostile candidate may be recorded, seconds: one of them never ends. More than another takes until it has
/// eaten all the memory that it may.
const RECORD: u64 = 30;

struct Case {
    name: String,
    task: TaskSource,
    candidate: Candidate,
    expect: Value,
}

fn files(folder: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().display().to_string();
        if path.is_dir() {
            files(&path, root, found);
        } else if name != "task.py" && name != "case.json" {
            found.insert(name, fs::read_to_string(&path).unwrap());
        }
    }
}

fn cases(kind: &str) -> Vec<Case> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(kind);
    let mut folders: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    folders
        .into_iter()
        .filter(|f| f.join("case.json").exists())
        .map(|folder| {
            let mut candidate = Candidate::default();
            files(&folder, &folder, &mut candidate.files);
            let case: Value = serde_json::from_slice(&fs::read(folder.join("case.json")).unwrap()).unwrap();
            Case {
                name: folder.file_name().unwrap().to_string_lossy().into_owned(),
                task: TaskSource {
                    name: "task".into(),
                    path: folder.join("task.py"),
                    source: fs::read_to_string(folder.join("task.py")).unwrap(),
                },
                candidate,
                expect: case["expect"].clone(),
            }
        })
        .collect()
}

/// What is wrong with a verdict, if anything.
fn complaint(expect: &Value, verdict: &Verdict) -> Option<String> {
    if Some(verdict.correct) != expect["correct"].as_bool() || (verdict.reward == -1) == verdict.correct {
        return Some(format!("judged correct={} ({:?})", verdict.correct, verdict.reason));
    }
    let speedup = verdict.speedup.eager.map_or(0.0, |x| x.median);
    if let Some(most) = expect["speedup_at_most"].as_f64().filter(|most| speedup > *most) {
        return Some(format!("{speedup:.1} times as fast as eager, {most} at most: {:?}", verdict.time_us));
    }
    let wanted: Vec<&str> = match &expect["code"] {
        Value::String(code) => vec![code],
        Value::Array(codes) => codes.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    let code = verdict.reason.as_ref().map_or("", |r| r.code.as_str());
    if wanted.contains(&code) { None } else { Some(format!("refused as {code}, not {wanted:?}: {:?}", verdict.reason)) }
}

fn judge_all(kind: &str, path: PathChoice) {
    let mut found = environment::discover().expect("the environment of `make env`");
    found.toolchain.program = PathBuf::from(env!("CARGO_BIN_EXE_kernelfleet"));
    let usual = Options::default();
    let options = Options {
        compile: false,
        device: Device::Cpu,
        path,
        measure_seconds: Some(0.0),
        record_seconds: if kind == "hostile" { RECORD } else { usual.record_seconds },
        ..usual
    };
    let judge =
        Judge::start(&found.toolchain, options, Slice::under(Arc::new(AtOnce))).expect("a judge of the CPU device");
    let only = std::env::var("CORPUS_ONLY").ok();
    let neighbour = (kind == "process/hostile")
        .then(|| cases("process/honest").into_iter().find(|c| c.name == "relu").expect("the honest neighbour"));
    let mut cases = cases(kind);
    cases.retain(|case| only.as_ref().is_none_or(|o| case.name.contains(o.as_str())));
    // Candidates of one task are judged in one session, so that each also has to do no harm to those after it.
    cases.sort_by(|a, b| (&a.task.source, &a.name).cmp(&(&b.task.source, &b.name)));
    let mut session = None;
    let mut wrong = Vec::new();
    let judged = cases.len();
    let mut before: Option<&Case> = None;
    for case in &cases {
        let figure = case.expect["speedup_at_most"].is_number();
        let _alone = figure.then(|| ALONE.write().unwrap_or_else(PoisonError::into_inner));
        let _together = (!figure).then(|| ALONE.read().unwrap_or_else(PoisonError::into_inner));
        let start = std::time::Instant::now();
        if before.is_none_or(|b| b.task.source != case.task.source) {
            drop(session.take());
        }
        before = Some(case);
        let mut open = || session.take().map_or_else(|| judge.open(&case.task), Ok);
        let outcome = open().and_then(|mut opened| {
            let verdict = opened.judge(&case.candidate, Effort::Final)?;
            session = Some(opened);
            Ok(verdict)
        });
        let said = match &outcome {
            Ok(verdict) => complaint(&case.expect, verdict),
            Err(error) => Some(format!("no verdict: {error}")),
        };
        if let (Ok(v), true) = (&outcome, std::env::var_os("CORPUS_PHASES").is_some()) {
            println!("{:?} {:?} {:?}", v.phases_seconds, v.speedup.eager, v.time_us);
        }
        println!(
            "{kind}/{}: {:.1} s: {}",
            case.name,
            start.elapsed().as_secs_f64(),
            said.as_deref().unwrap_or("as expected")
        );
        wrong.extend(said.map(|s| format!("{}: {s}", case.name)));
        // Whatever it did, the next one in its session is judged as if it had never been.
        if let (Some(honest), Some(opened)) = (&neighbour, &mut session) {
            let next = opened.judge(&honest.candidate, Effort::Verify);
            let said = next.as_ref().map_or_else(|e| Some(e.to_string()), |v| complaint(&honest.expect, v));
            wrong.extend(said.map(|s| format!("the one after {}: {s}", case.name)));
        }
    }
    assert!(judged > 0, "no case was judged");
    assert!(wrong.is_empty(), "{} of {judged} cases:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn every_honest_candidate_of_unusual_make_is_accepted() {
    judge_all("honest", PathChoice::Plan);
}

#[test]
fn every_hostile_candidate_is_refused_for_its_reason() {
    judge_all("hostile", PathChoice::Plan);
}

#[test]
fn existing_work_directories_run_as_they_are() {
    judge_all("process/honest", PathChoice::Auto);
}

#[test]
fn what_runs_as_it_is_is_watched() {
    judge_all("process/hostile", PathChoice::Auto);
}
