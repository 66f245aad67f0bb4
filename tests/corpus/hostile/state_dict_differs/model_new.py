import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.extra = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x
