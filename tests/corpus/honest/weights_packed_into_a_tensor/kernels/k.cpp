#include <cmath>
#include <cstdint>

// y = x @ w, w is (k, n): the packed transpose of a linear layer's weight
extern "C" void product(const float* x, const float* w, const float* b, float* y, int64_t m, int64_t k, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) y[i * n + j] = b[j];
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++) y[i * n + j] += x[i * k + l] * w[l * n + j];
    }
}
