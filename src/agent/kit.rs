//! What a workspace begins with: the layout that models are trained on.
//!
//! Knows the files. Must not know who uses them. The files in `utils/` ask the desk and decide nothing.

use std::collections::BTreeMap;

use crate::judge::{Device, TaskSource};

const SKILL: &str = include_str!("../../agent-image/skill/SKILL.md");
const COMPILE: &str = include_str!("../../agent-image/skill/utils/compile.sh");
const VERIFICATION: &str = include_str!("../../agent-image/skill/utils/verification.py");
const PROFILING: &str = include_str!("../../agent-image/skill/utils/profiling.py");
const MODEL_NEW: &str = include_str!("../../agent-image/skill/model_new.py");

/// Who the model is.
pub const SYSTEM: &str = "You are an expert in writing fast kernels. You work alone in a workspace on one task, with tools; \
nobody answers questions. Work until the task is done, then answer without a tool call.";

/// The files that ask the desk, by their names in `utils/`.
pub const UTILS: [(&str, &str); 3] =
    [("compile.sh", COMPILE), ("verification.py", VERIFICATION), ("profiling.py", PROFILING)];

/// The files of a workspace for a task.
#[must_use]
pub fn files(task: &TaskSource, device: Device) -> BTreeMap<String, Vec<u8>> {
    let suffix = match device {
        Device::Cpu => "cpp",
        Device::Cuda => "cu",
    };
    let own = [
        ("SKILL.md", SKILL.to_owned()),
        ("model.py", task.source.clone()),
        ("model_new.py", MODEL_NEW.replace("{suffix}", suffix)),
        ("kernels/.keep", String::new()),
    ];
    let utils = UTILS.iter().map(|(name, text)| (format!("utils/{name}"), text.as_bytes().to_vec()));
    own.into_iter().map(|(name, text)| (name.to_owned(), text.into_bytes())).chain(utils).collect()
}

/// What a task's job says that a prompt must.
#[derive(Clone, Debug)]
pub struct Brief {
    pub device: Device,
    /// What kernels run on, in words.
    pub hardware: String,
    pub libraries: Vec<String>,
    pub turns: u32,
    /// The job's own target, as a clause.
    pub target: Option<String>,
}

/// The first message.
#[must_use]
pub fn prompt(brief: &Brief) -> String {
    let (language, suffix) = match brief.device {
        Device::Cuda => ("CUDA C++", "cu"),
        Device::Cpu => ("C++ with OpenMP", "cpp"),
    };
    let libraries = if brief.libraries.is_empty() {
        "No library call is allowed.".to_owned()
    } else {
        format!("Allowed library calls: {}.", brief.libraries.join(", "))
    };
    let target = brief.target.as_ref().map(|t| format!(" The work ends at once when {t}.")).unwrap_or_default();
    format!(
        "Make the PyTorch model in model.py faster: write ModelNew in model_new.py, with kernels of your own in {language} \
         (kernels/*.{suffix}), for {hardware}. It must be correct and more than 5 % faster than both eager PyTorch and torch.compile; \
         faster still is better.{target}\n\n\
         Read SKILL.md first: it says how kernels are launched, what is refused and why, and what to try in which order. Then:\n\
         1. Read model.py; see what the reference spends its time on: python3 utils/profiling.py --reference\n\
         2. Write the kernels and model_new.py.\n\
         3. bash utils/compile.sh until it is OK.\n\
         4. python3 utils/verification.py until it is CORRECT.\n\
         5. python3 utils/profiling.py: speedups, and what each launch takes.\n\
         6. Improve what takes the most time; go on with 3. Keep what was fastest.\n\n\
         {libraries} You have {turns} turns. The best candidate that was profiled is judged once more at the end, on inputs never seen before; \
         speed counts only if it is correct. Only measurements of utils/ count; nothing else of yours runs on the measured device.",
        hardware = brief.hardware,
        turns = brief.turns,
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Names that begin with `kf_` in backquotes or a comment: `kf_max(a, b)`.
    fn named(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        words.filter(|word| word.starts_with("kf_") && word.len() > 3).collect()
    }

    #[test]
    fn the_pages_name_every_function_of_the_math_header_and_no_other() {
        const INTERNAL: [&str; 4] = ["kf_word", "kf_float", "kf_scaled_exp", "kf_log_tail"];
        let header = include_str!("../../agent-image/include/kernelfleet_math.h");
        let defined = header
            .lines()
            .filter_map(|line| line.strip_prefix("KF_INLINE ")?.split('(').next()?.split(' ').next_back());
        let defined: BTreeSet<&str> = defined.filter(|name| !INTERNAL.contains(name)).collect();
        assert!(defined.len() > 20, "{defined:?}");
        assert_eq!(named(SKILL), defined);
        let guide = include_str!("../../docs/user-guide.md");
        let part = guide.split("### Vector math on the CPU").nth(1).and_then(|t| t.split("\n## ").next()).unwrap();
        assert_eq!(named(part), defined);
    }
}
