"""The ops of a reference host, from messages to `Reference` and back.

Knows the table "Reference host" of `docs/interfaces.md`. Must not know how anything is done.
"""

from __future__ import annotations

import gc
import hashlib
import os
from typing import Any

import torch
from kernelfleet_zygote import Channel, Refused, Start, serve_ops
from kernelfleet_zygote.wire import Memory, close_all

from kernelfleet_host import buffers
from kernelfleet_host.check import check
from kernelfleet_host.compile import Compiled
from kernelfleet_host.handover import Handover
from kernelfleet_host.profile import launches
from kernelfleet_host.reference import Reference
from kernelfleet_host.task import lacks_memory
from kernelfleet_host.timing import copy_rate

Message = dict[str, Any]
Reply = Message | tuple[Message, list[int]]
MAX_FDS = 240


class Session:
    """One task after another on one channel; `open` replaces what was open."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self._reference: Reference | None = None
        self._compiled: Compiled | None = None
        self._handover: Handover | None = None
        self._floor: Message | None = None
        self._exported = False
        self._estimated: tuple[Any, Reference] | None = None

    def handlers(self) -> dict[str, Any]:
        """Handlers by op."""
        ops = {
            "open": self.open,
            "estimate": self.estimate,
            "trace": self.trace,
            "state": self.state,
            "parameters": self.parameters,
            "inputs": self.inputs,
            "draw": self.draw,
            "eager": self.eager,
            "compare": self.compare,
            "poison": self.poison,
            "profile": self.profile,
            "floor": self.floor,
            "check": self.check,
            "flush": self.flush,
            "share": self.share,
            "release": self.release,
            "snapshot": self.snapshot,
            "returned": self.returned,
        }

        def plain(function: Any) -> Any:
            def handle(request: Message, fds: list[int]) -> Reply:
                close_all(fds)
                result: Reply = guarded(lambda: function(request))
                return result

            return handle

        return {
            "hello": self.start.hello,
            "bind": lambda request, fds: guarded(lambda: self.bind(request, fds)),
            "compile": lambda request, fds: guarded(lambda: self.compile(request, fds)),
            "hash": lambda request, fds: guarded(lambda: self.hash(request, fds)),
            **{name: plain(function) for name, function in ops.items()},
        }

    @property
    def reference(self) -> Reference:
        """What is open."""
        if self._reference is None:
            raise Refused("malformed", "no task is open")
        return self._reference

    def _opened(self, request: Message) -> Reference:
        """The request's task; one that was just estimated isn't traced again."""
        device = str(request.get("device", "cpu"))
        threads = int(request.get("threads") or self.start.threads)
        slots = int(request.get("slots") or 1)
        key = (
            text(request, "source"),
            str(request.get("path") or "task.py"),
            device,
            request.get("precision"),
            threads,
        )
        if self._estimated is not None and self._estimated[0] == key:
            reference = self._estimated[1]
            reference.count = 1 if device == "cpu" else max(1, slots)
            return reference
        reference = Reference(key[0], key[1], device, str(request.get("precision", "reference")), threads, slots)
        self._estimated = (key, reference)
        return reference

    def open(self, request: Message) -> Reply:
        """`open`."""
        if self._reference is not None:
            self._reference.close()
        if self._handover is not None:
            self._handover.close()
        self._handover = None
        self._reference = None
        self._compiled = None
        self._exported = False
        reference = self._reference = self._opened(request)
        self._estimated = None
        return {
            "inputs": reference.inputs.wire(),
            "init": reference.init,
            "state": [{"name": name, **meta.wire()} for name, meta in reference.state_metas.items()],
            "outputs": {"structure": reference.structure, "tensors": [m.wire() for m in reference.output_metas]},
        }

    def estimate(self, request: Message) -> Reply:
        """`estimate`: of the request's task, or of the open one where it has no source."""
        return (self._opened(request) if "source" in request else self.reference).estimate()

    def trace(self, _request: Message) -> Reply:
        """`trace`."""
        return dict(self.reference.require_trace().graph)

    def state(self, request: Message) -> Reply:
        """`state`."""
        shared, records = self.reference.state_buffer(integer(request, "seed"))
        return {"tensors": records, "bytes": shared.size, "fd": 0}, [shared.export()]

    def parameters(self, request: Message) -> Reply:
        """`parameters`: tensors and descriptors with the first call, and whenever `first` asks for those from there."""
        reference = self.reference
        reference.use(integer(request, "seed"))
        if self._exported and "first" not in request:
            return {}
        self._exported = True
        first = int(request.get("first") or 0)
        exports = reference.state_exports()
        records: list[Message] = []
        fds: list[int] = []
        for i, ((name, meta), shared) in enumerate(zip(reference.state_metas.items(), exports, strict=True)):
            record: Message = {"name": name, **meta.wire(), "offset": 0, "size": shared.size}
            if first <= i < first + MAX_FDS:
                record["fd"] = len(fds)
                fds.append(shared.export())
            records.append(record)
        return {"tensors": records}, fds

    def inputs(self, _request: Message) -> Reply:
        """`inputs`."""
        reference = self.reference
        slots = reference.slots()
        fds: list[int] = []
        records: list[Message] = []
        for number, slot in enumerate(slots):
            for i, (shared, meta) in enumerate(zip(slot.shared, reference.inputs.metas, strict=True)):
                if shared is None or meta is None:
                    continue
                place = {"slot": number, "input": i, "offset": 0, "fd": len(fds), "size": shared.size}
                records.append({**meta.wire(), **place})
                fds.append(shared.export())
        if len(fds) > 250:
            close_all(fds)
            raise Refused("slots", f"{len(fds)} input buffers are more than a frame carries; ask for fewer slots")
        return {"tensors": records, "slots": len(slots)}, fds

    def draw(self, request: Message) -> Reply:
        """`draw`. Whether an untransformed set is finite is told by `check`; here it counts as finite, a mixed one too."""
        reference = self.reference
        transform = request.get("transform") or {"kind": "none"}
        kind = str(transform.get("kind", "none"))
        if "slots" in request:
            # Several at once: the device is waited for with the last.
            slots, seeds = listed(request, "slots"), listed(request, "seeds")
            for number, (index, seed) in enumerate(zip(slots, seeds, strict=True), 1):
                reference.draw(reference.slot(index), int(seed), kind, 1.0, wait=number == len(slots))
            return {}
        slot = reference.slot(request.get("slot", 0))
        applicable = reference.draw(slot, integer(request, "seed"), kind, float(transform.get("factor") or 1.0))
        finite = reference.all_finite(slot) if applicable and kind not in ("none", "mixed") else True
        return {"finite": finite, "applicable": applicable}

    def eager(self, request: Message) -> Reply:
        """`eager`."""
        return self.reference.timed(listed(request, "slots"))

    def profile(self, request: Message) -> Reply:
        """`profile`."""
        reference = self.reference
        slot = reference.drawn(integer(request, "slot"))
        return {"launches": launches(lambda: reference.forward(slot), reference.device)}

    def bind(self, request: Message, fds: list[int]) -> Reply:
        """`bind`."""
        try:
            self.reference.bind(
                list(request.get("outputs") or []),
                request.get("structure"),
                fds,
                list(request.get("workspaces") or []),
            )
        finally:
            close_all(fds)
        return {}

    def compare(self, request: Message) -> Reply:
        """`compare`."""
        reference = self.reference
        slot, tolerance = reference.slot(request.get("slot", 0)), str(request.get("tolerance", "contract"))
        if reference.device == "cpu" or reference.many_slabs():
            return reference.compare_bound(slot, tolerance)
        # What is left for the CPU is a few thousand figures: threads of a library, which share even a square root of so few,
        # wait for each other beside compilers.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return reference.compare_bound(slot, tolerance)
        finally:
            torch.set_num_threads(threads)

    def poison(self, request: Message) -> Reply:
        """`poison`."""
        self.reference.poison(integer(request, "seed"))
        return {}

    def flush(self, _request: Message) -> Reply:
        """`flush`."""
        self.reference.timer().flush()
        return {}

    def share(self, request: Message) -> Reply:
        """`share`: once; asked again it gives new descriptors of the same memory."""
        if self._handover is None:
            self._handover = Handover(self.reference, integer(request, "bytes"))
        records, fds = self._handover.exports()
        return {"shared": records}, fds

    def release(self, request: Message) -> Reply:
        """`release`."""
        self.handover.release(integer(request, "slot"))
        return {}

    def snapshot(self, request: Message) -> Reply:
        """`snapshot`."""
        self.handover.snapshot(integer(request, "slot"), listed(request, "outputs"), request.get("structure"))
        return {}

    def returned(self, request: Message) -> Reply:
        """`returned`. Whether a further call on the same inputs is asked for the same: not where `forward` writes them."""
        self.handover.returned(integer(request, "slot"))
        return {"repeats": not self.reference.written_inputs}

    @property
    def handover(self) -> Handover:
        """What is shared with a candidate's own process."""
        if self._handover is None:
            raise Refused("malformed", "nothing is shared")
        return self._handover

    def compile(self, request: Message, fds: list[int]) -> Reply:
        """`compile`."""
        try:
            if self._compiled is None:
                size = integer(request, "artifacts") if fds else 0
                self._compiled = Compiled(self.reference, os.pread(fds[0], size, 0) if fds else None)
        finally:
            close_all(fds)
        reply = self._compiled.timed(listed(request, "slots"))
        made = self._compiled.artifacts() if request.get("keep") is True else None
        if made is None:
            return reply
        memory = Memory.of("artifacts", made)
        return {**reply, "artifacts": len(made)}, [memory.fd]

    def floor(self, _request: Message) -> Reply:
        """`floor`: `copy_gbps` counts bytes read and written."""
        if self._floor is None:
            reference = self.reference
            size = reference.timer().cache_bytes
            self._floor = {"copy_gbps": copy_rate(reference.device, size), "l2_bytes": size}
        return self._floor

    def check(self, request: Message) -> Reply:
        """`check`."""
        seconds = float(request.get("seconds") or 300.0)
        try:
            return check(self.reference, max(2, int(request.get("inputs") or 5)), seconds)
        finally:
            if self.reference.device == "cuda":  # what a check held is the runner's next
                gc.collect()
                torch.cuda.empty_cache()

    def hash(self, request: Message, fds: list[int]) -> Reply:
        """`hash`."""
        device = self.reference.device if self._reference is not None else "cpu"
        secret = bool(request.get("secret"))
        result: list[Any] = []
        try:
            sizes = [int(f["bytes"] if isinstance(f, dict) else f) for f in request.get("fds") or []]
            if len(sizes) != len(fds):
                raise Refused("malformed", f"{len(sizes)} sizes for {len(fds)} descriptors")
            for fd, size in zip(fds, sizes, strict=True):
                foreign = buffers.adopt(os.dup(fd), size, device)
                try:
                    if secret:
                        result.append(self.reference.sums(foreign))
                        continue
                    digest = hashlib.sha256()
                    for start in range(0, size, 64 << 20):
                        part = foreign.read(start, min(64 << 20, size - start)).cpu()
                        digest.update(memoryview(part.numpy()))  # type: ignore[arg-type]
                    result.append(digest.hexdigest())
                finally:
                    foreign.close()
        finally:
            close_all(fds)
        return {"sums" if secret else "sha256": result}


def guarded(function: Any) -> Any:
    """A lack of memory and errors of the device get their codes."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if lacks_memory(error):
            raise Refused("memory", f"out of memory: {error}"[:2000]) from error
        if "CUDA error" in str(error):
            raise Refused("cuda", str(error)[:2000]) from error
        raise


def integer(request: Message, name: str) -> int:
    """A required integer."""
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused("malformed", f"{name} is an integer, not {value!r}")
    return value & (2**63 - 1)


def text(request: Message, name: str) -> str:
    """A required text."""
    value = request.get(name)
    if not isinstance(value, str):
        raise Refused("malformed", f"{name} is a text")
    return value


def listed(request: Message, name: str) -> list[Any]:
    """A required list."""
    value = request.get(name)
    if not isinstance(value, list):
        raise Refused("malformed", f"{name} is a list")
    return value


def serve_session(channel: Channel, start: Start) -> None:
    """Runs a reference host until its channel closes."""
    torch.set_num_threads(start.threads)
    serve_ops(channel, Session(start).handlers(), awake=("release",))
