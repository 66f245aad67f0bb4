//! Reads manifests: the very files that `kubectl apply` takes, several documents in one where wanted.
//!
//! Knows YAML, the kinds that a local run understands, and how to say which line is wrong. Must not know what
//! is done with a job. ConfigMaps of the same file are kept, since a job may refer to them.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde_json::Value;
use serde_saphyr::granit_parser::{Event, Parser};

use super::job::{ONE_POLICY, ONE_SOURCE, OptimizationJob};
use super::schema::{self, Step, dotted};
use super::{API_VERSION, GROUP};

/// Largest manifest that is read.
pub const MAX_BYTES: u64 = 16 << 20;

/// What is wrong, with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    /// Line and column, from 1, where they are known.
    pub place: Option<(usize, usize)>,
    /// `spec.agent.maxTurns`, empty for the document itself.
    pub field: String,
    pub message: String,
}

/// Why a manifest was refused: all that is wrong with it, not only the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub path: PathBuf,
    pub flaws: Vec<Flaw>,
}

impl std::error::Error for Refusal {}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, flaw) in self.flaws.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{}", self.path.display())?;
            if let Some((line, column)) = flaw.place {
                write!(f, ":{line}:{column}")?;
            }
            if !flaw.field.is_empty() {
                write!(f, ": {}", flaw.field)?;
            }
            write!(f, ": {}", flaw.message)?;
        }
        Ok(())
    }
}

/// What a manifest holds.
#[derive(Clone, Debug, Default)]
pub struct Manifest {
    pub jobs: Vec<OptimizationJob>,
    /// ConfigMaps by name: key -> text.
    pub config_maps: BTreeMap<String, BTreeMap<String, String>>,
}

/// Reads a manifest file.
///
/// # Errors
/// Says every flaw with file, line and field.
pub fn read(path: &Path) -> Result<Manifest, Refusal> {
    let refuse = |message: String| Refusal {
        path: path.to_path_buf(),
        flaws: vec![Flaw { place: None, field: String::new(), message }],
    };
    let metadata = std::fs::metadata(path).map_err(|e| refuse(format!("can't be read: {e}")))?;
    if metadata.len() > MAX_BYTES {
        return Err(refuse(format!("{} bytes are over the limit of {MAX_BYTES}", metadata.len())));
    }
    let text = std::fs::read_to_string(path).map_err(|e| refuse(format!("can't be read: {e}")))?;
    parse(path, &text)
}

/// Reads a manifest's text; `path` is only for messages.
///
/// # Errors
/// As `read`.
pub fn parse(path: &Path, text: &str) -> Result<Manifest, Refusal> {
    let refuse = |flaws: Vec<Flaw>| Refusal { path: path.to_path_buf(), flaws };
    let one = |place, message| refuse(vec![Flaw { place, field: String::new(), message }]);
    let places = places(text).map_err(|(place, message)| one(Some(place), message))?;
    let documents: Vec<Value> = serde_saphyr::from_str_multiple(text).map_err(|e| {
        let place =
            e.location().and_then(|l| Some((usize::try_from(l.line()).ok()?, usize::try_from(l.column()).ok()?)));
        one(place, format!("not valid YAML: {}", first_line(&e.without_snippet().to_string())))
    })?;
    // An empty document (a leading or trailing `---`) is nothing, for both readers of the text.
    let documents: Vec<Value> = documents.into_iter().filter(|d| !d.is_null()).collect();
    let places: Vec<_> = places.into_iter().filter(|p| p.len() > 1).collect();
    let mut manifest = Manifest::default();
    let mut flaws = Vec::new();
    for (i, document) in documents.iter().enumerate() {
        let empty = HashMap::new();
        let places = places.get(i).unwrap_or(&empty);
        let flaw = |steps: &[Step], message: String| Flaw {
            place: (0..=steps.len()).rev().find_map(|n| places.get(&steps[..n])).copied(),
            field: dotted(steps),
            message,
        };
        match document["kind"].as_str() {
            Some("ConfigMap") => config_map(document, &mut manifest),
            Some("OptimizationJob") => match job(document) {
                Ok(job) => manifest.jobs.push(job),
                Err(problems) => flaws.extend(problems.into_iter().map(|p| flaw(&p.path, p.message))),
            },
            // A cluster's part of a file; here the flags say what they say there.
            Some("GpuPool" | "ModelEndpoint" | "TaskSet") => {}
            Some(other) => {
                let near = schema::nearest(other, ["OptimizationJob", "ConfigMap"].into_iter());
                let hint = near.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
                let ours = document["apiVersion"].as_str().is_some_and(|v| v.starts_with(GROUP));
                // A file for a cluster may hold what a local run has no use for; it isn't our business to refuse it.
                if ours || near.is_some() {
                    let message =
                        format!("`{other}` is not a kind that is understood here: OptimizationJob, ConfigMap{hint}");
                    flaws.push(flaw(&[Step::Key("kind".into())], message));
                }
            }
            None => flaws.push(flaw(&[], "the field `kind` is missing: OptimizationJob is wanted".into())),
        }
    }
    if flaws.is_empty() && manifest.jobs.is_empty() {
        flaws.push(Flaw {
            place: None,
            field: String::new(),
            message: format!("holds no OptimizationJob (apiVersion: {API_VERSION}, kind: OptimizationJob)"),
        });
    }
    if flaws.is_empty() { Ok(manifest) } else { Err(refuse(flaws)) }
}

