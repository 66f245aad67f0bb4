"""The reference host through its own zygote: real processes, real PyTorch, small tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

PYTHON = Path(__file__).resolve().parents[2] / "agent-image" / "python"
sys.path.insert(0, str(PYTHON))

from kernelfleet_host import reference as module  # noqa: E402
from kernelfleet_host.compile import _Loads, _remembering  # noqa: E402
from kernelfleet_host.reference import short  # noqa: E402
from kernelfleet_host.task import lacks_memory  # noqa: E402
from kernelfleet_host.tensors import DTYPES, Meta, contiguous_strides  # noqa: E402
from kernelfleet_zygote import Channel, Refused  # noqa: E402

COMPILER_CACHE = Path(__file__).resolve().parents[2] / "target/tmp/cache/compiler"
"""What the compiler found out about this machine's processor: the same for all runs, as a judge keeps it."""

CONFINE = {
    "uid": None,
    "gid": None,
    "seccomp": None,
    "read": ["/"],
    "write": ["/tmp", "/dev"],
    "limits": {"as": None, "data": None, "fsize": 1 << 40, "nproc": None, "nofile": 1024, "cpu": None, "core": 0},
}


class Host:
    """A reference host or helper with blocking calls."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def raw(self, op: str, descriptors: list[int] | None = None, /, **body: Any) -> tuple[dict[str, Any], list[int]]:
        return self.channel.call({"op": op, **body}, descriptors or [])

    def __call__(self, op: str, descriptors: list[int] | None = None, /, **body: Any) -> dict[str, Any]:
        reply, got = self.raw(op, descriptors, **body)
        for fd in got:
            os.close(fd)
        assert reply["ok"], reply
        return reply

    def refused(self, op: str, descriptors: list[int] | None = None, /, **body: Any) -> dict[str, Any]:
        reply, _ = self.raw(op, descriptors, **body)
        assert not reply["ok"], reply
        return reply


class Zygote:
    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        fd = theirs.fileno()
        env = {**os.environ, "PYTHONPATH": str(PYTHON), "KERNELFLEET_COMPILER_CACHE": str(COMPILER_CACHE)}

        def to_three() -> None:
            os.dup2(fd, 3)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "kernelfleet_host"], pass_fds=[3, fd], preexec_fn=to_three, env=env, close_fds=True
        )
        theirs.close()

    def fork(self, cwd: Path, role: str = "host", **env: str) -> Host:
        ours, theirs = Channel.pair()
        request = {
            "op": "fork",
            "role": role,
            "confine": {**CONFINE, "write": ["/tmp", "/dev", str(cwd)]},
            "cwd": str(cwd),
            "env": {"TMPDIR": str(cwd), "USER": "nobody", **env},
            "threads": 1,
        }
        reply, _ = self.channel.call(request, [theirs.fileno()])
        theirs.close()
        assert reply["ok"], reply
        host = Host(ours)
        host("hello")
        return host


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.channel.close()
    zygote.process.wait(20)


@pytest.fixture
def host(zygote: Zygote, tmp_path: Path) -> Iterator[Host]:
    host = zygote.fork(tmp_path)
    yield host
    host.channel.close()


def task(forward: str, inputs: str, init: str = "pass", arguments: str = "[]", head: str = "") -> str:
    return f"""
import torch
import torch.nn as nn
import torch.nn.functional as F
{head}
class Model(nn.Module):
    def __init__(self, *args):
        super().__init__()
        {init}
    def forward(self, *xs):
        {forward}
def get_inputs():
    return [{inputs}]
def get_init_inputs():
    return {arguments}
