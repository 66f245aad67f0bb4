//! Operators that are made of simpler ones: windows, choices by place, losses, rearrangements.
//!
//! Knows what these operators of ATen mean in terms of element-wise operations, folds, poolings and views. Must not
//! know kernels or languages, nor the operators that the policy's form has itself (`lower`).

use serde_json::Value;

use super::Declined;
use super::ir::{Def, Fold, Vid, View, Window};
use super::lower::{Lower, float, ints, number};
use crate::plan::Dtype;
use crate::task::graph::OpNode;

/// Most terms of a window whose size depends on the place.
const TERMS: i64 = 64;
/// Most elements of a constant that is written into a kernel.
const WRITTEN: usize = 64;

impl Lower {
    /// The value of an operator whose first argument is `x`, `None` if it isn't one of these.
    ///
    /// # Errors
    /// What of the operator is not attempted.
    #[allow(clippy::too_many_lines)]
    pub(super) fn composed(
        &mut self,
        op: &str,
        overload: &str,
        node: &OpNode,
        x: Vid,
        shape: &[i64],
        out_dtype: Dtype,
    ) -> Result<Option<Vec<Vid>>, Declined> {
        let a = |i: usize| node.args.get(i);
        let int = |i: usize, default: i64| a(i).and_then(Value::as_i64).unwrap_or(default);
        let real = |i: usize, default: f64| a(i).and_then(number).unwrap_or(default);
        let flag = |i: usize, default: bool| a(i).and_then(Value::as_bool).unwrap_or(default);
        let (rank, dtype) = (self.ir.shape(x).len(), self.dtype(x));
        let one = |vid: Vid| Ok(Some(vec![vid]));
        match op {
            // Element-wise.
            "clamp" | "clamp_min" | "clamp_max" => {
                let (low, high) = if op == "clamp_max" { (None, a(1)) } else { (a(1), a(2)) };
                let mut y = x;
                if let Some(low) = self.optional(low)? {
                    y = self.binary("max", y, low);
                }
                if let Some(high) = self.optional(high)? {
                    y = self.binary("min", y, high);
                }
                one(y)
            }
            "pow" if overload == "Scalar" => {
                let y = self.value(a(1))?;
                let y = self.cast(y, out_dtype);
                one(self.binary("pow", x, y))
            }
            "lerp" => {
                // From the nearer end, so that both ends are met.
                let (y, weight) = (self.value(a(1))?, self.value(a(2))?);
                let step = self.binary("sub", y, x);
                let (unit, half) = (self.ir.num(1.0), self.ir.num(0.5));
                let near = self.binary("mul", weight, step);
                let near = self.binary("add", x, near);
                let rest = match self.ir.number(weight) {
                    Some(weight) if weight.abs() < 0.5 => return one(near),
                    Some(weight) => self.ir.num(1.0 - weight),
                    None => self.binary("sub", unit, weight),
                };
                let far = self.binary("mul", step, rest);
                let far = self.binary("sub", y, far);
                if self.ir.number(weight).is_some() {
                    return one(far);
                }
                let size = self.unary("abs", weight);
                let below = self.ir.point("lt", &[size, half], Dtype::Bool);
                one(self.ir.point("where", &[below, near, far], dtype))
            }
            "addcmul" | "addcdiv" => {
                let (y, z) = (self.value(a(1))?, self.value(a(2))?);
                let factor = node.kwargs.get("value").and_then(number).unwrap_or(1.0);
                let factor = self.ir.num(factor);
                let y = self.binary("mul", y, factor);
                let term = self.binary(if op == "addcmul" { "mul" } else { "div" }, y, z);
                one(self.binary("add", x, term))
            }
            "hardshrink" | "softshrink" => {
                let limit = real(1, 0.5);
                let (low, high, zero) = (self.ir.num(-limit), self.ir.num(limit), self.ir.num(0.0));
                if op == "hardshrink" {
                    let above = self.ir.point("ge", &[x, low], Dtype::Bool);
                    let below = self.ir.point("le", &[x, high], Dtype::Bool);
                    let inside = self.ir.point("and", &[above, below], Dtype::Bool);
                    return one(self.ir.point("where", &[inside, zero, x], dtype));
                }
                let (less, more) = (self.binary("sub", x, high), self.binary("add", x, high));
                let above = self.ir.point("gt", &[x, high], Dtype::Bool);
                let below = self.ir.point("lt", &[x, low], Dtype::Bool);
                let nothing = self.binary("mul", x, zero);
                let rest = self.ir.point("where", &[below, more, nothing], dtype);
                one(self.ir.point("where", &[above, less, rest], dtype))
            }
            "_prelu_kernel" => {
                let weight = self.value(a(1))?;
                let zero = self.ir.num(0.0);
                let above = self.ir.point("gt", &[x, zero], Dtype::Bool);
                let scaled = self.binary("mul", x, weight);
                one(self.ir.point("where", &[above, x, scaled], dtype))
            }
            "logit" => {
                let mut y = x;
                if let Some(eps) = a(1).and_then(number) {
                    let (low, high) = (self.ir.num(eps), self.ir.num(1.0 - eps));
                    y = self.binary("clamp_min", y, low);
                    y = self.binary("clamp_max", y, high);
                }
                let unit = self.ir.num(1.0);
                let rest = self.binary("sub", unit, y);
                let odds = self.binary("div", y, rest);
                one(self.unary("log", odds))
            }
            "glu" => {
                let dim = self.dim(x, int(1, -1));
                let half = self.ir.shape(x)[dim] / 2;
                let (left, right) = (self.slice(x, dim, 0, half), self.slice(x, dim, half, half));
                let gate = self.unary("sigmoid", right);
                one(self.binary("mul", left, gate))
            }
            "div" if overload.ends_with("mode") => {
                let y = self.value(a(1))?;
                let mode = node.kwargs.get("rounding_mode").and_then(Value::as_str);
                let quotient = self.binary("div", x, y);
                match mode {
                    None => one(quotient),
                    Some("trunc") if float(out_dtype) => one(self.unary("trunc", quotient)),
                    _ => Err(self.declined("this rounding mode is not attempted")),
                }
            }
            "atan2" | "hypot" | "fmod" | "remainder" | "logaddexp" if float(out_dtype) => {
                let y = self.value(a(1))?;
                let op = ["atan2", "hypot", "fmod", "remainder", "logaddexp"].into_iter().find(|known| *known == op);
                one(self.binary(op.unwrap_or("fmod"), x, y))
            }
            "isnan" => one(self.ir.point("ne", &[x, x], Dtype::Bool)),
            "isinf" => one(self.ir.point("isinf", &[x], Dtype::Bool)),
            // Folds.
            "any" | "all" => {
                let dims = if overload == "default" { self.dims(x, None) } else { self.dims(x, a(1)) };
                let zero = self.ir.num(0.0);
                let set = self.ir.point("ne", &[x, zero], Dtype::Bool);
                let set = self.cast(set, Dtype::Float32);
                let y = self.ir.reduce(if op == "any" { Fold::Max } else { Fold::Min }, set, &dims)[0];
                let y = self.squeeze(y, &dims, flag(2, false));
                one(self.ir.point("ne", &[y, zero], Dtype::Bool))
            }
            "count_nonzero" => {
                let dims = self.dims(x, a(1));
                let zero = self.ir.num(0.0);
                let set = self.ir.point("ne", &[x, zero], Dtype::Bool);
                let set = self.cast(set, Dtype::Int64);
                let y = self.ir.reduce(Fold::Total, set, &dims)[0];
                one(self.squeeze(y, &dims, false))
            }
            "nansum" => {
                let dims = self.dims(x, a(1));
                let zero = self.ir.num(0.0);
                let known = self.ir.point("eq", &[x, x], Dtype::Bool);
                let terms = self.ir.point("where", &[known, x, zero], dtype);
                let y = self.ir.reduce(Fold::Sum, terms, &dims)[0];
                one(self.squeeze(y, &dims, flag(2, false)))
            }
            "_fused_rms_norm" => {
                let sizes = ints(a(1)).unwrap_or_default();
                let dims: Vec<usize> = (rank - sizes.len()..rank).collect();
                let weight = self.optional(a(2))?;
                let eps = self.ir.num(a(3).and_then(number).unwrap_or(f64::from(f32::EPSILON)));
                let square = self.binary("mul", x, x);
                let mean = self.mean(square, &dims);
                let shifted = self.binary("add", mean, eps);
                let rstd = self.unary("rsqrt", shifted);
                let y = self.binary("mul", x, rstd);
                let y = self.affine(y, weight, None);
                Ok(Some(vec![y, rstd]))
            }
            // Rearrangements.
            "repeat" => {
                let times = ints(a(1)).unwrap_or_default();
                let mut own = self.ir.shape(x).to_vec();
                own.splice(0..0, std::iter::repeat_n(1, times.len() - rank));
                let split: Vec<i64> = own.iter().flat_map(|&size| [1, size]).collect();
                let grown: Vec<i64> = own.iter().zip(&times).flat_map(|(&size, &by)| [by, size]).collect();
                let y = self.ir.reshape(x, split);
                let y = self.ir.expand(y, &grown);
                one(self.ir.reshape(y, shape.to_vec()))
            }
            "roll" => {
                let (shifts, dims) = (ints(a(1)).unwrap_or_default(), ints(a(2)).unwrap_or_default());
                if dims.is_empty() {
                    return Err(self.declined("rolling without dimensions is not attempted"));
                }
                let mut y = x;
                for (shift, dim) in shifts.iter().zip(&dims) {
                    let dim = self.dim(x, *dim);
                    let size = self.ir.shape(x)[dim];
                    let by = shift.rem_euclid(size.max(1));
                    if by > 0 {
                        let parts = vec![self.slice(y, dim, size - by, by), self.slice(y, dim, 0, size - by)];
                        y = self.ir.add(Def::Cat(parts, dim), shape.to_vec(), dtype);
                    }
                }
                one(y)
            }
            "constant_pad_nd" => {
                let by = ints(a(1)).unwrap_or_default();
                let fill = real(2, 0.0);
                let mut y = x;
                for (k, sides) in by.chunks(2).enumerate() {
                    let dim = rank - 1 - k;
                    let (before, after) = (sides[0], sides.get(1).copied().unwrap_or(0));
                    let size = self.ir.shape(y)[dim];
                    let start = (-before).max(0);
                    y = self.slice(y, dim, start, size - start - (-after).max(0));
                    let mut parts = vec![];
                    for (at, count) in [(0, before), (1, after)] {
                        if at == 1 {
                            parts.push(y);
                        }
                        if count > 0 {
                            let mut filled = self.ir.shape(y).to_vec();
                            filled[dim] = count;
                            parts.push(self.ir.expand_number(fill, &filled, dtype));
                        }
                    }
                    let mut grown = self.ir.shape(y).to_vec();
                    grown[dim] += before.max(0) + after.max(0);
                    if parts.len() > 1 {
                        y = self.ir.add(Def::Cat(parts, dim), grown, dtype);
                    }
                }
                one(y)
            }
            "reflection_pad1d" | "reflection_pad2d" | "reflection_pad3d" | "replication_pad1d"
            | "replication_pad2d" | "replication_pad3d" => {
                let by = ints(a(1)).unwrap_or_default();
                let mut y = x;
                for (k, sides) in by.chunks(2).enumerate() {
                    let (dim, before) = (rank - 1 - k, sides[0]);
                    let size = self.ir.shape(y)[dim];
                    let mut grown = self.ir.shape(y).to_vec();
                    grown[dim] = shape[dim];
                    let place = self.ir.add(Def::Coord(dim), grown.clone(), Dtype::Int64);
                    let (before, zero, last) = (self.ir.whole(before), self.ir.whole(0), self.ir.whole(size - 1));
                    let from = self.binary("sub", place, before);
                    let (under, over) = (
                        self.ir.point("lt", &[from, zero], Dtype::Bool),
                        self.ir.point("gt", &[from, last], Dtype::Bool),
                    );
                    let (low, high) = if op.starts_with("reflection") {
                        let twice = self.ir.whole(2 * (size - 1));
                        (self.unary("neg", from), self.binary("sub", twice, from))
                    } else {
                        (zero, last)
                    };
                    let from = self.ir.point("where", &[under, low, from], Dtype::Int64);
                    let from = self.ir.point("where", &[over, high, from], Dtype::Int64);
                    y = self.ir.add(Def::Gather { source: y, index: from, dim }, grown, dtype);
                }
                one(y)
            }
            "index_select" | "gather" => {
                let (dim, index) = (self.dim(x, int(1, 0)), self.value(a(2))?);
                let index = if op == "index_select" {
                    let mut line = vec![1; rank];
                    line[dim] = self.ir.numel(index);
                    let index = self.ir.reshape(index, line);
                    self.ir.expand(index, shape)
                } else {
                    index
                };
                one(self.ir.add(Def::Gather { source: x, index, dim }, shape.to_vec(), dtype))
            }
            "embedding" => {
                let index = self.value(a(1))?;
                let (count, width) = (self.ir.numel(index), self.ir.shape(x)[1]);
                let index = self.ir.reshape(index, vec![count, 1]);
                let index = self.ir.expand(index, &[count, width]);
                let y = self.ir.add(Def::Gather { source: x, index, dim: 0 }, vec![count, width], dtype);
                one(self.ir.reshape(y, shape.to_vec()))
            }
            "pixel_shuffle" => {
                let by = int(1, 1);
                let from = self.ir.shape(x).to_vec();
                let (channels, height, width) = (from[rank - 3], from[rank - 2], from[rank - 1]);
                let count: i64 = from[..rank - 3].iter().product();
                let y = self.ir.reshape(x, vec![count, channels / (by * by), by, by, height, width]);
                let y = self.ir.permute(y, vec![0, 1, 4, 2, 5, 3]);
                one(self.ir.reshape(y, shape.to_vec()))
            }
            "upsample_nearest1d" | "upsample_nearest2d" | "upsample_nearest3d" => {
                let from = self.ir.shape(x).to_vec();
                if from.iter().zip(shape).any(|(from, to)| to % from != 0) {
                    return Err(self.declined("resizing by other than whole factors is not attempted"));
                }
                let split: Vec<i64> = from.iter().flat_map(|&size| [size, 1]).collect();
                let grown: Vec<i64> = from.iter().zip(shape).flat_map(|(&size, &to)| [size, to / size]).collect();
                let y = self.ir.reshape(x, split);
                let y = self.ir.expand(y, &grown);
                one(self.ir.reshape(y, shape.to_vec()))
            }
            // Poolings.
            "avg_pool1d" | "avg_pool2d" | "avg_pool3d" => {
                let spatial = usize::from(op.as_bytes()[8] - b'0');
                let window = self.window(spatial, a(1), a(2), a(3), None);
                one(self.average_pool(x, window, shape, flag(5, true), a(6).and_then(number)))
            }
            "_adaptive_avg_pool2d" | "_adaptive_avg_pool3d" | "adaptive_avg_pool1d" | "adaptive_avg_pool2d" => {
                let spatial = ints(a(1)).map_or(1, |sizes| sizes.len());
                let dims: Vec<usize> = (rank - spatial..rank).collect();
                if dims.iter().all(|&d| shape[d] == 1) {
                    return one(self.mean(x, &dims));
                }
                one(self.adaptive_pool(x, shape, &dims, Fold::Sum)?)
            }
            "adaptive_max_pool1d" | "adaptive_max_pool2d" | "adaptive_max_pool3d" => {
                let spatial = usize::from(op.as_bytes()[17] - b'0');
                let dims: Vec<usize> = (rank - spatial..rank).collect();
                one(self.adaptive_pool(x, shape, &dims, Fold::Max)?)
            }
            // Losses.
            "nll_loss_forward" | "nll_loss2d_forward" => self.nll(x, node, shape).map(|loss| Some(vec![loss])),
            "binary_cross_entropy" => {
                let (target, weight) = (self.value(a(1))?, self.optional(a(2))?);
                let (unit, least) = (self.ir.num(1.0), self.ir.num(-100.0));
                let log = self.unary("log", x);
                let log = self.binary("clamp_min", log, least);
                let opposite = self.unary("neg", x);
                let other = self.unary("log1p", opposite);
                let other = self.binary("clamp_min", other, least);
                let rest = self.binary("sub", target, unit);
                let (far, near) = (self.binary("mul", rest, other), self.binary("mul", target, log));
                let terms = self.binary("sub", far, near);
                let terms = self.affine(terms, weight, None);
                one(self.loss(terms, int(3, 1)))
            }
            "binary_cross_entropy_with_logits" => {
                let (target, weight, positive) = (self.value(a(1))?, self.optional(a(2))?, self.optional(a(3))?);
                let unit = self.ir.num(1.0);
                let mut log = self.unary("log_sigmoid", x);
                if let Some(positive) = positive {
                    let extra = self.binary("sub", positive, unit);
                    let extra = self.binary("mul", extra, target);
                    let factor = self.binary("add", extra, unit);
                    log = self.binary("mul", factor, log);
                }
                let rest = self.binary("sub", unit, target);
                let linear = self.binary("mul", rest, x);
                let terms = self.binary("sub", linear, log);
                let terms = self.affine(terms, weight, None);
                one(self.loss(terms, int(4, 1)))
            }
            "soft_margin_loss" => {
                let target = self.value(a(1))?;
                let margin = self.binary("mul", target, x);
                let margin = self.unary("neg", margin);
                let exp = self.unary("exp", margin);
                let terms = self.unary("log1p", exp);
                one(self.loss(terms, int(2, 1)))
            }
            _ => Ok(None),
        }
    }

