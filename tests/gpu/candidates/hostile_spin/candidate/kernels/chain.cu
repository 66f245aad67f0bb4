extern "C" __global__ void chain(const volatile float* x, volatile float* y, long long n) {
    while (true) y[0] = x[0];
}
