//! The promise: train on one mesh, save, load on another, and the losses equal those of the run that never stopped.

use crate::support::{self, Layout, tied_model, tiny_gpt2, tiny_model};
use ckpt::{Catalog, Checkpoint, Commit, LoadPlan, ReadReport, Saver, Sink, StateSource, Store};
use expect_test::expect;
use mesh::{BatchSchedule, Ramp, Region};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use train::backend::Device;
use train::config::{
    Activation, Biases, Documents, EpochTail, LossAverage, ModelConfig, Normalization, Numerics,
    PositionEmbedding, Precision, TrainConfig,
};
use train::data::Blend;
use train::evaluate::Evaluated;
use train::resume::{self, DataState, Level, Resume, Resumed, RngPolicy, Selection};
use train::run::{Event, Job, RunEnd, RunError, RunName, SavePolicy, Step, Trainable, run};

/// What a run told.
#[derive(Default)]
pub struct Told {
    pub steps: Vec<Step>,
    pub resumed: Option<Resumed>,
    pub failed_saves: Vec<String>,
    pub evaluated: Vec<(u64, Evaluated)>,
}

/// Runs `config` to its last iteration, saving there and every `save_interval` steps into `store`, from `from` or from scratch.
pub fn train<'a>(
    config: &TrainConfig,
    tokens: &Blend,
    store: &Store,
    from: Option<&'a (dyn StateSource + Sync)>,
    save_interval: u64,
    adjust: impl FnOnce(&mut Resume<'a>),
) -> Result<Told, RunError> {
    let (told, end) = train_until(config, tokens, None, store, from, save_interval, adjust, |_, _| {})?;
    assert_eq!(end, RunEnd { iteration: config.train_iters, stopped: false });
    Ok(told)
}

