"""`python -m kernelfleet_host.observe`: a reference host under a profiler, on descriptor 3.

Knows the start and the stop of the profiler. Must not know which profiler it is. What started it has confined it.
"""

from __future__ import annotations

from typing import Any

import torch
from kernelfleet_zygote import Channel, Start, serve_ops
from kernelfleet_zygote.wire import Message, close_all

from kernelfleet_host.session import Session, guarded, integer


def observe(session: Session) -> Any:
    """Handler of the op `observe`: one call of the reference on a drawn slot, seen by the profiler."""

    def handle(request: Message, fds: list[int]) -> Message:
        close_all(fds)
        reference = session.reference
        reference.use(integer(request, "seed"))
        slot = reference.drawn(integer(request, "slot"))

        def call() -> Message:
            with torch.no_grad():
                reference.forward(slot)
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                reference.forward(slot)
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
            return {}

        reply: Message = guarded(call)
        return reply

    return handle


if __name__ == "__main__":
    start = Start([], max(1, torch.get_num_threads()))
    session = Session(start)
    serve_ops(Channel.from_fd(3), {**session.handlers(), "observe": observe(session)})
