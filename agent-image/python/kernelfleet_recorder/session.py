"""A recording in progress: what each storage holds, what has been launched on it, where the candidate stands.

Knows stores (`Store`), the plan being written, the candidate's files. Must not know how PyTorch's calls are
intercepted (`intercept`).

A store is one allocation as the candidate sees it:

    input       shape and type, never data
    parameter   real bytes of the state dict, untouched: named in the plan
    real        real bytes computed on the CPU: a derived constant, copied when a launch uses it
    made        from empty, zeros, full ..: no bytes, fills that wait; becomes `workspace` at its first launch,
                or `real` when real data is written into it
    workspace   launches have seen it: its content is unknown here
"""

from __future__ import annotations

import ctypes
import math
import sys
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from kernelfleet_ext._session import Scalar, Source

from kernelfleet_recorder.plan import PlanWriter, runs
from kernelfleet_recorder.refusal import Place, Refusal, Violation

DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
FILL_ROWS = 4096
ROOT = "/candidate/"
"""Prefix of the file names that the candidate's code objects carry; no such folder exists."""
ADDRESS = 0x7F53_0000_0000
"""First made-up address; each store has its own range, 2 MiB aligned with a gap, so that an address names its store."""
GAP = 1 << 21


class Store:
    """One allocation; see the module's description for `kind`."""

    def __init__(self, session: Session, kind: str, size: int, name: Any = None) -> None:
        self.kind = kind
        self.size = size
        self.name = name
        self.storage: torch.UntypedStorage | None = None
        self.version = 0
        self.from_parameters = kind == "parameter"
        self.fills: list[tuple[int, int, bytes]] = []
        self.undefined: Place | bool = False
        """Where PyTorch wrote into memory that was undefined before; `True` while that is happening."""
        self.key = session.new_key()
        self.address = session.new_address(size)
        self.meta = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
        session.stores[self.key] = self

    @property
    def has_data(self) -> bool:
        """Whether framework operators may run on it, for real."""
        return self.kind in ("parameter", "real", "made")

    def data(self, write: bool) -> torch.UntypedStorage:
        """The bytes on the CPU. To `write` makes the store `real` for good."""
        if self.storage is None:
            storage = torch.zeros(self.size, dtype=torch.uint8).untyped_storage()
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            for offset, count, pattern in self.fills:
                rows = flat[offset : offset + count].view(-1, len(pattern))
                rows.copy_(torch.tensor(list(pattern), dtype=torch.uint8))
            if not write:
                return storage
            self.storage = storage
            self.fills = []
        if write:
            if self.kind == "made":
                self.undefined = True
            self.kind = "real"
            self.version += 1
        return self.storage


