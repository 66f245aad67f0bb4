//! The best kernels of a job: packed into a ConfigMap by the operator, unpacked by `kernelfleet results`.
//!
//! Knows archives and their bounds. Must not know why a kernel is the best.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::{Component, Path, PathBuf};

use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;

use crate::wire::v1::Result as Best;

/// Tasks whose kernels are kept.
pub const MOST_TASKS: usize = 64;
/// Bytes of all archives: a ConfigMap holds at most a megabyte.
pub const MOST_BYTES: usize = 700 << 10;
/// Bytes that one archive may unpack to.
const MOST_UNPACKED: u64 = 64 << 20;

/// Why an archive can't be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("an archive can't be written: {0}")]
    Write(std::io::Error),
    #[error("the archive {name} can't be read: {source}")]
    Read { name: String, source: std::io::Error },
    #[error("the archive {name} holds `{path}`, which lies outside its folder; nothing of it is unpacked")]
    Outside { name: String, path: String },
    #[error("the archive {0} unpacks to more than {MOST_UNPACKED} bytes")]
    TooLarge(String),
    #[error(
        "{0} holds a result of `kernelfleet run`, which a fetched one would be mixed with; name another folder with -o"
    )]
    Occupied(PathBuf),
    #[error("{path} can't be written: {source}")]
    Folder { path: PathBuf, source: std::io::Error },
}

/// Archives by key, and how many didn't fit.
#[derive(Clone, Debug, Default)]
pub struct Packed {
    pub files: BTreeMap<String, Vec<u8>>,
    pub left_out: usize,
    bytes: usize,
}

impl Packed {
    /// Adds the best candidate of a task, where it fits.
    ///
    /// # Errors
    /// When the archive can't be written.
    pub fn add(&mut self, task: &str, result: &Best) -> Result<(), Error> {
        let archive = pack(result).map_err(Error::Write)?;
        if self.files.len() >= MOST_TASKS || self.bytes + archive.len() > MOST_BYTES {
            self.left_out += 1;
            return Ok(());
        }
        self.bytes += archive.len();
        self.files.insert(format!("{task}.tar.gz"), archive);
        Ok(())
    }
}

/// The same bytes for the same result.
fn pack(result: &Best) -> std::io::Result<Vec<u8>> {
    let mut files: BTreeMap<&str, &str> =
        result.candidate.iter().flat_map(|c| &c.files).map(|(k, v)| (k.as_str(), v.as_str())).collect();
    files.insert("task.py", &result.task_source);
    files.insert("verdict.json", &result.verdict_json);
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (path, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(u64::try_from(text.len()).unwrap_or(u64::MAX));
        header.set_mode(0o644);
        header.set_mtime(0);
        archive.append_data(&mut header, path, text.as_bytes())?;
    }
    archive.into_inner()?.finish()
}

/// What lies beside the candidate, which a run keeps in `best/`.
const BESIDE: [&str; 2] = ["task.py", "verdict.json"];

/// Unpacks one archive into a folder of its own under `folder`, as a run lays out a result; files alone, and nothing outside of it.
///
/// # Errors
/// When it is no archive, or would write elsewhere.
pub fn unpack(key: &str, archive: &[u8], folder: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::Read { name: key.into(), source };
    let task = key.strip_suffix(".tar.gz").unwrap_or(key);
    let target = folder.join(inside(key, Path::new(task))?);
    let mut text = Vec::new();
    GzDecoder::new(archive).take(MOST_UNPACKED + 1).read_to_end(&mut text).map_err(failed)?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > MOST_UNPACKED {
        return Err(Error::TooLarge(key.into()));
    }
    let mut files = Vec::new();
    for entry in tar::Archive::new(text.as_slice()).entries().map_err(failed)? {
        let mut entry = entry.map_err(failed)?;
        let path = entry.path().map_err(failed)?.into_owned();
        let path = inside(key, &path)?;
        if entry.header().entry_type().is_file() {
            let mut content = Vec::new();
            entry.read_to_end(&mut content).map_err(failed)?;
            files.push((path, content));
        }
    }
    if target.join("outcome.json").exists() {
        return Err(Error::Occupied(target));
    }
    // Of a result that was fetched before nothing stays.
    let best = target.join("best");
    match std::fs::remove_dir_all(&best) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            return Err(Error::Folder { path: best, source });
        }
        _ => {}
    }
    for (path, content) in files {
        let beside = BESIDE.iter().any(|name| path == Path::new(name));
        let path = if beside { target.join(path) } else { target.join("best").join(path) };
        let at = |source| Error::Folder { path: path.clone(), source };
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(at)?;
        }
        std::fs::File::create(&path).and_then(|mut f| f.write_all(&content)).map_err(at)?;
    }
    Ok(target)
}

