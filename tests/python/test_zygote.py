"""The wire, the fork server and the confinement, with real sockets, real forks and the real kernel."""

from __future__ import annotations

import base64
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "agent-image" / "python"
sys.path.insert(0, str(PYTHON))

from kernelfleet_zygote import confine as confinement  # noqa: E402
from kernelfleet_zygote.wire import MAX_BYTES, Channel, Closed, Malformed, Memory, round_up  # noqa: E402

CHILD = """
import os, socket, sys, subprocess, errno
from kernelfleet_zygote import serve, serve_ops, Refused

def attempt(request, fds):
    try:
        return {"value": str(eval(request["code"]))}
    except OSError as error:
        raise Refused(errno.errorcode[error.errno], str(error))

def echo(request, fds):
    return {"got": len(fds)}, fds

def main(channel, start):
    serve_ops(channel, {"hello": start.hello, "attempt": attempt, "echo": echo, "exit": lambda r, f: os._exit(7)})

serve(main, {"torch": "none"})
"""

LIMITS = {"as": None, "data": None, "fsize": 1 << 20, "nproc": None, "nofile": 64, "cpu": None, "core": 0}


class Zygote:
    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"import os\nos.dup2({theirs.fileno()}, 3)\n{CHILD}"],
            pass_fds=[theirs.fileno()],
            env={"PYTHONPATH": str(PYTHON), "PATH": os.environ["PATH"]},
        )
        theirs.close()
        self.channel.settimeout(20)

    def fork(self, **confine: Any) -> tuple[Channel, int]:
        record = {"uid": None, "gid": None, "seccomp": None, "read": ["/"], "write": [], "limits": LIMITS, **confine}
        channel, theirs = Channel.pair()
        request = {"op": "fork", "confine": record, "cwd": "/", "env": {"ANSWER": "42"}, "threads": 1}
        reply, _ = self.channel.call(request, [theirs.fileno()])
        theirs.close()
        assert reply["ok"], reply
        channel.settimeout(20)
        return channel, reply["pid"]


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.channel.close()
    assert zygote.process.wait(20) == 0


def attempt(channel: Channel, code: str) -> dict[str, Any]:
    return channel.call({"op": "attempt", "code": code})[0]


def test_a_frame_carries_json_and_descriptors_both_ways(zygote: Zygote) -> None:
    child, _ = zygote.fork()
    memory = Memory.of("x", b"hello")
    reply, fds = child.call({"op": "echo", "big": "x" * 3_000_000}, [memory.fd, memory.fd])
    assert reply == {"ok": True, "got": 2}
    assert bytes(Memory.open(fds[0]).view[:5]) == b"hello"


def test_a_frame_over_the_limits_is_refused_before_it_is_read() -> None:
    ours, theirs = Channel.pair()
    theirs.sendall(struct.pack("<II", MAX_BYTES + 1, 0))
    with pytest.raises(Malformed, match="over the limit"):
        ours.receive()
    ours, theirs = Channel.pair()
    theirs.sendall(struct.pack("<II", 2, 1) + b"{}")
    with pytest.raises(Malformed, match="announced"):
        ours.receive()
    ours, theirs = Channel.pair()
    theirs.close()
    with pytest.raises(Closed):
        ours.receive()


def test_nan_is_not_sent_as_json() -> None:
    ours, _theirs = Channel.pair()
    with pytest.raises(Malformed):
        ours.send({"x": float("nan")})


def test_a_buffer_that_is_too_small_is_refused() -> None:
    memory = Memory.of("x", b"hello")
    assert memory.size == 4096 == round_up(1)
    with pytest.raises(Malformed, match="are needed"):
        Memory.open(os.dup(memory.fd), 5000)


def test_a_private_mapping_leaves_the_buffer_alone() -> None:
    memory = Memory.of("x", b"hello")
    private = Memory.open(os.dup(memory.fd), 5, writable=False)
    private.view[:1] = b"j"
    assert bytes(memory.view[:5]) == b"hello"


def test_the_zygote_answers_a_ping_and_refuses_what_it_does_not_know(zygote: Zygote) -> None:
    assert zygote.channel.call({"op": "ping"})[0] == {"ok": True, "versions": {"torch": "none"}}
    assert zygote.channel.call({"op": "load"})[0]["code"] == "unknown_op"
    assert zygote.channel.call({"op": "fork"})[0]["code"] == "malformed"


