"""Library calls that a task may allow: products and convolutions by the vendor's (on the CPU, PyTorch's own) library.

Knows shapes, layouts and types. Must not know how a call is stored or run. Every function checks its operands,
allocates `out` when there is none, records one call and returns `out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernelfleet_ext._launch import whole
from kernelfleet_ext._session import Session, current

Extents = int | Sequence[int]
FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _session(what: str, family: str) -> Session:
    session = current(what)
    if family not in session.libraries:
        session.refuse(
            "library_not_allowed",
            f"{what} needs the library family {family!r}, which this task does not allow",
            "write the product in a kernel of your own",
        )
    return session


def _tensor(
    what: str, name: str, value: torch.Tensor | None, ranks: tuple[int, ...], dtype: torch.dtype | None = None
) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what}: {name} is {type(value).__name__}, a tensor is expected")
    if value.dim() not in ranks:
        raise ValueError(f"{what}: {name} has {value.dim()} dimensions, {' or '.join(map(str, ranks))} are expected")
    if dtype is None and value.dtype not in FLOATING:
        raise ValueError(f"{what}: {name} is {value.dtype}, a floating type is expected")
    if dtype is not None and value.dtype != dtype:
        raise ValueError(f"{what}: {name} is {value.dtype} where the other operand is {dtype}")
    return value


def _out(
    what: str, out: torch.Tensor | None, shape: Sequence[int], dtype: torch.dtype, layout: Any = None
) -> torch.Tensor:
    if out is None:
        return empty(shape, dtype, layout)
    out = _tensor(what, "out", out, (len(shape),), dtype)
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{what}: out has shape {tuple(out.shape)}, the result has {tuple(shape)}")
    return out


def empty(shape: Extents, dtype: torch.dtype | None = None, memory_format: Any = None) -> torch.Tensor:
    """An uninitialised tensor on the device that is recorded for; `memory_format` as in `torch.empty`."""
    session = current("kf.empty")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    layout = memory_format or torch.contiguous_format
    return torch.empty(shape, dtype=dtype, device=session.device, memory_format=layout)


def _rows(what: str, name: str, value: torch.Tensor) -> None:
    """A library needs one of the last two strides to be 1, and the other to span it."""
    inner, outer = value.stride(-1), value.stride(-2)
    rows, columns = value.shape[-2:]
    if value.numel() == 0 or inner == 1 and (outer >= columns or rows == 1):
        return
    if outer == 1 and (inner >= rows or columns == 1):
        return
    raise ValueError(
        f"{what}: {name} has shape {tuple(value.shape)} and strides {value.stride()}; one of the last two strides must "
        "be 1 (a contiguous matrix or a transposed view). Pack it with a kernel first"
    )


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`a @ b (+ bias)`: (M, K) x (K, N), or with a batch (B, M, K) x (B, K, N); `bias` (N).

    Either may be 2-D beside a batch and either may be a transposed view.
    """
    what = "kf.matmul"
    session = _session(what, "matmul")
    a = _tensor(what, "a", a, (2, 3))
    b = _tensor(what, "b", b, (2, 3), a.dtype)
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"{what}: a is {tuple(a.shape)} and b is {tuple(b.shape)}; {a.shape[-1]} != {b.shape[-2]}")
    shape = [*a.shape[:-1], b.shape[-1]]
    if a.dim() == 3 and b.dim() == 2:
        if a.is_contiguous() and (out is None or out.is_contiguous()):
            result = _out(what, out, shape, a.dtype)
            _product(session, what, a.view(-1, a.shape[-1]), b, bias, result.view(-1, b.shape[-1]))
            return result
        b = b.expand(a.shape[0], *b.shape)
    elif a.dim() == 2 and b.dim() == 3:
        a = a.expand(b.shape[0], *a.shape)
        shape = [b.shape[0], *shape]
    elif a.dim() == 3 and a.shape[0] != b.shape[0]:
        raise ValueError(f"{what}: batches of {a.shape[0]} and {b.shape[0]}")
    result = _out(what, out, shape, a.dtype)
    _product(session, what, a, b, bias, result)
    return result


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T (+ bias)`: `x` (.., K) contiguous or 2-D, `weight` (N, K), `bias` (N)."""
    what = "kf.linear"
    session = _session(what, "matmul")
    x = _tensor(what, "x", x, tuple(range(2, 9)))
    weight = _tensor(what, "weight", weight, (2,), x.dtype)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"{what}: x is {tuple(x.shape)} and weight is {tuple(weight.shape)}")
    if x.dim() > 2 and not x.is_contiguous():
        raise ValueError(f"{what}: x of {x.dim()} dimensions must be contiguous, its strides are {x.stride()}")
    result = _out(what, out, [*x.shape[:-1], weight.shape[0]], x.dtype)
    if result.dim() > 2 and not result.is_contiguous():
        raise ValueError(f"{what}: out must be contiguous")
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    _product(session, what, rows, weight.t(), bias, result if x.dim() == 2 else result.view(-1, weight.shape[0]))
    return result


def _product(
    session: Session, what: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    for name, value in (("a", a), ("b", b), ("out", out)):
        _rows(what, name, value)
    if bias is not None:
        bias = _vector(what, bias, b.shape[-1], a.dtype)
    if out.numel():
        session.library("matmul", {"a": a, "b": b, "bias": bias, "out": out})


def _vector(what: str, bias: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    bias = _tensor(what, "bias", bias, (1,), dtype)
    if bias.shape[0] != length:
        raise ValueError(f"{what}: bias has {bias.shape[0]} elements, the result's dimension {length}")
    if length > 1 and bias.stride(0) != 1:
        raise ValueError(f"{what}: bias must be contiguous")
    return bias


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Extents = 1,
    padding: Extents | str = 0,
    dilation: Extents = 1,
    groups: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution as `torch.nn.functional.conv{1,2,3}d`: `x` (N, C, ..), `weight` (O, C / groups, ..), `bias` (O)."""
    what = "kf.conv"
    session = _session(what, "conv")
    x = _tensor(what, "x", x, (3, 4, 5))
    weight = _tensor(what, "weight", weight, (x.dim(),), x.dtype)
    count = x.dim() - 2
    strides, dilations = _spread(what, "stride", stride, count, 1), _spread(what, "dilation", dilation, count, 1)
    groups = whole(f"{what}: groups", groups)
    kernel = weight.shape[2:]
    if padding == "valid":
        padding = 0
    elif padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        if any(s != 1 for s in strides) or any(total % 2 for total in totals):
            raise ValueError(f"{what}: padding='same' needs stride 1 and an even total padding; give numbers")
        padding = [total // 2 for total in totals]
    elif isinstance(padding, str):
        raise ValueError(f"{what}: padding is a number, a tuple, 'same' or 'valid', not {padding!r}")
    paddings = _spread(what, "padding", padding, count, 0)
    if groups < 1 or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups:
        raise ValueError(f"{what}: x {tuple(x.shape)} and weight {tuple(weight.shape)} don't fit {groups} groups")
    shape = [x.shape[0], weight.shape[0]]
    for size, k, s, p, d in zip(x.shape[2:], kernel, strides, paddings, dilations, strict=True):
        shape.append((size + 2 * p - d * (k - 1) - 1) // s + 1)
    geometry = {"stride": strides, "padding": paddings, "dilation": dilations, "groups": groups}
    geometry |= {"transposed": False, "output_padding": [0] * count}
    return _convolve(session, what, x, weight, bias, out, shape, geometry)


def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Extents = 1,
    padding: Extents = 0,
    output_padding: Extents = 0,
    groups: int = 1,
    dilation: Extents = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `torch.nn.functional.conv_transpose{1,2,3}d`: `x` (N, C, ..), `weight` (C, O / groups, ..), `bias` (O)."""
    what = "kf.conv_transpose"
    session = _session(what, "conv")
    x = _tensor(what, "x", x, (3, 4, 5))
    weight = _tensor(what, "weight", weight, (x.dim(),), x.dtype)
    count = x.dim() - 2
    strides, dilations = _spread(what, "stride", stride, count, 1), _spread(what, "dilation", dilation, count, 1)
    paddings, extras = (
        _spread(what, "padding", padding, count, 0),
        _spread(what, "output_padding", output_padding, count, 0),
    )
    groups = whole(f"{what}: groups", groups)
    if groups < 1 or x.shape[1] != weight.shape[0] or x.shape[1] % groups:
        raise ValueError(f"{what}: x {tuple(x.shape)} and weight {tuple(weight.shape)} don't fit {groups} groups")
    if any(e >= max(s, d) for e, s, d in zip(extras, strides, dilations, strict=True)):
        raise ValueError(f"{what}: output_padding {extras} must be smaller than stride or dilation")
    shape = [x.shape[0], weight.shape[1] * groups]
    for size, k, s, p, d, e in zip(x.shape[2:], weight.shape[2:], strides, paddings, dilations, extras, strict=True):
        shape.append((size - 1) * s - 2 * p + d * (k - 1) + e + 1)
    geometry = {"stride": strides, "padding": paddings, "dilation": dilations, "groups": groups}
    geometry |= {"transposed": True, "output_padding": extras}
    return _convolve(session, what, x, weight, bias, out, shape, geometry)


def _convolve(
    session: Session,
    what: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    shape: list[int],
    geometry: dict[str, Any],
) -> torch.Tensor:
    if any(size < 1 for size in shape[2:]):
        raise ValueError(f"{what}: the result would have shape {tuple(shape)}; the kernel is larger than its input")
    if bias is not None:
        bias = _vector(what, bias, shape[1], x.dtype)
    last = LAYOUTS.get(x.dim())
    x_last = last is not None and not x.is_contiguous() and x.is_contiguous(memory_format=last)
    if not x_last and not x.is_contiguous():
        raise ValueError(f"{what}: x must be contiguous or channels-last; its strides are {x.stride()}")
    layout = last if last is not None and x_last else torch.contiguous_format
    if not weight.is_contiguous(memory_format=layout):
        # A parameter is packed once, for real, and becomes a derived constant; a computed weight can't be.
        weight = weight.contiguous(memory_format=layout)
    result = _out(what, out, shape, x.dtype, layout)
    if not result.is_contiguous(memory_format=layout):
        raise ValueError(f"{what}: out must have the layout of x ({layout}); its strides are {result.stride()}")
    if result.numel():
        session.library("conv", {"x": x, "weight": weight, "bias": bias, "out": result}, **geometry)
    return result


def _spread(what: str, name: str, value: Any, count: int, least: int) -> list[int]:
    parts = list(value) if isinstance(value, (tuple, list)) else [value] * count
    if len(parts) == 1:
        parts *= count
    if len(parts) != count:
        raise ValueError(f"{what}: {name} has {len(parts)} numbers for {count} dimensions")
    numbers = [whole(f"{what}: {name}", part) for part in parts]
    if any(number < least for number in numbers):
        raise ValueError(f"{what}: {name} {tuple(numbers)} has a number below {least}")
    return numbers
