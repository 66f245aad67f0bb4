//! Files of a workspace: read, written, listed and searched by the server that is confined beside them.
//!
//! Knows paths and the workspace's descriptor. Must not know who asks. Links inside the workspace are followed, and
//! those that lead out are refused by the kernel; since the server may reach no more than the agent's own commands,
//! a race is worth nothing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use globset::{GlobBuilder, GlobMatcher};
use grep_regex::RegexMatcherBuilder;
use grep_searcher::sinks::Lossy;
use grep_searcher::{BinaryDetection, SearcherBuilder};
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;
use walkdir::WalkDir;

use super::workspace::{Entry, Error, Match, Search};

/// Entries that a walk looks at and that an answer holds.
const VISITED: usize = 500_000;
const LISTED: usize = 10_000;
/// Longest walk.
const SECONDS: Duration = Duration::from_secs(30);
/// Bytes of a line that a search shows.
const LINE: usize = 500;
/// Memory for one line, or for one file where a pattern spans lines.
const HEAP: usize = 32 << 20;

#[derive(Debug)]
pub struct Files {
    root: PathBuf,
    fd: OwnedFd,
}

fn denied(path: &str, why: impl Into<String>) -> Error {
    Error::Denied { path: path.into(), why: why.into() }
}

fn explain(path: &str, error: Errno) -> Error {
    match error {
        Errno::ENOENT => Error::NotFound { path: path.into() },
        Errno::EXDEV => Error::Outside { path: path.into() },
        Errno::ELOOP => denied(path, "its links lead in a circle"),
        Errno::EISDIR => Error::NotAFile { path: path.into(), what: "a folder".into() },
        Errno::ENXIO => Error::NotAFile { path: path.into(), what: "a pipe, a socket or a device".into() },
        Errno::ENOTDIR => denied(path, "a part of it is a file, not a folder"),
        Errno::ENOSPC | Errno::EDQUOT => denied(path, "the sandbox's disk is full; remove what is not needed"),
        Errno::EFBIG => denied(path, "it would be larger than a file may be"),
        other => denied(path, other.desc()),
    }
}

fn explain_io(path: &str, error: &io::Error) -> Error {
    explain(path, Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))
}

