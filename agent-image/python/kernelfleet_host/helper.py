"""The library helper of the CPU device: matrix products and convolutions of a plan on PyTorch's CPU library.

Knows library nodes of a plan and the buffers they name; never sees a task or a candidate's code, evaluates nothing
from the plan, and checks every extent again. Wire between runner and helper: `u32 LE node index`, answered by
`u32 LE status` (0 done, 1 no such library node, 2 the library failed).
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Any

import torch
from kernelfleet_zygote import Channel, Closed, Refused, Start
from kernelfleet_zygote.wire import close_all

from kernelfleet_host.tensors import DTYPES, Meta, view

Call = Callable[[], object]
DONE, NO_NODE, FAILED = (struct.pack("<I", n) for n in range(3))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Helper:
    """One loaded plan."""

    def __init__(self, plan: dict[str, Any], bases: list[torch.Tensor | None]) -> None:
        """`bases`: a uint8 tensor per buffer of the plan, None for buffers that no library node touches."""
        self.calls: dict[int, Call] = {}
        buffers = plan.get("buffers")
        if not isinstance(buffers, list) or len(buffers) != len(bases):
            raise Refused("malformed", "a buffer for each of the plan's is needed")
        for buffer, base in zip(buffers, bases, strict=True):
            if base is not None and base.numel() < int(buffer["bytes"]):
                raise Refused("bounds", "a buffer is smaller than the plan says")
        self._sizes = [int(b["bytes"]) for b in buffers]
        self._bases = bases
        for index, node in enumerate(plan.get("nodes") or []):
            if node.get("op") == "library":
                self.calls[index] = self._bind(node)

    def _tensor(self, record: Any) -> torch.Tensor:
        if not isinstance(record, dict):
            raise Refused("malformed", "a library node lacks a tensor")
        index = record.get("buffer")
        dtype = DTYPES.get(str(record.get("dtype")))
        if not isinstance(index, int) or not 0 <= index < len(self._bases) or dtype is None:
            raise Refused("malformed", "a tensor of a library node names no buffer or dtype")
        base = self._bases[index]
        if base is None:
            raise Refused("malformed", f"buffer {index} is needed by a library node and wasn't given")
        shape = tuple(int(n) for n in record["shape"])
        strides = tuple(int(n) for n in record["strides"])
        if len(shape) != len(strides):
            raise Refused("malformed", "strides don't fit the shape")
        return view(base[: self._sizes[index]], Meta(dtype, shape, strides), int(record.get("offset") or 0))

    def _bind(self, node: dict[str, Any]) -> Call:
        call = node.get("call")
        if call == "matmul":
            return self._matmul(node)
        if call == "conv":
            return self._conv(node)
        raise Refused("malformed", f"no library call {call!r}")

    def _matmul(self, node: dict[str, Any]) -> Call:
        a, b, out = self._tensor(node["a"]), self._tensor(node["b"]), self._tensor(node["out"])
        bias = self._tensor(node["bias"]) if node.get("bias") is not None else None
        same_dtype("matmul", a, b, out, bias)
        if not (a.dim() == b.dim() == out.dim() and a.dim() in (2, 3)):
            raise Refused("shape", "matmul takes matrices or batches of them")
        m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
        if b.shape[-2] != k or tuple(out.shape[-2:]) != (m, n) or not a.shape[:-2] == b.shape[:-2] == out.shape[:-2]:
            raise Refused("shape", f"matmul of {list(a.shape)} and {list(b.shape)} into {list(out.shape)}")
        if bias is not None and tuple(bias.shape) != (n,):
            raise Refused("shape", f"the bias has the shape {list(bias.shape)}, {[n]} is needed")
        if bias is None:
            mm = torch.mm if a.dim() == 2 else torch.bmm
            return lambda: mm(a, b, out=out)
        if a.dim() == 2:
            return lambda: torch.addmm(bias, a, b, out=out)
        return lambda: torch.baddbmm(bias, a, b, out=out)

    def _conv(self, node: dict[str, Any]) -> Call:
        x, weight, out = self._tensor(node["x"]), self._tensor(node["weight"]), self._tensor(node["out"])
        bias = self._tensor(node["bias"]) if node.get("bias") is not None else None
        same_dtype("conv", x, weight, out, bias)
        dims = x.dim() - 2
        if dims not in (1, 2, 3) or weight.dim() != x.dim() or out.dim() != x.dim():
            raise Refused("shape", "conv takes 1 to 3 dimensions besides batch and channels")
        lists = {}
        for name in ("stride", "padding", "dilation", "output_padding"):
            values = [int(v) for v in node.get(name) or []]
            if len(values) != dims or any(not 0 <= v <= 1 << 20 for v in values):
                raise Refused("shape", f"conv: {name} has {dims} values")
            lists[name] = values
        groups, transposed = int(node["groups"]), bool(node["transposed"])
        if groups < 1:
            raise Refused("shape", "conv: at least one group")
        arguments = (lists["stride"], lists["padding"], lists["dilation"], transposed, lists["output_padding"], groups)
        shape = torch.convolution(
            torch.empty(x.shape, dtype=x.dtype, device="meta"),
            torch.empty(weight.shape, dtype=x.dtype, device="meta"),
            torch.empty(bias.shape, dtype=x.dtype, device="meta") if bias is not None else None,
            *arguments,
        ).shape
        if shape != out.shape:
            raise Refused("shape", f"conv gives {list(shape)}, the plan's output is {list(out.shape)}")
        return lambda: out.copy_(torch.convolution(x, weight, bias, *arguments))

    def run(self, index: int) -> bytes:
        """Runs one node; the status."""
        call = self.calls.get(index)
        if call is None:
            return NO_NODE
        try:
            call()
        except Exception:
            return FAILED
        return DONE


def same_dtype(what: str, *tensors: torch.Tensor | None) -> None:
    """All floating and alike."""
    dtypes = {t.dtype for t in tensors if t is not None}
    if len(dtypes) != 1 or not dtypes <= set(_FLOATS):
        raise Refused("dtype", f"{what} takes floating tensors of one dtype")


def load(request: dict[str, Any], fds: list[int]) -> tuple[Helper, socket.socket | None]:
    """`load`: `plan`, `buffers` (fd per buffer or null), `socket` (fd or absent). Descriptors become ours."""
    sock: socket.socket | None = None
    try:
        bases: list[torch.Tensor | None] = []
        for entry in request.get("buffers") or []:
            index = entry.get("fd") if isinstance(entry, dict) else entry
            if index is None:
                bases.append(None)
                continue
            fd = fds[index]
            size = os.fstat(fd).st_size
            if size == 0:
                bases.append(torch.empty(0, dtype=torch.uint8))
            else:
                bases.append(torch.frombuffer(mmap.mmap(fd, size, mmap.MAP_SHARED), dtype=torch.uint8))
        plan = request.get("plan")
        if not isinstance(plan, dict):
            raise Refused("malformed", "load without a plan")
        helper = Helper(plan, bases)
        index = request.get("socket")
        if index is not None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=os.dup(fds[index]))
        return helper, sock
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise Refused("malformed", f"load: {type(error).__name__}: {error}") from error
    finally:
        close_all(fds)


def answered(runner: socket.socket, helper: Helper) -> bool:
    """Serves one node index; False when the runner is gone."""
    try:
        data = runner.recv(4, socket.MSG_WAITALL)
        if len(data) < 4:
            return False
        runner.sendall(helper.run(int.from_bytes(data, "little")))
        return True
    except OSError:
        return False


def serve_helper(channel: Channel, start: Start) -> None:
    """Answers `hello`, `load` and `close` on the channel and node indices on the loaded socket."""
    torch.set_num_threads(start.threads)
    helper: Helper | None = None
    runner: socket.socket | None = None
    with torch.inference_mode():
        while True:
            if runner is None or helper is None:
                ready_channel, ready_runner = True, False
            else:
                readable, _, _ = select.select([runner, channel.fileno()], [], [])
                ready_runner, ready_channel = runner in readable, channel.fileno() in readable
            if ready_runner and runner is not None and helper is not None:
                if not answered(runner, helper):
                    runner.close()
                    runner = None
                if not ready_channel:
                    continue
            if not ready_channel:
                continue
            try:
                request, fds = channel.receive()
            except Closed:
                return
            op = request.get("op")
            try:
                if op == "load":
                    helper, fresh = load(request, fds)
                    if runner is not None:
                        runner.close()
                    runner = fresh
                    reply: dict[str, Any] = {"ok": True, "nodes": sorted(helper.calls)}
                elif op == "hello":
                    reply = {"ok": True, **start.hello(request, fds)}
                elif op == "close":
                    close_all(fds)
                    reply = {"ok": True}
                else:
                    close_all(fds)
                    raise Refused("unknown_op", f"no op {op!r} here")
            except Refused as refused:
                reply = refused.reply()
            try:
                channel.send(reply)
            except Closed:
                return
            if op == "close":
                return
