//! The ledger: what is kept, in SQLite, written ahead and synced at every commit.
//!
//! One thread writes. It commits what has gathered while the commit before was under way, so that many callers share one
//! sync. Knows rows; must not know what they mean. Times are kept as seconds since the epoch, and handed out as seconds
//! since this broker's start.

mod schema;

use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags, OptionalExtension, Row, Transaction, params};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use super::core::kept::{
    Change, Episode, Evaluation, EvaluationState, Exclusive, Job, Judge, Kept, Lease, Seconds, Share, Task, Usage,
};

/// Why the ledger can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the ledger {path} can't be {what}: {source}")]
    Sqlite { path: PathBuf, what: &'static str, source: rusqlite::Error },
    #[error(
        "the ledger {path} has schema {found}, which is newer than this program's {known}: run the program that wrote it, or restore a backup"
    )]
    Newer { path: PathBuf, found: i64, known: i64 },
    #[error("the ledger {path} can't be written by a thread: {source}")]
    Thread { path: PathBuf, source: std::io::Error },
    #[error("a ledger isn't for a terminal: write it to a file, with `> copy.db` or --to copy.db")]
    Terminal,
    #[error("the copy can't be written: {0}")]
    Copy(std::io::Error),
    /// What was promised can't be kept; the broker has to start again from what is.
    #[error("the ledger can't be written any more")]
    Broken,
}

impl Error {
    /// Whether trying again may help: it was another's lock, or the disk. What can't be understood stays so.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        use rusqlite::ErrorCode::{CannotOpen, DatabaseBusy, DatabaseLocked, OutOfMemory, SystemIoFailure};
        let Self::Sqlite { source, .. } = self else { return true };
        let code = source.sqlite_error_code();
        matches!(code, Some(CannotOpen | DatabaseBusy | DatabaseLocked | OutOfMemory | SystemIoFailure))
    }
}

/// What is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    Change(Box<Change>),
    /// A small object, by its digest.
    Blob {
        digest: String,
        bytes: Vec<u8>,
    },
    /// Lines of a trajectory, each with its end.
    Lines {
        job: String,
        index: u32,
        generation: u32,
        first: u64,
        text: String,
    },
    /// Lines before this one have become an object.
    LinesMoved {
        job: String,
        index: u32,
        generation: u32,
        before: u64,
    },
    /// The objects of a leftover are gone.
    Removed(Leftover),
}

/// Objects that nobody will ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Leftover {
    /// Trajectories and results of a job, by its UID.
    Job(String),
    /// Content, by its digest.
    Blob(String),
}

impl Leftover {
    const fn row(&self) -> (&'static str, &String) {
        match self {
            Self::Job(uid) => ("job", uid),
            Self::Blob(digest) => ("blob", digest),
        }
    }
}

/// A generation of an episode, as a key.
pub type Generation<'a> = (&'a str, u32, u32);

/// The ledger.
#[derive(Debug)]
pub struct Ledger {
    sender: Mutex<Option<mpsc::Sender<Vec<Record>>>>,
    submitted: AtomicU64,
    committed: watch::Receiver<Committed>,
    read: Mutex<Connection>,
    writer: Mutex<Option<JoinHandle<()>>>,
    path: PathBuf,
    epoch: f64,
}

/// Batches that are kept; `None` once writing failed.
type Committed = Option<u64>;

impl Ledger {
    /// Opens the ledger, makes or migrates its tables, and reads what is kept. `epoch` is the broker's start, in seconds
    /// since 1970.
    ///
    /// # Errors
    /// When it can't be read or written, or a newer program has written it.
    pub fn open(path: &Path, epoch: f64) -> Result<(Self, Kept), Error> {
        let failed = |what| move |source| Error::Sqlite { path: path.to_path_buf(), what, source };
        let mut connection = connect(path).map_err(failed("opened"))?;
        schema::migrate(&mut connection, path)?;
        let kept = load(&connection, epoch).map_err(failed("read"))?;
        let read = connect(path).map_err(failed("opened"))?;
        let (sender, receiver) = mpsc::channel();
        let (committed, watched) = watch::channel(Some(0));
        let writer = std::thread::Builder::new()
            .name("ledger".into())
            .spawn(move || write(&mut connection, &receiver, &committed, epoch))
            .map_err(|source| Error::Thread { path: path.to_path_buf(), source })?;
        let ledger = Self {
            sender: Mutex::new(Some(sender)),
            submitted: AtomicU64::new(0),
            committed: watched,
            read: Mutex::new(read),
            writer: Mutex::new(Some(writer)),
            path: path.to_path_buf(),
            epoch,
        };
        Ok((ledger, kept))
    }

