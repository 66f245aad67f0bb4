"""Reads of the API server over one connection: a start of kubectl takes a tenth of a second of a processor, and tests look often.

Knows the words of `kubectl get` that the tests use. Must not know what is asked for. ``kubectl proxy`` brings the
credentials, whatever kind the kubeconfig has.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import signal
import socket
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any
from urllib.parse import quote, urlencode

_C = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _C.prctl(1, signal.SIGKILL)


class Refused(Exception):
    """What the API server said instead of what was asked for."""


class Missing(Refused):
    """That there is no such object."""


class _Connection(http.client.HTTPConnection):
    """Over a socket in a folder of ours: nobody else on the machine is to have the credentials."""

    def __init__(self, socket_path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = socket_path

    def connect(self) -> None:
        """As of a host."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Api:
    """The API server, read through a proxy that lives as long as this does."""

    def __init__(self, kubectl: str, kubeconfig: Path) -> None:
        self._kubectl = [kubectl, f"--kubeconfig={kubeconfig}"]
        self._folder_of_socket = TemporaryDirectory(prefix="kernelfleet-api-")
        self._socket = f"{self._folder_of_socket.name}/proxy"
        self._turn = Lock()
        # By each of its names: the folder that a kind's objects lie in, below a namespace or not.
        self._kinds: dict[str, tuple[str, str, bool]] = {}
        words = ["config", "view", "--minify", "-o", "jsonpath={..namespace}"]
        named = subprocess.run([*self._kubectl, *words], capture_output=True, text=True, check=True).stdout
        self._namespace = named or "default"
        self._start()

    def _start(self) -> None:
        Path(self._socket).unlink(missing_ok=True)
        # Ctrl-C is for the tests, whose ends look at the cluster too.
        self._proxy = subprocess.Popen(
            [*self._kubectl, "proxy", f"--unix-socket={self._socket}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        assert self._proxy.stdout is not None
        said = self._proxy.stdout.readline()
        if not said.startswith("Starting to serve on "):
            self._proxy.kill()
            raise Refused(f"kubectl proxy says {said!r}")
        self._connection = _Connection(self._socket)

    def close(self) -> None:
        """Ends the proxy."""
        self._connection.close()
        self._proxy.kill()
        self._proxy.communicate()
        self._folder_of_socket.cleanup()

    def _asked(self, path: str) -> tuple[int, bytes]:
        """Status and body of one read; again where the connection is gone or the server has too much to do."""
        for left in range(5, -1, -1):
            try:
                self._connection.request("GET", path)
                reply = self._connection.getresponse()
                body = reply.read()
            except (http.client.HTTPException, OSError) as error:
                self._connection.close()
                if not left or isinstance(error, TimeoutError):
                    raise
                if left < 5:  # a connection that was idle for long is closed, and the next one is good
                    time.sleep(0.5)
                if self._proxy.poll() is not None:
                    self._start()
                continue
            if reply.status != 429 or not left:
                break
            time.sleep(float(reply.headers.get("Retry-After", 1)))
        return reply.status, body

    def read(self, path: str) -> dict[str, Any]:
        """What lies at a path of the API; `Missing` if there is no object of that name."""
        with self._turn:
            status, body = self._asked(path)
        try:
            said = json.loads(body)
        except ValueError as error:
            raise Refused(f"{path}: {status}: {body.decode(errors='replace')}") from error
        if status == 404 and said.get("reason") == "NotFound" and said.get("details", {}).get("name"):
            raise Missing(body.decode())
        if status != 200:
            raise Refused(f"{path}: {status}: {body.decode()}")
        found: dict[str, Any] = said
        return found

    def _discover(self) -> None:
        served = ["/api/v1"]
        served += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in self.read("/apis")["groups"]]
        for folder in served:
            try:
                kinds = self.read(folder)["resources"]
            except Refused as refused:  # whoever serves this group is away; it may not be the one that is wanted
                print(f"\nnot discovered: {refused}", flush=True)
                continue
            for kind in kinds:
                where = (folder, kind["name"], kind["namespaced"])
                whole = f"{kind['name']}.{folder.split('/')[2]}"
                names = (kind["name"], kind.get("singularName"), whole, *kind.get("shortNames", []))
                for name in filter(None, names):
                    self._kinds.setdefault(name, where)

    def _folder(self, kind: str, namespace: str | None) -> str:
        if kind not in self._kinds:
            self._discover()
        if kind not in self._kinds:
            raise Refused(f"the server doesn't have a resource type {kind!r}")
        top, name, namespaced = self._kinds[kind]
        within = f"/namespaces/{namespace or self._namespace}" if namespaced and namespace != "*" else ""
        return f"{top}{within}/{name}"

    def get(self, *words: str) -> dict[str, Any]:
        """As `kubectl get WORDS -o json`; `Missing` for an object that isn't there."""
        rest, plain = list(words), []
        namespace = selector = fields = None
        while rest:
            word = rest.pop(0)
            if word == "-n":
                namespace = rest.pop(0)
            elif word == "-l":
                selector = rest.pop(0)
            elif word == "--field-selector":
                fields = rest.pop(0)
            elif word == "-A":
                namespace = "*"
            else:
                assert not word.startswith("-"), f"{word} is read by kubectl alone"
                plain.append(word)
        kinds, *names = plain
        assert len(names) <= 1, f"several names at once are read by kubectl alone: {names}"
        if names:
            found = self.read(f"{self._folder(kinds, namespace)}/{quote(names[0])}")
            found["metadata"].pop("managedFields", None)
            return found
        chosen = {"labelSelector": selector, "fieldSelector": fields}
        query = urlencode({key: value for key, value in chosen.items() if value})
        items = []
        for kind in kinds.split(","):
            listed = self.read(f"{self._folder(kind, namespace)}?{query}")
            for item in listed["items"]:
                item["metadata"].pop("managedFields", None)
                own = {"apiVersion": listed["apiVersion"], "kind": listed["kind"].removesuffix("List")}
                items.append(own | item)
        return {"apiVersion": "v1", "kind": "List", "items": items}
