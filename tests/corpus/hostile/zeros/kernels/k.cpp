#include <cmath>
#include <cstdint>

extern "C" void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i++) y[i] = 0.0f;
}
