// Compares kernelfleet_math.h with double precision on every `step`-th float (argument 1) and prints, a line a
// function: name, largest error in units in the last place, where, and the number of wrong NaN and infinities.
#include "kernelfleet_math.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define SWEEP_LOOP(f) static __attribute__((noinline)) void run_##f(const float* __restrict x, float* __restrict y, int64_t n) { _Pragma("omp simd") for (int64_t i = 0; i < n; i++) y[i] = kf_##f(x[i]); }
// One a line: the test looks for each line among the loops that the compiler vectorised.
SWEEP_LOOP(exp)
SWEEP_LOOP(log)
SWEEP_LOOP(log1p)
SWEEP_LOOP(tanh)
SWEEP_LOOP(erf)
SWEEP_LOOP(sigmoid)
SWEEP_LOOP(silu)
SWEEP_LOOP(gelu)
SWEEP_LOOP(gelu_tanh)
SWEEP_LOOP(softplus)
SWEEP_LOOP(mish)
SWEEP_LOOP(relu)

static double nan_or(double x, double y) { return std::isnan(x) ? x : y; }
static double sigmoid(double x) { return x >= 0 ? 1 / (1 + std::exp(-x)) : std::exp(x) / (1 + std::exp(x)); }
static double silu(double x) { return x * sigmoid(x); }
static double gelu(double x) { return x * 0.5 * std::erfc(-x * 0.70710678118654752440); }
static double gelu_tanh(double x) { return x * sigmoid(2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x)); }
static double softplus(double x) { return nan_or(x, std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x)))); }
static double mish(double x) {
    const double e = std::exp(nan_or(x, std::fmin(x, 40.0))), n = e * (e + 2);
    return x * (n / (n + 2));
}
static double relu(double x) { return nan_or(x, std::fmax(x, 0)); }

struct Function {
    const char* name;
    void (*ours)(const float*, float*, int64_t);
    double (*exact)(double);
};

int main(int argc, char** argv) {
    const uint64_t step = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 4001;
    const Function functions[] = {
        {"exp", run_exp, std::exp},          {"log", run_log, std::log},     {"log1p", run_log1p, std::log1p},
        {"tanh", run_tanh, std::tanh},       {"erf", run_erf, std::erf},     {"sigmoid", run_sigmoid, sigmoid},
        {"silu", run_silu, silu},            {"gelu", run_gelu, gelu},       {"gelu_tanh", run_gelu_tanh, gelu_tanh},
        {"softplus", run_softplus, softplus}, {"mish", run_mish, mish},      {"relu", run_relu, relu},
    };
    const float special[] = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-45f, -1e-45f, 1.17549435e-38f, 3.4028234e38f, -3.4028234e38f, -1.0f, 88.72284f, -103.97f};
    const int64_t block = 4096;
    std::vector<float> x(block), y(block);
    for (const Function& f : functions) {
        double worst = 0;
        float at = 0;
        long wrong = 0;
        uint64_t word = 0;
        bool first = true;
        while (word < (1ull << 32)) {
            int64_t n = 0;
            if (first) for (float s : special) x[n++] = s;
            first = false;
            for (; n < block && word < (1ull << 32); word += step) x[n++] = kf_float(static_cast<uint32_t>(word));
            f.ours(x.data(), y.data(), n);
            for (int64_t i = 0; i < n; i++) {
                const double r = f.exact(x[i]);
                const double g = y[i];
                const float rounded = static_cast<float>(r);
                if (std::isnan(r) || std::isnan(g)) {
                    wrong += std::isnan(r) != std::isnan(g);
                } else if (std::isinf(rounded) || std::isinf(g)) {
                    // Next to the largest float either neighbour is right.
                    wrong += !(std::fabs(r) > 3.40282e38 && std::fabs(g) > 3.40282e38 && (r > 0) == (g > 0));
                } else {
                    int e;
                    std::frexp(r, &e);
                    const double error = std::fabs(g - r) / std::ldexp(1.0, e - 24 < -149 ? -149 : e - 24);
                    if (error > worst) {
                        worst = error;
                        at = x[i];
                    }
                }
            }
        }
        std::printf("%s %.3f %a %ld\n", f.name, worst, static_cast<double>(at), wrong);
    }
    // Reductions: a long sum of ones and tenths, and NaN in the middle of a maximum.
    std::vector<float> many(3000001, 0.1f);
    const float total = kf_sum(many.data(), static_cast<int64_t>(many.size()));
    std::printf("sum %.3f 0x0p+0 %d\n", 0.0, std::fabs(total / (3000001 * static_cast<double>(0.1f)) - 1) > 2e-6);
    const float largest = kf_largest(many.data(), 1000);
    many[777] = NAN;
    std::printf("largest %.3f 0x0p+0 %d\n", 0.0, largest != 0.1f || !std::isnan(kf_largest(many.data(), 1000)) || !std::isinf(kf_largest(many.data(), 0)));
}
