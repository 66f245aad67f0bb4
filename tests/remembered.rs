//! Verdicts that are remembered, by the real judge on the CPU device: what counts as the same candidate, what is kept,
//! and what becomes of a remembered verdict that a second look contradicts. Needs `make env`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernelfleet::judge::verdict::Measurement;
use kernelfleet::judge::{Candidate, Device, Effort, Judge, Options, Slice, TaskSource, Verdict};
use kernelfleet::local::environment;

/// A case of the corpus: its task and its candidate.
fn case(name: &str) -> (TaskSource, Candidate) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let read = |file: &str| fs::read_to_string(folder.join(file)).unwrap();
    let files: BTreeMap<String, String> =
        ["model_new.py", "kernels/k.cpp"].into_iter().map(|f| (f.to_owned(), read(f))).collect();
    (TaskSource { name: name.into(), path: folder.join("task.py"), source: read("task.py") }, Candidate { files })
}

/// The same candidate with `new` for `old` in one of its files.
fn with(candidate: &Candidate, file: &str, old: &str, new: &str) -> Candidate {
    let mut changed = candidate.clone();
    let text = changed.files.get_mut(file).unwrap();
    assert!(text.contains(old), "{file} has no {old:?}");
    *text = text.replace(old, new);
    changed
}

/// A judge that remembers in `cache` and judges `share` of what it remembers anew.
fn judge(cache: &Path, share: f64) -> Arc<Judge> {
    let mut found = environment::discover().expect("the environment of `make env`");
    found.toolchain.program = PathBuf::from(env!("CARGO_BIN_EXE_kernelfleet"));
    found.toolchain.cache = cache.to_owned();
    let options = Options {
        compile: false,
        device: Device::Cpu,
        inputs: 2,
        measure_seconds: Some(0.0),
        remembered: Some(share),
        ..Options::default()
    };
    Judge::start(&found.toolchain, options, Slice::new()).expect("a judge of the CPU device")
}

fn kept(cache: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache.join("verdicts")).into_iter().flatten();
    entries.map(|e| e.unwrap().path()).collect()
}

fn code(verdict: &Verdict) -> &str {
    verdict.reason.as_ref().map_or("", |r| r.code.as_str())
}

#[test]
fn a_changed_comment_does_not_draw_again_and_other_code_for_constants_does() {
    let cache = tempfile::tempdir().unwrap();
    let judge = judge(cache.path(), 0.0);
    // A wrong candidate: its verdict doesn't depend on who else uses this machine.
    let (task, wrong) = case("hostile/zeros");
    let mut session = judge.open(&task).unwrap();
    let mut say = |candidate: &Candidate| session.judge(candidate, Effort::Final).unwrap();
    let first = say(&wrong);
    assert_eq!((first.reward, code(&first), first.cached), (-1, "mismatch", false));
    let commented = with(&wrong, "model_new.py", "class ModelNew", "# one more comment\nclass ModelNew");
    let commented = with(&commented, "kernels/k.cpp", "extern", "// and here\nextern");
    let second = say(&commented);
    assert!(second.cached, "{second:?}");
    assert_eq!((second.reward, &second.reason, second.compared), (-1, &first.reason, first.compared));
    assert_ne!(first.digests["candidate"], second.digests["candidate"]);
    assert!(!second.phases_seconds.contains_key("correct"), "{:?}", second.phases_seconds);
    let other = with(&wrong, "kernels/k.cpp", "0.0f", "1.0f");
    assert!(!say(&other).cached);
    drop(session);

    // Two candidates with the same plan and the same images, and other constants.
    let (task, right) = case("honest/folded_batch_norm");
    let mut session = judge.open(&task).unwrap();
    let mut say = |candidate: &Candidate| session.judge(candidate, Effort::Final).unwrap();
    let wrong = with(&right, "model_new.py", "* scale + self.norm.bias", "* scale - self.norm.bias");
    let first = say(&wrong);
    assert_eq!((code(&first), first.cached), ("mismatch", false));
    let commented = with(&wrong, "model_new.py", "    def forward", "    # folded\n    def forward");
    assert!(say(&commented).cached);
    let before = kept(cache.path()).len();
    let good = say(&right);
    assert_eq!(good.digests["image"], first.digests["image"]);
    assert_eq!(good.digests["plan"], first.digests["plan"]);
    assert!(good.correct && !good.cached, "{:?}", good.reason);
    // Kept unless others used this machine while it was measured.
    let exclusive = good.measurement == Measurement::Exclusive;
    assert_eq!(kept(cache.path()).len() - before, usize::from(exclusive));
    let again = say(&with(&right, "model_new.py", "class ModelNew", "\n\n# moved\nclass ModelNew"));
    assert_eq!(again.cached, exclusive);
    if exclusive {
        assert_eq!(again.speedup, good.speedup);
        let line = |v: &Verdict| v.launches[0].line.clone().unwrap();
        assert_ne!(line(&again), line(&good), "lines are those of the text that was given");
    }
}

