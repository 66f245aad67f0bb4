import torch
import torch.nn as nn
import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = torch.empty_like(x)
        k.leaky(x, y, x.numel())
        return y
