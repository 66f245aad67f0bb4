//! What a C function is given, held against its definition in the source: on the CPU a library says nothing of its
//! functions' parameters, and a call with one too few reads whatever lies in the register.
//!
//! Knows enough of C++ to find a definition and split its parameters. Must not refuse what it can't read: a definition
//! made by a macro, of another file or with types of its own passes.

use crate::plan::Arg;

/// What a parameter takes, as far as its text says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Pointer,
    Integer,
    Float,
    Double,
    Unknown,
}

/// Checks the arguments of a launch against every definition of `kernel` in `source`.
///
/// # Errors
/// One sentence where none of them fits.
pub(in crate::judge) fn check(source: &str, kernel: &str, args: &[Arg]) -> Result<(), String> {
    let mut wrong = Ok(());
    for parameters in definitions(&plain(source), kernel) {
        match fits(kernel, &parameters, args) {
            Ok(()) => return Ok(()),
            Err(why) => wrong = wrong.and(Err(why)),
        }
    }
    wrong
}

/// The text with blanks instead of comments, literals and lines of the preprocessor.
fn plain(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut text = String::with_capacity(source.len());
    let mut at = 0;
    let starts = |at: usize, what: &str| bytes.get(at..).is_some_and(|rest| rest.starts_with(what.as_bytes()));
    let find = |from: usize, what: &str| {
        let rest = bytes.get(from..).unwrap_or_default();
        rest.windows(what.len()).position(|w| w == what.as_bytes()).map_or(bytes.len(), |i| from + i + what.len())
    };
    let mut line_begins = true;
    while let Some(&byte) = bytes.get(at) {
        let end = if starts(at, "//") {
            find(at, "\n") - usize::from(find(at, "\n") < bytes.len())
        } else if starts(at, "/*") {
            find(at + 2, "*/")
        } else if byte == b'#' && line_begins {
            let mut end = find(at, "\n");
            while end < bytes.len() && source.get(..end).is_some_and(|t| t.trim_end_matches('\n').ends_with('\\')) {
                end = find(end, "\n");
            }
            end - usize::from(end < bytes.len())
        } else if starts(at, "R\"") {
            let open = find(at, "(");
            let mark = source.get(at + 2..open.saturating_sub(1)).unwrap_or_default();
            find(open, &format!("){mark}\""))
        } else if byte == b'"' || (byte == b'\'' && !text.ends_with(|c: char| c.is_ascii_digit())) {
            let mut end = at + 1;
            while bytes.get(end).is_some_and(|b| *b != byte && *b != b'\n') {
                end += if bytes.get(end) == Some(&b'\\') { 2 } else { 1 };
            }
            (end + 1).min(bytes.len())
        } else {
            at
        };
        if end > at {
            text.push(' ');
            at = end;
            continue;
        }
        line_begins = byte == b'\n' || (line_begins && byte.is_ascii_whitespace());
        text.push(if byte.is_ascii() { char::from(byte) } else { '_' });
        at += 1;
    }
    text
}

const fn in_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Parameters of every definition of `name`: a name after a type, with a body behind its parameters.
fn definitions(text: &str, name: &str) -> Vec<Vec<String>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    for (at, _) in text.match_indices(name) {
        let after = text.get(at + name.len()..).unwrap_or_default().trim_start();
        let before = text.get(..at).unwrap_or_default();
        let whole = !before.as_bytes().last().is_some_and(|b| in_name(*b));
        let typed = before.trim_end().as_bytes().last().is_some_and(|b| in_name(*b) || matches!(b, b'*' | b'>'));
        if !whole || !typed || !after.starts_with('(') || bytes.get(at + name.len()).is_some_and(|b| in_name(*b)) {
            continue;
        }
        let Some((inside, rest)) = closed(after) else { continue };
        let rest = rest.trim_start();
        let rest = rest.strip_prefix("noexcept").unwrap_or(rest).trim_start();
        if rest.starts_with('{') && !before.trim_end().ends_with("return") {
            found.push(split(inside));
        }
    }
    found
}

