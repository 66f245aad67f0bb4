import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/softmax.cu", defines={"BLOCK": 1024})


class ModelNew(nn.Module):
    def forward(self, x):
        rows, columns = x.shape
        y = torch.empty_like(x)
        k.softmax[rows, 1024, columns * 4](x, y, columns)
        return y
