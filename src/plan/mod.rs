//! The launch plan: what a recorded candidate does, as data.
//!
//! Knows the format, its versions and its limits. Must not know who makes or runs a plan. A plan names
//! buffers, modules (device code or a shared library), and nodes in the order in which they run; what it
//! can't say, it can't do. `validate` is the gate: every consumer calls it before it acts on a plan.

use serde::{Deserialize, Serialize};

mod encode;
mod validate;
pub use encode::{Encoded, encode};
pub use validate::{Limits, Problem, validate};

/// Version of the format. A plan of another version is refused.
pub const VERSION: u32 = 1;

/// Where a plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    Cuda,
    Cpu,
}

/// Element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    Float32,
    Float16,
    Bfloat16,
    Float64,
    Int64,
    Int32,
    Int16,
    Int8,
    Uint8,
    Bool,
}

impl Dtype {
    /// Size of one element in bytes.
    #[must_use]
    pub const fn size(self) -> u64 {
        match self {
            Self::Float64 | Self::Int64 => 8,
            Self::Float32 | Self::Int32 => 4,
            Self::Float16 | Self::Bfloat16 | Self::Int16 => 2,
            Self::Int8 | Self::Uint8 | Self::Bool => 1,
        }
    }
}

/// A recorded sequence of launches on named buffers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub version: u32,
    pub device: Device,
    pub buffers: Vec<Buffer>,
    pub modules: Vec<Module>,
    pub nodes: Vec<Node>,
    /// Flat list of output tensors; `structure` says how they are nested.
    pub outputs: Vec<TensorRef>,
    pub structure: Structure,
}

/// One allocation. `bytes` is what may be touched; the allocation may be larger, never shared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Buffer {
    pub kind: BufferKind,
    pub bytes: u64,
}

/// What a buffer holds before the plan runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(rename_all = "lowercase")]
pub enum BufferKind {
    /// The n-th input of `forward`.
    Input(usize),
    /// A parameter or buffer of the state dict, by name.
    Parameter(String),
    /// The n-th derived constant: bytes computed from parameters alone.
    Constant(usize),
    /// Undefined content (noise); outputs that are not inputs or parameters live in one.
    Workspace,
}

/// Code that launches refer to: one source file with its defines and extra flags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Hash)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// Path inside the candidate's folder.
    pub path: String,
    #[serde(default)]
    pub defines: Vec<(String, String)>,
    #[serde(default)]
    pub flags: Vec<String>,
}

/// A strided view of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRef {
    pub buffer: usize,
    /// Byte offset of the first element.
    #[serde(default)]
    pub offset: u64,
    pub dtype: Dtype,
    pub shape: Vec<u64>,
    /// Strides in elements; never negative.
    pub strides: Vec<u64>,
}

/// How outputs are nested.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Structure {
    Tensor,
    Tuple(Vec<Structure>),
    List(Vec<Structure>),
    Dict(Vec<(String, Structure)>),
    /// A Python value that is not a tensor, by `repr`.
    Value(String),
}

/// One step. Steps run in order; step n+1 sees all that step n wrote.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    #[serde(flatten)]
    pub op: Op,
    /// `file:line` of the candidate that recorded it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum Op {
    Launch(Launch),
    Fill(Fill),
    Library(Library),
}

/// A kernel launch; on the CPU a call of a function of the shared library (grid and block are 1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Launch {
    pub module: usize,
    pub kernel: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    #[serde(default)]
    pub shared: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cluster: Option<[u32; 3]>,
    #[serde(default)]
    pub cooperative: bool,
    pub args: Vec<Arg>,
}

/// One argument of a launch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Arg {
    /// Address of `buffer` plus `offset` bytes.
    Pointer {
        buffer: usize,
        offset: u64,
    },
    /// A null pointer.
    Null,
    /// An integer of the width that the kernel's parameter has.
    Int(i64),
    /// A floating value of the width that the kernel's parameter has; C `float` on the CPU.
    Float(f64),
    F16(f64),
    F32(f64),
    F64(f64),
    I32(i32),
    I64(i64),
    U32(u32),
    U8(u8),
}

/// `bytes` bytes from `offset` set to a repeated element.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fill {
    pub buffer: usize,
    pub offset: u64,
    pub bytes: u64,
    /// Bytes of one element, 1, 2, 4 or 8 of them.
    pub pattern: Vec<u8>,
}

/// A call of a vendor's library that the task allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum Library {
    /// `out = a @ b (+ bias)`: 2-D, or 3-D with a batch. One of the last two strides of each operand is 1.
    Matmul { a: TensorRef, b: TensorRef, bias: Option<TensorRef>, out: TensorRef },
    /// Convolution over 1 to 3 dimensions, `x` of rank 3 to 5; contiguous or channels-last by its strides.
    Conv {
        x: TensorRef,
        weight: TensorRef,
        bias: Option<TensorRef>,
        out: TensorRef,
        stride: Vec<u32>,
        padding: Vec<u32>,
        dilation: Vec<u32>,
        groups: u32,
        transposed: bool,
        output_padding: Vec<u32>,
    },
}
