//! From values to steps: which values are stored, which kernels and library calls make them.
//!
//! Everything element-wise is computed where it is needed; what is stored is what libraries need, results of
//! folds, scans and overlapping windows, and the outputs. Knows nothing of how a kernel's text comes about.

use std::collections::{HashMap, HashSet};

use super::emit::{Buffer, own};
use super::gemm::Product;
use super::index::{contiguous, numel};
use super::ir::{Def, Fold, Ir, Vid, View};
use super::kernels::{Kernel, Knob, Spec, Walk, build, refine, scan};
use super::ops::operation;
use super::python::attribute;
use super::tile;
use super::{Declined, Facts};
use crate::plan::{Device, Dtype};

/// The body of a candidate.
#[derive(Debug, Default)]
pub struct Steps {
    /// C functions.
    pub source: String,
    /// Lines of `forward`, without its return.
    pub lines: Vec<String>,
    pub knobs: Vec<Knob>,
    /// What each step covers, in words.
    pub covered: Vec<String>,
    /// Expressions of the outputs.
    pub outputs: Vec<String>,
}

pub struct Scheduler<'a> {
    pub ir: &'a Ir,
    pub device: Device,
    pub facts: &'a Facts,
    pub arguments: &'a [String],
    buffers: HashMap<Vid, Buffer>,
    /// Python expression of a buffer, by its C name.
    python: HashMap<String, String>,
    steps: Steps,
    kernels: usize,
}

/// What a value needs before a kernel can compute it.
#[derive(Default)]
struct Needs {
    /// Results of folds, and whether a window or a choice lies between.
    folds: Vec<(Vid, bool)>,
    heavy: Vec<Vid>,
    derived: Vec<Vid>,
    leaves: Vec<Vid>,
    /// Poolings, the one around each if there is one, and whether a fold lies between.
    pools: Vec<(Vid, Option<Vid>)>,
}

/// PyTorch's name of a dtype.
fn torch(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Float32 => "torch.float32",
        Dtype::Float16 => "torch.float16",
        Dtype::Bfloat16 => "torch.bfloat16",
        Dtype::Float64 => "torch.float64",
        Dtype::Int64 => "torch.int64",
        Dtype::Int32 => "torch.int32",
        Dtype::Int16 => "torch.int16",
        Dtype::Int8 => "torch.int8",
        Dtype::Uint8 => "torch.uint8",
        Dtype::Bool => "torch.bool",
    }
}