    /// `length` places from `start` along a dimension.
    pub(super) fn slice(&mut self, x: Vid, dim: usize, start: i64, length: i64) -> Vid {
        let mut shape = self.ir.shape(x).to_vec();
        if start == 0 && shape[dim] == length {
            return x;
        }
        shape[dim] = length;
        let dtype = self.dtype(x);
        self.ir.add(Def::View(x, View::Slice { dim, start, step: 1 }), shape, dtype)
    }

    /// A tensor that the task made from Python values, in the order of its elements.
    ///
    /// # Errors
    /// More or other values than the policy writes into a kernel.
    pub(super) fn constant(&mut self, value: &Value, shape: &[i64], dtype: Dtype) -> Result<Vid, Declined> {
        fn flat(value: &Value, into: &mut Vec<f64>) -> Option<()> {
            match value {
                Value::Array(items) => items.iter().try_for_each(|item| flat(item, into)),
                other => number(other).map(|number| into.push(number)),
            }
        }
        let mut numbers = vec![];
        if flat(value, &mut numbers).is_none() || numbers.is_empty() {
            return Err(self.declined("a tensor made from Python values has no value in the graph"));
        }
        let first = numbers[0];
        if numbers.iter().all(|number| number.to_bits() == first.to_bits()) {
            return Ok(self.ir.expand_number(first, shape, dtype));
        }
        if numbers.len() > WRITTEN {
            return Err(self.declined(format!("constants of more than {WRITTEN} elements are not attempted")));
        }
        // A choice by place.
        let line = vec![numbers.len() as i64];
        let place = self.ir.add(Def::Coord(0), line.clone(), Dtype::Int64);
        let mut chosen = self.ir.expand_number(numbers[numbers.len() - 1], &line, dtype);
        for (k, &number) in numbers.iter().enumerate().rev().skip(1) {
            let (at, number) = (self.ir.whole(k as i64), self.ir.num(number));
            let here = self.ir.point("eq", &[place, at], Dtype::Bool);
            chosen = self.ir.point("where", &[here, number, chosen], dtype);
        }
        Ok(self.ir.reshape(chosen, shape.to_vec()))
    }

