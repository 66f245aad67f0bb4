"""A recorder as the judge uses it: its zygote, forks, and `record` requests from a task's own shapes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

PYTHON = Path(__file__).resolve().parents[2] / "agent-image" / "python"
sys.path.insert(0, str(PYTHON))

from kernelfleet_zygote.wire import Channel, Closed, Memory  # noqa: E402

LIMITS = {"as": None, "data": 3 << 30, "fsize": 1 << 32, "nproc": 64, "nofile": 64, "cpu": 60, "core": 0}


def no_processes() -> str | None:
    """A seccomp program for x86_64 that refuses new processes (EPERM) and lets threads be; `None` elsewhere."""
    if os.uname().machine != "x86_64":
        return None
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    steps = [
        (0x20, 0, 0, 0),  # number of the system call
        (0x15, 5, 0, 57),  # fork
        (0x15, 4, 0, 58),  # vfork
        (0x15, 3, 0, 435),  # clone3
        (0x15, 0, 3, 56),  # clone, allowed with CLONE_THREAD
        (0x20, 0, 0, 16),
        (0x45, 1, 0, 0x10000),
        (0x06, 0, 0, refuse),
        (0x06, 0, 0, allow),
    ]
    return base64.b64encode(b"".join(struct.pack("<HBBI", *step) for step in steps)).decode()


class Recorder:
    """The zygote `python -m kernelfleet_recorder`."""

    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        start = f"import os, runpy\nos.dup2({theirs.fileno()}, 3)\nrunpy.run_module('kernelfleet_recorder', run_name='__main__')"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": str(PYTHON), "PATH": os.environ["PATH"]},
        )
        theirs.close()
        self.channel.settimeout(60)

    def close(self) -> None:
        """Ends the zygote."""
        self.channel.close()
        self.process.wait(30)

    def fork(self) -> tuple[Channel, int]:
        """A new recorder and its process id."""
        confine = {"uid": None, "gid": None, "seccomp": no_processes(), "read": ["/"], "write": [], "limits": LIMITS}
        if os.getuid() == 0:
            confine |= {"uid": 61234, "gid": 61234}
        ours, theirs = Channel.pair()
        request = {"op": "fork", "confine": confine, "cwd": "/", "env": {}, "threads": 1}
        reply, _ = self.channel.call(request, [theirs.fileno()])
        theirs.close()
        assert reply["ok"], reply
        return ours, reply["pid"]

    def record(self, request: dict[str, Any], fds: list[int], seconds: float = 60.0) -> tuple[dict[str, Any], bytes]:
        """One recording in a fresh child: the reply and the constants' bytes.

        As the judge has it, a process that ends without a reply is code `crash`, one that takes longer `timeout`.
        """
        child, pid = self.fork()
        child.settimeout(seconds)
        got: list[int] = []
        try:
            reply, got = child.call(request, fds)
        except TimeoutError:
            reply = {"ok": False, "code": "timeout"}
        except Closed:
            reply = {"ok": False, "code": "crash"}
        finally:
            child.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        constants = b""
        for fd in got:
            memory = Memory.open(fd, 1, writable=False)
            constants = bytes(memory.view)
            memory.close_fd()
        return reply, constants


def tensor_meta(tensor: Any) -> dict[str, Any]:
    """A tensor as it is described on the wire."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
        "bytes": span * tensor.element_size() if tensor.numel() else 0,
    }


def request_for(
    task: ModuleType, files: dict[str, str], device: str = "cpu", seed: int = 0, **more: Any
) -> tuple[dict[str, Any], list[int]]:
    """The `record` request of a candidate for a task, with parameters drawn here, and its descriptors."""
    import torch

    torch.manual_seed(seed)
    init = task.get_init_inputs()
    model = task.Model(*init)
    inputs = []
    for value in task.get_inputs():
        if isinstance(value, torch.Tensor):
            inputs.append({"kind": "tensor", **tensor_meta(value)})
        else:
            inputs.append({"kind": "value", "repr": repr(value)})
    state, data = [], bytearray()
    for name, tensor in model.state_dict().items():
        data.extend(b"\0" * (-len(data) % 64))
        raw = tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        state.append({"name": name, **tensor_meta(tensor), "offset": len(data)})
        data.extend(raw)
    request = {
        "op": "record",
        "device": device,
        "files": files,
        "init": repr(init),
        "inputs": inputs,
        "state": state,
        "fd": 0,
        "libraries": ["matmul", "conv"],
        "properties": {},
        "limits": {"nodes": 20000, "seconds": 60},
        **more,
    }
    memory = Memory.of("state", bytes(data))
    memory.view.close()
    return request, [memory.fd]


def read_files(folder: Path) -> dict[str, str]:
    """A candidate's files: everything in its folder but the task and the case."""
    skip = {"task.py", "case.json"}
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in skip and "__pycache__" not in path.parts
    }


def load_task(path: Path) -> ModuleType:
    """Imports a task file under a name of its own."""
    module = ModuleType(f"task_{path.parent.name}")
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module


def expectation(folder: Path) -> dict[str, Any]:
    """What `case.json` expects."""
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    return case["expect"]
