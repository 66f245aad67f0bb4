import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([0.5, 1.25, -3.0, 7.0] * 4) * torch.arange(1, 17))

    def forward(self, x):
        return self.table.to(x.device)[x % 16]


def get_inputs():
    return [torch.randint(0, 1000, (64, 100))]


def get_init_inputs():
    return []
