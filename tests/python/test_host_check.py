"""What `check` refuses, on small tasks of each kind, and what it doesn't."""

from __future__ import annotations

import pytest
import torch
from test_host import Host, Judged, host, module, task, zygote  # noqa: F401

from kernelfleet_host import check  # noqa: E402  isort:skip

ACCEPTED = {
    "linear and relu": task(
        "return torch.relu(self.fc(xs[0]))", "torch.rand(64, 96) - 0.5", "self.fc = nn.Linear(96, 48)"
    ),
    "relu of positive numbers": task("return torch.relu(xs[0])", "torch.rand(64, 96)"),
    "layer norm": task("return self.n(xs[0])", "torch.rand(64, 96)", "self.n = nn.LayerNorm(96)"),
    "conv, norm, softmax": task(
        "return torch.softmax(self.n(self.c(xs[0])), dim=1)",
        "torch.rand(4, 3, 16, 16)",
        "self.c = nn.Conv2d(3, 8, 3); self.n = nn.BatchNorm2d(8)",
    ),
    "dropout": task("return self.d(torch.tanh(xs[0])) * 2", "torch.rand(64, 96)", "self.d = nn.Dropout(0.5)"),
    "argmax": task("return torch.argmax(xs[0], dim=1)", "torch.rand(32, 20, 5)"),
    "cross entropy": task("return F.cross_entropy(xs[0], xs[1])", "torch.rand(128, 10), torch.randint(0, 10, (128,))"),
    "a seed of its own": task("torch.manual_seed(3); torch.rand(3); return torch.tanh(xs[0])", "torch.rand(8, 8) * 4"),
    "recurrence": task("return self.r(xs[0])[0]", "torch.rand(4, 6, 8)", "self.r = nn.LSTM(8, 8, batch_first=True)"),
    "a product of three dimensions": task(
        "return xs[0] @ xs[1]", "torch.rand(2, 8, 16) - 0.5, torch.rand(16, 16) - 0.5"
    ),
    "matmul of triangular matrices": task(
        "return torch.tril(xs[0] @ xs[1]) + 1", "torch.rand(64, 64).tril(), torch.rand(64, 64).triu()"
    ),
}

REFUSED = {
    "zeros": task("return torch.zeros_like(xs[0])", "torch.rand(8, 8)"),
    "constant": task("return torch.softmax(xs[0].sum(1, keepdim=True), 1)", "torch.rand(8, 8)"),
    "other_set": task("return self.p * 2 + 0 * xs[0]", "torch.rand(8, 8)", "self.p = nn.Parameter(torch.randn(8))"),
    "skip_operator": task("return torch.relu(torch.relu(xs[0]) * 2)", "torch.rand(64, 96) - 0.5"),
    "random": task("return xs[0] + torch.rand_like(xs[0])", "torch.rand(8, 8)"),
    "stateful": task("return xs[0] + self.h", "torch.rand(8, 8)", "self.h = torch.randn(8)"),
    "inaccurate": task("return ((xs[0] + 1e7) - 1e7).mean(1)", "torch.rand(64, 2000)"),
    "not_finite": task("return xs[0] / 0 * 0", "torch.rand(8, 8)"),
    "exception": task("return xs[0].no_such_method()", "torch.rand(8, 8)"),
}


def opened(host: Host, source: str) -> None:  # noqa: F811
    host("open", source=source, path="task.py", device="cpu", precision="reference", threads=1, slots=1)


@pytest.mark.parametrize("name", ACCEPTED)
def test_an_honest_task_is_accepted(host: Host, name: str) -> None:  # noqa: F811
    opened(host, ACCEPTED[name])
    said = host("check", inputs=3)
    assert said["accepted"], said
    assert said["eager_us"] > 0 and said["operators"] and said["memory_bytes"] > 0
    assert said["reference_error"] < 1e-3


