"""The real API server takes the custom resources' definitions, and each rule in them refuses in its own words."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from conftest import ROOT, Cluster, Refused

TASK = "class Model: pass"
JOB: dict[str, Any] = {
    "apiVersion": "kernelfleet.dev/v1alpha1",
    "kind": "OptimizationJob",
    "metadata": {"name": "definitions", "namespace": "default"},
    "spec": {"tasks": {"inline": [{"name": "relu", "source": TASK}]}},
}
POOL: dict[str, Any] = {
    "apiVersion": "kernelfleet.dev/v1alpha1",
    "kind": "GpuPool",
    "metadata": {"name": "definitions"},
    "spec": {"device": "cpu"},
}
ENDPOINT: dict[str, Any] = {
    "apiVersion": "kernelfleet.dev/v1alpha1",
    "kind": "ModelEndpoint",
    "metadata": {"name": "definitions", "namespace": "default"},
    "spec": {"baseUrl": "https://models.example/v1", "models": [{"name": "m"}]},
}
SET: dict[str, Any] = {
    "apiVersion": "kernelfleet.dev/v1alpha1",
    "kind": "TaskSet",
    "metadata": {"name": "definitions", "namespace": "default"},
    "spec": {"configMap": {"names": ["tasks"]}},
}
CUDA = {"spec": {"device": "cuda"}}
BUCKET = {"url": "s3://bucket/prefix", "region": "eu-central-1"}
BAD_NAME = {"metadata": {"name": "a" * 41}}
# What is refused: an object, what is laid over it, and the words of the rule that has to refuse it.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        JOB,
        {"spec": {"tasks": {"configMap": {"name": "tasks"}}}},
        "exactly one of inline, configMap, taskSet says where the tasks come from",
    ),
    (
        JOB,
        {"spec": {"policy": {"builtin": {}, "replay": {"configMap": "turns"}}}},
        "exactly one of endpoint, builtin, replay says who writes the kernels",
    ),
    *(
        (JOB, {"spec": {"agent": {"resources": {name: "many"}}}}, "not a quantity such as 500m, 2 or 4Gi")
        for name in ("cpu", "memory", "ephemeralStorage")
    ),
    (
        JOB,
        {"metadata": {"name": "a" * 53}},
        "a job's name has at most 52 lower-case letters, digits and -, since the names of its pods begin with it",
    ),
    (
        POOL,
        BAD_NAME,
        "a pool's name has at most 40 lower-case letters, digits and -, since the names of its parts begin with it",
    ),
    (POOL, {"spec": {"arch": "sm_90"}}, "arch, resourceName and resourceClaimTemplate are for device: cuda"),
    (
        POOL,
        {"spec": {"device": "cuda", "resourceName": "nvidia.com/gpu", "resourceClaimTemplate": "card"}},
        "a judge gets its card by resourceName or by resourceClaimTemplate, not by both",
    ),
    (POOL, {"spec": {"sharing": "TimeSlicing"}}, "sharing is for device: cuda"),
    (
        POOL,
        {"spec": {"slices": {"maxSeconds": 10, "maxExclusiveSeconds": 20}}},
        "maxExclusiveSeconds is at most maxSeconds",
    ),
    (POOL, {"spec": {"storage": {"size": "large"}}}, "not a quantity such as 20Gi"),
    *(
        (
            POOL,
            {"spec": {"objectStore": {**BUCKET, "url": url}}},
            "an address such as s3://bucket or s3://bucket/prefix is wanted",
        )
        for url in ("https://bucket/prefix", "s3://key:secret@bucket", "s3://bucket/a/../b", "s3://bucket/?x")
    ),
    (
        POOL,
        {"spec": {"objectStore": {"url": "s3://bucket"}}},
        "region is wanted where no endpoint is said: that is Amazon's S3, whose buckets each belong to a region",
    ),
    (
        POOL,
        {"spec": {"objectStore": {**BUCKET, "endpoint": "minio.example.com:9000"}}},
        "an address such as https://host:9000 is wanted",
    ),
    (
        POOL,
        {"spec": {"objectStore": {**BUCKET, "endpoint": "https://key@minio.example.com"}}},
        "the address holds no user, query or fragment; a key belongs into credentialsSecret",
    ),
    (
        ENDPOINT,
        BAD_NAME,
        "an endpoint's name has at most 40 lower-case letters, digits and -, since the names of its gateway begin with it",
    ),
    (ENDPOINT, {"spec": {"baseUrl": "models.example/v1"}}, "an address such as https://host/v1 is wanted"),
    (
        ENDPOINT,
        {"spec": {"baseUrl": "https://key@models.example/v1"}},
        "the address holds no user, query or fragment; a key belongs into apiKeySecret",
    ),
    (
        SET,
        {"spec": {"oci": {"reference": "r/tasks"}}},
        "exactly one of configMap, oci, persistentVolumeClaim, objectStore says where the tasks are",
    ),
]
# What can't be changed any more: an object, its status, the change, the words.
STORED = {**POOL, "spec": {"device": "cpu", "storage": {"size": "1Gi"}, "objectStore": BUCKET}}
FROZEN: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (POOL, CUDA, "device can't be changed; make a new GpuPool"),
    (
        POOL,
        {"spec": {"storage": {"size": "1Gi"}}},
        "storage can't be added or taken away, since the ledger would be lost; make a new GpuPool",
    ),
    (
        STORED,
        {"spec": {"storage": {"size": "2Gi"}}},
        "storage can't be changed: enlarge the PersistentVolumeClaim itself",
    ),
    (
        POOL,
        {"spec": {"objectStore": BUCKET}},
        "objectStore can't be added or taken away, since the objects would be lost; make a new GpuPool",
    ),
    (
        STORED,
        {"spec": {"objectStore": None}},
        "objectStore can't be added or taken away, since the objects would be lost; make a new GpuPool",
    ),
    (
        STORED,
        {"spec": {"objectStore": {"url": "s3://bucket/other"}}},
        "objectStore.url can't be changed, since the objects would be lost; make a new GpuPool",
    ),
    (
        JOB,
        {"spec": {"tasks": {"inline": [{"name": "gelu", "source": TASK}]}}},
        "spec.tasks is frozen since the job has started; make a new OptimizationJob for other tasks",
    ),
    (
        JOB,
        {"spec": {"policy": {"builtin": None, "replay": {"configMap": "turns"}}}},
        "spec.policy is frozen since the job has started; make a new OptimizationJob for another policy",
    ),
    (
        JOB,
        {"spec": {"judge": {"inputs": 7}}},
        "spec.judge is frozen since the job has started; make a new OptimizationJob to judge otherwise",
    ),
    (
        JOB,
        {"spec": {"target": {"speedup": 2}}},
        "spec.target is frozen since the job has started; make a new OptimizationJob for another target",
    ),
    (
        JOB,
        {"spec": {"managedBy": "somebody.example/else"}},
        "spec.managedBy is frozen since the job has started; make a new OptimizationJob for another controller",
    ),
    (
        JOB,
        {"spec": {"agent": {"maxTurns": 7}}},
        "spec.agent is frozen since the job has started, all but parallelism; make a new OptimizationJob for other limits",
    ),
    (
        JOB,
        {"spec": {"agent": {"activeDeadlineSeconds": 60}}},
        "spec.agent is frozen since the job has started, all but parallelism; make a new OptimizationJob for other pods",
    ),
]
STARTED = {
    "type": "Started",
    "status": "True",
    "reason": "Started",
    "message": "",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
}


def over(value: dict[str, Any], laid: dict[str, Any]) -> dict[str, Any]:
    """`laid` over `value`; a null takes a field away."""
    result = deepcopy(value)
    for key, inner in laid.items():
        if isinstance(inner, dict) and isinstance(result.get(key), dict):
            result[key] = over(result[key], inner)
        elif inner is None:
            result.pop(key, None)
        else:
            result[key] = inner
    return result


def rules(schema: Any) -> list[str]:
    """Messages of the rules in a schema."""
    if isinstance(schema, list):
        return [message for inner in schema for message in rules(inner)]
    if not isinstance(schema, dict):
        return []
    own = [rule["message"] for rule in schema.get("x-kubernetes-validations", [])]
    return own + [message for inner in schema.values() for message in rules(inner)]


@pytest.fixture(scope="module")
def kinds(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """The definitions as the server has them."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    names = [f"{path.stem}.kernelfleet.dev" for path in (ROOT / "crds").glob("*.yaml")]
    for name in names:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", f"crd/{name}")
    found = [cluster.get("crd", name) for name in names]
    return {definition["spec"]["names"]["kind"]: definition for definition in found}


