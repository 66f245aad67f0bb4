//! Building: a plan's modules become images, and a card's driver sees none that was not admitted.
//!
//! Knows which modules a plan uses and whose fault a failure is. Must not know what is in an image.

use std::collections::BTreeSet;

use super::evidence::Evidence;
use super::{Stop, reason};
use crate::judge::cache::digest;
use crate::judge::session::{Error, Fixed};
use crate::judge::verdict::Reason;
use crate::judge::{Candidate, Device, admit, build};
use crate::plan::{Op, Plan};

pub(super) fn build_all(
    fixed: &Fixed,
    candidate: &Candidate,
    plan: &Plan,
    evidence: &mut Evidence,
) -> Result<Vec<build::Built>, Stop> {
    let judge = &fixed.judge;
    let used: BTreeSet<usize> = plan
        .nodes
        .iter()
        .filter_map(|n| if let Op::Launch(launch) = &n.op { Some(launch.module) } else { None })
        .collect();
    let mut images = Vec::with_capacity(plan.modules.len());
    for (index, module) in plan.modules.iter().enumerate() {
        if !used.contains(&index) {
            images.push(build::Built::empty());
            continue;
        }
        let built = judge.builder.build(judge.options.device, &judge.device.arch, &candidate.files, module);
        let built = built.map_err(|error| match error {
            build::BuildError::Refused { message, file, line } => {
                Stop::Candidate(Box::new(Reason { file, line, ..reason("build_failed", message) }))
            }
            build::BuildError::Fault(message) => Stop::Error(Error::Fault(message)),
        })?;
        if judge.options.device == Device::Cuda {
            let image = admit::admit(&built.image, &judge.device.arch).map_err(|refused| {
                Stop::Candidate(Box::new(Reason {
                    file: Some(module.path.clone()),
                    ..reason("image_refused", refused.to_string())
                }))
            })?;
            for node in &plan.nodes {
                if let Op::Launch(launch) = &node.op
                    && launch.module == index
                {
                    admit::check_launch(&image, launch).map_err(|refused| {
                        let (file, line) = place(node.line.as_deref());
                        Stop::Candidate(Box::new(Reason {
                            file,
                            line,
                            launch: Some(launch.kernel.clone()),
                            ..reason("launch_invalid", refused.to_string())
                        }))
                    })?;
                }
            }
        }
        images.push(built);
    }
    let all: Vec<&[u8]> = images.iter().map(|b| b.digest.as_bytes()).collect();
    evidence.digests.insert("image".into(), digest(all));
    Ok(images)
}

pub(super) fn place(line: Option<&str>) -> (Option<String>, Option<u32>) {
    match line.and_then(|l| l.rsplit_once(':')) {
        Some((file, number)) => (Some(file.to_owned()), number.parse().ok()),
        None => (None, None),
    }
}
