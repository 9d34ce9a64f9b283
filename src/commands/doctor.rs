//! `remesh doctor`: what of CUDA is there, and what a missing piece disables.

use crate::output::{Output, human_bytes};
use serde::Serialize;
use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;
use train::backend::cuda::loader;

#[derive(Serialize)]
struct Report {
    schema: &'static str,
    #[serde(flatten)]
    found: Diagnosis,
}

/// What was found.
#[derive(Serialize)]
pub(crate) struct Diagnosis {
    libraries: Vec<Library>,
    gpus: Vec<Gpu>,
    /// Why no GPU is seen.
    no_gpus: Option<String>,
}

#[derive(Serialize)]
struct Library {
    name: &'static str,
    needed_for: &'static str,
    version: Option<String>,
    path: Option<PathBuf>,
}

#[derive(Serialize)]
struct Gpu {
    ordinal: usize,
    name: String,
    compute_capability: String,
    memory_bytes: usize,
}

/// Looks, and says what was found. That something is missing is no failure.
pub(crate) fn run(output: &Output) -> anyhow::Result<ExitCode> {
    output.result(&Report { schema: "remesh.doctor/1", found: Diagnosis::found() })?;
    Ok(ExitCode::SUCCESS)
}

impl Diagnosis {
    /// Looks for libraries and GPUs.
    pub(crate) fn found() -> Self {
        let found = loader::find();
        let libraries = found.libraries.into_iter();
        let libraries = libraries.map(|loader::Library { name, needed_for, version, path }| Library {
            name,
            needed_for,
            version,
            path,
        });
        let (gpus, no_gpus) = match found.gpus {
            Ok(gpus) => (gpus, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let gpus = gpus.into_iter().map(|gpu| Gpu {
            ordinal: gpu.ordinal,
            name: gpu.name,
            compute_capability: format!("{}.{}", gpu.capability.0, gpu.capability.1),
            memory_bytes: gpu.memory_bytes,
        });
        Diagnosis { libraries: libraries.collect(), gpus: gpus.collect(), no_gpus }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.found.fmt(f)
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for library in &self.libraries {
            let Library { name, needed_for, version, path } = library;
            match version {
                Some(version) => write!(f, "{name:<12} {version}")?,
                None => write!(f, "{name:<12} not found, so there is no {needed_for}")?,
            }
            match path {
                Some(path) => writeln!(f, "  {}", path.display())?,
                None => writeln!(f)?,
            }
        }
        for gpu in &self.gpus {
            let Gpu { ordinal, name, compute_capability, memory_bytes } = gpu;
            let memory = human_bytes(*memory_bytes as u64);
            writeln!(f, "GPU {ordinal}        {name}, compute capability {compute_capability}, {memory}")?;
        }
        match &self.no_gpus {
            Some(reason) => writeln!(f, "no GPU: {reason}"),
            None => Ok(()),
        }
    }
}
