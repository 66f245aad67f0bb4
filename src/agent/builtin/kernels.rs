//! Kernels: loops around expressions, for both devices, and how they are launched.
//!
//! Knows the shapes that a kernel can have (element-wise, fold along rows, fold across columns, fold in two
//! steps, scan) and what may be tuned in each. Must not know how a task is cut into kernels (`schedule`).

use std::collections::{HashMap, HashSet};

use super::Facts;
use super::emit::{Buffer, Cache, Text, Writer, accumulators, element, merge, ty};
use super::index::{Ix, VarId, VarKind, contiguous, numel};
use super::ir::{Def, Fold, Ir, Vid};
use super::ops::Ty;
use crate::plan::{Device, Dtype};

/// A number that a sweep may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Knob {
    pub name: String,
    pub default: i64,
    pub others: Vec<i64>,
}

/// One launch, as Python expressions.
#[derive(Clone, Debug)]
pub struct Launch {
    pub function: String,
    pub grid: String,
    pub block: String,
    pub args: Vec<String>,
}

/// A kernel or a few that belong together.
#[derive(Clone, Debug, Default)]
pub struct Kernel {
    pub source: String,
    pub launches: Vec<Launch>,
    pub knobs: Vec<Knob>,
    /// Scratch tensors: name, elements, Python dtype.
    pub scratch: Vec<(String, i64, &'static str)>,
    pub reads: Vec<Vid>,
}

/// How the iteration space is walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Walk {
    /// Every element on its own.
    Elements,
    /// Threads side by side along the folded dimensions; one row a block or a warp.
    Rows,
    /// Threads side by side across the folded dimension.
    Columns,
    /// Few long rows: partial results by many blocks, joined by a second kernel.
    Split(i64),
    /// Few columns: the folded dimension is shared out to the threads of a block and to so many blocks.
    Bands(i64),
}

/// What a kernel computes.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Prefix of names and knobs: `k0`.
    pub name: String,
    pub walk: Walk,
    /// The iteration space and its folded dimensions.
    pub full: Vec<i64>,
    pub folded: Vec<usize>,
    /// Shape of what the stages fold: the same elements, maybe in fewer dimensions.
    pub shape: Vec<i64>,
    /// Folds in an order in which each needs only earlier ones.
    pub stages: Vec<Vid>,
    /// Values to store and the name of their buffer; all elements, or one for each row.
    pub outputs: Vec<(Vid, String)>,
    pub comment: String,
}

impl Spec {
    fn rows(&self) -> i64 {
        self.outer().iter().map(|&d| self.full[d]).product()
    }
    fn length(&self) -> i64 {
        self.folded.iter().map(|&d| self.full[d]).product()
    }
    fn outer(&self) -> Vec<usize> {
        (0..self.full.len()).filter(|d| !self.folded.contains(d)).collect()
    }
}

/// Variables of a spec, with the order in which loops nest.
struct Space {
    at: Vec<Ix>,
    outer: Vec<VarId>,
    inner: Vec<VarId>,
}

/// How the accumulators of a fold are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sums {
    /// One of its own type for each lane of a vector.
    Plain,
    /// The lanes of one vector are added pairwise in float (equal numbers without error), then to one double.
    Vectors,
    /// Each lane adds `BATCH` vectors in float, then to a double of its own: loops stay as wide as floats are.
    Batches,
}

/// Vectors that are added in float on the CPU before they go to a double.
const BATCH: i64 = 8;

impl Sums {
    fn of(fold: Fold, device: Device, columns: bool) -> Self {
        match (fold.sums(), device) {
            (true, Device::Cpu) => Self::Batches,
            (true, Device::Cuda) if !columns => Self::Vectors,
            _ => Self::Plain,
        }
    }

    /// What stands before the loop.
    fn declare(self, body: &mut Vec<String>, fold: Fold, arrays: &[String], whole: &[String], number: usize) {
        let kinds = accumulators(fold);
        match self {
            Self::Plain => {
                for (name, (kind, start)) in arrays.iter().zip(kinds) {
                    body.push(format!("{kind} {name}[VEC];"));
                    body.push("#pragma unroll".to_owned());
                    body.push(format!("for (int j = 0; j < VEC; ++j) {name}[j] = {start};"));
                }
            }
            Self::Vectors => {
                for (name, (kind, start)) in whole.iter().zip(kinds) {
                    body.push(format!("{kind} {name} = {start};"));
                }
            }
            Self::Batches => {
                for (name, total) in arrays.iter().zip(whole) {
                    body.push(format!("float {name}[VEC];"));
                    body.push(format!("double {total}[VEC];"));
                    body.push(format!("for (int j = 0; j < VEC; ++j) {name}[j] = 0.0f, {total}[j] = 0.0;"));
                }
                body.push(format!("int held{number} = 0;"));
            }
        }
    }

    /// What stands around the lanes of a vector, inside the loop.
    fn around(self, w: &mut Writer, fold: Fold, arrays: &[String], whole: &[String], vector: i64, number: usize) {
        match self {
            Self::Plain => {}
            Self::Vectors => {
                for name in arrays {
                    w.scopes[1].push(format!("float {name}[VEC];"));
                    w.scopes[1].push("#pragma unroll".into());
                    w.scopes[1].push(format!("for (int j = 0; j < VEC; ++j) {name}[j] = 0.0f;"));
                }
                let mut joined = vec![];
                join_lanes(&mut joined, fold, arrays, vector, true);
                joined.extend(arrays.iter().zip(whole).map(|(name, total)| format!("{total} += {name}[0];")));
                w.after.extend(joined);
            }
            Self::Batches => {
                w.after.push(format!("if (++held{number} == {BATCH}) {{"));
                self.flush(&mut w.after, arrays, whole);
                w.after.push(format!("held{number} = 0;"));
                w.after.push("}".into());
            }
        }
    }

    /// Moves what the lanes hold into their doubles.
    fn flush(self, lines: &mut Vec<String>, arrays: &[String], whole: &[String]) {
        for (name, total) in arrays.iter().zip(whole) {
            lines.push("#pragma omp simd".into());
            lines.push("for (int j = 0; j < VEC; ++j) {".into());
            lines.push(format!("{total}[j] += {name}[j];"));
            lines.push(format!("{name}[j] = 0.0f;"));
            lines.push("}".into());
        }
    }
}

fn indent(lines: &[String], by: usize) -> String {
    let mut depth = by;
    let mut out = String::new();
    for line in lines {
        for line in line.lines() {
            let line = line.trim();
            if line.starts_with('}') {
                depth = depth.saturating_sub(1);
            }
            out.push_str(&"  ".repeat(depth));
            out.push_str(line);
            out.push('\n');
            if line.ends_with('{') {
                depth += 1;
            }
        }
    }
    out
}

/// Whether lines use the element's own index.
pub(super) fn names_e(lines: &[String]) -> bool {
    lines.iter().any(|line| line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "e"))
}

/// The finest dimensions that both shapes are made of, if there are such.
pub fn refine(a: &[i64], b: &[i64]) -> Option<Vec<i64>> {
    let mut cuts: Vec<i64> = vec![];
    for shape in [a, b] {
        let mut product = 1;
        for &size in shape.iter().rev() {
            product *= size;
            cuts.push(product);
        }
    }
    cuts.push(1);
    cuts.sort_unstable();
    cuts.dedup();
    if cuts.windows(2).any(|w| w[0] == 0 || w[1] % w[0] != 0) {
        return None;
    }
    Some(cuts.windows(2).rev().map(|w| w[1] / w[0]).collect())
}

/// Variables that can be one, because every address uses them as one.
pub(super) fn merge_groups(vars: &[VarId], sizes: &dyn Fn(VarId) -> i64, accesses: &[Ix]) -> Vec<Vec<VarId>> {
    let mut groups: Vec<Vec<VarId>> = vec![];
    for &var in vars {
        let joined = groups.last().is_some_and(|group: &Vec<VarId>| {
            group.last().is_some_and(|&outer| {
                accesses.iter().all(|ix| ix.coefficient(outer) == ix.coefficient(var) * sizes(var))
            })
        });
        match groups.last_mut() {
            Some(group) if joined => group.push(var),
            _ => groups.push(vec![var]),
        }
    }
    groups
}

