//! Ranks as processes: each knows by its launcher's environment who it is and where the job meets, and joins the others there.
//!
//! The place to meet is a hub, which keeps the same board as a world of threads does and lets each rank's process use it over TCP.
//! What ranks agree on goes through it, and on CPU their data, too: that is for launching and testing, threads are quicker.
//!
//! A rank's process comes to the hub in this order, and each connection greets (`Hello`) and joins (`Join`) in one go:
//!
//! 1. its own thread: tried until the hub answers, then waits in `Join` until all ranks have come;
//! 2. its pulse, only then: beats for as long as the process runs, takes announcements along, and hears of a failure or a wish to
//!    stop even while the rank computes;
//! 3. one for each thread that it forks, such as one that saves.
//!
//! Any connection that ends without `End` is a rank that is gone, and ends the job. Four limits of time hold:
//!
//! | limit | who waits | for what |
//! |---|---|---|
//! | the job's `timeout` | rank, hub | the hub to be there; all ranks to join; the others in an operation; the next beat of a pulse |
//! | `hub::GRACE` | hub | a connection to greet and join; ranks of a failed job to leave |
//! | `remote::PATIENCE` | rank | an answer to its greeting; beyond `timeout`, the hub's own word on who is late |
//! | `remote::PULSE` | hub | nothing longer than this lies unsent: it is the time between two beats |

mod hub;
mod launch;
mod remote;
#[cfg(test)]
mod tests;
mod wire;

pub use hub::Hub;
pub use launch::{Launch, LaunchError};

use super::CommError;
use super::board::{Board, ThreadId};
use super::threads::{RankContext, RankFailure, Reason, WorldError, outcome_of};
use remote::{NotJoined, RemoteBoard};
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
    let hub = launch.serve(timeout).map_err(|error| failed(rank, Reason::NotJoined(error)))?;
    let board: Arc<dyn Board> = match RemoteBoard::join(launch, timeout, Arc::clone(stop)) {
        Ok(board) => Arc::new(board),
        Err(error) => {
            let error = match error {
                NotJoined::Refused(error) => failed(rank, Reason::NotJoined(error)),
                NotJoined::HasFailed { rank, error } => failed(rank, Reason::Elsewhere(error)),
            };
            if let Some(hub) = hub {
                hub.fail(rank, CommError::PeerFailed { rank, why: error.first.reason.to_string() });
                hub.finish();
            }
            return Err(error);
        }
    };
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
