// Vector math for kernels of the CPU device.
//
// Plain `-O3` leaves std::exp, std::erf and std::tanh scalar, and `-ffast-math` breaks the rules on NaN and
// infinity. The functions here have no branch and no call in them, so that GCC 12 and later and Clang 15 and
// later turn loops over them into vector code under `-O3 -march=native -fopenmp`:
//
//     #pragma omp parallel for simd
//     for (int64_t i = 0; i < n; i++) y[i] = kf_gelu(x[i]);
//
// Each takes and gives one `float`. Against the function in exact arithmetic the error is at most 4 units in the
// last place over all floats (tests/python/test_kernelfleet_math.py measures it). NaN gives NaN, overflow gives
// infinity, results below the smallest normal number are rounded as IEEE 754 asks. Where PyTorch's own answer at an
// infinity is a matter of its formula (`gelu(-inf)` is NaN: 0 times infinity), so is ours.
//
// Knows C++17 and nothing of plans, launches or PyTorch. Don't compile it with `-ffast-math`: it relies on the order
// of its additions.
#ifndef KERNELFLEET_MATH_H
#define KERNELFLEET_MATH_H

#include <cstdint>
#include <cstring>

#define KF_INLINE static inline __attribute__((always_inline, unused))

// ---- building blocks ----

// The bits of a float, and back.
KF_INLINE uint32_t kf_word(float x) {
    uint32_t w;
    std::memcpy(&w, &x, sizeof w);
    return w;
}
KF_INLINE float kf_float(uint32_t w) {
    float x;
    std::memcpy(&x, &w, sizeof x);
    return x;
}

// `c ? a : b` that never becomes a branch: a branch around arithmetic keeps GCC from vectorising.
KF_INLINE float kf_select(bool c, float a, float b) {
    const uint32_t m = 0u - static_cast<uint32_t>(c);
    return kf_float((kf_word(a) & m) | (kf_word(b) & ~m));
}

// a * b + c with one rounding; where the machine has no such instruction, with two.
KF_INLINE float kf_fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return static_cast<float>(static_cast<double>(a) * static_cast<double>(b) + static_cast<double>(c));
#endif
}

KF_INLINE float kf_abs(float x) { return kf_float(kf_word(x) & 0x7fffffffu); }
KF_INLINE float kf_copysign(float x, float sign) {
    return kf_float((kf_word(x) & 0x7fffffffu) | (kf_word(sign) & 0x80000000u));
}
// The larger or smaller of both; NaN if either is NaN, as PyTorch has it (std::max drops some).
KF_INLINE float kf_max(float a, float b) { return kf_select(a != a, a, kf_select(b < a, a, b)); }
KF_INLINE float kf_min(float a, float b) { return kf_select(a != a, a, kf_select(a < b, a, b)); }
KF_INLINE float kf_relu(float x) { return kf_max(x, 0.0f); }
// x limited to [low, high]; NaN stays.
KF_INLINE float kf_clamp(float x, float low, float high) {
    return kf_select(x < low, low, kf_select(x > high, high, x));
}

// factor e^(x + tail) for |tail| small against one; `tail` carries what x lost to rounding. The power is never formed
// alone, so that a product above the smallest normal number is right where the power lies below it.
KF_INLINE float kf_scaled_exp(float x, float tail, float factor) {
    // Beyond these the result is infinity or zero, whatever the tail and for any factor that is used below.
    x = kf_clamp(x, -125.0f, 90.0f);
    // n = x / ln 2 rounded: adding 1.5 * 2^23 leaves the integer in the low bits.
    const float shifted = kf_fma(x, 1.44269504f, 12582912.0f);
    const float n = shifted - 12582912.0f;
    const uint32_t k = kf_word(shifted) - 0x4b400000u;
    float r = kf_fma(n, -0.693145752f, x);
    r = kf_fma(n, -1.42860677e-6f, r);
    r += tail;
    float p = 0.00139504788f;
    p = kf_fma(p, r, 0.00836888421f);
    p = kf_fma(p, r, 0.041666206f);
    p = kf_fma(p, r, 0.166665182f);
    p = kf_fma(p, r, 0.5f);
    p = kf_fma(p * r, r, r) + 1.0f;
    // 2^k in two factors, so that overflow and gradual underflow come from the last product alone.
    const uint32_t half = static_cast<uint32_t>(static_cast<int32_t>(k) >> 1);
    const float s1 = kf_float((half + 127u) << 23);
    const float s2 = kf_float((k - half + 127u) << 23);
    return (p * factor) * s1 * s2;
}

