//! What is served over plain HTTP: metrics and health.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder, TextEncoder};

use super::Broker;
use crate::broker::metrics;

/// The routes.
pub(super) fn routes(broker: Arc<Broker>) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(scrape))
        .with_state(broker)
}

/// Ready: it isn't stopping. (It listens only once the ledger is read, and ends when the ledger can't be written.)
async fn ready(State(broker): State<Arc<Broker>>) -> (StatusCode, &'static str) {
    if *broker.stopping.borrow() { (StatusCode::SERVICE_UNAVAILABLE, "stopping") } else { (StatusCode::OK, "ok") }
}

async fn scrape(State(broker): State<Arc<Broker>>) -> Response {
    let pool = broker.pool.clone();
    let (families, batch) = broker.step(Vec::new(), |core, now| {
        core.tick(now);
        metrics::families(&pool, &core.pool(now), core.all_facts())
    });
    let mut text = Vec::new();
    let encoder = TextEncoder::new();
    // What is shown is what is kept.
    if broker.ledger.committed(batch).await.is_err() || encoder.encode(&families, &mut text).is_err() {
        return (StatusCode::SERVICE_UNAVAILABLE, "metrics can't be given").into_response();
    }
    ([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response()
}
