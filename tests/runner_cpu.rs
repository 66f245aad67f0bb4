//! The CPU runner through its real process: libraries built by the system's C++ compiler, honest and hostile.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use kernelfleet::judge::runner::client::{Error, Exported, LoadRequest, Loaded, Runner, memory_file, write_constants};
use kernelfleet::judge::runner::{Arithmetic, Item};
use kernelfleet::plan::Device::Cpu;
use kernelfleet::plan::{
    Arg, Buffer, BufferKind, Dtype, Fill, Launch, Library, Module, Node, Op, Plan, Structure, TensorRef, VERSION,
};

const SOON: Duration = Duration::from_secs(20);

fn build(source: &str) -> File {
    let folder = tempfile::tempdir().unwrap();
    let (input, output) = (folder.path().join("k.cpp"), folder.path().join("k.so"));
    std::fs::write(&input, source).unwrap();
    let status = Command::new("c++")
        .args(["-O2", "-shared", "-fPIC", "-std=c++17", "-pthread", "-o"])
        .args([&output, &input])
        .status()
        .expect("a C++ compiler named c++");
    assert!(status.success());
    File::open(output).unwrap()
}

fn start() -> Runner {
    let mut runner = Runner::spawn(Path::new(env!("CARGO_BIN_EXE_kernelfleet")), Cpu, |_| {}).unwrap();
    runner.hello(SOON).unwrap();
    runner
}

fn launch(kernel: &str, args: Vec<Arg>) -> Op {
    Op::Launch(Launch {
        module: 0,
        kernel: kernel.into(),
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        cluster: None,
        cooperative: false,
        args,
    })
}

fn at(buffer: usize) -> Arg {
    Arg::Pointer { buffer, offset: 0 }
}

/// A plan with one input, one parameter, one constant and two workspaces (3 is the output) of `bytes` each.
fn plan(bytes: u64, ops: Vec<Op>) -> Plan {
    let kinds = [
        BufferKind::Input(0),
        BufferKind::Parameter("weight".into()),
        BufferKind::Constant(0),
        BufferKind::Workspace,
        BufferKind::Workspace,
    ];
    Plan {
        version: VERSION,
        device: Cpu,
        buffers: kinds.into_iter().map(|kind| Buffer { kind, bytes }).collect(),
        modules: vec![Module { path: "kernels/k.cpp".into(), defines: vec![], flags: vec![] }],
        nodes: ops.into_iter().map(|op| Node { op, line: None }).collect(),
        outputs: vec![TensorRef {
            buffer: 3,
            offset: 0,
            dtype: Dtype::Float32,
            shape: vec![bytes / 4],
            strides: vec![1],
        }],
        structure: Structure::Tensor,
    }
}

struct World {
    input: OwnedFd,
    weight: OwnedFd,
    constants: OwnedFd,
    bytes: u64,
}

impl World {
    fn new(bytes: u64) -> Self {
        let make = || memory_file(c"test", bytes).unwrap();
        Self { input: make(), weight: make(), constants: make(), bytes }
    }

    fn load(
        &self,
        runner: &mut Runner,
        plan: &Plan,
        image: &File,
        helper: Option<&UnixStream>,
    ) -> Result<Loaded, Error> {
        let request = LoadRequest {
            plan,
            images: vec![image.as_fd()],
            inputs: vec![vec![Some((self.input.as_fd(), self.bytes))]],
            parameters: BTreeMap::from([("weight".to_owned(), (self.weight.as_fd(), self.bytes))]),
            constants: Some((self.constants.as_fd(), vec![Item { offset: 0, bytes: self.bytes }])),
            libraries: BTreeMap::new(),
            precision: Arithmetic::default(),
            seed: 0,
            helper: helper.map(AsFd::as_fd),
        };
        runner.load(&request, SOON)
    }
}

fn write(fd: &OwnedFd, values: &[f32]) {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    File::from(fd.try_clone().unwrap()).write_all_at(&bytes, 0).unwrap();
}

