//! What the pods of all parts have alike: how long they stay on a node that is lost, and what their images are pulled with.
//!
//! Knows fields of a pod's spec. Must not know what runs in it.

use serde_json::{Value, json};

use super::context::Settings;

/// Seconds that a pod stays on a node that isn't heard of, where Kubernetes' own 300 would leave its work undone.
const LOST_SECONDS: i64 = 30;
/// Taints of a node that isn't heard of.
const LOST: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// Tolerations of pods that are to be replaced soon when their node is lost.
#[must_use]
pub fn tolerations() -> Value {
    LOST.iter().map(|key| toleration(key)).collect()
}

fn toleration(key: &str) -> Value {
    json!({ "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECONDS })
}

/// Adds these tolerations to those of a pod's spec, but where somebody has said something of the same taint.
pub fn tolerate(spec: &mut Value) {
    let mut all = spec["tolerations"].as_array().cloned().unwrap_or_default();
    let covers = |toleration: &Value, key: &str| {
        let all_keys = toleration["key"].as_str().unwrap_or_default().is_empty();
        let effect = toleration["effect"].as_str().unwrap_or_default();
        (all_keys || toleration["key"] == key) && matches!(effect, "" | "NoExecute")
    };
    for key in LOST {
        if !all.iter().any(|t| covers(t, key)) {
            all.push(toleration(key));
        }
    }
    spec["tolerations"] = all.into();
}

/// References to the Secrets that images are pulled with. They are of the pod's own namespace.
#[must_use]
pub fn pull(settings: &Settings) -> Value {
    settings.pull_secrets.iter().map(|name| json!({ "name": name })).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_says_of_a_lost_node_stays_and_the_rest_is_added() {
        let mut spec = json!({});
        tolerate(&mut spec);
        assert_eq!(spec["tolerations"], tolerations());
        let card = json!({ "key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule" });
        let patient = json!({ "key": LOST[0], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 900 });
        let mut spec = json!({ "tolerations": [card, patient] });
        tolerate(&mut spec);
        assert_eq!(spec["tolerations"], json!([card, patient, toleration(LOST[1])]));
        let everything = json!({ "operator": "Exists" });
        let mut spec = json!({ "tolerations": [everything] });
        tolerate(&mut spec);
        assert_eq!(spec["tolerations"], json!([everything]));
    }
}
