//! Resolving arguments: precedence, worked layouts, refusals with their ways out, and idempotence.

use expect_test::{Expect, expect};
use mesh::{ExpertSizes, MergedArgs, ParallelArgs, ParallelConfig, ParallelError, RankOrder, Source};
use proptest::prelude::*;

/// What is said most in these tests; the batch and the sequence fit every layout below.
fn args(
    tp: u32,
    sp: bool,
    cp: u32,
    weight_shards: Option<u32>,
    sequence_shards: Option<u32>,
) -> ParallelArgs {
    ParallelArgs {
        tensor_model_parallel_size: Some(tp),
        context_parallel_size: Some(cp),
        sequence_parallel: Some(sp),
        tensor_parallel_num_weight_shards: weight_shards,
        tensor_parallel_num_sequence_shards: sequence_shards,
        micro_batch_size: Some(1),
        seq_length: Some(768),
        ..ParallelArgs::default()
    }
}

fn said(args: ParallelArgs) -> MergedArgs {
    MergedArgs::of(&[(Source::CommandLine, args)])
}

fn sequence_shards(shards: Option<u32>) -> ParallelArgs {
    ParallelArgs { tensor_parallel_num_sequence_shards: shards, ..ParallelArgs::default() }
}

#[test]
fn program_defaults_are_merged_before_anything_is_derived() {
    // explicit, program default → sequence shards, sequence shards inside GTP, runtime CP, DP, batch parallel size
    let cases = [
        (None, Some(2), [2, 2, 2, 4, 4]),
        (Some(1), Some(2), [1, 1, 1, 4, 8]),
        (None, None, [1, 1, 1, 4, 8]),
    ];
    for (explicit, default, expected) in cases {
        for source in [Source::CommandLine, Source::ConfigFile] {
            let merged = MergedArgs::of(&[
                (Source::ProgramDefault, sequence_shards(default)),
                (source, ParallelArgs { ..args(1, false, 1, Some(2), explicit) }),
            ]);
            let config = merged.resolve(8, 0).unwrap();
            let layout = config.layout();
            let found = [
                config.sequence_shards(),
                layout.gtp_sequence_shards(),
                layout.runtime_cp().0,
                layout.dp(),
                layout.batch_parallel_size(),
            ];
            assert_eq!(
                found, expected,
                "explicit {explicit:?} from the {source}, program default {default:?}"
            );
        }
    }
}

#[test]
fn the_strongest_source_wins_whatever_the_order_of_the_layers() {
    let of = |source, shards| (source, sequence_shards(Some(shards)));
    let mut layers = vec![
        of(Source::ProgramDefault, 16),
        of(Source::ConfigFile, 4),
        of(Source::CommandLine, 2),
        of(Source::Checkpoint, 8),
    ];
    for (source, shards) in [
        (Source::CommandLine, 2),
        (Source::ConfigFile, 4),
        (Source::Checkpoint, 8),
        (Source::ProgramDefault, 16),
    ] {
        let merged = MergedArgs::of(&layers);
        assert_eq!(merged.args().tensor_parallel_num_sequence_shards, Some(shards));
        assert_eq!(merged.source("tensor_parallel_num_sequence_shards"), Some(source));
        layers.retain(|(other, _)| *other != source);
    }
}

