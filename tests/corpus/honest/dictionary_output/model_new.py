import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        both = torch.empty(2, x.shape[0])
        k.sum_mean(x, both[0], both[1], x.shape[0], x.shape[1])
        return {"sum": both[0], "mean": both[1].unsqueeze(1)}