    /// The mean over windows. Where they reach beyond the edges the divisor depends on the place: all of the window
    /// that lies in the padded tensor, or only what lies in the tensor.
    fn average_pool(&mut self, x: Vid, window: Window, shape: &[i64], count_padding: bool, fixed: Option<f64>) -> Vid {
        let (full, dtype) = (self.ir.shape(x).to_vec(), self.dtype(x));
        let dims: Vec<usize> = (shape.len() - window.size.len()..shape.len()).collect();
        let def = Def::Pool { arg: x, weight: None, fold: Fold::Sum, window: window.clone(), dims: dims.clone() };
        let sum = self.ir.add(def, shape.to_vec(), dtype);
        if let Some(fixed) = fixed {
            let count = self.ir.num(fixed);
            return self.binary("div", sum, count);
        }
        let mut whole = 1;
        let mut count: Option<Vid> = None;
        for (k, &d) in dims.iter().enumerate() {
            let (size, stride, padding) = (window.size[k], window.stride[k], window.padding[k]);
            let outside = if count_padding { padding } else { 0 };
            let reach = (shape[d] - 1) * stride - padding + size;
            if padding <= outside && reach <= full[d] + outside {
                whole *= size;
                continue;
            }
            // From where to where, in numbers that a float holds exactly.
            let mut line = vec![1; shape.len()];
            line[d] = shape[d];
            let place = self.ir.add(Def::Coord(d), line, Dtype::Float32);
            let (stride, back, size) =
                (self.ir.num(stride as f64), self.ir.num(padding as f64), self.ir.num(size as f64));
            let (low, high) = (self.ir.num(-outside as f64), self.ir.num((full[d] + outside) as f64));
            let start = self.binary("mul", place, stride);
            let start = self.binary("sub", start, back);
            let end = self.binary("add", start, size);
            let start = self.binary("clamp_min", start, low);
            let end = self.binary("clamp_max", end, high);
            let length = self.binary("sub", end, start);
            count = Some(match count {
                Some(count) => self.binary("mul", count, length),
                None => length,
            });
        }
        let whole_count = self.ir.num(whole as f64);
        let count = match count {
            Some(count) if whole > 1 => self.binary("mul", count, whole_count),
            Some(count) => count,
            None => whole_count,
        };
        self.binary("div", sum, count)
    }

