//! Checks a value against the schema of its resource, so that a manifest is refused here for the reasons that
//! the API server would have, with words that say what is allowed.
//!
//! Knows the part of OpenAPI that our definitions use. Must not know files or any resource in particular.
//! Rules in CEL are not evaluated: `manifest` checks those by their message.

use serde_json::Value;

/// One step into a value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    Key(String),
    Index(usize),
}

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub path: Vec<Step>,
    /// One sentence: what is there, what is allowed.
    pub message: String,
}

/// `spec.tasks.inline[0].name`
#[must_use]
pub fn dotted(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Key(key) => {
                if !text.is_empty() {
                    text.push('.');
                }
                text.push_str(key);
            }
            Step::Index(i) => text.push_str(&format!("[{i}]")),
        }
    }
    text
}

/// Every way in which `value` breaks `schema`, in the order of the value.
#[must_use]
pub fn check(value: &Value, schema: &Value, at: &[Step]) -> Vec<Problem> {
    let mut problems = Vec::new();
    walk(value, schema, &mut at.to_vec(), &mut problems);
    problems
}

/// Fields that a message names at most.
const MOST_NAMED: usize = 12;

fn walk(value: &Value, schema: &Value, path: &mut Vec<Step>, problems: &mut Vec<Problem>) {
    if value.is_null() && schema["nullable"] == Value::Bool(true) {
        return;
    }
    if let Some(allowed) = schema["enum"].as_array() {
        let words: Vec<&str> = allowed.iter().filter_map(Value::as_str).collect();
        if !allowed.contains(value) {
            let near = value.as_str().and_then(|v| nearest(v, words.iter().copied()));
            let hint = near.map(|n| format!("; did you mean `{n}`?")).unwrap_or_default();
            problems.push(problem(path, format!("{} is not one of {}{hint}", show(value), words.join(", "))));
        }
        return;
    }
    let wanted = schema["type"].as_str().unwrap_or("");
    if !fits(value, wanted) {
        let found = match value {
            Value::Array(_) | Value::Object(_) | Value::Null => kind(value).to_owned(),
            _ => format!("{} is {}", show(value), kind(value)),
        };
        // A field that was left empty: what belongs there is what a person asks next.
        let fields = schema["properties"].as_object().filter(|_| value.is_null());
        let fields: Vec<&str> = fields.into_iter().flatten().map(|(name, _)| name.as_str()).take(MOST_NAMED).collect();
        let with = if fields.is_empty() { String::new() } else { format!(" with fields of {}", fields.join(", ")) };
        problems.push(problem(path, format!("{found}, {} is wanted{with}", article(wanted))));
        return;
    }
    match value {
        Value::Object(fields) => object(value, fields, schema, path, problems),
        Value::Array(items) => {
            bounds(items.len(), "items", &schema["minItems"], &schema["maxItems"], path, problems);
            for (i, item) in items.iter().enumerate() {
                path.push(Step::Index(i));
                walk(item, &schema["items"], path, problems);
                path.pop();
            }
        }
        Value::String(text) => {
            bounds(text.chars().count(), "characters", &schema["minLength"], &schema["maxLength"], path, problems);
            if let Some(pattern) = schema["pattern"].as_str()
                && !matches_name(text)
            {
                let message = format!("{} does not match {pattern}: lower-case letters, digits, - and _", show(value));
                problems.push(problem(path, message));
            }
        }
        Value::Number(number) => {
            let (min, max) = (schema["minimum"].as_f64(), schema["maximum"].as_f64());
            let x = number.as_f64().unwrap_or(f64::NAN);
            if min.is_some_and(|m| x < m) || max.is_some_and(|m| x > m) {
                problems.push(problem(path, format!("{number} is out of bounds, {} is allowed", range(min, max))));
            }
        }
        Value::Null | Value::Bool(_) => {}
    }
}

