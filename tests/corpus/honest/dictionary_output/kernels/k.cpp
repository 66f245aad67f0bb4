#include <cmath>
#include <cstdint>

extern "C" void sum_mean(const float* x, float* sum, float* mean, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        double total = 0.0;
        for (int64_t c = 0; c < columns; c++) total += x[r * columns + c];
        sum[r] = static_cast<float>(total);
        mean[r] = static_cast<float>(total / columns);
    }
}
