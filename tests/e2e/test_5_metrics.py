"""A real Prometheus finds what the chart's PodMonitor names and reads it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HOME, SYSTEM, Cluster, script
from work import Jobs, condition, job

ADDRESS = "127.0.0.1:19090"
CONFIG = """
global: {{scrape_interval: 2s}}
scrape_configs:
  - job_name: kernelfleet
    # A job and a namespace of kernelfleet are labels of its own metrics; without this they would be renamed.
    honor_labels: true
    kubernetes_sd_configs:
      - {{role: pod, kubeconfig_file: {kubeconfig}, namespaces: {{names: [{namespace}]}}}}
    relabel_configs:
      - {{source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_name], regex: kernelfleet, action: keep}}
      - {{source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], regex: {components}, action: keep}}
      - {{source_labels: [__meta_kubernetes_pod_container_port_name], regex: http, action: keep}}
      - {{source_labels: [__meta_kubernetes_pod_label_app_kubernetes_io_component], target_label: component}}
"""


class Prometheus:
    """A running Prometheus, asked over HTTP."""

    def ask(self, path: str, **words: str) -> Any:
        url = f"http://{ADDRESS}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, query: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Values by their labels."""
        found = self.ask("query", query=query)["result"]
        return {tuple(sorted(series["metric"].items())): float(series["value"][1]) for series in found}

    def up(self) -> dict[str, float]:
        """Which components were read."""
        return {dict(labels)["component"]: value for labels, value in self.query("up").items()}


@pytest.fixture(scope="module")
def prometheus(installed: Cluster, pool: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus on this machine, which reaches pods by their addresses."""
    del pool
    if not installed.own:
        pytest.skip("pods of a cluster given by KUBECONFIG may not be reachable from here")
    script("build.sh", "prometheus")
    folder: Path = tmp_path_factory.mktemp("prometheus")
    config = folder / "prometheus.yml"
    config.write_text(
        CONFIG.format(kubeconfig=installed.kubeconfig, namespace=SYSTEM, components="operator|broker|gateway")
    )
    words: list[str | Path] = [
        HOME / "bin/prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    log = (folder / "log").open("w")
    process = subprocess.Popen([*words, f"--web.listen-address={ADDRESS}"], stdout=log, stderr=subprocess.STDOUT)
    asked = Prometheus()

    def ready() -> bool:
        if process.poll() is not None:
            pytest.fail(f"Prometheus ended: {(folder / 'log').read_text()[-2000:]}", pytrace=False)
        try:
            return asked.up() != {}
        except OSError:
            return False

    try:
        installed.wait("Prometheus to have read a pod", 60, ready)
        yield asked
    finally:
        process.terminate()
        process.wait()


def test_prometheus_reads_the_operator_and_its_reconciliations(prometheus: Prometheus, installed: Cluster) -> None:
    installed.wait("the operator to be read", 30, lambda: prometheus.up().get("operator") == 1)
    done = prometheus.query('sum by (controller) (controller_runtime_reconcile_total{result="success"})')
    assert done[(("controller", "gpupool"),)] > 0
    assert sum(prometheus.query("leader_election_master_status").values()) == 1


def ledger(uid: str) -> dict[str, float]:
    """What the broker's ledger says of a job, read from its file."""
    for path in HOME.glob("state/ledgers/*/ledger.db"):
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as kept:
            if not kept.execute("select 1 from jobs where uid = ?", (uid,)).fetchone():
                continue
            (turns,) = kept.execute(
                "select sum(turns) from episodes where job = ? and state != 'void'", (uid,)
            ).fetchone()
            (seconds,) = kept.execute("select sum(ended - granted) from leases where job = ?", (uid,)).fetchone()
            return {"turns": turns, "seconds": seconds}
    pytest.fail(f"no ledger knows the job {uid}")


def test_what_prometheus_reads_of_a_job_is_what_ledger_and_status_say(
    prometheus: Prometheus, jobs: Jobs, pool: str
) -> None:
    # Finished by an earlier test; alone, this one waits for it.
    if jobs.cluster.find("optimizationjob", "first", "-n", jobs.namespace) is None:
        jobs.cluster.apply(job(jobs.namespace, "first", pool))
    found = jobs.until("first", "Succeeded", "True", seconds=900)
    status, kept = found["status"], ledger(found["metadata"]["uid"])
    jobs.cluster.wait("the broker to be read", 30, lambda: prometheus.up().get("broker") == 1)
    of = f'namespace="{jobs.namespace}", job="first"'

    def total(name: str, more: str = "") -> float:
        return sum(prometheus.query(f"sum(kernelfleet_{name}{{{of}{more}}})").values())

    def equal() -> None:
        # One reading after the end.
        succeeded = status["episodes"]["succeeded"]
        jobs.cluster.wait(
            "the finished episodes to be read", 60, lambda: total("episodes", ', state="succeeded"') == succeeded
        )
        assert total("agent_turns_total") == kept["turns"] == status["turns"]
        assert total("gpu_slice_seconds_total") == pytest.approx(kept["seconds"], rel=1e-3)
        assert total("gpu_slice_seconds_total") == pytest.approx(status["gpuSeconds"], rel=1e-3)
        assert total("job_pass_ratio") == status["rates"]["correct"]
        assert total("job_faster_ratio", ', baseline="eager"') == status["rates"]["fasterThanEager"]
        geomean = total("job_speedup_geomean", ', baseline="eager"')
        assert geomean == pytest.approx(status["geomean"]["eager"], abs=2e-3)

    equal()
    # The counts are the ledger's and outlive the broker that read them from it.
    broker = ("-n", SYSTEM, "-l", f"app.kubernetes.io/component=broker,app.kubernetes.io/instance={pool}")
    before = jobs.cluster.get("pods", *broker)["items"][0]["metadata"]["uid"]
    jobs.cluster.kubectl("delete", "pods", *broker, "--force", "--grace-period=0")

    def another() -> bool:
        pods = jobs.cluster.get("pods", *broker)["items"]
        ready = [p for p in pods if p["metadata"]["uid"] != before and condition(p, "Ready").get("status") == "True"]
        return len(ready) == 1 and prometheus.query(f"count(kernelfleet_job_pass_ratio{{{of}}})") == {(): 1.0}

    jobs.cluster.wait("another broker to be read", 90, another)
    equal()
    assert condition(found, "Failed").get("status") != "True"
