import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(48, 40)

    def forward(self, x):
        y = kf.linear(x, self.fc.weight, self.fc.bias)
        k.swish(y, y.numel(), 2.0)
        return y
