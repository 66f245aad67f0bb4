//! What runs and is compared: a plan in a runner, or a candidate in a process of its own.
//!
//! Knows what correctness and measurement ask of either. Must not know how they do it, nor what follows from it.

use super::Stop;
use super::ahead;
use super::constants;
use super::correct::clocked;
use super::evidence::{self, Evidence};
use super::measure;
use super::record::Recording;
use super::run::{RUNNER, Run, limit};
use crate::judge::Device;
use crate::judge::runner::client::write_constants;
use crate::judge::session::{MINUTES, Session, secret_seed, task_error};
use crate::judge::timing;
use crate::plan::Op;
use serde_json::json;
use std::os::fd::AsFd;

/// Empty plans after each block on a card, for the host's clock.
const NULLS: usize = 5;

pub(super) trait Subject {
    /// Learns what an empty call takes on the clock that it is measured by.
    fn calibrate(&mut self, session: &mut Session) -> Result<(), Stop>;
    /// Runs on parameter set `set` from now on.
    fn select(&mut self, session: &mut Session, set: usize) -> Result<(), Stop>;
    /// Eager of one run, by which a run's longest time is known.
    fn bound_by(&mut self, eager_us: f64);
    /// Runs once on a slot; microseconds, an empty call's taken off unless `taken_off` says it.
    fn sample(&mut self, session: &mut Session, slot: usize) -> Result<f64, Stop>;
    /// Makes the outputs of the last run what the reference host compares.
    fn show(&mut self, session: &mut Session) -> Result<(), Stop>;
    /// Before each block of samples.
    fn block(&mut self, session: &mut Session) -> Result<(), Stop>;
    /// Refuses what has changed that may not.
    fn unchanged(&mut self, session: &mut Session) -> Result<(), Stop>;
    /// What takes long and needs no device of its own, before the device is held to measure.
    fn ahead(&mut self, _: &mut Session) -> Result<(), Stop> {
        Ok(())
    }
    /// Waits for an idle card.
    fn settle(&mut self, session: &mut Session, evidence: &mut Evidence) -> Result<(), Stop>;
    /// Why two clocks disagree on the block of samples that has just ended, where there are two and they do. `mean`: of its
    /// samples, microseconds.
    fn apart(&mut self, mean: f64) -> Result<Option<String>, Stop>;
    /// What all blocks together say of the clocks.
    fn cross_check(&mut self, _: &mut Evidence) -> Result<(), Stop> {
        Ok(())
    }
    /// Adds what is known of each launch.
    fn profile(&mut self, evidence: &mut Evidence);
    /// The process that it runs in.
    fn pid(&self) -> u32;
    /// An empty call, microseconds, where that is on the same clock.
    fn null_us(&self) -> Option<f64>;
    /// What is taken off the mean of a block's samples, microseconds.
    fn taken_off(&self) -> f64 {
        0.0
    }
    /// The least time that can be told from none, microseconds.
    fn resolution(&self) -> f64 {
        0.1
    }
    /// The launch that a mismatch must be of, if there is only one.
    fn only(&self) -> Option<String>;
    /// Whether single runs say nothing, but the sum over a block does.
    fn summed(&self) -> bool;
    /// Bytes that a run must write.
    fn output_bytes(&self) -> u64;
    /// Ends, and leaves what the next candidate of a batch may use.
    fn leave(self: Box<Self>, _: &mut Session, _: &Evidence) {}
}

/// A plan that is loaded in a runner.
pub(super) struct Planned<'a> {
    pub(super) run: Run,
    pub(super) recording: &'a Recording,
}

