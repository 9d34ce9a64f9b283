//! The grid: named axes from fastest to slowest, coordinates to rank and back, groups over a set of axes.

use crate::rank::Rank;
use serde::{Deserialize, Serialize};

/// An axis of the dense grid or of the expert grid; both have the pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Tensor parallel.
    Tp,
    /// Sequence shards inside a GTP_remat group.
    Seq,
    /// Batch shards inside a GTP_remat group.
    Bat,
    /// Configured context parallel.
    Cp,
    /// Residual data parallel.
    Dp,
    /// Pipeline parallel.
    Pp,
    /// Tensor parallel of experts.
    Etp,
    /// Expert parallel.
    Ep,
    /// Weight shards of experts beyond ETP.
    Egtp,
    /// Replicas of an expert's weight shard.
    Edp,
}

impl Axis {
    /// Whether the axis is one of the expert grid alone.
    pub const fn is_expert(self) -> bool {
        matches!(self, Axis::Etp | Axis::Ep | Axis::Egtp | Axis::Edp)
    }
}

/// Ranks as a grid: `rank = offset + Σ coordinate · stride`, the first axis varying fastest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grid {
    offset: u32,
    axes: Vec<(Axis, u32)>,
}

impl Grid {
    /// A grid of the given axis sizes, fastest first, whose first rank is `offset`.
    ///
    /// # Panics
    /// If a size is zero or an axis is named twice: layouts are checked before a grid is made.
    pub fn new(offset: u32, axes: Vec<(Axis, u32)>) -> Self {
        for (at, (axis, size)) in axes.iter().enumerate() {
            assert!(*size > 0, "axis {axis:?} has size 0");
            assert!(axes[..at].iter().all(|(earlier, _)| earlier != axis), "axis {axis:?} is named twice");
        }
        Grid { offset, axes }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> u32 {
        self.axes.iter().map(|(_, size)| size).product()
    }

    /// All ranks, ascending.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (self.offset..self.offset + self.world_size()).map(Rank)
    }

    /// Axes with their sizes, fastest first.
    pub fn axes(&self) -> &[(Axis, u32)] {
        &self.axes
    }

    /// Size of an axis; 1 if the grid does not have it.
    pub fn size(&self, axis: Axis) -> u32 {
        self.axes.iter().find(|(named, _)| *named == axis).map_or(1, |(_, size)| *size)
    }

    /// The coordinate of `rank` along `axis`.
    pub fn coordinate(&self, rank: Rank, axis: Axis) -> u32 {
        let mut stride = 1;
        for (named, size) in &self.axes {
            if *named == axis {
                return (rank.0 - self.offset) / stride % size;
            }
            stride *= size;
        }
        0
    }

    /// The rank with these coordinates; `None` if the grid has no such one.
    pub fn rank(&self, coordinate: impl Fn(Axis) -> u32) -> Option<Rank> {
        let mut rank = self.offset;
        let mut stride = 1;
        for (axis, size) in &self.axes {
            let at = coordinate(*axis);
            if at >= *size {
                return None;
            }
            rank += at * stride;
            stride *= size;
        }
        Some(Rank(rank))
    }

    /// All groups over `axes`: the maximal sets of ranks that agree on every other axis. Members ascend, and
    /// groups are ordered by their smallest member.
    pub fn groups(&self, axes: &[Axis]) -> Vec<Vec<Rank>> {
        // The group's number is the rank's position in the grid that is left when `axes` are taken out.
        let outside: Vec<(Axis, u32)> =
            self.axes.iter().copied().filter(|(axis, _)| !axes.contains(axis)).collect();
        let num_groups: u32 = outside.iter().map(|(_, size)| size).product();
        let mut groups = vec![Vec::new(); num_groups as usize];
        for rank in self.ranks() {
            let mut group = 0;
            let mut stride = 1;
            for (axis, size) in &outside {
                group += self.coordinate(rank, *axis) * stride;
                stride *= size;
            }
            groups[group as usize].push(rank);
        }
        groups
    }
}