#[test]
fn worked_resolutions() {
    // The columns: world TP SP PP CP weight-shards sequence-shards → W SP-degree nseq nbatch DP runtime-CP
    // batch-parallel replicas
    let rows = "
        A1    1 1 off 1 1  -  -     1 1  1  1 1   1   1 1
        A2    2 2 off 1 1  -  -     1 1  1  1 1   1   1 1
        A3    2 1 off 1 1  2  -     2 1  1  2 1   1   2 1
        A4    2 1 off 1 1  2  2     2 1  2  1 1   2   1 1
        A5    4 2 on  1 1  4  4     2 2  2  1 1   2   1 1
        A6    4 1 off 1 2  2  2     2 1  2  1 1   4   1 2
        A7    8 1 off 1 1  2  -     2 1  1  2 4   1   8 4
        A8    8 1 off 1 1  2  2     2 1  2  1 4   2   4 4
        A9    8 2 on  1 2  4  4     2 2  2  1 1   4   1 2
        A10   8 2 on  1 2  4  -     2 2  1  2 1   2   2 2
        A11   8 2 off 1 1  8  -     4 1  1  4 1   1   4 1
        A12   8 1 off 1 2  4  2     4 1  2  2 1   4   2 2
        A13  16 2 on  2 1  8  4     4 2  2  2 1   2   2 1
        A14  24 1 off 1 3  4  2     4 1  2  2 2   6   4 6
        A15  32 2 on  2 2  8  4     4 2  2  2 1   4   2 2
        A16  64 2 on  1 1 64 16    32 2  8  4 1   8   4 1
        A17  64 2 on  2 2 16  8     8 2  4  2 1   8   2 2
        A18 128 1 off 1 2 64 64    64 1 64  1 1 128   1 2
        A19 128 2 on  1 2 64 64    32 2 32  1 1  64   1 2
        A20 128 2 on  1 2 64 16    32 2  8  4 1  16   4 2
        A21 128 1 off 1 1 64  -    64 1  1 64 2   1 128 2";
    let mut num_rows = 0;
    for row in rows.lines().skip(1) {
        let cells: Vec<&str> = row.split_whitespace().collect();
        let number = |at: usize| cells[at].parse::<u32>().unwrap();
        let optional = |at: usize| cells[at].parse::<u32>().ok();
        let config = said(ParallelArgs {
            pipeline_model_parallel_size: Some(number(4)),
            ..args(number(2), cells[3] == "on", number(5), optional(6), optional(7))
        })
        .resolve(number(1), 0)
        .unwrap();
        let layout = config.layout();
        let found = [
            layout.gtp(),
            config.sp_degree(),
            layout.gtp_sequence_shards(),
            layout.gtp_batch_shards(),
            layout.dp(),
            layout.runtime_cp().0,
            layout.batch_parallel_size(),
            layout.num_weight_replicas(),
        ];
        let expected: Vec<u32> = (8..16).map(number).collect();
        assert_eq!(found, expected.as_slice(), "{}", cells[0]);
        assert_eq!(config.global_batch_size(), u64::from(layout.batch_parallel_size()), "{}", cells[0]);
        num_rows += 1;
    }
    assert_eq!(num_rows, 21);
}

fn refused(args: ParallelArgs, world_size: u32, code: &str, expected: Expect) -> ParallelError {
    let error = said(args).resolve(world_size, 0).unwrap_err();
    assert_eq!(error.code(), code, "{error}");
    expected.assert_eq(&format!("{error}\nhelp: {}", error.help()));
    error
}