struct Built {
    kernel: Kernel,
    accesses: Vec<Ix>,
    outer: Vec<VarId>,
    inner: Vec<VarId>,
    sizes: Vec<i64>,
    asked_later: HashSet<(Vid, Vec<Ix>)>,
    /// What windows read.
    windows: Vec<Ix>,
}

/// Writes a kernel.
///
/// # Errors
/// A sentence, where a value can't be computed in a kernel of this shape.
pub fn build(
    ir: &Ir,
    buffers: &HashMap<Vid, Buffer>,
    device: Device,
    facts: &Facts,
    spec: &Spec,
) -> Result<Kernel, String> {
    // First as the dimensions are, to see all addresses; then with what can be merged merged.
    let first = write(ir, buffers, device, facts, spec, None)?;
    let sizes = |var: VarId| first.sizes[var];
    let groups =
        (merge_groups(&first.outer, &sizes, &first.accesses), merge_groups(&first.inner, &sizes, &first.accesses));
    let again = write(ir, buffers, device, facts, spec, Some(&(groups, first)))?;
    Ok(again.kernel)
}

/// Variables that can be one, and what else a first writing showed.
type Plan<'p> = Option<&'p ((Vec<Vec<VarId>>, Vec<Vec<VarId>>), Built)>;

/// Lines that set the variables of groups from a linear index.
pub(super) fn decompose(linear: &str, groups: &[(String, i64)], lines: &mut Vec<String>) {
    let mut rest = linear.to_owned();
    for (k, (name, size)) in groups.iter().enumerate().rev() {
        if k == 0 {
            lines.push(format!("const index_t {name} = {rest};"));
        } else {
            lines.push(format!("const index_t {name} = ({rest}) % {size};"));
            rest = format!("({rest}) / {size}");
        }
    }
}

