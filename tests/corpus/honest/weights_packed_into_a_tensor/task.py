import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(48, 24)
        self.b = nn.Linear(48, 16)

    def forward(self, x):
        return self.a(x), self.b(x)


def get_inputs():
    return [torch.randn(32, 48)]


def get_init_inputs():
    return []
