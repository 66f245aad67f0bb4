//! A judge behind the broker as the work on a task sees it: `Court` and `Bench` as calls of `Episodes`.
//!
//! Knows keys, waiting and whose fault an answer is. Must not know the order of the work, nor who judges.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tonic::Code;

use super::broker_client::{Broker, Error, ask, chance};
use crate::judge::counters::Kernel;
use crate::judge::verdict::{LaunchEvidence, Reason};
use crate::judge::{Candidate, Effort, TaskSource, Verdict};
use crate::local::run::{Bench, Court, Trouble};
use crate::task::graph::Graph;
use crate::wire::v1::evaluate_reply::State;
use crate::wire::v1::{Candidate as WireCandidate, EvaluateRequest, Op};

/// How long a call waits for an answer before it is made again.
const WAIT: Duration = Duration::from_secs(50);
/// Judges that may fail at one evaluation.
const FAULTS: u32 = 3;
/// Most bytes of the candidates of one evaluation.
const BATCH_BYTES: usize = 16 << 20;

/// The broker's judges, for the episode of this pod.
#[derive(Debug)]
pub struct Remote<'a> {
    broker: &'a Broker,
    properties: Value,
    /// Number of the next evaluation: with the generation it is the same evaluation whenever it is asked again.
    next: AtomicU64,
    void: Mutex<Option<Error>>,
}

impl<'a> Remote<'a> {
    /// `properties` are what candidates are told of the device.
    #[must_use]
    pub fn new(broker: &'a Broker, properties: Value) -> Self {
        Self { broker, properties, next: AtomicU64::new(1), void: Mutex::default() }
    }

    /// The broker's refusal, once it has nothing more to do with this pod.
    #[must_use]
    pub fn void(&self) -> Option<Error> {
        self.void.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn evaluate<T: DeserializeOwned>(&self, op: Op, candidates: &[Candidate]) -> Result<T, Trouble> {
        let candidates: Vec<WireCandidate> =
            candidates.iter().map(|c| WireCandidate { files: c.files.clone().into_iter().collect() }).collect();
        let mut last = String::new();
        for fault in 0..FAULTS {
            let key = self.next.fetch_add(1, Ordering::Relaxed).to_string();
            let whole = EvaluateRequest {
                key: key.clone(),
                op: op.into(),
                candidates: candidates.clone(),
                wait_seconds: WAIT.as_secs_f64(),
            };
            match self.answer(&whole)? {
                Ok(text) => {
                    return serde_json::from_str(&text).map_err(|e| {
                        Trouble::Fault(format!("the answer to {} is not understood: {e}", op.as_str_name()))
                    });
                }
                Err(message) => last = message,
            }
            tracing::warn!(op = op.as_str_name(), key, last, "a judge failed");
            std::thread::sleep(Duration::from_secs_f64(f64::from(1 << fault) * (0.5 + chance())));
        }
        Err(Trouble::Fault(last))
    }

    /// Waits for the answer to one evaluation; `Ok(Err(..))` is a judge that failed.
    fn answer(&self, whole: &EvaluateRequest) -> Result<Result<String, String>, Trouble> {
        let again = EvaluateRequest { op: Op::Unspecified.into(), candidates: Vec::new(), ..whole.clone() };
        let mut request = whole;
        loop {
            let reply = match ask!(self.broker, episodes.evaluate, WAIT, request) {
                Ok(reply) => reply,
                // It never arrived: the first answer came from a broker that was about to end.
                Err(error)
                    if error.code() == Some(Code::NotFound) && request.candidates.is_empty() && request.op == 0 =>
                {
                    request = whole;
                    continue;
                }
                Err(error) => return Err(self.refused(&error)),
            };
            match reply.state() {
                State::Pending => {
                    tracing::debug!(key = whole.key, ahead = reply.ahead, "waiting for a judge");
                    request = &again;
                }
                State::Done => return Ok(Ok(reply.answer_json)),
                State::Refused => return Err(Trouble::Request(reply.message)),
                State::Fault => return Ok(Err(reply.message)),
                State::Unspecified => return Err(Trouble::Fault("the broker's answer has no state".into())),
            }
        }
    }

    fn refused(&self, error: &Error) -> Trouble {
        if error.code() == Some(Code::FailedPrecondition) {
            *self.void.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.clone());
        }
        match error.code() {
            Some(Code::InvalidArgument) => Trouble::Request(error.to_string()),
            _ => Trouble::Fault(error.to_string()),
        }
    }
}

