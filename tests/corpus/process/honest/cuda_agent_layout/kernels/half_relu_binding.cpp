#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>

#include "../binding_registry.h"

extern "C" void half_relu_launcher(float* to, const float* from, int64_t n);

static torch::Tensor half_relu_forward(torch::Tensor x) {
  TORCH_CHECK(x.is_contiguous(), "x must be contiguous");
  auto y = torch::empty_like(x);
  half_relu_launcher(y.data_ptr<float>(), x.data_ptr<float>(), x.numel());
  return y;
}

static void register_half_relu(pybind11::module& m) { m.def("half_relu_forward", &half_relu_forward, py::arg("x")); }

REGISTER_BINDING(half_relu, register_half_relu);
