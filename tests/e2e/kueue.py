"""Kueue of its own manifests in the cluster: its controller built from its module, its webhooks for what is queued here.

Knows Kueue's manifests. Must not know what is queued.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import BED, HOME, Cluster

SYSTEM = "kueue-system"
IMAGE = "localhost/kueue:1"
# What is queued is Jobs; webhooks of other kinds would stand in the way of every pod.
WEBHOOKS = ("job", "workload", "clusterqueue", "resourceflavor", "cohort")
CONFIG = """
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
health: {healthProbeBindAddress: ":8081"}
metrics: {bindAddress: ":8443"}
webhook: {port: 9443}
leaderElection: {leaderElect: false}
featureGates: {VisibilityOnDemand: false}
integrations: {frameworks: ["batch/job"]}
"""


def module() -> Path:
    """Where the module's files are."""
    words = ["go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kueue"]
    done = subprocess.run(words, cwd=BED / "kueue", check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def image(folder: Path) -> Path:
    """An archive of an image that holds the program alone."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.add(HOME / "bin/kueue", "kueue")
    digest = hashlib.sha256(layer.getvalue()).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/kueue"], "User": "65532:65532"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    archive = folder / "kueue.tar"
    with tarfile.open(archive, "w") as tar:
        parts = {"manifest.json": json.dumps(manifest).encode(), "config.json": json.dumps(config).encode()}
        for name, content in {**parts, "layer.tar": layer.getvalue()}.items():
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    return archive


def manifests(cluster: Cluster) -> list[dict[str, Any]]:
    """The objects of Kueue's own installation, without its aggregated API."""
    text = cluster.kubectl("kustomize", str(module() / "config/default"))
    listed = cluster.kubectl("create", "-f", "-", "--dry-run=client", "-o", "json", stdin=text)
    objects: list[dict[str, Any]] = []
    place = 0
    decoder = json.JSONDecoder()
    while place < len(listed):
        found, place = decoder.raw_decode(listed, place)
        objects += found["items"] if found["kind"] == "List" else [found]
        while place < len(listed) and listed[place].isspace():
            place += 1
    kept = []
    for found in objects:
        kind, name = found["kind"], found["metadata"]["name"]
        if kind == "APIService" or "visibility" in name:
            continue
        if kind.endswith("WebhookConfiguration"):
            ours = {f"{letter}{word}.kb.io" for letter in "mv" for word in WEBHOOKS}
            found["webhooks"] = [w for w in found["webhooks"] if w["name"] in ours]
        if kind == "ConfigMap":
            found["data"] = {"controller_manager_config.yaml": CONFIG}
        if kind == "Deployment":
            (container,) = found["spec"]["template"]["spec"]["containers"]
            container |= {"image": IMAGE, "imagePullPolicy": "Never", "command": ["/kueue"]}
            container["resources"] = {"requests": {"cpu": "50m", "memory": "64Mi"}}
        kept.append(found)
    return kept


def install(cluster: Cluster, folder: Path) -> None:
    """Puts Kueue into the cluster and waits until it admits."""
    archive = image(folder)
    for socket in Path("/run/kernelfleet").glob("node*/containerd.sock"):
        words = ["ctr", "--address", str(socket), "--namespace", "k8s.io", "images", "import", str(archive)]
        subprocess.run(words, check=True, capture_output=True)
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(cluster)})
    # Their descriptions are longer than an annotation may be.
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=listed)
    try:
        cluster.kubectl(
            "rollout", "status", "-n", SYSTEM, "deployment/kueue-controller-manager", "--timeout=300s", timeout=320
        )
    except Exception:
        print(cluster.run("describe", "pods", "-n", SYSTEM).stdout)
        print(cluster.run("logs", "deployment/kueue-controller-manager", "--tail=40", "-n", SYSTEM).stdout)
        raise


def remove(cluster: Cluster) -> None:
    """Takes all of it away, its definitions too."""
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(cluster)})
    # What it would refuse while it goes is gone first.
    for kind in ("mutating", "validating"):
        cluster.run("delete", f"{kind}webhookconfiguration", "-l", "app.kubernetes.io/name=kueue", "--wait=false")
    cluster.run("delete", "-f", "-", "--ignore-not-found", "--wait=false", stdin=listed)


def retried(cluster: Cluster, *objects: dict[str, Any]) -> None:
    """Applies objects of Kueue, whose webhooks answer a moment after it is ready."""
    end = time.monotonic() + 60
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    while (done := cluster.run("apply", "-f", "-", stdin=listed)).returncode != 0:
        if time.monotonic() > end:
            pytest.fail(f"Kueue does not take its own objects: {done.stderr}", pytrace=False)
        time.sleep(1)
