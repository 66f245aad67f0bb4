#include <cmath>
#include <cstdint>

extern "C" void relu(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) y[i] = x[i] != x[i] ? x[i] : (x[i] > 0.0f ? x[i] : 0.0f);
}
