#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// Every kind of buffer, argument and node, on a card.
fn plan() -> Plan {
    serde_json::from_value(json!({
        "version": 1, "device": "cuda",
        "buffers": [
            {"kind": {"input": 0}, "bytes": 4 * 2 * 3 * 8 * 8},
            {"kind": {"parameter": "conv.weight"}, "bytes": 4 * 4 * 3 * 3 * 3},
            {"kind": {"parameter": "conv.bias"}, "bytes": 16},
            {"kind": {"constant": 0}, "bytes": 4 * 64 * 5},
            {"kind": "workspace", "bytes": 4 * 2 * 4 * 8 * 8},
            {"kind": "workspace", "bytes": 4 * 8 * 5},
            {"kind": "workspace", "bytes": 1024},
        ],
        "modules": [{"path": "kernels/a.cu", "defines": [["BLOCK", "256"]], "flags": ["--use_fast_math"]}],
        "nodes": [
            {"op": "fill", "buffer": 6, "offset": 8, "bytes": 16, "pattern": [0, 0, 128, 63]},
            {"op": "library", "call": "conv",
             "x": {"buffer": 0, "dtype": "float32", "shape": [2, 3, 8, 8], "strides": [192, 64, 8, 1]},
             "weight": {"buffer": 1, "dtype": "float32", "shape": [4, 3, 3, 3], "strides": [27, 9, 3, 1]},
             "bias": {"buffer": 2, "dtype": "float32", "shape": [4], "strides": [1]},
             "out": {"buffer": 4, "dtype": "float32", "shape": [2, 4, 8, 8], "strides": [256, 64, 8, 1]},
             "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "groups": 1, "transposed": false,
             "output_padding": [0, 0]},
            {"op": "library", "call": "matmul",
             "a": {"buffer": 4, "dtype": "float32", "shape": [8, 64], "strides": [64, 1]},
             "b": {"buffer": 3, "dtype": "float32", "shape": [64, 5], "strides": [1, 64]},
             "bias": null,
             "out": {"buffer": 5, "dtype": "float32", "shape": [8, 5], "strides": [5, 1]}},
            {"op": "launch", "module": 0, "kernel": "relu", "grid": [4, 1, 1], "block": [256, 1, 1], "shared": 128,
             "cluster": [2, 1, 1], "line": "model_new.py:12",
             "args": [{"pointer": {"buffer": 5, "offset": 0}}, {"int": 40}, "null", {"f32": 0.5}]},
        ],
        "outputs": [{"buffer": 5, "dtype": "float32", "shape": [8, 5], "strides": [5, 1]},
                    {"buffer": 6, "offset": 8, "dtype": "float32", "shape": [2, 2], "strides": [2, 1]}],
        "structure": {"tuple": ["tensor", {"dict": [["y", "tensor"], ["n", {"value": "3"}]]}]},
    }))
    .unwrap()
}

fn check(plan: &Plan) -> Result<(), Problem> {
    validate(plan, &Limits::default())
}

/// The plan with one place of its JSON changed.
fn changed(pointer: &str, value: Value) -> Plan {
    let mut json = serde_json::to_value(plan()).unwrap();
    *json.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
    serde_json::from_value(json).unwrap()
}

#[test]
fn the_sample_plan_is_valid() {
    check(&plan()).unwrap();
}

