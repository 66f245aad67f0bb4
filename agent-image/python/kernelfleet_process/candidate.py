"""One candidate in its process: import, construct, load weights, call; what it returned and what it did.

Knows the ops `load` and `run` of `docs/interfaces.md`. Must not know what the answers are for. The judge stops this process
between its requests, so nothing here keeps time.
"""

from __future__ import annotations

import ast
import importlib
import math
import mmap
import os
import sys
import time
import traceback
from itertools import pairwise
from typing import Any

import torch
from kernelfleet_zygote import Channel, Memory, Refused
from kernelfleet_zygote.wire import Message, close_all

from kernelfleet_process import extension, libraries
from kernelfleet_process.native import Native

ENTRY = "model_new.py"
DTYPES = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def literal(text: str) -> Any:
    """A Python value from its `repr`: a literal, or one with `inf` and `nan` in it. `ValueError` else."""

    class Names(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.AST:
            if node.id in ("inf", "nan"):
                return ast.copy_location(ast.Constant(math.inf if node.id == "inf" else math.nan), node)
            return node

    return ast.literal_eval(Names().visit(ast.parse(text, mode="eval")))


class _Null(torch.nn.Module):
    """What every candidate is compared with: it returns what it has.

    On a card it starts one small kernel: the card then changes from one process to another and back as it does for every
    candidate, which takes longer than many a kernel.
    """

    def __init__(self, structure: Any, outputs: list[torch.Tensor], device: str) -> None:
        super().__init__()
        self._result = _nested(structure, iter(outputs))
        self._mark = torch.empty(1, device=device) if device == "cuda" else None

    def forward(self, *_inputs: Any) -> Any:
        """The same tensors each time."""
        if self._mark is not None:
            self._mark.fill_(1.0)
        return self._result


def _nested(structure: Any, tensors: Any) -> Any:
    if structure == "tensor":
        return next(tensors)
    kind, inner = next(iter(structure.items()))
    if kind == "value":
        return literal(inner)
    if kind == "dict":
        return {k: _nested(s, tensors) for k, s in inner}
    items = [_nested(s, tensors) for s in inner]
    return tuple(items) if kind == "tuple" else items


class Candidate:
    """See the module. A failure of the candidate is `Refused` with its place."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._root = os.getcwd()
        self._builds: set[tuple[int, ...]] = set()
        self._work = os.path.join(self._root, "work")
        self._native: Native | None = None
        self._model: Any = None
        self._device = "cpu"
        self._inputs: list[Any] = []
        self._ranges: list[tuple[int, int] | None] = []
        self._outputs: list[torch.Tensor] = []
        self._built = 0
        self._left: str | None = None
        self._foreign: str | None = None

    # ---- load ----

    def load(self, request: Message, fds: list[int]) -> Message:
        """Everything up to the first call. While an extension is wanted, the reply is `{"build": spec}`."""
        if self._model is not None:
            close_all(fds)
            raise Refused("malformed", "a process serves one candidate")
        files = request["files"]
        self._device = str(request["device"])
        if isinstance(request.get("native"), int):
            self._native = Native(self._library("native", fds[request["native"]]))
            self._native.watch()
        if request.get("pool") and self._native is not None:
            self._open_pool(request["device"], request["pool"], fds)
        self._lay_out(files)
        extension.install(files, self._work, self._device, self._ask)
        self._inputs = self._given(request, fds)
        state = self._state(request, fds)
        close_all(fds)
        if request.get("null"):
            self._model = self._null(request)
            return {}
        self._note_ways_out()
        make = self._guarded("import", "exception", lambda: self._import())
        init = literal(request["init"]) if isinstance(request.get("init"), str) else []
        device = request["device"]

        def construct() -> Any:
            model = make(**init) if isinstance(init, dict) else make(*init)
            return (model.cuda() if device == "cuda" and not request.get("build_only") else model).eval()

        model = self._guarded("constructor", "constructor", construct)
        if request.get("build_only"):
            return {}
        self._guarded("load_state_dict", "state_dict", lambda: model.load_state_dict(state, strict=True))
        self._model = model
        return {}

    def _note_ways_out(self) -> None:
        """Notes where a tensor is handed to a library whose work isn't dispatched, or such a library is opened.

        On a card whatever works there is seen by the profiler.
        """
        if self._device == "cpu":
            libraries.watch(self._builds, self._note_library)
        tensor: Any = torch.Tensor
        for name in ("numpy", "__array__", "__dlpack__", "tolist"):
            original = getattr(tensor, name)

            def noted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                self._left = self._left or _name
                return _original(*args, **kwargs)

            setattr(tensor, name, noted)

    def _note_library(self, what: str) -> None:
        # Opened once, it may work at every call: the first one is told with each of them.
        self._foreign = self._foreign or what

    def _library(self, name: str, fd: int) -> str:
        path = os.path.join(self._root, f"{name}.so")
        size = os.fstat(fd).st_size
        with open(path, "wb") as file:
            done = 0
            while done < size:
                done += os.sendfile(file.fileno(), fd, done, size - done)
        self._builds.add(libraries.mark(path))
        return path

    def _open_pool(self, device: str, pool: dict[str, Any], fds: list[int]) -> None:
        assert self._native is not None
        fd, start, size = fds[pool["fd"]], int(pool["from"]), int(pool["bytes"])
        if device == "cpu":
            self._native.host_pool(fd, start, size)
            return
        from kernelfleet_host.buffers import CudaForeign

        # The allocator has to be changed before CUDA is initialised, and the memory can be mapped only after.
        self._native.device_allocator()
        self._mapped = CudaForeign(os.dup(fd), int(pool["whole"]))
        self._native.device_pool(int(self._mapped.read(start, 1).data_ptr()), size)

    def _lay_out(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = os.path.normpath(os.path.join(self._work, name))
            if not path.startswith(self._work + os.sep):
                raise Refused("malformed", f"{name!r} leaves the candidate's folder")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        os.makedirs(self._work, exist_ok=True)
        os.chdir(self._work)
        sys.path.insert(0, self._work)

    def _given(self, request: Message, fds: list[int]) -> list[Any]:
        values: list[Any] = []
        for item, place in zip(request.get("inputs") or [], request.get("slot") or [], strict=True):
            if item.get("kind") == "value":
                values.append(literal(item["repr"]))
                self._ranges.append(None)
                continue
            dtype, size = DTYPES[item["dtype"]], int(place["bytes"])
            if request["device"] == "cuda":
                from kernelfleet_host.buffers import CudaForeign

                base = CudaForeign(os.dup(fds[place["fd"]]), size).read(0, size)
            else:
                base = torch.frombuffer(mmap.mmap(fds[place["fd"]], max(size, 1), mmap.MAP_SHARED), dtype=torch.uint8)
            self._ranges.append((base.data_ptr(), size))
            whole = base[: size - size % dtype.itemsize].view(dtype)
            values.append(torch.as_strided(whole, item["shape"], item["strides"]))
        return values

    def _state(self, request: Message, fds: list[int]) -> dict[str, torch.Tensor]:
        tensors = request.get("state") or []
        if not tensors or not isinstance(request.get("state_fd"), int):
            return {}
        end = max(item["offset"] + item["bytes"] for item in tensors)
        memory = Memory.open(os.dup(fds[request["state_fd"]]), end, writable=False)
        state = {}
        for item in tensors:
            dtype = DTYPES[item["dtype"]]
            if item["bytes"] == 0:
                state[item["name"]] = torch.empty_strided(item["shape"], item["strides"], dtype=dtype)
                continue
            count = item["bytes"] // dtype.itemsize
            flat = torch.frombuffer(memory.view, dtype=dtype, count=count, offset=item["offset"])
            state[item["name"]] = torch.as_strided(flat, item["shape"], item["strides"])
        return state

    def _null(self, request: Message) -> Any:
        device = request["device"]
        made = [
            torch.empty_strided(t["shape"], t["strides"], dtype=DTYPES[t["dtype"]], device=device)
            for t in request["outputs"]["tensors"]
        ]
        return _Null(request["outputs"]["structure"], made, device)

    def _ask(self, spec: extension.Spec) -> str:
        """Has an extension built: the conversation of `load` is interrupted for it."""
        self._channel.send({"ok": True, "build": spec})
        body, fds = self._channel.receive()
        if body.get("op") != "built" or len(fds) != 1:
            close_all(fds)
            raise Refused("malformed", "an extension was awaited")
        self._built += 1
        path = self._library(f"extension{self._built}", fds[0])
        close_all(fds)
        return path

    def _import(self) -> Any:
        if not os.path.isfile(os.path.join(self._work, ENTRY)):
            raise Refused("no_model_new", f"the candidate has no {ENTRY}")
        module = importlib.import_module(ENTRY.removesuffix(".py"))
        make = getattr(module, "ModelNew", None)
        if not isinstance(make, type) or not issubclass(make, torch.nn.Module):
            raise Refused("no_model_new", f"{ENTRY} defines no class ModelNew that is a torch.nn.Module")
        return make

    def _guarded(self, doing: str, code: str, step: Any) -> Any:
        try:
            return step()
        except Refused:
            raise
        except BaseException as error:
            raise self._explained(doing, code, error) from None

    def _explained(self, doing: str, code: str, error: BaseException) -> Refused:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place: dict[str, Any] = {}
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename.startswith(self._work + os.sep):
                place = {"file": os.path.relpath(frame.filename, self._work), "line": frame.lineno}
                place["source"] = (frame.line or "")[:500]
        if isinstance(error, SyntaxError) and (error.filename or "").startswith(self._work):
            code = "syntax"
            place = {"file": os.path.relpath(str(error.filename), self._work), "line": error.lineno or 0}
        return Refused(code, f"{doing}: {text}".replace(self._work + os.sep, "")[:4000], **place)

    # ---- run ----

    def run(self, request: Message, fds: list[int]) -> Message:
        """One call: where its outputs lie, and what was dispatched meanwhile."""
        close_all(fds)
        native, model = self._native, self._model
        if native is None or model is None:
            raise Refused("malformed", "no candidate is loaded")
        # What the last call returned was read; its memory is taken again as it would be outside.
        self._outputs = []
        self._left = None
        before = len(sys._current_frames())
        start = time.perf_counter_ns()
        native.begin()
        try:
            with torch.no_grad():
                result = model(*self._inputs)
            called = time.perf_counter_ns()
            if self._device == "cuda":
                torch.cuda.synchronize()
            waited = time.perf_counter_ns()
        except BaseException as error:
            raise self._explained("forward", "exception", error) from None
        torch.empty(0)  # the last operator of every record: one that ends before it was tampered with
        operators = native.end()
        left, threads = self._left or self._foreign, len(sys._current_frames()) - before
        reply = self._told(result)
        took = [(b - a) / 1000 for a, b in pairwise((start, called, waited, time.perf_counter_ns()))]
        reply.update(id=request.get("id"), operators=operators, left=left, threads=threads, took_us=took)
        return reply

    def ready(self, _request: Message, fds: list[int]) -> Message:
        """Does what a call does but for the model: a process that has slept would be slow at first."""
        close_all(fds)
        for _ in range(3):
            torch.empty(0)
            if self._device == "cuda":
                torch.cuda.synchronize()
            len(sys._current_frames())
        return {}

    def trace(self, request: Message, fds: list[int]) -> Message:
        """What runs on the card in a call, by PyTorch's profiler, and what the last of those calls returned."""
        close_all(fds)
        from kernelfleet_host.profile import launches

        model = self._model
        if model is None:
            raise Refused("malformed", "no candidate is loaded")
        self._outputs = []
        returned: list[Any] = [None]

        def call() -> None:
            returned[0] = None  # its memory is taken again, as between other calls
            returned[0] = model(*self._inputs)

        seen = launches(call, self._device)
        return {"launches": seen, **self._told(returned[0])}

    def _told(self, result: Any) -> Message:
        assert self._native is not None
        tensors: list[torch.Tensor] = []
        structure = self._flatten(result, tensors, 0)
        outputs: list[dict[str, Any]] = []
        kept: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            record: dict[str, Any] = {"dtype": NAMES.get(tensor.dtype, str(tensor.dtype))}
            place = self._within_inputs(tensor)
            if place is not None:
                record["input"], record["offset"] = place
            else:
                offset = self._native.offset(tensor)
                if offset < 0 and tensor.numel():
                    # Memory of the candidate's own: the copy is its to pay for.
                    tensor = tensor.clone(memory_format=torch.preserve_format)
                    offset = self._native.offset(tensor)
                    if offset < 0:
                        raise Refused("memory", f"output {number} lies in no memory that the judge can read")
                record["offset"] = max(offset, 0)
            record["shape"], record["strides"] = list(tensor.shape), list(tensor.stride())
            kept.append(tensor)
            outputs.append(record)
        self._outputs = kept  # they have to lie where they are until they were read
        return {"outputs": outputs, "structure": structure}

    def _within_inputs(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        pointer = tensor.data_ptr()
        for number, range_ in enumerate(self._ranges):
            if range_ is not None and tensor.numel() and range_[0] <= pointer < range_[0] + range_[1]:
                return number, pointer - range_[0]
        return None

    def _flatten(self, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
        if depth > 32:
            raise Refused("structure", "the output of forward nests deeper than 32")
        if isinstance(value, torch.Tensor):
            # A subclass could compute when it is read, a lazy conjugate or negative too.
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                raise Refused("structure", f"an output is a {type(value).__name__}, not a plain tensor")
            if value.layout != torch.strided or value.is_conj() or value.is_neg() or value.is_meta:
                raise Refused("structure", "an output is a tensor that holds no plain values")
            tensors.append(value)
            return "tensor"
        if isinstance(value, tuple):
            return {"tuple": [self._flatten(v, tensors, depth + 1) for v in value]}
        if isinstance(value, list):
            return {"list": [self._flatten(v, tensors, depth + 1) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[str(k), self._flatten(v, tensors, depth + 1)] for k, v in value.items()]}
        return {"value": repr(value)[:4096]}
