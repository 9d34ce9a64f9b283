//! Groups whose members compute on GPUs of their own: data moves by NCCL, from GPU to GPU, on a lane beside the step, and no
//! collective makes the host wait. What members must agree on, small host data and the first cause go over the board, as
//! everywhere.

#![allow(unsafe_code)]

mod handle;
mod library;
mod link;
mod watchdog;

use super::threads::{RankContext, ThreadComm};
use super::{Comm, CommError, GroupId, Operation, Site, Ticket};
use crate::backend::cuda::Gpu;
use crate::backend::cuda::lane::Mark;
use crate::backend::{Backend, Device};
use link::Link;
use mesh::{GroupKind, ProcessGroups, Rank};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use watchdog::Watch;

/// A rank's ways to other GPUs: one for each set of ranks that it shares a group with.
///
/// Groups of the same ranks share one. Its collectives run one after another, in the order of the program, which is the same on
/// all members.
#[derive(Debug, Default)]
pub struct Links {
    /// `None` where members share a GPU, which NCCL refuses: there the group's data goes through the host.
    by_ranks: BTreeMap<Vec<Rank>, Option<Rc<Link>>>,
}

impl Links {
    /// Connects a rank that computes on `device` with its groups of these kinds. Collective; does nothing without GPUs.
    ///
    /// # Errors
    /// If NCCL is not there or fails, and what ends any collective.
    pub fn connect(
        context: &RankContext,
        device: &Device,
        groups: &ProcessGroups,
        kinds: &[GroupKind],
    ) -> Result<Links, CommError> {
        let mut links = Links::default();
        let Some(gpu) = device.gpu(context.rank()) else { return Ok(links) };
        let mut watch: Option<Arc<Watch>> = None;
        for (kind, group) in kinds.iter().filter_map(|kind| Some((*kind, groups.get(*kind)?))) {
            let ranks = group.ranks();
            if ranks.len() == 1 || links.by_ranks.contains_key(ranks) {
                continue;
            }
            let comm = context.comm_for("link", groups, kind);
            let mut gpus = comm.gather_bytes("link.gpu", &identity(gpu))?;
            gpus.sort();
            let link = match gpus.windows(2).any(|pair| pair[0] == pair[1]) {
                true => None,
                false => {
                    let watch = watch.get_or_insert_with(|| watchdog::start(context, gpu));
                    Some(Rc::new(Link::new(context, gpu, &*comm, Arc::clone(watch))?))
                }
            };
            links.by_ranks.insert(ranks.to_vec(), link);
        }
        Ok(links)
    }

    /// The communicator of this rank's group of `kind`, as [`RankContext::comm`], over NCCL where there is a link.
    ///
    /// # Panics
    /// As [`RankContext::comm`].
    pub fn comm(&self, context: &RankContext, groups: &ProcessGroups, kind: GroupKind) -> Rc<dyn Comm> {
        let link = groups.get(kind).and_then(|group| self.by_ranks.get(group.ranks())?.clone());
        let control = context.board_comm("", groups, kind);
        match link {
            Some(link) => Rc::new(NcclComm { control, link, open: RefCell::default() }),
            None => Rc::new(control),
        }
    }
}

/// What NCCL takes for one GPU: one of another host, which it knows by this variable where it is set, is another one.
fn identity(gpu: &Gpu) -> Vec<u8> {
    let host = std::env::var("NCCL_HOSTID").unwrap_or_default();
    [&gpu.uuid()[..], host.as_bytes()].concat()
}

/// A communicator over a link.
#[derive(Debug)]
struct NcclComm {
    control: ThreadComm,
    link: Rc<Link>,
    /// Where the lane was behind each operation, by its number.
    open: RefCell<BTreeMap<u64, Mark>>,
}

impl Comm for NcclComm {
    fn id(&self) -> &GroupId {
        self.control.id()
    }

    fn position(&self) -> usize {
        self.control.position()
    }

    fn size(&self) -> usize {
        self.control.size()
    }

    fn issue(&self, be: &mut dyn Backend, operation: Operation) -> Result<Ticket, CommError> {
        let be = be.as_cuda().expect("a link is between GPUs");
        let sequence = self.control.announce(operation.signature())?;
        let mark = self.link.issue(be, &operation, self.size(), || {
            self.control.waits_for_all(sequence, operation.signature())
        })?;
        self.open.borrow_mut().insert(sequence, mark);
        Ok(Ticket(sequence))
    }

    /// Makes what the rank queues from now on wait for the operation; the host goes on.
    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError> {
        if ticket == Ticket::COMPLETE {
            return Ok(());
        }
        let mark = self.open.borrow_mut().remove(&ticket.0);
        let mark = mark.expect("a ticket is waited for where it was issued");
        self.link.join(be.as_cuda().expect("a link is between GPUs"), mark)
    }

    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.gather_bytes(site, bytes)
    }

    fn gather_bytes_at_first(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.control.gather_bytes_at_first(site, bytes)
    }

    fn check(&self) -> Result<(), CommError> {
        self.control.check()
    }

    fn abort(&self, why: &str) {
        self.control.abort(why);
    }
}