    /// Hands a batch to the writer. Batches are kept in the order of these calls, each whole or not at all. Gives what
    /// `committed` waits for.
    pub fn submit(&self, records: Vec<Record>) -> u64 {
        let sender = lock(&self.sender);
        if records.is_empty() {
            return self.submitted.load(Ordering::Acquire);
        }
        if let Some(sender) = sender.as_ref() {
            // A writer that is gone has said so: `committed` fails.
            let _ = sender.send(records);
        }
        self.submitted.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Waits until a batch, and all before it, are kept.
    ///
    /// # Errors
    /// `Broken`.
    pub async fn committed(&self, batch: u64) -> Result<(), Error> {
        let mut watched = self.committed.clone();
        let reached = watched.wait_for(|c| c.is_none_or(|c| c >= batch)).await.map_err(|_| Error::Broken)?;
        if reached.is_some() { Ok(()) } else { Err(Error::Broken) }
    }

    /// Waits until writing failed; never, if it doesn't.
    pub async fn broken(&self) {
        let mut watched = self.committed.clone();
        let _ = watched.wait_for(Option::is_none).await;
    }

    /// Writes what has gathered and ends.
    pub fn close(&self) {
        drop(lock(&self.sender).take());
        if let Some(writer) = lock(&self.writer).take() {
            let _ = writer.join();
        }
    }

    /// Answer and message of an evaluation.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn answer(&self, evaluation: u64) -> Result<Option<(String, String)>, Error> {
        self.reading(|c| {
            c.prepare_cached("SELECT answer, message FROM evaluations WHERE id = ?1")?
                .query_row([evaluation], |r| Ok((r.get(0)?, r.get(1)?)))
                .optional()
        })
    }

    /// A small object.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn blob(&self, digest: &str) -> Result<Option<Vec<u8>>, Error> {
        self.reading(|c| {
            c.prepare_cached("SELECT bytes FROM blobs WHERE digest = ?1")?.query_row([digest], |r| r.get(0)).optional()
        })
    }

    /// Lines of a trajectory that haven't become objects, with the number of the first.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn lines(&self, (job, index, generation): Generation<'_>) -> Result<Vec<(u64, String)>, Error> {
        self.reading(|c| {
            c.prepare_cached(
                "SELECT first, text FROM lines WHERE job = ?1 AND idx = ?2 AND generation = ?3 ORDER BY first",
            )?
            .query_map(params![job, index, generation], |r| Ok((r.get(0)?, r.get(1)?)))?
            .collect()
        })
    }

    /// Trajectories that have lines in the ledger: job, index, generation, bytes.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn trajectories(&self) -> Result<Vec<(String, u32, u32, u64)>, Error> {
        self.reading(|c| {
            c.prepare_cached("SELECT job, idx, generation, SUM(OCTET_LENGTH(text)) FROM lines GROUP BY 1, 2, 3")?
                .query_map([], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?)))?
                .collect()
        })
    }

    /// Jobs that have been closed for so many seconds.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn closed(&self, seconds: f64) -> Result<Vec<String>, Error> {
        self.reading(|c| {
            c.prepare_cached("SELECT uid FROM jobs WHERE state = 'closed' AND closed <= strftime('%s', 'now') - ?1")?
                .query_map([seconds], |r| r.get(0))?
                .collect()
        })
    }

    /// Objects that are to be removed. Content that a job has come to name since then isn't among them.
    ///
    /// # Errors
    /// When they can't be read.
    pub fn leftovers(&self) -> Result<Vec<Leftover>, Error> {
        self.reading(|c| {
            c.prepare_cached(
                "SELECT kind, name FROM leftovers WHERE kind = 'job' OR name NOT IN (SELECT digest FROM uses)",
            )?
            .query_map([], |r| {
                let name = r.get(1)?;
                Ok(if r.get::<_, String>(0)? == "job" { Leftover::Job(name) } else { Leftover::Blob(name) })
            })?
            .collect()
        })
    }

    fn reading<T>(&self, what: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, Error> {
        what(&lock(&self.read)).map_err(|source| Error::Sqlite { path: self.path.clone(), what: "read", source })
    }

    /// Seconds since 1970 at the broker's start.
    #[must_use]
    pub const fn epoch(&self) -> f64 {
        self.epoch
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.close();
    }
}

