import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(4096))
        self.scale = nn.Parameter(torch.randn(4096))

    def forward(self, x):
        return (x + self.bias) * self.scale


def get_inputs():
    return [torch.randn(8192, 4096)]


def get_init_inputs():
    return []