// log(u + c) for |c| below a unit in the last place of u.
KF_INLINE float kf_log_tail(float u, float c) {
    // Numbers below the smallest normal one are scaled up by 2^23 first.
    const bool small = u < 1.17549435e-38f;
    const float v = kf_select(small, u * 8388608.0f, u);
    const uint32_t w = kf_word(v);
    // v = m 2^k with m in [sqrt(1/2), sqrt(2)).
    const uint32_t e = (w - 0x3f3504f3u) & 0xff800000u;
    const float m = kf_float(w - e);
    const float k = static_cast<float>(static_cast<int32_t>(e) >> 23) - kf_select(small, 23.0f, 0.0f);
    // c 2^-k; infinity and NaN have k = 128, where the bits of 2^-k would be those of -inf.
    const float f = (m - 1.0f) + c * kf_select(e == 0x40000000u, 0.0f, kf_float(0x3f800000u - e));
    const float s = f * f;
    float p = -0.0785955936f;
    p = kf_fma(p, f, 0.128816411f);
    p = kf_fma(p, f, -0.131287709f);
    p = kf_fma(p, f, 0.141811937f);
    p = kf_fma(p, f, -0.16624552f);
    p = kf_fma(p, f, 0.200022861f);
    p = kf_fma(p, f, -0.250008106f);
    p = kf_fma(p, f, 0.333333164f);
    p = kf_fma(p * f, s, -0.5f * s);
    p = kf_fma(k, 1.42860677e-6f, p);
    float y = kf_fma(k, 0.693145752f, f + p);
    y = kf_select(u == 0.0f, -__builtin_inff(), y);
    y = kf_select(u == __builtin_inff(), __builtin_inff(), y);
    return kf_select(!(u >= 0.0f), __builtin_nanf(""), y);
}

// ---- what kernels call ----

// e^x
KF_INLINE float kf_exp(float x) { return kf_scaled_exp(x, 0.0f, 1.0f); }

// Natural logarithm; -inf at 0, NaN below.
KF_INLINE float kf_log(float x) { return kf_log_tail(x, 0.0f); }

// log(1 + x), exact where x is tiny.
KF_INLINE float kf_log1p(float x) {
    const float u = 1.0f + x;
    // What the sum lost, whichever of both was the larger.
    const bool big = x > 1.0f;
    const float c = kf_select(big, 1.0f - (u - x), x - (u - 1.0f));
    // At infinity, and where only the sign of zero or a denormal is left, the sum says nothing.
    const float y = kf_log_tail(u, kf_select(x <= 3.0e38f, c, 0.0f));
    return kf_select(kf_abs(x) < 1.0e-8f, x, y);
}

// 1 / (1 + e^-x)
KF_INLINE float kf_sigmoid(float x) {
    const float e = kf_exp(-kf_abs(x));
    return kf_select(x >= 0.0f, 1.0f, e) / (1.0f + e);
}

// x / (1 + e^-x)
KF_INLINE float kf_silu(float x) {
    const float a = kf_abs(x);
    const float e = kf_exp(-a);
    const float part = x / (1.0f + e);
    const float low = kf_select(a > 1000.0f, x * 0.0f, kf_scaled_exp(-a, 0.0f, part));
    return kf_select(x >= 0.0f, part, low);
}

KF_INLINE float kf_tanh(float x) {
    const float a = kf_abs(x);
    const float s = x * x;
    float p = -0.00571703678f;
    p = kf_fma(p, s, 0.0206505787f);
    p = kf_fma(p, s, -0.0537434965f);
    p = kf_fma(p, s, 0.133314908f);
    p = kf_fma(p, s, -0.333332837f);
    const float low = kf_fma(p * s, a, a);
    const float high = 1.0f - 2.0f / (kf_exp(a + a) + 1.0f);
    return kf_copysign(kf_select(a < 0.625f, low, high), x);
}

KF_INLINE float kf_erf(float x) {
    const float a = kf_abs(x);
    const float s = x * x;
    float p = -0.000598678074f;
    p = kf_fma(p, s, 0.0049928939f);
    p = kf_fma(p, s, -0.026766846f);
    p = kf_fma(p, s, 0.112818368f);
    p = kf_fma(p, s, -0.376124978f);
    p = kf_fma(p, s, 0.128379151f);
    const float low = kf_fma(p, x, x);
    // erf(t) = 1 - e^q(t); 1 in float from 3.92 on. The comparison lets NaN through.
    const float t = kf_select(a > 4.0f, 4.0f, a);
    float q = -1.72853470e-5f;
    q = kf_fma(q, t, 3.83197126e-4f);
    q = kf_fma(q, t, -3.88396438e-3f);
    q = kf_fma(q, t, 2.42546219e-2f);
    q = kf_fma(q, t, -1.06777877e-1f);
    q = kf_fma(q, t, -6.34846687e-1f);
    q = kf_fma(q, t, -1.28717512e-1f);
    q = kf_fma(q, t, -t);
    const float high = 1.0f - kf_exp(q);
    return kf_select(a < 0.92773f, low, kf_copysign(high, x));
}