/// One change each, the field that must be named, and a word of the message.
#[test]
fn every_rule_names_its_node_and_field() {
    let cases: Vec<(&str, Value, Option<usize>, &str, &str)> = vec![
        ("/version", json!(2), None, "version", "version"),
        ("/buffers/5/kind", json!({"input": 0}), None, "buffers[5].kind", "input 0 has a buffer already"),
        ("/buffers/2/kind", json!({"parameter": "conv.weight"}), None, "buffers[2].kind", "already"),
        ("/buffers/0/kind", json!({"input": 99999}), None, "buffers[0].kind", "out of range"),
        ("/buffers/6/bytes", json!(u64::MAX), None, "buffers[6].bytes", "at most"),
        ("/modules/0/path", json!("../a.cu"), None, "modules[0].path", "without `..`"),
        ("/modules/0/path", json!("/etc/a.cu"), None, "modules[0].path", "relative"),
        ("/modules/0/path", json!("-o/a.cu"), None, "modules[0].path", "relative"),
        ("/modules/0/path", json!("@x.cu"), None, "modules[0].path", "relative"),
        ("/modules/0/path", json!("a.cpp"), None, "modules[0].path", ".cu"),
        ("/modules/0/defines", json!([["A B", "1"]]), None, "modules[0].defines", "C identifier"),
        ("/modules/0/defines", json!([["A", "1"], ["A", "2"]]), None, "modules[0].defines", "twice"),
        ("/modules/0/defines", json!([["A", "1,B=2"]]), None, "modules[0].defines", "may hold"),
        ("/modules/0/defines", json!([["A", "$(id)"]]), None, "modules[0].defines", "may hold"),
        ("/modules/0/flags", json!(["-I/root"]), None, "modules[0].flags", "not among"),
        ("/modules/0/flags", json!(["-ccbin=/tmp/x"]), None, "modules[0].flags", "not among"),
        ("/modules/0/flags", json!(["--maxrregcount=1000"]), None, "modules[0].flags", "not among"),
        ("/modules/0/flags", json!(["-lineinfo"]), None, "modules[0].flags", "not among"),
        ("/nodes/0/buffer", json!(7), Some(0), "buffer", "no buffer 7"),
        ("/nodes/0/buffer", json!(1), Some(0), "buffer", "can't be filled"),
        ("/nodes/0/buffer", json!(3), Some(0), "buffer", "can't be filled"),
        ("/nodes/0/offset", json!(u64::MAX - 3), Some(0), "bytes", "end behind"),
        ("/nodes/0/bytes", json!(2048), Some(0), "bytes", "end behind"),
        ("/nodes/0/pattern", json!([1, 2, 3]), Some(0), "pattern", "1, 2, 4 or 8"),
        ("/nodes/0/bytes", json!(18), Some(0), "pattern", "divide"),
        ("/nodes/1/x/shape/1", json!(4), Some(1), "x", "does not fit"),
        ("/nodes/1/x/strides/0", json!(u64::MAX), Some(1), "x", "does not fit"),
        ("/nodes/1/x/offset", json!(2), Some(1), "x.offset", "multiple"),
        ("/nodes/1/x/strides/3", json!(2), Some(1), "x", ""),
        ("/nodes/1/weight/dtype", json!("float16"), Some(1), "weight", "Float16"),
        ("/nodes/1/out/buffer", json!(0), Some(1), "out", ""),
        ("/nodes/1/out/strides", json!([256, 64, 0, 1]), Some(1), "out", "two elements"),
        ("/nodes/1/groups", json!(0), Some(1), "groups", "at least one"),
        ("/nodes/1/groups", json!(3), Some(1), "out", "groups"),
        ("/nodes/1/stride", json!([1]), Some(1), "stride", "dimensions"),
        ("/nodes/1/stride", json!([0, 1]), Some(1), "stride", "below"),
        ("/nodes/1/padding", json!([0, 1]), Some(1), "out", "gives 6"),
        ("/nodes/1/padding", json!([0xffff_ffffu32, 1]), Some(1), "padding", "over"),
        ("/nodes/1/dilation", json!([9, 1]), Some(1), "weight", "reaches over"),
        ("/nodes/1/output_padding", json!([1, 0]), Some(1), "output_padding", "transposed"),
        ("/nodes/1/bias/shape", json!([3]), Some(1), "bias", "asks for [4]"),
        ("/nodes/2/a/shape", json!([4, 64]), Some(2), "out", "does not give"),
        ("/nodes/2/b/strides", json!([2, 32]), Some(2), "b", ""),
        ("/nodes/2/out/buffer", json!(4), Some(2), "out", "overlaps a"),
        ("/nodes/3/module", json!(1), Some(3), "module", "no module 1"),
        ("/nodes/3/kernel", json!("re lu"), Some(3), "kernel", "C identifier"),
        ("/nodes/3/grid", json!([0, 1, 1]), Some(3), "grid", "zero"),
        ("/nodes/3/grid", json!([2, 65536, 1]), Some(3), "grid", "largest"),
        ("/nodes/3/grid", json!([5, 1, 1]), Some(3), "cluster", "multiple"),
        ("/nodes/3/block", json!([64, 32, 1]), Some(3), "block", "2048 threads"),
        ("/nodes/3/block", json!([1, 1, 65]), Some(3), "block", "largest"),
        ("/nodes/3/shared", json!(300_000), Some(3), "shared", "at most"),
        ("/nodes/3/cluster", json!([4, 4, 4]), Some(3), "cluster", "at most 16"),
        ("/nodes/3/args/0/pointer/offset", json!(161), Some(3), "args[0]", "behind"),
        ("/nodes/3/args/0/pointer/buffer", json!(70), Some(3), "args[0]", "no buffer"),
        ("/outputs/0/buffer", json!(77), None, "outputs[0].buffer", "no buffer"),
        ("/outputs/0/shape", json!([9, 5]), None, "outputs[0]", "does not fit"),
        ("/outputs/0/strides", json!([5]), None, "outputs[0]", "strides"),
        ("/structure", json!("tensor"), None, "structure", "1 tensors"),
        ("/structure", json!({"dict": [["y", "tensor"], ["y", "tensor"]]}), None, "structure", "twice"),
    ];
    for (pointer, value, node, field, word) in cases {
        let problem = check(&changed(pointer, value.clone())).expect_err(&format!("{pointer} = {value} passed"));
        assert_eq!((problem.node, problem.field.as_str()), (node, field), "{pointer} = {value}: {problem}");
        assert!(problem.message.contains(word), "{pointer} = {value}: {problem}");
    }
}

