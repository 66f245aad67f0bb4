//! Model endpoints: one client for all agents of the process.
//!
//! Knows requests, streams, deadlines and how an attempt failed; holds the key. Must not know what is asked for
//! what reason. When to send and when to try again is `budget`'s, what a body means is `chat`'s.

pub mod budget;
pub mod chat;
pub mod completions;
mod key;
pub mod tokens;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use reqwest::header::{HeaderMap, HeaderValue};
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use budget::{Budget, Failed, Limits, Tries};
use chat::{Assembly, Dialect, Events, Reply, Unreadable};
use completions::Completion;
pub use key::{Key, REDACTED};

/// An endpoint and how it is used.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Up to and with the version: `https://host/v1`.
    pub base_url: String,
    pub key: Option<Key>,
    /// File with a key that changes, read again for each request; instead of `key`.
    pub key_file: Option<PathBuf>,
    /// Whether answers come in pieces: then a server that hangs is noticed soon.
    pub stream: bool,
    /// Whether to ask for token ids.
    pub token_ids: bool,
    pub limits: Limits,
    pub prices: Option<tokens::Prices>,
    /// Longest silence: until the first byte, and between two.
    pub silence: Duration,
    /// Longest time of one attempt.
    pub attempt: Duration,
    /// Most bytes of an answer's texts; what comes after is given up.
    pub most_text: usize,
}

impl Settings {
    /// With the usual limits.
    #[must_use]
    pub fn new(base_url: &str) -> Self {
        Self {
            base_url: base_url.trim_end_matches('/').to_owned(),
            key: None,
            key_file: None,
            stream: true,
            token_ids: false,
            limits: Limits::default(),
            prices: None,
            silence: Duration::from_secs(180),
            attempt: Duration::from_secs(1800),
            most_text: 1 << 20,
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// All attempts failed by the server's or the network's fault.
    #[error("{what} ({tries} attempts)")]
    Unavailable { what: String, tries: u32 },
    /// No attempt found a server.
    #[error("{what} ({tries} attempts)")]
    Unreachable { what: String, tries: u32 },
    /// The server won't serve this request, now or later: the key, the model's name, a field.
    #[error("the endpoint refuses the request: {0}")]
    Refused(String),
    /// The request holds more tokens than the model reads.
    #[error("the conversation is longer than the model reads: {0}")]
    TooLong(String),
    #[error("no answer before the deadline; last: {0}")]
    Deadline(String),
    #[error("stopped")]
    Stopped,
}

/// An answer and how it was come by.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer<T> {
    pub reply: T,
    /// With all waiting and all attempts.
    pub seconds: f64,
    /// Attempts that failed before it.
    pub retries: u32,
}

/// A client of one endpoint. Agents share it, so that its limits hold for all of them together.
#[derive(Debug)]
pub struct Gateway {
    settings: Settings,
    runtime: tokio::runtime::Runtime,
    client: reqwest::Client,
    budget: Mutex<Budget>,
    slots: Arc<Semaphore>,
    /// `max_completion_tokens` instead of `max_tokens`: learned from the server's refusal.
    completion_tokens: AtomicBool,
    began: Instant,
}

/// One of the requests that may be under way at once.
type Slot = Option<OwnedSemaphorePermit>;

/// An answer that is handed on as it comes.
#[derive(Debug)]
pub struct Passing {
    response: reqwest::Response,
    gateway: Arc<Gateway>,
    announced: u64,
    until: Instant,
    _slot: Slot,
}

impl Passing {
    /// What it is, in the server's words.
    #[must_use]
    pub fn content_type(&self) -> Option<&HeaderValue> {
        self.response.headers().get(reqwest::header::CONTENT_TYPE)
    }

