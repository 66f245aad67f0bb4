//! From a GpuPool's spec to a checked type: what the schema can't say. Pure. The second step.

use serde_json::Value;

use crate::api::pool::{Device, GpuPool, GpuPoolSpec};
use crate::operator::endpoint::validate::inside;

/// Resource that a card is asked for by, where the spec says nothing.
const RESOURCE: &str = "nvidia.com/gpu";

/// What is wrong with a spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("spec.allowedNamespaces: `{0}` is no name of a namespace; write names, or `*` for all of them")]
    Namespace(String),
    #[error("spec.fairShare.weights: `{0}` is no name of a namespace")]
    Weight(String),
    #[error("spec.podTemplate: {0}")]
    Template(String),
    #[error("spec.objectStore.endpoint: kernels and trajectories would travel in the open; use https")]
    Open,
}

/// How a judge gets its card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Card {
    /// It has none.
    Cpu,
    /// From a device plugin.
    Resource(String),
    /// From a claim made from this template.
    Claim(String),
}

/// A pool that can be built.
#[derive(Clone, Debug)]
pub struct ValidPool {
    pub name: String,
    pub spec: GpuPoolSpec,
    pub card: Card,
    /// `None` is every namespace.
    pub namespaces: Option<Vec<String>>,
}

/// Checks a spec.
///
/// # Errors
/// Says the field that is wrong.
pub fn validate(pool: &GpuPool) -> Result<ValidPool, Error> {
    let spec = pool.spec.clone();
    for name in &spec.allowed_namespaces {
        if name != "*" && !is_label(name) {
            return Err(Error::Namespace(name.clone()));
        }
    }
    if let Some(name) = spec.fair_share.weights.keys().find(|n| !is_label(n)) {
        return Err(Error::Weight(name.clone()));
    }
    let endpoint = spec.object_store.as_ref().and_then(|o| o.endpoint.as_ref());
    if endpoint.is_some_and(|e| e.starts_with("http:") && !inside(e)) {
        return Err(Error::Open);
    }
    for (key, value) in spec.pod_template.iter().flatten() {
        match key.as_str() {
            "metadata" | "spec" if value.is_object() => {}
            "metadata" | "spec" => return Err(Error::Template(format!("`{key}` is a mapping in a PodTemplateSpec"))),
            other => {
                return Err(Error::Template(format!("`{other}` is no field of a PodTemplateSpec: metadata, spec")));
            }
        }
    }
    if let Some(containers) = spec.pod_template.as_ref().and_then(|t| t.get("spec")).and_then(|s| s.get("containers")) {
        let named = containers.as_array().is_some_and(|c| c.iter().all(|c| c["name"].as_str().is_some()));
        if !named {
            return Err(Error::Template(
                "spec.containers is a list of containers with names; the judge's is `judge`".into(),
            ));
        }
    }
    let card = match (spec.device, &spec.resource_claim_template) {
        (Device::Cpu, _) => Card::Cpu,
        (Device::Cuda, Some(template)) => Card::Claim(template.clone()),
        (Device::Cuda, None) => Card::Resource(spec.resource_name.clone().unwrap_or_else(|| RESOURCE.into())),
    };
    let everywhere = spec.allowed_namespaces.iter().any(|n| n == "*");
    let namespaces = (!everywhere).then(|| spec.allowed_namespaces.clone());
    Ok(ValidPool { name: pool.metadata.name.clone().unwrap_or_default(), spec, card, namespaces })
}

/// Whether it may be the name of a namespace.
fn is_label(name: &str) -> bool {
    let inside = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    !name.is_empty() && name.len() <= 63 && name.chars().all(inside) && !name.starts_with('-') && !name.ends_with('-')
}

