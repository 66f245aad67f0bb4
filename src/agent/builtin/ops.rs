//! Element-wise operations: what each is in C and in PyTorch, and the functions that they need.
//!
//! Knows PyTorch's semantics of NaN, infinities and thresholds. Must not know where operands come from.

use crate::plan::Device;

/// Type of an operation's result in C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ty {
    Float,
    Int,
    Bool,
}

impl Ty {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float => "float",
            Self::Int => "long long",
            Self::Bool => "bool",
        }
    }
}

/// One operation. `{0}`, `{1}` .. stand for operands.
pub struct Operation {
    pub c: &'static str,
    /// The same on tensors of parameters, empty if the policy never needs it there.
    pub python: &'static str,
}

const fn op(c: &'static str, python: &'static str) -> Operation {
    Operation { c, python }
}

/// The operation of that name.
pub fn operation(name: &str) -> Option<Operation> {
    Some(match name {
        "add" => op("{0} + {1}", "({0} + {1})"),
        "sub" => op("{0} - {1}", "({0} - {1})"),
        "mul" => op("{0} * {1}", "({0} * {1})"),
        "div" => op("{0} / {1}", "({0} / {1})"),
        "neg" => op("-{0}", "(-{0})"),
        "abs" => op("fabsf({0})", "{0}.abs()"),
        "sqrt" => op("sqrtf({0})", "{0}.sqrt()"),
        "rsqrt" => op("1.0f / sqrtf({0})", "{0}.rsqrt()"),
        "reciprocal" => op("1.0f / {0}", "(1.0 / {0})"),
        "exp" => op("kf_exp({0})", "{0}.exp()"),
        "exp2" => op("exp2f({0})", ""),
        "expm1" => op("pt_expm1({0})", ""),
        "log" => op("kf_log({0})", "{0}.log()"),
        "log1p" => op("kf_log1p({0})", ""),
        "log2" => op("log2f({0})", ""),
        "log10" => op("log10f({0})", ""),
        "sin" => op("sinf({0})", ""),
        "cos" => op("cosf({0})", ""),
        "floor" => op("floorf({0})", ""),
        "ceil" => op("ceilf({0})", ""),
        "round" => op("rintf({0})", ""),
        "sign" => op("pt_sign({0})", ""),
        "tanh" => op("kf_tanh({0})", "{0}.tanh()"),
        "tan" => op("tanf({0})", ""),
        "asin" => op("asinf({0})", ""),
        "acos" => op("acosf({0})", ""),
        "atan" => op("atanf({0})", ""),
        "sinh" => op("sinhf({0})", ""),
        "cosh" => op("coshf({0})", ""),
        "asinh" => op("asinhf({0})", ""),
        "acosh" => op("acoshf({0})", ""),
        "atanh" => op("atanhf({0})", ""),
        "erfc" => op("erfcf({0})", ""),
        "trunc" => op("truncf({0})", ""),
        "frac" => op("{0} - truncf({0})", ""),
        "atan2" => op("atan2f({0}, {1})", ""),
        "hypot" => op("hypotf({0}, {1})", ""),
        "fmod" => op("fmodf({0}, {1})", ""),
        "remainder" => op("pt_remainder({0}, {1})", ""),
        "logaddexp" => op("pt_logaddexp({0}, {1})", ""),
        "erf" => op("kf_erf({0})", ""),
        "sigmoid" => op("kf_sigmoid({0})", "{0}.sigmoid()"),
        "silu" => op("{0} * kf_sigmoid({0})", ""),
        "gelu" => op("kf_gelu({0})", ""),
        "gelu_tanh" => op("kf_gelu_tanh({0})", ""),
        "mish" => op("pt_mish({0})", ""),
        "softplus" => op("pt_softplus({0}, {1}, {2})", ""),
        "log_sigmoid" => op("pt_log_sigmoid({0})", ""),
        "relu" => op("pt_clamp_min({0}, 0.0f)", "{0}.relu()"),
        "relu6" => op("pt_clamp_max(pt_clamp_min({0}, 0.0f), 6.0f)", ""),
        "hardsigmoid" => op("pt_hardsigmoid({0})", ""),
        "hardswish" => op("pt_hardswish({0})", ""),
        "leaky_relu" => op("pt_leaky_relu({0}, {1})", ""),
        "elu" => op("pt_elu({0}, {1}, {2}, {3})", ""),
        "clamp_min" => op("pt_clamp_min({0}, {1})", "{0}.clamp_min({1})"),
        "clamp_max" => op("pt_clamp_max({0}, {1})", "{0}.clamp_max({1})"),
        "max" => op("pt_max({0}, {1})", ""),
        "min" => op("pt_min({0}, {1})", ""),
        "pow" => op("powf({0}, {1})", ""),
        "xlogy" => op("pt_xlogy({0}, {1})", ""),
        "huber" => op("pt_huber({0}, {1})", ""),
        "smooth_l1" => op("pt_smooth_l1({0}, {1})", ""),
        "lt" => op("{0} < {1}", ""),
        "le" => op("{0} <= {1}", ""),
        "gt" => op("{0} > {1}", ""),
        "ge" => op("{0} >= {1}", ""),
        "eq" => op("{0} == {1}", ""),
        "ne" => op("{0} != {1}", ""),
        "not" => op("!{0}", ""),
        "and" => op("{0} && {1}", ""),
        "or" => op("{0} || {1}", ""),
        "isinf" => op("pt_isinf({0})", ""),
        "where" => op("({0} ? {1} : {2})", ""),
        "rounded" => op("pt_rounded({0})", ""),
        "cast" => op("{0}", "{0}"),
        _ => return None,
    })
}

