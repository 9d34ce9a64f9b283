//! The device that was asked for, opened.

use crate::args::DeviceArg;
use std::path::PathBuf;
use train::backend::Device;
use train::backend::cuda::{Gpu, OpenError};

/// Opens what `num_ranks` ranks compute on: of GPUs, no more than there are ranks. Compiled kernels are kept where the user's
/// caches are.
pub(crate) fn open(device: DeviceArg, num_ranks: u32) -> Result<Device, OpenError> {
    match device {
        DeviceArg::Cpu => Ok(Device::Cpu),
        DeviceArg::Cuda => {
            let gpus = Gpu::open_first(num_ranks as usize, cache_folder().as_deref())?;
            Ok(Device::Cuda(gpus))
        }
    }
}

/// Opens what one rank computes on that is a process of its own: of several GPUs, its own by its number on this machine.
pub(crate) fn open_own(device: DeviceArg, local_rank: u32) -> Result<Device, OpenError> {
    match device {
        DeviceArg::Cpu => Ok(Device::Cpu),
        DeviceArg::Cuda => {
            let ordinal = local_rank as usize % Gpu::count()?.max(1);
            Ok(Device::Cuda(vec![Gpu::open(ordinal, cache_folder().as_deref())?]))
        }
    }
}

/// `remesh` in the user's folder of caches, by the rules of freedesktop.org.
fn cache_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")));
    Some(caches?.join("remesh/kernels"))
}
