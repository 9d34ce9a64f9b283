//! Where everything lies: ranks, layouts, process groups, boxes and shards. Pure arithmetic, the same on every rank; no
//! files, bytes, devices, threads or time.
//!
//! State is a set of global tensors. A layout only decides which box of each tensor a rank holds, and which tokens of
//! which samples it works on. The same ranks are seen in two ways:
//!
//! * the **weight view**: TP × GTP cut weights, configured CP × DP replicate them;
//! * the **token view**: DP × GTP batch shards hand out samples, configured CP × GTP sequence shards (runtime CP) and
//!   sequence parallelism cut each of them.
//!
//! So a change of CP or of sequence shards moves no weight.
//!
//! | question | answer |
//! |---|---|
//! | what did people say? | [`ParallelArgs`], merged by [`Source`] into [`MergedArgs`] |
//! | what holds, and why? | [`ParallelConfig`] (with a [`ParallelLayout`] in it), [`MergedArgs::explain`] |
//! | which ranks talk to each other? | [`GroupTable`] of a model, [`ProcessGroups`] of one of its ranks, by [`GroupKind`] |
//! | which layers has a stage? | [`Pipeline`], by [`PipelineSplit`]; [`ModelPart`] of a tensor |
//! | which part of a tensor is mine? | [`Placement`] of the tensor → [`LocalShard`]: [`Region`]s and a [`ReplicaId`] |
//! | is every element somebody's, once? | [`prove_tiling`] |
//! | what does a checkpoint hold? | [`StateTable`] of [`StateEntry`] |
//! | which tokens and samples are mine? | [`ParallelConfig::cp_tokens`], [`sp_tokens`](ParallelConfig::sp_tokens), [`samples`](ParallelConfig::samples) |
//! | how many samples has a step? | [`BatchSchedule`] |
//! | how fast do I learn? | [`Schedule`] |
//!
//! Eight ranks, two copies of each weight, one sample at a time:
//!
//! ```
//! use mesh::{DimPlacement, GroupKind, GroupTable, MergedArgs, ParallelArgs, Placement, Rank, Region, Source};
//! use std::sync::Arc;
//!
//! let flags = ParallelArgs {
//!     tensor_model_parallel_size: Some(2),
//!     sequence_parallel: Some(true),
//!     context_parallel_size: Some(2),
//!     tensor_parallel_num_weight_shards: Some(4),
//!     micro_batch_size: Some(1),
//!     seq_length: Some(32),
//!     ..ParallelArgs::default()
//! };
//! let program = ParallelArgs { tensor_parallel_num_sequence_shards: Some(4), ..ParallelArgs::default() };
//! let said = MergedArgs::of(&[(Source::CommandLine, flags), (Source::ProgramDefault, program)]);
//! let config = said.resolve(8, 0)?;
//! let explained: Vec<String> = said.explain(&config).iter().map(ToString::to_string).collect();
//! assert!(explained.contains(&"tensor-parallel-num-sequence-shards 4 (program default)".to_owned()));
//! assert!(explained.contains(&"runtime CP 4 = configured CP 2 × 2 GTP sequence shards".to_owned()));
//! assert!(explained.contains(&"batch parallel size 1 = DP 1 × 1 GTP batch shards".to_owned()));
//!
//! // Rank 7, axes from fastest to slowest: TP 1 of 2, GTP sequence 1 of 2, CP 1 of 2.
//! let groups = Arc::new(GroupTable::new("gpt", config.layout())).for_rank(Rank(7));
//! assert_eq!(groups.get(GroupKind::Tp).unwrap().ranks(), [Rank(6), Rank(7)]);
//! assert_eq!(groups.get(GroupKind::GtpRemat).unwrap().ranks(), [Rank(5), Rank(7)]);
//! assert_eq!(groups.get(GroupKind::DpCp).unwrap().ranks(), [Rank(3), Rank(7)]);
//! assert_eq!(groups.get(GroupKind::Cp).unwrap().ranks(), [Rank(1), Rank(3), Rank(5), Rank(7)]);
//!
//! // 96 gate and 96 up rows. TP leaves it the second half of each, GTP the second half of those: its up rows.
//! let rows = DimPlacement::fused(&[96, 96]).exact(GroupKind::Tp).ceil(GroupKind::GtpRemat);
//! let fc1 = Placement::new(vec![rows, DimPlacement::whole(64)]);
//! let shard = fc1.shard(&groups)?;
//! assert_eq!(shard.pieces[0].region, Region::new(&[144, 0], &[192, 64]));
//! assert_eq!(shard.replica.dp, 1); // rank 3 holds the same rows and is the one that writes them
//! // Optimizer rows are shared out between the two.
//! let moments = fc1.with_rows_over(GroupKind::DpCp).shard(&groups)?;
//! assert_eq!(moments.pieces[0].region, Region::new(&[168, 0], &[192, 64]));
//! assert!(moments.replica.is_main());
//!
//! // The last of four CP ranks takes the two middle chunks, and its second TP rank the second of them.
//! assert_eq!(config.cp_tokens(&groups), [12..16, 16..20]);
//! assert_eq!(config.sp_tokens(&groups), [16..20]);
//! assert_eq!(config.samples(&groups, 100, 0), 100..101);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod args;
mod axis;
mod batch;
mod config;
mod explain;
mod fold;
mod group_options;
mod groups;
mod layers;
mod layout;
mod pipeline;
mod placement;
mod rank;
mod region;
mod schedule;
mod sequence;
mod shape;
mod shard;

pub use args::{MergedArgs, ParallelArgs};
pub use axis::{Axis, Grid};
pub use batch::{BatchError, BatchSchedule, BatchStep, Ramp};
pub use config::{ParallelConfig, ParallelError, ParallelSettings};
pub use explain::{Explained, Origin};
pub use fold::{Fold, FoldMemory};
pub use group_options::{GroupOptions, GroupOptionsError};
pub use groups::{AllGatherRanks, Group, GroupKind, GroupTable, MissingGroups, ProcessGroups, UnknownGroup};
pub use layers::{Layered, Merged, Source};
pub use layout::{
    ConfiguredCp, ExpertSizes, LayoutError, LayoutSizes, MAX_RANKS, ParallelLayout, RankOrder, RuntimeCp,
};
pub use pipeline::{BadStageLayout, ModelPart, Pipeline, PipelineError, PipelineSplit, StageLayout};
pub use placement::{Cut, DimPlacement, Indivisible, InvalidDim, LocalShard, Piece, Placement};
pub use rank::{GroupRank, Rank};
pub use region::{Region, Runs, TilingFault, paired_runs, prove_tiling};
pub use schedule::{
    LrDecayStyle, Schedule, ScheduleConfig, ScheduleError, ScheduleUnit, Warmup, WeightDecayStyle, WsdShape,
};
pub use shape::{DType, Shape};
pub use shard::{DuplicateKey, ReplicaId, ShardedTensor, StateEntry, StateKind, StateTable, TensorKey};