#[allow(clippy::too_many_lines)]
fn write<'a>(
    ir: &'a Ir,
    buffers: &'a HashMap<Vid, Buffer>,
    device: Device,
    facts: &Facts,
    spec: &Spec,
    plan: Plan<'_>,
) -> Result<Built, String> {
    let mut w = Writer::new(ir, buffers, device);
    let cuda = device == Device::Cuda;
    let bands = if let Walk::Bands(n) = spec.walk { Some(n) } else { None };
    let columns = spec.walk == Walk::Columns || bands.is_some();
    let elements = spec.walk == Walk::Elements;

    // Variables. The lane is the innermost of what threads share out side by side.
    let mut space = Space { at: vec![Ix::default(); spec.full.len()], outer: vec![], inner: vec![] };
    let along: Vec<usize> = if columns || elements { spec.outer() } else { spec.folded.clone() };
    let lane_dim = along.iter().copied().rfind(|&d| spec.full[d] > 1);
    for d in 0..spec.full.len() {
        if spec.full[d] == 1 {
            continue;
        }
        let folded = spec.folded.contains(&d);
        let level = match (Some(d) == lane_dim, folded || elements) {
            (true, _) => 2,
            (false, true) => 1,
            (false, false) => 0,
        };
        let name = if Some(d) == lane_dim { "e".to_owned() } else { format!("d{d}") };
        let var = w.vars.add(name, spec.full[d], level, VarKind::Loop);
        if Some(d) == lane_dim {
            w.lane = Some(var);
        }
        space.at[d] = Ix::var(var);
        if folded { space.inner.push(var) } else { space.outer.push(var) }
    }

    // Merged groups, innermost variable stands for the group.
    let single = |vars: &[VarId]| vars.iter().map(|&v| vec![v]).collect::<Vec<_>>();
    let (outer_groups, inner_groups) = match plan {
        Some((groups, _)) => groups.clone(),
        None => (single(&space.outer), single(&space.inner)),
    };
    for group in outer_groups.iter().chain(&inner_groups) {
        w.merged.extend(&group[..group.len() - 1]);
    }
    let named = |w: &Writer, groups: &[Vec<VarId>]| -> Vec<(String, i64)> {
        groups
            .iter()
            .map(|g| {
                let size = g.iter().map(|&v| w.vars.list[v].size).product();
                (w.vars.list[g[g.len() - 1]].name.clone(), size)
            })
            .collect()
    };
    let outer = named(&w, &outer_groups);
    let inner = named(&w, &inner_groups);
    let lane_groups = if columns || elements { &outer } else { &inner };
    let lane_size = lane_groups.last().map_or(1, |g| g.1);
    let (rows, length) = (spec.rows(), spec.length());
    let total = numel(&spec.full);

    // Width of a vector: what divides the lane and all addresses of it.
    let widest: i64 = if columns && bands.is_none() { 2 } else { 4 };
    if cuda && w.lane.is_some() {
        let lane = w.lane.unwrap_or(0);
        let accesses: &[Ix] = plan.map_or(&[], |(_, first)| &first.accesses);
        let mut vector = widest;
        while vector > 1
            && (lane_size % vector != 0 || !accesses.iter().any(|ix| ix.coefficient(lane) == 1) || {
                // At least one access must gain; the others fall back to single loads by themselves.
                !accesses.iter().any(|ix| {
                    ix.coefficient(lane) == 1
                        && ix.constant % vector == 0
                        && ix.terms.iter().all(|(&v, &f)| v == lane || w.merged.contains(&v) || f % vector == 0)
                })
            })
        {
            vector /= 2;
        }
        // What windows read comes one by one: neighbouring threads, not neighbouring elements of a thread, make
        // whole lines of it.
        if plan.is_some_and(|(_, first)| first.windows.iter().any(|ix| ix.coefficient(lane) == 1)) {
            vector = 1;
        }
        let parallel = if columns { rows } else { total };
        if parallel / vector < facts.multiprocessors * 1024 && columns && bands.is_none() {
            vector = 1;
        }
        w.vector = vector;
    } else {
        w.vector = match spec.walk {
            Walk::Elements => 2048,
            Walk::Columns => 256,
            _ => 128,
        };
    }
    if !cuda {
        w.vector = w.vector.min(lane_size.max(1));
    }
    let vector = w.vector;

    let upper = spec.name.to_uppercase();
    let mut kernel = Kernel::default();

    // Coordinates of outputs: all elements or one a row.
    let row_at: Vec<Ix> = (0..spec.full.len())
        .map(|d| if spec.folded.contains(&d) { Ix::default() } else { space.at[d].clone() })
        .collect();
    let row_shape: Vec<i64> =
        (0..spec.full.len()).map(|d| if spec.folded.contains(&d) { 1 } else { spec.full[d] }).collect();
    let is_full = |vid: Vid| numel(ir.shape(vid)) == total && (total != rows || spec.folded.is_empty());
    let full_outputs: Vec<&(Vid, String)> = spec.outputs.iter().filter(|(vid, _)| is_full(*vid)).collect();
    let row_outputs: Vec<&(Vid, String)> = spec.outputs.iter().filter(|(vid, _)| !is_full(*vid)).collect();

    let split = if let Walk::Split(n) = spec.walk { Some(n) } else { None };
    // Values in registers between loops: where a row fits and is walked more than once.
    let loops = spec.stages.len() + usize::from(!full_outputs.is_empty());
    let cached = cuda
        && split.is_none()
        && bands.is_none()
        && loops > 1
        && plan.is_some()
        && ((!columns && length <= facts.register_row)
            || (columns && length <= facts.register_row.min(32) && vector == 1));
    if cached {
        w.cache = Some(Cache {
            wanted: plan.map(|(_, first)| first.asked_later.clone()).unwrap_or_default(),
            index: if columns { "u".into() } else { "it".into() },
            extent: if columns { length.to_string() } else { "ITEMS".into() },
            ..Cache::default()
        });
    }

    let mut body: Vec<String> = vec![];
    let mut asked_later = HashSet::new();
    let mut local_consts: Vec<String> = vec![];
    if cuda {
        local_consts.push(format!("constexpr int VEC = {vector};"));
    } else {
        local_consts.push(format!("constexpr index_t VEC = {vector};"));
    }

    // One element loop: `content` fills level 2; gives the lines of the whole loop over the folded dimensions.
    let loop_text = |w: &mut Writer, range: Option<(&str, &str)>| -> Vec<String> {
        let body2 = w.take(2);
        let body1 = w.take(1);
        let after = std::mem::take(&mut w.after);
        let mut out = vec![];
        let element_loop = |count: &str| {
            let mut lines = vec![];
            if w_is_cuda(device) {
                lines.push("#pragma unroll".to_owned());
            } else {
                lines.push("#pragma omp simd".to_owned());
            }
            lines.push(format!("for (int j = 0; j < {count}; ++j) {{"));
            if names_e(&body2) {
                lines.push("const index_t e = e0 + j;".into());
            }
            lines.extend(body2.clone());
            lines.push("}".into());
            lines
        };
        if columns {
            // The lane is outside; here the folded dimensions are walked one by one.
            if cached {
                out.push("#pragma unroll".into());
            } else if bands.is_some() {
                out.push("#pragma unroll 4".into());
            } else if w_is_cuda(device) {
                out.push("#pragma unroll UNROLL".into());
            }
            out.push(if bands.is_some() {
                format!("for (index_t u = from + threadIdx.y; u < to; u += {upper}_DEPTH) {{")
            } else {
                format!("for (index_t u = 0; u < {length}; ++u) {{")
            });
            decompose("u", &inner, &mut out);
            out.extend(body1);
            out.extend(element_loop(if w_is_cuda(device) { "VEC" } else { "n" }));
            out.extend(after);
            out.push("}".into());
        } else if w_is_cuda(device) {
            let (from, to) = range.map_or(("0", length.to_string()), |(a, b)| (a, b.to_owned()));
            if cached {
                out.push("#pragma unroll".into());
                out.push("for (int it = 0; it < ITEMS; ++it) {".into());
                out.push(format!("const index_t i0 = ((index_t)it * {upper}_THREADS + lane) * VEC;"));
                out.push(format!("if (i0 < {length}) {{"));
            } else {
                out.push("#pragma unroll UNROLL".into());
                out.push(format!(
                    "for (index_t i0 = {from} + lane * VEC; i0 < {to}; i0 += (index_t){upper}_THREADS * VEC) {{"
                ));
            }
            let mut parts = inner.clone();
            if let Some(last) = parts.last_mut() {
                last.0 = "e0".into();
            }
            decompose("i0", &parts, &mut out);
            out.extend(body1);
            out.extend(element_loop("VEC"));
            out.extend(after);
            if cached {
                out.push("}".into());
            }
            out.push("}".into());
        } else {
            let others = &inner[..inner.len().saturating_sub(1)];
            let count: i64 = others.iter().map(|g| g.1).product();
            if !others.is_empty() {
                out.push(format!("for (index_t u = 0; u < {count}; ++u) {{"));
                decompose("u", others, &mut out);
            }
            let (from, to) =
                range.map_or(("0".to_owned(), lane_size.to_string()), |(a, b)| (a.to_owned(), b.to_owned()));
            out.push(format!("for (index_t e0 = {from}; e0 < {to}; e0 += VEC) {{"));
            out.push(format!("const index_t n = e0 + VEC <= {to} ? VEC : {to} - e0;"));
            out.extend(body1);
            out.extend(element_loop("n"));
            out.extend(after);
            out.push("}".into());
            if !others.is_empty() {
                out.push("}".into());
            }
        }
        out
    };

    // --- Element-wise -------------------------------------------------------------------------------------
    if elements {
        for (vid, name) in &spec.outputs {
            let at = w.vars.reshape(&space.at, &spec.full, ir.shape(*vid));
            let value = w.value(*vid, &at)?;
            let ix = linear(ir.shape(*vid), &at);
            w.store(name, ir.vals[*vid].dtype, &ix, &value);
        }
        let level0 = w.take(0);
        let body1 = w.take(1);
        let body2 = w.take(2);
        let after = std::mem::take(&mut w.after);
        let mut text = local_consts;
        text.extend(level0);
        if cuda {
            text.push("#pragma unroll".into());
            text.push(format!("for (int u = 0; u < {upper}_UNROLL; ++u) {{"));
            text.push(format!(
                "const index_t i0 = (((index_t)blockIdx.x * {upper}_UNROLL + u) * {upper}_BLOCK + threadIdx.x) * VEC;"
            ));
            text.push(format!("if (i0 < {total}) {{"));
            let mut parts = outer.clone();
            if let Some(last) = parts.last_mut() {
                last.0 = "e0".into();
            } else {
                parts.push(("e0".into(), 1));
            }
            decompose("i0", &parts, &mut text);
            text.extend(body1);
            text.push("#pragma unroll".into());
            text.push("for (int j = 0; j < VEC; ++j) {".into());
            if names_e(&body2) {
                text.push("const index_t e = e0 + j;".into());
            }
            text.extend(body2);
            text.push("}".into());
            text.extend(after);
            text.push("}".into());
            text.push("}".into());
            let threads = total / vector;
            kernel.knobs.push(Knob { name: format!("{upper}_BLOCK"), default: 256, others: vec![128, 512, 1024] });
            let (unroll, others) = if threads > 1 << 22 { (2, vec![1, 4]) } else { (1, vec![2]) };
            kernel.knobs.push(Knob { name: format!("{upper}_UNROLL"), default: unroll, others });
            launch(
                &mut kernel,
                &w,
                spec,
                &spec.name,
                &[],
                format!("__launch_bounds__({upper}_BLOCK) "),
                &text,
                format!("blocks({total}, {vector} * TUNE[\"{upper}_BLOCK\"] * TUNE[\"{upper}_UNROLL\"])"),
                format!("TUNE[\"{upper}_BLOCK\"]"),
                cuda,
            );
        } else {
            let others = &outer[..outer.len().saturating_sub(1)];
            let count: i64 = others.iter().map(|g| g.1).product();
            text.push(format!("constexpr index_t CHUNKS = ({lane_size} + VEC - 1) / VEC;"));
            text.push("#pragma omp parallel for schedule(static)".into());
            text.push(format!("for (index_t task = 0; task < {count} * CHUNKS; ++task) {{"));
            text.push("const index_t e0 = task % CHUNKS * VEC;".into());
            text.push(format!("const index_t n = e0 + VEC <= {lane_size} ? VEC : {lane_size} - e0;"));
            decompose("task / CHUNKS", others, &mut text);
            text.extend(body1);
            text.push("#pragma omp simd".into());
            text.push("for (index_t j = 0; j < n; ++j) {".into());
            if names_e(&body2) {
                text.push("const index_t e = e0 + j;".into());
            }
            text.extend(body2);
            text.push("}".into());
            text.push("}".into());
            launch(&mut kernel, &w, spec, &spec.name, &[], String::new(), &text, "1".into(), "1".into(), cuda);
        }
        kernel.reads.clone_from(&w.reads);
        return Ok(built(kernel, w, space, asked_later));
    }

    // --- Folds --------------------------------------------------------------------------------------------
    let mut columns_results: Vec<String> = vec![];
    for (number, &stage) in spec.stages.iter().enumerate() {
        let Def::Reduce { fold, arg, .. } = ir.def(stage).clone() else { return Err("not a fold".into()) };
        let kinds = accumulators(fold);
        let arrays: Vec<String> = (0..kinds.len()).map(|k| format!("a{number}_{k}")).collect();
        let at = w.vars.reshape(&space.at, &spec.full, &spec.shape);
        let row_at = w.vars.reshape(&row_at, &spec.full, &spec.shape);
        // The first element of the row, for moments.
        let mut pivot = String::new();
        if fold == Fold::Moments {
            let value = w.value(arg, &row_at)?;
            if columns {
                // Per column: an array.
                pivot = format!("pivot{number}[j]");
                columns_results.push(format!("float pivot{number}[VEC];"));
                w.scopes[2].push(format!("{pivot} = {};", value.text));
                let lines = simple_loop(&mut w, cuda);
                body.extend(w.take(0));
                body.extend(std::mem::take(&mut columns_results));
                body.extend(lines);
            } else {
                pivot = value.text;
            }
        }
        let whole: Vec<String> = (0..kinds.len()).map(|k| format!("s{number}_{k}")).collect();
        let sums = Sums::of(fold, device, columns);
        sums.declare(&mut body, fold, &arrays, &whole, number);
        if !cuda {
            body.retain(|line| line != "#pragma unroll");
        }
        if let Some(cache) = &mut w.cache {
            cache.filling = number == 0;
        }
        if number > 0 || split.is_some() {
            // Values of earlier stages are known by now.
            asked_later.extend(std::mem::take(&mut w.asked));
        }
        w.asked.clear();
        let value = w.value(arg, &at)?;
        if number > 0 {
            asked_later.extend(w.asked.iter().cloned());
        }
        w.asked.clear();
        let lanes: Vec<String> = arrays.iter().map(|a| format!("{a}[j]")).collect();
        w.accumulate(stage, &lanes, &value, &at, &pivot);
        let chunk = split.map(|_| ("from", "to"));
        sums.around(&mut w, fold, &arrays, &whole, vector, number);
        let text = loop_text(&mut w, chunk);
        body.extend(w.take_zero());
        if let Some(cache) = &mut w.cache {
            cache.filling = false;
            body.append(&mut cache.declared);
        }
        body.extend(text);
        if let Some(splits) = bands {
            return finish_bands(kernel, w, space, asked_later, spec, splits, body, local_consts, &outer, &arrays);
        }
        if sums == Sums::Batches {
            sums.flush(&mut body, &arrays, &whole);
        }
        if columns {
            // Results are arrays by column.
            let totals: &[String] = if sums == Sums::Batches { &whole } else { &arrays };
            let lanes: Vec<String> = totals.iter().map(|a| format!("{a}[j]")).collect();
            for (k, (text, ty)) in w.finish(stage, &lanes, &pivot).into_iter().enumerate() {
                let name = format!("r{number}_{k}");
                body.push(format!("{} {name}[VEC];", ty.name()));
                if cuda {
                    body.push("#pragma unroll".into());
                }
                body.push(format!("for (int j = 0; j < VEC; ++j) {name}[j] = {text};"));
                w.results.insert((stage, k), Text { text: format!("{name}[j]"), level: 2, ty });
            }
        } else {
            let whole = match sums {
                Sums::Vectors => whole,
                Sums::Batches => {
                    let one: Vec<String> = (0..kinds.len()).map(|k| format!("t{number}_{k}")).collect();
                    fold_lanes(&mut body, fold, &whole, &one, vector, cuda);
                    one
                }
                Sums::Plain => {
                    fold_lanes(&mut body, fold, &arrays, &whole, vector, cuda);
                    whole
                }
            };
            if cuda {
                fold_threads(&mut body, fold, &whole, &upper);
            }
            if split.is_none() {
                for (k, (text, ty)) in w.finish(stage, &whole, &pivot).into_iter().enumerate() {
                    let name = format!("r{number}_{k}");
                    body.push(format!("const {} {name} = {text};", ty.name()));
                    w.results.insert((stage, k), Text { text: name, level: 0, ty });
                }
            } else {
                for (k, (kind, _)) in kinds.iter().enumerate() {
                    let buffer = format!("{}_part{k}", spec.name);
                    let line = format!("{buffer}[row * SPLITS + part] = {};", whole[k]);
                    body.push(if cuda { format!("if (lane == 0) {line}") } else { line });
                    kernel.scratch.push((buffer, rows * split.unwrap_or(1), scratch(kind)));
                }
            }
        }
        w.place.insert(stage, at);
    }

    if let Some(splits) = split {
        return finish_split(
            kernel,
            w,
            space,
            asked_later,
            spec,
            splits,
            body,
            local_consts,
            &outer,
            &inner,
            cuda,
            &row_at,
            &row_shape,
        );
    }

    // Everything of the row, then what there is one of.
    for (vid, name) in &full_outputs {
        w.asked.clear();
        let at = w.vars.reshape(&space.at, &spec.full, ir.shape(*vid));
        let value = w.value(*vid, &at)?;
        asked_later.extend(w.asked.iter().cloned());
        let ix = linear(ir.shape(*vid), &at);
        w.store(name, ir.vals[*vid].dtype, &ix, &value);
    }
    if !full_outputs.is_empty() {
        let mut text = loop_text(&mut w, None);
        if !columns && cuda {
            // Rows beyond the last are computed by idle threads and not stored.
            for line in &mut text {
                if line.starts_with("store_vector")
                    || full_outputs.iter().any(|(_, n)| line.starts_with(&format!("{n}[")))
                {
                    *line = format!("if (live) {line}");
                }
            }
        }
        body.extend(w.take_zero());
        body.extend(text);
    }
    if !row_outputs.is_empty() {
        for (vid, name) in &row_outputs {
            let at = w.vars.reshape(&row_at, &row_shape, ir.shape(*vid));
            let value = w.value(*vid, &at)?;
            let ix = linear(ir.shape(*vid), &at);
            if columns {
                w.store(name, ir.vals[*vid].dtype, &ix, &value);
            } else {
                w.access(&ix);
                let index = w.index(&ix);
                let cast = if ir.vals[*vid].dtype == Dtype::Float32 { "" } else { "(" };
                let text = if cast.is_empty() {
                    value.text.clone()
                } else {
                    match ir.vals[*vid].dtype {
                        Dtype::Float16 => format!("__float2half({})", value.text),
                        Dtype::Bfloat16 => format!("__float2bfloat16({})", value.text),
                        other => format!("({}){}", element(other), value.text),
                    }
                };
                let line = format!("{name}[{index}] = {text};");
                let lines = if cuda { format!("if (lane == 0 && live) {line}") } else { line };
                w.scopes[0].push(lines);
            }
        }
        if columns {
            let lines = simple_loop(&mut w, cuda);
            body.extend(w.take_zero());
            body.extend(lines);
        } else {
            body.extend(w.take_zero());
        }
    }

    // Around it: which row or column this is.
    let mut text = local_consts;
    if columns && cuda {
        text.push(format!("const index_t i0 = ((index_t)blockIdx.x * {upper}_BLOCK + threadIdx.x) * VEC;"));
        text.push(format!("if (i0 >= {rows}) return;"));
        let mut parts = outer.clone();
        if let Some(last) = parts.last_mut() {
            last.0 = "e0".into();
        }
        decompose("i0", &parts, &mut text);
        text.extend(body);
        kernel.knobs.push(Knob { name: format!("{upper}_BLOCK"), default: 128, others: vec![64, 256, 512] });
        if !cached {
            // Loads of one thread that are under way at once.
            text.insert(0, format!("constexpr int UNROLL = {upper}_UNROLL;"));
            kernel.knobs.push(Knob { name: format!("{upper}_UNROLL"), default: 8, others: vec![4, 16] });
        }
        launch(
            &mut kernel,
            &w,
            spec,
            &spec.name,
            &[],
            format!("__launch_bounds__({upper}_BLOCK) "),
            &text,
            format!("blocks({rows}, {vector} * TUNE[\"{upper}_BLOCK\"])"),
            format!("TUNE[\"{upper}_BLOCK\"]"),
            cuda,
        );
    } else if columns {
        let others = &outer[..outer.len().saturating_sub(1)];
        let count: i64 = others.iter().map(|g| g.1).product();
        text.push(format!("constexpr index_t CHUNKS = ({lane_size} + VEC - 1) / VEC;"));
        text.push("#pragma omp parallel for schedule(static)".into());
        text.push(format!("for (index_t task = 0; task < {count} * CHUNKS; ++task) {{"));
        text.push("const index_t e0 = task % CHUNKS * VEC;".into());
        text.push(format!("const index_t n = e0 + VEC <= {lane_size} ? VEC : {lane_size} - e0;"));
        decompose("task / CHUNKS", others, &mut text);
        text.extend(body);
        text.push("}".into());
        launch(&mut kernel, &w, spec, &spec.name, &[], String::new(), &text, "1".into(), "1".into(), cuda);
    } else if cuda {
        let (default, others) = thread_counts(length, vector, cached);
        kernel.knobs.push(Knob { name: format!("{upper}_THREADS"), default, others });
        if cached {
            text.push(format!(
                "constexpr int ITEMS = ({length} + {upper}_THREADS * VEC - 1) / ({upper}_THREADS * VEC);"
            ));
        } else {
            kernel.knobs.push(Knob { name: format!("{upper}_UNROLL"), default: 4, others: vec![1, 2, 8] });
            text.push(format!("constexpr int UNROLL = {upper}_UNROLL;"));
        }
        text.push(format!("index_t row = (index_t)blockIdx.x * {upper}_ROWS + threadIdx.y;"));
        text.push(format!("const bool live = row < {rows};"));
        text.push(format!("if (!live) row = {rows} - 1;"));
        text.push("const int lane = threadIdx.x;".into());
        decompose("row", &outer, &mut text);
        text.extend(body);
        let rows_each = format!("(128 // TUNE[\"{upper}_THREADS\"] or 1)");
        launch(
            &mut kernel,
            &w,
            spec,
            &spec.name,
            &[],
            format!("__launch_bounds__({upper}_THREADS * {upper}_ROWS) "),
            &text,
            format!("blocks({rows}, {rows_each})"),
            format!("(TUNE[\"{upper}_THREADS\"], {rows_each})"),
            cuda,
        );
        kernel.source = format!(
            "#define {upper}_ROWS ({upper}_THREADS < 128 ? 128 / {upper}_THREADS : 1)  // rows a block\n{}",
            kernel.source
        );
    } else {
        text.push("#pragma omp parallel for schedule(static)".into());
        text.push(format!("for (index_t row = 0; row < {rows}; ++row) {{"));
        decompose("row", &outer, &mut text);
        text.extend(body);
        text.push("}".into());
        launch(&mut kernel, &w, spec, &spec.name, &[], String::new(), &text, "1".into(), "1".into(), cuda);
    }
    kernel.reads.clone_from(&w.reads);
    Ok(built(kernel, w, space, asked_later))
}

