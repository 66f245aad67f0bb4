//! A real broker process, over TLS on loopback, and clients for it.

#![allow(dead_code, reason = "each user needs a part of it")]

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kernelfleet::wire::v1::control_client::ControlClient;
use kernelfleet::wire::v1::episodes_client::EpisodesClient;
use kernelfleet::wire::v1::evaluate_reply::State;
use kernelfleet::wire::v1::judges_client::JudgesClient;
use kernelfleet::wire::v1::put_job_request::Part;
use kernelfleet::wire::v1::{
    AppendRequest, BeginRequest, Candidate, CompleteRequest, EvaluateRequest, FinishRequest, JobHead, JobTask, Op,
    PullRequest, PutJobRequest, RegisterRequest,
};
use serde_json::{Value, json};
use tonic::metadata::MetadataValue;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Request, Status};

/// Puts a token into every call.
#[derive(Clone)]
pub struct Bearer(pub String);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        let value = MetadataValue::try_from(format!("Bearer {}", self.0)).unwrap();
        request.metadata_mut().insert("authorization", value);
        Ok(request)
    }
}

pub type Agent = EpisodesClient<InterceptedService<Channel, Bearer>>;
pub type Judge = JudgesClient<InterceptedService<Channel, Bearer>>;
pub type Operator = ControlClient<InterceptedService<Channel, Bearer>>;

pub struct Broker {
    pub folder: tempfile::TempDir,
    pub port: u16,
    pub metrics: u16,
    child: Child,
    flags: Vec<String>,
    environment: Vec<(String, String)>,
    tokens: std::sync::Mutex<Vec<Value>>,
}

/// A port that nobody listens on.
pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn certificate(folder: &Path) {
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(folder.join("tls.crt"), key.cert.pem()).unwrap();
    std::fs::write(folder.join("tls.key"), key.signing_key.serialize_pem()).unwrap();
}

impl Broker {
    /// Starts one on fresh folders. `operator` is the operator's token.
    pub fn start(flags: &[&str]) -> Self {
        Self::start_with(flags, &[])
    }

    /// Starts one with variables; what it logs is in `log` then. Objects lie in a folder unless the flags name a storage.
    pub fn start_with(flags: &[&str], environment: &[(&str, &str)]) -> Self {
        // A second installation is refused and changes nothing.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        certificate(folder.path());
        let tokens = vec![json!({"token": "operator", "role": "operator"})];
        let flags = flags.iter().map(|f| (*f).to_owned()).collect();
        let environment: Vec<(String, String)> =
            environment.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let (port, metrics) = (free_port(), free_port());
        std::fs::write(folder.path().join("tokens.json"), json!(tokens).to_string()).unwrap();
        let child = Self::spawn(folder.path(), port, metrics, &flags, &environment);
        Self { folder, port, metrics, child, flags, environment, tokens: std::sync::Mutex::new(tokens) }
    }

    fn spawn(folder: &Path, port: u16, metrics: u16, flags: &Vec<String>, environment: &[(String, String)]) -> Child {
        let at = |name: &str| folder.join(name).display().to_string();
        let mut command = Command::new(env!("CARGO_BIN_EXE_kernelfleet"));
        command
            .arg("broker")
            .args(["--listen", &format!("127.0.0.1:{port}"), "--metrics", &format!("127.0.0.1:{metrics}")])
            .args(["--cert", &at("tls.crt"), "--key", &at("tls.key"), "--ledger", &at("ledger.db")])
            .args(["--tokens", &at("tokens.json"), "--pool", "pool"])
            .args(flags)
            .stdin(Stdio::null());
        if !flags.iter().any(|f| f == "--storage") {
            command.args(["--storage", &format!("file://{}", at("objects"))]);
        }
        if !environment.is_empty() {
            let log = std::fs::File::options().append(true).create(true).open(folder.join("log")).unwrap();
            command.envs(environment.to_vec()).stderr(log);
        }
        command.spawn().unwrap()
    }

