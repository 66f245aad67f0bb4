//! Finds what a judge needs of this machine: interpreter, compilers, libraries, folders.
//!
//! Knows where such things lie and which variables override them. Must not know what they are used for.
//! Python is asked once and the answer kept beside the interpreter's age, so that most starts ask nobody.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::hex::hex;
use crate::judge::toolchain::{CudaLibraries, Nvcc, RunnerFilter, Toolchain};

/// Why this machine can't judge anything yet. Each message ends with what to do.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no Python with PyTorch: looked at KERNELFLEET_PYTHON, .kernelfleet/python and python3 on PATH{}; make the pinned one with `make env`, or set KERNELFLEET_PYTHON",
        notes(.0)
    )]
    NoPython(Vec<String>),
    #[error(
        "the folder agent-image was not found beside {program} or above it; set KERNELFLEET_AGENT_IMAGE to the one of the checkout"
    )]
    NoAgentImage { program: PathBuf },
    #[error("{variable} says {path}, which {problem}; correct it or unset it")]
    Override { variable: &'static str, path: PathBuf, problem: &'static str },
    #[error("the cache folder {path} can't be written: {source}; set KERNELFLEET_CACHE to one that can")]
    Cache { path: PathBuf, source: io::Error },
    #[error("the path of this program is not known: {0}")]
    Program(io::Error),
}

fn notes(tried: &[String]) -> String {
    if tried.is_empty() { String::new() } else { format!(" ({})", tried.join("; ")) }
}

/// What the interpreter says of itself. Paths and versions only; nothing is imported but the standard library.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PythonFacts {
    pub version: String,
    pub prefix: PathBuf,
    pub base_prefix: PathBuf,
    /// Site folders, in the order of `sys.path`.
    pub site: Vec<PathBuf>,
    /// `Python.h` is there: `torch.compile` needs it on the CPU.
    pub headers: bool,
    pub torch: Option<String>,
    pub cuda: Option<String>,
    pub cudnn: Option<String>,
    /// Names that `import` finds at the top level, the standard library's included.
    pub modules: Vec<String>,
}

const QUESTION: &str = r#"
import importlib.metadata as m, json, os, pkgutil, re, sys, sysconfig
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
site = [p for p in sys.path if p and os.path.isdir(p)]
cuda = None
for p in site:
    f = os.path.join(p, "torch", "version.py")
    if os.path.isfile(f):
        found = re.search(r"^cuda[^=]*=\s*'([^']+)'", open(f).read(), re.M)
        cuda = found and found.group(1)
        break