fn object(
    value: &Value,
    fields: &serde_json::Map<String, Value>,
    schema: &Value,
    path: &mut Vec<Step>,
    problems: &mut Vec<Problem>,
) {
    let known = schema["properties"].as_object();
    for (key, field) in fields {
        path.push(Step::Key(key.clone()));
        if let Some(schema) = known.and_then(|k| k.get(key)) {
            walk(field, schema, path, problems);
        } else if schema["additionalProperties"].is_object() {
            walk(field, &schema["additionalProperties"], path, problems);
        } else if schema["x-kubernetes-preserve-unknown-fields"] != Value::Bool(true) {
            let names: Vec<&str> = known.into_iter().flat_map(serde_json::Map::keys).map(String::as_str).collect();
            let hint = match nearest(key, names.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None if names.is_empty() => "nothing can be set here".to_owned(),
                None => format!("known here: {}", names.join(", ")),
            };
            problems.push(problem(path, format!("unknown field; {hint}")));
        }
        path.pop();
    }
    for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.get(name).is_none() {
            problems.push(problem(path, format!("the field `{name}` is missing")));
        }
    }
}

fn problem(path: &[Step], message: String) -> Problem {
    Problem { path: path.to_vec(), message }
}

fn fits(value: &Value, wanted: &str) -> bool {
    match wanted {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        _ => true,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

fn article(wanted: &str) -> &'static str {
    match wanted {
        "object" => "a mapping",
        "array" => "a list",
        "string" => "text",
        "boolean" => "true or false",
        "integer" => "a whole number",
        _ => "a number",
    }
}

fn show(value: &Value) -> String {
    let text = match value {
        Value::String(text) => format!("`{text}`"),
        Value::Array(_) => "this list".into(),
        Value::Object(_) => "this mapping".into(),
        Value::Null => "an empty value".into(),
        other => other.to_string(),
    };
    if text.chars().count() > 60 { format!("{}…`", text.chars().take(57).collect::<String>()) } else { text }
}

fn bounds(n: usize, unit: &str, min: &Value, max: &Value, path: &[Step], problems: &mut Vec<Problem>) {
    let (min, max) = (min.as_f64(), max.as_f64());
    #[expect(clippy::cast_precision_loss, reason = "lengths are far below 2^52")]
    let x = n as f64;
    if min.is_some_and(|m| x < m) || max.is_some_and(|m| x > m) {
        problems.push(problem(path, format!("{n} {unit}, {} is allowed", range(min, max))));
    }
}

fn range(min: Option<f64>, max: Option<f64>) -> String {
    match (min, max) {
        (Some(min), Some(max)) => format!("{min} to {max}"),
        (Some(min), None) => format!("at least {min}"),
        (None, Some(max)) => format!("at most {max}"),
        (None, None) => "anything".into(),
    }
}

/// The one pattern that our schemas use.
fn matches_name(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    edge(text.chars().next())
        && edge(text.chars().next_back())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_')
}

/// The name that was probably meant, if one is near enough.
#[must_use]
pub fn nearest<'a>(word: &str, names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let fold = |s: &str| s.to_ascii_lowercase().replace(['_', '-'], "");
    let word = fold(word);
    names
        .map(|n| (distance(&word, &fold(n)), n))
        .filter(|(d, n)| *d <= 1 + n.len() / 4)
        .min_by_key(|(d, _)| *d)
        .map(|(_, n)| n)
}

/// Insertions, deletions and replacements between two words.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let replaced = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_near_are_offered_and_far_ones_are_not() {
        let names = ["maxTurns", "contextTokens", "attempts"];
        assert_eq!(nearest("max_turn", names.into_iter()), Some("maxTurns"));
        assert_eq!(nearest("atempts", names.into_iter()), Some("attempts"));
        assert_eq!(nearest("image", names.into_iter()), None);
    }

    proptest::proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn distance_is_symmetric_and_zero_only_for_equal_words(a in "[a-d]{0,8}", b in "[a-d]{0,8}") {
            proptest::prop_assert_eq!(distance(&a, &b), distance(&b, &a));
            proptest::prop_assert_eq!(distance(&a, &b) == 0, a == b);
        }
    }
}
