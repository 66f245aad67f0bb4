import torch
import torch.nn as nn

import kernelfleet_ext as kf

k = kf.load("kernels/k.cpp")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        assert isinstance(x, torch.Tensor) and x.dim() == 2 and x.device.type == kf.device()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        x = x.detach().contiguous().float().to(x.device).to(torch.float32)
        y = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)
        assert x.data_ptr() % 16 == 0 and y.data_ptr() != 0 and x.element_size() == 4
        with torch.no_grad():
            k.relu(x.data_ptr(), y.data_ptr(), x.numel())
        return y.view(-1).view(x.shape)
