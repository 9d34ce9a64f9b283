//! Communicators over no one, for the dry run that plans memory: they use the buffers as a real one would, and note each
//! call.

use super::{Comm, CommError, GroupId, Membership, OpSignature, Operation, Site, Ticket, copy};
use crate::backend::{Backend, BackendError, Op};
use mesh::{GroupKind, ProcessGroups};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// One collective that a program called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// In which group.
    pub kind: GroupKind,
    /// What.
    pub operation: OpSignature,
}

/// The collectives of a program in its order, over all groups with more than one member. Clones share one log.
#[derive(Clone, Debug, Default)]
pub struct CallLog(Rc<RefCell<Vec<Call>>>);

impl CallLog {
    /// All calls so far.
    pub fn calls(&self) -> Vec<Call> {
        self.0.borrow().clone()
    }
}

/// A communicator that hears nobody. Source and destination count as used from the issue until the wait.
#[derive(Debug)]
pub struct RecordedComm {
    membership: Membership,
    log: CallLog,
    open: RefCell<BTreeMap<u64, Operation>>,
}

impl RecordedComm {
    /// Stands for the communicator of the group of `kind`.
    pub fn new(groups: &ProcessGroups, kind: GroupKind, log: &CallLog) -> Self {
        RecordedComm {
            membership: Membership::of(groups, kind, ""),
            log: log.clone(),
            open: RefCell::default(),
        }
    }

    /// Notes the call and returns its number.
    fn note(&self, operation: OpSignature) -> u64 {
        let mut calls = self.log.0.borrow_mut();
        calls.push(Call { kind: self.membership.id.kind, operation });
        calls.len() as u64
    }

    fn touch(&self, be: &mut dyn Backend, operation: &Operation) -> Result<(), BackendError> {
        let (src, dst) = operation.own_part(self.position(), self.size());
        be.run(Op::Copy { src, dst })
    }
}

impl Comm for RecordedComm {
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
        self.touch(be, &operation)?;
        let number = self.note(operation.signature());
        self.open.borrow_mut().insert(number, operation);
        Ok(Ticket(number))
    }

    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError> {
        if ticket == Ticket::COMPLETE {
            return Ok(());
        }
        let operation = self.open.borrow_mut().remove(&ticket.0);
        self.touch(be, &operation.expect("a ticket is waited for where it was issued"))?;
        Ok(())
    }

    /// This rank's bytes, once for each member.
    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if self.size() > 1 {
            self.note(OpSignature::Bytes { site });
        }
        Ok(vec![bytes.to_vec(); self.size()])
    }

    /// This rank's bytes, once for each member, as if it were the first.
    fn gather_bytes_at_first(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.gather_bytes(site, bytes)
    }

    fn check(&self) -> Result<(), CommError> {
        Ok(())
    }

    /// There is nobody to end.
    fn abort(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Buffers, Lifetime, Recorder};
    use crate::comm::{Collective, Reduce};
    use mesh::{DType, Group, GroupTable, Rank};
    use std::sync::Arc;

    fn groups() -> ProcessGroups {
        let ranks = vec![Rank(0), Rank(1)];
        let table = GroupTable::empty("m", ranks.clone()).with(GroupKind::Tp, Some(vec![Group::new(ranks)]));
        Arc::new(table).for_rank(Rank(1))
    }

    #[test]
    fn buffers_are_in_use_from_the_issue_until_the_wait() {
        let comm = RecordedComm::new(&groups(), GroupKind::Tp, &CallLog::default());
        type Issue = fn(&RecordedComm, &mut Recorder, crate::backend::View, crate::backend::View) -> Ticket;
        let issues: [(usize, usize, Issue); 3] = [
            (4, 8, |comm, be, src, dst| comm.all_gather(be, "op", src, dst).unwrap()),
            (8, 4, |comm, be, src, dst| comm.reduce_scatter(be, "op", Reduce::Tree, src, dst).unwrap()),
            (4, 4, |comm, be, src, dst| {
                be.run(Op::Copy { src, dst }).unwrap();
                comm.all_reduce(be, "op", Reduce::Tree, dst).unwrap()
            }),
        ];
        for (src_len, dst_len, issue) in issues {
            let mut buffers = Buffers::default();
            let mut declare = |name, len| buffers.declare(name, Lifetime::Transient, DType::F32, 1, len);
            let [src, dst] = [declare("src", src_len), declare("dst", dst_len)];
            let [meanwhile, afterwards] = ["meanwhile", "afterwards"].map(|name| declare(name, 4));
            let mut be = Recorder::new(&buffers);
            be.run(Op::Zero { dst: src }).unwrap();
            let ticket = issue(&comm, &mut be, src, dst);
            be.run(Op::Zero { dst: meanwhile }).unwrap();
            comm.wait(&mut be, ticket).unwrap();
            be.run(Op::Zero { dst: afterwards }).unwrap();
            let plan = be.plan();
            let shares = |view: crate::backend::View| plan.slot(view.buf).shares_with.clone();
            assert!(!shares(dst).contains(&meanwhile.buf));
            assert!(!shares(dst).contains(&src.buf));
            let is_read_in_place = src_len == dst_len;
            assert!(is_read_in_place || !shares(src).contains(&meanwhile.buf));
            assert!(!shares(afterwards).is_empty(), "they are free again after the wait");
        }
    }

    #[test]
    fn calls_are_noted_in_order_and_only_where_there_is_somebody_else() {
        let log = CallLog::default();
        let [tp, dp] = [GroupKind::Tp, GroupKind::Dp].map(|kind| RecordedComm::new(&groups(), kind, &log));
        assert_eq!((tp.position(), tp.size(), dp.size()), (1, 2, 1));
        let mut buffers = Buffers::default();
        let buf = buffers.declare("buf", Lifetime::Persistent, DType::F32, 1, 4);
        let be = &mut Recorder::new(&buffers);
        let ticket = tp.all_reduce(be, "norm", Reduce::Max, buf).unwrap();
        tp.wait(be, ticket).unwrap();
        let ticket = dp.all_reduce(be, "alone", Reduce::Max, buf).unwrap();
        dp.wait(be, ticket).unwrap();
        assert_eq!(tp.gather_bytes("agree", b"a").unwrap(), [b"a", b"a"]);
        let reduce = OpSignature::Tensor {
            collective: Collective::AllReduce(Reduce::Max),
            site: "norm",
            dtype: DType::F32,
            len: 4,
        };
        let expected = [reduce, OpSignature::Bytes { site: "agree" }];
        assert_eq!(log.calls(), expected.map(|operation| Call { kind: GroupKind::Tp, operation }));
    }
}
