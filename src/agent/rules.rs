//! When an episode ends and why, and what repeats itself. Pure.
//!
//! Knows counts, limits and names of ends. Must not know models, tools or judges.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Faults in a row that end an episode.
pub const FAULTS: u32 = 10;
/// Attempts at an endpoint that isn't reachable that are a wait of minutes: nobody waits so long ten times.
const PATIENT: u32 = 10;

/// Whether an endpoint that wasn't reached by so many attempts ends the episode: none of whose answers ever came, where the
/// address is wrong or the server isn't up, or one that has been waited for long enough. Pure.
#[must_use]
pub const fn given_up(turn: u32, tries: u32) -> bool {
    turn == 0 || tries >= PATIENT
}
/// Repetitions of the same step at which the model is told.
pub const REPEATS_TOLD: usize = 3;
/// Repetitions of the same step at which an episode ends.
pub const REPEATS: usize = 8;
/// Longest pattern of steps that counts as a repetition.
const PERIOD: usize = 3;

/// How an episode ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// The model says it is done, and a judged candidate is more than 5 % faster than every baseline there is.
    Solved,
    /// The job's target was reached; no further turn was spent.
    TargetReached,
    /// The model ended its work before the goal was reached, and did so again when it was told.
    Stopped,
    /// All turns are spent.
    Turns,
    /// The conversation fills the context.
    Context,
    /// The time is over.
    Deadline,
    /// The model, or its server's filter, won't do this.
    RefusedByModel,
    /// The same step again and again, after it was told.
    Loop,
    /// Ten faults in a row, the last one is the reason.
    Faults,
    /// The run was interrupted.
    Interrupted,
}

impl End {
    /// The word that trajectories and metrics use.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Solved => "solved",
            Self::TargetReached => "target_reached",
            Self::Stopped => "stopped",
            Self::Turns => "turns",
            Self::Context => "context",
            Self::Deadline => "deadline",
            Self::RefusedByModel => "refused_by_model",
            Self::Loop => "loop",
            Self::Faults => "faults",
            Self::Interrupted => "interrupted",
        }
    }
}

/// Whose fault a fault is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultOf {
    /// No answer came.
    Endpoint,
    /// The answer can't be used: no such tool, no JSON, cut off.
    Model,
    /// The sandbox or the judge failed.
    Machine,
}

/// Counts faults in a row.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    in_a_row: u32,
    pub all: u32,
    /// Whether every fault of the row was the endpoint's or the machine's.
    not_the_model: bool,
}

impl Faults {
    /// Notes one; whether the episode ends with it.
    pub fn note(&mut self, of: FaultOf) -> bool {
        self.not_the_model = (self.in_a_row == 0 || self.not_the_model) && of != FaultOf::Model;
        self.in_a_row += 1;
        self.all += 1;
        self.in_a_row >= FAULTS
    }

    /// A turn went well.
    pub fn clear(&mut self) {
        self.in_a_row = 0;
    }

    /// Whether the row says something about the machine and nothing about the model.
    #[must_use]
    pub const fn not_the_model(&self) -> bool {
        self.in_a_row > 0 && self.not_the_model
    }
}

/// What the steps so far come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeats {
    No,
    /// Worth telling: so many times.
    Told(usize),
    /// Enough.
    End(usize),
}

/// Remembers steps (calls with their results) to see when they repeat: one, or up to three in turn.
#[derive(Clone, Debug, Default)]
pub struct Steps {
    last: VecDeque<u64>,
}

impl Steps {
    /// Notes a step by its digest.
    pub fn note(&mut self, step: u64) -> Repeats {
        self.last.push_front(step);
        self.last.truncate(REPEATS * PERIOD);
        let times = (1..=PERIOD).map(|p| self.repeats(p)).max().unwrap_or(1);
        match times {
            n if n >= REPEATS => Repeats::End(n),
            n if n >= REPEATS_TOLD => Repeats::Told(n),
            _ => Repeats::No,
        }
    }

    /// How many times in a row the last `period` steps were done.
    fn repeats(&self, period: usize) -> usize {
        let same = self.last.iter().zip(self.last.iter().skip(period)).take_while(|(a, b)| a == b).count();
        same / period + 1
    }
}

/// Tokens of the answer that are asked for, given what the conversation takes; `None` when there is no room left for
/// an answer worth having.
#[must_use]
pub fn room(context: u64, prompt: u64, most: u64) -> Option<u64> {
    // The count of what is to be sent is an estimate for what was added since the last answer.
    let left = context.saturating_sub(prompt + prompt / 50);
    (left >= most.min(context / 64).max(64)).then(|| left.min(most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_that_is_away_is_waited_for_once() {
        assert!(given_up(0, 5) && given_up(0, 20), "it never answered");
        assert!(!given_up(3, 5), "a moment, in a local run");
        assert!(given_up(3, 20), "ten minutes, in a pod");
    }

    #[test]
    fn ten_faults_in_a_row_end_and_one_good_turn_forgives() {
        let mut faults = Faults::default();
        for _ in 0..9 {
            assert!(!faults.note(FaultOf::Endpoint));
        }
        assert!(faults.not_the_model());
        faults.clear();
        assert!(!faults.not_the_model());
        for _ in 0..9 {
            assert!(!faults.note(FaultOf::Endpoint));
        }
        assert!(faults.note(FaultOf::Model));
        assert!(!faults.not_the_model());
        assert_eq!(faults.all, 19);
    }

    #[test]
    fn the_same_step_is_told_then_ends() {
        let mut steps = Steps::default();
        let seen: Vec<Repeats> = (0..8).map(|_| steps.note(7)).collect();
        assert_eq!(seen[..2], [Repeats::No, Repeats::No]);
        assert_eq!(seen[2..7], [3, 4, 5, 6, 7].map(Repeats::Told));
        assert_eq!(seen[7], Repeats::End(8));
    }

    #[test]
    fn steps_in_turn_are_seen_and_work_that_goes_on_is_not() {
        let mut steps = Steps::default();
        let seen: Vec<Repeats> = (0..24).map(|i| steps.note(i % 3)).collect();
        assert_eq!(seen[23], Repeats::End(8));
        assert!(seen[..8].iter().all(|r| *r == Repeats::No), "{seen:?}");
        let mut steps = Steps::default();
        assert!((0..100).all(|i| steps.note(i) == Repeats::No));
        // Another result is another step.
        assert!((0..100).all(|i| steps.note(i / 2) == Repeats::No));
    }

    #[test]
    fn an_answer_gets_the_room_that_is_left() {
        assert_eq!(room(131_072, 1000, 16_384), Some(16_384));
        assert_eq!(room(131_072, 125_000, 16_384), Some(131_072 - 125_000 - 2500));
        assert_eq!(room(131_072, 131_000, 16_384), None);
        assert_eq!(room(4096, 3000, 16_384), Some(4096 - 3000 - 60));
    }
}
