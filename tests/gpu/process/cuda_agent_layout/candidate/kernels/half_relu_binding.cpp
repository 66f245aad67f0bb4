#include <torch/types.h>
#include <torch/csrc/utils/pybind.h>
#include <cuda_runtime.h>
#include <c10/cuda/CUDAStream.h>

#include "../binding_registry.h"

extern "C" void half_relu_launcher(float* to, const float* from, long long n, cudaStream_t stream);

static torch::Tensor half_relu_forward(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda() && x.is_contiguous(), "x must be a contiguous CUDA tensor");
  auto y = torch::empty_like(x);
  half_relu_launcher(y.data_ptr<float>(), x.data_ptr<float>(), x.numel(), c10::cuda::getCurrentCUDAStream().stream());
  return y;
}

static void register_half_relu(pybind11::module& m) { m.def("half_relu_forward", &half_relu_forward, py::arg("x")); }

REGISTER_BINDING(half_relu, register_half_relu);
