"""What the kernels' module imports as `kernelfleet_ext` in an exported package: launches happen at once.

Knows ctypes, the CUDA driver's interface and PyTorch's current stream. Must not know the reference or the checks of
shapes, which come before. Needs PyTorch alone; on the CPU device a C++ compiler only where the shared library that
came with the package doesn't fit this processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import os
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
CXX_FLAGS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=c++17", "-fno-semantic-interposition"]


class Unusable(RuntimeError):
    """The kernels can't be used on this machine; the reason is the message."""


@functools.cache
def signature() -> dict[str, Any]:
    """What the candidate was judged for: device, architecture, inputs, images."""
    return json.loads((FOLDER / "signature.json").read_text())


def device() -> str:
    """`"cuda"` or `"cpu"`."""
    return signature()["device"]


@functools.cache
def _cuda_properties() -> Any:
    facts: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return SimpleNamespace(
        name=facts.name,
        multi_processor_count=facts.multi_processor_count,
        l2_cache_size=facts.L2_cache_size,
        shared_memory_per_block_optin=facts.shared_memory_per_block_optin,
        total_memory=facts.total_memory,
        warp_size=facts.warp_size,
        major=facts.major,
        minor=facts.minor,
    )


def properties() -> Any:
    """Facts about the device, as when the candidate was recorded."""
    if device() == "cuda":
        return _cuda_properties()
    return SimpleNamespace(name="cpu", threads=torch.get_num_threads(), simd=None)


class Scalar:
    """An argument of an exact type, packed."""

    def __init__(self, kind: str, value: float) -> None:
        self.kind, self.value = kind, value


def _maker(kind: str) -> Any:
    def make(value: float) -> Scalar:
        return Scalar(kind, value)

    make.__name__ = kind
    make.__doc__ = f"An argument of type {kind}."
    return make


f16, f32, f64, i32, i64, u32, u8 = map(_maker, ("f16", "f32", "f64", "i32", "i64", "u32", "u8"))
FORMATS = {"f16": "e", "f32": "f", "f64": "d", "i32": "i", "i64": "q", "u32": "I", "u8": "B"}
CTYPES = {"f32": ctypes.c_float, "f64": ctypes.c_double, "i32": ctypes.c_int32, "i64": ctypes.c_int64}
CTYPES |= {"u32": ctypes.c_uint32, "u8": ctypes.c_uint8}


def load(path: str, defines: Mapping[str, object] | None = None, flags: Sequence[str] | None = None) -> Module:
    """Names a source file; it is loaded at its first launch."""
    pairs = []
    for name, value in (defines or {}).items():
        text = "1" if value is True else "0" if value is False else "" if value is None else str(value)
        pairs.append((str(name), text))
    return Module(str(path).removeprefix("./"), tuple(pairs), tuple(str(flag) for flag in flags or ()))


class Module:
    """A source file; `module.name` is its kernel `name`."""

    def __init__(self, path: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> None:
        self._path, self._defines, self._flags = path, defines, flags

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.function(name)

    def __deepcopy__(self, _memo: object) -> Module:
        return self

    def function(self, name: str) -> Kernel:
        """The kernel `name`."""
        return Kernel(self, name)

    def launch(
        self,
        kernel: str,
        grid: Any = 1,
        block: Any = 1,
        shared: int = 0,
        cluster: Any = None,
        cooperative: bool = False,
        args: Sequence[Any] = (),
    ) -> None:
        """Launches `kernel` with everything spelt out."""
        _launch(self.function(kernel), grid, block, shared, cluster, cooperative, args)


class Kernel:
    """A function of a module."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self._name = module, name

    def __getitem__(self, configuration: tuple[Any, ...]) -> Any:
        grid, block, *rest = configuration
        return lambda *args: _launch(self, grid, block, rest[0] if rest else 0, None, False, args)

    def __call__(self, *args: Any) -> None:
        _launch(self, 1, 1, 0, None, False, args)


def _launch(
    kernel: Kernel, grid: Any, block: Any, shared: int, cluster: Any, cooperative: bool, args: Sequence[Any]
) -> None:
    module = kernel._module
    key = (module._path, module._defines, module._flags)
    if device() == "cpu":
        getattr(_library(*key), kernel._name)(*map(_cpu_argument, args))
        return
    ordinal = torch.cuda.current_device()
    for arg in args:
        if isinstance(arg, torch.Tensor) and arg.is_cuda:
            ordinal = arg.device.index
            break
    with torch.cuda.device(ordinal):
        _cuda_launch(_function(ordinal, *key, kernel._name), grid, block, int(shared), cluster, cooperative, args)


# The CPU device: functions of a shared library.


def _cpu_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Scalar):
        if value.kind == "f16":
            return ctypes.c_uint16(struct.unpack("H", struct.pack("e", value.value))[0])
        return CTYPES[value.kind](value.value)  # type: ignore[arg-type]
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int64(int(value))


def _processor() -> set[str]:
    """Names of this processor's instructions."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    line = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return set(line.partition(":")[2].split())


@functools.cache
def _library(path: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    image = _image(path, defines, flags)
    wanted = set(signature().get("processor", ()))
    if image is not None and wanted <= _processor():
        return ctypes.CDLL(str(image))
    # Built for another processor: its instructions may be missing here, so build for this one.
    arguments = [f"-D{name}={value}" for name, value in defines] + list(flags)
    sources = sorted(p for p in (FOLDER / "candidate").rglob("*") if p.is_file() and p.suffix != ".py")
    digest = hashlib.sha256(json.dumps([path, arguments, sorted(_processor())]).encode())
    for source in [*sources, FOLDER / "include" / "kernelfleet_math.h"]:
        digest.update(source.read_bytes() if source.is_file() else b"")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kernelfleet-export"
    target = home / f"{digest.hexdigest()}.so"
    if not target.is_file():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            made = Path(folder) / "made.so"
            command = ["c++", *CXX_FLAGS, f"-I{FOLDER / 'include'}", *arguments, "-o", str(made), path]
            try:
                done = subprocess.run(command, cwd=FOLDER / "candidate", capture_output=True, text=True, check=False)
            except OSError as error:
                raise Unusable(f"the library was built for another processor and there is no c++: {error}") from error
            if done.returncode != 0:
                raise Unusable(f"the kernels don't compile on this machine: {done.stderr[:500]}")
            made.rename(target)
    return ctypes.CDLL(str(target))


def _image(path: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> Path | None:
    for entry in signature()["images"]:
        if (entry["path"], entry["defines"], entry["flags"]) == (path, [list(d) for d in defines], list(flags)):
            return FOLDER / "images" / entry["file"]
    return None


# CUDA: the driver's interface, in PyTorch's context and on its current stream.


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} ({status})")


@functools.cache
def _cuda_module(ordinal: int, path: str, defines: tuple[tuple[str, str], ...], flags: tuple[str, ...]) -> Any:
    image = _image(path, defines, flags)
    if image is None:
        raise Unusable(f"the package holds no image of {path} with these defines")
    handle = ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(handle), image.read_bytes()), f"loading {path} on cuda:{ordinal}")
    return handle


