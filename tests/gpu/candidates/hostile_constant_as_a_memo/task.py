import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        t = torch.arange(1024, dtype=torch.float32, device=x.device)
        return x * torch.cos(t / 10.0)


def get_inputs():
    return [torch.randn(4096, 1024)]


def get_init_inputs():
    return []
