"""A real cluster for the tests of this folder: brought up once, taken down at the end.

Knows how the cluster is started and asked. Must not know what is tested. With ``KUBECONFIG`` set the tests run on that
cluster instead, with the images and the chart that are there; a cluster that ``make cluster`` left up is used and kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from api import Api, Missing, Refused

ROOT = Path(__file__).resolve().parents[2]
BED = ROOT / "tests" / "cluster"
HOME = ROOT / ".kernelfleet" / "cluster"
# Where the chart is.
SYSTEM = "kernelfleet-system"
PACKAGES = "/opt/kernelfleet/python/lib/python3.11/site-packages"
# Whether the images and the chart of a cluster that was kept are to be left as they are.
INSTALLED = bool(os.environ.get("KERNELFLEET_INSTALLED"))
# What up.sh and images.sh ask for, with the Debian package that brings it.
NEEDED = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "ipset": "ipset",
    "ip": "iproute2",
    "openssl": "openssl",
    "buildah": "buildah",
    "mmdebstrap": "mmdebstrap",
    "strip": "binutils",
    "go": "golang (1.26.8 or later)",
}


class Cluster:
    """A cluster, asked through kubectl, and read without a start of it."""

    def __init__(self, kubeconfig: Path, kubectl: str, own: bool) -> None:
        self.kubeconfig = kubeconfig
        self.program = kubectl
        self.api = Api(kubectl, kubeconfig)
        # Of this checkout's test bed, so that its nodes' processes and files can be reached.
        self.own = own

    def run(self, *words: str, stdin: str | None = None, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A command of kubectl, whatever becomes of it."""
        return subprocess.run(
            [self.program, f"--kubeconfig={self.kubeconfig}", *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def kubectl(self, *words: str, stdin: str | None = None, timeout: float = 120) -> str:
        """What a command of kubectl prints; it has to succeed."""
        done = self.run(*words, stdin=stdin, timeout=timeout)
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        return done.stdout

    def apply(self, *objects: dict[str, Any]) -> None:
        """Applies objects; `Refused` with the server's words if it doesn't take one."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))

    def apply_dry(self, *objects: dict[str, Any]) -> None:
        """As `apply`, through admission and no further."""
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=listed)

    def get(self, *words: str) -> dict[str, Any]:
        """An object, or a list of them, as JSON."""
        return self.api.get(*words)

    def find(self, *words: str) -> dict[str, Any] | None:
        """As `get`, or nothing where there is no such object."""
        try:
            return self.api.get(*words)
        except Missing:
            return None

    def wait(self, what: str, seconds: float, ready: Callable[[], Any]) -> Any:
        """What `ready` gives as soon as that is truthy; says what it waited for if it never is."""
        start = time.monotonic()
        end = start + seconds
        while True:
            found = ready()
            if found:
                if time.monotonic() - start > 5:
                    print(f"\n{time.monotonic() - start:.0f} s until {what}", flush=True)
                return found
            if time.monotonic() > end:
                pytest.fail(f"waited {seconds:g} s in vain for {what}; last seen: {found!r}", pytrace=False)
            # What takes a while isn't asked for as often.
            time.sleep(min(1.0, 0.2 + 0.05 * (time.monotonic() - start)))

    def namespace(self, name: str, **labels: str) -> str:
        """A namespace that pods can be made in, enforcing `restricted` as an agent's does."""
        enforce = {"pod-security.kubernetes.io/enforce": "restricted", **labels}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": enforce}})
        self.wait(
            f"the default service account of {name}", 30, lambda: self.find("serviceaccount", "default", "-n", name)
        )
        return name


def missing() -> str | None:
    """Why this machine can't have a cluster."""
    if os.getuid() != 0:
        return "a cluster needs root"
    packages = [package for program, package in NEEDED.items() if shutil.which(program) is None]
    if packages:
        return f"a cluster needs these Debian packages: {' '.join(packages)}"
    bridge = "mount -t tmpfs none /mnt && ip link add kfprobe type bridge && ip link del kfprobe"
    probe = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", bridge], capture_output=True, text=True)
    refusal = probe.stderr.strip()
    return (
        f"a cluster needs network and mount namespaces, and this machine says: {refusal}" if probe.returncode else None
    )


def program() -> Path:
    """The program that the images get: the one named, else the newest that was built."""
    named = os.environ.get("KERNELFLEET_PROGRAM")
    if named:
        return Path(named)
    built = [p for p in (ROOT / "target/debug/kernelfleet", ROOT / "target/release/kernelfleet") if p.is_file()]
    if not built:
        pytest.fail("no program to make images of: make build", pytrace=False)
    return max(built, key=lambda p: p.stat().st_mtime)


def attempt(name: str, *words: str | Path) -> str | None:
    """Runs one of the test bed's scripts; its output is the test run's as it comes. If it fails, its last words."""
    last: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        [BED / name, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last.append(line)
            print(line, end="", flush=True)
    return f"tests/cluster/{name} failed:\n{''.join(last)}" if process.returncode else None


def script(name: str, *words: str | Path) -> None:
    """One of the test bed's scripts, which has to succeed."""
    words_of_it = attempt(name, *words)
    if words_of_it:
        pytest.fail(words_of_it, pytrace=False)


def prepare(name: str, *words: str | Path) -> None:
    """As `script`, for what depends on the machine and its network: where it fails there is no cluster to test on, which
    the count of skipped tests says. Under CI that is a failure."""
    words_of_it = attempt(name, *words)
    if words_of_it and os.environ.get("CI"):
        pytest.fail(words_of_it, pytrace=False)
    elif words_of_it:
        pytest.skip(f"this machine has no cluster: {words_of_it}")


def traces() -> dict[str, set[str]]:
    """What a cluster could leave on the machine, by kind."""

    def lines(*command: str) -> set[str]:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {line for line in text.splitlines() if not line.startswith("#")}

    # What runs in a namespace of processes of its own is another test's, or a pod's, which goes with its node.
    commands, ours = [], os.stat("/proc/self/ns/pid").st_ino
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "ns/pid").stat().st_ino == ours:
                commands.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return {
        "processes": {c for c in commands if f"{HOME}/bin/" in c or "/run/kernelfleet/node" in c},
        "links": {line.split(": ")[1] for line in lines("ip", "-o", "link")},
        "routes": lines("ip", "route"),
        "network namespaces": lines("ip", "netns"),
        "mounts": {line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()},
        "filters": {line.split(" [")[0] for line in lines("iptables-save")},
        "address sets": lines("ipset", "list", "-n"),
        # Others' go while they are looked at.
        "cgroups": {folder for folder, _, _ in os.walk("/sys/fs/cgroup") if folder.endswith("/kernelfleet")},
        "files": {p for p in ("/run/kernelfleet", "/var/lib/kubelet", str(HOME / "state")) if Path(p).exists()},
    }


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, without images."""
    given = os.environ.get("KUBECONFIG")
    if given:
        other = Cluster(Path(given), shutil.which("kubectl") or str(HOME / "bin/kubectl"), own=False)
        yield other
        other.api.close()
        return
    reason = missing()
    if reason:
        pytest.skip(reason)
    prepare("build.sh")
    kept = (HOME / "kubeconfig").is_file() or bool(os.environ.get("KERNELFLEET_KEEP_CLUSTER"))
    before = traces()
    found: Cluster | None = None
    try:
        prepare("up.sh", os.environ.get("KERNELFLEET_NODES", "1"))
        found = Cluster(HOME / "kubeconfig", str(HOME / "bin/kubectl"), own=True)
        yield found
    finally:
        if found is not None:
            found.api.close()
        if not kept:
            script("down.sh")
    if not kept:
        left = {kind: found - before[kind] for kind, found in traces().items() if found - before[kind]}
        # An error of this fixture is a failure of the run.
        assert not left, f"down.sh left something: {left}"


@pytest.fixture(scope="session")
def images(cluster: Cluster) -> Cluster:
    """The cluster with this checkout's images."""
    if cluster.own and not INSTALLED:
        prepare("images.sh", program())
    return cluster


@pytest.fixture(scope="session")
def installed(images: Cluster) -> Cluster:
    """The cluster with this checkout's chart."""
    if images.own and not INSTALLED:
        script("install.sh")
    return images


# How fast a kernel is on a machine under test, is no matter; threads that wait leave the processors to others.
MEASURED_BRIEFLY = [
    {"name": "KERNELFLEET_MEASURE_SECONDS", "value": "1"},
    {"name": "OMP_WAIT_POLICY", "value": "passive"},
]


def judges(claim: str) -> dict[str, Any]:
    """What a pool lays over its judges where the image has no PyTorch."""
    mount = {"name": "pytorch", "mountPath": PACKAGES, "readOnly": True}
    volume = {"name": "pytorch", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
    judge = {"name": "judge", "volumeMounts": [mount], "env": MEASURED_BRIEFLY}
    return {"spec": {"containers": [judge], "volumes": [volume]}}


@pytest.fixture(scope="session")
def pool(installed: Cluster) -> str:
    """A pool of one judge on the CPU, ready; its ledger outlives the broker's pod."""
    # On two cores with neighbours a measurement takes minutes.
    spec: dict[str, Any] = {"device": "cpu", "slices": {"maxSeconds": 1200, "maxExclusiveSeconds": 600}}
    if installed.own:
        # The pool that a person is told to apply.
        example = ROOT / "examples" / "cluster" / "test-bed.yaml"
        spec = json.loads(installed.kubectl("create", "--dry-run=client", "-o", "json", "-f", str(example)))["spec"]
        spec["podTemplate"]["spec"]["containers"][0]["env"] = MEASURED_BRIEFLY
    installed.apply(
        {"apiVersion": "kernelfleet.dev/v1alpha1", "kind": "GpuPool", "metadata": {"name": "e2e"}, "spec": spec}
    )

    def ready() -> bool:
        conditions = installed.get("gpupool", "e2e").get("status", {}).get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    try:
        installed.wait("the pool's broker and judge to be ready", 420, ready)
    except pytest.fail.Exception:
        for words in (("describe", "gpupool", "e2e"), ("describe", "pods", "-n", SYSTEM), ("events", "-n", SYSTEM)):
            print(installed.run(*words).stdout)
        for component in ("operator", "broker", "judge"):
            selector = f"app.kubernetes.io/component={component}"
            print(installed.run("logs", "-n", SYSTEM, "-l", selector, "--tail=60", "--prefix").stdout)
        raise
    return "e2e"


@pytest.fixture(scope="session")
def jobs(installed: Cluster) -> Iterator[Any]:
    """The jobs of a namespace that enforces `restricted`; they stay until all tests are through."""
    from work import passing

    yield from passing(installed, "e2e-jobs")
