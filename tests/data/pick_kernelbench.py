"""Chooses the KernelBench tasks that two cores and 24 GiB can judge, by estimates on tensors without data.

Knows KernelBench's folder and PyTorch's meta device. Writes numbers only: the problems stay where they are.

usage: pick_kernelbench.py KernelBench/KernelBench tests/data/kernelbench-cpu.json (what is known by runs is kept)
"""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

# What two cores do, roughly: eager's bytes and multiplications a second. Only for choosing.
BYTES_A_SECOND = 10e9
FLOPS_A_SECOND = 80e9
# At most so many of a level; a hundred in all.
WANTED = {1: 42, 2: 42, 3: 100}
TOTAL = 100
MAX_BYTES = 3_000_000_000
MAX_TRAFFIC = 6_000_000_000
# A judgement runs the reference some hundreds of times.
MAX_SECONDS = 5.0


class Traffic(TorchDispatchMode):
    """Adds up the bytes of what operators give and take; views give nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs the operator and counts."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            moved = size(result) + size(args)
            self.bytes += moved
            self.largest = max(self.largest, moved)
        return result


def size(tree: Any) -> int:
    """Bytes of all tensors of a tree."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def estimate(path: Path) -> dict[str, float]:
    """Bytes of inputs, outputs and parameters, and seconds of eager, of one task."""
    space: dict[str, Any] = {"__name__": "task"}
    with torch.device("meta"), torch.no_grad():
        exec(compile(path.read_text(), str(path), "exec"), space)
        model = space["Model"](*space["get_init_inputs"]()).eval()
        inputs = space["get_inputs"]()
        traffic, flops = Traffic(), FlopCounterMode(display=False)
        with flops, traffic:
            outputs = model(*inputs)
    held = size(inputs) + size(outputs) + size(list(model.state_dict().values()))
    seconds = traffic.bytes / BYTES_A_SECOND + flops.get_total_flops() / FLOPS_A_SECOND
    return {"bytes": held, "largest": traffic.largest, "seconds": seconds}


def main() -> None:
    """Writes the list."""
    root = Path(sys.argv[1])
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    chosen = []
    for level, wanted in WANTED.items():
        fits = []
        for path in sorted((root / f"level{level}").glob("*.py")):
            number = re.match(r"\d+", path.name)
            signal.alarm(8)
            try:
                facts = estimate(path)
            except Exception as error:
                print(f"{path.name}: {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
                continue
            finally:
                signal.alarm(0)
            if (
                number
                and facts["bytes"] < MAX_BYTES
                and facts["largest"] < MAX_TRAFFIC
                and facts["seconds"] < MAX_SECONDS
            ):
                fits.append((facts["seconds"], int(facts["bytes"]), int(number.group()), path))
        print(f"level {level}: {len(fits)} fit", file=sys.stderr)
        # Cheap ones first; of those that fit, the list takes the cheapest.
        for seconds, held, index, path in sorted(fits)[: min(wanted, TOTAL - len(chosen))]:
            chosen.append(
                {
                    "level": level,
                    "number": index,
                    "path": f"level{level}/{path.name}",
                    "seconds": round(seconds, 4),
                    "bytes": held,
                    "quick": False,
                }
            )
    written = Path(sys.argv[2])
    known = {t["path"]: t for t in json.loads(written.read_text())["tasks"]} if written.is_file() else {}
    for task in chosen:
        task.update(
            {key: known[task["path"]][key] for key in ("quick", "expect") if key in known.get(task["path"], {})}
        )
    chosen.sort(key=lambda t: (t["level"], t["number"]))
    about = (
        "KernelBench tasks for two cores and 24 GiB; estimates of pick_kernelbench.py: eager seconds, bytes held. `quick` "
        "and `expect` (codes that `task check` refuses with, none if it accepts) are kept by hand, from runs"
    )
    lines = ",\n".join("    " + json.dumps(task) for task in chosen)
    written.write_text(f'{{\n  "about": {json.dumps(about)},\n  "tasks": [\n{lines}\n  ]\n}}\n')


if __name__ == "__main__":
    main()
