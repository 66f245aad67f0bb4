//! The roles of pods as processes on this machine: a broker, judges, sandboxes, agents, and an operator to ask.

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kernelfleet::wire::v1::control_client::ControlClient;
use kernelfleet::wire::v1::put_job_request::Part;
use kernelfleet::wire::v1::{
    GetJobRequest, GetPoolRequest, GetResultRequest, JobFacts, JobHead, JobTask, PoolFacts, PutJobRequest,
};
use serde_json::{Value, json};
use tonic::Request;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

/// Longest that anything may take on a machine that does other things too.
pub const PATIENCE: Duration = Duration::from_secs(400);

pub const EXE: &str = env!("CARGO_BIN_EXE_kernelfleet");

/// A process that ends with its owner.
pub struct Process(pub Child);

impl Process {
    pub fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }

    /// How it ended.
    pub fn ended(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().unwrap() {
                return status;
            }
            assert!(Instant::now() < end, "process {} does not end", self.0.id());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// All processes below it.
    pub fn below(&self) -> Vec<i32> {
        let mut found = vec![i32::try_from(self.0.id()).unwrap()];
        let parents: Vec<(i32, i32)> = std::fs::read_dir("/proc")
            .unwrap()
            .filter_map(|entry| {
                let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
                let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
                Some((pid, stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()?))
            })
            .collect();
        let mut at = 0;
        while let Some(&parent) = found.get(at) {
            found.extend(parents.iter().filter(|p| p.1 == parent).map(|p| p.0));
            at += 1;
        }
        found.remove(0);
        found
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

pub fn root() -> bool {
    std::fs::read_to_string("/proc/self/status").unwrap().lines().any(|l| l.starts_with("Uid:\t0\t"))
}

fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A broker and all that is needed to be known by it.
pub struct House {
    pub folder: tempfile::TempDir,
    runtime: tokio::runtime::Runtime,
    operator: ControlClient<Channel>,
    address: String,
    tokens: std::sync::Mutex<Vec<Value>>,
    _broker: Process,
}

impl House {
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// With flags of the broker beside the usual ones.
    pub fn with(more: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        open(folder.path(), 0o755);
        let path = |name: &str| folder.path().join(name);
        let authority_key = rcgen::KeyPair::generate().unwrap();
        let mut authority = rcgen::CertificateParams::new(vec![]).unwrap();
        authority.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = authority.self_signed(&authority_key).unwrap().pem();
        let issuer = rcgen::Issuer::from_params(&authority, &authority_key);
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = rcgen::CertificateParams::new(vec!["broker.kernelfleet".to_owned()]).unwrap();
        std::fs::write(path("ca.pem"), &pem).unwrap();
        std::fs::write(path("cert.pem"), certificate.signed_by(&key, &issuer).unwrap().pem()).unwrap();
        std::fs::write(path("key.pem"), key.serialize_pem()).unwrap();
        let tokens = vec![json!({"token": "operator", "role": "operator"})];
        std::fs::write(path("tokens.json"), json!(tokens).to_string()).unwrap();
        std::fs::create_dir(path("objects")).unwrap();
        let (listen, metrics) = (format!("127.0.0.1:{}", port()), format!("127.0.0.1:{}", port()));
        let broker = Command::new(EXE)
            .args([
                "broker",
                "--listen",
                &listen,
                "--metrics",
                &metrics,
                "--renew-seconds",
                "1",
                "--exclusive-seconds",
                "180",
            ])
            .args(more)
            .arg("--cert")
            .arg(path("cert.pem"))
            .arg("--key")
            .arg(path("key.pem"))
            .arg("--ledger")
            .arg(path("ledger.sqlite"))
            .arg("--tokens")
            .arg(path("tokens.json"))
            .args(["--storage", &format!("file://{}", path("objects").display())])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let address = format!("https://{listen}");
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)).domain_name("broker.kernelfleet");
        let endpoint = Endpoint::from_shared(address.clone()).unwrap().tls_config(tls).unwrap();
        let channel = until("the broker listens", || runtime.block_on(endpoint.connect()).ok());
        let operator = ControlClient::new(channel);
        Self { folder, runtime, operator, address, tokens: tokens.into(), _broker: Process(broker) }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn program(&self, role: &str) -> Command {
        let mut command = Command::new(EXE);
        command.arg(role).current_dir(env!("CARGO_MANIFEST_DIR"));
        // One for all houses: what a compiler is asked once a machine takes longest.
        command.env("KERNELFLEET_CACHE", Path::new(env!("CARGO_TARGET_TMPDIR")).join("cache"));
        command.env("NO_PROXY", "127.0.0.1");
        // How fast a kernel is here, is no matter.
        command.env("KERNELFLEET_MEASURE_SECONDS", "1");
        command
    }

    /// Makes a caller known; the file with its token.
    fn known(&self, caller: Value) -> PathBuf {
        let token = caller["token"].as_str().unwrap().to_owned();
        let mut tokens = self.tokens.lock().unwrap();
        tokens.push(caller);
        let beside = self.path("tokens.beside");
        std::fs::write(&beside, json!(*tokens).to_string()).unwrap();
        std::fs::rename(beside, self.path("tokens.json")).unwrap();
        let file = self.path(&format!("token-{token}"));
        std::fs::write(&file, format!("{token}\n")).unwrap();
        file
    }

    fn broker(&self, command: &mut Command, token: &Path) {
        command.args(["--broker", &self.address, "--broker-ca-file"]).arg(self.path("ca.pem"));
        command.arg("--broker-token-file").arg(token);
    }

    pub fn judge(&self, pod: &str) -> Process {
        let token = self.known(json!({"token": pod, "role": "judge", "pod": pod, "podUid": format!("uid-{pod}")}));
        let mut command = self.program("judge-worker");
        self.broker(&mut command, &token);
        command.args([
            "--device",
            "cpu",
            "--card",
            "node-1",
            "--grace",
            "2",
            "--listen",
            &format!("127.0.0.1:{}", port()),
        ]);
        Process(command.spawn().unwrap())
    }

    /// An agent pod of a job's index. `more` are flags, `user` who runs it.
    pub fn agent(&self, job: &str, index: u32, pod: &str, more: &[&str], user: Option<u32>) -> Process {
        let caller = json!({"token": pod, "role": "agent", "namespace": "lab", "pod": pod,
                            "podUid": format!("uid-{pod}"), "jobUid": job, "index": index});
        let token = self.known(caller);
        let folder = self.path(&format!("agent-{pod}"));
        std::fs::create_dir(&folder).unwrap();
        open(&folder, 0o777);
        let mut command = match user {
            Some(user) => as_user(user),
            None => Command::new(EXE),
        };
        command.arg("agent");
        self.broker(&mut command, &token);
        command.env("NO_PROXY", "127.0.0.1").arg("--folder").arg(folder).args(more);
        Process(command.spawn().unwrap())
    }

    fn asked<T>(&self, message: T) -> Request<T> {
        let mut request = Request::new(message);
        request.metadata_mut().insert("authorization", "Bearer operator".parse().unwrap());
        request
    }

    /// Makes a job known: tasks with their sources and trajectories.
    pub fn put(&self, uid: &str, spec: &Value, tasks: &[(&str, &str, &[u8])]) {
        let head = JobHead {
            namespace: "lab".into(),
            name: uid.into(),
            uid: uid.into(),
            spec_json: spec.to_string(),
            batch_job: format!("{uid}-agents"),
            tasks: u32::try_from(tasks.len()).unwrap(),
        };
        let mut parts = vec![PutJobRequest { part: Some(Part::Head(head)) }];
        for (name, source, replay) in tasks {
            let task = JobTask { name: (*name).into(), source: (*source).into(), replay: replay.to_vec() };
            parts.push(PutJobRequest { part: Some(Part::Task(task)) });
        }
        let request = self.asked(tokio_stream::iter(parts));
        self.runtime.block_on(self.operator.clone().put_job(request)).unwrap();
    }

    pub fn facts(&self, uid: &str) -> JobFacts {
        let request = self.asked(GetJobRequest { uid: uid.into() });
        self.runtime.block_on(self.operator.clone().get_job(request)).unwrap().into_inner()
    }

    pub fn pool(&self) -> PoolFacts {
        self.runtime.block_on(self.operator.clone().get_pool(self.asked(GetPoolRequest {}))).unwrap().into_inner()
    }

    /// The best verdict of a task, and its candidate.
    pub fn result(&self, uid: &str, task: &str) -> (Value, BTreeMap<String, String>) {
        let request = self.asked(GetResultRequest { uid: uid.into(), task: task.into() });
        let result = self.runtime.block_on(self.operator.clone().get_result(request)).unwrap().into_inner();
        let files = result.candidate.unwrap().files.into_iter().collect();
        (serde_json::from_str(&result.verdict_json).unwrap(), files)
    }

    /// The two folders and the sandbox of an agent pod. In namespaces, or as a user without rights in a folder, with the
    /// tools mounted as a pod has them. The flags that the agent needs.
    pub fn sandbox(&self, pod: &str, restricted: Option<u32>) -> (Process, Vec<String>) {
        let place = self.path(&format!("pod-{pod}"));
        for name in ["", "link", "sealed", "workspace", "workspace/utils", "scratch"] {
            let folder = place.join(name);
            std::fs::create_dir(&folder).unwrap();
            open(&folder, if name.is_empty() { 0o755 } else { 0o777 });
        }
        let text = |name: &str| place.join(name).display().to_string();
        let sealed = self.program("seal").args(["--to", &text("sealed")]).status().unwrap();
        assert!(sealed.success());
        let (socket, desk) = (text("link/sandbox.sock"), text("link/desk.sock"));
        let flags =
            ["--socket", &socket, "--desk", &desk, "--workspace", &text("workspace"), "--folder", &text("scratch")];
        let mut command = match restricted {
            None => {
                let mut command = self.program("sandbox");
                command.args(flags).args(["--sealed", &text("sealed")]);
                command
            }
            Some(user) => {
                let mut command = Command::new("unshare");
                let mount = "mount --bind \"$1\" \"$2\" && mount -o remount,bind,ro \"$2\" && shift 2 && exec \"$@\"";
                command.args(["-m", "sh", "-ec", mount, "sh", &text("sealed"), &text("workspace/utils")]);
                let inner = as_user(user);
                command.arg(inner.get_program()).args(inner.get_args());
                command.arg("sandbox").args(flags).arg("--no-namespaces");
                command
            }
        };
        let process = Process(command.spawn().unwrap());
        (process, ["--sandbox", &socket, "--desk", &desk].map(str::to_owned).to_vec())
    }
}

/// This program as a user without any right, as a container has it.
fn as_user(user: u32) -> Command {
    let mut command = Command::new("setpriv");
    let user = user.to_string();
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
    command.args(["--bounding-set=-all", "--inh-caps=-all", EXE]);
    command
}

pub fn open(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}
