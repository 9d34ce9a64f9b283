//! One rank's communicator in one group of a world of threads.

use super::Seat;
use super::board::{GroupIndex, ThreadId};
use super::reduce::{Payload, combine};
use crate::backend::{Backend, View};
use crate::comm::{Collective, Comm, CommError, GroupId, Membership, OpSignature, Operation, Site, Ticket};
use crate::comm::{block, copy};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

#[derive(Debug)]
pub(super) struct ThreadComm {
    seat: Arc<Seat>,
    group: GroupIndex,
    membership: Membership,
    /// What to do when an operation is whole, by sequence number.
    open: RefCell<BTreeMap<u64, Open>>,
    num_posts: Cell<u64>,
}

#[derive(Debug)]
struct Open {
    collective: Collective,
    dst: View,
}

impl ThreadComm {
    pub(super) fn new(seat: Arc<Seat>, membership: Membership) -> Self {
        let group = seat.board.group(&membership);
        ThreadComm { seat, group, membership, open: RefCell::default(), num_posts: Cell::new(0) }
    }

    fn post(&self, signature: OpSignature, payload: Payload) -> Result<u64, CommError> {
        self.num_posts.set(self.num_posts.get() + 1);
        if let Some(seed) = self.seat.board.options().jitter {
            delay(seed, self.seat.thread, self.num_posts.get());
        }
        self.seat.board.post(self.seat.thread, self.group, self.position(), signature, payload)
    }
}

impl Comm for ThreadComm {
    fn id(&self) -> &GroupId {
        &self.membership.id
    }

    fn position(&self) -> usize {
        self.membership.position
    }

    fn size(&self) -> usize {
        self.membership.size()
    }

    fn issue(&self, be: &mut dyn Backend, operation: Operation) -> Result<Ticket, CommError> {
        if self.size() == 1 {
            let (src, dst) = operation.own_part(0, 1);
            copy(be, src, dst)?;
            return Ok(Ticket::COMPLETE);
        }
        let mut payload = Payload::zeros(operation.src.size_bytes());
        be.download(operation.src, payload.bytes_mut())?;
        let sequence = self.post(operation.signature(), payload)?;
        let open = Open { collective: operation.collective, dst: operation.dst };
        self.open.borrow_mut().insert(sequence, open);
        Ok(Ticket(sequence))
    }

    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError> {
        if ticket == Ticket::COMPLETE {
            return Ok(());
        }
        let open = self.open.borrow_mut().remove(&ticket.0);
        let Open { collective, dst } = open.expect("a ticket is waited for where it was issued");
        let contributions = self.seat.board.collect(self.seat.thread, self.group, ticket.0)?;
        let payloads = &contributions.payloads;
        match collective {
            Collective::AllGather => {
                for (position, payload) in payloads.iter().enumerate() {
                    be.upload(block(dst, position, self.size()), payload.bytes())?;
                }
            }
            Collective::ReduceScatter(reduce) => {
                let first = self.position() * dst.size_bytes();
                let own = combine(reduce, dst.dtype, payloads, first..first + dst.size_bytes());
                be.upload(dst, own.bytes())?;
            }
            Collective::AllReduce(reduce) => {
                let combine = || combine(reduce, dst.dtype, payloads, 0..dst.size_bytes());
                let combined = contributions.combined.get_or_init(combine);
                be.upload(dst, combined.bytes())?;
            }
        }
        Ok(())
    }

    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if self.size() == 1 {
            return Ok(vec![bytes.to_vec()]);
        }
        let mut payload = Payload::zeros(bytes.len());
        payload.bytes_mut().copy_from_slice(bytes);
        let sequence = self.post(OpSignature::Bytes { site }, payload)?;
        let contributions = self.seat.board.collect(self.seat.thread, self.group, sequence)?;
        Ok(contributions.payloads.iter().map(|payload| payload.bytes().to_vec()).collect())
    }

    fn check(&self) -> Result<(), CommError> {
        self.seat.board.check()
    }

    fn abort(&self, why: &str) {
        self.seat.board.fail(self.seat.rank, &why);
    }
}

/// Sleeps up to 127 µs, or does nothing half of the time.
fn delay(seed: u64, thread: ThreadId, num_posts: u64) {
    let mut z = seed ^ (thread.0 as u64) << 32 ^ num_posts;
    z = z.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let micros = (z >> 56).saturating_sub(128);
    if micros > 0 {
        thread::sleep(Duration::from_micros(micros));
    }
}
