"""`python -m kernelfleet_process`: a zygote that has imported torch and its extension builder, nothing of a candidate.

Knows `hello`, `load`, `run`, `ready`, `trace` and `close`. The native part is loaded in each child.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import platform
import sys
import sysconfig

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would start at import, before the fork
gc.disable()  # until it serves

import torch  # noqa: E402
import torch.utils.cpp_extension  # noqa: E402
from kernelfleet_zygote import Channel, Start, serve, serve_ops  # noqa: E402

from kernelfleet_process.candidate import Candidate  # noqa: E402


def child_main(channel: Channel, start: Start) -> None:
    """Serves one candidate: a second one would find what the first has left."""
    _keep_said()
    torch.set_num_threads(start.threads)
    candidate = Candidate(channel)
    own = {"load": candidate.load, "run": candidate.run, "ready": candidate.ready, "trace": candidate.trace}
    serve_ops(channel, {"hello": start.hello, **own}, awake=("ready",))


def _keep_said() -> None:
    """Standard error goes to a file in this child's folder: the judge reads its end when the process ends or fails."""
    fd = os.open("stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 2)
    os.close(fd)
    faulthandler.enable()


def facts() -> dict[str, str]:
    """What the judge builds extensions with."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torch_root": os.path.dirname(os.path.abspath(torch.__file__)),
        "python_include": sysconfig.get_paths()["include"],
        "abi": str(int(torch.compiled_with_cxx11_abi())),
    }


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    serve(child_main, facts())
