//! `kernelfleet gateway`: one model endpoint for the agents of a namespace.
//!
//! Knows what may be asked, and by whom; holds the endpoint's key. Must not know what is asked for what reason. When to
//! send and when to try again is `crate::gateway`'s, for all agents together.

mod callers;
mod counts;
mod meter;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Response, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::{get, post};
use serde_json::{Value, json};

use callers::{Callers, Review, Unknown};
use counts::{Counts, Outcome};
use meter::Meter;

use crate::gateway::{Error, Gateway, Settings, tokens};

/// Largest request: a conversation that fills a large context.
const MAX_REQUEST: usize = 32 << 20;
/// Tokens of an answer, for the announcement of a request that sets no limit.
const ANSWER: u64 = 500;

/// What a gateway pod is given.
#[derive(Clone, Debug)]
pub struct Arguments {
    /// Where models are asked.
    pub listen: SocketAddr,
    /// Where metrics and health are, apart from what agents reach.
    pub metrics: SocketAddr,
    pub upstream: Settings,
    /// Models that may be asked for.
    pub models: Vec<String>,
    /// The namespace whose pods may ask.
    pub namespace: Option<String>,
    /// File of known tokens, instead of TokenReview.
    pub tokens: Option<PathBuf>,
}

/// Why there is no gateway.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Settings(String),
    #[error("{0}")]
    Serve(std::io::Error),
}

#[derive(Debug)]
struct Role {
    gateway: Arc<Gateway>,
    models: Vec<String>,
    callers: Callers,
    counts: Counts,
    stop: &'static AtomicBool,
}

/// Serves until `stop` is set; what is being answered then has `grace` to end.
///
/// # Errors
/// Names the setting that is wrong, or the address that can't be used.
pub fn main(arguments: Arguments, stop: &'static AtomicBool, grace: Duration) -> Result<(), Failure> {
    let gateway =
        Arc::new(Gateway::new(arguments.upstream).map_err(|e| Failure::Settings(format!("--upstream: {e}")))?);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(Failure::Serve)?;
    let counts = Counts::new().map_err(|e| Failure::Settings(e.to_string()))?;
    let models = arguments.models;
    runtime.block_on(async {
        let callers = match (&arguments.tokens, arguments.namespace) {
            (Some(file), _) => Callers::from_file(file).map_err(Failure::Settings)?,
            (None, Some(namespace)) => {
                let client = kube::Client::try_default().await.map_err(|e| {
                    Failure::Settings(format!("no API server to review tokens: {e}; in a trial give --tokens FILE"))
                })?;
                Callers::Reviewed(Review::new(client, namespace))
            }
            (None, None) => return Err(Failure::Settings("--namespace: whose pods may ask?".into())),
        };
        let listener = bind("--listen", arguments.listen).await?;
        let plain = bind("--metrics", arguments.metrics).await?;
        let role = Arc::new(Role { gateway: Arc::clone(&gateway), models, callers, counts, stop });
        tracing::info!(listen = %arguments.listen, metrics = %arguments.metrics, upstream = gateway.settings().base_url, "serving");
        let told = axum::serve(plain, health(Arc::clone(&role)));
        let served = axum::serve(listener, routes(role)).with_graceful_shutdown(stopped(stop));
        let ended = async {
            stopped(stop).await;
            tokio::time::sleep(grace).await;
        };
        tokio::select! {
            done = served => done.map_err(Failure::Serve),
            // It is told of until the last answer has ended.
            done = told => done.map_err(Failure::Serve),
            () = ended => Ok(()),
        }
    })?;
    // Before the client, whose own event loop may not end within another one.
    runtime.shutdown_timeout(Duration::from_secs(1));
    drop(gateway);
    Ok(())
}

async fn bind(flag: &str, address: SocketAddr) -> Result<tokio::net::TcpListener, Failure> {
    let bound = tokio::net::TcpListener::bind(address).await;
    bound.map_err(|e| Failure::Serve(std::io::Error::new(e.kind(), format!("{flag} {address}: {e}"))))
}

