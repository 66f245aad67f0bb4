//! The gate of the plan format: what a plan must satisfy before anybody acts on it.
//!
//! Knows the format and its limits, and nothing of devices, images or memory at hand. A plan comes from a hostile
//! process: all sums and products are checked, nothing is allocated by its numbers, and the first thing that is wrong
//! is named with node and field. What can only be known with the task (sizes of inputs, names of parameters, allowed
//! libraries) or with the device image (parameters of kernels, registers) is checked by those who have them.

use std::collections::HashSet;
use std::fmt;
use std::path::{Component, Path};

use super::{Arg, Buffer, BufferKind, Device, Dtype, Fill, Launch, Library, Module, Op, Plan, Structure, TensorRef};

/// Largest plan that is accepted; the defaults are the format's, a judge may narrow them to its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub nodes: usize,
    pub buffers: usize,
    pub modules: usize,
    pub outputs: usize,
    /// Arguments of one launch.
    pub arguments: usize,
    /// Size of one buffer.
    pub buffer_bytes: u64,
    /// Size of all buffers together.
    pub total_bytes: u64,
    /// Dynamic shared memory of one block, bytes.
    pub shared_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            nodes: 20_000,
            buffers: 4_096,
            modules: 64,
            outputs: 256,
            arguments: 128,
            buffer_bytes: 256 << 30,
            total_bytes: 512 << 30,
            // What a block may opt in to on compute capability 9.0.
            shared_bytes: 227 << 10,
        }
    }
}

/// What is wrong with a plan: where, and why, in words for the candidate's author.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Index of the node; `None` for what is not a node's.
    pub node: Option<usize>,
    /// Path of the field: `args[2]`, `buffers[7].bytes`.
    pub field: String,
    pub message: String,
    /// `file:line` that recorded the node.
    pub line: Option<String>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(node) = self.node {
            write!(f, "node {node}")?;
            if let Some(line) = &self.line {
                write!(f, " ({line})")?;
            }
            write!(f, ", ")?;
        }
        write!(f, "{}: {}", self.field, self.message)
    }
}

impl std::error::Error for Problem {}

/// A problem whose node is not known yet.
struct Fault {
    field: String,
    message: String,
}

type Checked<T = ()> = Result<T, Fault>;

fn fault<T>(field: impl Into<String>, message: impl Into<String>) -> Checked<T> {
    Err(Fault { field: field.into(), message: message.into() })
}

/// Longest text that a message quotes.
const QUOTED: usize = 80;
/// Longest name of a kernel, a module or a parameter, bytes.
const NAME: usize = 256;
/// Longest value of a define, bytes.
const VALUE: usize = 1024;
/// Most defines and most flags of one module.
const SETTINGS: usize = 128;
/// Deepest nesting of outputs.
const DEPTH: usize = 32;
/// Highest rank of a tensor.
const RANK: usize = 32;
/// Largest extent, stride or geometry of a library call.
const EXTENT: u64 = i32::MAX as u64;

/// Checks a plan.
///
/// # Errors
/// The first problem, with its node and field.
pub fn validate(plan: &Plan, limits: &Limits) -> Result<(), Problem> {
    let Plan { version, device, buffers, modules, nodes, outputs, structure } = plan;
    let whole = |f: Fault| Problem { node: None, field: f.field, message: f.message, line: None };
    if *version != super::VERSION {
        let message =
            format!("{version} is not the version of this program ({}); record the plan anew", super::VERSION);
        return Err(whole(Fault { field: "version".into(), message }));
    }
    check_buffers(buffers, limits).map_err(whole)?;
    check_modules(modules, *device, limits).map_err(whole)?;
    count("nodes", nodes.len(), limits.nodes).map_err(whole)?;
    let mut written = vec![false; buffers.len()];
    for (index, node) in nodes.iter().enumerate() {
        let at = |f: Fault| Problem { node: Some(index), field: f.field, message: f.message, line: node.line.clone() };
        if node.line.as_ref().is_some_and(|l| l.len() > 2 * NAME || l.chars().any(char::is_control)) {
            // A line that can't be shown is not shown.
            let message = "is too long or holds control characters".into();
            return Err(Problem { node: Some(index), field: "line".into(), message, line: None });
        }
        match &node.op {
            Op::Launch(launch) => check_launch(launch, *device, buffers, modules.len(), limits, &mut written),
            Op::Fill(fill) => check_fill(fill, buffers, &mut written),
            Op::Library(library) => check_library(library, buffers, &mut written),
        }
        .map_err(at)?;
    }
    check_outputs(outputs, structure, buffers, &written, limits).map_err(whole)
}

