#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use super::*;
use crate::plan::Arg;

/// nvcc of the project's own environment, of the search path, or of a system-wide installation.
pub(in crate::judge) fn nvcc() -> Option<PathBuf> {
    let below = |folder: &Path| -> Vec<PathBuf> {
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect()
    };
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join(".kernelfleet/python/lib");
    let packages = below(&lib).into_iter().flat_map(|p| below(&p.join("site-packages/nvidia")));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = packages.map(|p| p.join("bin/nvcc")).chain(std::env::split_paths(&path).map(|p| p.join("nvcc")));
    found.chain([PathBuf::from("/usr/local/cuda/bin/nvcc")]).find(|p| p.is_file())
}

/// What nvcc makes of a source, `None` (and a line that says so) where there is no nvcc.
fn built(source: &str, flags: &[&str]) -> Option<Vec<u8>> {
    let Some(nvcc) = nvcc() else {
        println!("skipped: there is no nvcc here");
        return None;
    };
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.cu"), source).unwrap();
    let done = Command::new(nvcc).args(flags).args(["-o", "out", "a.cu"]).current_dir(folder.path()).output().unwrap();
    assert!(
        done.status.success(),
        "{}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    Some(std::fs::read(folder.path().join("out")).unwrap())
}

const CUBIN: &[&str] = &["-cubin", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a"];

const RELU: &str = r#"extern "C" __global__ void relu(const float* x, float* y, long long n, float s, char c) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] > 0 ? x[i] * s + c : 0;
}"#;

/// Constant tables, globals, string literals, recursion, function pointers, virtual calls, jump tables, static and
/// dynamic shared memory, clusters, a grid barrier, tensor cores, TMA, moved registers, CUB, double precision.
const MANY: &str = include_str!("many.cu");

/// The image of `RELU` or `MANY`, built once.
fn sample(source: &str) -> Option<Vec<u8>> {
    static IMAGES: [OnceLock<Option<Vec<u8>>>; 2] = [OnceLock::new(), OnceLock::new()];
    IMAGES[usize::from(source == MANY)].get_or_init(|| built(source, CUBIN)).clone()
}

fn refused(source: &str, flags: &[&str]) -> Option<Refusal> {
    built(source, flags).map(|image| admit(&image, "sm_90a").expect_err("admitted"))
}

#[test]
fn a_kernel_is_described_as_the_compiler_made_it() {
    for flags in [CUBIN, &["-cubin", "-arch=sm_90"]] {
        let Some(image) = built(RELU, flags) else { return };
        let image = admit(&image, "sm_90a").unwrap();
        let kernel = &image.kernels["relu"];
        let params: Vec<_> = kernel.params.iter().map(|p| (p.offset, p.size)).collect();
        assert_eq!(params, [(0, 8), (8, 8), (16, 8), (24, 4), (28, 1)]);
        assert_eq!((kernel.param_bytes, kernel.shared_static, kernel.local_bytes), (29, 0, 0));
        assert!((8..=32).contains(&kernel.registers));
    }
}

#[test]
fn honest_kernels_of_many_kinds_are_admitted() {
    let Some(image) = sample(MANY) else { return };
    let image = admit(&image, "sm_90a").unwrap_or_else(|e| panic!("{e}"));
    let kernel = |name: &str| &image.kernels[name];
    assert_eq!(kernel("everything").max_threads, Some(256));
    assert_eq!(kernel("everything").shared_static, 1024);
    assert!(kernel("everything").local_bytes >= 1200);
    assert_eq!(kernel("clusters").cluster, Some([2, 1, 1]));
    assert_eq!(kernel("tma").params[0].size, 128);
    assert_eq!(kernel("large").param_bytes, 3608);
    assert_eq!(kernel("fixed").required_block, Some([64, 2, 1]));
    assert!(kernel("reduce").shared_static > 0);
    assert_eq!(kernel("nothing").params, []);
}

#[test]
fn an_image_that_needs_anything_outside_is_refused_with_the_reason() {
    let kernel = |include: &str, body: &str| {
        format!("#include <{include}>\nextern \"C\" __global__ void k(char** o, int x) {{ {body} }}")
    };
    for (source, word) in [
        (kernel("cstdio", "printf(\"%d\\n\", x);"), "printf"),
        (kernel("cstdlib", "*o = (char*)malloc(x);"), "heap"),
        (kernel("cassert", "assert(x > 3);"), "assert"),
        (format!("__managed__ int m;\n{}", kernel("cstdlib", "m = x;")), "__managed__"),
    ] {
        let Some(refusal) = refused(&source, CUBIN) else { return };
        assert_eq!(refusal.code, Code::Symbol, "{refusal}");
        assert!(refusal.message.contains(word), "{refusal}");
    }
}

#[test]
fn an_image_of_another_kind_or_architecture_is_refused_with_the_reason() {
    for (flags, code, word) in [
        (&["-cubin", "-arch=sm_80"][..], Code::Arch, "sm_80"),
        (&["-cubin", "-arch=sm_100"], Code::Arch, "sm_100"),
        (&["-cubin", "-arch=sm_90a", "-rdc=true"], Code::Kind, "relocatable"),
        (&["-fatbin", "-arch=sm_90a"], Code::Kind, "fat binary"),
        (&["-ptx", "-arch=sm_90a"], Code::Malformed, "ELF"),
        (&["-cubin", "-arch=sm_90a", "-lineinfo"], Code::Section, "debug"),
        (&["-cubin", "-arch=sm_90a", "-G"], Code::Section, "debug"),
        (&["-c", "-arch=sm_90a"], Code::Malformed, "ELF"),
    ] {
        let Some(refusal) = refused(RELU, flags) else { return };
        assert!(refusal.code == code || refusal.code == Code::Ptx && code == Code::Section, "{flags:?}: {refusal:?}");
        assert!(refusal.message.contains(word) || refusal.code == Code::Ptx, "{flags:?}: {refusal}");
    }
}

#[test]
fn too_much_local_memory_is_refused() {
    let source = r#"extern "C" __global__ void k(int* y) {
        int a[20000]; for (int i = 0; i < 20000; i++) a[i] = y[i * 7]; y[0] = a[y[1]] + a[y[2]]; }"#;
    let Some(refusal) = refused(source, CUBIN) else { return };
    assert_eq!(refusal.code, Code::Limit);
    assert!(refusal.message.contains("local memory"), "{refusal}");
}

