"""10,000 agent pods over 200 jobs: what the operator costs, on the test bed's API server and the fake nodes of kwok.

Knows the cluster that is up (`tests/cluster`), its audit log and the operator's process. The operator, the broker, the API
server and its controllers are real; kwok says of a pod on a fake node that it runs, and no agent does. Writes
docs/evidence/scale.json, of which `tests/gpu/report.py` makes a section of docs/measurements.md.

usage: scale.py [--jobs 200] [--episodes 50] [--idle 120] [--remark WORDS]     on a fresh cluster; `make scale` does it all
With --attach the jobs are those that an earlier start of this script has made on the cluster.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".kernelfleet" / "cluster"
SYSTEM = "kernelfleet-system"
API = "kernelfleet.dev/v1alpha1"
OPERATOR = f"system:serviceaccount:{SYSTEM}:kernelfleet-operator"
WRITES = {"create", "update", "patch", "delete", "deletecollection"}
SPACES = 10
ATTEMPTS = 5
# A fake node takes as many pods as a large real one.
PODS_A_NODE = 250
KWOK = """
apiVersion: config.kwok.x-k8s.io/v1alpha1
kind: KwokConfiguration
options:
  cidr: 10.0.0.1/16
  podPlayStageParallelism: 16
  nodePlayStageParallelism: 4
  nodeLeaseParallelism: 4
  podsOnNodeSyncParallelism: 16
"""
TASK = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x) * {n}


def get_inputs():
    return [torch.randn(64, 64)]


def get_init_inputs():
    return []
"""


def kubectl(*words: str, stdin: str | None = None) -> str:
    """What a command of kubectl prints; it has to succeed."""
    command = [str(HOME / "bin/kubectl"), f"--kubeconfig={HOME / 'kubeconfig'}", *words]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def get(*words: str) -> dict[str, Any]:
    """An object, or a list of them."""
    found: dict[str, Any] = json.loads(kubectl("get", *words, "-o", "json"))
    return found


def apply(objects: list[dict[str, Any]]) -> None:
    """Creates objects."""
    kubectl("create", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))


def say(words: str) -> None:
    print(f"scale: {words}", flush=True)


def wait(what: str, seconds: float, ready: Any, every: float = 1.0) -> float:
    """Seconds until `ready` gives something true."""
    began = time.monotonic()
    while not ready():
        if time.monotonic() - began > seconds:
            sys.exit(f"scale: waited {seconds:g} s in vain for {what}")
        time.sleep(every)
    return time.monotonic() - began


