//! A scripted endpoint: a real HTTP server that speaks chat completions and says what a test wrote.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::routing::post;
use serde_json::{Value, json};

/// What the server does with one request.
#[derive(Clone, Debug)]
pub enum Act {
    /// Says something and calls tools: name and arguments.
    Say(String, Vec<(String, Value)>),
    /// Any message, with a reason for its end.
    Message(Value, &'static str),
    /// An error, with headers.
    Status(u16, Vec<(&'static str, String)>, String),
    /// Headers, then nothing for ever.
    Hang,
    /// The beginning of a stream, then the end of the connection.
    Cut,
    /// That many bytes of text.
    Large(usize),
    /// A body that is not what the protocol says.
    Raw(String),
}

pub fn call(tool: &str, arguments: Value) -> Act {
    Act::Say(String::new(), vec![(tool.into(), arguments)])
}

pub fn bash(command: &str) -> Act {
    call("Bash", json!({"command": command, "timeout": 600_000}))
}

pub fn say(text: &str) -> Act {
    Act::Say(text.into(), vec![])
}

/// Tokens that the server counts for the `n`th answer that it completes: told in `usage`.
pub fn usage(n: u64) -> (u64, u64) {
    (1000 + 10 * n, 20 + n)
}

type Script = Box<dyn FnMut(usize, &Value) -> Act + Send>;

pub struct Server {
    address: SocketAddr,
    pub state: Arc<Mutex<State>>,
    runtime: Option<tokio::runtime::Runtime>,
}

pub struct State {
    script: Script,
    pub requests: Vec<Value>,
    pub authorizations: Vec<String>,
    pub answered: u64,
    /// Whether requests are kept: not for soaks.
    pub keep: bool,
    pub count: usize,
    /// Whether `usage` is told.
    pub counts: bool,
}

impl Server {
    /// Plays the acts in order, and the last one for ever.
    pub fn playing(acts: Vec<Act>) -> Self {
        let mut acts: VecDeque<Act> = acts.into();
        Self::new(move |_, _| if acts.len() > 1 { acts.pop_front().unwrap() } else { acts[0].clone() })
    }

    /// Asks `script` for each request: its number from 0, and its body.
    pub fn new(script: impl FnMut(usize, &Value) -> Act + Send + 'static) -> Self {
        let state = Arc::new(Mutex::new(State {
            script: Box::new(script),
            requests: vec![],
            authorizations: vec![],
            answered: 0,
            keep: true,
            count: 0,
            counts: true,
        }));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let shared = Arc::clone(&state);
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let answer = move |headers: HeaderMap, body: Bytes| {
            let shared = Arc::clone(&shared);
            async move {
                let response = respond(&shared, &headers, &body);
                match response {
                    Some(response) => response,
                    None => std::future::pending().await,
                }
            }
        };
        let router = Router::new()
            .route("/v1/chat/completions", post(answer.clone()))
            .route("/v1/completions", post(answer))
            .layer(axum::extract::DefaultBodyLimit::max(64 << 20));
        runtime.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, state, runtime: Some(runtime) }
    }

    pub fn url(&self) -> String {
        format!("http://{}/v1", self.address)
    }

    pub fn requests(&self) -> Vec<Value> {
        self.state.lock().unwrap().requests.clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The answer; `None` for one that never comes.
fn respond(shared: &Mutex<State>, headers: &HeaderMap, body: &Bytes) -> Option<Response<Body>> {
    let request: Value = serde_json::from_slice(body).unwrap();
    let stream = request["stream"] == true;
    let mut state = shared.lock().unwrap();
    let number = state.count;
    state.count += 1;
    let act = (state.script)(number, &request);
    if state.keep {
        state.requests.push(request);
        let key = headers.get("authorization").map_or("", |v| v.to_str().unwrap()).to_owned();
        state.authorizations.push(key);
    }
    let (message, finish) = match act {
        Act::Say(text, calls) => {
            let calls: Vec<Value> = calls
                .iter()
                .enumerate()
                .map(|(i, (name, arguments))| {
                    let arguments = arguments.as_str().map_or_else(|| arguments.to_string(), str::to_owned);
                    json!({"index": i, "id": format!("call_{number}_{i}"), "type": "function",
                           "function": {"name": name, "arguments": arguments}})
                })
                .collect();
            let finish = if calls.is_empty() { "stop" } else { "tool_calls" };
            let mut message = json!({"role": "assistant", "content": text});
            if !calls.is_empty() {
                message["tool_calls"] = json!(calls);
            }
            (message, finish)
        }
        Act::Message(message, finish) => (message, finish),
        Act::Status(status, headers, body) => {
            let mut response = Response::builder().status(StatusCode::from_u16(status).unwrap());
            for (name, value) in headers {
                response = response.header(name, value);
            }
            return Some(response.body(Body::from(body)).unwrap());
        }
        Act::Hang => return None,
        Act::Cut => {
            let piece = json!({"choices": [{"delta": {"content": "I will n"}}]});
            let text = format!("data: {piece}\n\n");
            return Some(
                Response::builder().header("content-type", "text/event-stream").body(Body::from(text)).unwrap(),
            );
        }
        Act::Large(bytes) => (json!({"role": "assistant", "content": "x".repeat(bytes)}), "stop"),
        Act::Raw(text) => {
            return Some(
                Response::builder().header("content-type", "application/json").body(Body::from(text)).unwrap(),
            );
        }
    };
    state.answered += 1;
    let (prompt, completion) = usage(state.answered);
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": completion});
    if !stream {
        let mut body = json!({"choices": [{"index": 0, "message": message, "finish_reason": finish}]});
        if state.counts {
            body["usage"] = usage;
        }
        return Some(
            Response::builder().header("content-type", "application/json").body(Body::from(body.to_string())).unwrap(),
        );
    }
    let mut text = String::new();
    let mut event = |value: Value| text.push_str(&format!("data: {value}\n\n"));
    let content = message["content"].as_str().unwrap_or_default().to_owned();
    let content: Vec<char> = content.chars().collect();
    for piece in content.chunks(1000) {
        event(json!({"choices": [{"index": 0, "delta": {"content": piece.iter().collect::<String>()}}]}));
    }
    let mut rest = message.clone();
    rest.as_object_mut().unwrap().remove("content");
    event(json!({"choices": [{"index": 0, "delta": rest, "finish_reason": null}]}));
    event(json!({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}));
    if state.counts {
        event(json!({"choices": [], "usage": usage}));
    }
    text.push_str("data: [DONE]\n\n");
    Some(Response::builder().header("content-type", "text/event-stream").body(Body::from(text)).unwrap())
}
