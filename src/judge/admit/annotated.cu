#include <cuda_bf16.h>
#include <cuda_fp16.h>

using index_t = int;

// N neighbours in one memory access; addresses are multiples of N elements.
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T item[N];
};
template <int N, typename T>
__device__ __forceinline__ void load_vector(T (&to)[N], const T* from) {
  const Vector<T, N> vector = *reinterpret_cast<const Vector<T, N>*>(from);
#pragma unroll
  for (int k = 0; k < N; ++k) to[k] = vector.item[k];
}
template <int N, typename T>
__device__ __forceinline__ void store_vector(T* to, const T (&from)[N]) {
  Vector<T, N> vector;
#pragma unroll
  for (int k = 0; k < N; ++k) vector.item[k] = from[k];
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

// A matrix product in single precision on tensor cores. Each operand is cut into two TF32 numbers, the nearest one
// and what is left of it; three of the four products are summed (rest times rest is below the last bit). Tensor
// cores add with truncation, so they only sum GEMM_TERMS terms, and ordinary additions join those sums: the result
// is at least as near to the exact one as that of multiplications in single precision.
constexpr int GEMM_TERMS = 32;

// 16 bytes from global to shared memory without registers; zeros where `live` is false.
__device__ __forceinline__ void gemm_copy(float* to, const float* from, bool live) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  const int bytes = live ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes));
}

// Four blocks of 8 rows and 16 bytes, as tensor cores take them; every lane names one row.
__device__ __forceinline__ void gemm_blocks(float (&to)[4], const float* row) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(row);
  unsigned a, b, c, d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "r"(address));
  to[0] = __uint_as_float(a), to[1] = __uint_as_float(b), to[2] = __uint_as_float(c), to[3] = __uint_as_float(d);
}

// x = high + low to 22 bits; tensor cores ignore the last 13 bits of what they are given.
__device__ __forceinline__ void gemm_split(float x, unsigned& high, unsigned& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high)) + 0x1000u;
}

__device__ __forceinline__ void gemm_multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Floats of a tile: rows of GEMM_TERMS with their 16-byte pieces mixed against bank conflicts, or padded columns.
template <int ROWS, bool ALONG_K>
__device__ constexpr int gemm_size() {
  return ALONG_K ? ROWS * GEMM_TERMS : GEMM_TERMS * (ROWS + 8);
}

// A tile of an operand: ROWS rows of A (or columns of B) by GEMM_TERMS terms.
template <int ROWS, bool ALONG_K, int THREADS>
__device__ __forceinline__ void gemm_load(float* tile, const float* from, int stride, int row0, int rows, int k0,
                                          int terms) {
#pragma unroll
  for (int i = 0; i < ROWS * GEMM_TERMS / 4 / THREADS; ++i) {
    const int piece = threadIdx.x + i * THREADS;
    if (ALONG_K) {
      const int row = piece / 8, part = piece % 8;
      const bool live = row0 + row < rows && k0 + part * 4 < terms;
      const float* source = live ? from + (long long)(row0 + row) * stride + k0 + part * 4 : from;
      gemm_copy(tile + row * GEMM_TERMS + (part ^ (row & 7)) * 4, source, live);
    } else {
      const int k = piece / (ROWS / 4), row = piece % (ROWS / 4) * 4;
      const bool live = row0 + row < rows && k0 + k < terms;
      const float* source = live ? from + (long long)(k0 + k) * stride + row0 + row : from;
      gemm_copy(tile + k * (ROWS + 8) + row, source, live);
    }
  }
}

