extern "C" __global__ void chain(const float4* __restrict__ x, float4* __restrict__ y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    y[i + (1LL << 32)] = x[i];
}
