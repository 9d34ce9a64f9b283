//! The CUDA backend on a real GPU, against the CPU: operations, canonical bits under every kind of layout, loss curves, and
//! resumes from one device on the other. `cargo test --test gpu`; says that it did not run where there is no GPU.

#[path = "gpu/operations.rs"]
mod operations;
#[allow(dead_code, unreachable_pub)] // shared with the tests of the CPU
#[path = "it/support.rs"]
mod support;
#[path = "gpu/training.rs"]
mod training;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;
use train::backend::Device;
use train::backend::cuda::{Gpu, OpenError};

fn main() -> ExitCode {
    // An argument is a part of the names to run, as elsewhere.
    let wanted = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_default();
    let cache = std::env::temp_dir().join("remesh-kernels");
    let gpu = match Gpu::open(0, Some(&cache)) {
        Ok(gpu) => gpu,
        Err(error @ (OpenError::NoDriver | OpenError::NoGpu { .. })) => {
            println!("\ngpu: not run here: {error}\n");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            println!("gpu: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("gpu: {}", gpu.name());
    let device = Device::Cuda(gpu);
    let tests = operations::TESTS.iter().chain(training::TESTS).filter(|(name, _)| name.contains(&wanted));
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| test(&device)));
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("{name}: {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
        *(if outcome.is_ok() { &mut passed } else { &mut failed }) += 1;
    }
    println!("gpu: {passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A test by its name.
type Test = (&'static str, fn(&Device));