def test_a_child_has_its_environment_and_no_other_descriptor(zygote: Zygote) -> None:
    child, pid = zygote.fork()
    hello = child.call({"op": "hello"})[0]
    assert hello["ok"] and hello["pid"] == pid and "limits" in hello["isolation"]
    assert attempt(child, "os.environ['ANSWER']")["value"] == "42"
    open_fds = "[fd for fd in range(0, 64) if os.path.exists(f'/proc/self/fd/{fd}')]"
    if os.getuid() == 0:
        assert attempt(child, open_fds)["value"] == "[0, 1, 2, 3]"


def test_a_child_leads_its_own_session(zygote: Zygote) -> None:
    child, pid = zygote.fork()
    child.call({"op": "hello"})
    assert os.getsid(pid) == pid


def test_dead_children_are_reaped_and_the_zygote_goes_on(zygote: Zygote) -> None:
    child, pid = zygote.fork()
    with pytest.raises(Closed):
        child.call({"op": "exit"})
    assert zygote.channel.call({"op": "ping"})[0]["ok"]
    for _ in range(200):
        zygote.channel.call({"op": "ping"})
        if not os.path.exists(f"/proc/{pid}"):
            break
    assert not os.path.exists(f"/proc/{pid}")


def test_children_die_with_the_zygote() -> None:
    zygote = Zygote()
    child, _ = zygote.fork()
    child.call({"op": "hello"})
    zygote.process.send_signal(signal.SIGKILL)
    zygote.process.wait(20)
    with pytest.raises(Closed):
        child.receive()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give its user up")
def test_a_child_of_another_user_dies_with_the_zygote_too_and_can_not_come_back() -> None:
    zygote = Zygote()
    child, _ = zygote.fork(uid=54321, gid=54321)
    assert "users" in child.call({"op": "hello"})[0]["isolation"]
    assert attempt(child, "os.getresuid(), os.getgroups()")["value"] == "((54321, 54321, 54321), [])"
    assert attempt(child, "os.setuid(0)")["code"] == "EPERM"
    zygote.process.send_signal(signal.SIGKILL)
    zygote.process.wait(20)
    with pytest.raises(Closed):
        child.receive()


@pytest.mark.skipif(confinement.landlock_version() == 0, reason="this kernel has no Landlock")
def test_landlock_leaves_only_the_named_hierarchies(zygote: Zygote, tmp_path: Path) -> None:
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        folder.mkdir(mode=0o777)
        (folder / "x").write_text("secret")
    child, _ = zygote.fork(read=["/usr", "/nowhere"], write=[str(mine)])
    assert "landlock" in child.call({"op": "hello"})[0]["isolation"]
    assert attempt(child, f"open({str(mine / 'x')!r}, 'w').write('y')")["ok"]
    assert attempt(child, f"open({str(other / 'x')!r}).read()")["code"] == "EACCES"
    assert attempt(child, "os.listdir('/proc')")["code"] == "EACCES"
    assert attempt(child, "len(os.listdir('/usr')) > 0")["value"] == "True"


@pytest.mark.skipif(confinement.landlock_version() < 6, reason="this kernel's Landlock has no scopes")
def test_a_confined_child_can_not_signal_its_parent(zygote: Zygote) -> None:
    child, _ = zygote.fork()
    child.call({"op": "hello"})
    assert attempt(child, f"os.kill({zygote.process.pid}, 0)")["code"] == "EPERM"


def seccomp_deny(number: int, errno: int) -> str:
    """A filter that answers one system call with an error and allows the rest (the native architecture only)."""
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno), (0x06, 0, 0, 0x7FFF0000)]
    return base64.b64encode(b"".join(struct.pack("<HBBI", *step) for step in code)).decode()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of socket() is that of x86_64")
def test_a_seccomp_program_is_in_force(zygote: Zygote) -> None:
    child, _ = zygote.fork(seccomp=seccomp_deny(41, 13))
    assert "seccomp" in child.call({"op": "hello"})[0]["isolation"]
    assert attempt(child, "socket.socket()")["code"] == "EACCES"


def test_a_malformed_record_runs_nothing(zygote: Zygote) -> None:
    child, _ = zygote.fork(seccomp="AAAA")
    with pytest.raises(Closed):
        child.call({"op": "hello"})


def test_limits_hold(zygote: Zygote, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    child, _ = zygote.fork(write=["/"], limits={**LIMITS, "nofile": 16, "as": 1 << 30})
    assert attempt(child, "[os.open('/dev/null', 0) for _ in range(20)]")["code"] == "EMFILE"
    assert attempt(child, "len(bytearray(2 << 30))")["code"] == "memory"
