"""A node is drained while a job runs on it: the job goes on elsewhere, or later, and nothing counts twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from conftest import Cluster
from faults import HOLD, flaws, generations, kept, ledger, replayed, tasks
from work import Jobs, condition, passing


@pytest.fixture(scope="module")
def space(installed: Cluster) -> Iterator[Jobs]:
    if not installed.own:
        pytest.skip("nodes of a cluster given by KUBECONFIG aren't drained, and its ledger isn't on this machine")
    yield from passing(installed, "e2e-nodes")


def waiting(uid: str, generation: int) -> int:
    """Episodes of a job whose newest pod has begun to run its first command, by the pod's generation."""
    rows = ledger(uid)
    query = "select count(*) from episodes where job = ? and state = 'running' and turns >= 1 and generation = ?"
    (count,) = rows.execute(query, (uid, generation)).fetchone()
    rows.close()
    return int(count)


def test_a_job_on_a_node_that_is_drained_goes_on_and_nothing_counts_twice(space: Jobs, pool: str) -> None:
    cluster = space.cluster
    held = [replace(task, first=(HOLD,)) for task in tasks(4, measured=False)[1:]]
    cluster.apply(*replayed(space.namespace, "drained", pool, held))
    uid = space.until("drained", "Started", "True")["metadata"]["uid"]
    cluster.wait("all episodes to be under way", 240, lambda: waiting(uid, 1) == len(held))
    nodes = {pod["spec"]["nodeName"] for pod in space.pods("drained")}
    try:
        # All at once: operator, broker and judge go with the agents.
        for node in nodes:
            words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=180s")
            cluster.kubectl("drain", node, *words)
        assert all(pod["spec"].get("nodeName") not in nodes for pod in space.pods("drained"))
    finally:
        for node in nodes:
            cluster.kubectl("uncordon", node)

    def ready() -> bool:
        return condition(cluster.get("gpupool", pool), "Ready").get("status") == "True"

    cluster.wait("broker and judge to be back", 420, ready)
    cluster.wait("every episode to begin anew", 300, lambda: waiting(uid, 2) == len(held))
    for pod in space.pods("drained"):
        where = ("-n", space.namespace, "-c", "sandbox", "--", "touch", "/workspace/go")
        cluster.kubectl("exec", pod["metadata"]["name"], *where)
    found = space.until("drained", "Succeeded", "True", seconds=400)
    assert generations(uid) == {index: [1, 2] for index in range(len(held))}
    assert flaws(uid) == []
    assert [e["judged"]["reward"] for e in kept(uid)["episodes"]] == [task.reward for task in held]
    episodes = found["status"]["episodes"]
    assert episodes["succeeded"] + episodes["failed"] == len(held), episodes
    assert episodes["pending"] == episodes["running"] == episodes["faulted"] == 0, episodes