impl Subject for Planned<'_> {
    /// Done before the candidate was loaded (`run::load_into`).
    fn calibrate(&mut self, _: &mut Session) -> Result<(), Stop> {
        Ok(())
    }

    fn select(&mut self, session: &mut Session, set: usize) -> Result<(), Stop> {
        let Self { run, recording } = self;
        if set > 0 {
            constants::unchanged(session, recording, run)?;
            session.select(set)?;
            let constants = &recording.constants[set];
            if let Some(fd) = &constants.fd {
                let written = if run.cpu {
                    write_constants(&recording.plan, &run.loaded.constants, fd.as_fd(), &constants.items)
                } else {
                    run.runner.constants(fd.as_fd(), &constants.items, RUNNER)
                };
                written.map_err(|e| run.failure(e))?;
            }
        }
        constants::note(session, recording, run)
    }

    fn bound_by(&mut self, eager_us: f64) {
        self.run.limit = limit(eager_us);
    }

    fn sample(&mut self, session: &mut Session, slot: usize) -> Result<f64, Stop> {
        let run = &mut self.run;
        run.samples += 1;
        let seed = secret_seed()?;
        if !run.cpu {
            let (sample, _) = run.runner.run(slot, seed, run.limit).map_err(|e| run.failure(e))?;
            run.clocks.0 += sample.time_us;
            run.clocks.1 += sample.wall_us;
            return Ok(sample.time_us);
        }
        session
            .host
            .ask(&json!({"op": "poison", "seed": seed}), &[], MINUTES)
            .map_err(|e| task_error(&session.fixed.task, e))?;
        session.host.freeze();
        let ended = clocked(run, |run| run.runner.run(slot, seed, run.limit).map(|_| ()));
        session.host.thaw();
        Ok((ended? - run.null_us).max(0.1))
    }

    fn show(&mut self, _: &mut Session) -> Result<(), Stop> {
        Ok(())
    }

    fn block(&mut self, _: &mut Session) -> Result<(), Stop> {
        if !self.run.cpu {
            // No global of the device carries anything from one block into the next.
            self.run.runner.reload(RUNNER).map_err(|e| self.run.failure(e))?;
        }
        (self.run.clocks, self.run.samples) = ((0.0, 0.0), 0);
        Ok(())
    }

    fn unchanged(&mut self, session: &mut Session) -> Result<(), Stop> {
        constants::unchanged(session, self.recording, &mut self.run)
    }

    fn settle(&mut self, _: &mut Session, evidence: &mut Evidence) -> Result<(), Stop> {
        measure::settle(&mut self.run, evidence)
    }

    fn apart(&mut self, _: f64) -> Result<Option<String>, Stop> {
        let run = &mut self.run;
        if run.cpu {
            return Ok(None);
        }
        let (nulls, _) = run.runner.null(NULLS, RUNNER).map_err(|e| run.failure(e))?;
        let null = timing::median(&nulls.wall_us).unwrap_or(0.0);
        Ok(measure::disagreement(run.clocks.0, run.clocks.1, null, run.samples))
    }

    fn profile(&mut self, evidence: &mut Evidence) {
        evidence::profile(&mut self.run, &self.recording.plan, evidence);
    }

    fn pid(&self) -> u32 {
        self.run.runner.pid()
    }

    fn null_us(&self) -> Option<f64> {
        self.run.cpu.then_some(self.run.null_us)
    }

    fn only(&self) -> Option<String> {
        (self.run.names.len() == 1).then(|| self.run.names[0].0.clone())
    }

    fn summed(&self) -> bool {
        false
    }

    fn output_bytes(&self) -> u64 {
        let plan = &self.recording.plan;
        let outputs: std::collections::BTreeSet<usize> = plan.outputs.iter().map(|o| o.buffer).collect();
        outputs.iter().map(|o| plan.buffers[*o].bytes).sum()
    }

    fn leave(self: Box<Self>, session: &mut Session, evidence: &Evidence) {
        // A library's handles and kernels stay in a context for good: nothing makes them anew for whoever comes next.
        if self.recording.plan.nodes.iter().any(|node| matches!(node.op, Op::Library(_))) {
            return;
        }
        ahead::keep(session, self.run.runner, evidence.isolation.iter().cloned().collect());
    }
}

/// A mark for devices whose clock is the supervisor's.
pub(super) fn on_cpu(session: &Session) -> bool {
    session.fixed.judge.options.device == Device::Cpu
}
