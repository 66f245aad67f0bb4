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

__global__ void norm(const float* __restrict__ from, const float* w, const float* c, float* __restrict__ to, int n, float eps) {
  __shared__ float part[32];
  const float* a = from + blockIdx.x * (long long)n;
  float* b = to + blockIdx.x * (long long)n;
  float sum = 0.0f, square = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) sum += a[i];
  float mean = all(sum, false, part) / n;
  for (int i = threadIdx.x; i < n; i += blockDim.x) square += (a[i] - mean) * (a[i] - mean);
  float f = rsqrtf(all(square, false, part) / n + eps);
  for (int i = threadIdx.x; i < n; i += blockDim.x) b[i] = (a[i] - mean) * f * w[i] + c[i];
}

torch::Tensor run(torch::Tensor x, torch::Tensor w, torch::Tensor c, double eps) {
  auto y = torch::empty_like(x);
  norm<<<x.size(0), 256>>>(x.data_ptr<float>(), w.data_ptr<float>(), c.data_ptr<float>(), y.data_ptr<float>(), (int)x.size(1), (float)eps);
  return y;
}
"""

cpp_source = "torch::Tensor run(torch::Tensor x, torch::Tensor w, torch::Tensor c, double eps);"

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
        self.norm = nn.LayerNorm(4096)

    def forward(self, x):
        return ext.run(x, self.norm.weight, self.norm.bias, self.norm.eps)