/// A relative path without ways out.
fn inside(archive: &str, path: &Path) -> Result<PathBuf, Error> {
    let plain = path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if plain && path.components().next().is_some() {
        Ok(path.to_path_buf())
    } else {
        Err(Error::Outside { name: archive.into(), path: path.display().to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::v1::Candidate;

    fn result(kernel: &str) -> Best {
        let files = [("model_new.py", "class ModelNew: ..."), ("kernels/a.cu", kernel)];
        let files = files.into_iter().map(|(k, v)| (k.to_owned(), v.to_owned())).collect();
        Best { verdict_json: "{}".into(), candidate: Some(Candidate { files }), task_source: "class Model: ...".into() }
    }

    #[test]
    fn what_is_packed_comes_back_and_is_the_same_each_time() {
        let mut packed = Packed::default();
        packed.add("relu", &result("x")).unwrap();
        let mut again = Packed::default();
        again.add("relu", &result("x")).unwrap();
        assert_eq!(packed.files, again.files);
        let folder = tempfile::tempdir().unwrap();
        let target = unpack("relu.tar.gz", &packed.files["relu.tar.gz"], folder.path()).unwrap();
        assert_eq!(std::fs::read_to_string(target.join("best/kernels/a.cu")).unwrap(), "x");
        assert_eq!(std::fs::read_to_string(target.join("task.py")).unwrap(), "class Model: ...");
        assert!(target.join("verdict.json").exists() && target.join("best/model_new.py").exists());
        std::fs::write(target.join("best/kernels/old.cu"), "of a result before").unwrap();
        unpack("relu.tar.gz", &packed.files["relu.tar.gz"], folder.path()).unwrap();
        assert!(target.join("best/kernels/a.cu").exists() && !target.join("best/kernels/old.cu").exists());
        std::fs::write(target.join("outcome.json"), "{}").unwrap();
        let error = unpack("relu.tar.gz", &packed.files["relu.tar.gz"], folder.path()).unwrap_err().to_string();
        assert!(error.contains("holds a result of `kernelfleet run`"), "{error}");
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let mut packed = Packed::default();
        for i in 0..MOST_TASKS + 3 {
            packed.add(&format!("t{i}"), &result("x")).unwrap();
        }
        assert_eq!((packed.files.len(), packed.left_out), (MOST_TASKS, 3));
        let mut seed = 1u64;
        let noise: String = (0..(2 << 20))
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                char::from(b'a' + u8::try_from(seed >> 60).unwrap())
            })
            .collect();
        let mut packed = Packed::default();
        packed.add("large", &result(&noise)).unwrap();
        assert_eq!((packed.files.len(), packed.left_out), (0, 1));
    }

    #[test]
    fn an_archive_that_points_outside_is_refused_whole() {
        let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        let mut header = tar::Header::new_gnu();
        header.set_size(1);
        header.as_gnu_mut().unwrap().name[..9].copy_from_slice(b"../escape");
        header.set_cksum();
        archive.append(&header, &b"x"[..]).unwrap();
        let bytes = archive.into_inner().unwrap().finish().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let error = unpack("a.tar.gz", &bytes, folder.path()).unwrap_err().to_string();
        assert!(error.contains("../escape"), "{error}");
        assert!(unpack("../a.tar.gz", &bytes, folder.path()).is_err());
        assert!(unpack("a.tar.gz", b"no archive", folder.path()).is_err());
        assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
    }
}
