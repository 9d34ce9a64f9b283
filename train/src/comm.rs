//! Who talks: the trait of a communicator, made from a model's own process groups and never global.
//!
//! Rules on both sides: the same calls in the same order on all members, equal lengths and types (checked), and buffers
//! that belong to an operation until its ticket was waited for. A group of one is the identity and issues nothing.

mod board;
mod error;
#[cfg(test)]
mod host_memory;
#[cfg(any(test, feature = "testing"))]
pub mod mutate;
pub mod nccl;
pub mod processes;
pub mod record;
pub mod threads;

pub use error::{Blocked, CommError, Desync};

use crate::backend::{Backend, BackendError, Op, View};
use mesh::{DType, GroupKind, ProcessGroups, Rank};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Names one call in the program, such as `mlp.fc2.reduce`; members compare it, and errors and tests speak of it.
pub type Site = &'static str;

/// A communicator of one rank in one group. Views are contiguous; blocks of a gathered or scattered view follow each
/// other in the order of positions.
pub trait Comm {
    /// Which group.
    fn id(&self) -> &GroupId;

    /// This rank's position in the group.
    fn position(&self) -> usize;

    /// Number of members.
    fn size(&self) -> usize;

    /// Starts `operation`; never waits for another rank unless the implementation was told to.
    ///
    /// # Errors
    /// See [`CommError`].
    fn issue(&self, be: &mut dyn Backend, operation: Operation) -> Result<Ticket, CommError>;

    /// Blocks until the operation is complete and its destination written.
    ///
    /// # Errors
    /// See [`CommError`].
    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError>;

    /// Every member's `bytes`, by position; lengths may differ. Blocks. For small host data.
    ///
    /// # Errors
    /// See [`CommError`].
    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// The same on the member at position 0 alone; the others get nothing and need not wait.
    ///
    /// # Errors
    /// See [`CommError`].
    fn gather_bytes_at_first(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Whether the job still runs. Long work between collectives asks now and then, so that one rank's failure ends the
    /// others soon.
    ///
    /// # Errors
    /// The first cause, if the job has failed.
    fn check(&self) -> Result<(), CommError>;

    /// Ends the whole job on every rank, naming this rank and `why` as the first cause.
    fn abort(&self, why: &str);

    /// `dst` = every member's `src`; `dst` has `size` times the elements of `src`.
    ///
    /// # Errors
    /// See [`CommError`].
    fn all_gather(
        &self,
        be: &mut dyn Backend,
        site: Site,
        src: View,
        dst: View,
    ) -> Result<Ticket, CommError> {
        self.issue(be, Operation::new(Collective::AllGather, site, src, dst, self.size()))
    }

    /// `dst` = this position's block of the combination of every member's `src`, which has `size` times its elements.
    ///
    /// # Errors
    /// See [`CommError`].
    fn reduce_scatter(
        &self,
        be: &mut dyn Backend,
        site: Site,
        reduce: Reduce,
        src: View,
        dst: View,
    ) -> Result<Ticket, CommError> {
        self.issue(be, Operation::new(Collective::ReduceScatter(reduce), site, src, dst, self.size()))
    }

    /// `buf` = the combination of every member's `buf`.
    ///
    /// # Errors
    /// See [`CommError`].
    fn all_reduce(
        &self,
        be: &mut dyn Backend,
        site: Site,
        reduce: Reduce,
        buf: View,
    ) -> Result<Ticket, CommError> {
        self.issue(be, Operation::new(Collective::AllReduce(reduce), site, buf, buf, self.size()))
    }
}

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reduce {
    /// F32 or BF16, added pairwise in the order of positions: neighbours first, then pairs of pairs; a last odd one waits. The
    /// sum over `2^k` aligned neighbours, then over those sums, is the sum over all, bit for bit. BF16
    /// is rounded after each addition.
    Tree,
    /// F32 or BF16, added in an order that the implementation chooses: the same in every run.
    Sum,
    /// F32 maximum; NaN wins, and +0 is above -0, so any order gives the same number.
    Max,
    /// I64, added with wrap-around: any order gives the same bits.
    Fixed,
}

impl Reduce {
    /// How accumulators of this type are summed.
    pub const fn of_accumulators(dtype: DType) -> Self {
        match dtype {
            DType::I64 => Reduce::Fixed,
            _ => Reduce::Sum,
        }
    }

    /// Whether it combines elements of this type.
    pub const fn takes(self, dtype: DType) -> bool {
        match self {
            Reduce::Tree | Reduce::Sum => matches!(dtype, DType::F32 | DType::Bf16),
            Reduce::Max => matches!(dtype, DType::F32),
            Reduce::Fixed => matches!(dtype, DType::I64),
        }
    }
}

/// What is done with the contributions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Collective {
    /// Every member gets all of them.
    AllGather,
    /// Every member gets its block of their combination.
    ReduceScatter(Reduce),
    /// Every member gets their combination.
    AllReduce(Reduce),
}

/// One collective on one rank's views.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Operation {
    collective: Collective,
    site: Site,
    src: View,
    dst: View,
}