const fn w_is_cuda(device: Device) -> bool {
    matches!(device, Device::Cuda)
}

fn built(kernel: Kernel, w: Writer, space: Space, asked_later: HashSet<(Vid, Vec<Ix>)>) -> Built {
    Built {
        kernel,
        sizes: w.vars.list.iter().map(|v| v.size).collect(),
        accesses: w.accesses,
        windows: w.loads.into_iter().filter(|(_, _, inside)| *inside).map(|(_, ix, _)| ix).collect(),
        outer: space.outer,
        inner: space.inner,
        asked_later,
    }
}

pub(super) fn linear(shape: &[i64], at: &[Ix]) -> Ix {
    let strides = contiguous(shape);
    let mut ix = Ix::default();
    for d in 0..shape.len() {
        if shape[d] > 1 {
            ix = ix.plus(&at[d].times(strides[d]));
        }
    }
    ix
}

/// Threads for a row: 8 to 32 elements each where the row is kept in registers.
fn thread_counts(length: i64, vector: i64, cached: bool) -> (i64, Vec<i64>) {
    // A short row is read at once, by as few threads as keep their vectors side by side; a block has many.
    if !cached && length <= 256 {
        let most = [32, 16, 8, 4, 2, 1].into_iter().find(|t| t * vector <= length).unwrap_or(1);
        let default = if most * vector * 2 <= length || most < 8 { most } else { most / 2 };
        let others = [1, 2, 4, 8, 16, 32].into_iter().filter(|&t| t != default && t <= most && t * 4 >= most);
        return (default, others.collect());
    }
    let all = [8, 16, 32, 64, 128, 256, 512, 1024];
    let fits = |t: &i64| {
        let each = (length + t - 1) / t;
        if cached { each <= 32.max(vector) && (each >= vector || *t == 8) } else { each >= 4 * vector || *t == 32 }
    };
    let mut good: Vec<i64> = all.into_iter().filter(fits).collect();
    if good.is_empty() {
        good = vec![if length > 1024 { 1024 } else { 32 }];
    }
    let wanted = |t: i64| if cached { (length as f64 / t as f64 - 12.0).abs() } else { (t as f64 - 256.0).abs() };
    let default = good.iter().copied().min_by(|a, b| wanted(*a).total_cmp(&wanted(*b))).unwrap_or(256);
    let others = good.into_iter().filter(|&t| t != default && t * 4 >= default && t <= default * 4).collect();
    (default, others)
}

