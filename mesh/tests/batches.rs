//! Batch sizes over a run: worked schedules, counts of steps and samples against a simulation, and refusals.

use expect_test::expect;
use mesh::{BatchError, BatchSchedule, BatchStep, MergedArgs, ParallelArgs, Ramp, Source};
use proptest::prelude::*;

fn steps(entries: &[(u64, u64)]) -> BatchSchedule {
    BatchSchedule::steps(entries.iter().map(|(from, size)| BatchStep { from: *from, size: *size }).collect())
        .unwrap()
}

#[test]
fn thresholds_in_tokens_become_samples() {
    let schedule = BatchSchedule::parse("0:768 250B:1536, 500b:3072", Some(4096)).unwrap();
    assert_eq!(schedule, steps(&[(0, 768), (61_035_156, 1536), (122_070_312, 3072)]));
    assert_eq!(schedule.size_at(61_035_155), 768);
    assert_eq!(schedule.size_at(61_035_156), 1536);
    assert_eq!(schedule.last_size(), 3072);
    // Without a sequence length they are samples; the order of the entries does not matter.
    assert_eq!(BatchSchedule::parse("1.5K:2k,0:16", None).unwrap(), steps(&[(0, 16), (1500, 2000)]));
    assert_eq!(BatchSchedule::parse("0:1 0.0015K:2", None).unwrap(), steps(&[(0, 1), (1, 2)]));
}

#[test]
fn a_ramp_climbs_in_levels_of_equal_length() {
    let ramp = |start, increment, samples, end| {
        BatchSchedule::ramp(Ramp { start, increment, samples, end }).unwrap()
    };
    let climbing = ramp(8, 4, 100, 20);
    // Three levels of 33⅓ samples.
    let sizes = [0, 33, 34, 66, 67, 99, 100, 1000].map(|consumed| climbing.size_at(consumed));
    assert_eq!(sizes, [8, 8, 12, 12, 16, 16, 20, 20]);
    assert_eq!(ramp(8, 0, 100, 8).size_at(50), 8);
    assert_eq!(ramp(8, 8, 0, 16).size_at(0), 16);
}

#[test]
fn what_may_be_less_is_rounded_down_to_whole_microbatches() {
    let decreased = |asked: &BatchSchedule| asked.decreased(2, 4).map(|schedule| schedule.to_string());
    let constant = |size| BatchSchedule::constant(size).unwrap();
    assert_eq!(decreased(&constant(30)), Ok("24".into()));
    assert_eq!(decreased(&constant(32)), Ok("32".into()));
    expect![
        "batch size 7 ÷ (micro batch size 2 × batch parallel size 4) is not exact, from 0 consumed samples on"
    ]
    .assert_eq(&decreased(&constant(7)).unwrap_err().to_string());
    // Levels of 8, 12, 16 and 20 samples: two of them come to the same.
    let ramp = BatchSchedule::ramp(Ramp { start: 8, increment: 4, samples: 90, end: 20 }).unwrap();
    let sizes = [0, 30, 60, 89, 90, 1000].map(|consumed| ramp.size_at(consumed));
    assert_eq!(sizes, [8, 12, 16, 16, 20, 20]);
    assert_eq!(decreased(&ramp), Ok("0:8 60:16".into()));
}

