#include <cstdint>

extern "C" void half_relu_launcher(float* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i] != from[i] ? from[i] : (from[i] > 0.0f ? 0.5f * from[i] : 0.0f);
}
