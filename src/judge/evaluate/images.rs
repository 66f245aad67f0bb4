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
use crate::plan::{Launch, Op, Plan};

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
            check_launches(plan, index, |launch| {
                admit::check_launch(&image, launch).map(|_| ()).map_err(|refused| refused.to_string())
            })?;
        } else if let Some(source) = candidate.files.get(&module.path) {
            if let Some(forbidden) = build::symbols::forbidden(&built.image) {
                let why = format!("{} needs {}: {}", module.path, forbidden.symbol, forbidden.why);
                return Err(Stop::Candidate(Box::new(Reason {
                    file: Some(module.path.clone()),
                    ..reason(forbidden.code, why)
                })));
            }
            check_launches(plan, index, |launch| build::signature::check(source, &launch.kernel, &launch.args))?;
        }
        images.push(built);
    }
    let all: Vec<&[u8]> = images.iter().map(|b| b.digest.as_bytes()).collect();
    evidence.digests.insert("image".into(), digest(all));
    Ok(images)
}

/// Every launch of a module against what is known of its kernel.
fn check_launches(plan: &Plan, module: usize, check: impl Fn(&Launch) -> Result<(), String>) -> Result<(), Stop> {
    for node in &plan.nodes {
        if let Op::Launch(launch) = &node.op
            && launch.module == module
        {
            check(launch).map_err(|why| {
                let (file, line) = place(node.line.as_deref());
                let launch = Some(launch.kernel.clone());
                Stop::Candidate(Box::new(Reason { file, line, launch, ..reason("launch_invalid", why) }))
            })?;
        }
    }
    Ok(())
}

pub(super) fn place(line: Option<&str>) -> (Option<String>, Option<u32>) {
    match line.and_then(|l| l.rsplit_once(':')) {
        Some((file, number)) => (Some(file.to_owned()), number.parse().ok()),
        None => (None, None),
    }
}