#[test]
fn a_cut_or_prolonged_image_is_refused() {
    let Some(image) = sample(RELU) else { return };
    for length in 0..image.len() {
        assert!(admit(&image[..length], "sm_90a").is_err(), "the first {length} bytes were admitted");
    }
    let mut more = image;
    more.push(0);
    assert!(admit(&more, "sm_90a").is_err());
}

/// A small generator, so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[test]
fn no_mutation_makes_the_reader_panic() {
    for (source, times) in [(RELU, 20_000), (MANY, 2_000)] {
        let Some(image) = sample(source) else { return };
        let mut random = Random(7);
        for _ in 0..times {
            let mut changed = image.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(changed.len());
                match random.below(3) {
                    0 => changed[at] = random.next() as u8,
                    1 => changed[at] ^= 1 << random.below(8),
                    _ => {
                        let word = [0, 1, u64::MAX, 1 << 63, u64::from(u32::MAX), image.len() as u64][random.below(6)];
                        let end = (at + 8).min(changed.len());
                        changed[at..end].copy_from_slice(&word.to_le_bytes()[..end - at]);
                    }
                }
            }
            let _ = admit(&changed, "sm_90a");
        }
    }
}

/// Tables say what a kernel is: no changed byte of them may make another kernel of it.
#[test]
fn a_change_of_header_or_tables_is_refused_or_leaves_every_kernel_as_it_was() {
    for (source, times) in [(RELU, 20_000), (MANY, 2_000)] {
        let Some(image) = sample(source) else { return };
        let honest = admit(&image, "sm_90a").unwrap();
        let word = |at: usize| u64::from_le_bytes(image[at..at + 8].try_into().unwrap()) as usize;
        let sections = word(40);
        let symbols = sections + 3 * 64;
        // Header, section and program tables, and the symbols (section 3 of nvcc's images).
        let mut places: Vec<usize> = (0..64).chain(sections..image.len()).collect();
        places.extend(word(symbols + 24)..word(symbols + 24) + word(symbols + 32));
        let mut random = Random(11);
        let (mut refused, mut admitted) = (0, 0);
        for _ in 0..times {
            let mut changed = image.clone();
            let at = places[random.below(places.len())];
            changed[at] ^= (1 + random.below(255)) as u8;
            match admit(&changed, "sm_90a") {
                Err(_) => refused += 1,
                Ok(found) => {
                    admitted += 1;
                    let same = found.kernels.len() == honest.kernels.len()
                        && found
                            .kernels
                            .iter()
                            .zip(&honest.kernels)
                            .all(|(a, b)| a.0 == b.0 && a.1.params == b.1.params);
                    assert!(same, "byte {at:#x} = {:#x} made other kernels", changed[at]);
                }
            }
        }
        println!("{refused} refused, {admitted} admitted unchanged");
        assert!(refused > 8 * admitted, "{refused} refused, {admitted} admitted");
    }
}