/// Writes a ledger as it is now into a new file, or to standard output, while its broker runs.
///
/// # Errors
/// When it can't be read, or `to` is there already or can't be written, or standard output is a terminal.
pub fn backup(path: &Path, to: Option<&Path>) -> Result<(), Error> {
    let Some(to) = to else {
        let mut out = std::io::stdout().lock();
        if out.is_terminal() {
            return Err(Error::Terminal);
        }
        // Beside the ledger there is room for a second one; elsewhere, who knows.
        let beside = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
        let folder = tempfile::tempdir_in(beside).map_err(Error::Copy)?;
        let whole = folder.path().join("copy.db");
        copy(path, &whole)?;
        let mut file = std::fs::File::open(&whole).map_err(Error::Copy)?;
        return std::io::copy(&mut file, &mut out).map(drop).map_err(Error::Copy);
    };
    copy(path, to)
}

fn copy(path: &Path, to: &Path) -> Result<(), Error> {
    let failed = |what| move |source| Error::Sqlite { path: path.to_path_buf(), what, source };
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags).map_err(failed("opened"))?;
    connection.busy_timeout(Duration::from_secs(10)).map_err(failed("opened"))?;
    connection.execute("VACUUM INTO ?1", [to.display().to_string()]).map_err(failed("copied")).map(drop)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn connect(path: &Path) -> rusqlite::Result<Connection> {
    let connection = Connection::open(path)?;
    connection.busy_timeout(Duration::from_secs(10))?;
    connection.pragma_update(None, "journal_mode", "WAL")?;
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", "OFF")?;
    connection.set_prepared_statement_cache_capacity(64);
    Ok(connection)
}

/// Most batches of one commit.
const MOST_BATCHES: usize = 4096;

fn write(
    connection: &mut Connection,
    receiver: &mpsc::Receiver<Vec<Record>>,
    committed: &watch::Sender<Committed>,
    epoch: f64,
) {
    let mut done = 0;
    while let Ok(first) = receiver.recv() {
        let mut batches = vec![first];
        batches.extend(receiver.try_iter().take(MOST_BATCHES));
        done += batches.len() as u64;
        let kept = connection.transaction().and_then(|transaction| {
            for record in batches.iter().flatten() {
                put(&transaction, record, epoch)?;
            }
            transaction.commit()
        });
        if let Err(error) = kept {
            tracing::error!("the ledger can't be written: {error}");
            committed.send_replace(None);
            return;
        }
        committed.send_replace(Some(done));
    }
}

fn json(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value).map_err(|e| rusqlite::Error::ToSqlConversionFailure(Box::new(e)))
}

/// A unit variant as its word.
fn word(value: &impl Serialize) -> rusqlite::Result<String> {
    Ok(json(value)?.trim_matches('"').to_owned())
}

