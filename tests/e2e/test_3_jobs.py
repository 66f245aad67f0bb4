"""Jobs from `kubectl apply` to the kernel on disk, on a pool of CPU judges of the real node."""

from __future__ import annotations

import time
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


@pytest.fixture(scope="module")
def jobs(installed: Cluster) -> Iterator[Jobs]:
    """A namespace that enforces `restricted`."""
    namespace = installed.namespace("e2e-jobs")
    yield Jobs(installed, namespace)
    installed.kubectl("delete", "optimizationjobs", "--all", "-n", namespace, "--timeout=60s")
    installed.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_pool_says_what_its_judges_are(pool: str, installed: Cluster) -> None:
    found = installed.get("gpupool", pool)
    assert condition(found, "Ready")["status"] == "True"
    assert found["status"]["judgesReady"] == 1
    assert "cores" in found["status"].get("hardware", "") or found["status"].get("hardware")


def test_a_suspended_job_has_no_pods_until_it_is_resumed(jobs: Jobs, pool: str) -> None:
    jobs.cluster.apply(job(jobs.namespace, "later", pool, suspend=True))
    jobs.until("later", "Suspended", "True")
    assert not jobs.pods("later")
    resume = '{"spec": {"suspend": false}}'
    jobs.cluster.kubectl("patch", "optimizationjob", "later", "-n", jobs.namespace, "--type=merge", "-p", resume)
    jobs.until("later", "Started", "True")
    jobs.cluster.wait("a pod of the resumed job", 30, lambda: jobs.pods("later"))
    jobs.until("later", "Suspended", "False")
    jobs.cluster.kubectl("delete", "optimizationjob", "later", "-n", jobs.namespace, "--timeout=60s")


def test_a_running_job_that_is_suspended_loses_its_pods_and_one_that_is_deleted_everything(
    jobs: Jobs, pool: str
) -> None:
    jobs.cluster.apply(job(jobs.namespace, "cut", pool))
    jobs.cluster.wait("a pod of the job", 60, lambda: jobs.pods("cut"))
    suspend = '{"spec": {"suspend": true}}'
    jobs.cluster.kubectl("patch", "optimizationjob", "cut", "-n", jobs.namespace, "--type=merge", "-p", suspend)
    jobs.until("cut", "Suspended", "True")
    jobs.cluster.wait("the suspended job's pods to go", 40, lambda: not jobs.pods("cut"))
    resume = '{"spec": {"suspend": false}}'
    jobs.cluster.kubectl("patch", "optimizationjob", "cut", "-n", jobs.namespace, "--type=merge", "-p", resume)
    jobs.cluster.wait("its pods to come again", 60, lambda: jobs.pods("cut"))

    began = time.monotonic()
    jobs.cluster.kubectl("delete", "optimizationjob", "cut", "-n", jobs.namespace, "--wait=false")

    def gone() -> bool:
        left = jobs.cluster.get(
            "optimizationjobs,jobs,pods,networkpolicies,configmaps",
            "-n",
            jobs.namespace,
            "-l",
            "app.kubernetes.io/instance=cut",
        )
        return not left["items"] and jobs.cluster.find("optimizationjob", "cut", "-n", jobs.namespace) is None

    jobs.cluster.wait("all of a deleted job to go", 30 - (time.monotonic() - began), gone)


def test_a_job_waits_for_a_pool_that_is_not_there_and_can_be_corrected(jobs: Jobs, pool: str) -> None:
    jobs.cluster.apply(job(jobs.namespace, "waits", "no-such-pool"))
    found = jobs.until("waits", "Progressing", "False", "PoolNotFound", seconds=10)
    assert "no-such-pool" in condition(found, "Progressing")["message"]
    assert not jobs.pods("waits")
    jobs.cluster.apply(job(jobs.namespace, "waits", pool))
    jobs.until("waits", "Started", "True")
    jobs.cluster.kubectl("delete", "optimizationjob", "waits", "-n", jobs.namespace, "--timeout=60s")


def test_tasks_that_are_none_are_named_before_any_pod_is_made(jobs: Jobs, pool: str) -> None:
    broken = {"inline": [{"name": "broken", "source": "class Model: pass"}]}
    jobs.cluster.apply(job(jobs.namespace, "bad", pool, tasks=broken))
    found = jobs.until("bad", "Validated", "False", seconds=10)
    assert "broken" in condition(found, "Validated")["message"]
    assert not jobs.pods("bad")
    jobs.cluster.apply(job(jobs.namespace, "bad", pool))
    jobs.until("bad", "Validated", "True", seconds=10)
    jobs.cluster.kubectl("delete", "optimizationjob", "bad", "-n", jobs.namespace, "--timeout=60s")
