import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, m):
        y, inverse = torch.empty_like(x), torch.empty_like(m)
        k.mask(x, m, y, inverse, x.numel())
        return y, inverse
