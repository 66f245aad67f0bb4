import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/relu.cu")


class ModelNew(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.linear = nn.Linear(inside, outside)

    def forward(self, x):
        y = kf.linear(x, self.linear.weight, self.linear.bias)
        n = y.numel()
        k.relu2[(n // 4 + 255) // 256, 256](y, n)
        return y
