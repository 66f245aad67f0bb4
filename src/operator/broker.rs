//! The operator as a client of its pools' brokers (service `Control`).
//!
//! Knows addresses, certificates and the operator's own token. Must not know what the facts are used for.

use std::collections::HashMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{ConfigMap, Service};
use kube::Client;
use kube::api::Api;
use tokio::sync::Mutex;
use tonic::Code;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

use super::names;
use crate::wire::v1::control_client::ControlClient;
use crate::wire::v1::{
    CloseJobRequest, GetJobRequest, GetPoolRequest, GetResultRequest, JobFacts, PoolFacts, PutJobRequest,
    Result as Best,
};

/// Longest that one call may take.
const CALL: Duration = Duration::from_secs(10);
/// Longest that the tasks of a job may take on their way.
const PUT: Duration = Duration::from_secs(60);
/// How long an address is believed.
const FRESH: Duration = Duration::from_secs(5);
/// How long after the operator's own beginning a broker that isn't heard is asked again before that is news: the way from a new
/// pod may open seconds after it (policies are spread node by node), and every job's status would tell of that.
const BEGINNING: Duration = Duration::from_secs(15);
/// How long it waits before it asks again.
const AGAIN: Duration = Duration::from_millis(500);
/// Largest message: a candidate with its verdict.
const MOST_BYTES: usize = 32 << 20;

/// Why a broker gave no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("the broker of pool {pool} has no Service or certificate yet")]
    Unknown { pool: String },
    #[error("the broker of pool {pool} can't be reached: {what}")]
    Unreachable { pool: String, what: String },
    #[error("the broker of pool {pool} refuses: {what}")]
    Refused { pool: String, what: String },
    #[error("the token for brokers can't be read from {path}: {what}")]
    Token { path: PathBuf, what: String },
}

/// Where a broker is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// The Service's ClusterIP, which stays for the Service's life.
    pub ip: String,
    pub port: u16,
    /// PEM of the authorities that sign its certificates.
    pub authorities: String,
}

impl Address {
    /// `https://10.96.0.7:8443`
    #[must_use]
    pub fn url(&self) -> String {
        if self.ip.contains(':') {
            format!("https://[{}]:{}", self.ip, self.port)
        } else {
            format!("https://{}:{}", self.ip, self.port)
        }
    }
}

/// Connections to brokers, by pool.
pub struct Brokers {
    client: Client,
    namespace: String,
    token_file: PathBuf,
    known: Mutex<HashMap<String, Known>>,
    began: Instant,
}

#[derive(Clone, Debug)]
struct Known {
    address: Address,
    channel: Channel,
    at: Instant,
}

impl Brokers {
    /// `namespace` is the operator's own, where brokers run.
    #[must_use]
    pub fn new(client: Client, namespace: &str, token_file: PathBuf) -> Self {
        Self { client, namespace: namespace.into(), token_file, known: Mutex::default(), began: Instant::now() }
    }

    /// Where the broker of a pool is; `None` while it has no Service or no certificate.
    ///
    /// # Errors
    /// When the API server can't be asked.
    pub async fn address(&self, pool: &str) -> Result<Option<Address>, kube::Error> {
        Ok(self.find(pool).await?.map(|k| k.address))
    }

