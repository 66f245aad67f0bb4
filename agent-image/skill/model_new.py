"""Your ModelNew: same constructor, same state dict and same outputs as Model in model.py."""

import torch
from torch import nn

import kernelfleet_ext as kf

# k = kf.load("kernels/fused.{suffix}")


class ModelNew(nn.Module):
    def forward(self, *inputs):
        raise NotImplementedError("write me")
