//! The tools of an agent on the real sandbox: what a model is told when it does things rightly, and when not.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::time::Duration;

use kernelfleet::agent::tools::{Kind, Tools};
use kernelfleet::gateway::chat::Call;
use kernelfleet::sandbox::client::{Options, Sandbox};
use kernelfleet::sandbox::workspace::Workspace;
use serde_json::{Value, json};

struct Desk {
    tools: Tools,
    sandbox: Sandbox,
}

impl Desk {
    fn new() -> Self {
        let mut sandbox = Sandbox::start(&Options::new(env!("CARGO_BIN_EXE_kernelfleet").into())).unwrap();
        let text: String = (1..=3000).map(|i| format!("line {i}\n")).collect();
        let files =
            [("long.txt", text), ("kernels/a.cu", "int a;\nint b;\nint a2;\n".into()), ("empty.py", String::new())];
        sandbox.reset(&files.into_iter().map(|(n, t)| (n.to_owned(), t.into_bytes())).collect()).unwrap();
        Self { tools: Tools::default(), sandbox }
    }

    fn call(&mut self, tool: &str, arguments: Value) -> (Kind, String) {
        let call = Call { id: "1".into(), name: tool.into(), arguments: arguments.to_string() };
        let outcome = self.tools.call(&mut self.sandbox, &call, Duration::from_secs(60)).unwrap();
        (outcome.kind, outcome.content)
    }

    fn done(&mut self, tool: &str, arguments: Value) -> String {
        let (kind, content) = self.call(tool, arguments);
        assert_eq!(kind, Kind::Done, "{content}");
        content
    }

    fn fails(&mut self, tool: &str, arguments: Value) -> String {
        let (kind, content) = self.call(tool, arguments);
        assert_eq!(kind, Kind::Failed, "{content}");
        content
    }
}

#[test]
fn a_shell_keeps_its_state_and_says_how_commands_end() {
    let mut desk = Desk::new();
    assert_eq!(desk.done("Bash", json!({"command": "cd kernels && export A=7"})), "(no output)");
    assert_eq!(desk.done("Bash", json!({"command": "echo $A; ls", "description": "look"})), "7\na.cu");
    assert_eq!(desk.fails("Bash", json!({"command": "echo out; false"})), "out\nexit status 1");
    let late = desk.fails("Bash", json!({"command": "echo begun; sleep 30", "timeout": 300}));
    assert!(late.starts_with("begun\n") && late.contains("killed after 300 ms; give a longer `timeout`"), "{late}");
    assert_eq!(
        desk.fails("Bash", json!({"command": "exit 3"}))
            .lines()
            .last()
            .map(|l| l.contains("exit status 3") || l.contains("shell ended")),
        Some(true)
    );
    assert!(desk.done("Bash", json!({"command": "pwd"})).ends_with("/kernels"));
    assert_eq!(desk.fails("Bash", json!({"command": "  "})), "`command` is empty");
    let long = desk.done("Bash", json!({"command": "seq 100000"}));
    assert!(long.len() < 32_000 && long.starts_with("1\n2\n") && long.ends_with("\n100000"), "{}", long.len());
}

#[test]
fn a_background_command_is_asked_filtered_and_killed() {
    let mut desk = Desk::new();
    let said = desk.done("Bash", json!({"command": "echo one; echo two; sleep 60", "run_in_background": true}));
    let id = said.split('"').nth(1).unwrap().to_owned();
    // It answers as soon as there is something, which may be the first line alone.
    let asked = |desk: &mut Desk| desk.done("BashOutput", json!({"bash_id": id, "filter": "^tw"}));
    let first = (0..50).map(|_| asked(&mut desk)).find(|text| text != "(running)");
    assert_eq!(first.as_deref(), Some("two\n(running)"));
    assert!(desk.fails("BashOutput", json!({"bash_id": id, "filter": "("})).contains("the filter ( is not valid"));
    desk.done("KillBash", json!({"shell_id": id}));
    assert!(desk.fails("BashOutput", json!({"bash_id": "nobody"})).contains("there is no background command nobody"));
    let short = desk.done("Bash", json!({"command": "echo late; exit 4", "run_in_background": true}));
    let id = short.split('"').nth(1).unwrap().to_owned();
    let mut text = String::new();
    for _ in 0..20 {
        text.push_str(&desk.done("BashOutput", json!({"bash_id": id})));
        if text.contains("ended") {
            break;
        }
    }
    assert!(text.contains("late") && text.ends_with("(ended with exit status 4)"), "{text}");
}

