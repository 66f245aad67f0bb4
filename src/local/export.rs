//! `kernelfleet export`: a judged candidate as a Python package that needs PyTorch alone.
//!
//! Knows the layout of a package (`agent-image/export` is its template). The candidate is recorded and built again,
//! confined as ever, and what comes out must have the digests that its verdict names: a package holds what was judged.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use super::candidate;
use super::environment::Environment;
use super::progress::Stage;
use super::run;
use super::summary::State;
use crate::judge::{self, Artifacts, Device, Options, TaskSource, Verdict};

/// Why there is no package.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} is not the result of a task; one has task.py, verdict.json and best/ (results/<job>/<task>)")]
    NotAResult(PathBuf),
    #[error("{folder} has no kernel: {why}")]
    NoKernel { folder: PathBuf, why: String },
    #[error("{0}")]
    Candidate(#[from] candidate::Error),
    #[error("the verdict of {0} is not correct (reward -1); only correct kernels are exported")]
    NotCorrect(PathBuf),
    #[error("{0} is there already and is not empty; name a folder that isn't")]
    Occupied(PathBuf),
    #[error("{0} can't be a Python package: letters, digits and _ only, no digit first")]
    Name(String),
    #[error(
        "{what} of the candidate is not what was judged ({now} here, {then} in the verdict): other compilers or another device; judge it on this machine first"
    )]
    Differs { what: &'static str, now: String, then: String },
    #[error("{0}")]
    Judge(#[from] judge::Error),
    #[error("{path}: {source}")]
    Disk { path: PathBuf, source: std::io::Error },
}

/// A result as read from its folder.
#[derive(Debug)]
pub struct Judged {
    pub task: TaskSource,
    pub candidate: judge::Candidate,
    pub verdict: Verdict,
    pub device: Device,
}

/// What `judge --keep` knows of the task beside its text; a run's folders have the task's name themselves.
const NAME: &str = "task.json";

/// Keeps the task's name beside what `run::keep_judged` keeps.
///
/// # Errors
/// When the disk refuses.
pub fn keep_name(folder: &Path, task: &str) -> std::io::Result<()> {
    run::replace(&folder.join(NAME), &json!({"name": task}).to_string())
}

/// Whether `folder` holds what `judge --keep` wrote for this task, and not the results of a run.
#[must_use]
pub fn kept_of(folder: &Path, task: &TaskSource) -> bool {
    let same = std::fs::read_to_string(folder.join(run::TASK)).is_ok_and(|text| text == task.source);
    same && folder.join("verdict.json").is_file() && !folder.join(run::OUTCOME).exists()
}

/// The name of the task whose results lie in `folder`.
fn name(folder: &Path) -> String {
    let kept = std::fs::read_to_string(folder.join(NAME)).ok();
    let kept = kept.and_then(|text| serde_json::from_str::<Value>(&text).ok()?["name"].as_str().map(str::to_owned));
    let whole = || std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf());
    kept.or_else(|| Some(run::ended(folder)?.task))
        .unwrap_or_else(|| whole().file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// Reads a task's results.
///
/// # Errors
/// When the folder holds no correct result.
pub fn read(folder: &Path) -> Result<Judged, Error> {
    if let Some(ended) = run::ended(folder).filter(|ended| ended.verdict.is_none()) {
        let how = match ended.state {
            State::Declined => "the policy declined the task",
            State::Refused => "the task was refused",
            State::Failed | State::Judged => "the task was not judged",
        };
        let why = format!("{how}: {}", ended.reason.as_deref().unwrap_or("no reason was given"));
        return Err(Error::NoKernel { folder: folder.to_path_buf(), why });
    }
    let text = |name: &str| std::fs::read_to_string(folder.join(name)).map_err(|_| Error::NotAResult(folder.into()));
    let source = text(run::TASK)?;
    let verdict: Verdict =
        serde_json::from_str(&text("verdict.json")?).map_err(|_| Error::NotAResult(folder.to_path_buf()))?;
    if !verdict.correct {
        return Err(Error::NotCorrect(folder.to_path_buf()));
    }
    let candidate = candidate::read(&folder.join("best"))?;
    let device = if verdict.device.get("kind") == Some(&json!("cpu")) { Device::Cpu } else { Device::Cuda };
    let name = name(folder);
    Ok(Judged { task: TaskSource { name, path: folder.join("task.py"), source }, candidate, verdict, device })
}

/// Records and builds the candidate again and writes the package to `target`.
///
/// # Errors
/// When what comes out is not what was judged, or the disk refuses.
pub fn export(judged: &Judged, environment: &Environment, target: &Path, stage: &Arc<Stage>) -> Result<(), Error> {
    let name = target.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let plain = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if !plain || name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(Error::Name(name));
    }
    if std::fs::read_dir(target).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Error::Occupied(target.to_path_buf()));
    }
    let options = Options { device: judged.device, ..Options::default() };
    let judge = super::commands::judge_telling(environment, options, stage, || "again, to compare: ".to_owned())?;
    stage.say(&format!("opening {}", judged.task.name));
    let mut session = judge.open(&judged.task)?;
    let artifacts = session.artifacts(&judged.candidate)?;
    for what in ["plan", "image"] {
        let (now, then) = (artifacts.digests.get(what), judged.verdict.digests.get(what));
        if now != then {
            let short = |d: Option<&String>| d.map_or("none", String::as_str).chars().take(12).collect();
            return Err(Error::Differs { what, now: short(now), then: short(then) });
        }
    }
    let arch = judged.verdict.device.get("arch").and_then(Value::as_str).map_or_else(
        || match (judged.verdict.device.get("cc_major"), judged.verdict.device.get("cc_minor")) {
            (Some(major), Some(minor)) => format!("sm_{major}{minor}"),
            _ => std::env::consts::ARCH.to_owned(),
        },
        str::to_owned,
    );
    write(judged, &artifacts, session.description(), &arch, &environment.toolchain.agent_image, target)
}

