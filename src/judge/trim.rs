//! A folder of a cache stays within its size: what was used least lately goes.
//!
//! Knows files, sizes and times. Must not know what a file holds.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// What may be added before the folder is looked at again, bytes.
const LOOK: u64 = 256 << 20;

/// What was added to a cache since it was looked at, bytes.
#[derive(Debug)]
pub(super) struct Added(AtomicU64);

impl Default for Added {
    /// The first addition is looked at: others may have filled the folder.
    fn default() -> Self {
        Self(AtomicU64::new(LOOK))
    }
}

impl Added {
    /// Counts an addition, and trims `folder` to `most` bytes where enough has come together.
    pub(super) fn count(&self, folder: &Path, bytes: u64, most: u64) {
        if self.0.fetch_add(bytes, Ordering::Relaxed) + bytes < LOOK.min(most / 16) {
            return;
        }
        self.0.store(0, Ordering::Relaxed);
        match trim(folder, most) {
            Ok((0, _)) => {}
            Ok((files, freed)) => tracing::info!(files, freed, folder = %folder.display(), "old entries left a cache"),
            Err(error) => tracing::warn!(%error, folder = %folder.display(), "a cache can't be trimmed"),
        }
    }
}

/// Says of a file that it was used.
pub(super) fn used(path: &Path) {
    // A cache that can't be written is trimmed by nobody.
    if let Ok(file) = fs::File::open(path) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Takes files away, those that were used longest ago first, until a folder of more than `most` bytes has three quarters of
/// that. Answers how many files and bytes went.
fn trim(folder: &Path, most: u64) -> io::Result<(usize, u64)> {
    let mut files: Vec<(SystemTime, u64, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        // Others may trim or build beside this.
        let Ok(about) = entry.metadata() else { continue };
        if about.is_file() {
            files.push((about.modified()?, about.len(), entry.path()));
        }
    }
    let mut left: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
    if left <= most {
        return Ok((0, 0));
    }
    files.sort();
    let (mut gone, mut freed) = (0, 0);
    for (_, bytes, path) in files {
        if left <= most / 4 * 3 {
            break;
        }
        if fs::remove_file(&path).is_ok() {
            gone += 1;
            freed += bytes;
        }
        left -= bytes;
    }
    Ok((gone, freed))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_was_used_least_lately_goes_until_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let path = |n: u64| folder.path().join(n.to_string());
        for n in 0..10 {
            fs::write(path(n), [0; 100]).unwrap();
            let file = fs::File::open(path(n)).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(n)).unwrap();
        }
        fs::create_dir(folder.path().join("a folder")).unwrap();
        assert_eq!(trim(folder.path(), 1000).unwrap(), (0, 0), "it is within its size");
        used(&path(0));
        assert_eq!(trim(folder.path(), 800).unwrap(), (4, 400));
        let left: Vec<u64> = (0..10).filter(|n| path(*n).exists()).collect();
        assert_eq!(left, [0, 5, 6, 7, 8, 9]);
    }

    #[test]
    fn a_folder_is_looked_at_first_and_then_when_enough_has_come() {
        let folder = tempfile::tempdir().unwrap();
        let fill = |name: &str| fs::write(folder.path().join(name), [0; 100]).unwrap();
        let there = || fs::read_dir(folder.path()).unwrap().count();
        let added = Added::default();
        fill("a");
        fill("b");
        added.count(folder.path(), 1, 160);
        assert_eq!(there(), 1);
        fill("c");
        added.count(folder.path(), 5, 160);
        assert_eq!(there(), 2, "too little has come");
        added.count(folder.path(), 5, 160);
        assert_eq!(there(), 1);
    }
}
