//! One rank's part of a GPU: planned arenas, a stream, and copies from and to the host.

use super::arguments::{Arguments, Mat};
use super::gpu::Gpu;
use super::lane::Scratch;
use super::loader::{Present, reason};
use super::matmul::Products;
use super::memory::{DeviceMemory, Staging, arenas};
use crate::backend::{Backend, BackendError, MemoryPlan, Op, View};
use crate::config::Numerics;
use cudarc::cublaslt::result::CublasError;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdeviceptr, CUmemorytype, CUstream};
use mesh::DType;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs operations on a GPU, one after another on a stream of its own. Stays on the thread that made it.
#[derive(Debug)]
pub struct CudaBackend {
    pub(super) gpu: Arc<Gpu>,
    pub(super) stream: CUstream,
    plan: MemoryPlan,
    arenas: BTreeMap<DType, DeviceMemory>,
    staging: Staging,
    /// Bits of the largest magnitude that fixed-point additions met, one u32.
    pub(super) peak: DeviceMemory,
    /// For partial sums inside one operation; grows to the largest request.
    scratch: Scratch,
    /// Products of bf16, where cuBLASLt is there and its bits may depend on the shape.
    pub(super) products: Option<Products>,
}

impl CudaBackend {
    pub(super) fn new(gpu: Arc<Gpu>, plan: MemoryPlan, numerics: &Numerics) -> Result<Self, BackendError> {
        for slot in plan.slots() {
            let known = [DType::F32, DType::Bf16, DType::I64, DType::I32].contains(&slot.dtype);
            assert!(known, "`{}`: the GPU has no buffers of {}", slot.name, slot.dtype);
        }
        let bytes = plan.size_bytes();
        // What the library chooses depends on the shape, and so do the bits.
        let has_products =
            Present::get().cublaslt && plan.arena_len(DType::Bf16) > 0 && *numerics == Numerics::Fast;
        let new = || -> Result<Self, Fault> {
            gpu.enter()?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            Ok(CudaBackend {
                arenas: arenas(&plan, stream)?,
                staging: Staging::new()?,
                peak: DeviceMemory::zeros(4, stream)?,
                scratch: Scratch::NONE,
                products: has_products.then(|| Products::new(stream)).transpose()?,
                gpu,
                stream,
                plan,
            })
        };
        new().map_err(|fault| match fault {
            Fault::Driver(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                BackendError::OutOfMemory { bytes }
            }
            fault => failed("setting up")(fault),
        })
    }

    /// Where a view lies.
    ///
    /// # Panics
    /// If it reaches past its buffer.
    pub(super) fn mat(&self, view: View) -> Mat {
        let slot = self.plan.slot(view.buf);
        let end = view.extent().1;
        assert!(
            view.dtype == slot.dtype && end <= slot.len,
            "`{}` has {} elements of {}, its view wants {} up to {end}",
            slot.name,
            slot.len,
            slot.dtype,
            view.dtype
        );
        let first = slot.start + view.offset;
        Mat {
            address: self.arenas[&view.dtype].address() + (first * view.dtype.size_bytes()) as u64,
            // The stride of one row is never used; as wide as the row it hinders no alignment.
            stride: if view.rows <= 1 { view.cols } else { view.stride } as i64,
            rows: view.rows as i64,
            cols: view.cols as i64,
        }
    }

    /// At least `rows × cols` f32 elements, valid until the next call.
    pub(super) fn scratch(&mut self, rows: usize, cols: usize) -> Result<Mat, DriverError> {
        let len = rows * cols * size_of::<f32>();
        if self.scratch.len() < len {
            self.scratch = Scratch::new(len, self.stream)?;
        }
        let address = self.scratch.address();
        Ok(Mat { address, stride: cols as i64, rows: rows as i64, cols: cols as i64 })
    }

    /// Starts a kernel.
    pub(super) fn launch(
        &self,
        kernel: &'static str,
        grid: (u64, u64),
        threads: u32,
        shared_bytes: usize,
        arguments: Arguments,
    ) -> Result<(), Fault> {
        // SAFETY: `launch.rs` gives each kernel the arguments of its signature, with operands whose shapes `Op::check` has
        // compared and whose extents `mat` has checked against their buffers.
        Ok(unsafe { self.gpu.launch(self.stream, kernel, grid, threads, shared_bytes, arguments) }?)
    }

