"""A hundred KernelBench tasks checked, then the demo again and again: what flickers, and processes and files that stay.

Knows the program's command line only. Needs a release build. The figures are the ones to quote.

usage: soak.py [--minutes 30]; KernelBench is found by $KERNELBENCH or in ../shared/kernelbench
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "target/release/kernelfleet"


def processes() -> set[int]:
    """Numbers of the processes that run our program or one of its Python parts."""
    found = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if str(PROGRAM).encode() in command or b"kernelfleet_host" in command or b"kernelfleet_recorder" in command:
                found.add(int(folder.name))
    return found


def scratch() -> set[str]:
    """Names in the temporary folder."""
    return set(os.listdir(tempfile.gettempdir()))


def kernelbench(seconds: int) -> int:
    """Checks the tasks of tests/data/kernelbench-cpu.json one by one; how many got no answer or another than is known."""
    folder = Path(os.environ.get("KERNELBENCH") or ROOT.parent / "shared/kernelbench/KernelBench")
    if not (folder / "level1").is_dir():
        print(f"skipped: KernelBench is not in {folder}; set KERNELBENCH to its folder with level1, level2, level3")
        return 0
    tasks = json.loads((ROOT / "tests/data/kernelbench-cpu.json").read_text())["tasks"]
    wrong = accepted = 0
    for task in tasks:
        began = time.monotonic()
        arguments = ["task", "check", str(folder / task["path"]), "--device", "cpu", "--seconds", str(seconds)]
        command = [str(PROGRAM), *arguments, "-o", "json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        codes = None
        if done.returncode in (0, 2) and done.stdout:
            codes = [r["code"] for r in json.loads(done.stdout)[0]["refusals"]]
        known = task.get("expect")
        right = codes is not None and (known is None or (set(known) <= set(codes) if known else not codes))
        wrong += not right
        accepted += codes == []
        said = f"exit status {done.returncode}: {done.stderr.strip()[-300:]}" if codes is None else codes or "accepted"
        note = "" if right or codes is None else f", expected {known or 'accepted'}"
        print(f"{task['path']}: {said}{note}, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{len(tasks)} KernelBench tasks: {accepted} accepted, {wrong} without an answer or with a wrong one",
        flush=True,
    )
    return wrong


def main() -> int:
    """Runs rounds until the time is over; the exit status is 1 where something stayed or flickered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--check-seconds", type=int, default=10, help="longest that one KernelBench task is looked at")
    arguments = parser.parse_args()
    wrong = kernelbench(arguments.check_seconds)
    end = time.monotonic() + arguments.minutes * 60
    rewards: dict[str, list[int | None]] = {}
    speedups: dict[str, list[float]] = {}
    rounds = 0
    faults = 0
    with tempfile.TemporaryDirectory(prefix="kernelfleet-soak-") as results:
        before, files = processes(), scratch()
        while time.monotonic() < end:
            rounds += 1
            command = [str(PROGRAM), "run", "examples/demo.yaml", "--fresh", "--results", results, "-o", "json"]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
            if done.returncode != 0:
                faults += 1
                print(f"round {rounds}: exit status {done.returncode}", flush=True)
                continue
            summary = json.loads(done.stdout)
            for line in summary["results"]:
                rewards.setdefault(line["task"], []).append(line["reward"])
                if line["speedup"]["eager"]:
                    speedups.setdefault(line["task"], []).append(line["speedup"]["eager"])
            print(f"round {rounds}: {summary['seconds']:.0f} s, {summary['correct']} correct", flush=True)
        left, stayed = processes() - before, scratch() - files
    flicker = 0
    for task, seen in sorted(rewards.items()):
        # 2 and 3 differ by a second baseline near its threshold; right and wrong must never differ.
        signs = {reward is not None and reward > 0 for reward in seen}
        flicker += len(signs) > 1
        values = speedups.get(task, [])
        spread = statistics.stdev(values) / statistics.mean(values) if len(values) > 1 else 0.0
        print(f"{task}: rewards {sorted({str(r) for r in seen})}, speedup varies by {spread:.2%}")
    print(
        f"{rounds} rounds, {faults} failed, {flicker} tasks flickered, {len(left)} processes and {len(stayed)} files left"
    )
    for name in sorted(stayed):
        print(f"left: {name}")
    return 1 if wrong or faults or flicker or left or stayed else 0


if __name__ == "__main__":
    sys.exit(main())
