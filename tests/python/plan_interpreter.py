"""Runs a plan of the CPU device on tensors, in the plainest way: what a recording means, to test recordings by.

Knows the plan's JSON. It is no runner: nothing is confined and nothing is timed.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import torch

INCLUDE = Path(__file__).resolve().parents[2] / "agent-image" / "include"
FLAGS = ["-O2", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", f"-I{INCLUDE}"]


def build(files: dict[str, str], plan: dict[str, Any], folder: Path) -> list[ctypes.CDLL]:
    """Builds the modules of a plan."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    libraries = []
    for number, module in enumerate(plan["modules"]):
        defines = [f"-D{name}={value}" for name, value in module["defines"]]
        target = folder / f"module{number}.so"
        subprocess.run(
            ["c++", *FLAGS, *defines, *module["flags"], "-o", str(target), module["path"]], check=True, cwd=folder
        )
        libraries.append(ctypes.CDLL(str(target)))
    return libraries


def run(
    plan: dict[str, Any],
    libraries: list[ctypes.CDLL],
    inputs: list[Any],
    state: dict[str, torch.Tensor],
    constants: list[bytes],
) -> Any:
    """Runs a plan and returns its outputs as the candidate's `forward` would."""
    buffers = []
    for buffer in plan["buffers"]:
        kind = buffer["kind"]
        if kind == "workspace":
            raw = torch.randint(0, 255, (buffer["bytes"],), dtype=torch.uint8)
        elif "input" in kind:
            raw = _bytes(inputs[kind["input"]])
        elif "parameter" in kind:
            raw = _bytes(state[kind["parameter"]])
        else:
            raw = torch.tensor(list(constants[kind["constant"]]), dtype=torch.uint8)
        assert raw.numel() >= buffer["bytes"], (buffer, raw.numel())
        buffers.append(raw)

    def view(ref: dict[str, Any] | None) -> Any:
        if ref is None:
            return None
        dtype = getattr(torch, ref["dtype"])
        first = ref["offset"] // dtype.itemsize
        empty = torch.empty(0, dtype=dtype)
        return empty.set_(buffers[ref["buffer"]].untyped_storage(), first, ref["shape"], ref["strides"])

    for node in plan["nodes"]:
        if node["op"] == "launch":
            arguments = [_argument(argument, buffers) for argument in node["args"]]
            getattr(libraries[node["module"]], node["kernel"])(*arguments)
        elif node["op"] == "fill":
            part = buffers[node["buffer"]][node["offset"] : node["offset"] + node["bytes"]]
            part.view(-1, len(node["pattern"])).copy_(torch.tensor(node["pattern"], dtype=torch.uint8))
        elif node["call"] == "matmul":
            product = view(node["a"]) @ view(node["b"])
            view(node["out"]).copy_(product if node["bias"] is None else product + view(node["bias"]))
        else:
            result = torch.convolution(
                view(node["x"]),
                view(node["weight"]),
                view(node["bias"]),
                node["stride"],
                node["padding"],
                node["dilation"],
                node["transposed"],
                node["output_padding"],
                node["groups"],
            )
            view(node["out"]).copy_(result)
    flat = iter([view(ref) for ref in plan["outputs"]])
    return _nest(plan["structure"], flat)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    raw = torch.empty(0, dtype=torch.uint8)
    return raw.set_(tensor.untyped_storage())


def _argument(argument: Any, buffers: list[torch.Tensor]) -> Any:
    if argument == "null":
        return ctypes.c_void_p(None)
    ((kind, value),) = argument.items()
    if kind == "pointer":
        return ctypes.c_void_p(buffers[value["buffer"]].data_ptr() + value["offset"])
    if kind in ("float", "f32"):
        return ctypes.c_float(value)
    return ctypes.c_double(value) if kind == "f64" else ctypes.c_int64(value)


def _nest(structure: Any, flat: Any) -> Any:
    if structure == "tensor":
        return next(flat)
    ((kind, parts),) = structure.items()
    if kind == "dict":
        return {key: _nest(part, flat) for key, part in parts}
    if kind == "value":
        return parts
    return (tuple if kind == "tuple" else list)([_nest(part, flat) for part in parts])
