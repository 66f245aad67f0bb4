"""The library helper: a plan's matrix products and convolutions, on shared buffers, by node index over a socket."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from kernelfleet_host.tensors import DTYPES, Meta
from test_host import Zygote, zygote  # noqa: F401


class Plan:
    """A plan under construction, each tensor in a buffer of its own."""

    def __init__(self) -> None:
        self.buffers: list[dict[str, Any]] = []
        self.fds: list[int] = []
        self.nodes: list[dict[str, Any]] = []

    def tensor(self, value: torch.Tensor) -> dict[str, Any]:
        """Puts `value`, as its strides lie, 64 bytes into a new buffer."""
        span = (sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1) * value.element_size()
        fd = os.memfd_create("b", 0)
        os.ftruncate(fd, 64 + span)
        raw = torch.zeros(span, dtype=torch.uint8)
        raw.view(value.dtype).as_strided(value.shape, value.stride()).copy_(value)
        os.pwrite(fd, raw.numpy().tobytes(), 64)
        self.buffers.append({"kind": "workspace", "bytes": 64 + span})
        self.fds.append(fd)
        name = next(k for k, v in DTYPES.items() if v == value.dtype)
        return {
            "buffer": len(self.fds) - 1,
            "offset": 64,
            "dtype": name,
            "shape": list(value.shape),
            "strides": list(value.stride()),
        }

    def read(self, record: dict[str, Any]) -> torch.Tensor:
        meta = Meta(DTYPES[record["dtype"]], tuple(record["shape"]), tuple(record["strides"]))
        data = bytearray(os.pread(self.fds[record["buffer"]], meta.span, record["offset"]))
        return torch.frombuffer(data, dtype=meta.dtype).as_strided(meta.shape, meta.strides).clone()

    def wire(self) -> dict[str, Any]:
        return {"version": 1, "device": "cpu", "buffers": self.buffers, "modules": [], "nodes": self.nodes}


def loaded(zygote: Zygote, tmp_path: Path, plan: Plan) -> tuple[socket.socket, dict[str, Any]]:  # noqa: F811
    helper = zygote.fork(tmp_path, role="helper")
    ours, theirs = socket.socketpair()
    reply, _ = helper.raw(
        "load",
        [*plan.fds, theirs.fileno()],
        plan=plan.wire(),
        buffers=[{"fd": i} for i in range(len(plan.fds))],
        socket=len(plan.fds),
    )
    theirs.close()
    ours.settimeout(20)
    plan.helper = helper  # type: ignore[attr-defined]
    return ours, reply


def call(sock: socket.socket, node: int) -> int:
    sock.sendall(struct.pack("<I", node))
    return int(struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))[0])


def test_matrix_products_with_bias_batches_and_transposed_views(zygote: Zygote, tmp_path: Path) -> None:  # noqa: F811
    plan = Plan()
    a, b, bias = torch.randn(5, 7), torch.randn(9, 7).T, torch.randn(9)
    x, y = torch.randn(3, 4, 6), torch.randn(3, 6, 2)
    cases = []
    for left, right, add, want in (
        (a, b, None, a @ b),
        (a, b, bias, a @ b + bias),
        (x, y, None, x @ y),
        (x, y, torch.ones(2), x @ y + 1),
    ):
        out = plan.tensor(torch.zeros(want.shape))
        node = {"op": "library", "call": "matmul", "a": plan.tensor(left), "b": plan.tensor(right), "out": out}
        node["bias"] = plan.tensor(add) if add is not None else None
        cases.append((len(plan.nodes), out, want))
        plan.nodes.append(node)
        plan.nodes.append({"op": "fill", "buffer": 0, "offset": 0, "bytes": 4, "pattern": [0]})
    sock, reply = loaded(zygote, tmp_path, plan)
    assert reply["ok"] and reply["nodes"] == [0, 2, 4, 6], reply
    for index, out, want in cases:
        assert call(sock, index) == 0
        assert torch.allclose(plan.read(out), want, atol=1e-5)
    assert call(sock, 1) == 1
    assert call(sock, 77) == 1


@pytest.mark.parametrize("channels_last", [False, True])
def test_convolutions_in_all_variants(zygote: Zygote, tmp_path: Path, channels_last: bool) -> None:  # noqa: F811
    plan = Plan()
    cases = []
    for dims in (1, 2, 3):
        for transposed in (False, True):
            x = torch.randn(2, 4, *[9] * dims)
            weight = torch.randn(4, 2, *[3] * dims) if transposed else torch.randn(6, 2, *[3] * dims)
            bias = torch.randn(4 if transposed else 6)
            if channels_last and dims > 1:
                x = x.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
            arguments = ([2] * dims, [1] * dims, [2] * dims, transposed, [1 if transposed else 0] * dims, 2)
            want = torch.convolution(x, weight, bias, *arguments)
            out = plan.tensor(torch.zeros_like(want))
            cases.append((len(plan.nodes), out, want))
            plan.nodes.append(
                {
                    "op": "library",
                    "call": "conv",
                    "x": plan.tensor(x),
                    "weight": plan.tensor(weight),
                    "bias": plan.tensor(bias),
                    "out": out,
                    "stride": arguments[0],
                    "padding": arguments[1],
                    "dilation": arguments[2],
                    "transposed": transposed,
                    "output_padding": arguments[4],
                    "groups": 2,
                }
            )
    sock, reply = loaded(zygote, tmp_path, plan)
    assert reply["ok"], reply
    for index, out, want in cases:
        assert call(sock, index) == 0
        assert torch.allclose(plan.read(out), want, atol=1e-5)


def test_extents_outside_of_a_buffer_and_wrong_shapes_are_refused(zygote: Zygote, tmp_path: Path) -> None:  # noqa: F811
    for change, code in (
        ({"offset": 4096}, "bounds"),
        ({"offset": 2}, "bounds"),
        ({"strides": [1 << 40, 1]}, "bounds"),
        ({"strides": [-1, 1]}, "bounds"),
        ({"buffer": 9}, "malformed"),
        ({"buffer": None}, "malformed"),
        ({"shape": [4, 4]}, "shape"),
        ({"dtype": "int64"}, "bounds"),
        ({"dtype": "nonsense"}, "malformed"),
        ({"shape": "x"}, "malformed"),
    ):
        plan = Plan()
        a, b = plan.tensor(torch.ones(4, 5)), plan.tensor(torch.ones(5, 4))
        out = plan.tensor(torch.ones(4, 4))
        plan.nodes.append({"op": "library", "call": "matmul", "a": {**a, **change}, "b": b, "bias": None, "out": out})
        _, reply = loaded(zygote, tmp_path, plan)
        assert not reply["ok"] and reply["code"] == code, (change, reply)