/// Lays one JSON value over another as strategic merge does: mappings are merged, lists of things with a name are merged
/// by name, everything else is replaced.
pub fn overlay(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                match base.get_mut(key) {
                    _ if value.is_null() => {
                        base.remove(key);
                    }
                    Some(under) => overlay(under, value),
                    None => {
                        base.insert(key.clone(), value.clone());
                    }
                }
            }
        }
        (Value::Array(base), Value::Array(over)) if names(base).is_some() && names(over).is_some() => {
            for item in over {
                match base.iter_mut().find(|b| b["name"] == item["name"]) {
                    Some(under) => overlay(under, item),
                    None => base.push(item.clone()),
                }
            }
        }
        (Value::Array(base), Value::Array(over)) if mounts(base) && mounts(over) => {
            base.retain(|b| !over.iter().any(|o| o["mountPath"] == b["mountPath"]));
            base.extend(over.iter().cloned());
        }
        (base, over) => *base = over.clone(),
    }
}

/// Whether every item has a name that no other has.
fn names(items: &[Value]) -> Option<()> {
    let mut seen = Vec::new();
    for item in items {
        let name = item["name"].as_str()?;
        if item.get("mountPath").is_some() || seen.contains(&name) {
            return None;
        }
        seen.push(name);
    }
    Some(())
}

fn mounts(items: &[Value]) -> bool {
    items.iter().all(|i| i["mountPath"].is_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pool(spec: Value) -> GpuPool {
        let object = json!({"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "p"}, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_card_comes_from_the_device_plugin_if_nothing_is_said() {
        assert_eq!(validate(&pool(json!({"device": "cuda"}))).unwrap().card, Card::Resource("nvidia.com/gpu".into()));
        let claim = json!({"device": "cuda", "resourceClaimTemplate": "h100"});
        assert_eq!(validate(&pool(claim)).unwrap().card, Card::Claim("h100".into()));
        assert_eq!(validate(&pool(json!({"device": "cpu"}))).unwrap().card, Card::Cpu);
    }

    #[test]
    fn what_the_schema_cannot_say_is_told_with_its_field() {
        let says = |spec| validate(&pool(spec)).unwrap_err().to_string();
        assert!(
            says(json!({"device": "cpu", "allowedNamespaces": ["A b"]})).starts_with("spec.allowedNamespaces: `A b`")
        );
        assert!(says(json!({"device": "cpu", "fairShare": {"weights": {"../x": 1}}})).contains("`../x`"));
        assert!(says(json!({"device": "cpu", "podTemplate": {"containers": []}})).contains("`containers` is no field"));
        let open = json!({"device": "cpu", "objectStore": {"url": "s3://b", "endpoint": "http://minio.example.com"}});
        assert!(says(open).starts_with("spec.objectStore.endpoint: kernels"));
        let inside =
            json!({"device": "cpu", "objectStore": {"url": "s3://b", "endpoint": "http://minio.minio.svc:9000"}});
        assert!(validate(&pool(inside)).is_ok());
        let unnamed = json!({"device": "cpu", "podTemplate": {"spec": {"containers": [{"image": "x"}]}}});
        assert!(says(unnamed).contains("the judge's is `judge`"));
    }

    #[test]
    fn an_overlay_merges_by_name_and_replaces_the_rest() {
        let mut base = json!({
            "containers": [{"name": "judge", "image": "a", "args": ["x"], "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}],
            "volumes": [{"name": "tmp", "emptyDir": {}}], "hostname": "h"
        });
        let over = json!({
            "containers": [{"name": "judge", "args": ["y"], "volumeMounts": [{"name": "py", "mountPath": "/py"}, {"name": "py", "mountPath": "/opt"}]}, {"name": "more"}],
            "volumes": [{"name": "py", "hostPath": {"path": "/py"}}], "hostname": null, "runtimeClassName": "nvidia"
        });
        overlay(&mut base, &over);
        assert_eq!(
            base,
            json!({
                "containers": [
                    {"name": "judge", "image": "a", "args": ["y"], "volumeMounts": [
                        {"name": "tmp", "mountPath": "/tmp"}, {"name": "py", "mountPath": "/py"}, {"name": "py", "mountPath": "/opt"}]},
                    {"name": "more"}
                ],
                "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "py", "hostPath": {"path": "/py"}}],
                "runtimeClassName": "nvidia"
            })
        );
    }
}
