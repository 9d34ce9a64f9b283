//! Messages between a rank's process and the hub: a length, a header, and the bytes of contributions behind it.

use crate::comm::threads::Payload;
use crate::comm::{CommError, Membership, OpSignature};
use mesh::Rank;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeSet;
use std::io::{self, Read, Write};
use std::sync::{Mutex, PoisonError};

/// What a rank's process says.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Request {
    /// First on every connection: whether this is the hub of its job.
    Hello {
        program: String,
        job: String,
    },
    /// A thread of a rank; answered when all ranks have come.
    Join {
        rank: Rank,
        num_ranks: u32,
        place: Place,
    },
    /// Names the next group, of which the rank is the member at the position that is said.
    Group {
        membership: Membership,
    },
    /// `len` bytes follow.
    Post {
        group: usize,
        signature: OpSignature,
        len: u64,
    },
    Announce {
        group: usize,
        signature: OpSignature,
    },
    /// Answered when the operation is whole.
    Collect {
        group: usize,
        sequence: u64,
    },
    /// How the job goes.
    Check,
    Fail {
        error: CommError,
    },
    /// Nothing follows on this connection.
    End,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Place {
    /// The rank's own thread.
    Rank,
    /// Another thread of it.
    Fork,
    /// The pulse of its process.
    Pulse,
}

/// What the hub answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Welcome,
    Joined,
    Refused {
        why: String,
    },
    /// Contributions of these lengths follow.
    Whole {
        lens: Vec<u64>,
    },
    /// The job goes on.
    Fine {
        is_asked_to_stop: bool,
    },
    /// The first cause, and who failed or found it.
    Failed {
        rank: Rank,
        error: CommError,
    },
}

/// Of a header.
const LEN_MAX: u32 = 1 << 20;

pub(super) fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let header = postcard::to_allocvec(message).map_err(io::Error::other)?;
    let len = u32::try_from(header.len()).ok().filter(|len| *len <= LEN_MAX);
    let len = len.ok_or_else(|| io::Error::other("a message is too long"))?;
    to.write_all(&len.to_le_bytes())?;
    to.write_all(&header)
}

pub(super) fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<T> {
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if len > LEN_MAX {
        return Err(io::Error::other("what came is no message"));
    }
    postcard::from_bytes(&read_bytes(from, u64::from(len))?).map_err(io::Error::other)
}

/// Bytes are kept as they come, so that a length alone takes no memory.
fn read_bytes(from: &mut impl Read, len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(len).read_to_end(&mut bytes)?;
    if bytes.len() as u64 == len { Ok(bytes) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

pub(super) fn read_payload(from: &mut impl Read, len: u64) -> io::Result<Payload> {
    Ok(Payload::of(&read_bytes(from, len)?))
}

/// A word of the program's text that came from another process; each is kept for good, a few dozen in all.
pub(in crate::comm) fn word<'de, D: Deserializer<'de>>(from: D) -> Result<&'static str, D::Error> {
    const NUM_MAX: usize = 4096;
    static WORDS: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let word = String::deserialize(from)?;
    let mut words = WORDS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = words.get(word.as_str()) {
        return Ok(known);
    }
    if words.len() == NUM_MAX {
        return Err(D::Error::custom("more words than a program has"));
    }
    let word: &'static str = word.leak();
    words.insert(word);
    Ok(word)
}
