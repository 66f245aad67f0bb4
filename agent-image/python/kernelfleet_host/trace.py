"""The operator graph of a reference, from a run on meta tensors.

Knows the section "Operator graph" of `docs/interfaces.md`. Must not know data: only shapes, and the constants that
`forward` itself makes. A run sees what a `TorchDispatchMode` sees in `eval()` and `no_grad`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from typing import Any

import torch
from kernelfleet_zygote import Refused
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kernelfleet_host.parameters import state
from kernelfleet_host.task import Task, plain_tensors
from kernelfleet_host.tensors import NAMES, Meta, flatten

MAX_CONSTANT = 4096
"""Most elements of a constant that are given by value."""
MAX_NODES = 400_000
_DROPPED = {"device", "layout", "pin_memory", "non_blocking"}


def meta_model(task: Task, built: torch.nn.Module | None = None) -> torch.nn.Module:
    """A model whose state lies on meta. Uses `built` (which becomes meta) or constructs one.

    Construction on meta is tried first (nothing is initialised); it is not used where the model holds tensors
    outside its state dict, whose values would be lost.
    """
    if built is None:
        try:
            model = task.build(0, "meta")
            if not plain_tensors(model):
                return model
        except Refused:
            pass
        built = task.build(0)
    return _to_meta(built)


def _to_meta(model: torch.nn.Module) -> torch.nn.Module:
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.is_meta:
                continue
            twin = made.get(id(parameter))  # tied parameters stay tied
            if twin is None:
                twin = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
                made[id(parameter)] = twin
            setattr(module, name, twin)  # recurrent modules keep lists of their weights up to date by this
        for name, buffer in list(module._buffers.items()):
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to("meta")
    return model


def meta_inputs(task: Task) -> list[Any]:
    """`get_inputs()` without data where that works, else drawn for real and stripped of data.

    Floating inputs keep the task's dtype.
    """
    try:
        values = task.inputs(0, "meta")
    except Refused:
        values = task.inputs(0, "cpu")
    return [
        torch.empty_strided(m.shape, m.strides, dtype=m.dtype, device="meta")
        if isinstance(v, torch.Tensor) and (m := Meta.of(v))
        else v
        for v in values
    ]


class Valued(TorchFunctionMode):
    """Keeps the values of constants: `torch.tensor(0.5, device=x.device)` on meta would lose them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of PyTorch's."""
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.scalar_tensor) and torch.device(kwargs.get("device") or "cpu").type == "meta":
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **kwargs)