#[test]
fn a_launch_must_fit_its_kernel() {
    let kernel = Kernel {
        name: "k".into(),
        params: [(0, 0, 8), (1, 8, 4)].map(|(ordinal, offset, size)| Param { ordinal, offset, size }).to_vec(),
        param_bytes: 12,
        registers: 128,
        shared_static: 200 << 10,
        max_threads: Some(512),
        ..Kernel::default()
    };
    let image = Image { kernels: [("k".to_owned(), kernel)].into() };
    let launch = Launch {
        module: 0,
        kernel: "k".into(),
        grid: [8, 1, 1],
        block: [256, 1, 1],
        shared: 1024,
        cluster: None,
        cooperative: false,
        args: vec![Arg::Pointer { buffer: 3, offset: 16 }, Arg::Int(-7)],
    };
    let encoded = check_launch(&image, &launch).unwrap();
    let expected = [Encoded::Pointer { buffer: 3, offset: 16 }, Encoded::Bytes((-7i32).to_le_bytes().to_vec())];
    assert_eq!(encoded, expected);
    let why = |change: &dyn Fn(&mut Launch)| {
        let mut launch = launch.clone();
        change(&mut launch);
        check_launch(&image, &launch).unwrap_err().message
    };
    assert!(why(&|l| l.kernel = "g".into()).contains("it has k"));
    assert!(why(&|l| l.block = [1024, 1, 1]).contains("512 threads"));
    assert!(why(&|l| l.shared = 100 << 10).contains("shared memory"));
    assert!(why(&|l| l.args.truncate(1)).contains("takes 2"));
    assert!(why(&|l| l.args[1] = Arg::Int(1 << 40)).contains("argument 1"));
}

#[test]
#[ignore = "reads images of honest kernels from the folder IMAGES"]
fn every_image_of_a_folder_is_admitted() {
    let Ok(folder) = std::env::var("IMAGES") else { return };
    let (mut count, mut refused) = (0, Vec::new());
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        count += 1;
        if let Err(refusal) = admit(&std::fs::read(entry.path()).unwrap(), "sm_90a") {
            refused.push(format!("{}: {refusal}", entry.path().display()));
        }
    }
    assert!(refused.is_empty(), "{} of {count}: {refused:#?}", refused.len());
    println!("{count} images are admitted");
}

#[test]
fn the_matrix_products_of_the_built_in_policy_are_admitted() {
    let mut source = include_str!("../../agent/builtin/gemm.cu").to_owned();
    for (name, a, b) in [("nt", true, true), ("nn", true, false), ("tt", false, true), ("tn", false, false)] {
        source.push_str(&format!(
            "extern \"C\" __global__ void __launch_bounds__(256) {name}(const float* a, const float* b, const float* bias, float* c) {{\n  \
             extern __shared__ float shared[];\n  gemm<128, 128, 64, 32, 4, {a}, {b}>(a, b, bias, c, 4096, 4096, 4096, shared);\n}}\n"
        ));
    }
    source.push_str(
        "extern \"C\" __global__ void __launch_bounds__(128) small(const float* a, const float* b, float* c) {\n  \
         extern __shared__ float shared[];\n  gemm<64, 64, 32, 32, 4, true, true>(a, b, nullptr, c, 512, 512, 4096, shared);\n}\n",
    );
    let Some(image) = built(&source, CUBIN) else { return };
    let image = admit(&image, "sm_90a").unwrap();
    assert_eq!(image.kernels.len(), 5);
}

/// A kernel of the built-in policy in whose image the compiler leaves annotations.
#[test]
fn annotations_of_the_compiler_are_harmless() {
    let Some(image) = built(include_str!("annotated.cu"), &[CUBIN, &["-DK1_THREADS=512"]].concat()) else { return };
    admit(&image, "sm_90a").unwrap();
}
