extern "C" __global__ void relu2(float4* y, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (4 * i < n) {
        float4 a = y[i];
        y[i] = make_float4(2 * fmaxf(a.x, 0), 2 * fmaxf(a.y, 0), 2 * fmaxf(a.z, 0), 2 * fmaxf(a.w, 0));
    }
}
