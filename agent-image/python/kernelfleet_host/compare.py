"""The rule of "Correct" in `docs/measuring.md`: candidate c, reference r, float64 run d.

Knows tensors and the rule. Must not know tasks, slots or where outputs come from.

Over the whole tensor and each slab (a row of dimension 0, a channel of dimension 1):
    rms(c-d) <= 3 rms(r-d) + k eps rms(d)        max|c-d| <= 5 max|r-d| + 16 k eps max|d|
A slab has at least 64 elements (neighbours are joined), since the reference's error of a few elements may be small by
luck; for the same reason a slab's rms(r-d) counts as at least the whole tensor's relative error times rms(d) of
the slab and at least the median slab's, and outputs of fewer than 1024 elements take the largest relative error over several sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

K_SINGLE = 16.0
K_HALF = 1.0
RMS_FACTOR = 3.0
MAX_FACTOR = 5.0
MAX_K = 16.0
FAST = 1.5
"""Accept early where rms(c-r) <= this x an estimated rms(r-d). With 2 the triangle inequality gives exactly the factor
3; 1.5 leaves room for the estimate, which comes from another set of the same distribution."""
HOPELESS = 8.0
"""Refuse early beyond this x the estimate (4 would do were the estimate exact)."""
SMALL = 1024
SLAB = 64
SLABS = 4096
HALVES = (torch.float16, torch.bfloat16)


def k_of(dtype: torch.dtype) -> float:
    """k of the rule."""
    return K_HALF if dtype in HALVES else K_SINGLE


def eps_of(dtype: torch.dtype) -> float:
    """Unit in the last place of the output's dtype at 1."""
    return float(torch.finfo(dtype).eps)


def tiny_of(dtype: torch.dtype) -> float:
    """An absolute floor: the smallest normal number of the dtype, below which eps says nothing."""
    return float(torch.finfo(dtype).tiny)


