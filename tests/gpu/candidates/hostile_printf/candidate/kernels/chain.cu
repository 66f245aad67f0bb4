#include <cstdio>
extern "C" __global__ void chain(const float* x, float* y, long long n) { printf("%f", x[0]); }
