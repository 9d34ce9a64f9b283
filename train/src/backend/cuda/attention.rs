//! Attention in bf16 on Hopper: how the kernels of `attention.cu` are launched.

use super::arguments::{Arguments, Mat, TensorMap};
use super::device::{CudaBackend, Fault};
use super::launch::attention_drop;
use crate::backend::{AttentionInputs, View};
use cudarc::driver::sys;
use mesh::DType;

/// Rows of a warpgroup.
const HALF: usize = 64;
/// Threads of a warpgroup.
const WARPGROUP: u32 = 128;

/// How a kernel divides its work and its memory, as in `attention.cu`.
struct Tiling {
    /// Warpgroups that compute; one more loads.
    warpgroups: usize,
    /// Tiles of 64 rows of a head in shared memory.
    halves: usize,
    /// What else is there: statistics and barriers.
    more_bytes: usize,
}

const fn forward_tiling(head_dim: usize) -> Tiling {
    let (warpgroups, stages) = if head_dim == 64 { (3, 4) } else { (2, 2) };
    Tiling { warpgroups, halves: warpgroups + stages * 4, more_bytes: 256 }
}

const DQ_TILING: Tiling = Tiling { warpgroups: 3, halves: 2 * 3 + 3 * 2, more_bytes: 256 };

const fn dkv_tiling(head_dim: usize) -> Tiling {
    let warpgroups = if head_dim == 64 { 3 } else { 2 };
    Tiling { warpgroups, halves: 2 * warpgroups + 3 * 2, more_bytes: 3 * 1024 + 256 }
}

/// The kernel of a head size, with dropout or without.
macro_rules! variant {
    ($inputs:expr, $name:literal) => {
        match ($inputs.heads.head_dim, $inputs.dropout.is_some()) {
            (64, false) => concat!($name, "_64"),
            (64, true) => concat!($name, "_64_dropout"),
            (128, false) => concat!($name, "_128"),
            (128, true) => concat!($name, "_128_dropout"),
            (head_dim, _) => panic!("no kernel for heads of {head_dim}"),
        }
    };
}

impl CudaBackend {
    /// Whether `attention.cu` computes this; `others` are results and gradients.
    pub(super) fn is_quick_attention(&self, inputs: AttentionInputs, others: &[View]) -> bool {
        inputs.qkv.dtype == DType::Bf16
            && matches!(inputs.heads.head_dim, 64 | 128)
            && self.gpu.has("attention_forward_64")
            && inputs
                .views()
                .iter()
                .chain(others)
                .all(|view| view.is_contiguous() && self.mat(*view).address.is_multiple_of(16))
    }

    pub(super) fn quick_attention(&self, inputs: AttentionInputs, out: View, lse: View) -> Result<(), Fault> {
        let AttentionInputs { qkv, kv, heads, batch, .. } = inputs;
        let arguments =
            Arguments::default().and(self.tensor_map(qkv, batch)?).and(self.tensor_map(kv, batch)?);
        let arguments = arguments.and(self.mat(inputs.positions).address);
        let arguments = arguments.and(self.mat(inputs.samples).address);
        let arguments = arguments.and(self.mat(out).address).and(self.mat(lse).address);
        let rows = qkv.rows / batch;
        let arguments = of_shape(arguments.and(batch as i32).and(rows as i32), inputs);
        let arguments = with_dropout(arguments, inputs);
        let tiling = forward_tiling(heads.head_dim);
        let kernel = variant!(inputs, "attention_forward");
        self.launch_shares(kernel, inputs, tiling, heads.num_queries(), rows, arguments)
    }