/// Functions that a source may call, in an order in which they can be defined.
/// `kf_` functions come from `kernelfleet_math.h` on the CPU, where `-O3` alone leaves libm's calls scalar.
const FUNCTIONS: [(&str, &str, bool); 41] = [
    // On a card alone: elsewhere products are not contracted.
    ("pt_rounded", "{F}(float x) { return __fadd_rn(x, -0.0f); }", false),
    ("kf_exp", "{F}(float x) { return expf(x); }", true),
    ("kf_log", "{F}(float x) { return logf(x); }", true),
    ("kf_log1p", "{F}(float x) { return log1pf(x); }", true),
    ("kf_tanh", "{F}(float x) { return tanhf(x); }", true),
    ("kf_erf", "{F}(float x) { return erff(x); }", true),
    ("kf_sigmoid", "{F}(float x) { return 1.0f / (1.0f + expf(-x)); }", true),
    ("kf_gelu", "{F}(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }", true),
    (
        "kf_gelu_tanh",
        "{F}(float x) { return 0.5f * x * (1.0f + tanhf(0.79788456080286536f * (x + 0.044715f * x * x * x))); }",
        true,
    ),
    // Comparisons are written so that NaN comes through, as in PyTorch; both sides of a choice are computed
    // before it, since compilers don't make vectors of arithmetic that is behind a condition.
    ("pt_clamp_min", "{F}(float x, float low) { return x < low ? low : x; }", false),
    ("pt_clamp_max", "{F}(float x, float high) { return x > high ? high : x; }", false),
    (
        "pt_leaky_relu",
        "{F}(float x, float slope) {\n  const float below = x * slope;\n  return x > 0.0f ? x : below;\n}",
        false,
    ),
    ("pt_max", "{F}(float a, float b) { return ((a > b) | (a != a)) ? a : b; }", false),
    ("pt_min", "{F}(float a, float b) { return ((a < b) | (a != a)) ? a : b; }", false),
    ("pt_sign", "{F}(float x) { return x > 0.0f ? 1.0f : (x < 0.0f ? -1.0f : x); }", false),
    ("pt_isinf", "{B}(float x) { return fabsf(x) == INFINITY; }", false),
    // tanh(log(1 + e)) = (e^2 + 2 e) / (e^2 + 2 e + 2): one exponential, no cancellation.
    (
        "pt_mish",
        "{F}(float x) {\n  const float e = kf_exp(pt_clamp_max(x, 20.0f));\n  const float n = e * (e + 2.0f);\n  \
         const float y = x * (n / (n + 2.0f));\n  return x > 20.0f ? x : y;\n}",
        false,
    ),
    (
        "pt_softplus",
        "{F}(float x, float beta, float threshold) {\n  const float z = x * beta;\n  \
         const float y = kf_log1p(kf_exp(pt_clamp_max(z, threshold))) / beta;\n  return z > threshold ? x : y;\n}",
        false,
    ),
    ("pt_log_sigmoid", "{F}(float x) { return pt_clamp_max(x, 0.0f) - kf_log1p(kf_exp(-fabsf(x))); }", false),
    ("pt_hardsigmoid", "{F}(float x) { return pt_clamp_max(pt_clamp_min(x + 3.0f, 0.0f), 6.0f) / 6.0f; }", false),
    ("pt_hardswish", "{F}(float x) { return x * pt_clamp_max(pt_clamp_min(x + 3.0f, 0.0f), 6.0f) / 6.0f; }", false),
    // Kahan's form: exact near zero, and a vector on the CPU, where expm1f isn't.
    (
        "pt_expm1",
        "{F}(float x) {\n  const float u = kf_exp(x);\n  const float w = u - 1.0f;\n  \
         const float y = w * x / kf_log(u);\n  const float edge = ((w == -1.0f) | (u == INFINITY)) ? w : y;\n  return u == 1.0f ? x : edge;\n}",
        false,
    ),
    (
        "pt_elu",
        "{F}(float x, float alpha, float scale, float input_scale) {\n  \
         const float above = x * scale, below = pt_expm1(x * input_scale) * (alpha * scale);\n  return x > 0.0f ? above : below;\n}",
        false,
    ),
    // The sign of the divisor, as in Python.
    (
        "pt_remainder",
        "{F}(float x, float y) {\n  const float r = fmodf(x, y);\n  return ((r != 0.0f) & ((y < 0.0f) != (r < 0.0f))) ? r + y : r;\n}",
        false,
    ),
    (
        "pt_logaddexp",
        "{F}(float a, float b) {\n  const float top = pt_max(a, b);\n  \
         const float sum = top + kf_log1p(kf_exp(-fabsf(a - b)));\n  return (fabsf(a) == INFINITY) & (a == b) ? a : sum;\n}",
        false,
    ),
    (
        "pt_xlogy",
        "{F}(float x, float y) { const float z = x * kf_log(y);\n  const float some = x == 0.0f ? 0.0f : z;\n  return y != y ? y : some; }",
        false,
    ),
    (
        "pt_huber",
        "{F}(float d, float delta) {\n  const float z = fabsf(d);\n  \
         const float near = 0.5f * z * z, far = delta * (z - 0.5f * delta);\n  return z <= delta ? near : far;\n}",
        false,
    ),
    (
        "pt_smooth_l1",
        "{F}(float d, float beta) {\n  const float z = fabsf(d);\n  \
         const float near = 0.5f * z * z / beta, far = z - 0.5f * beta;\n  return z < beta ? near : far;\n}",
        false,
    ),
    // Folds: `add` takes one more element in, `merge` joins two partial results.
    // Sums are in double, those of a few neighbours in float before.
    ("sum_add", "template <typename T, typename X>\n{Q} void sum_add(T& a, X x) { a += x; }", false),
    ("sum_merge", "{T}(T& a, T b) { a += b; }", false),
    ("prod_add", "{V}(float& a, float x) { a *= x; }", false),
    ("prod_merge", "{V}(float& a, float b) { a *= b; }", false),
    ("max_add", "{V}(float& a, float x) { a = ((x > a) | (x != x)) ? x : a; }", false),
    ("max_merge", "{V}(float& a, float b) { a = ((b > a) | (b != b)) ? b : a; }", false),
    ("min_add", "{V}(float& a, float x) { a = ((x < a) | (x != x)) ? x : a; }", false),
    ("min_merge", "{V}(float& a, float b) { a = ((b < a) | (b != b)) ? b : a; }", false),
    // The first of equal extremes wins, NaN before all.
    (
        "argmax_merge",
        "{V}(float& a, index_t& i, float b, index_t k) {\n  const bool better = (b > a) | ((b != b) & (a == a)) | \
         (((b == a) | ((b != b) & (a != a))) & (k < i));\n  a = better ? b : a;\n  i = better ? k : i;\n}",
        false,
    ),
    (
        "argmin_merge",
        "{V}(float& a, index_t& i, float b, index_t k) {\n  const bool better = (b < a) | ((b != b) & (a == a)) | \
         (((b == a) | ((b != b) & (a != a))) & (k < i));\n  a = better ? b : a;\n  i = better ? k : i;\n}",
        false,
    ),
    ("moments_add", "{T}(T& s, T& q, float x, float k) {\n  const T d = x - k;\n  s += d;\n  q += d * d;\n}", false),
    // Online softmax: one exponential for each element, the sum is rescaled where the maximum moves.
    (
        "softmax_add",
        "{V}(float& m, float& s, float x) {\n  const float change = x - m;\n  const float d = x == m ? 0.0f : change;\n  \
         const float t = kf_exp(-fabsf(d));\n  const float up = s * t + 1.0f, same = s + t;\n  \
         s = d > 0.0f ? up : same;\n  m = ((x > m) | (x != x)) ? x : m;\n}",
        false,
    ),
    (
        "softmax_merge",
        "{V}(float& m, float& s, float m2, float s2) {\n  const float change = m2 - m;\n  const float d = m2 == m ? 0.0f : change;\n  \
         const float t = kf_exp(-fabsf(d));\n  const float up = s * t + s2, same = s + s2 * t;\n  \
         s = d > 0.0f ? up : same;\n  m = ((m2 > m) | (m2 != m2)) ? m2 : m;\n}",
        false,
    ),
];

