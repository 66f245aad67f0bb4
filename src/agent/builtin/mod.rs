//! The built-in policy: a small fusion compiler that writes candidates as a model would.
//!
//! It reads a task's operator graph and its class, recognises families of operators, writes fused kernels for
//! what is bound by memory, leaves dense products and convolutions to the allowed libraries, names what may be
//! tuned, and says what it doesn't attempt. It knows the graph, the task's source and a few facts of the device;
//! it must not know how candidates are judged: `search` is given a function for that.
//!
//! ```text
//!  graph --lower--> values --(layout)--> values --schedule--> steps --kernels, tile, emit--> C and CUDA
//!  source --python--> class without forward ---------------------------\
//!                                                             propose --> candidates --search--> the best
//! ```

mod compose;
mod emit;
mod gemm;
mod index;
mod ir;
mod kernels;
mod layout;
mod lower;
mod ops;
mod python;
mod schedule;
#[cfg(test)]
mod tests;
mod tile;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::judge::TaskSource;
use crate::plan::{Device, Structure};
use crate::task::graph::Graph;
pub use kernels::Knob;

/// What the policy wants to know of a device.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Multiprocessors of the card.
    pub multiprocessors: i64,
    /// Threads of the CPU device.
    pub threads: i64,
    /// Longest row that is kept in registers between passes, in elements.
    pub register_row: i64,
    /// Rows longer than this are folded by several blocks where there are few of them.
    pub long_row: i64,
    /// Channels-last convolutions are proposed on the CPU device too, where they are seldom faster: for tests, since
    /// a candidate of that device can be run anywhere.
    pub layouts_on_cpu: bool,
    /// Matrix products are written for tensor cores, where they are fit for it; set by `propose`.
    pub products: bool,
    /// Some tensor needs 64-bit indices; set by `propose`.
    pub wide: bool,
}

impl Default for Facts {
    fn default() -> Self {
        Self {
            multiprocessors: 132,
            threads: 1,
            register_row: 32768,
            long_row: 65536,
            layouts_on_cpu: false,
            products: false,
            wide: false,
        }
    }
}

/// Why there is no candidate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the built-in policy doesn't attempt {operator}{}: {reason}", line.map(|l| format!(" (line {l})")).unwrap_or_default())]
pub struct Declined {
    pub operator: String,
    pub line: Option<u32>,
    pub reason: String,
}

/// One candidate of a proposal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Variant {
    pub files: BTreeMap<String, String>,
    /// What distinguishes it from others of its form, in words.
    pub parameters: String,
}

/// One way to cut a task into kernels and library calls, with what may be tuned in it.
#[derive(Clone, Debug)]
pub struct Form {
    /// What distinguishes it from the task's other forms, where there are several.
    pub label: Option<&'static str>,
    /// What was fused or left to a library, step by step.
    pub covered: Vec<String>,
    knobs: Vec<Knob>,
    model: String,
    kernels: Option<(String, String)>,
}

/// Candidates for a task.
#[derive(Clone, Debug)]
pub struct Proposal {
    /// The more promising form first; there is at least one.
    pub forms: Vec<Form>,
}

/// At most so many candidates are proposed of one form.
pub const CANDIDATES: usize = 12;

/// Channels of a convolution from which on the channels-last layout is the more promising one, and what they must
/// be a multiple of: tensor cores take whole groups.
const CHANNELS: (i64, i64) = (8, 4);

