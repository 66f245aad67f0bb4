//! The operator graph of a reference, as the reference host traces it (`docs/interfaces.md`, `trace`).
//!
//! Knows the format. Must not know who uses it.

use serde::{Deserialize, Serialize};

use crate::plan::{Dtype, Structure};

/// Shape, strides (in elements) and type of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TensorMeta {
    pub dtype: Dtype,
    pub shape: Vec<i64>,
    pub strides: Vec<i64>,
}

/// An input of `forward`: a tensor, or a Python value that is the same in every input set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Input {
    pub id: String,
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub meta: Option<TensorMeta>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<serde_json::Value>,
}

/// A parameter or buffer of the state dict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Parameter {
    pub id: String,
    pub name: String,
    #[serde(flatten)]
    pub meta: TensorMeta,
    /// A registered buffer (running statistics, masks) and not a parameter.
    #[serde(default)]
    pub buffer: bool,
}

/// One ATen operator. `args` are JSON literals, `{"t": id}`, `{"dtype": ..}`, `{"inf": 1}`, or lists of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpNode {
    pub id: String,
    /// All results; more than one for operators with several.
    pub ids: Vec<String>,
    /// `aten.relu.default`
    pub op: String,
    pub args: Vec<serde_json::Value>,
    #[serde(default)]
    pub kwargs: serde_json::Map<String, serde_json::Value>,
    pub outputs: Vec<Option<TensorMeta>>,
    /// Line of the task's source.
    #[serde(default)]
    pub line: Option<u32>,
    /// Path of the submodule that calls it (`conv`, `layers.0`), empty for the model itself.
    #[serde(default)]
    pub module: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    pub inputs: Vec<Input>,
    pub parameters: Vec<Parameter>,
    pub nodes: Vec<OpNode>,
    pub outputs: Vec<String>,
    pub structure: Structure,
}
