//! Where everything lies: ranks, layouts, process groups, boxes and shards. Pure arithmetic, the same on every rank.
//!
//! State is a set of global tensors; a layout only decides which box of each tensor a rank holds. This crate knows no
//! files, bytes, devices, threads or time.

#![forbid(unsafe_code)]

mod args;
mod axis;
mod batch;
mod config;
mod explain;
mod groups;
mod layout;
mod placement;
mod rank;
mod region;
mod schedule;
mod sequence;
mod shape;
mod shard;

pub use args::{MergedArgs, ParallelArgs, Source};
pub use axis::{Axis, Grid};
pub use config::{ParallelConfig, ParallelError, ParallelSettings};
pub use explain::{Explained, Origin};
pub use groups::{Group, GroupKind, GroupTable, MissingGroups, ProcessGroups, UnknownGroup};
pub use layout::{ConfiguredCp, LayoutError, LayoutSizes, MAX_RANKS, ParallelLayout, RankOrder, RuntimeCp};
pub use placement::{Cut, DimPlacement, Indivisible, LocalShard, Piece, Placement};
pub use rank::{GroupRank, Rank};
pub use region::{Region, Runs, TilingFault, prove_tiling};
pub use schedule::{
    LrDecayStyle, Schedule, ScheduleConfig, ScheduleError, ScheduleUnit, Warmup, WeightDecayStyle, WsdShape,
};
pub use shape::{DType, Shape};
pub use shard::{DuplicateKey, ReplicaId, ShardedTensor, StateEntry, StateKind, StateTable, TensorKey};