@pytest.mark.parametrize("code", [c for c in REFUSED if c != "exception"])
def test_a_task_that_needs_no_work_or_is_unsound_is_refused(host: Host, code: str) -> None:  # noqa: F811
    opened(host, REFUSED[code])
    said = host("check", inputs=3)
    assert not said["accepted"]
    assert code in [r["code"] for r in said["refusals"]], said
    if code == "skip_operator":
        assert {r["line"] for r in said["refusals"] if r["code"] == code} == {11}


def test_what_is_drawn_is_random_though_the_result_hardly_shows_it(host: Host) -> None:  # noqa: F811
    opened(host, task("return xs[0] * 2 + torch.rand_like(xs[0]) * 1e-9", "torch.rand(8, 8)"))
    assert "random" in [r["code"] for r in host("check", inputs=3)["refusals"]]


def test_a_counter_outside_the_state_dict_is_state(host: Host) -> None:  # noqa: F811
    opened(host, task("self.n += 1; return xs[0] * self.n", "torch.rand(8, 8)", "self.n = 0"))
    assert [r["code"] for r in host("check", inputs=3)["refusals"]] == ["stateful"]


def test_after_a_check_the_parameter_set_and_its_buffers_are_the_callers(host: Host) -> None:  # noqa: F811
    source = ACCEPTED["linear and relu"]
    opened(host, source)
    host("check", inputs=2)
    judged = Judged(host, source)
    host("check", inputs=2)
    (x,) = judged.draw(1)
    want = torch.relu(x @ judged.state["fc.weight"].T + judged.state["fc.bias"])
    assert judged.says(want)["match"]


def test_parameters_are_shared_after_a_check_too(host: Host) -> None:  # noqa: F811
    opened(host, ACCEPTED["linear and relu"])
    host("check", inputs=2)
    reply, fds = host.raw("parameters", seed=7)
    assert len(fds) == len(reply["tensors"]) == 2


@pytest.mark.parametrize("code", ["zeros", "constant", "other_set"])
def test_what_costs_a_run_at_most_is_found_though_there_is_no_time(host: Host, code: str) -> None:  # noqa: F811
    opened(host, REFUSED[code])
    said = host("check", inputs=3, seconds=0)
    assert code in [r["code"] for r in said["refusals"]], said


def test_zeros_on_plain_inputs_alone_are_no_reason_to_refuse_though_there_is_no_time(host: Host) -> None:  # noqa: F811
    opened(host, task("return torch.relu(-xs[0])", "torch.rand(64, 96)"))
    said = host("check", inputs=3, seconds=0)
    assert said["accepted"], said


ROUNDED = "import torch.backends.cudnn as c; self.n += 1; return xs[0] * (1 + 3e-4 * {})"


@pytest.mark.parametrize(
    ("when", "accepted"),
    [
        ("(self.n % 2 * c.allow_tf32)", True),
        ("(self.n % 2)", False),
        ("(100 * (self.n % 2) * c.allow_tf32)", False),
        ("(self.n > 1)", False),
    ],
)
def test_what_differs_as_tf32_makes_it_is_looked_at_without_tf32(
    monkeypatch: pytest.MonkeyPatch, when: str, accepted: bool
) -> None:
    source = task(ROUNDED.format(when), "torch.rand(8, 8)", "self.n = 0")
    # The processor has no TF32: the task plays a library that takes it now and then.
    monkeypatch.setattr(module.Reference, "takes_tf32", lambda _self: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    said = check.Check(module.Reference(source, "task.py", "cpu", "reference", 1, 1), 3, 5.0)
    said._runs()
    said._deterministic()
    assert [r["code"] for r in said.refusals] == ([] if accepted else ["stateful"]), said.refusals
    assert torch.backends.cudnn.allow_tf32


def test_hidden_state_is_seen_however_little_it_moves_the_outputs(host: Host) -> None:  # noqa: F811
    opened(host, task("self.n += 1; return xs[0] * (1 + 3e-4 * (self.n % 2))", "torch.rand(8, 8)", "self.n = 0"))
    assert [r["code"] for r in host("check", inputs=3)["refusals"]] == ["stateful"]
