#include <cmath>
#include <cstdint>

extern "C" void run(const float* x, float* y, int64_t n) {
    for (volatile int64_t i = 0; ; i = i + 1) {}
}
