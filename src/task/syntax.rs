//! Checks a task file by its syntax tree, without running anything.
//!
//! Knows KernelBench's form: a class `Model`, `get_inputs()`, `get_init_inputs()`. What only running shows is
//! the judge's to say. The codes are those of the reference host, so that one refusal has one name.

use ruff_python_ast::{Expr, Mod, Stmt};
use ruff_python_parser::{Mode, ParseOptions, parse_module, parse_unchecked};
use ruff_text_size::Ranged;
use serde::{Deserialize, Serialize};

/// Why a task can't be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// `parse`, `no_model`, `no_get_inputs`, `no_get_init_inputs`, `import`.
    pub code: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub line: Option<usize>,
}

/// Everything that is wrong by syntax. `modules` are the names that `import` finds at the top level; without
/// them imports aren't checked.
#[must_use]
pub fn check(source: &str, modules: Option<&[String]>) -> Vec<Refusal> {
    let parsed = match parse_module(source) {
        Ok(parsed) => parsed,
        Err(error) => {
            let line = line_of(source, error.location.start().to_usize());
            return vec![Refusal {
                code: "parse".into(),
                message: format!("syntax error: {}", error.error),
                line: Some(line),
            }];
        }
    };
    let body = &parsed.syntax().body;
    let mut refusals = Vec::new();
    let mut refuse = |code: &str, message: String, line: Option<usize>| {
        refusals.push(Refusal { code: code.into(), message, line });
    };
    if let Some(modules) = modules {
        for (name, offset) in imports(body) {
            let top = name.split('.').next().unwrap_or(&name);
            if !modules.iter().any(|m| m == top) {
                let message = format!(
                    "imports {name}, and the package {top} is not installed in the environment that tasks run in"
                );
                refuse("import", message, Some(line_of(source, offset)));
            }
        }
    }
    match class(body, "Model") {
        None => {
            let other = body.iter().find_map(|s| match s {
                Stmt::ClassDef(c) => Some((c.name.to_string(), c.range().start().to_usize())),
                _ => None,
            });
            let hint = other.as_ref().map(|(n, _)| format!("; there is a class {n}, is it meant?")).unwrap_or_default();
            refuse("no_model", format!("has no class Model{hint}"), other.map(|(_, at)| line_of(source, at)));
        }
        Some(class) => {
            let has_forward =
                class.body.iter().any(|s| matches!(s, Stmt::FunctionDef(f) if f.name.as_str() == "forward"));
            let plain = class
                .bases()
                .iter()
                .any(|b| name_of(b).is_some_and(|n| n == "nn.Module" || n == "torch.nn.Module" || n == "Module"));
            if !has_forward && plain {
                refuse(
                    "no_model",
                    "Model has no method forward".into(),
                    Some(line_of(source, class.range().start().to_usize())),
                );
            }
        }
    }
    for (name, code) in [("get_inputs", "no_get_inputs"), ("get_init_inputs", "no_get_init_inputs")] {
        if !defines(body, name) {
            refuse(
                code,
                format!(
                    "has no function {name}(), which gives the arguments of {}",
                    if name == "get_inputs" { "forward" } else { "the constructor" }
                ),
                None,
            );
        }
    }
    refusals
}

fn class<'a>(body: &'a [Stmt], name: &str) -> Option<&'a ruff_python_ast::StmtClassDef> {
    body.iter().find_map(|s| match s {
        Stmt::ClassDef(c) if c.name.as_str() == name => Some(c),
        _ => None,
    })
}

fn defines(body: &[Stmt], name: &str) -> bool {
    body.iter().any(|s| match s {
        Stmt::FunctionDef(f) => f.name.as_str() == name,
        Stmt::Assign(a) => a.targets.iter().any(|t| name_of(t).as_deref() == Some(name)),
        Stmt::ImportFrom(i) => i.names.iter().any(|a| a.asname.as_ref().unwrap_or(&a.name).as_str() == name),
        _ => false,
    })
}

/// The classes of a text, and every name that its top level gives to a class or function. Nothing of one that doesn't parse.
#[must_use]
pub fn names(source: &str) -> (Vec<String>, Vec<String>) {
    let Ok(parsed) = parse_module(source) else { return Default::default() };
    let (mut classes, mut all) = (Vec::new(), Vec::new());
    for statement in &parsed.syntax().body {
        match statement {
            Stmt::ClassDef(c) => {
                classes.push(c.name.to_string());
                all.push(c.name.to_string());
            }
            Stmt::FunctionDef(f) => all.push(f.name.to_string()),
            _ => {}
        }
    }
    (classes, all)
}

