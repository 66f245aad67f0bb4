import torch
import torch.nn as nn

import kernelfleet_ext as kf

lib = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, q, k):
        s = kf.matmul(q, k.transpose(1, 2))
        y = torch.empty_like(s)
        lib.softmax(s, y, 60, 24)
        return y
