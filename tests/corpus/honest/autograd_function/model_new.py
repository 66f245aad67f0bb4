import torch
import torch.nn as nn
import torch.nn.functional as F

import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = torch.empty_like(x)
        k.gelu(x, y, x.numel())
        return y
    @staticmethod
    def backward(ctx, g):
        raise NotImplementedError
class ModelNew(nn.Module):
    def forward(self, x):
        return Gelu.apply(x)
