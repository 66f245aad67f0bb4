import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, i):
        y = torch.zeros(10, dtype=x.dtype, device=x.device)
        k.accumulate(x, i, y, x.numel())
        return y
