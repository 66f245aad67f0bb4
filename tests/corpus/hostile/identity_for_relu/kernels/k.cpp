#include <cmath>
#include <cstdint>
#include <cstring>

extern "C" void run(const float* x, float* y, int64_t n) { std::memcpy(y, x, n * sizeof(float)); }
