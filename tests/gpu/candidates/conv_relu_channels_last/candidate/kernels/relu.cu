// y is contiguous: `plane` float4 to a channel, 64 channels.
extern "C" __global__ void bias_relu(float4* y, const float* bias, long long n, int plane) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (4 * i < n) {
        float b = bias[(i / plane) % 64];
        float4 a = y[i];
        y[i] = make_float4(fmaxf(a.x + b, 0), fmaxf(a.y + b, 0), fmaxf(a.z + b, 0), fmaxf(a.w + b, 0));
    }
}

// (c, p) -> (p, c) for each image, 32 x 32 at a time.
extern "C" __global__ void to_last(const float* x, float* y, int channels, int plane) {
    __shared__ float tile[32][33];
    long long image = (long long)blockIdx.z * channels * plane;
    for (int r = threadIdx.y; r < 32; r += 8)
        tile[r][threadIdx.x] = x[image + (long long)(blockIdx.y * 32 + r) * plane + blockIdx.x * 32 + threadIdx.x];
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += 8)
        y[image + (long long)(blockIdx.x * 32 + r) * channels + blockIdx.y * 32 + threadIdx.x] = tile[threadIdx.x][r];
}

extern "C" __global__ void from_last(const float* x, const float* bias, float* y, int channels, int plane) {
    __shared__ float tile[32][33];
    long long image = (long long)blockIdx.z * channels * plane;
    float b = bias[blockIdx.y * 32 + threadIdx.x];
    for (int r = threadIdx.y; r < 32; r += 8)
        tile[r][threadIdx.x] =
            fmaxf(x[image + (long long)(blockIdx.x * 32 + r) * channels + blockIdx.y * 32 + threadIdx.x] + b, 0);
    __syncthreads();
    for (int r = threadIdx.y; r < 32; r += 8)
        y[image + (long long)(blockIdx.y * 32 + r) * plane + blockIdx.x * 32 + threadIdx.x] = tile[threadIdx.x][r];
}