class Session:
    """The recording; implements `kernelfleet_ext._session.Session`."""

    def __init__(
        self,
        device: str,
        files: dict[str, str],
        libraries: Sequence[str] = (),
        properties: dict[str, Any] | None = None,
        node_limit: int = 20_000,
    ) -> None:
        self.device = device
        self.torch_device = torch.device("cuda:0" if device == "cuda" else "cpu")
        self.files = files
        self.libraries = frozenset(libraries)
        self.properties = device_properties(device, properties or {})
        self.node_limit = node_limit
        self.plan = PlanWriter(device)
        self.violation: Violation | None = None
        self.phase = "import"
        self.stores: weakref.WeakValueDictionary[int, Store] = weakref.WeakValueDictionary()
        self.adopted: dict[int, tuple[torch.UntypedStorage, Store]] = {}
        self.used: set[Any] = set()
        self.reads: list[str] = []
        self._next_key = 0
        self._next_address = ADDRESS

    # Stores ---------------------------------------------------------------------------------------------------------

    def new_key(self) -> int:
        """A number for a store."""
        self._next_key += 1
        return self._next_key

    def new_address(self, size: int) -> int:
        """A made-up address with `size` bytes behind it."""
        address = self._next_address
        self._next_address += -(-max(size, 1) // GAP) * GAP + GAP
        return address

    def at_address(self, value: int) -> tuple[Store, int] | None:
        """The store and byte offset that a made-up address points into."""
        if not ADDRESS <= value < self._next_address:
            return None
        for store in list(self.stores.values()):
            if store.address <= value < store.address + max(store.size, 1):
                return store, value - store.address
        return None

    def buffer_of(self, store: Store) -> int:
        """Number of the plan's buffer for `store` as it is now; a made store's waiting fills become nodes first."""
        if store.kind == "made":
            store.kind = "workspace"
            waiting, store.fills = store.fills, []
            number = self.plan.buffer(store.key, "workspace", store.size)
            for offset, count, pattern in waiting:
                self._fill_node(number, offset, count, pattern)
            return number
        if store.kind == "workspace":
            return self.plan.buffer(store.key, "workspace", store.size)
        if store.kind == "input":
            return self.plan.buffer(("input", store.name), {"input": store.name}, store.size)
        if store.kind == "parameter":
            return self.plan.buffer(("parameter", store.name), {"parameter": store.name}, store.size)
        storage = store.data(write=False)
        pointer = storage.data_ptr()
        content = memoryview((ctypes.c_uint8 * store.size).from_address(pointer)) if store.size else memoryview(b"")
        return self.plan.constant((store.key, store.version), content.cast("B"))

    def key_of(self, store: Store) -> Any:
        """What `used` knows the store's present content by."""
        return (store.key, store.version) if store.kind == "real" else store.key

    def fill(self, store: Store, first: int, shape: tuple[int, ...], strides: tuple[int, ...], pattern: bytes) -> None:
        """Sets a strided view (`first` and strides in elements of `len(pattern)` bytes) of a store without data."""
        stretches = runs(shape, strides, FILL_ROWS)
        if stretches is None:
            self.refuse(
                "not_expressible",
                f"a fill of a view of shape {shape} and strides {strides} takes more than {FILL_ROWS} rows",
                "fill it in a kernel, or fill the whole tensor",
            )
        size = len(pattern)
        for start, count in stretches:
            offset, length = (first + start) * size, count * size
            if store.kind == "made":
                if offset == 0 and length >= store.size:
                    store.fills.clear()
                store.fills.append((offset, length, pattern))
                if len(store.fills) > self.node_limit:
                    self._too_many()
            else:
                self._fill_node(self.buffer_of(store), offset, length, pattern)
                self.used.add(self.key_of(store))

    def _fill_node(self, buffer: int, offset: int, count: int, pattern: bytes) -> None:
        node = {"op": "fill", "buffer": buffer, "offset": offset, "bytes": count, "pattern": list(pattern)}
        self._append(node)

    def _append(self, node: dict[str, Any]) -> None:
        if self.violation is not None:
            raise Refusal(self.violation)
        if len(self.plan.nodes) >= self.node_limit:
            self._too_many()
        place = self.place()
        self.plan.node(node, None if place is None else f"{place.file}:{place.line}")

    def _too_many(self) -> NoReturn:
        self.refuse(
            "too_many_nodes", f"the plan has more than {self.node_limit} nodes", "fuse steps into fewer kernels"
        )

    # What kernelfleet_ext calls -------------------------------------------------------------------------------------

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
        """Records a launch."""
        self._in_forward(f"a launch of {kernel}")
        arguments = [self._argument(kernel, position, value) for position, value in enumerate(args)]
        node: dict[str, Any] = {"op": "launch", "module": 0, "kernel": kernel, "grid": list(grid), "block": list(block)}
        node["module"] = self.plan.module(source.path, source.defines, source.flags)
        node["shared"] = shared
        if cluster is not None:
            node["cluster"] = list(cluster)
        node["cooperative"] = cooperative
        node["args"] = arguments
        self._append(node)

    def library(self, call: str, tensors: dict[str, torch.Tensor | None], **attributes: Any) -> None:
        """Records a library call."""
        self._in_forward(f"kf.{call}")
        refs = {name: None if value is None else self.reference(value, used=True) for name, value in tensors.items()}
        self._append({"op": "library", "call": call, **refs, **attributes})

    def _in_forward(self, what: str) -> None:
        if self.phase != "forward":
            self.refuse(
                "not_expressible",
                f"{what} while {PHASES[self.phase]}: a plan holds what forward launches",
                "launch it in forward, or compute on parameters with PyTorch (that runs for real, once)",
            )

    def _argument(self, kernel: str, position: int, value: Any) -> Any:
        what = f"argument {position} of {kernel}"
        if value is None:
            return "null"
        if isinstance(value, torch.Tensor):
            if value.numel() == 0:
                return "null"
            store, first = self.locate(value, what)
            return self._pointer(store, first * value.element_size())
        if isinstance(value, Scalar):
            if value.kind.startswith("f"):
                return {value.kind: self._finite(what, float(value.value))}
            return {value.kind: value.value}
        exact = EXACT.get(type(value).__name__) if type(value).__module__ in ("numpy", "ctypes") else None
        if exact is not None:
            kind, convert = exact
            raw = getattr(value, "value", value)
            if kind == "pointer":
                return self._integer(what, int(raw or 0)) if raw else "null"
            return {kind: self._finite(what, float(raw)) if convert is float else int(raw)}
        if isinstance(value, bool):
            return {"int": int(value)}
        if isinstance(value, int):
            return self._integer(what, value)
        if isinstance(value, float):
            return {"float": self._finite(what, value)}
        if hasattr(value, "__index__") and type(value).__module__ == "numpy":
            return self._integer(what, int(value))
        if hasattr(value, "__float__") and type(value).__module__ == "numpy":
            return {"float": self._finite(what, float(value))}
        raise TypeError(f"{what}: {value!r} ({type(value).__name__}) is no tensor, number or None")

    def _integer(self, what: str, value: int) -> Any:
        found = self.at_address(value)
        if found is not None:
            return self._pointer(*found)
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"{what}: {value} doesn't fit 64 bits")
        return {"int": value - 2**64 if value >= 2**63 else value}

    def _finite(self, what: str, value: float) -> float:
        if not math.isfinite(value):
            self.refuse(
                "not_expressible", f"{what} is {value}, which a plan can't say", "write INFINITY or NAN in the kernel"
            )
        return value

    def _pointer(self, store: Store, offset: int) -> Any:
        number = self.buffer_of(store)
        self.used.add(self.key_of(store))
        return {"pointer": {"buffer": number, "offset": offset}}

    def locate(self, tensor: torch.Tensor, what: str) -> tuple[Store, int]:
        """The store behind a tensor and its offset in elements."""
        from kernelfleet_recorder.intercept import store_of

        store = store_of(self, tensor)
        if store is None:
            raise TypeError(f"{what}: a tensor on {tensor.device} with layout {tensor.layout} has no address")
        with torch._C.DisableTorchFunction():
            return store, int(tensor.storage_offset())

    def reference(self, tensor: torch.Tensor, used: bool) -> dict[str, Any]:
        """A tensor as the plan writes it; `used` when a node is about to read or write it."""
        if tensor.dtype not in DTYPES:
            self.refuse("not_expressible", f"a plan has no tensors of {tensor.dtype}")
        store, first = self.locate(tensor, "a tensor")
        number = self.buffer_of(store)
        if used:
            self.used.add(self.key_of(store))
        return {
            "buffer": number,
            "offset": first * tensor.element_size(),
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
        }

    # Outputs --------------------------------------------------------------------------------------------------------

    def outputs(self, value: Any) -> tuple[list[dict[str, Any]], Any]:
        """The flat outputs and their structure; refuses what no node has written."""
        flat: list[dict[str, Any]] = []

        def walk(part: Any, path: str, depth: int) -> Any:
            if depth > 32:
                self.refuse("structure", "the outputs are nested more than 32 deep")
            if isinstance(part, torch.Tensor):
                flat.append(self._output(part, path))
                return "tensor"
            if isinstance(part, tuple):
                return {"tuple": [walk(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(part)]}
            if isinstance(part, list):
                return {"list": [walk(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(part)]}
            if isinstance(part, dict):
                for key in part:
                    if not isinstance(key, str):
                        self.refuse("structure", f"{path} has the key {key!r}; keys of outputs are strings")
                return {"dict": [[key, walk(item, f"{path}[{key!r}]", depth + 1)] for key, item in part.items()]}
            if part is None or type(part) in (int, float, bool, str):
                return {"value": repr(part)}
            self.refuse("structure", f"{path} is {type(part).__name__}: no tensor, tuple, list, dict or plain value")

        structure = walk(value, "the output", 0)
        return flat, structure

    def _output(self, tensor: torch.Tensor, path: str) -> dict[str, Any]:
        store, _ = self.locate(tensor, path)
        if tensor.numel() and (
            store.kind == "made" and not store.fills or store.kind == "workspace" and store.key not in self.used
        ):
            self.refuse(
                "unwritten_output",
                f"{path} of shape {tuple(tensor.shape)} is memory that no launch has been given: nothing wrote it",
                "pass it to the kernel that computes it",
            )
        if store.kind == "real" and store.undefined and self.key_of(store) in self.used:
            place = store.undefined if isinstance(store.undefined, Place) else None
            self.violation = Violation(
                "not_expressible",
                f"{path} was written by PyTorch first and then given to a kernel: in a plan it would be a constant, "
                "which no kernel may write",
                "let the kernel write all of its output, that part too",
                place,
            )
            raise Refusal(self.violation)
        return self.reference(tensor, used=False)

    # Where the candidate stands -------------------------------------------------------------------------------------

    def place(self, traceback: Any = None) -> Place | None:
        """The innermost line of the candidate, on the stack or in a traceback."""
        found: tuple[str, int] | None = None
        if traceback is not None:
            while traceback is not None:
                if traceback.tb_frame.f_code.co_filename.startswith(ROOT):
                    found = traceback.tb_frame.f_code.co_filename, traceback.tb_lineno
                traceback = traceback.tb_next
        else:
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code.co_filename.startswith(ROOT):
                    found = frame.f_code.co_filename, frame.f_lineno
                    break
                frame = frame.f_back  # type: ignore[assignment]
        return None if found is None else self.line(found[0], found[1])

    def line(self, filename: str, number: int) -> Place:
        """A line of a candidate's file."""
        name = filename.removeprefix(ROOT)
        lines = self.files.get(name, "").splitlines()
        return Place(name, number, lines[number - 1].strip() if 0 < number <= len(lines) else "")

    def refuse(self, code: str, message: str, hint: str = "") -> NoReturn:
        """Refuses the recording at the candidate's line. The first refusal stands, whatever is caught."""
        if self.violation is None:
            self.violation = Violation(code, message, hint, self.place())
        raise Refusal(self.violation)


PHASES = {
    "import": "model_new.py is imported",
    "constructor": "ModelNew is constructed",
    "load": "parameters are loaded",
    "forward": "forward runs",
    "done": "the recording is over",
}

EXACT: dict[str, tuple[str, type]] = {
    "float16": ("f16", float),
    "float32": ("f32", float),
    "int32": ("i32", int),
    "int64": ("i64", int),
    "uint32": ("u32", int),
    "uint8": ("u8", int),
    "intc": ("i32", int),
    "c_float": ("f32", float),
    "c_double": ("f64", float),
    "c_int": ("i32", int),
    "c_uint": ("u32", int),
    "c_long": ("i64", int),
    "c_longlong": ("i64", int),
    "c_ubyte": ("u8", int),
    "c_void_p": ("pointer", int),
}


def pattern(value: Any, dtype: torch.dtype) -> bytes:
    """The bytes of one element of `dtype` that holds `value`."""
    from kernelfleet_recorder.intercept import quiet

    with quiet():
        one = torch.full((1,), value, dtype=dtype)
        if one.element_size() not in (1, 2, 4, 8):
            raise TypeError(f"a fill of {dtype}: a plan fills elements of 1, 2, 4 or 8 bytes")
        return bytes(one.view(torch.uint8).tolist())


def device_properties(device: str, given: dict[str, Any]) -> SimpleNamespace:
    """Attributes of the device under the names that candidates use, with those of the request over the defaults."""
    if device == "cpu":
        return SimpleNamespace(**{"name": "cpu", "threads": 1, **given})
    values: dict[str, Any] = {
        "name": "NVIDIA H100 80GB HBM3",
        "major": 9,
        "minor": 0,
        "total_memory": 80 << 30,
        "multi_processor_count": 132,
        "warp_size": 32,
        "max_threads_per_block": 1024,
        "max_threads_per_multi_processor": 2048,
        "regs_per_multiprocessor": 65536,
        "shared_memory_per_block": 49152,
        "shared_memory_per_block_optin": 232448,
        "shared_memory_per_multiprocessor": 233472,
        "l2_cache_size": 50 << 20,
        "is_integrated": False,
        **given,
    }
    values.setdefault("L2_cache_size", values["l2_cache_size"])
    return SimpleNamespace(**values)
