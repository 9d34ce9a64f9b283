//! The device that was asked for, opened.

use crate::args::DeviceArg;
use crate::report::Refusal;
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

/// Checks that there is one.
pub(crate) fn check(device: DeviceArg) -> Result<(), OpenError> {
    match device {
        DeviceArg::Cpu => Ok(()),
        DeviceArg::Cuda => Gpu::count().map(drop),
    }
}

/// Opens what one rank computes on that is a process of its own: of several GPUs, its own by its number on this machine.
///
/// # Errors
/// That of the GPU; no such number where there are several GPUs.
pub(crate) fn open_own(device: DeviceArg, local_rank: Option<u32>) -> anyhow::Result<Device> {
    match device {
        DeviceArg::Cpu => Ok(Device::Cpu),
        DeviceArg::Cuda => {
            let ordinal = own_ordinal(local_rank, Gpu::count()?)?;
            Ok(Device::Cuda(vec![Gpu::open(ordinal, cache_folder().as_deref())?]))
        }
    }
}

/// Of this many GPUs, that of the rank with this number on the machine.
fn own_ordinal(local_rank: Option<u32>, num_gpus: usize) -> Result<usize, Refusal> {
    match (local_rank, num_gpus) {
        (_, 0 | 1) => Ok(0),
        (Some(local_rank), _) => Ok(local_rank as usize % num_gpus),
        (None, _) => {
            let message = format!(
                "this machine has {num_gpus} GPUs, and the launcher does not say which of its ranks this is"
            );
            let help = "set LOCAL_RANK, or show each process its own GPU with CUDA_VISIBLE_DEVICES";
            Err(Refusal::new("RM6011", message, help))
        }
    }
}

/// `remesh` in the user's folder of caches, by the rules of freedesktop.org.
fn cache_folder() -> Option<PathBuf> {
    let from = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = from("XDG_CACHE_HOME").or_else(|| Some(from("HOME")?.join(".cache")));
    Some(caches?.join("remesh/kernels"))
}

#[cfg(test)]
mod tests {
    use super::own_ordinal;

    #[test]
    fn ranks_of_a_machine_never_share_a_gpu_because_nothing_was_said() {
        assert_eq!([0, 7, 8].map(|local_rank| own_ordinal(Some(local_rank), 8).unwrap()), [0, 7, 0]);
        assert_eq!(own_ordinal(None, 1).unwrap(), 0);
        assert!(own_ordinal(None, 8).unwrap_err().help.starts_with("set LOCAL_RANK"));
    }
}