@functools.cache
def _function(ordinal: int, path: str, defines: Any, flags: Any, name: str) -> tuple[Any, str, list[int]]:
    module = _cuda_module(ordinal, path, defines, flags)
    handle = ctypes.c_void_p()
    _check(_driver().cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"kernel {name}")
    sizes: list[int] = []
    while True:
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        index = ctypes.c_size_t(len(sizes))
        if _driver().cuFuncGetParamInfo(handle, index, ctypes.byref(offset), ctypes.byref(size)) != 0:
            return handle, name, sizes
        sizes.append(size.value)


def _cuda_argument(value: Any, size: int) -> ctypes.Array[ctypes.c_char]:
    if isinstance(value, torch.Tensor):
        data = struct.pack("Q", value.data_ptr())
    elif value is None:
        data = struct.pack("Q", 0)
    elif isinstance(value, Scalar):
        data = struct.pack(FORMATS[value.kind], value.value)
    elif isinstance(value, float):
        data = struct.pack({8: "d", 2: "e"}.get(size, "f"), value)
    else:
        data = int(value).to_bytes(size, "little", signed=int(value) < 0)
    if len(data) != size:
        raise TypeError(f"an argument of {len(data)} bytes where the kernel takes {size}")
    return ctypes.create_string_buffer(data, size)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class _Configuration(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def _extent(value: Any) -> tuple[int, int, int]:
    parts = [int(part) for part in (value if isinstance(value, (tuple, list)) else (value,))]
    parts += [1] * (3 - len(parts))
    return parts[0], parts[1], parts[2]


def _cuda_launch(
    function: tuple[Any, str, list[int]],
    grid: Any,
    block: Any,
    shared: int,
    cluster: Any,
    cooperative: bool,
    args: Sequence[Any],
) -> None:
    handle, name, sizes = function
    if len(args) != len(sizes):
        raise TypeError(f"{name} takes {len(sizes)} arguments, {len(args)} were given")
    if shared > 48 * 1024:
        # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(_driver().cuFuncSetAttribute(handle, 8, shared), f"shared memory of {name}")
    values = [_cuda_argument(value, size) for value, size in zip(args, sizes, strict=True)]
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    attributes = (_Attribute * 2)()
    count = 0
    if cluster is not None:
        attributes[count].id = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        for i, size in enumerate(_extent(cluster)):
            attributes[count].value[i] = size
        count += 1
    if cooperative:
        attributes[count].id = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[count].value[0] = 1
        count += 1
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    configuration = _Configuration(
        (ctypes.c_uint * 3)(*_extent(grid)), (ctypes.c_uint * 3)(*_extent(block)), shared, stream, attributes, count
    )
    _check(_driver().cuLaunchKernelEx(ctypes.byref(configuration), handle, pointers, None), f"launching {name}")


# Library calls are PyTorch's own.


def empty(shape: Any, dtype: torch.dtype | None = None, memory_format: Any = None) -> torch.Tensor:
    """An uninitialised tensor on the device."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    return torch.empty(shape, dtype=dtype, device=device(), memory_format=memory_format or torch.contiguous_format)


def _given(result: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return result if out is None else out.copy_(result)


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`a @ b (+ bias)`."""
    if bias is not None and a.dim() == b.dim() == 2:
        return torch.addmm(bias, a, b, out=out) if out is not None else torch.addmm(bias, a, b)
    if bias is None:
        return torch.matmul(a, b, out=out) if out is not None else torch.matmul(a, b)
    return _given(torch.matmul(a, b) + bias, out)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`x @ weight.T (+ bias)`."""
    return _given(torch.nn.functional.linear(x, weight, bias), out)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution over 1 to 3 dimensions."""
    operator = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[x.dim() - 3]
    return _given(operator(x, weight, bias, stride, padding, dilation, groups), out)


def conv_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Transposed convolution over 1 to 3 dimensions."""
    functional = torch.nn.functional
    operator = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[x.dim() - 3]
    return _given(operator(x, weight, bias, stride, padding, output_padding, groups, dilation), out)
