"""One recording: files, parameters and shapes in, plan or refusal out.

Knows the op `record` of `docs/interfaces.md` and its order: import, construct, load, forward. Must not know how calls
are intercepted. What the candidate raises, and where, becomes the refusal.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from kernelfleet_ext import _session
from kernelfleet_zygote.wire import Memory, Message, Refused, close_all

from kernelfleet_recorder import cuda, files
from kernelfleet_recorder.intercept import DispatchLayer, FunctionLayer, data_less, from_bytes
from kernelfleet_recorder.refusal import Refusal, Violation
from kernelfleet_recorder.session import BY_NAME, PHASES, Session

ENTRY = "model_new.py"
MAX_FILES = 256
MAX_SOURCE = 8 << 20
CODES = {"import": "exception", "constructor": "constructor", "load": "state_dict", "forward": "exception"}
NO_MEMORY = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "out of memory")


def record(request: Message, fds: Sequence[int]) -> tuple[Message, list[int]]:
    """Serves the op; the reply without `"ok"` and its descriptors. Raises `Refused` with the reason else."""
    sources = request.get("files")
    if not isinstance(sources, dict) or not all(isinstance(text, str) for text in sources.values()):
        close_all(fds)
        raise Refused("malformed", "record needs files")
    if (
        len(sources) > MAX_FILES
        or sum(len(text.encode("utf-8", "surrogatepass")) for text in sources.values()) > MAX_SOURCE
    ):
        close_all(fds)
        raise Refused("not_expressible", f"a candidate has at most {MAX_FILES} files and {MAX_SOURCE >> 20} MiB")
    limits = request.get("limits") or {}
    session = Session(
        request["device"],
        sources,
        request.get("libraries") or (),
        request.get("properties"),
        int(limits.get("nodes") or 20_000),
    )
    try:
        state = _state(session, request, fds)
    except OSError as error:
        raise Refused("memory", f"the parameters can't be mapped: {error}") from error
    printed = files.Capped()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = printed, files.Capped()
    try:
        outputs, structure = _run(session, request, state)
    finally:
        sys.stdout, sys.stderr = streams
    reply: Message = {"plan": session.plan.finish(outputs, structure), "constants": session.plan.constants}
    reply["stdout"] = printed.text()
    if session.reads:
        reply["parameter_reads"] = session.reads
    fd = session.plan.constants_fd()
    if fd is None:
        return reply, []
    reply["fd"] = 0
    return reply, [fd]


def _state(session: Session, request: Message, fds: Sequence[int]) -> dict[str, torch.Tensor]:
    tensors = request.get("state") or []
    if not fds:
        if any(item["bytes"] for item in tensors):
            raise Refused("malformed", "the state dict's bytes didn't come")
        whole = memoryview(b"")
    else:
        close_all(fds[1:])
        end = max((item["offset"] + item["bytes"] for item in tensors), default=0)
        memory = Memory.open(fds[0], end, writable=False)
        memory.close_fd()
        whole = memoryview(memory.view)
    state = {}
    for item in tensors:
        raw = whole[item["offset"] : item["offset"] + item["bytes"]]
        state[item["name"]] = from_bytes(
            session, "parameter", item["name"], item["shape"], item["strides"], BY_NAME[item["dtype"]], raw
        )
    return state


def literal(text: str) -> Any:
    """A Python value from its `repr`: a literal, or one with `inf` and `nan` in it. `ValueError` else."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        tree = ast.parse(text, mode="eval")

        class Names(ast.NodeTransformer):
            def visit_Name(self, node: ast.Name) -> ast.AST:
                if node.id in ("inf", "nan"):
                    return ast.copy_location(ast.Constant(math.inf if node.id == "inf" else math.nan), node)
                return node

        return ast.literal_eval(Names().visit(tree))


