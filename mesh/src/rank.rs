//! Numbers that count ranks. They are newtypes because a world rank and a position in a group are easily swapped.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A rank of the whole job, in `0..world size` of the job, offsets of grids included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub u32);

/// A position in the member list of one process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GroupRank(pub u32);

impl Rank {
    /// As an index of a table with one row per rank.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl GroupRank {
    /// As an index of a table with one row per member.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for GroupRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
