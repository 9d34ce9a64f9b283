//! The promise: train on one mesh, save, load on another, and the losses equal those of the run that never stopped.

use crate::support::{self, Layout, tiny_model};
use ckpt::{Saver, StateSource, Store};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use train::config::TrainConfig;
use train::data::TokenFile;
use train::resume::{Level, Resume, Resumed, RngPolicy, Selection};
use train::run::{Event, Job, RunEnd, RunError, RunName, SavePolicy, Step, run};

/// What a run told.
#[derive(Default)]
pub struct Told {
    pub steps: Vec<Step>,
    pub resumed: Option<Resumed>,
    pub failed_saves: Vec<String>,
}

/// Runs `config` to its last iteration, saving there and every `save_interval` steps into `store`, from `from` or from scratch.
pub fn train(
    config: &TrainConfig,
    tokens: &TokenFile,
    store: &Store,
    from: Option<&(dyn StateSource + Sync)>,
    save_interval: u64,
    adjust: impl FnOnce(&mut Resume),
) -> Result<Told, RunError> {
    let told = Mutex::new(Told::default());
    let resume = from.map(|source| {
        let mut resume = Resume {
            source,
            selection: Selection::ALL,
            allow_missing: &[],
            allow_extra: &[],
            rng_policy: RngPolicy::Derive,
            allow_change: &[],
            strict: false,
        };
        adjust(&mut resume);
        resume
    });
    let job = Job {
        config,
        tokens,
        resume,
        save: Some(SavePolicy {
            interval: save_interval,
            saver: &|exchange| Saver::new(store.clone(), exchange),
            writer: RunName { run: "test".into(), host: "here".into(), pid: 1, program: "it".into() },
            now: || "2026-11-30T00:00:00Z".into(),
        }),
        stop: &AtomicBool::new(false),
        observer: &|event| {
            let mut told = told.lock().unwrap();
            match event {
                Event::Step(step) => told.steps.push(*step),
                Event::Resumed(resumed) => told.resumed = Some((**resumed).clone()),
                Event::SaveFailed { error, .. } => told.failed_saves.push(error.to_string()),
                Event::Saved { .. } | Event::Stopping { .. } | Event::SamplesDropped { .. } => {}
            }
        },
    };
    match run(&job) {
        Ok(RunEnd { iteration, stopped }) => {
            assert_eq!((iteration, stopped), (config.train_iters, false));
            Ok(told.into_inner().unwrap())
        }
        Err(error) => match error.first.reason {
            train::comm::threads::Reason::Error(error) => Err(error),
            other => panic!("{other:?}"),
        },
    }
}

/// Fingerprint of every tensor of a checkpoint but the random streams, which belong to a layout.
pub fn fingerprints(source: &dyn StateSource) -> BTreeMap<String, String> {
    let tensors = source.catalog().tensors().iter().filter(|tensor| tensor.kind != mesh::StateKind::Rng);
    tensors.map(|tensor| (tensor.key.to_string(), tensor.fingerprint.to_string())).collect()
}

const ITERATIONS: u64 = 4;
const HALF: u64 = 2;

struct Case {
    groups: usize,
    seq_length: u64,
    global_batch_size: u64,
}

impl Case {
    fn config(&self, layout: Layout) -> TrainConfig {
        let parallel = layout.parallel(self.seq_length, self.global_batch_size).unwrap();
        let config = support::config(tiny_model(self.groups), parallel, ITERATIONS);
        config.check().unwrap_or_else(|error| panic!("{layout:?}: {error}"));
        config
    }

    /// Straight under the first layout, then for each pair half under one and half under the other.
    fn resumes(&self, pairs: &[(Layout, Layout)]) {
        let folder = tempfile::tempdir().unwrap();
        let tokens = support::token_file(folder.path(), 6000);
        let straight_store = Store::open("memory://").unwrap();
        let straight =
            train(&self.config(Layout::SINGLE), &tokens, &straight_store, None, 0, |_| {}).unwrap();
        let expected = fingerprints(&straight_store.checkpoint(ITERATIONS).unwrap());
        for (before, after) in pairs {
            let store = Store::open("memory://").unwrap();
            let first_half = TrainConfig { train_iters: HALF, ..self.config(*before) };
            let first = train(&first_half, &tokens, &store, None, 0, |_| {}).unwrap();
            let saved = store.checkpoint(HALF).unwrap();
            let second = train(&self.config(*after), &tokens, &store, Some(&saved), 0, |_| {}).unwrap();
            let resumed = second.resumed.unwrap();
            assert_eq!(resumed.level, Some(Level::L2), "{before:?} → {after:?}: {:?}", resumed.notes);
            for (found, expected) in first.steps.iter().chain(&second.steps).zip(&straight.steps) {
                let at = expected.iteration;
                let same = |a: f64, b: f64, what: &str| {
                    assert_eq!(
                        a.to_bits(),
                        b.to_bits(),
                        "{what} of {at}, {before:?} → {after:?}: {a} for {b}"
                    );
                };
                same(found.outcome.loss, expected.outcome.loss, "loss");
                same(found.outcome.grad_norm, expected.outcome.grad_norm, "gradient norm");
                same(found.lr, expected.lr, "learning rate");
                assert_eq!(found.consumed_samples, expected.consumed_samples);
            }
            let found = fingerprints(&store.checkpoint(ITERATIONS).unwrap());
            assert!(found == expected, "state after {before:?} → {after:?}");
        }
    }
}

const fn layout(tp: u32, sp: bool, cp: u32, gtp: u32, nseq: u32, dp: u32) -> Layout {
    Layout { tp, sp, cp, gtp, nseq, dp, mbs: 1 }
}

#[test]
fn a_resume_under_another_cp_degree_goes_on_bit_for_bit() {
    let degrees = [1, 2, 4, 8].map(|cp| layout(1, false, cp, 1, 1, 1));
    let case = Case { groups: 4, seq_length: 64, global_batch_size: 8 };
    case.resumes(&[
        (degrees[0], degrees[1]),
        (degrees[1], degrees[2]),
        (degrees[2], degrees[3]),
        (degrees[3], degrees[0]),
    ]);
}
