"""The candidate's files as Python sees them: its modules, its printing, what it may not start.

Knows importlib and audit events. Must not know tensors. A candidate's module never shadows the standard library, torch,
NumPy or kernelfleet's own, whatever its files are called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from kernelfleet_recorder.session import ROOT, Session

PROTECTED = frozenset(sys.stdlib_module_names) | {
    "torch",
    "numpy",
    "kernelfleet_ext",
    "kernelfleet_recorder",
    "kernelfleet_zygote",
    "kernelfleet_host",
}
OTHER_COMPILERS = {
    "triton": "Triton kernels",
    "cupy": "CuPy kernels",
    "numba": "Numba kernels",
    "pycuda": "PyCUDA kernels",
    "tilelang": "TileLang kernels",
    "cutlass": "CUTLASS' Python kernels",
    "torch.utils.cpp_extension": "extensions against PyTorch's headers",
}
STDOUT_LIMIT = 4096
STARTS = frozenset(
    {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "os.spawn", "subprocess.Popen", "pty.spawn"}
)


class ForkRefused(PermissionError):
    """The candidate tried to start a process."""


class CandidateFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the candidate's own modules from its files."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds `a.b` as `a/b.py` or `a/b/__init__.py`, a folder without one as a namespace."""
        if fullname in OTHER_COMPILERS and self._asked_by_candidate():
            self._session.refuse(
                "not_expressible",
                f"{OTHER_COMPILERS[fullname]} ({fullname}) are not expressible as a plan (process path)",
                'write the kernel in kernels/x.cu as extern "C" and launch it with kf.load("kernels/x.cu")',
            )
        if fullname.partition(".")[0] in PROTECTED:
            return None
        base = fullname.replace(".", "/")
        files = self._session.files
        for name, package in ((f"{base}/__init__.py", True), (f"{base}.py", False)):
            if name in files:
                spec = importlib.util.spec_from_loader(fullname, self, origin=ROOT + name, is_package=package)
                if spec is not None:
                    spec.has_location = True
                return spec
        if any(name.startswith(base + "/") and name.endswith(".py") for name in files):
            spec = importlib.machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [ROOT + base]
            return spec
        return None

    def _asked_by_candidate(self) -> bool:
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if "importlib" not in name and name != __file__:
                return bool(name.startswith(ROOT))
            frame = frame.f_back
        return False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """The usual module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Runs the file."""
        spec = module.__spec__
        assert spec is not None and spec.origin is not None
        exec(compile_file(self._session, spec.origin.removeprefix(ROOT)), module.__dict__)

    def get_source(self, fullname: str) -> str:
        """The text of a module, for tracebacks."""
        spec = self.find_spec(fullname)
        return "" if spec is None or spec.origin is None else self._session.files[spec.origin.removeprefix(ROOT)]


def compile_file(session: Session, name: str) -> Any:
    """Compiles one of the candidate's files under a name that places and tracebacks recognise."""
    return compile(session.files[name], ROOT + name, "exec", dont_inherit=True)


def install(session: Session) -> CandidateFinder:
    """Makes the candidate's modules importable and everything around them not: no script folder, no current folder."""
    sys.dont_write_bytecode = True
    keep = ("lib/python", "lib64/python", "dist-packages", "site-packages", ".zip")
    sys.path[:] = [folder for folder in sys.path if any(part in folder for part in keep)]
    finder = CandidateFinder(session)
    sys.meta_path.insert(0, finder)
    for name, text in session.files.items():
        if name.endswith(".py"):
            linecache.cache[ROOT + name] = (len(text), None, text.splitlines(keepends=True), ROOT + name)
    sys.addaudithook(_audit)
    return finder


def _audit(event: str, _args: Any) -> None:
    if event in STARTS:
        raise ForkRefused(f"a recording may not start processes ({event})")


class Capped(io.TextIOBase):
    """Standard output that keeps its first 4 KiB and forgets the rest."""

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._left = STDOUT_LIMIT

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str) -> int:
        """Keeps what still fits."""
        if self._left > 0:
            part = str(text[: self._left])
            self._kept.append(part)
            self._left -= len(part)
        return len(text)

    def text(self) -> str:
        """What was kept, at most 4 KiB of UTF-8."""
        return "".join(self._kept).encode("utf-8", "replace")[:STDOUT_LIMIT].decode("utf-8", "ignore")
