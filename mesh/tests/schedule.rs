//! Schedules against values computed apart, at their corners, and as they are stored.

use expect_test::expect;
use mesh::{
    BatchSchedule, BatchStep, LrDecayStyle, Schedule, ScheduleConfig, ScheduleUnit, Warmup, WeightDecayStyle,
    WsdShape,
};

/// In steps of 8 samples: 30 long, the rate comes down over 25 after 5 of warm-up.
fn config() -> ScheduleConfig {
    ScheduleConfig {
        unit: ScheduleUnit::Iterations,
        train: 30,
        lr_decay: 25,
        lr_warmup: Warmup::Length(5),
        lr_decay_style: LrDecayStyle::Cosine,
        init_lr: 1e-5,
        max_lr: 3e-4,
        min_lr: 3e-5,
        start_weight_decay: 0.01,
        end_weight_decay: 0.1,
        weight_decay_style: WeightDecayStyle::Linear,
    }
}

fn batch(size: u64) -> BatchSchedule {
    BatchSchedule::constant(size).unwrap()
}

fn schedule(config: ScheduleConfig) -> Schedule {
    Schedule::new(config, &batch(8)).unwrap()
}

/// Values in the table have ten digits.
fn assert_close(found: f64, expected: &str, of: &str) {
    let expected: f64 = expected.parse().unwrap();
    assert!((found - expected).abs() <= 1e-9 * expected, "{of}: {found:e} is not {expected:e}");
}

#[test]
fn learning_rates_are_those_of_megatrons_formulas() {
    let wsd = |shape| LrDecayStyle::Wsd { length: 9, shape };
    let samples = [0, 8, 40, 48, 96, 128, 129, 160, 200, 201];
    let rows = [
        (LrDecayStyle::Constant, "1e-5 6.8e-5 3e-4 3e-4 3e-4 3e-4 3e-4 3e-4 3e-4 3e-4"),
        (LrDecayStyle::Linear, "1e-5 6.8e-5 3e-4 2.865e-4 2.055e-4 1.515e-4 1.498125e-4 9.75e-5 3e-5 3e-5"),
        (
            LrDecayStyle::Cosine,
            "1e-5 6.8e-5 3e-4 2.983379260e-4 2.262887175e-4 1.438813472e-4 1.412675022e-4 6.954058454e-5 3e-5 3e-5",
        ),
        (
            LrDecayStyle::InverseSquareRoot,
            "1e-5 6.8e-5 3e-4 2.738612788e-4 1.936491673e-4 1.677050983e-4 1.670538139e-4 1.5e-4 1.341640786e-4 3e-5",
        ),
        (wsd(WsdShape::Linear), "1e-5 6.8e-5 3e-4 3e-4 3e-4 3e-4 2.9625e-4 1.8e-4 3e-5 3e-5"),
        (wsd(WsdShape::Cosine), "1e-5 6.8e-5 3e-4 3e-4 3e-4 3e-4 2.998715099e-4 1.884425040e-4 3e-5 3e-5"),
        (
            wsd(WsdShape::Exponential),
            "1e-5 6.8e-5 3e-4 3e-4 3e-4 3e-4 2.948263396e-4 1.568283129e-4 3e-5 3e-5",
        ),
        (wsd(WsdShape::MinusSqrt), "1e-5 6.8e-5 3e-4 3e-4 3e-4 3e-4 2.681801948e-4 1.2e-4 3e-5 3e-5"),
    ];
    for (lr_decay_style, row) in rows {
        let schedule = schedule(ScheduleConfig { lr_decay_style, ..config() });
        let cells: Vec<&str> = row.split(' ').collect();
        assert_eq!(cells.len(), samples.len());
        for (at, cell) in samples.into_iter().zip(cells) {
            assert_close(schedule.lr(at), cell, &format!("{lr_decay_style:?} after {at} samples"));
        }
    }
}

#[test]
fn weight_decay_is_that_of_megatrons_formulas() {
    let samples = [0, 8, 60, 120, 200, 240, 241];
    let rows = [
        (WeightDecayStyle::Linear, "1e-2 1.3e-2 3.25e-2 5.5e-2 8.5e-2 1e-1 1e-1"),
        (WeightDecayStyle::Cosine, "1e-2 1.024651471e-2 2.318019485e-2 5.5e-2 9.397114317e-2 1e-1 1e-1"),
    ];
    for (weight_decay_style, row) in rows {
        let schedule = schedule(ScheduleConfig { weight_decay_style, ..config() });
        for (at, cell) in samples.into_iter().zip(row.split(' ')) {
            assert_close(
                schedule.weight_decay(at),
                cell,
                &format!("{weight_decay_style:?} after {at} samples"),
            );
        }
    }
    let constant = ScheduleConfig {
        weight_decay_style: WeightDecayStyle::Constant,
        start_weight_decay: 0.1,
        ..config()
    };
    assert_eq!([0, 8, 999].map(|at| schedule(constant.clone()).weight_decay(at)), [0.1; 3]);
}

#[test]
fn the_same_length_in_iterations_and_in_samples_is_the_same_schedule() {
    let in_samples = ScheduleConfig {
        unit: ScheduleUnit::Samples,
        train: 240,
        lr_decay: 200,
        lr_warmup: Warmup::Length(40),
        ..config()
    };
    assert_eq!(schedule(in_samples), schedule(config()));
}

#[test]
fn a_warmup_may_be_a_fraction_of_a_sample() {
    let of = |fraction| {
        let lr_warmup = Warmup::Fraction(fraction);
        schedule(ScheduleConfig { lr_warmup, init_lr: 0.0, max_lr: 1.0, min_lr: 0.0, ..config() })
    };
    // 0.0125 · 200 samples = 2.5
    assert_eq!([0, 1, 2].map(|at| of(0.0125).lr(at)), [0.0, 0.4, 0.8]);
    assert_eq!(of(0.0).lr(0), 1.0);
}

