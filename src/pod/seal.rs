//! `kernelfleet seal`: the tools of a workspace, laid where its sandbox can read them and never write.
//!
//! Knows files and their modes. Must not know what the tools do.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::agent::kit::UTILS;

/// Lays the files of `utils/` into a folder that exists. A second time it finds them as they are.
///
/// # Errors
/// Names the file that can't be written.
pub fn seal(folder: &Path) -> io::Result<()> {
    for (name, text) in UTILS {
        let path = folder.join(name);
        let failed = |e: io::Error| io::Error::new(e.kind(), format!("{} can't be sealed: {e}", path.display()));
        if fs::read(&path).is_ok_and(|there| there == text.as_bytes()) {
            continue;
        }
        fs::write(&path, text).map_err(failed)?;
        let mode = if text.starts_with("#!") { 0o555 } else { 0o444 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tools_lie_there_for_reading_alone() {
        let folder = tempfile::tempdir().unwrap();
        seal(folder.path()).unwrap();
        seal(folder.path()).unwrap();
        for (name, text) in UTILS {
            let path = folder.path().join(name);
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o222, 0);
        }
        let missing = seal(&folder.path().join("none")).unwrap_err().to_string();
        assert!(missing.contains("can't be sealed"), "{missing}");
    }
}