/// Whether `text` calls `name` (and not a function whose name ends so).
fn calls(text: &str, name: &str) -> bool {
    text.match_indices(&format!("{name}("))
        .any(|(at, _)| !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_'))
}

/// Definitions of the functions that `source` calls, with what those call.
pub fn functions(source: &str, device: Device) -> String {
    let qualifier = if device == Device::Cuda { "__device__ __forceinline__" } else { "static inline" };
    let mut wanted = vec![false; FUNCTIONS.len()];
    let mut text = source.to_owned();
    for (i, (name, body, library)) in FUNCTIONS.iter().enumerate().rev() {
        if calls(&text, name) && !(*library && device == Device::Cpu) {
            wanted[i] = true;
            text.push_str(body);
        }
    }
    let mut out = String::new();
    for (wanted, (name, body, _)) in wanted.into_iter().zip(FUNCTIONS) {
        if wanted {
            // A card's own is exact and short; the CPU's is no vector.
            let body =
                if device == Device::Cuda && name == "pt_expm1" { "{F}(float x) { return expm1f(x); }" } else { body };
            let body = body
                .replace("{F}", &format!("{qualifier} float {name}"))
                .replace("{V}", &format!("{qualifier} void {name}"))
                .replace("{Q}", qualifier)
                .replace("{T}", &format!("template <typename T>\n{qualifier} void {name}"))
                .replace("{B}", &format!("{qualifier} bool {name}"));
            out.push_str(&body);
            out.push('\n');
        }
    }
    out
}
