"""A gated GELU in the tanh form: elementwise operators that one loop can do."""

import math

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x, gate):
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner)) * torch.sigmoid(gate)


def get_inputs():
    return [torch.randn(2048, 4096), torch.randn(2048, 4096)]


def get_init_inputs():
    return []