/// Writes candidates for a task.
///
/// # Errors
/// The operator that the policy doesn't attempt, with its line and the reason.
pub fn propose(task: &TaskSource, graph: &Graph, device: Device, facts: &Facts) -> Result<Proposal, Declined> {
    let whole = |reason: String| Declined { operator: task.name.clone(), line: None, reason };
    let reference = python::take_over(&task.source).map_err(whole)?;
    let lowered = lower::lower(graph, device, false)?;
    if device == Device::Cpu
        && lowered
            .ir
            .vals
            .iter()
            .any(|val| matches!(val.dtype, crate::plan::Dtype::Float16 | crate::plan::Dtype::Bfloat16))
    {
        return Err(whole("half precision on the CPU device is not attempted".into()));
    }
    let form = |lowered: &lower::Lowered, label, products| -> Result<Form, Declined> {
        let mut facts = facts.clone();
        facts.products = products;
        facts.wide = lowered.ir.vals.iter().any(|val| {
            // A view's size counts too: kernels walk it.
            index::numel(&val.shape) > i64::from(i32::MAX) - 65536 * 8
        });
        let steps =
            schedule::Scheduler::new(&lowered.ir, device, &facts, &reference.arguments).run(&lowered.outputs)?;
        let kernels = if steps.source.is_empty() {
            None
        } else {
            let name = if device == Device::Cuda { "kernels/fused.cu" } else { "kernels/fused.cpp" };
            Some((name.to_owned(), source(&steps.source, device, facts.wide)))
        };
        let model = model(task, graph, &reference, &steps, kernels.as_ref().map(|k| k.0.as_str())).map_err(whole)?;
        Ok(Form { label, covered: steps.covered, knobs: steps.knobs, model, kernels })
    };
    // Where a task can't be written channels-last, nothing is lost.
    let layouts = device == Device::Cuda || facts.layouts_on_cpu;
    let last = if layouts { layout::channels_last(&lowered) } else { None };
    let (last, channels) =
        last.map_or((None, vec![]), |(last, channels)| (form(&last, Some("channels last"), false).ok(), channels));
    let mut forms = vec![form(&lowered, last.as_ref().map(|_| "channels first"), false)?];
    if let Some(last) = last {
        let (least, multiple) = CHANNELS;
        let promising = |size: i64| size >= least && size % multiple == 0;
        let first = channels.iter().all(|&(from, to)| promising(from) && promising(to));
        forms.insert(usize::from(!first), last);
    }
    // A product on tensor cores beside the library's, which keeps what has no form of its own.
    if device == Device::Cuda && lowered.ir.vals.iter().any(|val| matches!(val.def, ir::Def::Matmul { .. })) {
        let written = form(&lowered, Some("products on tensor cores"), true)?;
        if written.covered != forms[0].covered {
            forms[0].label.get_or_insert("products by the library");
            forms.insert(0, written);
        }
    }
    // Depthwise convolutions are bound by memory, so they can be fused; a library's kernel for them is slow for some windows.
    if layouts {
        let windows = lower::lower(graph, device, true)?;
        if windows.ir.vals.iter().map(|val| &val.def).ne(lowered.ir.vals.iter().map(|val| &val.def)) {
            // Where they can't be written so, nothing is lost.
            if let Ok(written) = form(&windows, Some("depthwise convolutions by windows"), false) {
                forms[0].label.get_or_insert("depthwise convolutions by the library");
                forms.insert(0, written);
            }
        }
    }
    Ok(Proposal { forms })
}

impl Form {
    /// The defaults first, then one change each: near values first, of all kernels in turn.
    #[must_use]
    pub fn candidates(&self) -> Vec<Variant> {
        let mut candidates = vec![self.variant(&BTreeMap::new())];
        let deepest = self.knobs.iter().map(|k| k.others.len()).max().unwrap_or(0);
        for depth in 0..deepest {
            for knob in &self.knobs {
                if let Some(&value) = knob.others.get(depth)
                    && candidates.len() < CANDIDATES
                {
                    candidates.push(self.variant(&BTreeMap::from([(knob.name.clone(), value)])));
                }
            }
        }
        candidates
    }

    /// The candidate with these parameters, the others at their defaults.
    #[must_use]
    pub fn variant(&self, chosen: &BTreeMap<String, i64>) -> Variant {
        let values: Vec<(String, i64)> = self
            .knobs
            .iter()
            .map(|knob| (knob.name.clone(), chosen.get(&knob.name).copied().unwrap_or(knob.default)))
            .collect();
        let tune = values.iter().map(|(name, value)| format!("\"{name}\": {value}")).collect::<Vec<_>>().join(", ");
        let mut files = BTreeMap::from([("model_new.py".to_owned(), self.model.replace("@TUNE@", &tune))]);
        if let Some((path, text)) = &self.kernels {
            files.insert(path.clone(), text.clone());
        }
        let changed = chosen.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(", ");
        Variant { files, parameters: if changed.is_empty() { "defaults".into() } else { changed } }
    }
}

