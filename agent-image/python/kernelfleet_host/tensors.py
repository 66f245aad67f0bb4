"""Tensors as data on the wire: dtype names, spans, nesting of outputs.

Knows the section "Tensors on the wire" of `docs/interfaces.md`. Must not know where the bytes lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kernelfleet_zygote import Refused

Structure = str | dict[str, Any]

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Wire name of a dtype; `Refused("dtype")` for one that has none (complex, quantised)."""
    name = NAMES.get(dtype)
    if name is None:
        raise Refused("dtype", f"tensors of {dtype} are not supported")
    return name


@dataclass(frozen=True)
class Meta:
    """Shape, strides (elements) and dtype of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """As the tensor lies; made contiguous where elements overlap (expanded) or leave gaps."""
        shape = tuple(int(n) for n in tensor.shape)
        strides = tuple(int(n) for n in tensor.stride())
        if not _dense(shape, strides):
            strides = contiguous_strides(shape)
        return cls(tensor.dtype, shape, strides)

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def span(self) -> int:
        """Bytes of storage that are touched, 0 if empty."""
        return span_bytes(self.shape, self.strides, self.dtype)

    def wire(self) -> dict[str, Any]:
        """`dtype`, `shape`, `strides`, `bytes`."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "strides": list(self.strides),
            "bytes": self.span,
        }

    def graph(self) -> dict[str, Any]:
        """`dtype`, `shape`, `strides`."""
        return {"dtype": dtype_name(self.dtype), "shape": list(self.shape), "strides": list(self.strides)}


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(strides, shape, strict=True) if sz != 1):
        if size == 0:
            return True
        if stride != expected:
            return False
        expected *= size
    return True


def span_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """`(sum((shape-1)*stride)+1)*itemsize`, 0 if empty."""
    if any(size == 0 for size in shape):
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * dtype.itemsize


def view(base: torch.Tensor, meta: Meta, offset: int = 0) -> torch.Tensor:
    """`meta` laid over the bytes of `base` (uint8, 1-D) from byte `offset`; `Refused("bounds")` outside of it."""
    span = meta.span
    if offset < 0 or any(s < 0 for s in meta.strides) or any(s < 0 for s in meta.shape):
        raise Refused("bounds", "negative offset, size or stride")
    if offset % meta.dtype.itemsize or offset + span > base.numel():
        raise Refused("bounds", f"{span} bytes at offset {offset} of a buffer of {base.numel()}")
    if span == 0:
        return torch.empty(meta.shape, dtype=meta.dtype, device=base.device)
    return base[offset : offset + span].view(meta.dtype).as_strided(meta.shape, meta.strides, None)


def flatten(value: Any) -> tuple[list[torch.Tensor], Structure]:
    """Tensors of a nested output in order, and how they nest."""
    tensors: list[torch.Tensor] = []
    return tensors, _flatten(value, tensors, 0)


def _flatten(value: Any, tensors: list[torch.Tensor], depth: int) -> Structure:
    if depth > 32:
        raise Refused("structure", "the output of forward nests deeper than 32")
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor"
    if isinstance(value, tuple):
        return {"tuple": [_flatten(v, tensors, depth + 1) for v in value]}
    if isinstance(value, list):
        return {"list": [_flatten(v, tensors, depth + 1) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[str(k), _flatten(v, tensors, depth + 1)] for k, v in value.items()]}
    return {"value": repr(value)[:4096]}


def same_structure(a: Any, b: Any) -> bool:
    """Whether two structures are equal; a dict may come as pairs or as an object."""
    if isinstance(a, str) or isinstance(b, str):
        return bool(a == b)
    if not (isinstance(a, dict) and isinstance(b, dict) and len(a) == len(b) == 1):
        return False
    (ka, va), (kb, vb) = next(iter(a.items())), next(iter(b.items()))
    if ka != kb:
        return False
    if ka == "value":
        return bool(va == vb)
    if ka == "dict":
        pa = list(va.items()) if isinstance(va, dict) else [tuple(p) for p in va]
        pb = list(vb.items()) if isinstance(vb, dict) else [tuple(p) for p in vb]
        return len(pa) == len(pb) and all(
            x[0] == y[0] and same_structure(x[1], y[1]) for x, y in zip(pa, pb, strict=True)
        )
    return len(va) == len(vb) and all(same_structure(x, y) for x, y in zip(va, vb, strict=True))
