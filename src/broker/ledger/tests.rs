use super::*;
use crate::broker::core::kept::{
    EpisodeState, EvaluationState, JobState, Judged, LeaseState, Op, Registration, Speedup,
};
use crate::broker::core::tally::Tally;

/// One row of every kind.
fn changes() -> Vec<Change> {
    let mut tally = Tally::default();
    tally.add("turns", "called", 3.0);
    tally.add("tokens", "read", 1e6);
    let task = |n: u32| Task { name: format!("t{n}"), source: format!("s{n}"), replay: (n == 1).then(|| "r".into()) };
    let speedup = Some(Speedup { median: 1.5, low: 1.25 });
    let judged = Judged {
        reward: 2,
        correct: true,
        grade: "observed".into(),
        measurement: "exclusive".into(),
        eager: speedup,
        compile: None,
        reason: None,
        candidate: "c".into(),
        place: 0,
    };
    let episode = |generation, state| Episode {
        job: "j".into(),
        index: 0,
        generation,
        pod: format!("p{generation}"),
        state,
        lines: 4,
        tally: tally.clone(),
        judged: Some((5, judged.clone())),
        ending: None,
        began: -3.5,
        stored: 77,
        said: 78,
    };
    let lease = |id, state, ended| Lease {
        id,
        evaluation: 5,
        job: "j".into(),
        pod: "judge".into(),
        session: 9,
        card: "GPU-1".into(),
        granted: 0.5,
        seconds: 900.0,
        estimate: 1.0,
        cancelled: false,
        state,
        ended,
    };
    vec![
        Change::Next(17),
        Change::Job(Job {
            uid: "j".into(),
            namespace: "a".into(),
            name: "one".into(),
            spec: "{}".into(),
            batch_job: "one".into(),
            attempts: 2,
            tasks: vec![task(0), task(1)],
            state: JobState::Suspended,
        }),
        Change::Usage("j".into(), Usage { tag: 1.5, charged: 2.5, tally: tally.clone() }),
        Change::Share("a".into(), Share { tag: 4.25, within: Some(3.5) }),
        Change::VirtualNow(2.125),
        Change::Episode(episode(1, EpisodeState::Void)),
        Change::Episode(episode(2, EpisodeState::Running)),
        Change::Evaluation(Evaluation {
            id: 5,
            job: "j".into(),
            index: 0,
            generation: 2,
            key: "k".into(),
            op: Op::Final,
            task: 0,
            candidates: vec!["c".into()],
            state: EvaluationState::Leased,
            enqueued: 0.25,
            losses: 2,
        }),
        Change::Lease(lease(6, LeaseState::Live, None)),
        Change::Lease(lease(7, LeaseState::Ghost, Some(1.5))),
        Change::Exclusive(Exclusive {
            id: 8,
            lease: 6,
            job: "j".into(),
            pod: "judge".into(),
            card: "GPU-1".into(),
            granted: 1.0,
            seconds: 60.0,
            number: 3,
            ended: None,
        }),
        Change::Judge(Judge {
            pod: "judge".into(),
            session: 9,
            instance: "i".into(),
            started: 12.5,
            before: vec!["h".into()],
            over: 4,
            registration: Registration { card: "GPU-1".into(), slots: 2, ..Registration::default() },
        }),
        Change::Device(Registration { device: "cpu".into(), ..Registration::default() }),
    ]
}

async fn kept(path: &Path, records: Vec<Record>) {
    let (ledger, _) = Ledger::open(path, 1000.0).unwrap();
    let batch = ledger.submit(records);
    ledger.committed(batch).await.unwrap();
}

#[tokio::test]
async fn what_is_read_is_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let mut meant = Kept::default();
    changes().into_iter().for_each(|c| meant.apply(c));
    let records: Vec<Record> = changes().into_iter().map(|c| Record::Change(Box::new(c))).collect();
    kept(&path, records.clone()).await;
    assert_eq!(Ledger::open(&path, 1000.0).unwrap().1, meant);
    // Each says the whole row: again is no change.
    kept(&path, records).await;
    assert_eq!(Ledger::open(&path, 1000.0).unwrap().1, meant);
    // A broker that started two seconds later says the same times.
    let (_, later) = Ledger::open(&path, 1002.0).unwrap();
    assert_eq!(later.evaluations[&5].enqueued, -1.75);
}