#[test]
fn bits_do_not_depend_on_the_machine() {
    let bits = |at| format!("{:016x}", schedule(config()).lr(at).to_bits());
    expect!["3f33a8ba6c40c930 3f316d4a51b609ef 3f25a07b352a8437 3eff7c0c8e9bb080"]
        .assert_eq(&[41, 77, 120, 199].map(bits).join(" "));
}

#[test]
fn a_stored_schedule_comes_back_or_is_refused() {
    let stored = schedule(ScheduleConfig {
        lr_decay_style: LrDecayStyle::Wsd { length: 9, shape: WsdShape::MinusSqrt },
        ..config()
    });
    let text = serde_json::to_string(&stored).unwrap();
    expect![[r#"{"unit":"samples","train":240,"lr_decay":200,"lr_warmup":{"length":40},"lr_decay_style":{"wsd":{"length":72,"shape":"minus_sqrt"}},"init_lr":0.00001,"max_lr":0.0003,"min_lr":0.00003,"start_weight_decay":0.01,"end_weight_decay":0.1,"weight_decay_style":"linear"}"#]].assert_eq(&text);
    assert_eq!(serde_json::from_str::<Schedule>(&text).unwrap(), stored);
    for (found, replaced) in [
        ("\"samples\"", "\"iterations\""),
        ("\"lr_decay\":200", "\"lr_decay\":0"),
        ("\"length\":72", "\"length\":201"),
    ] {
        assert!(text.contains(found), "{text}");
        assert!(serde_json::from_str::<Schedule>(&text.replace(found, replaced)).is_err(), "{replaced}");
    }
}

#[test]
fn numbers_that_make_no_schedule_are_refused() {
    let refused = |config| Schedule::new(config, &batch(8)).unwrap_err().to_string();
    let lines = [
        refused(ScheduleConfig { train: 0, ..config() }),
        refused(ScheduleConfig { train: u64::MAX / 2, ..config() }),
        refused(ScheduleConfig { lr_warmup: Warmup::Length(25), ..config() }),
        refused(ScheduleConfig { lr_warmup: Warmup::Fraction(f64::NAN), ..config() }),
        refused(ScheduleConfig {
            lr_decay_style: LrDecayStyle::Wsd { length: 26, shape: WsdShape::Linear },
            ..config()
        }),
        refused(ScheduleConfig { min_lr: 1e-3, ..config() }),
        refused(ScheduleConfig { max_lr: f64::INFINITY, ..config() }),
        refused(ScheduleConfig { weight_decay_style: WeightDecayStyle::Constant, ..config() }),
        refused(ScheduleConfig { start_weight_decay: -0.1, ..config() }),
    ];
    expect![[r#"
        `train` is 0; a schedule has a length
        9223372036854775807 iterations of 8 samples are too many to count
        the warm-up of 200 samples does not end before the decay of 200 samples does
        the warm-up of NaN samples does not end before the decay of 200 samples does
        the last phase of 208 samples is longer than the decay of 200 samples
        learning rates must be 0 ≤ min 0.001 ≤ max 0.0003 and 0 ≤ init 0.00001 ≤ max 0.0003
        learning rates must be 0 ≤ min 0.00003 ≤ max inf and 0 ≤ init 0.00001 ≤ max inf
        weight decay must be 0 ≤ start 0.01 ≤ end 0.1, and both the same for a constant one
        weight decay must be 0 ≤ start -0.1 ≤ end 0.1, and both the same for a constant one"#]]
    .assert_eq(&lines.join("\n"));
}

/// Batch 8 until 160 samples are consumed, then 16; 100 iterations; linear decay to the minimum over all of them.
#[test]
fn a_rate_that_counts_iterations_gets_to_its_end_although_the_batch_grows() {
    let batch = BatchSchedule::steps(vec![BatchStep { from: 0, size: 8 }, BatchStep { from: 160, size: 16 }])
        .unwrap();
    let config = ScheduleConfig {
        unit: ScheduleUnit::Iterations,
        train: 100,
        lr_decay: 100,
        lr_warmup: Warmup::Length(20),
        lr_decay_style: LrDecayStyle::Linear,
        init_lr: 0.0,
        max_lr: 1.0,
        min_lr: 0.25,
        ..config()
    };
    let schedule = Schedule::new(config.clone(), &batch).unwrap();
    assert_eq!([19, 20, 21, 100].map(|steps| batch.samples_after(steps)), [152, 160, 176, 1440].map(Some));
    // The warm-up of 20 iterations ends after 160 samples, the decay of 100 after 1440 and not before.
    assert_eq!(schedule.lr(160), 1.0);
    assert_eq!(schedule.lr(80), 0.5);
    assert_eq!(schedule.lr(1440), 0.25);
    assert_eq!(schedule.lr(800), 0.25 + 0.5 * 0.75);
    // The last phase of 10 iterations is the last 160 samples.
    let style = LrDecayStyle::Wsd { length: 10, shape: WsdShape::Linear };
    let stable = Schedule::new(ScheduleConfig { lr_decay_style: style, ..config.clone() }, &batch).unwrap();
    assert_eq!([1279, 1280, 1360, 1440].map(|samples| stable.lr(samples)), [1.0, 1.0, 0.625, 0.25]);
    let style = LrDecayStyle::Wsd { length: 101, shape: WsdShape::Linear };
    assert!(Schedule::new(ScheduleConfig { lr_decay_style: style, ..config }, &batch).is_err());
}