fn count(field: &str, found: usize, most: usize) -> Checked {
    if found > most {
        return fault(field, format!("{found} of them, at most {most} are allowed"));
    }
    Ok(())
}

/// A text as it may appear in a message.
fn quote(text: &str) -> String {
    let mut short: String = text.chars().take(QUOTED).collect();
    if short.len() < text.len() {
        short.push_str("..");
    }
    format!("{short:?}")
}

// ---- buffers ----

fn check_buffers(buffers: &[Buffer], limits: &Limits) -> Checked {
    count("buffers", buffers.len(), limits.buffers)?;
    let mut seen = HashSet::new();
    let mut total = 0u64;
    for (index, Buffer { kind, bytes }) in buffers.iter().enumerate() {
        let field = |name: &str| format!("buffers[{index}].{name}");
        if *bytes > limits.buffer_bytes {
            return fault(field("bytes"), format!("{bytes} bytes, at most {} are allowed", limits.buffer_bytes));
        }
        total = total.saturating_add(*bytes);
        if total > limits.total_bytes {
            return fault("buffers", format!("all together are over the {} bytes allowed", limits.total_bytes));
        }
        match kind {
            BufferKind::Workspace => continue,
            BufferKind::Input(n) | BufferKind::Constant(n) if *n >= limits.buffers => {
                return fault(field("kind"), format!("number {n} is out of range"));
            }
            BufferKind::Parameter(name)
                if name.is_empty() || name.len() > NAME || name.chars().any(char::is_control) =>
            {
                return fault(field("kind"), format!("{} can't be the name of a parameter", quote(name)));
            }
            BufferKind::Input(_) | BufferKind::Constant(_) | BufferKind::Parameter(_) => {}
        }
        if !seen.insert(kind) {
            return fault(field("kind"), format!("{} has a buffer already", describe(kind)));
        }
    }
    Ok(())
}

fn describe(kind: &BufferKind) -> String {
    match kind {
        BufferKind::Input(n) => format!("input {n}"),
        BufferKind::Parameter(name) => format!("parameter {}", quote(name)),
        BufferKind::Constant(n) => format!("derived constant {n}"),
        BufferKind::Workspace => "a workspace".into(),
    }
}

fn buffer<'a>(field: &str, buffers: &'a [Buffer], index: usize) -> Checked<&'a Buffer> {
    match buffers.get(index) {
        Some(found) => Ok(found),
        None => fault(field, format!("there is no buffer {index}, the plan has {}", buffers.len())),
    }
}

// ---- modules ----

fn check_modules(modules: &[Module], device: Device, limits: &Limits) -> Checked {
    count("modules", modules.len(), limits.modules)?;
    for (index, module) in modules.iter().enumerate() {
        check_module(module, device).map_err(|f| Fault { field: format!("modules[{index}].{}", f.field), ..f })?;
    }
    Ok(())
}

