//! Which libraries of CUDA are there. cudarc panics where a function of a missing library is called: whoever calls one has
//! asked here first.

use cudarc::driver::{result, sys};
use cudarc::{cublaslt, nvrtc};
use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW};
use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// A library of CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its name, such as `libnvrtc`.
    pub name: &'static str,
    /// What cannot be done without it.
    pub needed_for: &'static str,
    /// The version that was found.
    pub version: Option<String>,
    /// The file it was loaded from, where the system tells.
    pub path: Option<PathBuf>,
}

/// A GPU that the driver sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuName {
    /// Its number, from 0.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    /// Bytes of its memory.
    pub memory_bytes: usize,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// All libraries that are used where they are there.
    pub libraries: Vec<Library>,
    /// The GPUs; why there are none, if there are none.
    pub gpus: Result<Vec<GpuName>, String>,
}

/// Looks for libraries and GPUs.
pub fn find() -> Found {
    let present = Present::get();
    let library = |name, needed_for, version: Option<String>| {
        let path = version.as_ref().and_then(|_| loaded_from(name));
        Library { name, needed_for, version, path }
    };
    let libraries = vec![
        library("libcuda", "training on GPUs (`--device cuda`)", present.driver.then(driver_version)),
        library("libnvrtc", "training on GPUs (`--device cuda`)", present.nvrtc.then(nvrtc_version)),
        library("libcublasLt", "quick matrix products on GPUs", present.cublaslt.then(cublaslt_version)),
        library("libnccl", "training on several GPUs", present.nccl.map(readable)),
    ];
    let gpus = match present.driver {
        false => Err("there is no driver".to_owned()),
        true => gpus().map_err(|error| format!("the driver says {}", reason(&error))),
    };
    Found { libraries, gpus }
}

/// Whether libraries can be called.
#[derive(Clone, Copy, Debug)]
pub(super) struct Present {
    pub(super) driver: bool,
    pub(super) nvrtc: bool,
    pub(super) cublaslt: bool,
    /// NCCL's version as it counts: 10000 · major + 100 · minor + patch.
    nccl: Option<c_int>,
}

impl Present {
    /// Looks once a process. Where the loader's own search finds nothing, `$CUDA_HOME/lib64` and the wheels of an active
    /// virtual environment are tried.
    pub(super) fn get() -> Present {
        static PRESENT: OnceLock<Present> = OnceLock::new();
        // SAFETY: asking loads the libraries, whose initialisers are trusted as those of any linked library.
        *PRESENT.get_or_init(|| unsafe {
            if !nvrtc::sys::is_culib_present() {
                // It compiles nothing until its builtins are loaded, and does not look beside itself for them.
                load_from_folders("libnvrtc-builtins.so.13.0");
                load_from_folders("libnvrtc.so.13");
            }
            if !cublaslt::sys::is_culib_present() {
                load_from_folders("libcublasLt.so.13");
            }
            Present {
                driver: sys::is_culib_present(),
                nvrtc: nvrtc::sys::is_culib_present(),
                cublaslt: cublaslt::sys::is_culib_present(),
                nccl: nccl_version(),
            }
        })
    }
}

/// Loads a library for the rest of the process, so that it is found by its name later.
///
/// # Safety
/// Its initialisers run.
unsafe fn load_from_folders(file: &str) {
    for path in folders().into_iter().map(|folder| folder.join(file)).filter(|path| path.is_file()) {
        // SAFETY: passed on to the caller.
        if let Ok(handle) = unsafe { Handle::open(Some(&path), RTLD_NOW | RTLD_GLOBAL) } {
            std::mem::forget(handle);
            return;
        }
    }
}

/// Where libraries lie that the system's loader does not look for.
fn folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> =
        std::env::var_os("CUDA_HOME").iter().map(|home| Path::new(home).join("lib64")).collect();
    let entries = |folder: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(|entry| Some(entry.ok()?.path())).collect()
    };
    if let Some(environment) = std::env::var_os("VIRTUAL_ENV") {
        for python in entries(&Path::new(&environment).join("lib")) {
            let wheels = entries(&python.join("site-packages/nvidia"));
            folders.extend(wheels.into_iter().map(|wheel| wheel.join("lib")));
        }
    }
    folders
}

