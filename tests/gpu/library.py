"""Tasks of one convolution each, with a candidate that is just the library call.

The candidate's call is chosen by the rule that PyTorch chooses by, so its time over eager's must be near 1.
Must not know how anything is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TASK = """import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.op = nn.{module}({arguments}){layout}

    def forward(self, x):
        return self.op(x)


def get_inputs():
    return [torch.rand{shape}{packed}]


def get_init_inputs():
    return []
"""

CANDIDATE = """import torch
import torch.nn as nn

import kernelfleet_ext as kf


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.op = nn.{module}({arguments})

    def forward(self, x):
        return kf.{function}(x, self.op.weight{packed}, self.op.bias, {named})
"""


@dataclass(frozen=True)
class Case:
    """One convolution: `nn.<module>(*channels, **named)` of an input of `shape`."""

    name: str
    module: str
    channels: tuple[int, int, int]
    shape: tuple[int, ...]
    named: tuple[tuple[str, int], ...] = ()
    last: bool = False
    bias: bool = False

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes task and candidate below `folder`; returns the task's file and the candidate's folder."""
        layout = f"torch.channels_last{'_3d' if len(self.shape) == 5 else ''}"
        named = ", ".join(f"{key}={value}" for key, value in self.named)
        parts = {
            "module": self.module,
            "function": "conv_transpose" if "Transpose" in self.module else "conv",
            "arguments": ", ".join([*map(str, self.channels), *([named] if named else []), f"bias={self.bias}"]),
            "shape": self.shape,
            "named": named,
            "layout": f".to(memory_format={layout})" if self.last else "",
            "packed": f".contiguous(memory_format={layout})" if self.last else "",
        }
        task, candidate = folder / self.name / "task.py", folder / self.name / "candidate"
        candidate.mkdir(parents=True, exist_ok=True)
        task.write_text(TASK.format(**parts))
        (candidate / "model_new.py").write_text(CANDIDATE.format(**parts))
        return task, candidate


# The first two are those of KernelBench's level 2, problems 1 and 10.
CASES = [
    Case("conv2d_level2_1", "Conv2d", (64, 128, 3), (128, 64, 128, 128), bias=True),
    Case("transposed2d_level2_10", "ConvTranspose2d", (64, 64, 3), (128, 64, 256, 256), (("padding", 1),), bias=True),
    Case("conv2d_7x7_stride_2", "Conv2d", (3, 64, 7), (64, 3, 224, 224), (("stride", 2), ("padding", 3))),
    Case(
        "conv2d_groups_dilated",
        "Conv2d",
        (64, 64, 3),
        (32, 64, 112, 112),
        (("padding", 2), ("dilation", 2), ("groups", 4)),
    ),
    Case("conv2d_channels_last", "Conv2d", (64, 128, 3), (64, 64, 112, 112), (("padding", 1),), last=True),
    Case(
        "transposed2d_channels_last",
        "ConvTranspose2d",
        (64, 64, 3),
        (32, 64, 64, 64),
        (("stride", 2), ("padding", 1), ("output_padding", 1)),
        last=True,
    ),
    Case("conv1d", "Conv1d", (64, 128, 5), (32, 64, 16384)),
    Case("conv3d", "Conv3d", (16, 64, 3), (16, 16, 16, 64, 64), (("padding", 1),)),
    Case("conv3d_channels_last", "Conv3d", (16, 64, 3), (16, 16, 16, 64, 64), (("padding", 1),), last=True),
    Case(
        "transposed3d",
        "ConvTranspose3d",
        (32, 16, 3),
        (16, 32, 16, 32, 32),
        (("stride", 2), ("padding", 1), ("output_padding", 1)),
    ),
]