"""


LINEAR = task("return torch.relu(self.fc(xs[0]))", "torch.rand(64, 96) - 0.5", "self.fc = nn.Linear(96, 48)")
NORM = task("return self.norm(xs[0])", "torch.rand(8, 6, 10, 10)", "self.norm = nn.BatchNorm2d(6)")


def tensors_of(reply: dict[str, Any], fds: list[int]) -> list[torch.Tensor]:
    flat = [t for t in reply["tensors"] if not isinstance(t, list)] or [t for row in reply["tensors"] for t in row if t]
    result = []
    for record in flat:
        data = bytearray(os.pread(fds[record["fd"] if "fd" in record else 0], record["bytes"], record["offset"]))
        raw = torch.frombuffer(data, dtype=DTYPES[record["dtype"]])
        result.append(raw.as_strided(record["shape"], record["strides"]).clone())
    return result


class Outputs:
    """The candidate's buffers."""

    def __init__(self, host: Host, opened: dict[str, Any]) -> None:
        self.metas = []
        self.fds = []
        records = []
        for i, t in enumerate(opened["outputs"]["tensors"]):
            meta = Meta(DTYPES[t["dtype"]], tuple(t["shape"]), contiguous_strides(t["shape"]))
            fd = os.memfd_create("out", 0)
            os.ftruncate(fd, max(4096, meta.span))
            self.metas.append(meta)
            self.fds.append(fd)
            records.append({**meta.wire(), "fd": i, "offset": 0, "bytes": max(4096, meta.span)})
        host("bind", self.fds, outputs=records, structure=opened["outputs"]["structure"])

    def put(self, *tensors: torch.Tensor) -> None:
        for fd, meta, tensor in zip(self.fds, self.metas, tensors, strict=True):
            assert tensor.dtype == meta.dtype and tuple(tensor.shape) == meta.shape
            raw = (
                tensor.contiguous().reshape(-1).view(torch.uint8)
                if tensor.dim()
                else tensor.reshape(1).view(torch.uint8)
            )
            os.pwrite(fd, raw.numpy().tobytes(), 0)


class Judged:
    """A host with an opened task, parameters, one drawn slot and bound outputs."""

    def __init__(self, host: Host, source: str, precision: str = "reference") -> None:
        self.host = host
        self.opened = host("open", source=source, path="task.py", device="cpu", precision=precision, threads=1, slots=1)
        self.outputs = Outputs(host, self.opened)
        reply, fds = host.raw("parameters", seed=7)
        assert reply["ok"], reply
        self.state_records = reply.get("tensors", [])
        self.state_fds = fds
        self.state = (
            dict(zip([t["name"] for t in self.state_records], tensors_of(reply, fds), strict=True)) if fds else {}
        )
        reply, self.input_fds = host.raw("inputs")
        assert reply["ok"], reply
        self.input_reply = reply

    def draw(self, seed: int, kind: str = "none", factor: float = 1.0) -> list[torch.Tensor]:
        self.drawn = self.host("draw", slot=0, seed=seed, transform={"kind": kind, "factor": factor})
        return tensors_of(self.input_reply, self.input_fds)

    def says(self, *tensors: torch.Tensor, tolerance: str = "contract") -> dict[str, Any]:
        self.outputs.put(*tensors)
        return self.host("compare", slot=0, tolerance=tolerance)


def test_a_task_is_opened_with_its_shapes_state_and_constructor_arguments(host: Host) -> None:
    opened = host("open", source=LINEAR, path="linear.py", device="cpu", precision="reference", threads=1, slots=1)
    assert opened["inputs"] == [
        {"kind": "tensor", "dtype": "float32", "shape": [64, 96], "strides": [96, 1], "bytes": 64 * 96 * 4}
    ]
    assert [t["name"] for t in opened["state"]] == ["fc.weight", "fc.bias"]
    assert opened["outputs"]["structure"] == "tensor"
    assert opened["outputs"]["tensors"][0]["shape"] == [64, 48]
    assert opened["init"] == "[]"


def test_what_eager_runs_is_told_with_times_and_shares(host: Host) -> None:
    judged = Judged(host, LINEAR)
    judged.draw(1)
    launches = host("profile", slot=0)["launches"]
    names = [launch["name"] for launch in launches]
    assert "aten::addmm" in names and "aten::relu" in names or "aten::clamp_min" in names, names
    assert sum(launch["share"] for launch in launches) == pytest.approx(1.0)
    times = [launch["time_us"] for launch in launches]
    assert times == sorted(times, reverse=True) and times[-1] > 0
    assert all(launch["registers"] is None for launch in launches), "an operator on the CPU has no registers"


