//! The chart's values, their schema and the operator's flags belong together.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::Value;

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("charts/kernelfleet")
}

/// Paths of the values, two deep: what is below belongs to Kubernetes.
fn of_values(values: &Value) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for (key, section) in values.as_object().unwrap() {
        paths.extend(section.as_object().unwrap().keys().map(|name| format!("{key}.{name}")));
    }
    paths
}

fn of_schema(schema: &Value) -> BTreeSet<String> {
    let mut paths = BTreeSet::new();
    for (key, section) in schema["properties"].as_object().unwrap() {
        if key == "global" {
            continue;
        }
        assert_eq!(section["additionalProperties"], Value::Bool(false), "{key} takes anything");
        paths.extend(section["properties"].as_object().unwrap().keys().map(|name| format!("{key}.{name}")));
    }
    paths
}

#[test]
fn the_schema_knows_each_value_and_no_other() {
    let values = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    let values: Value = serde_saphyr::from_str(&values).unwrap();
    let schema = std::fs::read_to_string(chart().join("values.schema.json")).unwrap();
    assert_eq!(of_values(&values), of_schema(&serde_json::from_str(&schema).unwrap()));
}

#[test]
fn the_operator_leaves_a_node_that_is_lost_as_soon_as_what_it_makes() {
    let template = std::fs::read_to_string(chart().join("templates/operator.yaml")).unwrap();
    for made in kernelfleet::operator::pods::tolerations().as_array().unwrap() {
        let (key, seconds) = (made["key"].as_str().unwrap(), &made["tolerationSeconds"]);
        let line = format!("{{ key: {key}, operator: Exists, effect: NoExecute, tolerationSeconds: {seconds} }}");
        assert!(template.contains(&line), "{line}");
    }
}

#[test]
fn the_chart_starts_the_operator_with_flags_that_it_has() {
    let help =
        std::process::Command::new(env!("CARGO_BIN_EXE_kernelfleet")).args(["operator", "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let template = std::fs::read_to_string(chart().join("templates/operator.yaml")).unwrap();
    let flags: Vec<&str> = template
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- --"))
        .filter_map(|flag| flag.split('=').next())
        .collect();
    assert!(flags.len() >= 8, "{flags:?}");
    for flag in flags {
        assert!(help.contains(&format!("--{flag} ")), "the operator has no --{flag}");
    }
}
