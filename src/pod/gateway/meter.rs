//! What an answer took, read while it passes.
//!
//! Knows where servers tell their usage: in the body, or in an event of the stream. Must not know who asked. Pure.

use serde_json::Value;

use crate::gateway::chat::Events;
use crate::gateway::tokens::{Usage, estimate};

/// Longest event or body that is looked into.
const MOST: usize = 8 << 20;

/// Looks at an answer piece by piece.
#[derive(Debug)]
pub struct Meter {
    streamed: bool,
    events: Events,
    body: Vec<u8>,
    usage: Option<Usage>,
    bytes: usize,
    /// A stream said that it is complete.
    done: bool,
}

impl Meter {
    /// For a stream of events, or for a whole body.
    #[must_use]
    pub fn new(streamed: bool) -> Self {
        Self { streamed, events: Events::default(), body: Vec::new(), usage: None, bytes: 0, done: false }
    }

    /// Looks at the next piece.
    pub fn see(&mut self, piece: &[u8]) {
        self.bytes += piece.len();
        if !self.streamed {
            if self.body.len() + piece.len() <= MOST {
                self.body.extend_from_slice(piece);
            }
            return;
        }
        let (usage, done) = (&mut self.usage, &mut self.done);
        // What can't be read is passed on all the same, and estimated.
        let _ = self.events.feed(piece, MOST, |data| {
            *done |= data == "[DONE]";
            if data.contains("\"usage\"")
                && let Ok(event) = serde_json::from_str::<Value>(data)
                && let Some(found) = told(&event)
            {
                *usage = Some(found);
            }
            Ok(())
        });
    }

    /// Whether the answer came to its end.
    #[must_use]
    pub const fn complete(&self) -> bool {
        !self.streamed || self.done
    }

    /// What it took; `prompt` is the estimate for a server that does not count.
    #[must_use]
    pub fn usage(&self, prompt: u64) -> Usage {
        let told = match self.usage {
            Some(usage) => Some(usage),
            None => serde_json::from_slice::<Value>(&self.body).ok().as_ref().and_then(told),
        };
        told.unwrap_or(Usage { prompt, completion: estimate(self.bytes / 4), cached: 0, estimated: true })
    }
}

fn told(body: &Value) -> Option<Usage> {
    let usage = body.get("usage").filter(|usage| usage.is_object())?;
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    Some(Usage {
        prompt: number(&usage["prompt_tokens"]),
        completion: number(&usage["completion_tokens"]),
        cached: number(&usage["prompt_tokens_details"]["cached_tokens"]),
        estimated: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_is_read_from_a_body_and_from_a_stream_in_any_pieces() {
        let body = br#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}"#;
        let mut whole = Meter::new(false);
        body.chunks(5).for_each(|piece| whole.see(piece));
        assert_eq!(whole.usage(99), Usage { prompt: 7, completion: 3, cached: 0, estimated: false });
        let stream = "data: {\"choices\": [], \"usage\": null}\n\ndata: {\"usage\": {\"prompt_tokens\": 9, \
                      \"completion_tokens\": 2, \"prompt_tokens_details\": {\"cached_tokens\": 4}}}\n\ndata: [DONE]\n\n";
        let mut pieces = Meter::new(true);
        stream.as_bytes().chunks(7).for_each(|piece| pieces.see(piece));
        assert_eq!(pieces.usage(99), Usage { prompt: 9, completion: 2, cached: 4, estimated: false });
        assert!(pieces.complete());
    }

    #[test]
    fn a_server_that_does_not_count_is_estimated() {
        let mut meter = Meter::new(true);
        meter.see(&[b'x'; 1320]);
        assert_eq!(meter.usage(50), Usage { prompt: 50, completion: 100, cached: 0, estimated: true });
        assert!(!meter.complete());
    }
}
