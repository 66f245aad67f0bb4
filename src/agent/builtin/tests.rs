//! Whole proposals: snapshots to review, and a sweep over traced graphs in a folder that the environment names.

use super::*;

/// A task of one module and its trace.
fn case(init: &str, forward: &str, graph: &str) -> (TaskSource, Graph) {
    let source = format!(
        "import torch\nimport torch.nn as nn\n\n\nclass Model(nn.Module):\n    def __init__(self):\n        \
         super().__init__()\n        {init}\n\n    def forward(self, x):\n        return {forward}\n\n\n\
         def get_inputs():\n    return [torch.rand(2)]\n"
    );
    (TaskSource { name: "case".into(), path: "case.py".into(), source }, serde_json::from_str(graph).unwrap())
}

fn first(task: &TaskSource, graph: &Graph, device: Device) -> String {
    let proposal = propose(task, graph, device, &Facts::default()).unwrap();
    let plain = proposal.forms.iter().find(|form| form.label != Some("channels last")).unwrap();
    shown(plain)
}

fn shown(form: &Form) -> String {
    let mut out = String::new();
    let candidates = form.candidates();
    for (path, text) in &candidates[0].files {
        let _ = writeln!(out, "--- {path}\n{text}");
    }
    for variant in &candidates[1..] {
        let _ = writeln!(out, "--- variant: {}", variant.parameters);
    }
    out
}

const SOFTMAX: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[128,4096],"strides":[4096,1]}],"parameters":[],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten._softmax.default","args":[{"t":"i0"},1,false],"outputs":[{"dtype":"float32","shape":[128,4096],"strides":[4096,1]}],"line":12}],
"outputs":["t0"],"structure":"tensor"}"#;

const GELU: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[64,1000],"strides":[1000,1]}],"parameters":[],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.gelu.default","args":[{"t":"i0"}],"outputs":[{"dtype":"float32","shape":[64,1000],"strides":[1000,1]}]},
{"id":"t1","ids":["t1"],"op":"aten.mul.Tensor","args":[{"t":"t0"},{"t":"i0"}],"outputs":[{"dtype":"float32","shape":[64,1000],"strides":[1000,1]}]},
{"id":"t2","ids":["t2"],"op":"aten.clamp.default","args":[{"t":"t1"},-1.0,{"inf":1}],"outputs":[{"dtype":"float32","shape":[64,1000],"strides":[1000,1]}]}],
"outputs":["t2"],"structure":"tensor"}"#;

const LINEAR: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[64,256],"strides":[256,1]}],
"parameters":[{"id":"p0","name":"fc.weight","dtype":"float32","shape":[512,256],"strides":[256,1]},{"id":"p1","name":"fc.bias","dtype":"float32","shape":[512],"strides":[1]}],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.t.default","args":[{"t":"p0"}],"outputs":[{"dtype":"float32","shape":[256,512],"strides":[1,256]}]},
{"id":"t1","ids":["t1"],"op":"aten.addmm.default","args":[{"t":"p1"},{"t":"i0"},{"t":"t0"}],"outputs":[{"dtype":"float32","shape":[64,512],"strides":[512,1]}]},
{"id":"t2","ids":["t2"],"op":"aten.sigmoid.default","args":[{"t":"t1"}],"outputs":[{"dtype":"float32","shape":[64,512],"strides":[512,1]}]},
{"id":"t3","ids":["t3"],"op":"aten.mul.Tensor","args":[{"t":"t2"},{"t":"t1"}],"outputs":[{"dtype":"float32","shape":[64,512],"strides":[512,1]}]}],
"outputs":["t3"],"structure":"tensor"}"#;

const SUMMED: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[64,256],"strides":[256,1]}],
"parameters":[{"id":"p0","name":"fc.weight","dtype":"float32","shape":[512,256],"strides":[256,1]},{"id":"p1","name":"fc.bias","dtype":"float32","shape":[512],"strides":[1]}],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.t.default","args":[{"t":"p0"}],"outputs":[{"dtype":"float32","shape":[256,512],"strides":[1,256]}]},
{"id":"t1","ids":["t1"],"op":"aten.addmm.default","args":[{"t":"p1"},{"t":"i0"},{"t":"t0"}],"outputs":[{"dtype":"float32","shape":[64,512],"strides":[512,1]}]},
{"id":"t2","ids":["t2"],"op":"aten.sum.dim_IntList","args":[{"t":"t1"},[1],true],"outputs":[{"dtype":"float32","shape":[64,1],"strides":[1,1]}]}],
"outputs":["t2"],"structure":"tensor"}"#;

