//! What kernels are given, laid out as in `kernels/prelude.cuh`.

use bytemuck::{Pod, Zeroable};
use std::ffi::c_void;

/// `Mat<T>`: a matrix on the device.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Mat {
    pub(super) address: u64,
    /// Elements from one row to the next.
    pub(super) stride: i64,
    pub(super) rows: i64,
    pub(super) cols: i64,
}

impl Mat {
    /// An operand that is not there.
    pub(super) const NONE: Mat = Mat { address: 0, stride: 0, rows: 0, cols: 0 };
}

/// `Factor<T>` of `gemm.cu`: element (outer, inner) lies at outer · `outer_stride` + inner · `inner_stride`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Factor {
    pub(super) address: u64,
    pub(super) outer_stride: i64,
    pub(super) inner_stride: i64,
}

impl Factor {
    /// Rows are outer.
    pub(super) fn rows(mat: Mat) -> Self {
        Factor { address: mat.address, outer_stride: mat.stride, inner_stride: 1 }
    }

    /// Columns are outer.
    pub(super) fn cols(mat: Mat) -> Self {
        Factor { address: mat.address, outer_stride: 1, inner_stride: mat.stride }
    }
}

/// `Center<T>` of `norm.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Center {
    pub(super) mean: Mat,
    pub(super) beta: Mat,
}

/// `Summand<T>` of `columns.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Summand {
    pub(super) x: Mat,
    pub(super) normed: Mat,
    pub(super) mean: Mat,
    pub(super) rstd: Mat,
}

/// `Fixed`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Fixed {
    pub(super) scale: f32,
    pub(super) unit: f32,
    pub(super) peak: u64,
}

/// `TensorMap` of `attention.cu`: CUDA's description of a matrix for the copy engine.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct TensorMap {
    pub(super) words: [u64; 16],
}

/// `Drop`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Drop {
    pub(super) seed: u32,
    pub(super) purpose: u32,
    pub(super) place: u32,
    pub(super) threshold: u32,
    pub(super) scale: f32,
}

/// `Heads` of `rope.cu` and `tiles.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Heads {
    pub(super) groups: i32,
    pub(super) queries: i32,
    pub(super) dim: i32,
}

/// `Attention<T>` of `tiles.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Attention {
    pub(super) qkv: Mat,
    pub(super) kv: Mat,
    pub(super) positions: Mat,
    pub(super) samples: Mat,
    pub(super) heads: Heads,
    pub(super) padding: u32,
    pub(super) queries: i64,
    pub(super) keys: i64,
    pub(super) tile: i64,
    pub(super) scale: f32,
    pub(super) has_dropout: i32,
    pub(super) drop: Drop,
    pub(super) first_head: u32,
}

/// `Gradient<T>` of `tiles.cu`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Gradient {
    pub(super) out: Mat,
    pub(super) lse: Mat,
    pub(super) d_out: Mat,
}

/// The arguments of one launch, in the order of the kernel's parameters.
#[derive(Debug, Default)]
pub(super) struct Arguments {
    words: Vec<u64>,
    starts: Vec<usize>,
}

impl Arguments {
    pub(super) fn and<T: Pod>(mut self, argument: T) -> Self {
        let start = self.words.len();
        self.words.resize(start + size_of::<T>().div_ceil(8), 0);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.words[start..]);
        bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&argument));
        self.starts.push(start);
        self
    }

    /// Where each argument lies; valid while `self` is.
    pub(super) fn pointers(&mut self) -> Vec<*mut c_void> {
        let words = self.words.as_mut_ptr();
        // SAFETY: each start lies within the words.
        self.starts.iter().map(|start| unsafe { words.add(*start) }.cast()).collect()
    }
}
