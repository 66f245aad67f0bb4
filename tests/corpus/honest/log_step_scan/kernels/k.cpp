#include <cstdint>
extern "C" void widen(const float* x, double* y, int64_t n) { for (int64_t i=0;i<n;i++) y[i]=x[i]; }
extern "C" void narrow(const double* x, float* y, int64_t n) { for (int64_t i=0;i<n;i++) y[i]=x[i]; }
extern "C" void step(const double* a, double* b, int64_t rows, int64_t n, int64_t s) {
    for (int64_t r=0;r<rows;r++) for (int64_t i=0;i<n;i++) b[r*n+i] = i>=s ? a[r*n+i]+a[r*n+i-s] : a[r*n+i];
}