fn write(
    judged: &Judged,
    artifacts: &Artifacts,
    description: &Value,
    arch: &str,
    agent_image: &Path,
    target: &Path,
) -> Result<(), Error> {
    let disk = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Disk { path, source }
    };
    let put = |name: &str, content: &[u8]| {
        let path = target.join(name);
        let parent = path.parent().unwrap_or(target);
        std::fs::create_dir_all(parent).and_then(|()| std::fs::write(&path, content)).map_err(disk(&path))
    };
    candidate::write(&target.join("candidate"), &judged.candidate).map_err(disk(target))?;
    for name in ["__init__.py", "_launch.py"] {
        let from = agent_image.join("export").join(name);
        put(name, &std::fs::read(&from).map_err(disk(&from))?)?;
    }
    let header = agent_image.join("include/kernelfleet_math.h");
    if judged.device == Device::Cpu && header.is_file() {
        put("include/kernelfleet_math.h", &std::fs::read(&header).map_err(disk(&header))?)?;
    }
    put("reference.py", judged.task.source.as_bytes())?;
    let suffix = if judged.device == Device::Cpu { "so" } else { "cubin" };
    let mut images = Vec::new();
    for (i, (module, built)) in artifacts.plan.modules.iter().zip(&artifacts.images).enumerate() {
        if built.image.is_empty() {
            continue;
        }
        let file = format!("{i}.{suffix}");
        put(&format!("images/{file}"), &built.image)?;
        images.push(json!({"path": module.path, "defines": module.defines, "flags": module.flags, "file": file}));
    }
    let signature = json!({
        "device": judged.device, "arch": arch, "images": images, "inputs": inputs(description),
        "state": state(description), "processor": if judged.device == Device::Cpu { processor() } else { vec![] },
    });
    let pretty = |value: &Value| serde_json::to_string_pretty(value).unwrap_or_default() + "\n";
    put("signature.json", pretty(&signature).as_bytes())?;
    put("plan.json", pretty(&serde_json::to_value(&artifacts.plan).unwrap_or_default()).as_bytes())?;
    put("verdict.json", pretty(&serde_json::to_value(&judged.verdict).unwrap_or_default()).as_bytes())?;
    put("README.md", readme(judged, &inputs(description), target).as_bytes())
}

