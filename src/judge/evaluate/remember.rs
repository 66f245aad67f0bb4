//! Verdicts remembered: what makes two candidates one and the same, and what becomes of a remembered verdict.
//!
//! Knows what decides a verdict and which verdicts may be kept. Must not know how a verdict is come by. What can't be
//! seen in plan and images, the code that derives constants, is part of the key as text.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use ruff_python_ast::token::TokenKind;
use ruff_python_parser::parse_module;
use ruff_text_size::Ranged;
use serde::{Deserialize, Serialize};

use super::record::Recording;
use crate::judge::cache::digest;
use crate::judge::session::Fixed;
use crate::judge::timing;
use crate::judge::verdict::{Interval, Verdict};
use crate::judge::{Candidate, Effort, Toolchain, build};
use crate::plan::{BufferKind, Op, Plan};

/// Where they lie in the judge's cache.
pub(super) const KIND: &str = "verdicts";

/// A verdict as it is kept.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    verdict: Verdict,
    /// Where each step was recorded: the same steps may stand elsewhere in another text.
    lines: Vec<Option<String>>,
}

/// Where the steps of a candidate were recorded: of all, and of those that a verdict tells of.
#[derive(Clone, Debug, Default)]
pub(super) struct Places {
    all: Vec<Option<String>>,
    told: Vec<Option<String>>,
}

impl Places {
    pub(super) fn of(plan: &Plan) -> Self {
        let told = plan.nodes.iter().filter(|n| !matches!(n.op, Op::Fill(_)));
        Self { all: plan.nodes.iter().map(|n| n.line.clone()).collect(), told: told.map(|n| n.line.clone()).collect() }
    }
}

/// What this judge is beside its version: a verdict of another build of program or Python parts is not taken over.
pub(in crate::judge) fn version(toolchain: &Toolchain) -> String {
    fn add(path: &Path, root: &Path, found: &mut BTreeMap<String, String>) {
        let Ok(about) = fs::metadata(path) else { return };
        if about.is_dir() {
            for entry in fs::read_dir(path).into_iter().flatten().flatten() {
                add(&entry.path(), root, found);
            }
        } else if !path.components().any(|c| c.as_os_str() == "__pycache__") {
            let age = about.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
            let name = path.strip_prefix(root).unwrap_or(path).display().to_string();
            found.insert(name, format!("{} {}", about.len(), age.as_nanos()));
        }
    }
    let mut found = BTreeMap::new();
    for folder in ["python", "include", "native"] {
        add(&toolchain.agent_image.join(folder), &toolchain.agent_image, &mut found);
    }
    add(&toolchain.program, Path::new("/"), &mut found);
    digest([env!("CARGO_PKG_VERSION").as_bytes(), format!("{found:?}").as_bytes()])
}

/// What computes derived constants. Constants themselves come from parameters under fresh seeds and differ from one
/// judgement to the next, so two candidates with equal plans and images are told apart by the text that derives them:
/// Python without its comments and layout, and every other file that is not itself built into an image. A text that
/// reads its own comments shares verdicts with its like alone. Empty for a plan without constants.
pub(super) fn derivation(candidate: &Candidate, plan: &Plan) -> String {
    if !plan.buffers.iter().any(|b| matches!(b.kind, BufferKind::Constant(_))) {
        return String::new();
    }
    let mut parts: Vec<String> = Vec::new();
    for (name, text) in &candidate.files {
        if plan.modules.iter().any(|m| m.path == *name) {
            continue;
        }
        parts.push(name.clone());
        parts.push(if name.ends_with(".py") { tokens(text) } else { text.clone() });
    }
    digest(parts.iter().map(String::as_bytes))
}

/// A Python text without comments and empty lines; as it is, where it can't be read.
fn tokens(text: &str) -> String {
    let Ok(parsed) = parse_module(text) else { return text.to_owned() };
    let mut kept = String::with_capacity(text.len());
    for token in parsed.tokens() {
        let kind = token.kind();
        if matches!(kind, TokenKind::Comment | TokenKind::NonLogicalNewline) {
            continue;
        }
        let range = token.range();
        let said = text.get(range.start().to_usize()..range.end().to_usize()).unwrap_or_default();
        // How deep an indentation is says nothing; what is where it is says the kind.
        let said = if matches!(kind, TokenKind::Indent | TokenKind::Newline) { "" } else { said };
        kept.push_str(&format!("{kind:?} {} {said}\n", said.len()));
    }
    kept
}