impl Operation {
    /// An operation in a group of `size` members.
    ///
    /// # Panics
    /// If a view has gaps, or lengths or types do not fit: that is wrong code on this rank, whatever the others do.
    fn new(collective: Collective, site: Site, src: View, dst: View, size: usize) -> Self {
        assert!(src.is_contiguous() && dst.is_contiguous(), "`{site}` communicates a view with gaps");
        assert_eq!(src.dtype, dst.dtype, "`{site}` has a source and a destination of two types");
        let (src_blocks, dst_blocks) = match collective {
            Collective::AllGather => (1, size),
            Collective::ReduceScatter(_) => (size, 1),
            Collective::AllReduce(_) => (1, 1),
        };
        assert_eq!(
            src.numel() * dst_blocks,
            dst.numel() * src_blocks,
            "`{site}` has {} elements for {} in a group of {size}",
            src.numel(),
            dst.numel()
        );
        if let Collective::ReduceScatter(reduce) | Collective::AllReduce(reduce) = collective {
            assert!(reduce.takes(src.dtype), "`{site}` combines {} by {reduce:?}", src.dtype);
        }
        Operation { collective, site, src, dst }
    }

    /// What members must agree on.
    fn signature(&self) -> OpSignature {
        OpSignature::Tensor {
            collective: self.collective,
            site: self.site,
            dtype: self.src.dtype,
            len: self.src.numel(),
        }
    }

    /// This position's own share of the work: the part of the source that it would get if all others were silent, and its
    /// place in the destination, in the same shape.
    fn own_part(&self, position: usize, size: usize) -> (View, View) {
        let (src, dst) = match self.collective {
            Collective::AllGather => (self.src, block(self.dst, position, size)),
            Collective::ReduceScatter(_) => (block(self.src, position, size), self.dst),
            Collective::AllReduce(_) => (self.src, self.dst),
        };
        (src.reshaped(dst.rows, dst.cols), dst)
    }
}

/// The elements of `position` when `view` is cut into `size` equal blocks.
fn block(view: View, position: usize, size: usize) -> View {
    view.reshaped(size, view.numel() / size).row_range(position, position + 1)
}

/// Copies unless source and destination are the same elements.
fn copy(be: &mut dyn Backend, src: View, dst: View) -> Result<(), BackendError> {
    if src == dst { Ok(()) } else { be.run(Op::Copy { src, dst }) }
}

/// An operation that was issued; its buffers are in use until it was waited for.
#[must_use = "a collective is complete only after `Comm::wait`"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(u64);

impl Ticket {
    /// Of an operation that was complete when it was issued.
    const COMPLETE: Ticket = Ticket(u64::MAX);
}

/// One group of one model, for one purpose.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GroupId {
    /// The collection's model.
    pub model: String,
    /// Which kind of group.
    pub kind: GroupKind,
    /// Its number in creation order; the rank's own number where the collection has no such group.
    pub index: usize,
    /// Empty for the step itself. Traffic that must not mix with it, such as a save's, has a name of its own.
    #[serde(deserialize_with = "processes::word")]
    pub purpose: Site,
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}[{}]", self.model, self.kind, self.index)?;
        if !self.purpose.is_empty() {
            write!(f, ":{}", self.purpose)?;
        }
        Ok(())
    }
}

/// A rank's place in one of its groups.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Membership {
    id: GroupId,
    /// Members by position.
    ranks: Vec<Rank>,
    position: usize,
}

impl Membership {
    /// A group that the collection does not have is a group of one.
    fn of(groups: &ProcessGroups, kind: GroupKind, purpose: &'static str) -> Self {
        let rank = groups.rank();
        Membership {
            id: GroupId {
                model: groups.table().model().to_owned(),
                kind,
                index: groups.group_index(kind).unwrap_or(rank.index()),
                purpose,
            },
            ranks: groups.get(kind).map_or_else(|| vec![rank], |group| group.ranks().to_vec()),
            position: groups.position(kind).index(),
        }
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }
}

/// What one member issued, as far as members must agree on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OpSignature {
    /// A collective on views.
    Tensor {
        /// Which, and how it combines.
        collective: Collective,
        /// Call site.
        #[serde(deserialize_with = "processes::word")]
        site: Site,
        /// Element type.
        dtype: DType,
        /// Elements that the member contributes.
        len: usize,
    },
    /// A gather of host bytes.
    Bytes {
        /// Call site.
        #[serde(deserialize_with = "processes::word")]
        site: Site,
    },
}

impl OpSignature {
    /// The call site.
    pub fn site(&self) -> Site {
        match *self {
            OpSignature::Tensor { site, .. } | OpSignature::Bytes { site } => site,
        }
    }
}

impl fmt::Display for OpSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpSignature::Tensor { collective, site, dtype, len } = self else {
            return write!(f, "gather_bytes `{}`", self.site());
        };
        match collective {
            Collective::AllGather => write!(f, "all_gather `{site}` of {len} {dtype}"),
            Collective::ReduceScatter(reduce) => {
                write!(f, "reduce_scatter `{site}` of {len} {dtype} ({reduce:?})")
            }
            Collective::AllReduce(reduce) => write!(f, "all_reduce `{site}` of {len} {dtype} ({reduce:?})"),
        }
    }
}
