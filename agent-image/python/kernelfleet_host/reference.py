"""A task opened on a device: model, parameter sets, slots, expected outputs, the decision whether outputs match.

Knows all of the reference's side of one judge. Must not know the wire (session.py) or what refuses a task (check.py).
"""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kernelfleet_zygote import Refused

from kernelfleet_host import buffers, compare, parameters
from kernelfleet_host.buffers import Foreign, Shared
from kernelfleet_host.compare import Finding, Measure, Statistic, Sums
from kernelfleet_host.draw import MIXES, Inputs
from kernelfleet_host.exact import Exact, slices
from kernelfleet_host.task import Task, told
from kernelfleet_host.tensors import DTYPES, NAMES, Meta, flatten, same_structure, view
from kernelfleet_host.timing import Captured, CpuTimer, CudaTimer
from kernelfleet_host.trace import Traced, meta_inputs, meta_model

PRECISIONS = ("reference", "tf32", "half")
SMALL_SETS = 4
"""Further sets whose reference error is measured for outputs of fewer than 1024 elements."""
SPARE_BYTES = 2 << 30
"""What PyTorch may keep of a card's memory without using it."""
COPIED_BYTES = 16 << 20
"""An input of at most so many bytes is copied to where the captured forward reads; mapping a larger one there is quicker."""
_STATE_CACHE = 2
_WEIGHTS = 1 << 20


@dataclass
class Slot:
    """One place for an input set."""

    shared: list[Shared | None]
    inputs: list[Any]
    key: tuple[str, float] = ("none", 1.0)
    drawn: bool = False
    sums: list[torch.Tensor | None] = field(default_factory=list)
    pristine: dict[int, torch.Tensor] = field(default_factory=dict)
    expected: list[torch.Tensor] | None = None
    sizes: list[Measure | None] = field(default_factory=list)


class Own:
    """A buffer of our own in the place of another process's."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.size = shared.size

    def read(self, offset: int, count: int) -> torch.Tensor:
        """The memory itself."""
        return self._shared.base[offset : offset + count]

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copies `data` in."""
        self._shared.base[offset : offset + data.numel()].copy_(data)

    def close(self) -> None:
        """It stays whose it is."""


@dataclass
class Bound:
    """Where one output of the candidate lies: in its own buffer, in an input or in a tensor of the state."""

    meta: Meta
    offset: int
    foreign: Foreign | None = None
    input: int | None = None
    state: str | None = None


