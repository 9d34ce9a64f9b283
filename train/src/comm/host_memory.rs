//! The least device that has memory, for tests of communicators.

use crate::backend::{Backend, BackendError, BufId, Op, View};
use bytemuck::Pod;
use mesh::DType;

/// Buffers of bytes; it can copy and nothing else.
#[derive(Debug, Default)]
pub(super) struct HostMemory {
    buffers: Vec<Vec<u8>>,
}

impl HostMemory {
    /// A new buffer of `rows × cols` elements, in which all bits are set.
    pub(super) fn declare(&mut self, dtype: DType, rows: usize, cols: usize) -> View {
        self.buffers.push(vec![0xFF; rows * cols * dtype.size_bytes()]);
        View::whole(BufId(self.buffers.len() as u32 - 1), dtype, rows, cols)
    }

    /// A new buffer of one row that holds `values`.
    pub(super) fn holding<T: Pod>(&mut self, dtype: DType, values: &[T]) -> View {
        let view = self.declare(dtype, 1, values.len());
        self.upload(view, bytemuck::cast_slice(values)).unwrap();
        view
    }

    /// The elements of a view.
    pub(super) fn values<T: Pod>(&mut self, view: View) -> Vec<T> {
        let mut values = vec![T::zeroed(); view.numel()];
        self.download(view, bytemuck::cast_slice_mut(&mut values)).unwrap();
        values
    }

    fn bytes_mut(&mut self, view: View) -> &mut [u8] {
        assert!(view.is_contiguous());
        let (lo, hi) = view.extent();
        let element = view.dtype.size_bytes();
        &mut self.buffers[view.buf.0 as usize][lo * element..hi * element]
    }
}

impl Backend for HostMemory {
    fn run(&mut self, op: Op) -> Result<(), BackendError> {
        let Op::Copy { src, dst } = op else { panic!("{op:?} is not for communicators") };
        assert_eq!((src.rows, src.cols), (dst.rows, dst.cols), "a copy keeps the shape");
        let bytes = self.bytes_mut(src).to_vec();
        self.upload(dst, &bytes)
    }

    fn upload(&mut self, dst: View, bytes: &[u8]) -> Result<(), BackendError> {
        self.bytes_mut(dst).copy_from_slice(bytes);
        Ok(())
    }

    fn download(&mut self, src: View, bytes: &mut [u8]) -> Result<(), BackendError> {
        bytes.copy_from_slice(self.bytes_mut(src));
        Ok(())
    }

    fn take_fixed_point_peak(&mut self) -> Result<f32, BackendError> {
        Ok(0.0)
    }
}
