//! Which tokens and samples each rank gets.

use mesh::{GroupKind, GroupTable, MergedArgs, ParallelArgs, ParallelConfig, ProcessGroups, Rank, Source};
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

fn config(world_size: u32, args: ParallelArgs) -> ParallelConfig {
    MergedArgs::of(&[(Source::CommandLine, args)]).resolve(world_size, 0).unwrap()
}

fn all_ranks(config: &ParallelConfig) -> Vec<ProcessGroups> {
    let table = Arc::new(GroupTable::new("gpt", config.layout()));
    table.ranks().iter().map(|rank| table.for_rank(*rank)).collect()
}

fn tokens(ranges: Vec<Range<u64>>) -> Vec<u64> {
    ranges.into_iter().flatten().collect()
}

#[test]
fn head_and_tail_chunks_balance_causal_attention() {
    let config = config(
        8,
        ParallelArgs {
            context_parallel_size: Some(2),
            tensor_parallel_num_weight_shards: Some(4),
            tensor_parallel_num_sequence_shards: Some(2),
            seq_length: Some(16),
            micro_batch_size: Some(1),
            ..ParallelArgs::default()
        },
    );
    // CP groups are [0,1,4,5] and [2,3,6,7]: the CP rank is configured CP coordinate · 2 + sequence coordinate.
    let expected = [
        vec![0, 1, 14, 15],
        vec![2, 3, 12, 13],
        vec![0, 1, 14, 15],
        vec![2, 3, 12, 13],
        vec![4, 5, 10, 11],
        vec![6, 7, 8, 9],
        vec![4, 5, 10, 11],
        vec![6, 7, 8, 9],
    ];
    let found: Vec<Vec<u64>> =
        all_ranks(&config).iter().map(|groups| tokens(config.cp_tokens(groups))).collect();
    assert_eq!(found, expected);
}

#[test]
fn samples_of_a_step_follow_the_batch_parallel_size_and_never_plain_dp() {
    // configured CP, sequence shards inside GTP, GTP → batch parallel size, samples of a step of 3 microbatches of 2.
    for (cp, inside, gtp, batch_parallel, samples) in [(1, 1, 4, 8, 48), (2, 2, 2, 2, 12), (1, 2, 4, 4, 24)] {
        let config = config(
            8,
            ParallelArgs {
                context_parallel_size: Some(cp),
                tensor_parallel_num_weight_shards: Some(gtp),
                tensor_parallel_num_sequence_shards: Some(inside),
                data_parallel_size: Some(2),
                micro_batch_size: Some(2),
                global_batch_size: Some(samples),
                seq_length: Some(64),
                ..ParallelArgs::default()
            },
        );
        assert_eq!(config.layout().batch_parallel_size(), batch_parallel);
        assert_eq!(config.num_microbatches(), 3);
    }
}

#[test]
fn lanes_take_blocks_of_a_microbatch_in_the_order_of_their_positions() {
    let config = config(
        4,
        ParallelArgs {
            tensor_parallel_num_weight_shards: Some(4),
            tensor_parallel_num_sequence_shards: Some(2),
            micro_batch_size: Some(3),
            global_batch_size: Some(12),
            seq_length: Some(8),
            ..ParallelArgs::default()
        },
    );
    // Lanes are [0,2] and [1,3].
    let ranks = all_ranks(&config);
    let first: Vec<Range<u64>> = ranks.iter().map(|groups| config.samples(groups, 100, 0)).collect();
    assert_eq!(first, [100..103, 100..103, 103..106, 103..106]);
    assert_eq!(config.samples(&ranks[2], 100, 1), 109..112);
}

#[test]
#[should_panic(expected = "`cp` group and runtime CP of the configuration")]
fn groups_of_another_layout_are_wrong_code() {
    let args = |cp| ParallelArgs {
        context_parallel_size: Some(cp),
        seq_length: Some(8),
        micro_batch_size: Some(1),
        ..ParallelArgs::default()
    };
    let other = Arc::new(GroupTable::new("gpt", config(2, args(1)).layout())).for_rank(Rank(0));
    config(2, args(2)).cp_tokens(&other);
}

fn degree() -> impl Strategy<Value = u32> {
    1..4u32
}

proptest! {
    /// Over the ranks of one model copy's tensor-parallel slice, each token of each sample of the step is held once.
    #[test]
    fn every_token_of_every_sample_is_held_once(
        (tp, pp, cp, inside, batch, dp) in (degree(), 1..3u32, degree(), degree(), degree(), degree()),
        sp in any::<bool>(),
        (micro, microbatches, consumed) in (1..3u32, 1..3u64, 0..99u64),
    ) {
        let sp = sp || inside > 1;
        let sp_degree = if sp { tp } else { 1 };
        let seq_length = 2 * u64::from(cp * inside * tp);
        let global_batch_size = microbatches * u64::from(micro * dp * batch);
        let config = config(tp * pp * cp * inside * batch * dp, ParallelArgs {
            tensor_model_parallel_size: Some(tp),
            pipeline_model_parallel_size: Some(pp),
            context_parallel_size: Some(cp),
            sequence_parallel: Some(sp),
            tensor_parallel_num_weight_shards: Some(tp * inside * batch),
            tensor_parallel_num_sequence_shards: Some(sp_degree * inside),
            micro_batch_size: Some(micro),
            global_batch_size: Some(global_batch_size),
            seq_length: Some(seq_length),
            ..ParallelArgs::default()
        });
        // Outside the products with SP the TP ranks have different tokens, everywhere else the same.
        let mut held = vec![0; (global_batch_size * seq_length) as usize];
        for groups in all_ranks(&config) {
            let tokens_held = tokens(config.sp_tokens(&groups));
            prop_assert_eq!(tokens_held.len() as u64 * u64::from(cp * inside * config.sp_degree()), seq_length);
            if groups.position(GroupKind::Pp).0 > 0 || (!config.sequence_parallel() && groups.position(GroupKind::Tp).0 > 0) {
                continue;
            }
            for microbatch in 0..microbatches {
                for sample in config.samples(&groups, consumed, microbatch) {
                    for token in &tokens_held {
                        held[((sample - consumed) * seq_length + token) as usize] += 1;
                    }
                }
            }
        }
        prop_assert!(held.iter().all(|times| *times == 1), "{held:?}");
    }
}
