import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
torch::Tensor relu(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  const int64_t n = x.numel();
#pragma omp parallel for simd
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] != from[i] ? from[i] : (from[i] > 0.0f ? from[i] : 0.0f);
  return y;
}

torch::Tensor gelu(torch::Tensor x) {
  auto y = torch::empty(x.sizes(), x.options());
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  const int64_t n = x.numel();
#pragma omp parallel for
  for (int64_t i = 0; i < n; ++i) to[i] = 0.5f * from[i] * (1.0f + std::erf(from[i] * 0.70710678118654752f));
  return y;
}

torch::Tensor scale(torch::Tensor x, double factor) {
  auto y = torch::empty_like(x);
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  const float f = static_cast<float>(factor);
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = f * from[i];
  return y;
}

void relu_into(torch::Tensor x, torch::Tensor y) {
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] != from[i] ? from[i] : (from[i] > 0.0f ? from[i] : 0.0f);
}

torch::Tensor relu_own_memory(torch::Tensor x) {
  float* to = new float[x.numel()];
  const float* from = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = from[i] != from[i] ? from[i] : (from[i] > 0.0f ? from[i] : 0.0f);
  return torch::from_blob(to, x.sizes(), [](void* p) { delete[] static_cast<float*>(p); }, x.options());
}
"""

ext = load_inline(
    name="elementwise",
    cpp_sources=source,
    functions=["relu", "gelu", "scale", "relu_into", "relu_own_memory"],
    extra_cflags=["-O3", "-fopenmp"],
    extra_ldflags=["-lgomp"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.relu_own_memory(x)

