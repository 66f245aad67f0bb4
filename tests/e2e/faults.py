"""Jobs whose verdicts can be told beforehand, processes that are killed from the node, and what a run came to.

Knows the ledger's tables and the containers' processes. Must not know what is expected of them.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import HOME, SYSTEM, Cluster

# A margin that no neighbour takes: a product of two matrices, of which `torch.compile` keeps both, against one pass. On one
# thread: on a machine where processes are killed and started, two that wait for each other took up to five times as long.
DIAGONAL = """
import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.diag(a) @ b * {number}.0


def get_inputs():
    return [torch.randn({size}), torch.randn({size}, {size})]


def get_init_inputs():
    return []
"""
SCALED = """
#include <cstdint>

extern "C" void rows(const float* a, const float* b, float* y, int64_t n) {{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) y[i * n + j] = a[i] * b[i * n + j] * {number}.0f;
}}
"""
# Few elements: whatever PyTorch spends on them, two thousand passes over them are more.
SHIFTED = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + {number}.0


def get_inputs():
    return [torch.randn({size})]


def get_init_inputs():
    return []
"""
SLOW = """
#include <cstdint>

extern "C" void rows(const float* x, float* y, int64_t n) {{
    for (int64_t pass = 0; pass < 2000; pass++)
        for (int64_t i = 0; i < n; i++) {{
            volatile float v = x[i] > 0.0f ? x[i] : 0.0f;
            y[i] = v + {number}.0f;
        }}
}}
"""
WRONG = """
#include <cstdint>

extern "C" void rows(const float* x, float* y, int64_t n) {{
    for (int64_t i = 0; i < n; i++) y[i] = x[i] + {number}.0f;
}}
"""
BROKEN = 'extern "C" void rows(const float* x, float* y, int64_t n) {{ this is no C++ of {number}; }}\n'
MODEL = """
import torch

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(torch.nn.Module):
    def forward(self, {inputs}):
        y = torch.empty_like({last})
        k.rows({inputs}, y, {last}.shape[0])
        return y
"""
# A command of a recording that ends when somebody writes the file `go` into the workspace.
HOLD = "until [ -e go ]; do sleep 0.5; done"


@dataclass
class Task:
    """A task, what is to be written for it, and the reward that this has to get."""

    name: str
    source: str
    kernel: str
    model: str
    reward: int

    # What is run before anything is written.
    first: tuple[str, ...] = ()

    def trajectory(self) -> str:
        """A recording: both files are written, built and verified, then the model says that it is done."""
        write = f"cat >kernels/k.cpp <<'K'\n{self.kernel}K\ncat >model_new.py <<'M'\n{self.model}M"
        commands = [*self.first, write, "bash utils/compile.sh", "python3 utils/verification.py", None, None]
        lines: list[dict[str, Any]] = [
            {
                "at": 0,
                "kind": "episode",
                "schema": 1,
                "version": "0",
                "task": self.name,
                "source": "",
                "device": "cpu",
                "policy": None,
                "turns": len(commands),
                "context_tokens": 131072,
                "started": 0,
                "tools": ["Bash"],
            }
        ]
        for number, command in enumerate(commands, 1):
            line: dict[str, Any] = {"at": number, "kind": "turn", "turn": number, "content": "", "seconds": 0}
            line |= {"usage": {"prompt": 1000 + number, "completion": 10}, "retries": 0}
            if command is None:
                line |= {"content": "Done.", "finish": "stop"}
            else:
                arguments = json.dumps({"command": command, "timeout": 600000})
                call = {"id": f"c{number}", "name": "Bash", "arguments": arguments}
                line |= {"calls": [call], "finish": "tool_calls"}
            lines.append(line)
        return "".join(json.dumps(line) + "\n" for line in lines)


