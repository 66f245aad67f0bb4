"""What a candidate's own process asks to be built, and how its inputs and outputs change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.cpp_extension

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "agent-image" / "python"))

from kernelfleet_host.handover import Handover  # noqa: E402
from kernelfleet_host.reference import Reference  # noqa: E402
from kernelfleet_process import extension  # noqa: E402
from kernelfleet_zygote import Refused  # noqa: E402

PYTHON = Path(__file__).resolve().parents[2] / "agent-image" / "python"
SOURCE = "torch::Tensor relu(torch::Tensor x);"
CUDA = "__global__ void k() {}\ntorch::Tensor relu(torch::Tensor x) { return x; }"
TASK = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2.0


def get_inputs():
    return [torch.randn(8, 16)]


def get_init_inputs():
    return []
"""


@pytest.mark.parametrize(
    "arguments",
    [
        {"cpp_sources": SOURCE, "functions": ["relu"]},
        {"cpp_sources": [SOURCE, "// more"], "functions": "relu", "with_pytorch_error_handling": False},
        {"cpp_sources": SOURCE, "functions": {"relu": "what it says"}},
        {"cpp_sources": "#include <torch/extension.h>", "no_implicit_headers": True},
    ],
)
def test_an_inline_extension_is_the_text_that_pytorch_would_compile(
    arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/bin/false")  # PyTorch writes its sources, then finds no compiler
    given = {k: list(v) if isinstance(v, list) else v for k, v in arguments.items()}
    with pytest.raises(Exception, match=r"."):
        torch.utils.cpp_extension.load_inline(name="inline_ext", build_directory=str(tmp_path), **given)
    assert extension.inline("inline_ext", **arguments)["sources"] == {"main.cpp": (tmp_path / "main.cpp").read_text()}


def test_cuda_sources_get_the_headers_that_pytorch_puts_before_them() -> None:
    spec = extension.inline("inline_ext", SOURCE, CUDA, functions=["relu"], extra_cuda_cflags=["-O3"])
    head = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>\n"
    assert spec["sources"]["cuda.cu"] == head + CUDA
    assert spec["cuda"] and spec["cuda_cflags"] == ["-O3"]


def test_a_layout_is_all_sources_of_the_folder_and_of_kernels(tmp_path: Path) -> None:
    files = {
        "binding.cpp": "a",
        "binding_registry.h": "b",
        "kernels/x.cu": "c",
        "kernels/x_binding.cpp": "d",
        "kernels/deeper/y.cu": "e",
        "model_new.py": "f",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    spec = extension.layout(files, str(tmp_path), "cuda")
    assert sorted(spec["sources"]) == ["binding.cpp", "kernels/x.cu", "kernels/x_binding.cpp"]
    assert spec["files"] == {"binding_registry.h": "b"}
    assert "--use_fast_math" in spec["cuda_cflags"]
    with pytest.raises(FileNotFoundError):
        extension.of_files(files, str(tmp_path), "x", ["../outside.cpp"])


def wire(offset: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "float32", "shape": [8, 16], "strides": [16, 1], "bytes": 1 << 20, "offset": offset, **more}


class Shared:
    """A reference with a drawn slot, and the other end of what it shares: the descriptors."""

    def __init__(self) -> None:
        self.reference = Reference(TASK, "task.py", "cpu", "reference", 1, 1)
        self.reference.use(1)
        self.slot = self.reference.slot(0)
        self.reference.draw(self.slot, 7, "none", 1.0)
        self.reference.expect(self.slot)
        self.handover = Handover(self.reference, 1 << 20)
        _, (self.pool, self.input) = self.handover.exports()

    def given(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(os.pread(self.input, 512, 0)), dtype=torch.float32).view(8, 16)

    def put(self, fd: int, offset: int, values: torch.Tensor) -> None:
        os.pwrite(fd, values.contiguous().numpy().tobytes(), offset)

    def verdict(self) -> dict[str, Any]:
        return self.reference.compare_bound(self.slot, "contract")


def test_inputs_are_released_by_a_copy_and_outputs_are_what_was_there_when_they_were_copied() -> None:
    shared = Shared()
    assert not shared.given().any(), "nothing is released before a call"
    shared.handover.release(0)
    x = shared.given()
    assert torch.equal(x, shared.slot.inputs[0])
    shared.put(shared.pool, 4096, x * 2.0)
    shared.handover.snapshot(0, [wire(4096)], "tensor")
    shared.put(shared.pool, 4096, torch.zeros(8, 16))
    shared.handover.returned(0)
    assert shared.verdict()["match"]
    # What comes after the copy comes too late.
    shared.handover.snapshot(0, [wire(4096)], "tensor")
    shared.put(shared.pool, 4096, x * 2.0)
    assert not shared.verdict()["match"]


def test_a_changed_input_shows_and_an_output_in_it_is_no_way_around() -> None:
    shared = Shared()
    shared.handover.release(0)
    shared.put(shared.input, 0, shared.given() * 2.0)
    shared.handover.snapshot(0, [wire(0, input=0)], "tensor")
    shared.handover.returned(0)
    verdict = shared.verdict()
    assert not verdict["match"] and verdict["detail"]["rule"] == "input"


def test_outputs_outside_of_the_pool_and_of_other_shapes_are_refused() -> None:
    shared = Shared()
    shared.handover.release(0)
    for record, code in [
        (wire((1 << 20) - 256), "bounds"),
        (wire(0, shape=[16, 8], strides=[8, 1]), "shape"),
        (wire(0, dtype="float64"), "dtype"),
        (wire(0, strides=[-16, 1]), "bounds"),
    ]:
        with pytest.raises(Refused) as refused:
            shared.handover.snapshot(0, [record], "tensor")
        assert refused.value.code == code


def libm() -> Path:
    """The file of the system's library of mathematics."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in maps if "/libm.so" in line))


@pytest.mark.parametrize(
    ("does", "noted"),
    [
        ("import numpy, torch.utils.cpp_extension; torch.randn(8) @ torch.randn(8)", None),
        ("own = ctypes.CDLL(library); own.cosf", None),
        ("copy = shutil.copy(library, library + '.so'); ctypes.CDLL(copy)", "extension1.so.so')"),
        (
            "shutil.copy(library, library + '.so'); os.replace(library + '.so', library); ctypes.CDLL(library)",
            "extension1.so')",
        ),
        ("ctypes.CDLL('libm.so.6')", "ctypes.CDLL('libm.so.6')"),
        ("ctypes.CDLL(None)", "ctypes.CDLL(None)"),
        ("ctypes.pythonapi.dlopen", "dlopen by ctypes"),
        ("before.cosf", "cosf by ctypes"),
        ("(ctypes.c_float * 8).from_address(torch.randn(8).data_ptr())", "ctypes' from_address"),
        ("ctypes.string_at(torch.randn(8).data_ptr(), 32)", "ctypes' string_at"),
    ],
)
def test_a_library_that_is_no_build_of_the_candidates_is_noted(does: str, noted: str | None, tmp_path: Path) -> None:
    script = f"""
import ctypes, ctypes.util, os, shutil, sys, torch
sys.path.insert(0, {str(PYTHON)!r})
from kernelfleet_process import libraries
found = []
before = ctypes.CDLL("libm.so.6")
library = {str(tmp_path)!r} + "/extension1.so"
shutil.copy({str(libm())!r}, library)
libraries.watch({{libraries.mark(library)}}, found.append)
{does}
print(found[0] if found else None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(str(noted))
