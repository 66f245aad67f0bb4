"""What refuses a task: answers that need no work and would pass, chance, hidden state, an inaccurate reference.

Knows the refusals of "Correct" in `docs/measuring.md`. Must not know candidates. An answer counts as passing only
where it passes on every set that a judge would use: plain ones, scaled, shifted and negated ones.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kernelfleet_zygote import Refused
from torch.utils._python_dispatch import TorchDispatchMode

from kernelfleet_host import compare, parameters
from kernelfleet_host.compare import finite
from kernelfleet_host.reference import Reference, Slot, available_bytes
from kernelfleet_host.task import plain_tensors
from kernelfleet_host.tensors import flatten

TRANSFORMS = (("scale", 1e5), ("scale", 1e-6), ("shift", -0.5), ("negate", -1.0))
MAX_SKIPS = 24
ERROR_BOUND = {False: 1e-2, True: 5e-2}
"""Largest rms(r-d)/rms(d) of a reference: in float32 (TF32 convolutions included), in half precision."""
ALIKE = {False: 1e-4, True: 1e-2}
"""Largest rms(a-b)/rms(b) of two runs that are to be the same: in float32, in half precision."""
ROUNDED = 1e-2
"""The largest such that TF32 in one of them makes."""
_SEED = 0x0C4E_C000
_PARAMETERS = 0x0C4E_0001

# Operators that do nothing in eval() or whose result doesn't depend on the input's values.
_EXEMPT = {
    "clone",
    "detach",
    "detach_",
    "contiguous",
    "alias",
    "lift_fresh",
    "lift_fresh_copy",
    "_to_copy",
    "copy_",
    "dropout",
    "native_dropout",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "rand_like",
    "randn_like",
    "fill_",
    "zero_",
    # Of a tensor's place, not of its values: a recurrent module lays out its weights with it.
    "set_",
    "resize_",
}


@dataclass(frozen=True)
class Skippable:
    """An operator whose first tensor argument could stand for its result."""

    index: int
    op: str
    line: int | None


class Skip(TorchDispatchMode):
    """Leaves one operator out: its result is its first tensor argument. With `skip` None it only lists them."""

    def __init__(self, path: str, skip: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = path
        self.skip = skip
        self.seen: list[Skippable] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs or skips one operator."""
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        first = next((a for a in args if isinstance(a, torch.Tensor)), None)
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if name in _EXEMPT or is_view or first is None or not first.is_floating_point() or not returns:
            return func(*args, **kwargs)
        in_place = returns[0].alias_info is not None
        if self.skip is not None and len(self.seen) == self.skip and in_place:
            self._note(func)
            return first
        result = func(*args, **kwargs)
        head = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(head, torch.Tensor) or head.shape != first.shape or head.dtype != first.dtype:
            return result
        if not in_place and head.data_ptr() == first.data_ptr():
            return result  # a view that its schema doesn't call one
        index = len(self.seen)
        self._note(func)
        if self.skip != index:
            return result
        if isinstance(result, (tuple, list)):
            return type(result)([first, *result[1:]])
        return first

    def _note(self, func: Any) -> None:
        frame: Any = sys._getframe(2)
        line = None
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                line = int(frame.f_lineno)
                break
            frame = frame.f_back
        self.seen.append(Skippable(len(self.seen), str(func), line))


@dataclass
class Shortcut:
    """An answer without the work. `make` gives the outputs for a slot, or None where it can't."""

    code: str
    message: str
    make: Callable[[Slot, list[torch.Tensor]], list[torch.Tensor] | None]
    line: int | None = None
    cheap: bool = False
    """Costs a run of the reference at most: tried on the first sets however little time is left."""


def _difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """The largest rms(a-b)/rms(b) of a tensor; inf where integers differ, or one of a and b alone has a value that isn't finite."""
    most = 0.0
    for x, y in zip(a, b, strict=True):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return math.inf
        elif compare.non_finite(x, y) is not None:
            return math.inf
        else:
            apart, whole = compare.summed(x, y).grouped().rms, compare.summed(y).grouped().rms
            most = max(most, 0.0 if apart == 0 else apart / whole if whole else math.inf)
    return most


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    cuda, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = cuda.allow_tf32, cudnn.allow_tf32
    cuda.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        cuda.allow_tf32, cudnn.allow_tf32 = allowed


