//! A GPU that was opened: its context and compiled kernels, shared by all ranks that compute on it.

use super::CudaBackend;
use super::arguments::Arguments;
use super::kernels::sources_for;
use super::loader::{self, Present, reason};
use super::nvrtc::{self, CompileError};
use crate::backend::{BackendError, MemoryPlan};
use crate::config::Numerics;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUfunction_attribute as Attribute, CUstream};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

/// An opened GPU.
#[derive(Debug)]
pub struct Gpu {
    name: String,
    uuid: [u8; 16],
    context: sys::CUcontext,
    functions: BTreeMap<&'static str, sys::CUfunction>,
    num_multiprocessors: u32,
}

// SAFETY: contexts and functions belong to the process; the driver locks what it must.
unsafe impl Send for Gpu {}
// SAFETY: as above; nothing is changed after `open`.
unsafe impl Sync for Gpu {}

/// A GPU cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// There is no driver.
    #[error("NVIDIA's driver, libcuda, was not found")]
    NoDriver,
    /// There is no such GPU.
    #[error("there is no GPU {ordinal}: the driver sees {count}")]
    NoGpu {
        /// Its number.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The driver fails.
    #[error("GPU {ordinal} cannot be opened: {reason}")]
    Driver {
        /// Its number.
        ordinal: usize,
        /// The driver's words.
        reason: String,
    },
    /// Kernels cannot be compiled.
    #[error(transparent)]
    Compile(#[from] CompileError),
}

impl OpenError {
    /// Code of the error.
    pub fn code(&self) -> &'static str {
        match self {
            OpenError::NoDriver | OpenError::NoGpu { .. } => "RM8001",
            OpenError::Compile(CompileError::Missing) => "RM8002",
            OpenError::Driver { .. } | OpenError::Compile(CompileError::Refused { .. }) => "RM8003",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> &'static str {
        match self {
            OpenError::NoDriver | OpenError::NoGpu { .. } => {
                "`remesh doctor` shows what was found; `--device cpu` needs no GPU"
            }
            OpenError::Compile(CompileError::Missing) => {
                "install CUDA's run-time compiler 13 (for example `pip install nvidia-cuda-nvrtc` in the active virtual \
                 environment); `remesh doctor` shows what is found"
            }
            OpenError::Driver { .. } | OpenError::Compile(CompileError::Refused { .. }) => {
                "`remesh doctor` shows the versions that were found"
            }
        }
    }
}

impl Gpu {
    /// Opens GPU `ordinal` and compiles all kernels for it. Compiled kernels are kept in the folder `cache`.
    ///
    /// # Errors
    /// A missing or failing driver, compiler or GPU.
    pub fn open(ordinal: usize, cache: Option<&Path>) -> Result<Arc<Gpu>, OpenError> {
        let driver = |error: DriverError| OpenError::Driver { ordinal, reason: reason(&error) };
        let count = Gpu::count()?;
        if ordinal >= count {
            return Err(OpenError::NoGpu { ordinal, count });
        }
        let device = result::device::get(ordinal as i32).map_err(driver)?;
        let architecture = architecture(loader::capability(device).map_err(driver)?);
        let mut functions = BTreeMap::new();
        // SAFETY: the device is the driver's own; the context is retained for the rest of the process, as are the modules,
        // so that no handle outlives what it points to.
        let context = unsafe { result::primary_ctx::retain(device) }.map_err(driver)?;
        // SAFETY: the context was just retained.
        unsafe { result::ctx::set_current(context) }.map_err(driver)?;
        // SAFETY: the driver gave this device.
        let attribute =
            |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(driver);
        use sys::CUdevice_attribute as Of;
        let num_multiprocessors = attribute(Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32;
        let max_shared = attribute(Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        for source in sources_for(&architecture) {
            let code = nvrtc::cubin(source, &architecture, cache)?;
            // SAFETY: the image is the compiler's for this architecture, whole; it is copied.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) }.map_err(driver)?;
            for kernel in source.kernels {
                let name = CString::new(*kernel).expect("kernel names have no zero bytes");
                // SAFETY: the module stays loaded for the rest of the process.
                let function = unsafe { result::module::get_function(module, name) }.map_err(driver)?;
                allow_shared_memory(function, max_shared).map_err(driver)?;
                functions.insert(*kernel, function);
            }
        }
        let name = result::device::get_name(device).map_err(driver)?;
        let uuid = result::device::get_uuid(device).map_err(driver)?.bytes.map(|byte| byte as u8);
        Ok(Arc::new(Gpu { name, uuid, context, functions, num_multiprocessors }))
    }

    /// How many GPUs the driver sees.
    ///
    /// # Errors
    /// A missing or failing driver.
    pub fn count() -> Result<usize, OpenError> {
        if !Present::get().driver {
            return Err(OpenError::NoDriver);
        }
        let count = result::init().and_then(|()| result::device::get_count());
        let driver = |error: DriverError| OpenError::Driver { ordinal: 0, reason: reason(&error) };
        Ok(count.map_err(driver)? as usize)
    }

    /// Opens the GPUs from 0 on, as many as there are but not more than `max`, at least one.
    ///
    /// # Errors
    /// As [`Gpu::open`].
    pub fn open_first(max: usize, cache: Option<&Path>) -> Result<Vec<Arc<Gpu>>, OpenError> {
        let mut gpus = vec![Gpu::open(0, cache)?];
        while gpus.len() < max {
            match Gpu::open(gpus.len(), cache) {
                Ok(gpu) => gpus.push(gpu),
                Err(OpenError::NoGpu { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(gpus)
    }

    /// The GPU's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What tells it from every other GPU.
    pub(crate) fn uuid(&self) -> [u8; 16] {
        self.uuid
    }

    /// A rank's memory and queue of work. Under canonical numerics the bits do not depend on how work is cut.
    ///
    /// # Errors
    /// What the driver says, above all that its memory is too small.
    pub fn backend(
        self: &Arc<Self>,
        plan: MemoryPlan,
        numerics: &Numerics,
    ) -> Result<CudaBackend, BackendError> {
        CudaBackend::new(Arc::clone(self), plan, numerics)
    }

    /// Makes this GPU the calling thread's.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained for the rest of the process.
        unsafe { result::ctx::set_current(self.context) }
    }

    /// Whether there is a kernel for this GPU.
    pub(super) fn has(&self, kernel: &str) -> bool {
        self.functions.contains_key(kernel)
    }

    /// A kernel of the table.
    fn function(&self, kernel: &str) -> sys::CUfunction {
        *self.functions.get(kernel).unwrap_or_else(|| panic!("no kernel is called `{kernel}`"))
    }

    pub(super) fn num_multiprocessors(&self) -> u32 {
        self.num_multiprocessors
    }

    /// Queues a kernel on a stream of this GPU.
    ///
    /// # Safety
    /// The arguments are those of the kernel's signature, and what it reads and writes with them is there.
    pub(super) unsafe fn launch(
        &self,
        stream: CUstream,
        kernel: &str,
        (grid_x, grid_y): (u64, u64),
        threads: u32,
        shared_bytes: usize,
        mut arguments: Arguments,
    ) -> Result<(), DriverError> {
        if grid_x == 0 || grid_y == 0 {
            return Ok(());
        }
        let grid = |extent: u64| u32::try_from(extent).expect("grids are smaller than 2³²");
        let shared_bytes = u32::try_from(shared_bytes).expect("shared memory is small");
        // SAFETY: passed on to the caller.
        unsafe {
            result::launch_kernel(
                self.function(kernel),
                (grid(grid_x), grid(grid_y), 1),
                (threads, 1, 1),
                shared_bytes,
                stream,
                &mut arguments.pointers(),
            )
        }
    }
}

/// What code is compiled for: instructions of Hopper alone need the name with an a.
fn architecture((major, minor): (u32, u32)) -> String {
    let suffix = if (major, minor) == (9, 0) { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// Lets launches ask for as much shared memory as a block can have.
fn allow_shared_memory(function: sys::CUfunction, max_bytes: i32) -> Result<(), DriverError> {
    // SAFETY: the function belongs to a loaded module.
    unsafe {
        let fixed = result::function::get_function_attribute(
            function,
            Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
        )?;
        let dynamic = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        result::function::set_function_attribute(function, dynamic, max_bytes - fixed)
    }
}
