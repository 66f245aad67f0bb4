//! `/healthz` and `/readyz` of a judge pod.
//!
//! Knows when the broker was last heard. Must not know what is done with it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;

/// A judge that has heard nothing for so long is not ready.
const SILENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct Facts {
    renew: Option<Duration>,
    heard: Option<Instant>,
}

/// What is known of the judge's connection.
#[derive(Debug, Default)]
pub struct Health(Mutex<Facts>);

impl Health {
    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The broker has registered the judge, which is to renew its leases so often.
    pub fn registered(&self, renew_seconds: f64) {
        let renew = Duration::try_from_secs_f64(renew_seconds).unwrap_or(Duration::from_secs(10));
        *self.facts() = Facts { renew: Some(renew), heard: Some(Instant::now()) };
    }

    /// The broker has answered.
    pub fn heard(&self) {
        self.facts().heard = Some(Instant::now());
    }

    /// How often leases are renewed.
    #[must_use]
    pub fn renew(&self) -> Duration {
        self.facts().renew.unwrap_or(Duration::from_secs(10)).max(Duration::from_millis(100))
    }

    fn ready(&self, now: Instant) -> Result<(), String> {
        match self.facts().heard {
            None => Err("the broker has not registered this judge yet".into()),
            Some(at) if now.saturating_duration_since(at) > SILENCE => {
                Err(format!("the broker was last heard {} s ago", now.saturating_duration_since(at).as_secs()))
            }
            Some(_) => Ok(()),
        }
    }
}

/// Serves in the background until it is dropped.
///
/// # Errors
/// When the address can't be used.
pub fn serve(listen: SocketAddr, health: Arc<Health>) -> std::io::Result<tokio::runtime::Runtime> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("health").enable_all().build()?;
    let listener = runtime
        .block_on(tokio::net::TcpListener::bind(listen))
        .map_err(|e| std::io::Error::new(e.kind(), format!("--listen {listen} can't be used: {e}")))?;
    let ready = move || async move {
        match health.ready(Instant::now()) {
            Ok(()) => (StatusCode::OK, "ok".to_owned()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why),
        }
    };
    let routes = Router::new().route("/healthz", get(|| async { "ok" })).route("/readyz", get(ready));
    runtime.spawn(async move { axum::serve(listener, routes).await });
    Ok(runtime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_judge_is_ready_while_the_broker_is_heard() {
        let health = Health::default();
        assert!(health.ready(Instant::now()).unwrap_err().contains("not registered"));
        health.registered(3.0);
        assert_eq!(health.renew(), Duration::from_secs(3));
        assert!(health.ready(Instant::now()).is_ok());
        assert!(health.ready(Instant::now() + Duration::from_secs(90)).unwrap_err().contains("last heard"));
    }
}
