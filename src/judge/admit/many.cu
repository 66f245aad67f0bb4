// Honest kernels of many kinds, for the tests of the reader: what compilers put into images beyond plain code.
#include <cooperative_groups.h>
#include <cub/cub.cuh>
#include <cuda.h>
#include <cuda/barrier>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <mma.h>

namespace cg = cooperative_groups;

__constant__ float table[64] = {1, 2, 3};
__constant__ float zeros[64];
__device__ int counter;
__device__ float initial[4] = {1, 2, 3, 4};
__device__ float scratch[1 << 20];
__device__ const char* names[2] = {"aa", "bb"};
extern __shared__ float dynamic[];

struct Pack { float a[5]; double b; char c; };
struct Large { float a[900]; };
struct Base { __device__ virtual float f(float x) = 0; };
struct Twice : Base { __device__ float f(float x) override { return x * 2; } };
struct Square : Base { __device__ float f(float x) override { return x * x; } };

__device__ __noinline__ float recurse(int n, float x) { return n <= 0 ? x : recurse(n - 1, x * 1.5f) + sinf(x); }
typedef float (*Function)(int, float);
__device__ Function pointer = recurse;

extern "C" __global__ void __launch_bounds__(256, 2) everything(Pack p, float* y, int n, int* z) {
    __shared__ float own[256];
    own[threadIdx.x] = p.a[threadIdx.x % 5] * table[threadIdx.x % 64] + zeros[n & 63];
    __syncthreads();
    float local[300];
    for (int i = 0; i < 300; i++) local[i] = own[(i * n) & 255] + initial[i & 3];
    atomicAdd(&counter, 1);
    atomicAdd_system(z, 1);
    y[threadIdx.x] = local[n % 300] + sinf(y[threadIdx.x] * 1e9f) + recurse(n, p.b) + dynamic[threadIdx.x] +
                     names[n & 1][0] + pointer(n, 1.f) + scratch[n];
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) clusters(float* y) {
    cg::cluster_group c = cg::this_cluster();
    __shared__ float s[32];
    s[threadIdx.x & 31] = 1;
    c.sync();
    y[c.block_rank()] = *c.map_shared_rank(s, 1);
}

extern "C" __global__ void grid_barrier(float* y) {
    cg::grid_group g = cg::this_grid();
    y[0] = 1;
    g.sync();
    y[1] = y[0];
}

extern "C" __global__ void tensor_cores(const half* a, const half* b, float* c) {
    using namespace nvcuda;
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> fa;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> fb;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
    wmma::fill_fragment(fc, 0.f);
    wmma::load_matrix_sync(fa, a, 16);
    wmma::load_matrix_sync(fb, b, 16);
    wmma::mma_sync(fc, fa, fb, fc);
    wmma::store_matrix_sync(c, fc, 16, wmma::mem_row_major);
}

extern "C" __global__ void nothing() {}

template <int N> __global__ void templated(float* x) { x[N] = N; }
template __global__ void templated<3>(float*);

extern "C" __global__ void reduce(const float* x, float* y, int n) {
    typedef cub::BlockReduce<float, 256> Reduce;
    __shared__ Reduce::TempStorage storage;
    float s = 0;
    for (int i = threadIdx.x; i < n; i += 256) s += x[i];
    s = Reduce(storage).Sum(s);
    if (!threadIdx.x) y[0] = s;
}

extern "C" __global__ void sort(float* x) {
    typedef cub::BlockRadixSort<float, 128, 4> Sort;
    __shared__ Sort::TempStorage storage;
    float keys[4];
    for (int i = 0; i < 4; i++) keys[i] = x[threadIdx.x * 4 + i];
    Sort(storage).Sort(keys);
    for (int i = 0; i < 4; i++) x[threadIdx.x * 4 + i] = keys[i];
}

#pragma nv_diag_suppress 20054
extern "C" __global__ void barrier(const float* x, float* y) {
    __shared__ cuda::barrier<cuda::thread_scope_block> b;
    __shared__ float s[256];
    if (!threadIdx.x) init(&b, blockDim.x);
    __syncthreads();
    cuda::memcpy_async(cg::this_thread_block(), s, x, 1024, b);
    b.arrive_and_wait();
    y[threadIdx.x] = s[threadIdx.x];
}

extern "C" __global__ void large(const __grid_constant__ Large b, float* y) { y[threadIdx.x] = b.a[threadIdx.x]; }

extern "C" __global__ void virtual_call(float* y, int n) {
    Twice a;
    Square b;
    Base* f = n ? (Base*)&a : (Base*)&b;
    y[0] = f->f(y[1]);
}

extern "C" __global__ void jump_table(int* y) {
    switch (y[0]) {
        case 0: y[1] = 5; break;
        case 1: y[2] = 7; break;
        case 2: y[3] = 9; y[4] = 1; break;
        case 3: y[5] = 1; break;
        case 4: y[6] = 2; break;
        case 5: y[7] = 11; break;
        case 6: y[8] = y[9] * 3; break;
        case 7: y[9] = __popc(y[3]); break;
        default: y[10] = 1;
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) moved_registers(float* y) {
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        y[0] = 1;
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        y[threadIdx.x] = 2;
    }
}

extern "C" __global__ void dependent(float* y) {
    asm volatile("griddepcontrol.wait;");
    y[0] = 1;
    asm volatile("griddepcontrol.launch_dependents;");
}

extern "C" __global__ void __maxnreg__(64) bounded(float* y) { y[0] = expf(y[1]) + __bfloat162float(__float2bfloat16(y[2])); }

extern "C" __global__ void __block_size__((64, 2, 1)) fixed(float* y) { y[threadIdx.x] = threadIdx.y; }

extern "C" __global__ void tma(const __grid_constant__ CUtensorMap map, float* y) {
    extern __shared__ __align__(128) float tile[];
    __shared__ uint64_t b;
    unsigned bar = __cvta_generic_to_shared(&b), to = __cvta_generic_to_shared(tile);
    if (!threadIdx.x) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar));
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2,%3}], [%4];" ::"r"(to),
            "l"(&map), "r"(0), "r"(0), "r"(bar)
            : "memory");
    }
    y[0] = tile[0];
}

extern "C" __global__ void warpgroup(float* y) {
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = y[i];
    asm volatile("wgmma.fence.sync.aligned;");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %5, 1,1,1,0,0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "l"(0x4000000000000ull), "l"(0x4000000000001ull));
    asm volatile("wgmma.commit_group.sync.aligned;wgmma.wait_group.sync.aligned 0;");
    for (int i = 0; i < 4; i++) y[i] = d[i];
}

extern "C" __global__ void doubles(double* y) { y[0] = sin(y[1]) + pow(y[2], y[3]) + y[4] / y[5]; }

extern "C" __global__ void bytes(const __nv_fp8_e4m3* x, float* y, long long n) { y[n] = float(x[n]); }
