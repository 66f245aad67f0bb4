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
        loop {
            let _alone = self.naming.write().await;
            let mut left = self.ledger.leftovers()?;
            left.truncate(AT_ONCE);
            let mut removed = Vec::new();
            for leftover in left {
                if let Leftover::Blob(digest) = &leftover {
                    self.objects.remove(&objects::blob(digest)).await?;
                    removed.push(Record::Removed(leftover));
                }
            }
            if removed.is_empty() {
                return Ok(());
            }
            self.ledger.committed(self.ledger.submit(removed)).await?;
        }
    }
}
