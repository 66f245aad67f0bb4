"""The seam between what a candidate calls and what records it.

Knows the interface of a recording. Must not know how a recording is kept: `kernelfleet_recorder` implements it and
puts it here while a candidate runs; without one nothing can be launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch


@dataclass(frozen=True)
class Source:
    """Code that launches refer to: path inside the candidate's folder, defines, extra compiler flags."""

    path: str
    defines: tuple[tuple[str, str], ...]
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    """A launch argument of an exact type: `kind` as in the plan (`f32`, `i64` ..)."""

    kind: str
    value: int | float


class Session(Protocol):
    """A recording in progress."""

    device: str
    """`cuda` or `cpu`."""
    properties: Any
    """Attributes of the device."""
    libraries: frozenset[str]
    files: dict[str, str]

    def launch(
        self,
        source: Source,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
        args: Sequence[Any],
    ) -> None:
        """Records a launch; arguments are tensors, `None`, numbers or `Scalar`."""

    def library(self, call: str, tensors: dict[str, torch.Tensor | None], **attributes: Any) -> None:
        """Records a library call on tensors."""

    def refuse(self, code: str, message: str, hint: str = "") -> NoReturn:
        """Ends the recording with a refusal at the candidate's current line."""


_current: Session | None = None


def activate(session: Session | None) -> None:
    """Makes `session` the one that launches go to; `None` ends it."""
    global _current
    _current = session


def active() -> Session | None:
    """The recording in progress, if there is one."""
    return _current


def current(what: str) -> Session:
    """The recording in progress; `RuntimeError` where there is none, as on a person's laptop."""
    if _current is None:
        raise RuntimeError(
            f"{what} outside a recording: kernelfleet_ext runs nothing itself, it records what a candidate would "
            "launch. Run the candidate with `kernelfleet judge`; to use a judged kernel in your own code, "
            "`kernelfleet export` it."
        )
    return _current
