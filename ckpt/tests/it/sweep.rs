//! Every operation of a save, a clearing, a replacement, a setting aside and a load goes wrong in turn, in every way that
//! [`Trouble`] knows.

use crate::support::*;
use ckpt::testing::{FaultyStore, RankMemory, Trouble, header, load, save_through};
use ckpt::{LoadError, OpenError, Retention, SaveError, Saver, Store};
use mesh::{DType, Placement, Shape, StateKind, StateTable};
use object_store::ObjectStoreExt;
use object_store::path::Path;
use std::num::NonZeroU64;
use std::sync::Arc;

const TROUBLES: [fn(usize) -> Trouble; 6] = [
    Trouble::FailAt,
    Trouble::TearAt,
    Trouble::ShortAt,
    Trouble::LoseAnswerAt,
    Trouble::StopAt,
    Trouble::StopAfter,
];

#[derive(Clone, Copy, Debug)]
enum Medium {
    Memory,
    Disk,
}

/// A store, the same through a wrapper that is not in trouble yet, and the wrapper.
struct Place {
    clean: Store,
    store: Store,
    faulty: Arc<FaultyStore>,
    _folder: Option<tempfile::TempDir>,
}

impl Place {
    fn new(medium: Medium) -> Place {
        let folder = match medium {
            Medium::Memory => None,
            Medium::Disk => Some(tempfile::tempdir().unwrap()),
        };
        let location = folder.as_ref().map_or("memory://", |folder| folder.path().to_str().unwrap());
        let clean = Store::open(location).unwrap();
        let (store, faulty) = FaultyStore::around(&clean, Trouble::None);
        Place { clean, store, faulty, _folder: folder }
    }

    /// Whatever is left, a reader sees one checkpoint as the latest, which is whole, as is every other that can be opened.
    fn latest(&self, table: &StateTable) -> u64 {
        for step in self.clean.steps().unwrap() {
            if let Ok(checkpoint) = self.clean.checkpoint(step) {
                assert_eq!(checkpoint.verify().unwrap().faults.len(), 0, "step {step}");
            }
        }
        let latest = self.clean.latest(None).unwrap().checkpoint.unwrap();
        assert_loads_labelled(&latest, table, ONE);
        latest.step()
    }
}

/// Counts the operations that `act` needs after `before`, then lets it meet each trouble at every `stride`th of them, in a new
/// place each time, and hands its result to `check`, still in trouble.
fn sweep<T>(
    (name, medium, stride): (&str, Medium, usize),
    before: impl Fn(&Place),
    act: impl Fn(&Store) -> T,
    check: impl Fn(&Place, T),
) {
    let at_peace = Place::new(medium);
    before(&at_peace);
    check(&at_peace, act(&at_peace.store));
    let counted = Place::new(medium);
    before(&counted);
    act(&counted.store);
    let num_operations = counted.faulty.num_operations();
    let mut num_cases = 0;
    for trouble in TROUBLES {
        for at in (0..num_operations).step_by(stride) {
            // Shown if the case fails.
            eprintln!("{name}, {medium:?}: {:?}", trouble(at));
            let place = Place::new(medium);
            before(&place);
            place.faulty.set(trouble(at));
            let done = act(&place.store);
            place.faulty.set(Trouble::None);
            check(&place, done);
            num_cases += 1;
        }
    }
    assert!(num_cases >= TROUBLES.len());
    println!(
        "{name}, {medium:?}: {num_cases} cases over {num_operations} operations {:?}",
        counted.faulty.counts()
    );
}

fn try_save(store: &Store, step: u64, table: &StateTable, degrees: Degrees) -> Result<(), SaveError> {
    let retention = Retention { most_recent: NonZeroU64::MIN, interval: None, resumed_from: None };
    let mut saved: Vec<_> = ranks(degrees).run(|groups, exchange| {
        let memory = RankMemory::labelled(table, &groups);
        let saver = Saver::new(store.clone(), exchange).clearing(Some(retention));
        save_through(&saver, header(step, layout(degrees)), table, &groups, &memory)
    });
    assert!(saved.iter().all(|one| one.is_ok() == saved[0].is_ok()), "one verdict");
    saved.remove(0).map(|_| ())
}

/// A reader sees the step before or the new one: the new one if the ranks were told that it is saved, the one before if they
/// were told that it is not. Then the save, tried again, succeeds over whatever is left.
fn check_save(place: &Place, saved: Result<(), SaveError>, table: &StateTable, old: u64, new: u64) {
    let latest = place.latest(table);
    match saved {
        Ok(()) => assert_eq!(latest, new),
        Err(error) if error.to_string().contains("is not known") => {
            assert!([old, new].contains(&latest), "{latest}: {error}");
        }
        Err(error) => assert_eq!(latest, old, "{error}"),
    }
    if latest == old {
        try_save(&place.store, new, table, ONE).unwrap();
        assert_eq!(place.latest(table), new);
    }
    try_save(&place.store, new + 10, table, ONE).unwrap();
    assert_eq!(place.latest(table), new + 10);
    assert!(place.clean.checkpoint(old).is_err(), "cleared at last");
}

