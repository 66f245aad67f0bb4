#include <cmath>
#include <cstdint>

extern "C" void leaky(const float* x, float* y) {
#ifndef FAST
#error "FAST is not defined"
#endif
    for (int64_t i = 0; i < COUNT; i++) y[i] = x[i] > 0.0f ? x[i] : SLOPE * x[i];
}
