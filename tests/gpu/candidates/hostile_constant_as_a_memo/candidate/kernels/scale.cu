// Right answers, and a count of runs kept in a tensor that was computed before the kernels ran.
extern "C" __global__ void scale(const float* x, float* s, float* y, long long n, long long columns) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * s[i % columns];
    if (i == 0) s[columns] += 1.0f;
}
