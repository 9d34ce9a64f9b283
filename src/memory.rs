//! How much memory there is, so that what cannot fit is refused before any of it is asked for.

use crate::args::DeviceArg;
use train::config::{ConfigError, TrainConfig};

/// Checks that the machine has what the run needs at least. State on a GPU is that device's own to refuse.
///
/// # Errors
/// If it has less, with both numbers.
pub(crate) fn check(config: &TrainConfig, device: DeviceArg) -> Result<(), ConfigError> {
    match (device, of_this_process()) {
        (DeviceArg::Cpu, Some(bytes)) => config.check_memory(bytes),
        (DeviceArg::Cuda, _) | (_, None) => Ok(()),
    }
}

/// Bytes that the machine, or the container that this process runs in, has; `None` where the system does not tell.
pub(crate) fn of_this_process() -> Option<u64> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = machine.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total = total.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.saturating_mul(1024);
    let container = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok();
    let container = container.and_then(|limit| limit.trim().parse().ok());
    Some(container.map_or(total, |limit: u64| limit.min(total)))
}
