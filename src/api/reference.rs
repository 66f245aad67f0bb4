//! The API reference as a page of Markdown, from the definitions themselves. Knows the part of OpenAPI that they use.

use std::fmt::Write as _;

use serde_json::Value;

/// `docs/api-reference.md`.
#[must_use]
pub fn page() -> String {
    let mut text = String::from(
        "# API reference\n\nGenerated from `src/api` by `kernelfleet crds --reference docs/api-reference.md`; a test compares them. \
         Group `kernelfleet.dev`, version `v1alpha1`. `kubectl explain KIND.spec` says the same.\n\n\
         An unknown field is refused. What the schema can't say is a condition of the status, with a reason and what to do next.\n",
    );
    for (_, definition) in super::all() {
        kind(&mut text, &definition);
    }
    text
}

fn kind(text: &mut String, definition: &Value) {
    let spec = &definition["spec"];
    let version = &spec["versions"][0];
    let schema = &version["schema"]["openAPIV3Schema"];
    let word = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let names: Vec<String> = spec["names"]["shortNames"].as_array().into_iter().flatten().map(word).collect();
    let scope = if spec["scope"] == "Cluster" { "of the cluster" } else { "of a namespace" };
    let _ = writeln!(
        text,
        "\n## {}\n\n{}\n\nA resource {scope}; short name `{}`, category `kernelfleet`.\n\n### Spec\n",
        word(&spec["names"]["kind"]),
        word(&schema["description"]),
        names.join("`, `")
    );
    fields(text, &schema["properties"]["spec"], "");
    rules(text, schema);
    let _ = writeln!(text, "\n### Status\n");
    fields(text, &schema["properties"]["status"], "");
}

fn fields(text: &mut String, schema: &Value, prefix: &str) {
    let _ = writeln!(text, "| field | type | default | |\n|---|---|---|---|");
    rows(text, schema, prefix);
}

fn rows(text: &mut String, schema: &Value, prefix: &str) {
    let required: Vec<&str> = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let default = match (&field["default"], required.contains(&name.as_str())) {
            (Value::Object(_), _) => String::new(),
            (Value::Null, true) => "required".to_owned(),
            (Value::Null, false) => String::new(),
            (value, _) => format!("`{value}`"),
        };
        let description = field["description"].as_str().unwrap_or_default().replace('\n', " ").replace('|', "\\|");
        let told: Vec<String> = own_rules(field).iter().map(|m| format!(" Refused otherwise: {m}.")).collect();
        let _ = writeln!(text, "| `{path}` | {} | {default} | {description}{} |", of_type(field), told.concat());
        rows(text, field, &path);
        if field["items"]["properties"].is_object() {
            rows(text, &field["items"], &format!("{path}[]"));
        }
    }
}

/// Messages of the rules on a value.
fn own_rules(schema: &Value) -> Vec<String> {
    let rules = schema["x-kubernetes-validations"].as_array().into_iter().flatten();
    rules.filter_map(|r| r["message"].as_str().map(str::to_owned)).collect()
}

/// The rules on the whole object and its spec.
fn rules(text: &mut String, schema: &Value) {
    let mut all = own_rules(schema);
    all.extend(own_rules(&schema["properties"]["spec"]));
    all.dedup();
    if all.is_empty() {
        return;
    }
    let _ = writeln!(text, "\nRules:\n");
    for rule in all {
        let _ = writeln!(text, "- {rule}");
    }
}

fn of_type(field: &Value) -> String {
    let range = |least: &str, most: &str, unit: &str| {
        let number = |key: &str| field[key].as_f64();
        match (number(least), number(most)) {
            (Some(a), Some(b)) => format!(", {a} to {b}{unit}"),
            (Some(a), None) => format!(", from {a}{unit}"),
            (None, Some(b)) => format!(", up to {b}{unit}"),
            (None, None) => String::new(),
        }
    };
    if let Some(words) = field["enum"].as_array() {
        let words: Vec<String> = words.iter().filter_map(Value::as_str).map(|w| format!("`{w}`")).collect();
        return words.join(", ");
    }
    match field["type"].as_str() {
        Some("string") if field["format"] == "date-time" => "time".into(),
        Some("string") => format!("string{}", range("minLength", "maxLength", " characters")),
        Some("array") => {
            let of = field["items"]["type"].as_str().unwrap_or("object");
            format!("list of {of}{}", range("minItems", "maxItems", " items"))
        }
        Some("object") if field["additionalProperties"].is_object() => {
            let of = field["additionalProperties"]["type"].as_str().unwrap_or("anything");
            format!("map to {of}{}", range("minProperties", "maxProperties", " entries"))
        }
        Some(number @ ("integer" | "number")) => format!("{number}{}", range("minimum", "maximum", "")),
        Some(other) => other.into(),
        None => "anything".into(),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_reference_in_docs_is_that_of_the_types() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/api-reference.md");
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == super::page(), "{} has drifted from src/api: run `make crds`", path.display());
    }

    #[test]
    fn every_field_of_a_spec_says_what_it_is_for() {
        let missing: Vec<String> = super::page()
            .split("### Status")
            .flat_map(str::lines)
            .filter(|line| line.starts_with("| `") && line.ends_with("|  |"))
            .map(str::to_owned)
            .collect();
        assert!(missing.is_empty(), "{}", missing.join("\n"));
    }
}
