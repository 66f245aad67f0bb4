//! The policy's own form of a task: values with shapes, each defined by few kinds of operation.
//!
//! Knows what an operation means element by element. Must not know ATen's names (`lower`), nor how kernels
//! are cut out of it (`schedule`) or written down (`emit`). Equal definitions are one value.

use std::collections::HashMap;

use super::index::{Ix, Vars, numel};
use crate::plan::Dtype;

pub type Vid = usize;

/// How elements are folded. The number of results differs: see `Fold::results`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fold {
    Sum,
    Prod,
    Max,
    Min,
    ArgMax,
    ArgMin,
    /// Sum of integers.
    Total,
    /// Sums of `x - k` and of its square, k being the first element of the row, in one pass: the mean, what
    /// its rounding left (`x - mean - rest` is exact where `x` is near the mean), the variance.
    Moments,
    /// Maximum, and sum of `exp(x - maximum)`, in one pass.
    SoftMax,
}

impl Fold {
    /// Number of values that one fold gives.
    pub const fn results(self) -> usize {
        match self {
            Self::Moments => 3,
            Self::SoftMax => 2,
            _ => 1,
        }
    }

    /// Whether it adds up: its sums are kept in double, since a long row of nearly equal numbers rounds the same
    /// way at each step.
    pub const fn sums(self) -> bool {
        matches!(self, Self::Sum | Self::Moments)
    }
}

/// A view: coordinates of its source from coordinates of the view.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum View {
    Permute(Vec<usize>),
    Reshape,
    /// Broadcast over dimensions of size one; ranks are equal.
    Expand,
    Slice {
        dim: usize,
        start: i64,
        step: i64,
    },
    Flip(Vec<usize>),
}

/// Window of a pooling operator; one entry for each dimension that it slides along.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Window {
    pub size: Vec<i64>,
    pub stride: Vec<i64>,
    pub padding: Vec<i64>,
    pub dilation: Vec<i64>,
}

impl Window {
    /// No element is in two windows.
    pub fn disjoint(&self) -> bool {
        self.size
            .iter()
            .zip(&self.stride)
            .zip(&self.dilation)
            .all(|((size, stride), dilation)| (size - 1) * dilation < *stride)
    }
}

/// A convolution's geometry, by spatial dimension.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Conv {
    pub stride: Vec<i64>,
    pub padding: Vec<i64>,
    pub dilation: Vec<i64>,
    pub output_padding: Vec<i64>,
    pub groups: i64,
    pub transposed: bool,
    /// Operand and result have their channels last: `(N, .., C)`; the weight is as ever.
    pub channels_last: bool,
}

/// A number with the equality of its bits.
#[derive(Clone, Copy, Debug)]
pub struct Number(pub f64);
impl PartialEq for Number {
    fn eq(&self, other: &Self) -> bool {
        self.0.to_bits() == other.0.to_bits()
    }
}
impl Eq for Number {}
impl std::hash::Hash for Number {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.to_bits().hash(state);
    }
}

/// What a value is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Def {
    /// The n-th argument of `forward`, with its strides.
    Input(usize, Vec<i64>),
    /// A tensor of the state dict.
    Param(String, Vec<i64>),
    /// A scalar that is known now.
    Num(Number),
    /// The coordinate along a dimension.
    Coord(usize),
    /// An operation of `emit::OPERATIONS` on values of this shape or on scalars.
    Point(&'static str, Vec<Vid>),
    View(Vid, View),
    /// Folds dimensions, which stay with size one. Its values are `Result`s.
    Reduce {
        fold: Fold,
        arg: Vid,
        dims: Vec<usize>,
    },
    Result(Vid, usize),
    /// Maximum or sum over windows along `dims` (`average` divides outside). With a weight of shape `(C, 1, window)` each
    /// element is multiplied by that of its channel (dimension 1) and its place in the window first.
    Pool {
        arg: Vid,
        weight: Option<Vid>,
        fold: Fold,
        window: Window,
        dims: Vec<usize>,
    },
    /// Running sum or product along a dimension.
    Scan {
        arg: Vid,
        dim: usize,
        fold: Fold,
        reverse: bool,
    },
    Cat(Vec<Vid>, usize),
    /// `source` at this value's coordinates, but along `dim` at `index` (which has the shape of this value).
    Gather {
        source: Vid,
        index: Vid,
        dim: usize,
    },
    /// `a @ b`, 2-D or batched, with a bias along the last dimension.
    Matmul {
        a: Vid,
        b: Vid,
        bias: Option<Vid>,
    },
    Convolution {
        x: Vid,
        weight: Vid,
        bias: Option<Vid>,
        conv: Conv,
    },
}

