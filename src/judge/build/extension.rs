//! Extensions against PyTorch's headers: a candidate's sources in, a Python module as a shared library out.
//!
//! Knows what `torch.utils.cpp_extension` would call the compilers with. Must not know what a module does. Each source is
//! built and cached by itself, so that a fixed binding is built once; PyTorch's header is precompiled once for each set of
//! flags, so that a source takes seconds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use serde::Deserialize;

use super::{BuildError, Builder, Built, Job, LONG, OUTPUT, trim};
use crate::judge::Device;
use crate::judge::cache::digest;

/// What a candidate asks to be built. It comes from a hostile process.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Spec {
    pub name: String,
    /// What is compiled, by its path inside the candidate.
    pub sources: BTreeMap<String, String>,
    /// What sources may include.
    #[serde(default)]
    pub files: BTreeMap<String, String>,
    #[serde(default)]
    pub cflags: Vec<String>,
    #[serde(default)]
    pub cuda_cflags: Vec<String>,
    #[serde(default)]
    pub ldflags: Vec<String>,
    #[serde(default)]
    pub include: Vec<String>,
    #[serde(default)]
    pub cuda: bool,
}

/// PyTorch as extensions are built against it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Framework {
    /// Its version and the interpreter's.
    pub version: String,
    /// Folder with `include/` and `lib/`.
    pub root: PathBuf,
    /// Folder with `Python.h`.
    pub python: PathBuf,
    /// Value of `_GLIBCXX_USE_CXX11_ABI`.
    pub abi: String,
}

/// Most sources of an extension, and most bytes of all its files.
const SOURCES: usize = 64;
const BYTES: usize = 8 << 20;
/// The header that is precompiled.
const HEADER: &str = "torch/extension.h";
/// Flags that PyTorch gives nvcc for every extension.
const NVCC: [&str; 8] = [
    "-D__CUDA_NO_HALF_OPERATORS__",
    "-D__CUDA_NO_HALF_CONVERSIONS__",
    "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-D__CUDA_NO_HALF2_OPERATORS__",
    "--expt-relaxed-constexpr",
    "--compiler-options",
    "-fPIC",
    "-std=c++17",
];

fn refused(message: impl Into<String>) -> BuildError {
    BuildError::Refused { message: message.into(), file: None, line: None }
}

/// Whether a flag only says how to compile: none that names files, programs or outputs.
fn plain(flag: &str) -> bool {
    let forbidden = [
        "-o",
        "-c",
        "-E",
        "-S",
        "-x",
        "-M",
        "-B",
        "-include",
        "-imacros",
        "-specs",
        "-wrapper",
        "-fplugin",
        "-fdump",
        "-save-temps",
        "--save-temps",
        "-ccbin",
        "--compiler-bindir",
        "-I",
        "-L",
        "-l",
        "-Xlinker",
        "-shared",
        "-static",
        "--keep",
        "-odir",
        "-cubin",
        "-ptx",
        "-fatbin",
        "-rdc=true",
        "-dc",
        "-run",
    ];
    flag.len() <= 256
        && flag.starts_with('-')
        && !forbidden.iter().any(|f| flag.starts_with(f) && !flag.starts_with("-xHost"))
}

