#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use crate::judge::admit;
use crate::judge::toolchain::{CudaLibraries, Nvcc};

/// The compilers of this machine.
fn toolchain(cache: &Path) -> Toolchain {
    let cxx = ["/usr/bin/c++", "/usr/local/bin/c++"].map(PathBuf::from).into_iter().find(|p| p.is_file());
    let nvcc = admit::tests::nvcc().map(|path| {
        let tree = path.canonicalize().unwrap();
        Nvcc { path, args: vec![], read: vec![tree.parent().unwrap().parent().unwrap().to_owned()] }
    });
    Toolchain {
        ncu: None,
        python: PathBuf::new(),
        python_read: vec![],
        agent_image: Path::new(env!("CARGO_MANIFEST_DIR")).join("agent-image"),
        nvcc,
        cxx,
        libraries: CudaLibraries::default(),
        cache: cache.into(),
        program: PathBuf::new(),
        threads: 1,
        passive: false,
        runner_filter: crate::judge::toolchain::RunnerFilter::Off,
        measure: None,
        versions: BTreeMap::new(),
    }
}

/// Builds one file on a device, with an empty cache. `None` where there is no compiler for it.
fn build(device: Device, source: &str, module: &Module) -> Option<Result<Built, BuildError>> {
    let folder = tempfile::tempdir().unwrap();
    let toolchain = toolchain(folder.path());
    let missing = match device {
        Device::Cuda => toolchain.nvcc.is_none(),
        Device::Cpu => toolchain.cxx.is_none(),
    };
    if missing {
        println!("skipped: there is no compiler for {device:?} here");
        return None;
    }
    let files = [(module.path.clone(), source.to_owned()), ("kernels/own.h".to_owned(), "#define OWN 3\n".to_owned())];
    Some(Builder::new(&toolchain, folder.path()).build(device, "sm_90a", &files.into(), module))
}

fn module(device: Device) -> Module {
    let path = if device == Device::Cuda { "kernels/a.cu" } else { "kernels/a.cpp" };
    Module { path: path.into(), defines: vec![], flags: vec![] }
}

const CPU: &str = r#"
#include <cmath>
#include <cstdint>
#include "kernelfleet_math.h"
#include "own.h"
extern "C" void gelu(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) y[i] = kf_gelu(x[i]) + OWN;
}
"#;
const CUDA: &str = r#"
#include <cub/block/block_reduce.cuh>
#include <cuda_fp16.h>
#include "own.h"
extern "C" __global__ void add(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] + OWN;
}
"#;

fn source(device: Device) -> &'static str {
    if device == Device::Cuda { CUDA } else { CPU }
}

const DEVICES: [Device; 2] = [Device::Cpu, Device::Cuda];

#[test]
fn equal_sources_give_equal_images() {
    for device in DEVICES {
        let built = || build(device, source(device), &module(device)).map(|b| b.unwrap_or_else(|e| panic!("{e}")));
        let (Some(first), Some(second)) = (built(), built()) else { continue };
        assert!(!first.cached && !second.cached);
        assert_eq!(first.digest, second.digest, "{device:?}");
        assert!(!String::from_utf8_lossy(&first.image).contains("kernelfleet-build-"), "{device:?}");
    }
}

#[test]
fn a_second_build_comes_from_the_cache_and_a_change_of_anything_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let toolchain = toolchain(folder.path());
    if toolchain.cxx.is_none() {
        println!("skipped: there is no C++ compiler here");
        return;
    }
    let builder = Builder::new(&toolchain, folder.path());
    let header = |text: &str| {
        [
            ("a.cpp".to_owned(), "#include \"h.h\"\nextern \"C\" int f() { return X; }".to_owned()),
            ("h.h".to_owned(), text.to_owned()),
        ]
        .into()
    };
    let module = Module { path: "a.cpp".into(), defines: vec![], flags: vec![] };
    let cached =
        |text: &str, module: &Module| builder.build(Device::Cpu, "x86_64", &header(text), module).unwrap().cached;
    assert!(!cached("#define X 1\n", &module));
    assert!(cached("#define X 1\n", &module));
    assert!(!cached("#define X 2\n", &module), "a changed header");
    assert!(!cached("#define X 1\n", &Module { flags: vec!["-O2".into()], ..module.clone() }), "a flag");
    assert!(!cached("#define X 1\n", &Module { defines: vec![("Y".into(), "1".into())], ..module }), "a define");
}

