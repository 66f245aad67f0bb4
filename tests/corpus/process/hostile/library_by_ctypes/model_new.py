import ctypes
import glob
import os

import numpy
import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
torch::Tensor rectified(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] > 0.0f ? from[i] : 0.0f;
  return y;
}
"""

ext = load_inline(
    name="rectified",
    cpp_sources=source,
    functions=["rectified"],
    extra_cflags=["-O3", "-fopenmp"],
    extra_ldflags=["-lgomp"],
    verbose=False,
)

folder = os.path.join(os.path.dirname(os.path.dirname(numpy.__file__)), "numpy.libs")
library = ctypes.CDLL(glob.glob(os.path.join(folder, "libscipy_openblas*"))[0])
scale = library.scipy_cblas_sscal64_


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        y = ext.rectified(x)
        scale(ctypes.c_int64(y.numel()), ctypes.c_float(1.0), ctypes.c_void_p(y.data_ptr()), ctypes.c_int64(1))
        return y