    /// Mean or maximum over `floor(i n / m) .. ceil((i + 1) n / m)` along each of `dims`.
    fn adaptive_pool(&mut self, x: Vid, shape: &[i64], dims: &[usize], fold: Fold) -> Result<Vid, Declined> {
        let (full, dtype) = (self.ir.shape(x).to_vec(), self.dtype(x));
        if dims.iter().all(|&d| full[d] % shape[d] == 0) {
            if fold == Fold::Max && dims.iter().all(|&d| shape[d] == 1) {
                return Ok(self.ir.reduce(fold, x, dims)[0]);
            }
            let size: Vec<i64> = dims.iter().map(|&d| full[d] / shape[d]).collect();
            let zero = vec![0; dims.len()];
            let window = Window { stride: size.clone(), padding: zero, dilation: vec![1; dims.len()], size };
            if fold == Fold::Sum {
                return Ok(self.average_pool(x, window, shape, true, None));
            }
            return Ok(self.ir.add(
                Def::Pool { arg: x, weight: None, fold, window, dims: dims.to_vec() },
                shape.to_vec(),
                dtype,
            ));
        }
        // Windows of unequal size: as many terms as the longest has, each where the window has it.
        let bounds = |d: usize, i: i64| (i * full[d] / shape[d], ((i + 1) * full[d] + shape[d] - 1) / shape[d]);
        let longest = |d: usize| (0..shape[d]).map(|i| bounds(d, i).1 - bounds(d, i).0).max().unwrap_or(1);
        if dims.iter().map(|&d| longest(d)).product::<i64>() > TERMS {
            return Err(self.declined("adaptive pooling with large windows of unequal size is not attempted"));
        }
        let mut y = x;
        for &d in dims {
            let mut now = self.ir.shape(y).to_vec();
            let size = now[d];
            now[d] = shape[d];
            if size == shape[d] {
                continue;
            }
            let place = self.ir.add(Def::Coord(d), now.clone(), Dtype::Int64);
            let (from, to) = (self.ir.whole(size), self.ir.whole(shape[d]));
            let start = self.binary("mul", place, from);
            let start = self.binary("div", start, to);
            let (unit, up, last) = (self.ir.whole(1), self.ir.whole(shape[d] - 1), self.ir.whole(size - 1));
            let next = self.binary("add", place, unit);
            let end = self.binary("mul", next, from);
            let end = self.binary("add", end, up);
            let end = self.binary("div", end, to);
            let nothing = self.ir.num(if fold == Fold::Max { f64::NEG_INFINITY } else { 0.0 });
            let mut total = None;
            for k in 0..longest(d) {
                let k = self.ir.whole(k);
                let at = self.binary("add", start, k);
                let inside = self.ir.point("lt", &[at, end], Dtype::Bool);
                let beyond = self.ir.point("gt", &[at, last], Dtype::Bool);
                let at = self.ir.point("where", &[beyond, last, at], Dtype::Int64);
                let term = self.ir.add(Def::Gather { source: y, index: at, dim: d }, now.clone(), dtype);
                let term = self.ir.point("where", &[inside, term, nothing], dtype);
                total = Some(match total {
                    Some(total) => self.binary(if fold == Fold::Max { "max" } else { "add" }, total, term),
                    None => term,
                });
            }
            let Some(total) = total else { continue };
            y = if fold == Fold::Max {
                total
            } else {
                let length = self.binary("sub", end, start);
                let length = self.cast(length, dtype);
                self.binary("div", total, length)
            };
        }
        Ok(y)
    }