async fn stopped(stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What agents reach.
fn routes(role: Arc<Role>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(|state, headers, body| ask("chat/completions", state, headers, body)))
        .route("/v1/completions", post(|state, headers, body| ask("completions", state, headers, body)))
        .route("/v1/models", get(models))
        .layer(DefaultBodyLimit::max(MAX_REQUEST))
        .with_state(role)
}

/// What the cluster asks: it has no caller and is no agent's to read.
fn health(role: Arc<Role>) -> Router {
    let ready = |State(role): State<Arc<Role>>| async move {
        if role.stop.load(Ordering::Relaxed) {
            (StatusCode::SERVICE_UNAVAILABLE, "ending")
        } else {
            (StatusCode::OK, "ok")
        }
    };
    let metrics = |State(role): State<Arc<Role>>| async move {
        role.counts.text().map_err(|e| (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()))
    };
    Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .with_state(role)
}

/// An error in the protocol's form.
fn error(status: StatusCode, code: &str, message: &str) -> Response<Body> {
    let body = json!({"error": {"message": message, "type": "kernelfleet_gateway", "code": code}});
    (status, axum::Json(body)).into_response()
}

async fn caller(role: &Role, headers: &HeaderMap) -> Result<String, Response<Body>> {
    let token =
        headers.get(header::AUTHORIZATION).and_then(|v| v.to_str().ok()).and_then(|v| v.strip_prefix("Bearer "));
    let Some(token) = token else {
        return Err(error(StatusCode::UNAUTHORIZED, "unauthenticated", "no token; send authorization: Bearer"));
    };
    role.callers.who(token.trim()).await.map_err(|why| match why {
        Unknown::Refused(why) => error(StatusCode::UNAUTHORIZED, "unauthenticated", &why),
        Unknown::Unavailable(why) => error(StatusCode::SERVICE_UNAVAILABLE, "unavailable", &why),
    })
}

async fn models(State(role): State<Arc<Role>>, headers: HeaderMap) -> Response<Body> {
    if let Err(denied) = caller(&role, &headers).await {
        role.counts.ended(Outcome::Denied);
        return denied;
    }
    let data: Vec<Value> = role.models.iter().map(|m| json!({"id": m, "object": "model"})).collect();
    axum::Json(json!({"object": "list", "data": data})).into_response()
}

/// Counts a request as under way, and as one whose caller left unless its end is told.
struct UnderWay {
    role: Arc<Role>,
    ended: Option<Outcome>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.role.counts.under_way.dec();
        self.role.counts.ended(self.ended.unwrap_or(Outcome::Left));
    }
}

async fn ask(path: &'static str, State(role): State<Arc<Role>>, headers: HeaderMap, body: Bytes) -> Response<Body> {
    role.counts.under_way.inc();
    let mut under_way = UnderWay { role: Arc::clone(&role), ended: Some(Outcome::Denied) };
    let who = match caller(&role, &headers).await {
        Ok(who) => who,
        Err(denied) => return denied,
    };
    let mut request: Value = match serde_json::from_slice(&body) {
        Ok(request @ Value::Object(_)) => request,
        Ok(_) => return error(StatusCode::BAD_REQUEST, "invalid", "the request is no JSON object"),
        Err(why) => return error(StatusCode::BAD_REQUEST, "invalid", &format!("the request is not JSON: {why}")),
    };
    let model = request["model"].as_str().unwrap_or_default();
    if !role.models.iter().any(|allowed| allowed == model) {
        let message = format!("the model `{model}` is none of this endpoint's: {}", role.models.join(", "));
        return error(StatusCode::NOT_FOUND, "model_not_found", &message);
    }
    tracing::debug!(who, path, model, bytes = body.len(), "asked");
    fit(&mut request, path, role.gateway.settings());
    let prompt = tokens::estimate(body.len());
    under_way.ended = None;
    match role.gateway.pass(path, &request, prompt + ANSWER).await {
        Ok(answer) => {
            role.counts.retried(path, answer.retries);
            pass(answer.reply, prompt, under_way)
        }
        Err(why) => {
            let text = why.to_string();
            tracing::warn!(who, path, why = text, "not answered");
            let (outcome, response) = match why {
                Error::Refused(_) => (Outcome::Refused, error(StatusCode::BAD_REQUEST, "refused", &text)),
                Error::TooLong(_) => {
                    (Outcome::Refused, error(StatusCode::BAD_REQUEST, "context_length_exceeded", &text))
                }
                _ => (Outcome::Unavailable, error(StatusCode::BAD_GATEWAY, "unavailable", &text)),
            };
            under_way.ended = Some(outcome);
            response
        }
    }
}