/// A loop over the lane alone, at level 0.
fn simple_loop(w: &mut Writer, cuda: bool) -> Vec<String> {
    let body2 = w.take(2);
    let mut lines = w.take(1);
    lines.push(if cuda { "#pragma unroll".into() } else { "#pragma omp simd".into() });
    lines.push(format!("for (int j = 0; j < {}; ++j) {{", if cuda { "VEC" } else { "n" }));
    if names_e(&body2) {
        lines.push("const index_t e = e0 + j;".into());
    }
    lines.extend(body2);
    lines.push("}".into());
    lines.extend(std::mem::take(&mut w.after));
    lines
}

/// Joins the accumulators of a thread's vector lanes into the first.
fn join_lanes(body: &mut Vec<String>, fold: Fold, arrays: &[String], vector: i64, cuda: bool) {
    if vector > 1 {
        // Pairwise, which also keeps rounding low.
        let mut top = 1;
        while top * 2 < vector {
            top *= 2;
        }
        if cuda {
            body.push("#pragma unroll".into());
        }
        body.push(format!("for (int h = {top}; h > 0; h /= 2) {{"));
        if cuda {
            body.push("#pragma unroll".into());
        }
        body.push("for (int j = 0; j < h; ++j) {".into());
        let a: Vec<String> = arrays.iter().map(|a| format!("{a}[j]")).collect();
        let b: Vec<String> = arrays.iter().map(|a| format!("{a}[j + h]")).collect();
        body.push(format!("if (j + h < VEC) {{ {} }}", merge(fold, &a, &b)));
        body.push("}".into());
        body.push("}".into());
    }
}

/// Joins the accumulators of a thread's vector lanes into one.
fn fold_lanes(body: &mut Vec<String>, fold: Fold, arrays: &[String], whole: &[String], vector: i64, cuda: bool) {
    join_lanes(body, fold, arrays, vector, cuda);
    for ((kind, _), (array, name)) in accumulators(fold).iter().zip(arrays.iter().zip(whole)) {
        body.push(format!("{kind} {name} = {array}[0];"));
    }
}

/// Joins what the threads of a row have: shuffles in a warp, then shared memory across warps.
fn fold_threads(body: &mut Vec<String>, fold: Fold, whole: &[String], upper: &str) {
    let shuffled: Vec<String> = whole.iter().map(|s| format!("__shfl_xor_sync(0xffffffffu, {s}, o)")).collect();
    body.push("#pragma unroll".into());
    body.push(format!("for (int o = ({upper}_THREADS < 32 ? {upper}_THREADS : 32) / 2; o > 0; o /= 2) {{"));
    body.push(merge(fold, whole, &shuffled));
    body.push("}".into());
    body.push(format!("if ({upper}_THREADS > 32) {{"));
    for (s, (kind, _)) in whole.iter().zip(accumulators(fold)) {
        body.push(format!("__shared__ {kind} {s}_warps[{upper}_ROWS][32];"));
        body.push(format!("if (lane % 32 == 0) {s}_warps[threadIdx.y][lane / 32] = {s};"));
    }
    body.push("__syncthreads();".into());
    for (s, (kind, start)) in whole.iter().zip(accumulators(fold)) {
        body.push(format!(
            "{s} = lane % 32 < {upper}_THREADS / 32 ? {s}_warps[threadIdx.y][lane % 32] : ({kind}){start};"
        ));
    }
    body.push("#pragma unroll".into());
    body.push("for (int o = 16; o > 0; o /= 2) {".into());
    body.push(merge(fold, whole, &shuffled));
    body.push("}".into());
    body.push("}".into());
}

