"""Frames between the processes of a judge, and the shared memory whose descriptors ride on them.

Knows the framing of `docs/interfaces.md`: `u32 LE length`, `u32 LE number of descriptors`, JSON, descriptors as
SCM_RIGHTS on the first byte. Must not know what the messages mean. A peer may be hostile: lengths and counts are
bounded before anything is allocated.
"""

from __future__ import annotations

import array
import json
import mmap
import os
import select
import socket
import struct
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

MAX_BYTES = 64 << 20
"""Largest accepted JSON body in bytes."""
MAX_FDS = 250
"""Most descriptors in one frame."""
PAGE = 4096

AWAKE = 0.05
"""Seconds that an end which must answer at once looks for the next frame before it sleeps: waking up takes as long as many a kernel."""

Message = dict[str, Any]


class Closed(Exception):
    """The process at the other end is gone."""


class Malformed(Exception):
    """The peer broke the framing."""


class Refused(Exception):
    """A request that can't be served; becomes `{"ok": false, "code": .., "message": .., **extra}`."""

    def __init__(self, code: str, message: str, **extra: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.extra = extra

    def reply(self) -> Message:
        """The reply that tells the caller."""
        return {"ok": False, "code": self.code, "message": self.message, **self.extra}


class Channel:
    """One end of a stream socket that carries frames."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """Takes over descriptor `fd`, a connected Unix stream socket."""
        return cls(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, fileno=fd))

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A connected pair: our channel, and the socket for a child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    def fileno(self) -> int:
        """The descriptor below."""
        return self._sock.fileno()

    def close(self) -> None:
        """Closes the descriptor."""
        self._sock.close()

    def settimeout(self, seconds: float | None) -> None:
        """Lets `send` and `receive` raise `TimeoutError` after `seconds` without progress."""
        self._sock.settimeout(seconds)

    def send(self, body: Message, fds: Sequence[int] = ()) -> None:
        """Sends one frame; the descriptors stay open here.

        Raises `Malformed` when it is over the limits or not JSON (NaN and inf are not), `Closed` when the peer is gone.
        """
        try:
            text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise Malformed(f"not JSON: {error}") from error
        if len(text) > MAX_BYTES or len(fds) > MAX_FDS:
            raise Malformed(f"a frame of {len(text)} bytes and {len(fds)} descriptors is over the limit")
        frame = memoryview(struct.pack("<II", len(text), len(fds)) + text)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
            while sent < len(frame):
                sent += self._sock.send(frame[sent:], socket.MSG_NOSIGNAL)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self) -> tuple[Message, list[int]]:
        """Receives one frame: its JSON object and its descriptors, which are now the caller's to close.

        Raises `Closed` at end of file, `Malformed` when the peer breaks the framing (received descriptors are closed).
        """
        fds: list[int] = []
        try:
            length, count = struct.unpack("<II", self._fill(8, fds))
            if length > MAX_BYTES or count > MAX_FDS:
                raise Malformed(f"a frame of {length} bytes and {count} descriptors is over the limit")
            text = self._fill(length, fds)
            if len(fds) != count:
                raise Malformed(f"{count} descriptors announced, {len(fds)} came")
            try:
                body = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise Malformed(f"not JSON: {error}") from error
            if not isinstance(body, dict):
                raise Malformed("a message is a JSON object")
        except BaseException:
            close_all(fds)
            raise
        return body, fds

    def stay_awake(self, seconds: float = AWAKE) -> None:
        """Returns when something has come, or after `seconds`; never sleeps meanwhile."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        end = time.monotonic() + seconds
        while not poll.poll(0) and time.monotonic() < end:
            pass

    def call(self, body: Message, fds: Sequence[int] = ()) -> tuple[Message, list[int]]:
        """Sends a request and waits for its reply."""
        self.send(body, fds)
        return self.receive()

    def _fill(self, length: int, fds: list[int]) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        got = 0
        space = socket.CMSG_SPACE(MAX_FDS * 4)
        while got < length:
            try:
                n, controls, flags, _ = self._sock.recvmsg_into([view[got:]], space, socket.MSG_CMSG_CLOEXEC)
            except ConnectionResetError as error:
                raise Closed from error
            for level, kind, raw in controls:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(raw[: len(raw) - len(raw) % received.itemsize])
                    fds.extend(received)
            if flags & socket.MSG_CTRUNC:
                raise Malformed("descriptors were cut off")
            if n == 0:
                raise Closed
            got += n
        return data


Reply = Message | tuple[Message, Sequence[int]]
Handler = Callable[[Message, list[int]], Reply]


def serve_ops(
    channel: Channel, handlers: dict[str, Handler], final: Iterable[str] = ("close",), awake: Iterable[str] = ()
) -> None:
    """Answers requests until end of file or an op of `final` has been answered. After one of `awake` it does not sleep at first.

    A handler takes the request and its descriptors (which become its own) and returns the reply without `"ok"`, or
    reply and descriptors (closed here once sent). `Refused` becomes its reply; `MemoryError` code `memory`; any other
    exception code `exception` with its type. An op in `final` without a handler is answered with `{"ok": true}`.
    """
    ends, timed = frozenset(final), frozenset(awake)
    op: Any = None
    while True:
        if op in timed:
            channel.stay_awake()
        try:
            request, fds = channel.receive()
        except Closed:
            return
        op = request.get("op")
        out_fds: Sequence[int] = ()
        try:
            handler = handlers.get(op) if isinstance(op, str) else None
            if handler is None:
                close_all(fds)
                if op not in ends:
                    raise Refused("unknown_op", f"no op {op!r} here")
                result: Reply = {}
            else:
                result = handler(request, fds)
            body, out_fds = result if isinstance(result, tuple) else (result, ())
            reply: Message = {"ok": True, **body}
        except Refused as refused:
            reply = refused.reply()
        except MemoryError:
            reply = Refused("memory", f"out of memory in {op!r}").reply()
        except Exception as error:
            traceback.print_exc()
            reply = Refused("exception", f"{type(error).__name__}: {error}"[:4000]).reply()
        try:
            channel.send(reply, out_fds)
        except Malformed as error:
            channel.send(Refused("malformed", str(error)).reply())
        except Closed:
            return
        finally:
            close_all(out_fds)
        if op in ends:
            return


def close_all(fds: Iterable[int]) -> None:
    """Closes each descriptor; one that is closed already is fine."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass


def round_up(size: int, granularity: int = PAGE) -> int:
    """`size` rounded up to a multiple of `granularity`, at least one of it."""
    return max(granularity, -(-size // granularity) * granularity)


class Memory:
    """Shared memory behind a descriptor: a memfd, mapped whole. `size` is a multiple of 4096 bytes."""

    def __init__(self, fd: int, size: int, view: mmap.mmap) -> None:
        self.fd = fd
        self.size = size
        self.view = view

    @classmethod
    def create(cls, name: str, size: int) -> Memory:
        """A new zeroed memfd of at least `size` bytes, mapped shared and writable."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            rounded = round_up(size)
            os.ftruncate(fd, rounded)
            return cls(fd, rounded, mmap.mmap(fd, rounded, mmap.MAP_SHARED))
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def of(cls, name: str, data: bytes | bytearray | memoryview) -> Memory:
        """A new memfd that holds `data`."""
        memory = cls.create(name, len(data))
        memory.view[: len(data)] = bytes(data)
        return memory

    @classmethod
    def open(cls, fd: int, least: int = 0, writable: bool = True) -> Memory:
        """Maps the memfd `fd`, which becomes this object's own; `Malformed` when it holds fewer than `least` bytes.

        Not `writable` maps it private (copy on write): changes stay in this process.
        """
        size = os.fstat(fd).st_size
        if size < max(least, 1):
            os.close(fd)
            raise Malformed(f"a buffer of {size} bytes where {least} are needed")
        flags = mmap.MAP_SHARED if writable else mmap.MAP_PRIVATE
        return cls(fd, size, mmap.mmap(fd, size, flags, mmap.PROT_READ | mmap.PROT_WRITE))

    def close_fd(self) -> None:
        """Closes the descriptor; the mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
