//! OptimizationJob: tasks in, verified faster kernels out.
//!
//! Knows the fields, their bounds and their defaults. Must not know who acts on them. What can be said in
//! the schema is said there, so that `kubectl apply` and `kernelfleet run` refuse the same manifests.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Message of the rule on `spec.tasks`.
pub const ONE_SOURCE: &str = "exactly one of inline, configMap, taskSet says where the tasks come from";
/// Message of the rule on `spec.policy`.
pub const ONE_POLICY: &str = "exactly one of endpoint, builtin, replay says who writes the kernels";

/// A set of PyTorch tasks for which faster kernels are wanted.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kernelfleet.dev",
    version = "v1alpha1",
    kind = "OptimizationJob",
    plural = "optimizationjobs",
    shortname = "oj",
    namespaced,
    status = "OptimizationJobStatus",
    derive = "PartialEq",
    printcolumn = r#"{"name":"Tasks","type":"integer","jsonPath":".status.tasks"}"#,
    printcolumn = r#"{"name":"Correct","type":"integer","jsonPath":".status.correct"}"#,
    printcolumn = r#"{"name":"Faster","type":"integer","jsonPath":".status.fasterThanEager"}"#,
    printcolumn = r#"{"name":"Age","type":"date","jsonPath":".metadata.creationTimestamp"}"#
)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct OptimizationJobSpec {
    /// Where the tasks come from: exactly one of the three.
    pub tasks: Tasks,
    /// Who writes the kernels: exactly one of the three; the built-in policy if nothing is said.
    #[serde(default)]
    pub policy: Policy,
    /// How the agents work.
    #[serde(default)]
    pub agent: Agent,
    /// How their candidates are judged.
    #[serde(default)]
    pub judge: Judge,
    /// When a task counts as done before its turns are spent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Target>,
    /// No new episode is started while this is true; running ones are stopped.
    #[serde(default)]
    pub suspend: bool,
    /// Seconds after its end at which the job is deleted; kept if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// Another controller that manages this job, as for `batch/v1` Jobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub managed_by: Option<String>,
}

/// Where tasks come from.
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("[has(self.inline), has(self.configMap), has(self.taskSet)].filter(x, x).size() == 1").message("exactly one of inline, configMap, taskSet says where the tasks come from"))]
pub struct Tasks {
    /// Task files written into the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub inline: Option<Vec<InlineTask>>,
    /// A ConfigMap of the same namespace (locally: of the same file): each key that ends in `.py` is a task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapTasks>,
    /// A TaskSet of the same namespace (locally: what `--tasks` names).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task_set: Option<TaskSetTasks>,
}

/// One task file.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InlineTask {
    /// Short name for tables and result folders: lower-case letters, digits, `-` and `_`.
    #[schemars(length(min = 1, max = 63), regex(pattern = r"^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$"))]
    pub name: String,
    /// Python source in KernelBench's form: `Model`, `get_inputs()`, `get_init_inputs()`.
    #[schemars(length(min = 1, max = 262_144))]
    pub source: String,
}

/// Tasks of a ConfigMap.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ConfigMapTasks {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// Tasks of a TaskSet.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskSetTasks {
    /// Name of the TaskSet.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Which of its tasks; all if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<TaskSelector>,
}

/// Which tasks of a set.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskSelector {
    /// Names of tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 10_000))]
    pub names: Option<Vec<String>>,
    /// At most that many, in the set's order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub limit: Option<i32>,
}

/// Who writes the kernels.
#[derive(KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(validation = Rule::new("[has(self.endpoint), has(self.builtin), has(self.replay)].filter(x, x).size() == 1").message("exactly one of endpoint, builtin, replay says who writes the kernels"))]
pub struct Policy {
    /// A language model behind a ModelEndpoint of the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<EndpointPolicy>,
    /// The optimiser that comes with kernelfleet; it needs no model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub builtin: Option<BuiltinPolicy>,
    /// Actions recorded earlier, played again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<ReplayPolicy>,
}

impl Default for Policy {
    fn default() -> Self {
        Self { endpoint: None, builtin: Some(BuiltinPolicy {}), replay: None }
    }
}

/// A language model.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EndpointPolicy {
    /// Name of the ModelEndpoint.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// One of the endpoint's models.
    #[schemars(length(min = 1, max = 253))]
    pub model: String,
    /// How its answers are drawn.
    #[serde(default)]
    pub sampling: Sampling,
}

/// How answers of a model are drawn.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Sampling {
    /// 0 takes the likeliest token.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 2))]
    pub temperature: f64,
    /// Share of the probability that is drawn from.
    #[serde(default = "one")]
    #[schemars(range(min = 0, max = 1))]
    pub top_p: f64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0 }
    }
}

/// The built-in policy has nothing to choose.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BuiltinPolicy {}

