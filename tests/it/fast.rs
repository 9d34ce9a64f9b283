//! Fast numerics and bf16: the same layout gives the same bits, another one the same numbers within a tolerance, and a resume
//! under the same layout is the run that never stopped.

use crate::resume::{fingerprints, tensors, train};
use crate::support::{self, Layout, Trace, Tracing, difference, tiny_model, trace};
use ckpt::Store;
use train::config::{ConfigError, Numerics, Precision, TrainConfig};
use train::data::Blend;
use train::resume::Level;

const ITERATIONS: u64 = 4;

const fn layout(tp: u32, sp: bool, cp: u32, gtp: u32, nseq: u32, dp: u32) -> Layout {
    Layout { tp, sp, cp, gtp, nseq, dp, mbs: 2 }
}

/// 6 query groups, 48 positions and 24 samples go into 2 and into 3.
fn config(layout: Layout, numerics: Option<Numerics>, precision: Precision) -> TrainConfig {
    let parallel = layout.parallel(48, 24).unwrap();
    let mut model = tiny_model(6);
    model.num_attention_heads = 12;
    let config = support::config(model, parallel, ITERATIONS);
    TrainConfig { numerics: numerics.unwrap_or(config.numerics), precision, ..config }
}

fn fast(layout: Layout) -> TrainConfig {
    config(layout, Some(Numerics::Fast), Precision::Fp32)
}

fn run(config: &TrainConfig, tokens: &Blend) -> Trace {
    config.check().unwrap();
    trace(config, tokens, Tracing { steps: ITERATIONS, ..Tracing::default() }).unwrap()
}

/// Largest relative distance of the losses, and of the gradient norms.
fn apart(a: &Trace, b: &Trace) -> (f64, f64) {
    let relative = |a: f64, b: f64| (a - b).abs() / b.abs();
    let pairs = || a.outcomes.iter().zip(&b.outcomes);
    assert_eq!(a.samples, b.samples);
    assert!(pairs().all(|(a, b)| a.applied && b.applied));
    (
        pairs().map(|(a, b)| relative(a.loss, b.loss)).fold(0.0, f64::max),
        pairs().map(|(a, b)| relative(a.grad_norm, b.grad_norm)).fold(0.0, f64::max),
    )
}

/// Sums of f32 in another order differ by a few units of 6e-8, relative; Adam turns the smallest gradients into whole updates,
/// of which losses and norms see the mean.
#[test]
fn fast_numerics_agree_with_canonical_under_every_axis() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let canonical = run(&config(Layout::SINGLE, None, Precision::Fp32), &tokens);
    for layout in [
        Layout::SINGLE,
        layout(2, false, 1, 1, 1, 1),
        layout(3, true, 1, 1, 1, 1),
        layout(6, false, 1, 1, 1, 1),
        layout(1, false, 3, 1, 1, 1),
        layout(1, false, 1, 3, 1, 1),
        layout(1, false, 1, 4, 2, 1),
        layout(1, false, 1, 1, 1, 4),
        layout(3, true, 1, 2, 2, 2),
        layout(2, true, 2, 2, 1, 1),
    ] {
        let (loss, norm) = apart(&run(&fast(layout), &tokens), &canonical);
        assert!(loss <= 1e-6 && norm <= 1e-5, "{layout:?}: losses {loss:e} apart, norms {norm:e}");
    }
}

#[test]
fn the_same_layout_gives_the_same_bits_and_goes_on_bit_for_bit() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    for layout in [Layout::SINGLE, layout(3, true, 1, 2, 2, 1), layout(1, false, 2, 1, 1, 2)] {
        let config = fast(layout);
        assert_eq!(difference(&run(&config, &tokens), &run(&config, &tokens)), None, "{layout:?}");

        let stores = [(); 2].map(|()| Store::open("memory://").unwrap());
        let straight = train(&config, &tokens, &stores[0], None, 0, |_| {}).unwrap();
        let half = TrainConfig { train_iters: ITERATIONS / 2, ..config.clone() };
        train(&half, &tokens, &stores[1], None, 0, |_| {}).unwrap();
        let saved = stores[1].checkpoint(ITERATIONS / 2).unwrap();
        let resumed = train(&config, &tokens, &stores[1], Some(&saved), 0, |_| {}).unwrap();
        assert_eq!(resumed.resumed.unwrap().level, Some(Level::L2));
        for (found, expected) in resumed.steps.iter().zip(&straight.steps[ITERATIONS as usize / 2..]) {
            assert_eq!(found.outcome, expected.outcome, "{layout:?}");
        }
        let [expected, found] = stores.map(|store| fingerprints(&store.checkpoint(ITERATIONS).unwrap()));
        assert!(found == expected, "state of {layout:?}");
    }
}

/// bf16 rounds by up to 2⁻⁸ = 4e-3. A loss is the mean over 1,152 tokens, whose errors are mostly independent, and a change
/// of all weights by their rounding moves it less than one of them is off.
#[test]
fn bf16_follows_f32() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let f32 = run(&config(Layout::SINGLE, None, Precision::Fp32), &tokens);
    for numerics in [None, Some(Numerics::Fast)] {
        for layout in [Layout::SINGLE, layout(2, true, 2, 2, 1, 1)] {
            let bf16 = run(&config(layout, numerics.clone(), Precision::Bf16), &tokens);
            let (loss, norm) = apart(&bf16, &f32);
            assert!(loss <= 2e-3 && norm <= 2e-2, "{layout:?}: losses {loss:e} apart, norms {norm:e}");
        }
    }
}

