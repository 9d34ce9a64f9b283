//! The device that was asked for, opened.

use crate::args::DeviceArg;
use std::path::PathBuf;
use train::backend::Device;
use train::backend::cuda::{Gpu, OpenError};

/// Opens the device. Compiled kernels are kept where the user's caches are.
pub(crate) fn open(device: DeviceArg) -> Result<Device, OpenError> {
    match device {
        DeviceArg::Cpu => Ok(Device::Cpu),
        DeviceArg::Cuda => Ok(Device::Cuda(Gpu::open(0, cache_folder().as_deref())?)),
    }
}

/// `remesh` in the user's folder of caches, by the rules of freedesktop.org.
fn cache_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")));
    Some(caches?.join("remesh/kernels"))
}
