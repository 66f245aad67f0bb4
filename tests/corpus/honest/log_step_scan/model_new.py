import torch
import torch.nn as nn
import torch.nn.functional as F

import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class ModelNew(nn.Module):
    def forward(self, x):
        rows, n = x.shape
        a, b = torch.empty(rows, n, dtype=torch.float64, device=x.device), torch.empty(rows, n, dtype=torch.float64, device=x.device)
        k.widen(x, a, rows * n)
        step = 1
        while step < n:
            k.step(a, b, rows, n, step)
            a, b = b, a
            step *= 2
        y = torch.empty_like(x)
        k.narrow(a, y, rows * n)
        return y
