//! The builder: a candidate's sources in, a device image or shared library out.
//!
//! Knows compilers and how they are confined; the sources are hostile input. Must not know what an image does.
//! Equal sources give equal images: compilers see relative names in a folder whose path depends on the sources. Only this
//! file writes the build cache; an entry carries the digest of its content and is rebuilt when it does not fit.

pub(super) mod extension;
pub(super) mod signature;
pub(super) mod symbols;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::cache::digest;
use super::leash::Leash;
use super::{Device, Toolchain, trim};
use crate::plan::Module;
use crate::sandbox::{self, Confinement, Limits, seccomp};

/// Longest that one compilation may take; against PyTorch's headers that is minutes on a machine that others use.
const LIMIT: Duration = Duration::from_secs(120);
const LONG: Duration = Duration::from_secs(600);
/// Largest image, bytes; a card's are limited further when they are admitted.
const IMAGE: u64 = 256 << 20;
/// Most that the cache of builds keeps, bytes: some hundred thousand small ones, or four precompiled headers of PyTorch.
const KEPT: u64 = 4 << 30;
/// Largest precompiled header, bytes: PyTorch's takes 0.75 GB.
const HEADER: u64 = 2 << 30;
/// What the compiler is told to write.
const OUTPUT: &str = "kernelfleet.out";
/// Longest diagnostics that reach a verdict, bytes.
const DIAGNOSTICS: usize = 4000;

/// A built module.
#[derive(Clone, Debug)]
pub struct Built {
    pub image: Arc<[u8]>,
    pub digest: String,
    pub seconds: f64,
    pub cached: bool,
}

impl Built {
    /// For a module that no launch uses.
    #[must_use]
    pub fn empty() -> Self {
        Self { image: Arc::from([]), digest: String::new(), seconds: 0.0, cached: true }
    }
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum BuildError {
    /// The sources don't compile; the message is what the compiler says of them.
    #[error("{message}")]
    Refused { message: String, file: Option<String>, line: Option<u32> },
    #[error("{0}")]
    Fault(String),
}

#[derive(Clone, Debug)]
pub struct Builder {
    toolchain: Toolchain,
    cache: PathBuf,
    limit: Duration,
    processor: String,
    /// Held while a header is precompiled.
    headers: Arc<Mutex<()>>,
    added: Arc<trim::Added>,
}

/// One run of a compiler.
struct Job<'a> {
    /// What it makes is cached under this.
    key: &'a str,
    compiler: &'a Path,
    arguments: &'a [String],
    /// Texts that are laid out for it.
    files: &'a BTreeMap<String, String>,
    /// Files of ours that aren't text.
    binaries: Vec<(&'a str, &'a [u8])>,
    /// What it reads beside the system's folders.
    read: Vec<PathBuf>,
    /// PyTorch's header, precompiled.
    precompiled: Option<PathBuf>,
    device: Device,
    /// Longest that it may take.
    limit: Duration,
}

impl Builder {
    #[must_use]
    pub fn new(toolchain: &Toolchain, cache: &Path) -> Self {
        Self {
            toolchain: toolchain.clone(),
            cache: cache.to_owned(),
            limit: LIMIT,
            processor: processor(),
            headers: Arc::default(),
            added: Arc::default(),
        }
    }

    /// Builds one module for `arch` (`sm_90a`, or the CPU's).
    ///
    /// # Errors
    /// `Refused` with the compiler's words, file and line; `Fault` when there is no compiler or no disk.
    pub fn build(
        &self,
        device: Device,
        arch: &str,
        files: &BTreeMap<String, String>,
        module: &Module,
    ) -> Result<Built, BuildError> {
        let start = Instant::now();
        let (compiler, arguments) = self.arguments(device, arch, module)?;
        let version = self.toolchain.versions.get(if device == Device::Cuda { "nvcc" } else { "cxx" });
        let sources = serde_json::to_vec(&files.iter().filter(|f| !f.0.ends_with(".py")).collect::<BTreeMap<_, _>>())
            .map_err(|e| BuildError::Fault(e.to_string()))?;
        let header = fs::read(self.include().join("kernelfleet_math.h")).unwrap_or_default();
        let text = arguments.join("\0");
        let key = digest([
            sources.as_slice(),
            text.as_bytes(),
            arch.as_bytes(),
            version.map_or("", String::as_str).as_bytes(),
            if device == Device::Cpu { header.as_slice() } else { b"" },
            if device == Device::Cpu { self.processor.as_bytes() } else { b"" },
        ]);
        let job = Job {
            key: &key,
            compiler: &compiler,
            arguments: &arguments,
            files,
            binaries: Vec::new(),
            read: Vec::new(),
            precompiled: None,
            device,
            limit: self.limit,
        };
        Ok(Built { seconds: start.elapsed().as_secs_f64(), ..self.made(&job)? })
    }

