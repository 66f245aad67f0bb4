//! From ATen to the policy's own form.
//!
//! Knows ATen's operators and their semantics in `eval()` under `no_grad`; applies the exact rewrites that are
//! always worth it (a convolution's bias joined to the mean of a batch norm, sums of matrix products, reversed
//! scans). Must not know kernels or languages. What it doesn't know it declines, by name and line.

use std::collections::HashMap;

use serde_json::Value;

use super::Declined;
use super::ir::{Conv, Def, Fold, Ir, Vid, View, Window};
use crate::plan::{Device, Dtype};
use crate::task::graph::{Graph, OpNode};

/// Elements of the largest window of a depthwise convolution that is summed by a thread.
const WINDOW: i64 = 64;

/// A task in the policy's form.
pub struct Lowered {
    pub ir: Ir,
    pub outputs: Vec<Vid>,
}

pub(super) struct Lower {
    pub(super) ir: Ir,
    env: HashMap<String, Vid>,
    device: Device,
    /// Depthwise convolutions become weighted sums over windows.
    windows: bool,
    op: String,
    line: Option<u32>,
}

/// Lowers a traced graph. With `windows` depthwise convolutions of small windows become sums over them, which can be fused;
/// without they are the library's, like all others.
///
/// # Errors
/// The first operator that the policy doesn't know or doesn't attempt, with its line and the reason.
pub fn lower(graph: &Graph, device: Device, windows: bool) -> Result<Lowered, Declined> {
    let mut this = Lower { ir: Ir::default(), env: HashMap::new(), device, windows, op: String::new(), line: None };
    for (i, input) in graph.inputs.iter().enumerate() {
        if let Some(meta) = &input.meta {
            this.op = "the input".into();
            this.supported(meta.dtype)?;
            let vid = this.ir.add(Def::Input(i, meta.strides.clone()), meta.shape.clone(), meta.dtype);
            this.env.insert(input.id.clone(), vid);
        } else if let Some(value) = &input.value
            && let Some(number) = value.as_f64()
        {
            let vid = this.ir.num(number);
            this.env.insert(input.id.clone(), vid);
        }
    }
    for parameter in &graph.parameters {
        let def = Def::Param(parameter.name.clone(), parameter.meta.strides.clone());
        let vid = this.ir.add(def, parameter.meta.shape.clone(), parameter.meta.dtype);
        this.env.insert(parameter.id.clone(), vid);
    }
    // What nothing uses is not computed: dead nodes are skipped, so an odd one among them is no reason to decline.
    let mut live: std::collections::HashSet<&str> = graph.outputs.iter().map(String::as_str).collect();
    let mut keep = vec![false; graph.nodes.len()];
    for (i, node) in graph.nodes.iter().enumerate().rev() {
        let mutates = node.op.split('.').nth(1).is_some_and(|name| name.ends_with('_') && !name.starts_with('_'));
        if mutates || node.ids.iter().any(|id| live.contains(id.as_str())) {
            keep[i] = true;
            for arg in node.args.iter().chain(node.kwargs.values()) {
                tensors(arg, &mut live);
            }
        }
    }
    for (node, keep) in graph.nodes.iter().zip(keep) {
        if keep {
            let before = this.ir.vals.len();
            this.node(node)?;
            this.whole_numbers(before)?;
            let label = this.op.split('.').next().unwrap_or_default().to_owned();
            for vid in before..this.ir.vals.len() {
                this.ir.labels.insert(vid, label.clone());
            }
        }
    }
    let mut outputs = vec![];
    for id in &graph.outputs {
        let vid = *this.env.get(id).ok_or_else(|| this.declined("an output is not a tensor that the graph makes"))?;
        outputs.push(vid);
    }
    Ok(Lowered { ir: this.ir, outputs })
}

fn tensors<'a>(value: &'a Value, into: &mut std::collections::HashSet<&'a str>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| tensors(item, into)),
        Value::Object(map) => {
            if let Some(Value::String(id)) = map.get("t") {
                into.insert(id);
            }
        }
        _ => {}
    }
}

/// A number of an argument, `{"inf": 1}` included.
pub(super) fn number(value: &Value) -> Option<f64> {
    match value {
        Value::Number(n) => n.as_f64(),
        Value::Bool(b) => Some(f64::from(u8::from(*b))),
        Value::Object(map) if map.contains_key("inf") => {
            Some(if map["inf"].as_i64() == Some(-1) { f64::NEG_INFINITY } else { f64::INFINITY })
        }
        Value::Object(map) if map.contains_key("nan") => Some(f64::NAN),
        _ => None,
    }
}

pub(super) fn ints(value: Option<&Value>) -> Option<Vec<i64>> {
    match value {
        Some(Value::Array(items)) => items.iter().map(Value::as_i64).collect(),
        Some(Value::Number(n)) => Some(vec![n.as_i64()?]),
        _ => None,
    }
}

pub(super) const fn float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16)
}

impl Lower {
    pub(super) fn declined(&self, reason: impl Into<String>) -> Declined {
        Declined { operator: self.op.clone(), line: self.line, reason: reason.into() }
    }

    fn supported(&self, dtype: Dtype) -> Result<(), Declined> {
        if dtype == Dtype::Float64 {
            return Err(self.declined("float64 tensors are not attempted"));
        }
        Ok(())
    }

    /// A tensor or number argument as a value.
    pub(super) fn value(&mut self, arg: Option<&Value>) -> Result<Vid, Declined> {
        if let Some(Value::Object(map)) = arg
            && let Some(Value::String(id)) = map.get("t")
        {
            return self
                .env
                .get(id)
                .copied()
                .ok_or_else(|| self.declined("it uses a tensor that is neither input, parameter nor result"));
        }
        if let Some(whole) = arg.and_then(Value::as_i64) {
            return Ok(self.ir.whole(whole));
        }
        match arg.and_then(number) {
            Some(number) => Ok(self.ir.num(number)),
            None => Err(self.declined("an argument is neither tensor nor number")),
        }
    }

    pub(super) fn dtype(&self, vid: Vid) -> Dtype {
        self.ir.vals[vid].dtype
    }

    pub(super) fn dim(&self, vid: Vid, dim: i64) -> usize {
        let rank = self.ir.shape(vid).len() as i64;
        usize::try_from(if dim < 0 { dim + rank.max(1) } else { dim }).unwrap_or(0)
    }

