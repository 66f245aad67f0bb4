//! The tools of an agent, with the names, arguments and behaviour that models know from coding agents.
//!
//! Knows what a model wrote and what it is told. Must not know how the workspace is confined, nor who judges. A
//! mistake of the model is a text for the model; only a sandbox that fails is an error.

mod arguments;
mod bash;
mod files;
mod search;
mod todo;

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::Duration;

use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::gateway::chat::Call;
use crate::sandbox::workspace::{self, Workspace};
use arguments as a;

/// Most characters of a result.
pub const MOST_RESULT: usize = 40_000;

/// What a call came to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// What the model is told.
    pub content: String,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Done,
    /// The tool ran and could not do what was asked.
    Failed,
    /// There was no call to run: no such tool, no JSON, wrong arguments.
    Malformed,
}

/// A text for the model: what is wrong and what to do.
#[derive(Debug)]
enum Trouble {
    Mistake(String),
    Sandbox(workspace::Error),
}

impl From<workspace::Error> for Trouble {
    fn from(error: workspace::Error) -> Self {
        if error.is_fault() { Self::Sandbox(error) } else { Self::Mistake(error.to_string()) }
    }
}

type Done = Result<String, Trouble>;

fn mistake<T>(text: impl Into<String>) -> Result<T, Trouble> {
    Err(Trouble::Mistake(text.into()))
}

/// What the tools remember between calls.
#[derive(Debug, Default)]
pub struct Tools {
    /// Digest of each file as the model last saw it, by its path in the workspace.
    seen: BTreeMap<String, u64>,
    todos: Vec<a::Todo>,
}

struct Tool {
    name: &'static str,
    about: &'static str,
    schema: fn() -> Value,
}

fn schema<T: schemars::JsonSchema>() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.inline_subschemas = true;
    settings.meta_schema = None;
    let mut value = settings.into_generator().into_root_schema_for::<T>().to_value();
    plain(&mut value);
    value
}

/// Leaves what all servers understand: no titles, no number formats, an optional field is just not required.
fn plain(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // A property may be called `title`; a schema's own title is a text.
            if map.get("title").is_some_and(Value::is_string) {
                map.remove("title");
            }
            for key in ["format", "default", "minimum"] {
                if map.get(key).is_some_and(|v| !v.is_object()) {
                    map.remove(key);
                }
            }
            if let Some(Value::Array(types)) = map.get("type") {
                let types: Vec<&Value> = types.iter().filter(|t| *t != "null").collect();
                if let [one] = types.as_slice() {
                    let one = (*one).clone();
                    map.insert("type".into(), one);
                }
            }
            if let Some(Value::Array(any)) = map.remove("anyOf") {
                let some = any.into_iter().find(|s| s["type"] != "null");
                if let Some(Value::Object(some)) = some {
                    map.extend(some);
                }
            }
            if let Some(Value::Array(words)) = map.get_mut("enum") {
                words.retain(|w| !w.is_null());
            }
            map.values_mut().for_each(plain);
        }
        Value::Array(list) => list.iter_mut().for_each(plain),
        _ => {}
    }
}

const TOOLS: [Tool; 10] = [
    Tool {
        name: "Bash",
        about: "Runs a command in a persistent bash shell: folder, variables and functions stay for the next command. \
                The timeout is 120000 ms unless another is given, 600000 at most. Output over 30000 characters is cut in the middle. \
                There is no network. Use Read, Edit, Glob and Grep instead of cat, sed, find and grep.",
        schema: schema::<a::Bash>,
    },
    Tool {
        name: "BashOutput",
        about: "What a background command has printed since it was last asked, and whether it still runs.",
        schema: schema::<a::BashOutput>,
    },
    Tool {
        name: "KillBash",
        about: "Kills a background command and all that it started.",
        schema: schema::<a::KillBash>,
    },
    Tool {
        name: "Read",
        about: "Reads a text file, with line numbers: up to 2000 lines from the beginning, or from `offset`. Lines over 2000 characters are cut.",
        schema: schema::<a::Read>,
    },
    Tool {
        name: "Write",
        about: "Writes a file, with the folders above it; an existing one is replaced and must have been read before.",
        schema: schema::<a::Write>,
    },
    Tool {
        name: "Edit",
        about: "Replaces `old_string` in a file by `new_string`. The file must have been read before; `old_string` must be there \
                exactly once, white space included and without the line numbers of Read, unless `replace_all` is true.",
        schema: schema::<a::Edit>,
    },
    Tool {
        name: "MultiEdit",
        about: "Several edits of one file, in order, each on what the one before left: all of them or none.",
        schema: schema::<a::MultiEdit>,
    },
    Tool {
        name: "Glob",
        about: "Files by a pattern such as `kernels/**/*.cu`, the newest first.",
        schema: schema::<a::Glob>,
    },
    Tool {
        name: "Grep",
        about: "Searches files by a regular expression. `output_mode` is `files_with_matches` (default), `content` (with -n, -A, -B, -C) or `count`.",
        schema: schema::<a::Grep>,
    },
    Tool {
        name: "TodoWrite",
        about: "Keeps the list of what is to be done; each call replaces the whole list. One item at a time is `in_progress`.",
        schema: schema::<a::TodoWrite>,
    },
];

