"""The native part (`agent-image/native/process.cpp`) by ctypes: memory for tensors, and what was dispatched.

Knows its functions. Must not know what they are used for.
"""

from __future__ import annotations

import ctypes

import torch
from kernelfleet_zygote import Refused

_TEXT = 1 << 16


class Native:
    """The library at `path`, once a process."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._lib = ctypes.CDLL(path)
        except OSError as error:
            raise Refused("judge", f"the native part can't be loaded: {error}") from error
        self._lib.kernelfleet_host_pool.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
        for name in ("kernelfleet_host_offset", "kernelfleet_device_offset"):
            function = getattr(self._lib, name)
            function.argtypes = [ctypes.c_void_p]
            function.restype = ctypes.c_longlong
        self._lib.kernelfleet_device_pool.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._lib.kernelfleet_end.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._lib.kernelfleet_end.restype = ctypes.c_size_t
        self._text = ctypes.create_string_buffer(_TEXT)

    def host_pool(self, fd: int, start: int, size: int) -> None:
        """Tensors of the CPU lie in this part of the memory file from now on; the descriptor stays the caller's."""
        if self._lib.kernelfleet_host_pool(fd, start, size):
            raise Refused("memory", f"{size} bytes for tensors can't be mapped")

    def device_allocator(self) -> None:
        """Tensors of the card lie in the pool from now on; before there is one, nowhere. Before CUDA is initialised."""
        allocator = torch.cuda.memory.CUDAPluggableAllocator(
            self.path, "kernelfleet_device_take", "kernelfleet_device_give"
        )
        torch.cuda.memory.change_current_allocator(allocator)

    def device_pool(self, address: int, size: int) -> None:
        """Where the pool of the card's tensors is mapped."""
        self._lib.kernelfleet_device_pool(address, size)

    def offset(self, tensor: torch.Tensor) -> int:
        """Where the tensor's first element lies in its pool; -1 if it doesn't."""
        name = "kernelfleet_device_offset" if tensor.is_cuda else "kernelfleet_host_offset"
        return int(getattr(self._lib, name)(tensor.data_ptr()))

    def watch(self) -> None:
        """Makes `begin` and `end` work; once, while there is one thread."""
        self._lib.kernelfleet_watch()

    def begin(self) -> None:
        """Records the operators that are dispatched from now on."""
        self._lib.kernelfleet_begin()

    def end(self) -> dict[str, int]:
        """How often each was, since `begin`."""
        size = int(self._lib.kernelfleet_end(self._text, _TEXT))
        found: dict[str, int] = {}
        for line in self._text.raw[: min(size, _TEXT)].decode("utf-8", "replace").splitlines():
            name, _, count = line.rpartition(" ")
            if name and count.isdigit():
                found[name] = int(count)
        return found
