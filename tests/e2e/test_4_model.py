"""An episode of a model on the real node: what its sandbox can't reach, and what its key never meets.

The model is a script behind a real HTTP server on the machine; everything between it and the sandbox is the cluster's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from conftest import SYSTEM, Cluster
from work import FUSED, Jobs, condition, job

# The machine's address on the bridge that the nodes hang on.
HOST = "10.77.0.1"
KEY = "sk-secret-of-the-endpoint"
# A command of the model, under the sandbox's filter: every family of sockets but one is refused.
INSIDE = """python3 - <<'P'
import os, socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET):
    try:
        socket.socket(family, socket.SOCK_RAW if family == socket.AF_PACKET else socket.SOCK_DGRAM)
        print("OPEN", int(family))
    except OSError as error:
        print("refused", int(family), error.errno)
for path in ("utils/compile.sh", "utils/new.py"):
    try:
        open(path, "a").write("x")
        print("WROTE", path)
    except OSError as error:
        print("refused", path, error.errno)
print("secrets", os.path.exists("/var/run/secrets"), [k for k in os.environ if "TOKEN" in k or "KEY" in k])
P"""
# Under the filter as a command of the model, or from the container without it, as if it had been broken.
CONNECT = """
import socket, sys
for target in sys.argv[1:]:
    host, port = target.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=3).close()
        print(target, "open")
    except PermissionError as error:
        print(target, "forbidden")
    except OSError as error:
        print(target, "closed")
"""
ASK = """
import sys, urllib.request, urllib.error
try:
    print(urllib.request.urlopen(sys.argv[1], timeout=5).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""


class Script:
    """Says a command, then, each time when it is let go, another one and that it is done."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.command = "true"
        self.go = threading.Semaphore(0)
        script = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                script.requests.append(body)
                script.keys.append(self.headers.get("authorization", ""))
                number = len(script.requests)
                if number > 1:
                    script.go.acquire(timeout=170)
                answer = json.dumps(script.answer(number)).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer((HOST, 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server.server_address[1]}/v1"

    def answer(self, number: int) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "No kernel of mine is better."}
        if number <= 2:
            command = INSIDE if number == 1 else self.command
            function = {"name": "Bash", "arguments": json.dumps({"command": command})}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"c{number}", "type": "function", "function": function}],
            }
        return {
            "id": f"a{number}",
            "object": "chat.completion",
            "model": "scripted",
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if number <= 2 else "stop"}],
            "usage": {"prompt_tokens": 1000, "completion_tokens": 20, "total_tokens": 1020},
        }


@pytest.fixture(scope="module")
def model(installed: Cluster) -> Iterator[Script]:
    """The scripted model; a cluster elsewhere can't reach it."""
    if not installed.own:
        pytest.skip("the model runs on this machine, which a cluster given by KUBECONFIG may not reach")
    script = Script()
    yield script
    script.go.release(9)
    script.server.shutdown()


@pytest.fixture(scope="module")
def episode(installed: Cluster, pool: str, model: Script) -> Iterator[tuple[Jobs, dict[str, Any]]]:
    """A job of the model, at the point where the model has seen what its command printed and hasn't answered yet."""
    namespace = installed.namespace("e2e-model")
    jobs = Jobs(installed, namespace)
    installed.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "key", "namespace": namespace},
            "stringData": {"api-key": KEY},
        },
        {
            "apiVersion": "kernelfleet.dev/v1alpha1",
            "kind": "ModelEndpoint",
            "metadata": {"name": "scripted", "namespace": namespace},
            "spec": {
                "baseUrl": model.url,
                "apiKeySecret": {"name": "key"},
                "models": [{"name": "scripted"}],
                "stream": False,
            },
        },
        job(
            namespace,
            "asked",
            pool,
            tasks={"inline": [{"name": "fused", "source": FUSED}]},
            policy={"endpoint": {"name": "scripted", "model": "scripted"}},
            agent={"maxTurns": 4, "resources": {"cpu": "100m", "memory": "1Gi", "ephemeralStorage": "1Gi"}},
        ),
    )
    try:
        installed.wait("the model to be asked twice", 240, lambda: len(model.requests) >= 2)
    except pytest.fail.Exception:
        jobs.tell("asked")
        print(installed.run("describe", "modelendpoint", "scripted", "-n", namespace).stdout)
        print(installed.run("describe", "pods", "-n", namespace).stdout)
        raise
    (pod,) = jobs.pods("asked")
    yield jobs, pod
    model.go.release(9)
    installed.kubectl("delete", "optimizationjobs,modelendpoints", "--all", "-n", namespace, "--timeout=60s")
    installed.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_command_of_the_model_opens_no_socket_sees_no_secret_and_changes_no_tool(
    episode: tuple[Jobs, dict[str, Any]], model: Script
) -> None:
    del episode
    said = json.dumps(model.requests[1]["messages"][-1])
    assert "OPEN" not in said and "WROTE" not in said, said
    assert said.count("refused") == 6, said
    assert "secrets False []" in said, said


def test_the_key_is_the_gateways_alone(episode: tuple[Jobs, dict[str, Any]], model: Script) -> None:
    jobs, pod = episode
    assert set(model.keys) == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(pod)
    assert not [v for v in pod["spec"]["volumes"] if "secret" in v]