/// The tools in the form of the chat protocol.
pub static DEFINITIONS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    TOOLS
        .iter()
        .map(|t| {
            let about = t.about.split_whitespace().collect::<Vec<_>>().join(" ");
            json!({"type": "function", "function": {"name": t.name, "description": about, "parameters": (t.schema)()}})
        })
        .collect()
});

/// Reads the arguments of a call, saying what is wrong with them in words that help to mend them.
fn arguments<T: DeserializeOwned>(call: &Call) -> Result<T, String> {
    // An empty text is how some models call a tool without arguments.
    let text = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
    let value: Value = serde_json::from_str(text)
        .map_err(|e| format!("the arguments of {} are not valid JSON ({e}); send one JSON object", call.name))?;
    if !value.is_object() {
        return Err(format!("the arguments of {} must be one JSON object", call.name));
    }
    serde_path_to_error::deserialize(value).map_err(|e| {
        let path = e.path().to_string();
        let place = if path == "." { String::new() } else { format!(" at `{path}`") };
        format!("the arguments of {} are not as its schema says{place}: {}", call.name, e.inner())
    })
}

impl Tools {
    /// Runs one call, a command for at most `longest`.
    ///
    /// # Errors
    /// Only when the sandbox itself fails.
    pub fn call(
        &mut self,
        workspace: &mut dyn Workspace,
        call: &Call,
        longest: Duration,
    ) -> Result<Outcome, workspace::Error> {
        let outcome = |kind, content: String| Outcome { content: limited(content), kind };
        macro_rules! run {
            ($run:expr) => {
                match arguments(call) {
                    Ok(arguments) => $run(arguments),
                    Err(text) => return Ok(outcome(Kind::Malformed, text)),
                }
            };
        }
        let done: Done = match call.name.as_str() {
            "Bash" => run!(|x| bash::run(workspace, &x, longest)),
            "BashOutput" => run!(|x| bash::output(workspace, &x)),
            "KillBash" => run!(|x| bash::kill(workspace, &x)),
            "Read" => run!(|x| self.read(workspace, &x)),
            "Write" => run!(|x| self.write(workspace, &x)),
            "Edit" => run!(|x| self.edit(workspace, x)),
            "MultiEdit" => run!(|x| self.multi_edit(workspace, &x)),
            "Glob" => run!(|x| search::glob(workspace, &x)),
            "Grep" => run!(|x| search::grep(workspace, &x)),
            "TodoWrite" => run!(|x| self.todo(x)),
            other => {
                let names: Vec<&str> = TOOLS.iter().map(|t| t.name).collect();
                let text = format!("there is no tool `{other}`; the tools are {}", names.join(", "));
                return Ok(outcome(Kind::Malformed, text));
            }
        };
        match done {
            Ok(content) => Ok(outcome(Kind::Done, content)),
            Err(Trouble::Mistake(text)) => Ok(outcome(Kind::Failed, text)),
            Err(Trouble::Sandbox(error)) => Err(error),
        }
    }
}

/// A result of bearable length: the middle is what is left out.
fn limited(text: String) -> String {
    if text.len() <= MOST_RESULT {
        return text;
    }
    let cut = |at: usize| (0..=at).rev().find(|i| text.is_char_boundary(*i)).unwrap_or(0);
    let (head, tail) = (cut(MOST_RESULT / 2), cut(text.len() - MOST_RESULT / 2));
    let (first, last) = (text.get(..head).unwrap_or_default(), text.get(tail..).unwrap_or_default());
    format!("{first}\n... {} characters are left out here ...\n{last}", tail - head)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_as_models_know_them() {
        insta::assert_json_snapshot!(*DEFINITIONS);
    }

    #[test]
    fn a_long_result_keeps_its_beginning_and_its_end() {
        let text = format!("begin{}ä{}end", "x".repeat(MOST_RESULT), "y".repeat(MOST_RESULT));
        let short = limited(text);
        assert!(short.starts_with("begin") && short.ends_with("end") && short.contains("characters are left out"));
        assert!(short.len() < MOST_RESULT + 100);
    }
}
