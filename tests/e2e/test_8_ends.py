"""An episode that ends by its deadline, a job by its target and its time, and certificates that a job outlives.

Its episodes are recordings, so what each comes to is known beforehand.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from conftest import SYSTEM, Cluster
from faults import HOLD, Killer, flaws, generations, holding, kept, replayed, tasks
from work import Jobs, condition, passing


@pytest.fixture(scope="module")
def space(installed: Cluster) -> Iterator[Jobs]:
    if not installed.own:
        pytest.skip("the ledger of a cluster given by KUBECONFIG isn't on this machine")
    yield from passing(installed, "e2e-ends")


@pytest.fixture(scope="module")
def late(space: Jobs, pool: str) -> str:
    """A job whose episode waits until its minute is over, while the other tests run."""
    endless = [replace(task, first=(HOLD,)) for task in tasks(1)]
    space.cluster.apply(*replayed(space.namespace, "late", pool, endless, {"activeDeadlineSeconds": 60}))
    return "late"


@pytest.mark.usefixtures("late")
def test_a_job_whose_target_is_reached_spares_the_attempts_that_are_left_and_goes_after_its_time(
    space: Jobs, pool: str
) -> None:
    cluster = space.cluster
    # The first attempt reaches it by far; all would take an hour.
    objects = replayed(
        space.namespace,
        "early",
        pool,
        tasks(1),
        {"attempts": 100, "parallelism": 1},
        target={"speedup": 1.5, "baseline": "eager"},
        ttlSecondsAfterFinished=20,
    )
    cluster.apply(*objects)
    found = space.until("early", "Succeeded", "True", "TargetReached", seconds=900)
    assert "every task has reached spec.target" in condition(found, "Succeeded")["message"]
    assert found["status"]["correct"] == 1 and found["status"]["fasterThanEager"] == 1
    episodes = found["status"]["episodes"]
    assert episodes["succeeded"] >= 1 and episodes["pending"] > 50, episodes
    cluster.wait("the pods of the job that is over to go", 40, lambda: not space.pods("early"))
    # Suspended it could be started again by whoever manages its queue.
    cluster.wait("its Job to go", 30, lambda: cluster.find("job", "early", "-n", space.namespace) is None)
    uid = found["metadata"]["uid"]

    def gone() -> bool:
        return cluster.find("optimizationjob", "early", "-n", space.namespace) is None

    assert not gone()
    cluster.wait("the job to go after its time", 60, gone)
    everything = ("jobs,pods,configmaps,networkpolicies", "-n", space.namespace)
    mine = ("-l", "app.kubernetes.io/instance=early")
    cluster.wait("what it had made to go", 60, lambda: not cluster.get(*everything, *mine)["items"])
    assert kept(uid)["job"]["state"] == "closed"
    assert flaws(uid) == []


class Authority:
    """The certificates of a pool's broker, as its Secrets keep them."""

    def __init__(self, cluster: Cluster, pool: str) -> None:
        self.cluster, self.pool = cluster, pool

    def secret(self, name: str) -> dict[str, str]:
        data = self.cluster.get("secret", name, "-n", SYSTEM)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def secrets(self) -> list[str]:
        selector = f"app.kubernetes.io/component=broker,app.kubernetes.io/instance={self.pool}"
        return [s["metadata"]["name"] for s in self.cluster.get("secrets", "-n", SYSTEM, "-l", selector)["items"]]

    def name(self) -> str:
        (name,) = (n for n in self.secrets() if "current.crt" in self.secret(n))
        return name

    def set(self, **values: str) -> None:
        """Other times, as if they had passed, and a look of the operator."""
        data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
        self.cluster.kubectl(
            "patch", "secret", self.name(), "-n", SYSTEM, "--type=merge", "-p", json.dumps({"data": data})
        )
        self.cluster.kubectl(
            "annotate", "gpupool", self.pool, f"kernelfleet.dev/looked-at={len(values)}", "--overwrite"
        )
        self.cluster.kubectl("annotate", "gpupool", self.pool, "kernelfleet.dev/looked-at-")