fn check_module(module: &Module, device: Device) -> Checked {
    let Module { path, defines, flags } = module;
    // The path becomes an argument of a compiler: nothing that one could read as an option or a response file.
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./+".contains(c);
    let normal = Path::new(path).components().all(|c| matches!(c, Component::Normal(_)));
    if path.is_empty() || path.len() > NAME || !path.chars().all(plain) || !normal || path.starts_with(['-', '+']) {
        let message = format!(
            "{} is not a relative path without `..` inside the candidate's folder, of letters, digits and _ - . + /",
            quote(path)
        );
        return fault("path", message);
    }
    let extensions: &[&str] = match device {
        Device::Cuda => &["cu"],
        Device::Cpu => &["cpp", "cc", "cxx"],
    };
    let extension = Path::new(path).extension().and_then(|e| e.to_str()).unwrap_or_default();
    if !extensions.contains(&extension) {
        return fault("path", format!("{} must end with .{}", quote(path), extensions.join(" or .")));
    }
    count("defines", defines.len(), SETTINGS)?;
    count("flags", flags.len(), SETTINGS)?;
    let mut names = HashSet::new();
    for (name, value) in defines {
        if !identifier(name) {
            return fault("defines", format!("{} is not a C identifier", quote(name)));
        }
        if !names.insert(name) {
            return fault("defines", format!("{name} is defined twice"));
        }
        // No comma: nvcc splits the value of -D there. No quote, backslash or shell character.
        let allowed = |c: char| c.is_ascii_alphanumeric() || " _.+-*/%()<>:&|^~!=?[]{}".contains(c);
        if value.len() > VALUE || !value.chars().all(allowed) {
            let message = format!(
                "the value {} of {name} may hold letters, digits, blanks and _ . + - * / % ( ) < > : & | ^ ~ ! = ? [ ] {{ }}; \
                 write anything else in the source",
                quote(value)
            );
            return fault("defines", message);
        }
    }
    for flag in flags {
        if !flag_allowed(flag, device) {
            let known = match device {
                Device::Cuda => {
                    "--use_fast_math, -O0 .. -O3, -std=c++14 .. c++20, --maxrregcount=16 .. 255, --fmad=, --ftz=, --prec-div=, \
                     --prec-sqrt=, --extra-device-vectorization, --expt-relaxed-constexpr, --extended-lambda, -Xptxas=-O0 .. -O3, \
                     -Xptxas=-dlcm=ca or cg, -w"
                }
                Device::Cpu => {
                    "-O0 .. -O3, -Ofast, -std=c++14 .. c++20, -ffast-math and its parts, -ffp-contract=, -funroll-loops, \
                     -mprefer-vector-width=, -fno-exceptions, -fno-rtti, -w"
                }
            };
            return fault("flags", format!("{} is not among the flags that are allowed: {known}", quote(flag)));
        }
    }
    Ok(())
}