/// The kernels' file: what all kernels share, the functions that they call, the kernels.
fn source(kernels: &str, device: Device, wide: bool) -> String {
    let index = if wide || device == Device::Cpu { "long long" } else { "int" };
    let mut out = String::new();
    if device == Device::Cuda {
        out.push_str("#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n\n");
    } else {
        out.push_str("#include <cmath>\n#include <cstdint>\n\n#include \"kernelfleet_math.h\"\n\n");
    }
    let _ = writeln!(out, "using index_t = {index};\n");
    if kernels.contains("load_vector<") || kernels.contains("store_vector<") {
        out.push_str(
            "// N neighbours in one memory access; addresses are multiples of N elements.\n\
             template <typename T, int N>\nstruct alignas(sizeof(T) * N) Vector {\n  T item[N];\n};\n\
             template <int N, typename T>\n__device__ __forceinline__ void load_vector(T (&to)[N], const T* from) {\n  \
             const Vector<T, N> vector = *reinterpret_cast<const Vector<T, N>*>(from);\n#pragma unroll\n  \
             for (int k = 0; k < N; ++k) to[k] = vector.item[k];\n}\n\
             template <int N, typename T>\n__device__ __forceinline__ void store_vector(T* to, const T (&from)[N]) {\n  \
             Vector<T, N> vector;\n#pragma unroll\n  for (int k = 0; k < N; ++k) vector.item[k] = from[k];\n  \
             *reinterpret_cast<Vector<T, N>*>(to) = vector;\n}\n\n",
        );
    }
    if kernels.contains(gemm::CALL) {
        out.push_str(gemm::KERNEL);
        out.push('\n');
    }
    let functions = ops::functions(kernels, device);
    if !functions.is_empty() {
        out.push_str(&functions);
        out.push('\n');
    }
    out.push_str(kernels.trim_end());
    out.push('\n');
    out
}

/// `model_new.py`, with `@TUNE@` where the parameters go.
fn model(
    task: &TaskSource,
    graph: &Graph,
    reference: &python::Reference,
    steps: &schedule::Steps,
    kernels: Option<&str>,
) -> Result<String, String> {
    let mut out = format!("# {}: written by the built-in policy.\n", task.name);
    for step in &steps.covered {
        let _ = writeln!(out, "#   {step}");
    }
    let mut module = reference.module.clone();
    if !module.lines().any(|line| line == "import torch") {
        module.insert_str(0, "import torch\n");
    }
    // After `from __future__`, which must come first.
    out.push_str(module.trim_end());
    out.push_str("\n\nimport kernelfleet_ext as kf\n\n");
    if let Some(path) = kernels {
        out.push_str("TUNE = {@TUNE@}\n");
        // Neither errno nor traps: with them, square roots and choices keep loops from becoming vectors. Nothing
        // changes for NaN and infinities. Products are rounded before they are added, as PyTorch's are: what is
        // subtracted from itself is zero.
        let flags = ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"];
        let flags = if path.ends_with(".cpp") { format!(", flags={flags:?}") } else { String::new() };
        let _ = writeln!(out, "KERNELS = kf.load(\"{path}\", defines=TUNE{flags})");
        if steps.lines.iter().any(|line| line.contains("blocks(")) {
            out.push_str("\n\ndef blocks(count, each):\n    return -(-count // each)\n");
        }
    }
    let _ = write!(out, "\n\n{}\n\n", reference.class);
    let indent = &reference.indent;
    let _ = writeln!(out, "{indent}{}", reference.signature);
    for line in &steps.lines {
        let _ = writeln!(out, "{indent}{indent}{line}");
    }
    let mut outputs = steps.outputs.iter();
    let value = nested(&graph.structure, &mut outputs)?;
    let _ = writeln!(out, "{indent}{indent}return {value}");
    Ok(out)
}

/// The value of `forward` from its tensors.
fn nested(structure: &Structure, tensors: &mut std::slice::Iter<'_, String>) -> Result<String, String> {
    let list = |items: &[Structure], tensors: &mut std::slice::Iter<'_, String>| {
        items.iter().map(|item| nested(item, tensors)).collect::<Result<Vec<_>, _>>()
    };
    Ok(match structure {
        Structure::Tensor => tensors.next().cloned().ok_or("the graph has fewer outputs than forward returns")?,
        Structure::Tuple(items) => format!("({},)", list(items, tensors)?.join(", ")),
        Structure::List(items) => format!("[{}]", list(items, tensors)?.join(", ")),
        Structure::Dict(items) => {
            let mut parts = vec![];
            for (key, item) in items {
                parts.push(format!("{key:?}: {}", nested(item, tensors)?));
            }
            format!("{{{}}}", parts.join(", "))
        }
        Structure::Value(text) => text.clone(),
    })
}
