//! The server of one episode: it is confined as the agent's commands are, answers one request at a time, and ends
//! with everything below it when its channel closes.
//!
//! Knows the messages of `wire` and who does what they ask. Must not know how it came to be confined.

use std::os::fd::AsRawFd;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::export;
use super::files::Files;
use super::jobs::Jobs;
use super::wire::{Answer, Channel, Frame, Request};
use super::workspace::{Error, MAX_TIMEOUT};

/// Answers until nobody asks any more.
pub fn serve(mut channel: Channel, files: &Files, mut jobs: Jobs) {
    loop {
        while !jobs.turn(channel.as_raw_fd(), libc::POLLIN, Duration::from_secs(60)) {}
        let Ok(frame) = channel.receive::<Request>(None) else { return };
        let (answer, raw) = match handle(frame, &mut channel, files, &mut jobs) {
            Ok((value, raw)) => (Answer::Done(value), raw),
            Err(Error::Gone(_)) => return,
            Err(error) => (Answer::Refused(error), Vec::new()),
        };
        let sent = match channel.send(&answer, &raw, None) {
            Err(error) if error.kind() == std::io::ErrorKind::Other => {
                channel.send(&Answer::Refused(Error::Failed(error.to_string())), &[], None)
            }
            other => other,
        };
        if sent.is_err() {
            return;
        }
    }
}

fn value(of: &impl Serialize) -> Result<(Value, Vec<u8>), Error> {
    Ok((serde_json::to_value(of).map_err(std::io::Error::from)?, Vec::new()))
}

fn handle(
    frame: Frame<Request>,
    channel: &mut Channel,
    files: &Files,
    jobs: &mut Jobs,
) -> Result<(Value, Vec<u8>), Error> {
    match frame.body {
        Request::Run { command, seconds } => {
            let timeout = Duration::try_from_secs_f64(seconds).unwrap_or(MAX_TIMEOUT).min(MAX_TIMEOUT);
            value(&jobs.run(&command, timeout, channel.as_raw_fd())?)
        }
        Request::Start { command } => value(&jobs.start(&command)?),
        Request::Output { id } => value(&jobs.output(&id)?),
        Request::Kill { id } => value(&jobs.kill(&id)?),
        Request::Read { path, limit } => {
            let limit = limit.min(super::wire::MAX_RAW as u64);
            Ok((Value::Null, files.read(&path, limit)?))
        }
        Request::Write { path, executable } => value(&files.write(&path, &frame.raw, executable)?),
        Request::Stat { path } => value(&files.stat(&path)?),
        Request::List { path } => value(&files.list(&path)?),
        Request::Glob { pattern, path } => value(&files.glob(&pattern, path.as_deref())?),
        Request::Grep { search } => value(&files.grep(&search)?),
        Request::Export { limits } => {
            export::export(files.fd(), &limits, &mut |path, bytes| {
                channel.send(&Answer::File { path }, &bytes, None).map_err(|e| Error::Gone(e.to_string()))
            })?;
            value(&())
        }
    }
}