/// Checks what a candidate asked for, before anything is done with it. `libraries` are the calls that the task allows.
fn check(spec: &Spec, device: Device, libraries: &[String]) -> Result<(), BuildError> {
    let word = |n: &str| !n.is_empty() && n.len() <= 128 && n.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !word(&spec.name) || spec.name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(refused(format!("{:?} is no name of an extension: letters, digits and _", spec.name)));
    }
    let bytes: usize = spec.sources.values().chain(spec.files.values()).map(String::len).sum();
    if spec.sources.is_empty() || spec.sources.len() + spec.files.len() > SOURCES || bytes > BYTES {
        return Err(refused(format!("an extension has 1 to {SOURCES} files and at most {} MiB", BYTES >> 20)));
    }
    for name in spec.sources.keys() {
        let kind = Path::new(name).extension().and_then(|e| e.to_str()).unwrap_or_default();
        if !matches!(kind, "cpp" | "cc" | "cxx" | "c" | "cu") {
            return Err(refused(format!("{name}: sources of an extension are .cpp and .cu")));
        }
        if kind == "cu" && device == Device::Cpu {
            return Err(BuildError::Refused {
                message: format!("{name} is CUDA; the CPU device builds C++ only"),
                file: Some(name.clone()),
                line: None,
            });
        }
    }
    let cuda_flags = spec.cuda_cflags.iter().filter(|_| device == Device::Cuda);
    let mut operand = false;
    for flag in spec.cflags.iter().chain(cuda_flags) {
        // `-Xcompiler -O3` and the like come in two words.
        if !(plain(flag) || operand && plain(&format!("-{flag}"))) {
            return Err(refused(format!("the flag {flag:?} is not allowed; flags say how to compile and optimise")));
        }
        operand =
            matches!(flag.as_str(), "-Xcompiler" | "-Xptxas" | "--compiler-options" | "--ptxas-options" | "-gencode");
    }
    for flag in &spec.ldflags {
        let library = flag.strip_prefix("-l").unwrap_or_default();
        let wanted = match library {
            "cublas" | "cublasLt" => Some("matmul"),
            "cudnn" => Some("conv"),
            _ => None,
        };
        if wanted.is_some_and(|w| !libraries.iter().any(|l| l == w)) {
            return Err(refused(format!("this job does not allow the library {library}")));
        }
        let known = ["m", "gomp", "pthread", "dl", "rt", "stdc++", "cudart", "cuda", "nvrtc"].contains(&library);
        let harmless = flag == "-fopenmp" || flag == "-pthread" || flag.starts_with("-O");
        if !(known || wanted.is_some() || harmless) {
            return Err(refused(format!("the linker's flag {flag:?} is not allowed")));
        }
    }
    for path in &spec.include {
        let inside = Path::new(path).components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
        if !inside {
            return Err(refused(format!("the include path {path:?} leaves the candidate's folder")));
        }
    }
    Ok(())
}

impl Builder {
    /// Builds an extension; its sources at the same time.
    ///
    /// # Errors
    /// `Refused` with the compiler's words, or with what may not be asked for; `Fault` when there is no compiler or no disk.
    pub fn extension(
        &self,
        device: Device,
        arch: &str,
        framework: &Framework,
        spec: &Spec,
        libraries: &[String],
    ) -> Result<Built, BuildError> {
        let start = Instant::now();
        check(spec, device, libraries)?;
        let with_cuda = device == Device::Cuda;
        let made: Vec<Result<Built, BuildError>> = std::thread::scope(|scope| {
            let leash = crate::judge::Leash::current();
            let started: Vec<_> = spec
                .sources
                .keys()
                .map(|name| {
                    let leash = leash.clone();
                    scope.spawn(move || {
                        let _entered = leash.as_ref().map(crate::judge::Leash::enter);
                        self.object(device, arch, framework, spec, name)
                    })
                })
                .collect();
            let died = |_| Err(BuildError::Fault("the thread of a compiler died".into()));
            started.into_iter().map(|t| t.join().unwrap_or_else(died)).collect()
        });
        let objects = made.into_iter().collect::<Result<Vec<Built>, BuildError>>()?;
        let compiler = self.cxx()?;
        let lib = framework.root.join("lib");
        let mut arguments: Vec<String> = (0..objects.len()).map(|i| format!("{i}.o")).collect();
        arguments.extend(["-shared".into(), format!("-L{}", lib.display())]);
        arguments.extend(["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"].map(String::from));
        if with_cuda {
            arguments.extend(["-lc10_cuda", "-ltorch_cuda"].map(String::from));
            arguments.extend(self.cuda_libraries(framework, &spec.ldflags));
        }
        arguments.extend(spec.ldflags.iter().filter(|f| !f.starts_with("-lcu") && !f.starts_with("-lnv")).cloned());
        if spec.cflags.iter().any(|f| f == "-fopenmp") {
            arguments.push("-fopenmp".into());
        }
        arguments.extend(["-o".into(), OUTPUT.into()]);
        let mut parts: Vec<&[u8]> = vec![b"link", framework.version.as_bytes()];
        let text = arguments.join("\0");
        parts.push(text.as_bytes());
        parts.extend(objects.iter().map(|o| o.digest.as_bytes()));
        let key = digest(parts);
        let names: Vec<String> = (0..objects.len()).map(|i| format!("{i}.o")).collect();
        let binaries = names.iter().zip(&objects).map(|(n, o)| (n.as_str(), &*o.image)).collect();
        let mut built = self.made(&Job {
            key: &key,
            compiler: &compiler,
            arguments: &arguments,
            files: &BTreeMap::new(),
            binaries,
            read: self.framework_read(framework, with_cuda),
            precompiled: None,
            device,
            limit: LONG,
        })?;
        built.seconds = start.elapsed().as_secs_f64();
        built.cached &= objects.iter().all(|o| o.cached);
        Ok(built)
    }

