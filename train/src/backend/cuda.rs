//! The CUDA backend: the driver, the run-time compiler and cuBLASLt are loaded when a GPU is opened, and nothing of them is
//! needed to build or to run without one.
//!
//! Kernels are compiled for the device at hand the first time and kept in a folder. Canonical numerics hold here too: the
//! bits are not the CPU's, but they do not depend on the layout.

#![allow(unsafe_code)]

mod arguments;
mod attention;
mod device;
mod gpu;
pub mod kernels;
pub(crate) mod lane;
mod launch;
pub mod loader;
mod matmul;
mod memory;
pub mod nvrtc;

/// Largest head of attention, in elements, that the kernels have room for.
pub const HEAD_DIM_MAX: u64 = 256;

pub use device::CudaBackend;
pub use gpu::{Gpu, OpenError};
pub use nvrtc::CompileError;
