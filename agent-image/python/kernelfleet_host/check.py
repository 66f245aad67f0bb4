"""What refuses a task: stub."""

from __future__ import annotations

from typing import Any

from kernelfleet_host.reference import Reference


def check(reference: Reference, inputs: int, seconds: float) -> dict[str, Any]:
    """Stub."""
    raise NotImplementedError
