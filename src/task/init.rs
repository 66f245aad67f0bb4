//! Writes a task file around a module of a library. Pure.

use std::fmt::Write;

use super::syntax::arguments;

/// What the task is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// `torch.nn.GELU` or `package.module:Class`.
    pub module: String,
    /// Shape of each tensor that `forward` gets.
    pub shapes: Vec<Vec<u64>>,
    /// `float32` and so on.
    pub dtype: String,
    /// Arguments of the constructor as Python writes them: `4096, eps=1e-6`.
    pub arguments: String,
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

/// The text of the task file.
///
/// # Errors
/// When the request's module or arguments can't be Python.
pub fn render(request: &Request) -> Result<String, String> {
    let (package, class) = split(&request.module)?;
    let (positional, keywords) = arguments(&request.arguments)?;
    let names: Vec<String> = match request.shapes.len() {
        1 => vec!["x".into()],
        n => (0..n).map(|i| format!("x{i}")).collect(),
    };
    let mut call = vec!["*args".to_owned()];
    call.extend(keywords.iter().map(|(k, v)| format!("{k}={v}")));
    let mut text = String::new();
    let _ = writeln!(text, "\"\"\"{package}.{class} as a task.\"\"\"\n\nimport torch\nfrom torch import nn\n");
    let _ = writeln!(text, "from {package} import {class} as Subject\n\n");
    let _ = writeln!(text, "class Model(nn.Module):");
    let _ = writeln!(text, "    def __init__(self, *args):\n        super().__init__()");
    let _ = writeln!(text, "        self.subject = Subject({})\n", call.join(", "));
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
        let text = render(&request).unwrap();
        assert_eq!(super::super::syntax::check(&text, Some(&["torch".into()])), []);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn what_python_could_not_import_is_refused() {
        assert!(split("GELU").is_err());
        assert!(split("torch.nn.GE-LU").is_err());
        assert!(split("os;x.y").is_err());
        assert_eq!(split("torch.nn.GELU").unwrap(), ("torch.nn".into(), "GELU".into()));
    }
}
