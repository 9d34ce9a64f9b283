//! Ranks as threads of one process.
//!
//! An operation copies its contribution to the board and returns; waiting parks until all members have posted, then does
//! this rank's own part. The copy is the price of having no lifetime rule between threads.

mod board;
mod communicator;
#[cfg(test)]
mod faults;
mod reduce;
#[cfg(test)]
mod tests;

use super::error::list;
use super::{Comm, CommError, Membership};
use board::{Board, ThreadId};
use communicator::ThreadComm;
#[cfg(test)]
use faults::Fault;
use mesh::{GroupKind, ProcessGroups, Rank};
use std::any::Any;
use std::fmt::{self, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

const STACK_BYTES: usize = 8 << 20;

/// A job whose ranks are threads.
pub struct World;

impl World {
    /// Runs `program` once on each of `num_ranks` threads and returns their results by rank. All threads have ended when
    /// it returns.
    ///
    /// # Errors
    /// The first cause, with all that followed from it: an error or a panic of a rank ends all others at their next
    /// communicator call, and so do ranks that disagree, wait for each other, or wait too long.
    ///
    /// # Panics
    /// If `num_ranks` is 0.
    pub fn run<R, E>(
        num_ranks: u32,
        options: WorldOptions,
        program: impl Fn(&RankContext) -> Result<R, E> + Sync,
    ) -> Result<Vec<R>, WorldError<E>>
    where
        R: Send,
        E: Display + Send,
    {
        assert!(num_ranks > 0, "a world has at least one rank");
        let board = Arc::new(Board::new(num_ranks, options));
        let run_rank = |context: RankContext| {
            let _span = tracing::info_span!("rank", rank = context.rank().0).entered();
            let outcome = match catch_unwind(AssertUnwindSafe(|| program(&context))) {
                Ok(Ok(result)) => return Ok(result),
                Ok(Err(error)) => Reason::Error(error),
                Err(payload) => Reason::Panic(panic_message(payload.as_ref())),
            };
            // Before the context is dropped, which says that the rank has ended.
            board.fail(context.rank(), &outcome);
            Err(outcome)
        };
        let outcomes: Vec<Result<R, Reason<E>>> = thread::scope(|scope| {
            let spawn = |rank| {
                let context = RankContext::new(&board, rank, ThreadId(rank.index()));
                let thread = thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, || run_rank(context)).map_err(|error| {
                    let reason = Reason::NotStarted(error.to_string());
                    board.fail(rank, &reason);
                    reason
                })
            };
            let threads: Vec<_> = (0..num_ranks).map(Rank).map(spawn).collect();
            threads.into_iter().map(|thread| thread?.join().expect("a rank's panic is caught")).collect()
        });
        let Some((rank, error)) = board.first_cause() else {
            return Ok(outcomes.into_iter().map(|outcome| outcome.ok().expect("nobody failed")).collect());
        };
        let mut first = RankFailure { rank, reason: Reason::Silent(error) };
        let mut followers = Vec::new();
        for (outcome, at) in outcomes.into_iter().zip((0..num_ranks).map(Rank)) {
            match outcome {
                Err(reason) if at == rank => first.reason = reason,
                Err(reason) => followers.push(RankFailure { rank: at, reason }),
                Ok(_) => {}
            }
        }
        Err(WorldError { first, followers })
    }
}

/// How a world behaves.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// How long a rank waits for another one that computes. Ranks that wait for each other are found at once.
    pub timeout: Duration,
    /// Operations of one group that a rank may leave incomplete when an issue returns: 0 makes each issue a meeting of
    /// all members, so that a program which depends on buffering stops here as it might on NCCL. `None`: any number.
    pub max_incomplete: Option<u64>,
    /// Seed of random delays before each operation.
    #[cfg(test)]
    pub(crate) jitter: Option<u64>,
    /// Faults to inject.
    #[cfg(test)]
    pub(crate) faults: Vec<Fault>,
}

impl Default for WorldOptions {
    fn default() -> Self {
        WorldOptions {
            timeout: Duration::from_secs(60),
            max_incomplete: None,
            #[cfg(test)]
            jitter: None,
            #[cfg(test)]
            faults: Vec::new(),
        }
    }
}