const CONV: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[8,3,32,32],"strides":[3072,1024,32,1]}],
"parameters":[{"id":"p0","name":"conv.weight","dtype":"float32","shape":[16,3,3,3],"strides":[27,9,3,1]},{"id":"p1","name":"conv.bias","dtype":"float32","shape":[16],"strides":[1]},
{"id":"p2","name":"bn.weight","dtype":"float32","shape":[16],"strides":[1]},{"id":"p3","name":"bn.bias","dtype":"float32","shape":[16],"strides":[1]},
{"id":"p4","name":"bn.running_mean","dtype":"float32","shape":[16],"strides":[1],"buffer":true},{"id":"p5","name":"bn.running_var","dtype":"float32","shape":[16],"strides":[1],"buffer":true}],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.convolution.default","args":[{"t":"i0"},{"t":"p0"},{"t":"p1"},[1,1],[1,1],[1,1],false,[0,0],1],"outputs":[{"dtype":"float32","shape":[8,16,32,32],"strides":[16384,1024,32,1]}]},
{"id":"t1","ids":["t1","t2","t3"],"op":"aten.native_batch_norm.default","args":[{"t":"t0"},{"t":"p2"},{"t":"p3"},{"t":"p4"},{"t":"p5"},false,0.1,1e-05],"outputs":[{"dtype":"float32","shape":[8,16,32,32],"strides":[16384,1024,32,1]},{"dtype":"float32","shape":[0],"strides":[1]},{"dtype":"float32","shape":[0],"strides":[1]}]},
{"id":"t4","ids":["t4"],"op":"aten.relu_.default","args":[{"t":"t1"}],"outputs":[{"dtype":"float32","shape":[8,16,32,32],"strides":[16384,1024,32,1]}]}],
"outputs":["t4"],"structure":"tensor"}"#;

const GROUP_NORM: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[8,16,64,64],"strides":[65536,4096,64,1]}],
"parameters":[{"id":"p0","name":"norm.weight","dtype":"float32","shape":[16],"strides":[1]},{"id":"p1","name":"norm.bias","dtype":"float32","shape":[16],"strides":[1]}],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.sigmoid.default","args":[{"t":"i0"}],"outputs":[{"dtype":"float32","shape":[8,16,64,64],"strides":[65536,4096,64,1]}]},
{"id":"t1","ids":["t1","t2","t3"],"op":"aten.native_group_norm.default","args":[{"t":"t0"},{"t":"p0"},{"t":"p1"},8,16,4096,4,1e-05],"outputs":[{"dtype":"float32","shape":[8,16,64,64],"strides":[65536,4096,64,1]},{"dtype":"float32","shape":[8,4],"strides":[4,1]},{"dtype":"float32","shape":[8,4],"strides":[4,1]}]}],
"outputs":["t1"],"structure":"tensor"}"#;

#[test]
fn softmax_holds_its_row_in_registers_on_a_card() {
    let (task, graph) = case("pass", "torch.softmax(x, 1)", SOFTMAX);
    insta::assert_snapshot!(first(&task, &graph, Device::Cuda));
}

#[test]
fn softmax_on_the_cpu_walks_each_row_twice() {
    let (task, graph) = case("pass", "torch.softmax(x, 1)", SOFTMAX);
    insta::assert_snapshot!(first(&task, &graph, Device::Cpu));
}

#[test]
fn a_chain_of_element_wise_operators_is_one_pass_over_memory() {
    let (task, graph) = case("pass", "torch.clamp(torch.nn.functional.gelu(x) * x, -1)", GELU);
    insta::assert_snapshot!(first(&task, &graph, Device::Cuda));
}

#[test]
fn what_follows_a_linear_layer_is_one_kernel() {
    let (task, graph) = case("self.fc = nn.Linear(256, 512)", "torch.nn.functional.silu(self.fc(x))", LINEAR);
    insta::assert_snapshot!(first(&task, &graph, Device::Cuda));
}

