"""The stages of the GPU check: each runs the product's own commands and writes what they said as one JSON.

Nothing is computed here that a command could say itself, but for sums over its rows. A stage that was cut
goes on where it was: `kernelfleet run` keeps what is done in its results folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from library import CASES

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.environ.get("KERNELFLEET", str(ROOT / "target/release/kernelfleet"))
WORK = ROOT / "results/gpu"
SECONDS = int(os.environ.get("KERNELFLEET_STAGE_SECONDS", "520"))
# No further case of the library stage is begun after so many seconds.
LIBRARY_SECONDS = 160
# `task check`: tasks a call, calls beside each other, longest search for what refuses one task.
CHECKED_A_CALL, CHECKS_AT_ONCE, CHECK_SECONDS = 4, 6, 20
# Judgements of the candidate that answers early, of which all but the first measure for so many seconds at most; judgements
# of the process path beside each other.
EARLY, EARLY_SECONDS, PROCESSES_AT_ONCE = 50, 1, 5
# Candidate over eager is near 1 within 5 %.
NEAR = math.log(1.05)
# Coefficient of variation of ten verdicts of one kernel: at most the first above so many microseconds, the second below.
SPREAD, SPREAD_US = (0.003, 0.02), 100
OVER = {"median": "median", "low": "high", "high": "low"}


def command(arguments: list[str], seconds: float = SECONDS) -> tuple[int, str, str, float]:
    """Run the program; returns status, output, diagnostics, wall seconds. 124 when it was cut."""
    start = time.monotonic()
    process = subprocess.Popen(
        [PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=seconds)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 2)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            out, err = process.communicate()
        status = 124
    return status, out, err, time.monotonic() - start


def whereby(verdict: dict[str, Any]) -> dict[str, Any]:
    """Device and versions as a verdict names them."""
    return {key: verdict[key] for key in ("device", "versions")}


def judged(folder: Path) -> dict[str, Any]:
    """Device and versions as the first kept verdict names them."""
    for path in sorted(folder.glob("**/verdict.json")):
        return whereby(json.loads(path.read_text()))
    return {"device": {}, "versions": {}}


def commit() -> str:
    """Of what is measured."""
    given = os.environ.get("KERNELFLEET_COMMIT", "")
    if given:
        return given
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def facts() -> dict[str, Any]:
    """Commit, card, driver and versions, for every evidence file."""
    status, out, err, _ = command(["doctor", "-o", "json"], 120)
    doctor = json.loads(out) if out.strip().startswith("{") else {"error": err[-2000:], "status": status}
    query = "name,driver_version,memory.total,power.limit"
    card = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True
    )
    return {"commit": commit(), "card": card.stdout.strip(), "doctor": doctor}


def task_files(tasks: Path, levels: list[int]) -> list[Path]:
    """KernelBench's files of the levels, in the order of their numbers."""

    def number(path: Path) -> int:
        head = path.name.split("_")[0]
        return int(head) if head.isdigit() else 0

    return [p for level in levels for p in sorted((tasks / f"level{level}").glob("*.py"), key=number)]