fn identifier(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= NAME
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Flags that change how code is generated and nothing else: none names a file, another architecture, or a tool.
fn flag_allowed(flag: &str, device: Device) -> bool {
    if matches!(flag, "-O0" | "-O1" | "-O2" | "-O3" | "-w")
        || matches!(flag.strip_prefix("-std="), Some("c++14" | "c++17" | "c++20"))
    {
        return true;
    }
    match device {
        Device::Cpu => matches!(
            flag,
            "-Ofast"
                | "-ffast-math"
                | "-fno-math-errno"
                | "-fno-trapping-math"
                | "-fno-signed-zeros"
                | "-ffinite-math-only"
                | "-fassociative-math"
                | "-freciprocal-math"
                | "-funsafe-math-optimizations"
                | "-ffp-contract=fast"
                | "-ffp-contract=off"
                | "-ffp-contract=on"
                | "-funroll-loops"
                | "-funroll-all-loops"
                | "-fno-exceptions"
                | "-fno-rtti"
                | "-fno-tree-vectorize"
                | "-mprefer-vector-width=128"
                | "-mprefer-vector-width=256"
                | "-mprefer-vector-width=512"
        ),
        Device::Cuda => {
            // nvcc takes its long options with one dash as well.
            let Some(long) = flag.strip_prefix("--").or_else(|| flag.strip_prefix('-')) else { return false };
            match long.split_once('=') {
                None => matches!(
                    long,
                    "use_fast_math"
                        | "extra-device-vectorization"
                        | "expt-relaxed-constexpr"
                        | "extended-lambda"
                        | "expt-extended-lambda"
                        | "restrict"
                ),
                Some(("maxrregcount", n)) => {
                    n.parse::<u32>().is_ok_and(|n| (16..=255).contains(&n) && n.to_string().len() <= 3)
                }
                Some(("fmad" | "ftz" | "prec-div" | "prec-sqrt", value)) => matches!(value, "true" | "false"),
                Some(("Xptxas" | "ptxas-options", value)) => {
                    matches!(value, "-O0" | "-O1" | "-O2" | "-O3" | "-dlcm=ca" | "-dlcm=cg")
                }
                Some(_) => false,
            }
        }
    }
}

// ---- launches and fills ----

fn check_launch(
    launch: &Launch,
    device: Device,
    buffers: &[Buffer],
    modules: usize,
    limits: &Limits,
    written: &mut [bool],
) -> Checked {
    let Launch { module, kernel, grid, block, shared, cluster, cooperative, args } = launch;
    if *module >= modules {
        return fault("module", format!("there is no module {module}, the plan has {modules}"));
    }
    if !identifier(kernel) {
        return fault("kernel", format!("{} is not a C identifier: kernels are `extern \"C\"`", quote(kernel)));
    }
    match device {
        Device::Cpu => check_call(*grid, *block, *shared, *cluster, *cooperative)?,
        Device::Cuda => check_geometry(*grid, *block, *shared, *cluster, limits)?,
    }
    count("args", args.len(), limits.arguments)?;
    for (index, arg) in args.iter().enumerate() {
        if let Arg::Pointer { buffer: target, offset } = arg {
            let field = format!("args[{index}]");
            let found = buffer(&field, buffers, *target)?;
            // The end itself may be named: a tensor without elements lives there.
            if *offset > found.bytes {
                let message = format!("offset {offset} lies behind the {} bytes of buffer {target}", found.bytes);
                return fault(field, message);
            }
            // Who may write is not known of a kernel; what it wrote where it must not is found by comparison.
            if let Some(flag) = written.get_mut(*target) {
                *flag = true;
            }
        }
    }
    Ok(())
}

fn check_call(grid: [u32; 3], block: [u32; 3], shared: u32, cluster: Option<[u32; 3]>, cooperative: bool) -> Checked {
    for (field, bad) in [
        ("grid", grid != [1; 3]),
        ("block", block != [1; 3]),
        ("shared", shared != 0),
        ("cluster", cluster.is_some()),
        ("cooperative", cooperative),
    ] {
        if bad {
            return fault(field, "a function is called once on the CPU: it brings its own loops");
        }
    }
    Ok(())
}

fn check_geometry(grid: [u32; 3], block: [u32; 3], shared: u32, cluster: Option<[u32; 3]>, limits: &Limits) -> Checked {
    within("grid", grid, [i32::MAX.unsigned_abs(), 65_535, 65_535])?;
    within("block", block, [1024, 1024, 64])?;
    let threads = product(block);
    if threads > 1024 {
        return fault("block", format!("{threads} threads, a block has at most 1024"));
    }
    if shared > limits.shared_bytes {
        let message = format!("{shared} bytes of dynamic shared memory, a block has at most {}", limits.shared_bytes);
        return fault("shared", message);
    }
    if let Some(cluster) = cluster {
        within("cluster", cluster, [16; 3])?;
        let blocks = product(cluster);
        if blocks > 16 {
            return fault("cluster", format!("{blocks} blocks, a cluster has at most 16 (8 on every card)"));
        }
        if (0..3).any(|d| !grid[d].is_multiple_of(cluster[d])) {
            return fault("cluster", format!("the grid {grid:?} is not a multiple of the cluster {cluster:?}"));
        }
    }
    Ok(())
}

fn product(extents: [u32; 3]) -> u64 {
    // Each factor has been limited to 1024 before.
    extents.iter().map(|e| u64::from(*e)).product()
}

fn within(field: &str, value: [u32; 3], most: [u32; 3]) -> Checked {
    if value.contains(&0) {
        return fault(field, format!("{value:?} has a zero; leave a launch of nothing out"));
    }
    if (0..3).any(|d| value[d] > most[d]) {
        return fault(field, format!("{value:?} is over the largest, {most:?}"));
    }
    Ok(())
}

fn check_fill(fill: &Fill, buffers: &[Buffer], written: &mut [bool]) -> Checked {
    let Fill { buffer: target, offset, bytes, pattern } = fill;
    let found = buffer("buffer", buffers, *target)?;
    if matches!(found.kind, BufferKind::Parameter(_) | BufferKind::Constant(_)) {
        return fault("buffer", format!("{} can't be filled", describe(&found.kind)));
    }
    if offset.checked_add(*bytes).is_none_or(|end| end > found.bytes) {
        let message = format!("{bytes} bytes from {offset} end behind the {} bytes of buffer {target}", found.bytes);
        return fault("bytes", message);
    }
    if !matches!(pattern.len(), 1 | 2 | 4 | 8) {
        return fault("pattern", format!("{} bytes; 1, 2, 4 or 8 make an element", pattern.len()));
    }
    let size = pattern.len() as u64;
    if !bytes.is_multiple_of(size) || !offset.is_multiple_of(size) {
        return fault("pattern", format!("{size} bytes don't divide offset {offset} and length {bytes}"));
    }
    if let Some(flag) = written.get_mut(*target) {
        *flag = true;
    }
    Ok(())
}

// ---- tensors ----

/// Bytes from the first to behind the last element.
fn span(tensor: &TensorRef) -> Option<u64> {
    if tensor.shape.contains(&0) {
        return Some(0);
    }
    let last = tensor
        .shape
        .iter()
        .zip(&tensor.strides)
        .try_fold(0u64, |sum, (extent, stride)| sum.checked_add((extent - 1).checked_mul(*stride)?))?;
    last.checked_add(1)?.checked_mul(tensor.dtype.size())
}

fn check_tensor<'a>(field: &str, tensor: &TensorRef, buffers: &'a [Buffer]) -> Checked<&'a Buffer> {
    let found = buffer(&format!("{field}.buffer"), buffers, tensor.buffer)?;
    if tensor.shape.len() != tensor.strides.len() || tensor.shape.len() > RANK {
        let (ranks, strides) = (tensor.shape.len(), tensor.strides.len());
        return fault(field, format!("{ranks} extents and {strides} strides; as many of both, at most {RANK}"));
    }
    if !tensor.offset.is_multiple_of(tensor.dtype.size()) {
        let message = format!("{} is no multiple of the element's {} bytes", tensor.offset, tensor.dtype.size());
        return fault(format!("{field}.offset"), message);
    }
    if span(tensor).and_then(|s| s.checked_add(tensor.offset)).is_none_or(|end| end > found.bytes) {
        let message = format!(
            "shape {:?} with strides {:?} from byte {} does not fit into the {} bytes of buffer {}",
            tensor.shape, tensor.strides, tensor.offset, found.bytes, tensor.buffer
        );
        return fault(field, message);
    }
    Ok(found)
}

