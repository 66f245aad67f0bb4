import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
__global__ void kernel(const float* __restrict__ x, const float* __restrict__ bias, const float* __restrict__ scale,
                       float* __restrict__ to, long long n, int width) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) to[i] = (x[i] + bias[i % width]) * scale[i % width];
}

torch::Tensor run(torch::Tensor x, torch::Tensor bias, torch::Tensor scale) {
  auto y = torch::empty_like(x);
  long long n = x.numel();
  kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), bias.data_ptr<float>(), scale.data_ptr<float>(), y.data_ptr<float>(), n, (int)x.size(1));
  return y;
}
"""

cpp_source = "torch::Tensor run(torch::Tensor x, torch::Tensor bias, torch::Tensor scale);"

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
        self.bias = nn.Parameter(torch.randn(4096))
        self.scale = nn.Parameter(torch.randn(4096))

    def forward(self, x):
        return ext.run(x, self.bias, self.scale)
