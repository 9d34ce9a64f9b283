//! The validation loss: the same samples every time, the same bits under every layout, and nothing of the run is touched.

use crate::resume::{fingerprints, train, train_until};
use crate::support::{self, Layout, tiny_model};
use ckpt::Store;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use train::config::{LossAverage, TrainConfig};
use train::data::Blend;
use train::evaluate::{Evaluated, Evaluation, EvaluationBatch};
use train::run::{Event, RunEnd};

/// Evaluations every two steps, of at most `iters` batches of `batch` samples, `micro_batch` at a time.
fn config(layout: Layout, iters: u64, batch: u64, micro_batch: u32) -> TrainConfig {
    let parallel = layout.parallel(64, 8).unwrap();
    let batch = EvaluationBatch { micro_batch_size: micro_batch, global_batch_size: batch };
    let evaluation = Evaluation { interval: 2, iters, batch };
    let config = TrainConfig { evaluation: Some(evaluation), ..support::config(tiny_model(4), parallel, 5) };
    config.check().unwrap();
    config
}

/// What a run from scratch to its end evaluates to, and the fingerprints of its last checkpoint.
fn run(
    config: &TrainConfig,
    tokens: &Blend,
    validation: Option<&Blend>,
) -> (Vec<(u64, Evaluated)>, BTreeMap<String, String>) {
    let store = Store::open("memory://").unwrap();
    let (told, _) = train_until(config, tokens, validation, &store, None, 0, |_| {}, |_, _| {}).unwrap();
    (told.evaluated, fingerprints(&store.checkpoint(config.train_iters).unwrap()))
}

fn bits(evaluated: &[(u64, Evaluated)]) -> Vec<(u64, u64, u64)> {
    evaluated.iter().map(|(at, evaluated)| (*at, evaluated.loss.to_bits(), evaluated.samples)).collect()
}

/// 93 validation samples, of which 24 are read; or all of them in batches that 93 is no multiple of.
#[test]
fn a_validation_loss_is_the_same_under_every_layout_and_division_and_leaves_the_run_alone() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let single = config(Layout::SINGLE, 3, 8, 1);
    let (expected, state) = run(&single, &tokens, Some(&tokens));
    let at: Vec<_> = expected.iter().map(|(at, evaluated)| (*at, evaluated.samples)).collect();
    assert_eq!(at, [(2, 24), (4, 24), (5, 24)]);
    assert!(expected.iter().all(|(_, evaluated)| evaluated.loss.is_finite()));
    assert!(
        run(&single, &tokens, None) == (Vec::new(), state),
        "without validation data there is no evaluation"
    );
    let whole = run(&config(Layout::SINGLE, 100, 8, 1), &tokens, Some(&tokens)).0;
    assert!(whole.iter().all(|(_, evaluated)| evaluated.samples == 93), "each sample once");
    for (layout, micro_batch) in [
        (Layout::SINGLE, 4),
        (Layout { dp: 4, ..Layout::SINGLE }, 2),
        (Layout { tp: 2, sp: true, cp: 2, mbs: 2, ..Layout::SINGLE }, 2),
        (Layout { gtp: 4, nseq: 2, ..Layout::SINGLE }, 4),
    ] {
        let found = run(&config(layout, 3, 8, micro_batch.min(8 / layout.dp)), &tokens, Some(&tokens));
        assert_eq!(bits(&found.0), bits(&expected), "{layout:?}");
        // 12 batches of 8, or 6 of 16.
        let found = run(&config(layout, 6, 16, micro_batch), &tokens, Some(&tokens)).0;
        assert_eq!(bits(&found), bits(&whole), "{layout:?}");
    }
}

/// With a rate of 0 the weights stay: so does the loss, whatever the dropout, and it is the one that training has without.
#[test]
fn a_validation_loss_is_that_of_the_weights_alone() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    for loss_average in [LossAverage::Token, LossAverage::Sample] {
        let mut config = TrainConfig { loss_average, ..config(Layout::SINGLE, 1, 8, 1) };
        config.schedule.max_lr = 0.0;
        let (with_dropout, _) = run(&config, &tokens, Some(&tokens));
        assert!(with_dropout.iter().all(|(_, evaluated)| *evaluated == with_dropout[0].1));
        (config.model.hidden_dropout, config.model.attention_dropout) = (0.0, 0.0);
        assert_eq!(run(&config, &tokens, Some(&tokens)).0, with_dropout);
        let store = Store::open("memory://").unwrap();
        let first = train(&config, &tokens, &store, None, 0, |_| {}).unwrap().steps[0];
        assert_eq!(first.outcome.loss.to_bits(), with_dropout[0].1.loss.to_bits());
    }
}

/// A signal between a step and its evaluation: the step is saved, and the evaluation made up for under another layout. One that was made
/// is not made again.
#[test]
fn no_evaluation_is_lost_or_made_twice_over_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let straight = run(&config(Layout::SINGLE, 3, 8, 1), &tokens, Some(&tokens)).0;
    let other = config(Layout { dp: 2, ..Layout::SINGLE }, 3, 8, 1);
    for stop_at in [2, 3, 4, 5] {
        let store = Store::open("memory://").unwrap();
        let stop = |event: &Event, stop: &AtomicBool| {
            if matches!(event, Event::Step(step) if step.iteration == stop_at) {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let first_half = config(Layout::SINGLE, 3, 8, 1);
        let (first, end) =
            train_until(&first_half, &tokens, Some(&tokens), &store, None, 0, |_| {}, stop).unwrap();
        assert_eq!(end, RunEnd { iteration: stop_at, stopped: true });
        let saved = store.checkpoint(stop_at).unwrap();
        let counted = saved.commit().run.counters.consumed_valid_samples;
        assert_eq!(counted, 24 * first.evaluated.len() as u64);
        let (second, _) =
            train_until(&other, &tokens, Some(&tokens), &store, Some(&saved), 0, |_| {}, |_, _| {}).unwrap();
        let all = [first.evaluated, second.evaluated].concat();
        assert_eq!(bits(&all), bits(&straight), "stopped after {stop_at}");
    }
}
