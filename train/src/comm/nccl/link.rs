//! One rank's end of a communicator of NCCL, and the lane that its collectives run on.

use super::handle::Handle;
use super::library::{Config, IN_PROGRESS, Nccl, SUCCESS, SUM, Type, UniqueId};
use super::watchdog::Watch;
use crate::backend::cuda::lane::{Lane, Mark, Pairwise};
use crate::backend::cuda::{CudaBackend, Gpu};
use crate::comm::threads::RankContext;
use crate::comm::{Blocked, Collective, Comm, CommError, Operation, Reduce};
use mesh::DType;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Link {
    nccl: &'static Nccl,
    handle: Arc<Handle>,
    lane: RefCell<Lane>,
    watch: Arc<Watch>,
}

impl Link {
    /// This rank's end of a communicator among the members of `comm`. Collective.
    pub(super) fn new(
        context: &RankContext,
        gpu: &Arc<Gpu>,
        comm: &dyn Comm,
        watch: Arc<Watch>,
    ) -> Result<Link, CommError> {
        let nccl = Nccl::get()?;
        let lane = RefCell::new(Lane::new(gpu)?);
        let mut id = UniqueId { bytes: [0; 128] };
        let own: &[u8] = match comm.position() {
            0 => {
                // SAFETY: it writes an id.
                let code = unsafe { (nccl.ncclGetUniqueId)(&mut id) };
                if code != SUCCESS {
                    return Err(nccl.failed("ncclGetUniqueId", code, std::ptr::null_mut()));
                }
                &id.bytes
            }
            _ => &[],
        };
        let told = comm.gather_bytes("link.id", own)?.swap_remove(0);
        id.bytes = told.try_into().expect("the first member tells an id");
        let (size, position) = (comm.size() as c_int, comm.position() as c_int);
        let mut communicator = std::ptr::null_mut();
        // SAFETY: the lane has made the rank's GPU this thread's; the configuration is read before the call returns.
        let code = unsafe {
            let mut config = Config::non_blocking();
            (nccl.ncclCommInitRankConfig)(&mut communicator, size, id, position, &mut config)
        };
        if communicator.is_null() {
            return Err(nccl.failed("ncclCommInitRankConfig", code, communicator));
        }
        let handle = Arc::new(Handle::new(nccl, context.job(), communicator));
        watch.add(&handle);
        handle.settle("ncclCommInitRankConfig", code)?;
        Ok(Link { nccl, handle, lane, watch })
    }

    /// Queues an operation behind everything that `be` has queued; the mark is behind the operation. `blocked` says who waits
    /// until it is done.
    pub(super) fn issue(
        &self,
        be: &CudaBackend,
        operation: &Operation,
        size: usize,
        blocked: impl FnOnce() -> Blocked,
    ) -> Result<Mark, CommError> {
        let Operation { collective, src, dst, .. } = *operation;
        let mut lane = self.lane.borrow_mut();
        lane.follow(be)?;
        let (from, to) = (be.address(src), be.address(dst));
        let (nccl, stream, len) = (self.nccl, lane.stream(), dst.numel());
        match collective {
            Collective::AllGather => {
                // SAFETY: `dst` has `size` times the bytes of `src`; `Operation::new` has compared them.
                self.handle.call("ncclAllGather", |communicator| unsafe {
                    (nccl.ncclAllGather)(
                        at(from),
                        at(to),
                        src.size_bytes(),
                        Type::Bytes,
                        communicator,
                        stream,
                    )
                })?;
            }
            Collective::AllReduce(Reduce::Sum | Reduce::Fixed) => {
                let dtype = summed(dst.dtype);
                // SAFETY: both have `len` elements.
                self.handle.call("ncclAllReduce", |communicator| unsafe {
                    (nccl.ncclAllReduce)(at(from), at(to), len, dtype, SUM, communicator, stream)
                })?;
            }
            Collective::ReduceScatter(Reduce::Sum | Reduce::Fixed) => {
                let dtype = summed(dst.dtype);
                // SAFETY: `dst` has `len` elements and `src` `size` times as many.
                self.handle.call("ncclReduceScatter", |communicator| unsafe {
                    (nccl.ncclReduceScatter)(at(from), at(to), len, dtype, SUM, communicator, stream)
                })?;
            }
            // An order of ours: everybody's part comes here, and is combined here.
            Collective::AllReduce(reduce) => {
                let parts = lane.scratch(size * dst.size_bytes())?;
                // SAFETY: `parts` has `size` times the bytes of `src`.
                self.handle.call("ncclAllGather", |communicator| unsafe {
                    let (to, bytes) = (at(parts.address()), src.size_bytes());
                    (nccl.ncclAllGather)(at(from), to, bytes, Type::Bytes, communicator, stream)
                })?;
                lane.combine(pairwise(reduce), dst.dtype, &parts, (size, len), to)?;
            }
            Collective::ReduceScatter(reduce) => {
                let bytes = dst.size_bytes();
                let parts = lane.scratch(size * bytes)?;
                // SAFETY: `src` and `parts` are `size` blocks of `bytes` bytes.
                self.handle.call("ncclSend and ncclRecv", |communicator| unsafe {
                    let start = (nccl.ncclGroupStart)();
                    let mut codes = vec![start];
                    for peer in 0..size {
                        let (offset, peer) = ((peer * bytes) as u64, peer as c_int);
                        let (block, part) = (at(from + offset), at(parts.address() + offset));
                        codes.push((nccl.ncclSend)(block, bytes, Type::Bytes, peer, communicator, stream));
                        codes.push((nccl.ncclRecv)(part, bytes, Type::Bytes, peer, communicator, stream));
                    }
                    codes.push((nccl.ncclGroupEnd)());
                    let failed = codes.iter().find(|code| ![SUCCESS, IN_PROGRESS].contains(code));
                    *failed.unwrap_or(&codes[codes.len() - 1])
                })?;
                lane.combine(pairwise(reduce), dst.dtype, &parts, (size, len), to)?;
            }
        }
        let mark = lane.mark()?;
        self.watch.expect(&self.handle, stream, blocked)?;
        Ok(mark)
    }

    /// What `be` queues from now on starts after what lies before `mark`.
    pub(super) fn join(&self, be: &CudaBackend, mark: Mark) -> Result<(), CommError> {
        Ok(self.lane.borrow_mut().join(be, mark)?)
    }
}

fn at(address: u64) -> *mut c_void {
    address as *mut c_void
}

fn summed(dtype: DType) -> Type {
    match dtype {
        DType::F32 => Type::F32,
        DType::Bf16 => Type::Bf16,
        DType::I64 => Type::I64,
        other => panic!("nothing sums {other}"),
    }
}

fn pairwise(reduce: Reduce) -> Pairwise {
    match reduce {
        Reduce::Tree => Pairwise::Add,
        Reduce::Max => Pairwise::Max,
        Reduce::Sum | Reduce::Fixed => panic!("{reduce:?} is NCCL's"),
    }
}
