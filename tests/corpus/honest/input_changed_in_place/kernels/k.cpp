#include <cmath>
#include <cstdint>

extern "C" void clamp(float* x, int64_t n, float low, float high) {
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < low ? low : (x[i] > high ? high : x[i]);
}