/// The same with validation data, until it ends or `observe` sets the flag that stops it.
#[expect(clippy::too_many_arguments, reason = "what two tests say, and all others leave out")]
pub fn train_until<'a>(
    config: &TrainConfig,
    tokens: &Blend,
    validation: Option<&Blend>,
    store: &Store,
    from: Option<&'a (dyn StateSource + Sync)>,
    save_interval: u64,
    adjust: impl FnOnce(&mut Resume<'a>),
    observe: impl Fn(&Event, &AtomicBool) + Sync,
) -> Result<(Told, RunEnd), RunError> {
    let stop = AtomicBool::new(false);
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
    let mut trainable = Trainable::new(config, tokens, resume)?;
    if let Some(validation) = validation {
        trainable = trainable.evaluated_on(validation)?;
    }
    let job = Job {
        run: trainable,
        device: Device::Cpu,
        save: Some(SavePolicy {
            interval: save_interval,
            saver: &|exchange| Saver::new(store.clone(), exchange),
            writer: RunName { run: "test".into(), host: "here".into(), pid: 1, program: "it".into() },
            now: || "2026-11-30T00:00:00Z".into(),
        }),
        timeout: Job::TIMEOUT,
        stop: &stop,
        observer: &|event| {
            observe(event, &stop);
            let mut told = told.lock().unwrap();
            match event {
                Event::Step(step) => told.steps.push(*step),
                Event::Resumed(resumed) => told.resumed = Some((**resumed).clone()),
                Event::SaveFailed { error, .. } => told.failed_saves.push(error.to_string()),
                Event::Evaluated { iteration, evaluated } => told.evaluated.push((*iteration, *evaluated)),
                Event::Saved { .. }
                | Event::Stopping { .. }
                | Event::PassedOver { .. }
                | Event::SamplesDropped { .. } => {}
            }
            Ok(())
        },
    };
    match run(&job) {
        Ok(end) => Ok((told.into_inner().unwrap(), end)),
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

/// Bytes of every logical tensor of a checkpoint but the random streams.
pub fn tensors(source: &dyn StateSource) -> BTreeMap<String, Vec<u8>> {
    let stored = source.catalog().tensors().iter().filter(|tensor| tensor.kind != mesh::StateKind::Rng);
    stored
        .map(|tensor| {
            let mut bytes = vec![0; tensor.raw_bytes() as usize];
            source.read_box(&tensor.key, &Region::whole(&tensor.shape), &mut bytes).unwrap();
            (tensor.key.to_string(), bytes)
        })
        .collect()
}

const ITERATIONS: u64 = 4;
const HALF: u64 = 2;

struct Case {
    groups: usize,
    seq_length: u64,
    global_batch_size: u64,
    model: fn(usize) -> ModelConfig,
}

impl Case {
    fn config(&self, layout: Layout) -> TrainConfig {
        let parallel = layout.parallel(self.seq_length, self.global_batch_size).unwrap();
        let config = support::config((self.model)(self.groups), parallel, ITERATIONS);
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
            assert_eq!(first.steps.len() + second.steps.len(), straight.steps.len());
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

const POWERS: Case = Case { groups: 4, seq_length: 64, global_batch_size: 8, model: tiny_model };

/// The batch grows from 4 to 16 samples in levels of 8 samples: what was consumed decides, not the number of the step.
#[test]
fn a_resume_while_the_batch_grows_goes_on_bit_for_bit_under_another_dp() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let ramp = Ramp { start: 4, increment: 4, samples: 24, end: 16 };
    let case = Case { global_batch_size: 16, ..POWERS };
    let config = |layout: Layout| TrainConfig {
        batch: BatchSchedule::ramp(ramp).unwrap(),
        train_iters: 6,
        schedule: support::schedule(6),
        ..case.config(layout)
    };
    let straight_store = Store::open("memory://").unwrap();
    let straight = train(&config(Layout::SINGLE), &tokens, &straight_store, None, 0, |_| {}).unwrap();
    let consumed: Vec<u64> = straight.steps.iter().map(|step| step.consumed_samples).collect();
    assert_eq!(consumed, [4, 8, 16, 28, 44, 60]);
    let expected = fingerprints(&straight_store.checkpoint(6).unwrap());
    let [two, four] = [2, 4].map(|dp| layout(1, false, 1, 1, 1, dp));
    for (stop, before, after) in [(1, four, two), (3, two, four), (4, layout(2, true, 1, 2, 2, 1), four)] {
        let store = Store::open("memory://").unwrap();
        let first_half = TrainConfig { train_iters: stop, ..config(before) };
        let first = train(&first_half, &tokens, &store, None, 0, |_| {}).unwrap();
        let saved = store.checkpoint(stop).unwrap();
        let second = train(&config(after), &tokens, &store, Some(&saved), 0, |_| {}).unwrap();
        assert_eq!(second.resumed.unwrap().level, Some(Level::L2));
        let found: Vec<_> = (first.steps.iter().chain(&second.steps))
            .map(|step| (step.outcome, step.lr.to_bits(), step.consumed_samples))
            .collect();
        let of_straight: Vec<_> = straight
            .steps
            .iter()
            .map(|step| (step.outcome, step.lr.to_bits(), step.consumed_samples))
            .collect();
        assert_eq!(found, of_straight, "{before:?} → {after:?} after {stop}");
        assert!(fingerprints(&store.checkpoint(6).unwrap()) == expected, "{before:?} → {after:?}");
    }
    // Eight lanes cannot share batches of 4; from 28 samples on they can share those of 16.
    let eight = layout(1, false, 1, 1, 1, 8);
    let none = Store::open("memory://").unwrap();
    let error = train(&config(eight), &tokens, &none, None, 0, |_| {}).err().unwrap();
    expect![
        "batch size 4 ÷ (micro batch size 1 × batch parallel size 8) is not exact, from 0 consumed samples on"
    ]
    .assert_eq(&error.to_string());
    let first_four = TrainConfig { train_iters: 4, ..config(Layout::SINGLE) };
    train(&first_four, &tokens, &none, None, 0, |_| {}).unwrap();
    let saved = none.checkpoint(4).unwrap();
    let rest = train(&config(eight), &tokens, &none, Some(&saved), 0, |_| {}).unwrap();
    assert_eq!(rest.steps[0].outcome, straight.steps[4].outcome);
}

#[test]
fn a_resume_under_another_cp_degree_goes_on_bit_for_bit() {
    let [one, two, four, eight] = [1, 2, 4, 8].map(|cp| layout(1, false, cp, 1, 1, 1));
    POWERS.resumes(&[(one, two), (two, four), (four, eight), (eight, one)]);
}

#[test]
fn a_resume_under_other_sequence_shards_goes_on_bit_for_bit() {
    let [one, two, four] = [1, 2, 4].map(|nseq| layout(1, false, 1, 4, nseq, 1));
    POWERS.resumes(&[(one, two), (two, four), (four, one), (layout(1, false, 2, 4, 2, 1), one)]);
}

#[test]
fn a_resume_under_another_tp_goes_on_bit_for_bit() {
    let [one, two, four] =
        [layout(1, false, 1, 1, 1, 2), layout(2, true, 1, 1, 1, 1), layout(4, true, 1, 1, 1, 1)];
    POWERS.resumes(&[(one, two), (two, four), (four, one), (one, four), (layout(4, false, 1, 2, 1, 1), two)]);
}

#[test]
fn a_resume_over_mixed_axes_goes_on_bit_for_bit() {
    POWERS.resumes(&[
        (layout(2, true, 2, 2, 1, 1), layout(1, false, 2, 2, 2, 2)),
        (layout(1, false, 1, 1, 1, 8), layout(2, true, 1, 4, 4, 1)),
        (layout(2, false, 1, 2, 1, 2), layout(4, true, 2, 1, 1, 1)),
        (layout(1, false, 2, 4, 4, 1), layout(2, true, 2, 1, 1, 2)),
    ]);
}

#[test]
fn a_resume_over_3_and_8_ranks_goes_on_bit_for_bit() {
    let thirds = Case { groups: 2, seq_length: 96, global_batch_size: 24, ..POWERS };
    let single = Layout::SINGLE;
    thirds.resumes(&[
        (single, layout(1, false, 1, 3, 1, 1)),
        (layout(1, false, 2, 2, 2, 2), layout(1, false, 3, 1, 1, 1)),
        (layout(1, false, 1, 3, 3, 1), layout(2, true, 2, 2, 1, 1)),
    ]);
}

#[test]
fn a_tied_model_resumes_under_another_tp_bit_for_bit() {
    let tied = Case { model: tied_model, ..POWERS };
    let [one, two, four] =
        [layout(1, false, 1, 2, 1, 1), layout(2, true, 1, 1, 1, 1), layout(4, true, 1, 1, 1, 2)];
    tied.resumes(&[(two, one), (one, four), (four, two)]);
}

/// Vectors that TP cuts, and learned positions, which nothing cuts, are resumed as matrices are.
#[test]
fn a_gpt2_resumes_under_other_degrees_of_every_axis_bit_for_bit() {
    let gpt2 = Case { model: tiny_gpt2, groups: 8, ..POWERS };
    gpt2.resumes(&[
        (layout(1, false, 2, 1, 1, 1), layout(1, false, 4, 1, 1, 2)),
        (layout(1, false, 1, 4, 1, 1), layout(1, false, 1, 4, 4, 1)),
        (layout(4, true, 1, 1, 1, 1), layout(2, false, 1, 2, 1, 1)),
        (layout(2, true, 2, 2, 2, 1), layout(8, false, 1, 1, 1, 1)),
        (layout(1, false, 1, 2, 2, 2), layout(2, true, 1, 2, 1, 1)),
    ]);
}

/// A learning rate that blows the weights up: every rank leaves out every step from then on, and the run ends.
#[test]
fn steps_that_are_not_finite_end_the_run_after_some_in_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let mut config = TrainConfig { train_iters: 20, ..POWERS.config(layout(1, false, 2, 1, 1, 2)) };
    (config.schedule.train, config.schedule.lr_decay, config.schedule.max_lr) = (20, 20, 1e30);
    let error = train(&config, &tokens, &Store::open("memory://").unwrap(), None, 0, |_| {}).err().unwrap();
    expect!["3 steps in a row, up to iteration 4, had values that were not finite or out of range, or no token to learn from"]
        .assert_eq(&error.to_string());
}

/// A checkpoint whose `checkpoint.json` says something else, sealed as it is.
struct Edited {
    inner: Checkpoint,
    commit: Commit,
}

impl Edited {
    fn new(store: &Store, step: u64, edit: impl FnOnce(&mut Commit)) -> Self {
        let inner = store.checkpoint(step).unwrap();
        let mut commit = inner.commit().clone();
        edit(&mut commit);
        Edited { inner, commit }
    }
}

impl StateSource for Edited {
    fn commit(&self) -> &Commit {
        &self.commit
    }

    fn catalog(&self) -> &Catalog {
        self.inner.catalog()
    }

    fn read(&self, plan: &LoadPlan, sink: &mut Sink<'_>) -> Result<ReadReport, ckpt::LoadError> {
        self.inner.read(plan, sink)
    }
}

/// Random numbers, counters and the tensor of streams must be those of one run.
#[test]
fn a_commit_that_contradicts_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let config = TrainConfig { train_iters: 2, ..POWERS.config(Layout::SINGLE) };
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    let target = Store::open("memory://").unwrap();
    let refusal = |source: &Edited| {
        train(&config, &tokens, &target, Some(source), 0, |_| {}).err().unwrap().to_string()
    };
    let other_ordinal = Edited::new(&store, 1, |commit| commit.run.random.ordinal = 16);
    expect!["checkpoint.json says philox4x32-10 of seed 1234 at sample 16 where this run needs philox4x32-10 of seed 1234 at sample 8"].assert_eq(&refusal(&other_ordinal));
    let other_layout = Edited::new(&store, 1, |commit| {
        commit.run.layout = *layout(2, false, 1, 1, 1, 1).parallel(64, 8).unwrap().layout();
    });
    expect![
        "`rng_state` has shape 1 × 1 × 1 × 5 × 6 in the checkpoint, where its layout makes 1 × 2 × 1 × 5 × 6"
    ]
    .assert_eq(&refusal(&other_layout));
}

/// Groups of parameters are tied to names: neither their order nor the layout is of account, another group is.
#[test]
fn a_parameter_stays_in_its_group_or_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let [store, target] = [(); 2].map(|()| Store::open("memory://").unwrap());
    let config = TrainConfig { train_iters: 2, ..POWERS.config(layout(2, true, 1, 2, 1, 1)) };
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    let resumed = |edit: &dyn Fn(&mut Vec<serde_json::Value>, &mut Vec<serde_json::Value>)| {
        let edited = Edited::new(&store, 1, |commit| {
            let groups = commit.run.groups.as_object_mut().unwrap();
            let [mut decay, mut no_decay] =
                ["decay", "no_decay"].map(|name| groups[name].as_array().unwrap().clone());
            edit(&mut decay, &mut no_decay);
            (groups["decay"], groups["no_decay"]) = (decay.into(), no_decay.into());
        });
        train(&config, &tokens, &target, Some(&edited), 0, |_| {}).map(|told| told.steps.len())
    };
    assert_eq!(resumed(&|decay, no_decay| (decay.reverse(), no_decay.reverse()).1).unwrap(), 1);
    let error = resumed(&|decay, no_decay| no_decay.extend(decay.drain(..2))).unwrap_err();
    expect!["the checkpoint and this run differ: parameter group is without weight decay for `embedding.word_embeddings.weight` and 1 more in the checkpoint but with it here"].assert_eq(&error.to_string());
}