/// What `forward` is given, as the package compares it.
fn inputs(description: &Value) -> Vec<Value> {
    let list = description["inputs"].as_array().into_iter().flatten();
    list.map(|input| match input["kind"].as_str() {
        Some("value") => {
            let text = input["repr"].as_str().unwrap_or("null");
            // Numbers, true and false are written alike but for their capitals; anything else is compared as text.
            let literal = text.replace("True", "true").replace("False", "false").replace("None", "null");
            json!({"value": serde_json::from_str::<Value>(&literal).unwrap_or_else(|_| json!(text))})
        }
        _ => json!({"dtype": input["dtype"], "shape": input["shape"], "strides": input["strides"]}),
    })
    .collect()
}

fn state(description: &Value) -> Value {
    let mut map = serde_json::Map::new();
    for tensor in description["state"].as_array().into_iter().flatten() {
        let mut entry = vec![tensor["dtype"].clone()];
        entry.extend(tensor["shape"].as_array().into_iter().flatten().cloned());
        map.insert(tensor["name"].as_str().unwrap_or_default().to_owned(), Value::Array(entry));
    }
    Value::Object(map)
}

/// Instructions of this processor, which `-march=native` may have used.
fn processor() -> Vec<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("flags") || l.starts_with("Features")).unwrap_or("");
    let names = line.split_once(':').map_or("", |(_, names)| names);
    // Those that name instructions a compiler may emit; the rest (power, virtualisation) says nothing about a library.
    const PREFIXES: [&str; 17] = [
        "sse", "ssse", "avx", "fma", "f16c", "bmi", "abm", "movbe", "popcnt", "aes", "sha", "vaes", "vpclmul", "gfni",
        "amx", "pclmul", "adx",
    ];
    names.split_whitespace().filter(|n| PREFIXES.iter().any(|p| n.starts_with(p))).map(str::to_owned).collect()
}

/// What a person types first: it runs as it stands, on what the task itself gives its model.
fn example(package: &str, inputs: &[Value], device: Device) -> String {
    let names: Vec<String> = (0..inputs.len()).map(|i| format!("x{i}")).collect();
    let given = names.join(", ");
    let said = inputs.iter().map(|input| match input.get("value") {
        Some(value) => value.to_string(),
        None => format!("{} {}", input["dtype"].as_str().unwrap_or("tensor"), input["shape"]),
    });
    let said = said.collect::<Vec<_>>().join(", ");
    let drawn = match names.as_slice() {
        [] => String::new(),
        [one] => format!("({one},) = get_inputs()   # {said}\n"),
        _ => format!("{given} = get_inputs()   # {said}\n"),
    };
    let card = if device == Device::Cuda { "torch.set_default_device(\"cuda\")\n" } else { "" };
    format!(
        "import torch\n\nfrom {package} import Model\nfrom {package}.reference import get_init_inputs, get_inputs\n\n{card}model = Model(*get_init_inputs()).eval()   # or with your own arguments\n# model.load_state_dict(weights)         # of the reference's class\n{drawn}with torch.no_grad():\n    y = model({given})\n    print(model.why_reference({given}))   # None: the kernels ran\n"
    )
}

