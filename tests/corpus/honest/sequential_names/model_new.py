import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(48, 40), nn.Identity())

    def forward(self, x):
        y = torch.empty(x.shape[0], 40)
        w = self.net[0].weight.t().contiguous()
        k.product(x, w, self.net[0].bias, y, x.shape[0], 48, 40)
        return self.net[1](y)
