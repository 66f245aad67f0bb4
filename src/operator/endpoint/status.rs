//! From what was seen of a gateway to its endpoint's status. Pure. The last step.

use jiff::Timestamp;

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
        (_, _, Some(gateway)) if gateway.status.as_ref().and_then(|s| s.ready_replicas).unwrap_or(0) > 0 => {
            Said::yes("GatewayReady", "the gateway takes requests")
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
