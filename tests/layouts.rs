//! Forms of the built-in policy that are a card's, by the real judge on the CPU device: each layout of each task, and each way
//! to do a depthwise convolution, must be correct. What a card alone has, tiles and bands, is not shown here. Needs `make env`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/warm.rs"]
mod warm;

use std::path::PathBuf;

use kernelfleet::agent::builtin::{Facts, propose};
use kernelfleet::judge::{Candidate, Device, Effort, Judge, Options, Slice, TaskSource};
use kernelfleet::local::environment;

/// What a module holds, what it does with `x`, and the shape of `x`.
const TASKS: [(&str, &str, &str, &str); 4] = [
    (
        "groups_between_convolutions",
        "self.a, self.n, self.b = nn.Conv2d(6, 12, 3, bias=False), nn.GroupNorm(3, 12), nn.Conv2d(12, 8, 3, stride=2)",
        "self.b(F.gelu(self.n(F.max_pool2d(torch.relu(self.a(x)), 2, stride=1, padding=1)))) * 2 + 0.5",
        "3, 6, 21, 18",
    ),
    (
        "softmax_over_channels_of_a_volume",
        "self.a, self.n = nn.ConvTranspose3d(4, 10, 3, stride=2, output_padding=1, padding=1), nn.BatchNorm3d(10)",
        "F.avg_pool3d(torch.softmax(self.n(self.a(x)), 1), 2) - x[:, :1, :5, :5, :6]",
        "2, 4, 5, 5, 6",
    ),
    (
        "statistics_of_planes_and_a_linear_layer",
        "self.a, self.n, self.l = nn.Conv2d(5, 7, 3, padding=1), nn.InstanceNorm2d(7), nn.Linear(12 * 9 * 11, 6)",
        "self.l(torch.cat([self.n(self.a(x)), x.flip(3)], 1).flatten(1)), self.a(x).argmax(1), torch.logsumexp(self.a(x), 1)",
        "4, 5, 9, 11",
    ),
    (
        "other_orders_of_dimensions",
        "self.a = nn.Conv2d(4, 9, (3, 1), padding=(1, 0), dilation=1)",
        "torch.cumsum(self.a(x).transpose(1, 2).mean(3), 1), self.a(x)[:, 1:5, ::2].amax((1, 3)), self.a(x.tanh()).permute(0, 2, 3, 1)",
        "3, 4, 8, 10",
    ),
];

/// Depthwise convolutions, likewise: fused with what is before and behind, with every kind of window.
const DEPTHWISE: [(&str, &str, &str, &str); 3] = [
    (
        "a_column_between_activations",
        "self.a = nn.Conv2d(6, 6, (3, 1), groups=6, bias=False)",
        "torch.relu(self.a(x)) * 2",
        "3, 6, 21, 18",
    ),
    (
        "strides_padding_dilation_and_a_bias",
        "self.a, self.b = nn.Conv2d(8, 8, (3, 5), (2, 1), (1, 4), (1, 2), groups=8), nn.Conv2d(8, 5, 1)",
        "self.b(torch.sigmoid(self.a(x.tanh())))",
        "2, 8, 13, 16",
    ),
    (
        "one_dimension_and_its_mean",
        "self.a = nn.Conv1d(7, 7, 4, padding='same', groups=7)",
        "F.gelu(self.a(x)).mean(2)",
        "4, 7, 33",
    ),
];

/// Judges every form that the policy proposes for each task: all are correct, and their labels are these.
fn forms_are_correct(tasks: &[(&str, &str, &str, &str)], labels: &[&str]) {
    let home = tempfile::tempdir().unwrap();
    let mut found = environment::discover().expect("the environment of `make env`");
    found.toolchain.program = PathBuf::from(env!("CARGO_BIN_EXE_kernelfleet"));
    found.toolchain.cache = warm::cache(home.path());
    let options = Options { device: Device::Cpu, compile: false, inputs: 2, ..Options::default() };
    let judge = Judge::start(&found.toolchain, options, Slice::new()).expect("a judge of the CPU device");
    let facts = Facts { threads: 2, layouts_on_cpu: true, ..Facts::default() };
    for (name, module, value, shape) in tasks {
        let source = format!(
            "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\nclass Model(nn.Module):\n    \
             def __init__(self):\n        super().__init__()\n        {module}\n\n    def forward(self, x):\n        \
             return {value}\n\n\ndef get_inputs():\n    return [torch.randn({shape})]\n\n\ndef get_init_inputs():\n    \
             return []\n"
        );
        let task = TaskSource { name: (*name).into(), path: format!("{name}.py").into(), source };
        let mut session = judge.open(&task).unwrap();
        let graph = session.trace().unwrap();
        let proposal =
            propose(&task, &graph, Device::Cpu, &facts).unwrap_or_else(|declined| panic!("{name}: {declined}"));
        let said: Vec<_> = proposal.forms.iter().filter_map(|form| form.label).collect();
        for label in labels {
            assert!(said.contains(label), "{name}: {said:?}");
        }
        for form in &proposal.forms {
            let files = form.variant(&Default::default()).files;
            let verdict = session.judge(&Candidate { files }, Effort::Verify).unwrap();
            assert!(verdict.correct, "{name}, {:?}: {:?}", form.label, verdict.reason);
        }
    }
}

#[test]
fn both_layouts_of_convolutions_are_correct() {
    forms_are_correct(&TASKS, &["channels first", "channels last"]);
}

#[test]
fn depthwise_convolutions_by_windows_are_correct() {
    forms_are_correct(&DEPTHWISE, &["depthwise convolutions by windows"]);
}
