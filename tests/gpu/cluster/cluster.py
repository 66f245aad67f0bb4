"""The operator with a pool of cards: the test bed's cluster on a machine with a card, two jobs over KernelBench's tasks.

As root, on a machine with an NVIDIA card, PyTorch, nvcc and a compiler, from the folder that pack.sh made. Python, PyTorch and the
compilers are the machine's own: volumes on its folders, since `baseline` forbids pods to name one. The card comes by a device
plugin. What the jobs came to, the slices as the ledger has them, and the same candidates judged in local mode are the result.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PACKED = Path(os.environ.get("KERNELFLEET_CARD", ROOT / ".kernelfleet/card"))
HOME = ROOT / ".kernelfleet/cluster"
TOOLS = Path("/opt/kernelfleet-bed")
SYSTEM = "kernelfleet-system"
KUBECONFIG = HOME / "kubeconfig"
SOCKET = "/run/kernelfleet/node1/containerd.sock"
TASKS = (
    "level1/95_CrossEntropyLoss",
    "level1/88_MinGPTNewGelu",
    "level1/17_Matmul_with_transposed_B",
    "level1/82_conv_depthwise_2D_square_input_square_kernel",
    "level1/100_HingeLoss",
    "level1/10_3D_tensor_matrix_multiplication",
    "level1/40_LayerNorm",
    "level1/2_Standard_matrix_multiplication_",
    "level2/65_Conv2d_AvgPool_Sigmoid_Sum",
    "level2/37_Matmul_Swish_Sum_GroupNorm",
)
JOBS = ("team-a", "team-b")
DEVICE = {"device": "cuda", "arch": "sm_90"}
# Folders of the machine that judges see at the same place.
FOLDERS = {"usr": "/usr", "torch": "/opt/torch"}


def say(text: str) -> None:
    """A line with the time since the start."""
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


START = time.monotonic()


def run(*words: str | Path, check: bool = True, given: str | None = None, seconds: float = 300) -> str:
    """Output of a command; what failed is shown."""
    done = subprocess.run([str(w) for w in words], input=given, capture_output=True, text=True, timeout=seconds)
    if check and done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, words))[:300]} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def kubectl(*words: str | Path, **more: Any) -> str:
    """`kubectl` of the cluster."""
    return run(HOME / "bin/kubectl", f"--kubeconfig={KUBECONFIG}", *words, **more)


def apply(*objects: dict[str, Any]) -> None:
    """Applies objects."""
    whole = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(whole))


def until(what: str, seconds: float, there: Callable[[], Any]) -> Any:
    """The first true answer."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = there()
        if found:
            say(what)
            return found
        time.sleep(0.5)
    told()
    raise SystemExit(f"waited {seconds:.0f} s in vain for {what}")


def told() -> None:
    """What a person would look at."""
    for words in (
        ("get", "pods", "-A", "-o", "wide"),
        ("get", "gpupools,optimizationjobs", "-A", "-o", "yaml"),
        ("events", "-A"),
    ):
        print(kubectl(*words, check=False)[-6000:])
    for component in ("operator", "broker", "judge", "agent"):
        selector = f"app.kubernetes.io/component={component}"
        print(kubectl("logs", "-n", SYSTEM, "-l", selector, "--tail=30", "--prefix", check=False)[-4000:])
    for log in ("node1-containerd", "node1-kubelet", "node1-proxy", "card"):
        path = HOME / "state/log" / log
        if path.exists():
            print(f"== {log}\n{path.read_text(errors='replace')[-2500:]}")