def test_the_server_takes_every_definition_whole(kinds: dict[str, dict[str, Any]]) -> None:
    assert set(kinds) == {"GpuPool", "ModelEndpoint", "OptimizationJob", "TaskSet"}
    for kind, definition in kinds.items():
        conditions = {c["type"]: (c["status"], c.get("message")) for c in definition["status"]["conditions"]}
        assert conditions["NamesAccepted"][0] == "True", kind
        assert "NonStructuralSchema" not in conditions, conditions


def test_every_rule_of_the_definitions_is_tried_here(kinds: dict[str, dict[str, Any]]) -> None:
    known = {message for definition in kinds.values() for message in rules(definition["spec"]["versions"])}
    assert {words for _, _, words in REFUSED + FROZEN} == known


@pytest.mark.parametrize("good", [JOB, POOL, ENDPOINT, SET], ids=lambda good: good["kind"])
def test_the_objects_that_are_spoiled_below_are_good(
    cluster: Cluster, kinds: dict[str, dict[str, Any]], good: dict[str, Any]
) -> None:
    del kinds
    cluster.apply_dry(good)


@pytest.mark.parametrize(("good", "laid", "words"), REFUSED)
def test_what_the_schema_can_refuse_is_refused_in_the_rules_own_words(
    cluster: Cluster, kinds: dict[str, dict[str, Any]], good: dict[str, Any], laid: dict[str, Any], words: str
) -> None:
    del kinds
    with pytest.raises(Refused) as refused:
        cluster.apply_dry(over(good, laid))
    assert words in str(refused.value)


