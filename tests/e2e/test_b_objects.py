"""A pool whose objects lie in a bucket: what it lacks is told, what a job comes to is there, and goes with the job."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import HOME, SYSTEM, Cluster, judges, prepare
from faults import replayed, tasks
from work import Jobs, condition

# The machine's end of the bridge that the nodes hang on: where the API server is too.
HOST = "10.77.0.1"
KEY, SECRET, WRONG = "KEYOFTHETEST", "secret-of-the-test", "another-secret-of-the-test"
POOL = "bucket"


@dataclass
class Server:
    """A server that speaks S3 over a folder: a bucket is a folder of it, and objects are files."""

    folder: Path
    endpoint: str

    def objects(self, below: str) -> set[str]:
        """Objects of the pool in one of its folders, of which some may be going just now."""
        top = self.folder / "data" / "fleet" / "objects" / POOL
        walked = os.walk(top / below)
        return {str((Path(folder) / name).relative_to(top)) for folder, _, names in walked for name in names}


@pytest.fixture(scope="module")
def server(installed: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server, without a bucket."""
    if not installed.own:
        pytest.skip("pods of a cluster given by KUBECONFIG don't reach this machine")
    prepare("build.sh", "s3")
    folder = tmp_path_factory.mktemp("s3")
    for name in ("data", "sidecar"):
        (folder / name).mkdir()
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    words: list[str | Path] = [HOME / "bin/versitygw", "--port", f"{HOST}:{port}", "--quiet", "posix"]
    words += ["--sidecar", folder / "sidecar", folder / "data"]
    environment = {**os.environ, "ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    with subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with socket.socket() as probe:
                    if probe.connect_ex((HOST, port)) == 0:
                        break
                time.sleep(0.1)
            yield Server(folder, f"http://{HOST}:{port}")
        finally:
            process.kill()


def secret(key: str | None) -> dict[str, Any]:
    """The Secret of the bucket, with half of what belongs into it if there is no `key`."""
    text = {"access-key-id": KEY, **({"secret-access-key": key} if key else {})}
    data = {name: base64.b64encode(value.encode()).decode() for name, value in text.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": POOL, "namespace": SYSTEM}, "data": data}


def test_a_pool_says_what_its_bucket_lacks_until_a_job_works_with_it(installed: Cluster, server: Server) -> None:
    cluster = installed
    spec: dict[str, Any] = {"device": "cpu", "slices": {"maxSeconds": 1200, "maxExclusiveSeconds": 600}}
    spec |= {"replicas": 0, "retentionSeconds": 1, "podTemplate": judges("pytorch")}
    spec["objectStore"] = {
        "url": "s3://fleet/objects",
        "endpoint": server.endpoint,
        "credentialsSecret": {"name": POOL},
    }
    kind = {"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool"}
    namespace = cluster.namespace("e2e-objects")
    jobs = Jobs(cluster, namespace)

    def until(reason: str, seconds: float = 120) -> str:
        def said() -> str | None:
            ready = condition(cluster.get("gpupool", POOL), "Ready")
            return str(ready["message"]) if ready.get("reason") == reason else None

        message: str = cluster.wait(f"the pool to be {reason}", seconds, said)
        return message

    def look() -> None:
        """The operator looks at once: Secrets are not its to watch, and half a minute goes by until it asks again."""
        cluster.kubectl("annotate", "gpupool", POOL, f"kernelfleet.dev/looked-at={time.time_ns()}", "--overwrite")

    try:
        cluster.apply({**kind, "metadata": {"name": POOL}, "spec": spec})
        assert f"there is no Secret {POOL} in the namespace {SYSTEM}" in until("CredentialsNotFound")
        assert cluster.find("statefulset", f"{POOL}-broker", "-n", SYSTEM) is None
        cluster.apply(secret(None))
        look()
        assert "secret-access-key" in until("CredentialsIncomplete")
        cluster.apply(secret(WRONG))
        look()
        assert "AWS_SECRET_ACCESS_KEY" in until("ObjectStoreFailing")
        # Another key is another pod of the broker.
        cluster.apply(secret(SECRET))
        look()
        cluster.wait("the broker to know the key", 180, lambda: "no bucket fleet" in until("ObjectStoreFailing"))
        (server.folder / "data/fleet").mkdir()
        look()
        until("NoJudges")
        cluster.kubectl("patch", "gpupool", POOL, "--type=merge", "-p", '{"spec": {"replicas": 1}}')
        until("JudgesReady", 420)

        # A kernel that is correct has a result, and what a model says is a trajectory.
        cluster.apply(*replayed(namespace, "stored", POOL, tasks(1)))
        uid = jobs.until("stored", "Succeeded", "True", seconds=900)["metadata"]["uid"]
        assert server.objects("results") == {f"results/{uid}/0/1.json"}
        trajectory = f"trajectories/{uid}/0/1/00000000.jsonl"
        cluster.wait("the trajectory", 60, lambda: trajectory in server.objects("trajectories"))
        # Whom it concerns knows the Secret's name, and nobody what is in it.
        shown = [cluster.kubectl("logs", f"{POOL}-broker-0", "-n", SYSTEM)]
        for kinds in ("gpupools", "statefulsets,pods,configmaps,events"):
            shown.append(json.dumps(cluster.get(kinds, "-n", SYSTEM)))
        assert not [text for text in shown for hidden in (KEY, SECRET, WRONG) if hidden in text]
        cluster.kubectl("delete", "optimizationjob", "stored", "-n", namespace, "--timeout=60s")
        cluster.wait("the job's objects to go", 60, lambda: not server.objects("results"))
        assert not server.objects("trajectories")
    except (pytest.fail.Exception, AssertionError):
        print(cluster.run("describe", "gpupool", POOL).stdout)
        print(cluster.run("describe", "pod", f"{POOL}-broker-0", "-n", SYSTEM).stdout)
        for component in ("operator", "broker"):
            selector = f"app.kubernetes.io/component={component}"
            print(cluster.run("logs", "-n", SYSTEM, "-l", selector, "--tail=60", "--prefix").stdout)
        raise
    finally:
        cluster.run("delete", "optimizationjobs", "--all", "-n", namespace, "--timeout=60s")
        cluster.run("delete", "namespace", namespace, "--wait=false")
        cluster.run("delete", "gpupool", POOL, "--timeout=60s")
        cluster.run("delete", "secret", POOL, "-n", SYSTEM, "--ignore-not-found")
