//! What computes: views into planned buffers, the closed set of operations, and the trait a device implements.
//!
//! A program is a sequence of [`Op`]s on [`View`]s. The same program runs on a device or on the recorder of `plan.rs`,
//! which learns from it when each buffer lives.

mod check;
pub mod cpu;
pub mod cuda;
mod op;
mod plan;
#[cfg(test)]
mod refops;
mod view;

pub use op::{Accumulate, AdamWStep, AttentionInputs, Center, Dropout, Heads, HiddenSite, Op};
pub use plan::{Buffers, Lifetime, MemoryPlan, Recorder, Slot};
pub use view::{BufId, View};

use crate::config::Numerics;
use cpu::CpuBackend;
use cuda::{CudaBackend, Gpu};
use mesh::Rank;
use std::sync::Arc;

/// What ranks compute on.
#[derive(Clone, Debug, Default)]
pub enum Device {
    /// The processor, each rank in its own thread.
    #[default]
    Cpu,
    /// One or more GPUs: rank r computes on number r modulo their count, so that several ranks may share one.
    Cuda(Vec<Arc<Gpu>>),
}

impl Device {
    /// Largest head of attention that the device has kernels for; `None` if any.
    pub fn head_dim_max(&self) -> Option<u64> {
        match self {
            Device::Cpu => None,
            Device::Cuda(_) => Some(cuda::HEAD_DIM_MAX),
        }
    }

    /// Whether attention can be kept to the keys from one position on.
    pub fn hides_documents(&self) -> bool {
        matches!(self, Device::Cpu)
    }

    /// The GPU of a rank, if ranks compute on GPUs.
    pub(crate) fn gpu(&self, rank: Rank) -> Option<&Arc<Gpu>> {
        match self {
            Device::Cpu => None,
            Device::Cuda(gpus) => Some(&gpus[rank.index() % gpus.len()]),
        }
    }

    /// The memory of `rank`, with the buffers of `plan`. Under canonical numerics nothing is used whose bits depend on how work is
    /// cut.
    ///
    /// # Errors
    /// What the device says, above all that its memory is too small.
    pub fn backend(
        &self,
        rank: Rank,
        plan: MemoryPlan,
        numerics: &Numerics,
    ) -> Result<Box<dyn Backend>, BackendError> {
        Ok(match self.gpu(rank) {
            None => Box::new(CpuBackend::new(plan)),
            Some(gpu) => Box::new(gpu.backend(plan, numerics)?),
        })
    }
}

/// A device, or the recorder that stands for one while memory is planned. One a rank.
pub trait Backend {
    /// Runs one operation.
    ///
    /// # Errors
    /// What the device says. Operands of the wrong shape or type are wrong code and panic.
    fn run(&mut self, op: Op) -> Result<(), BackendError>;

    /// Writes little-endian row-major `bytes` into `dst`.
    ///
    /// # Errors
    /// What the device says.
    fn upload(&mut self, dst: View, bytes: &[u8]) -> Result<(), BackendError>;

    /// Reads `src` into `bytes`, little-endian and row-major.
    ///
    /// # Errors
    /// What the device says.
    fn download(&mut self, src: View, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// The largest magnitude that one fixed-point addition has met since the last call, in units of 2^(62 − bits). A sum
    /// of n additions has kept its range if n times this is at most 1. Infinite if NaN was added, or `SquareNorm` left an
    /// element out.
    ///
    /// # Errors
    /// What the device says.
    fn take_fixed_point_peak(&mut self) -> Result<f32, BackendError>;

    /// The CUDA backend, if it is one: what moves data between GPUs needs its memory and its queue.
    fn as_cuda(&self) -> Option<&CudaBackend> {
        None
    }
}

/// A device failed, or is too small.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The device has an error of its own.
    #[error("{operation} failed on the device: {reason}")]
    Failed {
        /// Which operation.
        operation: &'static str,
        /// The device's words.
        reason: String,
    },
    /// The planned memory does not fit.
    #[error("the device has no room for {bytes} bytes of planned memory")]
    OutOfMemory {
        /// Of all arenas.
        bytes: usize,
    },
}

impl BackendError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            BackendError::Failed { .. } => "RM3203",
            BackendError::OutOfMemory { .. } => "RM8004",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            BackendError::Failed { .. } => "the device's words say what failed",
            BackendError::OutOfMemory { .. } => {
                "a smaller micro-batch, or more ranks on more devices, need less memory on each"
            }
        }
    }
}
