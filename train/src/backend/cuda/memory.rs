//! Memory of the device, and pinned memory that copies pass through.

use crate::backend::MemoryPlan;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{CUdeviceptr, CUstream};
use mesh::DType;
use std::collections::BTreeMap;

/// Bytes on the device, freed when dropped.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    address: CUdeviceptr,
    len: usize,
}

impl DeviceMemory {
    /// Bytes of zeros on the current device.
    pub(super) fn zeros(len: usize, stream: CUstream) -> Result<Self, DriverError> {
        if len == 0 {
            return Ok(DeviceMemory { address: 0, len: 0 });
        }
        // SAFETY: the memory is as long as what is set.
        unsafe {
            let memory = DeviceMemory { address: result::malloc_sync(len)?, len };
            result::memset_d8_async(memory.address, 0, len, stream)?;
            Ok(memory)
        }
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated above. Freeing waits for the device; that it fails is known from other calls.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// One allocation an element type.
pub(super) fn arenas(
    plan: &MemoryPlan,
    stream: CUstream,
) -> Result<BTreeMap<DType, DeviceMemory>, DriverError> {
    let mut arenas = BTreeMap::new();
    for dtype in [DType::F32, DType::Bf16, DType::I64, DType::I32] {
        let len = plan.arena_len(dtype) * dtype.size_bytes();
        arenas.insert(dtype, DeviceMemory::zeros(len, stream)?);
    }
    // What is in a transient buffer before it is written is no number: NaN, or a negative integer.
    if cfg!(debug_assertions) {
        for slot in plan.slots().iter().filter(|slot| !slot.persistent && slot.len > 0) {
            let size = slot.dtype.size_bytes();
            let start = arenas[&slot.dtype].address + (slot.start * size) as u64;
            // SAFETY: slots lie within their arena.
            unsafe { result::memset_d8_async(start, 0xFF, slot.len * size, stream)? };
        }
    }
    Ok(arenas)
}

/// Pinned memory of the host, used as a ring by uploads.
#[derive(Debug)]
pub(super) struct Staging {
    bytes: *mut u8,
    /// First byte that no copy in flight reads.
    next: usize,
}

impl Staging {
    /// Bytes; longer copies are cut.
    pub(super) const LEN: usize = 32 << 20;

    pub(super) fn new() -> Result<Self, DriverError> {
        // SAFETY: freed when dropped. Flags 0: ordinary, cached memory.
        let bytes = unsafe { result::malloc_host(Self::LEN, 0)? };
        Ok(Staging { bytes: bytes.cast(), next: 0 })
    }

    /// `len` bytes for a copy that `stream` will make; waits for earlier ones if there is no room behind them.
    pub(super) fn take(&mut self, len: usize, stream: CUstream) -> Result<&mut [u8], DriverError> {
        assert!(len <= Self::LEN, "{len} bytes are staged at once");
        if self.next + len > Self::LEN {
            // SAFETY: the stream is the backend's.
            unsafe { result::stream::synchronize(stream)? };
            self.next = 0;
        }
        let start = self.next;
        self.next += len.next_multiple_of(64);
        // SAFETY: within the allocation, and no copy in flight uses these bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.bytes.add(start), len) })
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: allocated above; the backend has synchronised before.
        let _ = unsafe { result::free_host(self.bytes.cast()) };
    }
}
