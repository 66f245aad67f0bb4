"""The float64 run of a reference, against which both reference and candidate are measured.

Knows how to run a model that was written for another precision in double. Must not know the rules of comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernelfleet_zygote import Refused
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_LOW = (torch.float32, torch.float16, torch.bfloat16)


class Double(TorchDispatchMode):
    """Every floating argument and every dtype that is asked for becomes float64; what is written stays as it is.

    It catches what `model.double()` doesn't: `.float()` inside `forward`, masks and tables that it makes, tensors
    that hang on a module without being in its state dict.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator in double."""
        kwargs = dict(kwargs or {})
        written = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        names = [a.name for a in func._schema.arguments]
        args = tuple(a if names[i] in written else tree_map(_up, a) for i, a in enumerate(args))
        kwargs = {k: v if k in written else tree_map(_up, v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _up(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype in _LOW else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW else value
    return value


def widened(value: Any) -> Any:
    """A copy of a tensor in double where it is floating; others are copied."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.double() if value.dtype in _LOW else value.clone()


class Exact:
    """Runs the float64 twin of a model. The twin is made per parameter set and kept where it is small."""

    def __init__(self, keep_bytes: int = 512 << 20, copy_bytes: int = 4 << 30) -> None:
        self._keep = keep_bytes
        self._copy = copy_bytes
        self._twin: torch.nn.Module | None = None
        self._of: object = None

    def forget(self) -> None:
        """Drops the twin (the parameters have changed)."""
        self._twin = None
        self._of = None

    def run(
        self, model: torch.nn.Module, call: Callable[[Any, list[Any]], Any], inputs: list[Any]
    ) -> tuple[Any, list[Any], torch.nn.Module]:
        """Result, inputs as they were left, and the twin. `inputs` (any precision) are copied.

        `Refused("exact")` where the reference can't run in double.
        """
        wide = [widened(v) for v in inputs]
        twin = self._make(model)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with Double():
                result = call(twin, wide)
        except Refused as refused:
            if refused.code == "memory":
                raise
            raise Refused("exact", f"the reference doesn't run in float64: {refused.message}") from refused
        finally:
            torch.set_default_dtype(before)
            if twin is self._twin and _bytes(twin) > self._keep:
                self.forget()
        return result, wide, twin

    def _make(self, model: torch.nn.Module) -> torch.nn.Module:
        if self._twin is not None and self._of is model:
            return self._twin
        if _bytes(model) > self._copy:
            return model
        try:
            twin = copy.deepcopy(model).double()
        except (RuntimeError, TypeError, NotImplementedError):
            return model
        self._twin, self._of = twin, model
        return twin


def _bytes(model: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def slices(batch: int, pieces: int) -> Iterator[tuple[int, int]]:
    """`pieces` ranges that cover `range(batch)`."""
    for i in range(pieces):
        lo, hi = batch * i // pieces, batch * (i + 1) // pieces
        if hi > lo:
            yield lo, hi
