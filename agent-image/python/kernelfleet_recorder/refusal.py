"""Refusals: what a candidate did that no plan may hold, where, and what to use instead.

Knows codes and hints. Must not know how tensors are tracked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """A line of the candidate: `file` as in its folder, `source` the line's text."""

    file: str
    line: int
    source: str


@dataclass(frozen=True)
class Violation:
    """Why a recording is refused; the first one of a recording stands, whatever the candidate catches."""

    code: str
    message: str
    hint: str = ""
    place: Place | None = None

    def reply(self) -> dict[str, Any]:
        """The reply of `record`."""
        reply: dict[str, Any] = {"ok": False, "code": self.code, "message": self.message[:4000]}
        if self.place is not None:
            reply |= {"file": self.place.file, "line": self.place.line, "source": self.place.source[:500]}
        if self.hint:
            reply["hint"] = self.hint
        return reply


class Refusal(BaseException):
    """Unwinds a refused recording. Not an `Exception`, so that an honest `except Exception` doesn't go on for nothing."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.message)
        self.violation = violation


MATMUL = frozenset(
    "mm addmm bmm baddbmm matmul linear mv addmv dot vdot inner einsum tensordot _addmm_activation".split()
)
CONV = frozenset(
    "convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d mkldnn_convolution "
    "cudnn_convolution _convolution convolution_overrideable".split()
)
COPY = frozenset("clone copy_ copy contiguous _to_copy to lift_fresh_copy new_tensor resize_".split())
GATHER = frozenset("cat stack index index_select gather index_put_ pad constant_pad_nd flip roll repeat".split())
COMPARE = frozenset("gt ge lt le eq ne any all isnan isinf isfinite logical_and logical_or logical_not".split())
READS = frozenset("_local_scalar_dense item is_nonzero equal allclose nonzero unique unique2 _unique2 bincount".split())


BRANCH = (
    "forward runs once, on tensors without values, so `if` can look at shapes, types and Python numbers alone; what "
    "depends on values is decided in the kernel, for each element (`y[i] = x[i] > 0.0f ? a : b`)"
)
"""What to do instead of a branch on data."""


def hint_for(operator: str, dtype_changes: bool = False) -> str:
    """What to use instead of a framework operator (`operator`: ATen's base name without a namespace)."""
    if operator in MATMUL:
        return "use kf.matmul or kf.linear where the task allows it, or a kernel of your own"
    if operator in CONV:
        return "use kf.conv or kf.conv_transpose where the task allows it, or a kernel of your own"
    if operator in COPY:
        if dtype_changes:
            return "convert inside a kernel: read the input in its own type and cast in registers"
        return "read the tensor through its strides inside a kernel, or write a kernel that packs it"
    if operator in GATHER:
        return "let a kernel write into a slice of its output; views (split, chunk, slices, expand) cost nothing"
    if operator.rstrip("_") in COMPARE:
        return BRANCH
    if operator.endswith("_like") or operator in ("rand", "randn", "bernoulli_", "native_dropout"):
        return "random numbers can't be part of a plan"
    return "write a kernel in kernels/ and launch it with kf.load(..)"