def unpack() -> None:
    """Programs at their places; those of Debian behind scripts that show them their own libraries."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(["xz", "-dc", PACKED / "programs.tar.xz"], stdout=subprocess.PIPE) as xz:
        run_tar = subprocess.run(["tar", "-C", TOOLS, "-xf", "-"], stdin=xz.stdout, check=True)
        assert run_tar.returncode == 0
    (HOME / "bin").mkdir(parents=True, exist_ok=True)
    for program in (TOOLS / "bin").iterdir():
        # One that runs can't be written to, but replaced.
        (HOME / "bin" / program.name).unlink(missing_ok=True)
        shutil.copy2(program, HOME / "bin" / program.name)
    link = HOME / "bin/kubectl"
    link.unlink(missing_ok=True)
    link.symlink_to("kube")
    debian = TOOLS / "debian"
    libraries = ":".join(str(debian / d) for d in ("usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"))
    scripts = TOOLS / "path"
    scripts.mkdir(exist_ok=True)
    found: dict[str, Path] = {}
    for folder in ("bin", "sbin", "usr/bin", "usr/sbin"):
        for program in sorted((debian / folder).glob("*")) if (debian / folder).is_dir() else []:
            # An absolute link names a place of the system that the package is made for.
            inside = program.is_symlink() and os.readlink(program).startswith("/")
            found[program.name] = debian / os.readlink(program).lstrip("/") if inside else program
    # What `iptables` is, Debian decides by links that its installer makes.
    flavour = "xtables-legacy-multi" if works(found["xtables-legacy-multi"], libraries, debian) else "xtables-nft-multi"
    say(f"filters by {flavour}")
    for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"):
        found[name] = found[flavour]
    for name, program in found.items():
        if name.startswith("containerd") or name in ("ctr", "runc"):
            lines = f'exec {program} "$@"\n'
        else:
            lines = f'export LD_LIBRARY_PATH={libraries} XTABLES_LIBDIR={debian}/usr/lib/x86_64-linux-gnu/xtables\nexec -a {name} {program} "$@"\n'
        (scripts / name).write_text(f"#!/bin/bash\n{lines}")
        (scripts / name).chmod(0o755)
    os.environ["PATH"] = f"{scripts}:{os.environ['PATH']}"


def works(program: Path, libraries: str, debian: Path) -> bool:
    """Whether this flavour of iptables takes the rules that kube-proxy writes, in a network namespace of its own."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": libraries,
        "XTABLES_LIBDIR": f"{debian}/usr/lib/x86_64-linux-gnu/xtables",
    }
    rule = "iptables -t nat -A POSTROUTING -m comment --comment x -m mark ! --mark 0x4000/0x4000 -j RETURN"
    balance = "iptables -t nat -A PREROUTING -m statistic --mode random --probability 0.5 -j MARK --or-mark 0x4000"
    cloak = "iptables -t nat -A POSTROUTING -j MASQUERADE --random-fully"
    line = " && ".join(one.replace("iptables", f"{program} iptables", 1) for one in (rule, balance, cloak))
    done = subprocess.run(["unshare", "--net", "bash", "-c", line], env=environment, capture_output=True, text=True)
    if done.returncode:
        say(f"{program.name} won't do: {done.stderr.strip()[-300:]}")
    return done.returncode == 0


def image(name: str, files: dict[str, Path], links: dict[str, str], environment: dict[str, str]) -> None:
    """An image of files of this machine, into the node's containerd."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w", dereference=True) as archive:
        for folder in (
            "tmp",
            "usr",
            "opt",
            "opt/torch",
            "proc",
            "sys",
            "dev",
            "var",
            "var/cache",
            "run",
            "etc",
            "home",
        ):
            header = tarfile.TarInfo(folder)
            header.type, header.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(header)
        for target, where in links.items():
            header = tarfile.TarInfo(target)
            header.type, header.linkname = tarfile.SYMTYPE, where
            archive.addfile(header)
        users = b"root:x:0:0:root:/root:/bin/sh\nkernelfleet:x:10001:10001::/tmp:/bin/sh\n"
        for target, content in {"etc/passwd": users, "etc/group": b"root:x:0:\nkernelfleet:x:10001:\n"}.items():
            header = tarfile.TarInfo(target)
            header.size, header.mode = len(content), 0o644
            archive.addfile(header, io.BytesIO(content))
        for target, source in files.items():
            archive.add(source, target, filter=as_root)
    text = layer.getvalue()
    blobs = {hashlib.sha256(text).hexdigest(): text}
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": [f"{k}={v}" for k, v in environment.items()],
            "Entrypoint": ["/opt/kernelfleet/bin/kernelfleet"],
            "User": "10001:10001" if name == "kernelfleet" else "0:0",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{next(iter(blobs))}"]},
    }
    kinds = "application/vnd.oci.image."

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": f"{kinds}{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{kinds}manifest.v1+json",
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(text, "layer.v1.tar")],
    }
    entry = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    entry["annotations"] = {"io.containerd.image.name": f"localhost/{name}:dev"}
    index = json.dumps({"schemaVersion": 2, "manifests": [entry]}).encode()
    path = TOOLS / f"{name}.tar"
    with tarfile.open(path, "w") as archive:
        parts = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": index}
        parts |= {f"blobs/sha256/{digest}": content for digest, content in blobs.items()}
        for target, content in parts.items():
            header = tarfile.TarInfo(target)
            header.size = len(content)
            archive.addfile(header, io.BytesIO(content))
    run("ctr", "--address", SOCKET, "--namespace", "k8s.io", "images", "import", path)


def as_root(header: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files of nobody else, no compiled Python."""
    if "__pycache__" in header.name:
        return None
    header.uid = header.gid = 0
    header.uname = header.gname = "root"
    return header


