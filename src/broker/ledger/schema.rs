//! Tables of the ledger, and how an older ledger becomes one of today. A migration is never edited: a later one is added.

use std::path::Path;

use rusqlite::Connection;

use super::Error;

/// Number `n` of `user_version` is the state after the first `n` migrations.
pub(super) const MIGRATIONS: [&str; 5] = [
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
     CREATE TABLE jobs (uid TEXT PRIMARY KEY, namespace TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL,
       batch_job TEXT NOT NULL, attempts INTEGER NOT NULL, state TEXT NOT NULL);
     CREATE TABLE tasks (job TEXT NOT NULL, place INTEGER NOT NULL, name TEXT NOT NULL, source TEXT NOT NULL,
       replay TEXT, PRIMARY KEY (job, place));
     CREATE TABLE usage (job TEXT PRIMARY KEY, tag REAL NOT NULL, charged REAL NOT NULL, tally TEXT NOT NULL);
     CREATE TABLE shares (namespace TEXT PRIMARY KEY, tag REAL NOT NULL);
     CREATE TABLE episodes (job TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL, pod TEXT NOT NULL,
       state TEXT NOT NULL, lines INTEGER NOT NULL, turns INTEGER NOT NULL, tokens_read INTEGER NOT NULL,
       tokens_written INTEGER NOT NULL, tally TEXT NOT NULL, judged TEXT, ending TEXT, began REAL NOT NULL,
       PRIMARY KEY (job, idx, generation));
     CREATE TABLE evaluations (id INTEGER PRIMARY KEY, job TEXT NOT NULL, idx INTEGER NOT NULL,
       generation INTEGER NOT NULL, key TEXT NOT NULL, op TEXT NOT NULL, task INTEGER NOT NULL,
       candidates TEXT NOT NULL, state TEXT NOT NULL, enqueued REAL NOT NULL,
       answer TEXT NOT NULL DEFAULT '', message TEXT NOT NULL DEFAULT '',
       UNIQUE (job, idx, generation, key));
     CREATE TABLE leases (id INTEGER PRIMARY KEY, evaluation INTEGER NOT NULL, job TEXT NOT NULL, pod TEXT NOT NULL,
       session INTEGER NOT NULL, card TEXT NOT NULL, granted REAL NOT NULL, seconds REAL NOT NULL,
       estimate REAL NOT NULL, cancelled INTEGER NOT NULL, state TEXT NOT NULL, ended REAL);
     CREATE INDEX leases_open ON leases (state) WHERE state != 'ended';
     CREATE TABLE exclusives (id INTEGER PRIMARY KEY, lease INTEGER NOT NULL, job TEXT NOT NULL, pod TEXT NOT NULL,
       card TEXT NOT NULL, granted REAL NOT NULL, seconds REAL NOT NULL, number INTEGER NOT NULL, ended REAL);
     CREATE INDEX exclusives_lease ON exclusives (lease);
     CREATE INDEX exclusives_open ON exclusives (ended) WHERE ended IS NULL;
     CREATE TABLE judges (pod TEXT PRIMARY KEY, session INTEGER NOT NULL, instance TEXT NOT NULL,
       before TEXT NOT NULL, registration TEXT NOT NULL);
     CREATE TABLE blobs (digest TEXT PRIMARY KEY, bytes BLOB NOT NULL);
     CREATE TABLE lines (job TEXT NOT NULL, idx INTEGER NOT NULL, generation INTEGER NOT NULL, first INTEGER NOT NULL,
       text TEXT NOT NULL, PRIMARY KEY (job, idx, generation, first));",
    // Judges that are lost again and again over one evaluation are counted.
    "ALTER TABLE evaluations ADD COLUMN losses INTEGER NOT NULL DEFAULT 0;",
    // A late message of a judge's dead process is known by its start.
    "ALTER TABLE judges ADD COLUMN started REAL NOT NULL DEFAULT 0;",
    // Closed jobs go some day, with the contents that no other job names.
    "ALTER TABLE jobs ADD COLUMN closed REAL;
     UPDATE jobs SET closed = CAST(strftime('%s', 'now') AS REAL) WHERE state = 'closed';
     CREATE TABLE uses (digest TEXT NOT NULL, job TEXT NOT NULL, PRIMARY KEY (digest, job)) WITHOUT ROWID;
     CREATE INDEX uses_job ON uses (job);
     INSERT OR IGNORE INTO uses SELECT source, job FROM tasks;
     INSERT OR IGNORE INTO uses SELECT replay, job FROM tasks WHERE replay IS NOT NULL;
     INSERT OR IGNORE INTO uses SELECT c.value, e.job FROM evaluations e, json_each(e.candidates) c;
     CREATE TABLE leftovers (kind TEXT NOT NULL, name TEXT NOT NULL, PRIMARY KEY (kind, name)) WITHOUT ROWID;
     CREATE INDEX leases_job ON leases (job);
     CREATE INDEX exclusives_job ON exclusives (job);",
    // Virtual times outlive a broker, and so does which askings a judge waits for no longer; what an episode stores is bounded.
    "ALTER TABLE shares ADD COLUMN within REAL;
     ALTER TABLE judges ADD COLUMN asked INTEGER NOT NULL DEFAULT 0;
     ALTER TABLE episodes ADD COLUMN stored INTEGER NOT NULL DEFAULT 0;
     ALTER TABLE episodes ADD COLUMN said INTEGER NOT NULL DEFAULT 0;",
];

/// Brings a ledger to the newest schema, each step whole or not at all.
pub(super) fn migrate(connection: &mut Connection, path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Sqlite { path: path.to_path_buf(), what: "migrated", source };
    let found: i64 = connection.pragma_query_value(None, "user_version", |r| r.get(0)).map_err(failed)?;
    let known = i64::try_from(MIGRATIONS.len()).unwrap_or(i64::MAX);
    if found > known {
        return Err(Error::Newer { path: path.to_path_buf(), found, known });
    }
    for (done, step) in (0_i64..).zip(MIGRATIONS).filter(|(n, _)| *n >= found) {
        let transaction = connection.transaction().map_err(failed)?;
        transaction.execute_batch(step).map_err(failed)?;
        transaction.pragma_update(None, "user_version", done + 1).map_err(failed)?;
        transaction.commit().map_err(failed)?;
    }
    Ok(())
}
