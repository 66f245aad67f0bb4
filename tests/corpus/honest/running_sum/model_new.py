import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = torch.empty_like(x)
        half = x.shape[0] // 2
        for rows in (slice(0, half), slice(half, None)):
            k.scan(x[rows], y[rows], half, x.shape[1])
        return y
