"""Builds the crate's tests and runs their programs in two lanes beside each other.

Knows which programs mostly wait (for timers, pods of processes, a model's end). Must not know what is tested, nor how results
are counted: a program's output is printed whole when it ends, as ``cargo test`` prints it. Those that compute get the
processors one after another as with cargo; beside them run those that wait, which would leave the processors idle.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock, Timer

ROOT = Path(__file__).resolve().parent.parent
# Test programs that use less than half of a processor, longest first, then some that compute and measure nothing.
BESIDE = (
    "agent",
    "pods",
    "sandbox",
    "bucket",
    "broker",
    "gateway",
    "agent_tools",
    "agents_soak",
    "chart",
    "lib of the crate",
    "runner_cpu",
)
# Longest that one may take, seconds.
LIMIT = 1800
PRINTING = Lock()


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


def run(programs: list[tuple[str, str]]) -> bool:
    """Runs programs one after another; whether all passed."""
    good = True
    for name, path in programs:
        with PRINTING:
            print(f"     Running {name}", flush=True)
        start = time.monotonic()
        # No pipe: whatever a program leaves behind would hold its end.
        with TemporaryFile() as output:
            process = subprocess.Popen([path], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
            # Not Popen.kill, which waits for it where it has ended.
            timer = Timer(LIMIT, os.kill, (process.pid, signal.SIGKILL))
            timer.start()
            try:
                _, status, used = os.wait4(process.pid, 0)
            finally:
                timer.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            said = output.read()
        good &= process.returncode == 0
        took = f"{time.monotonic() - start:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of processors"
        with PRINTING:
            print(f"     Ended {name}, {took}, status {process.returncode}", flush=True)
            sys.stdout.buffer.write(said)
            print(flush=True)
    return good


def main() -> int:
    """Exit status 1 if a test failed."""
    programs = built()
    beside = sorted((p for p in programs if p[0] in BESIDE), key=lambda p: BESIDE.index(p[0]))
    # Judges measure in these, one program at a time.
    computing = [p for p in programs if p[0] not in BESIDE]
    with ThreadPoolExecutor(2) as lanes:
        good = all(list(lanes.map(run, [computing, beside])))
    # Examples in the documentation are no programs of their own.
    return subprocess.run(["cargo", "test", "--locked", "--doc"], cwd=ROOT).returncode or int(not good)


if __name__ == "__main__":
    sys.exit(main())