    /// The part of a candidate's process that isn't Python.
    ///
    /// # Errors
    /// As `extension`; a failure here is a fault of the installation.
    pub fn native(&self, framework: &Framework) -> Result<Built, BuildError> {
        let source = self.toolchain.agent_image.join("native/process.cpp");
        let text = fs::read_to_string(&source)
            .map_err(|e| BuildError::Fault(format!("{} can't be read: {e}", source.display())))?;
        let files = BTreeMap::from([("process.cpp".to_owned(), text)]);
        let mut arguments = vec!["-O2".to_owned(), "-shared".into(), "-fPIC".into(), "-std=c++17".into()];
        arguments.extend(includes(framework));
        let lib = framework.root.join("lib").display().to_string();
        arguments.extend(["process.cpp".into(), format!("-L{lib}"), "-lc10".into(), "-ltorch_cpu".into()]);
        arguments.extend(["-o".into(), OUTPUT.into()]);
        let key = self.key(&files, &arguments, framework, Device::Cpu, "");
        self.made(&Job {
            key: &key,
            compiler: &self.cxx()?,
            arguments: &arguments,
            files: &files,
            binaries: Vec::new(),
            read: self.framework_read(framework, false),
            precompiled: None,
            device: Device::Cpu,
            limit: LONG,
        })
        .map_err(|e| BuildError::Fault(format!("the native part of a candidate's process can't be built: {e}")))
    }

    fn object(
        &self,
        device: Device,
        arch: &str,
        framework: &Framework,
        spec: &Spec,
        name: &str,
    ) -> Result<Built, BuildError> {
        let mut files = spec.files.clone();
        files.extend(spec.sources.iter().filter(|(n, _)| *n == name).map(|(n, t)| (n.clone(), t.clone())));
        let text = spec.sources.get(name).map_or("", String::as_str);
        let cuda_source = name.ends_with(".cu");
        let mut arguments = vec![
            format!("-DTORCH_EXTENSION_NAME={}", spec.name),
            "-DTORCH_API_INCLUDE_EXTENSION_H".to_owned(),
            format!("-D_GLIBCXX_USE_CXX11_ABI={}", framework.abi),
        ];
        let compiler;
        let mut precompiled = None;
        if cuda_source {
            let nvcc = self.toolchain.nvcc.as_ref().ok_or_else(|| {
                BuildError::Fault("there is no nvcc: `make env` installs it, `kernelfleet doctor` tells more".into())
            })?;
            compiler = nvcc.path.clone();
            arguments.extend(nvcc.args.iter().cloned());
            arguments.extend(includes(framework));
            arguments.extend(NVCC.map(String::from));
            let number = arch.strip_prefix("sm_").unwrap_or(arch);
            arguments.push(format!("-gencode=arch=compute_{number},code=sm_{number}"));
            arguments.extend(spec.cuda_cflags.iter().cloned());
        } else {
            compiler = self.cxx()?;
            let mut flags = vec!["-fPIC".to_owned(), "-std=c++17".into(), "-fdiagnostics-color=never".into()];
            flags.extend(spec.cflags.iter().cloned());
            if ["torch/", "ATen/", "c10/"].iter().any(|part| text.contains(part)) {
                precompiled = Some(self.header(framework, &flags)?);
                arguments.extend(["-Iprecompiled".into(), "-include".into(), HEADER.into()]);
            }
            arguments.extend(includes(framework));
            if device == Device::Cuda {
                let nvcc = self.toolchain.nvcc.iter().flat_map(|n| n.args.iter());
                arguments.extend(nvcc.filter(|a| a.starts_with("-I")).cloned());
                arguments.extend(self.cuda_includes(framework));
            }
            arguments.extend(flags);
        }
        arguments.extend(spec.include.iter().map(|p| format!("-I{p}")));
        arguments.extend(["-c".into(), name.into(), "-o".into(), OUTPUT.into()]);
        let key = self.key(&files, &arguments, framework, device, arch);
        self.made(&Job {
            key: &key,
            compiler: &compiler,
            arguments: &arguments,
            files: &files,
            binaries: Vec::new(),
            read: self.framework_read(framework, device == Device::Cuda),
            precompiled,
            device,
            limit: LONG,
        })
    }

