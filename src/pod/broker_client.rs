//! The broker as its callers see it: TLS, a token that is read for each call, calls that are made again until they are
//! answered.
//!
//! Knows connections, waits and which answers are final. Must not know what is asked for what reason. All calls of the
//! contract are idempotent, so whatever may be passing is tried again.

use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Response, Status};

use crate::wire::v1::episodes_client::EpisodesClient;
use crate::wire::v1::judges_client::JudgesClient;

/// The name that the broker's certificate is for, whatever its address.
pub const NAME: &str = "broker.kernelfleet";
/// Metadata of a refusal that holds the contract's word for why.
const REASON: &str = "kernelfleet-reason";
/// Largest message either way: candidates and verdicts.
pub const MAX_MESSAGE: usize = 64 << 20;
/// What a call may take beyond the wait that it asks for.
const SLACK: Duration = Duration::from_secs(20);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const MOST_WAIT: Duration = Duration::from_secs(5);
/// A token that was just rotated, or a review that failed, is worth a second try; a caller that is unknown is not.
const UNKNOWN_FOR: Duration = Duration::from_secs(30);

/// Where the broker is and how its callers are known.
#[derive(Clone, Debug)]
pub struct Settings {
    /// `https://10.96.0.7:8443`.
    pub address: String,
    pub authority: Authority,
    pub token_file: PathBuf,
    /// Longest that one call is tried, beyond the wait that it asks for.
    pub patience: Duration,
}

/// PEM of the authority that signed the broker's certificate.
#[derive(Clone, Debug)]
pub enum Authority {
    Text(String),
    /// Read for each connection.
    File(PathBuf),
}

/// Why there is no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Settings(String),
    /// Asking again would be answered the same.
    #[error("the broker refuses `{call}`: {message}")]
    Refused {
        call: &'static str,
        code: Code,
        /// The contract's word for why, where it has one.
        reason: String,
        message: String,
    },
    #[error("the broker did not answer `{call}` within {seconds:.0} s; last: {last}")]
    Away { call: &'static str, seconds: f64, last: String },
}

impl Error {
    /// The code of a refusal.
    #[must_use]
    pub const fn code(&self) -> Option<Code> {
        match self {
            Self::Refused { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// The contract's word for a refusal; empty where there is none.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Refused { reason, .. } => reason,
            _ => "",
        }
    }
}

/// What follows an answer that is none. Pure.
fn is_final(code: Code, since_first: Duration) -> bool {
    match code {
        Code::Unavailable
        | Code::Unknown
        | Code::Internal
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::ResourceExhausted => false,
        Code::Unauthenticated | Code::PermissionDenied => since_first >= UNKNOWN_FOR,
        _ => true,
    }
}

/// The wait before attempt `number`, counted from 1; `chance` in [0, 1). Pure.
fn wait(number: u32, chance: f64) -> Duration {
    let doubled = FIRST_WAIT.saturating_mul(1 << (number.saturating_sub(1)).min(10)).min(MOST_WAIT);
    doubled.mul_f64(0.5 + 0.5 * chance)
}

/// A client. Threads share it.
#[derive(Debug)]
pub struct Broker {
    settings: Settings,
    runtime: tokio::runtime::Runtime,
    channel: Mutex<Option<Channel>>,
    /// Milliseconds that a call is tried, once there is little time.
    hurry: AtomicU64,
}

impl Broker {
    /// A client; no connection is made yet.
    ///
    /// # Errors
    /// Names the setting that is wrong.
    pub fn new(settings: Settings) -> Result<Self, Error> {
        if !settings.address.starts_with("https://") {
            let text = format!("the broker's address is {}; write https://ADDRESS:PORT", settings.address);
            return Err(Error::Settings(text));
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("broker")
            .enable_all()
            .build()
            .map_err(|e| Error::Settings(format!("no event loop: {e}")))?;
        let broker = Self { settings, runtime, channel: Mutex::default(), hurry: AtomicU64::new(u64::MAX) };
        // What is wrong with the settings is said before anything waits.
        let _in = broker.runtime.enter();
        broker.connection()?;
        broker.token()?;
        drop(_in);
        Ok(broker)
    }

    /// From now on no call is tried longer than this, beyond the wait that it asks for.
    pub fn hurry(&self, patience: Duration) {
        self.hurry.store(u64::try_from(patience.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn patience(&self) -> Duration {
        self.settings.patience.min(Duration::from_millis(self.hurry.load(Ordering::Relaxed)))
    }

    fn connection(&self) -> Result<Channel, Error> {
        let mut held = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = &*held {
            return Ok(channel.clone());
        }
        let wrong = |e: &dyn std::fmt::Display| Error::Settings(e.to_string());
        let pem = match &self.settings.authority {
            Authority::Text(text) => text.clone(),
            Authority::File(path) => std::fs::read_to_string(path)
                .map_err(|e| wrong(&format!("the broker's authority {} can't be read: {e}", path.display())))?,
        };
        if !pem.contains("-----BEGIN CERTIFICATE-----") {
            return Err(wrong(&"the broker's authority is no certificate in PEM"));
        }
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)).domain_name(NAME);
        let address = &self.settings.address;
        let endpoint = Endpoint::from_shared(address.clone())
            .and_then(|e| e.tls_config(tls))
            .map_err(|e| wrong(&format!("the broker at {address} can't be reached as it is described: {e}")))?
            .connect_timeout(Duration::from_secs(10))
            .http2_keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(10))
            .keep_alive_while_idle(true);
        let channel = endpoint.connect_lazy();
        *held = Some(channel.clone());
        Ok(channel)
    }

    fn token(&self) -> Result<MetadataValue<tonic::metadata::Ascii>, Error> {
        let path = &self.settings.token_file;
        let text = std::fs::read_to_string(path)
            .map_err(|e| Error::Settings(format!("the token for the broker {} can't be read: {e}", path.display())))?;
        let mut value: MetadataValue<_> = format!("Bearer {}", text.trim())
            .parse()
            .map_err(|_| Error::Settings(format!("{} holds no token", path.display())))?;
        value.set_sensitive(true);
        Ok(value)
    }

    /// Makes a call until it is answered, at most for the patience of the settings beyond `asked`, the wait that the
    /// request itself asks for. Blocks.
    ///
    /// # Errors
    /// When the answer is a refusal that is final, or there is none.
    pub fn call<Q, A, F>(
        &self,
        call: &'static str,
        asked: Duration,
        request: &Q,
        ask: impl Fn(Channel, Request<Q>) -> F,
    ) -> Result<A, Error>
    where
        Q: Clone,
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let began = Instant::now();
        self.runtime.block_on(async {
            for number in 1.. {
                let mut request = Request::new(request.clone());
                request.metadata_mut().insert("authorization", self.token()?);
                let one = tokio::time::timeout(asked + SLACK, ask(self.connection()?, request)).await;
                let status = match one {
                    Ok(Ok(answer)) => return Ok(answer.into_inner()),
                    Ok(Err(status)) => status,
                    Err(_) => Status::deadline_exceeded("no answer"),
                };
                if is_final(status.code(), began.elapsed()) {
                    let reason = status.metadata().get(REASON).and_then(|word| word.to_str().ok());
                    let reason = reason.unwrap_or_default().to_owned();
                    return Err(Error::Refused {
                        call,
                        code: status.code(),
                        reason,
                        message: status.message().to_owned(),
                    });
                }
                // The authority may be another by now.
                if matches!(status.code(), Code::Unavailable | Code::Unknown) {
                    *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
                }
                let wait = wait(number, chance());
                let last = explained(&status);
                if Instant::now() + wait >= began + asked + self.patience() {
                    return Err(Error::Away { call, seconds: began.elapsed().as_secs_f64(), last });
                }
                if number == 1 || number % 10 == 0 {
                    tracing::info!(call, number, %last, "the broker is asked again");
                }
                tokio::time::sleep(wait).await;
            }
            Err(Error::Away { call, seconds: began.elapsed().as_secs_f64(), last: String::new() })
        })
    }
}

/// What is wrong, with the innermost reason: that is the one that helps.
fn explained(status: &Status) -> String {
    let mut why = std::error::Error::source(status);
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut inner = None;
    while let Some(error) = why {
        inner = Some(error.to_string());
        why = error.source();
    }
    if let Some(inner) = inner.filter(|i| !text.contains(i.as_str())) {
        text.push_str(&format!(" ({inner})"));
    }
    text
}

/// A number in [0, 1) from the system.
pub(super) fn chance() -> f64 {
    let mut bytes = [0; 4];
    // Without random numbers callers wait alike; that is a worse spread and no reason to end.
    let _ = getrandom::fill(&mut bytes);
    f64::from(u32::from_le_bytes(bytes)) / (f64::from(u32::MAX) + 1.0)
}

/// The service of agents on a connection.
#[must_use]
pub fn episodes(channel: Channel) -> EpisodesClient<Channel> {
    EpisodesClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE)
}