def tasks(count: int, measured: bool = True) -> list[Task]:
    """Tasks of every outcome, each different from all others so that no verdict is another's. Measurements take longest: two of
    them are worth one, or none."""
    kinds = {0: (3, DIAGONAL, SCALED), 7: (1, SHIFTED, SLOW)} if measured else {}
    kinds |= {n: (-1, SHIFTED, BROKEN) for n in range(3, count, 5)}
    found = []
    for n in range(count):
        reward, source, kernel = kinds.get(n, (-1, SHIFTED, WRONG))
        two = source is DIAGONAL
        words = {"number": n + 2, "size": 768 if two else 4096 + n}
        model = MODEL.format(inputs="a, b" if two else "x", last="b" if two else "x")
        found.append(Task(f"t{n:02}", source.format(**words), kernel.format(**words), model, reward))
    return found


def replayed(
    namespace: str, name: str, pool: str, of: list[Task], agent: dict[str, Any] | None = None, **more: Any
) -> list[dict[str, Any]]:
    """A job that plays the recordings of tasks, and the ConfigMap that holds them."""
    recorded = {f"{task.name}.jsonl": task.trajectory() for task in of}
    meta = {"name": f"{name}-recorded", "namespace": namespace}
    spec = {
        "tasks": {"inline": [{"name": task.name, "source": task.source} for task in of]},
        "policy": {"replay": {"configMap": f"{name}-recorded"}},
        "judge": {"gpuPool": pool, "inputs": 2},
        "agent": {
            "maxTurns": 8,
            "parallelism": 8,
            "resources": {"cpu": "50m", "memory": "512Mi", "ephemeralStorage": "256Mi"},
            **(agent or {}),
        },
        **more,
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": recorded},
        {
            "apiVersion": "kernelfleet.dev/v1alpha1",
            "kind": "OptimizationJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        },
    ]


def processes(namespace: str, pods: str, container: str) -> list[tuple[str, int]]:
    """First processes of the containers of this name that run, in pods whose names begin so: the pod's name, and the process
    on this machine. Read from the nodes' own files: a killer that asked the API server again and again would be a load."""
    found = []
    for path in Path("/run/kernelfleet").glob("node*/containerd/*task/k8s.io/*/config.json"):
        try:
            said = json.loads(path.read_text())["annotations"]
            pid = int((path.parent / "init.pid").read_text())
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError, KeyError):
            continue
        name = said.get("io.kubernetes.cri.sandbox-name", "")
        where = (said.get("io.kubernetes.cri.sandbox-namespace"), said.get("io.kubernetes.cri.container-name"))
        if where == (namespace, container) and name.startswith(pods) and b"kernelfleet" in words:
            found.append((name, pid))
    return sorted(found)


def index(pod: str) -> str:
    """The completion index in the name of a pod of a Job: NAME-INDEX-RANDOM."""
    return pod.split("-")[-2]


@dataclass
class Killer:
    """Kills processes of a job and of all that serves it, at points drawn by a seed."""

    namespace: str
    job: str
    pool: str
    seed: int
    kills: list[dict[str, Any]] = field(default_factory=list)

    def kill(self, component: str, choose: random.Random) -> bool:
        """Kills one of a kind with SIGKILL, if one runs; says whether it did."""
        prefix = {"operator": "kernelfleet-operator-", "agent": f"{self.job}-"}.get(
            component, f"{self.pool}-{component}-"
        )
        running = processes(self.namespace if component == "agent" else SYSTEM, prefix, component)
        if component == "agent":
            # Each further failure of an index is waited for twice as long by the Job's controller, from 10 s on.
            before = Counter(index(k["pod"]) for k in self.kills if k["component"] == "agent")
            running = [(pod, pid) for pod, pid in running if before[index(pod)] < 3]
        if not running:
            return False
        pod, pid = choose.choice(running)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.kills.append({"component": component, "pod": pod, "at": time.time()})
        return True

    def run(self, each: int, uid: str, over: Any) -> None:
        """Kills each component so often. One in four kills of a judge waits until it has answered something since the last one:
        if all hit it while it starts, none would hit it at work."""
        choose = random.Random(self.seed)
        order = [c for c in ("operator", "broker", "judge", "agent") for _ in range(each)]
        choose.shuffle(order)
        answered = -1
        for component in order:
            time.sleep(choose.uniform(0, 3))
            working = choose.random() < 0.25 and component == "judge"
            looked = time.monotonic()
            while (working and answers(uid) <= answered) or not self.kill(component, choose):
                time.sleep(0.2)
                if time.monotonic() > looked + 10:
                    looked = time.monotonic()
                    if over():
                        pytest.fail(f"the job ended after {len(self.kills)} of {len(order)} kills", pytrace=False)
            print(f"kill {len(self.kills)} of {len(order)}: {component}", flush=True)
            if component == "judge":
                answered = answers(uid)