def _split(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and channels of a shape; 1 where there are none."""
    if not shape:
        return 1, 1
    return shape[0], shape[1] if len(shape) > 1 else 1


def blocks(shape: tuple[int, ...], limit: int) -> Iterator[tuple[slice, ...]]:
    """Index tuples over the first dimensions that cover a tensor in pieces of about `limit` elements."""
    numel = math.prod(shape)
    if numel == 0:
        return
    if numel <= limit or not shape:
        yield ()
        return
    rest = numel // shape[0]
    step = max(1, limit // rest)
    for lo in range(0, shape[0], step):
        head = slice(lo, min(shape[0], lo + step))
        if rest <= limit or len(shape) == 1 or step > 1:
            yield (head,)
        else:
            for tail in blocks(shape[1:], limit):
                yield (head, *tail)


class Sums:
    """Sums of squares and largest magnitudes of a tensor by row and by channel; adds up over blocks and slices."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dirty = False  # something was not finite
        a, c = _split(shape)
        self.row_squares = torch.zeros(a, dtype=torch.float64)
        self.row_max = torch.zeros(a, dtype=torch.float64)
        self.channel_squares = torch.zeros(c, dtype=torch.float64)
        self.channel_max = torch.zeros(c, dtype=torch.float64)

    def add(self, magnitudes: torch.Tensor, where: tuple[slice, ...]) -> None:
        """`magnitudes`: |x| in float64 of the block `where`; consumed."""
        a, c = _split(self.shape)
        rows = where[0] if where else slice(0, a)
        channels = where[1] if len(where) > 1 else slice(0, c)
        block = magnitudes.reshape(rows.stop - rows.start, channels.stop - channels.start, -1)
        peak = block.amax(2)
        squares = block.square_().sum(2)
        self.row_squares[rows] += squares.sum(1).cpu()
        self.channel_squares[channels] += squares.sum(0).cpu()
        self.row_max[rows] = torch.maximum(self.row_max[rows], peak.amax(1).cpu())
        self.channel_max[channels] = torch.maximum(self.channel_max[channels], peak.amax(0).cpu())

    def grouped(self) -> Measure:
        """rms and max over the whole, over rows and over channels."""
        a, c = _split(self.shape)
        numel = math.prod(self.shape)
        total = float(self.row_squares.sum())
        rows = _group(self.row_squares, self.row_max, numel // max(a, 1))
        channels = _group(self.channel_squares, self.channel_max, numel // max(c, 1))
        return Measure(
            numel,
            math.sqrt(total / numel) if numel else 0.0,
            float(self.row_max.max()) if numel else 0.0,
            *rows,
            *channels,
        )


def joined(count: int, each: int) -> int:
    """How many neighbouring rows of `each` elements make one slab."""
    if count <= 1 or each <= 0:
        return max(1, count)
    return min(count, max(1, -(-SLAB // each), -(-count // SLABS)))


def _group(squares: torch.Tensor, largest: torch.Tensor, each: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = squares.numel()
    step = joined(count, each)
    if step == 1:
        return (squares / max(each, 1)).sqrt(), largest
    groups = max(1, count // step)  # what is left over joins the last slab
    index = torch.clamp(torch.arange(count) // step, max=groups - 1)
    sums = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, squares)
    sizes = torch.zeros(groups, dtype=torch.float64).index_add_(0, index, torch.full_like(squares, float(each)))
    tops = torch.zeros(groups, dtype=torch.float64).index_reduce_(0, index, largest, "amax")
    return (sums / sizes.clamp(min=1)).sqrt(), tops


@dataclass
class Measure:
    """rms and largest magnitude of one tensor, whole and by slab (float64, on the CPU)."""

    numel: int
    rms: float
    max: float
    row_rms: torch.Tensor
    row_max: torch.Tensor
    channel_rms: torch.Tensor
    channel_max: torch.Tensor

    def parts(self) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """(rule, rms, max) of the whole, of rows and of channels."""
        return [
            ("whole", torch.tensor([self.rms], dtype=torch.float64), torch.tensor([self.max], dtype=torch.float64)),
            ("row", self.row_rms, self.row_max),
            ("channel", self.channel_rms, self.channel_max),
        ]


@dataclass
class Statistic:
    """What is known of a task's own error from earlier sets: r-d and d."""

    error: Measure
    exact: Measure
    relative: float
    """Largest rms(r-d)/rms(d) over the sets seen."""
    relative_max: float
    """Largest max|r-d|/max|d| over the sets seen."""


def ratio(a: float, b: float) -> float:
    """a / b, 0 where b is 0."""
    return a / b if b > 0 else 0.0


@dataclass
class Finding:
    """Result of one output's comparison. `value` and `limit` belong to the rule that decided or came closest."""

    match: bool
    rule: str
    value: float
    limit: float
    index: list[int]
    stage: str = "fast"

    def wire(self, output: int) -> dict[str, Any]:
        """`detail` of the reply to `compare`."""
        return {
            "output": output,
            "rule": self.rule,
            "value": finite(self.value),
            "limit": finite(self.limit),
            "index": self.index,
        }


def finite(value: float) -> float | None:
    """For JSON: null where a number is NaN or infinite."""
    return value if math.isfinite(value) else None


def block_limit(device: torch.device) -> int:
    """Elements that are worked on at once."""
    return 1 << 25 if device.type == "cuda" else 1 << 22


def non_finite(c: torch.Tensor, r: torch.Tensor) -> Finding | None:
    """A finding where c is not finite as r is: NaN where NaN, the same infinity where infinite."""
    for where in blocks(tuple(r.shape), block_limit(r.device)):
        cb, rb = c[where] if where else c, r[where] if where else r
        wrong = torch.where(
            torch.isfinite(rb), ~torch.isfinite(cb), ~((cb == rb) | (torch.isnan(cb) & torch.isnan(rb)))
        )
        if bool(wrong.any()):
            at = [int(i) for i in torch.nonzero(wrong.reshape(wrong.shape))[0].tolist()]
            for axis, part in enumerate(where):
                at[axis] += part.start
            return Finding(False, "nan", math.nan, 0.0, at)
    return None


def clean(x: torch.Tensor) -> bool:
    """Whether every value is finite, seen in one pass (a sum that overflows counts as not clean)."""
    return bool(torch.isfinite(x.sum()))


def summed(x: torch.Tensor, y: torch.Tensor | None = None) -> Sums:
    """|x - y|, or |x|; places where it is not finite count as 0 and make the sums `dirty`."""
    sums = Sums(tuple(x.shape))
    accumulate(sums, x, y, None, 0)
    return sums


def accumulate(sums: Sums, x: torch.Tensor, y: torch.Tensor | None, mask: torch.Tensor | None, first_row: int) -> None:
    """Adds rows from `first_row` on, of which `x`, `y` and `mask` are the slices."""
    for where in blocks(tuple(x.shape), block_limit(x.device)):
        if x.dim():
            rows = where[0] if where else slice(0, x.shape[0])
            moved: tuple[slice, ...] = (slice(rows.start + first_row, rows.stop + first_row), *where[1:])
        else:
            moved = where
        other = None if y is None else (y[where] if where else y)
        if x.is_cuda and mask is None and _add_quickly(sums, x[where] if where else x, other, moved):
            continue
        block = (x[where] if where else x).double()
        if other is not None:
            block = block - other.double()
        block = block.abs()
        total = block.sum()
        if not bool(torch.isfinite(total)):
            sums.dirty = True
            keep = torch.isfinite(block)
            block = torch.where(keep, block, 0.0)
        if mask is not None:
            block = torch.where(torch.isfinite(mask[where] if where else mask), block, 0.0)
        sums.add(block, moved)


_RANGES = {torch.float32: (1e-15, 1e15), torch.float64: (1e-140, 1e140)}
"""Largest magnitudes of a slab between which sums of its squares may be made in that type."""


def _add_quickly(sums: Sums, x: torch.Tensor, y: torch.Tensor | None, where: tuple[slice, ...]) -> bool:
    """`Sums.add` of |x - y| or |x| on a card, in the wider of their types; False where that won't do.

    A difference in single precision is right to half a unit of itself, and a card's sums are trees: both errors are
    far below the rule's factors. What isn't finite, and slabs whose squares could leave the type, go the slow way.
    """
    block = x if y is None else x - y
    limits = _RANGES.get(block.dtype)
    if limits is None or (y is None and x.dtype not in _RANGES) or (y is not None and y.dtype not in _RANGES):
        return False
    a, c = _split(sums.shape)
    rows = where[0] if where else slice(0, a)
    channels = where[1] if len(where) > 1 else slice(0, c)
    block = block.reshape(rows.stop - rows.start, channels.stop - channels.start, -1)
    norm = torch.linalg.vector_norm
    a, c = block.shape[:2]
    # One transfer brings all: each waits for the device.
    if block.shape[2] == 1:  # a matrix: its slabs are its rows and its columns
        flat = block[:, :, 0]
        largest = [norm(flat, math.inf, dim=1), norm(flat, math.inf, dim=0)]
        found = torch.cat([*largest, norm(flat, 2, dim=1), norm(flat, 2, dim=0)]).double()
        found[a + c :].square_()
    else:
        peak = norm(block, math.inf, dim=2).double()
        squares = norm(block, 2, dim=2).double().square_()
        found = torch.cat([peak.amax(1), peak.amax(0), squares.sum(1), squares.sum(0)])
    row_max, channel_max, row_squares, channel_squares = found.cpu().split([a, c, a, c])
    for values in (row_max, channel_max):
        if not bool((((values >= limits[0]) & (values <= limits[1])) | (values == 0)).all()):
            return False
    sums.row_squares[rows] += row_squares
    sums.channel_squares[channels] += channel_squares
    sums.row_max[rows] = torch.maximum(sums.row_max[rows], row_max)
    sums.channel_max[channels] = torch.maximum(sums.channel_max[channels], channel_max)
    return True


def judge(
    candidate: Measure, error: Measure, exact: Measure, dtype: torch.dtype, known: Statistic | None, stage: str = "full"
) -> Finding:
    """The rule itself. `candidate`: c-d; `error`: r-d; `exact`: d; `known`: for small outputs."""
    k, eps, tiny = k_of(dtype), eps_of(dtype), tiny_of(dtype)
    relative, relative_max = ratio(error.rms, exact.rms), ratio(error.max, exact.max)
    if known is not None and exact.numel < SMALL:
        relative, relative_max = max(relative, known.relative), max(relative_max, known.relative_max)
    closest: Finding | None = None
    for (part, c_rms, c_max), (_, e_rms, e_max), (_, d_rms, d_max) in zip(
        candidate.parts(), error.parts(), exact.parts(), strict=True
    ):
        e_rms, e_max = torch.maximum(e_rms, relative * d_rms), torch.maximum(e_max, relative_max * d_max)
        if part != "whole" and e_rms.numel() > 1:
            # A slab that ReLU left almost empty has almost no error of its own; what was cancelled or cut had the
            # error of any other. The median, so that a few large slabs lend nothing to the small ones.
            e_rms, e_max = torch.maximum(e_rms, e_rms.median()), torch.maximum(e_max, e_max.median())
        for rule, value, limit in (
            ("rms", c_rms, RMS_FACTOR * e_rms + k * eps * d_rms + tiny),
            ("max", c_max, MAX_FACTOR * e_max + MAX_K * k * eps * d_max + tiny),
        ):
            over = value / limit
            at = int(over.argmax()) if over.numel() else 0
            if not over.numel():
                continue
            index = [] if part == "whole" else [at]
            found = Finding(
                bool(over[at] <= 1.0),
                rule if part == "whole" else "slab",
                float(value[at]),
                float(limit[at]),
                index,
                stage,
            )
            if not found.match:
                return found
            if closest is None or ratio(found.value, found.limit) > ratio(closest.value, closest.limit):
                closest = found
    return closest or Finding(True, "rms", 0.0, 0.0, [], stage)


def quick(difference: Measure, reference: Measure, known: Statistic, dtype: torch.dtype) -> Finding | None:
    """A decision from c-r, r and what is known of r-d; None where only the float64 run can tell.

    Accepts only where the full rule would accept by the triangle inequality with the estimate reduced to 3/4;
    estimates never exceed what another set of the same parameters and transform had.
    """
    k, eps, tiny = k_of(dtype), eps_of(dtype), tiny_of(dtype)
    if difference.rms == 0.0 and difference.max == 0.0:
        return Finding(True, "rms", 0.0, 0.0, [])
    grown = max(1.0, ratio(reference.rms, known.exact.rms))
    e_whole = max(known.error.rms, known.relative * known.exact.rms) * grown
    hopeless = HOPELESS * e_whole + 2 * k * eps * reference.rms + tiny
    if difference.rms > hopeless:
        allowed = RMS_FACTOR * e_whole + k * eps * reference.rms
        return Finding(False, "rms", difference.rms, allowed, [])
    closest = Finding(True, "rms", 0.0, 1.0, [])
    for (part, c_rms, c_max), (_, e_rms, e_max), (_, d_rms, d_max), (_, r_rms, r_max) in zip(
        difference.parts(), known.error.parts(), known.exact.parts(), reference.parts(), strict=True
    ):
        shrink = torch.clamp(r_rms / d_rms.clamp(min=1e-300), max=1.0)
        e_rms = torch.maximum(e_rms * shrink, known.relative * r_rms * (0.5 if part == "whole" else 1.0))
        e_max = torch.maximum(
            e_max * torch.clamp(r_max / d_max.clamp(min=1e-300), max=1.0), known.relative_max * r_max * 0.5
        )
        for rule, value, limit in (
            ("rms", c_rms, FAST * e_rms + 0.9 * k * eps * r_rms + tiny),
            ("max", c_max, (MAX_FACTOR - 1) * 0.75 * e_max + 0.9 * MAX_K * k * eps * r_max + tiny),
        ):
            if not value.numel():
                continue
            over = value / limit
            at = int(over.argmax())
            if float(over[at]) > 1.0:
                return None
            if float(over[at]) > ratio(closest.value, closest.limit):
                closest = Finding(
                    True,
                    rule if part == "whole" else "slab",
                    float(value[at]),
                    float(limit[at]),
                    [] if part == "whole" else [at],
                )
    return closest


def exactly(c: torch.Tensor, r: torch.Tensor) -> Finding:
    """Equality of integers and booleans."""
    for where in blocks(tuple(r.shape), block_limit(r.device)):
        cb, rb = c[where] if where else c, r[where] if where else r
        wrong = cb != rb
        if bool(wrong.any()):
            at = [int(i) for i in torch.nonzero(wrong)[0].tolist()]
            pick = tuple(at)
            for axis, part in enumerate(where):
                at[axis] += part.start
            return Finding(False, "exact", float(cb[pick]), float(rb[pick]), at)
    return Finding(True, "exact", 0.0, 0.0, [])


ALLOWANCE = {"kernelbench": {torch.float32: 1e-4, torch.float64: 1e-4}, "cuda-agent": {}}


def allclose(c: torch.Tensor, r: torch.Tensor, tolerance: str) -> Finding:
    """|c-r| <= t + t |r| with the published judges' t; only for tables that are compared with theirs."""
    t = ALLOWANCE[tolerance].get(r.dtype, 1e-2)
    worst = Finding(True, "max", 0.0, t, [])
    bad = non_finite(c, r)
    if bad is not None:
        return bad
    for where in blocks(tuple(r.shape), block_limit(r.device)):
        cb, rb = (c[where] if where else c).double(), (r[where] if where else r).double()
        excess = torch.where(torch.isfinite(rb), (cb - rb).abs() / (t + t * rb.abs()), 0.0).reshape(-1)
        if not excess.numel():
            continue
        at = int(excess.argmax())
        if float(excess[at]) * t > worst.value:
            match = float(excess[at]) <= 1.0
            position = [int(i) for i in torch.unravel_index(torch.tensor(at), tuple(rb.shape))] if rb.dim() else []
            for axis, part in enumerate(where):
                position[axis] += part.start
            worst = Finding(match and worst.match, "max", float(excess[at]) * t, t, position)
    return worst
