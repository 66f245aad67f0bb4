//! Expressions and loops of one kernel, for both devices.
//!
//! Knows how a value is computed at given coordinates, what may be hoisted out of which loop, and when loads can
//! be vectors. Must not know which kernels there are and how they are launched (`kernels`). Text is collected by
//! level: 0 is what a row (or a thread) sets up, 1 one vector of elements, 2 one element, deeper are windows.

use std::collections::{HashMap, HashSet};

use super::index::{Ix, VarId, VarKind, Vars, contiguous};
use super::ir::{Def, Fold, Ir, Vid};
use super::ops::{Ty, operation};
use crate::plan::{Device, Dtype};

/// A tensor in memory.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Name in Python and in C.
    pub name: String,
    pub strides: Vec<i64>,
}

/// Text of a value, the deepest loop that it depends on, its type.
#[derive(Clone, Debug)]
pub struct Text {
    pub text: String,
    pub level: usize,
    pub ty: Ty,
}

/// Type of a value of that dtype in an expression.
pub const fn ty(dtype: Dtype) -> Ty {
    match dtype {
        Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float64 => Ty::Float,
        Dtype::Bool => Ty::Bool,
        _ => Ty::Int,
    }
}

/// C type of an element in memory.
pub const fn element(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "float",
        Dtype::Float64 => "double",
        Dtype::Float16 => "__half",
        Dtype::Bfloat16 => "__nv_bfloat16",
        Dtype::Int64 => "long long",
        Dtype::Int32 => "int",
        Dtype::Int16 => "short",
        Dtype::Int8 => "signed char",
        Dtype::Uint8 | Dtype::Bool => "unsigned char",
    }
}

/// A C literal of type `float`.
pub fn literal(value: f64) -> String {
    if value.is_nan() {
        return "NAN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "INFINITY".into() } else { "-INFINITY".into() };
    }
    let single = value as f32;
    let text = format!("{single:?}f");
    if single < 0.0 { format!("({text})") } else { text }
}

/// Accumulators of a fold: type and start value. Sums are in double; how a few elements are added before they
/// go there is the kernel's matter.
pub const fn accumulators(fold: Fold) -> &'static [(&'static str, &'static str)] {
    match fold {
        Fold::Sum => &[("double", "0.0")],
        Fold::Prod => &[("float", "1.0f")],
        Fold::Max => &[("float", "-INFINITY")],
        Fold::Min => &[("float", "INFINITY")],
        Fold::ArgMax => &[("float", "-INFINITY"), ("index_t", "0x7fffffff")],
        Fold::ArgMin => &[("float", "INFINITY"), ("index_t", "0x7fffffff")],
        Fold::Total => &[("long long", "0")],
        Fold::Moments => &[("double", "0.0"), ("double", "0.0")],
        Fold::SoftMax => &[("float", "-INFINITY"), ("float", "0.0f")],
    }
}

/// Joins partial results `b` into `a`.
pub fn merge(fold: Fold, a: &[String], b: &[String]) -> String {
    match fold {
        Fold::Sum | Fold::Total => format!("sum_merge({}, {});", a[0], b[0]),
        Fold::Prod => format!("prod_merge({}, {});", a[0], b[0]),
        Fold::Max => format!("max_merge({}, {});", a[0], b[0]),
        Fold::Min => format!("min_merge({}, {});", a[0], b[0]),
        Fold::ArgMax => format!("argmax_merge({}, {}, {}, {});", a[0], a[1], b[0], b[1]),
        Fold::ArgMin => format!("argmin_merge({}, {}, {}, {});", a[0], a[1], b[0], b[1]),
        Fold::Moments => format!("sum_merge({}, {}); sum_merge({}, {});", a[0], b[0], a[1], b[1]),
        Fold::SoftMax => format!("softmax_merge({}, {}, {}, {});", a[0], a[1], b[0], b[1]),
    }
}

/// Values that are kept in registers between the loops of a kernel.
#[derive(Clone, Debug, Default)]
pub struct Cache {
    /// What later loops need again.
    pub wanted: HashSet<(Vid, Vec<Ix>)>,
    /// Where it is, once it was computed.
    pub held: HashMap<(Vid, Vec<Ix>), Text>,
    /// Declarations to put before the first loop.
    pub declared: Vec<String>,
    /// Index of the loop's iteration, `it`.
    pub index: String,
    pub extent: String,
    /// Values are being put into the cache.
    pub filling: bool,
}

