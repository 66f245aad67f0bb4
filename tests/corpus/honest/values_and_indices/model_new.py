import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        values = x.new_empty(x.size(0))
        indices = torch.empty(x.size(0), dtype=torch.long)
        k.row_max(x, values, indices, x.size(0), x.size(1))
        return values, indices