class Tracer(TorchDispatchMode):
    """Records each operator. `nodes` as in the interface; `peak` follows the storages' lives."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.nodes: list[dict[str, Any]] = []
        self.modules: list[str] = []
        self._ids: dict[int, str] = {}
        self._keep: list[Any] = []
        self._next = 0
        self._lives: dict[int, list[int]] = {}  # storage -> [bytes, first node, last node]
        self.wrote: set[int] = set()  # storages that an in-place operator wrote
        self.columns = 0  # most bytes that a convolution unfolds its input to, in double

    def name(self, tensor: torch.Tensor, label: str) -> None:
        """Gives `tensor` the id `label`."""
        self._ids[id(tensor)] = label
        self._keep.append(tensor)

    def fresh(self) -> str:
        """A new id."""
        self._next += 1
        return f"t{self._next - 1}"

    def id_of(self, tensor: torch.Tensor) -> str:
        """Id of a tensor; one that nothing made is a constant that the task brought along."""
        known = self._ids.get(id(tensor))
        if known is not None:
            return known
        label = self.fresh()
        self.name(tensor, label)
        self._push("aten.lift_fresh.default", [label], [constant(tensor)], {}, [tensor])
        return label

    def _push(self, op: str, ids: list[str], args: list[Any], kwargs: dict[str, Any], outputs: list[Any]) -> None:
        if len(self.nodes) >= MAX_NODES:
            raise Refused("too_many_nodes", f"the reference has more than {MAX_NODES} operators")
        self.nodes.append(
            {
                "id": ids[0] if ids else "",
                "ids": ids,
                "op": op,
                "args": args,
                "kwargs": kwargs,
                "outputs": [Meta.of(o).graph() if isinstance(o, torch.Tensor) else None for o in outputs],
                "line": self._line(),
                "module": self.modules[-1] if self.modules else "",
            }
        )

    def _line(self) -> int | None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self.path:
                return int(frame.f_lineno)
            frame = frame.f_back
        return None

    def _touch(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            key = storage._cdata
            n = len(self.nodes)
            life = self._lives.get(key)
            if life is None:
                self._lives[key] = [storage.nbytes(), n, n]
                self._keep.append(storage)
            else:
                life[2] = n

    def hold(self, value: torch.Tensor) -> None:
        """Counts a tensor that lives through the whole run (inputs, parameters)."""
        storage = value.untyped_storage()
        self._lives[storage._cdata] = [storage.nbytes(), -1, 1 << 60]
        self._keep.append(storage)

    def argument(self, value: Any) -> Any:
        """One ARG."""
        if isinstance(value, torch.Tensor):
            return {"t": self.id_of(value)}
        if isinstance(value, torch.dtype):
            return {"dtype": NAMES.get(value, str(value).removeprefix("torch."))}
        if isinstance(value, (list, tuple)):
            return [self.argument(v) for v in value]
        if isinstance(value, torch.SymInt):
            return int(value)
        return literal(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs one operator on meta tensors and records it."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # torch.tensor(..) inside forward: the value is the argument
            result = func(*args, **kwargs)
            label = self.fresh()
            self.name(result, label)
            self._touch(result)
            self._push(str(func), [label], [constant(args[0])], {}, [result])
            return result
        args, kwargs = self._on_meta(args, kwargs)
        tree_map_only(torch.Tensor, self._touch, (args, kwargs))
        record_args = [self.argument(a) for a in args]
        record_kwargs = {
            k: self.argument(v) for k, v in kwargs.items() if k not in _DROPPED and not isinstance(v, torch.Generator)
        }
        for schema, value in zip(func._schema.arguments, args, strict=False):
            if schema.alias_info is not None and schema.alias_info.is_write:
                tree_map_only(torch.Tensor, lambda t: self.wrote.add(t.untyped_storage()._cdata), value)
        for schema in func._schema.arguments:
            if schema.alias_info is not None and schema.alias_info.is_write and schema.name in kwargs:
                tree_map_only(torch.Tensor, lambda t: self.wrote.add(t.untyped_storage()._cdata), kwargs[schema.name])
        result = func(*args, **kwargs)
        if func is torch.ops.aten.convolution.default:
            self.columns = max(self.columns, columns(args[0], args[1], result, transposed=args[6], groups=args[8]))
        outputs = list(result) if isinstance(result, (tuple, list)) else [result]
        tensors = [o for o in outputs if isinstance(o, torch.Tensor)]
        tree_map_only(torch.Tensor, self._touch, tensors)
        labels = []
        for _ in outputs:
            labels.append(self.fresh())
        self._push(str(func), labels, record_args, record_kwargs, outputs)
        for label, output in zip(labels, outputs, strict=True):
            if isinstance(output, torch.Tensor):
                self.name(output, label)
        return result

    def _on_meta(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Beside a meta tensor, tensors of other devices (masks that forward makes) become meta too."""
        found: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, found.append, (args, kwargs))
        if not any(t.is_meta for t in found) or all(t.is_meta or t.dim() == 0 for t in found):
            return args, kwargs
        swapped: dict[int, torch.Tensor] = {}

        def swap(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_meta:
                return tensor
            if id(tensor) not in swapped:
                twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
                self.name(twin, self.id_of(tensor))
                swapped[id(tensor)] = twin
            return swapped[id(tensor)]

        return tree_map_only(torch.Tensor, swap, (args, kwargs))  # type: ignore[no-any-return]

    def peak(self) -> int:
        """Most bytes that live at once, by first and last use."""
        events: Counter[int] = Counter()
        base = 0
        for size, first, last in self._lives.values():
            if first < 0:
                base += size
            else:
                events[2 * first] += size
                events[2 * last + 1] -= size
        now = most = base
        for _, change in sorted(events.items()):
            now += change
            most = max(most, now)
        return most


def columns(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, *, transposed: bool, groups: int) -> int:
    """Bytes of the matrix of columns that a convolution in float64 makes on the CPU, for which no library has another way: each
    place of the kernel for each place of the output (of the input where it is transposed), of a whole batch."""
    channels, places = (y.shape[1], x.shape[2:]) if transposed else (x.shape[1], y.shape[2:])
    return 8 * x.shape[0] * (channels // groups) * math.prod(weight.shape[2:]) * math.prod(places)


def literal(value: Any) -> Any:
    """A Python scalar as JSON; infinities and NaN spelled out."""
    if isinstance(value, float):
        if math.isnan(value):
            return {"nan": True}
        if math.isinf(value):
            return {"inf": 1 if value > 0 else -1}
        return value
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, torch.memory_format):
        return str(value).removeprefix("torch.")
    return repr(value)[:200]


def constant(tensor: torch.Tensor) -> dict[str, Any]:
    """`{"const": nested list}`, or null where the values are too many or unknown."""
    if tensor.is_meta or tensor.numel() > MAX_CONSTANT or tensor.is_complex():
        return {"const": None}

    def nest(value: Any) -> Any:
        return [nest(v) for v in value] if isinstance(value, list) else literal(value)

    with torch.utils._python_dispatch._disable_current_modes():
        return {"const": nest(tensor.detach().cpu().tolist())}


class Traced:
    """A finished trace: `graph` as on the wire, output tensors, memory and which arguments are written."""

    def __init__(self, task: Task, model: torch.nn.Module, inputs: list[Any]) -> None:
        """Runs `model` (on meta) on `inputs` (meta tensors and values)."""
        tracer = Tracer(task.path)
        graph_inputs: list[dict[str, Any]] = []
        for value in inputs:
            if isinstance(value, torch.Tensor):
                label = tracer.fresh()
                tracer.name(value, label)
                tracer.hold(value)
                graph_inputs.append({"id": label, **Meta.of(value).graph()})
            else:
                graph_inputs.append({"id": f"v{len(graph_inputs)}", "value": literal(value)})
        parameters: list[dict[str, Any]] = []
        named = dict(model.named_parameters(remove_duplicate=False))
        held = {**named, **dict(model.named_buffers(remove_duplicate=False))}
        for index, name in enumerate(state(model)):
            tensor = held[name]
            label = f"p{index}"
            if id(tensor) not in tracer._ids:
                tracer.name(tensor, label)
            tracer.hold(tensor)
            parameters.append({"id": label, "name": name, **Meta.of(tensor).graph(), "buffer": name not in named})
        names = {id(module): name for name, module in model.named_modules()}

        def enter(module: torch.nn.Module, _args: Any) -> None:
            tracer.modules.append(names.get(id(module), tracer.modules[-1] if tracer.modules else ""))

        def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
            tracer.modules.pop()

        hooks = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave),
        ]
        try:
            with Valued(), tracer:
                result = task.call(model, inputs)
        finally:
            for hook in hooks:
                hook.remove()
        self.outputs, self.structure = flatten(result)
        self.output_metas = [Meta.of(o) for o in self.outputs]
        ids = [tracer.id_of(o) for o in self.outputs]
        self.graph = {
            "inputs": graph_inputs,
            "parameters": parameters,
            "nodes": tracer.nodes,
            "outputs": ids,
            "structure": self.structure,
            "source": {"class": "Model"},
        }
        self.operators = Counter(".".join(node["op"].split(".")[:2]) for node in tracer.nodes)
        self.column_bytes = tracer.columns
        self.peak_bytes = tracer.peak()
        self.written_inputs = [
            i
            for i, v in enumerate(inputs)
            if isinstance(v, torch.Tensor) and v.untyped_storage()._cdata in tracer.wrote
        ]
        self.written_state = [n for n in state(model) if held[n].untyped_storage()._cdata in tracer.wrote]
