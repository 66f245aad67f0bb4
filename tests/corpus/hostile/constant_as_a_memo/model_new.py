import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.cos(torch.arange(65, dtype=torch.float32) / 10.0)

    def forward(self, x):
        y = torch.empty_like(x)
        k.scale(x, self.table, y, x.numel(), 64)
        return y
