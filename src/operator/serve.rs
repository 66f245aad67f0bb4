//! Health and metrics over plain HTTP.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::routing::get;

use super::metrics::Metrics;

/// What `/readyz` says: the API server was reached.
#[derive(Clone, Debug, Default)]
pub struct Ready(Arc<AtomicBool>);

impl Ready {
    /// From now on.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Serves until the future is dropped.
///
/// # Errors
/// When the address can't be listened on.
pub async fn serve(listen: SocketAddr, metrics: Metrics, ready: Ready) -> std::io::Result<()> {
    let state = move || {
        let ready = ready.0.load(Ordering::Acquire);
        async move {
            if ready {
                (StatusCode::OK, "ok")
            } else {
                (StatusCode::SERVICE_UNAVAILABLE, "the API server was not reached")
            }
        }
    };
    let text = move || {
        let text = metrics.text();
        async move { ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text) }
    };
    let routes = Router::new()
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(state))
        .route("/metrics", get(text));
    axum::serve(tokio::net::TcpListener::bind(listen).await?, routes).await
}
