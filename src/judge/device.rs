//! The device that a judge measures on: what it is, and what candidates may know of it.
//!
//! Knows how to ask the machine. Must not know what is judged.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use super::runner::client::{self, Runner};
use super::session::Error;
use super::turns::{self, Turns};
use super::{Device, Toolchain};

/// What follows where device code can write to memory of the process that launches it, its clock among it.
pub const EXPOSED: &str = "device code can reach the host's memory through this driver (HMM, or shared page tables), so no verdict \
                           on it is better than observed; `options nvidia-uvm uvm_disable_hmm=1` ends that where it is HMM";

/// Facts about the device, fixed for a judge's life.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Model and limits: part of cache keys.
    pub class: String,
    /// `sm_90a`, or the CPU's architecture.
    pub arch: String,
    /// Memory of the card, bytes; 0 on the CPU.
    pub memory_bytes: u64,
    /// It drives a display too: no measurement on it is exclusive.
    pub display: bool,
    /// Device code can reach the memory of its host process: `EXPOSED`.
    pub exposed: bool,
    /// For the verdict.
    pub description: BTreeMap<String, Value>,
    /// What `kernelfleet_ext.properties()` says to a candidate.
    pub properties: Value,
}

impl Facts {
    /// # Errors
    /// `Request` when a GPU is asked for and there is none that can be used.
    pub fn find(toolchain: &Toolchain, device: Device) -> Result<Self, Error> {
        match device {
            Device::Cpu => Ok(Self::cpu(toolchain)),
            Device::Cuda => Self::cuda(toolchain),
        }
    }

    fn cpu(toolchain: &Toolchain) -> Self {
        let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            info.lines().find(|l| l.starts_with(name)).and_then(|l| l.split_once(':')).map(|x| x.1.trim().to_owned())
        };
        let model = field("model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned());
        let flags = field("flags").unwrap_or_default();
        let simd = ["avx512f", "avx2", "avx", "sse4_2"].into_iter().find(|f| flags.split(' ').any(|x| x == *f));
        let description = [
            ("kind", json!("cpu")),
            ("name", json!(model)),
            ("threads", json!(toolchain.threads)),
            ("simd", json!(simd)),
        ];
        Self {
            class: format!("cpu {model} {}", toolchain.threads),
            arch: std::env::consts::ARCH.to_owned(),
            memory_bytes: 0,
            display: false,
            exposed: false,
            description: description.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            properties: json!({"name": model, "threads": toolchain.threads, "simd": simd}),
        }
    }

    fn cuda(toolchain: &Toolchain) -> Result<Self, Error> {
        let none = |why: String| {
            Error::request("no_gpu", format!("no GPU can be used here: {why}; `kernelfleet doctor` says more"))
        };
        let seconds = Duration::from_secs(60);
        // The driver's own version, the power limit and what hangs on the card are known to its tool alone.
        let said = Command::new("nvidia-smi")
            .args(["--query-gpu=uuid,driver_version,power.limit,display_active", "--format=csv,noheader"])
            .output()
            .map(|o| String::from_utf8_lossy(&o.stdout).lines().next().unwrap_or_default().trim().to_owned())
            .unwrap_or_default();
        let (uuid, said) = said.split_once(", ").unwrap_or_default();
        // A context that is made while another process measures is in its figures.
        let told = Box::new(|text: &str| tracing::warn!("{text}"));
        let turns =
            (!uuid.is_empty()).then(|| Turns::new(&turns::folder(), uuid, "the card", told)).and_then(Result::ok);
        if let Some(turns) = &turns {
            turns.share();
        }
        let mut runner =
            Runner::spawn(&toolchain.program, Device::Cuda, |_| ()).map_err(|e| Error::Fault(e.to_string()))?;
        let card = runner.device(seconds).map_err(|e| match &e {
            client::Error::Refused(fault) if fault.code == "memory" => Error::request(
                "memory",
                "the card's memory is taken by other processes; `nvidia-smi` lists them: run it again when there is room",
            ),
            client::Error::Refused(fault) => none(fault.message.clone()),
            _ => none(e.to_string()),
        })?;
        runner.close();
        drop(turns);
        let facts = serde_json::to_value(&card).map_err(|e| Error::Fault(e.to_string()))?;
        let arch = if (card.major, card.minor) == (9, 0) {
            "sm_90a".to_owned()
        } else {
            format!("sm_{}{}", card.major, card.minor)
        };
        let (said, display) = display(said);
        let mut description: BTreeMap<String, Value> =
            [("kind".to_owned(), json!("cuda")), ("driver_and_power".to_owned(), json!(said))].into();
        for key in [
            "name",
            "uuid",
            "major",
            "minor",
            "multi_processor_count",
            "l2_cache_size",
            "total_memory",
            "driver_version",
        ] {
            description.insert(key.to_owned(), facts[key].clone());
        }
        // Two transfers a clock.
        let gbps = 2.0 * f64::from(card.memory_clock_khz) * f64::from(card.memory_bus_bits) / 8.0 / 1e6;
        description.insert("memory_gbps".to_owned(), json!(gbps.round()));
        Ok(Self {
            class: format!("{} {said}", card.name),
            arch,
            memory_bytes: card.total_memory,
            display,
            exposed: card.pageable_memory_access,
            properties: facts,
            description,
        })
    }
}

/// Driver and power limit of a line of `nvidia-smi`, and whether a display is active.
fn display(line: &str) -> (String, bool) {
    match line.rsplit_once(", ") {
        Some((rest, state)) => (rest.to_owned(), state.trim() == "Enabled"),
        None => (line.to_owned(), false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_card_that_drives_a_display_is_known() {
        assert_eq!(display("580.95.05, 700.00 W, Disabled"), ("580.95.05, 700.00 W".into(), false));
        assert_eq!(display("580.95.05, 285.00 W, Enabled"), ("580.95.05, 285.00 W".into(), true));
        assert_eq!(display("580.95.05, 285.00 W, [N/A]"), ("580.95.05, 285.00 W".into(), false));
        assert_eq!(display(""), (String::new(), false));
    }
}
