import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/chain.cu")


class ModelNew(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        n = x.numel()
        k.chain[((n // 4 + 255) // 256,), 256](x, y, n)
        return y