    /// The next piece; `None` at its end.
    ///
    /// # Errors
    /// When it breaks off: what came can't be taken back, so it is not tried again here.
    pub async fn piece(&mut self) -> Result<Option<Vec<u8>>, Error> {
        match self.gateway.piece(&mut self.response, self.until).await {
            Ok(piece) => Ok(piece.map(|p| p.to_vec())),
            Err(Attempt::Fatal(error)) => Err(error),
            Err(Attempt::Retry(_, what, _)) => Err(Error::Unavailable { what, tries: 1 }),
        }
    }

    /// What it took, once that is known.
    pub fn used(&self, tokens: u64) {
        self.gateway.budget().used(self.announced, tokens);
    }
}

/// How one attempt failed.
enum Attempt {
    Retry(Failed, String, Option<Duration>),
    Fatal(Error),
}

/// Most bytes of a body that is read, whatever is in it.
const MOST_RAW: usize = 64 << 20;
/// Most bytes of an answer that comes whole: it has to be held at once.
const MOST_WHOLE: usize = 8 << 20;
/// How often a waiting request looks whether it was stopped.
const LOOK: Duration = Duration::from_millis(50);

impl Gateway {
    /// A client; no connection is made yet.
    ///
    /// # Errors
    /// When the address is none, or the key would travel in the open.
    pub fn new(settings: Settings) -> Result<Self, String> {
        let url = reqwest::Url::parse(&settings.base_url).map_err(|e| {
            format!("{} is not the address of an endpoint: {e}; write http://host:port/v1", settings.base_url)
        })?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(format!("{} is neither http nor https", settings.base_url));
        }
        if !url.username().is_empty() || url.password().is_some() || url.query().is_some() {
            return Err("the endpoint's address holds a user, a password or a query; give the key apart from it".into());
        }
        let mut headers = HeaderMap::new();
        if let Some(key) = &settings.key {
            let mut value = HeaderValue::from_str(&format!("Bearer {}", key.reveal()))
                .map_err(|_| "the key can't be sent in a header".to_owned())?;
            value.set_sensitive(true);
            headers.insert(reqwest::header::AUTHORIZATION, value);
        }
        // Another part of the program may have chosen already; it is the same one then.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .default_headers(headers)
            .user_agent(concat!("kernelfleet/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(Duration::from_secs(20))
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|e| format!("no HTTP client: {e}"))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("gateway")
            .enable_all()
            .build()
            .map_err(|e| format!("no event loop: {e}"))?;
        let mut seed = [0; 8];
        getrandom::fill(&mut seed).map_err(|e| format!("no random numbers: {e}"))?;
        Ok(Self {
            runtime,
            client,
            budget: Mutex::new(Budget::new(settings.limits.clone(), u64::from_le_bytes(seed))),
            slots: Arc::new(Semaphore::new(settings.limits.concurrency.clamp(1, 4096))),
            completion_tokens: AtomicBool::new(false),
            began: Instant::now(),
            settings,
        })
    }

    #[must_use]
    pub const fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The endpoint's key as it is now.
    #[must_use]
    pub fn key(&self) -> Option<Key> {
        match &self.settings.key_file {
            Some(file) => Key::from_file(file).ok(),
            None => self.settings.key.clone(),
        }
    }

    /// A text without the endpoint's key.
    #[must_use]
    pub fn redact(&self, text: &str) -> String {
        self.key().map_or_else(|| text.to_owned(), |k| k.redact(text))
    }

    /// The next message of a conversation. Blocks until it is there, `until` has passed, or `stop` is set.
    ///
    /// # Errors
    /// When there is none; texts of the server come without the key.
    pub fn chat(&self, request: &chat::Request<'_>, until: Instant, stop: &AtomicBool) -> Result<Answer<Reply>, Error> {
        self.chat_telling(request, until, stop, &|_| ())
    }