    /// Negative log likelihood, with weights of classes, ignored targets and any number of further dimensions.
    fn nll(&mut self, x: Vid, node: &OpNode, shape: &[i64]) -> Result<Vid, Declined> {
        let a = |i: usize| node.args.get(i);
        let int = |i: usize, default: i64| a(i).and_then(Value::as_i64).unwrap_or(default);
        let (target, weight) = (self.value(a(1))?, self.optional(a(2))?);
        let mut full = self.ir.shape(x).to_vec();
        if full.len() == 1 {
            full.insert(0, 1);
        }
        let x = self.ir.reshape(x, full.clone());
        let dtype = self.dtype(x);
        let mut line = full.clone();
        line[1] = 1;
        let all: Vec<usize> = (0..line.len()).collect();
        let index = self.ir.reshape(target, line.clone());
        let (ignored, zero, unit) = (self.ir.whole(int(4, -100)), self.ir.num(0.0), self.ir.num(1.0));
        let skip = self.ir.point("eq", &[index, ignored], Dtype::Bool);
        let safe = self.ir.point("where", &[skip, zero, index], Dtype::Int64);
        let picked = self.ir.add(Def::Gather { source: x, index: safe, dim: 1 }, line.clone(), dtype);
        let mut terms = self.unary("neg", picked);
        let mut share = unit;
        if let Some(weight) = weight {
            let wide = self.channels(weight, full.len());
            let wide = self.ir.expand(wide, &full);
            share = self.ir.add(Def::Gather { source: wide, index: safe, dim: 1 }, line, dtype);
            terms = self.binary("mul", terms, share);
        }
        let terms = self.ir.point("where", &[skip, zero, terms], dtype);
        Ok(match int(3, 1) {
            1 => {
                let counted = self.ir.point("where", &[skip, zero, share], Dtype::Float32);
                let sum = self.ir.reduce(Fold::Sum, terms, &all)[0];
                let count = self.ir.reduce(Fold::Sum, counted, &all)[0];
                let mean = self.binary("div", sum, count);
                self.ir.reshape(mean, vec![])
            }
            2 => self.loss(terms, 2),
            _ => self.ir.reshape(terms, shape.to_vec()),
        })
    }
}
