import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x):
        y = torch.empty_like(x)
        k.scaled(x, y, x.numel(), self.scale.item())
        return y
