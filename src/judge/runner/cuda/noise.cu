// Noise like data, for buffers and shared memory between samples. `noise.ptx` beside this file is what the
// runner embeds; `noise.sh` makes it from here. No library, no runtime: plain integer arithmetic.
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ static inline u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// One 32-bit word of elements of a kind: 0 float32, 1 float16, 2 bfloat16, 3 float64, 4 int64, 5 int32,
// 6 int16, 7 bytes, 8 booleans. Floats lie in (-2, 2), most of them below 1; integers are small.
__device__ static inline u32 element(u64 index, u32 seed, u32 kind) {
    u32 h = mix((u32)index ^ mix((u32)(index >> 32) + seed));
    // Exponents spread over eight binades below 2, by the number of trailing zeros of other bits.
    u32 g = mix(h ^ 0x9e3779b9u);
    u32 low = __clz(__brev((g & 0xffu) | 0x80u));
    u32 high = __clz(__brev(((g >> 8) & 0xffu) | 0x80u));
    switch (kind) {
    case 0: return (h & 0x807fffffu) | ((127u - low) << 23);
    case 1: return (h & 0x83ff83ffu) | ((15u - low) << 10) | ((15u - high) << 26);
    case 2: return (h & 0x807f807fu) | ((127u - low) << 7) | ((127u - high) << 23);
    case 3: return (index & 1) ? ((h & 0x800fffffu) | ((1023u - low) << 20)) : h;
    case 4: return (index & 1) ? 0u : (h & 0x3ffu);
    case 5: return h & 0x3ffu;
    case 6: return h & 0x01ff01ffu;
    case 7: return h;
    default: return h & 0x01010101u;
    }
}

extern "C" __global__ void kernelfleet_noise(u32 *words, u64 count, u32 seed, u32 kind) {
    u64 step = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) words[i] = element(i, seed, kind);
}

// Each block fills its dynamic shared memory; the read at the end keeps the stores alive.
extern "C" __global__ void kernelfleet_scrub(u32 *sink, u32 words, u32 seed) {
    extern __shared__ u32 shared[];
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) shared[i] = element(i + blockIdx.x * (u64)words, seed, 0);
    __syncthreads();
    if (words != 0 && shared[(seed + threadIdx.x) % words] == 0xffffffffu) *sink = seed;
}
