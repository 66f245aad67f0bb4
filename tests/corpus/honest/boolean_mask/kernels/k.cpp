#include <cmath>
#include <cstdint>

extern "C" void mask(const float* x, const bool* m, float* y, bool* inverse, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        y[i] = m[i] ? -INFINITY : x[i];
        inverse[i] = !m[i];
    }
}
