"""Libraries that a candidate's Python reaches by ctypes, past everything that is dispatched.

Knows Python's audit events. Must not know what becomes of what it notes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_MEMORY = {"ctypes.cdata": "from_address", "ctypes.string_at": "string_at", "ctypes.wstring_at": "wstring_at"}
"""Ways to read a tensor's memory that another library could work on."""


def mark(path: str) -> tuple[int, ...]:
    """What tells a file from one that was put in its place, or written anew."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def watch(builds: set[tuple[int, ...]], note: Callable[[str], None]) -> None:
    """Calls `note` with each library that isn't one of `builds` and is opened or asked for a function from now on, for good.

    `builds` are the marks of the candidate's own: a copy of another library in its folder is none. `None` as a library is all
    that this process has loaded, PyTorch's own among them.
    """

    def own(name: Any) -> bool:
        try:
            return isinstance(name, str) and mark(name) in builds
        except OSError:
            return False

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not event.startswith("ctypes."):
            return
        if event == "ctypes.dlopen" and not own(args[0]):
            note(f"ctypes.CDLL({args[0]!r})")
        elif event == "ctypes.dlsym" and not own(getattr(args[0], "_name", None)):
            note(f"{args[1]} by ctypes")
        elif event == "ctypes.dlsym/handle":
            note(f"{args[1]} by a library's handle")
        elif event in _MEMORY:
            note(f"ctypes' {_MEMORY[event]}")

    sys.addaudithook(hook)
