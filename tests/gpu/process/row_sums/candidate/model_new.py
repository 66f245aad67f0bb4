import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

cuda_source = """
__inline__ __device__ float all(float v, bool most, float* part) {
  for (int d = 16; d; d >>= 1) {
    float o = __shfl_xor_sync(~0u, v, d);
    v = most ? fmaxf(v, o) : v + o;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  v = part[0];
  for (int w = 1; w < (blockDim.x >> 5); ++w) v = most ? fmaxf(v, part[w]) : v + part[w];
  return v;
}

__global__ void sums(const float* __restrict__ from, float* __restrict__ to, int n) {
  __shared__ float part[32];
  float sum = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += from[blockIdx.x * (long long)n + i];
  sum = all(sum, false, part);
  if (threadIdx.x == 0) to[blockIdx.x] = sum;
}

torch::Tensor run(torch::Tensor x) {
  auto y = torch::empty({x.size(0)}, x.options());
  sums<<<x.size(0), 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), (int)x.size(1));
  return y;
}
"""

cpp_source = "torch::Tensor run(torch::Tensor x);"

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

    def forward(self, x):
        return ext.run(x)
