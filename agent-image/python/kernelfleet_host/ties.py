"""An index among equal extremes is as good as the one that the reference picked.

Knows argmax, argmin and the index results of max and min. Must not know other integer outputs: those are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernelfleet_host.tensors import flatten

if TYPE_CHECKING:
    from kernelfleet_host.reference import Reference, Slot

_CHOOSERS = {
    "aten.argmax.default": None,
    "aten.argmin.default": None,
    "aten.max.dim": 1,
    "aten.min.dim": 1,
}


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.Tensor, int | None, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        which = _CHOOSERS.get(str(func), -1)
        if which != -1:
            bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False)) | kwargs
            picked = result if which is None else result[which]
            self.seen.append((args[0], picked, bound.get("dim"), bool(bound.get("keepdim", False))))
        return result


def equal_choices(reference: Reference, slot: Slot, output: int, c: torch.Tensor, r: torch.Tensor) -> bool:
    """Whether output `output` is chosen by argmax or the like and `c` points at values equal to those at `r`."""
    watch = _Watch()
    values = reference._fresh_inputs(slot)
    with watch:
        result = reference.task.call(reference.ready(), values)
    reference._restore_state()
    outputs, _ = flatten(result)
    if output >= len(outputs):
        return False
    final = outputs[output]
    for source, picked, dim, keepdim in reversed(watch.seen):
        if picked.untyped_storage().data_ptr() != final.untyped_storage().data_ptr() or picked.numel() != final.numel():
            continue
        if dim is None:
            flat = source.flatten()
            return _same(flat, c.reshape(1), r.reshape(1), 0)
        axis = dim % max(source.dim(), 1)
        shape = list(source.shape)
        shape[axis] = 1
        del keepdim
        return _same(source, c.reshape(shape), r.reshape(shape), axis)
    return False


def _same(source: torch.Tensor, c: torch.Tensor, r: torch.Tensor, axis: int) -> bool:
    if bool((c < 0).any()) or bool((c >= source.shape[axis]).any()):
        return False
    return bool((source.gather(axis, c.long()) == source.gather(axis, r.long())).all())
