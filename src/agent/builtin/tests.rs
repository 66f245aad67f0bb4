//! Whole proposals: snapshots to review, and a sweep over traced graphs in a folder that the environment names.

use super::*;

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
            long_row: fact("LONG", base.long_row),
            register_row: fact("REGISTERS", base.register_row),
            ..base
        };
        match propose(&task, &graph, device, &facts) {
            Ok(proposal) => {
                println!("OK {stem} {} | {}", proposal.candidates.len(), proposal.covered.join(" | "));
                for (file, text) in &proposal.candidates[0].files {
                    let to = std::path::Path::new(&out).join(&stem).join(file);
                    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
                    std::fs::write(to, text).unwrap();
                }
            }
            Err(declined) => println!("NO {stem} {declined}"),
        }
    }
}
