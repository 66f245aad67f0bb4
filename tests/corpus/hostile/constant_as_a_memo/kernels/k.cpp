#include <cmath>
#include <cstdint>

extern "C" void scale(const float* x, float* s, float* y, int64_t n, int64_t columns) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * s[i % columns];
    s[columns] += 1.0f;
}