    /// As `chat`; `told` learns of each attempt that failed and is tried again, and why.
    ///
    /// # Errors
    /// As `chat`.
    pub fn chat_telling(
        &self,
        request: &chat::Request<'_>,
        until: Instant,
        stop: &AtomicBool,
        told: &(dyn Fn(&str) + Sync),
    ) -> Result<Answer<Reply>, Error> {
        let prompt = request.prompt_estimate();
        let last = Mutex::new(String::new());
        self.runtime.block_on(self.guarded(until, stop, &last, async {
            self.tried(
                &last,
                told,
                prompt + 500,
                |reply: &Reply| reply.usage.total(),
                |slot| async {
                    let _slot = slot;
                    let dialect = Dialect {
                        stream: self.settings.stream,
                        token_ids: self.settings.token_ids,
                        completion_tokens: self.completion_tokens.load(Ordering::Relaxed),
                    };
                    self.chat_once(request.body(dialect), prompt).await
                },
            )
            .await
        }))
    }

    /// Tokens that follow `request.prompt`.
    ///
    /// # Errors
    /// As `chat`; a server that gives no token ids is `Unavailable`.
    pub fn complete(
        &self,
        request: &completions::Request<'_>,
        until: Instant,
        stop: &AtomicBool,
    ) -> Result<Answer<Completion>, Error> {
        let body = request.body();
        let announced = u64::try_from(request.prompt.len()).unwrap_or(u64::MAX);
        let last = Mutex::new(String::new());
        self.runtime.block_on(self.guarded(until, stop, &last, async {
            self.tried(
                &last,
                &|_| (),
                announced,
                |c: &Completion| c.usage.total(),
                |slot| async {
                    let _slot = slot;
                    let response = self.send("completions", &body).await?;
                    let (bytes, _) = self.whole(response).await?;
                    completions::read(&bytes, request.prompt.len()).map_err(|e| self.unreadable(&e))
                },
            )
            .await
        }))
    }

    /// Sends a body as it is, within the limits of all, and gives the answer on from its first byte: for callers of another
    /// process. `announced` is what it will take, about.
    ///
    /// # Errors
    /// As `chat`.
    pub async fn pass(self: &Arc<Self>, path: &str, body: &Value, announced: u64) -> Result<Answer<Passing>, Error> {
        let last = Mutex::new(String::new());
        self.tried(
            &last,
            &|_| (),
            announced,
            |_: &Passing| announced,
            |slot| async {
                let response = self.send(path, body).await?;
                let until = Instant::now() + self.settings.attempt;
                Ok(Passing { response, gateway: Arc::clone(self), announced, until, _slot: slot })
            },
        )
        .await
    }

    /// Ends `work` with the deadline or the stop, whichever is first.
    async fn guarded<T>(
        &self,
        until: Instant,
        stop: &AtomicBool,
        last: &Mutex<String>,
        work: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let stopped = async {
            while !stop.load(Ordering::Relaxed) {
                tokio::time::sleep(LOOK).await;
            }
        };
        tokio::select! {
            biased;
            () = stopped => Err(Error::Stopped),
            done = work => done,
            () = tokio::time::sleep_until(until.into()) => {
                let last = last.lock().unwrap_or_else(PoisonError::into_inner).clone();
                Err(Error::Deadline(if last.is_empty() { "it was being waited for".into() } else { last }))
            }
        }
    }