modules = sorted(set(sys.stdlib_module_names) | {x.name for x in pkgutil.iter_modules()})
print(json.dumps({
    "version": sys.version.split()[0], "prefix": sys.prefix, "base_prefix": sys.base_prefix, "site": site,
    "headers": os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h")),
    "torch": version("torch"), "cuda": cuda,
    "cudnn": next((v for v in map(version, ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")) if v), None),
    "modules": modules}))
"#;

/// What discovery found, with what only `doctor` and the checks of tasks want to know.
#[derive(Clone, Debug)]
pub struct Environment {
    pub toolchain: Toolchain,
    pub python: PythonFacts,
}

/// Looks for everything.
///
/// # Errors
/// When there is no interpreter with PyTorch, no `agent-image`, or an override names something that isn't there.
/// Compilers and CUDA libraries may be absent: who needs one says so.
pub fn discover() -> Result<Environment, Error> {
    let program = std::env::current_exe().map_err(Error::Program)?;
    let cache = cache_folder()?;
    let agent_image = agent_image(&program)?;
    let (python, facts) = python(&program, &cache)?;
    let nvcc = nvcc(&facts)?;
    let cxx = override_file("KERNELFLEET_CXX")?.or_else(|| on_path("c++")).or_else(|| on_path("g++"));
    let mut versions = BTreeMap::new();
    versions.insert("kernelfleet".into(), env!("CARGO_PKG_VERSION").into());
    versions.insert("python".into(), facts.version.clone());
    for (name, value) in [("torch", &facts.torch), ("cuda", &facts.cuda), ("cudnn", &facts.cudnn)] {
        if let Some(value) = value {
            versions.insert(name.into(), value.clone());
        }
    }
    for (name, path) in [("nvcc", nvcc.as_ref().map(|n| &n.path)), ("cxx", cxx.as_ref())] {
        if let Some(version) = path.and_then(|p| compiler_version(p, &cache)) {
            versions.insert(name.into(), version);
        }
    }
    let mut python_read = vec![facts.prefix.clone(), facts.base_prefix.clone()];
    python_read.extend(facts.site.iter().cloned());
    let passive = std::env::var_os("OMP_WAIT_POLICY").is_some_and(|said| said.eq_ignore_ascii_case("passive"));
    if passive {
        // What is measured so is another measurement.
        versions.insert("omp_wait_policy".into(), "passive".into());
    }
    // A symbolic link in the way is followed by the loader, so the real folder must be readable as well.
    let real: Vec<PathBuf> = python_read.iter().chain([&python]).filter_map(|p| p.canonicalize().ok()).collect();
    python_read.extend(real.into_iter().filter(|p| p.is_dir()));
    let python_read = outermost(python_read);
    let toolchain = Toolchain {
        libraries: libraries(&facts),
        python,
        python_read,
        agent_image,
        nvcc,
        ncu: ncu()?,
        cxx,
        cache,
        program,
        threads: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        passive,
        runner_filter: runner_filter(std::env::var_os("KERNELFLEET_RUNNER_SECCOMP"))?,
        measure: measure(std::env::var_os("KERNELFLEET_MEASURE_SECONDS"))?,
        versions,
    };
    Ok(Environment { toolchain, python: facts })
}

/// Drops what lies below another entry, keeps the order.
fn outermost(paths: Vec<PathBuf>) -> Vec<PathBuf> {
    let mut kept: Vec<PathBuf> = Vec::new();
    for path in paths {
        if !kept.iter().any(|k| path.starts_with(k)) {
            kept.retain(|k| !k.starts_with(&path));
            kept.push(path);
        }
    }
    kept
}

/// The folders that may hold `.kernelfleet` and `agent-image`: above the program, then where it was built.
fn roots(program: &Path) -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> = program.ancestors().skip(1).map(Path::to_path_buf).collect();
    roots.push(PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    roots
}

fn agent_image(program: &Path) -> Result<PathBuf, Error> {
    if let Some(path) = override_path("KERNELFLEET_AGENT_IMAGE") {
        return if path.is_dir() {
            Ok(path)
        } else {
            Err(Error::Override { variable: "KERNELFLEET_AGENT_IMAGE", path, problem: "is not a folder" })
        };
    }
    roots(program)
        .iter()
        .flat_map(|r| [r.join("agent-image"), r.join("share/kernelfleet/agent-image")])
        .find(|p| p.join("python").is_dir() || p.join("requirements.lock").is_file())
        .ok_or_else(|| Error::NoAgentImage { program: program.to_path_buf() })
}

fn python(program: &Path, cache: &Path) -> Result<(PathBuf, PythonFacts), Error> {
    let mut tried = Vec::new();
    if let Some(path) = override_path("KERNELFLEET_PYTHON") {
        if !path.is_file() {
            return Err(Error::Override { variable: "KERNELFLEET_PYTHON", path, problem: "is not a file" });
        }
        return match ask(&path, cache) {
            Ok(facts) if facts.torch.is_some() => Ok((path, facts)),
            _ => Err(Error::Override {
                variable: "KERNELFLEET_PYTHON",
                path,
                problem: "is not a Python that has PyTorch",
            }),
        };
    }
    let ours = roots(program).into_iter().map(|r| r.join(".kernelfleet/python/bin/python")).find(|p| p.is_file());
    for path in ours.into_iter().chain(on_path("python3")) {
        match ask(&path, cache) {
            Ok(facts) if facts.torch.is_some() => return Ok((path, facts)),
            Ok(_) => tried.push(format!("{} has no torch", path.display())),
            Err(e) => tried.push(format!("{}: {e}", path.display())),
        }
    }
    Err(Error::NoPython(tried))
}

/// Asks the interpreter, or the note of the last time if neither it nor its site folders have changed since.
fn ask(python: &Path, cache: &Path) -> io::Result<PythonFacts> {
    #[derive(Serialize, Deserialize)]
    struct Note {
        stamps: Vec<(PathBuf, u128)>,
        facts: PythonFacts,
    }
    let key = hex(&Sha256::digest(format!("2 {}", python.display()).as_bytes()));
    let file = cache.join(format!("python-{}.json", &key[..16]));
    if let Ok(text) = std::fs::read_to_string(&file)
        && let Ok(note) = serde_json::from_str::<Note>(&text)
        && note.stamps.iter().all(|(path, stamp)| age(path) == Some(*stamp))
    {
        return Ok(note.facts);
    }
    let output =
        Command::new(python).args(["-I", "-c", QUESTION]).stdin(Stdio::null()).stderr(Stdio::null()).output()?;
    if !output.status.success() {
        return Err(io::Error::other(format!("it ended with {}", output.status)));
    }
    let facts: PythonFacts = serde_json::from_slice(&output.stdout).map_err(io::Error::other)?;
    let stamps = std::iter::once(python.to_path_buf())
        .chain(facts.site.iter().cloned())
        .filter_map(|p| age(&p).map(|a| (p, a)))
        .collect();
    let note = Note { stamps, facts };
    if let Ok(text) = serde_json::to_string(&note) {
        // Only a cache: where it can't be kept, the next start asks again.
        let _ = std::fs::write(&file, text);
    }
    Ok(note.facts)
}

fn age(path: &Path) -> Option<u128> {
    let modified = std::fs::metadata(path).ok()?.modified().ok()?;
    Some(modified.duration_since(UNIX_EPOCH).ok()?.as_nanos())
}

fn nvcc(python: &PythonFacts) -> Result<Option<Nvcc>, Error> {
    let packaged = python
        .site
        .iter()
        .flat_map(|s| ["nvidia/cu13/bin/nvcc", "nvidia/cuda_nvcc/bin/nvcc"].map(|p| s.join(p)))
        .find(|p| p.is_file());
    let path = override_file("KERNELFLEET_NVCC")?.or(packaged).or_else(|| of_toolkit("nvcc"));
    Ok(path.map(|path| {
        let tree = path.canonicalize().unwrap_or_else(|_| path.clone());
        let read = tree.parent().and_then(Path::parent).map(Path::to_path_buf).into_iter().collect();
        Nvcc { path, args: Vec::new(), read }
    }))
}

/// NVIDIA's Nsight Compute; `KERNELFLEET_NCU=off` is as if it weren't there.
fn ncu() -> Result<Option<PathBuf>, Error> {
    if std::env::var_os("KERNELFLEET_NCU").is_some_and(|given| given == "off") {
        return Ok(None);
    }
    Ok(override_file("KERNELFLEET_NCU")?.or_else(|| of_toolkit("ncu")))
}

/// A program of CUDA's toolkit, on the path or at its usual place.
fn of_toolkit(name: &str) -> Option<PathBuf> {
    on_path(name).or_else(|| Some(Path::new("/usr/local/cuda/bin").join(name)).filter(|p| p.is_file()))
}

fn libraries(python: &PythonFacts) -> CudaLibraries {
    let find =
        |names: &[&str]| python.site.iter().flat_map(|s| names.iter().map(move |n| s.join(n))).find(|p| p.is_file());
    let nvrtc = find(&["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"]);
    let nvrtc_builtins = nvrtc.as_deref().and_then(Path::parent).and_then(builtins);
    CudaLibraries {
        cublas: find(&["nvidia/cu13/lib/libcublas.so.13", "nvidia/cublas/lib/libcublas.so.12"]),
        cublaslt: find(&["nvidia/cu13/lib/libcublasLt.so.13", "nvidia/cublas/lib/libcublasLt.so.12"]),
        cudnn: find(&["nvidia/cudnn/lib/libcudnn.so.9"]),
        nvrtc,
        nvrtc_builtins,
    }
}

/// NVRTC's second library in `folder`; its name ends with a version of CUDA.
fn builtins(folder: &Path) -> Option<PathBuf> {
    let name = |p: &Path| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("libnvrtc-builtins.so."));
    std::fs::read_dir(folder).ok()?.flatten().map(|e| e.path()).filter(|p| name(p)).max()
}

/// First version number that `--version` prints, kept by the compiler's age.
fn compiler_version(path: &Path, cache: &Path) -> Option<String> {
    let key = hex(&Sha256::digest(format!("1 {} {:?}", path.display(), age(path)).as_bytes()));
    let file = cache.join(format!("compiler-{}.txt", &key[..16]));
    if let Ok(text) = std::fs::read_to_string(&file) {
        return Some(text);
    }
    let output = Command::new(path).arg("--version").stdin(Stdio::null()).output().ok()?;
    let version = version_in(&String::from_utf8_lossy(&output.stdout))?;
    let _ = std::fs::write(&file, &version);
    Some(version)
}

/// `V13.0.88` of nvcc, else the last word of the first line that looks like a version.
fn version_in(text: &str) -> Option<String> {
    let word = |w: &str| {
        let w = w.trim_start_matches('V');
        (w.contains('.') && w.chars().all(|c| c.is_ascii_digit() || c == '.')).then(|| w.to_owned())
    };
    if let Some(line) = text.lines().find(|l| l.contains("release")) {
        return line.split_whitespace().rev().find_map(word);
    }
    text.lines().next()?.split_whitespace().rev().find_map(word)
}

fn cache_folder() -> Result<PathBuf, Error> {
    let path = override_path("KERNELFLEET_CACHE")
        .or_else(|| override_path("XDG_CACHE_HOME").map(|p| p.join("kernelfleet")))
        .or_else(|| override_path("HOME").map(|p| p.join(".cache/kernelfleet")))
        .unwrap_or_else(|| std::env::temp_dir().join("kernelfleet-cache"));
    std::fs::create_dir_all(&path).map_err(|source| Error::Cache { path: path.clone(), source })?;
    Ok(path)
}

fn runner_filter(said: Option<std::ffi::OsString>) -> Result<RunnerFilter, Error> {
    let Some(said) = said.filter(|v| !v.is_empty()) else { return Ok(RunnerFilter::default()) };
    match said.to_str() {
        Some("off") => Ok(RunnerFilter::Off),
        Some("on") => Ok(RunnerFilter::On),
        Some("log") => Ok(RunnerFilter::Log),
        _ => Err(Error::Override {
            variable: "KERNELFLEET_RUNNER_SECCOMP",
            path: said.into(),
            problem: "is none of off, on and log",
        }),
    }
}

fn measure(said: Option<std::ffi::OsString>) -> Result<Option<Duration>, Error> {
    let Some(said) = said.filter(|v| !v.is_empty()) else { return Ok(None) };
    let seconds = said.to_str().and_then(|text| text.parse().ok()).filter(|s| (0.0..=600.0).contains(s));
    seconds.map(|s| Some(Duration::from_secs_f64(s))).ok_or_else(|| Error::Override {
        variable: "KERNELFLEET_MEASURE_SECONDS",
        path: said.into(),
        problem: "is no number of seconds from 0 to 600",
    })
}

fn override_path(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

fn override_file(variable: &'static str) -> Result<Option<PathBuf>, Error> {
    match override_path(variable) {
        Some(path) if !path.is_file() => Err(Error::Override { variable, path, problem: "is not a file" }),
        other => Ok(other),
    }
}

fn on_path(name: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt;
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|p| std::fs::metadata(p).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_library_of_nvrtc_is_known_by_the_start_of_its_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["libnvrtc.so.13", "libnvrtc-builtins.alt.so.13.0", "libnvrtc-builtins.so.13.0"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        assert_eq!(builtins(folder.path()), Some(folder.path().join("libnvrtc-builtins.so.13.0")));
        std::fs::remove_file(folder.path().join("libnvrtc-builtins.so.13.0")).unwrap();
        assert_eq!(builtins(folder.path()), None);
    }

    #[test]
    fn the_longest_measurement_is_a_number_of_seconds() {
        let seconds = |word: &str| measure(Some(word.into())).map(|d| d.map(|d| d.as_secs_f64()));
        assert_eq!(measure(None).unwrap(), None);
        assert_eq!(seconds("").unwrap(), None);
        assert_eq!(seconds("0").unwrap(), Some(0.0));
        assert_eq!(seconds("2.5").unwrap(), Some(2.5));
        for wrong in ["-1", "601", "NaN", "ten"] {
            let why = seconds(wrong).unwrap_err().to_string();
            assert!(
                why.contains(&format!("KERNELFLEET_MEASURE_SECONDS says {wrong}, which is no number of seconds")),
                "{why}"
            );
        }
    }

    #[test]
    fn the_filter_of_a_cards_runner_is_named_by_one_of_three_words() {
        let filter = |word: &str| runner_filter(Some(word.into()));
        assert_eq!(runner_filter(None).unwrap(), RunnerFilter::Off);
        assert_eq!((filter("").unwrap(), filter("on").unwrap()), (RunnerFilter::Off, RunnerFilter::On));
        assert_eq!(filter("log").unwrap(), RunnerFilter::Log);
        let said = filter("yes").unwrap_err().to_string();
        assert!(said.contains("KERNELFLEET_RUNNER_SECCOMP says yes, which is none of off, on and log"), "{said}");
    }

    #[test]
    fn versions_of_compilers_are_read_from_what_they_print() {
        let nvcc = "nvcc: NVIDIA (R) Cuda compiler driver\nCuda compilation tools, release 13.0, V13.0.88\n";
        assert_eq!(version_in(nvcc).as_deref(), Some("13.0.88"));
        assert_eq!(version_in("c++ (Debian 12.2.0-14) 12.2.0\nCopyright").as_deref(), Some("12.2.0"));
        assert_eq!(version_in("something else"), None);
    }

    #[test]
    fn folders_below_another_are_not_named_twice() {
        let paths = ["/a/b", "/a", "/a/c", "/d"].map(PathBuf::from).to_vec();
        assert_eq!(outermost(paths), ["/a", "/d"].map(PathBuf::from).to_vec());
    }

    #[test]
    fn what_the_interpreter_says_is_kept_until_it_changes() {
        let Some(python) = on_path("python3") else { return };
        let cache = tempfile::tempdir().unwrap();
        let first = ask(&python, cache.path()).unwrap();
        assert!(first.modules.iter().any(|m| m == "json"));
        let file = std::fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
        let mut note: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        note["facts"]["version"] = "from the note".into();
        std::fs::write(&file, note.to_string()).unwrap();
        assert_eq!(ask(&python, cache.path()).unwrap().version, "from the note");
        note["stamps"][0][1] = 1.into();
        std::fs::write(&file, note.to_string()).unwrap();
        assert_eq!(ask(&python, cache.path()).unwrap(), first);
    }
}
