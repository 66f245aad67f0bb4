//! Files on their way out: what may leave, and how it is read from under hostile hands.
//!
//! Knows names, kinds and sizes. Must not know what the files are for. Every step is by a descriptor of the folder
//! above, no link is followed, and a file is judged after it is open: nobody can change what it is then.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path};

use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;

use super::workspace::{Error, ExportLimits};

const DEPTH: usize = 32;
const NAME: usize = 1024;

/// Files so far, and what may still come. Both ends of the channel count with it.
#[derive(Debug)]
pub struct Taken<'a> {
    limits: &'a ExportLimits,
    bytes: u64,
    count: usize,
    pub files: BTreeMap<String, Vec<u8>>,
}

impl<'a> Taken<'a> {
    pub fn new(limits: &'a ExportLimits) -> Self {
        Self { limits, bytes: 0, count: 0, files: BTreeMap::new() }
    }

    /// Whether one more file of this name and size may leave.
    fn admit(&mut self, path: &str, bytes: u64) -> Result<(), Error> {
        let refused = |why: String| Err(Error::Export(why));
        if !plain(path) {
            return refused(format!("{path:?} is not a name that may leave"));
        }
        if !self.limits.paths.is_empty() && !self.limits.paths.iter().any(|p| Path::new(path).starts_with(clean(p))) {
            return refused(format!("{path} was not asked for"));
        }
        if bytes > self.limits.file_bytes {
            return refused(format!(
                "{path} has {bytes} bytes; at most {} of a file may leave",
                self.limits.file_bytes
            ));
        }
        self.count += 1;
        self.bytes += bytes;
        if self.count > self.limits.files {
            return refused(format!("there are more than {} files; remove what is not needed", self.limits.files));
        }
        if self.bytes > self.limits.bytes {
            return refused(format!("the files have more than {} bytes in all", self.limits.bytes));
        }
        Ok(())
    }

    /// Keeps a file that came.
    pub fn add(&mut self, path: String, bytes: Vec<u8>) -> Result<(), Error> {
        self.admit(&path, bytes.len() as u64)?;
        if self.files.insert(path.clone(), bytes).is_some() {
            return Err(Error::Export(format!("{path} came twice")));
        }
        Ok(())
    }
}

fn clean(path: &str) -> &str {
    path.strip_prefix("./").unwrap_or(path).trim_end_matches('/')
}

/// A relative path of printable names that leads nowhere but down.
fn plain(path: &str) -> bool {
    !path.is_empty()
        && path.len() <= NAME
        && !path.chars().any(char::is_control)
        && !path.split('/').any(|part| part.is_empty() || part == ".")
        && Path::new(path).components().all(|c| matches!(c, Component::Normal(_)))
}

/// Reads the files that may leave and hands over each one.
///
/// # Errors
/// `Export` with the first thing that may not leave; what `hand` says.
pub fn export(
    workspace: BorrowedFd<'_>,
    limits: &ExportLimits,
    hand: &mut dyn FnMut(String, Vec<u8>) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut taken = Taken::new(limits);
    if limits.paths.is_empty() {
        let root = open(workspace, ".", ".")?.ok_or_else(|| Error::Export("the workspace is gone".into()))?;
        return folder(root, "", DEPTH, &mut taken, hand);
    }
    for path in &limits.paths {
        let path = clean(path);
        if !plain(path) {
            return Err(Error::Export(format!("{path:?} is not a path inside the workspace")));
        }
        if let Some(found) = open(workspace, path, path)? {
            one(found, path, DEPTH, &mut taken, hand)?;
        }
    }
    Ok(())
}

/// Opens what a name stands for; `None` if nothing.
fn open(at: BorrowedFd<'_>, name: &str, shown: &str) -> Result<Option<OwnedFd>, Error> {
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC)
        .mode(Mode::empty())
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS
                | ResolveFlag::RESOLVE_NO_XDEV,
        );
    let refused = |why: &str| Err(Error::Export(format!("{shown} {why}")));
    match openat2(at, name, how) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::ENOENT) => Ok(None),
        Err(Errno::ELOOP) => refused("is a link; only files themselves may leave"),
        Err(Errno::ENXIO) => refused("is a socket or a device; only files may leave"),
        Err(Errno::EXDEV) => refused("leads out of the workspace"),
        Err(error) => refused(&format!("can't be opened: {}", error.desc())),
    }
}

