"""`python -m kernelfleet_host`: the host zygote on descriptor 3.

Knows the two kinds of children. Must not run anything of a task itself.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._dynamo  # noqa: F401  # a run on meta tensors does, which would cost each host a second
from kernelfleet_zygote import Channel, Start, serve

from kernelfleet_host.compile import warm
from kernelfleet_host.helper import serve_helper
from kernelfleet_host.session import serve_session


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
