//! What a judge remembers between evaluations: baselines and verdicts, by content.
//!
//! Knows keys and files. Must not know how a value was measured. A key holds everything that could change the
//! value (`docs/measuring.md`, "Cache keys"); an entry that can't be read is as good as none.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::trim;
use crate::hex::hex;

/// SHA-256 of parts, each with its length in front, as lower-case hex.
#[must_use]
pub fn digest<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize())
}

/// Where baselines lie; those of an earlier name may have been measured beside others' load.
pub(super) const BASELINE: &str = "quiet-baselines";

/// Times of the baselines of one task on one device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// Median of eager in the same minutes as `compile_us`, microseconds.
    pub eager_us: f64,
    /// Its mean then, for what is measured by sums.
    pub eager_mean_us: f64,
    /// Whether eager was timed as a CUDA graph.
    pub eager_graph: bool,
    /// Samples of `torch.compile`, microseconds; empty if it failed.
    pub compile_us: Vec<f64>,
    /// Whether these are of a CUDA graph.
    pub compile_graph: bool,
    pub compile_error: Option<String>,
}

/// Where what `torch.compile` made of a task's reference lies, for later hosts of the same task.
const COMPILED: &str = "compiled";
/// Most of one of these, and of all, bytes.
pub(super) const COMPILED_EACH: u64 = 64 << 20;
const COMPILED_ALL: u64 = 1 << 30;

#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
    /// Bytes of compiled references that were added.
    added: Arc<trim::Added>,
}

impl Cache {
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), added: Arc::default() }
    }

    fn path(&self, kind: &str, key: &str) -> PathBuf {
        self.folder.join(kind).join(format!("{key}.json"))
    }

    /// The entry of `key`, if there is a readable one.
    #[must_use]
    pub fn get<T: DeserializeOwned>(&self, kind: &str, key: &str) -> Option<T> {
        serde_json::from_slice(&fs::read(self.path(kind, key)).ok()?).ok()
    }

    /// Stores an entry; a failure is logged, since a cache may always be empty.
    pub fn put<T: Serialize>(&self, kind: &str, key: &str, value: &T) {
        let path = self.path(kind, key);
        stored(&path, serde_json::to_vec(value).map_err(io::Error::from));
    }

    fn compiled_path(&self, key: &str) -> PathBuf {
        self.folder.join(COMPILED).join(key)
    }

    /// What `torch.compile` made of the reference whose baseline has the name `key`.
    #[must_use]
    pub(super) fn compiled(&self, key: &str) -> Option<Vec<u8>> {
        let path = self.compiled_path(key);
        trim::used(&path);
        fs::read(path).ok()
    }

    /// Stores that; a failure is logged.
    pub(super) fn put_compiled(&self, key: &str, artifacts: Vec<u8>) {
        let bytes = artifacts.len() as u64;
        stored(&self.compiled_path(key), Ok(artifacts));
        self.added.count(&self.folder.join(COMPILED), bytes, COMPILED_ALL);
    }

    /// Drops that: it was of no use.
    pub(super) fn drop_compiled(&self, key: &str) {
        let _ = fs::remove_file(self.compiled_path(key));
    }
}

/// Writes a whole file or none; a failure is logged.
fn stored(path: &Path, value: io::Result<Vec<u8>>) {
    let written = value.and_then(|bytes| {
        let folder = path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        file.write_all(&bytes)?;
        file.persist(path).map_err(|e| e.error)?;
        Ok(())
    });
    if let Err(error) = written {
        tracing::warn!(%error, path = %path.display(), "a result could not be cached");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_that_join_to_the_same_bytes_have_different_digests() {
        assert_ne!(digest([b"ab".as_slice(), b"c"]), digest([b"a".as_slice(), b"bc"]));
    }

    #[test]
    fn an_entry_that_was_cut_is_as_good_as_none() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path());
        // Without `float_roundtrip` this number comes back as another one.
        let value = Baseline { eager_us: 0.112_312_262_869_982_79, ..Baseline::default() };
        cache.put("baseline", "k", &value);
        assert_eq!(cache.get::<Baseline>("baseline", "k"), Some(value));
        fs::write(folder.path().join("baseline/k.json"), "{\"eager").unwrap();
        assert_eq!(cache.get::<Baseline>("baseline", "k"), None);
    }
}
