//! A real broker that keeps its objects in a bucket of a real server that speaks S3, both on loopback.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "common/broker.rs"]
mod common;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use common::{Broker, candidate, evaluate, files, free_port, job, registration, until, whole_episode};
use kernelfleet::wire::v1::{BeginRequest, CloseJobRequest, GetJobRequest, GetPoolRequest, GetResultRequest, Op};
use tonic::Code;

const KEY: &str = "KEYOFTHETEST";
const SECRET: &str = "secret-of-the-test";
/// Least that a server may be away without anybody noticing.
const AWAY: Duration = Duration::from_secs(3);

/// The server's program, built from its pinned module the first time. Without it, and without what builds it, nothing is
/// tested here, which in CI is a failure.
fn program() -> Option<PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = PROGRAM.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let status = Command::new(root.join("tests/cluster/build.sh")).arg("s3").stdin(Stdio::null()).status();
        let built = status.is_ok_and(|s| s.success());
        built.then(|| root.join(".kernelfleet/cluster/bin/versitygw"))
    });
    if built.is_none() {
        assert!(std::env::var_os("CI").is_none(), "tests/cluster/build.sh s3 failed");
        // Past the capture of the test's output, where `tests/all.py` counts it.
        std::io::stderr()
            .write_all(b"\nskipped: no S3 server could be built; see tests/cluster/build.sh s3\n")
            .unwrap();
    }
    built.clone()
}

/// A server over a folder: a bucket is a folder of it, and objects are files.
struct Server {
    folder: tempfile::TempDir,
    port: u16,
    child: Child,
}