def served(space: Jobs, name: str) -> str:
    """The certificate that the broker shows to a job's pods, seen from a sandbox's container: nobody else reaches it."""
    pod = space.pods(name)[0]
    (agent,) = (c for c in pod["spec"]["containers"] if c["name"] == "agent")
    (url,) = (e["value"] for e in agent["env"] if e["name"] == "KERNELFLEET_BROKER")
    host, port = url.removeprefix("https://").rsplit(":", 1)
    look = f"import ssl; print(ssl.get_server_certificate(('{host}', {port}), timeout=5))"
    where = (pod["metadata"]["name"], "-n", space.namespace, "-c", "sandbox", "--", "python3", "-c", look)
    return space.cluster.run("exec", *where).stdout.strip()


def before(**span: int) -> str:
    """A time that is so long over."""
    return (datetime.now(UTC) - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.usefixtures("late")
def test_certificates_that_are_rotated_while_a_job_runs_cost_no_episode(space: Jobs, pool: str) -> None:
    cluster, authority = space.cluster, Authority(space.cluster, pool)
    held = [replace(task, first=(HOLD,)) for task in tasks(3)[1:]]
    cluster.apply(*replayed(space.namespace, "rotated", pool, held))
    uid = space.until("rotated", "Started", "True")["metadata"]["uid"]
    cluster.wait("both episodes to begin", 120, lambda: len(generations(uid)) == 2)
    killer = Killer(space.namespace, "rotated", pool, seed=1)

    def known() -> set[str]:
        """The authorities that each agent finds in its pod."""
        where = ("-n", space.namespace, "-c", "agent", "--", "cat", "/etc/kernelfleet/broker/ca.crt")
        return {cluster.kubectl("exec", pod["metadata"]["name"], *where) for pod in space.pods("rotated")}

    old, first = authority.secret(authority.name())["current.crt"], served(space, "rotated")
    assert "BEGIN CERTIFICATE" in first
    # A day is left: the next one is published, and signs nothing yet.
    authority.set(**{"current.made": before(days=729), "current.ends": before(days=-1)})
    cluster.wait("another authority", 60, lambda: "next.crt" in authority.secret(authority.name()))
    new = authority.secret(authority.name())["next.crt"]
    cluster.wait("every agent to know it", 180, lambda: all(new in text and old in text for text in known()))
    assert served(space, "rotated") == first
    # An hour later it signs; whoever connects anew meets its certificate.
    authority.set(**{"next.made": before(hours=2)})
    cluster.wait("the broker to show another certificate", 180, lambda: served(space, "rotated") not in (first, ""))
    cluster.wait("the broker to be killed", 30, lambda: killer.kill("broker", random.Random(1)))
    # A day later nobody knows the old one any more.
    authority.set(**{"previous.since": before(hours=25)})
    cluster.wait("the agents to forget the old authority", 180, lambda: known() == {new})
    cluster.wait("the broker to be killed again", 30, lambda: killer.kill("broker", random.Random(1)))
    cluster.wait("both to wait in their sandboxes", 400, lambda: holding(uid) == 2)
    for pod in space.pods("rotated"):
        cluster.kubectl(
            "exec", pod["metadata"]["name"], "-n", space.namespace, "-c", "sandbox", "--", "touch", "/workspace/go"
        )
    space.until("rotated", "Succeeded", "True", seconds=400)
    assert generations(uid) == {0: [1], 1: [1]}
    assert [e["judged"]["reward"] for e in kept(uid)["episodes"]] == [task.reward for task in held]


def test_an_episode_ends_by_its_deadline_and_is_no_fault(space: Jobs, late: str) -> None:
    found = space.until(late, "Succeeded", "True", seconds=400)
    (episode,) = kept(found["metadata"]["uid"])["episodes"]
    assert episode["ending"]["end"] == "deadline" and episode["turns"] <= 1
    assert found["status"]["episodes"]["faulted"] == 0
    assert generations(found["metadata"]["uid"]) == {0: [1]}
