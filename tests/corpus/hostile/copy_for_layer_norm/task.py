import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(8, 16, 96)]


def get_init_inputs():
    return [96]