#[test]
fn numbers_that_make_no_batches_are_refused() {
    let ramp =
        |start, increment, end| BatchSchedule::ramp(Ramp { start, increment, samples: 10, end }).unwrap_err();
    let parse = |text| BatchSchedule::parse(text, Some(10)).unwrap_err();
    let mut refusals = vec![
        BatchSchedule::constant(0).unwrap_err(),
        ramp(8, 5, 20),
        ramp(8, 0, 20),
        ramp(8, 4, 4),
        ramp(0, 4, 4),
        parse("10:8"),
        // Two thresholds that are the same sample.
        parse("0:8 21:16 29:32"),
        parse("0:0"),
        parse(""),
        parse("0"),
        parse("0:8 x:9"),
        parse("0:-8"),
        parse("0:99999999999999999999T"),
    ];
    // A size that the ranks of a larger world do not divide is refused as soon as it is in force, and not before.
    let said = ParallelArgs {
        micro_batch_size: Some(2),
        global_batch_size: Some(16),
        seq_length: Some(8),
        ..ParallelArgs::default()
    };
    let config = MergedArgs::of(&[(Source::CommandLine, said)]).resolve(4, 0).unwrap();
    let growing = steps(&[(0, 4), (40, 8), (80, 12), (160, 16)]);
    refusals.push(growing.check(&config, 0, 200).unwrap_err());
    refusals.push(growing.check(&config, 48, 200).unwrap_err());
    assert_eq!(growing.check(&config, 40, 80), Ok(()));
    assert_eq!(growing.check(&config, 164, 200), Ok(()));
    let text = |error: &BatchError| format!("{} {error}; {}", error.code(), error.help());
    expect![[r#"
        RM2002 a step of 0 samples; give every batch size a value of at least 1
        RM2002 a ramp from 8 to 20 samples in steps of 5 is not exact; the end, which is --global-batch-size, is the start and a number of increments: 18 would fit
        RM2002 a ramp from 8 to 20 samples in steps of 0 is not exact; the end, which is --global-batch-size, is the start and a number of increments: 8 would fit
        RM2002 a ramp from 8 to 4 samples in steps of 4 is not exact; the end, which is --global-batch-size, is the start and a number of increments: 8 would fit
        RM2002 a step of 0 samples; give every batch size a value of at least 1
        RM2002 entry 0 holds from 1 samples on; the first holds from 0, each later one from more than the one before; give entries such as `0:768 250B:1536`
        RM2002 entry 2 holds from 2 samples on; the first holds from 0, each later one from more than the one before; give entries such as `0:768 250B:1536`
        RM2002 a step of 0 samples; give every batch size a value of at least 1
        RM2002 a step of 0 samples; give every batch size a value of at least 1
        RM2002 `0` is no entry THRESHOLD:BATCH; numbers may end with K, M, B or T; give entries such as `0:768 250B:1536`
        RM2002 `x:9` is no entry THRESHOLD:BATCH; numbers may end with K, M, B or T; give entries such as `0:768 250B:1536`
        RM2002 `0:-8` is no entry THRESHOLD:BATCH; numbers may end with K, M, B or T; give entries such as `0:768 250B:1536`
        RM2002 `0:99999999999999999999T` is no entry THRESHOLD:BATCH; numbers may end with K, M, B or T; give entries such as `0:768 250B:1536`
        RM2002 batch size 4 ÷ (micro batch size 2 × batch parallel size 4) is not exact, from 0 consumed samples on; every size from there on is a multiple of 8
        RM2002 batch size 12 ÷ (micro batch size 2 × batch parallel size 4) is not exact, from 80 consumed samples on; every size from there on is a multiple of 8"#]].assert_eq(&refusals.iter().map(text).collect::<Vec<_>>().join("\n"));
}

#[test]
fn a_stored_schedule_comes_back() {
    for schedule in [
        BatchSchedule::constant(8).unwrap(),
        BatchSchedule::ramp(Ramp { start: 8, increment: 4, samples: 80, end: 16 }).unwrap(),
        steps(&[(0, 8), (160, 16)]),
    ] {
        let text = serde_json::to_string(&schedule).unwrap();
        assert_eq!(serde_json::from_str::<BatchSchedule>(&text).unwrap(), schedule);
    }
    assert!(serde_json::from_str::<BatchSchedule>(r#"{"constant":0}"#).is_err());
}

fn any_schedule() -> impl Strategy<Value = BatchSchedule> {
    let ramp = (1..20u64, 1..5u64, 0..6u64, 0..200u64).prop_map(|(start, increment, levels, samples)| {
        BatchSchedule::ramp(Ramp { start, increment, samples, end: start + levels * increment }).unwrap()
    });
    let entries = prop::collection::btree_map(1..300u64, 1..20u64, 0..5);
    let steps = (1..20u64, entries).prop_map(|(first, later)| {
        let later = later.into_iter().map(|(from, size)| BatchStep { from, size });
        BatchSchedule::steps([BatchStep { from: 0, size: first }].into_iter().chain(later).collect()).unwrap()
    });
    prop_oneof![ramp, steps]
}

proptest! {
    /// Samples after so many steps, and whole steps within so many samples, are what making the steps one by one gives.
    #[test]
    fn counting_is_making_steps_one_by_one(schedule in any_schedule()) {
        let mut consumed = 0;
        for step in 0..200u64 {
            prop_assert_eq!(schedule.samples_after(step), Some(consumed));
            prop_assert_eq!(schedule.steps_within(consumed), step);
            let next = consumed + schedule.size_at(consumed);
            prop_assert_eq!(schedule.steps_within(next - 1), step);
            consumed = next;
        }
    }
}