    /// PyTorch's header for these flags, precompiled: a file, made when it is first needed. Definitions don't count.
    fn header(&self, framework: &Framework, flags: &[String]) -> Result<PathBuf, BuildError> {
        let mut arguments: Vec<String> =
            flags.iter().filter(|f| !f.starts_with("-D") && !f.starts_with("-W")).cloned().collect();
        arguments.push("-DTORCH_API_INCLUDE_EXTENSION_H".into());
        arguments.push(format!("-D_GLIBCXX_USE_CXX11_ABI={}", framework.abi));
        arguments.extend(includes(framework));
        arguments.extend(["-x", "c++-header", "header.h", "-o", OUTPUT].map(String::from));
        let files = BTreeMap::from([("header.h".to_owned(), format!("#include <{HEADER}>\n"))]);
        let key = self.key(&files, &arguments, framework, Device::Cpu, "header");
        let path = self.cache.join(format!("{key}.gch"));
        // One at a time: two candidates that begin together want the same.
        let _one = self.headers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if !path.is_file() {
            let job = Job {
                key: &key,
                compiler: &self.cxx()?,
                arguments: &arguments,
                files: &files,
                binaries: Vec::new(),
                read: self.framework_read(framework, false),
                precompiled: None,
                device: Device::Cpu,
                limit: LONG,
            };
            self.keep(&job, &path)?;
        }
        trim::used(&path);
        Ok(path)
    }

    fn cxx(&self) -> Result<PathBuf, BuildError> {
        self.toolchain.cxx.clone().ok_or_else(|| {
            BuildError::Fault("there is no C++ compiler: install g++ (`kernelfleet doctor` tells more)".into())
        })
    }

    /// Everything that decides what a compiler makes of files.
    fn key(
        &self,
        files: &BTreeMap<String, String>,
        arguments: &[String],
        framework: &Framework,
        device: Device,
        arch: &str,
    ) -> String {
        let version = |name: &str| self.toolchain.versions.get(name).map_or("", String::as_str);
        let text = arguments.join("\0");
        let mut parts: Vec<&[u8]> = vec![
            b"extension",
            text.as_bytes(),
            framework.version.as_bytes(),
            version("cxx").as_bytes(),
            if device == Device::Cuda { version("nvcc").as_bytes() } else { b"" },
            arch.as_bytes(),
            self.processor.as_bytes(),
        ];
        for (name, text) in files {
            parts.extend([name.as_bytes(), text.as_bytes()]);
        }
        digest(parts)
    }

    /// What compilers read beside the system's folders and their own.
    fn framework_read(&self, framework: &Framework, cuda: bool) -> Vec<PathBuf> {
        let mut read = vec![framework.root.join("include"), framework.root.join("lib"), framework.python.clone()];
        if cuda {
            read.extend(framework.root.parent().map(|site| site.join("nvidia")));
        }
        read
    }

    /// CUDA's headers for a C++ source, which nvcc finds by itself: those of nvcc's own tree, and after them what PyTorch's
    /// wheels bring, for what that tree lacks.
    fn cuda_includes(&self, framework: &Framework) -> Vec<String> {
        let own = self.toolchain.nvcc.iter().flat_map(|n| n.read.iter().cloned());
        let folders = own.chain(wheels(framework)).map(|tree| tree.join("include")).filter(|f| f.is_dir());
        folders.flat_map(|f| ["-isystem".to_owned(), f.display().to_string()]).collect()
    }