    /// What it has logged, if it was started with variables.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    pub fn ledger(&self) -> PathBuf {
        self.folder.path().join("ledger.db")
    }

    /// Kills it, as a machine that loses power would, and starts it again.
    pub fn kill_and_start(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = Self::spawn(self.folder.path(), self.port, self.metrics, &self.flags, &self.environment);
    }

    /// Tells it to stop; gives its exit status.
    pub fn stop(&mut self) -> Option<i32> {
        let pid = nix::unistd::Pid::from_raw(self.child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
        self.child.wait().unwrap().code()
    }

    fn add(&self, entry: Value) {
        let mut tokens = self.tokens.lock().unwrap();
        tokens.push(entry);
        // Whole or not at all: the broker may read it at any time.
        let path = self.folder.path().join("tokens.json");
        let beside = self.folder.path().join("tokens.new");
        std::fs::write(&beside, Value::Array(tokens.clone()).to_string()).unwrap();
        std::fs::rename(beside, path).unwrap();
    }

    /// A connection, made when it is first used.
    pub fn channel(&self) -> Channel {
        let pem = std::fs::read(self.folder.path().join("tls.crt")).unwrap();
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)).domain_name("localhost");
        Endpoint::from_shared(format!("https://127.0.0.1:{}", self.port))
            .unwrap()
            .connect_timeout(Duration::from_secs(10))
            .tls_config(tls)
            .unwrap()
            .connect_lazy()
    }

    /// Waits until it answers.
    pub async fn ready(&self) {
        for _ in 0..600 {
            if tokio::net::TcpStream::connect(("127.0.0.1", self.port)).await.is_ok() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the broker doesn't listen");
    }

    pub fn operator(&self) -> Operator {
        ControlClient::with_interceptor(self.channel(), Bearer("operator".into()))
    }

    pub fn judge(&self, pod: &str) -> Judge {
        self.add(json!({"token": pod, "role": "judge", "podUid": pod}));
        JudgesClient::with_interceptor(self.channel(), Bearer(pod.into()))
    }

    /// The token of an agent's pod.
    pub fn agent_token(&self, job: &str, index: u32, pod: &str) -> String {
        let token = format!("{job}/{index}/{pod}");
        let entry = json!({"token": token, "role": "agent", "namespace": "ns", "pod": pod, "podUid": pod,
            "jobUid": job, "index": index});
        self.add(entry);
        token
    }

    pub fn agent(&self, job: &str, index: u32, pod: &str) -> Agent {
        EpisodesClient::with_interceptor(self.channel(), Bearer(self.agent_token(job, index, pod)))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The parts of a job of the namespace `ns`.
pub fn job(uid: &str, tasks: u32, attempts: u32) -> Vec<PutJobRequest> {
    let head = JobHead {
        namespace: "ns".into(),
        name: uid.into(),
        uid: uid.into(),
        spec_json: json!({"agent": {"attempts": attempts}, "judge": {"inputs": 3}}).to_string(),
        batch_job: uid.into(),
        tasks,
    };
    let task = |n: u32| JobTask { name: format!("t{n}"), source: format!("# task {n}"), replay: vec![] };
    let parts = std::iter::once(Part::Head(head)).chain((0..tasks).map(task).map(Part::Task));
    parts.map(|part| PutJobRequest { part: Some(part) }).collect()
}

pub fn candidate(text: &str) -> Candidate {
    Candidate { files: [("model_new.py".to_owned(), text.to_owned())].into() }
}

pub fn registration(card: &str, slots: u32) -> RegisterRequest {
    RegisterRequest {
        device: "cpu".into(),
        card: card.into(),
        slots,
        instance: "1".into(),
        ..RegisterRequest::default()
    }
}

/// A verdict as judges give it, as far as a broker reads it.
pub fn verdict(reward: i32, eager: f64) -> Value {
    let interval = |median: f64| json!({"median": median, "low": median * 0.98, "high": median * 1.02});
    json!({"reward": reward, "correct": reward > 0, "reason": null, "grade": "observed",
        "speedup": {"eager": interval(eager), "compile": interval(eager / 2.0)}, "cached": false})
}

/// An evaluation of `text`.
pub fn evaluate(key: &str, op: Op, text: &str, wait_seconds: f64) -> EvaluateRequest {
    EvaluateRequest { key: key.into(), op: op.into(), candidates: vec![candidate(text)], wait_seconds }
}

/// One episode of job `uid`, from its beginning to its end, with `text` as its candidate.
pub async fn whole_episode(broker: &Broker, session: u64, uid: &str, text: &str) {
    let mut agent = broker.agent(uid, 0, &format!("pod-{uid}"));
    let mut judge = broker.judge("judge");
    agent.begin(BeginRequest {}).await.unwrap();
    let asking = tokio::spawn({
        let (mut agent, text) = (agent.clone(), text.to_owned());
        async move { agent.evaluate(evaluate("final", Op::Final, &text, 30.0)).await.unwrap().into_inner() }
    });
    let pulled = judge.pull(PullRequest { session, wait_seconds: 30.0, ..PullRequest::default() }).await.unwrap();
    let complete = CompleteRequest {
        session,
        lease: pulled.into_inner().lease.unwrap().id,
        state: State::Done.into(),
        answer_json: json!([verdict(2, 1.5)]).to_string(),
        ..CompleteRequest::default()
    };
    judge.complete(complete).await.unwrap();
    assert_eq!(asking.await.unwrap().state(), State::Done);
    let line = json!({"at": 1.0, "kind": "turn", "turn": 1, "content": "", "calls": [], "finish": "stop",
        "usage": {"prompt": 10, "completion": 4}});
    agent.append(AppendRequest { first: 0, lines: vec![line.to_string()] }).await.unwrap();
    let outcome_json = json!({"task": "t0", "state": "judged", "attempts": 1, "seconds": 2.0}).to_string();
    agent.finish(FinishRequest { outcome_json }).await.unwrap();
}

/// Files below a folder.
pub fn files(folder: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return vec![] };
    entries
        .flat_map(|entry| {
            let path = entry.unwrap().path();
            if path.is_dir() { files(&path) } else { vec![path] }
        })
        .collect()
}

/// Waits until something is so.
pub async fn until(what: &str, mut ready: impl AsyncFnMut() -> bool) {
    for _ in 0..600 {
        if ready().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("waited in vain until {what}");
}
