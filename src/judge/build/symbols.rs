//! What a built library takes from others, and what of that it may not: an extension, or the module of a plan for the CPU.
//!
//! Knows ELF's dynamic symbols and the names behind which PyTorch computes without dispatching. Must not know how a library
//! is run. Operators that are dispatched are seen when they run; these here would not be.

/// Refusal of a symbol: the code of a verdict, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forbidden {
    pub code: &'static str,
    pub symbol: String,
    pub why: &'static str,
}

const DIRECT: &str = "it is the framework's own kernel, called past its dispatcher";
const LIBRARY: &str = "it is a library's function that nobody sees work";
const LOADS: &str = "it finds functions of libraries that nobody knows of";
const BLINDS: &str = "it takes away the record of what is dispatched";

/// Beginnings of symbols, with what they are refused as.
const NAMES: &[(&str, &str, &str)] = &[
    ("_ZN2at6native", "framework_operator", DIRECT),
    ("_ZN2at3cpu", "framework_operator", DIRECT),
    ("_ZN2at4cuda4blas", "framework_operator", DIRECT),
    ("_ZN2at9functionalization", "framework_operator", DIRECT),
    ("cblas_", "library_not_allowed", LIBRARY),
    ("_ZN3c1010Dispatcher", "framework_operator", DIRECT),
    ("_ZNK3c1010Dispatcher", "framework_operator", DIRECT),
    ("sgemm", "library_not_allowed", LIBRARY),
    ("dgemm", "library_not_allowed", LIBRARY),
    ("sgemv", "library_not_allowed", LIBRARY),
    ("dgemv", "library_not_allowed", LIBRARY),
    ("SGEM", "library_not_allowed", LIBRARY),
    ("DGEM", "library_not_allowed", LIBRARY),
    ("mkl_", "library_not_allowed", LIBRARY),
    ("MKL_", "library_not_allowed", LIBRARY),
    ("_ZN6fbgemm", "library_not_allowed", LIBRARY),
    ("xnn_", "library_not_allowed", LIBRARY),
    ("dnnl_", "library_not_allowed", LIBRARY),
    ("_ZN4dnnl", "library_not_allowed", LIBRARY),
    ("dlopen", "library_not_allowed", LOADS),
    ("dlmopen", "library_not_allowed", LOADS),
    ("dlsym", "library_not_allowed", LOADS),
    ("dlvsym", "library_not_allowed", LOADS),
    ("__libc_dl", "library_not_allowed", LOADS),
    ("dl_iterate_phdr", "library_not_allowed", LOADS),
    ("_r_debug", "library_not_allowed", LOADS),
    ("_ZN2at14clearCallbacks", "trace_failed", BLINDS),
    ("_ZN2at20clearGlobalCallbacks", "trace_failed", BLINDS),
    ("_ZN2at25clearThreadLocalCallbacks", "trace_failed", BLINDS),
    ("_ZN2at14removeCallback", "trace_failed", BLINDS),
    ("_ZN2at15disableCallback", "trace_failed", BLINDS),
    ("_ZN2at20enableRecordFunction", "trace_failed", BLINDS),
    ("_ZN2at19RecordFunctionGuard", "trace_failed", BLINDS),
    ("_ZN2at24set_record_function_tls_", "trace_failed", BLINDS),
];

/// The first symbol that a candidate's library may not take from elsewhere. `None` of what is no library too: it can't be loaded.
#[must_use]
pub fn forbidden(library: &[u8]) -> Option<Forbidden> {
    let found = |symbol: &str| {
        let known = NAMES.iter().find(|(start, ..)| symbol.starts_with(start)).map(|&(_, code, why)| (code, why));
        // `at::_ops::NAME::redispatch` runs an operator below where it would be recorded.
        let below = symbol.starts_with("_ZN2at4_ops") && symbol.contains("10redispatchE");
        known.or_else(|| below.then_some(("framework_operator", DIRECT)))
    };
    undefined(library)?
        .into_iter()
        .find_map(|symbol| found(&symbol).map(|(code, why)| Forbidden { code, symbol: symbol.clone(), why }))
}