impl Server {
    fn start(program: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["data/fleet", "sidecar"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        let port = free_port();
        let child = Self::spawn(program, folder.path(), port);
        let server = Self { folder, port, child };
        server.listens();
        server
    }

    fn spawn(program: &Path, folder: &Path, port: u16) -> Child {
        Command::new(program)
            .args(["--port", &format!("127.0.0.1:{port}"), "--region", "eu-1", "--quiet", "posix"])
            // Not every file system of temporary files has extended attributes.
            .arg("--sidecar")
            .args([folder.join("sidecar"), folder.join("data")])
            .env("ROOT_ACCESS_KEY", KEY)
            .env("ROOT_SECRET_KEY", SECRET)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn listens(&self) {
        for _ in 0..600 {
            if std::net::TcpStream::connect(("127.0.0.1", self.port)).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the server doesn't listen");
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn start_again(&mut self, program: &Path) {
        self.child = Self::spawn(program, self.folder.path(), self.port);
        self.listens();
    }

    fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    fn bucket(&self, name: &str) -> PathBuf {
        self.folder.path().join("data").join(name)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn broker(endpoint: &str, storage: &str, region: &str, key: &str, secret: &str) -> Broker {
    let flags = ["--storage", storage, "--storage-endpoint", endpoint, "--storage-region", region];
    let flags = [&flags[..], &["--retention-seconds", "1"]].concat();
    Broker::start_with(&flags, &[("AWS_ACCESS_KEY_ID", key), ("AWS_SECRET_ACCESS_KEY", secret)])
}

/// What is wrong with the bucket, as the operator hears it.
async fn failing(broker: &Broker) -> String {
    broker.operator().get_pool(GetPoolRequest {}).await.unwrap().into_inner().objects_failing
}

async fn failing_so(broker: &Broker, words: &str) {
    let mut last = String::new();
    until(words, async || {
        last = failing(broker).await;
        last.contains(words)
    })
    .await;
}

async fn usable(broker: &Broker) {
    until("the bucket can be used", async || failing(broker).await.is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_job_comes_to_is_in_the_bucket_outlives_the_broker_and_is_forgotten_there() {
    let Some(program) = program() else { return };
    let mut server = Server::start(&program);
    let mut broker = broker(&server.endpoint(), "s3://fleet/some/prefix", "eu-1", KEY, &format!("{SECRET}\n"));
    broker.ready().await;
    usable(&broker).await;
    let (folder, bucket) = (server.bucket("fleet/some/prefix"), server.bucket("fleet"));
    assert!(files(&bucket).is_empty(), "a check leaves nothing");
    let session = broker.judge("judge").register(registration("card", 1)).await.unwrap().into_inner().session;
    // Two candidates are too large for the ledger.
    let large = "x".repeat(100_000);
    for (uid, text) in [("one", large.as_str()), ("two", large.as_str())] {
        broker.operator().put_job(tokio_stream::iter(job(uid, 1, 1))).await.unwrap();
        whole_episode(&broker, session, uid, text).await;
    }
    until("trajectories are objects", async || files(&folder.join("trajectories")).len() == 2).await;
    assert_eq!((files(&folder.join("blobs")).len(), files(&folder.join("results")).len()), (1, 2));
    assert!(!broker.folder.path().join("objects").exists());
    // A broker that starts anew reads from the bucket what it doesn't remember.
    broker.kill_and_start();
    broker.ready().await;
    usable(&broker).await;
    let ask = || GetResultRequest { uid: "one".into(), task: "t0".into() };
    // What somebody else has made of a candidate isn't what was submitted.
    let blob = files(&folder.join("blobs")).remove(0);
    let kept = std::fs::read(&blob).unwrap();
    std::fs::write(&blob, String::from_utf8(kept.clone()).unwrap().replacen("xx", "zz", 1)).unwrap();
    let tampered = broker.operator().get_result(ask()).await.unwrap_err();
    assert!(tampered.code() == Code::DataLoss && tampered.message().contains("isn't what was written"), "{tampered}");
    std::fs::write(&blob, kept).unwrap();
    let result = broker.operator().get_result(ask()).await.unwrap().into_inner();
    assert_eq!(result.candidate, Some(candidate(&large)));

    // A server that is away for a moment: the reply waits until what it says is kept, and nobody hears of it.
    let session = broker.judge("judge").register(registration("card", 1)).await.unwrap().into_inner().session;
    server.kill();
    let other = "y".repeat(100_000);
    broker.operator().put_job(tokio_stream::iter(job("away", 1, 1))).await.unwrap();
    let blobs = files(&folder.join("blobs")).len();
    let mut episode = Box::pin(whole_episode(&broker, session, "away", &other));
    assert!(tokio::time::timeout(AWAY, &mut episode).await.is_err(), "something was promised that isn't kept");
    let queued = broker.operator().get_job(GetJobRequest { uid: "away".into() }).await.unwrap().into_inner().queued;
    assert_eq!((queued, files(&folder.join("blobs")).len()), (0, blobs));
    server.start_again(&program);
    episode.await;
    assert_eq!(files(&folder.join("blobs")).len(), blobs + 1);
    assert_eq!(failing(&broker).await, "");

    // More objects than a page of a list holds.
    let many = folder.join("results/one/7");
    std::fs::create_dir_all(&many).unwrap();
    for n in 0..1100 {
        std::fs::write(many.join(format!("{n}.json")), "{}").unwrap();
    }
    // Another broker's, whose prefix begins alike, and a neighbour's of the same bucket.
    for neighbour in ["fleet/some/prefix2/results/one/0/1.json", "fleet/other"] {
        let file = server.bucket(neighbour);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, "{}").unwrap();
    }
    let close = |uid: &str| CloseJobRequest { uid: uid.into(), keep: false };
    broker.operator().close_job(close("one")).await.unwrap();
    until("the objects of one job are gone", async || !folder.join("results/one").exists()).await;
    // The content that the other job names too is still there.
    assert_eq!((files(&folder.join("blobs")).len(), files(&folder.join("results")).len()), (2, 2));
    broker.operator().close_job(close("two")).await.unwrap();
    broker.operator().close_job(close("away")).await.unwrap();
    until("nothing is left but the neighbours'", async || files(&bucket).len() == 2).await;
    assert_eq!(broker.stop(), Some(0));
    let log = broker.log();
    assert!(!log.contains(SECRET) && !log.contains(KEY), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_a_bucket_is_told_with_its_setting() {
    let Some(program) = program() else { return };
    let server = Server::start(&program);
    let (endpoint, nobody) = (server.endpoint(), format!("http://127.0.0.1:{}", free_port()));
    let wrong = [
        (
            endpoint.as_str(),
            "s3://fleet",
            "eu-1",
            KEY,
            "not-the-secret-of-the-test",
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        (&endpoint, "s3://fleet", "eu-1", "NOSUCHKEY", SECRET, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        (&endpoint, "s3://fleet", "us-7", KEY, SECRET, "correct --storage-region us-7"),
        (&nobody, "s3://fleet", "eu-1", KEY, SECRET, "Connection refused"),
        (&endpoint, "s3://none/prefix", "eu-1", KEY, SECRET, "there is no bucket none"),
    ];
    let mut last = None;
    for (endpoint, storage, region, key, secret, words) in wrong {
        let broker = broker(endpoint, storage, region, key, secret);
        broker.ready().await;
        failing_so(&broker, words).await;
        let said = failing(&broker).await;
        assert!(said.starts_with(&format!("--storage {storage}: ")), "{said}");
        if endpoint == nobody {
            assert!(said.contains(&format!("--storage-endpoint {nobody} can't be reached")), "{said}");
        }
        let log = broker.log();
        assert!(log.contains("objects can't be kept") && log.contains(words), "{log}");
        for hidden in [key, secret] {
            assert!(!said.contains(hidden) && !log.contains(hidden), "{said}\n{log}");
        }
        last = Some(broker);
    }
    // The last one works on without its bucket, and goes on once that is there.
    let broker = last.unwrap();
    broker.operator().put_job(tokio_stream::iter(job("j", 1, 1))).await.unwrap();
    broker.judge("judge").register(registration("card", 1)).await.unwrap();
    let mut agent = broker.agent("j", 0, "pod");
    agent.begin(BeginRequest {}).await.unwrap();
    let large = "x".repeat(100_000);
    let refused = agent.evaluate(evaluate("k", Op::Verify, &large, 0.0)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    assert!(refused.message().contains("there is no bucket none"), "{refused}");
    // What fits into the ledger needs no bucket.
    agent.evaluate(evaluate("l", Op::Verify, "small", 0.0)).await.unwrap();
    std::fs::create_dir(server.bucket("none")).unwrap();
    usable(&broker).await;
    agent.evaluate(evaluate("k", Op::Verify, &large, 0.0)).await.unwrap();
    assert_eq!(files(&server.bucket("none/prefix/blobs")).len(), 1);
    // A bucket that goes while the broker runs is told of as well: it is no object that isn't there.
    std::fs::rename(server.bucket("none"), server.folder.path().join("gone")).unwrap();
    broker.operator().put_job(tokio_stream::iter(job("next", 1, 1))).await.unwrap();
    broker.judge("judge").register(registration("card", 1)).await.unwrap();
    let mut agent = broker.agent("next", 0, "pod-next");
    agent.begin(BeginRequest {}).await.unwrap();
    let other = "y".repeat(100_000);
    let refused = agent.evaluate(evaluate("k", Op::Verify, &other, 0.0)).await.unwrap_err();
    assert!(refused.message().contains("there is no bucket none"), "{refused}");
    failing_so(&broker, "there is no bucket none").await;
}

#[test]
fn a_broker_that_nobody_gave_credentials_says_which_it_wants_and_ends() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokens.json"), "[]").unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    std::fs::write(at("tls.crt"), key.cert.pem()).unwrap();
    std::fs::write(at("tls.key"), key.signing_key.serialize_pem()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kernelfleet"));
    for (name, _) in std::env::vars_os().filter(|(n, _)| n.to_str().is_some_and(|n| n.starts_with("AWS_"))) {
        command.env_remove(name);
    }
    let ended = command
        .args(["broker", "--storage", "s3://fleet", "--ledger", &at("ledger.db"), "--tokens", &at("tokens.json")])
        .args(["--cert", &at("tls.crt"), "--key", &at("tls.key"), "--listen", "127.0.0.1:0"])
        .args(["--metrics", "127.0.0.1:0"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && said.contains("set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"), "{said}");
}