/// Adds a function and its launch.
#[allow(clippy::too_many_arguments)]
pub(super) fn launch(
    kernel: &mut Kernel,
    w: &Writer,
    spec: &Spec,
    function: &str,
    extra: &[(String, String)],
    bounds: String,
    text: &[String],
    grid: String,
    block: String,
    cuda: bool,
) {
    let mut parameters = vec![];
    let mut args = vec![];
    for &vid in &w.reads {
        let name = &w.buffers[&vid].name;
        parameters.push(format!("const {}* __restrict__ {name}", element(w.ir.vals[vid].dtype)));
        args.push(name.clone());
    }
    for (kind, name) in extra {
        parameters.push(format!("{kind} {name}"));
        args.push(name.clone());
    }
    let used = text.join("\n");
    for (vid, name) in &spec.outputs {
        if used.contains(name.as_str()) {
            parameters.push(format!("{}* __restrict__ {name}", element(w.ir.vals[*vid].dtype)));
            args.push(name.clone());
        }
    }
    let qualifier = if cuda { "extern \"C\" __global__ void " } else { "extern \"C\" void " };
    kernel.source.push_str(&format!(
        "{}{qualifier}{bounds}{function}({}) {{\n{}}}\n",
        spec.comment.lines().map(|l| format!("// {l}\n")).collect::<String>(),
        parameters.join(", "),
        indent(text, 1)
    ));
    kernel.launches.push(Launch { function: function.to_owned(), grid, block, args });
}

/// PyTorch's name for accumulators of that type in memory; `index` is the kernels' own integer.
fn scratch(kind: &str) -> &'static str {
    match kind {
        "float" => "torch.float32",
        "double" => "torch.float64",
        "long long" => "torch.int64",
        _ => "index",
    }
}

#[allow(clippy::too_many_arguments)]
fn finish_split(
    mut kernel: Kernel,
    mut w: Writer,
    space: Space,
    asked: HashSet<(Vid, Vec<Ix>)>,
    spec: &Spec,
    splits: i64,
    body: Vec<String>,
    consts: Vec<String>,
    outer: &[(String, i64)],
    inner: &[(String, i64)],
    cuda: bool,
    row_at: &[Ix],
    row_shape: &[i64],
) -> Result<Built, String> {
    let ir = w.ir;
    let upper = spec.name.to_uppercase();
    let (rows, length) = (spec.rows(), spec.length());
    let stage = spec.stages[0];
    let Def::Reduce { fold, arg, .. } = ir.def(stage).clone() else { return Err("not a fold".into()) };
    let kinds = accumulators(fold);
    let parts: Vec<String> = (0..kinds.len()).map(|k| format!("{}_part{k}", spec.name)).collect();

    // First function: a part of a row.
    let mut text = consts.clone();
    text.push(format!("constexpr index_t SPLITS = {splits};"));
    let lane_size = inner.last().map_or(1, |g| g.1);
    let walked = if cuda { length } else { lane_size };
    let align = if cuda { w.vector } else { 64 };
    let chunk = ((walked + splits - 1) / splits + align - 1) / align * align;
    let range = [
        format!("const index_t from = part * {chunk}LL;"),
        format!("const index_t to = from + {chunk} < {walked} ? from + {chunk} : {walked};"),
    ];
    let written: Vec<(String, String)> =
        parts.iter().zip(kinds).map(|(name, (kind, _))| (format!("{kind}* __restrict__"), name.clone())).collect();
    if cuda {
        text.push(format!("constexpr int UNROLL = {upper}_UNROLL;"));
        text.push("const index_t part = blockIdx.x, row = blockIdx.y;".into());
        text.push("const int lane = threadIdx.x;".into());
        text.extend(range);
        decompose("row", outer, &mut text);
        text.extend(body);
        kernel.knobs.push(Knob { name: format!("{upper}_THREADS"), default: 256, others: vec![128, 512] });
        kernel.knobs.push(Knob { name: format!("{upper}_UNROLL"), default: 4, others: vec![2, 8] });
    } else {
        text.push("#pragma omp parallel for schedule(static)".into());
        text.push(format!("for (index_t task = 0; task < {rows} * SPLITS; ++task) {{"));
        text.push("const index_t part = task % SPLITS, row = task / SPLITS;".into());
        text.extend(range);
        decompose("row", outer, &mut text);
        text.extend(body);
        text.push("}".into());
    }
    let mut first = Spec { outputs: vec![], ..spec.clone() };
    first.comment = format!("{}\nOne part of a row; the parts are joined by {}_join.", spec.comment, spec.name);
    launch(
        &mut kernel,
        &w,
        &first,
        &format!("{}_parts", spec.name),
        &written,
        if cuda { format!("__launch_bounds__({upper}_THREADS) ") } else { String::new() },
        &text,
        format!("({splits}, {rows})"),
        format!("TUNE[\"{upper}_THREADS\"]"),
        cuda,
    );
    if cuda {
        kernel.source = format!(
            "#define {upper}_ROWS 1\n#define {upper}_JOIN_THREADS 256\n#define {upper}_JOIN_ROWS 1\n{}",
            kernel.source
        );
    }
    let reads_first = std::mem::take(&mut w.reads);

    // Second function: joins the parts, in a fixed order, and what follows for each row.
    let whole: Vec<String> = (0..kinds.len()).map(|k| format!("s0_{k}")).collect();
    let mut text = vec![format!("constexpr index_t SPLITS = {splits};")];
    w.take(0);
    w.take(1);
    w.take(2);
    let mut inner_text = vec![];
    let mut pivot = String::new();
    if fold == Fold::Moments {
        let first = w.vars.reshape(row_at, &spec.full, &spec.shape);
        pivot = w.value(arg, &first)?.text;
    }
    for (name, (kind, start)) in whole.iter().zip(kinds) {
        inner_text.push(format!("{kind} {name} = {start};"));
    }
    let read: Vec<String> = parts.iter().map(|p| format!("{p}[row * SPLITS + part]")).collect();
    if cuda {
        inner_text.push(format!("for (index_t part = lane; part < SPLITS; part += {upper}_JOIN_THREADS) {{"));
    } else {
        inner_text.push("for (index_t part = 0; part < SPLITS; ++part) {".into());
    }
    inner_text.push(merge(fold, &whole, &read));
    inner_text.push("}".into());
    if cuda {
        fold_threads(&mut inner_text, fold, &whole, &format!("{upper}_JOIN"));
    }
    for (k, (value, ty)) in w.finish(stage, &whole, &pivot).into_iter().enumerate() {
        let name = format!("r0_{k}");
        inner_text.push(format!("const {} {name} = {value};", ty.name()));
        w.results.insert((stage, k), Text { text: name, level: 0, ty });
    }
    let before = w.take(0);
    for (vid, name) in &spec.outputs {
        let at = w.vars.reshape(row_at, row_shape, ir.shape(*vid));
        let value = w.value(*vid, &at)?;
        let ix = linear(ir.shape(*vid), &at);
        w.access(&ix);
        let index = w.index(&ix);
        let cast = if ir.vals[*vid].dtype == Dtype::Float32 {
            value.text.clone()
        } else {
            format!("({}){}", element(ir.vals[*vid].dtype), value.text)
        };
        let line = format!("{name}[{index}] = {cast};");
        w.scopes[0].push(if cuda { format!("if (lane == 0) {line}") } else { line });
    }
    let after = w.take(0);
    if cuda {
        text.push("const index_t row = blockIdx.x;".into());
        text.push("const int lane = threadIdx.x;".into());
    } else {
        text.push(format!("for (index_t row = 0; row < {rows}; ++row) {{"));
    }
    decompose("row", outer, &mut text);
    text.extend(before);
    text.extend(inner_text);
    text.extend(after);
    if !cuda {
        text.push("}".into());
    }
    let read_only: Vec<(String, String)> =
        written.iter().map(|(kind, name)| (format!("const {kind}"), name.clone())).collect();
    let mut second = spec.clone();
    second.comment = "Joins the parts of each row.".into();
    launch(
        &mut kernel,
        &w,
        &second,
        &format!("{}_join", spec.name),
        &read_only,
        String::new(),
        &text,
        rows.to_string(),
        "256".into(),
        cuda,
    );
    let mut reads = reads_first;
    reads.extend(w.reads.clone());
    kernel.reads = reads;
    Ok(built(kernel, w, space, asked))
}

