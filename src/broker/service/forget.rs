//! What becomes of jobs that were closed long ago: their rows, the contents that they alone named, their objects.
//!
//! Rows go first, in one batch, with a note of what lies in the store; the note goes once that is removed. After a crash in
//! between it is removed again.

use std::sync::Arc;
use std::time::Duration;

use super::{Broker, Remembered, objects};
use crate::broker::ledger::{Leftover, Record};

/// Least and most time between two looks.
const LOOKS: (f64, f64) = (1.0, 600.0);
/// Most contents that are removed while nobody can name any.
const AT_ONCE: usize = 64;

type Failed = Box<dyn std::error::Error + Send + Sync>;

impl Broker {
    /// Forgets, for ever, jobs that have been closed for `retention` seconds.
    pub(super) async fn forget(self: Arc<Self>, retention: f64) {
        let pause = Duration::from_secs_f64((retention / 10.0).clamp(LOOKS.0, LOOKS.1));
        loop {
            if let Err(error) = self.forget_once(retention).await {
                tracing::warn!("closed jobs stay: {error}");
            }
            tokio::time::sleep(pause).await;
        }
    }

    async fn forget_once(&self, retention: f64) -> Result<(), Failed> {
        for uid in self.ledger.closed(retention)? {
            let _alone = self.naming.write().await;
            let (gone, batch) = self.step(vec![], |core, now| core.forget_job(&uid, now));
            self.ledger.committed(batch).await?;
            if gone {
                *self.remembered() = Remembered::default();
                tracing::info!("job {uid} was closed {retention} s ago or earlier and is forgotten");
            }
        }
        // Nobody can come to name what lies in these folders, so nobody waits for it.
        for leftover in self.ledger.leftovers()? {
            if let Leftover::Job(uid) = &leftover {
                for folder in objects::folders(uid) {
                    self.objects.remove_folder(&folder).await?;
                }
                self.ledger.committed(self.ledger.submit(vec![Record::Removed(leftover)])).await?;
            }
        }
        let blobs = |all: Vec<Leftover>| all.into_iter().filter(|l| matches!(l, Leftover::Blob(_))).take(AT_ONCE);
        loop {
            if blobs(self.ledger.leftovers()?).next().is_none() {
                return Ok(());
            }
            // A bucket that can't be reached is noticed before anybody has to wait for it.
            self.objects.check().await?;
            let _alone = self.naming.write().await;
            let left: Vec<Leftover> = blobs(self.ledger.leftovers()?).collect();
            let names = left.iter().filter_map(|l| match l {
                Leftover::Blob(digest) => Some(objects::blob(digest)),
                Leftover::Job(_) => None,
            });
            self.objects.remove(&names.collect::<Vec<_>>()).await?;
            let removed = left.into_iter().map(Record::Removed).collect();
            self.ledger.committed(self.ledger.submit(removed)).await?;
        }
    }
}
