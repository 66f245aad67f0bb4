"""The test bed is what it says: what the other tests of this folder rest on."""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import pytest
from conftest import HOME, Cluster, Refused

RESTRICTED = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
SERVER = "import http.server as h; h.HTTPServer(('', 8080), h.SimpleHTTPRequestHandler).serve_forever()"
ASK = """
import sys, urllib.request
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=3).status)
except OSError as error:
    print(error)
"""


def pod(namespace: str, name: str, *command: str, **labels: str) -> dict[str, Any]:
    """A pod that `restricted` admits."""
    container = {
        "name": "main",
        "image": "localhost/kernelfleet-sandbox:dev",
        "imagePullPolicy": "Never",
        "command": list(command),
        "workingDir": "/tmp",
        "securityContext": RESTRICTED,
    }
    spec = {"containers": [container], "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 0}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def running(cluster: Cluster, namespace: str, name: str) -> dict[str, Any] | None:
    """The pod once its container runs."""
    found = cluster.get("pod", name, "-n", namespace)
    return found if found["status"].get("phase") == "Running" else None


def test_every_node_is_ready_and_says_the_version_that_the_modules_pin(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert nodes
    for node in nodes:
        conditions = {c["type"]: c["status"] for c in node["status"]["conditions"]}
        assert conditions["Ready"] == "True"
        if cluster.own:
            assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.34.4"


def test_pods_that_could_take_the_node_over_are_refused(cluster: Cluster) -> None:
    namespace = cluster.namespace("bed-security")
    bad = pod(namespace, "bad", "true")
    bad["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(Refused, match='violates PodSecurity "restricted'):
        cluster.apply(bad)
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_network_policy_cuts_pods_off_and_its_end_connects_them_again(images: Cluster) -> None:
    namespace = images.namespace("bed-network")
    images.apply(
        pod(namespace, "server", "python3", "-c", SERVER, app="server"),
        pod(namespace, "client", "sleep", "600", app="client"),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "server", "namespace": namespace},
            "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8080}]},
        },
    )
    for name in ("server", "client"):
        images.wait(f"pod {name} to run", 60, partial(running, images, namespace, name))
    address = images.get("service", "server", "-n", namespace)["spec"]["clusterIP"]

    def ask(url: str) -> str:
        return images.kubectl("exec", "-n", namespace, "client", "--", "python3", "-c", ASK, url).strip()

    images.wait("the Service to answer", 30, lambda: ask(f"http://{address}") == "200")
    deny = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "deny", "namespace": namespace},
        "spec": {"podSelector": {"matchLabels": {"app": "client"}}, "policyTypes": ["Egress"]},
    }
    images.apply(deny)
    images.wait("the policy to cut the client off", 30, lambda: ask(f"http://{address}") != "200")
    images.kubectl("delete", "networkpolicy", "deny", "-n", namespace)
    images.wait("the client to reach the Service again", 30, lambda: ask(f"http://{address}") == "200")
    images.kubectl("delete", "namespace", namespace, "--wait=false")


def test_every_request_is_in_the_audit_log(cluster: Cluster) -> None:
    if not cluster.own:
        pytest.skip("the audit log of a cluster given by KUBECONFIG isn't ours to read")
    name = f"bed-audited-{time.time_ns()}"
    cluster.kubectl("create", "configmap", name, "-n", "default")
    cluster.kubectl("delete", "configmap", name, "-n", "default")
    with (HOME / "state/log/audit.json").open() as file:
        events = [json.loads(line) for line in file if name in line]
    verbs = [e["verb"] for e in events if e["objectRef"]["resource"] == "configmaps"]
    assert verbs.count("create") == 1 and verbs.count("delete") == 1
    assert {e["level"] for e in events} == {"Metadata"}