fn sweep_saves(medium: Medium, stride: usize) {
    let (table, two) = (model(), Degrees { dp: 2, ..ONE });
    let before = |place: &Place| {
        save_labelled(&place.clean, 10, &table, ONE);
        save_labelled(&place.clean, 20, &table, ONE);
    };
    let save = |store: &Store| try_save(store, 30, &table, two);
    sweep(("save and clear", medium, stride), before, save, |place, saved| {
        check_save(place, saved, &table, 20, 30);
    });
}

/// Over a commit that is there and whose checkpoint is not whole.
fn sweep_replacements(medium: Medium, stride: usize) {
    let table = model();
    let before = |place: &Place| {
        save_labelled(&place.clean, 10, &table, ONE);
        save_labelled(&place.clean, 20, &table, ONE);
        let file = place.clean.checkpoint(20).unwrap().commit().files[0].path.clone();
        let (_, client) = FaultyStore::around(&place.clean, Trouble::None);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(client.delete(&Path::from(format!("iter_0000020/{file}")))).unwrap();
    };
    let save = |store: &Store| try_save(store, 20, &table, ONE);
    sweep(("replace", medium, stride), before, save, |place, saved| {
        check_save(place, saved, &table, 10, 20);
    });
}

fn sweep_settings_aside(medium: Medium, stride: usize) {
    let table = model();
    let before = |place: &Place| {
        [10, 20, 30].iter().for_each(|step| {
            save_labelled(&place.clean, *step, &table, ONE);
        })
    };
    let set_aside = |store: &Store| store.set_aside(10, "run-2");
    sweep(("set aside", medium, stride), before, set_aside, |place, done: Result<Vec<u64>, OpenError>| {
        let latest = place.latest(&table);
        assert!(done.is_err() || latest == 10, "{latest}");
        place.store.set_aside(10, "run-2").unwrap();
        assert_eq!(place.latest(&table), 10);
    });
}

/// What a load gives is the newest checkpoint's state; else it says that the store failed, and takes neither an older one nor
/// the newest one for damaged.
fn sweep_loads(medium: Medium, stride: usize) {
    let table = model();
    let groups = mesh::GroupTable::new("gpt", &layout(ONE));
    let groups = Arc::new(groups).for_rank(mesh::Rank(0));
    let before = |place: &Place| {
        [10, 20].iter().for_each(|step| {
            save_labelled(&place.clean, *step, &table, Degrees { dp: 2, ..ONE });
        })
    };
    let try_load = |store: &Store| -> Result<(u64, RankMemory), (bool, String)> {
        let opened = store.latest(None).and_then(|latest| latest.require(store));
        let checkpoint = opened.map_err(|error| (error.is_damage(), error.to_string()))?;
        let loaded = load(&checkpoint, &table, &groups);
        let (memory, _) = loaded.map_err(|error: LoadError| (error.is_damage(), error.to_string()))?;
        Ok((checkpoint.step(), memory))
    };
    sweep(("load", medium, stride), before, try_load, |place, loaded| {
        let expected = Ok((20, RankMemory::labelled(&table, &groups)));
        match loaded {
            Ok(_) => assert!(loaded == expected, "another state"),
            Err((is_damage, text)) => {
                assert!(!is_damage, "{text}");
                assert!(text.contains("failed"), "{text}");
            }
        }
        assert!(try_load(&place.store) == expected, "tried again");
    });
}

/// Packs of several parts, which are written side by side.
fn sweep_large_saves(medium: Medium, stride: usize) {
    let shape = Shape::new(&[300, 4096]);
    let table =
        StateTable::new(vec![entry("a", StateKind::Object, DType::U64, Placement::replicated(&shape))]);
    let table = table.unwrap();
    let before = |place: &Place| {
        save_labelled(&place.clean, 10, &table, ONE);
    };
    let save = |store: &Store| try_save(store, 20, &table, ONE);
    sweep(("save several parts", medium, stride), before, save, |place, saved| {
        check_save(place, saved, &table, 10, 20);
    });
}

#[test]
fn whatever_operation_of_a_save_goes_wrong_a_reader_sees_a_whole_checkpoint() {
    sweep_saves(Medium::Memory, 1);
    sweep_saves(Medium::Disk, 7);
}

#[test]
fn whatever_operation_goes_wrong_a_damaged_step_can_be_replaced() {
    sweep_replacements(Medium::Memory, 1);
    sweep_replacements(Medium::Disk, 7);
}

#[test]
fn whatever_operation_goes_wrong_steps_can_be_set_aside() {
    sweep_settings_aside(Medium::Memory, 1);
    sweep_settings_aside(Medium::Disk, 7);
}

#[test]
fn whatever_operation_of_a_load_goes_wrong_it_is_right_or_says_so() {
    sweep_loads(Medium::Memory, 1);
    sweep_loads(Medium::Disk, 7);
}

#[test]
fn whatever_part_of_a_large_pack_goes_wrong_a_reader_sees_a_whole_checkpoint() {
    sweep_large_saves(Medium::Memory, 5);
}

#[test]
#[ignore = "minutes, on disk: cargo test -p ckpt --test it sweep::everything -- --ignored --nocapture"]
fn everything_on_disk_and_in_memory() {
    for medium in [Medium::Memory, Medium::Disk] {
        for sweep in [sweep_saves, sweep_replacements, sweep_settings_aside, sweep_loads, sweep_large_saves] {
            sweep(medium, 1);
        }
    }
}
