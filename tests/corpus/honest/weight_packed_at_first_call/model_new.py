import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(48, 40)
        self.packed = None

    def forward(self, x):
        if self.packed is None:
            self.packed = self.fc.weight.detach().t().contiguous()
        y = torch.empty(x.shape[0], 40)
        k.product(x, self.packed, self.fc.bias, y, x.shape[0], 48, 40)
        return y
