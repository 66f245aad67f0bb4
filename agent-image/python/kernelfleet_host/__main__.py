"""`python -m kernelfleet_host`: the host zygote on descriptor 3.

Knows the two kinds of children. Must not run anything of a task itself.
"""

from __future__ import annotations

import gc
import os
import sys

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
gc.disable()  # until it serves

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  # a run on meta tensors does, which would cost each host a second
from kernelfleet_zygote import Channel, Start, serve  # noqa: E402

from kernelfleet_host.compile import warm  # noqa: E402
from kernelfleet_host.helper import serve_helper  # noqa: E402
from kernelfleet_host.session import serve_session  # noqa: E402


def child(channel: Channel, start: Start) -> None:
    """A reference host, or the library helper of the CPU device."""
    if start.role == "helper":
        serve_helper(channel, start)
    else:
        serve_session(channel, start)


def versions() -> dict[str, str]:
    """What baselines and caches depend on."""
    found = {"python": sys.version.split()[0], "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


if __name__ == "__main__":
    serve(child, versions(), {"warm": warm})