impl Court for Remote<'_> {
    fn open(&self, _: &TaskSource) -> Result<Box<dyn Bench + '_>, Trouble> {
        Ok(Box::new(Asked(self)))
    }
}

/// The episode's task: the broker knows which it is.
struct Asked<'a>(&'a Remote<'a>);

impl Bench for Asked<'_> {
    fn check(&mut self) -> Result<Vec<String>, Trouble> {
        self.0.evaluate(Op::Check, &[])
    }

    fn trace(&mut self) -> Result<Graph, Trouble> {
        self.0.evaluate(Op::Trace, &[])
    }

    fn properties(&self) -> Value {
        self.0.properties.clone()
    }

    fn judge(
        &mut self,
        candidates: &[Candidate],
        effort: Effort,
        told: &mut dyn FnMut(usize, Verdict),
    ) -> Result<(), Trouble> {
        let op = match effort {
            Effort::Verify => Op::Verify,
            Effort::Screen => Op::Screen,
            Effort::Final => Op::Final,
        };
        for part in parts(candidates) {
            let verdicts: Vec<Verdict> = self.0.evaluate(op, candidates.get(part.clone()).unwrap_or_default())?;
            if verdicts.len() != part.len() {
                let text = format!("{} verdicts on {} candidates", verdicts.len(), part.len());
                return Err(Trouble::Fault(text));
            }
            for (index, verdict) in part.zip(verdicts) {
                told(index, verdict);
            }
        }
        Ok(())
    }

    fn compile(&mut self, candidate: &Candidate) -> Result<Result<Vec<LaunchEvidence>, Reason>, Trouble> {
        self.0.evaluate(Op::Compile, std::slice::from_ref(candidate))
    }

    fn reference(&mut self) -> Result<Vec<LaunchEvidence>, Trouble> {
        self.0.evaluate(Op::Reference, &[])
    }

    fn counters(&mut self, candidate: Option<&Candidate>) -> Result<Result<Vec<Kernel>, Reason>, Trouble> {
        self.0.evaluate(Op::Counters, candidate.map_or(&[], std::slice::from_ref))
    }
}

/// Runs of candidates that fit into a message. Pure.
fn parts(candidates: &[Candidate]) -> Vec<std::ops::Range<usize>> {
    let mut found = Vec::new();
    let (mut first, mut bytes) = (0, 0);
    for (index, candidate) in candidates.iter().enumerate() {
        let size: usize = candidate.files.iter().map(|(name, text)| name.len() + text.len()).sum();
        if index > first && bytes + size > BATCH_BYTES {
            found.push(first..index);
            (first, bytes) = (index, 0);
        }
        bytes += size;
    }
    if first < candidates.len() {
        found.push(first..candidates.len());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidates_go_together_as_far_as_a_message_holds_them() {
        let of = |bytes: usize| Candidate { files: [("model_new.py".to_owned(), "x".repeat(bytes))].into() };
        let small: Vec<Candidate> = (0..8).map(|_| of(100)).collect();
        assert_eq!(parts(&small), std::iter::once(0..8).collect::<Vec<_>>());
        let large: Vec<Candidate> = (0..3).map(|_| of(7 << 20)).collect();
        assert_eq!(parts(&large), [0..2, 2..3]);
        assert!(parts(&[]).is_empty());
    }
}