def _inputs(session: Session, request: Message) -> list[Any]:
    values = []
    for number, item in enumerate(request.get("inputs") or []):
        if item.get("kind") == "value":
            try:
                values.append(literal(item["repr"]))
            except (ValueError, SyntaxError) as error:
                raise Refused("not_expressible", f"input {number} is {item['repr']}, no Python literal") from error
            continue
        dtype = BY_NAME[item["dtype"]]
        values.append(data_less(session, "input", number, item["shape"], item["strides"], dtype, item["bytes"]))
    return values


def _run(session: Session, request: Message, state: dict[str, torch.Tensor]) -> tuple[list[Any], Any]:
    files.install(session)
    cuda.pretend(session)
    inputs = _inputs(session, request)
    text = request.get("init")
    init = literal(text) if isinstance(text, str) else []
    _session.activate(session)
    with torch.no_grad(), FunctionLayer(session), DispatchLayer(session):
        module = _guarded(session, "import", lambda: _import(session))
        make = getattr(module, "ModelNew", None)
        if not isinstance(make, type) or not issubclass(make, torch.nn.Module):
            raise Refused("no_model_new", f"{ENTRY} defines no class ModelNew that is a torch.nn.Module")

        def construct() -> Any:
            model = make(**init) if isinstance(init, dict) else make(*init)
            model.eval()
            return model

        model = _guarded(session, "constructor", construct)
        _guarded(session, "load", lambda: model.load_state_dict(state, strict=True))
        result = _guarded(session, "forward", lambda: model(*inputs))
        described: tuple[list[Any], Any] = _guarded(session, "forward", lambda: session.outputs(result))
        return described


def _import(session: Session) -> ModuleType:
    if ENTRY not in session.files:
        raise Refused("no_model_new", f"the candidate has no {ENTRY}")
    name = ENTRY.removesuffix(".py")
    module = ModuleType(name)
    module.__file__ = f"/candidate/{ENTRY}"
    sys.modules[name] = module
    exec(files.compile_file(session, ENTRY), module.__dict__)
    return module


def _guarded(session: Session, phase: str, step: Callable[[], Any]) -> Any:
    """Runs a step of the candidate; whatever it raises or has had refused becomes `Refused`."""
    session.phase = phase
    try:
        result = step()
    except Refused:
        raise
    except BaseException as error:
        if session.violation is None:
            violation = error.violation if isinstance(error, Refusal) else _explain(session, phase, error)
        else:
            violation = session.violation
        raise _refused(violation) from None
    if session.violation is not None:
        raise _refused(session.violation)
    return result


def _refused(violation: Violation) -> Refused:
    reply = violation.reply()
    del reply["ok"]
    return Refused(reply.pop("code"), reply.pop("message"), **reply)


def _explain(session: Session, phase: str, error: BaseException) -> Violation:
    place = session.place(error.__traceback__)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = text.replace("/candidate/", "")
    hint = ""
    if isinstance(error, SyntaxError) and (error.filename or "").startswith("/candidate/"):
        place = session.line(str(error.filename), error.lineno or 0)
        return Violation("syntax", text, "", place)
    if isinstance(error, files.ForkRefused):
        return Violation("fork", str(error), "a candidate is one process; kernels are built by the judge", place)
    if (
        isinstance(error, MemoryError)
        or isinstance(error, RuntimeError)
        and any(part in str(error) for part in NO_MEMORY)
    ):
        return Violation("memory", f"out of memory while {PHASES[phase]}: {text}", "", place)
    if isinstance(error, SystemExit):
        text = f"the candidate ended its process: {text}"
    if isinstance(error, ModuleNotFoundError):
        own = ", ".join(sorted(name for name in session.files if name.endswith(".py")))
        hint = f"a candidate can import PyTorch, NumPy, kernelfleet_ext and its own files ({own}); never the reference"
    if phase == "load" and isinstance(error, RuntimeError):
        hint = "ModelNew must have the reference's parameters and buffers, by name and shape"
    code = CODES[phase]
    if phase == "load" and not isinstance(error, RuntimeError):
        code = "exception"
    return Violation(code, text, hint, place)
