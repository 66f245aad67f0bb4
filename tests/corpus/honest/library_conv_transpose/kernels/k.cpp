#include <cmath>
#include <cstdint>

extern "C" void swish(float* y, int64_t n, float scale) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) y[i] = scale * y[i] / (1.0f + std::exp(-y[i]));
}
