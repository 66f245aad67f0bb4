"""Lays an image into the containerd of nodes, without a registry: only the layers that a node lacks travel.

The image comes as buildah's transport ``dir:`` writes it (which leaves layers uncompressed and so costs nothing), and
leaves as an OCI layout, which ``ctr images import`` takes with layers missing that it has already.

usage: load.py FOLDER IMAGE_NAME SOCKET..
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path


def load(folder: Path, name: str, socket: str) -> None:
    """Imports the image into one containerd."""
    control = ["ctr", "--address", socket, "--namespace", "k8s.io"]
    held = subprocess.run([*control, "content", "ls", "--quiet"], check=True, capture_output=True, text=True)
    there = set(held.stdout.split())
    text = (folder / "manifest.json").read_bytes()
    manifest = json.loads(text)
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    entry = {
        "mediaType": manifest["mediaType"],
        "digest": digest,
        "size": len(text),
        # The name that containerd takes as it stands.
        "annotations": {"io.containerd.image.name": name},
    }
    index = {"schemaVersion": 2, "manifests": [entry]}
    blobs = [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
    with subprocess.Popen([*control, "images", "import", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as ctr:
        assert ctr.stdin is not None
        with tarfile.open(fileobj=ctr.stdin, mode="w|") as archive:
            small = {
                "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
                "index.json": json.dumps(index).encode(),
                f"blobs/{digest.replace(':', '/')}": text,
            }
            for path, content in small.items():
                header = tarfile.TarInfo(path)
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
            for blob in dict.fromkeys(blobs):
                if blob not in there:
                    archive.add(folder / blob.removeprefix("sha256:"), f"blobs/{blob.replace(':', '/')}")
    if ctr.returncode != 0:
        sys.exit(f"cluster: containerd at {socket} did not take {name}")


if __name__ == "__main__":
    for address in sys.argv[3:]:
        load(Path(sys.argv[1]), sys.argv[2], address)
