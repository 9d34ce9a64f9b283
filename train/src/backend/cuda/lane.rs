//! A queue of work beside a rank's own, for what moves data between GPUs while the rank computes. Neither waits for the host.

use super::CudaBackend;
use super::arguments::{Arguments, Mat};
use super::device::failed;
use super::gpu::Gpu;
use super::launch::grid_of_elements;
use crate::backend::BackendError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr, CUstream};
use mesh::DType;
use std::sync::Arc;

/// A stream of its own on a rank's GPU.
#[derive(Debug)]
pub(crate) struct Lane {
    gpu: Arc<Gpu>,
    stream: CUstream,
    /// Where the rank's own queue was when the lane last followed it.
    followed: Event,
    /// Marks that nobody waits for any more.
    free: Vec<Event>,
}

/// What a lane had queued when it was made.
#[derive(Debug)]
pub(crate) struct Mark(Event);

/// How blocks are combined, pair by pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairwise {
    /// Sums of F32 or BF16.
    Add,
    /// Maxima of F32: NaN wins, and +0 is above -0.
    Max,
}

impl Lane {
    /// An empty lane; `gpu` becomes the calling thread's.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, BackendError> {
        let new = || {
            gpu.enter()?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok(Lane { gpu: Arc::clone(gpu), stream, followed: Event::new()?, free: Vec::new() })
        };
        new().map_err(failed::<DriverError>("setting up a lane"))
    }

    /// For calls that queue work on it.
    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// What is queued here from now on starts after everything that `be` has queued so far.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn follow(&self, be: &CudaBackend) -> Result<(), BackendError> {
        let follow = || {
            self.followed.record(be.stream)?;
            self.followed.hold(self.stream)
        };
        follow().map_err(failed("following the step"))
    }

    /// A mark behind everything that is queued here.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn mark(&mut self) -> Result<Mark, BackendError> {
        let mut mark = || {
            let event = self.free.pop().map_or_else(Event::new, Ok)?;
            event.record(self.stream)?;
            Ok(Mark(event))
        };
        mark().map_err(failed::<DriverError>("marking a lane"))
    }

    /// What `be` queues from now on starts after what lies before `mark`.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn join(&mut self, be: &CudaBackend, Mark(event): Mark) -> Result<(), BackendError> {
        event.hold(be.stream).map_err(failed("joining a lane"))?;
        self.free.push(event);
        Ok(())
    }

    /// Memory until it is dropped, in the order of this lane.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn scratch(&self, len: usize) -> Result<Scratch, BackendError> {
        Scratch::new(len, self.stream).map_err(failed("scratch memory of a lane"))
    }

    /// `dst` = `num_blocks` blocks of `len` elements, which follow each other in `blocks`, combined as a tree: neighbours first,
    /// then pairs of pairs; a last odd one waits. The blocks are spoilt.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn combine(
        &self,
        pairwise: Pairwise,
        dtype: DType,
        blocks: &Scratch,
        (num_blocks, len): (usize, usize),
        dst: CUdeviceptr,
    ) -> Result<(), BackendError> {
        let kernel = match (pairwise, dtype) {
            (Pairwise::Add, DType::F32) => "add_f32",
            (Pairwise::Add, DType::Bf16) => "add_bf16",
            (Pairwise::Max, DType::F32) => "max_f32",
            (_, other) => panic!("no blocks of {other} are combined"),
        };
        let block_bytes = len * dtype.size_bytes();
        assert_eq!(blocks.len, num_blocks * block_bytes, "bytes of {num_blocks} blocks of {len} elements");
        let block = |index: usize| Mat {
            address: blocks.address + (index * block_bytes) as u64,
            stride: len as i64,
            rows: 1,
            cols: len as i64,
        };
        let is_wide = block_bytes.is_multiple_of(16) && blocks.address.is_multiple_of(16);
        let pack = if is_wide { 16 / dtype.size_bytes() } else { 1 };
        let (grid, threads) = grid_of_elements((1, len), pack);
        let combine = || {
            let mut distance = 1;
            while distance < num_blocks {
                for first in (0..num_blocks - distance).step_by(2 * distance) {
                    let operands = Arguments::default().and(block(first + distance)).and(block(first));
                    let arguments = operands.and(i32::from(is_wide));
                    // SAFETY: two `Mat`s and an int, as `rows.cu` has it; both lie in the scratch memory, whose length was
                    // compared above.
                    unsafe { self.gpu.launch(self.stream, kernel, grid, threads, 0, arguments) }?;
                }
                distance *= 2;
            }
            // SAFETY: the caller's destination has `len` elements, and so has the first block.
            unsafe { result::memcpy_dtod_async(dst, blocks.address, block_bytes, self.stream) }
        };
        combine().map_err(failed::<DriverError>("combining"))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: the stream is this lane's, and nothing is queued on it when it goes.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Memory of a stream's pool: it is taken and given back in the order of the stream, and nothing waits for it.
#[derive(Debug)]
pub(crate) struct Scratch {
    address: CUdeviceptr,
    len: usize,
    stream: CUstream,
}

impl Scratch {
    pub(super) const NONE: Scratch = Scratch { address: 0, len: 0, stream: std::ptr::null_mut() };

    /// `len` bytes that work queued on `stream` may use.
    pub(super) fn new(len: usize, stream: CUstream) -> Result<Self, DriverError> {
        if len == 0 {
            return Ok(Scratch::NONE);
        }
        // SAFETY: given back when dropped, behind all work of the stream that may use it.
        let address = unsafe { result::malloc_async(stream, len)? };
        Ok(Scratch { address, len, stream })
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated on this stream; work that uses it was queued before.
            let _ = unsafe { result::free_async(self.address, self.stream) };
        }
    }
}

/// A place in a stream.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: events belong to the process; the driver locks what it must.
unsafe impl Send for Event {}

impl Event {
    /// Behind everything that a stream of the current GPU has queued.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn on(stream: CUstream) -> Result<Self, BackendError> {
        let on = || {
            let event = Event::new()?;
            event.record(stream)?;
            Ok(event)
        };
        on().map_err(failed::<DriverError>("marking a lane"))
    }

    fn new() -> Result<Self, DriverError> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?))
    }

    /// Moves it behind everything that `stream` has queued.
    fn record(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: both are alive and of one GPU.
        unsafe { result::event::record(self.0, stream) }
    }

    /// What `stream` queues from now on waits for it.
    fn hold(&self, stream: CUstream) -> Result<(), DriverError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both are alive and of one GPU.
        unsafe { result::stream::wait_event(stream, self.0, flags) }
    }

    /// Whether everything before it is done; an error of that work counts as done.
    pub(crate) fn is_reached(&self) -> bool {
        // SAFETY: it is alive.
        let error = unsafe { result::event::query(self.0) }.err();
        error.is_none_or(|error| error.0 != sys::CUresult::CUDA_ERROR_NOT_READY)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it is not used after this; the driver keeps what a queue still waits for.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
