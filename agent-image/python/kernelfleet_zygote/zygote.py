"""The fork server: a warmed process that forks a confined child on request.

Knows the ops `ping` and `fork`. Must not know what its children do: it is given their main function, and never runs
anything from a task or a candidate itself. No OpenMP region or parallel operator may run in this process: a child
forked after one hangs in its own first.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from kernelfleet_zygote.confine import confine
from kernelfleet_zygote.wire import Channel, Closed, Message, Refused, close_all

SOCKET = 3
"""Descriptor of the channel, in the zygote and in each child."""


@dataclass(frozen=True)
class Start:
    """What a child was started with.

    `isolation`: what held of the confinement. `threads`: for `torch.set_num_threads`; at least 1. `role`: what the
    fork request asked for, where a zygote has more than one kind of child.
    """

    isolation: list[str]
    threads: int
    role: str = ""

    def hello(self, _request: Message, fds: list[int]) -> Message:
        """Handler of the op `hello`."""
        close_all(fds)
        return {"isolation": self.isolation, "pid": os.getpid()}


ChildMain = Callable[[Channel, Start], None]


def serve(
    child_main: ChildMain, versions: dict[str, str] | None = None, ops: dict[str, Callable[[], Message]] | None = None
) -> None:
    """Serves `ping` and `fork` on descriptor 3 until end of file; each fork runs `child_main` confined, then exits.

    `ops`: further ops of this zygote, without arguments (imports to make before a fork).
    The children die with this process (PR_SET_PDEATHSIG).
    """
    signal.signal(signal.SIGCHLD, _reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel.from_fd(SOCKET)
    # What was imported stays: nobody is to look through it again, nor copy its pages. Who imports much does so without
    # collections, which would be a fifth of its start.
    gc.freeze()
    gc.enable()
    while True:
        try:
            request, fds = channel.receive()
        except Closed:
            return
        op = request.get("op")
        try:
            if op == "ping":
                close_all(fds)
                reply: Message = {"ok": True, "versions": versions or {}}
            elif op == "fork":
                reply = {"ok": True, "pid": _fork(request, fds, child_main)}
            elif ops and op in ops:
                close_all(fds)
                gc.disable()
                try:
                    reply = {"ok": True, **ops[op]()}
                finally:
                    gc.freeze()
                    gc.enable()
            else:
                close_all(fds)
                raise Refused("unknown_op", f"a zygote knows ping and fork, not {op!r}")
        except Refused as refused:
            reply = refused.reply()
        except OSError as error:
            reply = Refused("fork", f"could not fork: {error}").reply()
        try:
            channel.send(reply)
        except Closed:
            return


def _reap(_signal: int, _frame: FrameType | None) -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _fork(request: Message, fds: list[int], child_main: ChildMain) -> int:
    if len(fds) != 1:
        close_all(fds)
        raise Refused("malformed", f"fork takes one descriptor, {len(fds)} came")
    if not isinstance(request.get("confine"), dict):
        close_all(fds)
        raise Refused("malformed", "fork without a confine record")
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        close_all(fds)
        return pid
    status = 1
    try:
        _child(request, fds[0], child_main)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _child(request: dict[str, Any], fd: int, child_main: ChildMain) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.dup2(fd, SOCKET, inheritable=False)
    for name, value in dict(request.get("env") or {}).items():
        os.environ[name] = value
    if request.get("cwd") is not None:
        os.chdir(request["cwd"])
    tempfile.tempdir = None  # what an import found before the fork is not where a child may write
    threads = max(1, int(request.get("threads") or 1))
    isolation = confine(request["confine"], SOCKET)
    child_main(Channel.from_fd(SOCKET), Start(isolation, threads, str(request.get("role") or "")))