/// What stands within the parentheses that `text` begins with, and what follows them.
fn closed(text: &str) -> Option<(&str, &str)> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some((text.get(1..at)?, text.get(at + 1..)?));
        }
    }
    None
}

/// Parameters, one text each.
fn split(inside: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0;
    for c in inside.chars() {
        match c {
            '(' | '<' | '[' | '{' => depth += 1,
            ')' | '>' | ']' | '}' => depth -= 1,
            _ => {}
        }
        match parts.last_mut() {
            Some(part) if c != ',' || depth > 0 => part.push(c),
            _ => parts.push(String::new()),
        }
    }
    let parts: Vec<String> = parts.iter().map(|p| p.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    if parts.len() == 1 && parts.first().is_some_and(|p| p.is_empty() || p == "void") { Vec::new() } else { parts }
}

fn kind(parameter: &str) -> Kind {
    let declared = parameter.split('=').next().unwrap_or_default();
    if declared.contains(['*', '[']) {
        return Kind::Pointer;
    }
    if declared.contains(['&', '<', '.']) {
        return Kind::Unknown;
    }
    let words: Vec<&str> = declared.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).collect();
    let has = |word: &str| words.contains(&word);
    let sized = |w: &str| {
        let bare = w.strip_prefix('u').unwrap_or(w);
        bare.strip_prefix("int")
            .and_then(|r| r.strip_suffix("_t"))
            .is_some_and(|r| matches!(r, "8" | "16" | "32" | "64"))
    };
    let plain = ["int", "long", "short", "char", "bool", "unsigned", "signed", "size_t", "ssize_t", "ptrdiff_t"];
    match (has("float"), has("double"), words.iter().any(|w| plain.contains(w) || sized(w))) {
        (true, false, false) => Kind::Float,
        (false, true, false) => Kind::Double,
        (false, false, true) => Kind::Integer,
        _ => Kind::Unknown,
    }
}

