//! Finds task files: a file, a folder, or a list of paths.
//!
//! Knows names and files. Must not know Python.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Largest task file that is read.
pub const MAX_BYTES: u64 = 256 << 10;

/// A task file as found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The file's stem, or its folder's name where that is `task`; where two are alike, the folder's name is put in front.
    pub name: String,
    pub path: PathBuf,
    pub source: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} can't be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is {bytes} bytes, a task file is at most {MAX_BYTES}")]
    TooLarge { path: PathBuf, bytes: u64 },
    #[error("{0} is not UTF-8 text")]
    NotText(PathBuf),
    #[error("{0} holds no task: no file that ends in .py")]
    Empty(PathBuf),
    #[error("{path} is not a list of tasks: {problem}")]
    List { path: PathBuf, problem: String },
}

impl Error {
    /// The path that is in the way.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Read { path, .. } | Self::TooLarge { path, .. } | Self::List { path, .. } => path,
            Self::NotText(path) | Self::Empty(path) => path,
        }
    }

    /// The sentence without the path in front.
    #[must_use]
    pub fn problem(&self) -> String {
        let text = self.to_string();
        text.strip_prefix(&format!("{} ", self.path().display())).map_or_else(|| text.clone(), str::to_owned)
    }
}

/// Reads every task that `paths` name, in their order; folders in the order of the numbers that names begin
/// with. A list is a `.txt` with a path a line (`#` begins a comment) or a `.json` list of paths, relative to
/// `root`, or to the list's own folder without one.
///
/// # Errors
/// Names the first path that can't be read.
pub fn find(paths: &[PathBuf], root: Option<&Path>) -> Result<Vec<Found>, Error> {
    find_each(paths, root).into_iter().collect()
}

/// As `find`, each path for itself: one that can't be read stands in its place among the others.
#[must_use]
pub fn find_each(paths: &[PathBuf], root: Option<&Path>) -> Vec<Result<Found, Error>> {
    let mut found = Vec::new();
    for path in paths {
        let mut files = Vec::new();
        match collect(path, root, &mut files) {
            Ok(()) => found.extend(files.iter().map(|p| read(p))),
            Err(error) => found.push(Err(error)),
        }
    }
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for task in found.iter().flatten() {
        *count.entry(task.name.clone()).or_default() += 1;
    }
    for task in found.iter_mut().flatten() {
        if count.get(&task.name).copied().unwrap_or(0) > 1
            && let Some(folder) = task.path.parent().and_then(Path::file_name)
        {
            task.name = format!("{}-{}", folder.to_string_lossy(), task.name);
        }
    }
    found
}

fn collect(path: &Path, root: Option<&Path>, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    let failed = |source| Error::Read { path: path.to_path_buf(), source };
    if path.is_dir() {
        let mut inside: Vec<PathBuf> = Vec::new();
        for entry in std::fs::read_dir(path).map_err(failed)? {
            let file = entry.map_err(failed)?.path();
            if file.extension().is_some_and(|e| e == "py") && file.is_file() {
                inside.push(file);
            }
        }
        if inside.is_empty() {
            return Err(Error::Empty(path.to_path_buf()));
        }
        inside.sort_by_key(|p| order(p));
        files.extend(inside);
        return Ok(());
    }
    let base = root.or_else(|| path.parent()).unwrap_or(Path::new("."));
    match path.extension().and_then(|e| e.to_str()) {
        Some("txt") => {
            let text = std::fs::read_to_string(path).map_err(failed)?;
            let lines = text.lines().map(|l| l.split('#').next().unwrap_or("").trim()).filter(|l| !l.is_empty());
            files.extend(lines.map(|l| base.join(l)));
        }
        Some("json") => {
            let text = std::fs::read_to_string(path).map_err(failed)?;
            let bad = |problem: String| Error::List { path: path.to_path_buf(), problem };
            let value: serde_json::Value = serde_json::from_str(&text).map_err(|e| bad(e.to_string()))?;
            let list = value.as_array().or_else(|| value["tasks"].as_array());
            let list =
                list.ok_or_else(|| bad("a list of paths, or a mapping with one at `tasks`, is wanted".into()))?;
            for entry in list {
                let file = entry.as_str().or_else(|| entry["path"].as_str());
                files.push(base.join(file.ok_or_else(|| bad(format!("{entry} names no path")))?));
            }
        }
        _ => files.push(path.to_path_buf()),
    }
    Ok(())
}

/// `2_x.py` before `10_x.py`.
fn order(path: &Path) -> (u64, String) {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let digits: String = name.chars().take_while(char::is_ascii_digit).collect();
    (digits.parse().unwrap_or(u64::MAX), name)
}

fn read(path: &Path) -> Result<Found, Error> {
    let failed = |source| Error::Read { path: path.to_path_buf(), source };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > MAX_BYTES {
        return Err(Error::TooLarge { path: path.to_path_buf(), bytes });
    }
    let content = std::fs::read(path).map_err(failed)?;
    let source = String::from_utf8(content).map_err(|_| Error::NotText(path.to_path_buf()))?;
    let name = name(path);
    Ok(Found { name, path: path.to_path_buf(), source })
}

/// A file called `task.py` lies in a folder of results or of cases, whose name says more.
fn name(path: &Path) -> String {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    if stem != "task" {
        return stem;
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = std::fs::canonicalize(folder).ok();
    folder.and_then(|p| Some(p.file_name()?.to_string_lossy().into_owned())).unwrap_or(stem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_lists_give_tasks_in_the_order_of_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        for level in ["level1", "level2"] {
            std::fs::create_dir(folder.path().join(level)).unwrap();
            for name in ["10_b.py", "2_a.py", "notes.md"] {
                std::fs::write(folder.path().join(level).join(name), "x").unwrap();
            }
        }
        let names = |found: Vec<Found>| found.into_iter().map(|f| f.name).collect::<Vec<_>>();
        let one = find(&[folder.path().join("level1")], None).unwrap();
        assert_eq!(names(one), ["2_a", "10_b"]);
        std::fs::write(folder.path().join("list.txt"), "# both\nlevel1/2_a.py\nlevel2/2_a.py # same name\n").unwrap();
        let two = find(&[folder.path().join("list.txt")], None).unwrap();
        assert_eq!(names(two), ["level1-2_a", "level2-2_a"]);
        let other = tempfile::tempdir().unwrap();
        std::fs::write(other.path().join("l.json"), r#"{"tasks":[{"path":"level1/10_b.py"}, "level2/2_a.py"]}"#)
            .unwrap();
        let three = find(&[other.path().join("l.json")], Some(folder.path())).unwrap();
        assert_eq!(names(three), ["10_b", "2_a"]);
        for level in ["level1", "level2"] {
            std::fs::write(folder.path().join(level).join("task.py"), "x").unwrap();
        }
        let kept = ["level1", "level2"].map(|level| folder.path().join(level).join("task.py"));
        assert_eq!(names(find(&kept, None).unwrap()), ["level1", "level2"]);
        assert!(find(&[folder.path().to_path_buf()], None).unwrap_err().to_string().contains("holds no task"));
        assert!(find(&[folder.path().join("no.py")], None).unwrap_err().to_string().contains("no.py can't be read"));
    }
}
