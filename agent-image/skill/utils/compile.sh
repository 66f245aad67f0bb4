#!/usr/bin/env bash
# Asks the judge to record ModelNew and to build its kernels: bash utils/compile.sh
# Only sends the sources; errors come back with file and line. Exit status 0 built, 1 refused, 2 or 3 not tried.
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export ROOT
exec python3 -I - "$@" <<'EOF'
import json
import os
import socket
import sys

OP = "compile"

def sources() -> dict[str, str]:
    """model_new.py, everything below kernels/, and other Python files beside model_new.py."""
    root = os.environ["ROOT"]
    names = [n for n in os.listdir(root) if n.endswith(".py") and n != "model.py"]
    for folder, _, files in os.walk(os.path.join(root, "kernels")):
        names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    found = {}
    for name in sorted(names):
        if not os.path.basename(name).startswith(".") and "__pycache__" not in name:
            try:
                with open(os.path.join(root, name), encoding="utf-8") as file:
                    found[name] = file.read(8 << 20)
            except (OSError, ValueError) as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    return found

def ask(request: dict) -> dict:
    """Sends one line, reads one line."""
    with socket.socket(socket.AF_UNIX) as desk:
        desk.connect(os.environ["KERNELFLEET_SOCKET"])
        desk.sendall(json.dumps(request).encode() + b"\n")
        with desk.makefile(encoding="utf-8") as answer:
            return json.loads(answer.readline())

def main() -> int:
    """Prints the answer."""
    try:
        reply = ask({"op": OP, "files": sources()})
    except (OSError, KeyError, ValueError) as error:
        print(f"the judge can't be asked: {error}")
        return 3
    print(json.dumps(reply["answer"], indent=1) if "--json" in sys.argv else reply["text"].rstrip())
    return int(reply["status"])

if __name__ == "__main__":
    sys.exit(main())
EOF