/// The sentence for a person: without the reader's advice to programmers.
fn first_line(text: &str) -> &str {
    let line = text.lines().find(|l| !l.trim().is_empty()).unwrap_or("").trim();
    line.split(", set DuplicateKeyPolicy").next().unwrap_or(line)
}

fn config_map(document: &Value, manifest: &mut Manifest) {
    let name = document["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let data = document["data"].as_object().into_iter().flatten();
    let data = data.filter_map(|(k, v)| Some((k.clone(), v.as_str()?.to_owned()))).collect();
    manifest.config_maps.insert(name, data);
}

fn job(document: &Value) -> Result<OptimizationJob, Vec<schema::Problem>> {
    let key = |names: &[&str]| names.iter().map(|n| Step::Key((*n).to_owned())).collect::<Vec<_>>();
    let problem = |names: &[&str], message: String| schema::Problem { path: key(names), message };
    let mut problems = Vec::new();
    match document["apiVersion"].as_str() {
        Some(API_VERSION) => {}
        Some(other) => problems.push(problem(&["apiVersion"], format!("`{other}` is not known, use {API_VERSION}"))),
        None => problems.push(problem(&[], format!("the field `apiVersion` is missing: {API_VERSION}"))),
    }
    if document["metadata"]["name"].as_str().is_none_or(str::is_empty) {
        problems.push(problem(&["metadata"], "the field `name` is missing".into()));
    }
    for name in document.as_object().into_iter().flat_map(serde_json::Map::keys) {
        const KNOWN: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];
        if !KNOWN.contains(&name.as_str()) {
            let near = schema::nearest(name, KNOWN.into_iter()).unwrap_or("spec");
            problems.push(problem(&[name], format!("unknown field; did you mean `{near}`?")));
        }
    }
    if document.get("spec").is_none() {
        problems.push(problem(&[], "the field `spec` is missing".into()));
        return Err(problems);
    }
    let definition = super::optimization_job();
    let schema = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
    problems.extend(schema::check(&document["spec"], schema, &key(&["spec"])));
    let spec = &document["spec"];
    let count =
        |value: &Value, names: [&str; 3]| names.iter().filter(|n| value.get(n).is_some_and(|v| !v.is_null())).count();
    if spec["tasks"].is_object() && count(&spec["tasks"], ["inline", "configMap", "taskSet"]) != 1 {
        problems.push(problem(&["spec", "tasks"], ONE_SOURCE.into()));
    }
    if spec["policy"].is_object() && count(&spec["policy"], ["endpoint", "builtin", "replay"]) != 1 {
        problems.push(problem(&["spec", "policy"], ONE_POLICY.into()));
    }
    let mut names: Vec<&str> = Vec::new();
    for (i, task) in spec["tasks"]["inline"].as_array().into_iter().flatten().enumerate() {
        if let Some(name) = task["name"].as_str() {
            if names.contains(&name) {
                let mut path = key(&["spec", "tasks", "inline"]);
                path.extend([Step::Index(i), Step::Key("name".into())]);
                problems.push(schema::Problem { path, message: format!("`{name}` is the name of an earlier task") });
            }
            names.push(name);
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    // The schema has passed; what is left is what only the types know.
    let mut clean = document.clone();
    if let Some(fields) = clean.as_object_mut() {
        fields.remove("status");
    }
    serde_path_to_error::deserialize(clean).map_err(|e| {
        let names: Vec<String> = e
            .path()
            .iter()
            .filter_map(|s| match s {
                serde_path_to_error::Segment::Map { key } => Some(key.clone()),
                _ => None,
            })
            .collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        vec![problem(&names, e.inner().to_string())]
    })
}

type Places = HashMap<Vec<Step>, (usize, usize)>;

/// For each document, where each field begins.
fn places(text: &str) -> Result<Vec<Places>, ((usize, usize), String)> {
    enum Open {
        Map { key: Option<String> },
        List { next: usize },
    }
    let mut documents: Vec<Places> = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    let mut path: Vec<Step> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|e| {
            let marker = e.marker();
            ((marker.line(), marker.col() + 1), format!("not valid YAML: {}", e.info()))
        })?;
        let place = (span.start.line(), span.start.col() + 1);
        if matches!(event, Event::DocumentStart(..)) {
            documents.push(Places::new());
            open.clear();
            path.clear();
            continue;
        }
        if matches!(event, Event::MappingEnd | Event::SequenceEnd) {
            open.pop();
            finish(&mut open, &mut path);
            continue;
        }
        if !event.is_node() {
            continue;
        }
        let Some(document) = documents.last_mut() else { continue };
        // A scalar where a key is due is the key; its place is the field's.
        if let Some(Open::Map { key: key @ None }) = open.last_mut() {
            let name = event.scalar().map(|(text, _)| text.to_owned()).unwrap_or_default();
            path.push(Step::Key(name.clone()));
            document.insert(path.clone(), place);
            *key = Some(name);
            continue;
        }
        if let Some(Open::List { next }) = open.last() {
            path.push(Step::Index(*next));
            document.insert(path.clone(), place);
        } else if path.is_empty() {
            document.insert(Vec::new(), place);
        }
        match event {
            Event::MappingStart(..) => open.push(Open::Map { key: None }),
            Event::SequenceStart(..) => open.push(Open::List { next: 0 }),
            _ => finish(&mut open, &mut path),
        }
    }
    return Ok(documents);

    /// A value has ended: its container goes on to the next.
    fn finish(open: &mut [Open], path: &mut Vec<Step>) {
        match open.last_mut() {
            Some(Open::Map { key }) => {
                *key = None;
                path.pop();
            }
            Some(Open::List { next }) => {
                *next += 1;
                path.pop();
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
apiVersion: kernelfleet.dev/v1alpha1
kind: OptimizationJob
metadata:
  name: demo
spec:
  tasks:
    inline:
      - name: relu
        source: |
          import torch
          class Model(torch.nn.Module): ...
  policy:
    builtin: {}
  agent:
    maxTurns: 20
"#;

    fn refusal(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from}");
        parse(Path::new("job.yaml"), &GOOD.replace(from, to)).unwrap_err().to_string()
    }

    #[test]
    fn a_field_that_was_left_empty_is_told_with_what_belongs_there() {
        let inline = GOOD.split_once("    inline:\n").unwrap().1;
        let inline = inline.split_once("  policy:").unwrap().0;
        let said = refusal(&format!("    inline:\n{inline}"), "");
        assert!(said.contains("spec.tasks: nothing, a mapping is wanted with fields of configMap, inline"), "{said}");
        assert!(said.contains("taskSet"), "{said}");
    }

    #[test]
    fn a_manifest_comes_with_its_defaults() {
        let manifest = parse(Path::new("job.yaml"), GOOD).unwrap();
        let spec = &manifest.jobs[0].spec;
        assert_eq!((spec.agent.max_turns, spec.agent.attempts, spec.judge.inputs), (20, 1, 5));
        assert_eq!(spec.tasks.inline.as_ref().unwrap()[0].name, "relu");
    }

    #[test]
    fn documents_of_other_kinds_are_kept_or_passed_over() {
        let more =
            "---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: tasks}\ndata:\n  a.py: x\n---\nkind: Namespace\n";
        let manifest = parse(Path::new("job.yaml"), &format!("---{GOOD}{more}---\n")).unwrap();
        assert_eq!(manifest.config_maps["tasks"]["a.py"], "x");
        assert_eq!(manifest.jobs.len(), 1);
    }

    #[test]
    fn each_flaw_is_told_with_its_line_its_field_and_what_is_allowed() {
        let flaws = [
            ("a field in another spelling", refusal("maxTurns: 20", "max_turns: 20")),
            ("a field that is not known", refusal("maxTurns: 20", "image: x")),
            ("a number out of bounds", refusal("maxTurns: 20", "maxTurns: 0")),
            ("text where a number is due", refusal("maxTurns: 20", "maxTurns: many")),
            ("a word that is not of the list", refusal("  agent:", "  judge:\n    tolerance: kernel-bench\n  agent:")),
            ("two policies", refusal("builtin: {}", "builtin: {}\n    replay:\n      configMap: x")),
            ("no tasks", refusal("    inline:", "    inlined:")),
            ("a name that is no name", refusal("- name: relu", "- name: My Task")),
            ("a source that is missing", refusal("        source: |", "        text: |")),
            ("another kind", refusal("kind: OptimizationJob", "kind: OptimisationJob")),
            ("another version", refusal("kernelfleet.dev/v1alpha1", "kernelfleet.dev/v1")),
            ("something inside builtin", refusal("builtin: {}", "builtin:\n      seed: 1")),
            ("broken YAML", refusal("  agent:", "  agent: [")),
            ("a tab", refusal("  agent:", "\tagent:")),
            ("a list where a mapping is due", refusal("builtin: {}", "- builtin")),
            ("a key twice", refusal("maxTurns: 20", "maxTurns: 20\n    maxTurns: 30")),
        ];
        let text: Vec<String> =
            flaws.iter().map(|(what, says)| format!("{what}\n  {}", says.replace('\n', "\n  "))).collect();
        insta::assert_snapshot!(text.join("\n"));
    }

    #[test]
    fn the_examples_are_manifests_and_the_demo_holds_the_example_tasks() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        for entry in std::fs::read_dir(&examples).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "yaml") {
                read(&path).map_err(|r| r.to_string()).unwrap();
            }
        }
        let demo = read(&examples.join("demo.yaml")).unwrap();
        let inline = demo.jobs[0].spec.tasks.inline.clone().unwrap();
        assert_eq!(inline.len(), 8);
        for task in inline {
            let file = std::fs::read_to_string(examples.join("tasks").join(format!("{}.py", task.name))).unwrap();
            assert!(file == task.source, "{} in demo.yaml differs from examples/tasks", task.name);
        }
    }

    #[test]
    fn the_jobs_of_the_user_guide_are_manifests() {
        let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/user-guide.md");
        let text = std::fs::read_to_string(&guide).unwrap();
        let blocks: Vec<&str> = text.split("```yaml\n").skip(1).map(|b| b.split("```").next().unwrap()).collect();
        let jobs = blocks.iter().filter(|b| b.contains("kind: OptimizationJob"));
        let read: Vec<Manifest> = jobs.map(|b| parse(&guide, b).map_err(|r| format!("{r}\n{b}")).unwrap()).collect();
        assert!(read.len() >= 2);
        assert!(read.iter().any(|m| m.jobs[0].spec.policy.endpoint.is_some()));
    }

    #[test]
    fn the_definitions_rules_have_the_messages_that_are_told_here() {
        let text = super::super::optimization_job().to_string();
        assert!(text.contains(ONE_SOURCE) && text.contains(ONE_POLICY));
    }

    proptest::proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn no_text_makes_the_reader_panic(text in "[a-z:\\-\\[\\]{}&*|#\"' \n\t]{0,120}") {
            let _ = parse(Path::new("job.yaml"), &text);
        }
    }
}