fn fits(kernel: &str, parameters: &[String], args: &[Arg]) -> Result<(), String> {
    // A lone word that is no type may be a macro that stands for several parameters; `...` takes any number.
    let unclear = |p: &String| p.contains("...") || (kind(p) == Kind::Unknown && !p.contains([' ', '*', '&', '<']));
    if parameters.iter().any(unclear) {
        return Ok(());
    }
    if parameters.len() != args.len() {
        return Err(format!(
            "{kernel} takes {} arguments ({}), {} are given",
            parameters.len(),
            parameters.join(", "),
            args.len()
        ));
    }
    for (number, (parameter, arg)) in parameters.iter().zip(args).enumerate() {
        let wanted = kind(parameter);
        let problem = match (wanted, arg) {
            (Kind::Integer | Kind::Float | Kind::Double, Arg::Pointer { .. }) => "a tensor".to_owned(),
            (Kind::Integer | Kind::Float | Kind::Double, Arg::Null) => "None, which is a null pointer".to_owned(),
            (Kind::Pointer, Arg::Int(v) | Arg::I64(v)) if *v != 0 => format!("the number {v}: give a tensor, or None"),
            (Kind::Pointer, Arg::Float(v) | Arg::F32(v) | Arg::F64(v)) => format!("the number {v:?}: give a tensor"),
            (Kind::Float, Arg::Int(v)) => format!("the integer {v}: write float({v}) or kf.f32({v})"),
            (Kind::Double, Arg::Int(v)) => format!("the integer {v}: write kf.f64({v})"),
            (Kind::Double, Arg::Float(v)) => format!("a C float: write kf.f64({v:?})"),
            (Kind::Float, Arg::F64(v)) => format!("a C double: write kf.f32({v:?})"),
            (Kind::Double, Arg::F32(v)) => format!("a C float: write kf.f64({v:?})"),
            (Kind::Float | Kind::Double, Arg::I32(_) | Arg::I64(_) | Arg::U32(_) | Arg::U8(_)) => {
                "an integer".to_owned()
            }
            (Kind::Integer, Arg::Float(v) | Arg::F32(v) | Arg::F64(v)) => {
                format!("the floating number {v:?}: write int(..), or kf.i64(..)")
            }
            _ => continue,
        };
        return Err(format!("argument {} of {kernel}, `{parameter}`, is given {problem}", number + 1));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALE: &str = r#"
#include <cstdint>
#define COUNT(a, b) scale(a, b)
// void scale(int n) { }
static const char* NAME = "scale(x) {";
template <typename T> static T twice(T x) { return x + x; }
extern "C" void scale(const float* __restrict__ x, float* y, int64_t n /* all, of them */, float factor = 1.0f) {
    for (int64_t i = 0; i < n; i++) y[i] = twice(x[i]) * factor;
}
"#;

    const X: Arg = Arg::Pointer { buffer: 0, offset: 0 };

    #[test]
    fn a_call_as_the_function_is_defined_passes() {
        assert_eq!(check(SCALE, "scale", &[X, X, Arg::Int(4), Arg::Float(2.0)]), Ok(()));
        assert_eq!(check(SCALE, "scale", &[Arg::Null, X, Arg::I32(4), Arg::F32(2.0)]), Ok(()));
        assert_eq!(check(SCALE, "elsewhere", &[X]), Ok(()), "what is not here is not known");
    }

    #[test]
    fn one_argument_too_few_and_each_of_the_wrong_kind_is_named() {
        let why = |args: &[Arg]| check(SCALE, "scale", args).unwrap_err();
        assert_eq!(
            why(&[X, X, Arg::Int(4)]),
            "scale takes 4 arguments (const float* __restrict__ x, float* y, int64_t n, float factor = 1.0f), 3 are given"
        );
        assert!(why(&[X, X, X, Arg::Float(1.0)]).contains("argument 3 of scale, `int64_t n`, is given a tensor"));
        assert!(why(&[X, Arg::Int(3), Arg::Int(4), Arg::Float(1.0)]).contains("`float* y`, is given the number 3"));
        let factor = why(&[X, X, Arg::Int(4), Arg::Int(2)]);
        assert!(factor.ends_with("is given the integer 2: write float(2) or kf.f32(2)"), "{factor}");
        assert!(why(&[X, X, Arg::Float(4.0), Arg::Float(1.0)]).contains("the floating number 4.0"));
        assert!(why(&[X, X, Arg::Int(4), Arg::F64(1.0)]).contains("a C double"));
        let double = check("extern \"C\" void f(double a) {}", "f", &[Arg::Float(1.5)]).unwrap_err();
        assert!(double.ends_with("is given a C float: write kf.f64(1.5)"), "{double}");
    }

    #[test]
    fn what_cannot_be_read_for_certain_passes() {
        for source in [
            "#define KERNEL(name) extern \"C\" void name(const float* x)\nKERNEL(f) {}",
            "#define ARGS const float* x, float* y\nextern \"C\" void f(ARGS) {}",
            "extern \"C\" void f(float* x, ...) {}",
            "using number = double;\nextern \"C\" void f(number a, half2 b) {}",
            "void f(int a);\n",
            "int g() { return f(1) ; }",
            "#if A\nextern \"C\" void f(int a, int b, int c) {}\n#else\nextern \"C\" void f(float* a, float* b) {}\n#endif",
        ] {
            assert_eq!(check(source, "f", &[X, X]), Ok(()), "{source}");
        }
        assert!(check("void f(void) {}", "f", &[X]).unwrap_err().contains("takes 0 arguments (), 1 are given"));
        assert_eq!(check("auto s = R\"x(void f() {)x\"; void f(float *a) noexcept { }", "f", &[X]), Ok(()));
        assert_eq!(check("int n = 1'000; void f(std::size_t n, bool b) {}", "f", &[Arg::Int(1), Arg::U8(1)]), Ok(()));
    }

    proptest::proptest! {
        #![proptest_config(crate::properties::usual())]

        #[test]
        fn no_text_makes_it_panic(source in "[\\PC\n\"'/*#(){}<>,R]{0,200}") {
            let _ = check(&source, "f", &[X]);
            let _ = check(&format!("void f({source}) {{"), "f", &[X]);
        }
    }
}
