"""Reads of the API server over one connection: a start of kubectl takes a tenth of a second of a processor, and tests look often.

Knows the words of `kubectl get` that the tests use. Must not know what is asked for. ``kubectl proxy`` brings the
credentials, whatever kind the kubeconfig has.
"""

from __future__ import annotations

import http.client
import json
import subprocess
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import quote, urlencode


class Refused(Exception):
    """What the API server said instead of what was asked for."""


class Missing(Refused):
    """That there is no such object."""


class Api:
    """The API server, read through a proxy that lives as long as this does."""

    def __init__(self, kubectl: str, kubeconfig: Path) -> None:
        words = [kubectl, f"--kubeconfig={kubeconfig}", "proxy", "--port=0"]
        self._proxy = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self._proxy.stdout is not None
        said = self._proxy.stdout.readline()
        if not said.startswith("Starting to serve on "):
            self._proxy.kill()
            raise Refused(f"kubectl proxy says {said!r}")
        self._connection = http.client.HTTPConnection(said.split()[-1], timeout=60)
        self._turn = Lock()
        # By each of its names: the folder that a kind's objects lie in, below a namespace or not.
        self._kinds: dict[str, tuple[str, str, bool]] = {}

    def close(self) -> None:
        """Ends the proxy."""
        self._connection.close()
        self._proxy.kill()
        self._proxy.communicate()

    def read(self, path: str) -> dict[str, Any]:
        """What lies at a path of the API; `Missing` if nothing does."""
        with self._turn:
            for again in (True, False):
                try:
                    self._connection.request("GET", path)
                    reply = self._connection.getresponse()
                    text = reply.read()
                    break
                except (http.client.HTTPException, OSError):
                    self._connection.close()
                    if not again:
                        raise
        if reply.status == 404:
            raise Missing(text.decode())
        if reply.status != 200:
            raise Refused(text.decode())
        found: dict[str, Any] = json.loads(text)
        return found

    def _discover(self) -> None:
        served = ["/api/v1"]
        served += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in self.read("/apis")["groups"]]
        for folder in served:
            for kind in self.read(folder)["resources"]:
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
        within = f"/namespaces/{namespace or 'default'}" if namespaced and namespace != "*" else ""
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
