import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x, b):
        v = b.expand_as(x)
        y = torch.empty_like(x)
        k.add(x, v, y, x.shape[0], x.shape[1], v.stride(0), v.stride(1))
        return y
