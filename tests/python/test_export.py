"""Exported packages: every honest candidate of the corpus computes what its reference does, and gives way elsewhere."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HONEST = sorted((ROOT / "tests/corpus/honest").iterdir())


def describe(value: Any) -> dict[str, Any]:
    """An input as `kernelfleet export` writes it."""
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(value.shape), "strides": list(value.stride())}


def package(folder: Path, where: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ModuleType:
    """Lays a candidate out as `kernelfleet export` does and imports it."""
    name = f"exported_{folder.name}_{abs(hash(where))}"
    target = where / name
    shutil.copytree(ROOT / "agent-image/export", target, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(folder, target / "candidate")
    shutil.move(target / "candidate/task.py", target / "reference.py")
    shutil.copytree(ROOT / "agent-image/include", target / "include")
    space: dict[str, Any] = {"__name__": "task"}
    exec((target / "reference.py").read_text(), space)
    signature = {"device": "cpu", "arch": "x86_64", "images": [], "processor": []}
    signature["inputs"] = [describe(value) for value in space["get_inputs"]()]
    (target / "signature.json").write_text(json.dumps({**signature, **changes}))
    (target / "verdict.json").write_text(json.dumps({"reward": 1}))
    monkeypatch.syspath_prepend(str(where))
    monkeypatch.setenv("XDG_CACHE_HOME", str(where / "cache"))
    importlib.invalidate_caches()
    return importlib.import_module(name)


def same(got: Any, want: Any) -> None:
    """Compares nested results."""
    if isinstance(want, torch.Tensor):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (tuple, list)):
        assert type(got) is type(want) and len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
    else:
        assert got == want


@pytest.mark.parametrize("folder", HONEST, ids=lambda folder: folder.name)
def test_an_exported_candidate_computes_its_reference_with_other_weights_too(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = package(folder, tmp_path, monkeypatch)
    task = module._reference
    arguments = task.get_init_inputs()
    mine = module.Model(*arguments).eval()
    for seed in range(2):
        torch.manual_seed(seed)
        reference = task.Model(*arguments).eval()
        mine.load_state_dict(copy.deepcopy(reference.state_dict()))
        for _ in range(2):
            inputs = task.get_inputs()
            others = copy.deepcopy(inputs)
            with torch.no_grad():
                assert mine.why_reference(*others) is None
                same(mine(*others), reference(*inputs))
            same(others, inputs)
            same(mine.state_dict(), reference.state_dict())
        assert mine._kernelfleet["not"] is None, mine._kernelfleet["not"]


def relu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> ModuleType:
    """The softmax of the corpus as a package."""
    return package(ROOT / "tests/corpus/honest/softmax_rows", tmp_path, monkeypatch, **changes)


def test_other_shapes_types_modes_and_gradients_run_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = relu(tmp_path, monkeypatch)
    model = module.Model(*module._reference.get_init_inputs()).eval()
    (x,) = module._reference.get_inputs()
    with torch.no_grad():
        assert model.why_reference(x) is None
        assert "shape" in model.why_reference(x[:1])
        assert "dtype" in model.why_reference(x.double())
        assert "strides" in model.why_reference(x.t().contiguous().t())
        assert "2 inputs" in model.why_reference(x, x)
        same(model(x.double()), module._reference.Model(*module._reference.get_init_inputs())(x.double()))
        assert "training" in model.train().why_reference(x)
    assert "gradient" in model.eval().why_reference(x.clone().requires_grad_())


def test_a_library_for_another_processor_without_a_compiler_gives_way_to_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = relu(tmp_path, monkeypatch, processor=["no-such-instruction"])
    monkeypatch.setenv("PATH", str(tmp_path))
    model = module.Model(*module._reference.get_init_inputs()).eval()
    (x,) = module._reference.get_inputs()
    with torch.no_grad():
        same(model(x), module._reference.Model(*module._reference.get_init_inputs())(x))
        assert "no c++" in model.why_reference(x)


def test_kernels_for_a_card_give_way_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    module = relu(tmp_path, monkeypatch, device="cuda", arch="sm_90a")
    model = module.Model(*module._reference.get_init_inputs()).eval()
    (x,) = module._reference.get_inputs()
    with torch.no_grad():
        assert "built for sm_90a" in model.why_reference(x)
        same(model(x), module._reference.Model(*module._reference.get_init_inputs())(x))


def test_a_package_needs_nothing_but_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = relu(tmp_path, monkeypatch)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {module.__name__} as m; print(m.VERDICT['reward'])"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"