// c (m x n) = a (m x k) b (k x n) + bias (n, or null). An operand lies along k, or along its other dimension.
// A block makes BM x BN results, a warp WM x WN of them; STAGES tiles are on their way at once.
template <int BM, int BN, int WM, int WN, int STAGES, bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void gemm(const float* a, const float* b, const float* bias, float* c, int m, int n, int k,
                                     float* shared) {
  constexpr int WARPS_N = BN / WN, THREADS = BM / WM * WARPS_N * 32;
  constexpr int MT = WM / 16, NT = WN / 8;
  constexpr int A_SIZE = gemm_size<BM, A_ALONG_K>(), B_SIZE = gemm_size<BN, B_ALONG_K>();
  const int a_stride = A_ALONG_K ? k : m, b_stride = B_ALONG_K ? k : n;
  float* a_tiles = shared;
  float* b_tiles = shared + STAGES * A_SIZE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_m = warp / WARPS_N * WM, warp_n = warp % WARPS_N * WN;
  // Neighbouring blocks share operands in the cache: they go through the result in bands of eight tiles.
  const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN;
  const int first = blockIdx.x / (8 * tiles_n) * 8, inside = blockIdx.x % (8 * tiles_n);
  const int height = min(8, tiles_m - first);
  const int row0 = (first + inside % height) * BM, column0 = inside / height * BN;
  const int steps = (k + GEMM_TERMS - 1) / GEMM_TERMS;
  a += (long long)blockIdx.y * m * k;
  b += (long long)blockIdx.y * k * n;
  c += (long long)blockIdx.y * m * n;

  float sums[MT][NT][4] = {};
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) {
    if (s < steps) {
      gemm_load<BM, A_ALONG_K, THREADS>(a_tiles + s * A_SIZE, a, a_stride, row0, m, s * GEMM_TERMS, k);
      gemm_load<BN, B_ALONG_K, THREADS>(b_tiles + s * B_SIZE, b, b_stride, column0, n, s * GEMM_TERMS, k);
    }
    asm volatile("cp.async.commit_group;");
  }
  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
    __syncthreads();
    const int next = step + STAGES - 1;
    if (next < steps) {
      const int s = next % STAGES;
      gemm_load<BM, A_ALONG_K, THREADS>(a_tiles + s * A_SIZE, a, a_stride, row0, m, next * GEMM_TERMS, k);
      gemm_load<BN, B_ALONG_K, THREADS>(b_tiles + s * B_SIZE, b, b_stride, column0, n, next * GEMM_TERMS, k);
    }
    asm volatile("cp.async.commit_group;");
    const float* a_tile = a_tiles + step % STAGES * A_SIZE;
    const float* b_tile = b_tiles + step % STAGES * B_SIZE;
    float part[MT][NT][4] = {};
#pragma unroll
    for (int k0 = 0; k0 < GEMM_TERMS; k0 += 8) {
      unsigned a_high[MT][4], a_low[MT][4], b_high[NT][2], b_low[NT][2];
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        float x[4];
        if (A_ALONG_K) {
          const int row = warp_m + i * 16 + lane % 16;
          gemm_blocks(x, a_tile + row * GEMM_TERMS + ((k0 / 4 + lane / 16) ^ (row & 7)) * 4);
        } else {
          const float* at = a_tile + (k0 + lane % 4) * (BM + 8) + warp_m + i * 16 + lane / 4;
          x[0] = at[0], x[1] = at[8], x[2] = at[4 * (BM + 8)], x[3] = at[4 * (BM + 8) + 8];
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) gemm_split(x[r], a_high[i][r], a_low[i][r]);
      }
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        float x[4];
        if (B_ALONG_K) {
          const int row = warp_n + j * 8 + lane / 16 * 8 + lane % 8;
          gemm_blocks(x, b_tile + row * GEMM_TERMS + ((k0 / 4 + lane / 8 % 2) ^ (row & 7)) * 4);
        } else {
          const float* at = b_tile + (k0 + lane % 4) * (BN + 8) + warp_n + j * 8 + lane / 4;
          x[0] = at[0], x[1] = at[4 * (BN + 8)], x[2] = at[8], x[3] = at[4 * (BN + 8) + 8];
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) gemm_split(x[r], b_high[j + r / 2][r % 2], b_low[j + r / 2][r % 2]);
      }
      // The small products first; neighbours in this order don't wait for each other.
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) gemm_multiply(part[i][j], a_low[i], b_high[j]);
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) gemm_multiply(part[i][j], a_high[i], b_low[j]);
#pragma unroll
      for (int i = 0; i < MT; ++i)
#pragma unroll
        for (int j = 0; j < NT; ++j) gemm_multiply(part[i][j], a_high[i], b_high[j]);
    }
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int j = 0; j < NT; ++j)
#pragma unroll
        for (int r = 0; r < 4; ++r) sums[i][j][r] += part[i][j][r];
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int column = column0 + warp_n + j * 8 + lane % 4 * 2;
    if (column >= n) continue;
    const float2 shift = bias ? *reinterpret_cast<const float2*>(bias + column) : make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < MT; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = row0 + warp_m + i * 16 + lane / 4 + half * 8;
        if (row < m)
          *reinterpret_cast<float2*>(c + (long long)row * n + column) =
              make_float2(sums[i][j][half * 2] + shift.x, sums[i][j][half * 2 + 1] + shift.y);
      }
  }
}

__device__ __forceinline__ float pt_clamp_min(float x, float low) { return x < low ? low : x; }
template <typename T>
__device__ __forceinline__ void sum_merge(T& a, T b) { a += b; }
template <typename T>
__device__ __forceinline__ void moments_add(T& s, T& q, float x, float k) {
  const T d = x - k;
  s += d;
  q += d * d;
}

// addmm
extern "C" __global__ void __launch_bounds__(256)
    k0(const float* a, const float* b, const float* bias, float* c) {
  extern __shared__ float shared[];
  gemm<128, 128, 64, 32, 4, true, true>(a, b, bias, c, 1024, 8192, 8192, shared);
}

