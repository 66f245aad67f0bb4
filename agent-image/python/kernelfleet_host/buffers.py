"""Memory that other processes of the judge map: a sealed memfd on the CPU, a `cuMemCreate` allocation on CUDA.

Knows how such memory is made, exported, imported and seen as a torch tensor. Must not know what lies in it.
Buffers of other processes on the CPU are read and written through their descriptor, never mapped: a hostile
process may shrink its file, and a mapping would then fault here.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from typing import Protocol

import torch
from kernelfleet_zygote import Refused

PAGE = 4096
_CHUNK = 64 << 20
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4
"""No shrinking, no growing, and no further seals: a candidate could keep everybody from writing otherwise."""


class Shared(Protocol):
    """A buffer of our own. `base`: uint8 tensor over all of it; `size`: bytes, rounded up."""

    base: torch.Tensor
    size: int

    def export(self) -> int:
        """A new descriptor for another process; the caller closes it."""

    def close(self) -> None:
        """Gives the memory back; no view may be used afterwards."""


class CpuShared:
    """A memfd, mapped here, that no holder of its descriptor can shrink."""

    def __init__(self, size: int) -> None:
        self.size = max(PAGE, -(-size // PAGE) * PAGE)
        self._fd = os.memfd_create("kernelfleet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, self.size, mmap.MAP_SHARED)
        except BaseException:
            os.close(self._fd)
            raise
        self.base = torch.frombuffer(self._map, dtype=torch.uint8)

    def export(self) -> int:
        """A new descriptor of the memfd."""
        return os.dup(self._fd)

    def close(self) -> None:
        """Closes the descriptor; the mapping goes with its last view."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.base = torch.empty(0, dtype=torch.uint8)


