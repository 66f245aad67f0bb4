//! The card of a judge: what it is called, what it can do, whether it is well.
//!
//! Knows the driver's own tool. Must not know what is judged.

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::judge::Facts;

/// How often the driver is asked.
const LOOK: Duration = Duration::from_secs(30);

/// A card, or the CPU of a node.
#[derive(Debug)]
pub struct Card {
    /// UUID of a card; else what the judge was told, or the name of the host.
    pub name: String,
    pub arch: String,
    pub properties: Value,
    /// One sentence for a prompt.
    pub hardware: String,
    cuda: bool,
    last: Mutex<Option<(Instant, String)>>,
}

impl Card {
    /// `told` is its name where the device has none of its own, or another is wanted.
    #[must_use]
    pub fn of(facts: &Facts, told: Option<&str>) -> Self {
        let word = |key: &str| facts.description.get(key).and_then(Value::as_str).map(str::to_owned);
        let number = |key: &str| facts.description.get(key).and_then(Value::as_u64);
        let cuda = word("kind").as_deref() == Some("cuda");
        let model = word("name").unwrap_or_default();
        let hardware = match (cuda, number("threads"), number("multi_processor_count")) {
            (true, _, Some(count)) => format!("{model} with {count} multiprocessors"),
            (false, Some(threads), _) => format!("{model} with {threads} threads"),
            _ => model,
        };
        let name = told.map(str::to_owned).or_else(|| word("uuid")).unwrap_or_else(host);
        let last = Mutex::default();
        Self { name, arch: facts.arch.clone(), properties: facts.properties.clone(), hardware, cuda, last }
    }

    /// What is wrong with it; empty is well.
    #[must_use]
    pub fn unhealthy(&self) -> String {
        if !self.cuda {
            return String::new();
        }
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((at, said)) = &*last
            && at.elapsed() < LOOK
        {
            return said.clone();
        }
        let said = asked(&self.name);
        *last = Some((Instant::now(), said.clone()));
        said
    }
}

fn host() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").map_or_else(|_| "cpu".into(), |name| name.trim().to_owned())
}

/// Asks the driver's tool whether the card can be used. Where the tool is missing nothing is known, and so nothing wrong.
fn asked(uuid: &str) -> String {
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=uuid,ecc.errors.uncorrected.volatile.total", "--format=csv,noheader,nounits"]);
    command.stdin(Stdio::null());
    match command.output() {
        Ok(output) => told(uuid, output.status.success(), &String::from_utf8_lossy(&output.stdout)),
        Err(_) => String::new(),
    }
}

/// What the tool's answer means. Pure.
fn told(uuid: &str, well: bool, said: &str) -> String {
    let line = said.lines().find(|line| line.contains(uuid.trim_start_matches("GPU-")));
    match line.map(|line| line.rsplit_once(',').map_or("", |(_, errors)| errors.trim())) {
        Some(errors) => match errors.parse::<u64>() {
            Ok(count) if count > 0 => format!("{count} uncorrectable memory errors"),
            _ => String::new(),
        },
        None if well && !said.contains("lost") => "the driver does not list the card any more".into(),
        None => {
            let why: String = said.trim().chars().take(200).collect();
            format!("the driver reports: {}", if why.is_empty() { "no answer" } else { &why })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_is_well_while_the_driver_lists_it_without_errors() {
        let uuid = "GPU-6d0ef1a6";
        assert_eq!(told(uuid, true, "GPU-other, 0\nGPU-6d0ef1a6, 0\n"), "");
        assert_eq!(told(uuid, true, "GPU-6d0ef1a6, [N/A]\n"), "");
        assert_eq!(told(uuid, true, "GPU-6d0ef1a6, 2\n"), "2 uncorrectable memory errors");
        assert!(told(uuid, true, "GPU-other, 0\n").contains("does not list"));
        assert!(told(uuid, false, "Unable to determine the device handle: GPU is lost.").contains("GPU is lost"));
    }
}
