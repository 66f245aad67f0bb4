//! What becomes objects: lines of trajectories, once there are enough of them or the episode is over, and results.
//!
//! An object is written whole and synced before the ledger forgets its lines; after a crash in between it is written again.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tonic::Status;

use super::operator::verdict;
use super::{Broker, objects};
use crate::broker::core::Pod;
use crate::broker::ledger::Record;

/// Bytes of lines at which an object is made of them.
const ENOUGH: u64 = 1 << 20;
/// How often trajectories are looked at when nothing says that they have grown.
const LOOK: Duration = Duration::from_secs(30);
/// Least time between two looks.
const PAUSE: Duration = Duration::from_secs(1);

/// How often a bucket that failed is looked at again.
const AGAIN: Duration = Duration::from_secs(10);

impl Broker {
    /// Looks at the bucket at the start, and then for as long as something fails, for ever. A broker without its bucket goes
    /// on: what the ledger holds can be asked for and added to, and what needs the bucket is refused until it is back.
    pub(super) async fn look_at_bucket(self: Arc<Self>) {
        let mut last: Option<String> = None;
        loop {
            if self.objects.failing().is_some() {
                let found = self.objects.check().await.err().map(|e| e.to_string());
                match &found {
                    Some(why) if found != last => tracing::error!("objects can't be kept: {why}"),
                    None if last.is_some() => tracing::info!("objects are kept again"),
                    _ => {}
                }
                last = found;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Moves lines into objects for ever.
    pub(super) async fn upload(self: Arc<Self>) {
        loop {
            let _ = tokio::time::timeout(LOOK, self.grown.notified()).await;
            if let Err(error) = self.upload_once().await {
                tracing::warn!("lines of trajectories stay in the ledger: {error}");
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn upload_once(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        for (job, index, generation, bytes) in self.ledger.trajectories()? {
            let running = self.lock().core.runs(&job, index, generation);
            if running && bytes < ENOUGH {
                continue;
            }
            let rows = self.ledger.lines((&job, index, generation))?;
            let Some((first, _)) = rows.first() else { continue };
            let first = *first;
            let text: String = rows.into_iter().map(|r| r.1).collect();
            let before = first + text.matches('\n').count() as u64;
            self.objects.put(&objects::lines(&job, index, generation, first), text.into_bytes()).await?;
            let batch = self.ledger.submit(vec![Record::LinesMoved { job, index, generation, before }]);
            self.ledger.committed(batch).await?;
        }
        Ok(())
    }

    /// Writes what an episode came to as an object: the task, the verdict, the candidate.
    pub(super) async fn put_result(&self, pod: &Pod) -> Result<(), Status> {
        let found = {
            let state = self.lock();
            state.core.judged(pod).map(|(job, task, episode, evaluation, judged)| {
                let head = json!({
                    "namespace": job.namespace, "job": job.name, "jobUid": job.uid, "task": task.name,
                    "index": episode.index, "generation": episode.generation,
                });
                (head, episode.generation, evaluation, judged.clone())
            })
        };
        let Some((mut result, generation, evaluation, judged)) = found else { return Ok(()) };
        let unavailable = |e: &dyn std::fmt::Display| Status::unavailable(e.to_string());
        let answer = self.ledger.answer(evaluation).map_err(|e| unavailable(&e))?.unwrap_or_default().0;
        let parsed = |text: &str| {
            let lost = |e| Status::data_loss(format!("what the episode came to can't be read: {e}"));
            serde_json::from_str::<serde_json::Value>(text).map_err(lost)
        };
        result["verdict"] = parsed(&verdict(&answer, judged.place)?)?;
        result["files"] = parsed(&self.text(&judged.candidate).await?)?;
        let name = objects::result(&pod.job, pod.index, generation);
        self.objects.put(&name, result.to_string().into_bytes()).await.map_err(|e| unavailable(&e))
    }
}