    /// What a compiler makes of a job, from the cache if it is there.
    fn made(&self, job: &Job<'_>) -> Result<Built, BuildError> {
        let start = Instant::now();
        if let Some((image, digest)) = self.cached(job.key) {
            return Ok(Built { image, digest, seconds: start.elapsed().as_secs_f64(), cached: true });
        }
        let image = self.compile(job, IMAGE, take)?;
        let found = digest([image.as_slice()]);
        self.store(job.key, &image, &found);
        Ok(Built { image: image.into(), digest: found, seconds: start.elapsed().as_secs_f64(), cached: false })
    }

    /// Runs a job whose product becomes the file `kept`, readable by every user.
    fn keep(&self, job: &Job<'_>, kept: &Path) -> Result<(), BuildError> {
        let folder = self.cache.clone();
        self.compile(job, HEADER, |made| {
            let mut from = sandbox::plain_file(made)?;
            fs::create_dir_all(&folder)?;
            let mut file = tempfile::NamedTempFile::new_in(&folder)?;
            std::io::copy(&mut from, &mut file)?;
            file.as_file().set_permissions(fs::Permissions::from_mode(0o644))?;
            let bytes = file.as_file().metadata()?.len();
            file.persist(kept).map_err(|e| e.error)?;
            self.added.count(&folder, bytes, KEPT);
            Ok(())
        })
    }

    fn include(&self) -> PathBuf {
        self.toolchain.agent_image.join("include")
    }

    fn arguments(&self, device: Device, arch: &str, module: &Module) -> Result<(PathBuf, Vec<String>), BuildError> {
        let mut arguments: Vec<String> = Vec::new();
        let compiler = match device {
            Device::Cuda => {
                let nvcc = self.toolchain.nvcc.as_ref().ok_or_else(|| {
                    BuildError::Fault(
                        "there is no nvcc: `make env` installs it, `kernelfleet doctor` tells more".into(),
                    )
                })?;
                arguments.extend(nvcc.args.iter().cloned());
                let number = arch.strip_prefix("sm_").unwrap_or(arch);
                arguments.extend([
                    "-cubin".into(),
                    "-O3".into(),
                    "-std=c++17".into(),
                    format!("-gencode=arch=compute_{number},code=sm_{number}"),
                ]);
                nvcc.path.clone()
            }
            Device::Cpu => {
                let cxx = self.toolchain.cxx.clone().ok_or_else(|| {
                    BuildError::Fault("there is no C++ compiler: install g++ (`kernelfleet doctor` tells more)".into())
                })?;
                arguments.extend(
                    [
                        "-O3",
                        "-march=native",
                        "-fopenmp",
                        "-shared",
                        "-fPIC",
                        "-std=c++17",
                        "-fno-semantic-interposition",
                        "-fdiagnostics-color=never",
                    ]
                    .map(String::from),
                );
                arguments.push(format!("-I{}", self.include().display()));
                cxx
            }
        };
        arguments.extend(module.defines.iter().map(|(name, value)| format!("-D{name}={value}")));
        arguments.extend(module.flags.iter().cloned());
        arguments.extend(["-o".into(), OUTPUT.into(), module.path.clone()]);
        Ok((compiler, arguments))
    }

    fn cached(&self, key: &str) -> Option<(Arc<[u8]>, String)> {
        let path = self.cache.join(key);
        let bytes = fs::read(&path).ok()?;
        let (head, image) = bytes.split_at_checked(64)?;
        let found = digest([image]);
        trim::used(&path);
        (found.as_bytes() == head).then(|| (Arc::from(image), found))
    }

    fn store(&self, key: &str, image: &[u8], found: &str) {
        let stored = fs::create_dir_all(&self.cache).and_then(|()| {
            let mut file = tempfile::NamedTempFile::new_in(&self.cache)?;
            std::io::Write::write_all(&mut file, found.as_bytes())?;
            std::io::Write::write_all(&mut file, image)?;
            file.persist(self.cache.join(key)).map_err(|e| e.error)?;
            self.added.count(&self.cache, image.len() as u64, KEPT);
            Ok(())
        });
        if let Err(error) = stored {
            tracing::warn!(%error, "a build could not be cached");
        }
    }

