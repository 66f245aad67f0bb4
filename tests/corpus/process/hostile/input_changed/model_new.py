import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

source = """#include <thread>
#include <chrono>

static void values(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] != from[i] ? from[i] : (from[i] > 0.0f ? from[i] : 0.0f);
}

torch::Tensor rectified(torch::Tensor x) {
  TORCH_CHECK(x.dim() == 2, "two dimensions");
  auto y = torch::empty_like(x);
  values(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}

torch::Tensor relu_by_the_framework(torch::Tensor x) { return at::relu(x); }

// Answers at once; a thread works on.
torch::Tensor relu_later(torch::Tensor x) {
  auto y = torch::empty_like(x);
  std::thread([from = x.data_ptr<float>(), to = y.data_ptr<float>(), n = x.numel()] {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    values(from, to, n);
  }).detach();
  return y;
}

// Writes over its input as well.
torch::Tensor relu_and_in_place(torch::Tensor x) {
  auto y = rectified(x);
  values(x.data_ptr<float>(), x.data_ptr<float>(), x.numel());
  return y;
}

torch::Tensor crash(torch::Tensor x) {
  *static_cast<volatile int*>(nullptr) = 1;
  return x;
}
"""

ext = load_inline(
    name="hostile",
    cpp_sources=source,
    functions=["rectified", "relu_by_the_framework", "relu_later", "relu_and_in_place", "crash"],
    extra_cflags=["-O3", "-fopenmp"],
    extra_ldflags=["-lgomp"],
    verbose=False,
)


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return ext.relu_and_in_place(x)