/// A checkpoint of which the first rank that reads finds a damaged chunk; the others have a slow store.
struct DamagedForOne {
    inner: Checkpoint,
    readers: AtomicUsize,
}

impl StateSource for DamagedForOne {
    fn commit(&self) -> &Commit {
        self.inner.commit()
    }

    fn catalog(&self) -> &Catalog {
        self.inner.catalog()
    }

    fn read(&self, plan: &LoadPlan, sink: &mut Sink<'_>) -> Result<ReadReport, ckpt::LoadError> {
        if self.readers.fetch_add(1, Ordering::Relaxed) == 0 {
            let tensor = &self.catalog().tensors()[0];
            return Err(ckpt::LoadError::Damaged {
                key: tensor.key.clone(),
                region: Box::new(Region::whole(&tensor.shape)),
                object: "0.pack".to_owned(),
                bytes: 0..1,
                expected: 1,
                found: 2,
            });
        }
        self.inner.read(plan, &mut |target, within, bytes| {
            std::thread::sleep(Duration::from_millis(500));
            sink(target, within, bytes)
        })
    }
}

/// Each of the others would take more than 15 s: it ends with the next bytes that it gets, and the damage is what is told.
#[test]
fn damage_that_one_rank_finds_ends_the_loads_of_all() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let config = TrainConfig { train_iters: 2, ..POWERS.config(layout(1, false, 1, 1, 1, 4)) };
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    let source = DamagedForOne { inner: store.checkpoint(1).unwrap(), readers: AtomicUsize::new(0) };
    assert!(source.catalog().tensors().len() > 30);
    let start = Instant::now();
    let error = train(&config, &tokens, &store, Some(&source), 0, |_| {}).err().unwrap();
    assert_eq!(error.code(), "RM4021", "{error}");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    assert_eq!(source.readers.into_inner(), 4);
}

