"""Kueue itself admits jobs under a quota: one after the other, and none that is suspended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import kueue
import pytest
from conftest import Cluster, script
from work import Jobs, job

API = "kueue.x-k8s.io/v1beta2"
TASK = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.sigmoid(x) * torch.relu(x)


def get_inputs():
    return [torch.randn(256, 256)]


def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def queue(installed: Cluster, pool: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """A namespace with a queue whose quota is the CPU of one agent of the built-in policy."""
    if not installed.own:
        pytest.skip("Kueue is put into this checkout's own cluster only")
    script("build.sh", "kueue")
    namespace = installed.namespace("e2e-kueue")
    try:
        kueue.install(installed, tmp_path_factory.mktemp("kueue"))
        flavor = {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "plain"}}
        quota = [{"name": "cpu", "nominalQuota": "50m"}, {"name": "memory", "nominalQuota": "1Gi"}]
        covered = {
            "coveredResources": ["cpu", "memory"],
            "flavors": [{"name": "plain", "resources": quota}],
        }
        shared = {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": "agents"},
            "spec": {"namespaceSelector": {}, "resourceGroups": [covered]},
        }
        local = {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": "agents", "namespace": namespace},
            "spec": {"clusterQueue": "agents"},
        }
        kueue.retried(installed, flavor, shared, local)
        yield Jobs(installed, namespace)
    finally:
        installed.run("delete", "optimizationjobs", "--all", "-n", namespace, "--timeout=60s")
        installed.run("delete", "localqueues,clusterqueues,resourceflavors", "--all", "-n", namespace, "--timeout=30s")
        kueue.remove(installed)
        installed.run("delete", "namespace", namespace, "--wait=false")
    del pool


def queued(space: Jobs, name: str, pool: str, **spec: Any) -> dict[str, Any]:
    """A job of one task in the queue."""
    agent = {"maxTurns": 1, "scheduling": {"queueName": "agents"}}
    tasks = {"inline": [{"name": "gate", "source": TASK}]}
    return job(space.namespace, name, pool, tasks=tasks, agent=agent, **spec)


def admitted(space: Jobs, name: str) -> bool:
    """Whether Kueue says of the job's Workload that it is admitted."""
    workloads = space.cluster.get("workloads.kueue.x-k8s.io", "-n", space.namespace)["items"]
    ours = [w for w in workloads if any(o["name"] == name for o in w["metadata"].get("ownerReferences", []))]
    conditions = [c for w in ours for c in w.get("status", {}).get("conditions", [])]
    return any(c["type"] == "Admitted" and c["status"] == "True" for c in conditions)


def test_kueue_admits_one_job_after_the_other_under_its_quota(queue: Jobs, pool: str) -> None:
    cluster = queue.cluster
    cluster.apply(queued(queue, "ahead", pool))
    cluster.wait("Kueue to admit the first job", 60, lambda: admitted(queue, "ahead"))
    cluster.wait("a pod of the admitted job", 30, lambda: queue.pods("ahead"))
    cluster.apply(queued(queue, "behind", pool))
    found = queue.until("behind", "Progressing", "True", "Queued")
    assert (
        "kubectl get workloads"
        in next(c for c in found["status"]["conditions"] if c["type"] == "Progressing")["message"]
    )
    batch = cluster.get("job", "behind", "-n", queue.namespace)
    assert batch["spec"]["suspend"] is True and batch["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "agents"
    assert not queue.pods("behind") and not admitted(queue, "behind")
    # The first ends, and its quota is the second's.
    queue.until("ahead", "Succeeded", "True", seconds=600)
    cluster.wait("Kueue to admit the second job", 60, lambda: admitted(queue, "behind"))
    cluster.wait("a pod of the second job", 30, lambda: queue.pods("behind"))
    queue.until("behind", "Progressing", "True", "Running")

    # Suspended by its own spec it leaves the queue: Kueue, which would start it again, has nothing to start.
    def suspend(whether: bool) -> None:
        change = json.dumps({"spec": {"suspend": whether}})
        cluster.kubectl("patch", "optimizationjob", "behind", "-n", queue.namespace, "--type=merge", "-p", change)

    suspend(True)
    queue.until("behind", "Suspended", "True")
    cluster.wait("the suspended job's pods to go", 60, lambda: not queue.pods("behind"))
    assert cluster.find("job", "behind", "-n", queue.namespace) is None
    cluster.apply(queued(queue, "third", pool))
    cluster.wait("Kueue to give the quota to another", 60, lambda: admitted(queue, "third"))
    suspend(False)
    queue.until("behind", "Progressing", "True", "Queued")
    cluster.kubectl("delete", "optimizationjob", "third", "-n", queue.namespace, "--timeout=60s")
    cluster.wait("Kueue to admit what was resumed", 60, lambda: admitted(queue, "behind"))
    queue.until("behind", "Succeeded", "True", seconds=600)


def test_a_queued_job_whose_target_is_reached_gives_its_quota_back_for_good(queue: Jobs, pool: str) -> None:
    cluster = queue.cluster
    agent = {"maxTurns": 1, "attempts": 50, "parallelism": 1, "scheduling": {"queueName": "agents"}}
    # Large enough for one pass over memory instead of three to be faster by far.
    tasks = {"inline": [{"name": "gate", "source": TASK.replace("256, 256", "2048, 2048")}]}
    target = {"speedup": 1.1, "baseline": "eager"}
    cluster.apply(job(queue.namespace, "aimed", pool, tasks=tasks, agent=agent, target=target))
    queue.until("aimed", "Succeeded", "True", "TargetReached", seconds=900)

    def gone() -> bool:
        return cluster.find("job", "aimed", "-n", queue.namespace) is None

    cluster.wait("its Job to go with its pods", 60, gone)
    cluster.apply(queued(queue, "after", pool))
    cluster.wait("Kueue to give the quota to another", 60, lambda: admitted(queue, "after"))
    queue.until("after", "Succeeded", "True", seconds=600)
    assert gone() and not queue.pods("aimed"), "it was made anew"