/// Extents above 1 with their strides: what layout means.
fn dimensions(tensor: &TensorRef) -> Vec<(u64, u64)> {
    tensor.shape.iter().copied().zip(tensor.strides.iter().copied()).filter(|(extent, _)| *extent > 1).collect()
}

/// No two elements at one place, as far as sorted strides show it: each steps over all that lies below.
fn injective(tensor: &TensorRef) -> bool {
    let mut dims = dimensions(tensor);
    dims.sort_by_key(|(_, stride)| *stride);
    let mut below = 0u64;
    dims.into_iter().all(|(extent, stride)| {
        let apart = stride > below;
        below = below.saturating_add((extent - 1).saturating_mul(stride));
        apart
    })
}

/// Whether two views can't share a byte: other buffers, ranges that don't meet, or windows of a common period that
/// don't meet (neighbouring channels of one tensor). Sound, not complete.
fn disjoint(a: &TensorRef, b: &TensorRef) -> bool {
    let (Some(len_a), Some(len_b)) = (span(a), span(b)) else { return false };
    if a.buffer != b.buffer || len_a == 0 || len_b == 0 {
        return true;
    }
    if a.offset.saturating_add(len_a) <= b.offset || b.offset.saturating_add(len_b) <= a.offset {
        return true;
    }
    // Bytes within one period that a view touches, if it never crosses the period's end.
    let window = |t: &TensorRef, period: u64| {
        let size = t.dtype.size();
        let mut inner = size;
        for (extent, stride) in dimensions(t) {
            let step = stride.checked_mul(size)?;
            if !step.is_multiple_of(period) {
                inner = inner.checked_add((extent - 1).checked_mul(step)?)?;
            }
        }
        let start = t.offset % period;
        (start.checked_add(inner)? <= period).then_some((start, start + inner))
    };
    dimensions(a).into_iter().chain(dimensions(b)).any(|(_, stride)| {
        let Some(period) = stride.checked_mul(a.dtype.size()).filter(|p| *p > 0) else { return false };
        match (window(a, period), window(b, period)) {
            (Some(a), Some(b)) => a.1 <= b.0 || b.1 <= a.0,
            _ => false,
        }
    })
}

