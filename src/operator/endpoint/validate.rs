//! From a ModelEndpoint's spec to a checked type: what the schema can't say. Pure. The second step.

use crate::api::endpoint::{ModelEndpoint, ModelEndpointSpec};

/// What is wrong with a spec.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("spec.models: the name `{0}` holds a comma, which separates names")]
    Comma(String),
    #[error("spec.baseUrl: a key would travel in the open; use https, or leave apiKeySecret out")]
    Open,
}

/// An endpoint that can be built.
#[derive(Clone, Debug)]
pub struct ValidEndpoint {
    pub name: String,
    pub namespace: String,
    pub spec: ModelEndpointSpec,
}

/// Checks a spec.
///
/// # Errors
/// Says the field that is wrong.
pub fn validate(endpoint: &ModelEndpoint) -> Result<ValidEndpoint, Error> {
    let spec = endpoint.spec.clone();
    if let Some(model) = spec.models.iter().find(|m| m.name.contains(',')) {
        return Err(Error::Comma(model.name.clone()));
    }
    if spec.api_key_secret.is_some() && spec.base_url.starts_with("http:") && !inside(&spec.base_url) {
        return Err(Error::Open);
    }
    Ok(ValidEndpoint {
        name: endpoint.metadata.name.clone().unwrap_or_default(),
        namespace: endpoint.metadata.namespace.clone().unwrap_or_default(),
        spec,
    })
}

/// Whether an address is one of the cluster or the machine, where plain HTTP is usual.
#[must_use]
pub fn inside(url: &str) -> bool {
    let host = url.trim_start_matches("http://");
    let host = host.split(['/', ':']).next().unwrap_or_default();
    let private = host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_private() || ip.is_loopback());
    private
        || host == "localhost"
        || host.ends_with(".svc")
        || host.ends_with(".svc.cluster.local")
        || !host.contains('.')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_key_does_not_travel_in_the_open() {
        let check = |url: &str| {
            let object = json!({"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "ModelEndpoint", "metadata": {"name": "m"},
                "spec": {"baseUrl": url, "apiKeySecret": {"name": "k"}, "models": [{"name": "a"}]}});
            validate(&serde_json::from_value(object).unwrap()).map(|_| ())
        };
        assert_eq!(check("https://api.example.com/v1"), Ok(()));
        assert_eq!(check("http://api.example.com/v1"), Err(Error::Open));
        for inside in
            ["http://vllm.models.svc:8000/v1", "http://vllm:8000/v1", "http://10.0.0.3/v1", "http://localhost:8000/v1"]
        {
            assert_eq!(check(inside), Ok(()), "{inside}");
        }
    }
}
