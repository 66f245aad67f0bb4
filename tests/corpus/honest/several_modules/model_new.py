import torch
import torch.nn as nn

import kernelfleet_ext as kf

first = kf.load("kernels/first.cpp")
second = kf.load("kernels/second.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        a, y = torch.empty_like(x), torch.empty_like(x)
        first.relu(x, a, x.numel())
        second.softmax(a, y, x.shape[0], x.shape[1])
        return y