@pytest.mark.parametrize(("good", "laid", "words"), FROZEN)
def test_what_is_frozen_can_be_corrected_before_the_start_and_not_after(
    cluster: Cluster, kinds: dict[str, dict[str, Any]], good: dict[str, Any], laid: dict[str, Any], words: str
) -> None:
    del kinds
    kind, name, space = good["kind"], good["metadata"]["name"], good["metadata"].get("namespace", "default")
    named = (kind, name, "-n", space)
    cluster.apply(good)
    try:
        changed = over(good, laid)
        if kind == "OptimizationJob":
            cluster.apply_dry(changed)
            status = json.dumps({"status": {"conditions": [STARTED]}})
            cluster.kubectl("patch", *named, "--subresource=status", "--type=merge", "-p", status)
        with pytest.raises(Refused) as refused:
            cluster.apply_dry(changed)
        assert words in str(refused.value)
        if kind == "OptimizationJob":
            # These may always be changed.
            free = {"spec": {"suspend": True, "ttlSecondsAfterFinished": 5, "agent": {"parallelism": 3}}}
            cluster.apply_dry(over(good, free))
    finally:
        cluster.kubectl("delete", *named, "--wait=false", "--ignore-not-found")


def test_a_buckets_server_region_and_secret_can_be_changed(cluster: Cluster, kinds: dict[str, dict[str, Any]]) -> None:
    del kinds
    cluster.apply(STORED)
    try:
        moved = {"endpoint": "https://minio.example.com:9000", "region": None, "credentialsSecret": {"name": "bucket"}}
        cluster.apply_dry(over(STORED, {"spec": {"objectStore": moved}}))
    finally:
        cluster.kubectl("delete", "gpupool", "definitions", "--wait=false", "--ignore-not-found")


def test_an_unknown_field_is_refused_by_its_name(cluster: Cluster, kinds: dict[str, dict[str, Any]]) -> None:
    del kinds
    with pytest.raises(Refused, match='unknown field "(spec.agent.)?maxTurn"'):
        cluster.apply_dry(over(JOB, {"spec": {"agent": {"maxTurn": 3}}}))


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_are_accepted(cluster: Cluster, kinds: dict[str, dict[str, Any]], example: Any) -> None:
    del kinds
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-n", "default", "-f", str(example))
