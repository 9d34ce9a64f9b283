//! One rank's communicator in one group of a world of threads.

use super::Seat;
use super::reduce::{Payload, combine};
use crate::backend::{Backend, View};
use crate::comm::board::{Contributions, GroupIndex};
use crate::comm::{
    Blocked, Collective, Comm, CommError, GroupId, Membership, OpSignature, Operation, Site, Ticket,
};
use crate::comm::{block, copy};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
pub(in crate::comm) struct ThreadComm {
    seat: Arc<Seat>,
    group: GroupIndex,
    membership: Membership,
    /// What to do when an operation is whole, by sequence number.
    open: RefCell<BTreeMap<u64, Open>>,
}

#[derive(Debug)]
struct Open {
    collective: Collective,
    dst: View,
}

impl ThreadComm {
    pub(super) fn new(seat: Arc<Seat>, membership: Membership) -> Self {
        let group = seat.board.group(seat.thread, &membership);
        ThreadComm { seat, group, membership, open: RefCell::default() }
    }

    fn post(&self, signature: OpSignature, payload: Payload) -> Result<u64, CommError> {
        self.seat.board.post(self.seat.thread, self.group, self.position(), signature, payload)
    }

    /// Says what this member does elsewhere, and returns the operation's number.
    pub(in crate::comm) fn announce(&self, signature: OpSignature) -> Result<u64, CommError> {
        self.seat.board.announce(self.seat.thread, self.group, self.position(), signature)
    }

    /// How this rank is described while it waits for an announced operation.
    pub(in crate::comm) fn waits_for_all(&self, sequence: u64, operation: OpSignature) -> Blocked {
        let Membership { id, ranks, position } = &self.membership;
        let missing = ranks.iter().copied().filter(|rank| *rank != ranks[*position]).collect();
        Blocked { rank: ranks[*position], group: id.clone(), sequence, operation, missing }
    }

    /// Blocks until all members have done the same.
    fn contribute_bytes(&self, site: Site, bytes: &[u8]) -> Result<Arc<Contributions>, CommError> {
        let sequence = self.post(OpSignature::Bytes { site }, Payload::of(bytes))?;
        self.seat.board.collect(self.seat.thread, self.group, sequence)
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
        let contributions = self.contribute_bytes(site, bytes)?;
        Ok(contributions.payloads.iter().map(|payload| payload.bytes().to_vec()).collect())
    }

    fn gather_bytes_at_first(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        match self.position() {
            0 => self.gather_bytes(site, bytes),
            _ => self.contribute_bytes(site, bytes).map(|_| Vec::new()),
        }
    }

    fn check(&self) -> Result<(), CommError> {
        self.seat.board.check()
    }

    fn abort(&self, why: &str) {
        let rank = self.seat.rank;
        self.seat.board.fail_with(rank, CommError::PeerFailed { rank, why: why.to_owned() });
    }
}
