import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(16))

    def forward(self, x):
        y = torch.empty(x.shape, dtype=torch.float32)
        k.look_up(x, self.table, y, x.numel())
        return y