#[test]
fn a_problem_reads_as_a_sentence_with_the_line_that_recorded_it() {
    let problem = check(&changed("/nodes/3/block", json!([64, 32, 1]))).unwrap_err();
    assert_eq!(problem.to_string(), "node 3 (model_new.py:12), block: 2048 threads, a block has at most 1024");
}

#[test]
fn an_output_that_nothing_writes_is_refused() {
    let mut plan = plan();
    plan.nodes.remove(0);
    assert!(check(&plan).unwrap_err().message.contains("writes this output"));
}

#[test]
fn on_the_cpu_a_function_is_called_once() {
    let mut plan = plan();
    plan.device = Device::Cpu;
    plan.modules[0] = Module { path: "a.cpp".into(), defines: vec![], flags: vec!["-ffast-math".into()] };
    assert_eq!(check(&plan).unwrap_err().field, "grid");
    let Op::Launch(launch) = &mut plan.nodes[3].op else { unreachable!() };
    (launch.grid, launch.block, launch.shared, launch.cluster) = ([1; 3], [1; 3], 0, None);
    check(&plan).unwrap();
    plan.modules[0].flags = vec!["--use_fast_math".into()];
    assert_eq!(check(&plan).unwrap_err().field, "modules[0].flags");
}

#[test]
fn neighbouring_channels_of_one_tensor_may_be_read_and_written_in_one_call() {
    let mut plan = plan();
    plan.buffers[0].bytes = 4 * 2 * 7 * 64;
    plan.buffers[0].kind = BufferKind::Workspace;
    let Op::Library(Library::Conv { x, out, .. }) = &mut plan.nodes[1].op else { unreachable!() };
    x.strides[0] = 7 * 64;
    *out = TensorRef { buffer: 0, offset: 4 * 3 * 64, strides: vec![7 * 64, 64, 8, 1], ..out.clone() };
    check(&plan).unwrap();
    let Op::Library(Library::Conv { out, .. }) = &mut plan.nodes[1].op else { unreachable!() };
    out.offset -= 4;
    assert!(check(&plan).unwrap_err().message.contains("overlaps x"));
}

#[test]
fn a_transposed_convolution_has_the_shape_that_pytorch_gives() {
    // conv_transpose2d of (2, 4, 8, 8) by (4, 3, 3, 3): stride 2, padding 1, output padding 1 -> (2, 3, 16, 16).
    let mut json = serde_json::to_value(plan()).unwrap();
    json["buffers"][0]["bytes"] = json!(4 * 2 * 3 * 256);
    json["buffers"][0]["kind"] = json!("workspace");
    json["buffers"][2]["bytes"] = json!(12);
    let node = &mut json["nodes"][1];
    let (x, mut out) = (node["out"].clone(), node["x"].clone());
    out["shape"] = json!([2, 3, 16, 16]);
    out["strides"] = json!([768, 256, 16, 1]);
    (node["x"], node["out"]) = (x, out);
    node["stride"] = json!([2, 2]);
    node["bias"]["shape"] = json!([3]);
    node["transposed"] = json!(true);
    node["output_padding"] = json!([1, 1]);
    check(&serde_json::from_value(json.clone()).unwrap()).unwrap();
    json["nodes"][1]["output_padding"] = json!([2, 1]);
    assert_eq!(check(&serde_json::from_value(json).unwrap()).unwrap_err().field, "output_padding");
}

#[test]
fn the_number_of_nodes_is_limited() {
    let mut plan = plan();
    plan.nodes = vec![plan.nodes[0].clone(); 20_001];
    assert_eq!(check(&plan).unwrap_err().field, "nodes");
}

/// All places of a JSON value.
fn places(value: &Value, at: String, found: &mut Vec<String>) {
    found.push(at.clone());
    match value {
        Value::Array(items) => items.iter().enumerate().for_each(|(i, v)| places(v, format!("{at}/{i}"), found)),
        Value::Object(items) => items.iter().for_each(|(k, v)| places(v, format!("{at}/{k}"), found)),
        _ => {}
    }
}

