//! Who talks: the trait of a communicator, made from a model's own process groups and never global.
//!
//! Rules on both sides: the same calls in the same order on all members, equal lengths and types (checked), and buffers
//! that belong to an operation until its ticket was waited for. A group of one is the identity and issues nothing.

pub mod threads;

use crate::backend::{Backend, BackendError, View};
use mesh::{GroupKind, Rank};
use std::fmt;

/// Names one call in the program, such as `mlp.fc2.reduce`; members compare it, and errors and tests speak of it.
pub type Site = &'static str;

/// One group of one model.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId {
    /// The collection's model.
    pub model: String,
    /// Which kind of group.
    pub kind: GroupKind,
    /// Its number in creation order.
    pub index: usize,
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}[{}]", self.model, self.kind, self.index)
    }
}

/// How contributions are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// F32, added pairwise in the order of positions: neighbours first, then pairs of pairs; a last odd one waits.
    Tree,
    /// F32 maximum; NaN wins.
    Max,
    /// I64, added with wrap-around: any order gives the same bits.
    Fixed,
}

/// An operation that was issued; its buffers are in use until it was waited for.
#[must_use = "a collective is complete only after `Comm::wait`"]
#[derive(Debug)]
pub struct Ticket(pub u64);

/// A communicator of one rank in one group. Views are contiguous; blocks of a gathered or scattered view follow each
/// other in the order of positions.
pub trait Comm {
    /// Which group.
    fn id(&self) -> &GroupId;

    /// This rank's position in the group.
    fn position(&self) -> usize;

    /// Number of members.
    fn size(&self) -> usize;

    /// `dst` = every member's `src`; `dst` has `size` times the elements of `src`.
    ///
    /// # Errors
    /// See [`CommError`].
    fn all_gather(&self, be: &mut dyn Backend, site: Site, src: View, dst: View)
    -> Result<Ticket, CommError>;

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
    ) -> Result<Ticket, CommError>;

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
    ) -> Result<Ticket, CommError>;

    /// Blocks until the operation is complete and its destination written.
    ///
    /// # Errors
    /// See [`CommError`].
    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError>;

    /// Every member's `bytes`, by position; lengths may differ. For small host data.
    ///
    /// # Errors
    /// See [`CommError`].
    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError>;

    /// Ends the whole job on every rank, naming this rank and `why` as the first cause.
    fn abort(&self, why: &str);
}

/// What one member issued, as far as members must agree on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpSignature {
    /// The collective, such as `all_gather`.
    pub collective: &'static str,
    /// Call site.
    pub site: Site,
    /// Element type and number of elements that the member contributes; none for host bytes.
    pub elements: Option<(mesh::DType, usize)>,
    /// Combination, if it combines.
    pub reduce: Option<Reduce>,
}

impl fmt::Display for OpSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} `{}`", self.collective, self.site)?;
        if let Some((dtype, len)) = self.elements {
            write!(f, " of {len} {dtype}")?;
        }
        if let Some(reduce) = self.reduce {
            write!(f, " ({reduce:?})")?;
        }
        Ok(())
    }
}

/// A rank that waits, and for whom.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    /// Who waits.
    pub rank: Rank,
    /// In which group.
    pub group: GroupId,
    /// Number of the operation in that group.
    pub sequence: u64,
    /// What it waits in.
    pub operation: OpSignature,
    /// Members that have not come.
    pub missing: Vec<Rank>,
}

/// Why a collective did not complete.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// Another rank ended first; its reason is the cause.
    #[error("rank {rank} failed: {why}")]
    PeerFailed {
        /// The first rank that failed.
        rank: Rank,
        /// Its reason.
        why: String,
    },
    /// Members issued different operations.
    #[error("{group}: operation {sequence} is {mine} on rank {rank} but {theirs} on rank {other}")]
    Desync {
        /// In which group.
        group: GroupId,
        /// Number of the operation in that group.
        sequence: u64,
        /// This rank.
        rank: Rank,
        /// What it issued.
        mine: OpSignature,
        /// The other rank.
        other: Rank,
        /// What that one issued.
        theirs: OpSignature,
    },
    /// Every rank that still runs waits for another one.
    #[error("deadlock: {}", table(.blocked))]
    Deadlock {
        /// All waiting ranks.
        blocked: Vec<Blocked>,
    },
    /// A rank did not come in time.
    #[error("no answer within {seconds} s: {}", table(.blocked))]
    TimedOut {
        /// The limit.
        seconds: u64,
        /// All waiting ranks.
        blocked: Vec<Blocked>,
    },
    /// The device failed while a buffer was moved.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

fn table(blocked: &[Blocked]) -> String {
    let line = |b: &Blocked| {
        let missing = b.missing.iter().map(|rank| rank.to_string()).collect::<Vec<_>>().join(", ");
        format!(
            "rank {} waits in {} operation {} ({}) for {missing}",
            b.rank, b.group, b.sequence, b.operation
        )
    };
    blocked.iter().map(line).collect::<Vec<_>>().join("; ")
}