/// The name under which a verdict on these is remembered.
pub(super) fn key(fixed: &Fixed, recording: &Recording, images: &[build::Built], effort: Effort) -> String {
    let mut plan = recording.plan.clone();
    for node in &mut plan.nodes {
        node.line = None;
    }
    let said = serde_json::to_vec(&plan).unwrap_or_default();
    let asked = asked(fixed, effort);
    let mut parts: Vec<&[u8]> = vec![
        &said,
        recording.derivation.as_bytes(),
        fixed.digest.as_bytes(),
        fixed.judge.version.as_bytes(),
        asked.as_bytes(),
    ];
    parts.extend(images.iter().map(|b| b.digest.as_bytes()));
    digest(parts)
}

/// The name under which a verdict on a candidate that runs as it is is remembered: all its files decide.
pub(super) fn key_of_files(fixed: &Fixed, candidate: &Candidate, effort: Effort) -> String {
    let asked = asked(fixed, effort);
    let mut parts: Vec<&[u8]> =
        vec![b"process", fixed.digest.as_bytes(), fixed.judge.version.as_bytes(), asked.as_bytes()];
    parts.extend(candidate.files.iter().flat_map(|(name, text)| [name.as_bytes(), text.as_bytes()]));
    digest(parts)
}

/// How a candidate is judged, as far as the task doesn't say.
fn asked(fixed: &Fixed, effort: Effort) -> String {
    let options = &fixed.judge.options;
    format!(
        "{effort:?} {:?} {:?} {} {} {:?} {}",
        options.tolerance,
        options.libraries,
        options.inputs,
        options.compile,
        options.measure_seconds,
        fixed.judge.device.exposed
    )
}

impl Entry {
    pub(super) fn new(verdict: &Verdict, places: &Places) -> Self {
        Self { verdict: verdict.clone(), lines: places.all.clone() }
    }

    /// The verdict as it is told of another candidate: with that one's lines and digests, and with what this took.
    pub(super) fn told(self, places: &Places, now: Verdict) -> Verdict {
        let mut told = self.verdict;
        for (launch, line) in told.launches.iter_mut().zip(&places.told) {
            launch.line.clone_from(line);
        }
        if let Some(reason) = &mut told.reason
            && let (Some(file), Some(line)) = (&reason.file, reason.line)
        {
            let old = format!("{file}:{line}");
            let step = self.lines.iter().position(|l| l.as_deref() == Some(&old));
            let place = step.and_then(|n| places.all.get(n)?.as_deref()?.rsplit_once(':'));
            if let Some((file, line)) = place {
                (reason.file, reason.line) = (Some(file.to_owned()), line.parse().ok());
            }
        }
        told.digests = now.digests;
        told.phases_seconds = now.phases_seconds;
        told.cached = true;
        told
    }

    /// What is told where the same was judged anew, and whether that is to be remembered: the remembered verdict where
    /// both agree, so that nobody draws until a measurement is lucky; the worse one, marked, where they don't.
    pub(super) fn against(self, places: &Places, fresh: Verdict) -> (Verdict, bool) {
        if !fresh.counts() {
            return (self.told(places, fresh), false);
        }
        let Some(what) = disagreement(&self.verdict, &fresh) else {
            let mut told = self.told(places, fresh);
            told.notes.push("remembered from before, and judged anew this time with the same result".into());
            return (told, false);
        };
        let mut kept = if worse(&self.verdict, &fresh) { self.told(places, fresh) } else { fresh };
        kept.audit.push(format!("judged twice: {what}; the worse verdict stands"));
        (kept, true)
    }
}

/// What two verdicts on the same can't both be right about.
pub(super) fn disagreement(remembered: &Verdict, fresh: &Verdict) -> Option<String> {
    if remembered.correct != fresh.correct {
        let word = |v: &Verdict| if v.correct { "correct" } else { "not correct" };
        return Some(format!("it was {} and is now {}", word(remembered), word(fresh)));
    }
    let apart = |name: &str, a: Option<Interval>, b: Option<Interval>| {
        let (a, b) = (a?, b?);
        (a.high < b.low || b.high < a.low).then(|| {
            format!(
                "its speedup over {name} was {:.3} to {:.3} and is now {:.3} to {:.3}",
                a.low, a.high, b.low, b.high
            )
        })
    };
    let (was, is) = (&remembered.speedup, &fresh.speedup);
    apart("eager", was.eager, is.eager).or_else(|| apart("torch.compile", was.compile, is.compile))
}

