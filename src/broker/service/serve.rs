//! The role `kernelfleet broker`: its flags, its ports, its end.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tonic::service::Routes;
use tonic::transport::Server;

use super::agents::Agents;
use super::gate::Gate;
use super::identify::{Accounts, Cluster, Identify, Tokens};
use super::judges::JudgeService;
use super::operator::Operator;
use super::tls::{self, Certificate};
use super::{Broker, MOST_CONTROL, MOST_MESSAGE, MOST_STREAMS};
use crate::broker::core::{Core, Settings};
use crate::broker::ledger::{self, Ledger};
use crate::broker::objects::{self, Objects};
use crate::wire::v1::control_server::ControlServer;
use crate::wire::v1::episodes_server::EpisodesServer;
use crate::wire::v1::judges_server::JudgesServer;

/// How often time is let pass when nobody calls.
const TICK: Duration = Duration::from_millis(50);
/// Longest that calls under way may take once the broker stops.
const LAST: Duration = Duration::from_secs(15);

/// Flags of the role.
#[derive(Clone, Debug, clap::Args)]
pub struct Arguments {
    /// Address that agents, judges and the operator reach, over TLS
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8443")]
    pub listen: SocketAddr,
    /// Certificate chain, PEM; read again when the file changes
    #[arg(long, value_name = "FILE")]
    pub cert: PathBuf,
    /// Its private key, PEM
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
    /// The ledger, an SQLite file on a volume of its own; FILE-wal and FILE-shm lie beside it
    #[arg(long, value_name = "FILE")]
    pub ledger: PathBuf,
    /// Where objects go: file:///folder or s3://bucket/prefix (credentials from AWS_ACCESS_KEY_ID and
    /// AWS_SECRET_ACCESS_KEY, or the pod's own identity on Amazon); no other broker may have the same
    #[arg(long, value_name = "URL")]
    pub storage: String,
    /// Server of the bucket, if it isn't Amazon's; buckets are asked for by path
    #[arg(long, value_name = "URL")]
    pub storage_endpoint: Option<String>,
    /// Region of the bucket
    #[arg(long, value_name = "NAME")]
    pub storage_region: Option<String>,
    /// Address of /metrics, /healthz and /readyz, plain HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "0.0.0.0:8080")]
    pub metrics: SocketAddr,
    /// Name of the GpuPool, for metrics
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub pool: String,
    /// Weight of a namespace in the fair share, again for each one; 1 where nothing is said
    #[arg(long = "weight", value_name = "NAMESPACE=WEIGHT", value_parser = weight)]
    pub weights: Vec<(String, f64)>,
    /// Longest that an evaluation may hold a judge
    #[arg(long, value_name = "SECONDS", default_value_t = 900.0, value_parser = seconds)]
    pub lease_seconds: f64,
    /// Longest that an evaluation may have a card for itself
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    pub exclusive_seconds: f64,
    /// How often judges renew; one that is silent three times as long has lost its leases
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0, value_parser = seconds)]
    pub renew_seconds: f64,
    /// How long a job that was closed for good is kept, with its trajectories and results
    #[arg(long, value_name = "SECONDS", default_value_t = 2_592_000.0, value_parser = retention)]
    pub retention_seconds: f64,
    /// Service account of judges, again for each one
    #[arg(long = "judge-account", value_name = "NAMESPACE:NAME", value_parser = account, conflicts_with = "tokens")]
    pub judge_accounts: Vec<String>,
    /// Service account of the operator, again for each one
    #[arg(long = "operator-account", value_name = "NAMESPACE:NAME", value_parser = account, conflicts_with = "tokens")]
    pub operator_accounts: Vec<String>,
    /// For a broker without Kubernetes: JSON list of {"token", "role": "operator" | "judge" | "agent", ..}; without it,
    /// tokens are reviewed by the API server
    #[arg(long, value_name = "FILE")]
    pub tokens: Option<PathBuf>,
}

fn weight(text: &str) -> Result<(String, f64), String> {
    let pair = text.split_once('=').filter(|(n, _)| !n.is_empty());
    let pair = pair.and_then(|(n, w)| Some((n.to_owned(), w.parse::<f64>().ok()?)));
    pair.filter(|(_, w)| w.is_finite() && *w > 0.0)
        .ok_or_else(|| format!("`{text}` is no weight; write namespace=3 with a number above 0"))
}

fn seconds(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|s| s.is_finite() && (0.1..=86_400.0).contains(s));
    number.ok_or_else(|| format!("`{text}` is no time; write seconds from 0.1 to 86400"))
}

fn retention(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|s| s.is_finite() && (1.0..=315_360_000.0).contains(s));
    number.ok_or_else(|| format!("`{text}` is no time; write seconds from 1 to 315360000"))
}

fn account(text: &str) -> Result<String, String> {
    let pair = text.split_once(':').filter(|(a, b)| !a.is_empty() && !b.is_empty());
    pair.map(|_| text.to_owned()).ok_or_else(|| format!("`{text}` is no service account; write namespace:name"))
}

