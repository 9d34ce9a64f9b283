//! A tensor read a few whole rows at a time, so that memory does not grow with it.

use ckpt::{Checkpoint, ForeignCheckpoint, StateSource, StoredTensor};
use mesh::{DType, Region, Shape, TensorKey};

/// Bytes that are read at a time.
const SLAB_BYTES: u64 = 16 << 20;

/// The bytes of a tensor in pieces: together its elements in row-major order, little-endian.
pub(crate) fn read<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &'a StoredTensor,
) -> impl Iterator<Item = anyhow::Result<Vec<u8>>> + 'a {
    slabs(&tensor.shape, tensor.dtype).map(|(region, mut bytes)| {
        checkpoint.read_box(&tensor.key, &region, &mut bytes)?;
        Ok(bytes)
    })
}

/// The same of other software's files.
pub(crate) fn read_foreign<'a>(
    checkpoint: &'a ForeignCheckpoint,
    key: &'a TensorKey,
) -> impl Iterator<Item = anyhow::Result<Vec<u8>>> + 'a {
    let tensor = &checkpoint.tensors()[key];
    slabs(&tensor.shape, tensor.dtype).map(|(region, mut bytes)| {
        checkpoint.read_box(key, &region, &mut bytes)?;
        Ok(bytes)
    })
}

/// The tensor cut into boxes, each with room for its bytes.
fn slabs(shape: &Shape, dtype: DType) -> impl Iterator<Item = (Region, Vec<u8>)> + use<> {
    let width = dtype.size_bytes();
    let regions = Region::whole(shape).split(SLAB_BYTES / width as u64).into_iter();
    regions.map(move |region| {
        let bytes = vec![0; region.numel() as usize * width];
        (region, bytes)
    })
}