def test_the_reference_itself_computed_elsewhere_passes_and_a_small_error_does_not(host: Host) -> None:
    judged = Judged(host, LINEAR)
    (x,) = judged.draw(1)
    eager = host("eager", slots=[0])
    assert len(eager["time_us"]) == 1 and eager["time_us"][0] > 0
    w, b = judged.state["fc.weight"], judged.state["fc.bias"]
    right = torch.relu(x @ w.T + b)
    said = judged.says(right)
    assert said["match"], said
    # another order of summation
    halves = torch.relu(x[:, :48] @ w[:, :48].T + x[:, 48:] @ w[:, 48:].T + b)
    assert judged.says(halves)["match"]
    for wrong in (
        torch.zeros_like(right),
        right * 1.0001,
        torch.relu((x.half().float() @ w.T) + b),
        torch.where(torch.arange(64)[:, None] == 63, 0.0, right),
        torch.relu(x @ w.T),
    ):
        assert not judged.says(wrong)["match"]
    one = right.clone()
    one[5, 7] = float("nan")
    said = judged.says(one)
    assert not said["match"] and said["detail"]["rule"] == "nan" and said["detail"]["index"] == [5, 7]
    # under the published tolerance half precision inputs pass
    assert judged.says(right * 1.00001, tolerance="kernelbench")["match"]


def test_state_is_the_same_for_the_same_seed_and_affine_parameters_are_away_from_defaults(host: Host) -> None:
    host("open", source=NORM, path="norm.py", device="cpu", precision="reference", threads=1, slots=1)
    sets = []
    for seed in (3, 4, 3):
        reply, fds = host.raw("state", seed=seed)
        assert reply["ok"]
        names = [t["name"] for t in reply["tensors"]]
        records = [{**t, "fd": 0} for t in reply["tensors"]]
        sets.append(dict(zip(names, tensors_of({"tensors": records}, fds), strict=True)))
    assert all(torch.equal(sets[0][n], sets[2][n]) for n in sets[0])
    assert not torch.equal(sets[0]["norm.weight"], sets[1]["norm.weight"])
    weight, bias = sets[0]["norm.weight"], sets[0]["norm.bias"]
    assert (weight != 1).all() and weight.min() > 0 and (bias != 0).all()
    assert (sets[0]["norm.running_mean"] != 0).all() and (sets[0]["norm.running_var"] > 0).all()
    assert sets[0]["norm.num_batches_tracked"] == 0


def test_batch_norm_with_moved_statistics_matches_only_with_them(host: Host) -> None:
    judged = Judged(host, NORM)
    (x,) = judged.draw(1)
    s = judged.state
    args = (s["norm.running_mean"], s["norm.running_var"], s["norm.weight"], s["norm.bias"])
    assert judged.says(torch.nn.functional.batch_norm(x, *args))["match"]
    assert not judged.says(x)["match"]


def test_written_inputs_and_state_are_compared_with_what_the_reference_leaves(host: Host) -> None:
    source = task(
        "xs[0].mul_(2); self.count.add_(1); return xs[0] + self.count",
        "torch.rand(16, 8)",
        "self.register_buffer('count', torch.zeros(8))",
    )
    judged = Judged(host, source)
    (x,) = judged.draw(1)
    host("eager", slots=[0])
    want = x * 2 + 1 + judged.state["count"]
    said = judged.says(want)
    assert not said["match"] and said["detail"]["rule"] == "input"
    os.pwrite(judged.input_fds[0], (x * 2).numpy().tobytes(), 0)
    said = judged.says(want)
    assert not said["match"] and said["detail"]["rule"] == "state"
    os.pwrite(judged.input_fds[0], (x * 2).numpy().tobytes(), 0)
    os.pwrite(judged.state_fds[0], (judged.state["count"] + 1).numpy().tobytes(), 0)
    assert judged.says(want)["match"]
    # a second set starts from the same state
    (x,) = judged.draw(2)
    os.pwrite(judged.input_fds[0], (x * 2).numpy().tobytes(), 0)
    os.pwrite(judged.state_fds[0], (judged.state["count"] + 1).numpy().tobytes(), 0)
    assert judged.says(x * 2 + 1 + judged.state["count"])["match"]


def test_a_structure_is_told_as_python_writes_it() -> None:
    assert short("tensor") == "a tensor"
    assert short({"tuple": ["tensor"]}) == "a tuple (tensor,)"
    nested = {"dict": [["sum", "tensor"], ["parts", {"list": ["tensor", {"value": "None"}]}]]}
    assert short(nested) == "a dict {'sum': tensor, 'parts': [tensor, None]}"
    assert short({"value": "3"}) == "3"


