"""RMS norm with a gain in one pass over each row, for the CPU: examples/tasks/rms_norm.py by hand.

kernelfleet judge --task examples/tasks/rms_norm.py --candidate examples/candidates/rms_norm --device cpu
"""

import kernelfleet_ext as kf
import torch
from torch import nn

k = kf.load("kernels/rms_norm.cpp")


class ModelNew(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = torch.empty_like(x)
        width = x.shape[-1]
        k.rms_norm(x, self.weight, y, x.numel() // width, width, self.eps)
        return y
