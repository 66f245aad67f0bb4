//! Text of `model_new.py`: the reference's class taken over, `forward` replaced.
//!
//! Knows Python's syntax tree. Must not know kernels: it is given the lines of the new `forward`.

use ruff_python_ast::visitor::{self, Visitor};
use ruff_python_ast::{Expr, Stmt, StmtClassDef, StmtFunctionDef};
use ruff_text_size::{Ranged, TextRange};

/// The parts of a task's source that a candidate keeps.
pub struct Reference {
    /// Everything at module level that `ModelNew` may need, without `Model` and the functions that make inputs.
    pub module: String,
    /// Class header and body without `forward`, `Model` renamed.
    pub class: String,
    /// Names of `forward`'s parameters, without `self`.
    pub arguments: Vec<String>,
    /// `def forward(self, ..):` as it was written, in one line.
    pub signature: String,
    /// Indentation of the class body.
    pub indent: String,
}

struct Names<'a> {
    name: &'a str,
    found: Vec<TextRange>,
}
impl<'a> Visitor<'a> for Names<'_> {
    fn visit_expr(&mut self, expr: &'a Expr) {
        if let Expr::Name(name) = expr
            && name.id.as_str() == self.name
        {
            self.found.push(name.range());
        }
        visitor::walk_expr(self, expr);
    }
}

/// Takes a task's source apart.
///
/// # Errors
/// A sentence: the source doesn't parse, or has no class `Model` with a plain `forward`.
pub fn take_over(source: &str) -> Result<Reference, String> {
    let parsed =
        ruff_python_parser::parse_module(source).map_err(|error| format!("the task doesn't parse: {error}"))?;
    let text = |range: TextRange| source.get(range.start().to_usize()..range.end().to_usize()).unwrap_or_default();
    let mut module = String::new();
    let mut class: Option<&StmtClassDef> = None;
    for statement in &parsed.syntax().body {
        match statement {
            Stmt::ClassDef(def) if def.name.as_str() == "Model" => class = Some(def),
            Stmt::FunctionDef(def) if matches!(def.name.as_str(), "get_inputs" | "get_init_inputs") => {}
            // The module's docstring and tests at the end stay with the task.
            Stmt::Expr(_) | Stmt::If(_) => {}
            other => {
                module.push_str(text(other.range()));
                module.push('\n');
            }
        }
    }
    let class = class.ok_or("the task has no class Model")?;
    let forward: &StmtFunctionDef = class
        .body
        .iter()
        .find_map(|statement| match statement {
            Stmt::FunctionDef(def) if def.name.as_str() == "forward" => Some(def),
            _ => None,
        })
        .ok_or("Model has no forward of its own")?;
    let parameters = &forward.parameters;
    if parameters.vararg.is_some() || parameters.kwarg.is_some() || !parameters.kwonlyargs.is_empty() {
        return Err("forward takes a variable number of arguments".into());
    }
    let arguments: Vec<String> = parameters
        .posonlyargs
        .iter()
        .chain(&parameters.args)
        .skip(1)
        .map(|p| p.parameter.name.as_str().to_owned())
        .collect();
    let mut declared = vec!["self".to_owned()];
    for p in parameters.posonlyargs.iter().chain(&parameters.args).skip(1) {
        let default = p.default.as_ref().map(|d| format!("={}", text(d.range()))).unwrap_or_default();
        declared.push(format!("{}{default}", p.parameter.name));
    }

    // The class without `forward` and without its docstring, `Model` renamed wherever it is named.
    let start = class.range().start().to_usize();
    let line_start = |at: usize| source[..at].rfind('\n').map_or(0, |n| n + 1);
    let indent = source[line_start(forward.name.range().start().to_usize())..]
        .chars()
        .take_while(|c| c.is_whitespace())
        .collect::<String>();
    let mut names = Names { name: "Model", found: vec![] };
    visitor::walk_body(&mut names, &class.body);
    let mut edits: Vec<(usize, usize, &str)> =
        names.found.iter().map(|r| (r.start().to_usize(), r.end().to_usize(), "ModelNew")).collect();
    edits.push((class.name.range().start().to_usize(), class.name.range().end().to_usize(), "ModelNew"));
    let cut = (line_start(forward.range().start().to_usize()), forward.range().end().to_usize());
    edits.retain(|(from, ..)| !(cut.0 <= *from && *from < cut.1));
    edits.push((cut.0, cut.1, ""));
    if let Some(Stmt::Expr(first)) = class.body.first()
        && matches!(*first.value, Expr::StringLiteral(_))
    {
        let range = first.range();
        edits.push((line_start(range.start().to_usize()), range.end().to_usize(), ""));
    }
    edits.sort_by_key(|edit| edit.0);
    let mut out = String::new();
    let mut at = start;
    for (from, to, with) in edits {
        if from >= at {
            out.push_str(&source[at..from]);
            out.push_str(with);
            at = to;
        }
    }
    out.push_str(&source[at..class.range().end().to_usize().max(at)]);
    let mut class_text: Vec<&str> = out.lines().map(str::trim_end).collect();
    class_text.dedup_by(|a, b| a.is_empty() && b.is_empty());
    // No blank line directly under the header.
    let mut class_text: Vec<String> = class_text.into_iter().map(str::to_owned).collect();
    if class_text.get(1).is_some_and(String::is_empty) {
        class_text.remove(1);
    }
    while class_text.last().is_some_and(String::is_empty) {
        class_text.pop();
    }
    Ok(Reference {
        module,
        class: class_text.join("\n"),
        arguments,
        signature: format!("def forward({}):", declared.join(", ")),
        indent,
    })
}

/// `conv.0.weight` as an expression: `self.conv[0].weight`.
pub fn attribute(name: &str) -> String {
    let mut out = "self".to_owned();
    for part in name.split('.') {
        if part.chars().all(|c| c.is_ascii_digit()) {
            out.push_str(&format!("[{part}]"));
        } else {
            out.push_str(&format!(".{part}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_class_is_kept_but_for_its_name_and_forward() {
        let source = "import torch\nimport torch.nn as nn\nclass Model(nn.Module):\n    '''Doc.'''\n    def __init__(self, n):\n        super(Model, self).__init__()\n        self.l = nn.Linear(n, n)\n\n    def forward(self, x, y=2):\n        return self.l(x)\nN = 4\ndef get_inputs():\n    return [torch.rand(N)]\n";
        let taken = take_over(source).unwrap();
        assert_eq!(
            taken.class,
            "class ModelNew(nn.Module):\n    def __init__(self, n):\n        super(ModelNew, self).__init__()\n        self.l = nn.Linear(n, n)"
        );
        assert_eq!(taken.signature, "def forward(self, x, y=2):");
        assert_eq!(taken.module, "import torch\nimport torch.nn as nn\nN = 4\n");
        assert_eq!(attribute("layers.0.weight"), "self.layers[0].weight");
    }
}
