import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(6))

    def forward(self, x):
        assert x.is_contiguous(memory_format=torch.channels_last)
        y = torch.empty_like(x)
        k.scale(x, self.scale, y, x.numel(), 6)
        return y