#[test]
fn shards_that_do_not_divide_are_refused_with_those_that_do() {
    refused(
        args(2, false, 1, Some(1), None),
        8,
        "RM2001",
        expect![[r#"
        weight shards 1 ÷ TP 2 is not exact
        help: `--tensor-parallel-num-weight-shards` is a multiple of TP 2; here 2, 4 or 8 would fit"#]],
    );
    refused(
        args(2, false, 1, Some(5), None),
        8,
        "RM2001",
        expect![[r#"
        weight shards 5 ÷ TP 2 is not exact
        help: `--tensor-parallel-num-weight-shards` is a multiple of TP 2; here 2, 4 or 8 would fit"#]],
    );
    refused(
        args(2, false, 3, Some(5), None),
        8,
        "RM2001",
        expect![[r#"
        weight shards 5 ÷ TP 2 is not exact
        help: `--tensor-parallel-num-weight-shards` is a multiple of TP 2"#]],
    );
    refused(
        args(2, true, 1, Some(4), Some(1)),
        8,
        "RM2001",
        expect![[r#"
        sequence shards 1 ÷ SP degree 2 is not exact
        help: `--tensor-parallel-num-sequence-shards` is a multiple of the SP degree 2; here 2 or 4 would fit"#]],
    );
    refused(
        args(2, true, 1, Some(4), Some(3)),
        8,
        "RM2001",
        expect![[r#"
        sequence shards 3 ÷ SP degree 2 is not exact
        help: `--tensor-parallel-num-sequence-shards` is a multiple of the SP degree 2; here 2 or 4 would fit"#]],
    );
    refused(
        args(1, false, 1, Some(4), Some(3)),
        8,
        "RM2001",
        expect![[r#"
        GTP degree 4 cannot be cut into 3 sequence shards: 4 % 3 != 0
        help: 1, 2 or 4 sequence shards inside GTP 4 would fit; more pieces of a sequence than that come from CP"#]],
    );
    refused(
        args(1, false, 1, None, Some(2)),
        8,
        "RM2001",
        expect![[r#"
        GTP degree 1 cannot be cut into 2 sequence shards: 1 % 2 != 0
        help: there are no weight shards beyond TP to cut a sequence by: give as many as sequence shards, such as `--weight-shards 2 --seq-shards 2` with TP 1, or let TP cut it: `--sequence-parallel`"#]],
    );
    refused(
        args(1, false, 1, Some(4), Some(8)),
        8,
        "RM2001",
        expect![[r#"
        GTP degree 4 cannot be cut into 8 sequence shards: 4 % 8 != 0
        help: 1, 2 or 4 sequence shards inside GTP 4 would fit; more pieces of a sequence than that come from CP"#]],
    );
}

#[test]
fn a_world_that_does_not_divide_is_refused_with_the_degrees_that_fit() {
    refused(
        args(1, false, 3, Some(2), None),
        8,
        "RM2001",
        expect![[r#"
        world size 8 is not a multiple of TP 1 × PP 1 × CP 3 × GTP 2 = 6
        help: with the other sizes as they are, one of these would fit: a world size that is a multiple of 6; CP 1, 2 or 4"#]],
    );
    refused(
        args(1, false, 1, Some(6), None),
        8,
        "RM2001",
        expect![[r#"
        world size 8 is not a multiple of TP 1 × PP 1 × CP 1 × GTP 6 = 6
        help: with the other sizes as they are, one of these would fit: a world size that is a multiple of 6; GTP 1, 2, 4 or 8"#]],
    );
    refused(
        ParallelArgs { data_parallel_size: Some(3), ..args(2, false, 1, None, None) },
        8,
        "RM2001",
        expect![[r#"
            DP 3 was asked for, but world size 8 ÷ 2 ranks of a model copy leaves DP 4
            help: leave `--data-parallel-size` out or give 4, or run on 6 ranks"#]],
    );
    refused(
        args(1, false, 1, None, None),
        0,
        "RM2001",
        expect![[r#"
            world size is 0; every degree is at least 1
            help: give a world size of at least 1, or leave it out"#]],
    );
    refused(
        args(1, false, 1, None, None),
        u32::MAX,
        "RM2001",
        expect![[r#"
        4294967295 ranks from rank 0 on are more than the 16777216 that a job can have
        help: give the number of ranks that the job has"#]],
    );
}

#[test]
fn zero_is_no_size() {
    let some = || args(1, false, 1, None, None);
    refused(
        args(0, false, 1, None, None),
        8,
        "RM2001",
        expect![[r#"
            TP is 0; every degree is at least 1
            help: give a TP of at least 1, or leave it out"#]],
    );
    refused(
        args(1, false, 0, None, None),
        8,
        "RM2001",
        expect![[r#"
            CP is 0; every degree is at least 1
            help: give a CP of at least 1, or leave it out"#]],
    );
    refused(
        ParallelArgs { pipeline_model_parallel_size: Some(0), ..some() },
        8,
        "RM2001",
        expect![[r#"
            PP is 0; every degree is at least 1
            help: give a PP of at least 1, or leave it out"#]],
    );
    refused(
        args(1, false, 1, Some(0), None),
        8,
        "RM2001",
        expect![[r#"
        `--tensor-parallel-num-weight-shards` is 0
        help: give `--tensor-parallel-num-weight-shards` a value of at least 1"#]],
    );
    refused(
        args(1, false, 1, None, Some(0)),
        8,
        "RM2001",
        expect![[r#"
        `--tensor-parallel-num-sequence-shards` is 0
        help: give `--tensor-parallel-num-sequence-shards` a value of at least 1"#]],
    );
    refused(
        ParallelArgs { data_parallel_size: Some(0), ..some() },
        8,
        "RM2001",
        expect![[r#"
            DP is 0; every degree is at least 1
            help: give a DP of at least 1, or leave it out"#]],
    );
    refused(
        ParallelArgs { micro_batch_size: Some(0), ..some() },
        8,
        "RM2002",
        expect![[r#"
        `--micro-batch-size` is 0
        help: give `--micro-batch-size` a value of at least 1"#]],
    );
    refused(
        ParallelArgs { global_batch_size: Some(0), ..some() },
        8,
        "RM2002",
        expect![[r#"
        `--global-batch-size` is 0
        help: give `--global-batch-size` a value of at least 1"#]],
    );
    refused(
        ParallelArgs { seq_length: Some(0), ..some() },
        8,
        "RM2004",
        expect![[r#"
        `--seq-length` is 0
        help: give `--seq-length` a value of at least 1"#]],
    );
}

#[test]
fn sequence_shards_over_tp_need_sequence_parallelism() {
    refused(
        args(2, false, 1, Some(8), Some(2)),
        8,
        "RM2005",
        expect![[r#"
        2 sequence shards inside GTP with TP 2 need sequence parallelism, which is off
        help: add `--sequence-parallel --tensor-parallel-num-sequence-shards 4`, or leave the sequence shards out"#]],
    );
}

#[test]
fn the_older_rank_order_takes_no_sequence_shards() {
    let older = |shards| ParallelArgs {
        rank_order: Some(RankOrder::CpInsideGtp),
        ..args(1, false, 2, Some(2), Some(shards))
    };
    assert!(said(older(1)).resolve(8, 0).is_ok());
    refused(
        older(2),
        8,
        "RM2006",
        expect![[r#"
        rank order cp-inside-gtp has no place for 2 sequence shards inside GTP
        help: leave `--rank-order` at gtp-inside-cp, or the sequence shards at the SP degree"#]],
    );
}

#[test]
fn a_sequence_is_cut_evenly_or_refused() {
    let of = |seq_length, tp, sp, cp| ParallelArgs {
        seq_length: Some(seq_length),
        ..args(tp, sp, cp, None, None)
    };
    // Without CP and SP any length will do.
    for (seq_length, tp, sp, cp) in [(31, 2, false, 1), (16, 1, false, 8), (6, 3, true, 1), (6, 2, true, 3)] {
        assert!(said(of(seq_length, tp, sp, cp)).resolve(tp * cp, 0).is_ok());
    }
    refused(
        of(24, 1, false, 8),
        8,
        "RM2004",
        expect![[r#"
            sequence length 24 is not a multiple of 16, as runtime CP 8 and SP degree 1 need
            help: `--seq-length` 16 or 32 would fit"#]],
    );
    refused(
        of(31, 2, true, 1),
        8,
        "RM2004",
        expect![[r#"
            sequence length 31 is not a multiple of 2, as runtime CP 1 and SP degree 2 need
            help: `--seq-length` 30 or 32 would fit"#]],
    );
    refused(
        of(18, 3, true, 2),
        6,
        "RM2004",
        expect![[r#"
        sequence length 18 is not a multiple of 12, as runtime CP 2 and SP degree 3 need
        help: `--seq-length` 12 or 24 would fit"#]],
    );
}

#[test]
fn a_step_is_a_whole_number_of_microbatches_or_refused() {
    let of = |micro, global| ParallelArgs {
        micro_batch_size: Some(micro),
        global_batch_size: Some(global),
        ..args(1, false, 1, Some(2), Some(2))
    };
    assert_eq!(said(of(2, 24)).resolve(8, 0).unwrap().num_microbatches(), 3);
    refused(
        of(2, 10),
        8,
        "RM2002",
        expect![[r#"
        global batch size 10 ÷ (micro batch size 2 × batch parallel size 4) is not exact
        help: `--global-batch-size` 8 or 16 would fit; `--decrease-batch-size-if-needed` lets a step take fewer"#]],
    );
    refused(
        of(2, 4),
        8,
        "RM2002",
        expect![[r#"
        global batch size 4 ÷ (micro batch size 2 × batch parallel size 4) is not exact
        help: `--global-batch-size` 8 would fit"#]],
    );
}

#[test]
fn what_has_no_default_must_be_said_but_not_for_a_layout_alone() {
    let unsaid = ParallelArgs { micro_batch_size: None, ..args(2, false, 1, None, None) };
    assert_eq!(said(unsaid.clone()).resolve_layout(8, 0).unwrap().dp(), 4);
    refused(
        unsaid,
        8,
        "RM2007",
        expect![[r#"
        `--micro-batch-size` is not set
        help: give `--micro-batch-size`, or `micro_batch_size` in the configuration file"#]],
    );
    refused(
        ParallelArgs { seq_length: None, ..args(2, false, 1, None, None) },
        8,
        "RM2007",
        expect![[r#"
        `--seq-length` is not set
        help: give `--seq-length`, or `seq_length` in the configuration file"#]],
    );
}

#[test]
fn every_number_tells_where_it_comes_from() {
    let merged = MergedArgs::of(&[
        (
            Source::CommandLine,
            ParallelArgs { global_batch_size: Some(16), ..args(2, true, 1, Some(16), None) },
        ),
        (Source::ConfigFile, ParallelArgs { context_parallel_size: Some(4), ..ParallelArgs::default() }),
        (Source::ProgramDefault, sequence_shards(Some(4))),
    ]);
    let config = merged.resolve(16, 0).unwrap();
    let lines: Vec<String> = merged.explain(&config).iter().map(ToString::to_string).collect();
    expect![[r#"
        tensor-model-parallel-size 2 (command line)
        pipeline-model-parallel-size 1 (built-in default)
        context-parallel-size 1 (command line)
        sequence-parallel on (command line)
        tensor-parallel-num-weight-shards 16 (command line)
        tensor-parallel-num-sequence-shards 4 (program default)
        data-parallel-size 1 = world size 16 ÷ (TP 2 × PP 1 × CP 1 × GTP 8)
        rank-order gtp-inside-cp (built-in default)
        seq-length 768 (command line)
        micro-batch-size 1 (command line)
        global-batch-size 16 (command line)
        GTP degree 8 = weight shards 16 ÷ TP 2
        SP degree 2 = TP 2
        GTP sequence shards 2 = sequence shards 4 ÷ SP degree 2
        GTP batch shards 4 = GTP degree 8 ÷ 2 GTP sequence shards
        runtime CP 2 = configured CP 1 × 2 GTP sequence shards
        batch parallel size 4 = DP 1 × 4 GTP batch shards
        weight replicas 1 = configured CP 1 × DP 1
        microbatches 4 = global batch size 16 ÷ (micro batch size 1 × batch parallel size 4)"#]]
    .assert_eq(&lines.join("\n"));
}

#[test]
fn sequence_parallelism_is_dropped_without_tp_and_says_so() {
    let merged = said(args(1, true, 1, None, None));
    let config = merged.resolve(1, 0).unwrap();
    assert!(!config.sequence_parallel());
    let explained = merged.explain(&config);
    let line = explained.iter().find(|explained| explained.name == "sequence-parallel").unwrap();
    expect!["sequence-parallel off (asked for by the command line, dropped because TP is 1)"]
        .assert_eq(&line.to_string());
}

#[test]
fn experts_are_cut_as_dense_weights_unless_something_is_said() {
    let dense = said(args(2, false, 1, None, None)).resolve(8, 0).unwrap();
    assert_eq!(dense.layout().experts(), ExpertSizes { etp: 2, ep: 1, egtp: 1 });
    assert_eq!(dense.layout().edp(), 4);
    let program = ParallelArgs { expert_model_parallel_size: Some(4), ..ParallelArgs::default() };
    let file = ParallelArgs { expert_tensor_parallel_size: Some(1), ..ParallelArgs::default() };
    let flags =
        ParallelArgs { expert_tensor_parallel_num_weight_shards: Some(2), ..args(2, false, 1, None, None) };
    let layers =
        [(Source::ProgramDefault, program), (Source::ConfigFile, file), (Source::CommandLine, flags)];
    let merged = MergedArgs::of(&layers);
    let config = merged.resolve(8, 0).unwrap();
    let text: Vec<String> = merged
        .explain(&config)
        .iter()
        .map(ToString::to_string)
        .filter(|line| line.contains("xpert"))
        .collect();
    expect![[r#"
        expert-model-parallel-size 4 (program default)
        expert-tensor-parallel-size 1 (configuration file)
        expert-tensor-parallel-num-weight-shards 2 (command line)
        EGTP degree 2 = expert weight shards 2 ÷ ETP 1
        expert replicas 1 = world size 8 ÷ (ETP 1 × EP 4 × EGTP 2 × PP 1)"#]]
    .assert_eq(&text.join("\n"));
    let stored: ParallelConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(stored, config);
    assert_eq!(said(ParallelArgs::from(&stored)).resolve(8, 0).unwrap(), config);
    expect!["TP 2 · GTP 1 · CP 1 · DP 4 · experts: ETP 1 · EP 4 · EGTP 2 · EDP 1 · world 8"]
        .assert_eq(&config.layout().to_string());
}

#[test]
fn an_expert_grid_that_does_not_fit_is_refused() {
    let one = || args(1, false, 1, None, None);
    refused(
        ParallelArgs { expert_model_parallel_size: Some(3), ..one() },
        8,
        "RM2001",
        expect![[r#"
            world size 8 is not a multiple of ETP 1 × EP 3 × EGTP 1 × PP 1 = 3
            help: with the other sizes as they are, one of these would fit: a world size that is a multiple of 3; EP 1, 2, 4 or 8"#]],
    );
    refused(
        ParallelArgs {
            expert_tensor_parallel_size: Some(2),
            expert_tensor_parallel_num_weight_shards: Some(3),
            ..one()
        },
        8,
        "RM2001",
        expect![[r#"
            weight shards 3 ÷ ETP 2 is not exact
            help: `--expert-tensor-parallel-num-weight-shards` is a multiple of ETP 2; here 2, 4 or 8 would fit"#]],
    );
    refused(
        ParallelArgs { expert_tensor_parallel_size: Some(0), ..one() },
        8,
        "RM2001",
        expect![[r#"
            ETP is 0; every degree is at least 1
            help: give an ETP of at least 1, or leave it out"#]],
    );
    refused(
        ParallelArgs { num_distributed_optimizer_instances: Some(2), ..args(1, false, 1, Some(2), None) },
        8,
        "RM2008",
        expect![[r#"
            2 distributed optimizer instances with GTP 2 and EGTP 1: one at most
            help: leave out `--num-distributed-optimizer-instances`, or the weight shards beyond TP"#]],
    );
    refused(
        ParallelArgs { num_distributed_optimizer_instances: Some(0), ..one() },
        8,
        "RM2001",
        expect![[r#"
            0 distributed optimizer instances do not divide the 8 weight replicas and the 8 of experts
            help: `--num-distributed-optimizer-instances` 1, 2, 4 or 8 would fit"#]],
    );
    refused(
        ParallelArgs {
            hierarchical_context_parallel_sizes: Some(vec![2, 3]),
            ..args(1, false, 4, None, None)
        },
        8,
        "RM2001",
        expect![[r#"
            hierarchical context parallel sizes 2 × 3 make 6, not runtime CP 4
            help: give `--hierarchical-context-parallel-sizes` whose product is 4, the innermost first, or leave them out"#]],
    );
}

#[test]
fn an_unknown_key_of_a_file_is_refused() {
    let error = serde_json::from_str::<ParallelArgs>(r#"{"context_parallel_sizes": 4}"#).unwrap_err();
    assert!(
        error.to_string().starts_with("unknown field `context_parallel_sizes`, expected one of"),
        "{error}"
    );
}

#[test]
fn a_stored_configuration_that_contradicts_itself_is_not_read() {
    let config = said(args(2, true, 1, Some(4), Some(4))).resolve(4, 0).unwrap();
    let text = serde_json::to_string(&config).unwrap();
    assert_eq!(serde_json::from_str::<ParallelConfig>(&text).unwrap(), config);
    for (found, replaced) in [
        ("\"sequence_parallel\":true", "\"sequence_parallel\":false"),
        ("\"seq_length\":768", "\"seq_length\":767"),
        ("\"global_batch_size\":1", "\"global_batch_size\":0"),
        ("\"world_size\":4", "\"world_size\":5"),
    ] {
        assert!(text.contains(found), "{text}");
        assert!(
            serde_json::from_str::<ParallelConfig>(&text.replace(found, replaced)).is_err(),
            "{replaced}"
        );
    }
}

fn degree() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![1u32, 1, 2, 3, 4])
}

proptest! {
    /// Arguments made from a configuration win over any default and give the same configuration, also after a save.
    #[test]
    fn resolving_again_changes_nothing(
        (tp, pp, cp, inside, batch) in (degree(), degree(), degree(), degree(), degree()),
        (dp, micro, microbatches) in (degree(), 1..4u32, 1..4u64),
        sp in any::<bool>(),
        offset in 0..9u32,
    ) {
        let sp_degree = if sp { tp } else { 1 };
        let gtp = inside * batch;
        let explicit = ParallelArgs {
            pipeline_model_parallel_size: Some(pp),
            seq_length: Some(2 * u64::from(cp * inside * tp) * 5),
            micro_batch_size: Some(micro),
            global_batch_size: Some(microbatches * u64::from(micro * dp * batch)),
            ..args(tp, sp, cp, Some(tp * gtp), Some(sp_degree * inside))
        };
        let world_size = tp * pp * cp * gtp * dp;
        let resolved = said(explicit).resolve(world_size, offset);
        if inside > 1 && tp > 1 && !sp {
            let missing = matches!(resolved, Err(ParallelError::NeedsSequenceParallel { .. }));
            prop_assert!(missing, "{resolved:?}");
            return Ok(());
        }
        let config = resolved.unwrap();
        prop_assert_eq!(config.num_microbatches(), microbatches);
        prop_assert_eq!(config.layout().runtime_cp().0, cp * inside);
        let stored: ParallelConfig = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        let rebuilt = MergedArgs::of(&[
            (Source::ProgramDefault, ParallelArgs { global_batch_size: Some(7), ..args(5, true, 5, Some(5), Some(5)) }),
            (Source::Checkpoint, ParallelArgs::from(&stored)),
        ]);
        prop_assert_eq!(rebuilt.resolve(world_size, offset).unwrap(), config);
    }
}
