//! Writes a task file around a module: of a library, which the task imports, or of a file of one's own, whose text it
//! takes in. Pure.

use std::fmt::Write;

use super::source::MAX_BYTES;
use super::syntax::{self, arguments};

/// What the task is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// `torch.nn.GELU`, `package.module:Class` or `./file.py:Class`.
    pub module: String,
    /// Shape of each tensor that `forward` gets.
    pub shapes: Vec<Vec<u64>>,
    /// `float32` and so on.
    pub dtype: String,
    /// Arguments of the constructor as Python writes them: `4096, eps=1e-6`.
    pub arguments: String,
}

/// A module of one's own: a task is one file, so the text is taken in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Local {
    /// As it is told to people: `my_layers.py`.
    pub name: String,
    pub text: String,
}

impl Local {
    /// Why the text can't be taken into a task. `modules` are the names that tasks can import.
    #[must_use]
    pub fn refusal(&self, class: &str, modules: &[String]) -> Option<String> {
        let name = &self.name;
        if self.text.len() as u64 > MAX_BYTES / 2 {
            return Some(format!(
                "{name} is {} bytes, which a task can't take in (at most {})",
                self.text.len(),
                MAX_BYTES / 2
            ));
        }
        let at = |line: Option<usize>| line.map_or_else(|| name.clone(), |line| format!("{name}:{line}"));
        if let Some(refusal) =
            syntax::check(&self.text, Some(modules)).into_iter().find(|r| r.code == "parse" || r.code == "import")
        {
            let mend = if refusal.code == "import" {
                "; a task is one file: put what it needs into this one, or install the package there if you know it"
            } else {
                ""
            };
            return Some(format!("{}: {}{mend}", at(refusal.line), refusal.message));
        }
        let (classes, taken) = syntax::names(&self.text);
        if let Some(line) = syntax::relative_import(&self.text) {
            return Some(format!(
                "{}: imports a neighbouring file; a task is one file: put what it needs into this one",
                at(Some(line))
            ));
        }
        if !classes.iter().any(|c| c == class) {
            let there = if classes.is_empty() { "none".to_owned() } else { classes.join(", ") };
            return Some(format!("{name} has no class {class}; its classes: {there}"));
        }
        let own = ["Model", "get_inputs", "get_init_inputs"];
        if let Some(taken) = taken.iter().find(|t| own.contains(&t.as_str())) {
            return Some(format!(
                "{name} defines {taken} itself: if it is a task already, use it as it is (kernelfleet task check {name}); else give {taken} another name"
            ));
        }
        None
    }
}

/// The file and the class of a module that is a file: `./layers.py:Gate`.
#[must_use]
pub fn file(module: &str) -> Option<(&str, &str)> {
    let (path, class) =
        module.rsplit_once(':').or_else(|| module.rsplit_once('.').filter(|(p, _)| p.ends_with(".py")))?;
    path.ends_with(".py").then_some((path, class))
}

