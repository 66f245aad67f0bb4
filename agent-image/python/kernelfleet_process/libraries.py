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


def watch(root: str, note: Callable[[str], None]) -> None:
    """Calls `note` with each library outside of `root` that is opened or asked for a function from now on, for good.

    What is opened below `root` is the candidate's own build. `None` as a library is all that this process has loaded,
    PyTorch's own among them.
    """
    inside = os.path.realpath(root) + os.sep

    def own(name: Any) -> bool:
        return isinstance(name, str) and os.path.realpath(name).startswith(inside)

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