/// The service of judges on a connection.
#[must_use]
pub fn judges(channel: Channel) -> JudgesClient<Channel> {
    JudgesClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE)
}

/// A call of a service by its name, so that each is written once.
macro_rules! ask {
    ($broker:expr, $service:ident . $call:ident, $wait:expr, $request:expr) => {
        $broker.call(stringify!($call), $wait, $request, |channel, request| async move {
            $crate::pod::broker_client::$service(channel).$call(request).await
        })
    };
}
pub(super) use ask;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_a_bound_and_half_of_each_is_chance() {
        assert_eq!(wait(1, 0.0), Duration::from_millis(50));
        assert_eq!(wait(3, 0.0), Duration::from_millis(200));
        assert!(wait(3, 0.999) > Duration::from_millis(390));
        assert!(wait(60, 0.999) <= MOST_WAIT);
    }

    #[test]
    fn what_may_pass_is_tried_again_and_a_stranger_is_told_after_a_while() {
        for code in [Code::Unavailable, Code::Unknown, Code::Internal, Code::DeadlineExceeded] {
            assert!(!is_final(code, Duration::from_secs(3600)));
        }
        for code in [Code::FailedPrecondition, Code::InvalidArgument, Code::Aborted, Code::NotFound] {
            assert!(is_final(code, Duration::ZERO));
        }
        assert!(!is_final(Code::Unauthenticated, Duration::from_secs(1)));
        assert!(is_final(Code::Unauthenticated, Duration::from_secs(31)));
    }

    #[test]
    fn settings_that_are_wrong_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let token = folder.path().join("token");
        let pem = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n";
        let said = |address: &str, authority: Authority| {
            let settings =
                Settings { address: address.into(), authority, token_file: token.clone(), patience: Duration::ZERO };
            Broker::new(settings).map(|_| ()).unwrap_err().to_string()
        };
        assert!(said("http://a:1", Authority::Text(pem.into())).contains("write https://"));
        assert!(said("https://a:1", Authority::Text("x".into())).contains("no certificate"));
        assert!(said("https://a:1", Authority::File("/no/ca".into())).contains("/no/ca can't be read"));
        assert!(said("https://a:1", Authority::Text(pem.into())).contains("token"));
    }
}
