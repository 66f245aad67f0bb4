"""Runs everything that a merge is gated by, and counts.

Knows the stages and how their tools say what happened. Must not know what they test. One stage follows another, but for
those on the cluster, which wait for pods half of their time: what only computes runs beside them and gets the processors
that they leave. Goes on after a stage that failed, so that one run shows all; the last line is
``N passed, M failed, K skipped``, counted from the tools' own figures (a stage without figures counts as one). In CI the
tests that were skipped have to be those of ``tests/skipped.txt``: a test that quietly lacks what it needs is no test.

usage: all.py [--only rust|python|lint|cluster]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = ROOT / "tests" / "skipped.txt"
SAYING, COUNTING = Lock(), Lock()


@dataclass
class Count:
    """What one stage came to."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    # Which were skipped, or why.
    names: list[str] = field(default_factory=list)


@dataclass
class Stage:
    """A command with the way its output is counted."""

    group: str
    name: str
    command: list[str]
    count: Callable[[int, str], Count]
    # Before each of its lines, where another stage's come between them.
    prefix: str = ""


def one(status: int, _: str) -> Count:
    """A stage without figures: passed or failed."""
    return Count(passed=1) if status == 0 else Count(failed=1)


def cargo(status: int, output: str) -> Count:
    """Sums the ``test result`` lines; a build that failed has none and counts as one failure."""
    count = Count()
    for passed, failed, ignored in re.findall(
        r"^test result: \w+\. (\d+) passed; (\d+) failed; (\d+) ignored", output, re.MULTILINE
    ):
        count.passed += int(passed)
        count.failed += int(failed)
        count.skipped += int(ignored)
    # A test that lacks what it needs says so past the capture of its output.
    skipped = re.findall(r"^skipped: .*", output, re.MULTILINE)
    count.passed -= len(skipped)
    count.skipped += len(skipped)
    count.names = re.findall(r"^test (\S+) \.\.\. ignored", output, re.MULTILINE) + skipped
    if status != 0 and count.failed == 0:
        count.failed = 1
    return count


def junit(path: Path) -> Callable[[int, str], Count]:
    """Counts from pytest's own report; none means that it could not even start."""

    def read(status: int, _: str) -> Count:
        count = Count()
        if path.is_file():
            for suite in ElementTree.parse(path).iter("testsuite"):
                failed = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
                skipped = int(suite.get("skipped", 0))
                count.passed += int(suite.get("tests", 0)) - failed - skipped
                count.failed += failed
                count.skipped += skipped
                count.names += [
                    f"{case.get('classname')}::{case.get('name')}"
                    for case in suite.iter("testcase")
                    if case.find("skipped") is not None
                ]
        if status != 0 and count.failed == 0:
            count.failed = 1
        return count

    return read


def stages(reports: Path) -> list[Stage]:
    """What comes first, the quick ones at the beginning."""
    python = sys.executable
    return [
        Stage("lint", "cargo fmt", ["cargo", "fmt", "--check"], one),
        Stage("lint", "ruff check", [python, "-m", "ruff", "check", "agent-image", "tests"], one),
        Stage("lint", "ruff format", [python, "-m", "ruff", "format", "--check", "agent-image", "tests"], one),
        Stage("lint", "mypy", [python, "-m", "mypy"], one),
        Stage("lint", "clippy", ["cargo", "clippy", "--locked", "--all-targets", "--", "-D", "warnings"], one),
        Stage(
            "lint",
            "cargo doc",
            ["env", "RUSTDOCFLAGS=-D warnings", "cargo", "doc", "--locked", "--no-deps"],
            one,
        ),
        # The cluster's images hold the program that this builds.
        Stage("rust", "cargo build", ["cargo", "test", "--locked", "--no-run"], one),
    ]


def apart() -> list[str]:
    """What a command is run by in a namespace of processes of its own, where the machine allows that: judges take users that no
    process has and kill all that their children left, and neither is to meet one of a pod. What is left ends with the command.
    The shell is there to reap."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", '"$@"; exit $?', "sh"]
    try:
        probe = subprocess.run([*command, "true"], capture_output=True)
    except OSError:
        return []
    return command if probe.returncode == 0 else []


def lanes(reports: Path) -> list[list[Stage]]:
    """What runs beside each other then, each a list of stages that follow each other."""
    report, clustered = reports / "python.xml", reports / "cluster.xml"
    python = sys.executable
    own = apart()
    return [
        [
            # The snapshots, the custom resources' definitions and the examples are compared by tests of the crate.
            Stage("rust", "cargo test", [*own, python, "tests/lanes.py"], cargo),
            Stage("python", "pytest", [*own, python, "-m", "pytest", f"--junitxml={report}"], junit(report)),
        ],
        [
            Stage(
                "cluster",
                "end to end",
                [python, "-m", "pytest", "-v", "-s", "tests/e2e", f"--junitxml={clustered}"],
                junit(clustered),
                prefix="[end to end] ",
            )
        ],
    ]


def say(text: str) -> None:
    """A line, whole."""
    with SAYING:
        print(text, flush=True)


def run(stage: Stage) -> Count:
    """Runs a stage, shows its output as it comes, and counts."""
    say(f"== {stage.name}: {' '.join(stage.command)}")
    began = time.monotonic()
    # A snapshot that differs must fail here, never be written.
    environment = {**os.environ, "INSTA_UPDATE": "no", "CARGO_TERM_COLOR": "never"}
    # Tests run beside each other, and no figure of theirs counts: a thread that spins takes a processor from another test.
    environment["OMP_WAIT_POLICY"] = "passive"
    # A judge in a pod has time limits too: it goes before what merely computes.
    environment.setdefault("KERNELFLEET_CLUSTER_WEIGHT", "800")
    lines = []
    with subprocess.Popen(
        stage.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            say(f"{stage.prefix}{line.rstrip()}")
        status = process.wait()
    count = stage.count(status, "".join(lines))
    state = "ok" if count.failed == 0 else "FAILED"
    say(
        f"== {stage.name}: {state}, {count.passed} passed, {count.failed} failed, {count.skipped} skipped, "
        f"{time.monotonic() - began:.0f} s\n"
    )
    return count


def main() -> int:
    """Runs the stages asked for; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description="everything that a merge is gated by")
    parser.add_argument("--only", choices=["lint", "rust", "python", "cluster"])
    only = parser.parse_args().only
    total = Count()
    failed = []

    def several(which: list[Stage]) -> None:
        for stage in which:
            if only in (None, stage.group):
                count = run(stage)
                with COUNTING:
                    total.passed += count.passed
                    total.failed += count.failed
                    total.skipped += count.skipped
                    total.names += count.names
                    if count.failed:
                        failed.append(stage.name)

    with TemporaryDirectory() as folder:
        several(stages(Path(folder)))
        beside = lanes(Path(folder))
        with ThreadPoolExecutor(len(beside)) as pool:
            list(pool.map(several, beside))
    if only is None and os.environ.get("CI"):
        known = [line for line in SKIPPED.read_text().splitlines() if line and not line.startswith("#")]
        if sorted(known) != sorted(total.names):
            print(f"the skipped tests are not those of {SKIPPED.relative_to(ROOT)}:")
            print("".join(f"  {line}\n" for line in unified_diff(sorted(known), sorted(total.names), lineterm="", n=0)))
            total.failed += 1
            failed.append("skipped tests")
    if failed:
        print(f"failed stages: {', '.join(failed)}")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
