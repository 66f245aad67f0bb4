//! The device that a judge measures on: what it is, and what candidates may know of it.
//!
//! Knows how to ask the machine. Must not know what is judged.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::session::Error;
use super::{Device, Toolchain};

/// Facts about the device, fixed for a judge's life.
#[derive(Clone, Debug)]
pub struct Facts {
    /// Model and limits: part of cache keys.
    pub class: String,
    /// `sm_90a`, or the CPU's architecture.
    pub arch: String,
    /// Memory of the card, bytes; 0 on the CPU.
    pub memory_bytes: u64,
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
            description: description.into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            properties: json!({"name": model, "threads": toolchain.threads, "simd": simd}),
        }
    }

    fn cuda(toolchain: &Toolchain) -> Result<Self, Error> {
        let none = |why: String| {
            Error::request(
                "no_gpu",
                format!("no GPU can be used here: {why}. Use --device cpu, or see `kernelfleet doctor`"),
            )
        };
        let output = Command::new(&toolchain.program)
            .arg("gpu-facts")
            .output()
            .map_err(|e| Error::Fault(format!("{} can't be run: {e}", toolchain.program.display())))?;
        if !output.status.success() {
            return Err(none(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
        }
        let facts: Value = serde_json::from_slice(&output.stdout)
            .map_err(|e| Error::Fault(format!("the facts about the GPU can't be read: {e}")))?;
        let text = |key: &str| facts[key].as_str().unwrap_or_default().to_owned();
        let (major, minor) = (facts["cc_major"].as_u64().unwrap_or(0), facts["cc_minor"].as_u64().unwrap_or(0));
        let arch = if (major, minor) == (9, 0) { "sm_90a".to_owned() } else { format!("sm_{major}{minor}") };
        Ok(Self {
            class: format!("{} {} {}", text("name"), text("driver"), facts["power_limit_w"]),
            arch,
            memory_bytes: facts["memory_bytes"].as_u64().unwrap_or(0),
            properties: facts.clone(),
            description: facts.as_object().cloned().unwrap_or_default().into_iter().collect(),
        })
    }
}
