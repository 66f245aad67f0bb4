"""`python -m kernelfleet_recorder`: a zygote that has imported torch, and forks a confined child for each recording.

Knows `hello`, `record` and `close`. Must not know candidates before it forks: the warm-up records a model of its own.
"""

from __future__ import annotations

import gc
import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a recorder never touches a GPU
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its threads would start at import, before the fork
gc.disable()  # until it serves

import platform  # noqa: E402

import torch  # noqa: E402
from kernelfleet_zygote import Channel, Start, serve, serve_ops  # noqa: E402
from kernelfleet_zygote.wire import Message  # noqa: E402

from kernelfleet_recorder.record import record  # noqa: E402
from kernelfleet_recorder.warm import warm  # noqa: E402


def child_main(channel: Channel, start: Start) -> None:
    """Serves one recording; a second one would find what the first candidate left."""
    torch.set_num_threads(start.threads)
    done = False

    def once(request: Message, fds: list[int]) -> tuple[Message, list[int]]:
        nonlocal done
        if done:
            raise RuntimeError("a recorder records once")
        done = True
        return record(request, fds)

    serve_ops(channel, {"hello": start.hello, "record": once})


def main() -> None:
    """Warms up and serves."""
    warm()
    serve(child_main, {"torch": torch.__version__, "python": platform.python_version()})


if __name__ == "__main__":
    main()