/// The module and the class of a request.
///
/// # Errors
/// When the text names no class of a module.
pub fn split(module: &str) -> Result<(String, String), String> {
    let (package, class) = module
        .split_once(':')
        .or_else(|| module.rsplit_once('.'))
        .ok_or_else(|| format!("`{module}` names no class of a module; write torch.nn.GELU or package.module:Class"))?;
    let name = |s: &str| {
        !s.is_empty()
            && !s.starts_with(|c: char| c.is_ascii_digit())
            && s.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    if !package.split('.').all(name) || !name(class) {
        return Err(format!("`{module}` is not a name that Python can import"));
    }
    Ok((package.to_owned(), class.to_owned()))
}

/// The text of the task file; with `local`, the class is one of that text.
///
/// # Errors
/// When the request's module or arguments can't be Python.
pub fn render(request: &Request, local: Option<&Local>) -> Result<String, String> {
    let (positional, keywords) = arguments(&request.arguments)?;
    let names: Vec<String> = match request.shapes.len() {
        1 => vec!["x".into()],
        n => (0..n).map(|i| format!("x{i}")).collect(),
    };
    let mut call = vec!["*args".to_owned()];
    call.extend(keywords.iter().map(|(k, v)| format!("{k}={v}")));
    let mut text = String::new();
    let subject = if let Some(local) = local {
        let class =
            file(&request.module).map_or_else(|| split(&request.module).map(|(_, c)| c), |(_, c)| Ok(c.to_owned()))?;
        let _ = writeln!(text, "# {class} of {} as a task: that file's text, then what a task needs.\n", local.name);
        let _ = writeln!(
            text,
            "{}\n\n# ---- the task ----\n\nimport torch\nfrom torch import nn\n\n",
            local.text.trim_end()
        );
        class
    } else {
        let (package, class) = split(&request.module)?;
        let _ = writeln!(text, "\"\"\"{package}.{class} as a task.\"\"\"\n\nimport torch\nfrom torch import nn\n");
        let _ = writeln!(text, "from {package} import {class} as Subject\n\n");
        "Subject".to_owned()
    };
    let _ = writeln!(text, "class Model(nn.Module):");
    let _ = writeln!(text, "    def __init__(self, *args):\n        super().__init__()");
    let _ = writeln!(text, "        self.subject = {subject}({})\n", call.join(", "));
    let _ = writeln!(text, "    def forward(self, {0}):\n        return self.subject({0})\n\n", names.join(", "));
    let _ = writeln!(text, "def get_inputs():\n    return [");
    for shape in &request.shapes {
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        let shape = shape.join(", ");
        let draw = if request.dtype.starts_with("int") {
            format!("torch.randint(0, 100, ({shape},), dtype=torch.{})", request.dtype)
        } else if request.dtype == "float32" {
            format!("torch.randn({shape})")
        } else {
            format!("torch.randn({shape}, dtype=torch.{})", request.dtype)
        };
        let _ = writeln!(text, "        {draw},");
    }
    let _ = writeln!(text, "    ]\n\n\ndef get_init_inputs():\n    return [{}]", positional.join(", "));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_a_task_in_its_form() {
        let request = Request {
            module: "torch.nn:LayerNorm".into(),
            shapes: vec![vec![16, 1024]],
            dtype: "float32".into(),
            arguments: "1024, eps=1e-6".into(),
        };
        let text = render(&request, None).unwrap();
        assert_eq!(super::super::syntax::check(&text, Some(&["torch".into()])), []);
        insta::assert_snapshot!(text);
    }

    const LAYERS: &str = "import torch\nfrom torch import nn\n\n\nclass Gate(nn.Module):\n    def forward(self, x):\n        return x * torch.sigmoid(x)\n";

    fn layers(text: &str) -> Local {
        Local { name: "my_layers.py".into(), text: text.into() }
    }

    #[test]
    fn a_file_of_ones_own_is_taken_into_the_task() {
        let request = Request {
            module: "./my_layers.py:Gate".into(),
            shapes: vec![vec![4, 8]],
            dtype: "float32".into(),
            arguments: String::new(),
        };
        let text = render(&request, Some(&layers(LAYERS))).unwrap();
        assert_eq!(super::super::syntax::check(&text, Some(&["torch".into()])), []);
        assert!(text.contains("class Gate(nn.Module):") && text.contains("self.subject = Gate(*args)"), "{text}");
        let named = Request { module: "my_layers.Gate".into(), ..request };
        assert_eq!(render(&named, Some(&layers(LAYERS))).unwrap(), text);
    }

    #[test]
    fn a_file_that_cannot_be_taken_in_says_why_and_where() {
        let why = |text: &str| layers(text).refusal("Gate", &["torch".into()]).unwrap();
        assert_eq!(layers(LAYERS).refusal("Gate", &["torch".into()]), None);
        assert!(why(&LAYERS.replace("Gate", "Door")).contains("has no class Gate; its classes: Door"));
        assert!(why(&format!("import helpers\n{LAYERS}")).starts_with("my_layers.py:1: imports helpers"));
        assert!(why(&format!("\nfrom .helpers import x\n{LAYERS}")).starts_with("my_layers.py:2: imports a neighbour"));
        assert!(why(&format!("{LAYERS}\nclass Model(Gate):\n    pass\n")).contains("defines Model itself"));
        assert!(why("class Gate(:").starts_with("my_layers.py:1: syntax error"));
    }

    #[test]
    fn a_module_is_a_file_where_its_name_says_so() {
        assert_eq!(file("./my_layers.py:Gate"), Some(("./my_layers.py", "Gate")));
        assert_eq!(file("a/b.py.Gate"), Some(("a/b.py", "Gate")));
        assert_eq!((file("torch.nn.GELU"), file("my_layers:Gate")), (None, None));
    }

    #[test]
    fn what_python_could_not_import_is_refused() {
        assert!(split("GELU").is_err());
        assert!(split("torch.nn.GE-LU").is_err());
        assert!(split("os;x.y").is_err());
        assert_eq!(split("torch.nn.GELU").unwrap(), ("torch.nn".into(), "GELU".into()));
    }
}
