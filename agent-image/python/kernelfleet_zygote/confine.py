"""Confinement of a freshly forked child, before it meets anything hostile.

Knows the `confine` record of `docs/interfaces.md` and the kernel interfaces for it (Landlock and seccomp through
ctypes, nothing to install). Must not know what the child does afterwards. Steps run in a fixed order; a step that the
kernel or missing rights don't allow is left out of the report instead of raising, since the supervisor decides what
isolation it accepts. A malformed record raises: nothing hostile may run then.
"""

from __future__ import annotations

import base64
import ctypes
import os
import resource
import signal
import stat
import struct
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2

SYS_LANDLOCK_CREATE_RULESET = 444  # the same numbers on every architecture
SYS_LANDLOCK_ADD_RULE = 445
SYS_LANDLOCK_RESTRICT_SELF = 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1

FS_EXECUTE, FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
FS_REFER, FS_TRUNCATE, FS_IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FS_ALL_V1 = (1 << 13) - 1
FS_READ = FS_EXECUTE | FS_READ_FILE | FS_READ_DIR
FS_FILE = FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV
NET_ALL = 0b11  # bind and connect of TCP
SCOPE_ALL = 0b11  # abstract Unix sockets, signals

LIMITS = {
    "as": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
    "nproc": resource.RLIMIT_NPROC,
    "nofile": resource.RLIMIT_NOFILE,
    "cpu": resource.RLIMIT_CPU,
    "core": resource.RLIMIT_CORE,
}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_libc.syscall.restype = ctypes.c_long


def _prctl(option: int, a: int = 0, b: int = 0) -> bool:
    return int(_libc.prctl(option, a, b, 0, 0)) == 0


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends. A change of user undoes it: ask again after one."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def close_others(keep: int = 3) -> None:
    """Closes every descriptor but `keep`; 0, 1 and 2 become /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    # Never the limit alone: a descriptor opened before the limit was lowered stays open above it.
    os.closerange(3, keep)
    os.closerange(keep + 1, 2**31 - 1)


def apply_limits(limits: dict[str, int | None]) -> bool:
    """Sets each limit (soft and hard, bytes, seconds or counts); one above the hard limit stops there."""
    held = True
    for name, value in limits.items():
        which = LIMITS[name]
        if value is None:
            continue
        hard = resource.getrlimit(which)[1]
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(which, (value, value))
        except (OSError, ValueError):
            held = False
    return held


def change_user(uid: int | None, gid: int | None) -> bool:
    """Gives up groups and user for good: real, effective and saved. Without root capabilities go with them."""
    if uid is None and gid is None:
        return False
    try:
        if gid is not None:
            os.setgroups([])
            os.setresgid(gid, gid, gid)
        if uid is not None:
            os.setresuid(uid, uid, uid)
    except OSError:
        return False
    return uid is not None and os.getresuid() == (uid, uid, uid) and uid != 0


def landlock_version() -> int:
    """ABI version of the kernel's Landlock, 0 if it has none."""
    flag = LANDLOCK_CREATE_RULESET_VERSION
    version = _libc.syscall(SYS_LANDLOCK_CREATE_RULESET, ctypes.c_void_p(None), ctypes.c_size_t(0), ctypes.c_uint(flag))
    return max(0, int(version))


def apply_landlock(read: Iterable[str], write: Iterable[str]) -> bool:
    """Forbids all files but those beneath `read` (read, execute) and `write` (everything); TCP and scopes as known.

    Paths that don't exist grant nothing. False when the kernel has no Landlock. Needs `no_new_privs`.
    """
    version = landlock_version()
    if version == 0:
        return False
    handled = FS_ALL_V1
    if version >= 2:
        handled |= FS_REFER
    if version >= 3:
        handled |= FS_TRUNCATE
    if version >= 5:
        handled |= FS_IOCTL_DEV
    attributes = struct.pack("<Q", handled)
    if version >= 4:
        attributes += struct.pack("<Q", NET_ALL)
    if version >= 6:
        attributes += struct.pack("<Q", SCOPE_ALL)
    ruleset = _libc.syscall(
        SYS_LANDLOCK_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    if ruleset < 0:
        return False
    try:
        for paths, access in ((read, FS_READ), (write, handled)):
            for path in paths:
                if not _allow(ruleset, path, access & handled):
                    return False
        return int(_libc.syscall(SYS_LANDLOCK_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> bool:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            access &= FS_FILE
        rule = struct.pack("<Qi", access, parent)  # packed in the kernel's header too
        kind, text = ctypes.c_int(LANDLOCK_RULE_PATH_BENEATH), ctypes.c_char_p(rule)
        return int(_libc.syscall(SYS_LANDLOCK_ADD_RULE, ctypes.c_int(ruleset), kind, text, ctypes.c_uint(0))) == 0
    finally:
        os.close(parent)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def apply_seccomp(program: bytes) -> bool:
    """Loads a BPF program (array of `struct sock_filter`, 8 bytes each). `ValueError` when it can't be one."""
    if not program or len(program) % 8 or len(program) // 8 > 4096:
        raise ValueError(f"a BPF program of {len(program)} bytes")
    loaded = _Program(len(program) // 8, program)
    return _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(loaded))


def confine(record: dict[str, Any], keep: int = 3) -> list[str]:
    """Applies a confine record in its fixed order; what held of `users`, `landlock`, `seccomp`, `limits`.

    Raises `KeyError`, `TypeError` or `ValueError` for a malformed record.
    """
    program = base64.b64decode(record["seccomp"], validate=True) if record.get("seccomp") else None
    read, write = [str(p) for p in record.get("read") or ()], [str(p) for p in record.get("write") or ()]
    limits = dict(record.get("limits") or {})
    held = []

    parent = os.getppid()
    os.setsid()
    die_with_parent()
    close_others(keep)
    limited = apply_limits(limits)
    if change_user(record.get("uid"), record.get("gid")):
        held.append("users")
    die_with_parent()
    if os.getppid() != parent:
        os._exit(0)  # the parent ended before the kernel was asked to tell
    no_new_privileges = _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_DUMPABLE, 0)
    if no_new_privileges and apply_landlock(read, write):
        held.append("landlock")
    if no_new_privileges and program is not None and apply_seccomp(program):
        held.append("seccomp")
    if limited and limits:
        held.append("limits")
    return held
