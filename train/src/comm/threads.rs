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

use super::board::{Board, ThreadId};
use super::error::list;
use super::processes::LaunchError;
use super::{Comm, CommError, Membership};
pub(super) use board::LocalBoard;
pub(super) use communicator::ThreadComm;
#[cfg(test)]
use faults::Fault;
use mesh::{GroupKind, ProcessGroups, Rank};
pub(super) use reduce::Payload;
use std::any::Any;
use std::fmt::{self, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
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
        let board: Arc<dyn Board> = Arc::new(LocalBoard::new(num_ranks, options));
        let run_rank = |context: RankContext| outcome_of(context, &program);
        let outcomes: Vec<Result<R, Reason<E>>> = thread::scope(|scope| {
            let spawn = |rank| {
                let context = RankContext::new(&board, rank, ThreadId(rank.index()));
                let thread = thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK_BYTES);
                thread.spawn_scoped(scope, || run_rank(context)).map_err(|error| {
                    let reason = Reason::NotStarted(error.to_string());
                    board.fail_with(rank, CommError::PeerFailed { rank, why: reason.to_string() });
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

/// Runs a rank's program to its end. If it fails the job is told before the context is dropped, which says that the rank has ended.
pub(super) fn outcome_of<R, E: Display>(
    context: RankContext,
    program: impl FnOnce(&RankContext) -> Result<R, E>,
) -> Result<R, Reason<E>> {
    let rank = context.rank();
    let _span = tracing::info_span!("rank", rank = rank.0).entered();
    let reason = match catch_unwind(AssertUnwindSafe(|| program(&context))) {
        Ok(Ok(result)) => return Ok(result),
        Ok(Err(error)) => Reason::Error(error),
        Err(payload) => Reason::Panic(panic_message(payload.as_ref())),
    };
    context.seat.board.fail_with(rank, CommError::PeerFailed { rank, why: reason.to_string() });
    Err(reason)
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

/// What one rank of a job is given: who it is, and its communicators.
#[derive(Debug)]
pub struct RankContext {
    seat: Arc<Seat>,
}

impl RankContext {
    pub(super) fn new(board: &Arc<dyn Board>, rank: Rank, thread: ThreadId) -> Self {
        let (board, kept) = (Arc::clone(board), Mutex::default());
        RankContext { seat: Arc::new(Seat { board, rank, thread, kept }) }
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
        Rc::new(self.board_comm(purpose, groups, kind))
    }

    pub(super) fn board_comm(
        &self,
        purpose: &'static str,
        groups: &ProcessGroups,
        kind: GroupKind,
    ) -> ThreadComm {
        assert_eq!(
            groups.rank(),
            self.rank(),
            "a rank communicates through its own view of the process groups"
        );
        ThreadComm::new(Arc::clone(&self.seat), Membership::of(groups, kind, purpose))
    }

    /// Keeps what ends with the rank, once the job has heard how that ended.
    pub(super) fn keep(&self, guard: Box<dyn Any + Send + Sync>) {
        self.seat.kept.lock().unwrap_or_else(PoisonError::into_inner).push(guard);
    }

    /// What a thread that is no part of the rank's program may know and say of the job.
    pub(super) fn job(&self) -> JobHandle {
        JobHandle { board: Arc::clone(&self.seat.board), rank: self.seat.rank }
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
    board: Arc<dyn Board>,
    rank: Rank,
    thread: ThreadId,
    kept: Mutex<Vec<Box<dyn Any + Send + Sync>>>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        if thread::panicking() {
            let why = "a thread of this rank panicked".to_owned();
            self.board.fail_with(self.rank, CommError::PeerFailed { rank: self.rank, why });
        }
        self.board.end_thread(self.thread);
    }
}

/// How the job goes, seen from one rank.
#[derive(Clone, Debug)]
pub(super) struct JobHandle {
    board: Arc<dyn Board>,
    rank: Rank,
}

impl JobHandle {
    /// The first cause, if the job has failed.
    pub(super) fn check(&self) -> Result<(), CommError> {
        self.board.check()
    }

    /// Ends the job with this cause, unless it has failed before.
    pub(super) fn fail(&self, error: CommError) {
        self.board.fail_with(self.rank, error);
    }

    /// Ends the job if a rank is too late with what others have announced.
    pub(super) fn expire(&self) {
        self.board.expire();
    }

    /// How long a rank waits for another one.
    pub(super) fn timeout(&self) -> Duration {
        self.board.timeout()
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
    /// Its process did not find the others.
    NotJoined(LaunchError),
    /// It is another process's, and this is what that one told.
    Elsewhere(CommError),
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
            Reason::NotJoined(error) => error.fmt(f),
            // The rank is named beside the reason.
            Reason::Silent(error) | Reason::Elsewhere(error) => match error {
                CommError::PeerFailed { why, .. } | CommError::PeerLost { why, .. } => why.fmt(f),
                error => error.fmt(f),
            },
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