    /// Dimensions of a reduction; none given means all.
    pub(super) fn dims(&self, vid: Vid, arg: Option<&Value>) -> Vec<usize> {
        match ints(arg) {
            Some(list) if !list.is_empty() => list.iter().map(|&d| self.dim(vid, d)).collect(),
            _ => (0..self.ir.shape(vid).len()).collect(),
        }
    }

    pub(super) fn unary(&mut self, op: &'static str, x: Vid) -> Vid {
        let dtype = self.dtype(x);
        self.ir.point(op, &[x], dtype)
    }

    pub(super) fn binary(&mut self, op: &'static str, a: Vid, b: Vid) -> Vid {
        let (left, right) = (self.dtype(a), self.dtype(b));
        let number = |ir: &Ir, v| matches!(ir.def(v), Def::Num(_));
        // Numbers and 0-d tensors don't promote within a category; a floating operand wins over integers.
        let dtype = if number(&self.ir, a) || (self.ir.shape(a).is_empty() && !self.ir.shape(b).is_empty()) {
            if float(right) || !float(left) { right } else { left }
        } else if number(&self.ir, b) || (self.ir.shape(b).is_empty() && !self.ir.shape(a).is_empty()) {
            if float(left) || !float(right) { left } else { right }
        } else if left == right {
            left
        } else if float(left) && float(right) {
            Dtype::Float32
        } else if float(left) {
            left
        } else if float(right) {
            right
        } else {
            Dtype::Int64
        };
        self.ir.point(op, &[a, b], dtype)
    }

    /// `shape` without the dimensions in `dims`, unless they are kept.
    pub(super) fn squeeze(&mut self, vid: Vid, dims: &[usize], keep: bool) -> Vid {
        if keep {
            return vid;
        }
        let shape = self.ir.shape(vid).to_vec();
        let shape = (0..shape.len()).filter(|d| !dims.contains(d)).map(|d| shape[d]).collect();
        self.ir.reshape(vid, shape)
    }

    /// Functions and extremes are those of floats, which large integers would lose digits in.
    fn whole_numbers(&self, from: usize) -> Result<(), Declined> {
        for val in &self.ir.vals[from..] {
            let exact = match &val.def {
                Def::Point(op, _) => {
                    float(val.dtype)
                        || val.dtype == Dtype::Bool
                        || matches!(*op, "add" | "sub" | "mul" | "div" | "neg" | "where" | "cast")
                }
                Def::Reduce { fold, arg, .. } => float(self.dtype(*arg)) || *fold == Fold::Total,
                _ => true,
            };
            if !exact {
                return Err(self.declined("it is not attempted on integers"));
            }
        }
        Ok(())
    }

    fn sum(&mut self, x: Vid, dims: &[usize]) -> Vid {
        if let Some(better) = self.sum_of_product(x, dims) {
            return better;
        }
        self.ir.reduce(Fold::Sum, x, dims)[0]
    }

    /// The sum over the output features of a matrix product is a product with the summed weight, which depends
    /// on parameters alone: `sum_j (x W^T + b)_j = x . (sum_j W_j) + sum_j b_j`, factors outside kept outside.
    fn sum_of_product(&mut self, x: Vid, dims: &[usize]) -> Option<Vid> {
        let (product, factor) = self.strip_factors(x);
        let Def::Matmul { a, b, bias } = self.ir.def(product).clone() else { return None };
        let rank = self.ir.shape(product).len();
        if dims != [rank - 1] || rank != 2 || !self.parameters_only(b) || self.parameters_only(a) {
            return None;
        }
        let column = self.ir.reduce(Fold::Sum, b, &[1])[0];
        let column =
            self.ir.add(Def::View(column, View::Permute(vec![1, 0])), vec![1, self.ir.shape(b)[0]], self.dtype(b));
        let terms = self.binary("mul", a, column);
        let mut total = self.ir.reduce(Fold::Sum, terms, &[1])[0];
        if let Some(bias) = bias {
            let constant = self.ir.reduce(Fold::Sum, bias, &[0])[0];
            total = self.binary("add", total, constant);
        }
        for (op, by) in factor.into_iter().rev() {
            total = self.binary(op, total, by);
        }
        Some(total)
    }

