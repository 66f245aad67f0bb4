#include <cmath>
#include <cstdint>

extern "C" void conv(const float* x, const float* w, const float* b, float* y, int64_t n, int64_t c, int64_t o, int64_t s) {
    const int64_t t = s - 2;
#pragma omp parallel for collapse(2)
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < o; k++)
            for (int64_t h = 0; h < t; h++)
                for (int64_t v = 0; v < t; v++) {
                    float sum = b[k];
                    for (int64_t d = 0; d < c; d++)
                        for (int p = 0; p < 3; p++)
                            for (int q = 0; q < 3; q++)
                                sum += x[((i * c + d) * s + h + p) * s + v + q] * w[((k * c + d) * 3 + p) * 3 + q];
                    y[((i * o + k) * t + h) * t + v] = sum > 0.0f ? sum : 0.0f;
                }
}