/// Canonical numerics keep their promise in bf16, and so does a resume elsewhere: masters are stored exactly.
#[test]
fn canonical_bf16_gives_the_same_bits_under_other_layouts_and_after_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let bf16 = |layout| config(layout, None, Precision::Bf16);
    let single = run(&bf16(Layout::SINGLE), &tokens);
    for layout in [layout(2, true, 1, 1, 1, 2), layout(1, false, 3, 2, 2, 1), layout(2, false, 1, 3, 1, 1)] {
        assert_eq!(difference(&single, &run(&bf16(layout), &tokens)), None, "{layout:?}");
    }
    let store = Store::open("memory://").unwrap();
    let half = TrainConfig { train_iters: ITERATIONS / 2, ..bf16(layout(2, true, 1, 1, 1, 2)) };
    train(&half, &tokens, &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(ITERATIONS / 2).unwrap();
    let resumed =
        train(&bf16(layout(1, false, 3, 2, 1, 1)), &tokens, &store, Some(&saved), 0, |_| {}).unwrap();
    for (found, expected) in resumed.steps.iter().zip(&single.outcomes[ITERATIONS as usize / 2..]) {
        assert_eq!(found.outcome, *expected);
    }
    assert_eq!(tensors(&store.checkpoint(ITERATIONS).unwrap()), single.state);
}

/// Masters are what is updated; the model's weights are their nearest neighbours in bf16.
#[test]
fn bf16_weights_are_their_rounded_masters_which_a_finetune_takes_too() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let config = config(layout(2, false, 1, 1, 1, 2), None, Precision::Bf16);
    let store = Store::open("memory://").unwrap();
    train(&config, &tokens, &store, None, 0, |_| {}).unwrap();
    let saved = store.checkpoint(ITERATIONS).unwrap();
    let rounded = |source: &ckpt::Checkpoint| {
        let tensors = tensors(source);
        let masters = tensors.iter().filter_map(|(key, master)| {
            let weight = &tensors[key.strip_prefix("optimizer.state.param.")?];
            Some((master.clone(), weight.clone()))
        });
        masters.collect::<Vec<(Vec<u8>, Vec<u8>)>>()
    };
    let pairs = rounded(&saved);
    assert_eq!(pairs.len(), 3 + 6 * 2);
    let mut inexact = 0;
    for (master, weight) in &pairs {
        for (master, weight) in master.as_chunks::<4>().0.iter().zip(weight.as_chunks::<2>().0) {
            let (master, weight) = (f32::from_le_bytes(*master), half::bf16::from_le_bytes(*weight));
            assert_eq!(half::bf16::from_f32(master).to_bits(), weight.to_bits());
            inexact += u64::from(master != weight.to_f32());
        }
    }
    assert!(inexact > 1000, "masters keep what bf16 does not");

    // A new run of no learning: its weights are the saved ones with all their digits, which is what masters are.
    let mut new = TrainConfig { train_iters: 1, ..config };
    new.schedule.max_lr = 0.0;
    let target = Store::open("memory://").unwrap();
    let finetune = |resume: &mut train::resume::Resume| resume.selection = train::resume::Selection::FINETUNE;
    train(&new, &tokens, &target, Some(&saved), 0, finetune).unwrap();
    assert_eq!(rounded(&target.checkpoint(1).unwrap()), pairs);
}

/// Masters that differ in digits that bf16 does not have stay apart, however often the run is taken up again.
#[test]
fn five_resumes_in_a_row_lose_no_digit_of_a_master() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = support::token_file(folder.path(), 6000);
    let config = config(layout(2, false, 1, 1, 1, 1), None, Precision::Bf16);
    let config = TrainConfig { train_iters: 6, ..config };
    let [straight, store] = [(); 2].map(|()| Store::open("memory://").unwrap());
    train(&config, &tokens, &straight, None, 0, |_| {}).unwrap();
    train(&TrainConfig { train_iters: 1, ..config.clone() }, &tokens, &store, None, 0, |_| {}).unwrap();
    for done in 1..6 {
        let next = TrainConfig { train_iters: done + 1, ..config.clone() };
        train(&next, &tokens, &store, Some(&store.checkpoint(done).unwrap()), 0, |_| {}).unwrap();
    }
    let [expected, found] = [straight, store].map(|store| tensors(&store.checkpoint(6).unwrap()));
    assert!(found == expected);
    // By their bits in bf16 the masters of a tensor are fewer than they are.
    let masters = found.iter().filter(|(key, _)| key.starts_with("optimizer.state.param."));
    let values = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let distinct = |bits: Vec<u32>| bits.into_iter().collect::<std::collections::BTreeSet<u32>>().len();
    for (key, bytes) in masters.filter(|(key, _)| key.ends_with("linear_fc1.weight")) {
        let exact = distinct(values(bytes).iter().map(|master| master.to_bits()).collect());
        let rounded =
            distinct(values(bytes).iter().map(|m| half::bf16::from_f32(*m).to_bits().into()).collect());
        assert!(rounded < exact, "`{key}`: {rounded} and {exact}");
    }
}

#[test]
fn fast_numerics_take_layouts_that_canonical_refuse() {
    let refused = |layout: Layout| config(layout, None, Precision::Fp32).check().unwrap_err();
    let three = layout(3, false, 1, 1, 1, 1);
    assert_eq!(refused(three).code(), "RM2031");
    assert_eq!(refused(three).help(), "valid TP sizes: 1, 2; --numerics fast takes others");
    let mut odd = fast(three);
    odd.model.ffn_hidden_size = 50;
    let error: ConfigError = odd.check().unwrap_err();
    assert_eq!(error.to_string(), "`ffn-hidden-size` 50 is no multiple of `tensor-model-parallel-size` 3");
}
