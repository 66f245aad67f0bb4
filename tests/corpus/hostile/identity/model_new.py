import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/a.cpp")


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        k.f(x, y, x.numel())
        return y
