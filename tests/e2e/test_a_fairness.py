"""Two namespaces with the weights 1 and 3 on one judge: what each gets of its time, by the ledger."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from conftest import HOME, SYSTEM, Cluster, judges
from work import condition

API = "kernelfleet.dev/v1alpha1"
LIGHT, HEAVY = "e2e-fair-one", "e2e-fair-three"
WEIGHTS = {LIGHT: 1, HEAVY: 3}
# Agents of a namespace, so that one of its questions always waits while others are answered.
AGENTS = {LIGHT: 3, HEAVY: 6}
TASK = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) + {number}.0


def get_inputs():
    return [torch.randn(4096)]


def get_init_inputs():
    return []
"""
MODEL = """
import torch

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(torch.nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        k.rows(x, y, x.shape[0])
        return y
"""
KERNEL = """
#include <cstdint>

extern "C" void rows(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = (x[i] > 0 ? x[i] : 0) + NUMBER;
}
"""
# One candidate after another, none the same, none right: each is recorded, built and run.
ASK = f"""cat >model_new.py <<'M'{MODEL}M
for n in $(seq 100 1100); do
cat >kernels/k.cpp <<K{KERNEL.replace("NUMBER", "$n.5f")}K
python3 utils/verification.py
done"""


def recording(task: str) -> str:
    """A recorded episode of one command that asks the judge until it is ended."""
    head: dict[str, Any] = {"at": 0, "kind": "episode", "schema": 1, "version": "0", "task": task, "source": ""}
    head |= {"device": "cpu", "policy": None, "turns": 2, "context_tokens": 131072, "started": 0, "tools": ["Bash"]}
    call = {"id": "c1", "name": "Bash", "arguments": json.dumps({"command": ASK, "timeout": 600000})}
    turn: dict[str, Any] = {"at": 1, "kind": "turn", "turn": 1, "content": "", "seconds": 0, "retries": 0}
    turn |= {"usage": {"prompt": 1000, "completion": 10}, "calls": [call], "finish": "tool_calls"}
    return f"{json.dumps(head)}\n{json.dumps(turn)}\n"


def job(namespace: str) -> list[dict[str, Any]]:
    """A job whose agents ask and ask, and the recordings that it plays."""
    names = [f"{namespace.removeprefix('e2e-fair-')}-{n}" for n in range(AGENTS[namespace])]
    number = 1000 * WEIGHTS[namespace]
    tasks = [{"name": name, "source": TASK.format(number=number + n)} for n, name in enumerate(names)]
    meta = {"name": "asks", "namespace": namespace}
    spec = {
        "tasks": {"inline": tasks},
        "policy": {"replay": {"configMap": "asks"}},
        "judge": {"gpuPool": "fair", "inputs": 2},
        "agent": {"resources": {"cpu": "50m", "memory": "512Mi", "ephemeralStorage": "256Mi"}},
    }
    recorded = {f"{name}.jsonl": recording(name) for name in names}
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": recorded},
        {"apiVersion": API, "kind": "OptimizationJob", "metadata": meta, "spec": spec},
    ]


@dataclass
class Shares:
    """What was granted while both namespaces waited."""

    # Seconds, by namespace.
    seconds: dict[str, float]
    # The longest of the first and of the last few leases: by so much a share can be off at any moment.
    edge: float
    leases: int