/// Threads side by side across columns in a block that folds in bands.
const BAND_LANES: i64 = 16;

#[allow(clippy::too_many_arguments)]
fn finish_bands(
    mut kernel: Kernel,
    w: Writer,
    space: Space,
    asked: HashSet<(Vid, Vec<Ix>)>,
    spec: &Spec,
    splits: i64,
    body: Vec<String>,
    consts: Vec<String>,
    outer: &[(String, i64)],
    arrays: &[String],
) -> Result<Built, String> {
    let ir = w.ir;
    let upper = spec.name.to_uppercase();
    let (rows, length) = (spec.rows(), spec.length());
    let stage = spec.stages[0];
    let Def::Reduce { fold, arg, .. } = ir.def(stage).clone() else { return Err("not a fold".into()) };
    let kinds = accumulators(fold);
    let parts: Vec<String> = (0..kinds.len()).map(|k| format!("{}_part{k}", spec.name)).collect();
    let chunk = (length + splits - 1) / splits;

    // First function: a part of some columns, by all threads of a block.
    let mut text = consts;
    text.push(format!("const index_t part = blockIdx.y, from = part * {chunk};"));
    text.push(format!("const index_t to = from + {chunk} < {length} ? from + {chunk} : {length};"));
    text.push(format!("index_t i0 = ((index_t)blockIdx.x * {BAND_LANES} + threadIdx.x) * VEC;"));
    text.push(format!("const bool live = i0 < {rows};"));
    text.push("if (!live) i0 = 0;".into());
    let mut names = outer.to_vec();
    if let Some(last) = names.last_mut() {
        last.0 = "e0".into();
    }
    decompose("i0", &names, &mut text);
    text.extend(body);
    let lanes: Vec<String> = arrays.iter().map(|a| format!("{a}[j]")).collect();
    let shared: Vec<String> = (0..kinds.len()).map(|k| format!("band{k}")).collect();
    for (name, (kind, _)) in shared.iter().zip(kinds) {
        text.push(format!("__shared__ {kind} {name}[{upper}_DEPTH][VEC][{BAND_LANES}];"));
    }
    let own: Vec<String> = shared.iter().map(|s| format!("{s}[threadIdx.y][j][threadIdx.x]")).collect();
    let other: Vec<String> = shared.iter().map(|s| format!("{s}[threadIdx.y + h][j][threadIdx.x]")).collect();
    let put: String = own.iter().zip(&lanes).map(|(own, lane)| format!("{own} = {lane}; ")).collect();
    text.push("#pragma unroll".into());
    text.push("for (int j = 0; j < VEC; ++j) {".into());
    text.push(put.clone());
    text.push("}".into());
    text.push("#pragma unroll".into());
    text.push(format!("for (int h = {upper}_DEPTH / 2; h > 0; h /= 2) {{"));
    text.push("__syncthreads();".into());
    text.push("if (threadIdx.y < h) {".into());
    text.push("#pragma unroll".into());
    text.push("for (int j = 0; j < VEC; ++j) {".into());
    text.push(merge(fold, &lanes, &other));
    text.push(put);
    text.push("}".into());
    text.push("}".into());
    text.push("}".into());
    text.push("if (threadIdx.y == 0 && live) {".into());
    text.push("for (int j = 0; j < VEC; ++j) {".into());
    for (part, lane) in parts.iter().zip(&lanes) {
        text.push(format!("{part}[part * {rows} + i0 + j] = {lane};"));
    }
    text.push("}".into());
    text.push("}".into());
    let written: Vec<(String, String)> =
        parts.iter().zip(kinds).map(|(name, (kind, _))| (format!("{kind}* __restrict__"), name.clone())).collect();
    for (name, (kind, _)) in parts.iter().zip(kinds) {
        kernel.scratch.push((name.clone(), rows * splits, scratch(kind)));
    }
    kernel.knobs.push(Knob { name: format!("{upper}_DEPTH"), default: 16, others: vec![8, 32] });
    let mut first = Spec { outputs: vec![], ..spec.clone() };
    first.comment = format!("{}\nOne part of some columns; the parts are joined by {}_join.", spec.comment, spec.name);
    launch(
        &mut kernel,
        &w,
        &first,
        &format!("{}_parts", spec.name),
        &written,
        format!("__launch_bounds__({BAND_LANES} * {upper}_DEPTH) "),
        &text,
        format!("(blocks({rows}, {}), {splits})", BAND_LANES * w.vector),
        format!("({BAND_LANES}, TUNE[\"{upper}_DEPTH\"])"),
        true,
    );

    // Second function: a thread joins the parts of a column, in a fixed order, and computes what follows.
    let mut join = Writer::new(ir, w.buffers, Device::Cuda);
    let mut at = vec![Ix::default(); spec.full.len()];
    let mut columns = vec![];
    for d in spec.outer() {
        if spec.full[d] > 1 {
            at[d] = Ix::var(join.vars.add(format!("d{d}"), spec.full[d], 0, VarKind::Loop));
            columns.push((format!("d{d}"), spec.full[d]));
        }
    }
    let shape: Vec<i64> =
        (0..spec.full.len()).map(|d| if spec.folded.contains(&d) { 1 } else { spec.full[d] }).collect();
    let place = join.vars.reshape(&at, &spec.full, &spec.shape);
    let pivot = if fold == Fold::Moments { join.value(arg, &place)?.text } else { String::new() };
    let mut text = vec![format!("const index_t row = (index_t)blockIdx.x * 128 + threadIdx.x;")];
    text.push(format!("if (row >= {rows}) return;"));
    decompose("row", &columns, &mut text);
    text.extend(join.take_zero());
    let whole: Vec<String> = (0..kinds.len()).map(|k| format!("s0_{k}")).collect();
    for (name, (kind, start)) in whole.iter().zip(kinds) {
        text.push(format!("{kind} {name} = {start};"));
    }
    let read: Vec<String> = parts.iter().map(|part| format!("{part}[part * {rows} + row]")).collect();
    text.push("#pragma unroll 4".into());
    text.push(format!("for (index_t part = 0; part < {splits}; ++part) {{"));
    text.push(merge(fold, &whole, &read));
    text.push("}".into());
    for (k, (value, ty)) in join.finish(stage, &whole, &pivot).into_iter().enumerate() {
        let name = format!("r0_{k}");
        text.push(format!("const {} {name} = {value};", ty.name()));
        join.results.insert((stage, k), Text { text: name, level: 0, ty });
    }
    join.place.insert(stage, place);
    for (vid, name) in &spec.outputs {
        let at = join.vars.reshape(&at, &shape, ir.shape(*vid));
        let value = join.value(*vid, &at)?;
        let index = join.index(&linear(ir.shape(*vid), &at));
        let value = match ir.vals[*vid].dtype {
            Dtype::Float16 => format!("__float2half({})", value.text),
            Dtype::Bfloat16 => format!("__float2bfloat16({})", value.text),
            Dtype::Float32 => value.text,
            other => format!("({}){}", element(other), value.text),
        };
        join.scopes[0].push(format!("{name}[{index}] = {value};"));
    }
    text.extend(join.take_zero());
    let read_only: Vec<(String, String)> =
        written.iter().map(|(kind, name)| (format!("const {kind}"), name.clone())).collect();
    let mut second = spec.clone();
    second.comment = "Joins the parts of each column.".into();
    launch(
        &mut kernel,
        &join,
        &second,
        &format!("{}_join", spec.name),
        &read_only,
        String::new(),
        &text,
        format!("blocks({rows}, 128)"),
        "128".into(),
        true,
    );
    kernel.reads.clone_from(&w.reads);
    kernel.reads.extend(&join.reads);
    Ok(built(kernel, w, space, asked))
}