fn one(
    found: OwnedFd,
    path: &str,
    depth: usize,
    taken: &mut Taken<'_>,
    hand: &mut dyn FnMut(String, Vec<u8>) -> Result<(), Error>,
) -> Result<(), Error> {
    let refused = |why: &str| Err(Error::Export(format!("{path} {why}")));
    let file = File::from(found);
    let about = file.metadata()?;
    if about.is_dir() {
        return if depth == 0 { refused("lies too deep") } else { folder(file.into(), path, depth, taken, hand) };
    }
    if !about.is_file() {
        return refused("is a device, a pipe or a socket; only files may leave");
    }
    if about.nlink() != 1 {
        return refused("has a second name (a hard link); make it a file of its own by a copy");
    }
    taken.admit(path, about.len())?;
    let mut bytes = Vec::new();
    file.take(about.len() + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != about.len() {
        return refused("changed while it was read");
    }
    hand(path.to_owned(), bytes)
}

fn folder(
    found: OwnedFd,
    path: &str,
    depth: usize,
    taken: &mut Taken<'_>,
    hand: &mut dyn FnMut(String, Vec<u8>) -> Result<(), Error>,
) -> Result<(), Error> {
    let at = found.try_clone()?;
    let mut names = Vec::new();
    for entry in Dir::from_fd(found).map_err(std::io::Error::from)?.iter() {
        let entry = entry.map_err(std::io::Error::from)?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let Ok(name) = name.to_str().map(str::to_owned) else {
            return Err(Error::Export(format!("{name:?} in /{path} is no UTF-8 name")));
        };
        names.push(name);
        if names.len() > taken.limits.files * 2 + 1024 {
            return Err(Error::Export(format!("/{path} has too many files; remove what is not needed")));
        }
    }
    names.sort();
    for name in names {
        let below = if path.is_empty() { name.clone() } else { format!("{path}/{name}") };
        if !plain(&below) {
            return Err(Error::Export(format!("{below:?} is not a name that may leave")));
        }
        // What was removed meanwhile is not there.
        if let Some(found) = open(at.as_fd(), &name, &below)? {
            one(found, &below, depth - 1, taken, hand)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_lead_elsewhere_or_hide_are_no_names() {
        for good in ["model_new.py", "kernels/a b.cu", "kernels/sub/ä.h", "...", "a..b"] {
            assert!(plain(good), "{good}");
        }
        for bad in ["", "/etc/passwd", "../x", "a/../b", "a//b", "./a", "a/.", "a\nb", "a\u{7f}", "a\u{1b}[2J", "a/"] {
            assert!(!plain(bad), "{bad:?}");
        }
    }

    #[test]
    fn what_a_forged_stream_brings_is_refused_at_the_limit() {
        let limits = ExportLimits { paths: vec!["kernels/".into()], files: 2, file_bytes: 4, bytes: 6 };
        let mut taken = Taken::new(&limits);
        taken.add("kernels/a.cu".into(), vec![0; 4]).unwrap();
        for (path, bytes) in [("kernels/a.cu", 1), ("kernels/../x", 1), ("other", 1), ("kernelsx", 1), ("kernels/b", 5)]
        {
            let mut again = Taken::new(&limits);
            again.add("kernels/a.cu".into(), vec![0; 4]).unwrap();
            assert!(again.add(path.into(), vec![0; bytes]).is_err(), "{path}");
        }
        assert!(taken.add("kernels/b.cu".into(), vec![0; 3]).is_err(), "the sum");
        assert!(taken.add("kernels/c.cu".into(), vec![0; 0]).is_err(), "the count");
    }
}