#[test]
fn the_sum_over_output_features_becomes_a_product_with_the_summed_weight() {
    let (task, graph) = case("self.fc = nn.Linear(256, 512)", "self.fc(x).sum(1, keepdim=True)", SUMMED);
    let text = first(&task, &graph, Device::Cuda);
    assert!(!text.contains("kf.linear"), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn batch_norm_behind_a_convolution_takes_its_bias_along() {
    let (task, graph) = case(
        "self.conv = nn.Conv2d(3, 16, 3, padding=1)\n        self.bn = nn.BatchNorm2d(16)",
        "torch.relu(self.bn(self.conv(x)))",
        CONV,
    );
    insta::assert_snapshot!(first(&task, &graph, Device::Cuda));
}

#[test]
fn a_convolution_is_offered_channels_last_too() {
    let (task, graph) = case(
        "self.conv = nn.Conv2d(3, 16, 3, padding=1)\n        self.bn = nn.BatchNorm2d(16)",
        "torch.relu(self.bn(self.conv(x)))",
        CONV,
    );
    let proposal = propose(&task, &graph, Device::Cuda, &Facts::default()).unwrap();
    // Three channels are few: the layout of the task comes first.
    assert_eq!(
        proposal.forms.iter().map(|form| form.label).collect::<Vec<_>>(),
        [Some("channels first"), Some("channels last")]
    );
    insta::assert_snapshot!(shown(&proposal.forms[1]));
    let on_the_cpu = propose(&task, &graph, Device::Cpu, &Facts::default()).unwrap();
    assert_eq!(on_the_cpu.forms.len(), 1);
}

#[test]
fn sums_of_a_row_are_in_double_on_a_card_and_the_mean_is_subtracted_in_two_parts() {
    let (task, graph) = case("self.norm = nn.GroupNorm(4, 16)", "self.norm(torch.sigmoid(x))", GROUP_NORM);
    insta::assert_snapshot!(first(&task, &graph, Device::Cuda));
}

#[test]
fn sums_of_a_row_go_to_doubles_every_few_vectors_on_the_cpu() {
    let (task, graph) = case("self.norm = nn.GroupNorm(4, 16)", "self.norm(torch.sigmoid(x))", GROUP_NORM);
    insta::assert_snapshot!(first(&task, &graph, Device::Cpu));
}

const AVERAGE: &str = r#"{"inputs":[{"id":"i0","dtype":"float32","shape":[2,4,121,121],"strides":[58564,14641,121,1]}],"parameters":[],
"nodes":[{"id":"t0","ids":["t0"],"op":"aten.avg_pool2d.default","args":[{"t":"i0"},[11,11],[11,11]],"outputs":[{"dtype":"float32","shape":[2,4,11,11],"strides":[484,121,11,1]}],"line":12}],
"outputs":["t0"],"structure":"tensor"}"#;

#[test]
fn the_inner_loop_of_a_large_window_is_unrolled_and_its_outer_one_is_not() {
    let (task, graph) = case("pass", "torch.nn.functional.avg_pool2d(x, 11)", AVERAGE);
    let text = first(&task, &graph, Device::Cuda);
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let unrolled: Vec<bool> =
        lines.windows(2).filter(|pair| pair[1].contains("< 11; ++")).map(|pair| pair[0] == "#pragma unroll").collect();
    assert_eq!(unrolled, [false, true], "{text}");
}

#[test]
fn an_unknown_operator_is_declined_by_name_and_line() {
    let (task, mut graph) = case("pass", "torch.sort(x)", SOFTMAX);
    graph.nodes[0].op = "aten.sort.default".into();
    let declined = propose(&task, &graph, Device::Cuda, &Facts::default()).unwrap_err();
    assert_eq!(
        declined.to_string(),
        "the built-in policy doesn't attempt sort.default (line 12): it is not one of the operators that the policy knows"
    );
}

#[test]
#[ignore = "needs graphs traced into the folder GRAPHS; writes candidates into OUT"]
fn every_traced_graph_gives_a_candidate_or_a_reason() {
    let (Ok(graphs), Ok(out)) = (std::env::var("GRAPHS"), std::env::var("OUT")) else { return };
    let tasks = std::env::var("TASKS").unwrap();
    let device = if std::env::var("DEVICE").as_deref() == Ok("cpu") { Device::Cpu } else { Device::Cuda };
    let mut names: Vec<_> = std::fs::read_dir(&graphs).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    for path in names {
        let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let (level, name) = stem.split_once('_').unwrap();
        let source = std::fs::read_to_string(format!("{tasks}/{level}/{name}.py")).unwrap();
        let graph: Graph = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
        let task = TaskSource { name: name.to_owned(), path: path.clone(), source };
        let fact = |name: &str, default| std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default);
        let base = Facts::default();
        let facts = Facts {
            threads: 2,
            layouts_on_cpu: true,
            long_row: fact("LONG", base.long_row),
            register_row: fact("REGISTERS", base.register_row),
            ..base
        };
        match propose(&task, &graph, device, &facts) {
            Ok(proposal) => {
                for (number, form) in proposal.forms.iter().enumerate() {
                    let candidates = form.candidates();
                    let layout = form.label.unwrap_or("-");
                    println!("OK {stem} {number} {layout} {} | {}", candidates.len(), form.covered.join(" | "));
                    let which = fact("VARIANT", 0).unsigned_abs() as usize % candidates.len();
                    let folder = std::path::Path::new(&out).join(layout.replace(' ', "_")).join(&stem);
                    for (file, text) in &candidates[which].files {
                        let to = folder.join(file);
                        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
                        std::fs::write(to, text).unwrap();
                    }
                }
            }
            Err(declined) => println!("NO {stem} {declined}"),
        }
    }
}
