"""What the operator does with jobs before and after their episodes: waiting, correcting, names, time, deletion.

Nothing here is judged: a pool with a broker is enough.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Cluster

TASK = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""
API = "kernelfleet.dev/v1alpha1"


class Space:
    """A namespace with jobs, and a pool whose broker answers."""

    def __init__(self, cluster: Cluster, name: str, pool: str) -> None:
        self.cluster = cluster
        self.name = name
        self.pool = pool

    def job(self, name: str, **spec: Any) -> dict[str, Any]:
        """A job of one task; none of its pods finds an image, so none of its episodes begins."""
        whole = {
            "tasks": {"inline": [{"name": "relu", "source": TASK}]},
            "judge": {"gpuPool": self.pool},
            "agent": {"scheduling": {"nodeSelector": {"kernelfleet.dev/test": "nowhere"}}},
        }
        meta = {"name": name, "namespace": self.name}
        return {"apiVersion": API, "kind": "OptimizationJob", "metadata": meta, "spec": {**whole, **spec}}

    def apply(self, *objects: dict[str, Any]) -> None:
        self.cluster.apply(*objects)

    def map(self, name: str, **data: str) -> dict[str, Any]:
        meta = {"name": name, "namespace": self.name}
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        return self.cluster.find(kind, name, "-n", self.name)

    def until(self, name: str, kind: str, status: str, reason: str, kind_of: str = "optimizationjob") -> dict[str, Any]:
        """The object once a condition is so."""

        def there() -> dict[str, Any] | None:
            found = self.find(kind_of, name) or {}
            conditions = found.get("status", {}).get("conditions", [])
            said: dict[str, Any] = next((c for c in conditions if c["type"] == kind), {})
            return found if (said.get("status"), said.get("reason")) == (status, reason) else None

        found: dict[str, Any] = self.cluster.wait(f"{name}: {kind}={status} {reason}", 20, there)
        return found

    def started(self, name: str) -> dict[str, Any]:
        return self.until(name, "Started", "True", "JobCreated")

    def gone(self, kind: str, name: str, seconds: float = 30) -> None:
        self.cluster.wait(f"{kind} {name} to be gone", seconds, lambda: self.find(kind, name) is None)

    def message(self, found: dict[str, Any], kind: str) -> str:
        conditions = found["status"]["conditions"]
        return str(next(c["message"] for c in conditions if c["type"] == kind))


@pytest.fixture(scope="module")
def space(installed: Cluster, pool: str) -> Iterator[Space]:
    name = installed.namespace("e2e-operator")
    yield Space(installed, name, pool)
    installed.kubectl("delete", "optimizationjobs", "--all", "-n", name, "--timeout=60s")
    installed.kubectl("delete", "namespace", name, "--wait=false")


def test_a_job_starts_when_its_config_map_appears(space: Space) -> None:
    space.apply(space.job("waits", tasks={"configMap": {"name": "late"}}))
    found = space.until("waits", "Validated", "Unknown", "ConfigMapNotFound")
    assert "waiting for it" in space.message(found, "Validated")
    assert space.find("job", "waits") is None
    space.apply(space.map("late", **{"relu.py": TASK, "README.md": "no task"}))
    began = time.monotonic()
    found = space.started("waits")
    assert time.monotonic() - began < 5
    assert found["status"]["tasks"] == 1
    batch = space.find("job", "waits")
    assert batch is not None and batch["spec"]["completions"] == 1


def test_broken_tasks_are_named_within_a_second_and_a_correction_recovers(space: Space) -> None:
    began = time.monotonic()
    space.apply(space.job("broken", tasks={"inline": [{"name": "bad", "source": "def ("}]}))
    found = space.until("broken", "Validated", "False", "TasksInvalid")
    # With the time between two looks.
    assert time.monotonic() - began < 3
    assert "bad: line 1: syntax error" in space.message(found, "Validated")
    assert space.find("job", "broken") is None
    space.apply(space.job("broken"))
    space.started("broken")


def test_an_object_that_nobody_can_read_holds_up_nobody_else(space: Space) -> None:
    crd = "optimizationjobs.kernelfleet.dev"
    before = space.cluster.get("crd", crd)
    loose = json.loads(json.dumps(before))
    for key in ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"):
        loose["metadata"].pop(key, None)
    loose.pop("status", None)
    strict = json.loads(json.dumps(loose))
    loose["spec"]["versions"][0]["schema"]["openAPIV3Schema"] = {
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": True,
    }
    odd = space.job("odd")
    odd["spec"] = {"tasks": "seven", "agent": {"maxTurns": "many"}}
    try:
        space.cluster.kubectl("replace", "-f", "-", stdin=json.dumps(loose))

        def taken() -> bool:
            return space.cluster.run("apply", "-f", "-", stdin=json.dumps(odd)).returncode == 0

        space.cluster.wait("the loose definition to hold", 20, taken)
        space.apply(space.job("even"))
        space.started("even")
        # Nothing was made for it, so it has no finalizer; with one, as if it had been read once, it is released all the same.
        assert not (space.find("optimizationjob", "odd") or {})["metadata"].get("finalizers")
        held = json.dumps({"metadata": {"finalizers": ["kernelfleet.dev/broker"]}})
        space.cluster.kubectl("patch", "optimizationjob", "odd", "-n", space.name, "--type=merge", "-p", held)
        space.cluster.kubectl("delete", "optimizationjob", "odd", "-n", space.name, "--timeout=150s", timeout=160)
        assert space.find("optimizationjob", "odd") is None
    finally:
        space.cluster.run("delete", "optimizationjob", "odd", "-n", space.name, "--wait=false")
        space.cluster.kubectl("replace", "-f", "-", stdin=json.dumps(strict))


def test_a_job_of_somebody_else_is_left_alone_and_the_name_is_told(space: Space) -> None:
    pod = {"restartPolicy": "Never", "containers": [{"name": "a", "image": "nothing.invalid/x"}]}
    mine = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "taken", "namespace": space.name},
        "spec": {"suspend": True, "template": {"spec": pod}},
    }
    space.apply(mine)
    uid = (space.find("job", "taken") or {})["metadata"]["uid"]
    space.apply(space.job("taken"))
    found = space.until("taken", "Progressing", "False", "NameTaken")
    assert "Job taken is there already" in space.message(found, "Progressing")
    assert (space.find("job", "taken") or {})["metadata"]["uid"] == uid
    space.cluster.kubectl("delete", "job", "taken", "-n", space.name)
    space.started("taken")


def test_a_job_that_another_controller_manages_is_not_touched(space: Space) -> None:
    space.apply(space.job("theirs", managedBy="example.com/other"), space.job("ours"))
    space.started("ours")
    assert "status" not in (space.find("optimizationjob", "theirs") or {})
    assert space.find("job", "theirs") is None


def test_pace_and_suspension_follow_the_spec_and_what_others_did_stays(space: Space) -> None:
    space.apply(space.job("pace", tasks={"taskSet": {"name": "two"}}))
    space.until("pace", "Validated", "Unknown", "TaskSetNotFound")
    tasks = {"apiVersion": API, "kind": "TaskSet", "metadata": {"name": "two", "namespace": space.name}}
    space.apply(space.map("a", **{"x.py": TASK}), space.map("b", **{"y.py": TASK}))
    space.apply({**tasks, "spec": {"configMap": {"names": ["a", "b"]}}})
    space.until("two", "Ready", "True", "Ready", kind_of="taskset")
    space.started("pace")

    def spec() -> dict[str, Any]:
        found = space.find("job", "pace")
        assert found is not None
        return dict(found["spec"])

    assert (spec()["completions"], spec()["parallelism"], spec()["suspend"]) == (2, 2, False)
    patch = ("patch", "optimizationjob", "pace", "-n", space.name, "--type=merge", "-p")
    space.cluster.kubectl(*patch, json.dumps({"spec": {"agent": {"parallelism": 1}}}))
    space.cluster.wait("the pace to follow", 20, lambda: spec()["parallelism"] == 1)
    # Somebody else, such as Kueue.
    space.cluster.kubectl("patch", "job", "pace", "-n", space.name, "-p", json.dumps({"spec": {"suspend": True}}))
    space.until("pace", "Progressing", "False", "SuspendedByOthers")
    assert spec()["suspend"] is True
    space.cluster.kubectl("patch", "job", "pace", "-n", space.name, "-p", json.dumps({"spec": {"suspend": False}}))
    space.cluster.kubectl(*patch, json.dumps({"spec": {"suspend": True}}))
    space.until("pace", "Progressing", "False", "Suspended")
    assert spec()["suspend"] is True
    space.cluster.kubectl(*patch, json.dumps({"spec": {"suspend": False}}))
    space.cluster.wait("the job to go on", 20, lambda: spec()["suspend"] is False)


def test_what_is_deleted_by_hand_comes_back_while_the_job_runs(space: Space) -> None:
    space.apply(space.job("mended"))
    space.started("mended")
    for kind in ("networkpolicy", "configmap", "job"):
        name = "mended" if kind == "job" else f"kernelfleet-pool-{space.pool}"
        old = (space.find(kind, name) or {})["metadata"]["uid"]
        space.cluster.kubectl("delete", kind, name, "-n", space.name)

        def back(kind: str = kind, name: str = name, old: str = old) -> bool:
            found = space.find(kind, name)
            return found is not None and found["metadata"]["uid"] != old

        space.cluster.wait(f"the {kind} to come back", 30, back)
    # A ConfigMap counts no generations: that somebody has edited it is seen all the same.
    name = f"kernelfleet-pool-{space.pool}"
    edit = json.dumps({"data": {"ca.crt": "mine"}})
    space.cluster.kubectl("patch", "configmap", name, "-n", space.name, "--type=merge", "-p", edit)
    space.cluster.wait(
        "the edit to be undone", 30, lambda: (space.find("configmap", name) or {})["data"]["ca.crt"] != "mine"
    )


def test_what_jobs_of_a_namespace_share_goes_with_the_last_of_them(installed: Cluster, pool: str) -> None:
    space = Space(installed, installed.namespace("e2e-shared"), pool)
    shared = f"kernelfleet-pool-{pool}"
    space.apply(space.job("one"), space.job("two"))
    for name in ("one", "two"):
        space.started(name)
    found = space.find("networkpolicy", shared)
    assert found is not None and "ownerReferences" not in found["metadata"]
    installed.kubectl("delete", "optimizationjob", "one", "-n", space.name, "--timeout=30s")
    assert space.find("configmap", shared) is not None
    kept = space.find("networkpolicy", shared)
    assert kept is not None and kept["metadata"]["uid"] == found["metadata"]["uid"]
    installed.kubectl("delete", "optimizationjob", "two", "-n", space.name, "--timeout=30s")
    for kind in ("networkpolicy", "configmap"):
        space.gone(kind, shared, 10)
    # All at once, each still sees the others while it goes.
    many = [f"many-{i}" for i in range(8)]
    space.apply(*(space.job(name) for name in many))
    for name in many:
        space.started(name)
    installed.kubectl("delete", "optimizationjobs", *many, "-n", space.name, "--timeout=60s")
    for kind in ("networkpolicy", "configmap"):
        space.gone(kind, shared, 10)
    installed.kubectl("delete", "namespace", space.name, "--wait=false")


def test_a_deleted_job_leaves_nothing_and_its_name_is_free_at_once(space: Space) -> None:
    space.apply(space.job("again"))
    first = space.started("again")["metadata"]["uid"]
    space.cluster.kubectl("delete", "optimizationjob", "again", "-n", space.name, "--timeout=30s")
    space.apply(space.job("again"))
    found = space.started("again")
    assert found["metadata"]["uid"] != first
    batch = space.find("job", "again") or {}
    assert batch["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]


def test_a_job_whose_pool_has_gone_can_be_deleted(space: Space) -> None:
    # A pool of its own, whose broker nobody starts: the deletion may wait for no broker that isn't there.
    pool = {
        "apiVersion": API,
        "kind": "GpuPool",
        "metadata": {"name": "passing"},
        "spec": {"device": "cpu", "replicas": 0},
    }
    space.apply(space.job("orphan", judge={"gpuPool": "passing"}))
    space.until("orphan", "Validated", "Unknown", "PoolNotFound")
    space.apply(pool)
    try:
        space.cluster.wait(
            "the finalizer", 60, lambda: (space.find("optimizationjob", "orphan") or {})["metadata"].get("finalizers")
        )
    finally:
        space.cluster.kubectl("delete", "gpupool", "passing", "--timeout=30s")
    space.cluster.kubectl("delete", "optimizationjob", "orphan", "-n", space.name, "--timeout=30s")
    space.gone("job", "orphan")


def test_five_thousand_tasks_are_one_job(space: Space) -> None:
    short = TASK.replace("64, 64", "8")
    maps = [space.map(f"part-{i}", **{f"t{i}-{n}.py": short for n in range(1000)}) for i in range(5)]
    for one in maps:
        # Applying would keep the whole text twice.
        space.cluster.kubectl("create", "-f", "-", stdin=json.dumps(one))
    names = [f"part-{i}" for i in range(5)]
    space.apply(
        {
            "apiVersion": API,
            "kind": "TaskSet",
            "metadata": {"name": "large", "namespace": space.name},
            "spec": {"configMap": {"names": names}},
        },
        space.job("large", tasks={"taskSet": {"name": "large"}}, agent={"parallelism": 1}),
    )
    found = space.until("large", "Started", "True", "JobCreated")
    assert found["status"]["tasks"] == 5000
    assert (space.find("job", "large") or {})["spec"]["completions"] == 5000
    space.cluster.kubectl("delete", "optimizationjob", "large", "-n", space.name, "--timeout=60s")
