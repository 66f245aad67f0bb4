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
        loop {
            let alone = self.naming.write().await;
            let mut left = self.ledger.leftovers()?;
            if left.is_empty() {
                return Ok(());
            }
            left.truncate(AT_ONCE);
            for leftover in &left {
                match leftover {
                    Leftover::Job(uid) => {
                        for folder in objects::folders(uid) {
                            self.objects.remove_folder(&folder).await?;
                        }
                    }
                    Leftover::Blob(digest) => self.objects.remove(&objects::blob(digest)).await?,
                }
            }
            let batch = self.ledger.submit(left.into_iter().map(Record::Removed).collect());
            self.ledger.committed(batch).await?;
            drop(alone);
        }
    }
}
