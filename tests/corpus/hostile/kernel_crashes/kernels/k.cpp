#include <cmath>
#include <cstdint>

extern "C" void run(const float* x, float* y, int64_t n) { *static_cast<volatile int*>(nullptr) = 1; }