/// Whether `a` says less for the candidate than `b`.
pub(super) fn worse(a: &Verdict, b: &Verdict) -> bool {
    let rank = |v: &Verdict| (v.reward, v.speedup.eager.map_or(0.0, |i| i.median));
    let (a, b) = (rank(a), rank(b));
    a.0 < b.0 || (a.0 == b.0 && a.1 < b.1)
}

/// Whether a hit is judged anew all the same: chance decides, `share` of them.
pub(super) fn again(share: f64, random: &mut timing::Random) -> bool {
    (random.below(1_000_000) as f64) < share * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::verdict::{Measurement, Reason};

    fn sample(reward: i32, speedup: f64) -> Verdict {
        let figure = Interval { median: speedup, low: 0.99 * speedup, high: 1.01 * speedup };
        let speedup = (reward > 0).then_some(figure);
        serde_json::from_value(serde_json::json!({
            "reward": reward, "correct": reward > 0, "grade": "observed", "isolation": [], "measurement": "exclusive",
            "notes": [], "speedup": {"eager": speedup}, "time_us": {}, "samples": 32, "compared": 8, "launches": [],
            "device": {}, "versions": {}, "precision": "reference", "tolerance": "contract", "procedure": "x",
            "phases_seconds": {}, "digests": {},
        }))
        .unwrap()
    }

    const DERIVES: &str = "import torch\n\n# a comment\nclass M:\n    def forward(self, x):\n        # another\n        return self.w * 2  # twice\n";

    #[test]
    fn comments_and_layout_of_python_do_not_count_and_all_else_does() {
        let same = "import torch\nclass M:\n  def forward(self, x):\n\n    return self.w * 2\n";
        assert_eq!(tokens(DERIVES), tokens(same));
        assert_ne!(tokens(DERIVES), tokens(&DERIVES.replace("* 2", "* 3")));
        assert_ne!(tokens(DERIVES), tokens(&DERIVES.replace("self.w", "self.v")));
        // The same words in another block are another program.
        let nested = |indent: &str| format!("if a:\n    b()\n{indent}c()\n");
        assert_ne!(tokens(&nested("")), tokens(&nested("    ")));
        assert_ne!(tokens("x = '# a'\n"), tokens("x = '# b'\n"));
        assert_eq!(tokens("def f(:"), "def f(:");
    }

    #[test]
    fn what_others_disturbed_is_not_kept() {
        assert!(sample(2, 2.0).counts());
        let mut shared = sample(2, 2.0);
        shared.measurement = Measurement::Shared;
        assert!(!shared.counts());
        let mut late = sample(-1, 0.0);
        late.reason = Some(Reason {
            code: "timeout".into(),
            message: "late".into(),
            file: None,
            line: None,
            launch: None,
            hint: None,
        });
        assert!(!late.counts());
    }

    #[test]
    fn verdicts_disagree_on_correctness_or_on_disjoint_intervals_and_the_lower_one_is_worse() {
        let with = |low: f64, high: f64| {
            let mut verdict = sample(2, f64::midpoint(low, high));
            verdict.speedup.eager = Some(Interval { median: f64::midpoint(low, high), low, high });
            verdict.speedup.compile = None;
            verdict
        };
        assert_eq!(disagreement(&with(1.9, 2.1), &with(2.0, 2.2)), None);
        let found = disagreement(&with(1.9, 2.1), &with(2.2, 2.4)).unwrap();
        assert!(found.contains("over eager was 1.900 to 2.100 and is now 2.200 to 2.400"), "{found}");
        assert!(worse(&with(1.9, 2.1), &with(2.2, 2.4)) && !worse(&with(2.2, 2.4), &with(1.9, 2.1)));
        let wrong = sample(-1, 0.0);
        assert!(disagreement(&with(1.9, 2.1), &wrong).unwrap().contains("was correct and is now not correct"));
        assert!(worse(&wrong, &with(0.1, 0.2)));
    }

    #[test]
    fn chance_judges_anew_as_often_as_is_asked() {
        let mut random = timing::Random::new(7);
        let mut count = |share: f64| (0..10_000).filter(|_| again(share, &mut random)).count();
        assert_eq!((count(0.0), count(1.0)), (0, 10_000));
        let some = count(0.05);
        assert!((400..600).contains(&some), "{some}");
    }
}
