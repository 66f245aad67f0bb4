"""Sources, kernels and their launches, checked where a message can still name the candidate's line.

Knows the launch limits that hold on every card. Must not know how a launch is stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kernelfleet_ext._session import Scalar, Source, active, current

Extent = int | Sequence[int]

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,1023}")
SUFFIXES = {"cuda": (".cu",), "cpu": (".cpp",)}
GRID_LIMIT = (2**31 - 1, 65535, 65535)
BLOCK_LIMIT = (1024, 1024, 64)
MAX_THREADS = 1024
MAX_ARGUMENTS = 256
RANGES = {"i32": (-(2**31), 2**31), "i64": (-(2**63), 2**63), "u32": (0, 2**32), "u8": (0, 256)}


def load(path: str, defines: Mapping[str, object] | None = None, flags: Sequence[str] | None = None) -> Module:
    """Names a source file of the candidate (`.cu` on cuda, `.cpp` on cpu); its kernels are attributes of the result.

    Nothing is compiled here: the judge builds what the plan names. `defines` become `-DNAME=value` (`True` is 1).
    Raises `FileNotFoundError` when the candidate has no such file, `ValueError` when it can't be for this device.
    """
    path = str(path).removeprefix("./")
    session = active()
    if session is not None:
        if path not in session.files:
            have = ", ".join(sorted(name for name in session.files if name.endswith((".cu", ".cpp")))) or "none"
            raise FileNotFoundError(f"kf.load: the candidate has no file {path!r}; kernel sources: {have}")
        if not path.endswith(SUFFIXES[session.device]):
            wanted = " or ".join(SUFFIXES[session.device])
            raise ValueError(f"kf.load: {path!r} can't be built for the {session.device} device, which takes {wanted}")
    pairs = []
    for name, value in (defines or {}).items():
        if not NAME.fullmatch(str(name)):
            raise ValueError(f"kf.load: {name!r} is no macro name")
        text = "1" if value is True else "0" if value is False else "" if value is None else str(value)
        if "\n" in text or "\0" in text:
            raise ValueError(f"kf.load: the value of {name} has a line break or a null in it")
        pairs.append((str(name), text))
    if isinstance(flags, str):
        raise ValueError(f"kf.load: flags is a list of strings, not {flags!r}")
    return Module(Source(path, tuple(pairs), tuple(str(flag) for flag in flags or ())))


class Module:
    """A source file; `module.name` is its kernel `name` (`extern "C"`)."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.function(name)

    def __deepcopy__(self, _memo: object) -> Module:
        return self

    def __repr__(self) -> str:
        return f"kf.load({self._source.path!r})"

    def function(self, name: str) -> Kernel:
        """The kernel `name`, for names that Python's syntax can't say."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a kernel")
        return Kernel(self._source, name)

    def launch(
        self,
        kernel: str,
        grid: Extent = 1,
        block: Extent = 1,
        shared: int = 0,
        cluster: Extent | None = None,
        cooperative: bool = False,
        args: Sequence[Any] = (),
    ) -> None:
        """Launches `kernel` with everything spelt out; `shared` in bytes."""
        _record(self.function(kernel), grid, block, shared, cluster, cooperative, args)


class Kernel:
    """A function of a module. On cuda `kernel[grid, block](..)`, on the CPU `kernel(..)`."""

    def __init__(self, source: Source, name: str) -> None:
        self._source = source
        self._name = name

    def __repr__(self) -> str:
        return f"kf.load({self._source.path!r}).{self._name}"

    def __getitem__(self, configuration: Any) -> Configured:
        if not isinstance(configuration, tuple) or len(configuration) not in (2, 3):
            raise TypeError(f"{self._name}[grid, block] or {self._name}[grid, block, shared bytes] is expected")
        grid, block, *rest = configuration
        return Configured(self, grid, block, rest[0] if rest else 0)

    def __call__(self, *args: Any) -> None:
        if current(f"a launch of {self._name}").device == "cuda":
            raise TypeError(f"a launch needs a grid and a block: {self._name}[grid, block](..)")
        _record(self, 1, 1, 0, None, False, args)


class Configured:
    """A kernel with its grid, block and dynamic shared memory (bytes)."""

    def __init__(self, kernel: Kernel, grid: Extent, block: Extent, shared: int) -> None:
        self._kernel = kernel
        self._configuration = (grid, block, shared)

    def __call__(self, *args: Any) -> None:
        grid, block, shared = self._configuration
        _record(self._kernel, grid, block, shared, None, False, args)


def _record(
    kernel: Kernel,
    grid: Extent,
    block: Extent,
    shared: int,
    cluster: Extent | None,
    cooperative: bool,
    args: Sequence[Any],
) -> None:
    name = kernel._name
    session = current(f"a launch of {name}")
    grids, blocks = extent(f"grid of {name}", grid, GRID_LIMIT), extent(f"block of {name}", block, BLOCK_LIMIT)
    clusters = None if cluster is None else extent(f"cluster of {name}", cluster, (16, 16, 16))
    shared = whole(f"shared memory of {name}", shared)
    if session.device == "cpu" and (grids != (1, 1, 1) or blocks != (1, 1, 1) or shared or cluster or cooperative):
        raise ValueError(
            f"{name}: on the CPU the function is called once and brings its own loops: {name}(..), no grid or block"
        )
    if math.prod(blocks) > MAX_THREADS:
        raise ValueError(f"block of {name}: {blocks} has {math.prod(blocks)} threads, more than {MAX_THREADS}")
    limit = getattr(session.properties, "shared_memory_per_block_optin", None)
    if shared < 0 or (session.device == "cuda" and isinstance(limit, int) and 0 < limit < shared):
        raise ValueError(f"shared memory of {name}: {shared} bytes where a block can have {limit}")
    if clusters is not None:
        if math.prod(clusters) > 16:
            raise ValueError(f"cluster of {name}: {clusters} has more than 16 blocks")
        if any(g % c for g, c in zip(grids, clusters, strict=True)):
            raise ValueError(f"cluster of {name}: {clusters} doesn't divide the grid {grids}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name}: args is a list of arguments, not {type(args).__name__}")
    if len(args) > MAX_ARGUMENTS:
        raise ValueError(f"{name}: {len(args)} arguments, more than {MAX_ARGUMENTS}")
    session.launch(kernel._source, name, grids, blocks, shared, clusters, bool(cooperative), args)


def whole(what: str, value: Any) -> int:
    """`value` as an int; `TypeError` for anything that isn't a whole number."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{what}: a whole number is expected, not {value!r} ({type(value).__name__})")
    return int(value.__index__())