    /// Adds to `d_kv`, which is F32.
    pub(super) fn quick_attention_backward(
        &mut self,
        inputs: AttentionInputs,
        (out, lse): (View, View),
        d_out: View,
        (d_qkv, d_kv): (View, View),
    ) -> Result<(), Fault> {
        let AttentionInputs { qkv, kv, heads, batch, .. } = inputs;
        let (rows, keys, num_queries) = (qkv.rows / batch, kv.rows / batch, heads.num_queries());
        let padded = rows.next_multiple_of(HALF);
        let stats = self.scratch(batch * num_queries, padded * 2)?.address;

        let arguments = Arguments::default().and(self.mat(out).address).and(self.mat(d_out).address);
        let arguments = arguments.and(self.mat(lse).address).and(stats);
        let arguments = arguments.and(rows as i32).and(num_queries as i32);
        let blocks = (padded * num_queries * heads.head_dim).div_ceil(2048);
        let kernel = variant!(inputs, "attention_stats");
        self.launch(kernel, (blocks as u64, batch as u64), 256, 0, arguments)?;

        let [map_qkv, map_kv, map_d_out] = [qkv, kv, d_out].map(|view| self.tensor_map(view, batch));
        let (map_qkv, map_kv, map_d_out) = (map_qkv?, map_kv?, map_d_out?);
        let common = || {
            let arguments = Arguments::default().and(map_qkv).and(map_kv).and(map_d_out);
            let arguments = arguments.and(self.mat(inputs.positions).address);
            arguments.and(self.mat(inputs.samples).address).and(stats)
        };
        let arguments = common().and(self.mat(d_qkv).address).and(batch as i32).and(rows as i32);
        let arguments = with_dropout(of_shape(arguments, inputs), inputs);
        self.launch_shares(
            variant!(inputs, "attention_dq"),
            inputs,
            DQ_TILING,
            num_queries,
            rows,
            arguments,
        )?;

        let arguments =
            common().and(self.mat(d_kv).address).and(batch as i32).and(rows as i32).and(keys as i32);
        let arguments =
            of_shape(arguments, inputs).and(heads.kv_cols() as i32).and(2 * heads.head_dim as i32);
        let arguments = with_dropout(arguments.and(1), inputs);
        let tiling = dkv_tiling(heads.head_dim);
        let kernel = variant!(inputs, "attention_dkv");
        self.launch_shares(kernel, inputs, tiling, heads.groups, keys, arguments)
    }

    /// As many blocks as stay on their multiprocessors, at most one for each tile of `rows` of one of `heads` of a sample.
    fn launch_shares(
        &self,
        kernel: &'static str,
        inputs: AttentionInputs,
        tiling: Tiling,
        heads: usize,
        rows: usize,
        arguments: Arguments,
    ) -> Result<(), Fault> {
        let shares = heads * inputs.batch * rows.div_ceil(tiling.warpgroups * HALF);
        let blocks = (shares as u64).min(u64::from(self.gpu.num_multiprocessors()));
        let shared =
            tiling.halves * HALF * inputs.heads.head_dim * DType::Bf16.size_bytes() + tiling.more_bytes;
        self.launch(kernel, (blocks, 1), WARPGROUP * (1 + tiling.warpgroups as u32), shared, arguments)
    }

    /// Of a bf16 matrix with the rows of `batch` samples, for boxes of 64 × 64.
    fn tensor_map(&self, view: View, batch: usize) -> Result<TensorMap, Fault> {
        let Mat { address, stride, rows, cols } = self.mat(view);
        let (rows, row_bytes) = (rows as u64 / batch as u64, stride as u64 * DType::Bf16.size_bytes() as u64);
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // SAFETY: the matrix lies within its buffer; all lists are as long as the rank, or one less.
        unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                3,
                address as *mut _,
                [cols as u64, rows, batch as u64].as_ptr(),
                [row_bytes, rows * row_bytes].as_ptr(),
                [64, 64, 1].as_ptr(),
                [1, 1, 1].as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()?;
        Ok(TensorMap { words: map.opaque })
    }
}

fn of_shape(arguments: Arguments, AttentionInputs { heads, .. }: AttentionInputs) -> Arguments {
    let arguments = arguments.and(heads.groups as i32).and(heads.queries_per_group as i32);
    arguments.and(1.0 / (heads.head_dim as f32).sqrt())
}

fn with_dropout(arguments: Arguments, inputs: AttentionInputs) -> Arguments {
    arguments.and(inputs.first_head).and(attention_drop(inputs.dropout))
}
