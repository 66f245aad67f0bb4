"""The plan being written: buffers, modules, nodes, constants.

Knows the JSON form of `src/plan/mod.rs`. Must not know tensors of PyTorch: callers bring numbers and names.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
ALIGNMENT = 64
"""Constants begin at multiples of this many bytes in their memfd."""


@dataclass
class PlanWriter:
    """Collects a plan; buffers and modules get their numbers at their first use, so equal runs give equal plans."""

    device: str
    buffers: list[dict[str, Any]] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[dict[str, Any]] = field(default_factory=list)
    constants: list[dict[str, int]] = field(default_factory=list)
    _buffer_ids: dict[Hashable, int] = field(default_factory=dict)
    _module_ids: dict[Hashable, int] = field(default_factory=dict)
    _constants_fd: int = -1
    _constants_end: int = 0

    def buffer(self, key: Hashable, kind: Any, size: int) -> int:
        """Number of the buffer known as `key`; made with `kind` and `size` bytes at its first use."""
        number = self._buffer_ids.get(key)
        if number is None:
            number = self._buffer_ids[key] = len(self.buffers)
            self.buffers.append({"kind": kind, "bytes": size})
        return number

    def known(self, key: Hashable) -> bool:
        """Whether `buffer` has been called with `key`."""
        return key in self._buffer_ids

    def constant(self, key: Hashable, content: memoryview) -> int:
        """Number of the buffer that holds `content`, copied now unless `key` is known."""
        if key in self._buffer_ids:
            return self._buffer_ids[key]
        if self._constants_fd < 0:
            self._constants_fd = os.memfd_create("constants", os.MFD_CLOEXEC)
        offset = -(-self._constants_end // ALIGNMENT) * ALIGNMENT
        os.ftruncate(self._constants_fd, offset + len(content))
        written = 0
        while written < len(content):
            written += os.pwrite(self._constants_fd, content[written : written + (1 << 26)], offset + written)
        self._constants_end = offset + len(content)
        self.constants.append({"bytes": len(content), "offset": offset})
        return self.buffer(key, {"constant": len(self.constants) - 1}, len(content))

    def constants_fd(self) -> int | None:
        """The memfd with the constants, `None` where there is none."""
        return None if self._constants_fd < 0 else self._constants_fd

    def module(self, path: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> int:
        """Number of the module."""
        key = (path, defines, flags)
        number = self._module_ids.get(key)
        if number is None:
            number = self._module_ids[key] = len(self.modules)
            self.modules.append({"path": path, "defines": [list(pair) for pair in defines], "flags": list(flags)})
        return number

    def node(self, op: dict[str, Any], line: str | None) -> None:
        """Appends a step."""
        self.nodes.append(op if line is None else {**op, "line": line})

    def finish(self, outputs: list[dict[str, Any]], structure: Any) -> dict[str, Any]:
        """The plan."""
        return {
            "version": VERSION,
            "device": self.device,
            "buffers": self.buffers,
            "modules": self.modules,
            "nodes": self.nodes,
            "outputs": outputs,
            "structure": structure,
        }


def runs(shape: tuple[int, ...], strides: tuple[int, ...], limit: int) -> list[tuple[int, int]] | None:
    """Contiguous stretches `(first, count)` in elements that a strided view covers, in order of address.

    `None` when there are more than `limit`. Strides are not negative; dimensions of stride 0 count once.
    """
    if any(size == 0 for size in shape):
        return []
    dims = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride > 0)
    block = 1
    while dims and dims[0][0] <= block:  # equal: adjacent; below: overlapping, covered all the same
        stride, size = dims.pop(0)
        block = stride * (size - 1) + block
    count = 1
    for _, size in dims:
        count *= size
        if count > limit:
            return None
    starts = [0]
    for stride, size in reversed(dims):
        starts = [start + i * stride for start in starts for i in range(size)]
    return [(start, block) for start in sorted(set(starts))]
