//! Conditions of a status: set, kept where nothing changed, looked up. Pure.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Longest message that is written; a status stays small whatever a task or a server says.
const MOST_MESSAGE: usize = 2048;

/// What is said of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Said {
    /// Whether it is so; `None` is not known.
    pub status: Option<bool>,
    /// One word in PascalCase.
    pub reason: String,
    /// A sentence: why, and what to do next.
    pub message: String,
}

impl Said {
    /// It is so.
    #[must_use]
    pub fn yes(reason: &str, message: impl Into<String>) -> Self {
        Self { status: Some(true), reason: reason.into(), message: message.into() }
    }

    /// It isn't so.
    #[must_use]
    pub fn no(reason: &str, message: impl Into<String>) -> Self {
        Self { status: Some(false), reason: reason.into(), message: message.into() }
    }

    /// Nobody knows yet.
    #[must_use]
    pub fn unknown(reason: &str, message: impl Into<String>) -> Self {
        Self { status: None, reason: reason.into(), message: message.into() }
    }
}

/// Says something of an object; the time of the last transition stays where the status stays.
pub fn set(conditions: &mut Vec<Condition>, kind: &str, said: &Said, generation: Option<i64>, now: Timestamp) {
    let status = match said.status {
        Some(true) => "True",
        Some(false) => "False",
        None => "Unknown",
    };
    let message = cut(&said.message, MOST_MESSAGE);
    let old = conditions.iter().position(|c| c.type_ == kind);
    let since = old.map(|i| &conditions[i]).filter(|c| c.status == status);
    let condition = Condition {
        last_transition_time: since.map_or(Time(whole(now)), |c| c.last_transition_time.clone()),
        message,
        observed_generation: generation,
        reason: said.reason.clone(),
        status: status.into(),
        type_: kind.into(),
    };
    match old {
        Some(i) => conditions[i] = condition,
        None => conditions.push(condition),
    }
}

/// The condition of that type.
#[must_use]
pub fn get<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == kind)
}

/// Whether the condition of that type is true.
#[must_use]
pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    get(conditions, kind).is_some_and(|c| c.status == "True")
}

/// Times in a status are whole seconds.
#[must_use]
pub fn whole(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// At most `most` characters.
#[must_use]
pub fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most.saturating_sub(1)).collect();
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_condition_is_that_of_its_last_change() {
        let mut conditions = Vec::new();
        let at = |s| Timestamp::from_second(s).unwrap();
        set(&mut conditions, "Ready", &Said::no("Waiting", "a"), Some(1), at(10));
        set(&mut conditions, "Ready", &Said::no("Waiting", "b"), Some(2), at(20));
        assert_eq!(conditions[0].last_transition_time.0, at(10));
        assert_eq!((conditions[0].message.as_str(), conditions[0].observed_generation), ("b", Some(2)));
        set(&mut conditions, "Ready", &Said::yes("Running", "c"), Some(2), at(30));
        assert_eq!(conditions[0].last_transition_time.0, at(30));
        assert_eq!(conditions.len(), 1);
        assert!(is_true(&conditions, "Ready") && !is_true(&conditions, "Other"));
    }

    #[test]
    fn a_long_message_is_cut() {
        let mut conditions = Vec::new();
        set(&mut conditions, "Ready", &Said::unknown("X", "ä".repeat(9000)), None, Timestamp::UNIX_EPOCH);
        assert_eq!(conditions[0].message.chars().count(), MOST_MESSAGE);
    }
}
