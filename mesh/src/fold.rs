//! The other way to cut both weights and sequences over the same ranks: folding CP into the weight group, as some runs do,
//! where this crate's layouts put sequence shards inside GTP. Translation both ways, and what it costs in memory.

use crate::layout::{ConfiguredCp, LayoutSizes, ParallelLayout};
use serde::Serialize;

/// Degrees of the folded form: a weight group of CP × GTP ranks, replicated over DP, in which CP ranks share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fold {
    /// Context parallel degree.
    pub cp: u32,
    /// Weight shards ÷ (TP × CP).
    pub gtp: u32,
}

impl Fold {
    /// The folded form of `layout`; `None` if CP is configured beside the sequence shards, since there CP is at most the
    /// weight group.
    pub fn of(layout: &ParallelLayout) -> Option<Fold> {
        let fold = Fold { cp: layout.gtp_sequence_shards(), gtp: layout.gtp_batch_shards() };
        (layout.configured_cp() == ConfiguredCp(1)).then_some(fold)
    }

    /// The sizes that put the CP of the fold inside GTP; the others are those of `others`.
    pub fn sizes(self, others: LayoutSizes) -> LayoutSizes {
        LayoutSizes { cp: ConfiguredCp(1), gtp: self.cp * self.gtp, gtp_sequence_shards: self.cp, ..others }
    }

    /// What the optimizer state of parameters that GTP does not cut, norms above all, takes on a rank: `bytes` in the whole
    /// model. `layout` shares it out over its weight replicas; the fold over its CP ranks, too.
    pub fn memory(self, layout: &ParallelLayout, bytes: u64) -> FoldMemory {
        let replicas = u64::from(layout.num_weight_replicas());
        FoldMemory {
            here_bytes: bytes.div_ceil(replicas),
            folded_bytes: bytes.div_ceil(replicas * u64::from(self.cp)),
        }
    }
}

/// Bytes a rank for the optimizer state of parameters that GTP does not cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FoldMemory {
    /// In this crate's layout.
    pub here_bytes: u64,
    /// With CP folded into the weight group.
    pub folded_bytes: u64,
}