// ---- library calls ----

fn check_library(library: &Library, buffers: &[Buffer], written: &mut [bool]) -> Checked {
    let (mut operands, bias, out) = match library {
        Library::Matmul { a, b, bias, out } => (vec![("a", a), ("b", b)], bias, out),
        Library::Conv { x, weight, bias, out, .. } => (vec![("x", x), ("weight", weight)], bias, out),
    };
    operands.extend(bias.iter().map(|b| ("bias", b)));
    for (name, tensor) in operands.iter().copied().chain([("out", out)]) {
        check_tensor(name, tensor, buffers)?;
        if tensor.dtype != out.dtype {
            return fault(name, format!("{:?} where the result is {:?}", tensor.dtype, out.dtype));
        }
        if tensor.shape.contains(&0) {
            return fault(name, format!("shape {:?} has no element; leave the call out", tensor.shape));
        }
        if tensor.shape.iter().any(|extent| *extent > EXTENT) {
            return fault(name, format!("shape {:?} has an extent over {EXTENT}", tensor.shape));
        }
    }
    if !matches!(out.dtype, Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float64) {
        return fault("out", format!("{:?}; libraries compute on floating types", out.dtype));
    }
    let target = buffer("out.buffer", buffers, out.buffer)?;
    if target.kind != BufferKind::Workspace {
        return fault("out", format!("{} can't be the target of a library call", describe(&target.kind)));
    }
    if !injective(out) {
        return fault("out", format!("strides {:?} put two elements at one place", out.strides));
    }
    for (name, tensor) in &operands {
        if !disjoint(out, tensor) {
            return fault("out", format!("overlaps {name}; a library reads while it writes"));
        }
    }
    match library {
        Library::Matmul { a, b, bias, out } => check_matmul(a, b, bias.as_ref(), out)?,
        Library::Conv { .. } => check_conv(library)?,
    }
    if let Some(flag) = written.get_mut(out.buffer) {
        *flag = true;
    }
    Ok(())
}

fn check_bias(bias: Option<&TensorRef>, length: u64) -> Checked {
    let Some(bias) = bias else { return Ok(()) };
    if bias.shape != [length] {
        return fault("bias", format!("shape {:?}, the result asks for [{length}]", bias.shape));
    }
    if length > 1 && bias.strides != [1] {
        return fault("bias", format!("stride {:?}; a bias is contiguous", bias.strides));
    }
    Ok(())
}