def manifest(path: Path, name: str) -> Path:
    """An OptimizationJob for the built-in policy on this card; its tasks come by --tasks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (
        "apiVersion: kernelfleet.dev/v1alpha1\nkind: OptimizationJob\n"
        f"metadata: {{name: {name}}}\n"
        "spec:\n  tasks: {taskSet: {name: kernelbench}}\n  policy: {builtin: {}}\n  agent: {maxTurns: 6}\n"
        "  judge: {gpuPool: local, precision: reference}\n"
    )
    path.write_text(text)
    return path


def smoke(tasks: Path) -> dict[str, Any]:
    """Hand-written candidates of tests/gpu/candidates, each judged on the card."""
    rows = []
    for folder in sorted((ROOT / "tests/gpu/candidates").iterdir()):
        if not (folder / "task.py").exists():
            continue
        status, out, err, seconds = command(
            [
                "judge",
                "--task",
                str(folder / "task.py"),
                "--candidate",
                str(folder / "candidate"),
                "--device",
                "cuda",
                "--no-cache",
                "-o",
                "json",
            ],
            180,
        )
        verdict = json.loads(out) if out.strip().startswith("{") else None
        rows.append(
            {"case": folder.name, "status": status, "seconds": seconds, "verdict": verdict, "stderr": err[-3000:]}
        )
        print(
            folder.name,
            status,
            f"{seconds:.1f} s",
            (verdict or {}).get("reward"),
            (verdict or {}).get("reason"),
            err[-500:],
            flush=True,
        )
    return {"rows": rows}


def check(tasks: Path) -> dict[str, Any]:
    """`task check` of levels 3 to 1, several beside each other, a few tasks a call; what is on disk isn't checked again. What
    lacks memory beside others, or meets a fault, is checked again alone."""
    kept = WORK / "check"
    kept.mkdir(parents=True, exist_ok=True)

    def row(path: Path) -> Path:
        return kept / f"{path.parent.name}-{path.stem}.json"

    start = time.monotonic()

    def part(files: list[Path], alone: bool = False) -> str:
        more = SECONDS - (time.monotonic() - start)
        if more < 40:
            return ""
        arguments = ["task", "check", *map(str, files), "--device", "cuda", "--seconds", str(CHECK_SECONDS)]
        status, out, err, _ = command([*arguments, "-o", "json"], more)
        found = json.loads(out) if out.strip().startswith("[") else []
        for path in files:
            of = [line for line in found if Path(line["path"]).resolve() == path.resolve()]
            codes = {refusal["code"] for line in of for refusal in line["refusals"]}
            if of and (alone or not codes & {"memory", "fault"}):
                about = {"level": path.parent.name, "path": path.name, "commit": commit()}
                row(path).write_text(json.dumps(of[0] | about) + "\n")
        return "" if found else f"{[p.stem for p in files]}: {status} {err[-1000:]}"

    def left() -> list[Path]:
        return [path for path in task_files(tasks, [3, 2, 1]) if not row(path).exists()]

    files = left()
    parts = [files[n : n + CHECKED_A_CALL] for n in range(0, len(files), CHECKED_A_CALL)]
    with ThreadPoolExecutor(CHECKS_AT_ONCE) as pool:
        failed = [text for text in pool.map(part, parts) if text]
    failed += [text for text in (part([path], True) for path in left()) if text]
    print("\n".join(failed), flush=True)
    files = [row(path) for path in task_files(tasks, [1, 2, 3])]
    rows = [json.loads(path.read_text()) for path in files if path.exists()]
    return {"rows": rows, "left": len(files) - len(rows), "at_once": CHECKS_AT_ONCE, "seconds_a_task": CHECK_SECONDS}


def policy(tasks: Path) -> dict[str, Any]:
    """The built-in policy over levels 1 and 2 at precision reference; goes on where it was cut.

    With KERNELFLEET_GO_ON=FOLDER tasks that have a row in FOLDER/policy-level*.json are not run again: their rows are
    taken over, each under the commit that it came from; but those of KERNELFLEET_AGAIN (`2/28,2/37`: level and number)
    are run again. Those of KERNELFLEET_LAST come last.
    """
    job = manifest(WORK / "policy.yaml", "policy")
    levels = os.environ.get("KERNELFLEET_LEVELS", "1,2").split(",")
    arguments = ["run", str(job), "--device", "cuda", "--results", str(WORK / "policy"), "-o", "json", "--tasks"]
    before = earlier(levels)
    known = {row["task"] for row in before}
    last = os.environ.get("KERNELFLEET_LAST", "").split(",")
    files = [(label(level, p.stem) in last, p) for level in levels for p in task_files(tasks, [int(level)])]
    arguments += [str(p) for _, p in sorted(files, key=lambda f: f[0]) if p.stem not in known]
    status, _, err, seconds = command(arguments)
    if status not in (0, 124, 130):
        print(err[-6000:], file=sys.stderr)
    rows = before + [row | {"commit": facts()["commit"]} for row in outcomes(WORK / "policy", tasks)]
    rows.sort(key=lambda row: int(row["task"].split("_")[0]))
    return {"status": status, "levels": levels, "seconds": seconds, "cut": status == 124, "rows": rows}


def label(level: str, task: str) -> str:
    """`2/28` of level 2's `28_BMM_...`."""
    return f"{level}/{task.split('_')[0]}"