class Operator:
    """The operator's process and its metrics. One that ended by itself (a machine too busy to renew its lease in time ends it)
    is followed by its successor; how often that was is evidence, too."""

    def __init__(self) -> None:
        self.restarts = 0
        self.highest = 0
        wait("the operator to run", 120, running)
        self.find()

    def find(self) -> None:
        selector = "app.kubernetes.io/component=operator"
        pods = [p for p in get("pods", "-n", SYSTEM, "-l", selector)["items"] if not gone(p)]
        (pod,) = pods
        self.name: str = pod["metadata"]["name"]
        self.address: str = pod["status"]["podIP"]
        (state,) = pod["status"]["containerStatuses"]
        self.began = parse(state["state"]["running"]["startedAt"])
        self.pid = process(state["containerID"].removeprefix("containerd://"))

    def memory(self) -> dict[str, int]:
        """Resident bytes, now and at most."""
        try:
            text = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            self.again()
            text = Path(f"/proc/{self.pid}/status").read_text()
        found = {k: int(v) * 1024 for k, v in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", text, re.MULTILINE)}
        self.highest = max(self.highest, found["VmHWM"])
        return {"now": found["VmRSS"], "most": self.highest}

    def again(self) -> None:
        """Its successor."""
        self.restarts += 1
        say("the operator ended and began again")
        wait("the operator to run again", 120, running)
        self.find()

    def cpu(self) -> float:
        """Seconds of processors used since its start."""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            self.again()
            text = Path(f"/proc/{self.pid}/stat").read_text()
        fields = text.rsplit(") ", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def reconciled(self) -> dict[str, float]:
        """Reconciliations by controller, of whatever result."""
        with urllib.request.urlopen(f"http://{self.address}:8080/metrics", timeout=10) as answer:
            text = answer.read().decode()
        count: Counter[str] = Counter()
        for controller, value in re.findall(
            r'^controller_runtime_reconcile_total\{controller="(\w+)",.*\} (\d+)', text, re.MULTILINE
        ):
            count[controller] += int(value)
        return dict(count)


def running() -> bool:
    """Whether there is one operator, and it is ready."""
    pods = get("pods", "-n", SYSTEM, "-l", "app.kubernetes.io/component=operator")["items"]
    if len(pods) != 1 or condition(pods[0], "Ready").get("status") != "True":
        return False
    (state,) = pods[0]["status"]["containerStatuses"]
    return "containerID" in state and "running" in state["state"]


def gone(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"] or pod["status"].get("phase") in ("Failed", "Succeeded")


def parse(text: str) -> float:
    """Seconds since 1970 of a time as Kubernetes writes it."""
    from datetime import datetime

    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def process(container: str) -> int:
    """The first process of a container."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if container in (entry / "cgroup").read_text() and b"operator" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    sys.exit(f"scale: no process of the container {container}; this runs on the machine of the test bed")


class Audit:
    """The API server's own record of who asked what."""

    def __init__(self, attach: bool) -> None:
        self.path = HOME / "state/log/audit.json"
        self.place = 0
        with self.path.open("rb") as log:
            for line in log:
                if attach and b'"verb":"create"' in line and b'"resource":"optimizationjobs"' in line:
                    return
                self.place += len(line)

    def since(self) -> list[dict[str, Any]]:
        """Requests that ended since the last look."""
        with self.path.open("rb") as log:
            log.seek(self.place)
            text = log.read()
        whole = text.rfind(b"\n") + 1
        self.place += whole
        return [json.loads(line) for line in text[:whole].splitlines()]


def what(event: dict[str, Any]) -> str:
    """`patch optimizationjobs/status`"""
    of = event.get("objectRef", {})
    sub = f"/{of['subresource']}" if of.get("subresource") else ""
    return f"{event['verb']} {of.get('resource', event['requestURI'].split('?')[0])}{sub}"


def count(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Requests of the operator, and writes of pods by whoever makes them. The operator's renewals of its own lease are apart."""
    # A request that was given up before its caller was known has neither.
    events = [e for e in events if "username" in e["user"] and "code" in e.get("responseStatus", {})]
    own = [e for e in events if e["user"]["username"] == OPERATOR and e["responseStatus"]["code"] < 400]
    writes = Counter(what(e) for e in own if e["verb"] in WRITES)
    leases = sum(n for w, n in writes.items() if w.endswith(" leases"))
    pods = [e for e in events if e.get("objectRef", {}).get("resource") == "pods" and e["verb"] in WRITES]
    by = Counter(f"{e['user']['username'].rsplit(':', 1)[-1]}: {what(e)}" for e in pods)
    kept = {w: n for w, n in sorted(writes.items()) if not w.endswith(" leases")}
    reads = Counter(what(e) for e in own if e["verb"] not in WRITES)
    failed = Counter(
        f"{e['responseStatus']['code']} {what(e)}"
        for e in events
        if e["user"]["username"] == OPERATOR and e["responseStatus"]["code"] >= 400
    )
    return {
        "own_writes": sum(kept.values()),
        "own_writes_by_kind": kept,
        "own_lease_writes": leases,
        "own_reads": sum(reads.values()),
        "own_reads_by_kind": dict(sorted(reads.items())),
        "own_refused": dict(sorted(failed.items())),
        "all_writes": sum(e["verb"] in WRITES for e in events),
        "pod_writes": len(pods),
        "pod_writes_by_kind": dict(sorted(by.items())),
    }


def stages() -> list[Path]:
    """What kwok does with nodes and pods: it says that they are ready, and takes away what is deleted."""
    where = ["go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok"]
    module = Path(
        subprocess.run(
            where, cwd=ROOT / "tests/cluster/kwok", check=True, capture_output=True, text=True
        ).stdout.strip()
    )
    folder = module / "kustomize/stage"
    nodes = ["node/fast/node-initialize.yaml", "node/heartbeat-with-lease/node-heartbeat-with-lease.yaml"]
    # As a kubelet does, it says again that a pod is ready after its node was not heard of for a while.
    again = (folder / "pod/fast/pod-ready.yaml").read_text()
    before, after = "      - 'Pending'\n", "      - 'Pending'\n      - 'Running'\n"
    if again.count(before) != 1:
        sys.exit("scale: kwok's stage pod-ready isn't what it was; look at stages()")
    ready = HOME / "kwok-ready.yaml"
    ready.write_text(again.replace(before, after))
    return [*(folder / name for name in nodes), ready, folder / "pod/fast/pod-delete.yaml"]


def node(number: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": f"fake-{number}",
            "annotations": {"kwok.x-k8s.io/node": "fake", "node.alpha.kubernetes.io/ttl": "0"},
            "labels": {"kernelfleet.dev/perf": "fake", "kubernetes.io/hostname": f"fake-{number}"},
        },
        "status": {
            "allocatable": {"cpu": "1000", "memory": "1Ti", "pods": str(PODS_A_NODE)},
            "capacity": {"cpu": "1000", "memory": "1Ti", "pods": str(PODS_A_NODE)},
        },
    }


def job(number: int, episodes: int) -> dict[str, Any]:
    tasks = [{"name": f"task-{n}", "source": TASK.format(n=n)} for n in range(episodes // ATTEMPTS)]
    return {
        "apiVersion": API,
        "kind": "OptimizationJob",
        "metadata": {"name": f"scale-{number}", "namespace": f"scale-{number % SPACES}"},
        "spec": {
            "tasks": {"inline": tasks},
            "policy": {"builtin": {}},
            "judge": {"gpuPool": "scale"},
            "agent": {
                "attempts": ATTEMPTS,
                "scheduling": {"nodeSelector": {"kernelfleet.dev/perf": "fake"}},
            },
        },
    }


def ready_pool() -> bool:
    pool = get("gpupool", "scale")
    conditions = {c["type"]: c["reason"] for c in pool.get("status", {}).get("conditions", [])}
    # No judge: no agent asks for one.
    return conditions.get("Ready") == "NoJudges"


def made(found: list[dict[str, Any]]) -> float:
    """When the last of some objects was made."""
    return max((parse(f["metadata"]["creationTimestamp"]) for f in found), default=0.0)


def begin(options: argparse.Namespace, pods: int) -> None:
    """The pool, kwok's nodes and the namespaces."""
    spec = {"device": "cpu", "replicas": 0}
    apply([{"apiVersion": API, "kind": "GpuPool", "metadata": {"name": "scale"}, "spec": spec}])
    wait("the pool's broker", 180, ready_pool)
    fakes = [node(n) for n in range(-(-pods // PODS_A_NODE) + 1)]
    apply(fakes)

    def ready_nodes() -> bool:
        nodes = get("nodes", "-l", "kernelfleet.dev/perf=fake")["items"]
        ready = [n for n in nodes if {"type": "Ready", "status": "True"}.items() <= condition(n, "Ready").items()]
        return len(ready) == len(fakes)

    wait("kwok's nodes", 60, ready_nodes)
    apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": f"scale-{n}"}} for n in range(SPACES)])


def measure(options: argparse.Namespace, kwok: subprocess.Popen[bytes]) -> dict[str, Any]:
    pods = options.jobs * options.episodes
    if not options.attach:
        begin(options, pods)
    operator = Operator()
    # Of a start that is over already nobody knows what the operator had used before.
    before = None if options.attach else operator.memory()["now"]
    cpu = None if options.attach else operator.cpu()
    audit = Audit(options.attach)
    if not options.attach:
        jobs = [job(n, options.episodes) for n in range(options.jobs)]
        for first in range(0, len(jobs), 50):
            apply(jobs[first : first + 50])

    def progress() -> bool:
        if kwok.poll() is not None:
            sys.exit(f"scale: kwok ended: {(HOME / 'kwok.log').read_text()[-2000:]}")
        batches = get("jobs", "-A", "-l", "app.kubernetes.io/component=agent")["items"]
        active = sum(b.get("status", {}).get("active", 0) for b in batches)
        running = sum(b.get("status", {}).get("ready", 0) for b in batches)
        operator.memory()
        say(f"{len(batches)} Jobs, {active} pods, {running} of them run")
        return len(batches) >= options.jobs and (running if not options.made else active) >= pods

    wait("all pods to run", 3000, progress, every=15.0)
    ran = time.time()
    # By the objects' own times, which are whole seconds.
    jobs_of = get("optimizationjobs", "-A")["items"]
    earliest = min(parse(j["metadata"]["creationTimestamp"]) for j in jobs_of)
    agents = ("-A", "-l", "app.kubernetes.io/component=agent")
    marks = {
        "applied": made(jobs_of) - earliest,
        "jobs_made": made(get("jobs", *agents)["items"]) - earliest,
        "pods_made": made(get("pods", *agents)["items"]) - earliest,
        # Looked at every 15 s.
        "pods_running": None if options.made else round(ran - earliest),
    }
    say(f"seconds: {marks}")
    # What the last pods set off, and the figures that follow half a minute later.
    time.sleep(75 if not options.made else 5)
    start = count(audit.since())
    start_cpu = None if cpu is None or operator.restarts else round(operator.cpu() - cpu, 1)
    memory = operator.memory()
    say(f"own writes an episode: {start['own_writes'] / pods:.4f}; operator at most {memory['most'] >> 20} MiB")

    cpu, passes, at = operator.cpu(), operator.reconciled(), time.monotonic()
    time.sleep(options.idle)
    seconds = time.monotonic() - at
    idle: dict[str, Any] = count(audit.since())
    idle |= {
        "all_run": not options.made,
        "seconds": round(seconds, 1),
        "cpu_share": round((operator.cpu() - cpu) / seconds, 4),
        "reconciliations_a_second": {
            k: round((n - passes.get(k, 0)) / seconds, 3) for k, n in sorted(operator.reconciled().items())
        },
        "memory": operator.memory(),
    }
    say(f"idle: {idle['cpu_share'] * 100:.1f} % of a core, {idle['own_writes']} writes in {seconds:.0f} s")

    # On a fake node it would be said to run, and wouldn't.
    kubectl("cordon", "-l", "kernelfleet.dev/perf=fake")
    kubectl("delete", "pod", "-n", SYSTEM, operator.name, "--wait=true")
    wait("the new operator", 120, running, every=0.5)
    fresh = Operator()
    wait(
        "every job to be seen by the new operator",
        600,
        lambda: fresh.reconciled().get("optimizationjob", 0) >= options.jobs,
        every=0.5,
    )
    restarted = time.time() - fresh.began
    time.sleep(30)
    again = count(audit.since())
    say(f"restart: every job seen after {restarted:.1f} s, {again['own_writes']} writes")
    return {
        "jobs": options.jobs,
        "episodes_a_job": options.episodes,
        "pods": pods,
        "fake_nodes": len(get("nodes", "-l", "kernelfleet.dev/perf=fake")["items"]),
        "limits": limits(),
        "seconds": marks,
        "own_writes_an_episode": round(start["own_writes"] / pods, 4),
        "pod_writes_a_pod": round(start["pod_writes"] / pods, 2),
        "all_writes_a_pod": round(start["all_writes"] / pods, 2),
        "restarts_by_itself": operator.restarts,
        "memory_bytes": {"at_rest": before, "at_most": memory["most"]},
        "start": {**start, "cpu_seconds": start_cpu},
        "idle": idle,
        "restart": {"seconds": round(restarted, 1), "memory": fresh.memory(), **again},
    }


def condition(found: dict[str, Any], kind: str) -> dict[str, Any]:
    return next((c for c in found.get("status", {}).get("conditions", []) if c["type"] == kind), {})


def limits() -> dict[str, str]:
    """What slows whom down."""
    spec = get("deployments", "-n", SYSTEM, "kernelfleet-operator")["spec"]["template"]["spec"]
    workers = next(a for a in spec["containers"][0]["args"] if a.startswith("--workers"))
    qps = os.environ.get("KERNELFLEET_CLUSTER_QPS")
    words = f"{qps} requests/s, {2 * int(qps)} at once" if qps else "its own default"
    return {
        "operator": f"no limit of requests a second on the client's side, {workers.removeprefix('--workers=')} workers a kind",
        "controller manager": words,
        "scheduler": words,
        "kwok": "16 pods at once",
    }


def program() -> dict[str, Any]:
    """Which build runs as the operator."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {"commit": commit.stdout.strip()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=50, help=f"a job; a multiple of {ATTEMPTS}")
    parser.add_argument("--idle", type=int, default=120, help="seconds that are watched once all pods run")
    parser.add_argument("--build", default="release", help="what the images hold: release or debug")
    parser.add_argument("--attach", action="store_true", help="the jobs are there already")
    parser.add_argument(
        "--made", action="store_true", help="go on once all pods are made, though kwok hasn't said of all that they run"
    )
    parser.add_argument("--remark", default="", help="goes into the evidence")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/evidence/scale.json")
    options = parser.parse_args()
    if options.episodes % ATTEMPTS:
        parser.error(f"--episodes is a multiple of {ATTEMPTS}")
    if not (HOME / "kubeconfig").is_file():
        sys.exit("scale: no cluster is up: make scale, or make cluster first")
    subprocess.run([ROOT / "tests/cluster/build.sh", "kwok"], check=True)
    began = time.monotonic()
    words = ["--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake", "--node-lease-duration-seconds=40"]
    rate = HOME / "kwok.yaml"
    rate.write_text(KWOK)
    words += [f"--config={path}" for path in [rate, *stages()]]
    with (HOME / "kwok.log").open("wb") as log:
        kwok = subprocess.Popen(
            [HOME / "bin/kwok", f"--kubeconfig={HOME / 'kubeconfig'}", *words], stdout=log, stderr=log
        )
    # Ended from outside, it takes kwok with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("scale: ended"))
    try:
        result = measure(options, kwok)
    finally:
        kwok.terminate()
    memory = re.search(r"^MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    evidence = {
        "stage": "scale",
        "command": f"make scale (tests/perf/scale.py --jobs {options.jobs} --episodes {options.episodes})",
        **program(),
        "build": options.build,
        "machine": f"{os.cpu_count()} cores, {int(memory.group(1)) >> 20 if memory else 0} GiB",
        "load_average": [round(x, 1) for x in os.getloadavg()],
        "remark": options.remark,
        "wall_seconds": round(time.monotonic() - began, 1),
        "result": result,
    }
    options.output.write_text(json.dumps(evidence, indent=1) + "\n")
    say(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
