//! NCCL's functions, found by name in the library that the loader has. From 2.14 on, the first version whose calls need not
//! block.

use crate::backend::BackendError;
use crate::backend::cuda::loader;
use crate::comm::CommError;
use cudarc::driver::sys::CUstream;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `ncclComm_t`
pub(super) type Communicator = *mut c_void;

/// `ncclUniqueId`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct UniqueId {
    pub(super) bytes: [u8; 128],
}

/// `ncclConfig_t` of 2.14, which every later version takes, too: what it lacks has its default.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    /// Counted in `size`; unset.
    padding: c_int,
}

impl Config {
    /// No call blocks.
    pub(super) fn non_blocking() -> Self {
        let (magic, version) = (0xcafe_beef, 21400);
        Config { size: size_of::<Config>(), magic, version, blocking: 0, padding: c_int::MIN }
    }
}

/// `ncclResult_t`
pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclDataType_t`
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(super) enum Type {
    Bytes = 1,
    I64 = 4,
    F32 = 7,
    Bf16 = 9,
}

/// `ncclRedOp_t`: ncclSum
pub(super) const SUM: c_int = 0;

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*) -> $result:ty,)*) => {
        /// The functions that are used, under NCCL's names.
        #[allow(non_snake_case)]
        #[derive(Debug)]
        pub(super) struct Nccl {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Nccl {
            fn load() -> Option<Nccl> {
                let library = loader::nccl()?;
                // SAFETY: the signatures are those of `nccl.h`, which has not changed them since 2.14.
                unsafe {
                    Some(Nccl {
                        $($name: *library.get(concat!(stringify!($name), "\0").as_bytes()).ok()?,)*
                    })
                }
            }
        }
    };
}

functions! {
    ncclGetUniqueId: fn(*mut UniqueId) -> c_int,
    ncclCommInitRankConfig: fn(*mut Communicator, c_int, UniqueId, c_int, *mut Config) -> c_int,
    ncclCommFinalize: fn(Communicator) -> c_int,
    ncclCommDestroy: fn(Communicator) -> c_int,
    ncclCommAbort: fn(Communicator) -> c_int,
    ncclCommGetAsyncError: fn(Communicator, *mut c_int) -> c_int,
    ncclGetErrorString: fn(c_int) -> *const c_char,
    ncclGetLastError: fn(Communicator) -> *const c_char,
    ncclGroupStart: fn() -> c_int,
    ncclGroupEnd: fn() -> c_int,
    ncclAllGather: fn(*const c_void, *mut c_void, usize, Type, Communicator, CUstream) -> c_int,
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, Type, c_int, Communicator, CUstream) -> c_int,
    ncclReduceScatter: fn(*const c_void, *mut c_void, usize, Type, c_int, Communicator, CUstream) -> c_int,
    ncclSend: fn(*const c_void, usize, Type, c_int, Communicator, CUstream) -> c_int,
    ncclRecv: fn(*mut c_void, usize, Type, c_int, Communicator, CUstream) -> c_int,
}

impl Nccl {
    /// NCCL, once a process.
    ///
    /// # Errors
    /// If it is not there or too old.
    pub(super) fn get() -> Result<&'static Nccl, CommError> {
        static NCCL: OnceLock<Option<Nccl>> = OnceLock::new();
        NCCL.get_or_init(Nccl::load).as_ref().ok_or(CommError::NoNccl)
    }

    /// How far the last call on a communicator is, or how it failed.
    pub(super) fn state(&self, communicator: Communicator) -> c_int {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive; one integer is written.
        let code = unsafe { (self.ncclCommGetAsyncError)(communicator, &mut state) };
        if code == SUCCESS { state } else { code }
    }

    /// A call's failure in NCCL's words.
    pub(super) fn failed(&self, call: &'static str, code: c_int, communicator: Communicator) -> CommError {
        // SAFETY: both return text that lives as long as the library; a communicator that is none is allowed.
        let texts = unsafe { [(self.ncclGetErrorString)(code), (self.ncclGetLastError)(communicator)] };
        let texts = texts.iter().filter(|text| !text.is_null());
        // SAFETY: as above, ended by a zero.
        let texts = texts.map(|text| unsafe { CStr::from_ptr(*text) }.to_string_lossy().trim().to_owned());
        let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
        BackendError::Failed { operation: call, reason: format!("NCCL says {}", texts.join(": ")) }.into()
    }
}
