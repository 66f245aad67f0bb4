//! How long a sandbox takes: to start, to answer, to be reset after an episode that left much. And what it holds.
//!
//! `cargo bench --bench sandbox` prints a line a measurement; nothing is asserted.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kernelfleet::sandbox::client::{Bounds, Options, Sandbox};
use kernelfleet::sandbox::workspace::Workspace;

const SOON: Duration = Duration::from_secs(60);

fn measure(what: &str, times: usize, mut once: impl FnMut() -> Duration) {
    let mut taken: Vec<f64> = (0..times).map(|_| once().as_secs_f64() * 1e3).collect();
    taken.sort_by(f64::total_cmp);
    println!("{what}: median {:.2} ms, largest {:.2} ms of {times}", taken[times / 2], taken[times - 1]);
}

fn timed(work: impl FnOnce()) -> Duration {
    let start = Instant::now();
    work();
    start.elapsed()
}

fn main() {
    let template: BTreeMap<String, Vec<u8>> = (0..20).map(|i| (format!("utils/{i}.py"), vec![b'#'; 4000])).collect();
    for namespaces in [true, false] {
        let options = Options {
            namespaces,
            bounds: Bounds { disk: 1 << 30, file: 1 << 30, ..Bounds::default() },
            ..Options::new(env!("CARGO_BIN_EXE_kernelfleet").into())
        };
        println!("namespaces: {namespaces}");
        measure("  start and end", 20, || timed(|| drop(Sandbox::start(&options).unwrap())));
        let mut sandbox = Sandbox::start(&options).unwrap();
        println!("  isolation: {}", sandbox.isolation().join(" "));
        measure("  first command of an episode", 20, || {
            sandbox.reset(&template).unwrap();
            timed(|| drop(sandbox.run("true", SOON).unwrap()))
        });
        measure("  command", 200, || timed(|| drop(sandbox.run("true", SOON).unwrap())));
        measure("  read of 4 KB", 200, || timed(|| drop(sandbox.read("utils/1.py", 10_000).unwrap())));
        for (what, left) in [
            ("nothing left", "true"),
            ("200 processes left", "for i in $(seq 200); do sleep 1000 & done"),
            ("10,000 files left", "for d in $(seq 100); do mkdir $d; (cd $d; touch $(seq 100)); done"),
            ("900 MB left", "head -c 900000000 /dev/zero > large"),
        ] {
            measure(&format!("  reset, {what}"), 10, || {
                let ran = sandbox.run(left, SOON).unwrap();
                assert_eq!(ran.status, Some(0), "{}", ran.output);
                timed(|| sandbox.reset(&template).unwrap())
            });
        }
    }
    let mut sandbox = Sandbox::start(&Options::new(env!("CARGO_BIN_EXE_kernelfleet").into())).unwrap();
    let memory = sandbox.run("grep -E 'VmRSS|RssAnon' /proc/1/status | tr -s '\\t\\n' ' '", SOON).unwrap();
    println!("server of an episode: {}", memory.output.trim());
}
