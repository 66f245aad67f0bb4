// One block a row, the row kept in shared memory between the passes.
__device__ float block_reduce(float v, bool is_max) {
    __shared__ float parts[32];
    for (int o = 16; o; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        v = is_max ? fmaxf(v, w) : v + w;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = v;
    __syncthreads();
    v = parts[threadIdx.x % (BLOCK / 32)];
    for (int o = 16; o; o >>= 1) {
        float w = __shfl_xor_sync(~0u, v, o);
        v = is_max ? fmaxf(v, w) : v + w;
    }
    return v;
}

extern "C" __global__ void softmax(const float* x, float* y, int columns) {
    extern __shared__ float row[];
    const float* in = x + (long long)blockIdx.x * columns;
    float* out = y + (long long)blockIdx.x * columns;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < columns; i += BLOCK) {
        row[i] = in[i];
        most = fmaxf(most, row[i]);
    }
    most = block_reduce(most, true);
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += BLOCK) {
        row[i] = expf(row[i] - most);
        sum += row[i];
    }
    sum = block_reduce(sum, false);
    for (int i = threadIdx.x; i < columns; i += BLOCK) out[i] = row[i] / sum;
}