fn put(to: &Transaction<'_>, record: &Record, epoch: f64) -> rusqlite::Result<()> {
    match record {
        Record::Change(change) => put_change(to, change, epoch),
        Record::Blob { digest, bytes } => to
            .prepare_cached("INSERT OR IGNORE INTO blobs (digest, bytes) VALUES (?1, ?2)")?
            .execute(params![digest, bytes])
            .map(drop),
        Record::Lines { job, index, generation, first, text } => to
            .prepare_cached(
                "INSERT OR REPLACE INTO lines (job, idx, generation, first, text) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![job, index, generation, first, text])
            .map(drop),
        Record::LinesMoved { job, index, generation, before } => to
            .prepare_cached("DELETE FROM lines WHERE job = ?1 AND idx = ?2 AND generation = ?3 AND first < ?4")?
            .execute(params![job, index, generation, before])
            .map(drop),
        Record::Removed(leftover) => {
            let (kind, name) = leftover.row();
            to.prepare_cached("DELETE FROM leftovers WHERE kind = ?1 AND name = ?2")?.execute([kind, name]).map(drop)
        }
    }
}

fn put_change(to: &Transaction<'_>, change: &Change, epoch: f64) -> rusqlite::Result<()> {
    let meta = |key: &str, value: String| {
        to.prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")?.execute([key, &value]).map(drop)
    };
    match change {
        Change::Next(next) => meta("next", next.to_string()),
        Change::Device(device) => meta("device", json(device)?),
        Change::Job(job) => put_job(to, job),
        Change::Usage(job, Usage { tag, charged, tally }) => to
            .prepare_cached("INSERT OR REPLACE INTO usage (job, tag, charged, tally) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![job, tag, charged, json(tally)?])
            .map(drop),
        Change::Share(namespace, Share { tag, within }) => to
            .prepare_cached("INSERT OR REPLACE INTO shares (namespace, tag, within) VALUES (?1, ?2, ?3)")?
            .execute(params![namespace, tag, within])
            .map(drop),
        Change::VirtualNow(now) => meta("virtual_now", now.to_string()),
        Change::Episode(episode) => put_episode(to, episode, epoch),
        Change::Evaluation(e) => {
            let Evaluation { id, job, index, generation, key, op, task, candidates, state, enqueued, losses } = e;
            if *state == EvaluationState::Queued {
                put_uses(to, job, candidates)?;
            }
            to.prepare_cached(
                "INSERT INTO evaluations (id, job, idx, generation, key, op, task, candidates, state, enqueued, losses) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11) \
                 ON CONFLICT (id) DO UPDATE SET state = excluded.state, losses = excluded.losses",
            )?
            .execute(params![
                id, job, index, generation, key, word(op)?, task, json(candidates)?, word(state)?, enqueued + epoch, losses
            ])
            .map(drop)
        }
        Change::Answer { evaluation, answer, message } => to
            .prepare_cached("UPDATE evaluations SET answer = ?2, message = ?3 WHERE id = ?1")?
            .execute(params![evaluation, answer, message])
            .map(drop),
        Change::Lease(l) => {
            let Lease { id, evaluation, job, pod, session, card, granted, seconds, estimate, cancelled, state, ended } =
                l;
            to.prepare_cached(
                "INSERT INTO leases (id, evaluation, job, pod, session, card, granted, seconds, estimate, cancelled, state, ended) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12) ON CONFLICT (id) DO UPDATE SET \
                 cancelled = excluded.cancelled, state = excluded.state, ended = excluded.ended",
            )?
            .execute(params![
                id, evaluation, job, pod, session, card, granted + epoch, seconds, estimate, cancelled, word(state)?,
                ended.map(|t| t + epoch)
            ])
            .map(drop)
        }
        Change::Exclusive(s) => {
            let Exclusive { id, lease, job, pod, card, granted, seconds, number, ended } = s;
            to.prepare_cached(
                "INSERT INTO exclusives (id, lease, job, pod, card, granted, seconds, number, ended) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (id) DO UPDATE SET ended = excluded.ended",
            )?
            .execute(params![id, lease, job, pod, card, granted + epoch, seconds, number, ended.map(|t| t + epoch)])
            .map(drop)
        }
        Change::Judge(judge) => {
            let Judge { pod, session, instance, started, before, over, registration } = judge;
            to.prepare_cached(
                "INSERT OR REPLACE INTO judges (pod, session, instance, started, before, asked, registration) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            )?
            .execute(params![pod, session, instance, started, json(before)?, over, json(registration)?])
            .map(drop)
        }
        Change::JudgeGone(pod) => to.prepare_cached("DELETE FROM judges WHERE pod = ?1")?.execute([pod]).map(drop),
        Change::JobGone(job) => forget_job(to, job),
    }
}

/// Which contents a job names.
fn put_uses<'a>(
    to: &Transaction<'_>,
    job: &str,
    digests: impl IntoIterator<Item = &'a String>,
) -> rusqlite::Result<()> {
    let mut insert = to.prepare_cached("INSERT OR IGNORE INTO uses (digest, job) VALUES (?1, ?2)")?;
    digests.into_iter().try_for_each(|digest| insert.execute([digest.as_str(), job]).map(drop))
}

/// Removes the rows of a job and the contents that it alone names; what lies in the store is left over for a later step.
fn forget_job(from: &Transaction<'_>, job: &str) -> rusqlite::Result<()> {
    let alone = "SELECT digest FROM uses WHERE job = ?1 \
                 AND NOT EXISTS (SELECT 1 FROM uses o WHERE o.digest = uses.digest AND o.job != ?1)";
    for sql in [
        "INSERT OR IGNORE INTO leftovers (kind, name) VALUES ('job', ?1)",
        &format!("INSERT OR IGNORE INTO leftovers (kind, name) SELECT 'blob', digest FROM ({alone})"),
        &format!("DELETE FROM blobs WHERE digest IN ({alone})"),
        "DELETE FROM uses WHERE job = ?1",
        "DELETE FROM lines WHERE job = ?1",
        "DELETE FROM exclusives WHERE job = ?1",
        "DELETE FROM leases WHERE job = ?1",
        "DELETE FROM evaluations WHERE job = ?1",
        "DELETE FROM episodes WHERE job = ?1",
        "DELETE FROM usage WHERE job = ?1",
        "DELETE FROM tasks WHERE job = ?1",
        "DELETE FROM jobs WHERE uid = ?1",
    ] {
        from.prepare_cached(sql)?.execute([job])?;
    }
    Ok(())
}

fn put_job(to: &Transaction<'_>, job: &Job) -> rusqlite::Result<()> {
    let Job { uid, namespace, name, spec, batch_job, attempts, tasks, state } = job;
    to.prepare_cached(
        "INSERT INTO jobs (uid, namespace, name, spec, batch_job, attempts, state, closed) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, CASE ?7 WHEN 'closed' THEN CAST(strftime('%s', 'now') AS REAL) END) \
         ON CONFLICT (uid) DO UPDATE SET namespace = excluded.namespace, name = excluded.name, spec = excluded.spec, \
         batch_job = excluded.batch_job, attempts = excluded.attempts, state = excluded.state, \
         closed = CASE excluded.state WHEN 'closed' THEN COALESCE(jobs.closed, excluded.closed) END",
    )?
    .execute(params![uid, namespace, name, spec, batch_job, attempts, word(state)?])?;
    to.prepare_cached("DELETE FROM tasks WHERE job = ?1")?.execute([uid])?;
    let mut insert =
        to.prepare_cached("INSERT INTO tasks (job, place, name, source, replay) VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for (place, Task { name, source, replay }) in tasks.iter().enumerate() {
        insert.execute(params![uid, place, name, source, replay])?;
    }
    put_uses(to, uid, tasks.iter().flat_map(|task| std::iter::once(&task.source).chain(&task.replay)))
}

fn put_episode(to: &Transaction<'_>, episode: &Episode, epoch: f64) -> rusqlite::Result<()> {
    let Episode { job, index, generation, pod, state, lines, tally, judged, ending, began, stored, said } = episode;
    to.prepare_cached(
        "INSERT OR REPLACE INTO episodes \
         (job, idx, generation, pod, state, lines, turns, tokens_read, tokens_written, tally, judged, ending, began, stored, said) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15)",
    )?
    .execute(params![
        job,
        index,
        generation,
        pod,
        word(state)?,
        lines,
        tally.sum("turns"),
        tally.get("tokens", "read"),
        tally.get("tokens", "written"),
        json(tally)?,
        judged.as_ref().map(json).transpose()?,
        ending.as_ref().map(json).transpose()?,
        began + epoch,
        stored,
        said
    ])
    .map(drop)
}

fn from_json<T: DeserializeOwned>(text: &str) -> rusqlite::Result<T> {
    serde_json::from_str(text)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Text, Box::new(e)))
}