def earlier(levels: list[str]) -> list[dict[str, Any]]:
    """Rows of an earlier run that are taken over: all but those that a fault ended."""
    rows = []
    for level in levels:
        path = Path(os.environ.get("KERNELFLEET_GO_ON", "/nowhere")) / f"policy-level{level}.json"
        if path.is_file():
            evidence = json.loads(path.read_text())
            again = os.environ.get("KERNELFLEET_AGAIN", "").split(",")
            rows += [
                {"commit": evidence["commit"], **row}
                for row in evidence["result"]["rows"]
                if row["state"] != "failed" and label(level, row["task"]) not in again
            ]
    return rows


def outcomes(folder: Path, tasks: Path) -> list[dict[str, Any]]:
    """One row a task that is done, from what `kernelfleet run` keeps; a stage that was cut has fewer."""

    def number(path: Path) -> tuple[int, str]:
        head = path.parent.name.split("_")[0]
        return (int(head) if head.isdigit() else 0, path.parent.name)

    rows = []
    for path in sorted(folder.glob("**/outcome.json"), key=number):
        outcome = json.loads(path.read_text())["outcome"]
        verdict = outcome.get("verdict") or {}
        rows.append(
            {
                "task": outcome["task"],
                "state": outcome["state"],
                "reason": (outcome.get("reason") or (verdict.get("reason") or {}).get("message") or "").replace(
                    f"{tasks}/", ""
                )
                or None,
                "code": (verdict.get("reason") or {}).get("code"),
                "attempts": outcome["attempts"],
                "seconds": round(outcome["seconds"], 1),
                **{
                    key: verdict.get(key)
                    for key in ("reward", "grade", "measurement", "speedup", "time_us", "samples", "notes")
                },
                "phases_seconds": verdict.get("phases_seconds"),
            }
        )
    return rows


def repeat(tasks: Path) -> dict[str, Any]:
    """Ten verdicts of each of ten candidates, in two processes of five each: coefficient of variation of the speedup. They are the
    smoke stage's honest ones, and those best ones of the policy stage that took the least time. What is on disk isn't done again."""
    files = {path.stem: path for path in task_files(tasks, [1, 2])}
    smoke = [f for f in sorted((ROOT / "tests/gpu/candidates").iterdir()) if not f.name.startswith("hostile")]
    found = [(folder.name, folder / "task.py", folder / "candidate") for folder in smoke]
    bests = [b for b in (WORK / "policy").glob("**/best/model_new.py") if b.parents[1].name in files]

    def cost(best: Path) -> float:
        verdict = json.loads((best.parents[1] / "verdict.json").read_text())
        return float(verdict["phases_seconds"]["total"])

    found += [(b.parents[1].name, files[b.parents[1].name], b.parent) for b in sorted(bests, key=cost)]
    start = time.monotonic()

    def one(which: tuple[str, Path, Path]) -> dict[str, Any] | None:
        name, task, best = which
        kept = WORK / "repeat" / f"{name}.json"
        if kept.exists():
            return json.loads(kept.read_text())  # type: ignore[no-any-return]
        copies = WORK / "repeat" / name
        for number in range(5):
            shutil.copytree(best, copies / str(number), dirs_exist_ok=True)
        verdicts: list[dict[str, Any]] = []
        for _ in range(2):
            left = SECONDS - (time.monotonic() - start)
            if left < 30:
                return None
            arguments = ["judge", "--task", str(task), "--batch", str(copies), "--device", "cuda", "--no-cache"]
            status, out, err, _ = command([*arguments, "--inputs", "2", "-o", "json"], left)
            if status:
                print(name, status, err[-1000:], flush=True)
                return None
            verdicts += [line["verdict"] for line in json.loads(out)]
        well = [v for v in verdicts if v["correct"]]
        speedups = [v["speedup"]["eager"]["median"] for v in well]
        row = {
            "task": name,
            "commit": commit(),
            "runs": len(well),
            "speedup": statistics.mean(speedups),
            "cv": statistics.stdev(speedups) / statistics.mean(speedups),
            "time_us": statistics.mean(v["time_us"]["candidate"]["median"] for v in well),
            "phases": [v["phases_seconds"] for v in well],
            "about": whereby(well[0]),
        }
        kept.write_text(json.dumps(row) + "\n")
        print(name, row["runs"], row["cv"], flush=True)
        return row

    # Two beside each other: while one checks, the other measures.
    with ThreadPoolExecutor(2) as pool:
        rows = [row for row in pool.map(one, found[:10]) if row]
    said = [row.pop("about") for row in rows]
    return {"rows": rows} | (said[0] if said else {})