/// Why the broker doesn't start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Ledger(#[from] ledger::Error),
    #[error("{0}")]
    Objects(#[from] objects::Error),
    #[error("{0}")]
    Tls(#[from] tls::Error),
    #[error("{0}")]
    Tokens(String),
    #[error("the API server's address and credentials aren't known: {0}; without Kubernetes, give --tokens")]
    Cluster(String),
    #[error("{flag} {address} can't be listened on: {source}")]
    Listen { flag: &'static str, address: SocketAddr, source: std::io::Error },
    #[error("{what}: {source}")]
    Start { what: &'static str, source: std::io::Error },
    #[error("the service ended: {0}")]
    Service(#[from] tonic::transport::Error),
    #[error("nobody is known: give --operator-account and --judge-account, or --tokens")]
    Accounts,
}

/// Runs the role until it is told to stop.
///
/// # Errors
/// When it can't start, or the ledger can't be written any more.
pub fn main(arguments: &Arguments) -> Result<(), Error> {
    // A second installation is refused and changes nothing.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    runtime.map_err(|source| Error::Start { what: "the event loop can't start", source })?.block_on(run(arguments))
}

async fn run(arguments: &Arguments) -> Result<(), Error> {
    let identify = identify(arguments).await?;
    let certificate = Certificate::open(&arguments.cert, &arguments.key)?;
    let objects =
        Objects::open(&arguments.storage, arguments.storage_endpoint.as_deref(), arguments.storage_region.as_deref())?;
    let settings = Settings {
        weights: arguments.weights.iter().cloned().collect::<BTreeMap<_, _>>(),
        lease_seconds: arguments.lease_seconds,
        exclusive_seconds: arguments.exclusive_seconds,
        renew_seconds: arguments.renew_seconds,
    };
    let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
    let (ledger, kept) = Ledger::open(&arguments.ledger, epoch)?;
    let core = Core::restore(settings, kept, 0.0);
    let broker = Broker::new(core, ledger, objects, identify, arguments.pool.clone());
    let listening = |flag, address| move |source| Error::Listen { flag, address, source };
    let listener = TcpListener::bind(arguments.listen).await.map_err(listening("--listen", arguments.listen))?;
    let local = listener.local_addr().map_err(listening("--listen", arguments.listen))?;
    let incoming = tls::accept(listener, certificate.clone())?;
    let plain = TcpListener::bind(arguments.metrics).await.map_err(listening("--metrics", arguments.metrics))?;
    let routes = super::http::routes(broker.clone());
    tokio::spawn(async move { axum::serve(plain, routes).await });
    tokio::spawn(certificate.watch());
    tokio::spawn(broker.clone().tick());
    tokio::spawn(broker.clone().look_at_bucket());
    tokio::spawn(broker.clone().upload());
    tokio::spawn(broker.clone().forget(arguments.retention_seconds));
    tracing::info!("the broker of pool {} listens on {local}", arguments.pool);
    let agents = EpisodesServer::new(Agents(broker.clone()))
        .max_decoding_message_size(MOST_MESSAGE)
        .max_encoding_message_size(usize::MAX);
    let judges = JudgesServer::new(JudgeService(broker.clone()))
        .max_decoding_message_size(MOST_MESSAGE)
        .max_encoding_message_size(usize::MAX);
    let operator = ControlServer::new(Operator(broker.clone()))
        .max_decoding_message_size(MOST_CONTROL)
        .max_encoding_message_size(usize::MAX);
    let routes = Routes::new(agents).add_service(judges).add_service(operator);
    let gate = Gate::new(routes, broker.clone());
    let server = Server::builder()
        .max_concurrent_streams(MOST_STREAMS)
        .http2_keepalive_interval(Some(Duration::from_secs(20)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)));
    let stopping = broker.clone();
    let serving = server.serve_with_incoming_shutdown(gate, incoming, async move { stopping.stopped().await });
    tokio::pin!(serving);
    let end = tokio::select! {
        ended = &mut serving => ended.map_err(Error::from),
        () = told() => Ok(()),
        // Memory is ahead of what is kept: only a new start puts that right.
        () = broker.ledger.broken() => Err(Error::Ledger(ledger::Error::Broken)),
    };
    tracing::info!("the broker stops");
    broker.stopping.send_replace(true);
    if end.is_ok() && tokio::time::timeout(LAST, serving).await.is_err() {
        tracing::warn!("calls were still under way when the broker stopped");
    }
    broker.ledger.close();
    end
}

/// Waits for SIGTERM or SIGINT.
async fn told() {
    let (Ok(mut term), Ok(mut int)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt())) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = int.recv() => {}
    }
}

async fn identify(arguments: &Arguments) -> Result<Arc<dyn Identify>, Error> {
    if let Some(path) = &arguments.tokens {
        return Ok(Arc::new(Tokens::open(path.clone()).map_err(Error::Tokens)?));
    }
    if arguments.operator_accounts.is_empty() || arguments.judge_accounts.is_empty() {
        return Err(Error::Accounts);
    }
    let client = kube::Client::try_default().await.map_err(|e| Error::Cluster(e.to_string()))?;
    let accounts =
        Accounts { judges: arguments.judge_accounts.clone(), operators: arguments.operator_accounts.clone() };
    Ok(Arc::new(Cluster::new(client, accounts)))
}

impl Broker {
    /// Lets time pass for ever.
    async fn tick(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            if self.lock().core.due() <= self.now() {
                self.step(Vec::new(), |core, now| core.tick(now));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_say_what_is_wrong_with_them() {
        assert_eq!(weight("a=3").unwrap(), ("a".to_owned(), 3.0));
        for wrong in ["a", "=1", "a=x", "a=0", "a=inf"] {
            assert!(weight(wrong).unwrap_err().contains("write namespace=3"), "{wrong}");
        }
        assert!(seconds("0").is_err() && seconds("nan").is_err() && seconds("60").is_ok());
        assert!(account("kernelfleet:judge").is_ok() && account("judge").is_err());
    }
}