#[test]
fn a_remembered_verdict_that_a_second_look_contradicts_is_marked_and_gives_way_to_the_worse() {
    let cache = tempfile::tempdir().unwrap();
    let sure = judge(cache.path(), 1.0);
    let (task, wrong) = case("hostile/zeros");
    let mut session = sure.open(&task).unwrap();
    let first = session.judge(&wrong, Effort::Final).unwrap();
    assert_eq!(code(&first), "mismatch");
    let agreed = session.judge(&wrong, Effort::Final).unwrap();
    assert!(agreed.cached && agreed.audit.is_empty(), "{agreed:?}");
    assert!(agreed.phases_seconds.contains_key("correct"), "it was not judged anew");
    assert!(agreed.notes.iter().any(|n| n.contains("judged anew")), "{:?}", agreed.notes);

    // As if the first look had been a lucky one.
    let [entry] = kept(cache.path()).try_into().unwrap();
    let mut text: serde_json::Value = serde_json::from_slice(&fs::read(&entry).unwrap()).unwrap();
    text["verdict"]["correct"] = true.into();
    text["verdict"]["reward"] = 2.into();
    text["verdict"]["reason"] = serde_json::Value::Null;
    fs::write(&entry, text.to_string()).unwrap();
    let marked = session.judge(&wrong, Effort::Final).unwrap();
    assert_eq!((marked.reward, code(&marked), marked.cached), (-1, "mismatch", false));
    assert!(marked.audit.iter().any(|a| a.contains("was correct and is now not correct")), "{:?}", marked.audit);
    let text: serde_json::Value = serde_json::from_slice(&fs::read(&entry).unwrap()).unwrap();
    assert_eq!(text["verdict"]["reward"], -1);
    assert_eq!(text["verdict"]["audit"].as_array().unwrap().len(), 1);
}

#[test]
fn parameters_that_a_candidate_has_met_are_not_those_of_a_later_judgement_in_full() {
    let cache = tempfile::tempdir().unwrap();
    let judge = judge(cache.path(), 0.0);
    let (task, honest) = case("honest/layer_norm_with_parameters");
    let told = "class ModelNew(nn.Module):\n    def load_state_dict(self, state, strict=True):\n        \
                raise ValueError(str({k: v.flatten()[:3].tolist() for k, v in state.items()}))\n";
    let tells = with(&honest, "model_new.py", "class ModelNew(nn.Module):\n", told);
    let mut session = judge.open(&task).unwrap();
    let mut met = |effort: Effort| {
        let verdict = session.judge(&tells, effort).unwrap();
        let reason = verdict.reason.expect("it tells what it was given");
        assert!(reason.message.contains("tensor") || reason.message.contains('['), "{}", reason.message);
        reason.message
    };
    let first = met(Effort::Final);
    assert_eq!(met(Effort::Verify), first, "a look in between costs no new parameters");
    let second = met(Effort::Final);
    assert_ne!(second, first);
    assert_ne!(met(Effort::Final), second);
    // Those that are drawn later serve an honest candidate as the first ones did.
    let verdict = session.judge(&honest, Effort::Final).unwrap();
    assert!(verdict.correct, "{:?}", verdict.reason);
}
