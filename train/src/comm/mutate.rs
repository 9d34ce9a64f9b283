//! A communicator that leaves one call out, for tests that ask whether anybody would notice.

use super::{Collective, Comm, CommError, GroupId, Operation, Site, Ticket, block, copy};
use crate::backend::Backend;
use std::rc::Rc;

/// Does what `inner` does, but at one call site every rank hears only itself: a gather repeats its own block, a
/// reduction is its own contribution. All members need the same mutation.
pub struct Mutated {
    inner: Rc<dyn Comm>,
    site: Site,
}

impl Mutated {
    /// Leaves out the collectives at `site`.
    pub fn new(inner: Rc<dyn Comm>, site: Site) -> Self {
        Mutated { inner, site }
    }
}

impl Comm for Mutated {
    fn id(&self) -> &GroupId {
        self.inner.id()
    }

    fn position(&self) -> usize {
        self.inner.position()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn issue(&self, be: &mut dyn Backend, operation: Operation) -> Result<Ticket, CommError> {
        if operation.site != self.site {
            return self.inner.issue(be, operation);
        }
        let (position, size) = (self.position(), self.size());
        let (src, dst) = operation.own_part(position, size);
        copy(be, src, dst)?;
        if operation.collective == Collective::AllGather {
            for other in (0..size).filter(|other| *other != position) {
                copy(be, dst, block(operation.dst, other, size))?;
            }
        }
        Ok(Ticket::COMPLETE)
    }

    fn wait(&self, be: &mut dyn Backend, ticket: Ticket) -> Result<(), CommError> {
        self.inner.wait(be, ticket)
    }

    fn gather_bytes(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        if site == self.site {
            return Ok(vec![bytes.to_vec(); self.size()]);
        }
        self.inner.gather_bytes(site, bytes)
    }

    fn gather_bytes_at_first(&self, site: Site, bytes: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.inner.gather_bytes_at_first(site, bytes)
    }

    fn check(&self) -> Result<(), CommError> {
        self.inner.check()
    }

    fn abort(&self, why: &str) {
        self.inner.abort(why);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::Reduce;
    use crate::comm::host_memory::HostMemory;
    use crate::comm::threads::{World, WorldOptions};
    use mesh::{DType, Group, GroupKind, GroupTable, Rank};
    use std::sync::Arc;

    #[test]
    fn at_the_named_site_a_rank_hears_itself_and_elsewhere_all() {
        let ranks = vec![Rank(0), Rank(1)];
        let table = GroupTable::empty("m", ranks.clone()).with(GroupKind::Tp, Some(vec![Group::new(ranks)]));
        let table = Arc::new(table);
        World::run(2, WorldOptions::default(), |context| -> Result<(), CommError> {
            let whole = context.comm(&table.for_rank(context.rank()), GroupKind::Tp);
            let comm = Mutated::new(whole, "mutated");
            let own = context.rank().0 as f32;
            let be = &mut HostMemory::default();
            let mut run = |site| -> Result<_, CommError> {
                let src = be.holding(DType::F32, &[own, own + 10.0]);
                let (gathered, part) = (be.declare(DType::F32, 2, 2), be.declare(DType::F32, 1, 1));
                let gather = comm.all_gather(be, site, src, gathered)?;
                let scatter = comm.reduce_scatter(be, site, Reduce::Tree, src, part)?;
                let reduce = comm.all_reduce(be, site, Reduce::Tree, src)?;
                for ticket in [reduce, gather, scatter] {
                    comm.wait(be, ticket)?;
                }
                let bytes = comm.gather_bytes(site, &[own as u8])?.concat();
                Ok(([gathered, part, src].map(|view| be.values::<f32>(view)), bytes))
            };
            let both = [vec![0.0, 10.0, 1.0, 11.0], vec![[1.0, 21.0][own as usize]], vec![1.0, 21.0]];
            assert_eq!(run("other")?, (both, vec![0, 1]));
            let alone = [
                vec![own, own + 10.0, own, own + 10.0],
                vec![[0.0, 11.0][own as usize]],
                vec![own, own + 10.0],
            ];
            assert_eq!(run("mutated")?, (alone, vec![own as u8; 2]));
            Ok(())
        })
        .unwrap();
    }
}