/// A value.
#[derive(Clone, Debug)]
pub struct Val {
    pub shape: Vec<i64>,
    pub dtype: Dtype,
    pub def: Def,
}

/// All values of a task; arguments come before what uses them.
#[derive(Clone, Debug, Default)]
pub struct Ir {
    pub vals: Vec<Val>,
    /// ATen operators that a value stands for, for messages and comments.
    pub labels: HashMap<Vid, String>,
    known: HashMap<(Def, Vec<i64>, Dtype), Vid>,
}

impl Ir {
    pub fn add(&mut self, def: Def, shape: Vec<i64>, dtype: Dtype) -> Vid {
        let key = (def.clone(), shape.clone(), dtype);
        if let Some(&vid) = self.known.get(&key) {
            return vid;
        }
        self.vals.push(Val { shape, dtype, def });
        let vid = self.vals.len() - 1;
        self.known.insert(key, vid);
        vid
    }

    pub fn shape(&self, vid: Vid) -> &[i64] {
        &self.vals[vid].shape
    }

    pub fn def(&self, vid: Vid) -> &Def {
        &self.vals[vid].def
    }

    pub fn num(&mut self, value: f64) -> Vid {
        self.add(Def::Num(Number(value)), vec![], Dtype::Float32)
    }

    /// A number that leaves integers what they are.
    pub fn whole(&mut self, value: i64) -> Vid {
        self.add(Def::Num(Number(value as f64)), vec![], Dtype::Int64)
    }

    /// The number that a value is, if it is one.
    pub fn number(&self, vid: Vid) -> Option<f64> {
        match self.def(vid) {
            Def::Num(number) => Some(number.0),
            Def::View(source, _) => self.number(*source),
            _ => None,
        }
    }

    pub fn reshape(&mut self, vid: Vid, shape: Vec<i64>) -> Vid {
        if self.shape(vid) == shape || matches!(self.def(vid), Def::Num(_)) {
            return vid;
        }
        // A reshape of a reshape is one reshape.
        let source = match self.def(vid) {
            Def::View(inner, View::Reshape) => *inner,
            _ => vid,
        };
        if self.shape(source) == shape {
            return source;
        }
        let dtype = self.vals[vid].dtype;
        self.add(Def::View(source, View::Reshape), shape, dtype)
    }

    /// A view with its dimensions in another order.
    pub fn permute(&mut self, x: Vid, order: Vec<usize>) -> Vid {
        if order.iter().enumerate().all(|(i, &d)| i == d) {
            return x;
        }
        // A permutation of a permutation is one permutation.
        let (source, order) = match self.def(x) {
            Def::View(inner, View::Permute(first)) => (*inner, order.iter().map(|&d| first[d]).collect()),
            _ => (x, order),
        };
        if order.iter().enumerate().all(|(i, &d)| i == d) {
            return source;
        }
        let shape: Vec<i64> = order.iter().map(|&d| self.shape(source)[d]).collect();
        // Where only dimensions of size one move, it is a reshape.
        if order.iter().copied().filter(|&d| self.shape(source)[d] != 1).is_sorted() {
            return self.reshape(source, shape);
        }
        let dtype = self.vals[x].dtype;
        self.add(Def::View(source, View::Permute(order)), shape, dtype)
    }

    /// Broadcasts to `shape` by PyTorch's rules.
    pub fn expand(&mut self, vid: Vid, shape: &[i64]) -> Vid {
        if matches!(self.def(vid), Def::Num(_)) {
            return vid;
        }
        let mut own = self.shape(vid).to_vec();
        if own.len() < shape.len() {
            own.splice(0..0, std::iter::repeat_n(1, shape.len() - own.len()));
        }
        let vid = self.reshape(vid, own.clone());
        if own == shape {
            return vid;
        }
        let dtype = self.vals[vid].dtype;
        self.add(Def::View(vid, View::Expand), shape.to_vec(), dtype)
    }