/// The line of the first import of a neighbouring file (`from . import x`) at the top level.
#[must_use]
pub fn relative_import(source: &str) -> Option<usize> {
    let parsed = parse_module(source).ok()?;
    parsed.syntax().body.iter().find_map(|s| match s {
        Stmt::ImportFrom(i) if i.level > 0 => Some(line_of(source, i.range().start().to_usize())),
        _ => None,
    })
}

fn name_of(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Name(n) => Some(n.id.to_string()),
        Expr::Attribute(a) => Some(format!("{}.{}", name_of(&a.value)?, a.attr)),
        _ => None,
    }
}

/// Imports that run when the file is loaded: the top level's. One inside `try` may be missing on purpose.
fn imports(body: &[Stmt]) -> Vec<(String, usize)> {
    let mut names = Vec::new();
    for statement in body {
        match statement {
            Stmt::Import(i) => names.extend(i.names.iter().map(|a| (a.name.to_string(), i.range().start().to_usize()))),
            Stmt::ImportFrom(i) if i.level == 0 => {
                if let Some(module) = &i.module {
                    names.push((module.to_string(), i.range().start().to_usize()));
                }
            }
            _ => {}
        }
    }
    names
}

fn line_of(source: &str, offset: usize) -> usize {
    source.as_bytes().iter().take(offset).filter(|b| **b == b'\n').count() + 1
}

/// Arguments of a call as written: positional ones, and keywords with their values.
pub type Arguments = (Vec<String>, Vec<(String, String)>);

/// Splits the arguments of a call, `4096, eps=1e-6`, into positional ones and keywords.
///
/// # Errors
/// When they are not arguments of a call.
pub fn arguments(text: &str) -> Result<Arguments, String> {
    let call = format!("f({text})");
    let parsed = parse_unchecked(&call, ParseOptions::from(Mode::Expression));
    if let Some(error) = parsed.errors().first() {
        return Err(format!("`{text}` is not a list of arguments: {}", error.error));
    }
    let Mod::Expression(expression) = parsed.syntax() else { return Err(format!("`{text}` is not an expression")) };
    let Expr::Call(c) = expression.body.as_ref() else { return Err(format!("`{text}` is not a list of arguments")) };
    let slice = |e: &Expr| call[e.range().start().to_usize()..e.range().end().to_usize()].to_owned();
    let positional = c.arguments.args.iter().map(slice).collect();
    let mut keywords = Vec::new();
    for keyword in &c.arguments.keywords {
        let name = keyword.arg.as_ref().ok_or_else(|| format!("`{text}` has a ** argument, name them one by one"))?;
        keywords.push((name.to_string(), slice(&keyword.value)));
    }
    Ok((positional, keywords))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "import torch\nfrom torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        return x\ndef get_inputs():\n    return []\ndef get_init_inputs():\n    return []\n";

    fn codes(source: &str) -> Vec<(String, Option<usize>)> {
        let modules = ["torch".to_owned()];
        check(source, Some(&modules)).into_iter().map(|r| (r.code, r.line)).collect()
    }

    #[test]
    fn a_task_in_its_form_is_not_refused() {
        assert_eq!(codes(GOOD), []);
    }

    #[test]
    fn each_thing_that_is_missing_is_named_with_its_line() {
        assert_eq!(codes("import torch\nclass Model(:\n"), [("parse".into(), Some(2))]);
        assert_eq!(codes(&GOOD.replace("class Model", "class Net")), [("no_model".into(), Some(3))]);
        assert_eq!(codes(&GOOD.replace("get_inputs", "inputs")), [("no_get_inputs".into(), None)]);
        assert_eq!(codes(&GOOD.replace("get_init_inputs", "init")), [("no_get_init_inputs".into(), None)]);
        assert_eq!(codes(&GOOD.replace("forward", "call")), [("no_model".into(), Some(3))]);
        let refusals =
            check(&GOOD.replace("import torch\n", "import torch\nimport flash_attn.ops\n"), Some(&["torch".into()]));
        assert_eq!(refusals.len(), 1);
        assert!(refusals[0].message.contains("the package flash_attn is not installed"));
        assert_eq!(refusals[0].line, Some(2));
    }

    #[test]
    fn arguments_are_split_as_python_reads_them() {
        let (positional, keywords) = arguments("4096, (1, 2), eps=1e-6, name=\"a,b\"").unwrap();
        assert_eq!(positional, ["4096", "(1, 2)"]);
        assert_eq!(keywords, [("eps".to_owned(), "1e-6".to_owned()), ("name".to_owned(), "\"a,b\"".to_owned())]);
        assert!(arguments("4096)").is_err());
        assert!(arguments("**x").is_err());
    }

    proptest::proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn no_text_makes_the_check_panic(source in "\\PC{0,200}") {
            let _ = check(&source, None);
            let _ = arguments(&source);
        }
    }
}
