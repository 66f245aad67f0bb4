import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/scale.cu")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.cos(torch.arange(1025, dtype=torch.float32) / 10.0)

    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        k.scale[((n + 255) // 256,), 256](x, self.table, y, n, 1024)
        return y
