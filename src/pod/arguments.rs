//! Flags and variables of the roles (`docs/pods.md`).
//!
//! Knows their names and defaults. Must not know what a role does with them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::broker_client::{Authority, Settings};
use super::{agent, gateway, judge};
use crate::gateway::{Key, Settings as Upstream};
use crate::judge::Device;
use crate::sandbox::client::{Bounds, Options};

/// Longest that an agent tries one call: a broker that is moved to another node is back by then.
const PATIENCE: Duration = Duration::from_secs(600);
/// A judge has its registration to look after meanwhile.
const JUDGE_PATIENCE: Duration = Duration::from_secs(45);

/// Sockets in the folder that agent and sandbox share.
const SANDBOX: &str = "/run/kernelfleet/sandbox.sock";
const DESK: &str = "/run/kernelfleet/desk.sock";

/// Where the broker is and how it knows its caller.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Broker")]
pub struct Broker {
    /// Address of the broker: https://10.96.0.7:8443
    #[arg(long, value_name = "URL", env = "KERNELFLEET_BROKER")]
    broker: String,
    /// PEM of the authority that signed the broker's certificate
    #[arg(long, value_name = "PEM", env = "KERNELFLEET_BROKER_CA", required_unless_present = "broker_ca_file")]
    broker_ca: Option<String>,
    /// The same, in a file
    #[arg(long, value_name = "FILE", env = "KERNELFLEET_BROKER_CA_FILE")]
    broker_ca_file: Option<PathBuf>,
    /// Token that the broker knows its caller by; read again for each call
    #[arg(
        long,
        value_name = "FILE",
        env = "KERNELFLEET_BROKER_TOKEN_FILE",
        default_value = "/var/run/secrets/kernelfleet/broker/token"
    )]
    broker_token_file: PathBuf,
}

impl Broker {
    fn settings(self, patience: Duration) -> Settings {
        let authority = match (self.broker_ca, self.broker_ca_file) {
            (Some(text), _) => Authority::Text(text),
            (None, file) => Authority::File(file.unwrap_or_default()),
        };
        Settings {
            address: self.broker.trim_end_matches('/').to_owned(),
            authority,
            token_file: self.broker_token_file,
            patience,
        }
    }
}

/// `kernelfleet agent`.
#[derive(Args, Clone, Debug)]
pub struct Agent {
    #[command(flatten)]
    broker: Broker,
    /// Socket that the sandbox is kept behind
    #[arg(long, value_name = "SOCKET", env = "KERNELFLEET_SANDBOX_SOCKET", default_value = SANDBOX)]
    sandbox: PathBuf,
    /// Socket that the sandbox's utils/ ask; the agent makes it
    #[arg(long, value_name = "SOCKET", env = "KERNELFLEET_DESK_SOCKET", default_value = DESK)]
    desk: PathBuf,
    /// Where models are asked, up to and with the version: http://10.96.0.9:8080/v1
    #[arg(long, value_name = "URL", env = "KERNELFLEET_GATEWAY")]
    gateway: Option<String>,
    /// Token that the gateway knows its caller by; read again for each request
    #[arg(
        long,
        value_name = "FILE",
        env = "KERNELFLEET_GATEWAY_TOKEN_FILE",
        default_value = "/var/run/secrets/kernelfleet/gateway/token"
    )]
    gateway_token_file: PathBuf,
    /// Folder for what the broker does not have yet
    #[arg(long, value_name = "DIR", env = "KERNELFLEET_AGENT_FOLDER")]
    folder: Option<PathBuf>,
    /// Pods of this completion index that failed before this one, drained ones not counted
    #[arg(long, value_name = "N", env = "KERNELFLEET_FAILURES", value_parser = count)]
    failures: Option<Count>,
}

/// A count that may be said by nobody: the variable is there and empty where the cluster doesn't count.
#[derive(Clone, Copy, Debug)]
struct Count(Option<u32>);

fn count(text: &str) -> Result<Count, std::num::ParseIntError> {
    if text.is_empty() { Ok(Count(None)) } else { text.parse().map(|n| Count(Some(n))) }
}

impl Agent {
    /// What the role is given.
    #[must_use]
    pub fn get(self) -> agent::Arguments {
        agent::Arguments {
            broker: self.broker.settings(PATIENCE),
            folder: self.folder.unwrap_or_else(std::env::temp_dir),
            sandbox: self.sandbox,
            desk: self.desk,
            gateway: self.gateway,
            gateway_token_file: self.gateway_token_file,
            failures: self.failures.and_then(|c| c.0),
        }
    }
}

/// `kernelfleet seal`.
#[derive(Args, Clone, Debug)]
pub struct Seal {
    /// Empty folder that the tools are laid into
    #[arg(long, value_name = "DIR", env = "KERNELFLEET_SEALED", default_value = "/sealed")]
    pub to: PathBuf,
}

