#include <cmath>
#include <cstdint>
#include "kernelfleet_math.h"

extern "C" void gelu(const float* x, float* y, int64_t n) {
#pragma omp parallel for simd
    for (int64_t i = 0; i < n; i++) y[i] = kf_gelu(x[i]);
}