/// Writes the expressions of one kernel.
pub struct Writer<'a> {
    pub ir: &'a Ir,
    pub buffers: &'a HashMap<Vid, Buffer>,
    pub device: Device,
    pub vars: Vars,
    /// Lines by level.
    pub scopes: Vec<Vec<String>>,
    /// Lines that follow the element loop of the current vector.
    pub after: Vec<String>,
    known: Vec<HashMap<(Vid, Vec<Ix>), Text>>,
    defined: Vec<HashSet<VarId>>,
    /// Buffers that are read, in order of their first use.
    pub reads: Vec<Vid>,
    /// The variable of the element loop, and elements in a vector.
    pub lane: Option<VarId>,
    pub vector: i64,
    /// Variables that were merged into an inner one.
    pub merged: HashSet<VarId>,
    /// All address expressions, for merging.
    pub accesses: Vec<Ix>,
    /// What is read from memory and where, and whether in a window.
    pub loads: Vec<(Vid, Ix, bool)>,
    /// Results of folds of this kernel, valid at these coordinates (folded dimensions aside).
    pub results: HashMap<(Vid, usize), Text>,
    pub place: HashMap<Vid, Vec<Ix>>,
    pub cache: Option<Cache>,
    /// Every (value, place) that was asked for.
    pub asked: HashSet<(Vid, Vec<Ix>)>,
    /// Nothing may be hoisted above this level (inside a condition).
    floor: usize,
    counter: usize,
}

impl<'a> Writer<'a> {
    pub fn new(ir: &'a Ir, buffers: &'a HashMap<Vid, Buffer>, device: Device) -> Self {
        Self {
            ir,
            buffers,
            device,
            vars: Vars::default(),
            scopes: vec![vec![]; 3],
            after: vec![],
            known: vec![HashMap::new(); 3],
            defined: vec![HashSet::new(); 3],
            reads: vec![],
            lane: None,
            vector: 1,
            merged: HashSet::new(),
            accesses: vec![],
            loads: vec![],
            results: HashMap::new(),
            place: HashMap::new(),
            cache: None,
            asked: HashSet::new(),
            floor: 0,
            counter: 0,
        }
    }

    pub fn fresh(&mut self, prefix: &str) -> String {
        self.counter += 1;
        format!("{prefix}{}", self.counter)
    }

    /// Takes the lines of a level and forgets what was known there.
    pub fn take(&mut self, level: usize) -> Vec<String> {
        self.known[level].clear();
        self.defined[level].clear();
        std::mem::take(&mut self.scopes[level])
    }

    fn push(&mut self, level: usize, line: String) {
        self.scopes[level].push(line);
    }

    /// Makes sure that variables that need a division are set.
    fn define(&mut self, ix: &Ix) {
        for &var in ix.terms.keys() {
            let (name, level, kind) = {
                let v = &self.vars.list[var];
                (v.name.clone(), v.level, v.kind.clone())
            };
            let level = level.max(self.floor);
            if (0..=level).any(|l| self.defined[l].contains(&var)) {
                continue;
            }
            let (inner, text) = match kind {
                VarKind::Quotient(inner, by) => (inner, format!(" / {by}")),
                VarKind::Remainder(inner, by) => (inner, format!(" % {by}")),
                VarKind::Loop | VarKind::Loaded => continue,
            };
            self.accesses.push(inner.clone());
            let value = self.index(&inner);
            self.push(level, format!("const index_t {name} = ({value}){text};"));
            self.defined[level].insert(var);
        }
    }

    /// Text of an index.
    pub fn index(&mut self, ix: &Ix) -> String {
        self.define(ix);
        self.print(ix, None)
    }

    fn print(&self, ix: &Ix, lane: Option<&str>) -> String {
        let mut parts = vec![];
        for (&var, &factor) in &ix.terms {
            if self.merged.contains(&var) {
                continue;
            }
            let name = match lane {
                Some(name) if Some(var) == self.lane => name,
                _ => &self.vars.list[var].name,
            };
            parts.push(match factor {
                1 => name.to_owned(),
                -1 => format!("-{name}"),
                _ if factor.abs() > i64::from(i32::MAX) => format!("{name} * {factor}LL"),
                _ => format!("{name} * {factor}"),
            });
        }
        if ix.constant != 0 || parts.is_empty() {
            parts.push(ix.constant.to_string());
        }
        parts.join(" + ").replace("+ -", "- ")
    }

    /// Registers an address so that merging respects it.
    pub fn access(&mut self, ix: &Ix) {
        self.accesses.push(ix.clone());
    }

