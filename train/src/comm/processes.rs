//! Ranks as processes: each knows by its launcher's environment who it is and where the job meets, and joins the others there.
//!
//! The place to meet is a hub, which keeps the same board as a world of threads does and lets each rank's process use it over TCP.
//! What ranks agree on goes through it, and on CPU their data, too: that is for launching and testing, threads are quicker.

mod hub;
mod launch;
mod remote;
#[cfg(test)]
mod tests;
mod wire;

pub use hub::Hub;
pub use launch::{Launch, LaunchError};

use super::board::{Board, ThreadId};
use super::threads::{RankContext, RankFailure, Reason, WorldError, outcome_of};
use remote::RemoteBoard;
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;
pub(super) use wire::word;

/// Runs `program` as the one rank that `launch` says this process is, and returns when it has ended; the process that the job meets
/// at, when all have. A rank waits up to `timeout` for the others, be it to join or to answer. `stop` is set when the launcher
/// asks the job to stop.
///
/// # Errors
/// The first cause, this rank's or another one's, as [`World::run`](super::threads::World::run).
pub fn run<R, E: Display>(
    launch: &Launch,
    timeout: Duration,
    stop: &Arc<AtomicBool>,
    program: impl FnOnce(&RankContext) -> Result<R, E>,
) -> Result<R, WorldError<E>> {
    let rank = launch.rank;
    let failed = |rank, reason| WorldError { first: RankFailure { rank, reason }, followers: Vec::new() };
    let not_joined = |error: LaunchError| failed(rank, Reason::NotJoined(error));
    let hub = launch.serve(timeout).map_err(not_joined)?;
    let board = RemoteBoard::join(launch, timeout, Arc::clone(stop)).map_err(not_joined)?;
    let board: Arc<dyn Board> = Arc::new(board);
    let outcome = outcome_of(RankContext::new(&board, rank, ThreadId(0)), program);
    let result = match (outcome, board.first_cause()) {
        (Ok(result), None) => Ok(result),
        (Err(reason), Some((first, _))) if first == rank => Err(failed(rank, reason)),
        (_, Some((first, error))) => Err(failed(first, Reason::Elsewhere(error))),
        // It could not be told, and nobody else failed.
        (Err(reason), None) => Err(failed(rank, reason)),
    };
    drop(board);
    if let Some(hub) = hub {
        hub.finish();
    }
    result
}
