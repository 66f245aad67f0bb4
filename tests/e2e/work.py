"""Jobs as the tests write them, and a namespace's jobs as a person looks at them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import SYSTEM, Cluster

# Memory traffic is all they cost, and a fused kernel makes one pass of several: a margin that noise can't take.
FUSED = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.sigmoid(torch.relu(x) * 2 + 1) * torch.tanh(x) + torch.abs(x)


def get_inputs():
    return [torch.randn(1024, 2048)]


def get_init_inputs():
    return []
"""
CLAMPED = FUSED.replace("torch.tanh(x) + torch.abs(x)", "torch.clamp(x, -1, 1) - torch.abs(x)")


def job(namespace: str, name: str, pool: str, **spec: Any) -> dict[str, Any]:
    """A job of the built-in policy with two tasks."""
    tasks = {"inline": [{"name": "fused", "source": FUSED}, {"name": "clamped", "source": CLAMPED}]}
    whole = {
        "tasks": tasks,
        "policy": {"builtin": {}},
        "agent": {"maxTurns": 2},
        "judge": {"gpuPool": pool, "inputs": 2},
    }
    return {
        "apiVersion": "kernelfleet.dev/v1alpha1",
        "kind": "OptimizationJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {**whole, **spec},
    }


def condition(found: dict[str, Any], kind: str) -> dict[str, Any]:
    """One condition of an object; empty if it isn't there."""
    conditions = found.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {})


class Jobs:
    """The jobs of a namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def get(self, name: str) -> dict[str, Any]:
        return self.cluster.get("optimizationjob", name, "-n", self.namespace)

    def until(
        self, name: str, kind: str, status: str, reason: str | None = None, seconds: float = 60
    ) -> dict[str, Any]:
        """The job once a condition is so."""

        def there() -> dict[str, Any] | None:
            found = self.get(name)
            said = condition(found, kind)
            if kind != "Failed" and condition(found, "Failed").get("status") == "True":
                pytest.fail(f"{name} failed: {condition(found, 'Failed')['message']}", pytrace=False)
            return found if said.get("status") == status and reason in (None, said.get("reason")) else None

        try:
            return self.cluster.wait(f"{name} to be {kind}={status} {reason or ''}", seconds, there)
        except pytest.fail.Exception:
            self.tell(name)
            raise

    def tell(self, name: str) -> None:
        """Prints what a person would look at."""
        for words in (
            ("describe", "optimizationjob", name),
            ("get", "pods", "-o", "wide"),
            ("events",),
            ("logs", "-l", f"batch.kubernetes.io/job-name={name}", "--all-containers", "--tail=40", "--prefix"),
        ):
            print(self.cluster.run(*words, "-n", self.namespace).stdout)
        for component in ("operator", "broker", "judge"):
            selector = f"app.kubernetes.io/component={component}"
            print(self.cluster.run("logs", "-n", SYSTEM, "-l", selector, "--tail=60", "--prefix").stdout)

    def pods(self, name: str) -> list[dict[str, Any]]:
        selector = f"batch.kubernetes.io/job-name={name}"
        return list(self.cluster.get("pods", "-n", self.namespace, "-l", selector)["items"])

    def reasons(self, name: str) -> list[str]:
        """Reasons of a job's events, the oldest first."""
        events = self.cluster.get("events", "-n", self.namespace)["items"]
        ours = [
            e
            for e in events
            if e["involvedObject"]["name"] == name and e["involvedObject"]["kind"] == "OptimizationJob"
        ]
        return [e["reason"] for e in sorted(ours, key=lambda e: e["metadata"]["creationTimestamp"])]


def passing(cluster: Cluster, namespace: str) -> Iterator[Jobs]:
    """The jobs of a namespace that is made for a fixture and goes with it."""
    cluster.namespace(namespace)
    yield Jobs(cluster, namespace)
    cluster.run("delete", "optimizationjobs", "--all", "-n", namespace, "--timeout=60s")
    cluster.run("delete", "namespace", namespace, "--wait=false")
