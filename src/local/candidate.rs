//! Reads a candidate's folder, within limits, saying what is wrong with it by name.
//!
//! Knows files. Must not know what is in them: that is the recorder's and the builder's business.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::judge::Candidate;

/// Most files of a candidate.
pub const MAX_FILES: usize = 256;
/// Most bytes of all its files together.
pub const MAX_BYTES: u64 = 8 << 20;

/// Why a folder is no candidate.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} can't be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{0} is not a folder; a candidate is a folder with model_new.py and kernels/, or a single .py file")]
    NotAFolder(PathBuf),
    #[error("{0} has no model_new.py, the file that defines ModelNew")]
    NoModelNew(PathBuf),
    #[error("{0} has no model_new.py, the file that defines ModelNew; did you mean {0}/best?")]
    NotBest(PathBuf),
    #[error("{0} is a link; a candidate holds plain files only, copy what it points to")]
    Link(PathBuf),
    #[error("{0} is neither a file nor a folder")]
    Special(PathBuf),
    #[error("{0} is not UTF-8 text; a candidate holds sources only")]
    NotText(PathBuf),
    #[error("{0} has more than {MAX_FILES} files; give the candidate a folder of its own")]
    TooMany(PathBuf),
    #[error("{path} makes the candidate larger than {} MiB", MAX_BYTES >> 20)]
    TooLarge { path: PathBuf },
    #[error("{0} holds no folder with a model_new.py")]
    EmptyBatch(PathBuf),
}

/// Reads one candidate: its folder, or the one file that is all of it. Hidden files and `__pycache__` are left out, of CUDA
/// Agent's layout also what its compile.sh has made: that is made anew.
///
/// # Errors
/// Names the file that is in the way.
pub fn read(folder: &Path) -> Result<Candidate, Error> {
    if folder.is_file() && folder.extension().is_some_and(|e| e == "py") {
        let text = std::fs::read(folder).map_err(|source| Error::Read { path: folder.to_path_buf(), source })?;
        let text = String::from_utf8(text).map_err(|_| Error::NotText(folder.to_path_buf()))?;
        return Ok(Candidate { files: BTreeMap::from([("model_new.py".to_owned(), text)]) });
    }
    if !folder.is_dir() {
        return Err(Error::NotAFolder(folder.to_path_buf()));
    }
    if !folder.join("model_new.py").is_file() {
        // A folder of results, of a run or of `judge --keep`, has the candidate below.
        let below = folder.join("best/model_new.py").is_file();
        return Err(if below { Error::NotBest(folder.into()) } else { Error::NoModelNew(folder.into()) });
    }
    let mut files = BTreeMap::new();
    let mut bytes = 0;
    walk(folder, folder, &mut files, &mut bytes)?;
    Ok(Candidate { files })
}

fn walk(root: &Path, folder: &Path, files: &mut BTreeMap<String, String>, bytes: &mut u64) -> Result<(), Error> {
    let failed = |path: &Path, source| Error::Read { path: path.to_path_buf(), source };
    let mut entries: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(|e| failed(folder, e))? {
        entries.push(entry.map_err(|e| failed(folder, e))?.path());
        if entries.len() > 16 * MAX_FILES {
            return Err(Error::TooMany(root.to_path_buf()));
        }
    }
    entries.sort();
    for path in entries {
        let Some(name) = path.file_name().and_then(|n| n.to_str()) else { return Err(Error::NotText(path)) };
        if name.starts_with('.') || name == "__pycache__" {
            continue;
        }
        if made(root, folder, name) {
            continue;
        }
        let metadata = std::fs::symlink_metadata(&path).map_err(|e| failed(&path, e))?;
        if metadata.is_symlink() {
            return Err(Error::Link(path));
        }
        if metadata.is_dir() {
            walk(root, &path, files, bytes)?;
            continue;
        }
        if !metadata.is_file() {
            return Err(Error::Special(path));
        }
        *bytes += metadata.len();
        if *bytes > MAX_BYTES {
            return Err(Error::TooLarge { path });
        }
        if files.len() == MAX_FILES {
            return Err(Error::TooMany(root.to_path_buf()));
        }
        let content = std::fs::read(&path).map_err(|e| failed(&path, e))?;
        let Ok(text) = String::from_utf8(content) else { return Err(Error::NotText(path)) };
        let inside = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        files.insert(inside, text);
    }
    Ok(())
}

/// Whether it is a product of CUDA Agent's compile.sh.
fn made(root: &Path, folder: &Path, name: &str) -> bool {
    let product = name.ends_with(".so") || name.ends_with(".o") || (folder == root && name == "build");
    product && root.join("binding.cpp").is_file()
}