/// Names of undefined dynamic symbols of a 64-bit little-endian library.
fn undefined(library: &[u8]) -> Option<Vec<String>> {
    let number = |at: usize, size: usize| -> Option<usize> {
        let bytes = library.get(at..at.checked_add(size)?)?;
        let value = bytes.iter().rev().fold(0u64, |value, byte| (value << 8) | u64::from(*byte));
        usize::try_from(value).ok()
    };
    if library.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let (table, size, count) = (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?);
    let section = |index: usize| table.checked_add(index.checked_mul(size)?);
    let dynamic = (0..count).filter_map(section).find(|&at| number(at.saturating_add(4), 4) == Some(11))?;
    let strings = section(number(dynamic.checked_add(0x28)?, 4)?)?;
    let names = number(strings.checked_add(0x18)?, 8)?;
    let (start, bytes) = (number(dynamic.checked_add(0x18)?, 8)?, number(dynamic.checked_add(0x20)?, 8)?);
    let mut found = Vec::new();
    for symbol in (0..bytes / 24).filter_map(|i| start.checked_add(i.checked_mul(24)?)) {
        // Section 0 says that it is defined elsewhere.
        if number(symbol.checked_add(6)?, 2)? == 0 {
            let at = names.checked_add(number(symbol, 4)?)?;
            let name = library.get(at..)?.split(|byte| *byte == 0).next()?;
            found.push(String::from_utf8_lossy(name).into_owned());
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn library(source: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let (from, to) = (folder.path().join("x.cpp"), folder.path().join("x.so"));
        std::fs::write(&from, source).unwrap();
        let made = Command::new("c++").args(["-shared", "-fPIC", "-o"]).arg(&to).arg(&from).status().unwrap();
        assert!(made.success());
        std::fs::read(to).unwrap()
    }

    fn refused(source: &str) -> Option<&'static str> {
        forbidden(&library(source)).map(|f| f.code)
    }

    #[test]
    fn what_computes_past_the_dispatcher_is_known_by_its_symbol() {
        let plain = "#include <cmath>\n#include <cstdlib>\nextern \"C\" float f(float x) { return std::tanh(x) + std::atof(\"1\"); }";
        assert_eq!(refused(plain), None);
        assert_eq!(
            refused("namespace at { namespace native { void mm(); } } void f() { at::native::mm(); }"),
            Some("framework_operator")
        );
        assert_eq!(
            refused("namespace at { namespace cpu { int mm(int); } } int f() { return at::cpu::mm(1); }"),
            Some("framework_operator")
        );
        assert_eq!(
            refused(
                "namespace at { namespace _ops { struct mm { static int redispatch(int); }; } } int f() { return at::_ops::mm::redispatch(1); }"
            ),
            Some("framework_operator")
        );
        assert_eq!(
            refused(
                "namespace at { namespace _ops { struct empty { static int call(int); }; } } int f() { return at::_ops::empty::call(1); }"
            ),
            None
        );
        assert_eq!(
            refused("extern \"C\" void cblas_sgemm(); void f() { cblas_sgemm(); }"),
            Some("library_not_allowed")
        );
        for name in ["sgemm", "SGEMM", "sgemm_", "MKL_SGEMM", "dl_iterate_phdr"] {
            let source = format!("extern \"C\" void {name}() __attribute__((weak)); void f() {{ {name}(); }}");
            assert_eq!(refused(&source), Some("library_not_allowed"), "{name}");
        }
        assert_eq!(
            refused(
                "namespace c10 { struct Dispatcher { static void* realSingleton(); }; } void* f() { return c10::Dispatcher::realSingleton(); }"
            ),
            Some("framework_operator")
        );
        assert_eq!(
            refused(
                "namespace at { void set_record_function_tls_(int*); } void f() { at::set_record_function_tls_(0); }"
            ),
            Some("trace_failed")
        );
        assert_eq!(
            refused("extern \"C\" void* dlopen(const char*, int); void* f() { return dlopen(0, 1); }"),
            Some("library_not_allowed")
        );
        assert_eq!(
            refused("namespace at { void clearCallbacks(); } void f() { at::clearCallbacks(); }"),
            Some("trace_failed")
        );
    }

    #[test]
    fn what_is_cut_or_no_library_is_read_to_its_end_and_no_further() {
        assert_eq!(forbidden(b"garbage"), None);
        let whole = library("extern \"C\" void cblas_sgemm(); void f() { cblas_sgemm(); }");
        for end in (0..whole.len()).step_by(97) {
            let _ = forbidden(&whole[..end]);
        }
    }
}