def test_an_input_or_parameter_that_the_candidate_wrote_is_a_mismatch(host: Host) -> None:
    judged = Judged(host, LINEAR)
    (x,) = judged.draw(1)
    right = torch.relu(x @ judged.state["fc.weight"].T + judged.state["fc.bias"])
    assert judged.says(right)["match"]
    os.pwrite(judged.input_fds[0], b"\x01", 100)
    said = judged.says(right)
    assert not said["match"] and said["detail"]["rule"] == "input"
    judged.draw(1)
    assert judged.says(right)["match"]
    os.pwrite(judged.state_fds[1], b"\x01", 2)
    assert judged.says(right)["detail"]["rule"] == "state"


def changed(judged: Judged, seed: int) -> list[torch.Tensor]:
    """Where a mixed set differs from what the task draws under the same seed."""
    plain = [x.clone() for x in judged.draw(seed)]
    mixed = judged.draw(seed, "mixed")
    return [a != b for a, b in zip(plain, mixed, strict=True)]


def test_a_mixed_set_differs_in_a_secret_row_and_a_few_places(host: Host) -> None:
    judged = Judged(host, task("return torch.relu(xs[0])", "torch.rand(64, 256)"))
    places = []
    for seed in range(1, 7):
        (differs,) = changed(judged, seed)
        assert judged.drawn["applicable"]
        rows = differs.all(1).nonzero().flatten().tolist()
        assert len(rows) == 1 and 256 < int(differs.sum()) <= 256 + 6, differs.sum()
        places.append(rows[0])
        # a copy passes where nothing is negative, and nowhere else
        (x,) = judged.draw(seed, "mixed")
        assert judged.says(torch.relu(x))["match"]
        assert bool((x < 0).any()) != judged.says(x)["match"]
    assert len(set(places)) > 2, places


def test_sets_that_are_drawn_in_one_request_are_those_that_are_drawn_one_by_one(host: Host) -> None:
    judged = Judged(host, task("return torch.relu(xs[0])", "torch.rand(64, 256)"))
    (x,) = [x.clone() for x in judged.draw(5, "mixed")]
    judged.draw(6, "mixed")
    host("draw", slots=[0], seeds=[5], transform={"kind": "mixed"})
    (again,) = tensors_of(judged.input_reply, judged.input_fds)
    assert torch.equal(again, x)
    assert judged.says(torch.relu(x))["match"]
    assert host.refused("draw", slots=[0], transform={"kind": "mixed"})["code"] == "malformed"


def test_a_mixed_set_holds_nothing_that_the_reference_does_not_bear(host: Host) -> None:
    judged = Judged(host, task("return torch.log(xs[0]) + torch.exp(xs[0])", "torch.rand(64, 256) + 1e-3"))
    for seed in range(1, 9):
        (differs,) = changed(judged, seed)
        (x,) = judged.draw(seed, "mixed")
        assert differs.any()
        assert (x > 0).all() and (x <= 1.001).all(), "of a logarithm no sign changes, of an exponential nothing grows"


@pytest.mark.parametrize(
    "inputs",
    [
        "torch.randint(0, 9, (64, 16))",
        "torch.randint(0, 2, (64, 16)).float()",
        "torch.softmax(torch.randn(64, 16), 1)",
        "torch.tril(torch.rand(32, 32))",
        "(lambda a: a + a.T)(torch.rand(32, 32))",
    ],
)
def test_labels_probabilities_and_matrices_of_a_kind_stay_as_they_were_drawn(host: Host, inputs: str) -> None:
    judged = Judged(host, task("return xs[0] * 2", inputs))
    (differs,) = changed(judged, 3)
    assert not differs.any() and not judged.drawn["applicable"]