#[test]
fn a_mistake_is_told_with_file_and_line() {
    for device in DEVICES {
        let source = "extern \"C\" {\nint x = 3;\nint y = unknown_name;\n}\n";
        let Some(built) = build(device, source, &module(device)) else { continue };
        let Err(BuildError::Refused { message, file, line }) = built else { panic!("{built:?}") };
        assert!(message.contains("unknown_name"), "{message}");
        assert_eq!((file, line), (Some(module(device).path), Some(3)), "{message}");
    }
}

#[test]
fn files_outside_are_neither_read_nor_quoted() {
    if sandbox::Probe::here().landlock == 0 {
        println!("skipped: this kernel has no Landlock");
        return;
    }
    // A secret that any user could read, were it not for Landlock.
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, "int stolen_secret = 7;\n").unwrap();
    for path in [folder.path(), &secret] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    }
    for device in DEVICES {
        for name in [
            secret.to_str().unwrap(),
            "/etc/passwd",
            "/proc/self/environ",
            "/root/.profile",
            "../../../../etc/hostname",
        ] {
            for source in [
                format!("#include \"{name}\"\n{}", source(device)),
                format!("asm(\".pushsection .rodata\\n.incbin \\\"{name}\\\"\\n.popsection\");\n"),
            ] {
                if device == Device::Cuda && source.starts_with("asm") {
                    continue;
                }
                let Some(built) = build(device, &source, &module(device)) else { continue };
                let Err(BuildError::Refused { message, .. }) = built else { panic!("{name} was read: {built:?}") };
                assert!(!message.contains("stolen_secret") && !message.contains("root:"), "{message}");
            }
        }
    }
}

#[test]
fn a_file_of_the_candidate_outside_of_its_folder_is_not_laid_out() {
    for name in ["/tmp/kernelfleet-evil.h", "../evil.h", "a/../../evil.h", "kernelfleet.out", ""] {
        assert!(!inside(name), "{name}");
    }
    assert!(inside("kernels/a.cu") && inside("a.h"));
}

#[test]
fn a_link_in_place_of_an_image_is_none() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(take(&path).is_err());
    fs::remove_file(&path).unwrap();
    fs::write(&path, "image").unwrap();
    assert_eq!(take(&path).unwrap(), b"image");
}

#[test]
fn a_compiler_that_does_not_end_is_killed_with_what_it_started() {
    let folder = tempfile::tempdir().unwrap();
    let toolchain = toolchain(folder.path());
    if toolchain.cxx.is_none() {
        println!("skipped: there is no C++ compiler here");
        return;
    }
    let mut builder = Builder::new(&toolchain, folder.path());
    builder.limit = Duration::from_secs(2);
    let source = "template <int N, int M> struct F { enum { v = F<N - 1, M * 2>::v + F<N - 1, M * 2 + 1>::v }; };\n\
                  template <int M> struct F<0, M> { enum { v = 1 }; };\nint x = F<40, 1>::v;\n";
    let files = [("a.cpp".to_owned(), source.to_owned())].into();
    let module = Module { path: "a.cpp".into(), defines: vec![], flags: vec![] };
    let start = Instant::now();
    let error = builder.build(Device::Cpu, "x86_64", &files, &module).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20), "{error}");
    assert!(matches!(error, BuildError::Refused { .. }), "{error}");
}