    /// An element-wise operation; arguments are broadcast.
    pub fn point(&mut self, op: &'static str, args: &[Vid], dtype: Dtype) -> Vid {
        let mut shape: Vec<i64> = vec![];
        for &arg in args {
            let other = self.shape(arg);
            let rank = shape.len().max(other.len());
            let at = |s: &[i64], d: usize| if d + s.len() < rank { 1 } else { s[d + s.len() - rank] };
            shape = (0..rank).map(|d| if at(&shape, d) == 1 { at(other, d) } else { at(&shape, d) }).collect();
        }
        let args = args.iter().map(|&arg| self.expand(arg, &shape)).collect();
        self.add(Def::Point(op, args), shape, dtype)
    }

    /// The results of a fold over `dims`, which stay with size one.
    pub fn reduce(&mut self, fold: Fold, arg: Vid, dims: &[usize]) -> Vec<Vid> {
        let full = self.shape(arg).to_vec();
        // Dimensions of size one have nothing to fold.
        let mut dims: Vec<usize> = dims.iter().copied().filter(|&d| full[d] != 1).collect();
        dims.sort_unstable();
        let mut shape = full;
        for &d in &dims {
            shape[d] = 1;
        }
        let dtype = self.vals[arg].dtype;
        if dims.is_empty() {
            let zero = self.num(0.0);
            return match fold {
                Fold::Sum | Fold::Prod | Fold::Max | Fold::Min | Fold::Total => vec![arg],
                Fold::ArgMax | Fold::ArgMin => vec![self.expand_number(0.0, &shape, Dtype::Int64)],
                Fold::Moments => {
                    let nothing = self.point("mul", &[arg, zero], dtype);
                    vec![arg, nothing, nothing]
                }
                Fold::SoftMax => vec![arg, self.expand_number(1.0, &shape, dtype)],
            };
        }
        let out = if matches!(fold, Fold::ArgMax | Fold::ArgMin) { Dtype::Int64 } else { dtype };
        let reduce = self.add(Def::Reduce { fold, arg, dims }, shape.clone(), out);
        (0..fold.results()).map(|k| self.add(Def::Result(reduce, k), shape.clone(), out)).collect()
    }

    /// A tensor filled with one number.
    pub fn expand_number(&mut self, value: f64, shape: &[i64], dtype: Dtype) -> Vid {
        let number = self.add(Def::Num(Number(value)), vec![], dtype);
        self.add(Def::View(number, View::Expand), shape.to_vec(), dtype)
    }

    /// Coordinates in a view's source.
    pub fn through(&self, vid: Vid, at: &[Ix], vars: &mut Vars) -> Vec<Ix> {
        let Def::View(source, view) = self.def(vid) else { return at.to_vec() };
        let from = self.shape(*source);
        match view {
            View::Permute(order) => {
                let mut result = vec![Ix::default(); from.len()];
                for (to, &d) in order.iter().enumerate() {
                    result[d] = at[to].clone();
                }
                result
            }
            View::Reshape => vars.reshape(at, self.shape(vid), from),
            View::Expand => {
                from.iter().zip(at).map(|(&size, ix)| if size == 1 { Ix::default() } else { ix.clone() }).collect()
            }
            View::Slice { dim, start, step } => {
                let mut result = at.to_vec();
                result[*dim] = at[*dim].times(*step).offset(*start);
                result
            }
            View::Flip(dims) => {
                let mut result = at.to_vec();
                for &d in dims {
                    result[d] = at[d].times(-1).offset(from[d] - 1);
                }
                result
            }
        }
    }

    /// Direct arguments.
    pub fn args(&self, vid: Vid) -> Vec<Vid> {
        match self.def(vid) {
            Def::Input(..) | Def::Param(..) | Def::Num(_) | Def::Coord(_) => vec![],
            Def::Point(_, args) | Def::Cat(args, _) => args.clone(),
            Def::View(arg, _) | Def::Result(arg, _) => vec![*arg],
            Def::Reduce { arg, .. } | Def::Scan { arg, .. } => vec![*arg],
            Def::Pool { arg, weight, .. } => std::iter::once(*arg).chain(*weight).collect(),
            Def::Gather { source, index, .. } => vec![*source, *index],
            Def::Matmul { a, b, bias } => [*a, *b].into_iter().chain(*bias).collect(),
            Def::Convolution { x, weight, bias, .. } => [*x, *weight].into_iter().chain(*bias).collect(),
        }
    }

    /// Number of elements.
    pub fn numel(&self, vid: Vid) -> i64 {
        numel(self.shape(vid))
    }
}