def images() -> None:
    """`kernelfleet` with the libraries that it loads; the judge's, whose system is the machine's own."""
    program = HOME / "bin/kernelfleet"
    own = {"opt/kernelfleet/bin/kernelfleet": program}
    path = "/opt/kernelfleet/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    loaded = [w for w in run("ldd", program).split() if w.startswith("/")]
    image("kernelfleet", own | {lib.lstrip("/"): Path(lib) for lib in loaded}, {}, {"PATH": path})
    agent = {
        f"opt/kernelfleet/agent-image/{part}": ROOT / "agent-image" / part for part in ("python", "include", "native")
    }
    agent |= {"opt/kernelfleet/agent-image/requirements.lock": ROOT / "agent-image/requirements.lock"}
    system = {
        f"etc/{name}": Path("/etc") / name for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives")
    }
    system = {target: source for target, source in system.items() if source.exists() and source.name != "alternatives"}
    links = {name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib64")}
    # Compilers are found by links through /etc/alternatives.
    alternatives = Path("/etc/alternatives")
    for link in alternatives.iterdir() if alternatives.is_dir() else []:
        if link.is_symlink():
            links[f"etc/alternatives/{link.name}"] = os.readlink(link)
    python = os.environ.get("KERNELFLEET_PYTHON", "/opt/torch/.venv/bin/python3")
    environment = {
        "PATH": path,
        "KERNELFLEET_PYTHON": python,
        "KERNELFLEET_AGENT_IMAGE": "/opt/kernelfleet/agent-image",
    }
    nvcc = os.environ.get("KERNELFLEET_NVCC") or shutil.which("nvcc")
    if nvcc:
        environment["KERNELFLEET_NVCC"] = nvcc
    if "LD_LIBRARY_PATH" in os.environ:
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    image("kernelfleet-judge", own | agent | system, links, environment)


def volume(name: str, folder: str, mode: str = "ReadOnlyMany") -> list[dict[str, Any]]:
    """A volume on a folder of the machine, and a claim of it."""
    size = {"storage": "1Gi"}
    shared = {"accessModes": [mode], "storageClassName": name}
    return [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "kubernetes.io/no-provisioner",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {"capacity": size, "hostPath": {"path": folder, "type": "Directory"}, **shared},
        },
    ] + (
        []
        if mode != "ReadOnlyMany"
        else [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": SYSTEM},
                "spec": {"resources": {"requests": size}, **shared},
            }
        ]
    )


