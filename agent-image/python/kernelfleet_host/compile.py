"""The `torch.compile` baseline.

Knows the compiler's settings that a confined child needs. Must not know what the baseline is compared with.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, Timer
from typing import Any

import torch
from kernelfleet_zygote import Refused

from kernelfleet_host.reference import Reference
from kernelfleet_host.timing import CpuTimer

_KEY = 1


def warm() -> dict[str, Any]:
    """Imports what the first compile needs; for the zygote, before a fork. Nothing of a task is run.

    With `KERNELFLEET_COMPILER_CACHE` (the CPU device) it also finds the processor's vector instructions, which the
    compiler tries by building programs and loading each in a Python of its own: seconds that every fork would spend
    again, and every start of a judge. What was built and could be loaded is kept in that folder.
    """
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    start = time.monotonic()
    import torch._dynamo  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    # A digest of PyTorch's sources, which each compile asks for; the name is its own and may go.
    with contextlib.suppress(Exception):
        from torch._inductor.codecache import torch_key

        torch_key()
    folder = os.environ.get("KERNELFLEET_COMPILER_CACHE")
    if folder:
        from torch._inductor import cpu_vec_isa

        reap = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or the compiler's status is lost
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        try:
            os.makedirs(folder, exist_ok=True)
            tried = cpu_vec_isa.VecISA.check_build
            with _Loads() as loads:

                def begun(isa: Any, code: str) -> bool:
                    loads.begin()
                    return bool(tried(isa, code))

                cpu_vec_isa.VecISA.check_build = _remembering(begun, folder)  # type: ignore[assignment,method-assign]
                cpu_vec_isa.subprocess = loads  # type: ignore[assignment]
                try:
                    _try_beside(cpu_vec_isa)
                    cpu_vec_isa.pick_vec_isa()
                finally:
                    cpu_vec_isa.VecISA.check_build = tried  # type: ignore[method-assign]
                    cpu_vec_isa.subprocess = subprocess
        finally:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            signal.signal(signal.SIGCHLD, reap)
            os.kill(os.getpid(), signal.SIGCHLD)  # of children that ended meanwhile
    return {"seconds": time.monotonic() - start}


def _try_beside(instructions: Any) -> None:
    """Tries a processor's vector instructions beside each other, which `pick_vec_isa` would do one after another: each trial
    waits for a compiler. `instructions`: PyTorch's module, whose own names may go."""
    with contextlib.suppress(Exception):
        here = instructions.x86_isa_checker()
        known = [isa for isa in instructions.supported_vec_isa_list if all(f in here for f in str(isa).split())]
        with ThreadPoolExecutor(len(known)) as trials:
            list(trials.map(bool, known))


class _Loads:
    """In place of `subprocess` where PyTorch starts a Python for each library that is to be loaded: one that has PyTorch in it
    forks for each of them. What isn't such a command is run as it is."""

    DEVNULL = subprocess.DEVNULL
    # Its answers go where nothing else writes: a library may print as it is loaded.
    _PROGRAM = """
import ctypes, os, sys, torch
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
own = os.getpid()
for path in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            ctypes.CDLL(None).prctl(1, 9)  # it ends with this Python
            if os.getppid() != own:
                os._exit(1)
            ctypes.CDLL(path.rstrip())
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, path.rstrip(), file=answers, flush=True)
"""
    SECONDS = 30.0
    """How long the Python may take to start and to answer; what it doesn't answer is tried as PyTorch would."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._python: subprocess.Popen[str] | None = None

    def __enter__(self) -> _Loads:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._python is not None:
            self._python.kill()
            self._python.communicate()
            self._python = None

    def begin(self) -> None:
        """Starts the Python, if it isn't there: it is ready after about as long as a compiler takes."""
        with self._turn:
            if self._python is None:
                environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
                pipe = subprocess.PIPE
                command = [sys.executable, "-c", self._PROGRAM]
                with contextlib.suppress(OSError):
                    self._python = subprocess.Popen(
                        command, stdin=pipe, stdout=pipe, stderr=self.DEVNULL, env=environment, text=True
                    )

    def check_call(self, command: list[str], **options: Any) -> int:
        """`subprocess.check_call`; raises `CalledProcessError` where the library can't be loaded."""
        named = re.search(r'LoadLibrary\("(/[^"\n]+)"\)', command[-1])
        status = self._status(named[1]) if named else None
        if status is None:
            return subprocess.check_call(command, **options)
        if status:
            raise subprocess.CalledProcessError(status, command)
        return 0

    def _status(self, path: str) -> int | None:
        """Of the fork that loads a library; none where there is no Python to make it, or it doesn't do as it should."""
        with self._turn:
            if self._python is None or not self._python.stdin or not self._python.stdout:
                return None
            late = Timer(self.SECONDS, self._python.kill)
            late.start()
            try:
                self._python.stdin.write(path + "\n")
                self._python.stdin.flush()
                status, of = self._python.stdout.readline().rstrip("\n").split(" ", 1)
                if of == path:
                    return int(status)
            except (OSError, ValueError):
                pass
            finally:
                late.cancel()
            self._end()
        return None


