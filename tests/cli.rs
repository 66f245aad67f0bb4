//! The program as a person meets it: what it prints, where, and with which exit status. Nothing is judged here.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Output};

fn kernelfleet(arguments: &[&str], home: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kernelfleet"))
        .args(arguments)
        .env("KERNELFLEET_CACHE", home.join("cache"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap()
}

fn beside(arguments: &[&str], folder: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kernelfleet"))
        .args(arguments)
        .env("KERNELFLEET_CACHE", folder.join("cache"))
        .current_dir(folder)
        .output()
        .unwrap()
}

fn says(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_manifest_with_flaws_is_refused_with_status_2_and_every_line() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("job.yaml");
    std::fs::write(
        &file,
        "apiVersion: kernelfleet.dev/v1alpha1\nkind: OptimizationJob\nmetadata: {name: x}\nspec:\n  tasks:\n    taskSet: {name: a}\n  agent:\n    maxTurn: 3\n  judge: {inputs: 1}\n",
    )
    .unwrap();
    let output = kernelfleet(&["run", file.to_str().unwrap()], home.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(says(&output).contains("job.yaml:8:5: spec.agent.maxTurn: unknown field; did you mean `maxTurns`?"));
    assert!(says(&output).contains("job.yaml:9:11: spec.judge.inputs: 1 is out of bounds, 2 to 64 is allowed"));
}

#[test]
fn a_job_that_this_machine_cannot_run_says_which_field_and_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("job.yaml");
    let job = |policy: &str, rest: &str| {
        format!(
            "apiVersion: kernelfleet.dev/v1alpha1\nkind: OptimizationJob\nmetadata: {{name: x}}\nspec:\n  tasks:\n    taskSet: {{name: a}}\n  policy: {policy}\n{rest}"
        )
    };
    let run = |text: String, more: &[&str]| {
        std::fs::write(&file, text).unwrap();
        let mut arguments = vec!["run", file.to_str().unwrap(), "--device", "cpu"];
        arguments.extend(more);
        let output = kernelfleet(&arguments, home.path());
        assert_eq!(output.status.code(), Some(2), "{}", says(&output));
        says(&output)
    };
    assert!(
        run(job("{builtin: {}}", ""), &[])
            .contains("spec.tasks.taskSet: a local run has no TaskSet `a`; name its files with --tasks")
    );
    let tasks = ["--tasks", "examples/tasks"];
    assert!(
        run(job("{endpoint: {name: a, model: b}}", ""), &tasks)
            .contains("spec.policy.endpoint: a local run knows no ModelEndpoint `a`; say where it is: --endpoint URL")
    );
    let enforced = run(job("{builtin: {}}", "  judge: {minimumGrade: enforced}\n"), &tasks);
    assert!(enforced.contains("spec.judge.minimumGrade: verdicts of the cpu device are `observed`"));
}

#[test]
fn a_folder_that_is_no_candidate_is_named() {
    let home = tempfile::tempdir().unwrap();
    let folder = home.path().to_str().unwrap();
    let output = kernelfleet(&["judge", "--task", "examples/tasks/softmax.py", "--candidate", folder], home.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(says(&output).contains("has no model_new.py, the file that defines ModelNew"));
    let output = kernelfleet(&["judge", "--task", "no/such.py", "--candidate", folder], home.path());
    assert!(says(&output).contains("no/such.py can't be read"));
    // Nothing is lost to a folder that is something else.
    std::fs::create_dir_all(home.path().join("mine/best")).unwrap();
    let mine = home.path().join("mine");
    let (task, candidate) = ("examples/tasks/rms_norm.py", "examples/candidates/rms_norm");
    let keep = ["judge", "--task", task, "--candidate", candidate, "--keep", mine.to_str().unwrap()];
    let refused = says(&kernelfleet(&keep, home.path()));
    assert!(refused.contains("mine is there already and holds something else than an earlier verdict on this task"));
    // A folder of results is told where its candidate is.
    std::fs::write(mine.join("best/model_new.py"), "x").unwrap();
    let above = ["judge", "--task", task, "--candidate", mine.to_str().unwrap()];
    assert!(says(&kernelfleet(&above, home.path())).contains("mine/best?"));
    let twice = ["judge", "--task", "examples/tasks/softmax.py", "--candidate", folder, "--recheck", "2"];
    let output = kernelfleet(&twice, home.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(says(&output).contains("`2` is no share; write a number from 0 to 1"));
}

#[test]
fn what_would_be_observed_is_not_judged_where_only_enforced_verdicts_count() {
    let home = tempfile::tempdir().unwrap();
    let judge = |more: &[&str]| {
        let mut arguments = vec!["judge", "--task", "tests/corpus/process/honest/relu/task.py"];
        arguments.extend([
            "--candidate",
            "tests/corpus/process/honest/relu/model_new.py",
            "--minimum-grade",
            "enforced",
        ]);
        arguments.extend(more);
        let output = kernelfleet(&arguments, home.path());
        assert_eq!(output.status.code(), Some(2), "{}", says(&output));
        says(&output)
    };
    assert!(judge(&["--device", "cpu"]).contains("verdicts of the cpu device are `observed`"));
    assert!(judge(&["--device", "cuda", "--path", "process"]).contains("verdicts of the process path are `observed`"));
}

#[test]
fn tasks_are_checked_by_syntax_without_running_them() {
    let home = tempfile::tempdir().unwrap();
    let output = kernelfleet(&["task", "check", "examples/tasks", "--static", "-o", "json"], home.path());
    assert!(output.status.success(), "{}", says(&output));
    let checked: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(checked.as_array().unwrap().len(), 8);
    let bad = home.path().join("bad.py");
    std::fs::write(&bad, "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x) return x\n").unwrap();
    let output = kernelfleet(&["task", "check", bad.to_str().unwrap(), "--static"], home.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stdout).contains("bad.py:3: syntax error"));
    // One that isn't there stands among the others, and none that has a flaw by syntax starts a process.
    let began = std::time::Instant::now();
    let output = kernelfleet(&["task", "check", "no/such.py", bad.to_str().unwrap(), "--device", "cpu"], home.path());
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.contains("REFUSED   such: no/such.py: can't be read: No such file"), "{table}");
    assert!(table.contains("bad.py:3: syntax error") && table.contains("2 tasks, checked by syntax only"), "{table}");
    let output = kernelfleet(&["task", "check", "no/such.py", "examples/tasks/softmax.py", "--static"], home.path());
    assert!(String::from_utf8_lossy(&output.stdout).contains("accepted  softmax"));
    let job = home.path().join("job.yaml");
    let text = "apiVersion: kernelfleet.dev/v1alpha1\nkind: OptimizationJob\nmetadata: {name: x}\nspec: {tasks: {taskSet: {name: a}}}\n";
    std::fs::write(&job, text).unwrap();
    let results = home.path().join("results");
    let (job, results) = (job.to_str().unwrap(), results.to_str().unwrap());
    let run = ["run", job, "--tasks", bad.to_str().unwrap(), "--device", "cpu", "--results", results];
    let output = kernelfleet(&run, home.path());
    assert!(output.status.code() == Some(2) && says(&output).contains("bad.py:3: syntax error"), "{}", says(&output));
    assert!(!says(&output).contains("warm") && began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
}

#[test]
fn a_task_is_written_around_a_module_and_a_missing_package_is_named() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("gelu.py");
    let path = file.to_str().unwrap();
    let written = [
        "task",
        "init",
        "--module",
        "torch.nn.GELU",
        "--shape",
        "16,1024",
        "--arguments",
        "approximate='tanh'",
        "-o",
        path,
    ];
    let output = kernelfleet(&written, home.path());
    assert!(output.status.success(), "{}", says(&output));
    assert!(std::fs::read_to_string(&file).unwrap().contains("Subject(*args, approximate='tanh')"));
    let again = kernelfleet(&written, home.path());
    assert!(says(&again).contains("is there already; --force overwrites it"));
    let missing = kernelfleet(
        &["task", "init", "--module", "flash_attn:Layer", "--shape", "1", "-o", path, "--force"],
        home.path(),
    );
    assert_eq!(missing.status.code(), Some(2));
    assert!(says(&missing).contains("the package flash_attn is not installed"));
    assert!(!says(&missing).contains("pip install"), "whose package that is nobody knows");
    let typo = kernelfleet(
        &["task", "init", "--module", "torch.nn.GELUU", "--shape", "1", "-o", path, "--force"],
        home.path(),
    );
    assert!(says(&typo).contains("torch.nn has no torch.nn.Module called GELUU"));
    let linear = ["--module", "torch.nn.Linear", "--arguments", "8, 4", "--shape", "2,7", "--shape", "2,8"];
    let other = kernelfleet(&[&["task", "init", "-o", path, "--force"][..], &linear[..]].concat(), home.path());
    assert_eq!(other.status.code(), Some(2));
    let said = says(&other);
    assert!(said.contains("can't be called with [2, 7] and [2, 8] of float32: TypeError: "), "{said}");
    assert!(said.contains("say others with --shape"), "{said}");
}

#[test]
fn a_module_of_ones_own_file_becomes_a_task() {
    let home = tempfile::tempdir().unwrap();
    let layers = "import torch\nfrom torch import nn\n\n\nclass Gate(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n        self.scale = nn.Linear(width, width)\n\n    def forward(self, x):\n        return x * torch.sigmoid(self.scale(x))\n\n\ndef helper():\n    return 1\n";
    std::fs::write(home.path().join("my_layers.py"), layers).unwrap();
    let init = |module: &str, arguments: &str| {
        let all = [
            "task",
            "init",
            "--module",
            module,
            "--shape",
            "4,8",
            "--arguments",
            arguments,
            "-o",
            "gate.py",
            "--force",
        ];
        beside(&all, home.path())
    };
    for module in ["./my_layers.py:Gate", "my_layers:Gate", "my_layers.Gate"] {
        let output = init(module, "8");
        assert!(output.status.success(), "{module}: {}", says(&output));
        let checked = beside(&["task", "check", "gate.py", "--static"], home.path());
        assert!(checked.status.success(), "{}", says(&checked));
    }
    let wrong = init("my_layers:Gate", "8, 9");
    assert_eq!(wrong.status.code(), Some(2));
    assert!(
        says(&wrong)
            .contains("can't be constructed with 8, 9: TypeError: Gate.__init__() takes 2 positional arguments"),
        "{}",
        says(&wrong)
    );
    assert!(says(&init("my_layers:helper", "")).contains("my_layers.py has no class helper; its classes: Gate"));
    std::fs::write(home.path().join("my_layers.py"), format!("from helpers import x\n{layers}")).unwrap();
    assert!(
        says(&init("my_layers:Gate", "8")).contains("my_layers.py:1: imports helpers, and the package helpers is not")
    );
    std::fs::create_dir(home.path().join("mine")).unwrap();
    assert!(says(&init("mine.layers:Gate", "8")).contains("mine is a folder here, and a task is one file"));
    let library = init("torch.nn.LayerNorm", "");
    assert!(
        says(&library).contains("torch.nn.LayerNorm can't be constructed with no arguments: TypeError"),
        "{}",
        says(&library)
    );
}

#[test]
fn an_episode_is_found_in_its_folder_and_several_are_listed() {
    let home = tempfile::tempdir().unwrap();
    let replay = |path: &Path| kernelfleet(&["replay", path.to_str().unwrap()], home.path());
    assert!(says(&replay(home.path())).contains("holds no trajectory.jsonl; a run records one a task"));
    for name in ["a", "b"] {
        std::fs::create_dir(home.path().join(name)).unwrap();
        std::fs::copy("docs/evidence/episode-smollm2.jsonl", home.path().join(name).join("trajectory.jsonl")).unwrap();
    }
    let several = says(&replay(home.path()));
    assert!(
        several.contains("holds several episodes, say which:") && several.contains("b/trajectory.jsonl"),
        "{several}"
    );
    let one = replay(&home.path().join("a"));
    assert!(one.status.success() && !one.stdout.is_empty(), "{}", says(&one));
}

#[test]
fn the_help_says_what_it_is_and_the_three_first_commands() {
    let home = tempfile::tempdir().unwrap();
    let text = String::from_utf8(kernelfleet(&["--help"], home.path()).stdout).unwrap();
    assert!(text.starts_with("A PyTorch module in, a verified faster kernel out."), "{text}");
    for command in
        ["kernelfleet doctor", "kernelfleet run examples/demo.yaml", "kernelfleet task init --module torch.nn.GELU"]
    {
        assert!(text.contains(command), "{text}");
    }
}

#[test]
fn the_doctor_answers_in_json_too() {
    let home = tempfile::tempdir().unwrap();
    let output = kernelfleet(&["doctor", "-o", "json"], home.path());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(report["findings"].as_array().unwrap().iter().any(|f| f["name"] == "python"));
}

#[test]
fn definitions_are_printed_as_yaml_documents() {
    let home = tempfile::tempdir().unwrap();
    let output = kernelfleet(&["crds"], home.path());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with("---\n") && text.contains("kind: CustomResourceDefinition"));
}

/// What a program prints on standard output into a pipe that is closed already.
#[test]
fn a_closed_pipe_ends_no_command_with_a_panic() {
    let home = tempfile::tempdir().unwrap();
    let commands: [&[&str]; 5] = [
        &["crds"],
        &["doctor", "-o", "json"],
        &["replay", "docs/evidence/episode-smollm2.jsonl"],
        &["task", "check", "examples/tasks", "--static"],
        &["run", "no/such.yaml"],
    ];
    for arguments in commands {
        for errors in [false, true] {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let mut command = Command::new(env!("CARGO_BIN_EXE_kernelfleet"));
            command
                .args(arguments)
                .env("KERNELFLEET_CACHE", home.path().join("cache"))
                .current_dir(env!("CARGO_MANIFEST_DIR"))
                .stdout(writer.try_clone().unwrap());
            if errors {
                command.stderr(writer);
            }
            let output = command.output().unwrap();
            assert!(!says(&output).contains("panicked"), "{arguments:?}: {}", says(&output));
            assert!(output.status.code().is_some_and(|code| code < 3), "{arguments:?}: {:?}", output.status);
        }
    }
}

#[test]
fn counters_without_a_card_name_no_option_that_the_command_has_not() {
    if Path::new("/dev/nvidiactl").exists() {
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let output = kernelfleet(&["counters", "--task", "examples/tasks/softmax.py"], home.path());
    assert_eq!(output.status.code(), Some(2));
    assert!(says(&output).contains("no NVIDIA card here") && !says(&output).contains("--device"), "{}", says(&output));
}

#[test]
fn a_machine_without_pytorch_is_told_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kernelfleet"))
        .args(["judge", "--task", "examples/tasks/softmax.py", "--candidate", "tests/corpus/honest/softmax_rows"])
        .env("KERNELFLEET_CACHE", home.path())
        .env("KERNELFLEET_PYTHON", "/usr/bin/env")
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(says(&output).contains(
        "KERNELFLEET_PYTHON says /usr/bin/env, which is not a Python that has PyTorch; correct it or unset it"
    ));
}