/// What the endpoint is asked beside what the caller wrote, and what it can't do. Pure.
fn fit(request: &mut Value, path: &str, upstream: &Settings) {
    let Some(fields) = request.as_object_mut() else { return };
    if upstream.token_ids {
        fields.insert("return_token_ids".into(), json!(true));
        if path == "chat/completions" {
            fields.insert("logprobs".into(), json!(true));
        }
    }
    if !upstream.stream {
        fields.remove("stream");
        fields.remove("stream_options");
    }
}

/// Hands an answer on, piece by piece.
fn pass(passing: crate::gateway::Passing, prompt: u64, under_way: UnderWay) -> Response<Body> {
    let kind = passing.content_type().cloned();
    let streamed = kind.as_ref().and_then(|k| k.to_str().ok()).is_some_and(|k| k.starts_with("text/event-stream"));
    let start = (passing, Meter::new(streamed), under_way);
    let pieces = futures::stream::unfold(Some(start), move |state| async move {
        let (mut passing, mut meter, mut under_way) = state?;
        match passing.piece().await {
            Ok(Some(piece)) => {
                meter.see(&piece);
                Some((Ok(Bytes::from(piece)), Some((passing, meter, under_way))))
            }
            end => {
                let usage = meter.usage(prompt);
                passing.used(usage.total());
                under_way.role.counts.used(&usage);
                let whole = end.is_ok() && meter.complete();
                under_way.ended = Some(if whole { Outcome::Answered } else { Outcome::Cut });
                // The connection breaks off as the endpoint's did, so that nobody takes a part for the whole.
                end.err().map(|why| (Err(std::io::Error::other(why.to_string())), None))
            }
        }
    });
    let mut response = Response::new(Body::from_stream(pieces));
    if let Some(kind) = kind {
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_endpoint_wants_or_cannot_do_is_said_to_it_and_not_to_its_callers() {
        let asked = || json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}});
        let mut upstream = Settings::new("http://a/v1");
        let mut request = asked();
        fit(&mut request, "chat/completions", &upstream);
        assert_eq!(request, asked());
        upstream.token_ids = true;
        upstream.stream = false;
        fit(&mut request, "chat/completions", &upstream);
        assert_eq!(request, json!({"model": "m", "return_token_ids": true, "logprobs": true}));
    }

    #[test]
    fn metrics_and_health_are_not_where_agents_ask() {
        use std::io::{Read, Write};
        static STOP: AtomicBool = AtomicBool::new(false);
        let folder = tempfile::tempdir().unwrap();
        let tokens = folder.path().join("tokens.json");
        std::fs::write(&tokens, "[]").unwrap();
        let role = Arc::new(Role {
            gateway: Arc::new(Gateway::new(Settings::new("http://127.0.0.1:1/v1")).unwrap()),
            models: vec!["m".into()],
            callers: Callers::from_file(&tokens).unwrap(),
            counts: Counts::new().unwrap(),
            stop: &STOP,
        });
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let serve = |routes: Router| {
            runtime.block_on(async {
                let listener = bind("--listen", ([127, 0, 0, 1], 0).into()).await.unwrap();
                let address = listener.local_addr().unwrap();
                tokio::spawn(async move { axum::serve(listener, routes).await });
                address
            })
        };
        let (agents, cluster) = (serve(routes(Arc::clone(&role))), serve(health(Arc::clone(&role))));
        let status = |address: SocketAddr, path: &str| -> String {
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            write!(stream, "GET {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text.split_whitespace().nth(1).unwrap().to_owned()
        };
        for path in ["/metrics", "/healthz", "/readyz"] {
            assert_eq!((status(agents, path), status(cluster, path)), ("404".into(), "200".into()), "{path}");
        }
        assert_eq!((status(agents, "/v1/models"), status(cluster, "/v1/models")), ("401".into(), "404".into()));
        runtime.shutdown_background();
    }
}