fn read(fd: &OwnedFd, count: usize) -> Vec<f32> {
    let mut bytes = vec![0; count * 4];
    File::from(fd.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
    bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn output(loaded: &Loaded) -> &Exported {
    &loaded.outputs[0]
}

/// Loads and runs `kernel()` of a source that takes no arguments.
fn run_bare(source: &str, kernel: &str, timeout: Duration) -> (Runner, Result<(), Error>) {
    let mut runner = start();
    let world = World::new(64);
    world.load(&mut runner, &plan(64, vec![launch(kernel, vec![at(3)])]), &build(source), None).unwrap();
    let result = runner.run(0, 1, timeout).map(|_| ());
    (runner, result)
}

#[test]
fn a_plan_reads_inputs_parameters_and_constants_and_writes_the_output() {
    let source = r#"extern "C" void axpy(const float* x, const float* w, const float* c, float* y, long n, float s) {
        for (long i = 0; i < n; i++) y[i] = s * x[i] * w[i] + c[i]; }"#;
    let plan = plan(64, vec![launch("axpy", vec![at(0), at(1), at(2), at(3), Arg::Int(16), Arg::Float(0.5)])]);
    let world = World::new(64);
    write(&world.weight, &[2.0; 16]);
    write(&world.constants, &[10.0; 16]);
    let mut runner = start();
    let loaded = world.load(&mut runner, &plan, &build(source), None).unwrap();
    assert_eq!(loaded.outputs.iter().map(|o| o.buffer).collect::<Vec<_>>(), [3]);
    assert_eq!(loaded.workspaces.iter().map(|o| o.buffer).collect::<Vec<_>>(), [4]);
    assert_eq!(loaded.constants.iter().map(|o| o.buffer).collect::<Vec<_>>(), [2]);

    let first: Vec<f32> = (0..16u8).map(f32::from).collect();
    write(&world.input, &first);
    runner.run(0, 1, SOON).unwrap();
    assert_eq!(read(&output(&loaded).fd, 16), first.iter().map(|x| x + 10.0).collect::<Vec<_>>());

    runner.stop(SOON).unwrap();
    write(&world.input, &[1.0; 16]);
    write(&world.constants, &[-1.0; 16]);
    write_constants(&plan, &loaded.constants, world.constants.as_fd(), &[Item { offset: 0, bytes: 64 }]).unwrap();
    write(&output(&loaded).fd, &[7.0; 16]);
    let (_, wall) = runner.run(0, 2, SOON).unwrap();
    assert!(wall > Duration::ZERO);
    assert_eq!(read(&output(&loaded).fd, 16), [0.0; 16]);
    let (null, _) = runner.null(3, SOON).unwrap();
    assert_eq!(null.time_us.len(), 3);
    let profile = runner.profile(0, 3, SOON).unwrap();
    assert_eq!(profile.len(), 1);
    runner.close();
}

#[test]
fn sixty_four_mixed_arguments_arrive_in_order() {
    let mut source = String::from("extern \"C\" void many(double* y");
    let mut body = String::new();
    let mut args = vec![at(3)];
    for n in 1..64 {
        let (kind, arg) = match n % 5 {
            0 => ("double", Arg::F64(f64::from(n) + 0.25)),
            1 => ("float", Arg::Float(f64::from(n) + 0.5)),
            2 => ("int", Arg::I32(-n)),
            3 => ("unsigned char", Arg::U8(u8::try_from(n).unwrap())),
            _ => ("long", Arg::I64(i64::from(n) << 40)),
        };
        source.push_str(&format!(", {kind} a{n}"));
        body.push_str(&format!("y[{n}] = (double)a{n};"));
        args.push(arg);
    }
    source.push_str(&format!(") {{ y[0] = 0; {body} }}"));
    let world = World::new(512);
    let mut runner = start();
    let plan = plan(512, vec![launch("many", args)]);
    let loaded = world.load(&mut runner, &plan, &build(&source), None).unwrap();
    runner.run(0, 1, SOON).unwrap();
    let mut bytes = vec![0; 512];
    File::from(output(&loaded).fd.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
    for n in 1..64usize {
        let got = f64::from_le_bytes(bytes[n * 8..n * 8 + 8].try_into().unwrap());
        let f = n as f64;
        let want = [f + 0.25, f + 0.5, -f, f, f * 2f64.powi(40)][n % 5];
        assert_eq!(got, want, "argument {n}");
    }
}

#[test]
fn only_floats_or_only_integers_beyond_the_registers_arrive_too() {
    for (kind, make) in [("float", Arg::F32 as fn(f64) -> Arg), ("long", |v| Arg::Int(v as i64))] {
        let list: Vec<String> = (1..40).map(|n| format!("{kind} a{n}")).collect();
        let sums: Vec<String> = (1..40).map(|n| format!("y[{}] = (float)a{n};", n - 1)).collect();
        let source = format!("extern \"C\" void f({}, float* y) {{ {} }}", list.join(", "), sums.concat());
        let mut args: Vec<Arg> = (1..40).map(|n| make(f64::from(n))).collect();
        args.push(at(3));
        let world = World::new(256);
        let mut runner = start();
        let loaded = world.load(&mut runner, &plan(256, vec![launch("f", args)]), &build(&source), None).unwrap();
        runner.run(0, 1, SOON).unwrap();
        let want: Vec<f32> = (1..40u8).map(f32::from).collect();
        assert_eq!(read(&output(&loaded).fd, 39), want, "{kind}");
    }
}

#[test]
fn fills_write_their_pattern_and_nothing_else() {
    let pattern = 1.5f64.to_le_bytes().to_vec();
    let fill = |offset, bytes, pattern| Op::Fill(Fill { buffer: 3, offset, bytes, pattern });
    let plan = plan(64, vec![fill(8, 32, pattern), fill(40, 4, 2.0f32.to_le_bytes().to_vec()), fill(44, 1, vec![9])]);
    let world = World::new(64);
    let mut runner = start();
    let loaded = world.load(&mut runner, &plan, &build(""), None).unwrap();
    runner.run(0, 1, SOON).unwrap();
    let mut bytes = [0; 64];
    File::from(output(&loaded).fd.try_clone().unwrap()).read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(bytes[..8], [0; 8]);
    assert!(bytes[8..40].chunks(8).all(|c| c == 1.5f64.to_le_bytes()));
    assert_eq!(bytes[40..44], 2.0f32.to_le_bytes());
    assert_eq!(bytes[44], 9);
    assert_eq!(bytes[45..], [0; 19]);
}

#[test]
fn a_missing_function_is_named_with_what_the_library_exports() {
    let world = World::new(64);
    let mut runner = start();
    let image = build("extern \"C\" void relu(float*) {} void gelu(float*) {}");
    let error = world.load(&mut runner, &plan(64, vec![launch("gelu", vec![at(3)])]), &image, None).unwrap_err();
    let Error::Refused(fault) = error else { panic!("{error}") };
    assert_eq!((fault.code.as_str(), fault.node, fault.kernel.as_deref()), ("symbol", Some(0), Some("gelu")));
    assert!(fault.message.contains("relu") && fault.message.contains("_Z4geluPf"), "{}", fault.message);
}

#[test]
fn a_plan_that_the_gate_refuses_is_refused_here_too() {
    let world = World::new(64);
    let mut runner = start();
    let error = world.load(&mut runner, &plan(64, vec![launch("f", vec![at(9)])]), &build(""), None).unwrap_err();
    assert_eq!(error.code(), "plan", "{error}");
}

#[test]
fn a_library_that_is_none_is_refused() {
    let world = World::new(64);
    let mut runner = start();
    let mut image = tempfile::tempfile().unwrap();
    image.write_all(b"not an image").unwrap();
    let error = world.load(&mut runner, &plan(64, vec![launch("f", vec![at(3)])]), &image, None).unwrap_err();
    assert_eq!(error.code(), "image");
    assert!(error.to_string().contains("kernels/k.cpp"), "{error}");
}

#[test]
fn a_crash_is_reported_with_its_signal() {
    let (_, result) = run_bare("extern \"C\" void f() { *(volatile int*)8 = 1; }", "f", SOON);
    let error = result.unwrap_err();
    assert!(matches!(error, Error::Crashed { signal: Some(libc::SIGSEGV), .. }), "{error}");
    assert!(error.to_string().contains("SIGSEGV"), "{error}");
    let (_, result) = run_bare("#include <cstdlib>\nextern \"C\" void f() { abort(); }", "f", SOON);
    assert!(matches!(result, Err(Error::Crashed { signal: Some(libc::SIGABRT), .. })));
    let (_, result) = run_bare("#include <unistd.h>\nextern \"C\" void f() { _exit(0); }", "f", SOON);
    assert!(matches!(result, Err(Error::Crashed { signal: None, code: Some(0), .. })));
}

#[test]
fn a_hang_ends_with_the_timeout_and_the_process_can_be_killed() {
    let start = Instant::now();
    let (mut runner, result) =
        run_bare("extern \"C\" void f() { for (;;) asm volatile(\"\"); }", "f", Duration::from_millis(300));
    assert!(matches!(result, Err(Error::Timeout { .. })));
    runner.kill();
    assert!(start.elapsed() < SOON);
    assert!(!Path::new(&format!("/proc/{}", runner.pid())).exists());
}

#[test]
fn a_second_answer_is_a_forgery() {
    let reply = r#"{\"ok\":true,\"id\":4,\"time_us\":0.0}"#;
    let source = format!(
        r#"#include <unistd.h>
        #include <cstring>
        #include <cstdint>
        extern "C" void f() {{ const char* t = "{reply}"; char b[256]; uint32_t n = strlen(t), z = 0;
            memcpy(b, &n, 4); memcpy(b + 4, &z, 4); memcpy(b + 8, t, n); write(3, b, 8 + n); }}"#
    );
    let (mut runner, first) = run_bare(&source, "f", SOON);
    // The forged answer comes first and reads as done; the true one behind it gives it away at once, or, if
    // it comes later, before the next request.
    let error = match first {
        Err(error) => error,
        Ok(()) => runner.run(0, 2, SOON).unwrap_err(),
    };
    assert_eq!(error.code(), "forged_reply", "{error}");
}

#[test]
fn garbage_and_stray_descriptors_are_forgeries_and_no_panic() {
    let garbage = r#"#include <unistd.h>
        extern "C" void f() { char b[64]; for (char& c : b) c = (char)0xff; write(3, b, 64); _exit(0); }"#;
    let (_, result) = run_bare(garbage, "f", SOON);
    assert_eq!(result.unwrap_err().code(), "forged_reply");

    let wrong_type = r#"#include <unistd.h>
        #include <cstring>
        extern "C" void f() { char b[64] = {}; const char* t = "{\"ok\":true,\"id\":4,\"time_us\":[]}"; b[0] = (char)strlen(t);
            memcpy(b + 8, t, strlen(t)); write(3, b, 8 + strlen(t)); pause(); }"#;
    let (_, result) = run_bare(wrong_type, "f", SOON);
    assert_eq!(result.unwrap_err().code(), "forged_reply");

    let descriptor = r#"#include <unistd.h>
        #include <cstring>
        #include <sys/socket.h>
        extern "C" void f() { char b[64] = {}; const char* t = "{\"ok\":true,\"id\":4,\"time_us\":0.0}"; b[0] = (char)strlen(t);
            b[4] = 1; memcpy(b + 8, t, strlen(t)); iovec v{b, 8 + strlen(t)}; alignas(8) char c[CMSG_SPACE(4)] = {};
            msghdr m{}; m.msg_iov = &v; m.msg_iovlen = 1; m.msg_control = c; m.msg_controllen = sizeof c;
            cmsghdr* h = CMSG_FIRSTHDR(&m); h->cmsg_level = SOL_SOCKET; h->cmsg_type = SCM_RIGHTS; h->cmsg_len = CMSG_LEN(4);
            int fd = 1; memcpy(CMSG_DATA(h), &fd, 4); sendmsg(3, &m, 0); pause(); }"#;
    let (_, result) = run_bare(descriptor, "f", SOON);
    assert_eq!(result.unwrap_err().code(), "forged_reply");
}

#[test]
fn a_stopped_runner_with_busy_threads_writes_nothing_until_it_is_continued() {
    let source = r#"#include <thread>
        extern "C" void f(volatile float* y) { for (int t = 0; t < 4; t++) std::thread([=] { for (float v = 0;; v += 1) y[t] = v; }).detach(); }"#;
    let world = World::new(64);
    let mut runner = start();
    let loaded = world.load(&mut runner, &plan(64, vec![launch("f", vec![at(3)])]), &build(source), None).unwrap();
    runner.run(0, 1, SOON).unwrap();
    for _ in 0..20 {
        runner.stop(SOON).unwrap();
        write(&output(&loaded).fd, &[-1.0; 4]);
        std::thread::yield_now();
        assert_eq!(read(&output(&loaded).fd, 4), [-1.0; 4], "no thread writes while the process is stopped");
        runner.cont().unwrap();
    }
}

#[test]
fn an_end_while_stopped_or_waiting_is_a_crash_and_no_hang() {
    let mut runner = start();
    runner.stop(SOON).unwrap();
    // SAFETY: signals a process that this test has started.
    unsafe { libc::kill(i32::try_from(runner.pid()).unwrap(), libc::SIGKILL) };
    assert!(matches!(runner.hello(SOON), Err(Error::Crashed { .. } | Error::Io { .. })));
    assert!(matches!(runner.hello(SOON), Err(Error::Crashed { .. })));
}

fn matmul() -> Op {
    let matrix =
        |buffer| TensorRef { buffer, offset: 0, dtype: Dtype::Float32, shape: vec![4, 4], strides: vec![4, 1] };
    Op::Library(Library::Matmul { a: matrix(0), b: matrix(1), bias: None, out: matrix(3) })
}

#[test]
fn a_library_call_without_a_helper_is_refused_at_load() {
    let world = World::new(64);
    let mut runner = start();
    let error = world.load(&mut runner, &plan(64, vec![matmul()]), &build(""), None).unwrap_err();
    assert_eq!(error.code(), "no_helper");
}

#[test]
fn library_calls_go_to_the_helper_by_node_and_its_status_counts() {
    let world = World::new(64);
    let mut runner = start();
    let (mut helper, theirs) = UnixStream::pair().unwrap();
    let fill = Op::Fill(Fill { buffer: 4, offset: 0, bytes: 4, pattern: vec![1] });
    world.load(&mut runner, &plan(64, vec![fill, matmul(), matmul()]), &build(""), Some(&theirs)).unwrap();
    drop(theirs);
    let answers = std::thread::spawn(move || {
        let mut seen = Vec::new();
        for status in [0u32, 3] {
            let mut node = [0; 4];
            helper.read_exact(&mut node).unwrap();
            seen.push(u32::from_le_bytes(node));
            helper.write_all(&status.to_le_bytes()).unwrap();
        }
        seen
    });
    let error = runner.run(0, 1, SOON).unwrap_err();
    assert_eq!(answers.join().unwrap(), [1, 2]);
    let Error::Refused(fault) = error else { panic!("{error}") };
    assert_eq!((fault.code.as_str(), fault.node), ("library_failed", Some(2)));
}

#[test]
fn three_hundred_parameters_reach_the_runner_although_a_frame_carries_250() {
    let count = 300;
    let source = r#"extern "C" void add(const float* w, float* y) { *y += *w; }"#;
    let mut plan = plan(64, vec![]);
    plan.nodes = std::iter::once(Op::Fill(Fill { buffer: 3, offset: 0, bytes: 64, pattern: vec![0] }))
        .chain((0..count).map(|n| launch("add", vec![at(5 + n), at(3)])))
        .map(|op| Node { op, line: None })
        .collect();
    plan.buffers.extend((0..count).map(|n| Buffer { kind: BufferKind::Parameter(format!("p{n}")), bytes: 4 }));
    let files: Vec<OwnedFd> = (0..count).map(|_| memory_file(c"p", 4).unwrap()).collect();
    for file in &files {
        write(file, &[1.0]);
    }
    let world = World::new(64);
    let image = build(source);
    let mut parameters: BTreeMap<String, _> =
        files.iter().enumerate().map(|(n, fd)| (format!("p{n}"), (fd.as_fd(), 4))).collect();
    parameters.insert("weight".into(), (world.weight.as_fd(), 64));
    let request = LoadRequest {
        plan: &plan,
        images: vec![image.as_fd()],
        inputs: vec![vec![Some((world.input.as_fd(), 64))]],
        parameters,
        constants: Some((world.constants.as_fd(), vec![Item { offset: 0, bytes: 64 }])),
        libraries: BTreeMap::new(),
        precision: Arithmetic::default(),
        seed: 0,
        helper: None,
    };
    let mut runner = start();
    let loaded = runner.load(&request, SOON).unwrap();
    runner.run(0, 1, SOON).unwrap();
    assert_eq!(read(&output(&loaded).fd, 1), [300.0]);
}

#[test]
fn a_buffer_smaller_than_the_plan_says_is_refused() {
    let world = World::new(64);
    let mut runner = start();
    let mut plan = plan(64, vec![launch("f", vec![at(3)])]);
    plan.buffers[0].bytes = 4096 * 4;
    let error = world.load(&mut runner, &plan, &build(""), None).unwrap_err();
    assert_eq!(error.code(), "memory");
}