fn check_matmul(a: &TensorRef, b: &TensorRef, bias: Option<&TensorRef>, out: &TensorRef) -> Checked {
    let rank = out.shape.len();
    if !(2..=3).contains(&rank) || a.shape.len() != rank || b.shape.len() != rank {
        let (a, b) = (a.shape.len(), b.shape.len());
        return fault("out", format!("ranks {a}, {b} and {rank}; all are 2, or all 3 with a batch"));
    }
    let (outer, matrix) = (rank - 2, |t: &TensorRef| [t.shape[rank - 2], t.shape[rank - 1]]);
    let ([m, k], [k2, n]) = (matrix(a), matrix(b));
    let batch = |t: &TensorRef| t.shape[..outer].to_vec();
    if k != k2 || matrix(out) != [m, n] || batch(a) != batch(out) || batch(b) != batch(out) {
        return fault("out", format!("{:?} times {:?} does not give {:?}", a.shape, b.shape, out.shape));
    }
    for (name, tensor) in [("a", a), ("b", b), ("out", out)] {
        let ([rows, columns], strides) = (matrix(tensor), &tensor.strides[outer..]);
        let along = |inner: u64, inner_extent: u64, outer: u64, outer_extent: u64| {
            (inner == 1 || inner_extent == 1) && (outer >= inner_extent || outer_extent == 1)
        };
        if !along(strides[1], columns, strides[0], rows) && !along(strides[0], rows, strides[1], columns) {
            let message = format!(
                "shape {:?} with strides {:?}: one of the last two strides must be 1 and the other span it",
                tensor.shape, tensor.strides
            );
            return fault(name, message);
        }
        if tensor.strides.iter().any(|s| *s > i64::MAX.unsigned_abs() / 8) {
            return fault(name, format!("strides {:?} are too large", tensor.strides));
        }
    }
    check_bias(bias, n)
}

/// Dense in the given order of dimensions; the batch (the outermost) may be further apart.
fn dense(tensor: &TensorRef, order: &[usize], slack: bool) -> bool {
    let mut expected = 1u64;
    for dim in order.iter().rev() {
        let (extent, stride) = (tensor.shape[*dim], tensor.strides[*dim]);
        if extent > 1 && stride != expected && !(slack && *dim == 0 && stride > expected) {
            return false;
        }
        expected = expected.saturating_mul(extent);
    }
    true
}