    /// Runs a compiler; what it left, at most `most` bytes, is read by `read`.
    fn compile<T>(
        &self,
        job: &Job<'_>,
        most: u64,
        read: impl FnOnce(&Path) -> std::io::Result<T>,
    ) -> Result<T, BuildError> {
        let Job { key, compiler, arguments, files, binaries, precompiled, .. } = job;
        let fault = |what: &str, e: &dyn std::fmt::Display| BuildError::Fault(format!("{what}: {e}"));
        // nvcc hashes the folder's real path into names of internal linkage, so the path comes from the sources: equal
        // sources give equal images. Where that folder is taken, by a build of the same at the same time or by what
        // died in one, those names differ and nothing else does.
        let prefix = format!("kernelfleet-build-{}", key.get(..24).unwrap_or(key));
        let folder = tempfile::Builder::new()
            .prefix(&prefix)
            .rand_bytes(0)
            .tempdir()
            .or_else(|_| tempfile::Builder::new().prefix(&prefix).tempdir())
            .map_err(|e| fault("no folder to build in", &e))?;
        let work = folder.path().join("work");
        let temp = folder.path().join("tmp");
        fs::create_dir(&temp).map_err(|e| fault("no folder to build in", &e))?;
        for (name, text) in files.iter().filter(|f| !f.0.ends_with(".py")) {
            if !inside(name) {
                return Err(BuildError::Refused {
                    message: format!("{name:?} is not a path inside the candidate's folder"),
                    file: Some(name.clone()),
                    line: None,
                });
            }
            let path = work.join(name);
            fs::create_dir_all(path.parent().unwrap_or(&work))
                .and_then(|()| fs::write(&path, text))
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)))
                .map_err(|e| fault(&format!("{name} can't be laid out to be built"), &e))?;
        }
        fs::create_dir_all(&work).map_err(|e| fault("no folder to build in", &e))?;
        let lay = |what: &str, e: std::io::Error| fault(&format!("{what} can't be laid out to be built with"), &e);
        for (name, bytes) in binaries {
            let path = work.join(name);
            fs::write(&path, bytes)
                .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o644)))
                .map_err(|e| lay(name, e))?;
        }
        let confinement = self.confinement(job, most, folder.path(), &work, &temp);
        if let Some(header) = precompiled {
            lend(header, &work.join("precompiled/torch"), confinement.user.is_some())
                .map_err(|e| lay("a precompiled header", e))?;
        }
        let own = Owned { confinement: &confinement, folders: folders(folder.path()) };
        for path in &own.folders {
            confinement.own(path).map_err(|e| fault("the build folder can't be given to its user", &e))?;
        }
        let mut command = Command::new(compiler);
        command.args(*arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if job.device == Device::Cuda {
            // Built while others are measured on the card, whose clocks run on the host's processors too.
            sandbox::in_background(&mut command);
        }
        confinement.apply(&mut command).map_err(|e| fault("the compiler can't be confined", &e))?;
        let mut child =
            command.spawn().map_err(|e| fault(&format!("the compiler {} can't be started", compiler.display()), &e))?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let mut member = Leash::join(pid, confinement.user.map(|u| u.0));
        let readers: Vec<_> = [
            child.stdout.take().map(|p| Box::new(p) as Box<dyn Read + Send>),
            child.stderr.take().map(|p| Box::new(p) as _),
        ]
        .into_iter()
        .flatten()
        .map(|pipe| {
            std::thread::spawn(move || {
                let mut text = Vec::new();
                let mut pipe = pipe;
                let _ = pipe.by_ref().take(1 << 20).read_to_end(&mut text);
                let _ = std::io::copy(&mut pipe, &mut std::io::sink());
                text
            })
        })
        .collect();
        let end = Instant::now() + job.limit;
        let status = loop {
            match child.try_wait() {
                Ok(Some(status)) => break Some(status),
                Ok(None) if Instant::now() >= end => break None,
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(error) => return Err(fault("the compiler can't be waited for", &error)),
            }
        };
        member.leave();
        sandbox::kill_all(pid, confinement.user.map(|u| u.0));
        let _ = child.wait();
        let said: String = readers
            .into_iter()
            .filter_map(|r| r.join().ok())
            .map(|text| String::from_utf8_lossy(&text).into_owned())
            .collect();
        let Some(status) = status else {
            return Err(BuildError::Refused {
                message: format!("the compiler did not end within {} s", job.limit.as_secs()),
                file: None,
                line: None,
            });
        };
        if !status.success() {
            return Err(diagnostics(&said, files, &status.to_string()));
        }
        read(&work.join(OUTPUT)).map_err(|e| fault("the compiler left no output", &e))
    }

    fn confinement(&self, job: &Job<'_>, most: u64, folder: &Path, work: &Path, temp: &Path) -> Confinement {
        let mut read: Vec<PathBuf> =
            ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/alternatives", "/dev/urandom"]
                .map(PathBuf::from)
                .to_vec();
        read.push(self.include());
        let mut readable = true;
        for path in &job.read {
            readable &= sandbox::world_readable(path);
            read.push(path.clone());
        }
        if job.device == Device::Cuda {
            let tree = self.toolchain.nvcc.iter().flat_map(|n| n.read.iter().cloned());
            for path in tree {
                readable &= sandbox::world_readable(&path);
                read.push(path);
            }
        }
        readable &= sandbox::world_readable(&self.include());
        let base = if readable { Confinement::new_user() } else { Confinement::default() };
        Confinement {
            read,
            write: vec![folder.to_owned(), PathBuf::from("/dev/null")],
            seccomp: Some(seccomp::builder()),
            limits: Limits {
                address_space: Some(16 << 30),
                fsize: most,
                nproc: base.user.map(|_| 64),
                nofile: 256,
                cpu: Some(job.limit.as_secs()),
                ..Limits::default()
            },
            cwd: Some(work.to_owned()),
            env: [
                ("PATH", "/usr/local/bin:/usr/bin:/bin".to_owned()),
                ("TMPDIR", temp.display().to_string()),
                ("LC_ALL", "C".into()),
            ]
            .into_iter()
            .map(|(k, v)| (k.to_owned(), v))
            .collect(),
            ..base
        }
    }
}

