//! Who says what is done next: a model behind an endpoint, or a recording.
//!
//! Knows how an answer is come by. Must not know tools, workspaces or judges.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::{Value, json};

use super::tools::DEFINITIONS;
use super::trajectory::{Line, What};
use crate::gateway::chat::{Reply, Request, Sampling};
use crate::gateway::{Answer, Error, Gateway, Key};

/// The author of an episode's turns.
pub trait Author: Send {
    /// The next answer, of at most `most` tokens; `None` when there is nothing more to say. `told` learns of what goes
    /// wrong before it comes.
    ///
    /// # Errors
    /// When no answer came.
    fn next(
        &mut self,
        messages: &[Value],
        most: u64,
        until: Instant,
        stop: &AtomicBool,
        told: &(dyn Fn(&str) + Sync),
    ) -> Result<Option<Answer<Reply>>, Error>;
    /// Who it is, for the trajectory.
    fn describe(&self) -> Value;
    /// What an answer cost, if prices are known.
    fn cost(&self, _: &Reply) -> Option<f64> {
        None
    }
    /// What must not be in any record.
    fn key(&self) -> Option<Key> {
        None
    }
}

/// A model behind an endpoint.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub gateway: Arc<Gateway>,
    pub model: String,
    pub sampling: Sampling,
}

impl Author for Endpoint {
    fn next(
        &mut self,
        messages: &[Value],
        most: u64,
        until: Instant,
        stop: &AtomicBool,
        told: &(dyn Fn(&str) + Sync),
    ) -> Result<Option<Answer<Reply>>, Error> {
        let request =
            Request { model: &self.model, messages, tools: &DEFINITIONS, sampling: self.sampling, max_tokens: most };
        self.gateway.chat_telling(&request, until, stop, told).map(Some)
    }

    fn describe(&self) -> Value {
        let url = &self.gateway.settings().base_url;
        json!({"endpoint": {"url": url, "model": self.model, "sampling": self.sampling}})
    }

    fn cost(&self, reply: &Reply) -> Option<f64> {
        self.gateway.settings().prices.map(|p| p.cost(&reply.usage))
    }

    fn key(&self) -> Option<Key> {
        self.gateway.key()
    }
}

/// Answers of an earlier episode, said again; tools and judge answer anew.
#[derive(Clone, Debug)]
pub struct Recording {
    replies: VecDeque<Reply>,
    of: String,
}

impl Recording {
    /// From the lines of a trajectory.
    #[must_use]
    pub fn new(lines: &[Line]) -> Self {
        let mut of = String::new();
        let mut replies = VecDeque::new();
        for line in lines {
            match &line.what {
                What::Episode(head) => of.clone_from(&head.task),
                What::Turn { reply, .. } => replies.push_back((**reply).clone()),
                _ => {}
            }
        }
        Self { replies, of }
    }
}

impl Author for Recording {
    fn next(
        &mut self,
        _: &[Value],
        _: u64,
        _: Instant,
        _: &AtomicBool,
        _: &(dyn Fn(&str) + Sync),
    ) -> Result<Option<Answer<Reply>>, Error> {
        Ok(self.replies.pop_front().map(|reply| Answer { reply, seconds: 0.0, retries: 0 }))
    }

    fn describe(&self) -> Value {
        json!({"replay": {"of": self.of, "turns": self.replies.len()}})
    }
}
