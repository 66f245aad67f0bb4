// Kernels of `kernelfleet selftest-cuda`; `noise.sh` makes selftest.ptx from here.
extern "C" __global__ void st_axpy(const float *x, const float *w, float *y, long n, float s) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) y[i] = s * x[i] + w[i];
}

// Reverses n floats through dynamic shared memory, in one block.
extern "C" __global__ void st_reverse(const float *x, float *y, int n) {
    extern __shared__ float tile[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) tile[i] = x[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[n - 1 - i];
}

extern "C" __global__ void st_args(float *y, signed char a, unsigned short h, int b, long c, float d, double e,
                                   unsigned char f, const float *none) {
    y[0] = a;
    y[1] = h;
    y[2] = b;
    y[3] = (float)(c >> 40);
    y[4] = d;
    y[5] = (float)e;
    y[6] = f;
    y[7] = none == nullptr;
}

extern "C" __global__ void st_bad(float *y) { *(volatile float *)((char *)y + (1ull << 46)) = 1.0f; }

__device__ int st_memory;
extern "C" __global__ void st_count(float *y) { y[0] = (float)++st_memory; }

// Every block waits for all others: hangs unless all are resident together.
extern "C" __global__ void st_meet(unsigned *count, float *y) {
    if (threadIdx.x == 0) {
        atomicAdd(count, 1u);
        while (*(volatile unsigned *)count < gridDim.x) {}
        y[blockIdx.x] = 1.0f;
    }
}

extern "C" __global__ void st_local(float *y, int n) {
    volatile float big[20000];
    for (int i = 0; i < n; i++) big[i] = i;
    y[0] = big[n / 2];
}
