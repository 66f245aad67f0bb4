"""Processes that are killed while a job runs: the job comes to what it comes to anyway.

Short here; `make faults` is the same with 20 episodes and 80 kills.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import Cluster
from faults import Killer, differences, flaws, generations, kept, metrics, replayed, status, tasks
from work import Jobs, passing

EPISODES = int(os.environ.get("KERNELFLEET_FAULTS_EPISODES", "5"))
KILLS = int(os.environ.get("KERNELFLEET_FAULTS_KILLS", "8"))
SEED = int(os.environ.get("KERNELFLEET_FAULTS_SEED", "1"))
# A judge spends a minute of a processor on each candidate that is correct, most of it in `torch.compile`.
MEASURED = os.environ.get("KERNELFLEET_FAULTS_MEASURED", "1") != "0"
# A pod that was killed is replaced after 10 s, 20 s, 40 s, ..: by the Job's controller, whatever the machine.
SECONDS = 300 + 60 * EPISODES + 30 * KILLS


@pytest.fixture(scope="module")
def space(installed: Cluster) -> Iterator[Jobs]:
    if not installed.own:
        pytest.skip("processes and ledger of a cluster given by KUBECONFIG aren't on this machine")
    yield from passing(installed, "e2e-faults")


def ended(space: Jobs, name: str) -> dict[str, Any] | None:
    """The job, if it is over."""
    found = space.get(name)
    over = [c for c in found.get("status", {}).get("conditions", []) if c["type"] in ("Succeeded", "Failed")]
    return found if any(c["status"] == "True" for c in over) else None


def test_a_job_whose_processes_are_killed_comes_to_what_one_comes_to_that_is_left_alone(space: Jobs, pool: str) -> None:
    cluster, of, names = space.cluster, tasks(EPISODES, MEASURED), ("faults-none", "faults-many")
    began = time.monotonic()
    cluster.apply(*replayed(space.namespace, names[0], pool, of))
    space.until(names[0], "Succeeded", "True", seconds=SECONDS)
    alone = time.monotonic() - began

    began = time.monotonic()
    cluster.apply(*replayed(space.namespace, names[1], pool, of))
    uid = space.until(names[1], "Started", "True")["metadata"]["uid"]
    killer = Killer(space.namespace, names[1], pool, SEED)
    try:
        killer.run(KILLS // 4, uid, lambda: ended(space, names[1]))
        space.until(names[1], "Succeeded", "True", seconds=SECONDS)
    except pytest.fail.Exception:
        space.tell(names[1])
        raise
    done = Counter(k["component"] for k in killer.kills)
    print(
        f"\n{EPISODES} episodes: {alone:.0f} s alone, {time.monotonic() - began:.0f} s with the kills {dict(done)} of seed {SEED}"
    )
    assert done == dict.fromkeys(("operator", "broker", "judge", "agent"), KILLS // 4)

    both = [space.get(name) for name in names]
    uids = [job["metadata"]["uid"] for job in both]
    ledgers = [kept(uid) for uid in uids]
    read = [metrics(cluster, pool, space.namespace, name) for name in names]
    found = {
        "ledger": differences(ledgers[0], ledgers[1]),
        "status": differences(status(both[0]), status(both[1])),
        "metrics": differences(read[0], read[1]),
        "flaws": [flaw for uid in uids for flaw in flaws(uid)],
        "pods": [p["metadata"]["name"] for n in names for p in space.pods(n) if p["status"]["phase"] == "Running"],
    }
    count = {name: len(generations(uid)) for name, uid in zip(names, uids, strict=True)}
    print(f"episodes {count}, generations {[sum(map(len, generations(uid).values())) for uid in uids]}")
    print(f"{len(read[0])} series of each job; different: {found}")
    assert found == dict.fromkeys(found, [])
    # What is equal has to be what was to be expected.
    expected = [task.reward for task in of]
    assert [e["judged"].get("reward") for e in ledgers[0]["episodes"]] == expected
    assert both[0]["status"]["correct"] == sum(reward > 0 for reward in expected)
    assert read[0]

    cluster.kubectl("delete", "optimizationjobs", *names, "-n", space.namespace, "--timeout=60s")
    everything = ("pods,jobs,configmaps,networkpolicies", "-n", space.namespace)
    ours = ("-l", "app.kubernetes.io/name=kernelfleet")
    cluster.wait("what the jobs had made to go", 60, lambda: not cluster.get(*everything, *ours)["items"])