fn of_json<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    from_json(&row.get::<_, String>(column)?)
}

fn of_word<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    from_json(&format!("\"{}\"", row.get::<_, String>(column)?))
}

fn optional<T: DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<T>> {
    row.get::<_, Option<String>>(column)?.map(|t| from_json(&t)).transpose()
}

/// Reads what a core needs: of evaluations those of generations that run, of leases those that aren't over.
fn load(from: &Connection, epoch: f64) -> rusqlite::Result<Kept> {
    let mut kept = Kept::default();
    let all = |sql: &str, each: &mut dyn FnMut(&Row<'_>) -> rusqlite::Result<()>| {
        let mut statement = from.prepare(sql)?;
        let mut rows = statement.query([])?;
        while let Some(row) = rows.next()? {
            each(row)?;
        }
        Ok::<_, rusqlite::Error>(())
    };
    let time = |row: &Row<'_>, column: &str| Ok::<Seconds, rusqlite::Error>(row.get::<_, f64>(column)? - epoch);
    let ended = |row: &Row<'_>| Ok::<_, rusqlite::Error>(row.get::<_, Option<f64>>("ended")?.map(|t| t - epoch));
    all("SELECT * FROM meta", &mut |r| {
        let value: String = r.get("value")?;
        match r.get::<_, String>("key")?.as_str() {
            "next" => kept.next = value.parse().unwrap_or(1),
            "device" => kept.device = Some(from_json(&value)?),
            "virtual_now" => kept.virtual_now = value.parse().ok(),
            _ => {}
        }
        Ok(())
    })?;
    all("SELECT * FROM jobs", &mut |r| {
        let job = Job {
            uid: r.get("uid")?,
            namespace: r.get("namespace")?,
            name: r.get("name")?,
            spec: r.get("spec")?,
            batch_job: r.get("batch_job")?,
            attempts: r.get("attempts")?,
            tasks: Vec::new(),
            state: of_word(r, "state")?,
        };
        kept.apply(Change::Job(job));
        Ok(())
    })?;
    all("SELECT * FROM tasks ORDER BY job, place", &mut |r| {
        if let Some(job) = kept.jobs.get_mut(&r.get::<_, String>("job")?) {
            job.tasks.push(Task { name: r.get("name")?, source: r.get("source")?, replay: r.get("replay")? });
        }
        Ok(())
    })?;
    all("SELECT * FROM usage", &mut |r| {
        let usage = Usage { tag: r.get("tag")?, charged: r.get("charged")?, tally: of_json(r, "tally")? };
        kept.apply(Change::Usage(r.get("job")?, usage));
        Ok(())
    })?;
    all("SELECT * FROM shares", &mut |r| {
        kept.apply(Change::Share(r.get("namespace")?, Share { tag: r.get("tag")?, within: r.get("within")? }));
        Ok(())
    })?;
    all("SELECT * FROM episodes", &mut |r| {
        let episode = Episode {
            job: r.get("job")?,
            index: r.get("idx")?,
            generation: r.get("generation")?,
            pod: r.get("pod")?,
            state: of_word(r, "state")?,
            lines: r.get("lines")?,
            tally: of_json(r, "tally")?,
            judged: optional(r, "judged")?,
            ending: optional(r, "ending")?,
            began: time(r, "began")?,
            stored: r.get("stored")?,
            said: r.get("said")?,
        };
        kept.apply(Change::Episode(episode));
        Ok(())
    })?;
    let running = "SELECT v.* FROM evaluations v JOIN episodes e \
                   ON e.job = v.job AND e.idx = v.idx AND e.generation = v.generation WHERE e.state = 'running'";
    all(running, &mut |r| {
        let evaluation = Evaluation {
            id: r.get("id")?,
            job: r.get("job")?,
            index: r.get("idx")?,
            generation: r.get("generation")?,
            key: r.get("key")?,
            op: of_word(r, "op")?,
            task: r.get("task")?,
            candidates: of_json(r, "candidates")?,
            state: of_word(r, "state")?,
            enqueued: time(r, "enqueued")?,
            losses: r.get("losses")?,
        };
        kept.apply(Change::Evaluation(evaluation));
        Ok(())
    })?;
    all("SELECT * FROM leases WHERE state != 'ended'", &mut |r| {
        let lease = Lease {
            id: r.get("id")?,
            evaluation: r.get("evaluation")?,
            job: r.get("job")?,
            pod: r.get("pod")?,
            session: r.get("session")?,
            card: r.get("card")?,
            granted: time(r, "granted")?,
            seconds: r.get("seconds")?,
            estimate: r.get("estimate")?,
            cancelled: r.get("cancelled")?,
            state: of_word(r, "state")?,
            ended: ended(r)?,
        };
        kept.apply(Change::Lease(lease));
        Ok(())
    })?;
    // The newest of each judge says how far its askings have come.
    let slices = "SELECT * FROM exclusives WHERE ended IS NULL \
                  OR lease IN (SELECT id FROM leases WHERE state != 'ended') \
                  OR id IN (SELECT MAX(id) FROM exclusives GROUP BY pod)";
    all(slices, &mut |r| {
        let slice = Exclusive {
            id: r.get("id")?,
            lease: r.get("lease")?,
            job: r.get("job")?,
            pod: r.get("pod")?,
            card: r.get("card")?,
            granted: time(r, "granted")?,
            seconds: r.get("seconds")?,
            number: r.get("number")?,
            ended: ended(r)?,
        };
        kept.apply(Change::Exclusive(slice));
        Ok(())
    })?;
    all("SELECT * FROM judges", &mut |r| {
        let judge = Judge {
            pod: r.get("pod")?,
            session: r.get("session")?,
            instance: r.get("instance")?,
            started: r.get("started")?,
            before: of_json(r, "before")?,
            over: r.get("asked")?,
            registration: of_json(r, "registration")?,
        };
        kept.apply(Change::Judge(judge));
        Ok(())
    })?;
    Ok(kept)
}

#[cfg(test)]
mod tests;
