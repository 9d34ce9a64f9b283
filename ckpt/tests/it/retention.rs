//! Which checkpoints stay, and that one always does.

use crate::support::*;
use ckpt::testing::{FaultyStore, RankMemory, Trouble, header, save_through};
use ckpt::{Cleared, Retention, SaveError, SaveReport, Saver, Store};
use mesh::StateTable;
use std::fs;
use std::num::NonZeroU64;

const TWO: Degrees = Degrees { dp: 2, ..ONE };

fn keep(most_recent: u64, interval: Option<u64>, resumed_from: Option<u64>) -> Retention {
    let number = |number| NonZeroU64::new(number).unwrap();
    Retention { most_recent: number(most_recent), interval: interval.map(number), resumed_from }
}

fn try_save(
    store: &Store,
    step: u64,
    table: &StateTable,
    retention: Retention,
) -> Result<SaveReport, SaveError> {
    let mut saved: Vec<Result<SaveReport, SaveError>> = ranks(TWO).run(|groups, exchange| {
        let memory = RankMemory::labelled(table, &groups);
        let saver = Saver::new(store.clone(), exchange).clearing(Some(retention));
        save_through(&saver, header(step, layout(TWO)), table, &groups, &memory)
    });
    assert!(saved.iter().all(|one| one.is_ok() == saved[0].is_ok()), "one verdict");
    saved.remove(0)
}

fn save(store: &Store, step: u64, table: &StateTable, retention: Retention) -> Cleared {
    try_save(store, step, table, retention).unwrap().cleared.unwrap()
}

fn removed(steps: &[u64]) -> Cleared {
    Cleared { removed: steps.to_vec(), ..Cleared::default() }
}

#[test]
fn the_newest_multiples_and_the_origin_stay() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let table = model();
    for step in [10, 20, 30, 40, 50] {
        save_labelled(&store, step, &table, ONE);
    }
    assert_eq!(save(&store, 60, &table, keep(2, Some(40), Some(20))), removed(&[10, 30]));
    assert_eq!(store.steps().unwrap(), [20, 40, 50, 60]);
    assert_eq!(save(&store, 70, &table, keep(2, Some(40), None)), removed(&[20, 50]));
    assert_eq!(save(&store, 80, &table, keep(1, None, None)), removed(&[40, 60, 70]));
    let mut names: Vec<_> = fs::read_dir(&root).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["iter_0000080"], "nothing is left of what was removed");
    assert_loads_labelled(&store.checkpoint(80).unwrap(), &table, TWO);
}

#[test]
fn failed_and_unfinished_saves_neither_count_nor_go() {
    let (table, clean) = (model(), Store::open("memory://").unwrap());
    let (store, faulty) = FaultyStore::around(&clean, Trouble::None);
    save(&store, 10, &table, keep(1, None, None));
    faulty.set(Trouble::FullFor("iter_0000020"));
    try_save(&store, 20, &table, keep(1, None, None)).unwrap_err();
    assert_loads_labelled(&clean.latest(None).unwrap().checkpoint.unwrap(), &table, ONE);
    assert_eq!(clean.steps().unwrap(), [10]);

    // Not committed yet, maybe in the hands of another process; and committed, but not whole any more.
    let put = |path: &str| {
        use object_store::ObjectStoreExt;
        let path = object_store::path::Path::from(path);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(faulty.put(&path, "left over".into())).unwrap();
    };
    put("iter_0000030/data/0123456789abcdef-0-0.pack");
    faulty.set(Trouble::None);
    save_labelled(&store, 40, &table, ONE);
    put(&format!("iter_0000040/{}", clean.checkpoint(40).unwrap().commit().files[0].path));
    assert_eq!(save(&store, 50, &table, keep(2, None, None)), Cleared::default());
    assert_eq!(clean.steps().unwrap(), [10, 30, 40, 50]);
    assert_eq!(save(&store, 60, &table, keep(2, None, None)), removed(&[10, 40]));
    assert_eq!(clean.steps().unwrap(), [30, 50, 60]);
}

#[test]
fn what_somebody_reads_stays_until_it_is_read() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let table = model();
    save_labelled(&store, 10, &table, ONE);
    let reader = Store::open(root.path().to_str().unwrap()).unwrap().checkpoint(10).unwrap();
    let cleared = save(&store, 20, &table, keep(1, None, None));
    assert_eq!(cleared, Cleared { in_use: vec![10], ..Cleared::default() });
    assert_loads_labelled(&reader, &table, TWO);
    drop(reader);
    assert_eq!(save(&store, 30, &table, keep(1, None, None)), removed(&[10, 20]));
    assert_eq!(store.steps().unwrap(), [30]);
}

/// A pack that is a folder cannot be removed as a file.
#[test]
fn what_was_removed_and_what_is_left_are_told_together_and_damaged_steps_do_not_count() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::open(root.path().to_str().unwrap()).unwrap();
    let table = model();
    for step in [10, 20, 30, 40] {
        save_labelled(&store, step, &table, ONE);
    }
    assert_eq!(store.clear(40, &keep(2, None, Some(10)), &[30]).unwrap(), Cleared::default());
    let pack = store.checkpoint(20).unwrap().commit().files.last().unwrap().path.clone();
    let pack = root.path().join("iter_0000020").join(pack);
    fs::remove_file(&pack).unwrap();
    fs::create_dir_all(pack.join("in the way")).unwrap();
    let cleared = store.clear(40, &keep(1, None, None), &[]).unwrap();
    assert_eq!(cleared.removed, [20, 30], "and 10 waits for the next clearing");
    let failed = cleared.failed.unwrap();
    assert!(failed.starts_with("of step 20 is left: removing `") && failed.contains(".pack`"), "{failed}");
    assert_eq!(store.clear(40, &keep(1, None, None), &[]).unwrap(), removed(&[10]));
}
