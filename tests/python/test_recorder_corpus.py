"""The corpus at the recorder: honest candidates give a plan that computes the reference, hostile ones what they expect.

What only a run can tell (a mismatch, a crash of a kernel) is the judge's test; here such candidates have a plan.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_interpreter import build, run
from recording import Recorder, expectation, load_task, read_files, request_for

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
HONEST = sorted((CORPUS / "honest").iterdir())
HOSTILE = sorted((CORPUS / "hostile").iterdir())
AT_RUN = {
    "launch_invalid",
    "mismatch",
    "constants_changed",
    "build_failed",
    "shape",
    "dtype",
    "impossible",
    "library_not_allowed",
    "forged_reply",
}
"""Codes of later stages: the recording succeeds."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.close()


def same(got: Any, want: Any) -> None:
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
        assert repr(got) == repr(want) or got == repr(want)


@pytest.mark.parametrize("folder", HONEST, ids=lambda folder: folder.name)
def test_an_honest_candidate_is_recorded_and_its_plan_computes_the_reference(
    folder: Path, recorder: Recorder, tmp_path: Path
) -> None:
    assert expectation(folder) == {"correct": True}
    task, files = load_task(folder / "task.py"), read_files(folder)
    request, fds = request_for(task, files)
    reply, constants = recorder.record(request, fds)
    assert reply["ok"], reply
    libraries = build(files, reply["plan"], tmp_path)
    torch.manual_seed(0)  # as `request_for` has drawn the parameters
    model = task.Model(*task.get_init_inputs()).eval()
    state = copy.deepcopy(model.state_dict())
    parts = [constants[item["offset"] : item["offset"] + item["bytes"]] for item in reply["constants"]]
    for _ in range(2):
        inputs = task.get_inputs()
        mine = copy.deepcopy(inputs)
        with torch.no_grad():
            want = model(*inputs)
        same(run(reply["plan"], libraries, mine, state, parts), want)
        same(mine, inputs)
        same(state, model.state_dict())
    again, _ = recorder.record(*request_for(task, files, seed=1))
    assert again["plan"] == reply["plan"], "another parameter set gives another plan"


@pytest.mark.parametrize("folder", HOSTILE, ids=lambda folder: folder.name)
def test_a_hostile_candidate_is_refused_as_expected_or_left_to_the_run(folder: Path, recorder: Recorder) -> None:
    expected = expectation(folder)
    # One whose trick is about time alone is correct, and wins nothing by it.
    trick = "speedup_at_most" in expected
    assert expected["correct"] is trick
    code = expected.get("code")
    task, files = load_task(folder / "task.py"), read_files(folder)
    request, fds = request_for(task, files)
    reply, _ = recorder.record(request, fds, seconds=5.0)
    if code == "plan_differs":
        again, _ = recorder.record(*request_for(task, files, seed=1))
        assert reply["plan"] != again["plan"]
    elif (
        trick
        or code in AT_RUN
        or code == "structure"
        and reply["ok"]
        or "kernel" in folder.name
        and code in ("crash", "timeout")
    ):
        assert reply["ok"], reply
    elif code is not None:
        assert reply["code"] == code, reply
        if code in ("framework_operator", "input_read"):
            assert reply["file"] == "model_new.py" and reply["source"] and reply["hint"], reply


def test_the_recorder_still_serves_after_all_that(recorder: Recorder) -> None:
    folder = CORPUS / "honest" / "softmax_rows"
    reply, _ = recorder.record(*request_for(load_task(folder / "task.py"), read_files(folder)))
    assert reply["ok"], reply
