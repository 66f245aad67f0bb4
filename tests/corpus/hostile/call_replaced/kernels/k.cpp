#include <cmath>
#include <cstdint>
extern "C" void gelu(const float* x, float* y, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) y[i] = 0.5 * (double)x[i] * (1.0 + std::erf((double)x[i] * 0.70710678118654752440));
}
