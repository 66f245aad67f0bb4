#include <cmath>
#include <cstdint>

extern "C" void row_max(const float* x, float* values, int64_t* indices, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t best = 0;
        for (int64_t c = 1; c < columns; c++)
            if (x[r * columns + c] > x[r * columns + best]) best = c;
        values[r] = x[r * columns + best];
        indices[r] = best;
    }
}