#[test]
fn a_file_is_read_in_parts_with_numbers() {
    let mut desk = Desk::new();
    let text = desk.done("Read", json!({"file_path": "long.txt"}));
    assert!(text.starts_with("     1\tline 1\n") && text.ends_with("(1000 more lines; go on with offset 2001)\n"));
    assert_eq!(
        desk.done("Read", json!({"file_path": "long.txt", "offset": 2999, "limit": 9})),
        "  2999\tline 2999\n  3000\tline 3000\n"
    );
    assert!(desk.fails("Read", json!({"file_path": "long.txt", "offset": 9000})).contains("has 3000 lines"));
    assert_eq!(desk.done("Read", json!({"file_path": "empty.py"})), "(the file is empty)");
    assert!(desk.fails("Read", json!({"file_path": "kernels"})).contains("is a folder"));
    assert!(desk.fails("Read", json!({"file_path": "no.py"})).contains("no.py does not exist"));
    assert!(desk.fails("Read", json!({"file_path": "/etc/shadow"})).contains("outside the workspace"));
    desk.done("Bash", json!({"command": "printf '\\xff\\xfe' > bytes"}));
    assert!(desk.fails("Read", json!({"file_path": "bytes"})).contains("is not UTF-8 text"));
}

#[test]
fn a_file_is_changed_only_by_who_has_seen_it_as_it_is() {
    let mut desk = Desk::new();
    let edit = |old: &str, new: &str| json!({"file_path": "kernels/a.cu", "old_string": old, "new_string": new});
    assert!(desk.fails("Edit", edit("int b", "int c")).contains("has not been read yet"));
    assert!(
        desk.fails("Write", json!({"file_path": "kernels/a.cu", "content": "x"})).contains("has not been read yet")
    );
    desk.done("Read", json!({"file_path": "kernels/a.cu"}));
    assert!(desk.fails("Edit", edit("int a", "int c")).contains("is in the file 2 times"));
    let shown = desk.done("Edit", edit("int b;", "int c;"));
    assert!(shown.contains("     2\tint c;\n"), "{shown}");
    // Under another name of the same file, and after somebody else has changed it.
    let absolute = json!({"file_path": desk.sandbox.folder().join("kernels/a.cu"), "old_string": "int c;", "new_string": "int d;"});
    desk.done("Edit", absolute);
    desk.done("Bash", json!({"command": "echo 'int e;' >> kernels/a.cu"}));
    assert!(desk.fails("Edit", edit("int d;", "int f;")).contains("has changed since it was read"));
    desk.done("Read", json!({"file_path": "kernels/a.cu"}));
    // All edits or none.
    let edits = |second: &str| {
        json!({"file_path": "kernels/a.cu", "edits": [
        {"old_string": "int d;", "new_string": "int z;"}, {"old_string": second, "new_string": "int y;"}]})
    };
    assert!(desk.fails("MultiEdit", edits("int nowhere;")).contains("edit 2 of 2: `old_string` is not in the file"));
    assert!(desk.done("Bash", json!({"command": "cat kernels/a.cu"})).contains("int d;"));
    desk.done("MultiEdit", edits("int z;"));
    assert!(desk.done("Bash", json!({"command": "cat kernels/a.cu"})).contains("int y;"));
    // What was written is known without reading; a new file needs no reading.
    assert_eq!(
        desk.done("Write", json!({"file_path": "kernels/new/b.cu", "content": "1\n2\n"})),
        "created kernels/new/b.cu (2 lines)"
    );
    assert_eq!(
        desk.done("Write", json!({"file_path": "kernels/new/b.cu", "content": "3\n"})),
        "replaced kernels/new/b.cu (1 lines)"
    );
    let all = json!({"file_path": "kernels/a.cu", "old_string": "int", "new_string": "long", "replace_all": true});
    desk.done("Edit", all);
    assert!(!desk.done("Bash", json!({"command": "cat kernels/a.cu"})).contains("int"));
}

#[test]
fn files_and_lines_are_found() {
    let mut desk = Desk::new();
    assert_eq!(desk.done("Glob", json!({"pattern": "**/*.cu"})), "kernels/a.cu");
    assert_eq!(desk.done("Glob", json!({"pattern": "*.rs"})), "no file matches");
    assert_eq!(desk.done("Grep", json!({"pattern": "int a"})), "kernels/a.cu");
    assert_eq!(
        desk.done("Grep", json!({"pattern": "INT A", "-i": true, "output_mode": "count", "type": "cuda"})),
        "kernels/a.cu:2"
    );
    let lines = desk.done("Grep", json!({"pattern": "int b", "output_mode": "content", "-C": 1, "-n": true}));
    assert_eq!(lines, "kernels/a.cu-1-int a;\nkernels/a.cu:2:int b;\nkernels/a.cu-3-int a2;");
    assert_eq!(
        desk.done("Grep", json!({"pattern": "line 1", "output_mode": "content", "head_limit": 2, "path": "long.txt"}))
            .lines()
            .count(),
        3
    );
    assert!(desk.fails("Grep", json!({"pattern": "("})).contains("is not valid"));
    assert!(desk.fails("Grep", json!({"pattern": "a", "type": "java"})).contains("the type `java` is not known"));
    let todos = json!({"todos": [{"content": "a", "status": "completed", "activeForm": "doing a"}, {"content": "b", "status": "pending"}]});
    assert_eq!(desk.done("TodoWrite", todos), "the list is kept: 2 items, 1 open");
    let wrong = desk.call("TodoWrite", json!({"todos": [{"content": "a", "status": "later"}]}));
    assert_eq!(wrong.0, Kind::Malformed);
    assert!(wrong.1.contains("at `todos[0].status`: unknown variant `later`"), "{}", wrong.1);
}
