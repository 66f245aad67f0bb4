#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" void rows(const int64_t* x, const float* table, float* y, int64_t n, int64_t width) {
    for (int64_t i = 0; i < n; i++) std::memcpy(y + i * width, table + x[i] * width, width * sizeof(float));
}
