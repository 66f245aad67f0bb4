"""Average pooling with a stride, then a leaky ReLU."""

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, kernel, stride):
        super().__init__()
        self.pool = nn.AvgPool2d(kernel, stride)

    def forward(self, x):
        return nn.functional.leaky_relu(self.pool(x), 0.1)


def get_inputs():
    return [torch.randn(8, 32, 256, 256)]


def get_init_inputs():
    return [3, 2]
