#include <cstdint>
extern "C" void f(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * 2.0f + 1.0f;
}
