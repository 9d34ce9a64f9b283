//! Every CUDA kernel compiles for Hopper, without spilling registers and within the registers that its table allows. Needs the
//! run-time compiler alone, no GPU; says so where it is not there, and fails there if it is told `--require-compiler`.

use std::collections::BTreeSet;
use std::process::ExitCode;
use train::backend::cuda::CompileError;
use train::backend::cuda::kernels::{Source, sources_for};
use train::backend::cuda::nvrtc::{compile, usage};

const ARCHITECTURE: &str = "sm_90a";

fn main() -> ExitCode {
    let required = std::env::args().any(|argument| argument == "--require-compiler");
    let mut faults = Vec::new();
    let mut num_kernels = 0;
    for source in sources_for(ARCHITECTURE) {
        match compile(source, ARCHITECTURE) {
            Ok(compiled) => {
                num_kernels += source.kernels.len();
                faults.extend(faults_of(source, &compiled.log));
            }
            Err(CompileError::Missing) if !required => {
                println!(
                    "\nkernels: not run here; `.ci/run` installs CUDA's run-time compiler and runs them\n"
                );
                return ExitCode::SUCCESS;
            }
            Err(error) => faults.push(error.to_string()),
        }
    }
    faults.iter().for_each(|fault| println!("{fault}"));
    println!("kernels: {num_kernels} compiled for {ARCHITECTURE}, {} faults", faults.len());
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn faults_of(source: &Source, log: &str) -> Vec<String> {
    let used = usage(log);
    let mut faults = Vec::new();
    for kernel in &used {
        let (name, registers) = (&kernel.kernel, kernel.registers);
        if kernel.spilled_bytes > 0 {
            faults.push(format!("`{name}` spills {} bytes of registers", kernel.spilled_bytes));
        }
        if registers == 0 || registers > source.max_registers {
            faults.push(format!(
                "`{name}` uses {registers} registers, its table says up to {}",
                source.max_registers
            ));
        }
    }
    let compiled: BTreeSet<&str> = used.iter().map(|kernel| kernel.kernel.as_str()).collect();
    let listed: BTreeSet<&str> = source.kernels.iter().copied().collect();
    if compiled != listed {
        faults.push(format!("`{}.cu` has {compiled:?}, its table says {listed:?}", source.name));
    }
    faults
}
