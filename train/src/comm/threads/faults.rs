//! Faults and delays, for tests.

use super::reduce::Payload;
use crate::comm::board::ThreadId;
use mesh::{GroupKind, Rank};
use std::cell::Cell;
use std::thread;
use std::time::Duration;

/// Something that goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// On which rank.
    pub(crate) rank: Rank,
    /// In its groups of this kind.
    pub(crate) kind: GroupKind,
    /// At this operation of the group, counted from 0.
    pub(crate) sequence: u64,
    /// What happens.
    pub(crate) effect: FaultEffect,
}

/// What a [`Fault`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultEffect {
    /// The rank fails instead of issuing the operation.
    Fail,
    /// The lowest bit of its contribution's first byte is flipped.
    Corrupt,
}

impl FaultEffect {
    /// What becomes of a contribution; `None` if the operation fails.
    pub(super) fn on(self, mut payload: Payload) -> Option<Payload> {
        match self {
            FaultEffect::Fail => None,
            FaultEffect::Corrupt => {
                payload.bytes_mut().iter_mut().take(1).for_each(|byte| *byte ^= 1);
                Some(payload)
            }
        }
    }
}

/// Before each operation of a thread, sleeps up to 127 µs, or does nothing half of the time.
pub(super) fn delay(seed: Option<u64>, thread: ThreadId) {
    thread_local! {
        static NUM_POSTS: Cell<u64> = const { Cell::new(0) };
    }
    let Some(seed) = seed else { return };
    NUM_POSTS.set(NUM_POSTS.get() + 1);
    let mut z = seed ^ (thread.0 as u64) << 32 ^ NUM_POSTS.get();
    z = z.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let micros = (z >> 56).saturating_sub(128);
    if micros > 0 {
        thread::sleep(Duration::from_micros(micros));
    }
}
