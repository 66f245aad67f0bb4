#include <cmath>
#include <cstdint>

extern "C" void gauss(const double* x, double* y, int64_t n, double a) {
    for (int64_t i = 0; i < n; i++) y[i] = std::exp(a * x[i] * x[i]);
}
