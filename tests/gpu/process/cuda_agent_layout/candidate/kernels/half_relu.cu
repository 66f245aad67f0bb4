#include <cuda_runtime.h>

__global__ void half_relu(float* to, const float* from, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) to[i] = from[i] != from[i] ? from[i] : 0.5f * fmaxf(from[i], 0.0f);
}

extern "C" void half_relu_launcher(float* to, const float* from, long long n, cudaStream_t stream) {
  if (n > 0) half_relu<<<(n + 255) / 256, 256, 0, stream>>>(to, from, n);
}
