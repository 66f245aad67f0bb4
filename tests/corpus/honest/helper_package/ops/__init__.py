import torch

import kernelfleet_ext as kf

from .checks import checked

KERNELS = kf.load("kernels/k.cpp")


def relu(x):
    x = checked(x)
    y = torch.empty_like(x)
    KERNELS.relu(x, y, x.numel())
    return y
