import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, x):
        return self.norm(x)


def get_inputs():
    return [torch.randn(16, 10, 20)]


def get_init_inputs():
    return []