class Network:
    """What of the cluster a pod could reach."""

    def __init__(self, jobs: Jobs, pod: dict[str, Any]) -> None:
        self.jobs, self.name = jobs, pod["metadata"]["name"]
        (agent,) = (c for c in pod["spec"]["containers"] if c["name"] == "agent")
        env = {e["name"]: e.get("value", "") for e in agent["env"]}
        self.broker = env["KERNELFLEET_BROKER"].removeprefix("https://")
        self.gateway = env["KERNELFLEET_GATEWAY"].removeprefix("http://").removesuffix("/v1")
        judges = jobs.cluster.get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=judge")["items"]
        judge = judges[0]["status"]["podIP"]
        # The gateway's metrics are no agent's.
        metrics = self.gateway.rsplit(":", 1)[0] + ":8081"
        self.others = [metrics, "10.96.0.1:443", f"{HOST}:6443", "10.77.0.11:10250", f"{judge}:8081"]

    def inside(self, *words: str) -> str:
        """A program in the sandbox's container and not under its filter."""
        where = ("-n", self.jobs.namespace, self.name, "-c", "sandbox")
        done = self.jobs.cluster.run("exec", *where, "--", *words)
        return done.stdout + done.stderr

    def lines(self) -> list[str]:
        """Which targets are open to the container."""
        return self.inside("python3", "-c", CONNECT, self.broker, self.gateway, *self.others).splitlines()


def test_without_its_filter_the_sandbox_reaches_broker_and_gateway_and_nothing_else(
    episode: tuple[Jobs, dict[str, Any]],
) -> None:
    network = Network(*episode)
    reached = [f"{network.broker} open", f"{network.gateway} open"]
    assert network.lines() == [*reached, *(f"{other} closed" for other in network.others)]


def test_broker_and_gateway_refuse_the_sandbox(episode: tuple[Jobs, dict[str, Any]]) -> None:
    network = Network(*episode)
    assert network.inside("python3", "-c", ASK, f"http://{network.gateway}/v1/models").strip() == "401"
    # The program that an agent asks the broker by, with a token that is none: what a sandbox could bring.
    jobs, _ = episode
    (volume,) = (v for v in episode[1]["spec"]["volumes"] if v["name"] == "ca")
    authority = jobs.cluster.get("configmap", volume["configMap"]["name"], "-n", jobs.namespace)["data"]["ca.crt"]
    ask = 'echo mine >/tmp/token; exec kernelfleet agent --broker "$1" --broker-ca="$2" --broker-token-file /tmp/token'
    said = network.inside("sh", "-c", ask, "sh", f"https://{network.broker}", authority)
    assert "the broker refuses `begin`" in said, said


def test_under_its_filter_the_sandbox_reaches_nothing_even_without_the_network_policy(
    episode: tuple[Jobs, dict[str, Any]], model: Script
) -> None:
    jobs, _ = episode
    network, cluster = Network(*episode), jobs.cluster
    operator = ("deployment", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")
    (deployment,) = cluster.get(*operator)["items"]
    scale = ("scale", "deployment", deployment["metadata"]["name"], "-n", SYSTEM)
    policies = ("networkpolicies", "-n", jobs.namespace)
    before = len(cluster.get(*policies)["items"])
    assert before
    # It would put them back at once.
    cluster.kubectl(*scale, "--replicas=0")
    gone = ("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")
    try:
        cluster.wait("the operator to be gone", 60, lambda: not cluster.get(*gone)["items"])
        cluster.kubectl("delete", *policies, "--all")
        everything = [f"{target} open" for target in (network.broker, network.gateway, *network.others)]
        cluster.wait("nothing to hold the container back", 60, lambda: network.lines() == everything)
        targets = (network.broker, network.gateway, *network.others)
        model.command = f"python3 - {' '.join(targets)} <<'P'\n{CONNECT}P"
        model.go.release()
        cluster.wait("the model to be told what its second command printed", 60, lambda: len(model.requests) >= 3)
        said = model.requests[2]["messages"][-1]["content"]
        assert [line for line in said.splitlines() if line.endswith(("open", "closed", "forbidden"))] == [
            f"{target} forbidden" for target in targets
        ], said
    finally:
        cluster.kubectl(*scale, f"--replicas={deployment['spec']['replicas']}")
        cluster.kubectl("rollout", "status", "deployment", deployment["metadata"]["name"], "-n", SYSTEM)
    cluster.wait("the policies to come back", 60, lambda: len(cluster.get(*policies)["items"]) == before)


def test_the_sandbox_has_no_token_and_no_capability(episode: tuple[Jobs, dict[str, Any]]) -> None:
    jobs, pod = episode
    look = "ls /var/run/secrets /run/secrets; grep CapEff /proc/1/status; touch /usr/x /workspace/utils/x; id -u"
    done = jobs.cluster.run(
        "exec", "-n", jobs.namespace, pod["metadata"]["name"], "-c", "sandbox", "--", "sh", "-c", look
    )
    assert "token" not in done.stdout
    assert "CapEff:\t0000000000000000" in done.stdout
    assert done.stderr.count("Read-only file system") == 2, done.stderr
    assert done.stdout.split()[-1] != "0"


def test_an_episode_without_a_kernel_ends_as_what_it_is(episode: tuple[Jobs, dict[str, Any]], model: Script) -> None:
    jobs, _ = episode
    # It is told where it stands and says so once more.
    model.go.release(9)
    found = jobs.until("asked", "Succeeded", "True", seconds=120)
    assert found["status"]["correct"] == 0
    assert found["status"]["tokens"]["written"] >= 40
    assert condition(found, "Failed").get("status") != "True"
