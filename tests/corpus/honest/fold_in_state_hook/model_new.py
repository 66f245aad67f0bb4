import torch
import torch.nn as nn
import torch.nn.functional as F

import kernelfleet_ext as kf
k = kf.load("kernels/k.cpp")
class ModelNew(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.linear = nn.Linear(i, o)
        self.scale = nn.Parameter(torch.randn(o))
        self.register_load_state_dict_post_hook(self.pack)
        self.packed = None
    @staticmethod
    def pack(module, keys):
        with torch.no_grad():
            module.packed = module.linear.weight.t().contiguous()
    def forward(self, x):
        if self.packed is None:
            self.pack(self, None)
        y = torch.empty((x.shape[0], self.packed.shape[1]), device=x.device)
        k.lin(x, self.packed, self.linear.bias, self.scale, y, *x.shape, self.packed.shape[1])
        return y