    /// Attempts until one succeeds or there are no more.
    async fn tried<T, F>(
        &self,
        last: &Mutex<String>,
        told: &(dyn Fn(&str) + Sync),
        announced: u64,
        used: impl Fn(&T) -> u64,
        attempt: impl Fn(Slot) -> F,
    ) -> Result<Answer<T>, Error>
    where
        F: Future<Output = Result<T, Attempt>>,
    {
        let start = Instant::now();
        let mut tries = Tries::default();
        loop {
            // The slot is held while an answer comes and not while a retry is waited for.
            let slot = Arc::clone(&self.slots).acquire_owned().await.ok();
            loop {
                let leave = self.budget().admit(self.began.elapsed(), announced, tries.failed() > 0);
                match leave {
                    Ok(()) => break,
                    Err(wait) => tokio::time::sleep(wait.min(Duration::from_secs(5))).await,
                }
            }
            let ended = attempt(slot).await;
            match ended {
                Ok(reply) => {
                    self.budget().used(announced, used(&reply));
                    let seconds = start.elapsed().as_secs_f64();
                    return Ok(Answer { reply, seconds, retries: tries.failed() });
                }
                Err(Attempt::Fatal(error)) => return Err(error),
                Err(Attempt::Retry(failed, what, after)) => {
                    tracing::debug!(%what, ?after, "an attempt at the endpoint failed");
                    let wait = self.budget().failed(self.began.elapsed(), failed, &mut tries, after);
                    let Some(wait) = wait else {
                        let count = tries.failed();
                        if failed == Failed::Denied {
                            return Err(Error::Refused(what));
                        }
                        return Err(if tries.unreachable == count {
                            Error::Unreachable { what, tries: count }
                        } else {
                            Error::Unavailable { what, tries: count }
                        });
                    };
                    told(&format!("{what}; attempt {} in {:.1} s", tries.failed() + 1, wait.as_secs_f64()));
                    *last.lock().unwrap_or_else(PoisonError::into_inner) = what;
                    tokio::time::sleep(wait).await;
                }
            }
        }
    }

    fn budget(&self) -> MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn chat_once(&self, body: Value, prompt: u64) -> Result<Reply, Attempt> {
        let mut response = match self.send("chat/completions", &body).await {
            // Newer models of OpenAI know the limit by another name only, and say so.
            Err(Attempt::Fatal(Error::Refused(why)))
                if body.get("max_tokens").is_some() && why.contains("max_completion_tokens") =>
            {
                self.completion_tokens.store(true, Ordering::Relaxed);
                return Err(Attempt::Retry(Failed::Trouble, why, Some(Duration::ZERO)));
            }
            other => other?,
        };
        let streamed = response
            .headers()
            .get(reqwest::header::CONTENT_TYPE)
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| v.starts_with("text/event-stream"));
        let mut assembly = Assembly::default();
        if !streamed {
            let (bytes, cut) = self.whole(response).await?;
            if cut {
                let mut reply = assembly.reply(prompt, true);
                reply.cut_at = Some(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
                reply.usage.completion = tokens::estimate(bytes.len());
                return Ok(reply);
            }
            assembly.body(&bytes).map_err(|e| self.unreadable(&e))?;
            let cut = assembly.bytes() > self.settings.most_text;
            return Ok(assembly.reply(prompt, cut));
        }
        let mut events = Events::default();
        let (mut raw, until) = (0, Instant::now() + self.settings.attempt);
        loop {
            let piece = self.piece(&mut response, until).await?;
            let Some(piece) = piece else { break };
            raw += piece.len();
            events.feed(&piece, MOST_WHOLE, |data| assembly.event(data)).map_err(|e| self.unreadable(&e))?;
            if assembly.done() {
                break;
            }
            if assembly.bytes() > self.settings.most_text || raw > MOST_RAW {
                return Ok(assembly.reply(prompt, true));
            }
        }
        if !assembly.finished() {
            return Err(Attempt::Retry(Failed::Trouble, "the stream was cut before the answer's end".into(), None));
        }
        Ok(assembly.reply(prompt, false))
    }

