//! Which samples a rank reads.
//!
//! Samples have positions in one global order. A step takes the next global batch of them, a microbatch the next
//! micro batch size × batch parallel size, and in it each lane the next micro batch size. Ranks of one lane read the same
//! samples: they share a sequence, a weight or a pipeline.

use crate::config::ParallelConfig;
use crate::groups::{GroupKind, ProcessGroups};
use std::ops::Range;

impl ParallelConfig {
    /// The positions in the global order of the samples that the rank behind `groups` reads in microbatch `microbatch` of
    /// the step that starts after `consumed` samples. Its lane is its position in the `dp_gtp_remat` group.
    ///
    /// # Panics
    /// If the step has no such microbatch, or the `dp_gtp_remat` group does not have batch parallel size members: the
    /// groups are of another layout.
    pub fn samples(&self, groups: &ProcessGroups, consumed: u64, microbatch: u64) -> Range<u64> {
        assert!(microbatch < self.num_microbatches(), "a step has {} microbatches", self.num_microbatches());
        let lanes = groups.size(GroupKind::DpGtpRemat);
        assert_eq!(
            lanes,
            self.layout().batch_parallel_size(),
            "`dp_gtp_remat` group and batch parallel size of the configuration"
        );
        let lane = u64::from(groups.position(GroupKind::DpGtpRemat).0);
        let micro = u64::from(self.micro_batch_size());
        let start = consumed + (microbatch * u64::from(lanes) + lane) * micro;
        start..start + micro
    }
}
