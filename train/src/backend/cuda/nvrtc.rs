//! Compiling kernels at run time, to machine code of one architecture, and keeping the result.

use super::kernels::{PRELUDE, Source};
use super::loader::{Present, nvrtc_version};
use ckpt::fnv1a;
use cudarc::nvrtc::{result, sys};
use std::ffi::{CStr, CString};
use std::fs;
use std::path::Path;

/// A kernel file could not be compiled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// There is no compiler.
    #[error("CUDA's run-time compiler, libnvrtc, was not found")]
    Missing,
    /// The compiler refuses the source.
    #[error("kernels `{source_name}` do not compile for {architecture}: {log}")]
    Refused {
        /// Which file.
        source_name: &'static str,
        /// For which architecture.
        architecture: String,
        /// The compiler's words.
        log: String,
    },
}

/// A compiled kernel file.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// Machine code.
    pub cubin: Vec<u8>,
    /// The compiler's report, with the registers of each kernel.
    pub log: String,
}

/// What one kernel uses, by the compiler's report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes that did not fit them, stored and loaded.
    pub spilled_bytes: u32,
}

const OPTIONS: [&str; 2] = ["--std=c++17", "--ptxas-options=-v"];

/// Compiles `source` for an architecture such as `sm_90a`. Needs no GPU.
///
/// # Errors
/// No compiler, or the compiler's complaint.
pub fn compile(source: &Source, architecture: &str) -> Result<Compiled, CompileError> {
    if !Present::get().nvrtc {
        return Err(CompileError::Missing);
    }
    let refused = |log: String| CompileError::Refused {
        source_name: source.name,
        architecture: architecture.to_owned(),
        log,
    };
    let text = CString::new(whole_text(source)).expect("sources have no zero bytes");
    let name = CString::new(source.name).expect("names have no zero bytes");
    let program = result::create_program(&text, Some(&name)).map_err(|error| refused(error.to_string()))?;
    let mut options = vec![format!("--gpu-architecture={architecture}")];
    options.extend(OPTIONS.map(str::to_owned));
    // SAFETY: the program was just created and is destroyed last; the code's size is the compiler's own.
    unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program)
            .map(|log| CStr::from_ptr(log.as_ptr()).to_string_lossy().into_owned())
            .unwrap_or_default();
        let code = compiled.and_then(|()| {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &mut size).result()?;
            let mut code = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result()?;
            Ok(code)
        });
        let destroyed = result::destroy_program(program);
        match code.and_then(|code| destroyed.map(|()| code)) {
            Ok(cubin) => Ok(Compiled { cubin, log }),
            Err(error) => Err(refused(format!("{error}\n{log}"))),
        }
    }
}

/// Machine code of `source`, from the folder `cache` if an equal source was compiled there before.
///
/// # Errors
/// As [`compile`]. A cache that cannot be read or written is none.
pub(super) fn cubin(
    source: &Source,
    architecture: &str,
    cache: Option<&Path>,
) -> Result<Vec<u8>, CompileError> {
    if !Present::get().nvrtc {
        return Err(CompileError::Missing);
    }
    let Some(cache) = cache else { return Ok(compile(source, architecture)?.cubin) };
    let identity = [&whole_text(source), architecture, &nvrtc_version(), &OPTIONS.join(" ")]
        .map(str::to_owned)
        .join("\0");
    let file = format!("{}-{architecture}-{:016x}.cubin", source.name, fnv1a(identity.as_bytes()));
    let path = cache.join(&file);
    if let Ok(code) = fs::read(&path)
        && code.starts_with(b"\x7fELF")
    {
        return Ok(code);
    }
    let code = compile(source, architecture)?.cubin;
    // Renamed into place whole, so that processes which start together do not read each other's halves.
    let partial = cache.join(format!("{file}.{}", std::process::id()));
    let kept = fs::create_dir_all(cache)
        .and_then(|()| fs::write(&partial, &code))
        .and_then(|()| fs::rename(&partial, &path));
    if let Err(error) = kept {
        tracing::debug!(%error, path = %path.display(), "compiled kernels are not kept");
    }
    Ok(code)
}

fn whole_text(source: &Source) -> String {
    format!("{PRELUDE}\n#line 1 \"{}.cu\"\n{}", source.name, source.text)
}

/// What each kernel uses, from the report of [`compile`].
pub fn usage(log: &str) -> Vec<Usage> {
    let number_before = |line: &str, what: &str| -> Option<u32> {
        line.split(what).next()?.trim_end().rsplit([' ', ',']).next()?.parse().ok()
    };
    let mut found: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_owned();
            found.push(Usage { kernel, registers: 0, spilled_bytes: 0 });
        }
        let Some(last) = found.last_mut() else { continue };
        if line.contains("bytes spill stores") {
            let spilled = [" bytes spill stores", " bytes spill loads"].map(|what| number_before(line, what));
            last.spilled_bytes = spilled.into_iter().flatten().sum();
        }
        if let Some((_, rest)) = line.split_once("Used ") {
            last.registers = number_before(rest, " registers").unwrap_or(0);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_read() {
        let log = "ptxas info    : Compiling entry function 'glu_f32' for 'sm_90a'\n\
                   ptxas info    : Function properties for glu_f32\n\
                   ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers\n\
                   ptxas info    : Compiling entry function 'add_f32' for 'sm_90a'\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 168 registers\n";
        let kernel = |kernel: &str, registers, spilled_bytes| Usage {
            kernel: kernel.to_owned(),
            registers,
            spilled_bytes,
        };
        assert_eq!(usage(log), [kernel("glu_f32", 32, 20), kernel("add_f32", 168, 0)]);
    }
}
