"""A convolution and what follows it: bias per channel, GELU, scale."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, channels, out, kernel):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel)
        self.shift = nn.Parameter(torch.randn(out, 1, 1))

    def forward(self, x):
        y = torch.relu(self.conv(x) + self.shift)
        return torch.sigmoid(y) * y * 1.7


def get_inputs():
    return [torch.randn(16, 8, 128, 128)]


def get_init_inputs():
    return [8, 32, 3]