    /// Whether consecutive elements of the lane at `ix` can be one vector access.
    fn aligned(&self, ix: &Ix) -> bool {
        let Some(lane) = self.lane else { return false };
        self.device == Device::Cuda
            && self.vector > 1
            && self.scopes.len() == 3
            && self.floor == 0
            && ix.coefficient(lane) == 1
            && ix.constant % self.vector == 0
            && ix.terms.iter().all(|(&var, &factor)| {
                var == lane
                    || self.merged.contains(&var)
                    || (factor % self.vector == 0 && self.vars.list[var].level <= 1 && !self.derived_from_lane(var))
            })
    }

    fn derived_from_lane(&self, var: VarId) -> bool {
        self.vars.list[var].level >= 2
    }

    /// Element offset of coordinates in a buffer.
    fn address(&mut self, vid: Vid, at: &[Ix]) -> Ix {
        let strides = &self.buffers[&vid].strides;
        let shape = self.ir.shape(vid);
        let mut ix = Ix::default();
        for d in 0..shape.len() {
            if shape[d] > 1 {
                ix = ix.plus(&at[d].times(strides[d]));
            }
        }
        self.vars.whole(&ix)
    }

    fn convert(&self, text: String, dtype: Dtype) -> String {
        match dtype {
            Dtype::Float16 => format!("__half2float({text})"),
            Dtype::Bfloat16 => format!("__bfloat162float({text})"),
            Dtype::Bool => format!("({text} != 0)"),
            _ => text,
        }
    }

    fn load(&mut self, vid: Vid, at: &[Ix]) -> Text {
        if !self.reads.contains(&vid) {
            self.reads.push(vid);
        }
        let dtype = self.ir.vals[vid].dtype;
        let name = self.buffers[&vid].name.clone();
        let ix = self.address(vid, at);
        self.access(&ix);
        self.loads.push((vid, ix.clone(), self.scopes.len() > 3));
        if self.aligned(&ix) {
            let array = self.fresh("v");
            self.define(&ix);
            let base = self.print(&ix, Some("e0"));
            self.push(1, format!("{} {array}[VEC];", element(dtype)));
            self.push(1, format!("load_vector<VEC>({array}, {name} + ({base}));"));
            let text = self.convert(format!("{array}[j]"), dtype);
            return Text { text, level: 2, ty: ty(dtype) };
        }
        let level = self.vars.level(&ix).max(self.floor);
        let index = self.index(&ix);
        let value = self.convert(format!("{name}[{index}]"), dtype);
        let text = self.fresh("t");
        self.push(level, format!("const {} {text} = {value};", ty(dtype).name()));
        Text { text, level, ty: ty(dtype) }
    }

    /// Tells where a value is already.
    pub fn hold(&mut self, vid: Vid, at: &[Ix], text: Text) {
        self.known[text.level].insert((vid, at.to_vec()), text);
    }

    /// A value at coordinates.
    ///
    /// # Errors
    /// A sentence, where the value can't be computed in this kernel.
    pub fn value(&mut self, vid: Vid, at: &[Ix]) -> Result<Text, String> {
        if let Def::Num(number) = self.ir.def(vid) {
            return Ok(Text { text: literal(number.0), level: 0, ty: Ty::Float });
        }
        let key = (vid, at.to_vec());
        for known in &self.known {
            if let Some(text) = known.get(&key) {
                return Ok(text.clone());
            }
        }
        if let Some(cache) = &self.cache
            && let Some(text) = cache.held.get(&key)
            && !cache.filling
        {
            return Ok(text.clone());
        }
        self.asked.insert(key.clone());
        let view = matches!(self.ir.def(vid), Def::View(..));
        let keep = !view
            && self.scopes.len() == 3
            && self.cache.as_ref().is_some_and(|cache| cache.filling && cache.wanted.contains(&key));
        let filling = self.cache.as_ref().is_some_and(|cache| cache.filling);
        if keep && let Some(cache) = &mut self.cache {
            // What is below is held by what is kept here.
            cache.filling = false;
        }
        let mut text = self.compute(vid, at)?;
        if let Some(cache) = &mut self.cache {
            cache.filling = filling;
        }
        if keep && text.level == 2 && self.floor == 0 {
            let name = self.fresh("c");
            let (index, extent) = self.cache.as_ref().map(|c| (c.index.clone(), c.extent.clone())).unwrap_or_default();
            let slot = format!("{name}[{index}][j]");
            self.push(2, format!("{slot} = {};", text.text));
            if let Some(cache) = &mut self.cache {
                cache.declared.push(format!("{} {name}[{extent}][VEC];", text.ty.name()));
                cache.held.insert(key.clone(), Text { text: slot, level: 2, ty: text.ty });
            }
        }
        text.level = text.level.max(self.floor);
        if !view {
            self.known[text.level].insert(key, text.clone());
        }
        Ok(text)
    }

