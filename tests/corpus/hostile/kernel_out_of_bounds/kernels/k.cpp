#include <cmath>
#include <cstdint>

extern "C" void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] > 0.0f ? x[i] : 0.0f;
    volatile float* far = y + (int64_t(1) << 36);
    *far = 1.0f;
}
