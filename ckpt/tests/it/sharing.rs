//! A folder that several use at once: readers beside a writer, and writers that all make it.

use crate::support::*;
use ckpt::{COMMIT_NAME, Store, parse_commit};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whenever a reader looks, the name of a commit holds nothing or a whole one, and the latest step only moves on.
#[test]
fn a_reader_beside_a_writer_sees_whole_steps_alone() {
    let root = tempfile::tempdir().unwrap();
    let place = root.path().to_str().unwrap();
    let (table, steps) = (model(), 40);
    let is_done = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let store = Store::open(place).unwrap();
            let (mut newest, mut looks) = (0, 0);
            while !is_done.load(Ordering::Relaxed) {
                for step in store.steps().unwrap() {
                    let commit = root.path().join(format!("iter_{step:07}")).join(COMMIT_NAME);
                    if let Ok(bytes) = fs::read(commit) {
                        assert_eq!(parse_commit(&bytes).unwrap().iteration, step);
                    }
                }
                let latest = store.latest(None).unwrap().checkpoint.map_or(0, |latest| latest.step());
                assert!(latest >= newest, "{latest} after {newest}");
                (newest, looks) = (latest, looks + 1);
            }
            looks
        });
        let store = Store::open(place).unwrap();
        for step in 1..=steps {
            save_labelled(&store, step, &table, ONE);
        }
        is_done.store(true, Ordering::Relaxed);
        reader.join().unwrap()
    });
    assert!(looks > 1, "the reader looked while steps came");
    assert_loads_labelled(&Store::open(place).unwrap().checkpoint(steps).unwrap(), &table, ONE);
}

#[test]
fn writers_that_make_one_folder_at_once_all_save_there() {
    let root = tempfile::tempdir().unwrap();
    let table = model();
    for round in 0..6 {
        let place = root.path().join(format!("{round}/nested/run"));
        std::thread::scope(|scope| {
            for step in 1..=8 {
                let (place, table) = (place.to_str().unwrap(), &table);
                scope.spawn(move || save_labelled(&Store::create(place).unwrap(), step, table, ONE));
            }
        });
        let store = Store::open(place.to_str().unwrap()).unwrap();
        assert_eq!(store.steps().unwrap(), (1..=8).collect::<Vec<_>>());
        for step in 1..=8 {
            assert_eq!(store.checkpoint(step).unwrap().verify().unwrap().faults.len(), 0, "{round}: {step}");
        }
    }
}
