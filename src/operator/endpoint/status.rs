//! From what was seen of a gateway to its endpoint's status. Pure. The last step.

use jiff::Timestamp;
use k8s_openapi::api::apps::v1::Deployment;

use super::dereference::Facts;
use super::validate;
use crate::api::NameReference;
use crate::api::endpoint::{ModelEndpoint, ModelEndpointStatus};
use crate::operator::conditions::{Said, set};
use crate::operator::names;

/// The status that follows. `failed` is why something couldn't be applied: one word, and a sentence.
#[must_use]
pub fn status(
    endpoint: &ModelEndpoint,
    checked: &Result<(), validate::Error>,
    failed: Option<(&'static str, String)>,
    facts: &Facts,
    now: Timestamp,
) -> ModelEndpointStatus {
    let generation = endpoint.metadata.generation;
    let name = names::gateway(endpoint.metadata.name.as_deref().unwrap_or_default());
    let mut status = endpoint.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    let ready = match (checked, failed, &facts.gateway) {
        (Err(error), _, _) => Said::no("Invalid", error.to_string()),
        (_, Some((reason, failed)), _) => Said::no(reason, failed),
        (_, _, None) => Said::no("Starting", "the gateway is being made"),
        (_, _, Some(gateway)) if is_present(gateway) => Said::yes("GatewayReady", "the gateway takes requests"),
        (_, _, Some(gateway)) if gateway.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0) > 0 => {
            Said::no("GatewayUpdating", "the gateway is being replaced by one of the present form")
        }
        _ => Said::no(
            "GatewayNotReady",
            format!(
                "the gateway is not ready; kubectl describe pods -l app.kubernetes.io/component=gateway says why: a missing Secret, an image, a quota. It is the Deployment {name}"
            ),
        ),
    };
    set(&mut status.conditions, "Ready", &ready, generation, now);
    let namespace = endpoint.metadata.namespace.clone().unwrap_or_default();
    status.gateway = facts.gateway.as_ref().map(|_| NameReference { name, namespace });
    status
}

/// Whether a gateway of the present form takes requests: its Deployment's controller has seen that form, no replica is of
/// one before, and one is available. Pure.
fn is_present(gateway: &Deployment) -> bool {
    let Some(status) = &gateway.status else { return false };
    let seen = status.observed_generation >= gateway.metadata.generation;
    let count = |replicas: Option<i32>| replicas.unwrap_or(0);
    let updated = count(status.updated_replicas);
    seen && updated > 0 && count(status.replicas) == updated && count(status.available_replicas) > 0
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn an_endpoint_is_ready_by_a_gateway_of_the_present_form() {
        let endpoint: ModelEndpoint = serde_json::from_value(json!({
            "apiVersion": "kernelfleet.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": { "name": "m", "generation": 4 },
            "spec": { "baseUrl": "http://vllm:8000/v1", "models": [{ "name": "a" }] },
        }))
        .unwrap();
        let reason = |state: Value| {
            let gateway = serde_json::from_value(json!({ "metadata": { "generation": 2 }, "status": state })).unwrap();
            let facts = Facts { gateway: Some(gateway) };
            let said = status(&endpoint, &Ok(()), None, &facts, Timestamp::UNIX_EPOCH);
            (said.conditions[0].status.clone(), said.conditions[0].reason.clone())
        };
        let state = |observed: i64, all: i32, updated: i32, ready: i32| {
            json!({ "observedGeneration": observed, "replicas": all, "updatedReplicas": updated, "readyReplicas": ready,
                "availableReplicas": ready })
        };
        let is = |status: &str, word: &str| (status.to_owned(), word.to_owned());
        assert_eq!(reason(state(2, 1, 1, 1)), is("True", "GatewayReady"));
        assert_eq!(reason(state(1, 1, 1, 1)), is("False", "GatewayUpdating"), "its controller hasn't looked yet");
        assert_eq!(reason(state(2, 1, 0, 1)), is("False", "GatewayUpdating"), "the replica is of the form before");
        assert_eq!(reason(state(2, 1, 1, 0)), is("False", "GatewayNotReady"));
        assert_eq!(reason(json!({})), is("False", "GatewayNotReady"));
    }
}