    /// Where the elements of a contiguous view lie.
    ///
    /// # Panics
    /// If the view has gaps, or reaches past its buffer.
    pub(crate) fn address(&self, view: View) -> CUdeviceptr {
        assert!(view.is_contiguous(), "a view with gaps has no one place");
        self.mat(view).address
    }

    /// Sets the elements of a view to zero.
    pub(super) fn zero(&self, dst: View) -> Result<(), Fault> {
        if dst.numel() == 0 {
            return Ok(());
        }
        let (mat, size) = (self.mat(dst), dst.dtype.size_bytes());
        let (pitch, width) = (mat.stride as usize * size, dst.cols * size);
        // SAFETY: the rows lie within the view's buffer.
        unsafe {
            if dst.is_contiguous() {
                result::memset_d8_async(mat.address, 0, dst.size_bytes(), self.stream)?;
            } else {
                sys::cuMemsetD2D8Async(mat.address, pitch, 0, width, dst.rows, self.stream).result()?;
            }
        }
        Ok(())
    }

    /// Copies between views of one shape and type.
    pub(super) fn copy(&self, src: View, dst: View) -> Result<(), Fault> {
        let (from, to) = (Place::Device(self.mat(src)), Place::Device(self.mat(dst)));
        let size = dst.dtype.size_bytes();
        Ok(self.copy_rows(from, to, dst.rows, dst.cols * size, size)?)
    }

    fn copy_rows(
        &self,
        from: Place,
        to: Place,
        rows: usize,
        row_bytes: usize,
        element_bytes: usize,
    ) -> Result<(), DriverError> {
        if rows == 0 || row_bytes == 0 {
            return Ok(());
        }
        let (from, to) = (from.described(row_bytes, element_bytes), to.described(row_bytes, element_bytes));
        let mut copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from.kind,
            srcHost: from.host.cast_const(),
            srcDevice: from.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to.kind,
            dstHost: to.host,
            dstDevice: to.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.pitch,
            WidthInBytes: row_bytes,
            Height: rows,
        };
        if from.pitch == row_bytes && to.pitch == row_bytes {
            copy.WidthInBytes = rows * row_bytes;
            copy.srcPitch = copy.WidthInBytes;
            copy.dstPitch = copy.WidthInBytes;
            copy.Height = 1;
        }
        // SAFETY: both sides are as large as the rows and pitches say: `mat` has checked the device's, the caller the host's.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream) }.result()
    }

    fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream is this backend's.
        unsafe { result::stream::synchronize(self.stream) }
    }

    /// Row ranges of `view` that fit the staging memory.
    fn staged_parts(view: View) -> impl Iterator<Item = View> {
        // A long row is cut, too: as a contiguous view it may be seen as many short ones.
        let max = Staging::LEN / view.dtype.size_bytes();
        let narrow = view.cols.clamp(1, max);
        (0..view.rows).step_by((max / narrow).max(1)).flat_map(move |lo| {
            let rows = view.row_range(lo, view.rows.min(lo + (max / narrow).max(1)));
            (0..view.cols).step_by(narrow).map(move |col| rows.col_range(col, view.cols.min(col + narrow)))
        })
    }

    fn upload_now(&mut self, dst: View, bytes: &[u8]) -> Result<(), DriverError> {
        let size = dst.dtype.size_bytes();
        let mut bytes = bytes;
        for part in Self::staged_parts(dst) {
            let (now, later) = bytes.split_at(part.size_bytes());
            let staged = self.staging.take(now.len(), self.stream)?;
            staged.copy_from_slice(now);
            let from = Place::Host(staged.as_mut_ptr());
            self.copy_rows(from, Place::Device(self.mat(part)), part.rows, part.cols * size, size)?;
            bytes = later;
        }
        Ok(())
    }

    fn download_now(&mut self, src: View, bytes: &mut [u8]) -> Result<(), DriverError> {
        let size = src.dtype.size_bytes();
        let mut bytes = bytes;
        for part in Self::staged_parts(src) {
            let (now, later) = bytes.split_at_mut(part.size_bytes());
            let staged = self.staging.take(now.len(), self.stream)?.as_mut_ptr();
            let from = Place::Device(self.mat(part));
            self.copy_rows(from, Place::Host(staged), part.rows, part.cols * size, size)?;
            self.synchronize()?;
            // SAFETY: the copy into these bytes of the staging memory is complete.
            now.copy_from_slice(unsafe { std::slice::from_raw_parts(staged, now.len()) });
            bytes = later;
        }
        Ok(())
    }

    fn take_peak(&mut self) -> Result<f32, DriverError> {
        let staged = self.staging.take(4, self.stream)?;
        // SAFETY: four bytes on both sides; read after the copy is complete.
        unsafe {
            let staged = std::slice::from_raw_parts_mut(staged.as_mut_ptr(), 4);
            result::memcpy_dtoh_async(staged, self.peak.address(), self.stream)?;
            result::memset_d8_async(self.peak.address(), 0, 4, self.stream)?;
            result::stream::synchronize(self.stream)?;
            let peak = f32::from_le_bytes([staged[0], staged[1], staged[2], staged[3]]);
            Ok(if peak.is_nan() { f32::INFINITY } else { peak })
        }
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // It is given back in the order of the stream.
        self.scratch = Scratch::NONE;
        // SAFETY: the stream is this backend's; nothing is queued on it when its memory is freed.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _ = result::stream::destroy(self.stream);
        }
    }
}

