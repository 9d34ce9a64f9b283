//! `ParallelArgs` as flags of a command line.

use clap::{CommandFactory, Parser};
use mesh::{ParallelArgs, RankOrder};

/// A command that takes a layout.
#[derive(Parser)]
struct Command {
    #[command(flatten)]
    parallel: ParallelArgs,
}

fn parse(line: &str) -> Result<ParallelArgs, clap::Error> {
    Command::try_parse_from(["remesh"].into_iter().chain(line.split_whitespace()))
        .map(|command| command.parallel)
}

#[test]
fn the_definition_is_sound() {
    Command::command().debug_assert();
}

#[test]
fn no_flag_says_nothing() {
    assert_eq!(parse("").unwrap(), ParallelArgs::default());
}

#[test]
fn each_flag_has_megatrons_name_and_a_short_one() {
    let said = ParallelArgs {
        tensor_model_parallel_size: Some(2),
        pipeline_model_parallel_size: Some(3),
        context_parallel_size: Some(4),
        sequence_parallel: Some(true),
        tensor_parallel_num_weight_shards: Some(8),
        tensor_parallel_num_sequence_shards: Some(6),
        data_parallel_size: Some(5),
        expert_model_parallel_size: Some(2),
        expert_tensor_parallel_size: Some(3),
        expert_tensor_parallel_num_weight_shards: Some(9),
        num_distributed_optimizer_instances: Some(4),
        hierarchical_context_parallel_sizes: Some(vec![2, 4]),
        rank_order: Some(RankOrder::CpInsideGtp),
        micro_batch_size: Some(7),
        global_batch_size: Some(70),
        seq_length: Some(4096),
    };
    let long = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --context-parallel-size 4 \
                --sequence-parallel --tensor-parallel-num-weight-shards 8 --tensor-parallel-num-sequence-shards 6 \
                --data-parallel-size 5 --expert-model-parallel-size 2 --expert-tensor-parallel-size 3 \
                --expert-tensor-parallel-num-weight-shards 9 --num-distributed-optimizer-instances 4 \
                --hierarchical-context-parallel-sizes 2 4 --rank-order cp-inside-gtp --micro-batch-size 7 \
                --global-batch-size 70 --seq-length 4096";
    let short = "--tp 2 --pp 3 --cp 4 --sp --weight-shards 8 --seq-shards 6 --dp 5 --ep 2 --etp 3 --expert-weight-shards 9 \
                 --num-distributed-optimizer-instances 4 --hierarchical-context-parallel-sizes 2,4 \
                 --rank-order cp-inside-gtp --mbs 7 --gbs 70 --seq-length 4096";
    assert_eq!(parse(long).unwrap(), said);
    assert_eq!(parse(short).unwrap(), said);
}

#[test]
fn opposite_words_on_sequence_parallelism_are_refused_with_both() {
    assert_eq!(parse("--no-sequence-parallel").unwrap().sequence_parallel, Some(false));
    assert_eq!(parse("--sp").unwrap().sequence_parallel, Some(true));
    for line in ["--sp --no-sequence-parallel", "--no-sequence-parallel --sp"] {
        let said = parse(line).unwrap_err().to_string();
        assert!(said.contains("--sequence-parallel") && said.contains("--no-sequence-parallel"), "{said}");
    }
    assert!(parse("--sequence-parallel off").is_err());
}

#[test]
fn help_tells_unit_default_and_rule_of_each_flag() {
    let mut command = Command::command().term_width(200);
    expect_test::expect![[r#"
        A command that takes a layout

        Usage: mesh [OPTIONS]

        Options:
              --tensor-model-parallel-size <RANKS>                 Ranks that split each weight matrix before GTP [default: 1; TP × PP × CP × GTP must divide the world size] [alias: --tp]
              --pipeline-model-parallel-size <STAGES>              Pipeline stages [default: 1; TP × PP × CP × GTP must divide the world size] [alias: --pp]
              --context-parallel-size <RANKS>                      Weight replicas that share each sequence, before the sequence shards inside GTP [default: 1; 2 × runtime CP must divide the sequence length]
                                                                   [alias: --cp]
              --sequence-parallel                                  Split the sequence over the TP ranks outside the matrix products [default: off; off if TP is 1; runtime CP × TP must divide the sequence
                                                                   length] [alias: --sp]
              --tensor-parallel-num-weight-shards <SHARDS>         Weight shards, TP × GTP [default: TP; a multiple of TP] [alias: --weight-shards]
              --tensor-parallel-num-sequence-shards <SHARDS>       Sequence shards, SP degree × shards inside GTP [default: the SP degree, which is TP with sequence parallelism and else 1; a multiple of it,
                                                                   and sequence shards ÷ SP degree must divide GTP] [alias: --seq-shards]
              --data-parallel-size <RANKS>                         Ranks left for data parallelism, to check [default: world size ÷ (TP × PP × CP × GTP)] [alias: --dp]
              --expert-model-parallel-size <RANKS>                 Ranks that the experts are distributed over [default: 1; ETP × EP × EGTP × PP must divide the world size] [alias: --ep]
              --expert-tensor-parallel-size <RANKS>                Ranks that split each weight matrix of an expert [default: TP; ETP × EP × EGTP × PP must divide the world size] [alias: --etp]
              --expert-tensor-parallel-num-weight-shards <SHARDS>  Weight shards of an expert, ETP × EGTP [default: ETP; a multiple of ETP] [alias: --expert-weight-shards]
              --num-distributed-optimizer-instances <INSTANCES>    Parts of the weight replicas that each hold the whole optimizer state [default: 1; divides the weight replicas and those of experts; 1 with
                                                                   weight shards beyond TP or ETP]
              --hierarchical-context-parallel-sizes <RANKS>...     Sizes of the levels inside runtime CP, the innermost first [default: one level; their product is runtime CP]
              --rank-order <ORDER>                                 Order of the dense axes among the ranks [default: gtp-inside-cp; the older cp-inside-gtp only without sequence shards inside GTP] [possible
                                                                   values: gtp-inside-cp, cp-inside-gtp]
              --micro-batch-size <SAMPLES>                         Samples that a rank runs at a time [required, no default] [alias: --mbs]
              --global-batch-size <SAMPLES>                        Samples of an optimizer step [default: micro batch size × batch parallel size; a multiple of it] [alias: --gbs]
              --seq-length <TOKENS>                                Tokens of a sample [required, no default; a multiple of 2 × runtime CP if that is above 1, and of runtime CP × SP degree]
              --no-sequence-parallel                               Turn sequence parallelism off
          -h, --help                                               Print help (see more with '--help')
    "#]].assert_eq(&command.render_help().to_string());
}
