//! Matrix products by cuBLASLt: bf16 factors, sums in f32. The library is asked for its algorithm once a shape, so that a shape
//! is computed in the same way in every step.

use super::arguments::{Factor, Mat};
use super::device::Fault;
use super::memory::DeviceMemory;
use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulAlgo_t, cublasLtMatmulDesc_t,
    cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayout_t, cudaDataType_t,
};
use cudarc::driver::sys::CUstream;
use mesh::DType;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr::from_ref;

/// Bytes that algorithms may use; the library's own advice for Hopper is half of it.
const WORKSPACE_BYTES: usize = 64 << 20;
/// The alignment that the library takes for granted.
const ALIGNMENT_MAX: u64 = 256;

/// One rank's handle, and the algorithms that were chosen.
#[derive(Debug)]
pub(super) struct Products {
    handle: cublasLtHandle_t,
    workspace: DeviceMemory,
    plans: HashMap<Shape, Plan>,
}

/// Everything that a choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    /// Rows of the result, its columns, and terms of a sum.
    extents: [u64; 3],
    /// Elements from one row or column of a, b and the result to the next.
    strides: [i64; 3],
    /// Whether neighbouring terms of a sum lie side by side.
    along_sums: [bool; 2],
    /// Whether the result is F32 rather than BF16.
    wide: bool,
    /// Powers of two at multiples of which a, b and the result start.
    alignments: [u32; 3],
}

#[derive(Debug)]
struct Plan {
    operation: cublasLtMatmulDesc_t,
    layouts: [cublasLtMatrixLayout_t; 3],
    /// `None` if the library has none for such operands.
    algorithm: Option<cublasLtMatmulAlgo_t>,
}

impl Products {
    /// For one stream: its products share a workspace.
    pub(super) fn new(stream: CUstream) -> Result<Self, Fault> {
        let workspace = DeviceMemory::zeros(WORKSPACE_BYTES, stream)?;
        Ok(Products { handle: result::create_handle()?, workspace, plans: HashMap::new() })
    }

    /// `out[m][n] (+)= Σ a(m, k) · b(n, k)` over `depth`; false if the library has no algorithm for such operands.
    pub(super) fn run(
        &mut self,
        stream: CUstream,
        (a, b): (Factor, Factor),
        depth: usize,
        (out, dtype): (Mat, DType),
        accumulate: bool,
    ) -> Result<bool, CublasError> {
        let shape = Shape {
            extents: [out.rows as u64, out.cols as u64, depth as u64],
            strides: [a.stride(), b.stride(), out.stride],
            along_sums: [a.inner_stride == 1, b.inner_stride == 1],
            wide: dtype == DType::F32,
            alignments: [a.address, b.address, out.address].map(alignment),
        };
        let handle = self.handle;
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Plan::new(handle, shape)?),
        };
        let Some(algorithm) = &plan.algorithm else { return Ok(false) };
        let (alpha, beta) = (1.0f32, if accumulate { 1.0f32 } else { 0.0 });
        // The library's matrices are stored by columns, so it computes the transposed result: b comes first.
        let [first, second, result] = plan.layouts;
        let pointer = |address: u64| address as *const c_void;
        // SAFETY: the layouts describe the operands, whose extents were checked against their buffers; the workspace is as
        // long as was said when the algorithm was chosen, and is used by this stream alone.
        unsafe {
            result::matmul(
                handle,
                plan.operation,
                from_ref(&alpha).cast(),
                from_ref(&beta).cast(),
                pointer(b.address),
                first,
                pointer(a.address),
                second,
                pointer(out.address),
                result,
                out.address as *mut c_void,
                result,
                algorithm,
                self.workspace.address() as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )?;
        }
        Ok(true)
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        for plan in self.plans.values() {
            // SAFETY: made by `Plan::new` and used by nobody any more. That destroying fails changes nothing.
            unsafe {
                for layout in plan.layouts {
                    result::destroy_matrix_layout(layout).ok();
                }
                result::destroy_matmul_desc(plan.operation).ok();
            }
        }
        // SAFETY: as above.
        unsafe { result::destroy_handle(self.handle).ok() };
    }
}

impl Plan {
    /// The library's first choice.
    fn new(handle: cublasLtHandle_t, shape: Shape) -> Result<Self, CublasError> {
        let Shape {
            extents: [m, n, k],
            strides: [a, b, out],
            along_sums: [a_along, b_along],
            wide,
            alignments,
        } = shape;
        let bf16 = cudaDataType_t::CUDA_R_16BF;
        let f32 = cudaDataType_t::CUDA_R_32F;
        let layout = |along: bool, outer: u64, stride: i64| {
            let (rows, cols) = if along { (k, outer) } else { (outer, k) };
            result::create_matrix_layout(bf16, rows, cols, stride)
        };
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, f32)?;
        let layouts = [
            layout(b_along, n, b)?,
            layout(a_along, m, a)?,
            result::create_matrix_layout(if wide { f32 } else { bf16 }, n, m, out)?,
        ];
        // What lies along the sums is read as (k × outer) columns: the first factor is transposed then, the second is not.
        let transposed = [
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA, i32::from(b_along)),
            (cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB, i32::from(!a_along)),
        ];
        let preference = result::create_matmul_pref()?;
        let [of_a, of_b, of_out] = alignments;
        let aligned = [
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_b),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_a),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_out),
            (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_out),
        ];
        // SAFETY: all objects were just made; attributes have the sizes that the library documents.
        let choice = unsafe {
            for (attribute, value) in transposed {
                result::set_matmul_desc_attribute(operation, attribute, from_ref(&value).cast(), 4)?;
            }
            let workspace = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, workspace, from_ref(&WORKSPACE_BYTES).cast(), 8)?;
            for (attribute, value) in aligned {
                result::set_matmul_pref_attribute(preference, attribute, from_ref(&value).cast(), 4)?;
            }
            let [first, second, out] = layouts;
            let choice =
                result::get_matmul_algo_heuristic(handle, operation, first, second, out, out, preference);
            result::destroy_matmul_pref(preference)?;
            choice
        };
        Ok(Plan { operation, layouts, algorithm: choice.ok().map(|choice| choice.algo) })
    }
}

impl Factor {
    /// Elements between the lines that are not side by side.
    fn stride(self) -> i64 {
        if self.inner_stride == 1 { self.outer_stride } else { self.inner_stride }
    }
}

/// The largest power of two, up to what the library looks for, that divides an address.
fn alignment(address: u64) -> u32 {
    (1 << address.trailing_zeros().min(ALIGNMENT_MAX.trailing_zeros())) as u32
}