/// `kernelfleet sandbox`.
#[derive(Args, Clone, Debug)]
pub struct Sandbox {
    /// Socket that the agent is waited for at
    #[arg(long, value_name = "SOCKET", env = "KERNELFLEET_SANDBOX_SOCKET", default_value = SANDBOX)]
    socket: PathBuf,
    /// The agent's socket that utils/ ask
    #[arg(long, value_name = "SOCKET", env = "KERNELFLEET_DESK_SOCKET", default_value = DESK)]
    desk: PathBuf,
    /// Folder of the workspace; it is emptied
    #[arg(long, value_name = "DIR", env = "KERNELFLEET_SANDBOX_WORKSPACE", default_value = "/workspace")]
    workspace: PathBuf,
    /// Folder with the tools that nobody may write; the workspace's utils if it is mounted there
    #[arg(long, value_name = "DIR", env = "KERNELFLEET_SANDBOX_SEALED")]
    sealed: Option<PathBuf>,
    /// Folder for the home folder and the temporary files of commands
    #[arg(long, value_name = "DIR", env = "KERNELFLEET_SANDBOX_FOLDER", default_value = "/tmp")]
    folder: PathBuf,
    /// Folders with toolchains outside the system's
    #[arg(long, value_name = "DIR:DIR", env = "KERNELFLEET_SANDBOX_READ", value_delimiter = ':')]
    read: Vec<PathBuf>,
    /// Folders of programs that are found before the system's
    #[arg(long, value_name = "DIR:DIR", env = "KERNELFLEET_SANDBOX_PATH", value_delimiter = ':')]
    path: Vec<PathBuf>,
    /// Bytes of memory of all commands together
    #[arg(long, value_name = "BYTES", env = "KERNELFLEET_SANDBOX_MEMORY")]
    memory: Option<u64>,
    /// Bytes of all files together
    #[arg(long, value_name = "BYTES", env = "KERNELFLEET_SANDBOX_DISK")]
    disk: Option<u64>,
    /// Processes and threads
    #[arg(long, value_name = "N", env = "KERNELFLEET_SANDBOX_PROCESSES")]
    processes: Option<u64>,
    /// Makes no namespaces, as where a pod's rules allow none
    #[arg(long, env = "KERNELFLEET_SANDBOX_NO_NAMESPACES", value_parser = clap::builder::FalseyValueParser::new())]
    no_namespaces: bool,
}

impl Sandbox {
    /// The socket, and the sandbox that is kept behind it.
    ///
    /// # Errors
    /// When this program can't be found.
    pub fn get(self) -> std::io::Result<(PathBuf, Options)> {
        let usual = self.workspace.join("utils");
        let bounds = Bounds::default();
        let options = Options {
            read: self.read,
            path: self.path,
            socket: Some(self.desk),
            bounds: Bounds {
                memory: self.memory.unwrap_or(bounds.memory),
                disk: self.disk.unwrap_or(bounds.disk),
                processes: self.processes.unwrap_or(bounds.processes),
                ..bounds
            },
            namespaces: !self.no_namespaces,
            folder: Some(self.folder),
            workspace: Some(self.workspace),
            sealed: self.sealed.or_else(|| usual.is_dir().then_some(usual)),
            ..Options::new(std::env::current_exe()?)
        };
        Ok((self.socket, options))
    }
}

/// Device of a judge.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum DeviceWord {
    /// The GPU if there is one, else the CPU
    Auto,
    Cpu,
    Cuda,
}

/// `kernelfleet judge-worker`.
#[derive(Args, Clone, Debug)]
pub struct JudgeWorker {
    #[command(flatten)]
    broker: Broker,
    #[arg(long, value_enum, default_value_t = DeviceWord::Auto, env = "KERNELFLEET_DEVICE")]
    device: DeviceWord,
    /// Evaluations at once: 1 on the CPU, 4 on a card if nothing is said
    #[arg(long, value_name = "N", env = "KERNELFLEET_SLOTS", value_parser = clap::value_parser!(u8).range(1..=64))]
    slots: Option<u8>,
    /// What an exclusive slice is of: the UUID of the card if nothing is said
    #[arg(long, value_name = "NAME", env = "KERNELFLEET_CARD")]
    card: Option<String>,
    /// Name of the node: what an exclusive slice is of on the CPU
    #[arg(long, value_name = "NAME", env = "KERNELFLEET_NODE")]
    node: Option<String>,
    /// Tasks whose reference host is kept
    #[arg(long, value_name = "N", env = "KERNELFLEET_WARM", default_value_t = 4)]
    warm: u8,
    /// Address of /healthz and /readyz
    #[arg(long, value_name = "ADDRESS", env = "KERNELFLEET_LISTEN", default_value = "0.0.0.0:8081")]
    listen: SocketAddr,
    /// Seconds that evaluations under way may take after SIGTERM
    #[arg(long, value_name = "SECONDS", env = "KERNELFLEET_GRACE", default_value_t = 20)]
    grace: u64,
}