    /// Sends a request; an answer that is none is told apart by its status.
    async fn send(&self, path: &str, body: &Value) -> Result<reqwest::Response, Attempt> {
        let text = serde_json::to_vec(body)
            .map_err(|e| Attempt::Fatal(Error::Refused(format!("the request can't be written: {e}"))))?;
        let mut request = self
            .client
            .post(format!("{}/{path}", self.settings.base_url))
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .body(text);
        if let Some(file) = &self.settings.key_file {
            let key = Key::from_file(file).map_err(|why| Attempt::Retry(Failed::Trouble, why, None))?;
            request = request.bearer_auth(key.reveal());
        }
        let response = match tokio::time::timeout(self.settings.silence, request.send()).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => return Err(self.broken(&error)),
            Err(_) => return Err(self.hang()),
        };
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let after = retry_after(response.headers(), SystemTime::now());
        let (body, _) = self.whole(response).await.unwrap_or_default();
        let (code, said) = told(&body);
        let what = self.redact(&format!("the endpoint answers {status}: {said}"));
        Err(match status.as_u16() {
            429 if code.contains("insufficient_quota") => Attempt::Fatal(Error::Refused(what)),
            429 => Attempt::Retry(Failed::Rate, what, after),
            // A Secret that was changed a moment ago is in its file a moment later.
            401 if self.settings.key_file.is_some() => Attempt::Retry(Failed::Denied, what, after),
            408 | 409 | 425 | 500..=599 => Attempt::Retry(Failed::Trouble, what, after),
            _ if too_long(&code, &said) => Attempt::Fatal(Error::TooLong(what)),
            _ => Attempt::Fatal(Error::Refused(what)),
        })
    }

    /// The next piece of a body; `None` at its end.
    async fn piece(
        &self,
        response: &mut reqwest::Response,
        until: Instant,
    ) -> Result<Option<impl AsRef<[u8]> + std::ops::Deref<Target = [u8]> + use<>>, Attempt> {
        let silence = self.settings.silence.min(until.saturating_duration_since(Instant::now()));
        match tokio::time::timeout(silence, response.chunk()).await {
            Ok(Ok(piece)) => Ok(piece),
            Ok(Err(error)) => Err(self.broken(&error)),
            Err(_) => Err(self.hang()),
        }
    }

    /// A whole body and whether it was given up for its length.
    async fn whole(&self, mut response: reqwest::Response) -> Result<(Vec<u8>, bool), Attempt> {
        let mut bytes = Vec::new();
        let until = Instant::now() + self.settings.attempt;
        while let Some(piece) = self.piece(&mut response, until).await? {
            bytes.extend_from_slice(&piece);
            if bytes.len() > MOST_WHOLE {
                return Ok((bytes, true));
            }
        }
        Ok((bytes, false))
    }

    fn hang(&self) -> Attempt {
        let seconds = self.settings.silence.as_secs_f64();
        Attempt::Retry(Failed::Trouble, format!("the endpoint said nothing for {seconds:.0} s"), None)
    }

    fn broken(&self, error: &reqwest::Error) -> Attempt {
        // The innermost reason is the one that helps.
        let mut why: &dyn std::error::Error = error;
        while let Some(inner) = why.source() {
            why = inner;
        }
        let (failed, what) = if error.is_connect() {
            (Failed::Unreachable, format!("the endpoint {} can't be reached", self.settings.base_url))
        } else {
            (Failed::Trouble, "the connection broke".to_owned())
        };
        Attempt::Retry(failed, self.redact(&format!("{what}: {why}")), None)
    }

    fn unreadable(&self, error: &Unreadable) -> Attempt {
        Attempt::Retry(Failed::Trouble, self.redact(&error.0), None)
    }
}

/// Code and sentence of an error's body.
fn told(body: &[u8]) -> (String, String) {
    let text = String::from_utf8_lossy(body);
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    let error = if value["error"].is_null() { &value } else { &value["error"] };
    let code = format!("{} {}", error["code"].as_str().unwrap_or_default(), error["type"].as_str().unwrap_or_default());
    let said = error["message"].as_str().or_else(|| error.as_str()).or_else(|| value["detail"].as_str());
    let said = said.map_or_else(|| text.trim().to_owned(), str::to_owned);
    let short: String = said.chars().take(600).collect();
    (code, if short.is_empty() { "no reason given".into() } else { short })
}

fn too_long(code: &str, said: &str) -> bool {
    const SIGNS: [&str; 5] =
        ["context length", "context_length", "context window", "maximum context", "exceeds the available context size"];
    code.contains("context_length_exceeded") || SIGNS.iter().any(|s| said.to_ascii_lowercase().contains(s))
}

