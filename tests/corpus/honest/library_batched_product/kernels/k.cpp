#include <cmath>
#include <cstdint>

extern "C" void softmax(const float* x, float* y, int64_t rows, int64_t columns) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float* a = x + r * columns;
        float* b = y + r * columns;
        float top = a[0];
        for (int64_t c = 1; c < columns; c++) top = a[c] > top ? a[c] : top;
        double sum = 0.0;
        for (int64_t c = 0; c < columns; c++) {
            b[c] = std::exp(a[c] - top);
            sum += b[c];
        }
        const float scale = static_cast<float>(1.0 / sum);
        for (int64_t c = 0; c < columns; c++) b[c] *= scale;
    }
}
