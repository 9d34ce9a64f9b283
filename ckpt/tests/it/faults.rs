//! A store that fails or is full, and ranks that cannot write or do not agree.

use crate::support::*;
use ckpt::testing::{FaultyStore, RankMemory, Trouble, header, save};
use ckpt::{Header, SaveError, SaveReport, Saver, Snapshot, Store};
use expect_test::expect;
use mesh::{DType, Placement, Shape, StateKind, StateTable};
use std::sync::Arc;

const TWO: Degrees = Degrees { dp: 2, ..ONE };

fn table() -> StateTable {
    let plain = |shape: &[u64]| Placement::replicated(&Shape::new(shape));
    StateTable::new(vec![
        entry("a", StateKind::Model, DType::F32, plain(&[40, 4])),
        entry("b", StateKind::Model, DType::Bf16, plain(&[33])),
    ])
    .unwrap()
}

fn try_save(store: &Store, step: u64, degrees: Degrees) -> Vec<Result<SaveReport, SaveError>> {
    let (table, layout) = (table(), layout(degrees));
    ranks(degrees).run(|groups, exchange| {
        let memory = RankMemory::labelled(&table, &groups);
        save(store, header(step, layout), &table, &groups, exchange, &memory)
    })
}

/// A store in memory, the same behind a wrapper that is not in trouble yet, and the wrapper.
fn faulty() -> (Store, Store, Arc<FaultyStore>) {
    let clean = Store::open("memory://").unwrap();
    let (store, faulty) = FaultyStore::around(&clean, Trouble::None);
    (clean, store, faulty)
}

#[test]
fn a_failed_save_leaves_no_file() {
    for at in 0.. {
        let (clean, store, faulty_store) = faulty();
        faulty_store.set(Trouble::FailAt(at));
        if try_save(&store, 20, TWO).iter().all(Result::is_ok) {
            break;
        }
        assert!(clean.steps().unwrap().is_empty(), "write {at}");
    }
}

#[test]
fn a_full_disk_on_one_rank_is_told_by_all() {
    let four = Degrees { dp: 4, ..ONE };
    let plain = Placement::replicated(&Shape::new(&[300_000]));
    let entries = ["a", "b", "c", "d"].map(|key| entry(key, StateKind::Model, DType::F32, plain.clone()));
    let table = StateTable::new(entries.to_vec()).unwrap();
    let (clean, store, faulty_store) = faulty();
    save_labelled(&clean, 10, &table, four);
    faulty_store.set(Trouble::FullFor("-2-0.pack"));
    let saved = ranks(four).run(|groups, exchange| {
        let memory = RankMemory::labelled(&table, &groups);
        save(&store, header(20, layout(four)), &table, &groups, exchange, &memory).unwrap_err()
    });
    let text = saved[0].to_string();
    let attempt = text.split("data/").nth(1).and_then(|rest| rest.split('-').next()).unwrap();
    expect!["the save failed on rank 2: writing `memory://iter_0000020/data/ATTEMPT-2-0.pack` (1200000 bytes) failed: no space is left: Generic FaultyStore error: no storage space"].assert_eq(&text.replace(attempt, "ATTEMPT"));
    for error in &saved {
        assert_eq!((error.to_string(), error.code()), (text.clone(), "RM1005"));
    }
    assert_eq!(clean.steps().unwrap(), [10]);
    faulty_store.set(Trouble::None);
    save_labelled(&store, 20, &table, four);
    assert_loads_labelled(&clean.checkpoint(20).unwrap(), &table, ONE);
}

#[test]
fn a_rank_without_its_elements_is_named() {
    let (table, store) = (table(), Store::open("memory://").unwrap());
    let saved = ranks(TWO).run(|groups, exchange| {
        let mut read = |entry: usize, _: &mesh::Region, _: &mut [u8]| match entry {
            1 => Err("this buffer is empty".into()),
            _ => Ok(()),
        };
        let header = header(1, layout(TWO));
        let snapshot = Snapshot { header, table: &table, groups: &groups, read: &mut read };
        Saver::new(store.clone(), exchange).save(snapshot).unwrap_err().to_string()
    });
    let expected = "the save failed on rank 1: reading `b` [0..33] out of this rank's memory failed: this buffer is empty";
    assert_eq!(saved, [expected, expected]);
    assert!(store.steps().unwrap().is_empty());
}

#[test]
fn ranks_that_differ_write_nothing() {
    let store = Store::open("memory://").unwrap();
    let save_with = |change: fn(&mut Header, &mut StateTable)| {
        let saved = ranks(TWO).run(|groups, exchange| {
            let (mut header, mut own) = (header(1, layout(TWO)), table());
            if groups.rank().0 == 1 {
                change(&mut header, &mut own);
            }
            let memory = RankMemory::labelled(&own, &groups);
            save(&store, header, &own, &groups, exchange, &memory).map_err(|error| error.to_string())
        });
        assert_eq!(saved[0], saved[1]);
        saved.into_iter().next().unwrap()
    };
    let differs = |what| Err(format!("rank 1 was about to save another {what} than rank 0"));
    let another_step = save_with(|header, _| header.iteration = 2);
    assert_eq!(another_step, differs("step"));
    let another_plan = save_with(|_, table| *table = StateTable::new(table.entries()[..1].to_vec()).unwrap());
    assert_eq!(another_plan, differs("plan"));
    let another_state = save_with(|header, _| header.run.counters.tokens += 1);
    assert_eq!(another_state, differs("header"));
    assert!(store.steps().unwrap().is_empty());
    assert!(save_with(|header, _| header.writer.pid = 12).is_ok(), "who writes may differ");
}
