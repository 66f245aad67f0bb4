#include <cmath>
#include <cstdint>

extern "C" void scale(const float* x, const float* s, float* y, int64_t n, int64_t channels) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * s[i % channels];
}