    /// Multiplications and divisions by numbers, outermost first, and what they apply to.
    fn strip_factors(&self, mut x: Vid) -> (Vid, Vec<(&'static str, Vid)>) {
        let mut factors = vec![];
        while let Def::Point(op @ ("mul" | "div"), args) = self.ir.def(x) {
            if self.ir.number(args[1]).is_some() {
                factors.push((*op, args[1]));
                x = args[0];
            } else if *op == "mul" && self.ir.number(args[0]).is_some() {
                factors.push((*op, args[0]));
                x = args[1];
            } else {
                break;
            }
        }
        (x, factors)
    }

    /// Whether a value is known from parameters and numbers.
    fn parameters_only(&self, vid: Vid) -> bool {
        match self.ir.def(vid) {
            Def::Input(..) => false,
            _ => self.ir.args(vid).into_iter().all(|arg| self.parameters_only(arg)),
        }
    }

    pub(super) fn mean(&mut self, x: Vid, dims: &[usize]) -> Vid {
        let count: i64 = dims.iter().map(|&d| self.ir.shape(x)[d]).product();
        let sum = self.sum(x, dims);
        if count == 1 {
            return sum;
        }
        let count = self.ir.num(count as f64);
        self.binary("div", sum, count)
    }

    fn normalise(&mut self, x: Vid, dims: &[usize], eps: f64) -> (Vid, Vid, Vid) {
        let moments = self.ir.reduce(Fold::Moments, x, dims);
        let (mean, rest, var) = (moments[0], moments[1], moments[2]);
        let eps = self.ir.num(eps);
        let shifted = self.binary("add", var, eps);
        let rstd = self.unary("rsqrt", shifted);
        let near = self.binary("sub", x, mean);
        let centred = self.binary("sub", near, rest);
        (self.binary("mul", centred, rstd), mean, rstd)
    }

    /// A convolution and the bias of its channels, where `x` is their sum.
    fn with_bias(&self, x: Vid) -> Option<(Vid, Vid)> {
        let Def::Point("add", args) = self.ir.def(x) else { return None };
        let &[plain, expanded] = args.as_slice() else { return None };
        let Def::View(bias, View::Expand) = *self.ir.def(expanded) else { return None };
        (matches!(self.ir.def(plain), Def::Convolution { .. }) && self.parameters_only(bias)).then_some((plain, bias))
    }

    pub(super) fn affine(&mut self, mut y: Vid, weight: Option<Vid>, bias: Option<Vid>) -> Vid {
        if let Some(weight) = weight {
            y = self.binary("mul", y, weight);
        }
        if let Some(bias) = bias {
            y = self.binary("add", y, bias);
        }
        y
    }

    pub(super) fn optional(&mut self, arg: Option<&Value>) -> Result<Option<Vid>, Declined> {
        match arg {
            None | Some(Value::Null) => Ok(None),
            some => self.value(some).map(Some),
        }
    }

    /// A per-channel vector as a tensor of `rank` dimensions that broadcasts over dimension 1.
    pub(super) fn channels(&mut self, vid: Vid, rank: usize) -> Vid {
        let mut shape = vec![1; rank];
        shape[1.min(rank - 1)] = self.ir.numel(vid);
        self.ir.reshape(vid, shape)
    }

    /// `x - top` where `top` is the largest `x` as it was rounded: a product that is subtracted from without
    /// rounding would differ from itself, and its exponential from one.
    fn below(&mut self, x: Vid, top: Vid) -> Vid {
        let computed =
            self.device == Device::Cuda && matches!(self.ir.def(x), Def::Point(op, _) if !matches!(*op, "add" | "sub"));
        let x = if computed { self.unary("rounded", x) } else { x };
        self.binary("sub", x, top)
    }

    fn logsumexp(&mut self, x: Vid, dims: &[usize]) -> Vid {
        let results = self.ir.reduce(Fold::SoftMax, x, dims);
        if results[0] == x {
            return x;
        }
        let log = self.unary("log", results[1]);
        let sum = self.binary("add", results[0], log);
        // An infinite maximum is the result itself.
        let infinite = self.ir.point("isinf", &[results[0]], Dtype::Bool);
        let dtype = self.dtype(x);
        self.ir.point("where", &[infinite, results[0], sum], dtype)
    }

    pub(super) fn loss(&mut self, x: Vid, reduction: i64) -> Vid {
        let all: Vec<usize> = (0..self.ir.shape(x).len()).collect();
        match reduction {
            1 => {
                let mean = self.mean(x, &all);
                self.ir.reshape(mean, vec![])
            }
            2 => {
                let sum = self.sum(x, &all);
                self.ir.reshape(sum, vec![])
            }
            _ => x,
        }
    }

    pub(super) fn cast(&mut self, x: Vid, dtype: Dtype) -> Vid {
        if self.dtype(x) == dtype { x } else { self.ir.point("cast", &[x], dtype) }
    }

    #[allow(clippy::too_many_lines)]
    fn node(&mut self, node: &OpNode) -> Result<(), Declined> {
        self.op = node.op.trim_start_matches("aten.").to_owned();
        self.line = node.line;
        let name = self.op.split('.').next().unwrap_or_default().to_owned();
        let overload = self.op.split('.').nth(1).unwrap_or_default().to_owned();
        // An in-place operator is the same function; its result takes the operand's name.
        let in_place = name.ends_with('_') && !name.starts_with('_');
        let op = if in_place { name.trim_end_matches('_') } else { name.as_str() };
        let a = |i: usize| node.args.get(i);
        let int = |i: usize, default: i64| a(i).and_then(Value::as_i64).unwrap_or(default);
        let real = |i: usize, default: f64| a(i).and_then(number).unwrap_or(default);
        let flag = |i: usize, default: bool| a(i).and_then(Value::as_bool).unwrap_or(default);
        let shape = node.outputs.first().and_then(|o| o.as_ref()).map(|o| o.shape.clone()).unwrap_or_default();
        let out_dtype = node.outputs.first().and_then(|o| o.as_ref()).map_or(Dtype::Float32, |o| o.dtype);
        self.supported(out_dtype)?;

        // Made without a tensor.
        if matches!(
            op,
            "full" | "zeros" | "ones" | "zeros_like" | "ones_like" | "full_like" | "scalar_tensor" | "new_zeros"
        ) {
            let value = match op {
                "ones" | "ones_like" => 1.0,
                "full" | "full_like" => real(1, f64::NAN),
                "scalar_tensor" => real(0, f64::NAN),
                _ => 0.0,
            };
            let vid = self.ir.expand_number(value, &shape, out_dtype);
            return self.done(node, in_place, vec![vid]);
        }
        if op == "arange" {
            let start = if node.args.len() > 1 { real(0, 0.0) } else { 0.0 };
            let step = real(2, 1.0);
            let coord = self.ir.add(Def::Coord(0), shape.clone(), out_dtype);
            let (start, step) = if float(out_dtype) {
                (self.ir.num(start), self.ir.num(step))
            } else {
                (self.ir.whole(start as i64), self.ir.whole(step as i64))
            };
            let scaled = self.binary("mul", coord, step);
            let vid = self.binary("add", scaled, start);
            return self.done(node, in_place, vec![vid]);
        }
        if op == "empty" {
            return Ok(());
        }
        if matches!(op, "_safe_softmax") || op.contains("scaled_dot_product") || op.contains("attention") {
            return Err(self.declined("attention is not attempted"));
        }
        // A tensor that the task made from Python values: a number is as good.
        if op == "lift_fresh"
            && let Some(Value::Object(map)) = a(0)
            && let Some(value) = map.get("const")
        {
            let vid = self.constant(value, &shape, out_dtype)?;
            return self.done(node, in_place, vec![vid]);
        }
        if matches!(op, "lift_fresh" | "lift_fresh_copy") && self.value(a(0)).is_err() {
            return Err(self.declined("a tensor made from Python values has no value in the graph"));
        }
        if op == "stack" {
            let Some(Value::Array(items)) = a(0) else { return Err(self.declined("its list has another form")) };
            let mut parts = vec![];
            let dim = int(1, 0);
            let dim = usize::try_from(if dim < 0 { dim + shape.len() as i64 } else { dim }).unwrap_or(0);
            let mut one = shape.clone();
            one[dim] = 1;
            for item in items {
                let part = self.value(Some(item))?;
                parts.push(self.ir.reshape(part, one.clone()));
            }
            let vid = self.concatenate(parts, dim, &shape, out_dtype);
            return self.done(node, in_place, vec![vid]);
        }
        if op == "cat" {
            let Some(Value::Array(items)) = a(0) else { return Err(self.declined("its list has another form")) };
            let parts: Vec<Vid> = items.iter().map(|item| self.value(Some(item))).collect::<Result<_, _>>()?;
            let dim = self.dim(parts[0], int(1, 0));
            let vid = self.concatenate(parts, dim, &shape, out_dtype);
            return self.done(node, in_place, vec![vid]);
        }

        let mut x = self.value(a(0))?;
        let rank = self.ir.shape(x).len();
        let unary = match op {
            "abs" | "exp" | "log" | "log1p" | "sqrt" | "rsqrt" | "sin" | "cos" | "tanh" | "erf" | "sigmoid"
            | "relu" | "silu" | "mish" | "hardsigmoid" | "hardswish" | "neg" | "reciprocal" | "floor" | "ceil"
            | "sign" | "expm1" | "log_sigmoid" | "log2" | "log10" | "exp2" | "relu6" | "round" | "tan" | "asin"
            | "acos" | "atan" | "sinh" | "cosh" | "asinh" | "acosh" | "atanh" | "erfc" | "trunc" | "frac" => Some(op),
            "special_erfc" => Some("erfc"),
            "sgn" => Some("sign"),
            "log_sigmoid_forward" => Some("log_sigmoid"),
            _ => None,
        };
        let result = if let Some(op) = unary {
            let x = if float(self.dtype(x)) || !float(out_dtype) { x } else { self.cast(x, out_dtype) };
            let op = OPERATION_NAMES.iter().find(|known| **known == op).copied();
            let op = op.ok_or_else(|| self.declined("it is not one of the operators that the policy knows"))?;
            self.unary(op, x)
        } else {
            match op {
                // Identities: nothing is written in place between a copy and its use (in-place operators rebind).
                "clone" | "detach" | "alias" | "contiguous" | "dropout" | "native_dropout" | "lift_fresh"
                | "lift_fresh_copy" => x,
                "_to_copy" => {
                    let dtype = node.kwargs.get("dtype").map_or(self.dtype(x), |_| out_dtype);
                    self.cast(x, dtype)
                }
                "copy" => {
                    let source = self.value(a(1))?;
                    let source = self.ir.expand(source, &shape);
                    self.cast(source, out_dtype)
                }
                "add" | "sub" | "rsub" => {
                    let mut y = self.value(a(1))?;
                    let alpha = node.kwargs.get("alpha").and_then(number).unwrap_or_else(|| real(2, 1.0));
                    if (alpha - 1.0).abs() > 0.0 {
                        let alpha = self.ir.num(alpha);
                        if op == "rsub" {
                            x = self.binary("mul", x, alpha);
                        } else {
                            y = self.binary("mul", y, alpha);
                        }
                    }
                    match op {
                        "rsub" => self.binary("sub", y, x),
                        "add" => self.binary("add", x, y),
                        _ => self.binary("sub", x, y),
                    }
                }
                "mul" => {
                    let y = self.value(a(1))?;
                    self.binary("mul", x, y)
                }
                "div" if overload == "Tensor" || overload == "Scalar" => {
                    let y = self.value(a(1))?;
                    let x = if float(self.dtype(x)) { x } else { self.cast(x, out_dtype) };
                    self.binary("div", x, y)
                }
                "maximum" | "minimum" => {
                    let y = self.value(a(1))?;
                    self.binary(if op == "maximum" { "max" } else { "min" }, x, y)
                }
                "pow" if overload == "Tensor_Scalar" => self.power(x, real(1, 1.0)),
                "square" => self.binary("mul", x, x),
                "pow" if overload == "Tensor_Tensor" => {
                    let y = self.value(a(1))?;
                    self.binary("pow", x, y)
                }
                "xlogy" => {
                    let y = self.value(a(1))?;
                    self.binary("xlogy", x, y)
                }
                "lt" | "le" | "gt" | "ge" | "eq" | "ne" => {
                    let y = self.value(a(1))?;
                    let op =
                        ["lt", "le", "gt", "ge", "eq", "ne"].into_iter().find(|known| *known == op).unwrap_or("eq");
                    self.ir.point(op, &[x, y], Dtype::Bool)
                }
                "logical_not" | "bitwise_not" if out_dtype == Dtype::Bool => self.ir.point("not", &[x], Dtype::Bool),
                "logical_and" | "logical_or" | "bitwise_and" | "bitwise_or" if out_dtype == Dtype::Bool => {
                    let y = self.value(a(1))?;
                    self.ir.point(if op.ends_with("and") { "and" } else { "or" }, &[x, y], Dtype::Bool)
                }
                "where" => {
                    let (y, z) = (self.value(a(1))?, self.value(a(2))?);
                    self.ir.point("where", &[x, y, z], out_dtype)
                }
                "masked_fill" => {
                    let (mask, fill) = (self.value(a(1))?, self.value(a(2))?);
                    self.ir.point("where", &[mask, fill, x], out_dtype)
                }
                "gelu" => {
                    let tanh = node.kwargs.get("approximate").or(a(1)).and_then(Value::as_str) == Some("tanh");
                    self.unary(if tanh { "gelu_tanh" } else { "gelu" }, x)
                }
                "leaky_relu" => {
                    let slope = self.ir.num(real(1, 0.01));
                    self.binary("leaky_relu", x, slope)
                }
                "elu" => {
                    let args = [x, self.ir.num(real(1, 1.0)), self.ir.num(real(2, 1.0)), self.ir.num(real(3, 1.0))];
                    let dtype = self.dtype(x);
                    self.ir.point("elu", &args, dtype)
                }
                "celu" => {
                    let alpha = real(1, 1.0);
                    let args = [x, self.ir.num(alpha), self.ir.num(1.0), self.ir.num(1.0 / alpha)];
                    let dtype = self.dtype(x);
                    self.ir.point("elu", &args, dtype)
                }
                "softplus" => {
                    let args = [x, self.ir.num(real(1, 1.0)), self.ir.num(real(2, 20.0))];
                    let dtype = self.dtype(x);
                    self.ir.point("softplus", &args, dtype)
                }
                "threshold" => {
                    let (limit, value) = (self.ir.num(real(1, 0.0)), self.ir.num(real(2, 0.0)));
                    let below = self.ir.point("le", &[x, limit], Dtype::Bool);
                    let dtype = self.dtype(x);
                    self.ir.point("where", &[below, value, x], dtype)
                }
                "clamp" | "hardtanh" | "clamp_min" | "clamp_max" | "clip" if overload != "Tensor" => {
                    let (low, high) = match op {
                        "hardtanh" => (Some(real(1, -1.0)), Some(real(2, 1.0))),
                        "clamp_max" => (None, a(1).and_then(number)),
                        _ => (a(1).and_then(number), a(2).and_then(number)),
                    };
                    let mut y = x;
                    if let Some(low) = low {
                        let low = self.ir.num(low);
                        y = self.binary("clamp_min", y, low);
                    }
                    if let Some(high) = high {
                        let high = self.ir.num(high);
                        y = self.binary("clamp_max", y, high);
                    }
                    y
                }
                "triu" | "tril" => {
                    let full = shape.clone();
                    let row = self.ir.add(Def::Coord(rank - 2), full.clone(), Dtype::Int64);
                    let column = self.ir.add(Def::Coord(rank - 1), full, Dtype::Int64);
                    let distance = self.binary("sub", column, row);
                    let diagonal = self.ir.num(int(1, 0) as f64);
                    let zero = self.ir.num(0.0);
                    let inside =
                        self.ir.point(if op == "triu" { "ge" } else { "le" }, &[distance, diagonal], Dtype::Bool);
                    let dtype = self.dtype(x);
                    self.ir.point("where", &[inside, x, zero], dtype)
                }
                // Views.
                "view" | "_unsafe_view" | "reshape" | "unsqueeze" | "squeeze" | "flatten" | "unflatten" => {
                    self.ir.reshape(x, shape)
                }
                "expand" => self.ir.expand(x, &shape),
                "t" | "transpose" | "permute" | "numpy_T" | "mT" => {
                    let mut order: Vec<usize> = (0..rank).collect();
                    match op {
                        "permute" => order = self.dims(x, a(1)),
                        "transpose" => {
                            let (first, second) = (self.dim(x, int(1, 0)), self.dim(x, int(2, 1)));
                            order.swap(first, second);
                        }
                        _ => order.reverse(),
                    }
                    self.ir.permute(x, order)
                }
                "slice" => {
                    let dim = self.dim(x, int(1, 0));
                    let size = self.ir.shape(x)[dim];
                    let start = int(2, 0);
                    let start = (if start < 0 { start + size } else { start }).clamp(0, size);
                    let (step, dtype) = (int(4, 1), self.dtype(x));
                    if shape == self.ir.shape(x) {
                        x
                    } else {
                        self.ir.add(Def::View(x, View::Slice { dim, start, step }), shape, dtype)
                    }
                }
                "select" => {
                    let dim = self.dim(x, int(1, 0));
                    let index = int(2, 0);
                    let start = if index < 0 { index + self.ir.shape(x)[dim] } else { index };
                    let mut kept = self.ir.shape(x).to_vec();
                    kept[dim] = 1;
                    let dtype = self.dtype(x);
                    let slice = self.ir.add(Def::View(x, View::Slice { dim, start, step: 1 }), kept, dtype);
                    self.ir.reshape(slice, shape)
                }
                "flip" => {
                    let dims = self.dims(x, a(1));
                    self.flip(x, dims)
                }
                "split" | "chunk" | "unbind" | "split_with_sizes" => {
                    let dim = self.dim(x, int(if op == "unbind" { 1 } else { 2 }, 0));
                    let mut start = 0;
                    let mut parts = vec![];
                    for output in node.outputs.iter().flatten() {
                        let mut part = self.ir.shape(x).to_vec();
                        part[dim] = if op == "unbind" { 1 } else { output.shape[dim] };
                        let dtype = self.dtype(x);
                        let length = part[dim];
                        let slice = self.ir.add(Def::View(x, View::Slice { dim, start, step: 1 }), part, dtype);
                        start += length;
                        parts.push(self.ir.reshape(slice, output.shape.clone()));
                    }
                    return self.done(node, in_place, parts);
                }
                // Reductions.
                "sum" | "mean" => {
                    let dims = if overload == "default" { self.dims(x, None) } else { self.dims(x, a(1)) };
                    let x = if float(self.dtype(x)) { x } else { self.cast(x, out_dtype) };
                    let y = match op {
                        "sum" if !float(out_dtype) => self.ir.reduce(Fold::Total, x, &dims)[0],
                        "sum" => self.sum(x, &dims),
                        _ => self.mean(x, &dims),
                    };
                    self.squeeze(y, &dims, flag(2, false) && overload != "default")
                }
                "prod" => {
                    let dims = if overload == "default" { self.dims(x, None) } else { self.dims(x, a(1)) };
                    let y = self.ir.reduce(Fold::Prod, x, &dims)[0];
                    self.squeeze(y, &dims, flag(2, false))
                }
                "amax" | "amin" => {
                    let dims = self.dims(x, a(1));
                    let y = self.ir.reduce(if op == "amax" { Fold::Max } else { Fold::Min }, x, &dims)[0];
                    self.squeeze(y, &dims, flag(2, false))
                }
                "max" | "min" => {
                    let (value, place) =
                        if op == "max" { (Fold::Max, Fold::ArgMax) } else { (Fold::Min, Fold::ArgMin) };
                    if overload == "other" {
                        let y = self.value(a(1))?;
                        self.binary(if op == "max" { "max" } else { "min" }, x, y)
                    } else {
                        let all = overload == "default";
                        let dims = if all { self.dims(x, None) } else { self.dims(x, a(1)) };
                        let keep = flag(2, false);
                        let y = self.ir.reduce(value, x, &dims)[0];
                        let y = self.squeeze(y, &dims, keep);
                        if all {
                            y
                        } else {
                            let index = self.ir.reduce(place, x, &dims)[0];
                            let index = self.squeeze(index, &dims, keep);
                            return self.done(node, in_place, vec![y, index]);
                        }
                    }
                }
                "argmax" | "argmin" => {
                    let fold = if op == "argmax" { Fold::ArgMax } else { Fold::ArgMin };
                    let flat = matches!(a(1), None | Some(Value::Null));
                    let x = if flat { self.ir.reshape(x, vec![self.ir.numel(x)]) } else { x };
                    let dims = self.dims(x, a(1));
                    let y = self.ir.reduce(fold, x, &dims)[0];
                    if flat { self.ir.reshape(y, shape) } else { self.squeeze(y, &dims, flag(2, false)) }
                }
                "logsumexp" => {
                    let dims = self.dims(x, a(1));
                    let y = self.logsumexp(x, &dims);
                    self.squeeze(y, &dims, flag(2, false))
                }
                "_softmax" | "softmax" => {
                    let dim = self.dim(x, int(1, -1));
                    let results = self.ir.reduce(Fold::SoftMax, x, &[dim]);
                    let centred = self.below(x, results[0]);
                    let exp = self.unary("exp", centred);
                    self.binary("div", exp, results[1])
                }
                "_log_softmax" | "log_softmax" => {
                    let dim = self.dim(x, int(1, -1));
                    let results = self.ir.reduce(Fold::SoftMax, x, &[dim]);
                    let centred = self.below(x, results[0]);
                    let log = self.unary("log", results[1]);
                    self.binary("sub", centred, log)
                }
                "var" | "var_mean" | "std" | "std_mean" => {
                    let dims = if overload == "default" { self.dims(x, None) } else { self.dims(x, a(1)) };
                    let correction = match overload.as_str() {
                        "correction" => node.kwargs.get("correction").and_then(number).unwrap_or(1.0),
                        "dim" => f64::from(u8::from(flag(2, true))),
                        _ => return Err(self.declined("this overload is not attempted")),
                    };
                    let keep = node.kwargs.get("keepdim").and_then(Value::as_bool).unwrap_or_else(|| flag(3, false));
                    let count = dims.iter().map(|&d| self.ir.shape(x)[d]).product::<i64>() as f64;
                    let moments = self.ir.reduce(Fold::Moments, x, &dims);
                    let (mean, var) = (moments[0], moments[2]);
                    let factor = self.ir.num(count / (count - correction));
                    let mut var = if correction == 0.0 { var } else { self.binary("mul", var, factor) };
                    if op.starts_with("std") {
                        var = self.unary("sqrt", var);
                    }
                    let var = self.squeeze(var, &dims, keep);
                    let mean = self.squeeze(mean, &dims, keep);
                    return self.done(node, in_place, vec![var, mean]);
                }
                "linalg_vector_norm" | "norm" => {
                    let order = if a(1).is_some_and(Value::is_null) { 2.0 } else { real(1, 2.0) };
                    let dims = self.dims(x, a(2));
                    let y = self.norm(x, order, &dims)?;
                    self.squeeze(y, &dims, flag(3, false))
                }
                // Normalisation.
                "native_layer_norm" => {
                    let sizes = ints(a(1)).unwrap_or_default();
                    let dims: Vec<usize> = (rank - sizes.len()..rank).collect();
                    let (weight, bias) = (self.optional(a(2))?, self.optional(a(3))?);
                    let (y, mean, rstd) = self.normalise(x, &dims, real(4, 1e-5));
                    let y = self.affine(y, weight, bias);
                    return self.done(node, in_place, vec![y, mean, rstd]);
                }
                "native_group_norm" => {
                    let (weight, bias) = (self.optional(a(1))?, self.optional(a(2))?);
                    let (n, c, hw, groups) = (int(3, 1), int(4, 1), int(5, 1), int(6, 1));
                    let grouped = self.ir.reshape(x, vec![n, groups, c / groups * hw]);
                    let (y, mean, rstd) = self.normalise(grouped, &[2], real(7, 1e-5));
                    let y = self.ir.reshape(y, shape);
                    let (weight, bias) =
                        (weight.map(|vid| self.channels(vid, rank)), bias.map(|vid| self.channels(vid, rank)));
                    let y = self.affine(y, weight, bias);
                    return self.done(node, in_place, vec![y, mean, rstd]);
                }
                "native_batch_norm"
                | "_native_batch_norm_legit"
                | "_native_batch_norm_legit_no_training"
                | "cudnn_batch_norm"
                | "batch_norm"
                | "_batch_norm_impl_index"
                | "miopen_batch_norm" => {
                    let (weight, bias) = (self.optional(a(1))?, self.optional(a(2))?);
                    let no_stats = op == "_native_batch_norm_legit" && overload == "no_stats";
                    let frozen = op == "_native_batch_norm_legit_no_training";
                    let (mean, var) =
                        if no_stats { (None, None) } else { (self.optional(a(3))?, self.optional(a(4))?) };
                    let training = !frozen && flag(if no_stats { 3 } else { 5 }, true);
                    let eps = match (frozen, no_stats) {
                        (true, _) => real(6, 1e-5),
                        (_, true) => real(5, 1e-5),
                        _ => real(7, 1e-5),
                    };
                    let weight = weight.map(|vid| self.channels(vid, rank));
                    let bias = bias.map(|vid| self.channels(vid, rank));
                    let y = if training {
                        if mean.is_some() {
                            return Err(self.declined("batch norm that updates its statistics is not attempted"));
                        }
                        let dims: Vec<usize> = (0..rank).filter(|&d| d != 1).collect();
                        let (y, ..) = self.normalise(x, &dims, eps);
                        self.affine(y, weight, bias)
                    } else {
                        let (Some(mean), Some(var)) = (mean, var) else {
                            return Err(self.declined("batch norm without statistics"));
                        };
                        // y = (x - mean) * scale + bias; as x * scale + shift it would cancel where x is near
                        // the mean. A bias that was just added joins the mean, known from parameters alone.
                        let (mean, var) = (self.channels(mean, rank), self.channels(var, rank));
                        let eps = self.ir.num(eps);
                        let var = self.binary("add", var, eps);
                        let rstd = self.unary("rsqrt", var);
                        let scale = if let Some(weight) = weight { self.binary("mul", rstd, weight) } else { rstd };
                        let centred = if let Some((plain, added)) = self.with_bias(x) {
                            let shift = self.binary("sub", added, mean);
                            self.binary("add", plain, shift)
                        } else {
                            self.binary("sub", x, mean)
                        };
                        let scaled = self.binary("mul", centred, scale);
                        if let Some(bias) = bias { self.binary("add", scaled, bias) } else { scaled }
                    };
                    return self.done(node, in_place, vec![y]);
                }
                // Pooling.
                "max_pool1d_with_indices"
                | "max_pool2d_with_indices"
                | "max_pool3d_with_indices"
                | "max_pool2d"
                | "max_pool1d"
                | "max_pool3d" => {
                    let spatial = usize::from(op.as_bytes()[8] - b'0');
                    let window = self.window(spatial, a(1), a(2), a(3), a(4));
                    let dtype = self.dtype(x);
                    let dims = (rank - spatial..rank).collect();
                    self.ir.add(Def::Pool { arg: x, weight: None, fold: Fold::Max, window, dims }, shape, dtype)
                }
                // Scans.
                "cumsum" | "cumprod" => {
                    let dim = self.dim(x, int(1, 0));
                    let fold = if op == "cumsum" { Fold::Sum } else { Fold::Prod };
                    let x = self.cast(x, out_dtype);
                    self.ir.add(Def::Scan { arg: x, dim, fold, reverse: false }, shape, out_dtype)
                }
                // Losses.
                "mse_loss" => {
                    let y = self.value(a(1))?;
                    let d = self.binary("sub", x, y);
                    let square = self.binary("mul", d, d);
                    self.loss(square, int(2, 1))
                }
                "smooth_l1_loss" | "huber_loss" => {
                    let y = self.value(a(1))?;
                    let width = self.ir.num(real(3, 1.0));
                    let d = self.binary("sub", x, y);
                    let op = if op == "huber_loss" { "huber" } else { "smooth_l1" };
                    let terms = self.binary(op, d, width);
                    self.loss(terms, int(2, 1))
                }
                // Library calls.
                "mm" | "bmm" => {
                    let y = self.value(a(1))?;
                    self.matmul(x, y, None, &shape)
                }
                "addmm" | "baddbmm" => {
                    let (m, w) = (self.value(a(1))?, self.value(a(2))?);
                    let factor = |name: &str| node.kwargs.get(name).and_then(number).unwrap_or(1.0);
                    let (alpha, beta) = (factor("alpha"), factor("beta"));
                    if alpha != 1.0 || beta != 1.0 {
                        let mut product = self.matmul(m, w, None, &shape);
                        if alpha != 1.0 {
                            let alpha = self.ir.num(alpha);
                            product = self.binary("mul", product, alpha);
                        }
                        if beta != 0.0 {
                            let beta = self.ir.num(beta);
                            let scaled = self.binary("mul", x, beta);
                            product = self.binary("add", product, scaled);
                        }
                        return self.done(node, in_place, vec![product]);
                    }
                    if self.ir.shape(x).len() == 1 && op == "addmm" {
                        self.matmul(m, w, Some(x), &shape)
                    } else {
                        let product = self.matmul(m, w, None, &shape);
                        self.binary("add", product, x)
                    }
                }
                "mv" | "dot" => {
                    let y = self.value(a(1))?;
                    let terms = self.binary("mul", x, y);
                    let dims = [rank - 1];
                    let sum = self.sum(terms, &dims);
                    self.squeeze(sum, &dims, false)
                }
                "linear" => {
                    let w = self.value(a(1))?;
                    let bias = self.optional(a(2))?;
                    let w = self.ir.permute(w, vec![1, 0]);
                    let features = self.ir.shape(x)[rank - 1];
                    let flat = self.ir.reshape(x, vec![self.ir.numel(x) / features, features]);
                    let two = vec![self.ir.shape(flat)[0], shape[rank - 1]];
                    let y = self.matmul(flat, w, bias, &two);
                    self.ir.reshape(y, shape)
                }
                "convolution" | "_convolution" | "cudnn_convolution" | "mkldnn_convolution" => {
                    let weight = self.value(a(1))?;
                    let bias = self.optional(a(2))?;
                    let list = |i| ints(a(i)).unwrap_or_default();
                    let conv = Conv {
                        stride: list(3),
                        padding: list(4),
                        dilation: list(5),
                        transposed: flag(6, false),
                        output_padding: list(7),
                        groups: int(8, 1),
                        channels_last: false,
                    };
                    let dtype = self.dtype(x);
                    if self.windows && self.depthwise(x, weight, &conv) {
                        let y = self.weighted(x, weight, conv, shape);
                        let bias = bias.map(|bias| self.channels(bias, rank));
                        let y = bias.map_or(y, |bias| self.binary("add", y, bias));
                        return self.done(node, in_place, vec![y]);
                    }
                    // PyTorch adds the bias in a kernel of its own on CUDA, so there it is part of what is fused.
                    if self.device == Device::Cuda
                        && let Some(bias) = bias
                    {
                        let def = Def::Convolution { x, weight, bias: None, conv };
                        let y = self.ir.add(def, shape, dtype);
                        let bias = self.channels(bias, rank);
                        self.binary("add", y, bias)
                    } else {
                        self.ir.add(Def::Convolution { x, weight, bias, conv }, shape, dtype)
                    }
                }
                _ => match self.composed(op, &overload, node, x, &shape, out_dtype)? {
                    Some(results) => return self.done(node, in_place, results),
                    None => return Err(self.declined("it is not one of the operators that the policy knows")),
                },
            }
        };
        self.done(node, in_place, vec![result])
    }

    fn done(&mut self, node: &OpNode, in_place: bool, results: Vec<Vid>) -> Result<(), Declined> {
        if in_place
            && let Some(Value::Object(map)) = node.args.first()
            && let Some(Value::String(id)) = map.get("t")
        {
            // Only a value of its own may be rebound: a write through a view, or into an argument, is another thing.
            let written = self.env.get(id).copied();
            if written.is_some_and(|vid| matches!(self.ir.def(vid), Def::Input(..) | Def::Param(..) | Def::View(..))) {
                return Err(self.declined("writing into an argument or through a view is not attempted"));
            }
            self.env.insert(id.clone(), results[0]);
        }
        for (k, id) in node.ids.iter().enumerate() {
            if let Some(&vid) = results.get(k) {
                // The shape of the trace is the truth.
                if let Some(Some(meta)) = node.outputs.get(k)
                    && self.ir.shape(vid) != meta.shape
                    && !matches!(self.ir.def(vid), Def::Num(_))
                {
                    let vid = if self.ir.numel(vid) == meta.shape.iter().product::<i64>() {
                        self.ir.reshape(vid, meta.shape.clone())
                    } else {
                        self.ir.expand(vid, &meta.shape)
                    };
                    self.env.insert(id.clone(), vid);
                } else {
                    self.env.insert(id.clone(), vid);
                }
            }
        }
        Ok(())
    }

    /// Whether a convolution gives each channel of its own a sum over a window that a thread can hold.
    fn depthwise(&self, x: Vid, weight: Vid, conv: &Conv) -> bool {
        let (x, weight) = (self.ir.shape(x), self.ir.shape(weight));
        !conv.transposed
            && x.len() == weight.len()
            && x[1] == conv.groups
            && weight[0] == conv.groups
            && weight[2..].iter().product::<i64>() <= WINDOW
    }

    /// A depthwise convolution as a weighted sum over windows.
    fn weighted(&mut self, x: Vid, weight: Vid, conv: Conv, shape: Vec<i64>) -> Vid {
        let size = self.ir.shape(weight)[2..].to_vec();
        let each = |list: Vec<i64>| if list.len() == 1 { vec![list[0]; size.len()] } else { list };
        let (stride, padding, dilation) = (each(conv.stride), each(conv.padding), each(conv.dilation));
        let dims = (2..shape.len()).collect();
        let window = Window { stride, padding, dilation, size };
        let dtype = self.dtype(x);
        self.ir.add(Def::Pool { arg: x, weight: Some(weight), fold: Fold::Sum, window, dims }, shape, dtype)
    }

    fn flip(&mut self, x: Vid, dims: Vec<usize>) -> Vid {
        // A scan between two flips is a scan from the other end.
        if let Def::Scan { arg, dim, fold, reverse } = *self.ir.def(x)
            && dims == [dim]
            && let Def::View(inner, View::Flip(flipped)) = self.ir.def(arg).clone()
            && flipped == dims
        {
            let (shape, dtype) = (self.ir.shape(x).to_vec(), self.dtype(x));
            return self.ir.add(Def::Scan { arg: inner, dim, fold, reverse: !reverse }, shape, dtype);
        }
        let (shape, dtype) = (self.ir.shape(x).to_vec(), self.dtype(x));
        self.ir.add(Def::View(x, View::Flip(dims)), shape, dtype)
    }

    /// Zeros before a scan of all but the last element are a scan that starts one element later.
    fn concatenate(&mut self, parts: Vec<Vid>, dim: usize, shape: &[i64], dtype: Dtype) -> Vid {
        if let [zeros, scan] = parts[..]
            && self.ir.number(zeros) == Some(0.0)
            && self.ir.shape(zeros)[dim] == 1
            && let Def::Scan { arg, dim: along, fold: Fold::Sum, reverse: false } = *self.ir.def(scan)
            && along == dim
        {
            let zeros = self.ir.expand_number(
                0.0,
                &{
                    let mut one = shape.to_vec();
                    one[dim] = 1;
                    one
                },
                dtype,
            );
            let shifted = self.ir.add(Def::Cat(vec![zeros, arg], dim), shape.to_vec(), dtype);
            return self.ir.add(
                Def::Scan { arg: shifted, dim, fold: Fold::Sum, reverse: false },
                shape.to_vec(),
                dtype,
            );
        }
        self.ir.add(Def::Cat(parts, dim), shape.to_vec(), dtype)
    }

    fn power(&mut self, x: Vid, exponent: f64) -> Vid {
        match exponent {
            1.0 => x,
            2.0 => self.binary("mul", x, x),
            3.0 => {
                let square = self.binary("mul", x, x);
                self.binary("mul", square, x)
            }
            0.5 => self.unary("sqrt", x),
            -0.5 => self.unary("rsqrt", x),
            -1.0 => self.unary("reciprocal", x),
            _ => {
                let exponent = self.ir.num(exponent);
                self.binary("pow", x, exponent)
            }
        }
    }

    fn norm(&mut self, x: Vid, order: f64, dims: &[usize]) -> Result<Vid, Declined> {
        let size = self.unary("abs", x);
        Ok(match order {
            2.0 => {
                let square = self.binary("mul", x, x);
                let sum = self.ir.reduce(Fold::Sum, square, dims)[0];
                self.unary("sqrt", sum)
            }
            1.0 => self.ir.reduce(Fold::Sum, size, dims)[0],
            o if o == f64::INFINITY => self.ir.reduce(Fold::Max, size, dims)[0],
            o if o == f64::NEG_INFINITY => self.ir.reduce(Fold::Min, size, dims)[0],
            0.0 => return Err(self.declined("the count of what is not zero as a norm is not attempted")),
            _ => {
                let (order, root) = (self.ir.num(order), self.ir.num(1.0 / order));
                let power = self.binary("pow", size, order);
                let sum = self.ir.reduce(Fold::Sum, power, dims)[0];
                self.binary("pow", sum, root)
            }
        })
    }

    pub(super) fn window(
        &self,
        spatial: usize,
        size: Option<&Value>,
        stride: Option<&Value>,
        padding: Option<&Value>,
        dilation: Option<&Value>,
    ) -> Window {
        let fill = |value: Option<&Value>, default: &[i64]| match ints(value) {
            Some(list) if list.len() == spatial => list,
            Some(list) if list.len() == 1 => vec![list[0]; spatial],
            _ => default.to_vec(),
        };
        let size = fill(size, &vec![1; spatial]);
        Window {
            stride: fill(stride, &size),
            padding: fill(padding, &vec![0; spatial]),
            dilation: fill(dilation, &vec![1; spatial]),
            size,
        }
    }

    fn matmul(&mut self, a: Vid, b: Vid, bias: Option<Vid>, shape: &[i64]) -> Vid {
        let dtype = self.dtype(a);
        let rank = shape.len();
        // A product with one column is bound by memory: a sum along the rows.
        if shape[rank - 1] == 1 && rank == 2 {
            let mut order: Vec<usize> = (0..rank).collect();
            order.swap(rank - 2, rank - 1);
            let column = self.ir.permute(b, order);
            let terms = self.binary("mul", a, column);
            let sum = self.ir.reduce(Fold::Sum, terms, &[rank - 1])[0];
            return if let Some(bias) = bias { self.binary("add", sum, bias) } else { sum };
        }
        // A batch of one is none.
        if rank == 3 && shape[0] == 1 {
            let (a2, b2) = (self.ir.shape(a)[1..].to_vec(), self.ir.shape(b)[1..].to_vec());
            let (a, b) = (self.ir.reshape(a, a2), self.ir.reshape(b, b2));
            let y = self.ir.add(Def::Matmul { a, b, bias }, shape[1..].to_vec(), dtype);
            return self.ir.reshape(y, shape.to_vec());
        }
        self.ir.add(Def::Matmul { a, b, bias }, shape.to_vec(), dtype)
    }
}

/// Names of element-wise operators that are the same in ATen and here.
const OPERATION_NAMES: [&str; 42] = [
    "abs",
    "exp",
    "log",
    "log1p",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "tanh",
    "erf",
    "sigmoid",
    "relu",
    "silu",
    "mish",
    "hardsigmoid",
    "hardswish",
    "neg",
    "reciprocal",
    "floor",
    "ceil",
    "sign",
    "expm1",
    "log_sigmoid",
    "log2",
    "log10",
    "exp2",
    "relu6",
    "round",
    "gelu",
    "gelu_tanh",
    "tan",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "erfc",
    "trunc",
    "frac",
];
