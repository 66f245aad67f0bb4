import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 24)

    def forward(self, x):
        y = torch.empty(*x.shape, 24)
        k.rows(x, self.table.weight, y, x.numel(), 24)
        return y