/// Where rows lie.
#[derive(Clone, Copy)]
enum Place {
    Device(Mat),
    /// One after another.
    Host(*mut u8),
}

struct Described {
    kind: CUmemorytype,
    host: *mut std::ffi::c_void,
    device: CUdeviceptr,
    /// Bytes from one row to the next.
    pitch: usize,
}

impl Place {
    fn described(self, row_bytes: usize, element_bytes: usize) -> Described {
        match self {
            Place::Device(mat) => Described {
                kind: CUmemorytype::CU_MEMORYTYPE_DEVICE,
                host: std::ptr::null_mut(),
                device: mat.address,
                pitch: mat.stride as usize * element_bytes,
            },
            Place::Host(bytes) => Described {
                kind: CUmemorytype::CU_MEMORYTYPE_HOST,
                host: bytes.cast(),
                device: 0,
                pitch: row_bytes,
            },
        }
    }
}

/// What can go wrong while an operation is started.
#[derive(Debug)]
pub(super) enum Fault {
    Driver(DriverError),
    Product(CublasError),
}

impl From<DriverError> for Fault {
    fn from(error: DriverError) -> Self {
        Fault::Driver(error)
    }
}

impl From<CublasError> for Fault {
    fn from(error: CublasError) -> Self {
        Fault::Product(error)
    }
}

pub(super) fn failed<E: Into<Fault>>(operation: &'static str) -> impl Fn(E) -> BackendError {
    move |error| {
        let reason = match error.into() {
            Fault::Driver(error) => reason(&error),
            Fault::Product(error) => format!("cuBLASLt says {:?}", error.0),
        };
        BackendError::Failed { operation, reason }
    }
}

impl Backend for CudaBackend {
    fn run(&mut self, op: Op) -> Result<(), BackendError> {
        op.check();
        self.start(op).map_err(failed(op.name()))?;
        // Where assertions are on, a kernel that fails is named at once.
        if cfg!(debug_assertions) { self.synchronize().map_err(failed(op.name())) } else { Ok(()) }
    }

    fn upload(&mut self, dst: View, bytes: &[u8]) -> Result<(), BackendError> {
        assert_eq!(bytes.len(), dst.size_bytes(), "bytes for {} × {} of {}", dst.rows, dst.cols, dst.dtype);
        self.upload_now(dst, bytes).map_err(failed("upload"))
    }

    fn download(&mut self, src: View, bytes: &mut [u8]) -> Result<(), BackendError> {
        assert_eq!(bytes.len(), src.size_bytes(), "bytes for {} × {} of {}", src.rows, src.cols, src.dtype);
        self.download_now(src, bytes).map_err(failed("download"))
    }

    fn take_fixed_point_peak(&mut self) -> Result<f32, BackendError> {
        self.take_peak().map_err(failed("take_fixed_point_peak"))
    }

    fn as_cuda(&self) -> Option<&CudaBackend> {
        Some(self)
    }
}