/// Going on with other samples is never called the same run.
#[test]
fn what_was_allowed_to_change_caps_the_level() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let config = TrainConfig { train_iters: 2, ..POWERS.config(Layout::SINGLE) };
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(1).unwrap();
    let mut wider = config.clone();
    wider.parallel = Layout::SINGLE.parallel(64, 16).unwrap();
    wider.batch = BatchSchedule::constant(16).unwrap();
    let allowed = ["global-batch-size".to_owned()];
    let target = Store::open("memory://").unwrap();
    let told =
        train(&wider, &tokens, &target, Some(&saved), 0, |resume| resume.allow_change = &allowed).unwrap();
    let resumed = told.resumed.unwrap();
    assert_eq!(resumed.level, Some(Level::L0));
    assert_eq!(resumed.notes, ["the next samples are others: global-batch-size changed"]);
    let strict = |resume: &mut Resume| (resume.allow_change, resume.strict) = (&[], true);
    let error = train(&wider, &tokens, &target, Some(&saved), 0, strict).err().unwrap().to_string();
    assert!(error.contains("global-batch-size is 8 in the checkpoint but 16 here"), "{error}");
}

/// An id that the model has no row for would train padding, which is never stored.
#[test]
fn a_token_above_the_vocabulary_ends_the_run_naming_it() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let mut config = POWERS.config(Layout::SINGLE);
    config.model.vocab_size = 200;
    let error = train(&config, &tokens, &Store::open("memory://").unwrap(), None, 0, |_| {}).err().unwrap();
    let text = error.to_string();
    assert!(text.ends_with("but the vocabulary has 200 ids"), "{text}");
}

