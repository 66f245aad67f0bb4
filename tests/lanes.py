"""Builds the crate's tests and runs their programs in two lanes beside each other.

Knows which programs mostly wait (for timers, pods of processes, a model's end). Must not know what is tested, nor how results
are counted: a program's output is printed whole when it ends, as ``cargo test`` prints it. Those that compute get the
processors one after another as with cargo; beside them run those that wait, which would leave the processors idle.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
# Test programs that use less than half of a processor, longest first.
WAITING = ("agent", "pods", "sandbox", "bucket", "broker", "gateway", "agent_tools", "agents_soak", "chart")
LONG = ("kernelbench", "corpus")
PRINTING, TAKING = Lock(), Lock()


def built() -> list[tuple[str, str]]:
    """Names and paths of the test programs; exits as cargo does where they can't be built."""
    command = ["cargo", "test", "--locked", "--no-run", "--message-format=json-render-diagnostics"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(done.returncode)
    found = []
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("reason") == "compiler-artifact" and message.get("executable") and message["profile"]["test"]:
            kind = message["target"]["kind"][0]
            found.append(
                (message["target"]["name"] if kind == "test" else f"{kind} of the crate", message["executable"])
            )
    return found


def run(take: Callable[[], tuple[str, str] | None]) -> bool:
    """Runs programs one after another, as long as there is one to take; whether all passed."""
    good = True
    while (taken := take()) is not None:
        name, path = taken
        start = time.monotonic()
        done = subprocess.run([path], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        good &= done.returncode == 0
        with PRINTING:
            print(f"     Running {name}, {time.monotonic() - start:.0f} s, status {done.returncode}", flush=True)
            sys.stdout.buffer.write(done.stdout)
            print(flush=True)
    return good


def main() -> int:
    """Exit status 1 if a test failed."""
    programs = built()
    waiting = deque(sorted((p for p in programs if p[0] in WAITING), key=lambda p: WAITING.index(p[0])))
    # The longest first; where those that wait are through, the others' second lane begins with the shortest.
    computing = deque(sorted((p for p in programs if p[0] not in WAITING), key=lambda p: p[0] not in LONG))

    def compute() -> tuple[str, str] | None:
        with TAKING:
            return computing.popleft() if computing else None

    def wait() -> tuple[str, str] | None:
        with TAKING:
            return waiting.popleft() if waiting else computing.pop() if computing else None

    with ThreadPoolExecutor(2) as lanes:
        good = all(list(lanes.map(run, [compute, wait])))
    # Examples in the documentation are no programs of their own.
    return subprocess.run(["cargo", "test", "--locked", "--doc"], cwd=ROOT).returncode or int(not good)


if __name__ == "__main__":
    sys.exit(main())
