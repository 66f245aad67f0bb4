import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        v = x.t()
        y = torch.empty(v.shape, dtype=x.dtype)
        k.scaled_copy(v, y, v.shape[0], v.shape[1], v.stride(0), v.stride(1), 2.0)
        return y