fn tuple(items: &[i64]) -> String {
    match items {
        [one] => format!("({one},)"),
        _ => format!("({})", items.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
    }
}

fn safe(name: &str) -> String {
    let cleaned: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    let letter_digits = cleaned.len() > 1 && cleaned[1..].chars().all(|c| c.is_ascii_digit());
    let reserved = [
        "e", "j", "u", "n", "o", "h", "it", "row", "lane", "live", "part", "from", "to", "acc", "carry", "before",
        "warps", "total", "totals", "side", "first", "task", "float", "int", "bool", "short", "long", "double", "char",
        "const", "auto", "left", "VEC", "ITEMS", "CHUNKS", "SPLITS", "signed", "index_t", "s", "t", "k", "at_x",
        "at_y", "from_x", "from_y", "tx", "ty", "place", "block", "rest",
    ];
    if letter_digits || reserved.contains(&cleaned.as_str()) { format!("in_{cleaned}") } else { cleaned }
}

/// `full` cut so finely that it also lines up with `target`, if that has the same elements.
fn refined(full: &[i64], folded: &[usize], target: &[i64]) -> (Vec<i64>, Vec<usize>) {
    let unchanged = (full.to_vec(), folded.to_vec());
    if numel(full) != numel(target) {
        return unchanged;
    }
    let Some(fine) = refine(full, target) else { return unchanged };
    let (mut at, mut dims) = (0, vec![]);
    for (d, &size) in full.iter().enumerate() {
        let mut product = 1;
        while product < size && at < fine.len() {
            product *= fine[at];
            if folded.contains(&d) {
                dims.push(at);
            }
            at += 1;
        }
        if product != size {
            return unchanged;
        }
    }
    (fine, dims)
}

impl<'a> Scheduler<'a> {
    pub fn new(ir: &'a Ir, device: Device, facts: &'a Facts, arguments: &'a [String]) -> Self {
        Self {
            ir,
            device,
            facts,
            arguments,
            buffers: HashMap::new(),
            python: HashMap::new(),
            steps: Steps::default(),
            kernels: 0,
        }
    }

    /// Makes the steps for `outputs`.
    ///
    /// # Errors
    /// What the policy can't write.
    pub fn run(mut self, outputs: &[Vid]) -> Result<Steps, Declined> {
        let declined = |reason: String| Declined { operator: "the task".into(), line: None, reason };
        for &vid in outputs {
            let text = self.stored(vid).map_err(declined)?;
            self.steps.outputs.push(text);
        }
        Ok(self.steps)
    }

    /// A contiguous tensor in Python that holds a value.
    fn stored(&mut self, vid: Vid) -> Result<String, String> {
        // A reshape of something stored is a view.
        let mut base = vid;
        while let Def::View(source, View::Reshape) = self.ir.def(base) {
            base = *source;
        }
        let base = if matches!(self.ir.def(base), Def::View(..) | Def::Num(_)) { vid } else { base };
        self.need(base)?;
        let name = self.python_of(base);
        Ok(if self.ir.shape(base) == self.ir.shape(vid) {
            name
        } else {
            format!("{name}.view({})", tuple(self.ir.shape(vid)))
        })
    }

    fn python_of(&self, vid: Vid) -> String {
        let name = &self.buffers[&vid].name;
        self.python.get(name).cloned().unwrap_or_else(|| name.clone())
    }

    fn leaf(&mut self, vid: Vid) {
        if self.buffers.contains_key(&vid) {
            return;
        }
        let (name, python, strides) = match self.ir.def(vid) {
            Def::Input(i, strides) => {
                let argument = self.arguments.get(*i).cloned().unwrap_or_else(|| format!("input{i}"));
                (safe(&argument), argument, strides.clone())
            }
            Def::Param(name, strides) => (safe(name), attribute(name), strides.clone()),
            _ => return,
        };
        let name = if self.python.contains_key(&name) { format!("{name}_{vid}") } else { name };
        self.python.insert(name.clone(), python);
        self.buffers.insert(vid, Buffer { name, strides });
    }

    /// Makes sure that a value is stored.
    fn need(&mut self, vid: Vid) -> Result<(), String> {
        if self.buffers.contains_key(&vid) {
            return Ok(());
        }
        match self.ir.def(vid).clone() {
            Def::Input(..) | Def::Param(..) => {
                self.leaf(vid);
                Ok(())
            }
            Def::Matmul { a, b, bias } => self.matmul(vid, a, b, bias),
            Def::Convolution { x, weight, bias, conv } => {
                let bias = bias.map(|b| self.operand(b)).transpose()?;
                self.convolution(vid, vid, x, weight, bias, &conv)
            }
            Def::Scan { arg, .. } => {
                self.ready(&[arg], true)?;
                let (name, output) = self.names();
                let comment = self.describe(&[vid]);
                let kernel = scan(self.ir, &self.buffers, self.device, vid, &name, &output, comment)?;
                self.allocate(vid, &output);
                self.add(kernel, &[vid], "scan");
                Ok(())
            }
            Def::Result(fold, _) => self.need_fold(fold),
            // A convolution with nothing to fuse but its bias takes it along.
            Def::Point("add", args) if self.bias_of(&args).is_some() && !self.buffers.contains_key(&args[0]) => {
                let bias = self.bias_of(&args).unwrap_or(args[1]);
                let Def::Convolution { x, weight, conv, .. } = self.ir.def(args[0]).clone() else {
                    return self.produce(&[vid]);
                };
                self.leaf(bias);
                let bias = self.python_of(bias);
                self.convolution(vid, args[0], x, weight, Some(bias), &conv)
            }
            _ => self.produce(&[vid]),
        }
    }

    /// The bias parameter in `convolution + bias`.
    fn bias_of(&self, args: &[Vid]) -> Option<Vid> {
        let Def::Convolution { bias: None, .. } = self.ir.def(args[0]) else { return None };
        let mut at = *args.get(1)?;
        let Def::Convolution { conv, .. } = self.ir.def(args[0]) else { return None };
        let rank = self.ir.shape(args[0]).len();
        let channels = self.ir.shape(args[0]).get(if conv.channels_last { rank - 1 } else { 1 }).copied()?;
        if conv.channels_last
            && let Def::View(source, View::Permute(order)) = self.ir.def(at)
        {
            let last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
            if *order != last {
                return None;
            }
            at = *source;
        } else if conv.channels_last {
            return None;
        }
        while let Def::View(source, View::Expand | View::Reshape) = self.ir.def(at) {
            if matches!(self.ir.def(at), Def::View(_, View::Reshape))
                && self.ir.shape(at).iter().enumerate().any(|(d, &size)| d != 1 && size != 1)
            {
                return None;
            }
            at = *source;
        }
        (matches!(self.ir.def(at), Def::Param(..)) && self.ir.shape(at) == [channels]).then_some(at)
    }

    fn need_fold(&mut self, fold: Vid) -> Result<(), String> {
        let Def::Reduce { fold: kind, .. } = self.ir.def(fold) else { return Err("not a fold".into()) };
        let mut results = vec![];
        for k in 0..kind.results() {
            let found = (0..self.ir.vals.len()).find(|&v| *self.ir.def(v) == Def::Result(fold, k));
            results.extend(found);
        }
        if results.iter().all(|r| self.buffers.contains_key(r)) {
            return Ok(());
        }
        self.produce(&results)
    }

    fn parameters_only(&self, vid: Vid) -> bool {
        match self.ir.def(vid) {
            Def::Input(..) | Def::Coord(_) => false,
            Def::Num(_) | Def::Param(..) => true,
            _ => self.ir.args(vid).into_iter().all(|arg| self.parameters_only(arg)),
        }
    }

    /// A value of parameters alone as a Python expression in float64, if the policy can say it.
    fn derived(&self, vid: Vid) -> Option<String> {
        Some(match self.ir.def(vid) {
            Def::Param(name, _) => format!("{}.double()", attribute(name)),
            Def::Num(number) => format!("{:?}", number.0).replace("inf", "float(\"inf\")"),
            Def::View(source, view) => {
                let inner = self.derived(*source)?;
                let shape = tuple(self.ir.shape(vid));
                match view {
                    View::Reshape => format!("{inner}.reshape({shape})"),
                    View::Expand => {
                        if matches!(self.ir.def(*source), Def::Num(_)) {
                            inner
                        } else {
                            format!("{inner}.expand({shape})")
                        }
                    }
                    View::Permute(order) => {
                        format!(
                            "{inner}.permute({})",
                            order.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")
                        )
                    }
                    View::Slice { .. } | View::Flip(_) => return None,
                }
            }
            Def::Point(op, args) => {
                let mut text = operation(op)?.python.to_owned();
                if text.is_empty() {
                    return None;
                }
                for (k, &arg) in args.iter().enumerate() {
                    let operand = match self.ir.number(arg) {
                        // A method needs a tensor.
                        Some(number) if text.contains(&format!("{{{k}}}.")) => {
                            format!("torch.tensor({number:?}, dtype=torch.float64)")
                        }
                        Some(number) => format!("{number:?}"),
                        None => self.derived(arg)?,
                    };
                    text = text.replace(&format!("{{{k}}}"), &operand);
                }
                text
            }
            Def::Result(fold, 0) => {
                let Def::Reduce { fold: Fold::Sum, arg, dims } = self.ir.def(*fold) else { return None };
                if let Some(number) = self.ir.number(*arg) {
                    let count: i64 = dims.iter().map(|&d| self.ir.shape(*arg)[d]).product();
                    return Some(format!("torch.full({}, {:?})", tuple(self.ir.shape(vid)), number * count as f64));
                }
                let dims = dims.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
                format!("{}.sum(dim=({dims},), keepdim=True)", self.derived(*arg)?)
            }
            _ => return None,
        })
    }

    fn collect(&self, vid: Vid, hidden: bool, around: Option<Vid>, seen: &mut HashSet<(Vid, bool)>, needs: &mut Needs) {
        if self.buffers.contains_key(&vid) || !seen.insert((vid, hidden)) {
            return;
        }
        match self.ir.def(vid) {
            Def::Num(_) | Def::Coord(_) => {}
            Def::Input(..) | Def::Param(..) => needs.leaves.push(vid),
            Def::Point(..) | Def::Result(..) if self.parameters_only(vid) && self.derived(vid).is_some() => {
                needs.derived.push(vid);
            }
            Def::Result(fold, _) => needs.folds.push((*fold, hidden)),
            Def::Matmul { .. } | Def::Convolution { .. } | Def::Scan { .. } => needs.heavy.push(vid),
            Def::Pool { arg, weight, .. } => {
                needs.pools.push((vid, around));
                self.collect(*arg, true, Some(vid), seen, needs);
                if let Some(weight) = weight {
                    self.collect(*weight, true, around, seen, needs);
                }
            }
            Def::Cat(parts, _) => {
                for &part in parts {
                    self.collect(part, true, around, seen, needs);
                }
            }
            Def::Gather { source, index, .. } => {
                self.collect(*index, hidden, around, seen, needs);
                self.collect(*source, true, around, seen, needs);
            }
            _ => {
                for arg in self.ir.args(vid) {
                    self.collect(arg, hidden, around, seen, needs);
                }
            }
        }
    }

    fn needs(&self, vids: &[Vid]) -> Needs {
        let mut needs = Needs::default();
        let mut seen = HashSet::new();
        for &vid in vids {
            self.collect(vid, false, None, &mut seen, &mut needs);
        }
        needs
    }

    /// Stores what a kernel for `vids` can't compute itself. With `all`, folds and poolings too.
    fn ready(&mut self, vids: &[Vid], all: bool) -> Result<(), String> {
        loop {
            let needs = self.needs(vids);
            for &leaf in &needs.leaves {
                self.leaf(leaf);
            }
            if let Some(&vid) = needs.heavy.first() {
                self.need(vid)?;
                continue;
            }
            if let Some(&vid) = needs.derived.first() {
                let text = self.derived(vid).unwrap_or_default();
                let name = format!("c{}", self.kernels);
                self.kernels += 1;
                self.steps.lines.push(format!("{name} = {text}.float().contiguous()  # known from parameters alone"));
                self.buffers.insert(vid, own(format!("{name}_"), self.ir.shape(vid)));
                self.python.insert(format!("{name}_"), name);
                continue;
            }
            if all && let Some((fold, _)) = needs.folds.first() {
                self.need_fold(*fold)?;
                continue;
            }
            // A fold inside a window would be computed once for each window.
            if let Some((fold, _)) = needs.folds.iter().find(|(_, hidden)| *hidden) {
                self.need_fold(*fold)?;
                continue;
            }
            // So would a pooling inside overlapping windows.
            let overlapped = needs.pools.iter().find(|(_, around)| {
                around.is_some_and(|outer| match self.ir.def(outer) {
                    Def::Pool { window, .. } => !window.disjoint(),
                    _ => false,
                })
            });
            if let Some((pool, _)) = overlapped {
                self.need(*pool)?;
                continue;
            }
            if all
                && let Some((pool, _)) =
                    needs.pools.iter().find(|(pool, around)| around.is_none() && !vids.contains(pool))
            {
                self.need(*pool)?;
                continue;
            }
            return Ok(());
        }
    }

    fn names(&mut self) -> (String, String) {
        let number = self.kernels;
        self.kernels += 1;
        (format!("k{number}"), format!("y{number}_"))
    }

    fn allocate(&mut self, vid: Vid, name: &str) {
        let python = name.trim_end_matches('_').to_owned();
        let shape = tuple(self.ir.shape(vid));
        self.steps.lines.push(format!("{python} = kf.empty({shape}, dtype={})", torch(self.ir.vals[vid].dtype)));
        self.buffers.insert(vid, own(name.to_owned(), self.ir.shape(vid)));
        self.python.insert(name.to_owned(), python);
    }

    /// Writes one kernel for values that share rows.
    fn produce(&mut self, outputs: &[Vid]) -> Result<(), String> {
        self.ready(outputs, false)?;
        // A dependency may have made it meanwhile.
        if outputs.iter().all(|vid| self.buffers.contains_key(vid)) {
            return Ok(());
        }
        let needs = self.needs(outputs);
        let target = numel(self.ir.shape(outputs[0]));
        let key = |vid: Vid| match self.ir.def(vid) {
            Def::Reduce { arg, dims, .. } => (self.ir.shape(*arg).to_vec(), dims.clone()),
            _ => (vec![], vec![]),
        };
        let mut folds: Vec<Vid> = needs.folds.iter().map(|(fold, _)| *fold).collect();
        folds.sort_by_key(|&fold| std::cmp::Reverse(numel(&key(fold).0)));
        let fits = |fold: Vid| {
            let full = numel(&key(fold).0);
            target == full || target == numel(self.ir.shape(fold))
        };
        if let Some(&chosen) = folds.iter().find(|&&fold| fits(fold)) {
            let (full, folded) = key(chosen);
            // Other folds at this level that don't share rows come first.
            if let Some(&other) = folds.iter().find(|&&fold| key(fold) != (full.clone(), folded.clone())) {
                self.need_fold(other)?;
                return self.produce(outputs);
            }
            // Folds that these need: earlier stages where they share rows.
            let mut stages: Vec<Vid> = vec![];
            let mut queue = folds.clone();
            while let Some(fold) = queue.pop() {
                let Def::Reduce { arg, .. } = *self.ir.def(fold) else { continue };
                self.ready(&[arg], false)?;
                let inner = self.needs(&[arg]);
                for (nested, hidden) in inner.folds {
                    if hidden || key(nested) != (full.clone(), folded.clone()) {
                        self.need_fold(nested)?;
                        return self.produce(outputs);
                    }
                    queue.push(nested);
                }
                stages.retain(|&s| s != fold);
                stages.insert(0, fold);
            }
            let rows: i64 = (0..full.len()).filter(|d| !folded.contains(d)).map(|d| full[d]).product();
            let length: i64 = folded.iter().map(|&d| full[d]).product();
            let last = (0..full.len()).rfind(|&d| full[d] > 1).unwrap_or(0);
            let is_row = target == rows && rows != rows * length;
            // Poolings that would be computed more than once, or that would hide the parallelism, are stored.
            let args: Vec<Vid> = stages
                .iter()
                .filter_map(|&s| match self.ir.def(s) {
                    Def::Reduce { arg, .. } => Some(*arg),
                    _ => None,
                })
                .collect();
            let mut sources = args.clone();
            sources.extend(outputs);
            let pools = self.needs(&sources).pools;
            let once = stages.len() == 1 && is_row && rows >= 64 * 1024;
            if let Some((pool, _)) = pools.iter().find(|(pool, around)| {
                around.is_none()
                    && !(once && matches!(self.ir.def(*pool), Def::Pool { window, .. } if window.disjoint()))
            }) {
                self.need(*pool)?;
                return self.produce(outputs);
            }
            let lanes = self.facts.multiprocessors.max(1);
            let walk = if folded.contains(&last) {
                let (few, long) = match self.device {
                    Device::Cuda => (4 * lanes, self.facts.long_row),
                    Device::Cpu => (2 * self.facts.threads.max(1), self.facts.long_row),
                };
                if rows < few && length > long {
                    let splits = match self.device {
                        Device::Cuda => (8 * lanes / rows).clamp(1, (length / 4096).max(1)),
                        Device::Cpu => (self.facts.threads * 4).max(length / 65536) / rows.min(4),
                    };
                    Walk::Split(splits.max(1))
                } else {
                    Walk::Rows
                }
            } else {
                // Too few columns for a thread each to keep memory busy.
                let few = if is_row { 64 * 1024 } else { 16 * 1024 };
                if self.device == Device::Cuda && rows < few && length >= 256 {
                    let blocks = (rows + 63) / 64;
                    Walk::Bands((8 * lanes / blocks).clamp(1, length / 64))
                } else {
                    Walk::Columns
                }
            };
            if let Walk::Split(_) | Walk::Bands(_) = walk
                && (!is_row || stages.len() > 1)
            {
                // Few long rows: statistics first, by many blocks, then the rest element by element.
                for stage in stages {
                    self.need_fold(stage)?;
                }
                return self.produce(outputs);
            }
            let (name, output) = self.names();
            let named: Vec<(Vid, String)> = outputs
                .iter()
                .enumerate()
                .map(|(k, &v)| (v, if k == 0 { output.clone() } else { format!("{output}{k}_") }))
                .collect();
            // Dimensions in which both the folded values and what is stored have simple places.
            let shape = full.clone();
            let (full, folded) = refined(&full, &folded, self.ir.shape(outputs[0]));
            let spec = Spec {
                name,
                walk,
                full,
                folded,
                shape,
                stages: stages.clone(),
                outputs: named.clone(),
                comment: self.describe(outputs),
            };
            match build(self.ir, &self.buffers, self.device, self.facts, &spec) {
                Ok(kernel) => {
                    for (vid, name) in &named {
                        self.allocate(*vid, name);
                    }
                    let word = match walk {
                        Walk::Rows => "fold along rows",
                        Walk::Columns => "fold across columns",
                        Walk::Split(_) | Walk::Bands(_) => "fold in two steps",
                        Walk::Elements => "element-wise",
                    };
                    self.add(kernel, outputs, word);
                    return Ok(());
                }
                Err(reason) => {
                    // Where rows don't match after all, the folds are stored and the rest is element-wise.
                    if stages
                        .iter()
                        .any(|stage| outputs.iter().any(|&o| matches!(self.ir.def(o), Def::Result(r, _) if r == stage)))
                    {
                        return Err(reason);
                    }
                    for stage in stages {
                        self.need_fold(stage)?;
                    }
                    return self.produce(outputs);
                }
            }
        }
        if let Some(&fold) = folds.first() {
            self.need_fold(fold)?;
            return self.produce(outputs);
        }
        // Element-wise. A pooling that is read more than once for each of its elements is stored.
        for (pool, around) in needs.pools {
            if around.is_none() && numel(self.ir.shape(pool)) != target {
                self.need(pool)?;
                return self.produce(outputs);
            }
        }
        let (name, output) = self.names();
        let spec = Spec {
            name,
            walk: Walk::Elements,
            full: self.ir.shape(outputs[0]).to_vec(),
            folded: vec![],
            shape: self.ir.shape(outputs[0]).to_vec(),
            stages: vec![],
            outputs: vec![(outputs[0], output.clone())],
            comment: self.describe(outputs),
        };
        // What is read in another order than it is written goes through tiles.
        let tiled = if self.device == Device::Cuda { tile::build(self.ir, &self.buffers, &spec)? } else { None };
        let word = if tiled.is_some() { "transposing, element-wise" } else { "element-wise" };
        let kernel = match tiled {
            Some(kernel) => kernel,
            None => build(self.ir, &self.buffers, self.device, self.facts, &spec)?,
        };
        self.allocate(outputs[0], &output);
        self.add(kernel, outputs, word);
        Ok(())
    }

    /// Adds a kernel's text, its scratch tensors and its launches.
    fn add(&mut self, kernel: Kernel, outputs: &[Vid], word: &str) {
        for (name, count, kind) in &kernel.scratch {
            let dtype = if *kind == "index" {
                if self.facts.wide || self.device == Device::Cpu { "torch.int64" } else { "torch.int32" }
            } else {
                kind
            };
            self.steps.lines.push(format!("{name} = kf.empty(({count},), dtype={dtype})"));
        }
        for launch in &kernel.launches {
            let args: Vec<String> =
                launch.args.iter().map(|a| self.python.get(a).cloned().unwrap_or_else(|| a.clone())).collect();
            let call = match self.device {
                Device::Cuda => {
                    format!("KERNELS.{}[{}, {}]({})", launch.function, launch.grid, launch.block, args.join(", "))
                }
                Device::Cpu => format!("KERNELS.{}({})", launch.function, args.join(", ")),
            };
            self.steps.lines.push(call);
        }
        self.steps.source.push_str(&kernel.source);
        self.steps.source.push('\n');
        self.steps.knobs.extend(kernel.knobs);
        let what = self.describe(outputs);
        self.steps.covered.push(format!("{word}: {what}"));
    }

    /// The ATen operators that a kernel covers, in order.
    fn describe(&self, outputs: &[Vid]) -> String {
        let mut seen = HashSet::new();
        let mut stack = outputs.to_vec();
        let mut found = vec![];
        let mut first = true;
        while let Some(vid) = stack.pop() {
            let stored = self.buffers.contains_key(&vid) && !outputs.contains(&vid);
            let heavy = matches!(self.ir.def(vid), Def::Matmul { .. } | Def::Convolution { .. }) && !first;
            first = false;
            if stored || heavy || !seen.insert(vid) || self.parameters_only(vid) {
                continue;
            }
            found.push(vid);
            stack.extend(self.ir.args(vid));
        }
        found.sort_unstable();
        let mut words: Vec<&str> = vec![];
        for vid in found {
            if let Some(label) = self.ir.labels.get(&vid)
                && !matches!(
                    label.as_str(),
                    "view" | "unsqueeze" | "squeeze" | "t" | "expand" | "permute" | "_unsafe_view" | "transpose"
                )
            {
                words.push(label);
            }
        }
        // A change of layout is worth a word where it is all that a kernel does.
        if words.iter().any(|&word| word != "channels_last") {
            words.retain(|&word| word != "channels_last");
        }
        words.dedup();
        if words.is_empty() { "intermediate values".into() } else { words.join(", ") }
    }

    /// A Python expression of a value for a library call, and whether it is contiguous.
    fn view(&mut self, vid: Vid) -> Result<(String, bool), String> {
        if let Def::View(source, view) = self.ir.def(vid).clone()
            && !self.buffers.contains_key(&vid)
            && !matches!(self.ir.def(source), Def::Num(_))
        {
            let shape = tuple(self.ir.shape(vid));
            let list = |items: &[usize]| items.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            match view {
                View::Permute(order) => {
                    let (inner, _) = self.view(source)?;
                    return Ok((format!("{inner}.permute({})", list(&order)), false));
                }
                // Of what lies in another order a reshape is a copy, by a kernel from what there is.
                View::Reshape
                    if !matches!(self.ir.def(source), Def::View(..)) || self.buffers.contains_key(&source) =>
                {
                    let (inner, contiguous) = self.view(source)?;
                    if contiguous {
                        return Ok((format!("{inner}.view({shape})"), true));
                    }
                }
                View::Expand => {
                    let (inner, _) = self.view(source)?;
                    return Ok((format!("{inner}.expand({shape})"), false));
                }
                View::Slice { dim, start, step: 1 } => {
                    let (inner, _) = self.view(source)?;
                    let length = self.ir.shape(vid)[dim];
                    return Ok((format!("{inner}.narrow({dim}, {start}, {length})"), false));
                }
                View::Reshape | View::Slice { .. } | View::Flip(_) => {}
            }
        }
        if self.parameters_only(vid) && !matches!(self.ir.def(vid), Def::Param(..)) {
            self.ready(&[vid], false)?;
        }
        self.need(vid)?;
        let straight = self.buffers[&vid].strides == contiguous(self.ir.shape(vid));
        Ok((self.python_of(vid), straight))
    }

    /// Whether a stored value, or what it is a reshape of, isn't contiguous.
    fn strided(&self, vid: Vid) -> bool {
        match (self.buffers.get(&vid), self.ir.def(vid)) {
            (Some(buffer), _) => buffer.strides != contiguous(self.ir.shape(vid)),
            (None, Def::View(source, View::Reshape)) => self.strided(*source),
            _ => false,
        }
    }

    fn operand(&mut self, vid: Vid) -> Result<String, String> {
        Ok(self.view(vid)?.0)
    }

    fn library(&mut self, vid: Vid, call: &str) {
        let name = format!("h{}", self.kernels);
        self.kernels += 1;
        self.steps.lines.push(format!("{name} = {call}"));
        let label = self.ir.labels.get(&vid).cloned().unwrap_or_default();
        self.steps.covered.push(format!("library: {label}"));
        self.buffers.insert(vid, own(format!("{name}_"), self.ir.shape(vid)));
        self.python.insert(format!("{name}_"), name);
    }

    /// Writes a matrix product for tensor cores, where that is asked for and its operands are fit for it.
    fn product(&mut self, vid: Vid, a: Vid, b: Vid, bias: Option<Vid>) -> Result<bool, String> {
        let single = |v: Vid| self.ir.vals[v].dtype == Dtype::Float32;
        if !self.facts.products || self.device != Device::Cuda || ![vid, a, b].into_iter().all(single) {
            return Ok(false);
        }
        let (shape, rank) = (self.ir.shape(vid).to_vec(), self.ir.shape(vid).len());
        // An operand with its last two dimensions exchanged is taken as it lies.
        let lies = |operand: Vid| match self.ir.def(operand) {
            Def::View(source, View::Permute(order)) if order.ends_with(&[rank - 1, rank - 2]) => (*source, true),
            _ => (operand, false),
        };
        let ((a_source, a_turned), (b_source, b_turned)) = (lies(a), lies(b));
        let Some(spec) =
            Product::fit(&shape, self.ir.shape(a)[rank - 1], !a_turned, b_turned, self.facts.multiprocessors)
        else {
            return Ok(false);
        };
        if bias.is_some_and(|bias| self.ir.shape(bias) != [spec.n] || !single(bias)) {
            return Ok(false);
        }
        let mut args = vec![];
        for operand in [Some(a_source), Some(b_source), bias].into_iter().flatten() {
            let (text, contiguous) = self.view(operand)?;
            if !contiguous {
                return Ok(false);
            }
            args.push(text);
        }
        let (name, output) = self.names();
        let comment = self.describe(&[vid]);
        self.allocate(vid, &output);
        args.push(self.python_of(vid));
        let (source, configuration) = spec.write(&name, bias.is_some(), &comment);
        self.steps.lines.push(format!("KERNELS.{name}[{configuration}]({})", args.join(", ")));
        self.steps.source.push_str(&source);
        self.steps.covered.push(format!("product on tensor cores: {comment}"));
        Ok(true)
    }

    fn matmul(&mut self, vid: Vid, a: Vid, b: Vid, bias: Option<Vid>) -> Result<(), String> {
        if self.product(vid, a, b, bias)? {
            return Ok(());
        }
        let left = self.operand(a)?;
        let bias = bias.map(|b| self.operand(b)).transpose()?;
        let tail = bias.map(|b| format!(", {b}")).unwrap_or_default();
        // `x @ w.T` is what `linear` is for.
        let call = if let Def::View(weight, View::Permute(order)) = self.ir.def(b).clone()
            && order == [1, 0]
            && matches!(self.ir.def(weight), Def::Param(..))
        {
            let weight = self.operand(weight)?;
            format!("kf.linear({left}, {weight}{tail})")
        } else {
            let right = self.operand(b)?;
            format!("kf.matmul({left}, {right}{tail})")
        };
        self.library(vid, &call);
        Ok(())
    }

    fn convolution(
        &mut self,
        vid: Vid,
        label: Vid,
        x: Vid,
        weight: Vid,
        bias: Option<String>,
        conv: &super::ir::Conv,
    ) -> Result<(), String> {
        let weight = self.operand(weight)?;
        // The library takes channels-last operands as PyTorch has them: dimensions in the usual order, strides not.
        let rank = self.ir.shape(x).len();
        let (x, back) = if conv.channels_last {
            let inner: Vec<String> = (1..rank - 1).map(|d| d.to_string()).collect();
            let outer: Vec<String> = (2..rank).map(|d| d.to_string()).collect();
            let stored = self.stored(x)?;
            if self.strided(x) {
                return Err("a channels-last convolution reads an argument with strides of its own".into());
            }
            (
                format!("{stored}.permute(0, {}, {})", rank - 1, inner.join(", ")),
                format!(".permute(0, {}, 1)", outer.join(", ")),
            )
        } else {
            (self.operand(x)?, String::new())
        };
        let list = |v: &[i64]| if v.windows(2).all(|w| w[0] == w[1]) { v[0].to_string() } else { tuple(v) };
        let mut call = format!(
            "{}({x}, {weight}, {}, stride={}, padding={}",
            if conv.transposed { "kf.conv_transpose" } else { "kf.conv" },
            bias.unwrap_or_else(|| "None".into()),
            list(&conv.stride),
            list(&conv.padding)
        );
        if conv.transposed && conv.output_padding.iter().any(|&p| p != 0) {
            call.push_str(&format!(", output_padding={}", list(&conv.output_padding)));
        }
        if conv.dilation.iter().any(|&d| d != 1) {
            call.push_str(&format!(", dilation={}", list(&conv.dilation)));
        }
        if conv.groups != 1 {
            call.push_str(&format!(", groups={}", conv.groups));
        }
        call.push(')');
        call.push_str(&back);
        self.library(vid, &call);
        if label != vid {
            self.steps.covered.pop();
            self.steps.covered.push("library: convolution with its bias".into());
        }
        Ok(())
    }
}