/// Each setting that must match is a difference of its own, with both values; shapes cannot be allowed to change.
#[test]
fn every_setting_that_must_match_is_compared() {
    let saved = POWERS.config(Layout::SINGLE);
    let data = DataState {
        validation: None,
        num_samples: 93,
        seq_length: 64,
        files: "00".into(),
        next_batch: "00".into(),
        next_batch_size: 8,
    };
    let mut table = Vec::new();
    let mut change = |edit: &dyn Fn(&mut TrainConfig, &mut DataState)| {
        let (mut wanted, mut wanted_data) = (saved.clone(), data.clone());
        edit(&mut wanted, &mut wanted_data);
        let differences = resume::compare(&saved, &data, &wanted, &wanted_data, 4);
        assert_eq!(differences.len(), 1, "{differences:?}");
        let d = &differences[0];
        let word = if d.overridable { "may be allowed" } else { "never" };
        table.push(format!("{}: {} → {}, {word}", d.field, d.saved, d.wanted));
    };
    change(&|c, _| c.model.num_layers = 3);
    change(&|c, _| c.model.hidden_size = 48);
    change(&|c, _| c.model.ffn_hidden_size = 64);
    change(&|c, _| c.model.num_attention_heads = 4);
    change(&|c, _| c.model.num_query_groups = 2);
    change(&|c, _| c.model.kv_channels = 4);
    change(&|c, _| c.model.vocab_size = 300);
    change(&|c, _| c.model.tie_embeddings = true);
    change(&|c, _| c.model.normalization = Normalization::LayerNorm);
    change(&|c, _| c.model.position_embedding = PositionEmbedding::LearnedAbsolute { max_positions: 64 });
    change(&|c, _| c.model.activation = Activation::Gelu);
    change(&|c, _| c.model.biases = Biases::Qkv);
    change(&|c, _| c.model.norm_epsilon = 1e-6);
    change(&|c, _| c.model.rotary_base = 5e5);
    change(&|c, _| c.model.hidden_dropout = 0.0);
    change(&|c, _| c.model.attention_dropout = 0.0);
    change(&|c, _| c.parallel = Layout::SINGLE.parallel(128, 8).unwrap());
    change(&|c, _| c.batch = BatchSchedule::constant(16).unwrap());
    change(&|c, _| c.seed = 1);
    change(&|_, d| d.files = "01".into());
    change(&|c, _| c.epoch_tail = EpochTail::Drop);
    change(&|c, _| {
        c.documents = Some(Documents {
            end_token: 256,
            reset_positions: true,
            reset_attention: false,
            mask_loss: true,
        });
    });
    change(&|c, _| c.loss_average = LossAverage::Sample);
    change(&|c, _| c.optimizer.clip_grad = 0.5);
    change(&|c, _| *c = support::with_leaf(c.clone(), 2));
    change(&|c, _| c.numerics = Numerics::Fast);
    change(&|c, _| c.precision = Precision::Bf16);
    expect![[r#"
        num-layers: 2 → 3, never
        hidden-size: 32 → 48, never
        ffn-hidden-size: 48 → 64, never
        num-attention-heads: 8 → 4, never
        num-query-groups: 4 → 2, never
        kv-channels: 8 → 4, never
        vocab-size: 257 → 300, never
        tie-embeddings: false → true, never
        normalization: RMSNorm → LayerNorm, never
        position-embedding-type: rope → learned_absolute of 64 positions, never
        activation: swiglu → gelu, never
        biases: none → qkv, never
        norm-epsilon: 0.00001 → 0.000001, may be allowed
        rotary-base: 10000 → 500000, may be allowed
        hidden-dropout: 0.1 → 0, may be allowed
        attention-dropout: 0.1 → 0, may be allowed
        seq-length: 64 → 128, may be allowed
        global-batch-size: 8 → 16, may be allowed
        seed: 1234 → 1, may be allowed
        data: 93 samples of index 00 with the next tokens 00 → 93 samples of index 01 with the next tokens 00, may be allowed
        epoch-tail: span → drop, may be allowed
        documents: not told apart → end token 256 resets positions, masks the next target, may be allowed
        loss-average: token → sample, may be allowed
        optimizer: AdamW (β 0.9 and 0.999, ε 0.00000001, clip 1) → AdamW (β 0.9 and 0.999, ε 0.00000001, clip 0.5), may be allowed
        numerics: canonical (leaf 4, TP blocks 4, fraction bits 36 and 40) → canonical (leaf 2, TP blocks 4, fraction bits 36 and 40), may be allowed
        numerics: canonical (leaf 4, TP blocks 4, fraction bits 36 and 40) → fast, may be allowed
        precision: fp32 → bf16, never"#]].assert_eq(&table.join("\n"));

    // Layout, ranks, micro-batch and the length of the run may change without a word.
    let mut elsewhere = POWERS.config(Layout { tp: 2, sp: true, cp: 2, mbs: 2, ..Layout::SINGLE });
    elsewhere.train_iters = 99;
    assert_eq!(resume::compare(&saved, &data, &elsewhere, &data, 4), []);
}

/// Retraining from a checkpoint with other settings is refused, naming both values; what may change takes a word.
#[test]
fn what_must_match_is_compared_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let config = POWERS.config(Layout::SINGLE);
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(1).unwrap();

    let mut other = config.clone();
    other.seed = 99;
    other.model.num_layers = 3;
    let other = support::with_leaf(other, 2);
    let error = train(&other, &tokens, &store, Some(&saved), 0, |_| {}).err().unwrap();
    expect!["the checkpoint and this run differ: num-layers is 2 in the checkpoint but 3 here; seed is 1234 in the checkpoint but 99 here; numerics is canonical (leaf 4, TP blocks 4, fraction bits 36 and 40) in the checkpoint but canonical (leaf 2, TP blocks 4, fraction bits 36 and 40) here"].assert_eq(&error.to_string());

    let mut reseeded = config.clone();
    reseeded.seed = 99;
    let seed = ["seed".to_owned()];
    let told =
        train(&reseeded, &tokens, &store, Some(&saved), 0, |resume| resume.allow_change = &seed).unwrap();
    let resumed = told.resumed.unwrap();
    assert_eq!(resumed.level, Some(Level::L0));
    expect!["the next samples are others: seed changed"].assert_eq(&resumed.notes.join("; "));
}

/// Weights alone for a new run, and it says what was left.
#[test]
fn a_finetune_takes_the_weights_and_starts_at_iteration_0() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let store = Store::open("memory://").unwrap();
    let config = TrainConfig { train_iters: 2, ..POWERS.config(Layout::SINGLE) };
    train(&config, &tokens, &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(2).unwrap();
    let target = Store::open("memory://").unwrap();
    let finetune = |resume: &mut Resume| resume.selection = Selection::FINETUNE;
    let told = train(&config, &tokens, &target, Some(&saved), 0, finetune).unwrap();
    let resumed = told.resumed.unwrap();
    assert_eq!((resumed.iteration, resumed.counters.consumed_train_samples), (0, 0));
    assert_eq!(resumed.level, None);
    expect!["not restored: optimizer, counters; not restored: random streams"]
        .assert_eq(&resumed.notes.join("; "));
}