def test_an_index_among_equal_maxima_is_accepted_and_another_is_not(host: Host) -> None:
    source = task("return torch.argmax(xs[0], dim=1)", "torch.randint(0, 3, (32, 20, 5)).float()")
    judged = Judged(host, source)
    (x,) = judged.draw(1)
    last = 19 - torch.argmax(x.flip(1), dim=1)
    said = judged.says(last)
    assert said["match"], said
    assert not torch.equal(last, torch.argmax(x, dim=1))
    wrong = last.clone()
    wrong[3, 2] = torch.argmin(x, dim=1)[3, 2]
    assert not judged.says(wrong)["match"]
    wrong[3, 2] = 99
    assert not judged.says(wrong)["match"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (Refused("memory", "no room for a window"), True),
        (RuntimeError("operation not permitted when stream is capturing"), False),
    ],
)
def test_a_capture_that_finds_no_memory_is_told(error: Exception, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = module.Reference(LINEAR, "linear.py", "cpu", "reference", 1, 1)

    def capture(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "_Graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert reference._capture("eager", None, reference.slots()[0]) is None
    assert reference.short == ({"eager"} if told else set())
    reference.draw(reference.slots()[0], 1, "none", 1.0)
    assert reference.timed([0])["short"] is told


def test_losses_are_compared_by_the_error_of_several_sets(host: Host) -> None:
    source = task("return F.mse_loss(xs[0], xs[1])", "torch.rand(128, 300), torch.rand(128, 300)")
    judged = Judged(host, source)
    x, y = judged.draw(1)
    exact = ((x.double() - y.double()) ** 2).mean()
    assert judged.says(exact.float())["match"]
    assert judged.says(((x - y) ** 2).sum(0).sum().div(128 * 300))["match"]
    assert not judged.says((exact * 1.001).float())["match"]


def test_scaled_sets_stay_out_of_probabilities_and_labels(host: Host) -> None:
    judged = Judged(host, task("return xs[0] + xs[1]", "torch.softmax(torch.rand(4, 5), -1), torch.rand(4, 5)"))
    a, b = judged.draw(1)
    a2, b2 = judged.draw(1, "scale", 1000.0)
    assert judged.drawn == {"ok": True, "finite": True, "applicable": True}
    assert torch.equal(a, a2) and torch.allclose(b * 1000, b2)
    judged = Judged(host, task("return xs[0] * 2", "torch.randint(0, 2, (4, 5)).float() * 2 - 1"))
    judged.draw(1, "scale", 1000.0)
    assert judged.drawn["applicable"] is False
    judged = Judged(host, task("return torch.log(xs[0] + 1e-3)", "torch.rand(64)"))
    judged.draw(1, "negate")
    assert judged.drawn == {"ok": True, "finite": False, "applicable": True}


def test_infinities_and_nan_of_the_reference_are_expected_of_the_candidate(host: Host) -> None:
    judged = Judged(host, task("return torch.log(xs[0].round())", "torch.rand(40, 50)"))
    (x,) = judged.draw(1)
    right = torch.log(x.round())
    assert torch.isinf(right).any()
    assert judged.says(right)["match"]
    assert not judged.says(right.nan_to_num())["match"]


def test_what_is_no_task_is_refused_with_code_and_line(host: Host) -> None:
    cases = {
        "parse": "def f(:\n",
        "no_model": "import torch\ndef get_inputs(): return []\n",
        "no_get_inputs": "import torch\nclass Model(torch.nn.Module): pass\n",
        "import": "import torch\nimport no_such_module_at_all\n",
    }
    for code, source in cases.items():
        said = host.refused(
            "open", source=source, path="bad.py", device="cpu", precision="reference", threads=1, slots=1
        )
        assert said["code"] == code, said
    assert said["line"] == 2
    source = task("return xs[0] @ xs[0]", "torch.rand(3, 4)")
    said = host.refused("open", source=source, path="bad.py", device="cpu", precision="reference", threads=1, slots=1)
    assert said["code"] == "exception" and said["line"] == 11, said
    source = task("return torch.empty(1 << 48) + xs[0]", "torch.rand(1)")
    said = host.refused("open", source=source, path="bad.py", device="cpu", precision="reference", threads=1, slots=1)
    assert said["code"] == "memory", said


def test_a_lack_of_memory_is_known_by_class_or_words() -> None:
    assert lacks_memory(MemoryError())
    assert lacks_memory(RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"))
    assert not lacks_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not lacks_memory(ValueError("can't allocate memory"))


def test_outputs_that_can_not_equal_the_references_are_refused_when_bound(host: Host) -> None:
    opened = host("open", source=LINEAR, path="t.py", device="cpu", precision="reference", threads=1, slots=1)
    fd = os.memfd_create("x", 0)
    os.ftruncate(fd, 1 << 16)
    good = {"fd": 0, "bytes": 1 << 16, "offset": 0, "dtype": "float32", "shape": [64, 48], "strides": [48, 1]}
    for code, structure, change in (
        ("shape", "tensor", {"shape": [48, 64]}),
        ("dtype", "tensor", {"dtype": "float16"}),
        ("structure", {"tuple": ["tensor"]}, {}),
        ("bounds", "tensor", {"offset": (1 << 16) - 8}),
        ("bounds", "tensor", {"bytes": 1 << 20}),
    ):
        assert host.refused("bind", [fd], outputs=[{**good, **change}], structure=structure)["code"] == code
    host("bind", [fd], outputs=[good], structure=opened["outputs"]["structure"])


def test_poison_is_noise_that_does_not_match(host: Host) -> None:
    judged = Judged(host, LINEAR)
    judged.draw(1)
    host("eager", slots=[0])
    host("poison", seed=5)
    noise = os.pread(judged.outputs.fds[0], 64 * 48 * 4, 0)
    assert noise != bytes(len(noise))
    assert not host("compare", slot=0, tolerance="contract")["match"]
    host("poison", seed=6)
    assert os.pread(judged.outputs.fds[0], 64 * 48 * 4, 0) != noise


def test_a_trace_names_operators_lines_modules_and_constants(host: Host) -> None:
    source = task(
        "y = self.fc(xs[0]); y.add_(1.0); return y * torch.tensor([2.0]) + float('inf')",
        "torch.rand(4, 6), 3",
        "self.fc = nn.Linear(6, 5)",
    )
    host("open", source=source, path="t.py", device="cpu", precision="reference", threads=1, slots=1)
    graph = host("trace")
    ops = [n["op"] for n in graph["nodes"]]
    assert "aten.addmm.default" in ops and "aten.add_.Tensor" in ops
    addmm = graph["nodes"][ops.index("aten.addmm.default")]
    assert addmm["module"] == "fc" and addmm["line"] == 11
    assert addmm["args"][0] == {"t": "p1"} and graph["parameters"][1]["name"] == "fc.bias"
    lift = graph["nodes"][ops.index("aten.lift_fresh.default")]
    assert lift["args"] == [{"const": [2.0]}]
    assert graph["nodes"][-1]["args"][1] == {"inf": 1}
    assert graph["inputs"][1] == {"id": "v1", "value": 3}
    assert graph["outputs"] == graph["nodes"][-1]["ids"]


def test_a_trace_has_the_value_of_a_constant_made_on_the_inputs_device(host: Host) -> None:
    source = task("return torch.minimum(xs[0], torch.tensor([0.5, 2.0], device=xs[0].device))", "torch.rand(4, 2)")
    host("open", source=source, path="t.py", device="cpu", precision="reference", threads=1, slots=1)
    graph = host("trace")
    assert [n["op"] for n in graph["nodes"]] == ["aten.lift_fresh.default", "aten.minimum.default"]
    assert graph["nodes"][0]["args"] == [{"const": [0.5, 2.0]}]
    assert graph["nodes"][1]["outputs"][0]["shape"] == [4, 2]


def test_an_estimate_needs_no_memory(host: Host) -> None:
    source = task("return torch.relu(xs[0]) + 1", "torch.rand(1 << 20, 1 << 14)")
    said = host("estimate", source=source, path="t.py", device="cpu", precision="reference", threads=1, slots=1)
    assert said["input_bytes"] == said["output_bytes"] == 1 << 36
    assert said["peak_bytes"] == 3 << 36
    assert said["operators"] == {"aten.add": 1, "aten.relu": 1} and said["operator_count"] == 2


def test_half_precision_runs_in_half_and_bounds_the_error_by_it(host: Host) -> None:
    judged = Judged(host, LINEAR, "half")
    assert judged.opened["inputs"][0]["dtype"] == "float16"
    (x,) = judged.draw(1)
    w, b = judged.state["fc.weight"], judged.state["fc.bias"]
    right = torch.relu(x.float() @ w.float().T + b.float())
    assert judged.says(right.half())["match"]
    assert not judged.says((right * 1.02).half())["match"]
    assert not judged.says(right.to(torch.float8_e4m3fn).half())["match"]


def test_buffers_are_hashed(host: Host) -> None:
    import hashlib

    fd = os.memfd_create("x", 0)
    os.write(fd, b"kernelfleet")
    assert host("hash", [fd], fds=[11])["sha256"] == [hashlib.sha256(b"kernelfleet").hexdigest()]


def test_secret_sums_tell_one_changed_byte_and_nothing_else(host: Host) -> None:
    Judged(host, LINEAR)
    size = (64 << 20) + 13  # more than one read, and no multiple of a word
    fd = os.memfd_create("x", 0)
    os.ftruncate(fd, size)
    os.pwrite(fd, b"kernelfleet", 5)

    def sums() -> list[list[int]]:
        said: list[list[int]] = host("hash", [fd, fd], fds=[size, 11], secret=True)["sums"]
        return said

    before = sums()
    assert before == sums() and len(before[0]) > len(before[1]) == 1
    os.pwrite(fd, b"!", size - 1)
    assert sums()[0] != before[0] and sums()[1] == before[1]
    os.pwrite(fd, b"\0", size - 1)
    os.pwrite(fd, b"K", 5)
    assert sums()[0] != before[0] and sums()[1] != before[1]


def test_torch_compile_is_measured_with_caches_in_the_working_directory(zygote: Zygote, tmp_path: Path) -> None:
    reply, _ = zygote.channel.call({"op": "warm"})
    assert reply["ok"] and reply["seconds"] > 0, reply
    host = zygote.fork(tmp_path)
    judged = Judged(host, LINEAR)
    judged.draw(1)
    said, (kept,) = host.raw("compile", slots=[0, 0, 0], keep=True)
    assert len(said["time_us"]) == 3 and min(said["time_us"]) > 0 and said["compile_seconds"] > 0
    assert (tmp_path / "compile" / "inductor").is_dir()
    again = host("compile", slots=[0])
    assert again["compile_seconds"] == said["compile_seconds"]
    host.channel.close()

    def graphs(folder: Path) -> set[str]:
        return {str(p.relative_to(folder)) for p in folder.glob("compile/inductor/fxgraph/*/*/*")}

    # Another host of the same task compiles no graph anew: it finds what the first one kept, and has nothing to keep.
    other = tmp_path / "other"
    other.mkdir()
    host = zygote.fork(other)
    Judged(host, LINEAR).draw(1)
    said = host("compile", [kept], slots=[0], keep=True, artifacts=said["artifacts"])
    assert len(said["time_us"]) == 1 and "artifacts" not in said
    assert graphs(other) == graphs(tmp_path) != set()
    host.channel.close()
    # What can't be read is as good as none, and is replaced.
    other = tmp_path / "third"
    other.mkdir()
    broken = os.memfd_create("broken")
    os.write(broken, b"no artifacts")
    host = zygote.fork(other)
    Judged(host, LINEAR).draw(1)
    said = host("compile", [broken], slots=[0], keep=True, artifacts=12)
    assert said["time_us"] and said["artifacts"] > 12, "what is of use takes its place"
    host.channel.close()


def test_instructions_that_a_program_was_loaded_with_once_are_not_tried_again_and_others_are(tmp_path: Path) -> None:
    tried = []

    def loads(_isa: Any, code: str) -> bool:
        tried.append(code)
        return code == "good"

    isa, other = SimpleNamespace(_arch_flags="-mavx2"), SimpleNamespace(_arch_flags="-mavx512f")
    for _ in range(2):
        check = _remembering(loads, str(tmp_path))
        assert check(isa, "good") and not check(isa, "bad")
    assert check(other, "good")
    assert tried == ["good", "bad", "bad", "good"]


def test_a_library_is_loaded_by_a_fork_of_one_python_and_any_other_command_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.cpu_vec_isa import VecISA

    good, bad = Path(torch.__file__).parent / "lib/libtorch_python.so", tmp_path / "none.so"
    bad.write_text("no library")

    def load(path: Path) -> list[str]:
        return [sys.executable, "-c", VecISA._avx_py_load.replace("__lib_path__", str(path))]

    run, ran = subprocess.check_call, []

    def check_call(command: list[str], **options: Any) -> int:
        ran.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "check_call", check_call)
    with _Loads() as loads:
        loads.begin()
        assert loads.check_call(load(good), stderr=loads.DEVNULL) == 0
        with pytest.raises(subprocess.CalledProcessError):
            loads.check_call(load(bad), stderr=loads.DEVNULL)
        assert ran == [], "a Python was started for a library"
        assert loads.check_call(["true"]) == 0
        with pytest.raises(subprocess.CalledProcessError):
            loads.check_call(["false"])
        # Where that Python is gone, PyTorch's own way is taken.
        assert loads._python is not None
        loads._python.kill()
        loads._python.wait()
        assert loads.check_call(load(good), stderr=loads.DEVNULL) == 0
        assert ran == [["true"], ["false"], load(good)]


def test_a_library_that_prints_or_never_ends_as_it_is_loaded_gives_no_other_librarys_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(name: str, body: str) -> str:
        source = f"#include <stdio.h>\n__attribute__((constructor)) static void loaded(void) {{ {body} }}"
        (tmp_path / f"{name}.c").write_text(source)
        subprocess.run(["cc", "-shared", "-fPIC", f"{name}.c", "-o", f"{name}.so"], cwd=tmp_path, check=True)
        return f'LoadLibrary("{tmp_path}/{name}.so")'

    talks, spins = built("talks", 'puts("1 /no.so"); fflush(stdout);'), built("spins", "for (;;) {}")
    ran: list[list[str]] = []
    monkeypatch.setattr(subprocess, "check_call", lambda command, **_options: ran.append(command) or 7)
    with _Loads() as loads:
        loads.begin()
        assert loads.check_call(["", talks]) == 0 and ran == []
        monkeypatch.setattr(loads, "SECONDS", 0.5)
        assert loads.check_call(["", spins]) == 7
        assert loads.check_call(["", talks]) == 7, "there is no Python any more"
    for entry in Path("/proc").glob("[0-9]*/maps"):
        try:
            assert "spins.so" not in entry.read_text()
        except OSError:
            continue


def test_outputs_in_an_input_are_read_there_and_workspaces_are_poisoned(host: Host) -> None:
    source = task("return xs[0].mul_(2)", "torch.rand(16, 8)")
    judged = Judged(host, source)
    (x,) = judged.draw(1)
    fd = os.memfd_create("w", 0)
    os.ftruncate(fd, 4096)
    output = {"input": 0, "bytes": 512, "offset": 0, "dtype": "float32", "shape": [16, 8], "strides": [8, 1]}
    host("bind", [fd], outputs=[output], structure="tensor", workspaces=[{"fd": 0, "bytes": 4096}])
    host("poison", seed=1)
    assert os.pread(fd, 4096, 0) != bytes(4096)
    assert os.pread(judged.input_fds[0], 512, 0) == x.numpy().tobytes()
    assert not host("compare", slot=0, tolerance="contract")["match"]
    os.pwrite(judged.input_fds[0], (x * 2).numpy().tobytes(), 0)
    assert host("compare", slot=0, tolerance="contract")["match"]


def test_the_copy_rate_and_cache_size_are_measured(host: Host) -> None:
    host("open", source=LINEAR, path="t.py", device="cpu", precision="reference", threads=1, slots=1)
    said = host("floor")
    assert said["copy_gbps"] > 0.1 and said["l2_bytes"] > 1 << 16


def test_a_task_that_was_estimated_opens_like_any_other(host: Host) -> None:
    request = {"source": NORM, "path": "n.py", "device": "cpu", "precision": "reference", "threads": 1, "slots": 1}
    estimated = host("estimate", **request)
    assert estimated["parameter_bytes"] == 4 * 6 * 4 + 8
    judged = Judged(host, NORM)
    (x,) = judged.draw(1)
    s = judged.state
    args = (s["norm.running_mean"], s["norm.running_var"], s["norm.weight"], s["norm.bias"])
    assert judged.says(torch.nn.functional.batch_norm(x, *args))["match"]
    assert host("open", **request)["inputs"] == judged.opened["inputs"]


def test_a_convolution_in_double_that_unfolds_to_more_than_there_is_runs_in_slices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import kernelfleet_host.reference as module

    source = task("return self.c(xs[0])", "torch.rand(4, 6, 32, 32)", "self.c = nn.Conv2d(6, 8, (3, 5), groups=2)")
    reference = module.Reference(source, "task.py", "cpu", "reference", 1, 1)
    traced = reference.require_trace()
    assert traced.column_bytes == 8 * 4 * 3 * (3 * 5) * (30 * 28)
    turned = task("return self.c(xs[0])", "torch.rand(4, 6, 16, 16)", "self.c = nn.ConvTranspose2d(6, 8, 3)")
    assert module.Reference(turned, "task.py", "cpu", "reference", 1, 1).require_trace().column_bytes == (
        8 * 4 * 8 * 9 * (16 * 16)
    )
    room = (2 * traced.peak_bytes + (1 << 28)) * 4 // 3 + 4
    monkeypatch.setattr(module, "available_bytes", lambda _device: room)
    assert reference._pieces() > 1
    monkeypatch.setattr(module, "available_bytes", lambda _device: room + traced.column_bytes * 2)
    assert reference._pieces() == 1