def installed() -> Path:
    """The chart, volumes, a pool of the card. The folder of its ledger."""
    level = {"pod-security.kubernetes.io/enforce": "baseline"}
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM, "labels": level}})
    kubectl("apply", "--server-side", "--force-conflicts", "-n", SYSTEM, "-f", PACKED / "chart.yaml")
    ledger = HOME / "state/ledger"
    ledger.mkdir(parents=True, exist_ok=True)
    ledger.chmod(0o777)
    apply(
        *[o for name, folder in FOLDERS.items() for o in volume(name, folder)],
        *volume("ledger", str(ledger), "ReadWriteOnce"),
    )
    judge = {
        "name": "judge",
        "volumeMounts": [{"name": name, "mountPath": folder, "readOnly": True} for name, folder in FOLDERS.items()],
    }
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in FOLDERS]
    pool = {
        "apiVersion": "kernelfleet.dev/v1alpha1",
        "kind": "GpuPool",
        "metadata": {"name": "card"},
        "spec": {
            **DEVICE,
            "replicas": 1,
            "storage": {"size": "1Gi", "storageClassName": "ledger"},
            "podTemplate": {"spec": {"containers": [judge], "volumes": claims}},
        },
    }
    served = ("get", "--raw", "/apis/kernelfleet.dev/v1alpha1/gpupools")
    until("GpuPools are served", 60, lambda: kubectl(*served, check=False).startswith("{"))
    apply(pool)
    return ledger


def condition(kind: str, name: str, condition: str, *more: str) -> bool:
    """Whether an object's condition is true."""
    text = kubectl("get", kind, name, *more, "-o", "json", check=False)
    conditions = json.loads(text).get("status", {}).get("conditions", []) if text.startswith("{") else []
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def job(name: str, tasks: Path, chosen: list[str]) -> list[dict[str, Any]]:
    """A namespace with a job over the tasks."""
    inline = [{"name": path.split("/")[1].strip("_"), "source": (tasks / f"{path}.py").read_text()} for path in chosen]
    for one in inline:
        one["name"] = one["name"].lower().replace("_", "-")[:60].strip("-")
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": restricted}},
        {
            "apiVersion": "kernelfleet.dev/v1alpha1",
            "kind": "OptimizationJob",
            "metadata": {"name": "bench", "namespace": name},
            "spec": {
                "tasks": {"inline": inline},
                "policy": {"builtin": {}},
                "agent": {"maxTurns": 6, "parallelism": 4},
                "judge": {"gpuPool": "card", "precision": "reference"},
            },
        },
    ]


def ended(name: str) -> bool:
    """Whether a job has come to its end."""
    return condition("optimizationjob", "bench", "Succeeded", "-n", name) or condition(
        "optimizationjob", "bench", "Failed", "-n", name
    )


def slices(ledger: Path) -> dict[str, Any]:
    """Exclusive slices as the ledger has them: how many, how long, whether any two overlap; seconds charged to each job."""
    kept = sqlite3.connect(f"file:{ledger / 'ledger.db'}?mode=ro", uri=True)
    kept.row_factory = sqlite3.Row
    rows = [dict(r) for r in kept.execute("select * from exclusives order by card, granted")]
    overlaps = 0
    last: dict[str, float] = {}
    for row in rows:
        overlaps += row["card"] in last and row["granted"] < last[row["card"]]
        last[row["card"]] = max(last.get(row["card"], 0.0), row["ended"] or float("inf"))
    usage = {r["job"]: r["charged"] for r in kept.execute("select job, charged from usage")}
    leases = [dict(r) for r in kept.execute("select job, granted, ended, state from leases order by granted")]
    together = sum(
        1
        for i, a in enumerate(leases)
        for b in leases[i + 1 :]
        if b["granted"] < (a["ended"] or 0) and a["job"] != b["job"]
    )
    return {
        "exclusive": len(rows),
        "overlapping": overlaps,
        "exclusive_seconds": sum((r["ended"] or r["granted"]) - r["granted"] for r in rows),
        "cards": len({r["card"] for r in rows}),
        "leases": len(leases),
        "leases_of_both_jobs_at_once": together,
        "charged_seconds": usage,
        "log": [{k: row[k] for k in row if k in ("id", "card", "granted", "ended", "lease")} for row in rows],
    }