#define K1_ROWS (K1_THREADS < 128 ? 128 / K1_THREADS : 1)  // rows a block
// native_batch_norm, add, mul
extern "C" __global__ void __launch_bounds__(K1_THREADS * K1_ROWS) k1(const float* __restrict__ y0_, const float* __restrict__ y, float* __restrict__ y1_) {
  constexpr int VEC = 4;
  constexpr int ITEMS = (8192 + K1_THREADS * VEC - 1) / (K1_THREADS * VEC);
  index_t row = (index_t)blockIdx.x * K1_ROWS + threadIdx.y;
  const bool live = row < 1024;
  if (!live) row = 1024 - 1;
  const int lane = threadIdx.x;
  const index_t d0 = row;
  double s0_0 = 0.0;
  double s0_1 = 0.0;
  const float t1 = y0_[d0 * 8192];
  float c3[ITEMS][VEC];
  #pragma unroll
  for (int it = 0; it < ITEMS; ++it) {
    const index_t i0 = ((index_t)it * K1_THREADS + lane) * VEC;
    if (i0 < 8192) {
      const index_t e0 = i0;
      float v2[VEC];
      load_vector<VEC>(v2, y0_ + (d0 * 8192 + e0));
      float a0_0[VEC];
      #pragma unroll
      for (int j = 0; j < VEC; ++j) a0_0[j] = 0.0f;
      float a0_1[VEC];
      #pragma unroll
      for (int j = 0; j < VEC; ++j) a0_1[j] = 0.0f;
      #pragma unroll
      for (int j = 0; j < VEC; ++j) {
        c3[it][j] = v2[j];
        moments_add(a0_0[j], a0_1[j], v2[j], t1);
      }
      #pragma unroll
      for (int h = 2; h > 0; h /= 2) {
        #pragma unroll
        for (int j = 0; j < h; ++j) {
          if (j + h < VEC) { sum_merge(a0_0[j], a0_0[j + h]); sum_merge(a0_1[j], a0_1[j + h]); }
        }
      }
      s0_0 += a0_0[0];
      s0_1 += a0_1[0];
    }
  }
  #pragma unroll
  for (int o = (K1_THREADS < 32 ? K1_THREADS : 32) / 2; o > 0; o /= 2) {
    sum_merge(s0_0, __shfl_xor_sync(0xffffffffu, s0_0, o)); sum_merge(s0_1, __shfl_xor_sync(0xffffffffu, s0_1, o));
  }
  if (K1_THREADS > 32) {
    __shared__ double s0_0_warps[K1_ROWS][32];
    if (lane % 32 == 0) s0_0_warps[threadIdx.y][lane / 32] = s0_0;
    __shared__ double s0_1_warps[K1_ROWS][32];
    if (lane % 32 == 0) s0_1_warps[threadIdx.y][lane / 32] = s0_1;
    __syncthreads();
    s0_0 = lane % 32 < K1_THREADS / 32 ? s0_0_warps[threadIdx.y][lane % 32] : (double)0.0;
    s0_1 = lane % 32 < K1_THREADS / 32 ? s0_1_warps[threadIdx.y][lane % 32] : (double)0.0;
    #pragma unroll
    for (int o = 16; o > 0; o /= 2) {
      sum_merge(s0_0, __shfl_xor_sync(0xffffffffu, s0_0, o)); sum_merge(s0_1, __shfl_xor_sync(0xffffffffu, s0_1, o));
    }
  }
  const float r0_0 = (float)(t1 + s0_0 * 0.0001220703125);
  const float r0_1 = (float)((t1 + s0_0 * 0.0001220703125) - (float)(t1 + s0_0 * 0.0001220703125));
  const float r0_2 = pt_clamp_min((float)((s0_1 - s0_0 * s0_0 * 0.0001220703125) * 0.0001220703125), 0.0f);
  const float t6 = r0_2 + 1e-5f;
  const float t7 = 1.0f / sqrtf(t6);
  #pragma unroll
  for (int it = 0; it < ITEMS; ++it) {
    const index_t i0 = ((index_t)it * K1_THREADS + lane) * VEC;
    if (i0 < 8192) {
      const index_t e0 = i0;
      float v9[VEC];
      load_vector<VEC>(v9, y + (d0 * 8192 + e0));
      float o12[VEC];
      #pragma unroll
      for (int j = 0; j < VEC; ++j) {
        const float t4 = c3[it][j] - r0_0;
        const float t5 = t4 - r0_1;
        const float t8 = t5 * t7;
        const float t10 = t8 + v9[j];
        const float t11 = t10 * v9[j];
        o12[j] = t11;
      }
      if (live) store_vector<VEC>(y1_ + (d0 * 8192 + e0), o12);
    }
  }
}
