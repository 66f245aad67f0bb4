"""A task's source as a module: `Model`, `get_inputs`, `get_init_inputs`, and the errors of what isn't one.

Knows KernelBench's task layout. Must not know devices' buffers, time or comparison. Whatever the source raises
becomes a `Refused` that says what was being done and at which line.
"""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kernelfleet_zygote import Refused

MODULE = "kernelfleet_task"
# What else than an exception of its own says that there was no memory: C++'s allocator, the driver, cuBLAS.
NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def lacks_memory(error: BaseException) -> bool:
    """Whether memory of the host or the device was lacking: that is not the task's fault, nor that of a kernel."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in NO_MEMORY)


@contextmanager
def told(what: str, path: str) -> Iterator[None]:
    """Turns an exception of task code into a `Refused` with the innermost line of the task's file."""
    try:
        yield
    except Refused:
        raise
    except BaseException as error:
        if lacks_memory(error):
            raise Refused("memory", f"out of memory while {what}: {error}"[:2000]) from error
        text = f"{type(error).__name__}: {error}"[:2000]
        extra: dict[str, Any] = {}
        line = line_of(error, path)
        if line is not None:
            extra["line"] = line
        code = "exception"
        if isinstance(error, ImportError):
            code = "import"
        elif "CUDA error" in text or "CUDNN_STATUS" in text:
            code = "cuda"
        raise Refused(code, f"{what}: {text}", **extra) from error


def line_of(error: BaseException, path: str) -> int | None:
    """Line of the innermost frame in `path` that `error` went through."""
    line = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def seeded(seed: int) -> None:
    """`torch.manual_seed` for the CPU and CUDA devices.

    PyTorch's own also leaves the seed with kinds of devices that were never used, each time with a formatted stack of
    the call: half the time of a small input set.
    """
    if not torch.cuda.is_initialized():
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    for generator in torch.cuda.default_generators:
        generator.manual_seed(seed)


class Task:
    """A loaded task."""

    def __init__(self, source: str, path: str) -> None:
        """Executes `source` as a module whose file name is `path`.

        Raises `Refused`: `parse`, `import`, `exception`, `no_model`, `no_get_inputs`.
        """
        self.source = source
        self.path = path
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        try:
            code = compile(source, path, "exec")
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise Refused("parse", f"the task isn't Python: {error}", line=line) from error
        module = types.ModuleType(MODULE)
        module.__file__ = path
        sys.modules[MODULE] = module
        torch.manual_seed(0)
        with told("executing the task's module", path):
            exec(code, module.__dict__)  # confined: the task comes from people and models alike
        self.module = module
        model = getattr(module, "Model", None)
        if not (isinstance(model, type) and issubclass(model, torch.nn.Module)):
            raise Refused("no_model", "the task defines no class Model that derives from torch.nn.Module")
        self.model_class = model
        self._get_inputs = self._function("get_inputs", "no_get_inputs")
        self._get_init_inputs: Callable[[], Any] = (
            self._function("get_init_inputs", "no_get_init_inputs") if hasattr(module, "get_init_inputs") else list
        )

    def _function(self, name: str, code: str) -> Callable[[], Any]:
        function = getattr(self.module, name, None)
        if not callable(function):
            raise Refused(code, f"the task defines no function {name}()")
        return function  # type: ignore[no-any-return]

    def init_inputs(self) -> list[Any]:
        """Arguments of the constructor."""
        with told("get_init_inputs()", self.path):
            values = self._get_init_inputs()
            if not isinstance(values, (list, tuple)):
                raise Refused("no_get_init_inputs", f"get_init_inputs() gave {type(values).__name__}, not a list")
            return list(values)

    def init_literal(self) -> str | None:
        """`get_init_inputs()` as the text of a Python literal; None where it can't be one."""
        values = self.init_inputs()
        text = repr(values)
        try:
            return text if ast.literal_eval(text) == values else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return None

    def inputs(self, seed: int, device: str) -> list[Any]:
        """`get_inputs()` under `torch.manual_seed(seed)` with `device` as the default device, in order."""
        seeded(seed)
        with told("get_inputs()", self.path), torch.no_grad():
            if device == "cpu":
                values = self._get_inputs()
            else:
                with torch.device(device):
                    values = self._get_inputs()
        if isinstance(values, torch.Tensor):
            values = [values]
        if not isinstance(values, (list, tuple)):
            raise Refused("no_get_inputs", f"get_inputs() gave {type(values).__name__}, not a list")
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout != torch.strided:
                    raise Refused(
                        "input", f"an input has the layout {value.layout}: only strided tensors are supported"
                    )
            elif isinstance(value, (list, tuple, dict)) and _holds_tensor(value):
                raise Refused(
                    "input", "an input is a container of tensors: only tensors and plain values are supported"
                )
        return [v.detach() if isinstance(v, torch.Tensor) else v for v in values]

    def build(self, seed: int, device: str = "cpu") -> torch.nn.Module:
        """`Model(*get_init_inputs())` under `seed` in `eval()`, without gradients."""
        torch.manual_seed(seed)
        arguments = self.init_inputs()
        with told("constructing Model", self.path):
            if device == "cpu":
                model = self.model_class(*arguments)
            else:
                with torch.device(device):
                    model = self.model_class(*arguments)
            model.eval()
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        return model

    def call(self, model: Callable[..., Any], inputs: list[Any]) -> Any:
        """`model(*inputs)` without gradients; errors name the line."""
        with told("forward", self.path), torch.no_grad():
            return model(*inputs)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, dict):
        return any(_holds_tensor(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_tensor(v) for v in value)
    return False


def plain_tensors(model: torch.nn.Module) -> list[str]:
    """Names of tensors that hang on the model without being in its state dict."""
    names = []
    for prefix, module in model.named_modules():
        held = set(module._non_persistent_buffers_set)
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules", "_flat_weights") and _holds_tensor(value):
                held.add(name)
        names += [f"{prefix}.{name}" if prefix else name for name in sorted(held)]
    return names