/// All that `plan::validate` lets through must mean something to the compiler, and to no shell.
#[test]
fn every_flag_and_sign_that_a_plan_may_hold_reaches_the_compiler_unchanged() {
    let cpu = [
        "-O0",
        "-O1",
        "-O2",
        "-O3",
        "-w",
        "-std=c++14",
        "-std=c++17",
        "-std=c++20",
        "-Ofast",
        "-ffast-math",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-fno-signed-zeros",
        "-ffinite-math-only",
        "-fassociative-math",
        "-freciprocal-math",
        "-funsafe-math-optimizations",
        "-ffp-contract=fast",
        "-ffp-contract=off",
        "-ffp-contract=on",
        "-funroll-loops",
        "-funroll-all-loops",
        "-fno-exceptions",
        "-fno-rtti",
        "-fno-tree-vectorize",
        "-mprefer-vector-width=512",
    ];
    let cuda = [
        "-O0",
        "-O3",
        "-w",
        "-std=c++20",
        "--use_fast_math",
        "-use_fast_math",
        "--extra-device-vectorization",
        "--expt-relaxed-constexpr",
        "--extended-lambda",
        "-expt-extended-lambda",
        "--restrict",
        "--maxrregcount=64",
        "-maxrregcount=32",
        "--fmad=false",
        "--ftz=true",
        "--prec-div=false",
        "--prec-sqrt=false",
        "-Xptxas=-O2",
        "-Xptxas=-dlcm=ca",
        "--ptxas-options=-O3",
    ];
    // Of each kind of sign, in places where a shell or nvcc's own splitting would see it.
    let defines = vec![
        ("A".to_owned(), "(1<<3)|(5&4)^~0".to_owned()),
        ("B".to_owned(), "(7>2&&1||!0)?2:3".to_owned()),
        ("C".to_owned(), "x [ i ] * 2 % 3".to_owned()),
        ("D".to_owned(), "{ 1 }".to_owned()),
        ("E".to_owned(), String::new()),
        ("F".to_owned(), "-1.5e-3f".to_owned()),
    ];
    let text = "#define TEXT2(x) #x\n#define TEXT(x) TEXT2(x)\nconstexpr bool same(const char* a, const char* b) { return *a == *b && (*a == 0 || same(a + 1, b + 1)); }\n";
    for device in DEVICES {
        let mut source = text.to_owned();
        for (name, value) in &defines {
            source += &format!("static_assert(same(TEXT({name}), \"{value}\"), \"{name}\");\n");
        }
        source +=
            if device == Device::Cuda { "extern \"C\" __global__ void k() {}\n" } else { "extern \"C\" void k() {}\n" };
        let flags: &[&str] = if device == Device::Cuda { &cuda } else { &cpu };
        for flag in [""].iter().chain(flags) {
            let flags: Vec<String> = [*flag].iter().filter(|f| !f.is_empty()).map(|f| (*f).to_owned()).collect();
            let module = Module { defines: defines.clone(), flags, ..module(device) };
            let Some(built) = build(device, &source, &module) else { break };
            let built = built.unwrap_or_else(|e| panic!("{device:?} {flag}: {e}"));
            if device == Device::Cuda {
                admit::admit(&built.image, "sm_90a").unwrap_or_else(|e| panic!("{flag}: {e}"));
            }
        }
    }
}

#[test]
fn lines_of_other_files_are_not_quoted() {
    let files = [("kernels/a.cpp".to_owned(), String::new())].into();
    let said = "In file included from kernels/a.cpp:1:\n/etc/passwd:1:1: error: 'root' does not name a type\n    1 | root:x:0:0:root:/root\nkernels/a.cpp:7:2: error: expected ';'\n    7 | int x\n";
    let BuildError::Refused { message, file, line } = diagnostics(said, &files, "1") else { panic!("refused") };
    assert!(!message.contains("root"), "{message}");
    assert_eq!((file.as_deref(), line), (Some("kernels/a.cpp"), Some(7)));
}

#[test]
fn an_entry_of_the_cache_that_was_changed_is_not_used() {
    let folder = tempfile::tempdir().unwrap();
    let toolchain = toolchain(folder.path());
    let builder = Builder::new(&toolchain, folder.path());
    builder.store("k", b"image", &digest([b"image".as_slice()]));
    assert!(builder.cached("k").is_some());
    let path = folder.path().join("k");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    assert!(builder.cached("k").is_none());
}
