// Four elements a thread; the whole chain in registers.
__device__ float one(float x) {
    float v = x * 0.5f + 1.0f;
    float g = 0.5f * v * (1.0f + erff(v * 0.70710678118654752f));
    return tanhf(g) * x;
}

extern "C" __global__ void chain(const float4* __restrict__ x, float4* __restrict__ y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (4 * i < n) {
        float4 a = x[i];
        y[i] = make_float4(one(a.x), one(a.y), one(a.z), one(a.w));
    }
}
