import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 256))

    def forward(self, x):
        y = torch.empty_like(x)
        k.launch("product", args=[x, self.weight, y])
        return y
