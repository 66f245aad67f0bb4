import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
torch::Tensor relu(torch::Tensor x) { return y; }
"""

ext = load_inline(
    name="garbage",
    cpp_sources=source,
    functions=["relu"],
    extra_cflags=["-O3", "-fopenmp"],
    extra_ldflags=["-lgomp"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.relu(x)