class Foreign(Protocol):
    """A buffer of another process. `size`: bytes."""

    size: int

    def read(self, offset: int, count: int) -> torch.Tensor:
        """`count` bytes from `offset` as a uint8 tensor on the device: a snapshot on the CPU, the memory on CUDA."""

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Writes the bytes of `data` (uint8, contiguous) at `offset`."""

    def close(self) -> None:
        """Lets go of it."""


class CpuForeign:
    """A memfd that another process made; `fd` becomes this object's own."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size
        if os.fstat(fd).st_size < size:
            os.close(fd)
            raise Refused("bounds", f"a buffer of {size} bytes was announced, its file is smaller")

    def read(self, offset: int, count: int) -> torch.Tensor:
        """A copy of `count` bytes; `Refused("bounds")` when the file has become shorter."""
        data = torch.empty(count, dtype=torch.uint8)
        if count == 0:
            return data
        target = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
        done = 0
        while done < count:
            n = os.preadv(self._fd, [target[done : done + _CHUNK]], offset + done)
            if n <= 0:
                raise Refused("bounds", "an output buffer ended early")
            done += n
        return data

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Writes through the descriptor."""
        count = data.numel()
        if count == 0:
            return
        source = memoryview((ctypes.c_char * count).from_address(data.data_ptr())).cast("B")
        done = 0
        while done < count:
            done += os.pwrite(self._fd, source[done : done + _CHUNK], offset + done)

    def close(self) -> None:
        """Closes the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---- CUDA: the driver's virtual memory management, through ctypes (cuda.h of CUDA 12 and 13) ----


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Flags(ctypes.Structure):
    _fields_ = [
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", _Flags),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


_PINNED = 1
_POSIX_FD = 1
_DEVICE = 1
_READ_WRITE = 3
_u64 = ctypes.c_uint64
_size = ctypes.c_size_t


class Driver:
    """The calls of libcuda that shared buffers need. One per process, made after torch has initialised CUDA."""

    _instance: Driver | None = None

    def __init__(self, device: int) -> None:
        self.device = device
        try:
            lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Refused("cuda", f"the CUDA driver's library can't be loaded: {error}") from error
        self._lib = lib
        signatures: dict[str, list[object]] = {
            "cuMemGetAllocationGranularity": [ctypes.POINTER(_size), ctypes.POINTER(_AllocationProp), ctypes.c_int],
            "cuMemCreate": [ctypes.POINTER(_u64), _size, ctypes.POINTER(_AllocationProp), _u64],
            "cuMemRelease": [_u64],
            "cuMemAddressReserve": [ctypes.POINTER(_u64), _size, _size, _u64, _u64],
            "cuMemAddressFree": [_u64, _size],
            "cuMemMap": [_u64, _size, _size, _u64, _u64],
            "cuMemUnmap": [_u64, _size],
            "cuMemSetAccess": [_u64, _size, ctypes.POINTER(_AccessDesc), _size],
            "cuMemExportToShareableHandle": [ctypes.c_void_p, _u64, ctypes.c_int, _u64],
            "cuMemImportFromShareableHandle": [ctypes.POINTER(_u64), ctypes.c_void_p, ctypes.c_int],
            "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
        }
        for name, arguments in signatures.items():
            function = getattr(lib, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int
        self._prop = _AllocationProp()
        self._prop.type = _PINNED
        self._prop.requestedHandleTypes = _POSIX_FD
        self._prop.location = _Location(_DEVICE, device)
        granularity = _size()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), 0)
        self.granularity = max(int(granularity.value), 2 << 20)

    @classmethod
    def get(cls) -> Driver:
        """The driver of this process's current CUDA device."""
        if cls._instance is None:
            torch.cuda.init()
            torch.cuda.current_stream()
            torch.empty(1, device="cuda")  # makes the primary context current in this thread
            cls._instance = cls(torch.cuda.current_device())
        return cls._instance

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorName(status, ctypes.byref(text))
            label = text.value.decode() if text.value else str(status)
            raise Refused("memory" if status == 2 else "cuda", f"{name}: {label}")

    def round(self, size: int) -> int:
        """`size` rounded up to the granularity, at least one of it."""
        return max(1, -(-size // self.granularity)) * self.granularity

    def create(self, size: int) -> int:
        """A physical allocation of `size` bytes (a multiple of the granularity), exportable."""
        handle = _u64()
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._prop), 0)
        return int(handle.value)

    def release(self, handle: int) -> None:
        """Drops a handle; the memory lives on while it is mapped."""
        self._call("cuMemRelease", handle)

    def reserve(self, size: int) -> int:
        """A range of addresses."""
        address = _u64()
        self._call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
        return int(address.value)

    def free(self, address: int, size: int) -> None:
        """Gives a range of addresses back."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int, handle: int) -> None:
        """Maps an allocation, readable and writable by the device."""
        self._call("cuMemMap", address, size, 0, handle, 0)
        access = _AccessDesc(_Location(_DEVICE, self.device), _READ_WRITE)
        self._call("cuMemSetAccess", address, size, ctypes.byref(access), 1)

    def unmap(self, address: int, size: int) -> None:
        """Takes a mapping away; the device must not be using it."""
        self._call("cuMemUnmap", address, size)

    def export_fd(self, handle: int) -> int:
        """A new POSIX descriptor of an allocation."""
        fd = ctypes.c_int(-1)
        self._call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _POSIX_FD, 0)
        return int(fd.value)

    def import_fd(self, fd: int) -> int:
        """A handle of another process's allocation; the descriptor stays the caller's."""
        handle = _u64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _POSIX_FD)
        return int(handle.value)


class _Raw:
    """Device memory for `torch.as_tensor` (CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def device_bytes(address: int, size: int) -> torch.Tensor:
    """A uint8 tensor over mapped device memory; it doesn't own it."""
    return torch.as_tensor(_Raw(address, size), device="cuda")


class CudaShared:
    """Device memory that is its own allocation and can be mapped at further addresses."""

    def __init__(self, size: int) -> None:
        self._driver = Driver.get()
        self.size = self._driver.round(size)
        try:
            self.handle = self._driver.create(self.size)
        except Refused as refused:
            if refused.code != "memory":
                raise
            torch.cuda.empty_cache()  # what torch keeps for itself may be enough
            self.handle = self._driver.create(self.size)
        try:
            self._address = self._driver.reserve(self.size)
            self._driver.map(self._address, self.size, self.handle)
        except BaseException:
            self._driver.release(self.handle)
            raise
        self.base = device_bytes(self._address, self.size)

    def export(self) -> int:
        """A new POSIX descriptor of the allocation."""
        return self._driver.export_fd(self.handle)

    def close(self) -> None:
        """Unmaps and releases it."""
        if self.handle:
            torch.cuda.synchronize()
            self.base = torch.empty(0, dtype=torch.uint8)
            self._driver.unmap(self._address, self.size)
            self._driver.free(self._address, self.size)
            self._driver.release(self.handle)
            self.handle = 0


class CudaForeign:
    """Device memory of another process; `fd` is closed once imported. `size` bytes are what was announced."""

    def __init__(self, fd: int, size: int) -> None:
        self._driver = Driver.get()
        self.size = size
        self._mapped = self._driver.round(size)
        try:
            self._handle = self._driver.import_fd(fd)
        finally:
            os.close(fd)
        try:
            self._address = self._driver.reserve(self._mapped)
            # fails where the allocation is smaller than announced
            self._driver.map(self._address, self._mapped, self._handle)
        except BaseException:
            self._driver.release(self._handle)
            raise
        self._base = device_bytes(self._address, self._mapped)

    def read(self, offset: int, count: int) -> torch.Tensor:
        """The memory itself."""
        return self._base[offset : offset + count]

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Copies `data` in."""
        self._base[offset : offset + data.numel()].copy_(data)

    def close(self) -> None:
        """Unmaps and releases it."""
        if self._handle:
            torch.cuda.synchronize()
            self._base = torch.empty(0, dtype=torch.uint8)
            self._driver.unmap(self._address, self._mapped)
            self._driver.free(self._address, self._mapped)
            self._driver.release(self._handle)
            self._handle = 0


class CudaWindow:
    """One range of addresses at which the allocations of several slots are mapped in turn.

    A captured graph reads its inputs here, so one capture serves all slots.
    """

    def __init__(self, first: CudaShared) -> None:
        self._driver = Driver.get()
        self.size = first.size
        self.address = self._driver.reserve(self.size)
        self._driver.map(self.address, self.size, first.handle)
        self._current = first.handle
        self.base = device_bytes(self.address, self.size)

    def show(self, buffer: CudaShared) -> None:
        """Maps `buffer` (of the same size) here; waits for the device first."""
        if buffer.handle == self._current:
            return
        torch.cuda.synchronize()
        self._driver.unmap(self.address, self.size)
        self._driver.map(self.address, self.size, buffer.handle)
        self._current = buffer.handle

    def close(self) -> None:
        """Takes mapping and addresses back."""
        if self._current:
            torch.cuda.synchronize()
            self.base = torch.empty(0, dtype=torch.uint8)
            self._driver.unmap(self.address, self.size)
            self._driver.free(self.address, self.size)
            self._current = 0


def share(size: int, device: str) -> Shared:
    """A new buffer of at least `size` bytes."""
    return CudaShared(size) if device == "cuda" else CpuShared(size)


def adopt(fd: int, size: int, device: str) -> Foreign:
    """Another process's buffer, of which `fd` becomes ours."""
    return CudaForeign(fd, size) if device == "cuda" else CpuForeign(fd, size)
