//! Several saves in one folder: worlds that shrink and grow, two jobs at once, going back.

use crate::support::*;
use ckpt::testing::{RankMemory, header, save};
use ckpt::{DestinationError, Header, RunName, SaveError, SaveReport, Saver, Snapshot, Store};
use mesh::{Region, StateTable};
use std::fs;

fn save_as(
    store: &Store,
    step: u64,
    run: &str,
    pid: u32,
    table: &StateTable,
) -> Result<SaveReport, SaveError> {
    let header = {
        let plain = header(step, layout(ONE));
        let writer = RunName { run: run.to_owned(), pid, ..plain.writer.clone() };
        Header { writer, ..plain }
    };
    let mut saved = ranks(ONE).run(|groups, exchange| {
        let memory = RankMemory::labelled(table, &groups);
        save(store, header.clone(), table, &groups, exchange, &memory)
    });
    saved.remove(0)
}

#[test]
fn a_world_that_shrinks_and_grows() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let (table, four, two) = (model(), Degrees { tp: 2, dp: 2, ..ONE }, Degrees { dp: 2, ..ONE });
    save_labelled(&store, 10, &table, four);
    // What a dead attempt of four ranks left where two will save.
    let dead = root.path().join("iter_0000020/data");
    fs::create_dir_all(&dead).unwrap();
    fs::write(dead.join("0123456789abcdef-3-0.pack"), b"left over").unwrap();
    assert_loads_labelled(&store.latest(None).unwrap().checkpoint.unwrap(), &table, two);
    save_labelled(&store, 20, &table, two);
    let latest = store.latest(None).unwrap().checkpoint.unwrap();
    assert_eq!(latest.step(), 20);
    assert!(latest.commit().files.iter().all(|file| file.path.contains(&latest.commit().writer.attempt)));
    assert_loads_labelled(&latest, &table, four);
}

/// Two jobs on one step: one wins, its checkpoint is whole, and the other is told whose it is.
#[test]
fn two_jobs_at_once() {
    let root = tempfile::tempdir().unwrap();
    let table = model();
    for repetition in 0..50 {
        let (store, files) = if repetition % 2 == 0 {
            (Store::open("memory://").unwrap(), None)
        } else {
            let folder = root.path().join(format!("{repetition}"));
            (Store::create(folder.to_str().unwrap()).unwrap(), Some(folder))
        };
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(|| save_as(&store, 20, "run-1", 1, &table));
            let other = scope.spawn(|| save_as(&store, 20, "run-2", 2, &table));
            (one.join().unwrap(), other.join().unwrap())
        });
        let (winner, loser, run) = match (one, other) {
            (Ok(report), Err(error)) => (report, error, "run `run-1` (process 1 on host-1"),
            (Err(error), Ok(report)) => (report, error, "run `run-2` (process 2 on host-1"),
            (one, other) => panic!("exactly one wins, not {one:?} and {other:?}"),
        };
        assert!(loser.to_string().contains(&format!("step 20 was saved already, by {run}")), "{loser}");
        assert_eq!(loser.code(), "RM7002");
        let checkpoint = store.checkpoint(20).unwrap();
        assert_eq!(checkpoint.commit().writer.attempt, winner.attempt);
        assert_eq!(checkpoint.verify().unwrap().faults.len(), 0);
        if let Some(folder) = files {
            let packs = fs::read_dir(folder.join("iter_0000020/data")).unwrap().count();
            assert_eq!(packs, checkpoint.catalog().objects().len(), "the loser leaves nothing");
        }
    }
}

#[test]
fn newer_steps_are_refused_or_set_aside() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let table = model();
    for step in [10, 20, 30] {
        save_as(&store, step, "run-1", 1, &table).unwrap();
    }
    store.require_none_after(30, &[]).unwrap();
    store.require_none_after(10, &[30, 20]).unwrap();
    let error = store.require_none_after(10, &[]).unwrap_err();
    let expected = format!("`{}` holds whole checkpoints newer than step 10: 20, 30", root.path().display());
    assert_eq!(error.to_string(), expected);
    assert_eq!(error.code(), "RM7003");
    assert!(matches!(error, DestinationError::Newer { .. }));

    assert_eq!(store.set_aside(10, "run/2").unwrap(), [20, 30]);
    assert_eq!(store.latest(None).unwrap().checkpoint.unwrap().step(), 10);
    save_as(&store, 20, "run/2", 2, &table).unwrap();
    assert_eq!(store.set_aside(10, "run/2").unwrap(), [20], "again, and nothing is lost");
    let mut names: Vec<String> = fs::read_dir(root.path().join("iter_0000020"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("checkpoint"))
        .collect();
    names.sort();
    assert_eq!(names, ["checkpoint.json.superseded-run_2", "checkpoint.json.superseded-run_2-2"]);
    assert!(store.set_aside(10, "run-3").unwrap().is_empty());
}

#[test]
fn a_damaged_commit_is_set_aside_when_its_turn_comes() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let table = model();
    save_as(&store, 20, "run-1", 1, &table).unwrap();
    let commit = root.path().join("iter_0000020/checkpoint.json");
    fs::write(&commit, "{").unwrap();
    let report = save_as(&store, 20, "run-2", 2, &table).unwrap();
    assert_eq!(store.checkpoint(20).unwrap().commit().writer.attempt, report.attempt);
    let aside = root.path().join("iter_0000020/checkpoint.json.superseded-run-2");
    assert_eq!(fs::read_to_string(aside).unwrap(), "{");
}

/// Steps never meet, so nothing fails by itself: the run whose step is not the newest any more must see it.
#[test]
fn a_run_that_is_not_alone_ends_with_its_next_save_and_the_other_goes_on() {
    let store = Store::open("memory://").unwrap();
    let table = model();
    let results = ranks(ONE).run(|groups, _| {
        let saver = |step| {
            Saver::new(store.clone(), Box::new(|bytes, _| Ok(vec![bytes.to_vec()]))).going_on_from(step)
        };
        let save = |saver: &Saver, step, run: &str| {
            let own = header(step, layout(ONE));
            let header = Header { writer: RunName { run: run.to_owned(), ..own.writer.clone() }, ..own };
            let read = &mut |_, _: &Region, _: &mut [u8]| Ok(());
            saver.save(Snapshot { header, table: &table, groups: &groups, read })
        };
        let one = saver(0);
        save(&one, 10, "run-1").unwrap();
        let other = saver(10);
        save(&other, 15, "run-2").unwrap();
        let refused = save(&one, 20, "run-1").unwrap_err();
        save(&other, 25, "run-2").unwrap();
        save(&other, 30, "run-2").unwrap();
        (refused.is_final(), refused.code().to_owned(), refused.to_string())
    });
    let (is_final, code, said) = &results[0];
    assert_eq!((*is_final, code.as_str()), (true, "RM7002"));
    let expected = "the save failed on rank 0: another run saves here: step 15, newer than this run's step 10, is of run \
                    `run-2` (process 4711 on host-1, 2026-01-01T00:00:00Z)";
    assert_eq!(said, expected);
    assert_eq!(store.steps().unwrap(), [10, 15, 25, 30]);
}