class Check:
    """One check of an open task."""

    def __init__(self, reference: Reference, inputs: int, seconds: float) -> None:
        self.reference = reference
        self.inputs = inputs
        self.deadline = time.monotonic() + seconds
        self.refusals: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.slot = reference._new_slot(shared=False)
        self.other = reference._new_slot(shared=False)
        self.outputs = len(reference.output_metas)
        self.error: float | None = None
        self._constants: list[float] | None = None
        # Generators before and after the first run of forward under a seed, which `_deterministic` repeats.
        self._drawn: tuple[torch.Tensor, torch.Tensor] | None = None
        # What forward gave for one other set, with that set's key.
        self._kept: tuple[tuple[str, float], list[torch.Tensor]] | None = None
        self.eager_us: float | None = None
        self.wall_us: float | None = None
        self.phases: dict[str, float] = {}

    def refuse(self, code: str, message: str, line: int | None = None) -> None:
        """Adds a refusal."""
        self.refusals.append({"code": code, "message": message, **({"line": line} if line is not None else {})})

    def run(self) -> dict[str, Any]:
        """All of it; what the task raises is a refusal too."""
        before = self.reference.seed
        for step in (self._runs, self._deterministic, self._own_state, self._accuracy, self._shortcuts, self._time):
            start = time.monotonic()
            try:
                step()
            except Refused as refused:
                self.refuse(refused.code, refused.message, refused.extra.get("line"))
                break
            finally:
                self.phases[step.__name__.lstrip("_")] = round(time.monotonic() - start, 3)
            if any(r["code"] in ("random", "stateful", "not_finite", "empty") for r in self.refusals):
                break
        if before is not None:
            self.reference.use(before)
        traced = self.reference.traced
        return {
            "accepted": not self.refusals,
            "refusals": self.refusals,
            "notes": self.notes,
            "eager_us": self.eager_us,
            "wall_us": self.wall_us,
            "operators": dict(sorted(traced.operators.items())) if traced is not None else {},
            "memory_bytes": traced.peak_bytes if traced is not None else 0,
            "phases_seconds": self.phases,
            "reference_error": finite(self.error) if self.error is not None else None,
        }

    def _runs(self) -> None:
        reference = self.reference
        reference.use(_PARAMETERS)
        reference.draw(self.slot, _SEED, "none", 1.0)
        reference.ready()
        torch.manual_seed(1)
        before = _generators(reference.device)
        expected = reference.expect(self.slot)
        self._drawn = before, _generators(reference.device)
        if not expected or all(t.numel() == 0 for t in expected):
            self.refuse("empty", "forward gives no tensor with elements")
        for i, tensor in enumerate(expected):
            if tensor.is_floating_point() and tensor.numel() and not bool(torch.isfinite(tensor).any()):
                self.refuse("not_finite", f"output {i} has no finite value, so anything of the kind would pass")
        if reference.trace_error is not None:
            self.notes.append(f"can't be traced on shapes alone: {reference.trace_error.message}")

    def _same(self, tensors: list[torch.Tensor]) -> bool:
        return bool(self.reference.decide(self.slot, tensors, "contract")["match"])

    def _alike(self, run: Callable[[], list[torch.Tensor]], *firsts: Callable[[], list[torch.Tensor]]) -> bool:
        """Whether `run` gives what was expected at first, but for what two algorithms of a library do otherwise. What TF32 may have
        made different has to be alike without it, to what each of `firsts` makes. Not the contract's rule: a float64 run of a
        random reference differs."""
        half = self.reference.half
        found = _difference(run(), self.reference.expect(self.slot))
        if found <= ALIKE[half] or found > ROUNDED or not self.reference.takes_tf32():
            return found <= ALIKE[half]
        with _without_tf32():
            again = run()
            return all(_difference(again, first()) <= ALIKE[half] for first in firsts)

    def _deterministic(self) -> None:
        reference = self.reference
        assert self._drawn is not None
        before, after = self._drawn
        last = []

        def seeded(seed: int) -> Callable[[], list[torch.Tensor]]:
            def run() -> list[torch.Tensor]:
                torch.manual_seed(seed)
                outputs = reference.forward(self.slot)
                last.append(_generators(reference.device))
                return outputs

            return run

        def fresh() -> list[torch.Tensor]:
            # Of a model that was never called: what only a first call does differently is state too.
            model = self._another(_PARAMETERS)
            torch.manual_seed(1)
            return self._forward_of(model)

        if not self._alike(seeded(1), seeded(1), fresh):
            self.refuse("stateful", "two calls with the same inputs, parameters and seed give different outputs")
            return
        last.clear()
        differs = not self._alike(seeded(2), seeded(1))
        # What is drawn may be forgotten within the tolerance, as the first state of a long recurrence is; a forward that
        # seeds the generator itself draws the same each time.
        drawn = not torch.equal(after, before) and not torch.equal(after, last[0])
        if differs or drawn:
            self.refuse("random", "the outputs depend on the random generator: forward draws numbers")

    def _another(self, seed: int) -> torch.nn.Module:
        """A model that was made under `seed` and has the current parameter set."""
        reference = self.reference
        model = parameters.fresh(reference.task, seed, reference.half).to(reference.device)
        parameters.install(model, reference.state_values(_PARAMETERS))
        return model

    def _forward_of(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """What another model leaves for the slot."""
        own, self.reference.model = self.reference.model, model
        try:
            return self.reference.forward(self.slot)
        finally:
            self.reference.model = own

    def _own_state(self) -> None:
        """Another model with the same state dict must give the same outputs."""
        model = self._another(_PARAMETERS + 1)
        if not self._alike(lambda: self._forward_of(model), lambda: self.reference.forward(self.slot)):
            held = plain_tensors(model)
            names = f" ({', '.join(held[:5])})" if held else ""
            self.refuse(
                "stateful",
                "two models with the same state dict give different outputs: the constructor draws tensors that are "
                f"not in it{names}",
            )

    def _accuracy(self) -> None:
        reference = self.reference
        found = [s for s in reference.statistics(self.slot) if s is not None]
        self.error = max((s.relative for s in found), default=0.0)
        if reference.no_exact is not None:
            self.notes.append(f"no float64 run to measure the reference's error by: {reference.no_exact}")
            return
        bound = ERROR_BOUND[reference.half]
        if self.error > bound:
            self.refuse(
                "inaccurate",
                f"the reference itself is off from a float64 run by {self.error:.1e} of its size, the bound is {bound:g}",
            )

    # ---- answers without the work ----

    def _skip(self, index: int | None, slot: Slot) -> tuple[list[torch.Tensor] | None, list[Skippable]]:
        reference = self.reference
        mode = Skip(reference.task.path, index)
        values = reference._fresh_inputs(slot)
        try:
            with mode:
                result = reference.task.call(reference.ready(), values)
            outputs, _ = flatten(result)
            kept: list[torch.Tensor] | None = [o.clone() for o in outputs]
        except Refused as refused:
            if refused.code == "memory":
                raise
            kept = None
        reference._restore_state()
        reference._sync()
        return kept, mode.seen

    def _shortcuts(self) -> None:
        _, found = self._skip(None, self.slot)
        if len(found) > MAX_SKIPS:
            self.notes.append(f"of {len(found)} operators that could be skipped {MAX_SKIPS} were tried")
            found = [found[i * len(found) // MAX_SKIPS] for i in range(MAX_SKIPS)]
        shortcuts = [
            Shortcut("zeros", "zeros would pass", lambda _s, r: [torch.zeros_like(t) for t in r], cheap=True),
            Shortcut("constant", "a constant would pass", self._constant, cheap=True),
            Shortcut("other_set", "the output for other inputs would pass", self._of_other_inputs, cheap=True),
            Shortcut("mean", "the mean output over other inputs would pass", self._mean),
        ]
        for skippable in found:
            shortcuts.append(
                Shortcut(
                    "skip_operator",
                    f"leaving out {skippable.op} would pass",
                    lambda s, _r, k=skippable.index: self._skip(k, s)[0],  # type: ignore[misc]
                    skippable.line,
                )
            )
        alive = shortcuts
        # What tells most comes first, for a check that runs out of time.
        sets = [("none", 1.0), *TRANSFORMS, *[("none", 1.0)] * (self.inputs - 1)]
        least = 1 + len(TRANSFORMS)
        tried = 0
        for number, (kind, factor) in enumerate(sets):
            if not alive:
                return
            if number and self._late() and (number >= least or not any(s.cheap for s in alive)):
                self.notes.append(f"out of time after {number} of {len(sets)} input sets")
                break
            tried = number + 1
            # The first is there already.
            applies = not number or self.reference.draw(self.slot, _SEED + number, kind, factor)
            if not applies or (kind != "none" and not self.reference.all_finite(self.slot)):
                continue
            expected = self.reference.expect(self.slot)
            still = []
            for shortcut in alive:
                if self._late() and not (shortcut.cheap and number < least):
                    if number == 0:
                        self.notes.append("out of time: not all operators were tried")
                    break
                made = shortcut.make(self.slot, expected[: self.outputs])
                if made is None or len(made) != self.outputs:
                    continue
                tensors = [*made, *expected[self.outputs :]]
                if self._fits(tensors, expected) and self._same(tensors):
                    still.append(shortcut)
                elif number == 0 and self._fits(tensors, expected):
                    loose = self.reference.decide(self.slot, tensors, "kernelbench")
                    if loose["match"]:
                        place = f" (line {shortcut.line})" if shortcut.line is not None else ""
                        self.notes.append(f"under the tolerance kernelbench {shortcut.message}{place}")
            alive = still
        for shortcut in alive:
            if shortcut.code == "skip_operator" and tried < least:
                # The sets that would tell them apart were not reached: no reason to refuse.
                self.notes.append(f"{shortcut.message} on the {tried} input sets that there was time for")
            else:
                self.refuse(shortcut.code, shortcut.message, shortcut.line)

    def _late(self) -> bool:
        return time.monotonic() > self.deadline

    def _fits(self, tensors: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
        return all(t.shape == e.shape and t.dtype == e.dtype for t, e in zip(tensors, expected, strict=True))

    def _run_other(self, slot: Slot, number: int) -> list[torch.Tensor]:
        if number == 0 and self._kept is not None and self._kept[0] == slot.key:
            return self._kept[1]
        kind, factor = slot.key
        self.reference.draw(self.other, _SEED + 1000 + number, kind, factor)
        outputs = self.reference.forward(self.other)[: self.outputs]
        self.other.expected = None
        if number == 0:
            held = sum(t.numel() * t.element_size() for t in outputs)
            self._kept = (slot.key, outputs) if held < available_bytes(self.reference.device) // 16 else None
        return outputs

    def _constant(self, slot: Slot, expected: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """One number an output, taken from other plain inputs and the same for all sets."""
        if self._constants is None:
            assert slot.key[0] == "none"
            self._constants = [typical(o) for o in self._run_other(slot, 0)]
        return [torch.full_like(e, v) for e, v in zip(expected, self._constants, strict=True)]

    def _of_other_inputs(self, slot: Slot, _expected: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return self._run_other(slot, 0) if any(m is not None for m in self.reference.inputs.metas) else None

    def _mean(self, slot: Slot, expected: list[torch.Tensor]) -> list[torch.Tensor] | None:
        if not any(m is not None for m in self.reference.inputs.metas):
            return None
        count = max(2, self.inputs - 1)
        sums: list[torch.Tensor] | None = None
        for number in range(count):
            outputs = self._run_other(slot, number)
            if sums is None:
                sums = [o.to(torch.float32 if o.dtype != torch.float64 else o.dtype, copy=True) for o in outputs]
            else:
                for total, output in zip(sums, outputs, strict=True):
                    total.add_(output)
        return [(s / count).to(e.dtype) for s, e in zip(sums or [], expected, strict=True)]

    def _time(self) -> None:
        reference = self.reference
        slot = reference.slot(0)
        reference.draw(slot, _SEED, "none", 1.0)
        times, walls = [], []
        for _ in range(3):
            told = reference.timed([0])
            times += told["time_us"]
            walls += told["wall_us"]
            if time.monotonic() > self.deadline:
                break
        self.eager_us, self.wall_us = statistics.median(times), statistics.median(walls)
        slot.expected = None
        if reference.device == "cuda" and self.wall_us > 5 * self.eager_us + 100:
            self.notes.append(
                f"eager's wall time ({self.wall_us:.0f} us) is far above its device time ({self.eager_us:.0f} us): "
                "the host is what is slow"
            )


def _generators(device: str) -> torch.Tensor:
    """The state of the default generators, which changes whenever a number is drawn from them."""
    states = [torch.get_rng_state()]
    if device == "cuda":
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def typical(tensor: torch.Tensor) -> float:
    """The mean of the finite values; of integers and booleans the most frequent value."""
    if not tensor.numel():
        return 0.0
    if not tensor.is_floating_point():
        return float(tensor.flatten().mode().values.item())
    total = tensor.sum(dtype=torch.float64)
    if not bool(torch.isfinite(total)):
        tensor = tensor[torch.isfinite(tensor)]
        total = tensor.sum(dtype=torch.float64)
    return float(total / tensor.numel()) if tensor.numel() else 0.0


def check(reference: Reference, inputs: int, seconds: float) -> dict[str, Any]:
    """Every refusal of the contract for the open task; stops looking for more after `seconds`."""
    return Check(reference, inputs, seconds).run()
