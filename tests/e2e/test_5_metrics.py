"""A real Prometheus finds what the chart's PodMonitor names and reads it."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HOME, SYSTEM, Cluster, script

ADDRESS = "127.0.0.1:19090"
CONFIG = """
global: {{scrape_interval: 2s}}
scrape_configs:
  - job_name: kernelfleet
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
