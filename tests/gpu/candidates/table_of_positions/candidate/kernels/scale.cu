extern "C" __global__ void scale(const float* x, const float* s, float* y, long long n, long long columns) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] * s[i % columns];
}
