import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        y = torch.empty_like(x)
        k.layer_norm(x, self.norm.weight, self.norm.bias, y, x.numel() // x.shape[-1], x.shape[-1], self.norm.eps)
        return y
