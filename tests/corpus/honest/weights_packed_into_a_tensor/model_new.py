import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(48, 24)
        self.b = nn.Linear(48, 16)

    def forward(self, x):
        w = torch.empty(48, 40)
        w[:, :24] = self.a.weight.t()
        w[:, 24:].copy_(self.b.weight.t())
        bias = torch.cat([self.a.bias, self.b.bias])
        y = torch.empty(x.shape[0], 40)
        k.product(x, w, bias, y, x.shape[0], 48, 40)
        return y[:, :24], y[:, 24:]
