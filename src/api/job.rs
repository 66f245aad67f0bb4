//! OptimizationJob: tasks in, verified faster kernels out.
//!
//! Knows the fields, their bounds and their defaults. Must not know who acts on them. What can be said in
//! the schema is said there, so that `kubectl apply` and `kernelfleet run` refuse the same manifests.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Message of the rule on `spec.tasks`.
pub const ONE_SOURCE: &str = "exactly one of inline, configMap, taskSet says where the tasks come from";
/// Message of the rule on `spec.policy`.
pub const ONE_POLICY: &str = "exactly one of endpoint, builtin, replay says who writes the kernels";

/// Value of `spec.managedBy` that means this operator, as does leaving it out.
pub const MANAGER: &str = "kernelfleet.dev/operator";
/// Results that a status holds.
pub const MOST_RESULTS: usize = 64;

/// A rule that freezes fields of the spec once the status says that the job has started.
fn frozen(fields: &[&str]) -> String {
    let same = fields.iter().map(|f| {
        format!(
            "(has(self.spec.{f}) ? has(oldSelf.spec.{f}) && self.spec.{f} == oldSelf.spec.{f} : !has(oldSelf.spec.{f}))"
        )
    });
    let same: Vec<String> = same.collect();
    format!(
        "!has(oldSelf.status) || !has(oldSelf.status.conditions) || \
         !oldSelf.status.conditions.exists(c, c.type == 'Started' && c.status == 'True') || ({})",
        same.join(" && ")
    )
}

/// A set of PyTorch tasks for which faster kernels are wanted.
///
/// The spec may be corrected until the condition `Started` is true; from then on `suspend`, `ttlSecondsAfterFinished` and
/// `agent.parallelism` alone can be changed.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "kernelfleet.dev",
    version = "v1alpha1",
    kind = "OptimizationJob",
    plural = "optimizationjobs",
    shortname = "oj",
    namespaced,
    category = "kernelfleet",
    status = "OptimizationJobStatus",
    derive = "PartialEq",
    validation = Rule::new("self.metadata.name.size() <= 52 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')").message("a job's name has at most 52 lower-case letters, digits and -, since the names of its pods begin with it"),
    validation = Rule::new(frozen(&["tasks"])).message("spec.tasks is frozen since the job has started; make a new OptimizationJob for other tasks"),
    validation = Rule::new(frozen(&["policy"])).message("spec.policy is frozen since the job has started; make a new OptimizationJob for another policy"),
    validation = Rule::new(frozen(&["judge"])).message("spec.judge is frozen since the job has started; make a new OptimizationJob to judge otherwise"),
    validation = Rule::new(frozen(&["target"])).message("spec.target is frozen since the job has started; make a new OptimizationJob for another target"),
    validation = Rule::new(frozen(&["managedBy"])).message("spec.managedBy is frozen since the job has started; make a new OptimizationJob for another controller"),
    validation = Rule::new(frozen(&["agent.maxTurns", "agent.contextTokens", "agent.attempts"])).message("spec.agent is frozen since the job has started, all but parallelism; make a new OptimizationJob for other limits"),
    validation = Rule::new(frozen(&["agent.activeDeadlineSeconds", "agent.resources", "agent.scheduling"])).message("spec.agent is frozen since the job has started, all but parallelism; make a new OptimizationJob for other pods"),
    printcolumn = r#"{"name":"State","type":"string","jsonPath":".status.conditions[?(@.type==\"Progressing\")].reason"}"#,
    printcolumn = r#"{"name":"Tasks","type":"integer","jsonPath":".status.tasks"}"#,
    printcolumn = r#"{"name":"Running","type":"integer","jsonPath":".status.episodes.running"}"#,
    printcolumn = r#"{"name":"Correct","type":"integer","jsonPath":".status.correct"}"#,
    printcolumn = r#"{"name":"Faster","type":"integer","jsonPath":".status.fasterThanEager","description":"Tasks whose best kernel is faster than eager PyTorch"}"#,
    printcolumn = r#"{"name":"Speedup","type":"number","jsonPath":".status.geomean.eager","description":"Geometric mean over eager PyTorch, of correct tasks"}"#,
    printcolumn = r#"{"name":"Untrusted","type":"integer","jsonPath":".status.untrusted","description":"Tasks whose best kernel was measured while others used the device"}"#,
    printcolumn = r#"{"name":"Pool","type":"string","jsonPath":".spec.judge.gpuPool","priority":1}"#,
    printcolumn = r#"{"name":"Turns","type":"integer","jsonPath":".status.turns","priority":1}"#,
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
    /// No new episode is started while this is true; running ones are stopped, and begin again on resumption. What has
    /// been finished stays.
    #[serde(default)]
    pub suspend: bool,
    /// Seconds after its end at which the job is deleted; kept if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 31_536_000))]
    pub ttl_seconds_after_finished: Option<i32>,
    /// The controller that manages this job, as for `batch/v1` Jobs: kernelfleet's operator leaves a job alone whose
    /// value isn't `kernelfleet.dev/operator`.
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
    #[schemars(length(min = 1, max = 64), extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"]))]
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
    #[schemars(length(min = 1, max = 10_000), inner(length(min = 1, max = 253)))]
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
    /// Episodes at once; 64 if nothing is said.
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
#[derive(KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// Cores, such as `2` or `500m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("isQuantity(self)").message("not a quantity such as 500m, 2 or 4Gi"))]
    #[schemars(length(min = 1, max = 32))]
    pub cpu: Option<String>,
    /// Memory, such as `4Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("isQuantity(self)").message("not a quantity such as 500m, 2 or 4Gi"))]
    #[schemars(length(min = 1, max = 32))]
    pub memory: Option<String>,
    /// Disk, such as `10Gi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("isQuantity(self)").message("not a quantity such as 500m, 2 or 4Gi"))]
    #[schemars(length(min = 1, max = 32))]
    pub ephemeral_storage: Option<String>,
}

