//! Training on the GPU: the promises of canonical numerics, several ranks sharing one device, and curves beside the CPU's.

use crate::Test;
use crate::support::{self, Layout, Trace, Tracing, tiny_model, trace, trace_on};
use ckpt::{Saver, Store};
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use train::backend::Device;
use train::config::{Numerics, Precision, TrainConfig};
use train::data::Blend;
use train::resume::{Level, Resume, RngPolicy, Selection};
use train::run::{Event, Job, RunName, SavePolicy, Trainable, run};

pub(crate) const TESTS: &[Test] = &[
    ("training::losses_are_those_of_the_cpu", losses_are_those_of_the_cpu),
    ("training::losses_in_bf16_are_about_those_of_the_cpu", losses_in_bf16_are_about_those_of_the_cpu),
    ("training::layouts_of_eight_ranks_give_the_same_bits", layouts_of_eight_ranks_give_the_same_bits),
    ("training::resumes_cross_devices", resumes_cross_devices),
];

const SEQ_LENGTH: u64 = 64;
const BATCH: u64 = 8;

pub(crate) fn tokens(folder: &std::path::Path) -> Blend {
    support::token_file(folder, 64 * SEQ_LENGTH + 1)
}

pub(crate) fn config(layout: Layout, train_iters: u64) -> TrainConfig {
    let parallel = layout.parallel(SEQ_LENGTH, BATCH).unwrap();
    let config = support::config(tiny_model(8), parallel, train_iters);
    config.check().unwrap();
    config
}

/// The same sums in another order; later steps have gone through updates.
fn losses_are_those_of_the_cpu(device: &Device) {
    compare_losses(device, &config(Layout::SINGLE, 20), 1e-5);
}

/// Both round to bf16 in the same places. Where a sum in another order rounds to the other neighbour, 2⁻⁸ away, what follows
/// differs; over 20 steps of a loss that is an average of many tokens.
fn losses_in_bf16_are_about_those_of_the_cpu(device: &Device) {
    let config = config(Layout::SINGLE, 20);
    let bf16 = TrainConfig { precision: Precision::Bf16, ..config };
    compare_losses(device, &TrainConfig { numerics: Numerics::Fast, ..bf16.clone() }, 4e-3);
    compare_losses(device, &bf16, 4e-3);
}

fn compare_losses(device: &Device, config: &TrainConfig, tolerance: f64) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(folder.path());
    let tracing = Tracing { steps: config.train_iters, ..Tracing::default() };
    let losses = |trace: Trace| trace.outcomes.iter().map(|outcome| outcome.loss).collect::<Vec<f64>>();
    let expected = losses(trace(config, &tokens, tracing).unwrap());
    let found = losses(trace_on(device, config, &tokens, tracing).unwrap());
    let errors = expected.iter().zip(&found).map(|(expected, found)| (found / expected - 1.0).abs());
    let worst = errors.fold(0.0, f64::max);
    println!(
        "  losses from {:.6} to {:.6}, at most {worst:.1e} off the CPU's",
        found[0],
        found[found.len() - 1]
    );
    assert!(worst <= tolerance, "losses {found:?} instead of {expected:?}");
    assert!(found[found.len() - 1] < found[0], "it learns");
}

fn layouts_of_eight_ranks_give_the_same_bits(device: &Device) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(folder.path());
    let tracing = Tracing { steps: 3, ..Tracing::default() };
    let single = Layout::SINGLE;
    for precision in [Precision::Fp32, Precision::Bf16] {
        let config = |layout| TrainConfig { precision, ..config(layout, 3) };
        let expected = trace_on(device, &config(single), &tokens, tracing).unwrap();
        let layouts = [
            Layout { mbs: 2, ..single },
            Layout { dp: 8, ..single },
            Layout { cp: 8, ..single },
            Layout { tp: 8, ..single },
            Layout { tp: 8, sp: true, ..single },
            Layout { gtp: 8, nseq: 1, ..single },
            Layout { gtp: 8, nseq: 8, ..single },
            Layout { tp: 2, sp: true, cp: 2, dp: 2, ..single },
            Layout { tp: 2, sp: true, gtp: 4, nseq: 2, ..single },
        ];
        for layout in layouts {
            let found = trace_on(device, &config(layout), &tokens, tracing).unwrap();
            let difference = support::difference(&expected, &found);
            assert_eq!(difference, None, "{layout:?} in {precision:?}");
        }
        println!("  {} layouts, equal bits in {precision:?}", layouts.len());
    }
}

/// CUDA ranks save, CPU ranks go on and save, CUDA ranks go on.
fn resumes_cross_devices(device: &Device) {
    let eight = Layout { tp: 2, cp: 2, dp: 2, ..Layout::SINGLE };
    resume_through(&[(device, eight), (&Device::Cpu, Layout::SINGLE), (device, Layout { cp: 4, ..eight })]);
}

/// Two steps on each device and layout, each from the checkpoint of the one before: every load proves that memory holds what was
/// saved, and losses are about those of a run on one CPU rank that never stopped.
pub(crate) fn resume_through(legs: &[(&Device, Layout)]) {
    let folder = tempfile::tempdir().unwrap();
    let tokens = tokens(folder.path());
    let save = folder.path().join("run");
    let store = Store::create(save.to_str().unwrap()).unwrap();
    let last = 2 * legs.len() as u64;
    let straight =
        trace(&config(Layout::SINGLE, last), &tokens, Tracing { steps: last, ..Tracing::default() });
    let straight: Vec<f64> = straight.unwrap().outcomes.iter().map(|outcome| outcome.loss).collect();
    for ((device, layout), until) in legs.iter().zip((2..).step_by(2)) {
        let mut config = config(*layout, until);
        config.schedule = support::schedule(last);
        let checkpoint = (until > 2).then(|| store.checkpoint(until - 2).unwrap());
        let level = Mutex::new(None);
        let losses = Mutex::new(Vec::new());
        let resume = checkpoint.as_ref().map(|source| Resume {
            source,
            selection: Selection::ALL,
            allow_missing: &[],
            allow_extra: &[],
            rng_policy: RngPolicy::Derive,
            allow_change: &[],
            strict: false,
        });
        let job = Job {
            run: Trainable::new(&config, &tokens, resume).unwrap(),
            device: (*device).clone(),
            save: Some(SavePolicy {
                interval: 0,
                saver: &|exchange| Saver::new(store.clone(), exchange),
                writer: RunName { run: "test".into(), host: "here".into(), pid: 1, program: "gpu".into() },
                now: || "2026-11-30T00:00:00Z".into(),
            }),
            timeout: Job::TIMEOUT,
            stop: &AtomicBool::new(false),
            observer: &|event| {
                match event {
                    Event::Resumed(resumed) => *level.lock().unwrap() = Some(resumed.level),
                    Event::Step(step) => losses.lock().unwrap().push(step.outcome.loss),
                    Event::SaveFailed { error, .. } => panic!("{error}"),
                    _ => {}
                }
                Ok(())
            },
        };
        run(&job).unwrap();
        let level: Option<Level> = level.into_inner().unwrap().flatten();
        println!(
            "  until step {until} on {layout:?}: resumed at {level:?}, losses {:?}",
            losses.lock().unwrap()
        );
        assert!(checkpoint.is_none() || level.is_some());
        let expected = &straight[until as usize - 2..until as usize];
        for (found, expected) in losses.into_inner().unwrap().iter().zip(expected) {
            // The same sums in another order, as in f32 between the devices.
            assert!((found / expected - 1.0).abs() < 1e-5, "a loss of {found} instead of {expected}");
        }
    }
}
