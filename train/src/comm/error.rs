//! Why a collective did not complete.

use super::{GroupId, OpSignature};
use crate::backend::BackendError;
use mesh::Rank;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Why a collective did not complete. Once one happens in a job every rank gets the same at its next call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum CommError {
    /// A rank ended first; its reason is the cause.
    #[error("rank {rank} failed: {why}")]
    PeerFailed {
        /// The first rank that failed.
        rank: Rank,
        /// Its reason.
        why: String,
    },
    /// A rank is gone without having told why.
    #[error("rank {rank} failed: {why}")]
    PeerLost {
        /// The first rank that is gone.
        rank: Rank,
        /// How that was seen.
        why: String,
    },
    /// Members issued different operations.
    #[error(transparent)]
    Desync(Box<Desync>),
    /// Ranks wait for each other, or for one that has ended.
    #[error("deadlock: {}{}", table(.blocked), ended_ranks(.ended))]
    Deadlock {
        /// All waiting ranks.
        blocked: Vec<Blocked>,
        /// Ranks that ended without an error.
        ended: Vec<Rank>,
    },
    /// A rank did not come in time.
    #[error("no answer within {limit:?}: {}", table(.blocked))]
    TimedOut {
        /// How long a rank waits.
        limit: Duration,
        /// All waiting ranks.
        blocked: Vec<Blocked>,
    },
    /// Ranks compute on several GPUs, and NCCL is not there to move data between them.
    #[serde(skip)]
    #[error("several GPUs need NCCL 2.14 or newer, and libnccl.so.2 was not found or is older")]
    NoNccl,
    /// The device failed while a buffer was moved.
    #[serde(skip)]
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl CommError {
    /// The error as other processes are told: what is one rank's own is its reason.
    pub(super) fn told_by(self, rank: Rank) -> CommError {
        match self {
            CommError::NoNccl | CommError::Backend(_) => {
                CommError::PeerFailed { rank, why: self.to_string() }
            }
            other => other,
        }
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            CommError::PeerFailed { .. } => "RM3200",
            CommError::TimedOut { .. } => "RM3204",
            CommError::PeerLost { .. } => "RM3208",
            CommError::NoNccl => "RM8005",
            CommError::Backend(error) => error.code(),
            CommError::Desync(_) | CommError::Deadlock { .. } => "RM9003",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            CommError::PeerFailed { .. } => "the first cause is the other rank's",
            CommError::PeerLost { .. } => {
                "run again: it goes on from the last save; the system's log says whether memory was short"
            }
            CommError::TimedOut { .. } => {
                "a rank was too busy, or its disk too slow; run again, with a longer --distributed-timeout-minutes"
            }
            CommError::NoNccl => {
                "install it (for example `pip install nvidia-nccl-cu13` in the active virtual environment); `remesh doctor` \
                 shows what is found"
            }
            CommError::Backend(error) => error.help(),
            CommError::Desync(_) | CommError::Deadlock { .. } => {
                "this is a fault of the program; please report it with this text"
            }
        }
    }
}

/// Two members issued different operations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{group}: operation {sequence} is {issued} on rank {rank} but {other_issued} on rank {other}")]
pub struct Desync {
    /// In which group.
    pub group: GroupId,
    /// Number of the operation in that group.
    pub sequence: u64,
    /// The member that came first.
    pub rank: Rank,
    /// What it issued.
    pub issued: OpSignature,
    /// The first member that differs.
    pub other: Rank,
    /// What that one issued.
    pub other_issued: OpSignature,
}

/// A rank that waits, and for whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

fn table(blocked: &[Blocked]) -> String {
    let line = |b: &Blocked| {
        let missing = list(&b.missing);
        format!(
            "rank {} waits in {} operation {} ({}) for {missing}",
            b.rank, b.group, b.sequence, b.operation
        )
    };
    blocked.iter().map(line).collect::<Vec<_>>().join("; ")
}

fn ended_ranks(ended: &[Rank]) -> String {
    if ended.is_empty() { String::new() } else { format!("; ended: {}", list(ended)) }
}

pub(super) fn list(ranks: &[Rank]) -> String {
    ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", ")
}