/// Reads every subfolder with a `model_new.py`, by name.
///
/// # Errors
/// As `read`; a folder without any candidate is an error too.
pub fn read_batch(folder: &Path) -> Result<Vec<(String, Candidate)>, Error> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::Read { path: folder.to_path_buf(), source })?;
    let mut folders: Vec<PathBuf> =
        entries.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.join("model_new.py").is_file()).collect();
    folders.sort();
    if folders.is_empty() {
        return Err(Error::EmptyBatch(folder.to_path_buf()));
    }
    let name = |p: &Path| p.file_name().unwrap_or_default().to_string_lossy().into_owned();
    folders.iter().map(|p| Ok((name(p), read(p)?))).collect()
}

/// Names of the subfolders that `read_batch` doesn't take for candidates.
#[must_use]
pub fn left_out(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().is_dir() && !entry.path().join("model_new.py").is_file())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !name.starts_with('.') && name != "__pycache__")
        .collect();
    names.sort();
    names
}

/// Writes a candidate's files below `folder`, which is emptied first.
///
/// # Errors
/// When the disk refuses. A path that would leave the folder is refused as `InvalidInput`.
pub fn write(folder: &Path, candidate: &Candidate) -> std::io::Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    std::fs::create_dir_all(folder)?;
    for (name, text) in &candidate.files {
        let inside = Path::new(name);
        if !inside.components().all(|c| matches!(c, std::path::Component::Normal(_))) {
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("bad file name {name}")));
        }
        let path = folder.join(inside);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(path, text)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("model_new.py"), "x").unwrap();
        std::fs::create_dir(folder.path().join("kernels")).unwrap();
        std::fs::write(folder.path().join("kernels/a.cpp"), "y").unwrap();
        folder
    }

    #[test]
    fn a_folder_comes_back_as_it_was_written() {
        let folder = folder();
        std::fs::create_dir(folder.path().join("__pycache__")).unwrap();
        std::fs::write(folder.path().join("__pycache__/x.pyc"), [0xff]).unwrap();
        let candidate = read(folder.path()).unwrap();
        assert_eq!(candidate.files.keys().collect::<Vec<_>>(), ["kernels/a.cpp", "model_new.py"]);
        let other = tempfile::tempdir().unwrap();
        write(&other.path().join("best"), &candidate).unwrap();
        assert_eq!(read(&other.path().join("best")).unwrap(), candidate);
    }

    #[test]
    fn a_single_file_is_a_candidate_and_what_cuda_agents_script_has_made_is_left_out() {
        let folder = folder();
        std::fs::create_dir(folder.path().join("build")).unwrap();
        for name in ["build/x.o", "cuda_extension.so", "kernels/x.o"] {
            std::fs::write(folder.path().join(name), [0xff]).unwrap();
        }
        assert!(read(folder.path()).unwrap_err().to_string().contains("is not UTF-8"));
        std::fs::write(folder.path().join("binding.cpp"), "z").unwrap();
        let candidate = read(folder.path()).unwrap();
        assert_eq!(candidate.files.keys().collect::<Vec<_>>(), ["binding.cpp", "kernels/a.cpp", "model_new.py"]);
        let single = folder.path().join("solution.py");
        std::fs::write(&single, "x").unwrap();
        assert_eq!(read(&single).unwrap().files, BTreeMap::from([("model_new.py".into(), "x".into())]));
    }

    #[test]
    fn what_is_not_a_plain_small_text_file_is_named() {
        let a = folder();
        std::os::unix::fs::symlink("/etc/passwd", a.path().join("kernels/link.cpp")).unwrap();
        assert!(read(a.path()).unwrap_err().to_string().contains("kernels/link.cpp is a link"));
        let b = folder();
        std::fs::write(b.path().join("kernels/bad.cpp"), [0xff, 0xfe]).unwrap();
        assert!(read(b.path()).unwrap_err().to_string().contains("bad.cpp is not UTF-8"));
        let c = folder();
        std::fs::write(c.path().join("kernels/big.cpp"), vec![b'x'; (MAX_BYTES + 1) as usize]).unwrap();
        assert!(matches!(read(c.path()), Err(Error::TooLarge { .. })));
        let d = folder();
        for i in 0..MAX_FILES {
            std::fs::write(d.path().join(format!("f{i}.py")), "").unwrap();
        }
        assert!(matches!(read(d.path()), Err(Error::TooMany(_))));
        std::fs::remove_file(d.path().join("model_new.py")).unwrap();
        assert!(
            read(d.path()).unwrap_err().to_string().ends_with("has no model_new.py, the file that defines ModelNew")
        );
        std::fs::create_dir(d.path().join("best")).unwrap();
        std::fs::write(d.path().join("best/model_new.py"), "x").unwrap();
        let best = d.path().join("best");
        assert!(read(d.path()).unwrap_err().to_string().ends_with(&format!("did you mean {}?", best.display())));
    }

    #[test]
    fn a_file_name_that_leaves_the_folder_is_not_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut candidate = Candidate::default();
        candidate.files.insert("../outside".into(), "x".into());
        assert!(write(&folder.path().join("best"), &candidate).is_err());
    }
}