def _remembering(tried: Callable[[Any, str], bool], folder: str) -> Callable[[Any, str], bool]:
    """`VecISA.check_build` that leaves an empty file in `folder` for what could be loaded, and doesn't try that again.

    What failed may have failed for want of room or time: it is tried by everybody.
    """
    try:
        from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint
    except ImportError:  # it is PyTorch's own and may go
        return tried

    def check_build(isa: Any, code: str) -> bool:
        key = repr((code, _get_isa_dry_compile_fingerprint(isa._arch_flags), torch.__file__))
        note = os.path.join(folder, f"loads-{hashlib.sha256(key.encode()).hexdigest()[:32]}")
        if os.path.exists(note):
            return True
        loads = tried(isa, code)
        if loads:
            with contextlib.suppress(OSError), open(note, "w"):
                pass
        return loads

    return check_build


def _populate(artifacts: bytes) -> None:
    """`torch.compiler.load_cache_artifacts` but for which of a kernel's forms was the fastest: each host tries that itself, as one
    trial beside others' work would otherwise be every later baseline's."""
    from torch.compiler._cache import CacheArtifactManager

    found = CacheArtifactManager.deserialize(artifacts)
    if found is not None:
        found.pop("autotune", None)
        CacheArtifactManager.populate_caches(found)


def _hits() -> int:
    """Graphs that this process has found instead of compiling them; none where PyTorch doesn't count them so any more."""
    try:
        from torch._dynamo.utils import counters

        return int(counters["inductor"]["fxgraph_cache_hit"])
    except (ImportError, LookupError, TypeError, ValueError):
        return 0


class Compiled:
    """A reference compiled in the default mode; compiles on the first call.

    `artifacts`: what `torch.compiler.save_cache_artifacts` gave an earlier host of the same task, versions and device.
    """

    def __init__(self, reference: Reference, artifacts: bytes | None = None) -> None:
        self.reference = reference
        self._artifacts = artifacts
        self._used = False
        self._call: Any = None
        self.seconds = 0.0
        self._failed: Refused | None = None

    def _prepare(self, index: int) -> None:
        if self._failed is not None:
            raise self._failed
        reference = self.reference
        cache = os.path.join(os.getcwd(), "compile")
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(cache, "inductor")
        os.environ["TRITON_CACHE_DIR"] = os.path.join(cache, "triton")
        os.environ.setdefault("USER", "kernelfleet")
        start = time.monotonic()
        try:
            import torch._dynamo as dynamo
            import torch._inductor.config as inductor

            inductor.compile_threads = 1
            # Made for this process alone they cost more than they save.
            inductor.cpp_cache_precompile_headers = False
            dynamo.reset()
            if self._artifacts is not None:
                with contextlib.suppress(Exception):  # it is compiled as if there were none
                    _populate(self._artifacts)
            hits = _hits()
            call = torch.compile(reference.ready())
            with torch.no_grad():
                call(*reference._fresh_inputs(reference.slot(index)))
            reference._sync()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self._failed = Refused("compile_failed", f"torch.compile: {text}"[:4000])
            raise self._failed from error
        finally:
            reference._restore_state()
        self.seconds = time.monotonic() - start
        self._used = _hits() > hits
        self._call = call

    def artifacts(self) -> bytes | None:
        """What a later host needs not to compile again; `None` where it was found so already, or nothing can be kept."""
        if self._call is None or self._used:
            return None
        with contextlib.suppress(Exception):
            saved = torch.compiler.save_cache_artifacts()
            if saved is not None:
                return saved[0]
        return None

    def timed(self, indices: list[int]) -> dict[str, Any]:
        """Times like `eager`'s."""
        reference = self.reference
        reference.ready()
        if not indices:
            return {"time_us": [], "compile_seconds": self.seconds}
        for index in indices:
            reference.drawn(index)
        if self._call is None:
            self._prepare(indices[0])
        model = reference._model()
        times = []
        graph = False
        for index in indices:
            slot = reference.slot(index)
            if isinstance(reference.timer(), CpuTimer):
                times.append(reference._run_cpu(slot, self._call, _KEY))
            else:
                took, graph = reference._run_cuda(slot, self._call, "compile")
                times.append(took)
        del model
        short = "compile" in reference.short
        return {"time_us": times, "compile_seconds": self.seconds, "graph": graph, "short": short}
