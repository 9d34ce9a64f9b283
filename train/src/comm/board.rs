//! What the ranks of a job know of each other: contributions by group and sequence number, and the first cause of failure.

use super::threads::Payload;
use super::{CommError, Membership, OpSignature};
use mesh::Rank;
use std::fmt::Debug;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A thread of the job; a rank has one and may fork more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ThreadId(pub(super) usize);

/// A group on the board, for the thread that named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupIndex(pub(super) usize);

/// All contributions of one operation, by position.
#[derive(Debug)]
pub(super) struct Contributions {
    pub(super) payloads: Vec<Payload>,
    /// Their combination, made by the first reader that wants it whole.
    pub(super) combined: OnceLock<Payload>,
}

impl Contributions {
    pub(super) fn of(payloads: Vec<Payload>) -> Self {
        Contributions { payloads, combined: OnceLock::new() }
    }
}

/// Where ranks meet: in one process, or over TCP.
pub(super) trait Board: Debug + Send + Sync {
    fn num_ranks(&self) -> u32;

    /// The group of this membership.
    ///
    /// # Panics
    /// If it has ranks that the job lacks, or its name is another group's.
    fn group(&self, thread: ThreadId, membership: &Membership) -> GroupIndex;

    /// Adds a contribution and returns the operation's number.
    fn post(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        position: usize,
        signature: OpSignature,
        payload: Payload,
    ) -> Result<u64, CommError>;

    /// Says what this member does elsewhere, so that members agree on it, and returns the operation's number. Nobody collects
    /// it.
    fn announce(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        position: usize,
        signature: OpSignature,
    ) -> Result<u64, CommError>;

    /// Blocks until every member has posted the operation.
    fn collect(
        &self,
        thread: ThreadId,
        group: GroupIndex,
        sequence: u64,
    ) -> Result<Arc<Contributions>, CommError>;

    /// Counts another thread of `rank` as running.
    fn start_thread(&self, rank: Rank) -> ThreadId;

    /// Counts a thread as ended; whoever waits for the last one of a rank waits in vain.
    fn end_thread(&self, thread: ThreadId);

    /// Ends the job with this cause, found by `rank`, unless it has failed before.
    fn fail_with(&self, rank: Rank, error: CommError);

    /// Why the job failed, and the rank that failed or found it.
    fn first_cause(&self) -> Option<(Rank, CommError)>;

    /// Ends the job if a member has not announced for too long what others have.
    fn expire(&self);

    /// How long a rank waits for another one.
    fn timeout(&self) -> Duration;

    /// Operations that somebody has issued and not everybody has read.
    #[cfg(test)]
    fn num_operations(&self) -> usize;

    /// Fails if the job has failed.
    fn check(&self) -> Result<(), CommError> {
        self.first_cause().map_or(Ok(()), |(_, error)| Err(error))
    }
}
