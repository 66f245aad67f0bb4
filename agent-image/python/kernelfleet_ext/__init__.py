"""What a candidate imports: sources, launches, allowed library calls, facts about the device.

`import kernelfleet_ext as kf`. Nothing runs here: what a candidate's `forward` calls is recorded as a launch plan,
which a judge then runs on data. The interface is in `docs/interfaces.md`.
"""

from __future__ import annotations

from typing import Any

from kernelfleet_ext._launch import Kernel, Module, floating, integer, load
from kernelfleet_ext._library import conv, conv_transpose, empty, linear, matmul
from kernelfleet_ext._session import Scalar, current

__all__ = [
    "Kernel",
    "Module",
    "Scalar",
    "conv",
    "conv_transpose",
    "device",
    "empty",
    "f16",
    "f32",
    "f64",
    "i32",
    "i64",
    "linear",
    "load",
    "matmul",
    "properties",
    "u32",
    "u8",
]


def device() -> str:
    """`"cuda"` or `"cpu"`: what is recorded for."""
    return current("kf.device()").device


def properties() -> Any:
    """Facts about the device: `.multi_processor_count`, `.l2_cache_size`, `.shared_memory_per_block_optin`, `.threads`."""
    return current("kf.properties()").properties


def f32(value: float) -> Scalar:
    """A C `float` argument."""
    return floating("f32", value)


def f64(value: float) -> Scalar:
    """A C `double` argument."""
    return floating("f64", value)


def f16(value: float) -> Scalar:
    """A half-precision argument (2 bytes)."""
    return floating("f16", value)


def i32(value: int) -> Scalar:
    """A 32-bit signed argument."""
    return integer("i32", value)


def i64(value: int) -> Scalar:
    """A 64-bit signed argument."""
    return integer("i64", value)


def u32(value: int) -> Scalar:
    """A 32-bit unsigned argument."""
    return integer("u32", value)


def u8(value: int) -> Scalar:
    """An 8-bit unsigned argument."""
    return integer("u8", value)
