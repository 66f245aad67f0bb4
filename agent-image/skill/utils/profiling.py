"""Asks the judge how fast ModelNew is and what its time is spent on: python3 utils/profiling.py [--reference] [--counters] [--json]

--reference: what the reference (eager PyTorch) runs instead.
--counters: a GPU's hardware counters of each kernel (of ModelNew, or of the reference) instead of speedups.

Only sends the sources; the judgement is made elsewhere. Exit status 0 correct, 1 not correct, 2 or 3 not judged.
"""

import json
import os
import socket
import sys

REFERENCE = "--reference" in sys.argv
COUNTERS = "--counters" in sys.argv
OP = {
    (False, False): "profile",
    (False, True): "counters",
    (True, False): "reference",
    (True, True): "reference_counters",
}[REFERENCE, COUNTERS]


def sources() -> dict[str, str]:
    """model_new.py, everything below kernels/, and other Python files beside model_new.py."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
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
        reply = ask({"op": OP, "files": {} if REFERENCE else sources()})
    except (OSError, KeyError, ValueError) as error:
        print(f"the judge can't be asked: {error}")
        return 3
    print(json.dumps(reply["answer"], indent=1) if "--json" in sys.argv else reply["text"].rstrip())
    return int(reply["status"])


if __name__ == "__main__":
    sys.exit(main())
