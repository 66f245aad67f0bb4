"""An upgrade from an earlier commit's chart, images and ledger while a job runs. It takes the release away, so it runs alone.

Not in the test run, since it builds the earlier program: `make upgrade`.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import BED, HOME, ROOT, SYSTEM, Cluster, judges, script
from work import Jobs, condition, job

# Its ledger has the schema 2, today's has a later one.
EARLIER = "afa051a08d0f12e318b90e556b0cf94b4c746ca5"
FOLDER = ROOT / ".kernelfleet" / "earlier" / EARLIER
TAG = "earlier"


def helm(cluster: Cluster, *words: str | Path) -> None:
    """A command of helm, which has to succeed."""
    command = [HOME / "bin/helm", f"--kubeconfig={cluster.kubeconfig}", "-n", SYSTEM, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def deploy(cluster: Cluster, chart: Path, tag: str) -> None:
    """Installs or upgrades the release."""
    values: list[str | Path] = ["--values", BED / "values.yaml", "--set", f"image.tag={tag}"]
    helm(
        cluster, "upgrade", "--install", "kernelfleet", chart, "--take-ownership", *values, "--wait", "--timeout", "5m"
    )


def ledger() -> sqlite3.Connection:
    """The ledger that knows the job; read only."""
    for path in HOME.glob("state/ledgers/*/ledger.db"):
        kept = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        if kept.execute("select 1 from jobs where name = 'upgraded'").fetchone():
            return kept
        kept.close()
    pytest.fail("no ledger knows the job", pytrace=False)


def schema(kept: sqlite3.Connection) -> int:
    (version,) = kept.execute("pragma user_version").fetchone()
    return int(version)


def image(pod: dict[str, Any]) -> str:
    (container,) = pod["spec"]["containers"]
    return str(container["image"])


@pytest.fixture(scope="module")
def earlier(images: Cluster) -> Iterator[Jobs]:
    """The cluster with the release of the earlier commit, and a pool of it that is ready."""
    if not images.own:
        pytest.skip("a release is taken away and put back in this checkout's own cluster only")
    script("earlier.sh", EARLIER)
    os.environ["KERNELFLEET_IMAGE_TAG"] = TAG
    try:
        script("images.sh", FOLDER / "kernelfleet")
    finally:
        del os.environ["KERNELFLEET_IMAGE_TAG"]
    script("install.sh")
    # Pools of the present release have ledgers that the earlier one refuses.
    images.kubectl("delete", "optimizationjobs", "--all", "-A", "--timeout=90s")
    images.kubectl("delete", "gpupools", "--all", "--timeout=60s")
    helm(images, "uninstall", "kernelfleet", "--wait")
    deploy(images, FOLDER / "source/charts/kernelfleet", TAG)
    spec = {
        "device": "cpu",
        "slices": {"maxSeconds": 1200, "maxExclusiveSeconds": 600},
        "podTemplate": judges("pytorch"),
        "storage": {"size": "1Gi", "storageClassName": "test-bed"},
    }
    pool = {"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "upgrade"}, "spec": spec}
    images.apply(pool)

    def answers() -> bool:
        said = condition(images.get("gpupool", "upgrade"), "Ready")
        # A judge that gets ready is waited for by agents as well.
        return said.get("status") == "True" or said.get("reason") == "JudgesNotReady"

    images.wait("the earlier release's broker to answer", 180, answers)
    space = Jobs(images, images.namespace("e2e-upgrade"))
    yield space
    images.run("delete", "optimizationjobs", "--all", "-n", space.namespace, "--timeout=60s")
    images.run("delete", "gpupool", "upgrade", "--timeout=60s")
    images.run("delete", "pvc", "-n", SYSTEM, "ledger-upgrade-broker-0", "--wait=false")
    images.run("delete", "namespace", space.namespace, "--wait=false")


def test_a_job_that_runs_is_finished_by_its_own_pods_through_an_upgrade(earlier: Jobs) -> None:
    cluster = earlier.cluster
    # One episode after the other, so that one is under way and one is still to come.
    cluster.apply(job(earlier.namespace, "upgraded", "upgrade", agent={"maxTurns": 2, "parallelism": 1}))

    def working() -> bool:
        return any(condition(p, "Ready").get("status") == "True" for p in earlier.pods("upgraded"))

    cluster.wait("an agent to run", 90, working)

    def asked() -> bool:
        return bool(ledger().execute("select 1 from evaluations where state in ('queued', 'leased')").fetchone())

    cluster.wait("the agent to have asked the judge", 90, asked)
    (agent,) = earlier.pods("upgraded")
    uid, before = agent["metadata"]["uid"], schema(ledger())
    batch = cluster.get("job", "upgraded", "-n", earlier.namespace)["metadata"]["uid"]
    assert image(agent) == f"localhost/kernelfleet:{TAG}"

    deploy(cluster, ROOT / "charts/kernelfleet", "dev")

    def upgraded(component: str) -> bool:
        selector = f"app.kubernetes.io/component={component},app.kubernetes.io/instance=upgrade"
        pods = cluster.get("pods", "-n", SYSTEM, "-l", selector)["items"]
        fresh = [p for p in pods if image(p).endswith(":dev") and condition(p, "Ready").get("status") == "True"]
        return len(pods) == len(fresh) == 1

    cluster.wait("the broker to be the present one", 240, lambda: upgraded("broker"))
    assert schema(ledger()) > before
    still = [p for p in earlier.pods("upgraded") if p["metadata"]["uid"] == uid]
    assert still and still[0]["status"]["phase"] in ("Running", "Succeeded"), "the agent under way was replaced"

    found = earlier.until("upgraded", "Succeeded", "True", seconds=1200)
    assert upgraded("judge")
    assert found["status"]["tasks"] == found["status"]["correct"] == 2
    assert found["status"]["episodes"] == {"pending": 0, "running": 0, "succeeded": 2, "failed": 0, "faulted": 0}
    assert cluster.get("job", "upgraded", "-n", earlier.namespace)["metadata"]["uid"] == batch, "its Job was made anew"
    pods = earlier.pods("upgraded")
    # One pod an episode, the earlier image for both: it is pinned in the Job.
    assert len(pods) == 2 and {image(p) for p in pods} == {f"localhost/kernelfleet:{TAG}"}
    assert uid in {p["metadata"]["uid"] for p in pods}
    uids = ledger().execute("select idx, generation, state from episodes order by idx").fetchall()
    assert [(index, state) for index, _, state in uids] == [(0, "finished"), (1, "finished")]
