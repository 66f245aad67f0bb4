import torch
import torch.nn as nn
import torch.nn.functional as F

import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        k.gelu(x, y, x.numel())
        return y