/// Whether a name stays in the folder that it is laid out in.
fn inside(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 1024
        && !name.bytes().any(|b| b < 0x20)
        && name != OUTPUT
        && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
}

/// Lays a precompiled header where a compiler looks for it: the very file where its user can't write to it, a copy where
/// it could.
fn lend(header: &Path, folder: &Path, safe: bool) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    // A second inclusion finds the header itself, of which nothing is left to read.
    fs::write(folder.join("extension.h"), "#include_next <torch/extension.h>\n")?;
    let place = folder.join("extension.h.gch");
    if !(safe && fs::hard_link(header, &place).is_ok()) {
        fs::copy(header, &place)?;
    }
    for name in ["extension.h", "extension.h.gch"] {
        let path = folder.join(name);
        if fs::metadata(&path)?.permissions().mode() & 0o777 != 0o644 {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o644))?;
        }
    }
    Ok(())
}

/// Reads what a hostile process may have left in place of an image: a link or a pipe is none.
fn take(path: &Path) -> std::io::Result<Vec<u8>> {
    let file = sandbox::plain_file(path)?;
    let bytes = file.metadata()?.len();
    if bytes == 0 || bytes > IMAGE {
        return Err(std::io::Error::other("it is no file of a size that an image has"));
    }
    let mut image = Vec::new();
    file.take(IMAGE).read_to_end(&mut image)?;
    Ok(image)
}

/// What `-march=native` means on this machine: a cache may be shared with another.
fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let told = |line: &&str| ["model name", "flags", "Features", "CPU part"].iter().any(|k| line.starts_with(k));
    let mut lines: Vec<&str> = text.lines().filter(told).collect();
    lines.sort_unstable();
    lines.dedup();
    lines.join("\n")
}

/// Folders that were the compiler's user's; emptied before they are removed.
struct Owned<'a> {
    confinement: &'a Confinement,
    folders: Vec<PathBuf>,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        for folder in &self.folders {
            self.confinement.empty(folder);
        }
    }
}

/// A folder with all below it. The files in them stay ours, readable by whoever may enter.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_owned()];
    let mut next = 0;
    while next < found.len() {
        let inside = fs::read_dir(&found[next]).into_iter().flatten().flatten();
        let inside: Vec<PathBuf> =
            inside.filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect();
        found.extend(inside);
        next += 1;
    }
    found
}

/// What the compiler says of the candidate's own files, and nothing that it quotes from others: an `#include` of
/// a file of the system would print that file's lines.
fn diagnostics(said: &str, files: &BTreeMap<String, String>, status: &str) -> BuildError {
    let mut kept = String::new();
    let mut own = false;
    let mut first: Option<(String, u32)> = None;
    for line in said.lines() {
        // `file:12:3: error: ..` (g++) or `file(12): error: ..` (nvcc) begins a diagnostic.
        let head = line.split([':', '(']).next().unwrap_or_default();
        let begins = line.contains("error") || line.contains("warning") || line.contains("note:");
        if files.contains_key(head) {
            own = true;
            if first.is_none() && line.contains("error") {
                let number = line[head.len()..].trim_start_matches([':', '(']);
                let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
                first = digits.parse().ok().map(|n| (head.to_owned(), n));
            }
        } else if begins || head.starts_with('/') || line.starts_with("In file included") {
            own = line.contains("undefined reference") || line.starts_with("ptxas");
        }
        if own && kept.len() + line.len() < DIAGNOSTICS {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    if kept.is_empty() {
        kept = format!(
            "the compiler failed ({status}) with nothing to say about the candidate's own files: it may include a file that is not there"
        );
    }
    let (file, line) = first.map_or((None, None), |(f, l)| (Some(f), Some(l)));
    BuildError::Refused { message: kept.trim_end().to_owned(), file, line }
}

#[cfg(test)]
mod tests;
