"""What eager runs: kernels on a card, operators on the CPU, by PyTorch's own profiler.

Knows the profiler and its trace. Must not know tasks. Evidence for who optimises, never for a verdict.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kernelfleet_zygote import Refused
from torch.profiler import ProfilerActivity, profile

CALLS = 5
MOST = 40


def launches(call: Callable[[], Any], device: str) -> list[dict[str, Any]]:
    """A record a kernel or operator, summed over its calls within one run, the longest first. Times in microseconds."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    with torch.no_grad():
        call()
        try:
            with profile(activities=activities) as seen:
                for _ in range(CALLS):
                    call()
                if device == "cuda":
                    torch.cuda.synchronize()
            found = _kernels(seen) if device == "cuda" else _operators(seen)
        except (RuntimeError, OSError, ValueError, AssertionError) as error:
            raise Refused("profiler", f"PyTorch's profiler does not work here: {error}") from error
    whole = sum(record["time_us"] for record in found) or 1.0
    for record in found:
        record["share"] = record["time_us"] / whole
        record |= {"bytes": 0, "line": None}
    return sorted(found, key=lambda record: -float(record["time_us"]))[:MOST]


def _record(name: str, time_us: float) -> dict[str, Any]:
    facts = dict.fromkeys(("registers", "shared_bytes", "local_bytes", "occupancy"))
    return {"name": name, "time_us": time_us, **facts}


def _operators(seen: Any) -> list[dict[str, Any]]:
    """Operators by the time that is their own."""
    return [
        _record(event.key, event.self_cpu_time_total / CALLS)
        for event in seen.key_averages()
        if event.self_cpu_time_total > 0 and "::" in event.key and not event.key.startswith("profiler::")
    ]


def _kernels(seen: Any) -> list[dict[str, Any]]:
    """Kernels by name, with what the trace says of their launch."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        record = found.setdefault(str(event["name"]), _record(str(event["name"]), 0.0))
        record["time_us"] += float(event.get("dur", 0)) / CALLS
        about = event.get("args", {})
        if "registers per thread" in about:
            record["registers"] = int(about["registers per thread"])
            record["shared_bytes"] = int(about.get("shared memory", 0))
            occupancy = about.get("est. achieved occupancy %")
            record["occupancy"] = None if occupancy is None else float(occupancy) / 100
    return list(found.values())
