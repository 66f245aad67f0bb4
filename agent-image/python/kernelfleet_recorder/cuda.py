"""`torch.cuda` as it looks where there is no GPU but a candidate for one is recorded.

Knows the names that honest candidates call. Must not know the plan. Everything says: one device, index 0, with the
properties that the request gave; waiting for it is nothing, timing it or capturing its work is not expressible.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from kernelfleet_recorder.session import Session


class Stream:
    """The stream of a plan; a graph of nodes in order needs no other."""

    cuda_stream = 0
    stream_id = 0
    device = torch.device("cuda:0")
    device_index = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_args: object) -> None:
        pass

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait_stream(self, _other: object) -> None:
        """A plan's nodes run in order."""

    def wait_event(self, _event: object) -> None:
        """A plan's nodes run in order."""

    def record_event(self, event: Any = None) -> Any:
        """An event that says nothing."""
        return event or Event()

    def query(self) -> bool:
        """Always done."""
        return True


class Event:
    """An event that can be waited for but tells no time."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record(self, _stream: object = None) -> None:
        """Nothing to record."""

    def wait(self, _stream: object = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, _other: object) -> float:
        """There is no clock in a recording."""
        from kernelfleet_ext._session import current

        current("a timed event").refuse("not_expressible", "a recording has no clock: events tell no time")


class Nothing:
    """A context manager that does nothing (`torch.cuda.device`, `torch.cuda.stream`)."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_args: object) -> None:
        pass


def pretend(session: Session) -> None:
    """Replaces what asks the driver; for good, since a recorder's process lives for one recording."""

    def refuse_graph(*_args: Any, **_kwargs: Any) -> Any:
        session.refuse(
            "not_expressible",
            "capturing a CUDA graph is not expressible as a plan",
            "launch the kernels: the judge replays the whole plan as one CUDA graph",
        )

    def refuse_extension(*_args: Any, **_kwargs: Any) -> Any:
        session.refuse(
            "not_expressible",
            "an extension against PyTorch's headers is not expressible as a plan (process path)",
            'put the kernels into kernels/x.cu as extern "C" and use kf.load("kernels/x.cu")',
        )

    def script(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
        return (lambda inner: inner) if function is None else function

    def refuse_triton(*_args: Any, **_kwargs: Any) -> Any:
        session.refuse(
            "not_expressible",
            "Triton kernels are not expressible as a plan (process path)",
            'write the kernel in kernels/x.cu as extern "C" and launch it with kf.load("kernels/x.cu")',
        )

    triton: Any = sys.modules.get("triton")
    if triton is not None:
        triton.jit = refuse_triton
    # What is compiled would be framework operators; uncompiled they are refused at their own line.
    framework: Any = torch
    framework.compile = script
    framework.jit.script = script
    framework.utils.cpp_extension = type(
        "cpp_extension", (), {"load": refuse_extension, "load_inline": refuse_extension}
    )
    if session.device != "cuda":
        return
    # Layers that say `cuda` would pack their weights by cuDNN.
    torch.nn.RNNBase.flatten_parameters = lambda self: None  # type: ignore[method-assign]
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda _self, _stream: None
    torch.backends.cudnn.is_acceptable = lambda _tensor: False
    cuda: Any = torch.cuda
    properties = session.properties
    stream = Stream()
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_name": lambda _device=None: properties.name,
        "get_device_capability": lambda _device=None: (properties.major, properties.minor),
        "get_device_properties": lambda _device=None: properties,
        "is_bf16_supported": lambda *_args, **_kwargs: True,
        "synchronize": lambda _device=None: None,
        "current_stream": lambda _device=None: stream,
        "default_stream": lambda _device=None: stream,
        "set_stream": lambda _stream: None,
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": Nothing,
        "StreamContext": Nothing,
        "device": Nothing,
        "device_of": Nothing,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "reset_peak_memory_stats": lambda _device=None: None,
        "memory_allocated": lambda _device=None: 0,
        "max_memory_allocated": lambda _device=None: 0,
        "memory_reserved": lambda _device=None: 0,
        "mem_get_info": lambda _device=None: (properties.total_memory, properties.total_memory),
        "CUDAGraph": refuse_graph,
        "graph": refuse_graph,
        "make_graphed_callables": refuse_graph,
        "manual_seed": lambda _seed: None,
        "manual_seed_all": lambda _seed: None,
    }
    for name, value in values.items():
        setattr(cuda, name, value)