fn check_conv(call: &Library) -> Checked {
    let Library::Conv { x, weight, bias, out, stride, padding, dilation, groups, transposed, output_padding } = call
    else {
        return Ok(());
    };
    let rank = x.shape.len();
    if !(3..=5).contains(&rank) || weight.shape.len() != rank || out.shape.len() != rank {
        let (weight, out) = (weight.shape.len(), out.shape.len());
        return fault("x", format!("ranks {rank}, {weight} and {out}; all three are the same, from 3 to 5"));
    }
    let space = rank - 2;
    for (name, values, least) in [
        ("stride", stride, 1),
        ("padding", padding, 0),
        ("dilation", dilation, 1),
        ("output_padding", output_padding, 0),
    ] {
        if values.len() != space {
            return fault(name, format!("{} numbers for {space} dimensions", values.len()));
        }
        if values.iter().any(|v| *v < least || u64::from(*v) > EXTENT) {
            return fault(name, format!("{values:?} has a number below {least} or over {EXTENT}"));
        }
    }
    let groups = u64::from(*groups);
    if groups == 0 {
        return fault("groups", "0; there is at least one group");
    }
    let (batch, channels) = (x.shape[0], x.shape[1]);
    // Channels of the result, and whether x fits the weight.
    let (result, fits) = if *transposed {
        let fits = weight.shape[0] == channels && channels.is_multiple_of(groups);
        (weight.shape[1].checked_mul(groups), fits)
    } else {
        let fits = weight.shape[1].checked_mul(groups) == Some(channels) && weight.shape[0].is_multiple_of(groups);
        (Some(weight.shape[0]), fits)
    };
    if !fits || result != Some(out.shape[1]) || out.shape[0] != batch {
        let message =
            format!("x {:?}, weight {:?} and out {:?} don't fit {groups} groups", x.shape, weight.shape, out.shape);
        return fault("out", message);
    }
    for d in 0..space {
        let [s, p, l, extra] = [stride, padding, dilation, output_padding].map(|v| i128::from(v[d]));
        let [size, kernel, found] = [x, weight, out].map(|t| i128::from(t.shape[d + 2]));
        let reach = l * (kernel - 1) + 1;
        if !*transposed && extra != 0 {
            return fault("output_padding", "belongs to a transposed convolution");
        }
        if *transposed && extra >= s.max(l) {
            return fault("output_padding", format!("{extra} must be smaller than stride {s} or dilation {l}"));
        }
        let padded = size + 2 * p;
        let expected =
            if *transposed { (size - 1) * s - 2 * p + reach + extra } else { (padded - reach).div_euclid(s) + 1 };
        if !*transposed && padded < reach {
            return fault("weight", format!("the kernel reaches over {reach} where dimension {d} has {padded}"));
        }
        if expected != found {
            return fault("out", format!("dimension {} has {found} elements, the call gives {expected}", d + 2));
        }
    }
    let first: Vec<usize> = (0..rank).collect();
    let last: Vec<usize> = [0].into_iter().chain(2..rank).chain([1]).collect();
    for (name, tensor, slack) in [("x", x, true), ("weight", weight, false), ("out", out, true)] {
        if !dense(tensor, &first, slack) && !dense(tensor, &last, slack) {
            let message = format!("strides {:?} are neither contiguous nor channels-last", tensor.strides);
            return fault(name, message);
        }
    }
    check_bias(bias.as_ref(), out.shape[1])
}

// ---- outputs ----

fn check_outputs(
    outputs: &[TensorRef],
    structure: &Structure,
    buffers: &[Buffer],
    written: &[bool],
    limits: &Limits,
) -> Checked {
    count("outputs", outputs.len(), limits.outputs)?;
    for (index, output) in outputs.iter().enumerate() {
        let field = format!("outputs[{index}]");
        let found = check_tensor(&field, output, buffers)?;
        let empty = output.shape.contains(&0);
        if found.kind == BufferKind::Workspace && !empty && !written.get(output.buffer).copied().unwrap_or(false) {
            return fault(field, "no launch, fill or library call writes this output");
        }
    }
    let mut found = 0usize;
    let mut values = 0usize;
    let mut left = vec![(structure, 0usize)];
    while let Some((part, depth)) = left.pop() {
        if depth > DEPTH {
            return fault("structure", format!("is nested deeper than {DEPTH}"));
        }
        let inside: Vec<&Structure> = match part {
            Structure::Tensor => {
                found += 1;
                Vec::new()
            }
            Structure::Value(text) => {
                values += 1;
                if text.len() > VALUE {
                    return fault("structure", "holds a value that is too long");
                }
                Vec::new()
            }
            Structure::Tuple(parts) | Structure::List(parts) => parts.iter().collect(),
            Structure::Dict(parts) => {
                let mut keys = HashSet::new();
                for (key, _) in parts {
                    if key.len() > NAME || !keys.insert(key) {
                        return fault("structure", format!("the key {} is too long or there twice", quote(key)));
                    }
                }
                parts.iter().map(|(_, part)| part).collect()
            }
        };
        count("structure", left.len() + inside.len() + found + values, 4 * limits.outputs)?;
        left.extend(inside.into_iter().map(|part| (part, depth + 1)));
    }
    if found != outputs.len() {
        return fault("structure", format!("names {found} tensors, there are {} outputs", outputs.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
