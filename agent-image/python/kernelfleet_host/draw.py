"""Input sets: the task's own `get_inputs()`, and transformed ones where the task's invariants survive.

Knows which tensors bear which transform. Must not know where the slots lie or what the reference makes of them.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from kernelfleet_zygote import Refused

from kernelfleet_host.task import Task
from kernelfleet_host.tensors import Meta, dtype_name

KINDS = ("none", "mixed", "scale", "shift", "negate")
MIXES = {"up": ("scale", 1e5), "down": ("scale", 1e-6), "shift": ("shift", -0.5), "negate": ("negate", -1.0)}
"""What a few places of a mixed set may be, and the transform of a whole set that the reference must bear for it."""
_PLACES = 6
"""Single elements of an input that are changed in a mixed set, beside one row."""
_ROWS = 4
"""Fewest rows of which one may be changed."""
_SAMPLE = 1 << 16


class Inputs:
    """What `get_inputs()` gives: kinds, shapes, values that never change."""

    def __init__(self, task: Task, example: list[Any], device: str, half: bool) -> None:
        """`example`: one result of `get_inputs()`; tensors may be on meta."""
        self.task = task
        self.device = device
        self.half = half
        self.metas: list[Meta | None] = []
        self.values: list[Any] = []
        for value in example:
            if isinstance(value, torch.Tensor):
                meta = Meta.of(value)
                if half and value.is_floating_point():
                    meta = Meta(torch.float16, meta.shape, meta.strides)
                dtype_name(meta.dtype)
                self.metas.append(meta)
                self.values.append(None)
            else:
                self.metas.append(None)
                self.values.append(value)
        self._allowed: list[frozenset[str]] | None = None
        self.mixes: tuple[str, ...] | None = None
        """Of `MIXES`, what the reference bears; to be found out once, before the first mixed set."""

    def wire(self) -> list[dict[str, Any]]:
        """`inputs` of the reply to `open`."""
        return [
            {"kind": "tensor", **meta.wire()} if meta is not None else {"kind": "value", "repr": repr(value)[:4096]}
            for meta, value in zip(self.metas, self.values, strict=True)
        ]

    def draw(self, seed: int) -> list[Any]:
        """A set as the task gives it, in the precision asked for, on the device.

        `Refused("random")` where shapes, dtypes or plain values differ from the first set's.
        """
        drawn = self.task.inputs(seed, self.device)
        if len(drawn) != len(self.metas):
            raise Refused("random", f"get_inputs() gave {len(drawn)} inputs, before it gave {len(self.metas)}")
        result: list[Any] = []
        for i, (value, meta) in enumerate(zip(drawn, self.metas, strict=True)):
            if meta is None:
                if isinstance(value, torch.Tensor) or repr(value) != repr(self.values[i]):
                    raise Refused(
                        "random", f"input {i} of get_inputs() is a plain value and differs from call to call: {value!r}"
                    )
                result.append(value)
                continue
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != meta.shape:
                raise Refused("random", f"input {i} of get_inputs() changes its shape from call to call")
            if value.dtype != meta.dtype:
                if not (self.half and value.is_floating_point()):
                    raise Refused("random", f"input {i} of get_inputs() changes its dtype from call to call")
                value = value.to(meta.dtype)
            result.append(value)
        if self._allowed is None:
            self._allowed = [allowed(v) if isinstance(v, torch.Tensor) else frozenset() for v in result]
        return result

    def transform(self, values: list[Any], kind: str, factor: float) -> bool:
        """Transforms tensors in place; False where no input bears it (then nothing has changed)."""
        if kind == "none":
            return True
        if kind not in KINDS or kind == "mixed":
            raise Refused("transform", f"no transform {kind!r}")
        done = False
        for value, may in zip(values, self._allowed or [], strict=True):
            if kind not in may:
                continue
            done = True
            if kind == "scale":
                value.mul_(factor)
            elif kind == "shift":
                value.add_(factor)
            else:
                value.neg_()
        return done

    def mix(self, values: list[Any], seed: int) -> bool:
        """Changes a secret few places of each input that bears every transform, in place; False where none does.

        A row and some single elements are negated, shifted or scaled (by 4 at most, so that they rule no sum of squares).
        No place of such a set tells whether another one is as `get_inputs` drew it. An input that is no more than it
        was (integers, labels, probabilities, triangular and symmetric matrices) is left alone.
        """
        done = False
        chance = random.Random(f"places {seed}")
        for value, may in zip(values, self._allowed or [], strict=True):
            if not self.mixes or may != frozenset({"scale", "shift", "negate"}):
                continue
            done = True
            if value.dim() and value.shape[0] >= _ROWS and value.numel() > value.shape[0]:
                _change(value[chance.randrange(value.shape[0])], chance.choice(self.mixes), chance)
            for _ in range(min(_PLACES, value.numel() // 8)):
                place = tuple(chance.randrange(size) for size in value.shape)
                _change(value[place], chance.choice(self.mixes), chance)
        return done


def _change(part: torch.Tensor, how: str, chance: random.Random) -> None:
    """Changes a view of an input."""
    if how == "negate":
        part.neg_()
    elif how == "shift":
        part.add_(MIXES["shift"][1])
    else:
        part.mul_(chance.uniform(2.0, 4.0) if how == "up" else chance.uniform(0.25, 0.5))


def allowed(tensor: torch.Tensor) -> frozenset[str]:
    """Transforms that keep what a tensor is by construction.

    None for integers, labels and masks (all values whole numbers) and probabilities (rows that sum to 1); scale and
    negate for triangular, diagonal and symmetric matrices; else all.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return frozenset()
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    step = max(1, flat.numel() // _SAMPLE)
    sample = flat[::step].double()
    if bool((sample == sample.round()).all()):
        return frozenset()
    if bool((sample >= 0).all()) and bool((sample <= 1).all()) and tensor.dim() > 0:
        for dim in {tensor.dim() - 1, min(1, tensor.dim() - 1)}:
            size = tensor.shape[dim]
            if size < 2:
                continue
            rows = tensor.movedim(dim, -1)
            while rows.dim() > 1:
                rows = rows[:64] if rows.dim() == 2 else rows[0]
                if rows.dim() == 2 and rows.shape[0] <= 64:
                    break
            sums = rows.double().sum(-1)
            if bool(((sums - 1).abs() < (1e-3 if tensor.dtype == torch.float32 else 2e-2)).all()):
                return frozenset()
    if tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] > 1:
        matrix = tensor
        while matrix.dim() > 2:
            matrix = matrix[0]
        if (
            not bool(matrix.triu(1).any())
            or not bool(matrix.tril(-1).any())
            or (matrix.shape[0] > 2 and bool(torch.equal(matrix, matrix.T)))
        ):
            return frozenset({"scale", "negate"})
    return frozenset({"scale", "shift", "negate"})
