import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """
torch::Tensor softmax(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const int64_t rows = x.size(0), n = x.size(1);
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
#pragma omp parallel for
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = from + r * n;
    float* b = to + r * n;
    float most = a[0];
    for (int64_t i = 1; i < n; ++i) most = std::max(most, a[i]);
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) sum += b[i] = std::exp(a[i] - most);
    for (int64_t i = 0; i < n; ++i) b[i] = static_cast<float>(b[i] / sum);
  }
  return y;
}

torch::Tensor layer_norm(torch::Tensor x, torch::Tensor weight, torch::Tensor bias, double eps) {
  auto y = torch::empty_like(x);
  const int64_t n = x.size(-1), rows = x.numel() / n;
  const float* from = x.data_ptr<float>();
  const float* w = weight.data_ptr<float>();
  const float* c = bias.data_ptr<float>();
  float* to = y.data_ptr<float>();
#pragma omp parallel for
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = from + r * n;
    double mean = 0.0, square = 0.0;
    for (int64_t i = 0; i < n; ++i) mean += a[i];
    mean /= n;
    for (int64_t i = 0; i < n; ++i) square += (a[i] - mean) * (a[i] - mean);
    const double f = 1.0 / std::sqrt(square / n + eps);
    for (int64_t i = 0; i < n; ++i) to[r * n + i] = static_cast<float>((a[i] - mean) * f) * w[i] + c[i];
  }
  return y;
}

torch::Tensor packed(torch::Tensor weight) {
  const int64_t out = weight.size(0), in = weight.size(1);
  auto y = torch::empty({in, out}, weight.options());
  const float* from = weight.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t o = 0; o < out; ++o)
    for (int64_t i = 0; i < in; ++i) to[i * out + o] = from[o * in + i];
  return y;
}

torch::Tensor linear(torch::Tensor x, torch::Tensor packed, torch::Tensor bias) {
  const int64_t rows = x.size(0), in = packed.size(0), out = packed.size(1);
  auto y = torch::empty({rows, out}, x.options());
  const float* from = x.data_ptr<float>();
  const float* w = packed.data_ptr<float>();
  const float* c = bias.data_ptr<float>();
  float* to = y.data_ptr<float>();
#pragma omp parallel for
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) to[r * out + o] = c[o];
    for (int64_t i = 0; i < in; ++i) {
      const float a = from[r * in + i];
      for (int64_t o = 0; o < out; ++o) to[r * out + o] += a * w[i * out + o];
    }
  }
  return y;
}

std::vector<torch::Tensor> halves(torch::Tensor x) {
  auto y = torch::empty({2, x.size(0), x.size(1) / 2}, x.options());
  const int64_t rows = x.stride(0), columns = x.stride(1), n = x.size(1) / 2;
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t r = 0; r < x.size(0); ++r)
      for (int64_t i = 0; i < n; ++i) *to++ = 2.0f * from[r * rows + (h * n + i) * columns];
  return {y[0], y[1]};
}
"""

ext = load_inline(
    name="rows",
    cpp_sources=source,
    functions=["softmax", "layer_norm", "packed", "linear", "halves"],
    extra_cflags=["-O3", "-fopenmp"],
    extra_ldflags=["-lgomp"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.softmax(x)

