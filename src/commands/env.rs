//! `remesh env`: a block about program and machine, to paste into a report.

use crate::commands::doctor::Diagnosis;
use crate::output::{Output, table};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;
use std::process::ExitCode;
use train::comm::processes::Launch;

/// Variables that change what the program or its libraries do, beside those of launchers; nothing that may hold a secret.
const VARIABLES: [&str; 11] = [
    "CUDA_HOME",
    "CUDA_VISIBLE_DEVICES",
    "HOME",
    "LD_LIBRARY_PATH",
    "NCCL_DEBUG",
    "NCCL_HOSTID",
    "NO_COLOR",
    "OMP_NUM_THREADS",
    "RUST_LOG",
    "VIRTUAL_ENV",
    "XDG_CACHE_HOME",
];

#[derive(Serialize)]
struct Environment {
    schema: &'static str,
    version: &'static str,
    /// Versions of the native format that are read; the last one is written.
    checkpoint_versions: [u32; 1],
    system: String,
    /// As many as this process may use.
    cores: Option<usize>,
    memory_bytes: Option<u64>,
    variables: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    devices: Diagnosis,
}

/// Prints it.
pub(crate) fn run(output: &Output) -> anyhow::Result<ExitCode> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let name = read("/etc/os-release").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="))?;
        Some(line.trim_matches('"').to_owned())
    });
    let kernel = read("/proc/sys/kernel/osrelease");
    let words = [name.as_deref(), Some(std::env::consts::OS), kernel.as_deref().map(str::trim)];
    let value = |name| Some((name, std::env::var(name).ok()?));
    output.result(&Environment {
        schema: "remesh.env/1",
        version: env!("CARGO_PKG_VERSION"),
        checkpoint_versions: [ckpt::VERSION],
        system: [&words.into_iter().flatten().collect::<Vec<_>>().join(" "), std::env::consts::ARCH]
            .join(" "),
        cores: std::thread::available_parallelism().ok().map(Into::into),
        memory_bytes: crate::memory::of_this_process(),
        variables: VARIABLES.into_iter().chain(Launch::variables()).filter_map(value).collect(),
        devices: Diagnosis::found(),
    })?;
    Ok(ExitCode::SUCCESS)
}

impl fmt::Display for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unknown = || "unknown".to_owned();
        let fixed = [
            ("remesh", self.version.to_owned()),
            ("checkpoints", format!("version {} of the native format is read and written", ckpt::VERSION)),
            ("system", self.system.clone()),
            ("cores", self.cores.map_or_else(unknown, |cores| cores.to_string())),
            ("memory", self.memory_bytes.map_or_else(unknown, crate::output::human_bytes)),
        ];
        let variables = self.variables.iter().map(|(name, value)| (*name, value.clone()));
        let row = |(name, value): (&str, String)| vec![name.to_owned(), value];
        f.write_str(&table(&fixed.into_iter().chain(variables).map(row).collect::<Vec<_>>()))?;
        self.devices.fmt(f)
    }
}