def ledger(uid: str) -> sqlite3.Connection:
    """The ledger that knows a job, to be read."""
    for path in HOME.glob("state/ledgers/*/ledger.db"):
        kept = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)
        kept.row_factory = sqlite3.Row
        if kept.execute("select 1 from jobs where uid = ?", (uid,)).fetchone():
            return kept
        kept.close()
    pytest.fail(f"no ledger knows the job {uid}")


def generations(uid: str) -> dict[int, list[int]]:
    """Generations of each episode of a job."""
    rows = ledger(uid)
    found: dict[int, list[int]] = {}
    for row in rows.execute("select idx, generation from episodes where job = ? order by 1, 2", (uid,)):
        found.setdefault(row["idx"], []).append(row["generation"])
    rows.close()
    return found


def holding(uid: str) -> int:
    """Episodes of a job that have begun to run their first command. What is written into a workspace before goes when the episode
    begins."""
    rows = ledger(uid)
    query = "select count(*) from episodes where job = ? and state = 'running' and turns >= 1"
    (count,) = rows.execute(query, (uid,)).fetchone()
    rows.close()
    return int(count)


def answers(uid: str) -> int:
    """Evaluations of a job that are done."""
    kept = ledger(uid)
    try:
        query = "select count(*) from evaluations where job = ? and state = 'done'"
        return int(kept.execute(query, (uid,)).fetchone()[0])
    finally:
        kept.close()