fn any_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        any::<u64>().prop_map(|n| json!(n)),
        any::<i64>().prop_map(|n| json!(n)),
        (0u64..300).prop_map(|n| json!(n)),
        prop::sample::select(vec![0, 1, u64::MAX, 1 << 63, u64::from(u32::MAX), 1 << 32, i64::MAX as u64])
            .prop_map(|n| json!(n)),
        ".{0,12}".prop_map(|s| json!(s)),
        any::<bool>().prop_map(|b| json!(b)),
        prop::collection::vec(any::<u64>(), 0..6).prop_map(|v| json!(v)),
        Just(json!(null)),
        Just(json!("tensor")),
        Just(json!({"list": []})),
    ]
}

/// What must hold of a valid plan, said in another way: by 128-bit sums over everything that names bytes.
fn in_bounds(plan: &Plan) -> bool {
    let fits = |t: &TensorRef| {
        let empty = t.shape.contains(&0);
        let last: u128 = t.shape.iter().zip(&t.strides).map(|(e, s)| u128::from(e.max(&1) - 1) * u128::from(*s)).sum();
        let span = if empty { 0 } else { (last + 1) * u128::from(t.dtype.size()) };
        t.buffer < plan.buffers.len() && u128::from(t.offset) + span <= u128::from(plan.buffers[t.buffer].bytes)
    };
    plan.outputs.iter().all(fits)
        && plan.nodes.iter().all(|node| match &node.op {
            Op::Launch(l) => {
                l.module < plan.modules.len()
                    && l.args.iter().all(|a| match a {
                        Arg::Pointer { buffer, offset } => {
                            *buffer < plan.buffers.len() && *offset <= plan.buffers[*buffer].bytes
                        }
                        _ => true,
                    })
            }
            Op::Fill(f) => {
                f.buffer < plan.buffers.len()
                    && u128::from(f.offset) + u128::from(f.bytes) <= u128::from(plan.buffers[f.buffer].bytes)
            }
            Op::Library(Library::Matmul { a, b, bias, out }) => {
                [Some(a), Some(b), bias.as_ref(), Some(out)].into_iter().flatten().all(fits)
            }
            Op::Library(Library::Conv { x, weight, bias, out, .. }) => {
                [Some(x), Some(weight), bias.as_ref(), Some(out)].into_iter().flatten().all(fits)
            }
        })
}

proptest! {
    #![proptest_config(crate::properties::kept(4000, "tests/regressions/plan.txt"))]

    #[test]
    fn no_change_of_a_plan_makes_the_gate_panic_or_let_a_byte_out_of_bounds_through(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any_value()), 1..4)
    ) {
        let mut json = serde_json::to_value(plan()).unwrap();
        for (index, value) in edits {
            let mut found = Vec::new();
            places(&json, String::new(), &mut found);
            let place: &String = index.get(&found);
            *json.pointer_mut(place).unwrap() = value;
        }
        if let Ok(plan) = serde_json::from_value::<Plan>(json)
            && check(&plan).is_ok() {
            prop_assert!(in_bounds(&plan));
        }
    }

    /// Against all elements of small views, one by one.
    #[test]
    fn views_that_are_called_disjoint_share_no_byte(
        views in prop::collection::vec(
            (0u64..24, prop::collection::vec((1u64..4, 0u64..9), 1..4), prop::sample::select(vec![Dtype::Int8, Dtype::Int16])), 2)
    ) {
        let view = |(offset, dims, dtype): &(u64, Vec<(u64, u64)>, Dtype)| TensorRef {
            buffer: 0, offset: offset * dtype.size(), dtype: *dtype,
            shape: dims.iter().map(|d| d.0).collect(), strides: dims.iter().map(|d| d.1).collect(),
        };
        let bytes = |t: &TensorRef| {
            let mut starts = vec![0u64];
            for (extent, stride) in t.shape.iter().zip(&t.strides) {
                starts = starts.iter().flat_map(|s| (0..*extent).map(move |i| s + i * stride)).collect();
            }
            starts.iter().map(|s| t.offset + s * t.dtype.size()).collect::<Vec<_>>()
        };
        let touched = |t: &TensorRef| bytes(t).into_iter().flat_map(|b| b..b + t.dtype.size()).collect::<HashSet<_>>();
        let (a, b) = (view(&views[0]), view(&views[1]));
        if disjoint(&a, &b) {
            prop_assert!(touched(&a).is_disjoint(&touched(&b)), "{a:?} {b:?}");
        }
        if injective(&a) {
            let all = bytes(&a);
            prop_assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
        }
    }
}
