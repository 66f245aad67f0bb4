// RMS norm: a row is read twice, the second time from the cache, and written once.
#include <cmath>
#include <cstdint>

extern "C" void rms_norm(const float* x, const float* weight, float* y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel for
    for (int64_t row = 0; row < rows; row++) {
        const float* a = x + row * width;
        float* b = y + row * width;
        // Blocks of 1,024 terms in vector lanes, the blocks in double: the error doesn't grow with the row.
        double squares = 0.0;
        for (int64_t from = 0; from < width; from += 1024) {
            const int64_t to = from + 1024 < width ? from + 1024 : width;
            float part = 0.0f;
#pragma omp simd reduction(+ : part)
            for (int64_t i = from; i < to; i++) part += a[i] * a[i];
            squares += part;
        }
        const float scale = 1.0f / std::sqrt(static_cast<float>(squares / width) + eps);
#pragma omp simd
        for (int64_t i = 0; i < width; i++) b[i] = a[i] * scale * weight[i];
    }
}
