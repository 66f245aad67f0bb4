//! From the texts of a TaskSet to its status. Pure. The last step.

use std::collections::BTreeMap;

use jiff::Timestamp;
use sha2::{Digest, Sha256};

use crate::api::taskset::{TaskSet, TaskSetStatus};
use crate::hex::hex;
use crate::operator::conditions::{Said, set};
use crate::operator::context::Found;
use crate::operator::job::dereference::{Texts, unsupported};
use crate::task::syntax;

/// The status that follows; `maps` is `None` where the source is none of those that are read yet.
#[must_use]
pub fn status(object: &TaskSet, maps: Option<&[(String, Found<Texts>)]>, now: Timestamp) -> TaskSetStatus {
    let generation = object.metadata.generation;
    let mut status = object.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let (tasks, refusals, digest, ready) = match maps {
        None => {
            let source = unsupported(&object.spec);
            let message = format!("spec.{source} is not supported yet; put the tasks into ConfigMaps");
            (None, BTreeMap::new(), None, Said::no("NotSupported", message))
        }
        Some(maps) => read(maps),
    };
    status.refused = tasks.map(|_| refusals.values().sum());
    status.tasks = tasks;
    status.refusals = refusals;
    status.digest = digest;
    set(&mut status.conditions, "Ready", &ready, generation, now);
    status
}

type Read = (Option<i32>, BTreeMap<String, i32>, Option<String>, Said);

fn read(maps: &[(String, Found<Texts>)]) -> Read {
    for (name, found) in maps {
        let what = match found {
            Found::Missing => format!("there is no ConfigMap `{name}` in this namespace; waiting for it"),
            Found::Unreadable(what) => format!("the ConfigMap `{name}` can't be used: {what}"),
            Found::Is(_) => continue,
        };
        return (None, BTreeMap::new(), None, Said::no("ConfigMapNotFound", what));
    }
    let mut names: Vec<&str> = Vec::new();
    let mut refusals: BTreeMap<String, i32> = BTreeMap::new();
    let mut first = None;
    let mut digest = Sha256::new();
    for (map, found) in maps {
        let Found::Is(texts) = found else { continue };
        for (key, text) in texts {
            let Some(name) = key.strip_suffix(".py") else { continue };
            let refusal = if names.contains(&name) {
                Some(("twice".to_owned(), "another task has that name".to_owned()))
            } else {
                syntax::check(text, None).into_iter().next().map(|r| (r.code, r.message))
            };
            if let Some((code, message)) = refusal {
                first.get_or_insert_with(|| format!("{map}/{key}: {message}"));
                *refusals.entry(code).or_default() += 1;
                continue;
            }
            names.push(name);
            for part in [name, text.as_str()] {
                digest.update(u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes());
                digest.update(part.as_bytes());
            }
        }
    }
    let tasks = i32::try_from(names.len()).unwrap_or(i32::MAX);
    let address = hex(&digest.finalize());
    let said = match (tasks, first) {
        (0, None) => Said::no("NoTasks", "the ConfigMaps hold no task: each key that ends in .py is one"),
        (_, Some(first)) => {
            Said::no("TasksInvalid", format!("{} files are no tasks; {first}", refusals.values().sum::<i32>()))
        }
        (_, None) => Said::yes("Ready", format!("{tasks} tasks")),
    };
    (Some(tasks), refusals, Some(format!("sha256:{address}")), said)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::operator::job::validate::tests::GOOD;

    fn map(name: &str, texts: &[(&str, &str)]) -> (String, Found<Texts>) {
        (name.into(), Found::Is(texts.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()))
    }

    #[test]
    fn a_set_is_counted_and_its_address_changes_with_its_content_alone() {
        let set: TaskSet = serde_json::from_value(json!({"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "TaskSet",
            "metadata": {"name": "s"}, "spec": {"configMap": {"names": ["a", "b"]}}}))
        .unwrap();
        let now = Timestamp::UNIX_EPOCH;
        let one =
            status(&set, Some(&[map("a", &[("x.py", GOOD), ("note.md", "n")]), map("b", &[("y.py", GOOD)])]), now);
        assert_eq!((one.tasks, one.refused, one.conditions[0].status.as_str()), (Some(2), Some(0), "True"));
        let same = status(&set, Some(&[map("a", &[("x.py", GOOD), ("y.py", GOOD)])]), now);
        assert_eq!(one.digest, same.digest);
        let other = status(&set, Some(&[map("a", &[("x.py", GOOD), ("z.py", GOOD)])]), now);
        assert_ne!(one.digest, other.digest);
        let bad = status(&set, Some(&[map("a", &[("x.py", "def"), ("y.py", GOOD)])]), now);
        assert_eq!((bad.tasks, bad.refused, bad.refusals["parse"]), (Some(1), Some(1), 1));
        assert!(bad.conditions[0].message.contains("a/x.py: syntax error"), "{}", bad.conditions[0].message);
        let none = status(&set, Some(&[("a".into(), Found::Missing)]), now);
        assert_eq!((none.tasks, none.conditions[0].reason.as_str()), (None, "ConfigMapNotFound"));
    }
}