    fn compute(&mut self, vid: Vid, at: &[Ix]) -> Result<Text, String> {
        if self.buffers.contains_key(&vid) {
            return Ok(self.load(vid, at));
        }
        let dtype = self.ir.vals[vid].dtype;
        match self.ir.def(vid).clone() {
            Def::Num(number) => Ok(Text { text: literal(number.0), level: 0, ty: Ty::Float }),
            Def::Coord(dim) => {
                self.access(&at[dim]);
                let level = self.vars.level(&at[dim]);
                let index = self.index(&at[dim]);
                let cast = if ty(dtype) == Ty::Float { "float" } else { "long long" };
                Ok(Text { text: format!("(({cast})({index}))"), level, ty: ty(dtype) })
            }
            Def::View(source, _) => {
                let inner = self.ir.through(vid, at, &mut self.vars);
                self.value(source, &inner)
            }
            Def::Result(reduce, k) => {
                if let Some(text) = self.results.get(&(reduce, k)) {
                    let place = &self.place[&reduce];
                    let Def::Reduce { arg, dims, .. } = self.ir.def(reduce) else { return Err("not a fold".into()) };
                    let full = self.ir.shape(*arg);
                    let same = (0..full.len()).all(|d| full[d] == 1 || dims.contains(&d) || at[d] == place[d]);
                    return if same { Ok(text.clone()) } else { Err("a fold's result is used at another row".into()) };
                }
                Err("a fold's result is used before it is there".into())
            }
            Def::Point(op, args) => {
                let operation = operation(op).ok_or_else(|| format!("no text for {op}"))?;
                let out = ty(dtype);
                // Integers are compared with integers: a float doesn't hold large ones.
                let whole = out == Ty::Int
                    || (out == Ty::Bool
                        && args
                            .iter()
                            .any(|&arg| self.ir.number(arg).is_none() && ty(self.ir.vals[arg].dtype) == Ty::Int));
                let mut text = operation.c.to_owned();
                let mut level = 0;
                for (k, &arg) in args.iter().enumerate() {
                    let operand = match self.ir.number(arg) {
                        Some(number) if whole && number.fract() == 0.0 => {
                            Text { text: format!("{}LL", number as i64), level: 0, ty: Ty::Int }
                        }
                        Some(number) => Text { text: literal(number), level: 0, ty: Ty::Float },
                        None => self.value(arg, at)?,
                    };
                    level = level.max(operand.level);
                    text = text.replace(&format!("{{{k}}}"), &operand.text);
                }
                let level = level.max(self.floor);
                let name = self.fresh("t");
                self.push(level, format!("const {} {name} = {text};", out.name()));
                Ok(Text { text: name, level, ty: out })
            }
            Def::Pool { arg, weight, fold, window, dims } => self.pool((arg, weight), fold, &window, &dims, at),
            Def::Cat(parts, dim) => self.concatenation(&parts, dim, at, ty(dtype)),
            Def::Gather { source, index, dim } => {
                let picked = self.value(index, at)?;
                let size = self.ir.shape(source)[dim];
                let var = self.vars.add(picked.text, size, picked.level, VarKind::Loaded);
                let mut inner = at.to_vec();
                inner[dim] = Ix::var(var);
                self.value(source, &inner)
            }
            other => Err(format!("{} is not computed inside another kernel", kind(&other))),
        }
    }

    fn open(&mut self) -> usize {
        self.scopes.push(vec![]);
        self.known.push(HashMap::new());
        self.defined.push(HashSet::new());
        self.scopes.len() - 1
    }

    fn close(&mut self) -> Vec<String> {
        self.known.pop();
        self.defined.pop();
        self.scopes.pop().unwrap_or_default()
    }

