"""A judged kernel as a module: `Model` is the reference's class with the kernels inside.

`Model` takes the reference's arguments and has its state dict. In inference, on the device, shapes and types that
were judged, `forward` runs the kernels; anywhere else it runs the reference. `why_reference(*inputs)` says why.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import _launch
from ._launch import FOLDER, Unusable, signature

VERDICT: dict[str, Any] = json.loads((FOLDER / "verdict.json").read_text())


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{__name__}.{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} can't be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _load_candidate() -> ModuleType:
    """Imports `model_new.py`: its own files and `kernelfleet_ext` resolve inside this package while it loads."""
    folder = FOLDER / "candidate"
    own = {p.name.removesuffix(".py") for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()} | {
        "kernelfleet_ext"
    }
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in own}
    sys.modules["kernelfleet_ext"] = _launch
    sys.path.insert(0, str(folder))
    try:
        return _load("_model_new", folder / "model_new.py")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            sys.modules[f"{__name__}._own.{name}"] = sys.modules.pop(name)
        sys.modules.update(hidden)


_reference = _load("_reference", FOLDER / "reference.py")
_candidate = _load_candidate()


class Model(_reference.Model):  # type: ignore[misc, name-defined]
    """The reference with the judged kernels inside."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Outside of the module's own attributes: the state dict stays the reference's.
        object.__setattr__(
            self, "_kernelfleet", {"arguments": (args, kwargs), "fast": None, "stamp": None, "not": None}
        )

    def why_reference(self, *inputs: Any) -> str | None:
        """Why `forward(*inputs)` runs the reference; `None` where it runs the kernels."""
        mine = self._kernelfleet
        if mine["not"]:
            return mine["not"]
        if self.training:
            return "the module is in training mode; call eval()"
        tensors = [*inputs, *self.parameters()]
        if torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors):
            return "a gradient is wanted; use torch.no_grad()"
        wanted = signature()
        if wanted["device"] == "cuda":
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "no card"
            if arch != wanted["arch"].rstrip("af"):
                return f"the kernels are built for {wanted['arch']}, this is {arch}"
        if len(inputs) != len(wanted["inputs"]):
            return f"{len(inputs)} inputs, judged with {len(wanted['inputs'])}"
        for i, (value, judged) in enumerate(zip(inputs, wanted["inputs"], strict=True)):
            problem = _differs(value, judged, wanted["device"])
            if problem:
                return f"input {i}: {problem}"
        for name, value in self.state_dict().items():
            if value.device.type != wanted["device"]:
                return f"{name} is on {value.device}, judged on {wanted['device']}"
        shapes = {name: [str(v.dtype).removeprefix("torch."), *v.shape] for name, v in self.state_dict().items()}
        if "state" in wanted and shapes != wanted["state"]:
            return "parameters have other shapes or types than were judged"
        return None

    def forward(self, *inputs: Any) -> Any:
        """As the reference's; tensors of the judged shapes and types go through the kernels."""
        if self.why_reference(*inputs) is None:
            try:
                fast = self._fast()
            except Unusable as error:
                self._kernelfleet["not"] = str(error)
            else:
                # Not under `torch.no_grad()` alone: what the kernels write, autograd must not look for.
                with torch.no_grad():
                    try:
                        return fast(*inputs)
                    except Unusable as error:
                        self._kernelfleet["not"] = str(error)
        return super().forward(*inputs)

    def _fast(self) -> torch.nn.Module:
        """The candidate on this module's own parameters; made anew when they change, for it may have packed them."""
        mine = self._kernelfleet
        state = self.state_dict(keep_vars=True)
        stamp = [(name, id(t), t.data_ptr(), t._version) for name, t in state.items()]
        if mine["fast"] is None or mine["stamp"] != stamp:
            args, kwargs = mine["arguments"]
            with torch.random.fork_rng(), torch.no_grad():
                fast = _candidate.ModelNew(*args, **kwargs).eval()
            fast.load_state_dict(state, assign=True)
            mine["fast"], mine["stamp"], mine["fresh"] = fast, stamp, _attributes(fast)
            mine["own"] = [(t, t.clone()) for t in _own_tensors(fast, state)]
        # A plan starts from the same state each time: what the last call has left in the module is forgotten.
        for module, attributes in mine["fresh"]:
            module.__dict__.clear()
            module.__dict__.update({k: dict(v) if type(v) is dict else v for k, v in attributes.items()})
        with torch.no_grad():
            for tensor, content in mine["own"]:
                tensor.copy_(content)
        return mine["fast"]


def _attributes(model: torch.nn.Module) -> list[tuple[torch.nn.Module, dict[str, Any]]]:
    """Attributes of a model and its parts, one level deep: tensors themselves are shared."""
    return [
        (module, {k: dict(v) if type(v) is dict else v for k, v in module.__dict__.items()})
        for module in model.modules()
    ]


def _own_tensors(model: torch.nn.Module, state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that the constructor made beside the state dict, which a kernel may write."""
    known = {t.untyped_storage().data_ptr() for t in state.values()}
    found: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for leaf in tree_leaves([v for k, v in module.__dict__.items() if k != "_modules"]):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                found[id(leaf)] = leaf
    return list(found.values())


def _differs(value: Any, judged: dict[str, Any], device: str) -> str | None:
    if "value" in judged:
        return None if value == judged["value"] else f"{value!r}, judged with {judged['value']!r}"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}, a tensor was judged"
    have = {
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "strides": list(value.stride()),
        "device": value.device.type,
    }
    for name, found in have.items():
        want = device if name == "device" else judged[name]
        if found != want:
            return f"{name} {found}, judged with {want}"
    return None