class Reference:
    """See the module. Every method raises `Refused`."""

    def __init__(self, source: str, path: str, device: str, precision: str, threads: int, slots: int) -> None:
        if device not in ("cpu", "cuda"):
            raise Refused("malformed", f"no device {device!r}")
        if precision not in PRECISIONS:
            raise Refused("malformed", f"no precision {precision!r}")
        torch.set_num_threads(max(1, threads))
        self.device = device
        self.half = precision == "half"
        if device == "cuda":
            if not torch.cuda.is_available():
                raise Refused("cuda", "this machine has no CUDA device that PyTorch can use")
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.allow_tf32 = precision in ("reference", "tf32")
            torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
        self.task = Task(source, path)
        self.count = 1 if device == "cpu" else max(1, slots)
        self.init = self.task.init_literal()
        self.trace_error: Refused | None = None
        self.traced: Traced | None = None
        self._built: torch.nn.Module | None = None
        example = meta_inputs(self.task)
        self.inputs = Inputs(self.task, example, device, self.half)
        self._inspect()
        self.model: torch.nn.Module | None = None
        self.seed: int | None = None
        self._state_cache: dict[int, Shared] = {}
        self._shared_state: dict[str, Shared] = {}
        self._shared_views: dict[str, torch.Tensor] = {}
        self._state_sums: dict[str, torch.Tensor] = {}
        self._slots: list[Slot] = []
        self._scratch: Slot | None = None
        self._timer: CpuTimer | CudaTimer | None = None
        self._graphs: dict[str, _Graph | None] = {}
        self.short: set[str] = set()
        """What could not be captured as a graph for want of memory: its times are no baseline for later."""
        self.windows = True  # slots are mapped in turn at the addresses that a graph reads
        self._exact = Exact(copy_bytes=(1 << 30) if device == "cpu" else (16 << 30))
        self._statistics: dict[tuple[int | None, str, float], list[Statistic | None]] = {}
        self._can_slice: bool | None = None
        self._sum_weights: torch.Tensor | None = None
        self.bound: list[Bound] = []
        self._foreign: list[Foreign] = []
        self._workspaces: list[tuple[Foreign, int]] = []
        self._calls = 0
        self._wall = 0.0
        self.no_exact: str | None = None
        self._cold = False  # memory was given back: what isn't a graph is run once before it is timed

    # ---- what the task is ----

    def takes_tf32(self) -> bool:
        """Whether the library may round what it multiplies to TF32. Which of its algorithms do is its choice anew in each call, by
        the memory that is left for one."""
        allowed = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return self.device == "cuda" and not self.half and allowed

    def _meta_inputs(self) -> list[Any]:
        return [
            torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta") if m is not None else v
            for m, v in zip(self.inputs.metas, self.inputs.values, strict=True)
        ]

    def _inspect(self) -> None:
        """Shapes of state and outputs and what is written, from meta tensors or else from a real run."""
        model = meta_model(self.task)
        if self.half:
            model = model.half()
        self.state_metas = {name: Meta.of(t) for name, t in parameters.state(model).items()}
        try:
            self.traced = Traced(self.task, model, self._meta_inputs())
        except Refused as refused:
            self.trace_error = refused
        if self.traced is not None:
            self.structure = self.traced.structure
            self.output_metas = self.traced.output_metas
            self.written_inputs = self.traced.written_inputs
            self.written_state = self.traced.written_state
            return
        del model
        real = parameters.fresh(self.task, 0, self.half)
        values = [v.cpu() if isinstance(v, torch.Tensor) else v for v in self.inputs.draw(0)]
        before = [v._version if isinstance(v, torch.Tensor) else 0 for v in values]
        held = parameters.state(real)
        versions = {n: t._version for n, t in held.items()}
        result = self.task.call(real, values)
        outputs, self.structure = flatten(result)
        self.output_metas = [Meta.of(o) for o in outputs]
        self.written_inputs = [
            i for i, v in enumerate(values) if isinstance(v, torch.Tensor) and v._version != before[i]
        ]
        self.written_state = [n for n, t in held.items() if t._version != versions[n]]

    def estimate(self) -> dict[str, Any]:
        """Memory and operators without data."""
        traced = self.require_trace()
        return {
            "input_bytes": sum(m.span for m in self.inputs.metas if m is not None),
            "output_bytes": sum(m.span for m in self.output_metas),
            "parameter_bytes": sum(m.span for m in self.state_metas.values()),
            "peak_bytes": traced.peak_bytes,
            "operators": dict(sorted(traced.operators.items())),
            "operator_count": sum(traced.operators.values()),
        }

    def require_trace(self) -> Traced:
        """The trace, or the reason why there is none."""
        if self.traced is None:
            assert self.trace_error is not None
            raise self.trace_error
        return self.traced

    # ---- parameter sets ----

    def state_buffer(self, seed: int) -> tuple[Shared, list[dict[str, Any]]]:
        """The CPU bytes of the parameter set of `seed`, and where each tensor lies."""
        records, total = parameters.layout(self.state_metas)
        known = self._state_cache.pop(seed, None)
        if known is None:
            while len(self._state_cache) >= _STATE_CACHE or (self._state_cache and total * 3 > available_bytes("cpu")):
                self._state_cache.pop(next(iter(self._state_cache))).close()
            built = parameters.fresh(self.task, seed, self.half)
            tensors = parameters.state(built)
            if {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()} != {
                n: (m.dtype, m.shape) for n, m in self.state_metas.items()
            }:
                raise Refused("stateful", "the constructor makes another state dict each time it is called")
            known = buffers.share(total, "cpu")
            for record, (name, meta) in zip(records, self.state_metas.items(), strict=True):
                view(known.base, meta, record["offset"]).copy_(tensors[name])
            if self.model is None:
                self.model = built.to(self.device) if self.device == "cuda" else built
        self._state_cache[seed] = known
        return known, records

    def state_values(self, seed: int) -> dict[str, torch.Tensor]:
        """The parameter set of `seed` as CPU tensors over the cache."""
        shared, records = self.state_buffer(seed)
        return {
            name: view(shared.base, meta, record["offset"])
            for record, (name, meta) in zip(records, self.state_metas.items(), strict=True)
        }

    def use(self, seed: int) -> None:
        """Makes the set of `seed` current, in the model and in shared buffers."""
        values = self.state_values(seed)
        model = self._model()
        with told("loading a parameter set", self.task.path):
            parameters.install(model, values)
            for name, meta in self.state_metas.items():
                if name not in self._shared_state:
                    self._shared_state[name] = buffers.share(meta.span, self.device)
                    self._shared_views[name] = view(self._shared_state[name].base, meta)
                self._shared_views[name].copy_(values[name])
        self.seed = seed
        self._exact.forget()
        for slot in [*self._slots, *([self._scratch] if self._scratch else [])]:
            slot.expected = None
            slot.sizes = []
        self._state_sums = {}
        self._sync()

    def state_exports(self) -> list[Shared]:
        """Shared buffers of the state, in order."""
        return [self._shared_state[name] for name in self.state_metas]

    def _model(self) -> torch.nn.Module:
        if self.model is None:
            self.state_buffer(0 if self.seed is None else self.seed)
        if self.model is None:  # the cache had the set, but no model was kept
            built = parameters.fresh(self.task, 0, self.half)
            self.model = built.to(self.device) if self.device == "cuda" else built
        return self.model

    def ready(self) -> torch.nn.Module:
        """The model with a current parameter set (that of seed 0 where none was chosen)."""
        if self.seed is None:
            self.use(0)
        return self._model()

    def _restore_state(self) -> None:
        if not self.written_state or self.seed is None:
            return
        values = self.state_values(self.seed)
        held = parameters.state(self._model())
        with torch.no_grad():
            for name in self.written_state:
                held[name].copy_(values[name])

    # ---- slots ----

    def slots(self) -> list[Slot]:
        """All slots, made on first use."""
        while len(self._slots) < self.count:
            self._slots.append(self._new_slot(shared=True))
        return self._slots

    def slot(self, index: Any) -> Slot:
        """One slot by number."""
        if not isinstance(index, int) or not 0 <= index < self.count:
            raise Refused("malformed", f"no slot {index!r}, there are {self.count}")
        return self.slots()[index]

    def drawn(self, index: Any) -> Slot:
        """One slot by number, into which inputs were drawn."""
        slot = self.slot(index)
        if not slot.drawn:
            raise Refused("malformed", f"nothing was drawn into slot {index}")
        return slot

    def scratch(self) -> Slot:
        """A slot that nobody else sees."""
        if self._scratch is None:
            self._scratch = self._new_slot(shared=False)
        return self._scratch

    def _new_slot(self, shared: bool) -> Slot:
        owned: list[Shared | None] = []
        values: list[Any] = []
        for meta, value in zip(self.inputs.metas, self.inputs.values, strict=True):
            if meta is None:
                owned.append(None)
                values.append(value)
            elif shared:
                buffer = buffers.share(meta.span, self.device)
                owned.append(buffer)
                values.append(view(buffer.base, meta))
            else:
                owned.append(None)
                values.append(torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=self.device))
        return Slot(owned, values)

    def draw(self, slot: Slot, seed: int, kind: str, factor: float, wait: bool = True) -> bool:
        """Fills a slot; False where the transform doesn't apply (the slot holds untransformed data). Without `wait` the device may
        still be at it."""
        if kind == "mixed" and self.inputs.mixes is None:
            self.inputs.mixes = self._borne(slot)
        drawn = self.inputs.draw(seed)
        slot.expected = None
        slot.sizes = []
        with torch.no_grad():
            for i, (target, value) in enumerate(zip(slot.inputs, drawn, strict=True)):
                if isinstance(target, torch.Tensor):
                    target.copy_(value)
                else:
                    slot.inputs[i] = value
                drawn[i] = None  # each is freed at once
            if kind == "mixed":
                applicable = self.inputs.mix(slot.inputs, seed)
            else:
                applicable = self.inputs.transform(slot.inputs, kind, factor)
        slot.key = (kind, factor) if applicable else ("none", 1.0)
        slot.drawn = True
        slot.pristine = {i: slot.inputs[i].clone() for i in self.written_inputs}
        slot.sums = [self._checksum(s.base) if s is not None else None for s in slot.shared]
        if wait:
            self._sync()
        return applicable

    def _borne(self, slot: Slot) -> tuple[str, ...]:
        """What a few places of an input may be: what leaves the reference finite where all of them are so."""
        found = []
        for how, (kind, factor) in MIXES.items():
            seed = int.from_bytes(os.urandom(8), "little") >> 1
            try:
                if self.draw(slot, seed, kind, factor) and self.all_finite(slot):
                    found.append(how)
            except Refused as refused:  # forward itself says that such inputs are none
                if refused.code in ("memory", "cuda"):
                    raise
        slot.expected = None
        return tuple(found)

    def _checksum(self, base: torch.Tensor) -> torch.Tensor:
        """Sums of the bytes with secret odd weights: a buffer with another content has another one."""
        if self._sum_weights is None:
            secret = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
            weights = torch.randint(-(2**62), 2**62, (_WEIGHTS,), generator=secret) * 2 + 1
            self._sum_weights = weights.to(self.device)
        words = base.view(torch.int64)
        parts = []
        for start in range(0, words.numel(), _WEIGHTS):
            part = words[start : start + _WEIGHTS]
            parts.append((part * self._sum_weights[: part.numel()]).sum())
        return torch.stack(parts)

    def sums(self, foreign: Foreign) -> list[int]:
        """Such sums of another process's buffer, taken where it lies; good for comparing two moments of one session."""
        found: list[int] = []
        for start in range(0, foreign.size, _WEIGHTS * 64):
            part = foreign.read(start, min(_WEIGHTS * 64, foreign.size - start))
            if part.numel() % 8:
                part = torch.cat([part, part.new_zeros(8 - part.numel() % 8)])
            found += self._checksum(part).tolist()
        return found

    # ---- running the reference ----

    def timer(self) -> CpuTimer | CudaTimer:
        """The timer of the device."""
        if self._timer is None:
            self._timer = CudaTimer() if self.device == "cuda" else CpuTimer()
        return self._timer

    def _sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _fresh_inputs(self, slot: Slot) -> list[Any]:
        """The slot's inputs; those that `forward` writes as copies of what was drawn."""
        return [slot.pristine[i].clone() if i in slot.pristine else v for i, v in enumerate(slot.inputs)]

    def forward(self, slot: Slot) -> list[torch.Tensor]:
        """All that the reference leaves for a slot: outputs, then written inputs, then written state."""
        model = self.ready()
        values = self._fresh_inputs(slot)
        result = self.task.call(model, values)
        taken = self._collect(result, values, model, slot)
        self._sync()
        return taken

    def _collect(self, result: Any, values: list[Any], model: torch.nn.Module, slot: Slot) -> list[torch.Tensor]:
        outputs, _ = flatten(result)
        if len(outputs) != len(self.output_metas):
            raise Refused("structure", "forward gives another number of tensors than before")
        held = parameters.state(model) if self.written_state else {}
        kept = {v.untyped_storage().data_ptr() for v in slot.inputs if isinstance(v, torch.Tensor) and v.numel()}
        kept |= {t.untyped_storage().data_ptr() for t in model.state_dict().values() if isinstance(t, torch.Tensor)}
        taken = [o.clone() if o.untyped_storage().data_ptr() in kept else o for o in outputs]
        taken += [values[i] for i in self.written_inputs]
        taken += [held[name].clone() for name in self.written_state]
        self._restore_state()
        return taken

    def expect(self, slot: Slot) -> list[torch.Tensor]:
        """Expected outputs of a slot, computed where they aren't kept."""
        if slot.expected is None:
            if not slot.drawn:
                raise Refused("malformed", "nothing was drawn into this slot")
            slot.expected = self.forward(slot)
            slot.sizes = []
        return slot.expected

    def all_finite(self, slot: Slot) -> bool:
        """Whether every expected value is finite."""
        return all(
            not t.is_floating_point()
            or bool(torch.isfinite(t.sum(dtype=torch.float64)))
            or bool(torch.isfinite(t).all())
            for t in self.expect(slot)
        )

    def timed(self, indices: list[int]) -> dict[str, Any]:
        """`eager`: times and expected outputs of slots."""
        model = self.ready()
        times: list[float] = []
        graph = False
        for index in indices:
            slot = self.drawn(index)
            if self.device == "cpu":
                slot.expected = None  # its memory is used again by the run below
                took = self._run_cpu(slot, model, 0)
            else:
                slot.expected = None
                took, graph = self._run_cuda(slot, model, "eager")
            times.append(took)
        walls = self._walls(indices, model, times)
        return {"time_us": times, "wall_us": walls, "graph": graph, "short": "eager" in self.short}

    def _run_cpu(self, slot: Slot, call: Any, key: int) -> float:
        timer = self.timer()
        assert isinstance(timer, CpuTimer)
        values = self._fresh_inputs(slot)
        if self.written_inputs or self.written_state:
            # a warm-up would write them: it gets its own
            if key not in timer._warm:
                self.task.call(call, self._fresh_inputs(slot))
                self._restore_state()
                timer._warm.add(key)
        with told("forward", self.task.path):
            result, took = timer.run(lambda: call(*values), key)
        if key == 0:
            slot.expected = self._collect(result, values, self._model(), slot)
            slot.sizes = []
        else:
            self._restore_state()
        return took

    def _run_cuda(self, slot: Slot, call: Any, name: str) -> tuple[float, bool]:
        timer = self.timer()
        assert isinstance(timer, CudaTimer)
        if name not in self._graphs:
            timer.warm(lambda: call(*self._fresh_inputs(slot)))
            self._restore_state()
            self._graphs[name] = self._capture(name, call, slot)
            self._restore_state()
        captured = self._graphs[name]
        if captured is not None:
            try:
                captured.show(slot)
            except Refused:  # no mapping in turn: capture again, on copies
                self.windows = False
                self._restore_state()
                captured = self._graphs[name] = self._capture(name, call, slot)
                self._restore_state()
        if captured is not None:
            with told("replaying forward", self.task.path):
                result, took = timer.run(captured.graph.replay)
            values = captured.inputs
        else:
            if self._cold:
                with told("forward", self.task.path):
                    call(*self._fresh_inputs(slot))
                self._restore_state()
                self._cold = False
            values = self._fresh_inputs(slot)
            with told("forward", self.task.path):
                result, took = timer.run(lambda: call(*values))
        if name == "eager":
            kept = self._collect(result, values, self._model(), slot)
            if captured is not None:  # the next replay writes the same memory
                kept = [t.clone() for t in kept]
            self._sync()
            slot.expected = kept
            slot.sizes = []
            self._make_room(slot)
        else:
            self._restore_state()
        return took, captured is not None

    def _capture(self, name: str, call: Any, slot: Slot) -> _Graph | None:
        self.short.discard(name)
        try:
            return _Graph(self, call, slot)
        except Exception as error:  # whatever a capture runs into: eager calls are timed instead
            torch.cuda.synchronize()
            if out_of_memory(error):
                self.short.add(name)
            return None

    def give_back(self) -> None:
        """Gives memory that PyTorch keeps for later back to the device: runners need it beside this process."""
        if self.device != "cuda":
            return
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > SPARE_BYTES:
            torch.cuda.empty_cache()
            self._cold = True

    def _make_room(self, current: Slot) -> None:
        """Drops other slots' expected outputs where memory is short; they are computed again when needed."""
        need = 3 * sum(t.numel() * t.element_size() for t in current.expected or [])
        if torch.cuda.mem_get_info()[0] > need:  # what PyTorch keeps beside it costs more to ask for
            return
        for slot in self._slots:
            if available_bytes("cuda") > need:
                return
            if slot is not current:
                slot.expected = None
                slot.sizes = []

    def _walls(self, indices: list[int], model: torch.nn.Module, times: list[float]) -> list[float]:
        """Host time of plain calls; on CUDA measured on every eighth call of this op."""
        if self.device == "cpu":
            return times
        timer = self.timer()
        assert isinstance(timer, CudaTimer)
        if indices and self._calls % 8 == 0:
            slot = self.slot(indices[0])
            values = self._fresh_inputs(slot)
            with told("forward", self.task.path):
                timer.wall(lambda: model(*values))
                values = self._fresh_inputs(slot)
                _, self._wall = timer.wall(lambda: model(*values))
            self._restore_state()
        self._calls += 1
        return [self._wall] * len(indices)

    # ---- the float64 run ----

    def exact_parts(self, slot: Slot) -> list[tuple[int, list[torch.Tensor]]]:
        """(first row, tensors) of the float64 run: one part, or several along the batch where memory is short.

        `Refused("exact")` where there can be none.
        """
        pieces = self._pieces()
        if pieces == 1:
            try:
                return [(0, self._exact_whole(slot))]
            except Refused as refused:
                if refused.code != "memory":
                    raise
                pieces = 4
        raise Refused("slices", str(pieces))

    def _pieces(self) -> int:
        """In how many slices the float64 run fits into memory."""
        if self.traced is None:
            return 1
        need = 2 * self.traced.peak_bytes + (1 << 28)
        if self.device == "cpu":
            need += self.traced.column_bytes
        room = available_bytes(self.device) * 3 // 4
        return 1 if need <= room else min(1 << 16, 2 * -(-need // max(room, 1)))

    def _exact_whole(self, slot: Slot) -> list[torch.Tensor]:
        model = self.ready()
        source = [slot.pristine.get(i, v) for i, v in enumerate(slot.inputs)]
        result, left, twin = self._exact.run(model, self.task.call, source)
        outputs, _ = flatten(result)
        held = parameters.state(twin) if self.written_state else {}
        taken = [*outputs, *(left[i] for i in self.written_inputs), *(held[n].clone() for n in self.written_state)]
        self._restore_state()
        if self.written_state and twin is not model:
            self._exact.forget()
        self._sync()
        return taken

    def _exact_slice(self, slot: Slot, lo: int, hi: int) -> list[torch.Tensor]:
        """Rows lo to hi of every output, by the inputs' rows; checked against the reference's own rows."""
        model = self.ready()
        batch = self.output_metas[0].shape[0] if self.output_metas and self.output_metas[0].shape else 0
        part = [v[lo:hi] if isinstance(v, torch.Tensor) and v.dim() and v.shape[0] == batch else v for v in slot.inputs]
        result, _, _ = self._exact.run(model, self.task.call, part)
        outputs, _ = flatten(result)
        expected = self.expect(slot)
        for d, r in zip(outputs, expected, strict=True):
            rows = r[lo:hi]
            if d.shape != rows.shape:
                raise Refused("exact", "the reference can't be run in slices")
            if r.is_floating_point():
                bound = 0.1 if self.half else 0.02
                error, size = (rows.double() - d).nan_to_num(0, 0, 0).norm(), d.norm()
                if bool(torch.isfinite(size)) and float(error) > bound * float(size) + 1e-30:
                    raise Refused("exact", "a slice of the batch gives other rows than the whole batch")
        return outputs

    def sums_against_exact(
        self, slot: Slot, others: list[list[torch.Tensor]]
    ) -> tuple[list[Sums | None], list[list[Sums | None]]]:
        """Per output: sums of |d|, and for each list of tensors in `others` sums of |x-d| (None: not floating)."""
        expected = self.expect(slot)
        floating = [e.is_floating_point() for e in expected]
        shapes = [tuple(e.shape) for e in expected]

        def empty() -> list[Sums | None]:
            return [Sums(s) if f else None for s, f in zip(shapes, floating, strict=True)]

        exact, against = empty(), [empty() for _ in others]

        def add(first: int, count: int | None, outputs: list[torch.Tensor]) -> None:
            for i, d in enumerate(outputs):
                into = exact[i]
                if into is None:
                    continue
                r = expected[i]
                mask = r if count is None else r[first : first + count]
                if d.shape != mask.shape:
                    raise Refused("exact", "the float64 run has another shape")
                if compare.clean(d) and compare.clean(mask):
                    compare.accumulate(into, d, None, None, first)
                    for tensors, sums in zip(others, against, strict=True):
                        target = sums[i]
                        assert target is not None
                        x = tensors[i] if count is None else tensors[i][first : first + count]
                        compare.accumulate(target, x, d, None, first)
                    continue
                compare.accumulate(into, d, None, mask, first)
                for tensors, sums in zip(others, against, strict=True):
                    x = tensors[i] if count is None else tensors[i][first : first + count]
                    target = sums[i]
                    assert target is not None
                    # where only the float64 run is not finite, the reference stands in for it
                    compare.accumulate(target, x, torch.where(torch.isfinite(d), d, mask.double()), mask, first)

        try:
            for first, outputs in self.exact_parts(slot):
                add(first, None, outputs)
            return exact, against
        except Refused as refused:
            if refused.code != "slices":
                raise
            pieces = int(refused.message)
        batches = {s[0] if s else 0 for s in shapes}
        if len(batches) != 1 or self.written_inputs or self.written_state or batches == {0}:
            raise Refused("exact", "the float64 run doesn't fit into memory, and the task has no batch to cut")
        batch = batches.pop()
        if pieces > batch:
            pieces = batch
        for lo, hi in slices(batch, pieces):
            add(lo, hi - lo, self._exact_slice(slot, lo, hi))
        return exact, against

    def statistics(self, slot: Slot) -> list[Statistic | None]:
        """What is known of the reference's own error under this slot's parameter set and transform."""
        key = (self.seed, *slot.key)
        known = self._statistics.get(key)
        if known is None:
            known = self._first_statistics(slot, None)
            self._statistics[key] = known
        return known

    def _first_statistics(
        self, slot: Slot, sums: tuple[list[Sums | None], list[Sums | None]] | None
    ) -> list[Statistic | None]:
        if sums is None:
            sums = self._errors(slot)
        exact, error = sums
        result: list[Statistic | None] = []
        for d, e in zip(exact, error, strict=True):
            if d is None or e is None:
                result.append(None)
                continue
            md, me = d.grouped(), e.grouped()
            result.append(Statistic(me, md, compare.ratio(me.rms, md.rms), compare.ratio(me.max, md.max)))
        if any(s is not None and s.exact.numel < compare.SMALL for s in result):
            spare = self.scratch()
            for i in range(SMALL_SETS):
                kind, factor = slot.key
                self.draw(spare, 0x5EED_0000 + i, kind, factor)
                for s, d, e in zip(result, *self._errors(spare), strict=True):
                    if s is None or d is None or e is None or s.exact.numel >= compare.SMALL:
                        continue
                    md, me = d.grouped(), e.grouped()
                    s.relative = max(s.relative, compare.ratio(me.rms, md.rms))
                    s.relative_max = max(s.relative_max, compare.ratio(me.max, md.max))
            spare.expected = None
        self.give_back()
        return result

    def _errors(self, slot: Slot) -> tuple[list[Sums | None], list[Sums | None]]:
        """Sums of |d| and |r-d|. Without a float64 run the error is taken as 32 units in the last place."""
        try:
            exact, (error,) = self.sums_against_exact(slot, [self.expect(slot)])
            return exact, error
        except Refused as refused:
            if refused.code not in ("exact", "memory"):
                raise
            self.no_exact = refused.message
        exact, error = [], []
        for r in self.expect(slot):
            if not r.is_floating_point():
                exact.append(None)
                error.append(None)
                continue
            size = compare.summed(r)
            guess = compare.summed(r)
            unit = 32 * compare.eps_of(r.dtype) / compare.k_of(r.dtype)
            guess.row_squares *= unit**2
            guess.channel_squares *= unit**2
            guess.row_max *= unit
            guess.channel_max *= unit
            exact.append(size)
            error.append(guess)
        return exact, error

    # ---- comparison ----

    def bind(
        self,
        outputs: list[dict[str, Any]],
        structure: Any,
        fds: list[int],
        workspaces: list[dict[str, Any]],
        pool: Shared | None = None,
    ) -> None:
        """Takes the candidate's output buffers; checks that they can equal the reference's.

        `workspaces` are poisoned with the outputs and never read. `pool`: a buffer of our own that outputs without a
        descriptor lie in.
        """
        self.unbind()
        if not same_structure(structure, self.structure):
            raise Refused(
                "structure", f"the candidate returns {short(structure)}, the reference returns {short(self.structure)}"
            )
        if len(outputs) != len(self.output_metas):
            raise Refused("structure", f"{len(outputs)} outputs, the reference has {len(self.output_metas)}")
        used: dict[int, Foreign] = {}

        def adopt(fd: Any, size: int) -> Foreign:
            if not isinstance(fd, int) or not 0 <= fd < len(fds):
                raise Refused("malformed", f"descriptor {fd!r} is named, {len(fds)} came")
            if fd not in used:
                used[fd] = buffers.adopt(os.dup(fds[fd]), size, self.device)
                self._foreign.append(used[fd])
            return used[fd]

        bound: list[Bound] = []
        for i, (record, want) in enumerate(zip(outputs, self.output_metas, strict=True)):
            dtype = DTYPES.get(str(record.get("dtype")))
            if dtype != want.dtype:
                raise Refused("dtype", f"output {i} is {record.get('dtype')}, the reference's is {NAMES[want.dtype]}")
            shape = tuple(int(n) for n in record["shape"])
            if shape != want.shape:
                raise Refused("shape", f"output {i} has the shape {list(shape)}, the reference's is {list(want.shape)}")
            meta = Meta(want.dtype, shape, tuple(int(n) for n in record["strides"]))
            offset, size = int(record.get("offset") or 0), int(record["bytes"])
            if len(meta.strides) != len(shape) or offset < 0 or any(s < 0 for s in meta.strides):
                raise Refused("bounds", f"output {i} has impossible strides")
            place = Bound(meta, offset)
            if "input" in record:
                place.input = int(record["input"])
                own = self.inputs.metas[place.input] if 0 <= place.input < len(self.inputs.metas) else None
                size = min(size, own.span if own is not None else 0)
            elif "parameter" in record:
                place.state = str(record["parameter"])
                size = min(size, self.state_metas[place.state].span if place.state in self.state_metas else 0)
            else:
                place.foreign = Own(pool) if pool is not None else adopt(record.get("fd"), size)
                size = min(size, place.foreign.size)
            if offset % want.dtype.itemsize or offset + meta.span > size:
                raise Refused("bounds", f"output {i} lies outside of its buffer of {size} bytes")
            bound.append(place)
        for record in workspaces:
            self._workspaces.append((adopt(record.get("fd"), int(record["bytes"])), int(record["bytes"])))
        self.bound = bound

    def unbind(self) -> None:
        """Lets go of the candidate's buffers."""
        self.bound = []
        self._workspaces = []
        for foreign in self._foreign:
            foreign.close()
        self._foreign = []

    def candidate(self, slot: Slot) -> list[torch.Tensor]:
        """The bound outputs: a snapshot on the CPU, the memory itself on CUDA."""
        result = []
        for place in self.bound:
            meta = place.meta
            if meta.span == 0:
                result.append(torch.empty(meta.shape, dtype=meta.dtype, device=self.device))
            elif place.foreign is not None:
                result.append(view(place.foreign.read(place.offset, meta.span), meta))
            else:
                own = slot.shared[place.input] if place.input is not None else self._shared_state[place.state or ""]
                if own is None:
                    raise Refused("malformed", "an output is said to lie in an input that is no tensor")
                result.append(view(own.base, meta, place.offset))
        return result

    def untouched(self, slot: Slot) -> Finding | None:
        """A finding where an input or the state doesn't hold what it should, though the reference never writes it."""
        for i, (shared, sums) in enumerate(zip(slot.shared, slot.sums, strict=True)):
            if shared is None or sums is None or i in self.written_inputs:
                continue
            if not torch.equal(self._checksum(shared.base), sums):
                return Finding(False, "input", float(i), 0.0, [i])
        for i, (name, shared) in enumerate(self._shared_state.items()):
            if name in self.written_state:
                continue
            known = self._state_sums.get(name)
            now = self._checksum(shared.base)
            if known is None:
                want = self.state_values(self.seed or 0)[name]
                if not torch.equal(as_bytes(self._shared_views[name].cpu()), as_bytes(want)):
                    return Finding(False, "state", float(i), 0.0, [i])
                self._state_sums[name] = now
            elif not torch.equal(now, known):
                return Finding(False, "state", float(i), 0.0, [i])
        return None

    def many_slabs(self) -> bool:
        """Whether a comparison leaves much for the CPU: slabs of the outputs, or a state that was not looked at yet."""
        slabs = sum(sum(meta.shape[:2]) for meta in self.output_metas)
        fresh = sum(meta.span for name, meta in self.state_metas.items() if name not in self._state_sums)
        return slabs > 1 << 16 or fresh > 1 << 24

    def compare_bound(self, slot: Slot, tolerance: str) -> dict[str, Any]:
        """`compare`."""
        if not self.bound and self.output_metas:
            raise Refused("malformed", "no outputs are bound")
        bad = self.untouched(slot)
        if bad is not None:
            return reply(0, bad)
        tensors = self.candidate(slot)
        tensors += [slot.inputs[i] for i in self.written_inputs]
        tensors += [self._shared_views[name] for name in self.written_state]
        verdict = self.decide(slot, tensors, tolerance)
        with torch.no_grad():  # what forward writes is as it was drawn again
            for i, value in slot.pristine.items():
                slot.inputs[i].copy_(value)
            if self.written_state and self.seed is not None:
                values = self.state_values(self.seed)
                for name in self.written_state:
                    self._shared_views[name].copy_(values[name])
        self._sync()
        return verdict

    def decide(self, slot: Slot, candidate: list[torch.Tensor], tolerance: str) -> dict[str, Any]:
        """Whether `candidate` (outputs, written inputs, written state) equals what the reference leaves."""
        if tolerance not in ("contract", *compare.ALLOWANCE):
            raise Refused("malformed", f"no tolerance {tolerance!r}")
        expected = self.expect(slot)
        if len(candidate) != len(expected):
            raise Refused("malformed", f"{len(candidate)} tensors where {len(expected)} are expected")
        doubtful: list[int] = []
        closest: tuple[int, Finding] | None = None
        for i, (c, r) in enumerate(zip(candidate, expected, strict=True)):
            if c.shape != r.shape or c.dtype != r.dtype:
                return reply(i, Finding(False, "shape", 0.0, 0.0, []))
            found = self._quickly(slot, i, c, r, tolerance)
            if found is None:
                doubtful.append(i)
            elif not found.match:
                return self._told(i, found)
            elif closest is None or compare.ratio(found.value, found.limit) > compare.ratio(
                closest[1].value, closest[1].limit
            ):
                closest = (i, found)
        if doubtful:
            i, found = self._fully(slot, candidate, doubtful)
            if not found.match:
                return self._told(i, found)
            closest = (i, found)
        return self._told(*(closest or (0, Finding(True, "rms", 0.0, 0.0, []))))

    def _told(self, index: int, found: Finding) -> dict[str, Any]:
        """A finding on a written input or state is named as such."""
        outputs = len(self.output_metas)
        if index >= outputs and not found.match:
            found.rule = "input" if index < outputs + len(self.written_inputs) else "state"
            index -= outputs if found.rule == "input" else outputs + len(self.written_inputs)
        return reply(index, found)

    def _quickly(self, slot: Slot, i: int, c: torch.Tensor, r: torch.Tensor, tolerance: str) -> Finding | None:
        if not r.is_floating_point():
            found = compare.exactly(c, r)
            if not found.match and r.dtype != torch.bool:
                from kernelfleet_host.ties import equal_choices

                if equal_choices(self, slot, i, c, r):
                    return Finding(True, "exact", 0.0, 0.0, [], "full")
            return found
        if tolerance != "contract":
            return compare.allclose(c, r, tolerance)
        difference = compare.summed(c, r)
        if difference.dirty:
            bad = compare.non_finite(c, r)
            if bad is not None:
                return bad
        while len(slot.sizes) <= i:
            slot.sizes.append(None)
        size = slot.sizes[i]
        if size is None:
            size = slot.sizes[i] = compare.summed(r).grouped()
        apart = difference.grouped()
        if apart.rms == 0.0:
            return Finding(True, "rms", 0.0, 0.0, [])
        known = self._statistics.get((self.seed, *slot.key))
        statistic = known[i] if known is not None else None
        if statistic is None:
            return None
        quick = compare.quick(apart, size, statistic, r.dtype)
        # Mixed sets differ in what a few places amplify: only the float64 run refuses one.
        return None if quick is not None and not quick.match and slot.key[0] == "mixed" else quick

    def _fully(self, slot: Slot, candidate: list[torch.Tensor], indices: list[int]) -> tuple[int, Finding]:
        expected = self.expect(slot)
        key = (self.seed, *slot.key)
        estimated = False
        try:
            exact, (error, off) = self.sums_against_exact(slot, [expected, candidate])
        except Refused as refused:
            if refused.code not in ("exact", "memory"):
                raise
            self.no_exact = refused.message
            exact, error = self._errors(slot)
            off = [
                compare.summed(c, r) if r.is_floating_point() else None
                for c, r in zip(candidate, expected, strict=True)
            ]
            estimated = True
        known = self._statistics.get(key)
        if known is None:
            known = self._statistics[key] = self._first_statistics(slot, (exact, error))
        closest: tuple[int, Finding] | None = None
        for i in indices:
            c, e, d = off[i], error[i], exact[i]
            assert c is not None and e is not None and d is not None
            self.give_back()
            found = compare.judge(
                c.grouped(), e.grouped(), d.grouped(), expected[i].dtype, known[i], "estimated" if estimated else "full"
            )
            if not found.match:
                return i, found
            if closest is None or compare.ratio(found.value, found.limit) > compare.ratio(
                closest[1].value, closest[1].limit
            ):
                closest = (i, found)
        assert closest is not None
        return closest

    def poison(self, seed: int) -> None:
        """Overwrites the bound outputs with noise of the reference's mean and deviation, then flushes the cache."""
        generator = torch.Generator(device=self.device).manual_seed(seed)
        likely = next((s.expected for s in self._slots if s.expected is not None), None)
        for i, bound in enumerate(self.bound):
            meta = bound.meta
            if meta.span == 0 or bound.foreign is None:
                continue
            count = meta.span // meta.dtype.itemsize
            bound.foreign.write(
                bound.offset, noise(count, meta.dtype, likely[i] if likely else None, generator, self.device)
            )
        like = next((t for t in likely or [] if t.dtype == torch.float32), None)
        for foreign, size in self._workspaces:
            if size >= 4:
                foreign.write(0, noise(size // 4, torch.float32, like, generator, self.device))
        timer = self.timer()
        timer.flush()
        self._sync()

    def close(self) -> None:
        """Gives buffers back."""
        self.unbind()
        self._graphs.clear()
        gc.collect()


class _Graph:
    """The captured forward and the addresses at which it finds its inputs."""

    def __init__(self, reference: Reference, call: Any, slot: Slot) -> None:
        self.windows: list[buffers.CudaWindow | None] = []
        self.inputs: list[Any] = []
        for i, (shared, value, meta) in enumerate(zip(slot.shared, slot.inputs, reference.inputs.metas, strict=True)):
            window = None
            if meta is None:
                self.inputs.append(value)
            elif (
                i in slot.pristine
                or not reference.windows
                or not isinstance(shared, buffers.CudaShared)
                or meta.span <= COPIED_BYTES
            ):
                self.inputs.append(slot.pristine.get(i, value).clone())
            else:
                try:
                    window = buffers.CudaWindow(shared)
                    self.inputs.append(view(window.base, meta))
                except Refused:  # no second mapping: inputs are copied to one place instead
                    self.inputs.append(value.clone())
            self.windows.append(window)
        self.graph = Captured(lambda: call(*self.inputs))
        self.show(slot)

    def show(self, slot: Slot) -> None:
        """Lets the graph see the inputs of `slot`."""
        with torch.no_grad():
            for i, window in enumerate(self.windows):
                target = self.inputs[i]
                if not isinstance(target, torch.Tensor):
                    continue
                shared = slot.shared[i]
                if window is not None and isinstance(shared, buffers.CudaShared):
                    window.show(shared)
                else:
                    target.copy_(slot.pristine.get(i, slot.inputs[i]))
        torch.cuda.synchronize()


def reply(output: int, found: Finding) -> dict[str, Any]:
    """The reply to `compare`."""
    return {"match": found.match, "detail": found.wire(output), "stage": found.stage}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a CPU tensor's elements."""
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def noise(
    count: int, dtype: torch.dtype, like: torch.Tensor | None, generator: torch.Generator, device: str
) -> torch.Tensor:
    """`count` elements of noise as uint8, distributed like `like` where that is given."""
    block = min(count, 1 << 20)
    if dtype.is_floating_point:
        mean, deviation = 0.0, 1.0
        if like is not None and like.numel():
            sample = like.flatten()[: 1 << 20].double()
            sample = sample[torch.isfinite(sample)]
            if sample.numel() > 1:
                mean, deviation = float(sample.mean()), float(sample.std()) or 1.0
        values = torch.randn(block, generator=generator, device=device, dtype=torch.float64).mul_(deviation).add_(mean)
        data = values.to(dtype)
    elif dtype == torch.bool:
        data = torch.randint(0, 2, (block,), generator=generator, device=device).bool()
    else:
        top = int(like.max()) + 1 if like is not None and like.numel() else 100
        top = max(1, min(top, 100 if dtype == torch.int8 else 30000 if dtype == torch.int16 else 2**31 - 1))
        data = torch.randint(0, top, (block,), generator=generator, device=device).to(dtype)
    if block < count:
        shift = int(torch.randint(0, block, (1,), generator=generator, device=device))
        data = data.roll(shift).repeat(-(-count // block))[:count]
    return data.contiguous().view(torch.uint8)


def out_of_memory(error: BaseException) -> bool:
    """Whether `error`, or what it came from, says that memory was short."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error)
    refused = isinstance(error, Refused) and error.code == "memory"
    cause = error.__cause__ or error.__context__
    return known or refused or (cause is not None and out_of_memory(cause))


def available_bytes(device: str) -> int:
    """Memory that can still be allocated."""
    if device == "cuda":
        free, _ = torch.cuda.mem_get_info()
        return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                room = int(line.split()[1]) << 10
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            room = min(room, int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return room


def short(structure: Any) -> str:
    """A structure for messages: `a tuple (tensor, tensor)`."""
    text = _said(structure)
    if isinstance(structure, dict) and len(structure) == 1:
        kind = next(iter(structure))
        text = text if kind == "value" else f"a {kind} {text}"
    else:
        text = f"a {text}"
    return text if len(text) < 200 else text[:200] + "..."


def _said(structure: Any) -> str:
    """A structure as Python would write it, with `tensor` where one stands."""
    if not isinstance(structure, dict) or len(structure) != 1:
        return str(structure)
    kind, inside = next(iter(structure.items()))
    if kind == "value":
        return str(inside)
    if kind == "dict":
        pairs = inside.items() if isinstance(inside, dict) else inside
        return "{" + ", ".join(f"{name!r}: {_said(part)}" for name, part in pairs) + "}"
    parts = ", ".join(_said(part) for part in inside)
    if kind == "list":
        return f"[{parts}]"
    return f"({parts},)" if len(inside) == 1 else f"({parts})"