/// What one rank of a [`World`] is given: who it is, and its communicators.
#[derive(Debug)]
pub struct RankContext {
    seat: Arc<Seat>,
}

impl RankContext {
    fn new(board: &Arc<Board>, rank: Rank, thread: ThreadId) -> Self {
        RankContext { seat: Arc::new(Seat { board: Arc::clone(board), rank, thread }) }
    }

    /// This rank in the job.
    pub fn rank(&self) -> Rank {
        self.seat.rank
    }

    /// Ranks of the job.
    pub fn num_ranks(&self) -> u32 {
        self.seat.board.num_ranks()
    }

    /// The communicator of this rank's group of `kind`; where the collection has none, of a group of one.
    ///
    /// # Panics
    /// If the collection is another rank's, has ranks that this job lacks, or shares its model's name with a different one.
    pub fn comm(&self, groups: &ProcessGroups, kind: GroupKind) -> Rc<dyn Comm> {
        self.comm_for("", groups, kind)
    }

    /// Another communicator of the same group, whose operations have an order of their own.
    ///
    /// # Panics
    /// As [`RankContext::comm`].
    pub fn comm_for(&self, purpose: &'static str, groups: &ProcessGroups, kind: GroupKind) -> Rc<dyn Comm> {
        assert_eq!(
            groups.rank(),
            self.rank(),
            "a rank communicates through its own view of the process groups"
        );
        Rc::new(ThreadComm::new(Arc::clone(&self.seat), Membership::of(groups, kind, purpose)))
    }

    /// A context for another thread of this rank, such as one that saves. It needs its own purposes, since the order of
    /// operations between threads is open. The rank counts as running until the context is dropped.
    pub fn fork(&self) -> RankContext {
        let Seat { board, rank, .. } = &*self.seat;
        RankContext::new(board, *rank, board.start_thread(*rank))
    }
}

/// A thread's place in the world, held by its context and its communicators: while it is taken the rank may still come to
/// an operation.
#[derive(Debug)]
struct Seat {
    board: Arc<Board>,
    rank: Rank,
    thread: ThreadId,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if thread::panicking() {
            self.board.fail(self.rank, &"a thread of this rank panicked");
        }
        self.board.end_thread(self.thread);
    }
}

/// A job failed.
#[derive(Debug)]
pub struct WorldError<E> {
    /// The first cause.
    pub first: RankFailure<E>,
    /// Ranks that ended because of it, ascending.
    pub followers: Vec<RankFailure<E>>,
}

/// How a rank ended.
#[derive(Debug)]
pub struct RankFailure<E> {
    /// Which rank.
    pub rank: Rank,
    /// Why.
    pub reason: Reason<E>,
}

/// Why a rank ended.
#[derive(Debug)]
pub enum Reason<E> {
    /// It returned this.
    Error(E),
    /// It panicked with this message.
    Panic(String),
    /// The system gave it no thread.
    NotStarted(String),
    /// It returned no error, but it aborted the job, went on after a failed collective, or ended while others waited.
    Silent(CommError),
}

impl<E: Display> Display for Reason<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            // The alternate form of an error with a chain is the whole chain.
            Reason::Error(error) => write!(f, "{error:#}"),
            Reason::Panic(message) => write!(f, "panicked: {message}"),
            Reason::NotStarted(reason) => write!(f, "no thread could be started: {reason}"),
            // The rank is named beside the reason.
            Reason::Silent(CommError::PeerFailed { why, .. }) => why.fmt(f),
            Reason::Silent(error) => error.fmt(f),
        }
    }
}

impl<E: Display> Display for WorldError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} failed: {}", self.first.rank, self.first.reason)?;
        if !self.followers.is_empty() {
            let ranks: Vec<Rank> = self.followers.iter().map(|follower| follower.rank).collect();
            write!(f, "; it ended ranks {}", list(&ranks))?;
        }
        Ok(())
    }
}

impl<E: Display + fmt::Debug> std::error::Error for WorldError<E> {}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
