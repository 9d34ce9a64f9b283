//! Two models with two collections in one job, one of them on its own rank offset: each trains, saves and loads on its own
//! ranks. And a collection that was built by hand gives what the default one gives.

use crate::resume::{fingerprints, tensors, train};
use crate::support::{self, Layout, tiny_model};
use ckpt::{Checkpoint, Saver, StateSource, Store};
use mesh::{
    Group, GroupKind, GroupTable, LayoutSizes, ParallelConfig, ParallelLayout, ParallelSettings, Rank,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use train::backend::Device;
use train::comm::threads::{World, WorldOptions};
use train::config::TrainConfig;
use train::data::Blend;
use train::resume::{Resume, RngPolicy, Selection};
use train::run::{Job, RunEnd, RunName, SavePolicy, Trainable, run_rank};

const ITERATIONS: u64 = 2;
const MIXED: Layout = Layout { tp: 2, sp: true, cp: 2, ..Layout::SINGLE };
const SHARDED: Layout = Layout { gtp: 2, nseq: 2, ..Layout::SINGLE };

struct Model {
    prefix: &'static str,
    config: TrainConfig,
    table: Arc<GroupTable>,
    store: Store,
    /// Where it goes on from.
    source: Option<Checkpoint>,
}

impl Model {
    fn new(prefix: &'static str, layout: Layout, rank_offset: u32, groups: usize) -> Self {
        let parallel = layout.parallel(64, 8).unwrap();
        let layout = ParallelLayout::new(LayoutSizes { rank_offset, ..parallel.layout().sizes() }).unwrap();
        let settings = ParallelSettings { layout, ..ParallelSettings::from(parallel) };
        let config = support::config(tiny_model(groups), ParallelConfig::new(settings).unwrap(), ITERATIONS);
        let table = Arc::new(GroupTable::new(prefix, &layout));
        Model { prefix, config, table, store: Store::open("memory://").unwrap(), source: None }
    }
}

/// Runs all models in one world, each on its own ranks.
fn run_all(models: &[&Model], tokens: &Blend) {
    let num_ranks = models.iter().map(|model| model.table.ranks().len() as u32).sum();
    let stop = AtomicBool::new(false);
    World::run(num_ranks, WorldOptions::default(), |context| {
        let model = models.iter().find(|model| model.table.ranks().contains(&context.rank())).unwrap();
        let saver = |exchange| Saver::new(model.store.clone(), exchange);
        let resume = model.source.as_ref().map(|saved| Resume {
            source: saved as &(dyn StateSource + Sync),
            selection: Selection::ALL,
            allow_missing: &[],
            allow_extra: &[],
            rng_policy: RngPolicy::Derive,
            allow_change: &[],
            strict: true,
        });
        let job = Job {
            run: Trainable::new(&model.config, tokens, resume)?,
            device: Device::Cpu,
            save: Some(SavePolicy {
                interval: 1,
                saver: &saver,
                writer: RunName { run: "test".into(), host: "here".into(), pid: 1, program: "it".into() },
                now: || "2026-11-30T00:00:00Z".into(),
            }),
            timeout: Job::TIMEOUT,
            stop: &stop,
            observer: &|_| Ok(()),
        };
        let end = run_rank(&job, &model.table.for_rank(context.rank()), model.prefix, context)?;
        assert_eq!(end, RunEnd { iteration: ITERATIONS, stopped: false });
        Ok::<_, train::run::RunError>(())
    })
    .unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn two_models_with_their_own_ranks_train_save_and_load_in_one_job() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let student = Model::new("student.", MIXED, 0, 4);
    let teacher = Model::new("teacher.", SHARDED, 4, 8);
    run_all(&[&student, &teacher], &tokens);
    // Again from the step in the middle, each under the other's layout.
    let resumed = |model: &Model, layout, offset, groups| Model {
        source: Some(model.store.checkpoint(1).unwrap()),
        ..Model::new(model.prefix, layout, offset, groups)
    };
    let student_again = resumed(&student, SHARDED, 0, 4);
    let teacher_again = resumed(&teacher, MIXED, 2, 8);
    run_all(&[&teacher_again, &student_again], &tokens);
    for (model, again) in [(&student, &student_again), (&teacher, &teacher_again)] {
        // The same model alone, on one rank and without a prefix.
        let alone = Store::open("memory://").unwrap();
        let mut config = model.config.clone();
        config.parallel = Layout::SINGLE.parallel(64, 8).unwrap();
        train(&config, &tokens, &alone, None, 0, |_| {}).unwrap();
        let of = |store: &Store| tensors(&store.checkpoint(ITERATIONS).unwrap());
        let with_prefix = |(key, bytes): (String, _)| (format!("{}{key}", model.prefix), bytes);
        let expected: BTreeMap<_, _> = of(&alone).into_iter().map(with_prefix).collect();
        assert!(of(&model.store) == expected, "{}", model.prefix);
        assert!(of(&again.store) == expected, "{} again", model.prefix);
    }
}

#[test]
fn a_collection_built_by_hand_gives_what_the_default_gives() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let layout = Layout { tp: 2, sp: true, cp: 2, gtp: 2, ..Layout::SINGLE };
    let default = Model::new("", layout, 0, 4);
    let mut by_hand = GroupTable::empty("", (0..8).map(Rank).collect());
    for kind in GroupKind::ALL.iter().copied() {
        let groups: Vec<Group> =
            default.table.groups(kind).iter().map(|group| Group::new(group.ranks().to_vec())).collect();
        by_hand = by_hand.with(kind, (!groups.is_empty()).then_some(groups));
    }
    let by_hand = Model { table: Arc::new(by_hand), ..Model::new("", layout, 0, 4) };
    run_all(&[&default], &tokens);
    run_all(&[&by_hand], &tokens);
    let of = |model: &Model| fingerprints(&model.store.checkpoint(ITERATIONS).unwrap());
    assert_eq!(of(&by_hand), of(&default));
}
