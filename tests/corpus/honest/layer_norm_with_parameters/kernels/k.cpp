#include <cmath>
#include <cstdint>

extern "C" void layer_norm(const float* x, const float* w, const float* b, float* y, int64_t rows, int64_t n, float eps) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0.0, square = 0.0;
        for (int64_t c = 0; c < n; c++) mean += x[r * n + c];
        mean /= n;
        for (int64_t c = 0; c < n; c++) square += (x[r * n + c] - mean) * (x[r * n + c] - mean);
        const double scale = 1.0 / std::sqrt(square / n + eps);
        for (int64_t c = 0; c < n; c++) y[r * n + c] = static_cast<float>((x[r * n + c] - mean) * scale) * w[c] + b[c];
    }
}