impl JudgeWorker {
    /// The device that is asked for; `None` for the best there is.
    #[must_use]
    pub const fn device(&self) -> Option<Device> {
        match self.device {
            DeviceWord::Auto => None,
            DeviceWord::Cpu => Some(Device::Cpu),
            DeviceWord::Cuda => Some(Device::Cuda),
        }
    }

    /// What the role is given.
    #[must_use]
    pub fn get(self, device: Device) -> judge::Arguments {
        let (slots, card) = match device {
            Device::Cpu => (1, self.card.or(self.node)),
            Device::Cuda => (4, self.card),
        };
        judge::Arguments {
            broker: self.broker.settings(JUDGE_PATIENCE),
            device,
            slots: self.slots.map_or(slots, usize::from),
            card,
            warm: usize::from(self.warm),
            listen: self.listen,
            grace: Duration::from_secs(self.grace),
        }
    }
}

/// `kernelfleet gateway`.
#[derive(Args, Clone, Debug)]
pub struct Gateway {
    /// Address where models are asked
    #[arg(long, value_name = "ADDRESS", env = "KERNELFLEET_LISTEN", default_value = "0.0.0.0:8080")]
    listen: SocketAddr,
    /// Address of /metrics, /healthz and /readyz, which agents don't reach
    #[arg(long, value_name = "ADDRESS", env = "KERNELFLEET_METRICS", default_value = "0.0.0.0:8081")]
    metrics: SocketAddr,
    /// The endpoint, up to and with its version: https://host/v1
    #[arg(long, value_name = "URL", env = "KERNELFLEET_UPSTREAM")]
    upstream: String,
    /// Models that may be asked for
    #[arg(long, value_name = "NAME,NAME", env = "KERNELFLEET_MODELS", value_delimiter = ',', required = true)]
    models: Vec<String>,
    /// File with the endpoint's key; read again for each request
    #[arg(long, value_name = "FILE", env = "KERNELFLEET_API_KEY_FILE")]
    key_file: Option<PathBuf>,
    /// Most requests a minute of all callers together
    #[arg(long, value_name = "N", env = "KERNELFLEET_REQUESTS_PER_MINUTE")]
    requests_per_minute: Option<u32>,
    /// Most tokens a minute of all callers together
    #[arg(long, value_name = "N", env = "KERNELFLEET_TOKENS_PER_MINUTE")]
    tokens_per_minute: Option<u32>,
    /// Most requests at once
    #[arg(long, value_name = "N", env = "KERNELFLEET_CONCURRENCY", default_value_t = 64)]
    concurrency: usize,
    /// Asks the endpoint for token ids and log-probabilities
    #[arg(long, env = "KERNELFLEET_TOKEN_IDS", value_parser = clap::builder::FalseyValueParser::new())]
    token_ids: bool,
    /// Asks the endpoint for whole answers, whatever the callers ask for
    #[arg(long, env = "KERNELFLEET_NO_STREAM", value_parser = clap::builder::FalseyValueParser::new())]
    no_stream: bool,
    /// Seconds of silence of the endpoint after which an attempt is given up
    #[arg(long, value_name = "SECONDS", env = "KERNELFLEET_SILENCE", default_value_t = 180)]
    silence: u64,
    /// Namespace whose pods may ask
    #[arg(long, value_name = "NAME", env = "KERNELFLEET_NAMESPACE")]
    namespace: Option<String>,
    /// File of known tokens instead of TokenReview: for trials without Kubernetes
    #[arg(long, value_name = "FILE", env = "KERNELFLEET_TOKENS")]
    tokens: Option<PathBuf>,
}

impl Gateway {
    /// What the role is given.
    ///
    /// # Errors
    /// When the key can't be read.
    pub fn get(self) -> Result<gateway::Arguments, String> {
        let mut upstream = Upstream::new(&self.upstream);
        if let Some(file) = &self.key_file {
            // One that is missing now is told now.
            Key::from_file(file).map_err(|e| format!("--key-file: {e}"))?;
        }
        upstream.key_file = self.key_file;
        upstream.stream = !self.no_stream;
        upstream.token_ids = self.token_ids;
        upstream.limits.requests_per_minute = self.requests_per_minute;
        upstream.limits.tokens_per_minute = self.tokens_per_minute;
        upstream.limits.concurrency = self.concurrency;
        upstream.silence = Duration::from_secs(self.silence.max(1));
        Ok(gateway::Arguments {
            listen: self.listen,
            metrics: self.metrics,
            upstream,
            models: self.models,
            namespace: self.namespace,
            tokens: self.tokens,
        })
    }
}
