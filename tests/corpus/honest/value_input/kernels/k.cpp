#include <cmath>
#include <cstdint>

extern "C" void scale(const float* x, float* y, int64_t n, float alpha, int64_t shift) {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * alpha + static_cast<float>(shift);
}