    fn pool(
        &mut self,
        (arg, weight): (Vid, Option<Vid>),
        fold: Fold,
        window: &super::ir::Window,
        dims: &[usize],
        at: &[Ix],
    ) -> Result<Text, String> {
        let shape = self.ir.shape(arg).to_vec();
        let result = self.fresh("p");
        let start = accumulators(fold)[0].1;
        let parent = self.scopes.len() - 1;
        let level = self.open();
        let mut inner = at.to_vec();
        let mut place = vec![Ix::constant(0); at.len()];
        if weight.is_some() {
            place[0] = at[1].clone();
        }
        let mut loops = vec![];
        let mut guards = vec![];
        for (k, (&size, &d)) in window.size.iter().zip(dims).enumerate() {
            let mut ix = at[d].times(window.stride[k]).offset(-window.padding[k]);
            if size > 1 {
                let name = self.fresh("w");
                let var = self.vars.add(name.clone(), size, level, VarKind::Loop);
                ix = ix.plus(&Ix::var(var).times(window.dilation[k]));
                place[d] = Ix::var(var);
                loops.push((format!("for (int {name} = 0; {name} < {size}; ++{name})"), size));
            }
            // Reached beyond the edges?
            let low: i64 =
                ix.constant + ix.terms.iter().map(|(&var, &f)| f.min(0) * (self.vars.list[var].size - 1)).sum::<i64>();
            let high: i64 =
                ix.constant + ix.terms.iter().map(|(&var, &f)| f.max(0) * (self.vars.list[var].size - 1)).sum::<i64>();
            if low < 0 || high >= shape[d] {
                guards.push((ix.clone(), low < 0, (high >= shape[d]).then_some(shape[d])));
            }
            inner[d] = ix;
        }
        let mut condition = vec![];
        for (ix, low, high) in guards {
            self.access(&ix);
            let text = self.index(&ix);
            if low {
                condition.push(format!("({text}) >= 0"));
            }
            if let Some(size) = high {
                condition.push(format!("({text}) < {size}"));
            }
        }
        let outside = self.floor;
        if !condition.is_empty() {
            self.floor = level;
        }
        let value = self.value(arg, &inner);
        let factor = weight.map(|weight| self.value(weight, &place)).transpose();
        self.floor = outside;
        let body = self.close();
        let term = match (value?, factor?) {
            (value, Some(factor)) => format!("{} * {}", value.text, factor.text),
            (value, None) => value.text,
        };
        let prefix = if fold == Fold::Max { "max" } else { "sum" };
        let mut text = vec![format!("float {result} = {start};")];
        // From the innermost loop outward as long as the body stays short: loads of a row are in flight together.
        let mut trips: i64 = loops.iter().map(|(_, size)| size).product();
        for (header, size) in loops {
            if self.device == Device::Cuda && trips <= 64 {
                text.push("#pragma unroll".into());
            }
            text.push(header);
            trips /= size;
        }
        text.push("{".into());
        if !condition.is_empty() {
            text.push(format!("if ({}) {{", condition.join(" && ")));
        }
        text.extend(body);
        text.push(format!("{prefix}_add({result}, {term});"));
        if !condition.is_empty() {
            text.push("}".into());
        }
        text.push("}".into());
        self.scopes[parent].extend(text);
        Ok(Text { text: result, level: parent, ty: Ty::Float })
    }

    fn concatenation(&mut self, parts: &[Vid], dim: usize, at: &[Ix], out: Ty) -> Result<Text, String> {
        let result = self.fresh("s");
        let parent = self.scopes.len() - 1;
        self.access(&at[dim]);
        let coordinate = self.index(&at[dim]);
        let mut text = vec![format!("{} {result};", out.name())];
        let mut start = 0;
        for (k, &part) in parts.iter().enumerate() {
            let size = self.ir.shape(part)[dim];
            let level = self.open();
            let outside = std::mem::replace(&mut self.floor, level);
            let mut inner = at.to_vec();
            inner[dim] = at[dim].offset(-start);
            let value = self.value(part, &inner);
            self.floor = outside;
            let body = self.close();
            let value = value?;
            start += size;
            text.push(match (k, k + 1 == parts.len()) {
                (0, _) => format!("if ({coordinate} < {start}) {{"),
                (_, false) => format!("}} else if ({coordinate} < {start}) {{"),
                (_, true) => "} else {".into(),
            });
            text.extend(body);
            text.push(format!("{result} = {};", value.text));
        }
        text.push("}".into());
        self.scopes[parent].extend(text);
        Ok(Text { text: result, level: parent, ty: out })
    }