def again(name: str, results: Path) -> list[dict[str, Any]]:
    """The job's best candidates, fetched as a person would and judged in local mode on the same card."""
    program = HOME / "bin/kernelfleet"
    os.environ["KUBECONFIG"] = str(KUBECONFIG)
    run(program, "results", "bench", "-n", name, "-o", results / name)
    rows = []
    for verdict in sorted((results / name).glob("**/verdict.json")):
        folder = verdict.parent
        kept = json.loads(verdict.read_text())
        row: dict[str, Any] = {"job": name, "task": folder.name, "cluster": brief(kept)}
        candidate = folder / "best" if (folder / "best").is_dir() else folder
        words = [
            program,
            "judge",
            "--task",
            folder / "task.py",
            "--candidate",
            candidate,
            "--device",
            DEVICE["device"],
            "--no-cache",
        ]
        done = subprocess.run([*map(str, words), "-o", "json"], capture_output=True, text=True, timeout=120)
        row["local"] = brief(json.loads(done.stdout)) if done.stdout.startswith("{") else {"error": done.stderr[-500:]}
        row["agree"] = all(row["cluster"].get(k) == row["local"].get(k) for k in ("correct", "reward"))
        say(f"{name} {folder.name}: {row['cluster']} {row['local']}")
        rows.append(row)
    return rows


def brief(verdict: dict[str, Any]) -> dict[str, Any]:
    """What is compared."""
    eager = (verdict.get("speedup") or {}).get("eager") or {}
    keys = ("correct", "reward", "grade", "measurement")
    return {k: verdict.get(k) for k in keys} | {"over_eager": eager.get("median"), "reason": verdict.get("reason")}


def whole(tasks: Path, count: int, local_seconds: float) -> dict[str, Any]:
    """All of it. `count`: tasks of both jobs together; `local_seconds`: no further local judgement is begun after so many."""
    unpack()
    say("programs unpacked")
    try:
        run("bash", ROOT / "tests/cluster/up.sh", "1")
    except BaseException:
        run("bash", ROOT / "tests/cluster/down.sh", check=False)
        raise
    say("cluster up")
    seconds = {"up": time.monotonic() - START}
    folder = HOME / "state/node1/kubelet/device-plugins"
    until("the kubelet waits for device plugins", 30, lambda: (folder / "kubelet.sock").exists())
    log = (HOME / "state/log/card").open("w")
    plugin = subprocess.Popen([HOME / "bin/card", "--folder", folder], stdout=log, stderr=log, start_new_session=True)
    result: dict[str, Any] = {}
    try:
        images()
        say("images are in")
        ledger = installed()
        until("the card is the node's", 60, lambda: "nvidia.com/gpu" in kubectl("get", "node", "node1", "-o", "json"))
        until("the pool is ready", 180, lambda: condition("gpupool", "card", "Ready"))
        seconds["ready"] = time.monotonic() - START
        chosen = list(TASKS[:count])
        apply(*[o for n, name in enumerate(JOBS) for o in job(name, tasks, chosen[n :: len(JOBS)])])
        until("both jobs ended", 400, lambda: all(ended(name) for name in JOBS))
        seconds["jobs"] = time.monotonic() - START - seconds["ready"]
        pool = json.loads(kubectl("get", "gpupool", "card", "-o", "json"))
        result["pool"] = pool.get("status", {})
        statuses = {
            n: json.loads(kubectl("get", "optimizationjob", "bench", "-n", n, "-o", "json"))["status"] for n in JOBS
        }
        result["jobs"] = statuses
        result["slices"] = slices(ledger)
        say(f"slices: { {k: v for k, v in result['slices'].items() if k != 'log'} }")
        # The judge has the card no more.
        kubectl("delete", "gpupool", "card", "--wait=false")
        rows: list[dict[str, Any]] = []
        for name in JOBS:
            if time.monotonic() - START < local_seconds:
                rows += again(name, TOOLS / "results")
        result["verdicts"] = rows
        result["seconds"] = seconds
        return result
    except BaseException:
        told()
        raise
    finally:
        plugin.terminate()
        run("bash", ROOT / "tests/cluster/down.sh", check=False)
        shutil.rmtree(TOOLS, ignore_errors=True)
        say("cluster down")


if __name__ == "__main__":
    found = whole(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else len(TASKS), 400)
    print(json.dumps({k: v for k, v in found.items() if k != "slices"}, indent=1)[:4000])
