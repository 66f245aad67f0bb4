"""Running a callable on a slot and how long that took.

Knows warm-up, cache flushes, CUDA graphs and events. Must not know tasks or comparison. Times are microseconds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WARM_UP_SECONDS = 0.15
_SPIN_CYCLES = 300_000  # about 0.15 ms: the host enqueues the sample while the device spins


def last_level_bytes() -> int:
    """Size of the CPU's last level of cache, 32 MiB where the system doesn't tell; at most 32 MiB: more costs more than the call that is timed."""
    largest = 0
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        try:
            text = path.read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
            largest = max(largest, int(text.rstrip("KM")) * unit)
        except (OSError, ValueError):
            continue
    return min(largest or 32 << 20, 32 << 20)


class CpuTimer:
    """Wall time of single calls on the CPU, caches flushed before."""

    def __init__(self) -> None:
        self.cache_bytes = last_level_bytes()
        self._flush = torch.zeros(2 * self.cache_bytes // 4, dtype=torch.int32)
        self._warm: set[int] = set()

    def flush(self) -> None:
        """Writes twice the last level of cache."""
        self._flush.add_(1)

    def run(self, call: Callable[[], Any], key: int) -> tuple[Any, float]:
        """Result and microseconds. The first call for `key` is preceded by one that isn't counted."""
        with torch.no_grad():
            if key not in self._warm:
                self._warm.add(key)
                call()
            gc.collect(0)
            gc.disable()
            try:
                self.flush()
                start = time.perf_counter_ns()
                result = call()
                end = time.perf_counter_ns()
            finally:
                gc.enable()
        return result, (end - start) / 1000


class CudaTimer:
    """Device time by events, the L2 flushed before each sample, as a CUDA graph where it can be captured."""

    def __init__(self) -> None:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.cache_bytes = int(properties.L2_cache_size)
        self._flush: torch.Tensor | None = None

    def flush(self) -> None:
        """Writes twice the L2."""
        if self._flush is None:
            self._flush = torch.zeros(2 * self.cache_bytes, dtype=torch.uint8, device="cuda")
        self._flush.zero_()

    def warm(self, call: Callable[[], Any]) -> None:
        """Calls until clocks and caches of the libraries have had 150 ms."""
        with torch.no_grad():
            torch.cuda.synchronize()
            start = time.perf_counter()
            while True:
                call()
                torch.cuda.synchronize()
                if time.perf_counter() - start >= WARM_UP_SECONDS:
                    return

    def run(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Result and device microseconds of one call, which only enqueues work on the current stream."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.no_grad():
            torch.cuda.synchronize()
            gc.disable()
            try:
                self.flush()
                torch.cuda._sleep(_SPIN_CYCLES)
                start.record()
                result = call()
                end.record()
            finally:
                gc.enable()
            torch.cuda.synchronize()
        return result, start.elapsed_time(end) * 1000

    def wall(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """Result and host microseconds of one call until the device is idle."""
        with torch.no_grad():
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            result = call()
            torch.cuda.synchronize()
            return result, (time.perf_counter_ns() - start) / 1000


class Captured:
    """A callable as a CUDA graph over static inputs. `result`: its outputs, rewritten by each replay."""

    def __init__(self, call: Callable[[], Any]) -> None:
        """Raises what the capture raises; the stream is usable afterwards."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(side):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        gc.collect()
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self.graph):
            self.result = call()
        for _ in range(2):  # the first replay also brings the graph to the device
            self.graph.replay()
        torch.cuda.synchronize()

    def replay(self) -> Any:
        """Enqueues the graph."""
        self.graph.replay()
        return self.result


def copy_rate(device: str, cache_bytes: int) -> float:
    """Bytes read and written per nanosecond (GB/s) by the fastest of some large copies."""
    size = max(4 * cache_bytes, 256 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, device=device)
    best = float("inf")
    for _ in range(6 if device == "cpu" else 20):
        if device == "cpu":
            begin = time.perf_counter_ns()
            target.copy_(source)
            took = float(time.perf_counter_ns() - begin)
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            took = start.elapsed_time(end) * 1e6
        best = min(best, took)
    return 2 * size / best