def extent(what: str, value: Extent, limits: tuple[int, int, int]) -> tuple[int, int, int]:
    """`value` as three positive numbers within `limits`; `ValueError` with the reason else."""
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if not 1 <= len(parts) <= 3:
        raise ValueError(f"{what}: one to three numbers are expected, not {value!r}")
    numbers = [whole(what, part) for part in parts] + [1] * (3 - len(parts))
    for number, most in zip(numbers, limits, strict=True):
        if not 1 <= number <= most:
            raise ValueError(f"{what}: {number} in {tuple(numbers)} is not between 1 and {most}")
    return numbers[0], numbers[1], numbers[2]


def integer(kind: str, value: Any) -> Scalar:
    """An integer argument of the exact type `kind`; `ValueError` where it doesn't fit."""
    number = int(value) if isinstance(value, bool) else whole(f"kf.{kind}", value)
    low, high = RANGES[kind]
    if not low <= number < high:
        raise ValueError(f"kf.{kind}({number}): not within {low} .. {high - 1}")
    return Scalar(kind, number)


def floating(kind: str, value: Any) -> Scalar:
    """A floating argument of the exact type `kind`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) and not hasattr(value, "__float__"):
        raise TypeError(f"kf.{kind}: a number is expected, not {value!r}")
    return Scalar(kind, float(value))
