import torch
import torch.nn as nn
import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
        k.work(x, y, x.shape[0], x.shape[1])
        return y
