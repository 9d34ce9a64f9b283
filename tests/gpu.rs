//! The CUDA backend on real GPUs, against the CPU: operations, canonical bits under every kind of layout, loss curves, resumes from
//! one device on the other, and several GPUs. `cargo test --test gpu`; says what did not run where there are fewer.

#[path = "gpu/operations.rs"]
mod operations;
#[path = "gpu/several.rs"]
mod several;
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
    let gpus = match Gpu::open_first(usize::MAX, Some(&cache)) {
        Ok(gpus) => gpus,
        Err(error @ (OpenError::NoDriver | OpenError::NoGpu { .. })) => {
            println!("\ngpu: not run here: {error}\n");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            println!("gpu: {error}");
            return ExitCode::FAILURE;
        }
    };
    println!("gpu: {} × {}", gpus.len(), gpus[0].name());
    let one = Device::Cuda(vec![gpus[0].clone()]);
    if several::is_rank() {
        let tests = several::COMMUNICATORS.iter().filter(|(name, _)| name.contains(&wanted));
        tests.for_each(|(_, test)| test(&one));
        return ExitCode::SUCCESS;
    }
    let several = (gpus.len() > 1).then_some(Device::Cuda(gpus));
    let mut tests: Vec<Prepared> = Vec::new();
    for (name, test) in [operations::TESTS, training::TESTS].concat() {
        let one = one.clone();
        tests.push((name, Box::new(move || test(&one))));
    }
    for (name, test) in [several::COMMUNICATORS, several::TRAINING].concat() {
        match &several {
            Some(several) => {
                let several = several.clone();
                tests.push((name, Box::new(move || test(&several))));
            }
            None if several::COMMUNICATORS.iter().any(|(other, _)| *other == name) => {
                tests.push((name, Box::new(move || several::run_in_processes(name))));
            }
            None => println!("{name}: not run here, it needs two GPUs"),
        }
    }
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in tests.into_iter().filter(|(name, _)| name.contains(&wanted)) {
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(test));
        let verdict = if outcome.is_ok() { "ok" } else { "FAILED" };
        println!("{name}: {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
        *(if outcome.is_ok() { &mut passed } else { &mut failed }) += 1;
    }
    println!("gpu: {passed} passed, {failed} failed");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A test by its name.
type Test = (&'static str, fn(&Device));

/// The same with its device.
type Prepared = (&'static str, Box<dyn Fn()>);
