//! What is served over plain HTTP: health.

use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;

use super::Broker;

/// The routes.
pub(super) fn routes(broker: Arc<Broker>) -> Router {
    Router::new().route("/healthz", get(|| async { "ok" })).route("/readyz", get(ready)).with_state(broker)
}

/// Ready: it isn't stopping. (It listens only once the ledger is read, and ends when the ledger can't be written.)
async fn ready(State(broker): State<Arc<Broker>>) -> (StatusCode, &'static str) {
    if *broker.stopping.borrow() { (StatusCode::SERVICE_UNAVAILABLE, "stopping") } else { (StatusCode::OK, "ok") }
}