// x P(X <= x) for X normal, the `gelu` of `approximate="none"`. The tail below zero is computed as such and not as a
// difference from one, which leaves nothing of it in float.
KF_INLINE float kf_gelu(float x) {
    // Around zero: P(X <= x) = 1/2 + x m(x x).
    const float x2 = x * x;
    float m = 4.47498962e-7f;
    m = kf_fma(m, x2, -8.91537184e-6f);
    m = kf_fma(m, x2, 0.000114757524f);
    m = kf_fma(m, x2, -0.00118685747f);
    m = kf_fma(m, x2, 0.00997338817f);
    m = kf_fma(m, x2, -0.0664903522f);
    m = kf_fma(m, x2, 0.398942292f);
    const float middle = x * kf_fma(m, x, 0.5f);
    const float a = kf_select(kf_abs(x) > 15.0f, 15.0f, kf_abs(x));
    // P(X <= -a) = e^(-a a / 2) p(q) / (1 + a), q = (a - 4) / (a + 4)
    const float q = (a - 4.0f) / (a + 4.0f);
    float p = -7.16918075e-5f;
    p = kf_fma(p, q, -6.07714828e-5f);
    p = kf_fma(p, q, 0.000692716858f);
    p = kf_fma(p, q, -0.000303693436f);
    p = kf_fma(p, q, -0.00500428816f);
    p = kf_fma(p, q, 0.0179402083f);
    p = kf_fma(p, q, -0.0321972854f);
    p = kf_fma(p, q, 0.0285999775f);
    p = kf_fma(p, q, 0.0139995972f);
    p = kf_fma(p, q, -0.0967034698f);
    p = kf_fma(p, q, 0.4720532f);
    const float s = a * a;
    const float lost = kf_fma(a, a, -s);
    const float c = p / (1.0f + a);
    const float high = x * (1.0f - kf_scaled_exp(-0.5f * s, -0.5f * lost, c));
    const float low = kf_select(x < -1000.0f, x * 0.0f, kf_scaled_exp(-0.5f * s, -0.5f * lost, x * c));
    return kf_select(x > 1.31f, high, kf_select(x < -0.5f, low, middle));
}

// x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the `gelu` of `approximate="tanh"`.
KF_INLINE float kf_gelu_tanh(float x) {
    const float a = kf_select(kf_abs(x) > 15.0f, 15.0f, kf_abs(x));
    // v + tail = a (c0 + c1 a^2) to twice the precision: e^v multiplies the error of v by v.
    const float s = a * a;
    const float s1 = kf_fma(a, a, -s);
    const float p = 0.0713548139f * s;
    const float p1 = kf_fma(0.0713548139f, s, -p) + kf_fma(0.0713548139f, s1, 2.39883247e-9f * s);
    const float w = 1.59576917f + p;
    const float back = w - 1.59576917f;
    const float w1 = ((1.59576917f - (w - back)) + (p - back)) + p1 - 4.53406805e-8f;
    const float v = a * w;
    const float tail = kf_fma(a, w, -v) + a * w1;
    const float part = x / (1.0f + kf_scaled_exp(-v, -tail, 1.0f));
    const float low = kf_select(x < -1000.0f, x * 0.0f, kf_scaled_exp(-v, -tail, part));
    return kf_select(x >= 0.0f, part, low);
}

// log(1 + e^x)
KF_INLINE float kf_softplus(float x) { return kf_max(x, 0.0f) + kf_log1p(kf_exp(-kf_abs(x))); }

// x tanh(softplus(x))
KF_INLINE float kf_mish(float x) {
    // tanh(log(1 + e^x)) = n / (n + 2), n = e^x (e^x + 2); from 20 on it is 1 in float.
    const float t = kf_min(x, 20.0f);
    const float e = kf_exp(t);
    const float part = x * ((e + 2.0f) / (e * (e + 2.0f) + 2.0f));
    return kf_select(x < -1000.0f, x * 0.0f, kf_scaled_exp(t, 0.0f, part));
}

// ---- sums and maxima over contiguous memory ----

// Sum of `n` floats: blocks of 1,024 in vector lanes, the blocks in double, so that the error does not grow with n.
KF_INLINE float kf_sum(const float* x, int64_t n) {
    double total = 0.0;
    for (int64_t i = 0; i < n; i += 1024) {
        const int64_t end = i + 1024 < n ? i + 1024 : n;
        float part = 0.0f;
#pragma omp simd reduction(+ : part)
        for (int64_t j = i; j < end; j++) part += x[j];
        total += static_cast<double>(part);
    }
    return static_cast<float>(total);
}

// Largest of `n` floats, -inf for none; NaN if one is NaN.
KF_INLINE float kf_largest(const float* x, int64_t n) {
    float top = -__builtin_inff();
    uint32_t nans = 0;
#pragma omp simd reduction(max : top) reduction(| : nans)
    for (int64_t j = 0; j < n; j++) {
        nans |= static_cast<uint32_t>(x[j] != x[j]);
        top = x[j] > top ? x[j] : top;
    }
    return nans != 0 ? __builtin_nanf("") : top;
}

#endif
