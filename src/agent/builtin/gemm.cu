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
