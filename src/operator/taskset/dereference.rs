//! Reads the ConfigMaps of a TaskSet. The first step.

use kube::Client;

use crate::api::TaskSetSpec;
use crate::operator::context::Found;
use crate::operator::job::dereference::{Error, Texts, config_map};

/// The ConfigMaps in their order; `None` where the source is none of those that are read yet.
///
/// # Errors
/// When the API server can't be asked.
pub async fn dereference(
    client: &Client,
    namespace: &str,
    spec: &TaskSetSpec,
) -> Result<Option<Vec<(String, Found<Texts>)>>, Error> {
    let Some(source) = &spec.config_map else { return Ok(None) };
    let mut found = Vec::new();
    for name in &source.names {
        found.push((name.clone(), config_map(client, namespace, name).await?));
    }
    Ok(Some(found))
}
