//! The file tree of a sandbox, in a mount namespace of its own: what is not put there does not exist.
//!
//! Knows mounts. Must not know what runs on them. Everything that can be written lies on one file system in memory
//! of bounded size, so that a full disk is the sandbox's own, and all of it goes with the last process.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::wire::Settings;

pub const WORKSPACE: &str = "/workspace";
/// The folder of a workspace whose files ask the desk.
pub const SEALED: &str = "utils";
pub const HOME: &str = "/home/agent";
pub const SOCKET: &str = "/run/kernelfleet.sock";
/// Folders that can be written, with their modes.
const WRITABLE: [(&str, u32); 4] = [(WORKSPACE, 0o755), (HOME, 0o755), ("/tmp", 0o1777), ("/dev/shm", 0o1777)];
pub const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];
/// Facts of the host that no command has a use for.
const HIDDEN: [&str; 7] = [
    "/proc/cmdline",
    "/proc/kallsyms",
    "/proc/kcore",
    "/proc/keys",
    "/proc/key-users",
    "/proc/kmsg",
    "/proc/timer_list",
];
/// What any program needs to start and to find its libraries.
pub const SYSTEM: [&str; 9] = [
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/ld.so.conf",
    "/etc/ld.so.conf.d",
    "/etc/alternatives",
];

/// What commands may write, as Landlock is told.
pub fn writable() -> Vec<PathBuf> {
    WRITABLE.iter().map(|w| w.0).chain(DEVICES).map(PathBuf::from).collect()
}

fn at<T>(what: &str, path: &Path, done: Result<T, impl Into<io::Error>>) -> io::Result<T> {
    done.map_err(|e| io::Error::other(format!("{what} {}: {}", path.display(), e.into())))
}

/// Makes the tree on `settings.folder` and moves into it for good. `user` is who will live there. As long as somebody
/// holds what it returns, the files of the tree are not freed.
pub fn enter(settings: &Settings, user: (u32, u32)) -> io::Result<OwnedFd> {
    const NONE: Option<&str> = None;
    let root = settings.folder.canonicalize()?;
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    // Nothing that is mounted here shows outside.
    at("to make private", Path::new("/"), mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE))?;
    at("to mount", &root, mount(Some("tmpfs"), &root, Some("tmpfs"), safe, Some("size=1m,mode=755")))?;
    let inside = |path: &str| root.join(path.trim_start_matches('/'));

    let disk = inside("/.disk");
    fs::create_dir(&disk)?;
    let size = format!("size={},nr_inodes={},mode=711", settings.bounds.disk, settings.bounds.files);
    at("to mount", &disk, mount(Some("tmpfs"), &disk, Some("tmpfs"), safe, Some(size.as_str())))?;
    for (path, mode) in WRITABLE {
        let folder = disk.join(path.trim_start_matches('/').replace('/', "-"));
        fs::create_dir(&folder)?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(mode))?;
        chown(&folder, Some(user.0), Some(user.1))?;
        bind(&folder, &inside(path))?;
    }
    if let Some(sealed) = &settings.sealed {
        let target = inside(WORKSPACE).join(SEALED);
        bind(sealed, &target)?;
        at("to protect", &target, protect(&target))?;
    }
    let hold = fs::OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(&disk)?.into();
    at("to unmount", &disk, umount2(&disk, MntFlags::MNT_DETACH))?;
    fs::remove_dir(&disk)?;
    // After the folders that can be written, since a toolchain may lie in what is one of them here.
    let mut bound: Vec<PathBuf> = Vec::new();
    let mut trees: Vec<&Path> =
        SYSTEM.iter().map(Path::new).chain(settings.read.iter().map(PathBuf::as_path)).collect();
    trees.sort_by_key(|p| p.components().count());
    for given in trees {
        let Ok(real) = given.canonicalize() else { continue };
        // A link of the system is a link here too; what it leads to is bound where it is.
        for path in [real.as_path(), given] {
            if bound.iter().any(|b| path.starts_with(b)) {
                continue;
            }
            let target = root.join(path.strip_prefix("/").unwrap_or(path));
            if path != real && SYSTEM.iter().any(|s| Path::new(s) == path) {
                if let Some(parent) = target.parent() {
                    fs::create_dir_all(parent)?;
                }
                at("to link", &target, symlink(&real, &target))?;
            } else {
                bind(&real, &target)?;
                at("to protect", &target, protect(&target))?;
            }
            bound.push(path.to_owned());
        }
    }
    for device in DEVICES {
        bind(Path::new(device), &inside(device))?;
    }
    for (name, target) in [("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")] {
        symlink(format!("/proc/self/fd{target}"), inside("/dev").join(name))?;
    }

    fs::create_dir(inside("/var"))?;
    symlink("/tmp", inside("/var/tmp"))?;

    fs::create_dir_all(inside("/run"))?;
    if let Some(socket) = &settings.socket {
        at("to bind", socket, bind(socket, &inside(SOCKET)))?;
    }
    fs::create_dir_all(inside("/etc"))?;
    let (uid, gid) = user;
    let passwd = format!("root:x:0:0:root:/:/bin/false\nagent:x:{uid}:{gid}:agent:{HOME}:/bin/bash\n");
    fs::write(inside("/etc/passwd"), passwd)?;
    fs::write(inside("/etc/group"), format!("root:x:0:\nagent:x:{gid}:\n"))?;
    fs::write(inside("/etc/hosts"), "127.0.0.1 localhost\n")?;

    fs::create_dir_all(inside("/proc"))?;
    let quiet = safe | MsFlags::MS_NOEXEC;
    at("to mount", Path::new("/proc"), mount(Some("proc"), &inside("/proc"), Some("proc"), quiet, NONE))?;
    for path in HIDDEN {
        let (hidden, null) = (inside(path), inside("/dev/null"));
        if hidden.exists() {
            at("to hide", &hidden, mount(Some(&null), &hidden, NONE, MsFlags::MS_BIND, NONE))?;
        }
    }
    let fixed = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY | safe;
    at("to protect", &root, mount(NONE, &root, NONE, fixed, NONE))?;

    std::env::set_current_dir(&root)?;
    at("to move into", &root, nix::unistd::pivot_root(".", "."))?;
    at("to leave", Path::new("/"), umount2(".", MntFlags::MNT_DETACH))?;
    std::env::set_current_dir("/")?;
    Ok(hold)
}

/// Shows a file or a folder of the host at `target`, with all that is mounted on it.
fn bind(source: &Path, target: &Path) -> io::Result<()> {
    if source.is_dir() {
        fs::create_dir_all(target)?;
    } else {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::File::create(target)?;
    }
    at("to bind", source, mount(Some(source), target, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>))
}

/// Makes a tree read-only, with all that is mounted on it.
fn protect(target: &Path) -> io::Result<()> {
    let path = CString::new(target.as_os_str().as_bytes())?;
    let attributes = libc::mount_attr {
        attr_set: libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NODEV,
        attr_clr: 0,
        propagation: 0,
        userns_fd: 0,
    };
    // SAFETY: `path` ends in a zero byte and `attributes` has the size that is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            path.as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