def shares() -> Shares | None:
    """Read from the ledger's file; nothing before every agent has asked. What counts is the time since which both namespaces
    have had a question that waits whenever a lease was granted."""
    for path in HOME.glob("state/ledgers/*/ledger.db"):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as kept:
            jobs = dict(kept.execute("select uid, namespace from jobs where name = 'asks' and state = 'open'"))
            if len(jobs) != len(WEIGHTS):
                continue
            asked = kept.execute(
                "select e.job, e.idx, e.enqueued, min(l.granted) from evaluations e left join leases l on l.evaluation = e.id"
                " where e.op = 'verify' group by e.id"
            ).fetchall()
            firsts: dict[tuple[str, int], float] = {}
            waits: dict[str, list[tuple[float, float]]] = {namespace: [] for namespace in WEIGHTS}
            for uid, index, enqueued, granted in asked:
                if uid not in jobs:
                    continue
                firsts[uid, index] = min(enqueued, firsts.get((uid, index), enqueued))
                waits[jobs[uid]].append((enqueued, float("inf") if granted is None else granted))
            if len(firsts) < sum(AGENTS.values()):
                return None
            # What an agent asks first (its task is checked) is long and unlike what follows.
            begin = max(firsts.values())
            seconds, costs = dict.fromkeys(WEIGHTS, 0.0), list[float]()
            ended_ones = "select job, granted, ended from leases where ended is not null order by granted"
            for uid, granted, ended in kept.execute(ended_ones):
                if uid not in jobs or granted < begin:
                    continue
                # The one that is granted waited until now, so the other namespace is what is asked about.
                others = [spans for namespace, spans in waits.items() if namespace != jobs[uid]]
                if all(any(a <= granted < b for a, b in spans) for spans in others):
                    seconds[jobs[uid]] += ended - granted
                    costs.append(ended - granted)
                else:
                    seconds, costs = dict.fromkeys(WEIGHTS, 0.0), []
            return Shares(seconds, max([*costs[:4], *costs[-4:]], default=0.0), len(costs))
    return None


@pytest.fixture(scope="module")
def asking(installed: Cluster) -> Iterator[Cluster]:
    """Both jobs under way, on a pool of their own with one judge that does one thing at a time."""
    if not installed.own:
        pytest.skip("the ledger of a cluster given by KUBECONFIG isn't on this machine")
    for namespace in WEIGHTS:
        installed.namespace(namespace)
    spec: dict[str, Any] = {
        "device": "cpu",
        "slices": {"maxSeconds": 1200, "maxExclusiveSeconds": 600},
        "evaluationsPerJudge": 1,
        "allowedNamespaces": list(WEIGHTS),
        "fairShare": {"weights": {namespace: float(weight) for namespace, weight in WEIGHTS.items()}},
        "storage": {"size": "1Gi", "storageClassName": "test-bed"},
        "podTemplate": judges("pytorch"),
    }
    # Nine agents have to fit the node beside the pools that are there.
    spec["podTemplate"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "100m"}}
    installed.apply({"apiVersion": API, "kind": "GpuPool", "metadata": {"name": "fair"}, "spec": spec})

    def ready() -> bool:
        return condition(installed.get("gpupool", "fair"), "Ready").get("status") == "True"

    try:
        installed.wait("the judge to be ready", 420, ready)
        installed.apply(*(part for namespace in WEIGHTS for part in job(namespace)))
        yield installed
    finally:
        for namespace in WEIGHTS:
            installed.run("delete", "optimizationjobs", "--all", "-n", namespace, "--timeout=60s")
        installed.run("delete", "gpupool", "fair", "--timeout=60s")
        installed.run("delete", "pvc", "-n", SYSTEM, "ledger-fair-broker-0", "--wait=false")
        for namespace in WEIGHTS:
            installed.run("delete", "namespace", namespace, "--wait=false")


def test_seconds_of_a_judge_are_shared_by_weight_while_both_namespaces_wait(asking: Cluster) -> None:
    def enough() -> Shares | None:
        found = shares()
        if not found or found.leases < 60 or found.seconds[LIGHT] <= 12 * found.edge:
            return None
        # What the first and the last lease cost beside what was expected of them weighs less with each that follows.
        near = WEIGHTS[HEAVY] / WEIGHTS[LIGHT] == pytest.approx(found.seconds[HEAVY] / found.seconds[LIGHT], rel=0.07)
        return found if near or found.leases >= 300 else None

    try:
        found: Shares = asking.wait("enough seconds of a judge to be shared", 900, enough)
    except pytest.fail.Exception:
        print(shares())
        for namespace in WEIGHTS:
            words = ("-n", namespace, "-l", "app.kubernetes.io/component=agent", "--tail=20", "--prefix", "-c", "agent")
            print(asking.run("logs", *words).stdout)
        raise
    ratio = found.seconds[HEAVY] / found.seconds[LIGHT]
    print(f"\n{found.leases} leases, {found.seconds}, the last few at most {found.edge:.2f} s: 1 to {ratio:.2f}")
    assert ratio == pytest.approx(WEIGHTS[HEAVY] / WEIGHTS[LIGHT], rel=0.1)