/// `Retry-After`, in seconds or as a date; at most an hour is believed.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(reqwest::header::RETRY_AFTER)?.to_str().ok()?.trim();
    let seconds = match text.parse::<f64>() {
        Ok(seconds) => seconds,
        Err(_) => {
            let now = now.duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
            date(text)? - now
        }
    };
    seconds.is_finite().then(|| Duration::from_secs_f64(seconds.clamp(0.0, 3600.0)))
}

/// Seconds since the epoch of `Wed, 21 Oct 2026 07:28:00 GMT`.
fn date(text: &str) -> Option<f64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let words: Vec<&str> = text.split_whitespace().collect();
    let [_, day, month, year, clock, "GMT"] = words.as_slice() else { return None };
    let month = i64::try_from(MONTHS.iter().position(|m| m == month)?).ok()? + 1;
    let (day, year): (i64, i64) = (day.parse().ok()?, year.parse().ok()?);
    let clock: Vec<i64> = clock.split(':').map(|n| n.parse().ok()).collect::<Option<_>>()?;
    let [hours, minutes, seconds] = clock.as_slice() else { return None };
    if !(1970..=9999).contains(&year) || !(1..=31).contains(&day) {
        return None;
    }
    // Days since the epoch in the proleptic Gregorian calendar, years beginning in March.
    let (y, m) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * y + y / 4 - y / 100 + y / 400 + (153 * m + 2) / 5 + day - 1 - 719_468;
    let whole = days * 86_400 + hours * 3600 + minutes * 60 + seconds;
    #[allow(clippy::cast_precision_loss)]
    Some(whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_when_to_come_back_in_seconds_or_as_a_date() {
        let at = |text: &str, now: u64| {
            let mut headers = HeaderMap::new();
            headers.insert("retry-after", text.parse().unwrap());
            retry_after(&headers, UNIX_EPOCH + Duration::from_secs(now))
        };
        assert_eq!(at("7", 0), Some(Duration::from_secs(7)));
        assert_eq!(at("0.5", 0), Some(Duration::from_millis(500)));
        assert_eq!(at("Wed, 21 Oct 2026 07:28:00 GMT", 1_792_567_670), Some(Duration::from_secs(10)));
        assert_eq!(at("Tue, 29 Feb 2028 00:00:01 GMT", 1_835_395_200), Some(Duration::from_secs(1)));
        assert_eq!(at("-5", 0), Some(Duration::ZERO));
        assert_eq!(at("999999999", 0), Some(Duration::from_secs(3600)));
        assert_eq!((at("soon", 0), at("NaN", 0)), (None, None));
    }

    #[test]
    fn what_a_server_says_is_found_in_its_dialects() {
        let said = |body: &str| told(body.as_bytes()).1;
        assert_eq!(said(r#"{"error": {"message": "no such model", "code": "x"}}"#), "no such model");
        assert_eq!(said(r#"{"error": "busy"}"#), "busy");
        assert_eq!(said(r#"{"object": "error", "message": "vLLM says"}"#), "vLLM says");
        assert_eq!(said(r#"{"detail": "Not Found"}"#), "Not Found");
        assert_eq!(said("<html>"), "<html>");
        assert!(too_long("", "This model's maximum context length is 4096 tokens"));
        assert!(too_long("context_length_exceeded ", ""));
        assert!(!too_long("", "the model does not exist"));
    }

    #[test]
    fn an_address_that_is_none_or_holds_a_secret_is_refused() {
        let refused = |url: &str| Gateway::new(Settings::new(url)).unwrap_err();
        assert!(refused("localhost").contains("is not the address of an endpoint"));
        assert!(refused("ftp://a/v1").contains("neither http nor https"));
        assert!(refused("https://me:secret@host/v1").contains("give the key apart"));
        assert!(!refused("https://me:secret@host/v1").contains("secret"));
    }
}