fn what(about: &std::fs::Metadata) -> String {
    use std::os::unix::fs::FileTypeExt;
    let kind = about.file_type();
    if kind.is_dir() {
        "a folder"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
    .into()
}

fn entry(path: &Path, about: &std::fs::Metadata) -> Entry {
    #[allow(clippy::cast_precision_loss)]
    let modified = about.mtime() as f64 + about.mtime_nsec() as f64 / 1e9;
    Entry { path: path.to_string_lossy().into_owned(), bytes: about.len(), modified, folder: about.is_dir() }
}

impl Files {
    pub fn open(root: &Path) -> io::Result<Self> {
        let fd = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(root)?.into();
        let files = Self { root: root.to_owned(), fd };
        match files.at(Path::new("."), OFlag::O_PATH, true) {
            Ok(_) => Ok(files),
            Err(error) => Err(io::Error::other(format!(
                "this kernel can't keep file operations inside a folder (openat2, Linux 5.6): {}",
                error.desc()
            ))),
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A path relative to the workspace; it may still have `..` and links in it.
    fn relative(&self, path: &str) -> Result<PathBuf, Error> {
        if path.contains('\0') {
            return Err(denied(path, "it contains a zero byte"));
        }
        let path = Path::new(path);
        let inside = if path.is_absolute() {
            path.strip_prefix(&self.root).map_err(|_| Error::Outside { path: path.display().to_string() })?
        } else {
            path
        };
        Ok(if inside.as_os_str().is_empty() { ".".into() } else { inside.to_owned() })
    }

    fn at(&self, path: &Path, flags: OFlag, links: bool) -> Result<OwnedFd, Errno> {
        let mut resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
        if !links {
            resolve |= ResolveFlag::RESOLVE_NO_SYMLINKS;
        }
        let tty = if flags.contains(OFlag::O_PATH) { OFlag::empty() } else { OFlag::O_NOCTTY };
        let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC | tty).resolve(resolve);
        let mut tries = 0;
        loop {
            match openat2(&self.fd, path, how) {
                // Something was moved on the way.
                Err(Errno::EAGAIN) if tries < 100 => tries += 1,
                Err(Errno::EINTR) => {}
                other => return other,
            }
        }
    }

    /// Opens a path that links may lead through, as long as they stay inside.
    fn follow(&self, shown: &str, path: &Path, flags: OFlag) -> Result<(OwnedFd, PathBuf), Error> {
        match self.at(path, flags, true) {
            Ok(fd) => Ok((fd, path.to_owned())),
            // An absolute link is refused even where it stays inside.
            Err(Errno::EXDEV) => {
                let outside = || Error::Outside { path: shown.into() };
                let root = self.root.canonicalize().map_err(|_| outside())?;
                let whole = self.root.join(path);
                let real = whole.canonicalize().map_err(|_| {
                    // What is not there lies where the folders above it lie.
                    let above = whole.ancestors().skip(1).find_map(|p| p.canonicalize().ok());
                    if above.is_some_and(|p| p.starts_with(&root)) && !whole.is_symlink() {
                        Error::NotFound { path: shown.into() }
                    } else {
                        outside()
                    }
                })?;
                let inside = real.strip_prefix(&root).map_err(|_| outside())?;
                let inside = if inside.as_os_str().is_empty() { Path::new(".") } else { inside };
                let fd = self.at(inside, flags, false).map_err(|e| explain(shown, e))?;
                Ok((fd, inside.to_owned()))
            }
            Err(error) => Err(explain(shown, error)),
        }
    }

    pub fn read(&self, path: &str, limit: u64) -> Result<Vec<u8>, Error> {
        let inside = self.relative(path)?;
        let (fd, _) = self.follow(path, &inside, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
        let file = File::from(fd);
        let about = file.metadata()?;
        if !about.is_file() {
            return Err(Error::NotAFile { path: path.into(), what: what(&about) });
        }
        let too_large = |bytes| Err(Error::TooLarge { path: path.into(), bytes, limit });
        if about.len() > limit {
            return too_large(about.len());
        }
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| explain_io(path, &e))?;
        if bytes.len() as u64 > limit { too_large(bytes.len() as u64) } else { Ok(bytes) }
    }

    /// Writes beside and renames, so that nobody sees half a file and a full disk leaves the old one.
    pub fn write(&self, path: &str, bytes: &[u8], executable: bool) -> Result<(), Error> {
        let mut inside = self.relative(path)?;
        let mut mode = if executable { 0o755 } else { 0o644 };
        // What is there already says where it really lies and who may run it.
        match self.follow(path, &inside, OFlag::O_PATH) {
            Ok((fd, real)) => {
                let about = File::from(fd).metadata()?;
                if !about.is_file() {
                    return Err(Error::NotAFile { path: path.into(), what: what(&about) });
                }
                mode = about.mode() & 0o777;
                inside = real;
                if self.root.join(&inside).is_symlink() {
                    let target = self.root.join(&inside).canonicalize().map_err(|e| explain_io(path, &e))?;
                    let root = self.root.canonicalize()?;
                    inside = target.strip_prefix(root).map_err(|_| Error::Outside { path: path.into() })?.to_owned();
                }
            }
            Err(Error::NotFound { .. }) => {
                if self.root.join(&inside).is_symlink() {
                    return Err(denied(path, "it is a link to nothing"));
                }
            }
            Err(error) => return Err(error),
        }
        let Some(name) = inside.file_name().map(std::ffi::OsStr::to_owned) else {
            return Err(Error::NotAFile { path: path.into(), what: "a folder".into() });
        };
        let parent = match inside.parent() {
            Some(p) if !p.as_os_str().is_empty() => p.to_owned(),
            _ => PathBuf::from("."),
        };
        let folder = match self.follow(path, &parent, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
            Err(Error::NotFound { .. }) => {
                std::fs::create_dir_all(self.root.join(&parent)).map_err(|e| explain_io(path, &e))?;
                self.follow(path, &parent, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?.0
            }
            other => other?.0,
        };
        let beside = format!(".kernelfleet-{}", std::process::id());
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let done = nix::fcntl::openat(&folder, beside.as_str(), flags, Mode::from_bits_truncate(0o600))
            .map_err(io::Error::from)
            .and_then(|fd| {
                let mut file = File::from(fd);
                file.write_all(bytes)?;
                nix::sys::stat::fchmod(&file, Mode::from_bits_truncate(mode))?;
                Ok(nix::fcntl::renameat(&folder, beside.as_str(), &folder, name.as_os_str())?)
            });
        done.map_err(|e| {
            let _ = nix::unistd::unlinkat(&folder, beside.as_str(), nix::unistd::UnlinkatFlags::NoRemoveDir);
            explain_io(path, &e)
        })
    }

    pub fn stat(&self, path: &str) -> Result<Entry, Error> {
        let inside = self.relative(path)?;
        let (fd, real) = self.follow(path, &inside, OFlag::O_PATH)?;
        Ok(entry(&real, &File::from(fd).metadata()?))
    }

    pub fn list(&self, path: &str) -> Result<Vec<Entry>, Error> {
        let inside = self.relative(path)?;
        let (fd, real) = match self.follow(path, &inside, OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NONBLOCK) {
            Err(Error::Denied { .. }) if self.root.join(&inside).is_file() => {
                return Err(Error::NotAFolder { path: path.into() });
            }
            other => other?,
        };
        let mut found = Vec::new();
        for name in Dir::from_fd(fd).map_err(io::Error::from)?.iter() {
            let name = name.map_err(io::Error::from)?;
            if name.file_name() == c"." || name.file_name() == c".." {
                continue;
            }
            let below = real.join(std::ffi::OsStr::new(&*name.file_name().to_string_lossy()));
            // A link is shown as what it is.
            if let Ok(about) = self.root.join(&below).symlink_metadata() {
                found.push(entry(below.strip_prefix(".").unwrap_or(&below), &about));
            }
            if found.len() >= LISTED {
                break;
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// Folder or file that a search begins in, as a real path.
    fn base(&self, path: Option<&str>) -> Result<PathBuf, Error> {
        let path = path.unwrap_or(".");
        let (fd, _) = self.follow(path, &self.relative(path)?, OFlag::O_PATH)?;
        // The descriptor's name is the path without links.
        let real = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))?;
        Ok(real)
    }

    /// Files below a folder, links not followed.
    fn walk(
        &self,
        base: &Path,
        seen: &mut dyn FnMut(&Path, &Path, &walkdir::DirEntry) -> Result<bool, Error>,
    ) -> Result<(), Error> {
        let root = self.root.canonicalize()?;
        let end = Instant::now() + SECONDS;
        for (count, found) in WalkDir::new(base).sort_by_file_name().into_iter().enumerate() {
            if count > VISITED || Instant::now() > end {
                return Err(denied(
                    &base.strip_prefix(&root).unwrap_or(base).display().to_string(),
                    "it has too many files to search; name a smaller folder",
                ));
            }
            // What can't be read or was removed meanwhile is not looked at.
            let Ok(found) = found else { continue };
            if !found.file_type().is_file() {
                continue;
            }
            let shown = found.path().strip_prefix(&root).unwrap_or(found.path());
            let below = found.path().strip_prefix(base).unwrap_or(shown);
            let below = if below.as_os_str().is_empty() { Path::new(found.file_name()) } else { below };
            if !seen(shown, below, &found)? {
                break;
            }
        }
        Ok(())
    }

    /// The newest first.
    pub fn glob(&self, pattern: &str, path: Option<&str>) -> Result<Vec<Entry>, Error> {
        let mut pattern = pattern;
        if path.is_none()
            && let Some(inside) = self.root.to_str().and_then(|r| pattern.strip_prefix(r)?.strip_prefix('/'))
        {
            pattern = inside;
        }
        let matcher = matcher(pattern.strip_prefix("./").unwrap_or(pattern))?;
        let base = self.base(path)?;
        if !base.is_dir() {
            return Err(Error::NotAFolder { path: path.unwrap_or(".").into() });
        }
        let mut found = Vec::new();
        self.walk(&base, &mut |shown, below, file| {
            if matcher.is_match(below)
                && let Ok(about) = file.metadata()
            {
                found.push(entry(shown, &about));
            }
            Ok(true)
        })?;
        found.sort_by(|a, b| b.modified.total_cmp(&a.modified).then_with(|| a.path.cmp(&b.path)));
        found.truncate(LISTED);
        Ok(found)
    }

    pub fn grep(&self, search: &Search) -> Result<Vec<Match>, Error> {
        let pattern =
            |why: &dyn std::fmt::Display| Error::Pattern { pattern: search.pattern.clone(), why: why.to_string() };
        let matcher_of_lines = RegexMatcherBuilder::new()
            .case_insensitive(search.case_insensitive)
            .multi_line(true)
            .dot_matches_new_line(search.multiline)
            .line_terminator((!search.multiline).then_some(b'\n'))
            .build(&search.pattern)
            .map_err(|e| pattern(&e))?;
        let glob = search.glob.as_deref().map(matcher).transpose()?;
        let by_path = search.glob.as_deref().is_some_and(|g| g.contains('/'));
        let base = self.base(search.path.as_deref())?;
        let mut searcher = SearcherBuilder::new()
            .line_number(true)
            .multi_line(search.multiline)
            .binary_detection(BinaryDetection::quit(0))
            .heap_limit(Some(HEAP))
            .build();
        let limit = search.limit.min(LISTED);
        let mut found = Vec::new();
        self.walk(&base, &mut |shown, below, file| {
            if found.len() >= limit {
                return Ok(false);
            }
            let name = Path::new(file.file_name());
            if glob.as_ref().is_some_and(|g| !g.is_match(if by_path { below } else { name })) {
                return Ok(true);
            }
            let Ok(open) = super::plain_file(file.path()) else { return Ok(true) };
            let path = shown.to_string_lossy();
            let mut line = |number, text: &str| {
                let mut text = text.trim_end_matches(['\n', '\r']);
                if text.len() > LINE {
                    text = &text[..text.floor_char_boundary(LINE)];
                }
                found.push(Match { path: path.clone().into_owned(), line: number, text: text.to_owned() });
                Ok(found.len() < limit)
            };
            // A file that can't be searched, say for lines without end, has no matches.
            let _ = searcher.search_file(&matcher_of_lines, &open, Lossy(&mut line));
            Ok(true)
        })?;
        Ok(found)
    }
}

fn matcher(pattern: &str) -> Result<GlobMatcher, Error> {
    GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()
        .map(|g| g.compile_matcher())
        .map_err(|e| Error::Pattern { pattern: pattern.into(), why: e.kind().to_string() })
}