/// Recorded actions.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplayPolicy {
    /// ConfigMap of the same namespace with one trajectory a task.
    #[schemars(length(min = 1, max = 253))]
    pub config_map: String,
}

/// How agents work.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Agent {
    /// Turns of an episode. The built-in policy spends one a candidate.
    #[serde(default = "max_turns")]
    #[schemars(range(min = 1, max = 1000))]
    pub max_turns: i32,
    /// Tokens of the context window.
    #[serde(default = "context_tokens")]
    #[schemars(range(min = 1024, max = 4_194_304))]
    pub context_tokens: i32,
    /// Episodes a task.
    #[serde(default = "one_i32")]
    #[schemars(range(min = 1, max = 256))]
    pub attempts: i32,
    /// Episodes at once; what the namespace allows if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000))]
    pub parallelism: Option<i32>,
    /// Seconds after its start at which an episode is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 2_592_000))]
    pub active_deadline_seconds: Option<i64>,
    /// What an agent pod's sandbox may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// Where agent pods run. An allow-list: nothing that could mount or name what belongs to others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
}

impl Default for Agent {
    fn default() -> Self {
        Self {
            max_turns: max_turns(),
            context_tokens: context_tokens(),
            attempts: 1,
            parallelism: None,
            active_deadline_seconds: None,
            resources: None,
            scheduling: None,
        }
    }
}

/// What a sandbox may use, as Kubernetes quantities.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// Cores, such as `2` or `500m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32))]
    pub cpu: Option<String>,
    /// Memory, such as `4Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32))]
    pub memory: Option<String>,
    /// Disk, such as `10Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32))]
    pub ephemeral_storage: Option<String>,
}

/// Where agent pods run.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scheduling {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// PriorityClass of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// Kueue's LocalQueue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub queue_name: Option<String>,
}

/// How candidates are judged (`docs/measuring.md`).
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Judge {
    /// GpuPool whose judges are used. Local runs have one judge and ignore it.
    #[serde(default = "default_pool")]
    #[schemars(length(min = 1, max = 253))]
    pub gpu_pool: String,
    /// Input sets for each parameter set that a candidate must get right.
    #[serde(default = "inputs")]
    #[schemars(range(min = 2, max = 64))]
    pub inputs: i32,
    /// Arithmetic of the baselines, which sets what counts as equal.
    #[serde(default)]
    pub precision: Precision,
    /// Rule that outputs are compared by; the last two are for tables that are compared with published ones.
    #[serde(default)]
    pub tolerance: Tolerance,
    /// Lowest grade that counts. Verdicts of the CPU device are `observed`.
    #[serde(default)]
    pub minimum_grade: Grade,
    /// Library calls that candidates may make.
    #[serde(default = "libraries")]
    #[schemars(length(max = 2))]
    pub libraries: Vec<Library>,
}

impl Default for Judge {
    fn default() -> Self {
        Self {
            gpu_pool: default_pool(),
            inputs: inputs(),
            precision: Precision::default(),
            tolerance: Tolerance::default(),
            minimum_grade: Grade::default(),
            libraries: libraries(),
        }
    }
}

#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    #[default]
    Reference,
    Tf32,
    Half,
}

#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tolerance {
    #[default]
    Contract,
    Kernelbench,
    CudaAgent,
}

#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Grade {
    Enforced,
    #[default]
    Observed,
}

#[derive(JsonSchema, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Library {
    Matmul,
    Conv,
}

impl Library {
    /// The word that plans and verdicts use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::Conv => "conv",
        }
    }
}

#[derive(JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Baseline {
    #[default]
    Eager,
    Compile,
}

/// When a task counts as done early.
#[derive(JsonSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Target {
    /// Baseline of the speedup.
    #[serde(default)]
    pub baseline: Baseline,
    /// Lower bound of the speedup at which no further turn is spent.
    #[schemars(range(min = 1, max = 10_000))]
    pub speedup: f64,
}

/// What the operator has seen.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OptimizationJobStatus {
    /// Generation of the spec that this status speaks of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// `Validated`, `Started`, `Progressing`, `Succeeded`, `Failed`, `Suspended`.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub conditions: Vec<Condition>,
    /// Tasks of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<i32>,
    /// Episodes by state: `pending`, `running`, `succeeded`, `failed`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub episodes: BTreeMap<String, i32>,
    /// Tasks whose best verdict is correct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct: Option<i32>,
    /// Tasks whose best verdict is faster than eager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_than_eager: Option<i32>,
    /// Tasks whose best verdict is faster than `torch.compile` as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_than_compile: Option<i32>,
}

fn one() -> f64 {
    1.0
}
fn one_i32() -> i32 {
    1
}
fn max_turns() -> i32 {
    200
}
fn context_tokens() -> i32 {
    131_072
}
fn inputs() -> i32 {
    5
}
fn default_pool() -> String {
    "default".into()
}
fn libraries() -> Vec<Library> {
    vec![Library::Matmul, Library::Conv]
}