fn readme(judged: &Judged, inputs: &[Value], target: &Path) -> String {
    let package = target.file_name().unwrap_or_default().to_string_lossy();
    let example = example(&package, inputs, judged.device);
    format!(
        "# {package}\n\n{}: {}\n\n```python\n{example}```\n\nIt needs PyTorch alone. Elsewhere than on the device, shapes, strides and types that were judged (`signature.json`), in training\nand where gradients are wanted, the reference runs. `verdict.json` is the verdict with its evidence, `plan.json` the plan\nthat was judged, `candidate/` the sources.\n",
        judged.task.name,
        super::render::sentence(&judged.verdict)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_that_are_no_correct_result_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("is not the result of a task"));
        std::fs::write(folder.path().join("task.py"), "x").unwrap();
        let wrong = super::super::render::tests::sample(-1, 0.0);
        std::fs::write(folder.path().join("verdict.json"), serde_json::to_string(&wrong).unwrap()).unwrap();
        assert!(read(folder.path()).unwrap_err().to_string().contains("only correct kernels are exported"));
    }

    #[test]
    fn a_package_of_what_others_disturbed_says_so() {
        let mut verdict = super::super::render::tests::sample(3, 4.0);
        let judged = |verdict: &Verdict| Judged {
            task: TaskSource { name: "softmax".into(), path: "task.py".into(), source: String::new() },
            candidate: judge::Candidate::default(),
            verdict: verdict.clone(),
            device: Device::Cpu,
        };
        assert!(!readme(&judged(&verdict), &[], Path::new("p")).contains("Not to be trusted"));
        verdict.measurement = judge::verdict::Measurement::Shared;
        assert!(readme(&judged(&verdict), &[], Path::new("p")).contains("Not to be trusted: others used the device"));
    }

    #[test]
    fn the_example_has_as_many_arguments_as_the_model() {
        let tensor = json!({"dtype": "float32", "shape": [2, 3], "strides": [3, 1]});
        let two = example("p", &[tensor.clone(), json!({"value": 2})], Device::Cpu);
        assert!(two.contains("\nx0, x1 = get_inputs()   # float32 [2,3], 2\n"), "{two}");
        assert!(two.contains("    y = model(x0, x1)\n    print(model.why_reference(x0, x1))"), "{two}");
        let one = example("p", &[tensor], Device::Cuda);
        assert!(one.contains("(x0,) = get_inputs()") && one.contains("set_default_device"), "{one}");
    }

    #[test]
    fn a_task_without_a_kernel_says_how_it_ended_and_a_kept_one_knows_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let task = TaskSource { name: "cum".into(), path: "cum.py".into(), source: "x".into() };
        let mut outcome =
            json!({"task": "cum", "state": "declined", "reason": "cumsum is beyond it", "attempts": 0, "seconds": 1.0});
        let put = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
        put("task.py", "x".into());
        put(run::OUTCOME, json!({"key": "k", "outcome": outcome}).to_string());
        let said = read(folder.path()).unwrap_err().to_string();
        assert!(said.ends_with("has no kernel: the policy declined the task: cumsum is beyond it"), "{said}");
        let sample = super::super::render::tests::sample(3, 4.0);
        let verdict = serde_json::to_value(&sample).unwrap();
        put("verdict.json", verdict.to_string());
        assert!(
            read(folder.path()).unwrap_err().to_string().contains("declined"),
            "an older verdict is not its kernel"
        );
        assert!(!kept_of(folder.path(), &task), "a run's results are no kept verdict");
        (outcome["state"], outcome["verdict"]) = (json!("judged"), verdict);
        put(run::OUTCOME, json!({"key": "k", "outcome": outcome}).to_string());
        std::fs::create_dir(folder.path().join("best")).unwrap();
        put("best/model_new.py", "x".into());
        assert_eq!(read(folder.path()).unwrap().task.name, "cum");
        std::fs::remove_file(folder.path().join(run::OUTCOME)).unwrap();
        keep_name(folder.path(), "softmax").unwrap();
        assert_eq!(read(folder.path()).unwrap().task.name, "softmax");
        assert!(kept_of(folder.path(), &task));
        assert!(!kept_of(folder.path(), &TaskSource { source: "y".into(), ..task }), "another task's");
    }

    #[test]
    fn inputs_are_described_as_the_package_compares_them() {
        let description = json!({"inputs": [
            {"kind": "tensor", "dtype": "float32", "shape": [2, 3], "strides": [3, 1], "bytes": 24},
            {"kind": "value", "repr": "True"}, {"kind": "value", "repr": "2.5"}]});
        assert_eq!(
            inputs(&description),
            [
                json!({"dtype": "float32", "shape": [2, 3], "strides": [3, 1]}),
                json!({"value": true}),
                json!({"value": 2.5})
            ]
        );
    }
}