def unmeasured(text: str) -> str:
    """A sentence without the numbers that inputs under fresh seeds gave."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", "#", text)


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two runs differ, as paths with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b})
        return [d for k in keys for d in differences(a.get(k), b.get(k), f"{where}.{k}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for n, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{where}[{n}]")]
    return [] if a == b else [f"{where}: {a!r} != {b!r}"]


def kept(uid: str) -> dict[str, Any]:
    """What the ledger says that a job came to. Left out, since they may differ between two runs: times and what clocks
    measured (speedups, seconds, slices), by how much a wrong output is off under fresh seeds, generations that are void, pods,
    and the numbers of generations and evaluations."""
    rows = ledger(uid)
    try:
        (job,) = rows.execute("select attempts, state from jobs where uid = ?", (uid,)).fetchall()
        tasks = rows.execute("select place, name, source, replay from tasks where job = ? order by place", (uid,))
        found: dict[str, Any] = {"job": dict(job), "tasks": [dict(t) for t in tasks], "episodes": []}
        counting = rows.execute(
            "select * from episodes where job = ? and state != 'void' order by idx, generation", (uid,)
        ).fetchall()
        for row in counting:
            ending = json.loads(row["ending"]) if row["ending"] else {}
            evaluation, judged = json.loads(row["judged"]) if row["judged"] else (None, {})
            del evaluation
            asked = rows.execute(
                "select key, op, task, candidates, state from evaluations where job = ? and idx = ? and generation = ? "
                "order by key",
                (uid, row["idx"], row["generation"]),
            )
            tally = json.loads(row["tally"])
            if judged.get("reason"):
                judged["reason"] = unmeasured(judged["reason"])
            found["episodes"].append(
                {
                    "index": row["idx"],
                    "state": row["state"],
                    "lines": row["lines"],
                    "turns": row["turns"],
                    "tokens": [row["tokens_read"], row["tokens_written"]],
                    "tally": {k: v for k, v in tally.items() if "seconds" not in k and "|sum" not in k},
                    "judged": {k: v for k, v in judged.items() if k not in ("eager", "compile")},
                    "ending": {k: ending.get(k) for k in ("state", "reason", "end")},
                    "evaluations": [dict(a) for a in asked],
                }
            )
        return found
    finally:
        rows.close()


def flaws(uid: str) -> list[str]:
    """What a ledger may never say, whatever happened to who wrote it."""
    rows = ledger(uid)
    found = []
    try:
        generations: dict[int, list[tuple[int, str]]] = {}
        for row in rows.execute("select idx, generation, state from episodes where job = ? order by 1, 2", (uid,)):
            generations.setdefault(row["idx"], []).append((row["generation"], row["state"]))
        for index, all_of in generations.items():
            if [g for g, _ in all_of] != list(range(1, len(all_of) + 1)):
                found.append(f"episode {index} has the generations {all_of}")
            if any(state != "void" for _, state in all_of[:-1]):
                found.append(f"more than one generation of episode {index} counts: {all_of}")
        for row in rows.execute("select id, state from leases where job = ? and state != 'ended'", (uid,)):
            found.append(f"lease {row['id']} is {row['state']}")
        for row in rows.execute(
            "select id, state from evaluations where job = ? and state in ('queued', 'leased')", (uid,)
        ):
            found.append(f"evaluation {row['id']} is {row['state']}")
        last: dict[str, tuple[int, float]] = {}
        for row in rows.execute("select id, card, granted, ended from exclusives order by card, granted"):
            before = last.get(row["card"])
            if before and row["granted"] < before[1]:
                found.append(f"exclusive slices {before[0]} and {row['id']} of {row['card']} overlap")
            if row["ended"] is None:
                found.append(f"exclusive slice {row['id']} never ended")
            else:
                last[row["card"]] = (row["id"], max(row["ended"], before[1] if before else 0.0))
        (charged,) = rows.execute("select charged from usage where job = ?", (uid,)).fetchone() or (0.0,)
        query = "select coalesce(sum(ended - granted), 0.0), count(*) from leases where job = ?"
        (seconds, leases) = rows.execute(query, (uid,)).fetchone()
        # Times are kept as seconds since 1970 in double precision: a length is off by a few ten-millionths, and by as much
        # again for each time that a broker started meanwhile.
        if abs(charged - seconds) > 1e-5 * (1 + leases):
            found.append(f"{charged} s are charged for leases of {seconds} s")
        return found
    finally:
        rows.close()


def status(found: dict[str, Any]) -> dict[str, Any]:
    """A job's status without its name, times and what clocks measured."""
    text = json.dumps(found["status"]).replace(found["metadata"]["name"], "NAME")
    said: dict[str, Any] = json.loads(text)
    for key in ("startTime", "completionTime", "gpuSeconds", "geomean", "observedGeneration"):
        said.pop(key, None)
    for condition in said["conditions"]:
        condition.pop("lastTransitionTime")
        condition.pop("observedGeneration", None)
    for result in said["results"]:
        result.pop("speedup")
        if result.get("reason"):
            result["reason"] = unmeasured(result["reason"])
    best = said.get("best", {})
    best.pop("digest", None)
    return said


# What clocks measured; of histograms of these only the number of observations is compared.
MEASURED = ("kernelfleet_gpu_slice_", "kernelfleet_job_speedup_geomean", "kernelfleet_judge_phase_seconds")


def metrics(cluster: Cluster, pool: str, namespace: str, job: str) -> dict[str, float]:
    """The series of a job at its broker, without its name and without what clocks measured."""
    selector = f"app.kubernetes.io/component=broker,app.kubernetes.io/instance={pool}"
    (pod,) = cluster.get("pods", "-n", SYSTEM, "-l", selector)["items"]
    (container,) = (c for c in pod["spec"]["containers"] if c["name"] == "broker")
    (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == "http")
    with urllib.request.urlopen(f"http://{pod['status']['podIP']}:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if f'job="{job}"' not in line or f'namespace="{namespace}"' not in line or line.startswith(MEASURED):
            continue
        if line.startswith(("kernelfleet_speedup_sum", "kernelfleet_speedup_bucket")):
            continue
        name, _, value = line.rpartition(" ")
        found[name.replace(f'job="{job}"', 'job="NAME"')] = float(value)
    return found
