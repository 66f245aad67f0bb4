import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
__global__ void kernel(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ to, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) to[i] = 2.0f * a[i] + b[i];
}

torch::Tensor run(torch::Tensor a, torch::Tensor b) {
  auto y = torch::empty_like(a);
  long long n = a.numel();
  kernel<<<(n + 255) / 256, 256>>>(a.data_ptr<float>(), b.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
}
"""

cpp_source = "torch::Tensor run(torch::Tensor a, torch::Tensor b);"

ext = load_inline(
    name="inline_ext",
    cpp_sources=cpp_source,
    cuda_sources=cuda_source,
    functions=["run"],
    extra_cuda_cflags=["-O3"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, a, b):
        return ext.run(a, b)