    /// Stores a value at level 2 (or as a vector after the element loop), at the address `ix` of `name`.
    pub fn store(&mut self, name: &str, dtype: Dtype, ix: &Ix, value: &Text) {
        self.access(ix);
        let value = match dtype {
            Dtype::Float16 => format!("__float2half({})", value.text),
            Dtype::Bfloat16 => format!("__float2bfloat16({})", value.text),
            Dtype::Float32 if value.ty == Ty::Float => value.text.clone(),
            _ => format!("({}){}", element(dtype), value.text),
        };
        if self.aligned(ix) {
            let array = self.fresh("o");
            self.define(ix);
            let base = self.print(ix, Some("e0"));
            self.push(1, format!("{} {array}[VEC];", element(dtype)));
            self.push(2, format!("{array}[j] = {value};"));
            self.after.push(format!("store_vector<VEC>({name} + ({base}), {array});"));
        } else {
            let index = self.index(ix);
            self.push(2, format!("{name}[{index}] = {value};"));
        }
    }

    /// Adds the element `value` (fold's `at` in its argument) to accumulators `names`.
    pub fn accumulate(&mut self, reduce: Vid, names: &[String], value: &Text, at: &[Ix], pivot: &str) {
        let Def::Reduce { fold, arg, dims } = self.ir.def(reduce).clone() else { return };
        let line = match fold {
            Fold::Sum | Fold::Total => format!("sum_add({}, {});", names[0], value.text),
            Fold::Prod => format!("prod_add({}, {});", names[0], value.text),
            Fold::Max => format!("max_add({}, {});", names[0], value.text),
            Fold::Min => format!("min_add({}, {});", names[0], value.text),
            Fold::Moments => format!("moments_add({}, {}, {}, {pivot});", names[0], names[1], value.text),
            Fold::SoftMax => format!("softmax_add({}, {}, {});", names[0], names[1], value.text),
            Fold::ArgMax | Fold::ArgMin => {
                let shape = self.ir.shape(arg);
                let mut linear = Ix::default();
                for &d in &dims {
                    linear = linear.times(shape[d]).plus(&at[d]);
                }
                self.access(&linear);
                let index = self.index(&linear);
                let name = if fold == Fold::ArgMax { "argmax" } else { "argmin" };
                format!("{name}_merge({}, {}, {}, (index_t)({index}));", names[0], names[1], value.text)
            }
        };
        self.push(2, line);
    }

    /// Texts of a fold's results from its accumulators.
    pub fn finish(&self, reduce: Vid, names: &[String], pivot: &str) -> Vec<(String, Ty)> {
        let Def::Reduce { fold, arg, dims } = self.ir.def(reduce) else { return vec![] };
        let count: i64 = dims.iter().map(|&d| self.ir.shape(*arg)[d]).product();
        match fold {
            Fold::Sum => vec![(format!("(float){}", names[0]), Ty::Float)],
            Fold::ArgMax | Fold::ArgMin => vec![(names[1].clone(), Ty::Int)],
            Fold::Total => vec![(names[0].clone(), Ty::Int)],
            Fold::Moments => {
                let each = format!("{:?}", 1.0 / count as f64);
                let mean = format!("({pivot} + {} * {each})", names[0]);
                let square = format!("({1} - {0} * {0} * {each}) * {each}", names[0], names[1]);
                vec![
                    (format!("(float){mean}"), Ty::Float),
                    (format!("(float)({mean} - (float){mean})"), Ty::Float),
                    (format!("pt_clamp_min((float)({square}), 0.0f)"), Ty::Float),
                ]
            }
            _ => names.iter().map(|name| (name.clone(), Ty::Float)).collect(),
        }
    }
}

/// A word for what a value is.
pub const fn kind(def: &Def) -> &'static str {
    match def {
        Def::Input(..) => "an input",
        Def::Param(..) => "a parameter",
        Def::Num(_) => "a number",
        Def::Coord(_) => "a coordinate",
        Def::Point(..) => "an element-wise operation",
        Def::View(..) => "a view",
        Def::Reduce { .. } | Def::Result(..) => "a fold",
        Def::Pool { .. } => "a pooling",
        Def::Scan { .. } => "a scan",
        Def::Cat(..) => "a concatenation",
        Def::Gather { .. } => "a gather",
        Def::Matmul { .. } => "a matrix product",
        Def::Convolution { .. } => "a convolution",
    }
}

/// Contiguous strides, for buffers that the candidate makes.
pub fn own(name: String, shape: &[i64]) -> Buffer {
    Buffer { name, strides: contiguous(shape) }
}

impl Writer<'_> {
    /// Takes the lines of level 0 but remembers what they define: they stay in scope for the whole kernel.
    pub fn take_zero(&mut self) -> Vec<String> {
        std::mem::take(&mut self.scopes[0])
    }
}