/// The file of a loaded library, as the kernel maps it.
fn loaded_from(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let paths = maps.lines().filter_map(|line| line.split_whitespace().last());
    paths.map(Path::new).find(|path| is_library(path, name)).map(Path::to_owned)
}

fn is_library(path: &Path, name: &str) -> bool {
    let file = path.file_name().and_then(|file| file.to_str());
    file.and_then(|file| file.strip_prefix(name)).is_some_and(|rest| rest.starts_with(".so"))
}

fn driver_version() -> String {
    let mut version = 0;
    // SAFETY: the driver is there; it writes one integer.
    match unsafe { sys::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) => format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
        Err(error) => reason(&error),
    }
}

/// NVRTC's version; the compiler must be there.
pub(super) fn nvrtc_version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the compiler is there; it writes two integers.
    match unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result() {
        Ok(()) => format!("{major}.{minor}"),
        Err(error) => error.to_string(),
    }
}

fn cublaslt_version() -> String {
    // SAFETY: the library is there; the function takes nothing.
    let version = unsafe { cublaslt::sys::cublasLtGetVersion() };
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

/// NCCL, loaded for the rest of the process, if it is there. Found by hand: what cudarc looks for lacks the name that NCCL's
/// package installs.
pub(crate) fn nccl() -> Option<&'static Handle> {
    static NCCL: OnceLock<Option<Handle>> = OnceLock::new();
    const FILE: &str = "libnccl.so.2";
    NCCL.get_or_init(|| {
        // SAFETY: its initialisers are trusted as those of any linked library.
        let load = |file: &str| unsafe { Handle::open(Some(file), RTLD_NOW) }.ok();
        load(FILE).or_else(|| {
            // SAFETY: as above.
            unsafe { load_from_folders(FILE) };
            load(FILE).or_else(|| load("libnccl.so"))
        })
    })
    .as_ref()
}

fn nccl_version() -> Option<c_int> {
    let mut version = 0;
    // SAFETY: `ncclGetVersion` writes one integer and returns a code, in every version of NCCL.
    let code = unsafe {
        let get = nccl()?.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(b"ncclGetVersion\0").ok()?;
        get(&mut version)
    };
    (code == 0).then_some(version)
}

fn readable(nccl: c_int) -> String {
    format!("{}.{}.{}", nccl / 10000, nccl / 100 % 100, nccl % 100)
}

fn gpus() -> Result<Vec<GpuName>, result::DriverError> {
    result::init()?;
    (0..result::device::get_count()?)
        .map(|ordinal| {
            let device = result::device::get(ordinal)?;
            Ok(GpuName {
                ordinal: ordinal as usize,
                name: result::device::get_name(device)?,
                capability: capability(device)?,
                // SAFETY: the driver just gave this device.
                memory_bytes: unsafe { result::device::total_mem(device)? },
            })
        })
        .collect()
}

/// Major and minor compute capability.
pub(super) fn capability(device: sys::CUdevice) -> Result<(u32, u32), result::DriverError> {
    use sys::CUdevice_attribute as Attribute;
    // SAFETY: the driver gave this device.
    let get = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let major = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((major as u32, minor as u32))
}

/// What the driver says, in its words.
pub(super) fn reason(error: &result::DriverError) -> String {
    let name = error.error_name().map(|name| name.to_string_lossy().into_owned());
    let text = error.error_string().map(|text| text.to_string_lossy().into_owned());
    match (name, text) {
        (Ok(name), Ok(text)) => format!("{name}: {text}"),
        _ => format!("error {:?}", error.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_apart_from_their_neighbours() {
        assert!(is_library(Path::new("/usr/lib/libnvrtc.so.13"), "libnvrtc"));
        assert!(is_library(Path::new("/usr/lib/libcuda.so.580.1"), "libcuda"));
        assert!(!is_library(Path::new("/usr/lib/libnvrtc-builtins.so.13.0"), "libnvrtc"));
        assert!(!is_library(Path::new("/usr/lib/libcudart.so.13"), "libcuda"));
    }

    #[test]
    fn looking_for_what_is_not_there_is_no_panic() {
        let found = find();
        assert_eq!(found.libraries.len(), 4);
        let driver = found.libraries[0].version.is_some();
        assert!(driver || found.gpus.is_err(), "no GPU without a driver");
    }
}