/// A running sum or product.
///
/// # Errors
/// A sentence, where the scanned value can't be computed here.
pub fn scan(
    ir: &Ir,
    buffers: &HashMap<Vid, Buffer>,
    device: Device,
    vid: Vid,
    name: &str,
    output: &str,
    comment: String,
) -> Result<Kernel, String> {
    let Def::Scan { arg, dim, fold, reverse } = *ir.def(vid) else { return Err("not a scan".into()) };
    let cuda = device == Device::Cuda;
    let shape = ir.shape(vid).to_vec();
    let length = shape[dim];
    let upper = name.to_uppercase();
    let mut w = Writer::new(ir, buffers, device);
    let along = shape[dim + 1..].iter().product::<i64>() == 1;
    let mut at = vec![Ix::default(); shape.len()];
    let mut outer = vec![];
    for d in 0..shape.len() {
        if d != dim && shape[d] > 1 {
            let var = w.vars.add(format!("d{d}"), shape[d], 0, VarKind::Loop);
            at[d] = Ix::var(var);
            outer.push((format!("d{d}"), shape[d]));
        }
    }
    let e = w.vars.add("e", length, 2, VarKind::Loop);
    at[dim] = Ix::var(e);
    w.lane = Some(e);
    let operator = if fold == Fold::Sum { "+" } else { "*" };
    let dtype = ir.vals[vid].dtype;
    let whole = ty(dtype) != Ty::Float;
    let (kind, start) = match (whole, fold == Fold::Sum) {
        (true, true) => ("long long", "0"),
        (true, false) => ("long long", "1"),
        (false, true) => ("float", "0.0f"),
        (false, false) => ("float", "1.0f"),
    };
    let rows: i64 = shape.iter().product::<i64>() / length;
    let spec = Spec {
        name: name.to_owned(),
        walk: Walk::Rows,
        full: shape.clone(),
        folded: vec![dim],
        shape: shape.clone(),
        stages: vec![],
        outputs: vec![(vid, output.to_owned())],
        comment,
    };
    let mut kernel = Kernel::default();
    if cuda && along && !reverse && length % 4 == 0 && matches!(dtype, Dtype::Float32 | Dtype::Int64) {
        w.vector = 4;
    }
    let value = w.value(arg, &at)?;
    let ix = linear(&shape, &at);
    let mut text = vec![];
    if cuda && along {
        // A block a row; each thread scans 4 neighbours, warps and the block are joined by their totals.
        let vector = 4;
        w.scopes[2].push(format!("acc[j] = {};", value.text));
        let mut body = w.take(0);
        let body1 = w.take(1);
        let body2 = w.take(2);
        let stores_vector = w.vector == 4;
        text.push(format!("constexpr int VEC = {vector};"));
        text.push(format!("__shared__ {kind} totals[2][{upper}_THREADS / 32];"));
        text.push("const index_t row = blockIdx.x;".into());
        text.push("const int lane = threadIdx.x;".into());
        decompose("row", &outer, &mut text);
        text.append(&mut body);
        text.push(format!("{kind} carry = {start};"));
        text.push("int side = 0;".into());
        text.push(format!("for (index_t first = 0; first < {length}; first += {upper}_THREADS * VEC, side ^= 1) {{"));
        text.push("const index_t s0 = first + lane * VEC;".into());
        text.push(format!("{kind} acc[VEC] = {{{start}, {start}, {start}, {start}}};"));
        text.push(format!("if (s0 < {length}) {{"));
        if stores_vector {
            text.push("const index_t e0 = s0;".into());
        }
        text.extend(body1);
        text.push("#pragma unroll".into());
        text.push("for (int j = 0; j < VEC; ++j) {".into());
        text.push(format!("if (s0 + j < {length}) {{"));
        text.push(if reverse {
            format!("const index_t e = {} - s0 - j;", length - 1)
        } else {
            "const index_t e = s0 + j;".into()
        });
        text.extend(body2);
        text.push("}".into());
        text.push("}".into());
        text.push("}".into());
        text.push("#pragma unroll".into());
        text.push(format!("for (int j = 1; j < VEC; ++j) acc[j] = acc[j - 1] {operator} acc[j];"));
        text.push(format!("{kind} total = acc[VEC - 1];"));
        text.push("#pragma unroll".into());
        text.push("for (int o = 1; o < 32; o *= 2) {".into());
        text.push(format!("const {kind} left = __shfl_up_sync(0xffffffffu, total, o);"));
        text.push(format!("if (lane % 32 >= o) total = left {operator} total;"));
        text.push("}".into());
        text.push(format!("{kind} before = __shfl_up_sync(0xffffffffu, total, 1);"));
        text.push(format!("if (lane % 32 == 0) before = {start};"));
        text.push("if (lane % 32 == 31) totals[side][lane / 32] = total;".into());
        text.push("__syncthreads();".into());
        text.push(format!("{kind} warps = carry;"));
        text.push("#pragma unroll".into());
        text.push(format!("for (int k = 0; k < {upper}_THREADS / 32; ++k) {{"));
        text.push(format!("const {kind} t = totals[side][k];"));
        text.push(format!("if (k < lane / 32) warps = warps {operator} t;"));
        text.push(format!("carry = carry {operator} t;"));
        text.push("}".into());
        text.push(format!("before = warps {operator} before;"));
        text.push("#pragma unroll".into());
        text.push(format!("for (int j = 0; j < VEC; ++j) acc[j] = before {operator} acc[j];"));
        if stores_vector {
            w.lane = Some(e);
            let base = {
                let rest = ix.without(e);
                let text = w.index(&rest);
                format!("{text} + s0")
            };
            text.push(format!("if (s0 < {length}) store_vector<VEC>({output} + ({base}), acc);"));
        } else {
            text.push("#pragma unroll".into());
            text.push("for (int j = 0; j < VEC; ++j) {".into());
            text.push(format!("if (s0 + j < {length}) {{"));
            text.push(if reverse {
                format!("const index_t e = {} - s0 - j;", length - 1)
            } else {
                "const index_t e = s0 + j;".into()
            });
            let index = w.index(&ix);
            text.push(format!("{output}[{index}] = acc[j];"));
            text.push("}".into());
            text.push("}".into());
        }
        text.push("}".into());
        kernel.knobs.push(Knob { name: format!("{upper}_THREADS"), default: 256, others: vec![128, 512, 1024] });
        launch(
            &mut kernel,
            &w,
            &spec,
            name,
            &[],
            format!("__launch_bounds__({upper}_THREADS) "),
            &text,
            rows.to_string(),
            format!("TUNE[\"{upper}_THREADS\"]"),
            cuda,
        );
    } else {
        // One thread a row or column. On the CPU in double, as PyTorch does.
        let kind = if cuda || whole { kind } else { "double" };
        w.scopes[2].push(format!("total = total {operator} {};", value.text));
        let index = w.index(&ix);
        w.scopes[2].push(format!("{output}[{index}] = {}total;", if whole { "" } else { "(float)" }));
        let body0 = w.take(0);
        let body1 = w.take(1);
        let body2 = w.take(2);
        if cuda {
            text.push(format!("const index_t row = (index_t)blockIdx.x * {upper}_BLOCK + threadIdx.x;"));
            text.push(format!("if (row >= {rows}) return;"));
        } else {
            text.push("#pragma omp parallel for schedule(static)".into());
            text.push(format!("for (index_t row = 0; row < {rows}; ++row) {{"));
        }
        decompose("row", &outer, &mut text);
        text.extend(body0);
        text.extend(body1);
        text.push(format!("{kind} total = {start};"));
        if cuda {
            text.push("#pragma unroll 4".into());
        }
        text.push(format!("for (index_t s = 0; s < {length}; ++s) {{"));
        text.push(if reverse {
            format!("const index_t e = {} - s;", length - 1)
        } else {
            "const index_t e = s;".into()
        });
        text.extend(body2);
        text.push("}".into());
        if !cuda {
            text.push("}".into());
        }
        if cuda {
            kernel.knobs.push(Knob { name: format!("{upper}_BLOCK"), default: 128, others: vec![32, 256] });
        }
        launch(
            &mut kernel,
            &w,
            &spec,
            name,
            &[],
            String::new(),
            &text,
            format!("blocks({rows}, TUNE[\"{upper}_BLOCK\"])"),
            format!("TUNE[\"{upper}_BLOCK\"]"),
            cuda,
        );
    }
    kernel.reads.clone_from(&w.reads);
    Ok(kernel)
}