BATCH_MODEL = """import torch
from torch import nn

import kernelfleet_ext as kf

k = kf.load("kernels/chain.cu")


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        k.chain[((n + {block} * {each} - 1) // ({block} * {each}),), {block}](x, y, n)
        return y
"""
BATCH_KERNEL = """// {each} elements a thread, {block} threads a block.
__device__ float one(float x) {{
    float v = x * 0.5f + 1.0f;
    return {form} * x;
}}

extern "C" __global__ void chain(const float* __restrict__ x, float* __restrict__ y, long long n) {{
    long long first = blockIdx.x * (long long)({block} * {each}) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < {each}; ++j) {{
        long long i = first + j * {block};
        if (i < n) y[i] = one(x[i]);
    }}
}}
"""
# What a candidate of the batch between accepted ones does, and the code that it is refused with.
BATCH_BREAKS = {
    "mismatch": ("if (i < n) y[i] = one(x[i]);", "if (i < n) y[i] = i == 77777 ? 0.0f : one(x[i]);"),
    "illegal_access": ("if (i < n) y[i] = one(x[i]);", "if (i < n) y[i + (i == 77777) * (1ll << 40)] = one(x[i]);"),
}
BATCH_FORMS = (
    "tanhf(0.5f * v * (1.0f + erff(v * 0.70710678118654752f)))",
    "tanhf(v * normcdff(v))",
    "tanhf(0.5f * v * erfcf(v * -0.70710678118654752f))",
)


