//! Which tokens of a sequence a rank holds.
//!
//! The sequence is cut in 2 · runtime CP equal chunks, and CP rank c takes chunks c and 2 · runtime CP − 1 − c, one behind
//! the other, so that causal attention costs all ranks the same. Sequence parallelism cuts what a CP rank holds once
//! more, in equal pieces over its TP ranks.

use crate::config::ParallelConfig;
use crate::groups::{GroupKind, ProcessGroups};
use std::iter;
use std::ops::Range;

impl ParallelConfig {
    /// The tokens that the rank behind `groups` holds in attention, as ranges of positions in the sequence, in the order
    /// of its buffer: two chunks, or the whole sequence without CP. Its CP rank is its position in the `cp` group.
    ///
    /// # Panics
    /// If the `cp` group does not have runtime CP members: the groups are of another layout.
    pub fn cp_tokens(&self, groups: &ProcessGroups) -> Vec<Range<u64>> {
        let cp = u64::from(self.layout().runtime_cp().0);
        assert_eq!(
            u64::from(groups.size(GroupKind::Cp)),
            cp,
            "`cp` group and runtime CP of the configuration"
        );
        if cp == 1 {
            return iter::once(0..self.seq_length()).collect();
        }
        let cp_rank = u64::from(groups.position(GroupKind::Cp).0);
        let chunk = self.seq_length() / (2 * cp);
        [cp_rank, 2 * cp - 1 - cp_rank].map(|index| index * chunk..(index + 1) * chunk).into()
    }

    /// The tokens that the rank behind `groups` holds outside the matrix products: with sequence parallelism its equal
    /// piece of [`cp_tokens`](Self::cp_tokens), without it all of them.
    ///
    /// # Panics
    /// If the `cp` or `tp` group does not have the size that the configuration says.
    pub fn sp_tokens(&self, groups: &ProcessGroups) -> Vec<Range<u64>> {
        let tokens = self.cp_tokens(groups);
        if !self.sequence_parallel() {
            return tokens;
        }
        let tp = self.layout().tp();
        assert_eq!(groups.size(GroupKind::Tp), tp, "`tp` group and TP of the configuration");
        let piece = tokens.iter().map(|range| range.end - range.start).sum::<u64>() / u64::from(tp);
        let start = piece * u64::from(groups.position(GroupKind::Tp).0);
        let mut at = 0;
        let mut cut = Vec::new();
        for range in tokens {
            let lo = range.start + start.saturating_sub(at);
            let hi = range.end.min((range.start + start + piece).saturating_sub(at));
            at += range.end - range.start;
            if lo < hi {
                cut.push(lo..hi);
            }
        }
        cut
    }
}
