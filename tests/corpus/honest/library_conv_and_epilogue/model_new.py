import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)

    def forward(self, x):
        c = self.conv
        y = kf.conv(x, c.weight, c.bias, stride=c.stride, padding=c.padding, dilation=c.dilation, groups=c.groups)
        k.swish(y, y.numel(), 1.0)
        return y