    async fn find(&self, pool: &str) -> Result<Option<Known>, kube::Error> {
        let mut known = self.known.lock().await;
        if let Some(known) = known.get(pool)
            && known.at.elapsed() < FRESH
        {
            return Ok(Some(known.clone()));
        }
        let services: Api<Service> = Api::namespaced(self.client.clone(), &self.namespace);
        let maps: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.namespace);
        let service = services.get_opt(&names::broker(pool)).await?;
        let ip = service.and_then(|s| s.spec).and_then(|s| s.cluster_ip).filter(|ip| ip != "None" && !ip.is_empty());
        let map = maps.get_opt(&names::authority(pool)).await?;
        let authorities = map.and_then(|m| m.data).and_then(|mut d| d.remove("ca.crt"));
        let (Some(ip), Some(authorities)) = (ip, authorities) else {
            known.remove(pool);
            return Ok(None);
        };
        let address = Address { ip, port: names::BROKER_PORT, authorities };
        let channel = match known.get(pool) {
            Some(old) if old.address == address => old.channel.clone(),
            _ => match connect(&address) {
                Ok(channel) => channel,
                Err(error) => {
                    tracing::warn!(pool, %error, "the broker's address or certificate is of no use");
                    return Ok(None);
                }
            },
        };
        let found = Known { address, channel, at: Instant::now() };
        known.insert(pool.to_owned(), found.clone());
        Ok(Some(found))
    }

    async fn client(&self, pool: &str) -> Result<ControlClient<Channel>, Error> {
        let found = self
            .find(pool)
            .await
            .map_err(|e| Error::Unreachable { pool: pool.into(), what: format!("the API server says: {e}") })?;
        let found = found.ok_or_else(|| Error::Unknown { pool: pool.into() })?;
        Ok(ControlClient::new(found.channel).max_decoding_message_size(MOST_BYTES))
    }

    /// A request with the operator's token, read again for each.
    fn request<T>(&self, message: T, limit: Duration) -> Result<tonic::Request<T>, Error> {
        let bad = |what: String| Error::Token { path: self.token_file.clone(), what };
        let token = std::fs::read_to_string(&self.token_file).map_err(|e| bad(e.to_string()))?;
        let value = MetadataValue::try_from(format!("Bearer {}", token.trim())).map_err(|e| bad(e.to_string()))?;
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("authorization", value);
        request.set_timeout(limit);
        Ok(request)
    }

    /// Makes a job known with its tasks.
    ///
    /// # Errors
    /// When the broker can't be reached or refuses.
    pub async fn put_job(&self, pool: &str, parts: Vec<PutJobRequest>) -> Result<(), Error> {
        let request = self.request(tokio_stream::iter(parts), PUT)?;
        self.client(pool).await?.put_job(request).await.map_err(|s| refused(pool, &s))?;
        Ok(())
    }

    /// Facts of a job.
    ///
    /// # Errors
    /// As `put_job`.
    pub async fn job(&self, pool: &str, uid: &str) -> Result<JobFacts, Error> {
        let ask = || async move {
            let request = self.request(GetJobRequest { uid: uid.into() }, CALL)?;
            Ok(self.client(pool).await?.get_job(request).await.map_err(|s| refused(pool, &s))?.into_inner())
        };
        heard(self.began + BEGINNING, ask).await
    }

    /// Closes a job; `keep` where it may come back.
    ///
    /// # Errors
    /// As `put_job`.
    pub async fn close_job(&self, pool: &str, uid: &str, keep: bool) -> Result<(), Error> {
        let request = self.request(CloseJobRequest { uid: uid.into(), keep }, CALL)?;
        self.client(pool).await?.close_job(request).await.map_err(|s| refused(pool, &s))?;
        Ok(())
    }

    /// The best candidate of a task.
    ///
    /// # Errors
    /// As `put_job`.
    pub async fn result(&self, pool: &str, uid: &str, task: &str) -> Result<Best, Error> {
        let request = self.request(GetResultRequest { uid: uid.into(), task: task.into() }, CALL)?;
        Ok(self.client(pool).await?.get_result(request).await.map_err(|s| refused(pool, &s))?.into_inner())
    }

    /// Facts of a pool.
    ///
    /// # Errors
    /// As `put_job`.
    pub async fn pool(&self, pool: &str) -> Result<PoolFacts, Error> {
        let ask = || async move {
            let request = self.request(GetPoolRequest {}, CALL)?;
            Ok(self.client(pool).await?.get_pool(request).await.map_err(|s| refused(pool, &s))?.into_inner())
        };
        heard(self.began + BEGINNING, ask).await
    }
}

/// The answer; that nobody can be reached is asked about again until `end`.
async fn heard<T, F: Future<Output = Result<T, Error>>>(end: Instant, ask: impl Fn() -> F) -> Result<T, Error> {
    loop {
        match ask().await {
            Err(Error::Unreachable { .. }) if Instant::now() < end => tokio::time::sleep(AGAIN).await,
            done => return done,
        }
    }
}

/// A connection that is made when it is first used.
fn connect(address: &Address) -> Result<Channel, tonic::transport::Error> {
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&address.authorities))
        .domain_name(names::BROKER_NAME);
    let endpoint = Endpoint::from_shared(address.url())?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .tls_config(tls)?;
    Ok(endpoint.connect_lazy())
}

fn refused(pool: &str, status: &tonic::Status) -> Error {
    let what = format!("{} ({})", cause(status), status.code());
    match status.code() {
        Code::Unavailable
        | Code::DeadlineExceeded
        | Code::Cancelled
        | Code::Unknown
        | Code::Aborted
        | Code::Internal => Error::Unreachable { pool: pool.into(), what },
        _ => Error::Refused { pool: pool.into(), what },
    }
}

/// The innermost reason: `transport error` alone tells nobody anything.
fn cause(status: &tonic::Status) -> String {
    let mut error: &dyn std::error::Error = status;
    while let Some(source) = error.source() {
        error = source;
    }
    if std::error::Error::source(status).is_some() { error.to_string() } else { status.message().to_owned() }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// What becomes of a broker that answers at the third time, and how often it was asked.
    async fn asked(end: Instant, error: Error) -> (bool, usize) {
        let times = AtomicUsize::new(0);
        let ask = || async { if times.fetch_add(1, Ordering::Relaxed) < 2 { Err(error.clone()) } else { Ok(()) } };
        (heard(end, ask).await.is_ok(), times.into_inner())
    }

    #[tokio::test]
    async fn a_broker_that_is_not_reached_is_asked_again_at_the_operators_beginning_alone() {
        let (pool, what) = ("p".to_owned(), "x".to_owned());
        let unreachable = || Error::Unreachable { pool: pool.clone(), what: what.clone() };
        let later = || Instant::now() + Duration::from_secs(60);
        assert_eq!(asked(later(), unreachable()).await, (true, 3));
        assert_eq!(asked(Instant::now(), unreachable()).await, (false, 1));
        let refuses = Error::Refused { pool, what };
        assert_eq!(asked(later(), refuses).await, (false, 1), "that is an answer");
    }
}