#[tokio::test]
async fn blobs_answers_and_lines_come_back_and_lines_leave_when_they_have_become_objects() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let mut records: Vec<Record> = changes().into_iter().map(|c| Record::Change(Box::new(c))).collect();
    records.push(Record::Blob { digest: "d".into(), bytes: vec![1, 2] });
    let answer = Change::Answer { evaluation: 5, answer: "[]".into(), message: "m".into() };
    records.push(Record::Change(Box::new(answer)));
    for first in [0, 2] {
        let text = format!("{first}\n{}\n", first + 1);
        records.push(Record::Lines { job: "j".into(), index: 0, generation: 2, first, text });
    }
    kept(&path, records).await;
    let (ledger, _) = Ledger::open(&path, 1000.0).unwrap();
    assert_eq!((ledger.blob("d").unwrap(), ledger.blob("e").unwrap()), (Some(vec![1, 2]), None));
    assert_eq!(ledger.answer(5).unwrap(), Some(("[]".into(), "m".into())));
    assert_eq!(ledger.lines(("j", 0, 2)).unwrap(), [(0, "0\n1\n".into()), (2, "2\n3\n".into())]);
    assert_eq!(ledger.trajectories().unwrap(), [("j".into(), 0, 2, 8)]);
    // Bytes are counted, not characters.
    let text = "ä€\n".to_owned();
    let wide = Record::Lines { job: "j".into(), index: 0, generation: 3, first: 0, text };
    ledger.committed(ledger.submit(vec![wide])).await.unwrap();
    assert_eq!(ledger.trajectories().unwrap()[1], ("j".into(), 0, 3, 6));
    let moved = Record::LinesMoved { job: "j".into(), index: 0, generation: 2, before: 2 };
    ledger.committed(ledger.submit(vec![moved])).await.unwrap();
    assert_eq!(ledger.lines(("j", 0, 2)).unwrap(), [(2, "2\n3\n".into())]);
}

#[test]
fn an_older_ledger_is_migrated_with_what_it_holds_and_a_newer_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let older = Connection::open(&path).unwrap();
    older.execute_batch(schema::MIGRATIONS[0]).unwrap();
    older.pragma_update(None, "user_version", 1).unwrap();
    older
        .execute_batch(
            "INSERT INTO episodes VALUES ('j', 3, 1, 'p', 'running', 0, 0, 0, 0, '{}', NULL, NULL, 1000.5);
             INSERT INTO evaluations (id, job, idx, generation, key, op, task, candidates, state, enqueued)
               VALUES (5, 'j', 3, 1, 'k', 'verify', 0, '[\"c\"]', 'queued', 1001.0);",
        )
        .unwrap();
    drop(older);
    let (_, kept) = Ledger::open(&path, 1000.0).unwrap();
    let row = &kept.evaluations[&5];
    assert_eq!((row.key.as_str(), row.state, row.enqueued, row.losses), ("k", EvaluationState::Queued, 1.0, 0));
    let connection = Connection::open(&path).unwrap();
    connection.pragma_update(None, "user_version", 99).unwrap();
    let refused = Ledger::open(&path, 0.0).unwrap_err().to_string();
    assert!(refused.contains("has schema 99, which is newer than this program's 5"), "{refused}");
}

#[tokio::test]
async fn a_ledger_that_cant_be_written_says_so_to_whoever_waits() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ledger.db");
    let (ledger, _) = Ledger::open(&path, 0.0).unwrap();
    Connection::open(&path).unwrap().execute_batch("DROP TABLE shares").unwrap();
    let batch = ledger.submit(vec![Record::Change(Box::new(Change::Share("a".into(), Share::default())))]);
    assert!(matches!(ledger.committed(batch).await, Err(Error::Broken)));
    ledger.broken().await;
}