    /// The CUDA libraries that an extension is linked with, by their files: wheels have no name without a version. Those that
    /// PyTorch itself loads come first, then those of nvcc's tree.
    fn cuda_libraries(&self, framework: &Framework, ldflags: &[String]) -> Vec<String> {
        let mut wanted: Vec<&str> = vec!["cudart"];
        wanted.extend(
            ldflags
                .iter()
                .filter_map(|f| f.strip_prefix("-l"))
                .filter(|l| ["cublas", "cublasLt", "cudnn", "nvrtc"].contains(l)),
        );
        let own = self.toolchain.nvcc.iter().flat_map(|n| n.read.iter());
        let own = own.flat_map(|tree| ["lib64", "lib"].map(|name| tree.join(name)));
        let folders = wheels(framework).into_iter().map(|tree| tree.join("lib")).chain(own);
        let files: Vec<PathBuf> = folders
            .flat_map(|folder| {
                let mut files: Vec<PathBuf> =
                    fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
                files.sort();
                files
            })
            .collect();
        wanted
            .iter()
            .filter_map(|name| {
                let start = format!("lib{name}.so");
                files.iter().find(|f| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&start)))
            })
            .map(|f| f.display().to_string())
            .chain(ldflags.iter().any(|f| f == "-lcuda").then(|| "-l:libcuda.so.1".to_owned()))
            .collect()
    }
}

/// Folders of CUDA's wheels beside PyTorch, in the order of their names.
fn wheels(framework: &Framework) -> Vec<PathBuf> {
    let site = framework.root.parent().map(|site| site.join("nvidia"));
    let mut found: Vec<PathBuf> =
        site.iter().flat_map(|s| fs::read_dir(s).into_iter().flatten().flatten()).map(|e| e.path()).collect();
    found.sort();
    found
}

fn includes(framework: &Framework) -> Vec<String> {
    let root = framework.root.join("include");
    let api = root.join("torch/csrc/api/include");
    [&root, &api, &framework.python]
        .into_iter()
        .flat_map(|p| ["-isystem".to_owned(), p.display().to_string()])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(sources: &[(&str, &str)]) -> Spec {
        let sources = sources.iter().map(|(n, t)| ((*n).to_owned(), (*t).to_owned())).collect();
        Spec { name: "inline_ext".into(), sources, ..Spec::default() }
    }

    fn said(spec: &Spec, device: Device, libraries: &[&str]) -> String {
        let libraries: Vec<String> = libraries.iter().map(|l| (*l).to_owned()).collect();
        check(spec, device, &libraries).err().map(|e| e.to_string()).unwrap_or_default()
    }

    #[test]
    fn what_an_extension_may_ask_for_is_checked_before_a_compiler_runs() {
        let good = Spec {
            cflags: vec!["-O3".into(), "-march=native".into(), "-fopenmp".into(), "-DN=4".into()],
            ldflags: vec!["-lm".into(), "-lgomp".into()],
            ..spec(&[("main.cpp", "")])
        };
        assert_eq!(said(&good, Device::Cpu, &[]), "");
        for flag in ["-fplugin=x.so", "-o/etc/passwd", "@more", "-include/etc/shadow", "-I/root", "-wrapper", "x"] {
            let bad = Spec { cflags: vec![flag.into()], ..good.clone() };
            assert!(said(&bad, Device::Cpu, &[]).contains("is not allowed"), "{flag}");
        }
        let named = Spec { name: "a b".into(), ..good.clone() };
        assert!(said(&named, Device::Cpu, &[]).contains("no name of an extension"));
        let outside = Spec { include: vec!["../..".into()], ..good.clone() };
        assert!(said(&outside, Device::Cpu, &[]).contains("leaves the candidate's folder"));
        assert!(said(&spec(&[]), Device::Cpu, &[]).contains("1 to 64 files"));
        assert!(said(&spec(&[("k.cu", "")]), Device::Cpu, &[]).contains("builds C++ only"));
        assert_eq!(said(&spec(&[("k.cu", "")]), Device::Cuda, &[]), "");
    }

    #[test]
    fn a_library_is_linked_where_the_job_allows_it() {
        let asks = |flag: &str| Spec { ldflags: vec![flag.into()], ..spec(&[("main.cpp", "")]) };
        assert!(said(&asks("-lcublas"), Device::Cuda, &["conv"]).contains("does not allow the library cublas"));
        assert_eq!(said(&asks("-lcublas"), Device::Cuda, &["matmul"]), "");
        assert_eq!(said(&asks("-lcudnn"), Device::Cuda, &["conv"]), "");
        assert!(said(&asks("-lopenblas"), Device::Cpu, &["matmul"]).contains("is not allowed"));
    }
}