def batch(tasks: Path) -> dict[str, Any]:
    """Verdicts a second of a batch of 60 candidates of a small task, all different: once with everything to be built, then
    with builds and baselines cached, every candidate judged in full all the same."""
    folder = WORK / "batch"
    folder.mkdir(parents=True, exist_ok=True)
    task = (ROOT / "tests/gpu/candidates/gelu_chain/task.py").read_text()
    (folder / "task.py").write_text(task.replace("torch.randn(4096, 8192)", "torch.randn(512, 1024)"))

    def lay(candidate: Path, block: int, each: int, kernel: str) -> None:
        (candidate / "kernels").mkdir(parents=True, exist_ok=True)
        (candidate / "model_new.py").write_text(BATCH_MODEL.format(block=block, each=each))
        (candidate / "kernels/chain.cu").write_text(kernel)

    kernels = [
        (block, each, BATCH_KERNEL.format(block=block, each=each, form=form))
        for block, each, form in product((64, 128, 256, 512, 1024), (1, 2, 4, 8), BATCH_FORMS)
    ]
    for number, (block, each, kernel) in enumerate(kernels):
        lay(folder / "candidates" / f"c{number:02}", block, each, kernel)
    # One that is wrong and one that breaks its context among others: each gets its own verdict.
    breaks = [None, None, *BATCH_BREAKS, None, *BATCH_BREAKS, None]
    for number, (what, (block, each, kernel)) in enumerate(zip(breaks, kernels[24:], strict=False)):
        name = f"{number:02}-{what or 'accepted'}"
        lay(folder / "mixed" / name, block, each, kernel.replace(*BATCH_BREAKS[what]) if what else kernel)
    judge = ["judge", "--task", str(folder / "task.py"), "--device", "cuda", "--no-cache", "-o", "json", "--batch"]
    arguments = [*judge, str(folder / "candidates")]
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    start = time.monotonic()
    # A line with its time for each verdict.
    os.environ["KERNELFLEET_LOG"] = "kernelfleet::local=info"
    for which in ("first", "again"):
        left = SECONDS - (time.monotonic() - start)
        if left < 60:
            continue
        status, out, err, seconds = command(arguments, left)
        verdicts = [line["verdict"] for line in json.loads(out)] if out.strip().startswith("[") else []
        said = [re.match(r"(\d+-\d+-\S+Z)\s.*judged", re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in err.splitlines()]
        times = sorted(datetime.fromisoformat(found[1]).timestamp() for found in said if found)
        phases: dict[str, list[float]] = {}
        about = whereby(verdicts[0]) if verdicts else {}
        for verdict in verdicts:
            for phase, spent in verdict["phases_seconds"].items():
                phases.setdefault(phase, []).append(spent)
        rows.append(
            {
                "which": which,
                "status": status,
                "seconds": seconds,
                "verdicts": len(verdicts),
                # Without the start of the judge and of the task's host, and the first candidate's baseline.
                "verdicts_a_second": (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
                "verdict_after_seconds": [round(at - times[0], 2) for at in times],
                "correct": sum(bool(v["correct"]) for v in verdicts),
                "rewards": [v["reward"] for v in verdicts],
                "phases_median_seconds": {phase: statistics.median(spent) for phase, spent in sorted(phases.items())},
                "held_seconds": sum(phases.get("held", [])),
                "own_seconds": sum(phases.get("measure", [])),
                "stderr": err[-2000:],
            }
        )
        print(which, status, f"{seconds:.1f} s", len(verdicts), rows[-1]["verdicts_a_second"], err[-300:], flush=True)
    del os.environ["KERNELFLEET_LOG"]
    status, out, err, seconds = command([*judge, str(folder / "mixed")], max(SECONDS - (time.monotonic() - start), 60))
    mixed = [
        {
            "candidate": line["candidate"],
            "correct": line["verdict"]["correct"],
            "code": (line["verdict"]["reason"] or {}).get("code"),
        }
        for line in (json.loads(out) if out.strip().startswith("[") else [])
    ]
    print("mixed", status, f"{seconds:.1f} s", mixed, err[-500:], flush=True)
    return {"rows": rows, "mixed": mixed} | about


def library(tasks: Path) -> dict[str, Any]:
    """The library's convolutions against eager's, one a row; what this very program has done is not done again."""
    program = hashlib.sha256(Path(PROGRAM).read_bytes()).hexdigest()
    start, rows = time.monotonic(), []
    for case in CASES:
        task, candidate = case.write(WORK / "library")
        kept = task.with_name("row.json")
        row = json.loads(kept.read_text()) if kept.exists() else {}
        if row.get("program") != program or not row["over_eager"]:
            if time.monotonic() - start > LIBRARY_SECONDS:
                print(case.name, "left for the next run", flush=True)
                continue
            arguments = ["judge", "--task", str(task), "--candidate", str(candidate), "--inputs", "2"]
            status, out, err, seconds = command([*arguments, "--device", "cuda", "-o", "json"], 75)
            verdict = json.loads(out) if out.strip().startswith("{") else {}
            eager = (verdict.get("speedup") or {}).get("eager")
            row = {
                "case": case.name,
                "program": program,
                "status": status,
                "seconds": round(seconds, 1),
                # The interval of candidate over eager, of which the speedup is the inverse.
                "over_eager": {k: 1 / eager[v] for k, v in OVER.items()} if eager else None,
                **{key: verdict.get(key) for key in ("reward", "reason", "time_us", "phases_seconds")},
                "about": whereby(verdict) if verdict else {},
                "stderr": err[-3000:],
            }
            kept.write_text(json.dumps(row, indent=1) + "\n")
        rows.append(row)
        print(case.name, row["status"], row["over_eager"], row["reason"], row["stderr"][-500:], flush=True)
    said = [row.pop("about", {}) for row in rows]
    about: dict[str, Any] = next((one for one in said if one), {})
    far = [row["case"] for row in rows if not row["over_eager"] or abs(math.log(row["over_eager"]["median"])) > NEAR]
    return {"rows": rows, "left": len(CASES) - len(rows), "not_near_1": far} | about


def row_of(case: str, number: int, status: int, seconds: float, verdict: dict[str, Any], err: str) -> dict[str, Any]:
    """What is kept of a verdict of the process path; `seconds` of the whole command, 0 in a batch."""
    keys = ["reward", "correct", "reason", "grade", "speedup", "time_us", "phases_seconds", "isolation"]
    keys += ["measurement", "device", "versions", "notes", "audit"]
    row = {"case": case, "number": number, "status": status, "seconds": round(seconds, 1), "commit": commit()}
    return row | {key: verdict.get(key) for key in keys} | {"stderr": err[-2000:]}


@dataclass
class Case:
    """A candidate of the process path and its task."""

    name: str
    task: Path
    candidate: Path


def process(tasks: Path) -> dict[str, Any]:
    """Candidates that can't be plans, as they are: honest ones, an operator behind a decoy, and one that answers early, again
    and again. Several are built and judged beside each other, measured one at a time. Build seconds are those of the
    first judgement of each."""
    folder = ROOT / "tests/gpu/process"
    start = time.monotonic()

    def one(case: Path) -> dict[str, Any] | None:
        kept = WORK / "process" / f"{case.name}.json"
        if not kept.exists():
            left = SECONDS - (time.monotonic() - start)
            if left < 90:
                return None
            arguments = ["judge", "--task", str(case.task), "--candidate", str(case.candidate)]
            arguments += ["--device", "cuda", "--path", "process", "--no-cache", "-o", "json"]
            status, out, err, seconds = command(arguments, left)
            verdict = json.loads(out) if out.strip().startswith("{") else {}
            row = row_of(case.name, 0, status, seconds, verdict, err)
            # What was cut is no result: the next run tries it again.
            if status != 124:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(row, indent=1) + "\n")
            print(case.name, status, f"{seconds:.1f} s", row["reward"], row["reason"], err[-600:], flush=True)
            return row
        return json.loads(kept.read_text())  # type: ignore[no-any-return]

    ours = sorted(p for p in folder.iterdir() if (p / "task.py").exists())
    cases = [Case(p.name, p / "task.py", p / "candidate") for p in ours]
    if released := os.environ.get("KERNELFLEET_CUDA_AGENT"):
        cases.append(Case("cuda_agent_released", Path(released) / "model.py", Path(released)))
    with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
        found = list(pool.map(one, cases))
    # The one that answers early again and again, in batches beside each other.
    case = folder / "early_done"

    def again(part: int) -> list[dict[str, Any]]:
        kept = WORK / f"process/again-{part}.json"
        left = SECONDS - (time.monotonic() - start)
        if not kept.exists() and left > 60:
            copies = WORK / f"early/{part}"
            for number in range(1 + part, EARLY, PROCESSES_AT_ONCE):
                shutil.copytree(case / "candidate", copies / f"{number:02}", dirs_exist_ok=True)
            arguments = ["judge", "--task", str(case / "task.py"), "--batch", str(copies)]
            arguments += ["--device", "cuda", "--path", "process", "--no-cache", "-o", "json"]
            status, out, err, seconds = command(arguments, left)
            judged = json.loads(out) if out.strip().startswith("[") else []
            print("early_done, again", part, status, f"{seconds:.1f} s", len(judged), err[-600:], flush=True)
            if judged:
                rows = [row_of(case.name, int(j["candidate"]), status, 0.0, j["verdict"], "") for j in judged]
                kept.write_text(json.dumps(rows, indent=1) + "\n")
        return json.loads(kept.read_text()) if kept.exists() else []

    os.environ["KERNELFLEET_MEASURE_SECONDS"] = str(EARLY_SECONDS)
    with ThreadPoolExecutor(PROCESSES_AT_ONCE) as pool:
        found += [row for rows in pool.map(again, range(PROCESSES_AT_ONCE)) for row in rows]
    del os.environ["KERNELFLEET_MEASURE_SECONDS"]
    rows = [row for row in found if row and row["status"] != 124]
    early = [row for row in rows if row["case"] == "early_done"]
    refused = [row for row in early if row["correct"] is False]
    # What isn't refused has paid for the wait, since the clock runs until outputs are copied: the work takes about 1 ms.
    paid = [r for r in early if r["correct"] and r["time_us"]["candidate"]["median"] > 500]
    said = [{key: row.pop(key) for key in ("device", "versions")} for row in rows]
    about = next((one for one in said if one["versions"]), {})
    counts = {"judged": len(early), "refused": len(refused), "paid": len(paid)}
    left = len(cases) + EARLY - 1 - len(rows)
    return about | {"rows": rows, "left": left, "at_once": PROCESSES_AT_ONCE, "early_done": counts}


def counters(tasks: Path) -> dict[str, Any]:
    """Hardware counters of two candidates' kernels, one with a library call, and of what eager runs for the same."""
    rows = []
    for case in ("gelu_chain", "linear_relu"):
        folder = ROOT / "tests/gpu/candidates" / case
        for whose in ("candidate", "reference"):
            arguments = ["counters", "--task", str(folder / "task.py"), "-o", "json"]
            arguments += ["--candidate", str(folder / "candidate")] if whose == "candidate" else []
            status, out, err, seconds = command(arguments, 120)
            kernels = json.loads(out) if out.strip().startswith("[") else []
            row = {"case": case, "whose": whose, "status": status, "seconds": round(seconds, 1), "kernels": kernels}
            rows.append(row | {"stderr": err[-1000:]})
            print(case, whose, status, len(kernels), err[-300:], flush=True)
    return {"rows": rows}


def selftest(tasks: Path) -> dict[str, Any]:
    """The runner's own checks on this card: what it does to buffers, modules, graphs and libraries, without a judge."""
    status, out, err, seconds = command(["selftest-cuda"], SECONDS)
    lines = [line.split(None, 1) for line in out.splitlines() if not line.startswith(" ")]
    by = {word: [rest for first, rest in lines if first == word] for word in ("ok", "skipped", "FAILED")}
    print(out, err[-2000:], status, f"{seconds:.1f} s", flush=True)
    return {"passed": by["ok"], "skipped": by["skipped"], "failed": by["FAILED"], "status": status}


def cluster(tasks: Path) -> dict[str, Any]:
    """The operator on a cluster of this machine with a pool of its card (`tests/gpu/cluster`): two jobs, then local mode."""
    sys.path.insert(0, str(ROOT / "tests/gpu/cluster"))
    from cluster import TASKS, whole

    count = int(os.environ.get("KERNELFLEET_CLUSTER_TASKS", len(TASKS)))
    return whole(tasks, count, SECONDS - 60)


def wrong(stage: str, result: dict[str, Any]) -> list[str]:
    """What a stage found to be other than it has to be: each ends the run with status 1. What is left for a next run isn't."""
    rows = result.get("rows", [])
    if stage == "smoke":
        return [row["case"] for row in rows if not right(row["case"].startswith("hostile"), row["verdict"])]
    if stage == "selftest":
        return result["failed"] + ["nothing passed"] * (not result["passed"])
    if stage == "check":
        codes = [(row["path"], refusal["code"]) for row in rows for refusal in row["refusals"]]
        return [path for path, code in codes if code == "fault"]
    if stage == "process":
        unkept = [row for row in rows if row["case"] != "early_done"]
        hidden = [row["case"] for row in unkept if not right("decoy" in row["case"], row)]
        early = result["early_done"]
        return hidden + ["early_done"] * (early["judged"] - early["refused"] - early["paid"])
    if stage == "counters":
        return [f"{row['case']} of the {row['whose']}" for row in rows if row["status"] or not row["kernels"]]
    if stage == "policy":
        return [row["task"] for row in rows if row["state"] == "failed"]
    if stage == "repeat":
        return [row["task"] for row in rows if row["cv"] > SPREAD[row["time_us"] < SPREAD_US]]
    if stage == "batch":
        short = [
            row["which"] for row in rows if row["status"] or row["correct"] < row["verdicts"] or not row["verdicts"]
        ]
        unlike = [m for m in result["mixed"] if not m["candidate"].endswith(m["code"] or "accepted")]
        return short + [str(m) for m in unlike] + ["mixed"] * (not result["mixed"])
    if stage == "library":
        return [row["case"] for row in rows if row["reward"] in (None, -1)]
    if stage == "cluster":
        unlike = [r["task"] for r in result["verdicts"] if r["cluster"]["correct"] != r["local"].get("correct")]
        return unlike + ["exclusive slices overlap"] * bool(result["slices"]["overlapping"])
    raise ValueError(stage)


def right(hostile: bool, verdict: dict[str, Any] | None) -> bool:
    """An honest candidate is correct, a hostile one is refused; no verdict is neither."""
    return bool(verdict) and verdict["correct"] is not None and bool(verdict["correct"]) != hostile


STAGES = {
    "selftest": selftest,
    "smoke": smoke,
    "cluster": cluster,
    "counters": counters,
    "process": process,
    "check": check,
    "policy": policy,
    "repeat": repeat,
    "batch": batch,
    "library": library,
}


def main() -> int:
    """Run the stages asked for; 1 if one could not run at all, or found what must not be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=sorted(STAGES))
    parser.add_argument("--out", type=Path, default=ROOT / "docs/evidence")
    parser.add_argument("--tasks", type=Path, default=Path(os.environ.get("KERNELBENCH", ROOT / "kernelbench")))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    about = facts()
    found: list[str] = []
    for stage in given.stages:
        start = time.monotonic()
        result = STAGES[stage](given.tasks)
        text = {
            "stage": stage,
            "command": f"tests/gpu/run.sh {stage}",
            "wall_seconds": time.monotonic() - start,
            **about,
            "result": result,
        }
        if stage == "policy":
            text |= judged(WORK / "policy")
            del text["doctor"]  # type: ignore[arg-type]
            text["command"] = f"KERNELFLEET_LEVELS={','.join(result['levels'])} {text['command']}"
            stems = {level: {p.stem for p in task_files(given.tasks, [int(level)])} for level in result["levels"]}
            for level, names in stems.items():
                rows = [row for row in result["rows"] if row["task"] in names]
                part = text | {"result": result | {"levels": [level], "rows": rows}}
                (given.out / f"policy-level{level}.json").write_text(json.dumps(part, indent=1) + "\n")
        else:
            text |= {key: result.pop(key) for key in ("device", "versions") if key in result}
            (given.out / f"{stage}.json").write_text(json.dumps(text, indent=1) + "\n")
        found += [f"{stage}: {what}" for what in wrong(stage, result)]
        print(f"stage {stage}: {time.monotonic() - start:.0f} s", flush=True)
    print("\n".join(f"WRONG {line}" for line in found), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
