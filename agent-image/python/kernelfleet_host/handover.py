"""Hand-over of inputs and outputs between a reference host and a candidate's own process, both on one device.

Knows memory that both have mapped. Must not know what the candidate does with it. Inputs are copied to where the candidate
reads them just before a call; outputs are copied to where it can't reach them, and the supervisor's clock runs until that
copy is done: who answers before its work is done is found with what is there, or pays for the wait.
"""

from __future__ import annotations

from typing import Any

import torch

from kernelfleet_host import buffers
from kernelfleet_host.buffers import Shared
from kernelfleet_host.reference import Bound, Reference

# About 1 ms of the card's time before each call: between calls of a process it would lower its clocks.
_AWAKE_CYCLES = 2_000_000


class Copied:
    """A snapshot of an output as a buffer that can be compared."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.size = data.numel()

    def read(self, offset: int, count: int) -> torch.Tensor:
        """The bytes."""
        return self.data[offset : offset + count]

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Nobody reads what is written to a snapshot."""

    def close(self) -> None:
        """Freed with its last reader."""


class Handover:
    """The memory of one task's candidates: a pool that their tensors lie in, and one set of inputs."""

    def __init__(self, reference: Reference, size: int) -> None:
        self._reference = reference
        self._pool = buffers.share(size, reference.device)
        metas = reference.inputs.metas
        self._staged: list[Shared | None] = [
            buffers.share(m.span, reference.device) if m is not None else None for m in metas
        ]

    def exports(self) -> tuple[list[dict[str, Any]], list[int]]:
        """Records of the pool and of each input that is a tensor, and their descriptors in that order."""
        records: list[dict[str, Any]] = [{"fd": 0, "bytes": self._pool.size}]
        fds = [self._pool.export()]
        for number, (shared, meta) in enumerate(zip(self._staged, self._reference.inputs.metas, strict=True)):
            if shared is not None and meta is not None:
                records.append({"input": number, "fd": len(fds), "bytes": meta.span})
                fds.append(shared.export())
        return records, fds

    def release(self, index: int) -> None:
        """Copies the inputs of a slot to where the candidate reads them, and flushes the cache."""
        reference = self._reference
        slot = reference.drawn(index)
        if reference.device == "cuda":
            torch.cuda._sleep(_AWAKE_CYCLES)  # before the inputs are there: nobody is to have them earlier than must be
        self._copy(slot.shared, self._staged, range(len(self._staged)))
        reference.timer().flush()
        _wait(reference.device)

    def snapshot(self, index: int, outputs: list[dict[str, Any]], structure: Any) -> None:
        """Copies what the candidate has returned; the copies are what is bound."""
        reference = self._reference
        slot = reference.slot(index)
        reference.bind(outputs, structure, [], [], self._pool)
        within = sorted({b.input for b in reference.bound if b.input is not None})
        self._copy(self._staged, slot.shared, within)
        bound: list[Bound] = []
        for place in reference.bound:
            if place.foreign is not None:
                data = self._pool.base[place.offset : place.offset + place.meta.span].clone()
                place = Bound(place.meta, 0, Copied(data))
            bound.append(place)
        _wait(reference.device)
        reference.bound = bound

    def returned(self, index: int) -> None:
        """Copies the inputs as the candidate has left them, so that a change shows."""
        slot = self._reference.slot(index)
        self._copy(self._staged, slot.shared, range(len(self._staged)))
        _wait(self._reference.device)

    def _copy(self, source: Any, target: Any, which: Any) -> None:
        for i in which:
            meta = self._reference.inputs.metas[i]
            if source[i] is not None and target[i] is not None and meta is not None:
                target[i].base[: meta.span].copy_(source[i].base[: meta.span])

    def close(self) -> None:
        """Gives the memory back."""
        for shared in (self._pool, *self._staged):
            if shared is not None:
                shared.close()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
