//! The trajectory on its way to the broker while it is written.
//!
//! Knows a file that grows by whole lines, and how many of them the broker has. Must not know what is in a line.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::agent::End;
use super::broker_client::{Broker, ask};
use crate::wire::v1::AppendRequest;

/// How often the file is looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Most bytes of the lines of one call.
const PART: usize = 8 << 20;
/// Longest line that the broker takes.
const MAX_LINE: usize = 4 << 20;

/// A file that is sent line by line.
#[derive(Debug)]
pub struct Tail<'a> {
    broker: &'a Broker,
    path: PathBuf,
    over: AtomicBool,
}

impl<'a> Tail<'a> {
    #[must_use]
    pub fn new(broker: &'a Broker, path: PathBuf) -> Self {
        Self { broker, path, over: AtomicBool::new(false) }
    }

    /// Nothing more is written; `send` returns when all is sent.
    pub fn end(&self) {
        self.over.store(true, Ordering::Release);
    }

    /// Sends what comes, until the end.
    ///
    /// # Errors
    /// When the file can't be read or the broker does not take it.
    pub fn send(&self) -> Result<(), End> {
        let mut from = 0;
        let mut first = 0;
        loop {
            // Asked before looking: what was written before the end is then seen.
            let over = self.over.load(Ordering::Acquire);
            loop {
                let text = self.read(from).map_err(|e| End::Fault(format!("the trajectory can't be read: {e}")))?;
                let (lines, used) = whole(&text);
                if lines.is_empty() {
                    break;
                }
                let count = lines.len() as u64;
                let request = AppendRequest { first, lines };
                ask!(self.broker, episodes.append, Duration::ZERO, &request).map_err(End::from)?;
                first += count;
                from += used as u64;
            }
            if over {
                return Ok(());
            }
            std::thread::sleep(LOOK);
        }
    }

    fn read(&self, from: u64) -> std::io::Result<Vec<u8>> {
        let mut file = match File::open(&self.path) {
            // There is none without a model.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other?,
        };
        file.seek(SeekFrom::Start(from))?;
        let mut text = Vec::new();
        file.take(PART as u64).read_to_end(&mut text)?;
        Ok(text)
    }
}

/// The whole lines at the beginning of a text, and how many bytes they are. A line that is too long is said to be
/// left out in its place, so that the others keep their numbers. Pure.
fn whole(text: &[u8]) -> (Vec<String>, usize) {
    let mut lines = Vec::new();
    let mut used = 0;
    for line in text.split_inclusive(|&b| b == b'\n') {
        // A part that holds no end of a line is one that is too long, or one that is still being written.
        if line.last() != Some(&b'\n') && !(lines.is_empty() && line.len() == PART) {
            break;
        }
        used += line.len();
        lines.push(if line.len() > MAX_LINE {
            r#"{"at":0,"kind":"message","turn":0,"role":"system","content":"a line of more than 4 MiB was left out"}"#
                .to_owned()
        } else {
            String::from_utf8_lossy(line).trim_end_matches('\n').to_owned()
        });
    }
    (lines, used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_are_taken_and_the_rest_is_waited_for() {
        assert_eq!(whole(b""), (vec![], 0));
        assert_eq!(whole(b"{\"a\":1}\n{\"b\""), (vec!["{\"a\":1}".to_owned()], 8));
        assert_eq!(whole(b"{\"b\""), (vec![], 0));
        let mut long = vec![b'x'; MAX_LINE + 1];
        long.extend(b"\n{}\n");
        let (lines, used) = whole(&long);
        assert_eq!((lines.len(), used, lines[1].as_str()), (2, long.len(), "{}"));
        assert!(lines[0].contains("left out"));
    }
}