/// Where agent pods run.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Scheduling {
    /// Labels that a node must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32, "additionalProperties" = { "type": "string", "maxLength": 63 }))]
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
    #[schemars(length(max = 2), extend("x-kubernetes-list-type" = "set"))]
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
    /// `Validated`, `Started`, `Progressing`, `Succeeded`, `Failed`, `Suspended`. The reason of `Progressing` is the state
    /// in one word.
    #[serde(default)]
    #[schemars(schema_with = "super::conditions")]
    pub conditions: Vec<Condition>,
    /// When the job's pods were first allowed to run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,
    /// When it succeeded or failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,
    /// Tasks of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tasks: Option<i32>,
    /// Episodes by state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub episodes: Option<Episodes>,
    /// Turns of all episodes that count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turns: Option<i64>,
    /// Tokens that models have read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Tokens>,
    /// Tasks whose best verdict is correct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub correct: Option<i32>,
    /// Tasks of which the policy said that it can't do them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub declined: Option<i32>,
    /// Tasks whose best verdict is faster than eager.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_than_eager: Option<i32>,
    /// Tasks whose best verdict is faster than `torch.compile` as well.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_than_compile: Option<i32>,
    /// Shares of all tasks, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rates: Option<Rates>,
    /// Tasks whose best kernel was measured while others used the device: neither its speedup nor its reward is to be trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untrusted: Option<i32>,
    /// Geometric means of the speedups of correct tasks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub geomean: Option<Speedups>,
    /// Seconds of GPU slices that were spent on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_seconds: Option<f64>,
    /// Evaluations that wait for a judge.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queued: Option<i32>,
    /// The best result of each task, the fastest first, at most 64; then tasks that have none (reward 0), with the reason.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub results: Vec<TaskResult>,
    /// Where the best kernels are; `kernelfleet results` fetches them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub best: Option<BestKernels>,
    /// Name of the `batch/v1` Job whose pods are the episodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_job: Option<String>,
}

/// Episodes by state.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Episodes {
    /// Not begun, or to begin again.
    #[serde(default)]
    pub pending: i32,
    /// Begun and not ended.
    #[serde(default)]
    pub running: i32,
    /// Ended with a correct candidate.
    #[serde(default)]
    pub succeeded: i32,
    /// Ended without one.
    #[serde(default)]
    pub failed: i32,
    /// Ended by faults alone; they say nothing of the policy.
    #[serde(default)]
    pub faulted: i32,
}

/// Tokens of models.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tokens {
    /// Read by models.
    #[serde(default)]
    pub read: i64,
    /// Written by models.
    #[serde(default)]
    pub written: i64,
}

/// Shares of all tasks.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// With a correct verdict.
    #[serde(default)]
    pub correct: f64,
    /// Faster than eager.
    #[serde(default)]
    pub faster_than_eager: f64,
    /// Faster than `torch.compile` as well.
    #[serde(default)]
    pub faster_than_compile: f64,
}

/// Speedups over the two baselines; absent where nothing was measured.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Speedups {
    /// Over eager PyTorch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eager: Option<f64>,
    /// Over `torch.compile`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compile: Option<f64>,
}

/// The best result of one task.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TaskResult {
    /// Name of the task.
    #[schemars(length(max = 253))]
    pub task: String,
    /// Episode that it is of.
    #[serde(default)]
    pub episode: i32,
    /// -1 not correct, 1 correct, 2 faster than eager, 3 than `torch.compile` too; 0 nothing was judged, `reason` says why.
    #[serde(default)]
    pub reward: i32,
    /// `enforced` or `observed`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32))]
    pub grade: String,
    /// `exclusive`, or `shared` where others used the device while it was measured: then neither `speedup` nor `reward` is to
    /// be trusted.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32))]
    pub measurement: String,
    /// Median speedups.
    #[serde(default)]
    pub speedup: Speedups,
    /// Content address of the candidate.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128))]
    pub candidate: String,
    /// Why it is no better, where a sentence says it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 256))]
    pub reason: String,
}

/// Where the best kernels are.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BestKernels {
    /// ConfigMap of the same namespace: `<task>.tar.gz` with `model_new.py`, `kernels/`, `task.py` and `verdict.json`.
    #[schemars(length(max = 253))]
    pub config_map: String,
    /// Tasks whose kernels it holds.
    #[serde(default)]
    pub tasks: i32,
    /// Tasks whose kernels didn't fit into it; `results` has their addresses in the broker's store.
    #[serde(default)]
    pub left_out: i32,
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
