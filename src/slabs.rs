//! A tensor read a few whole rows at a time, so that memory does not grow with it.

use ckpt::{Checkpoint, StateSource, StoredTensor};
use mesh::Region;

/// Bytes that are read at a time, if a row is no longer.
const SLAB_BYTES: u64 = 16 << 20;

/// The bytes of each box of [`slabs`], in order: together the elements in row-major order, little-endian.
pub(crate) fn read<'a>(
    checkpoint: &'a Checkpoint,
    tensor: &'a StoredTensor,
) -> impl Iterator<Item = anyhow::Result<Vec<u8>>> + 'a {
    slabs(tensor).map(|region| {
        let mut bytes = vec![0; region.numel() as usize * tensor.dtype.size_bytes()];
        checkpoint.read_box(&tensor.key, &region, &mut bytes)?;
        Ok(bytes)
    })
}

/// The tensor cut into boxes of whole rows.
fn slabs(tensor: &StoredTensor) -> impl Iterator<Item = Region> + use<> {
    let dims = tensor.shape.dims().to_vec();
    let row_bytes = dims.iter().skip(1).product::<u64>() * tensor.dtype.size_bytes() as u64;
    let step = (SLAB_BYTES / row_bytes.max(1)).max(1);
    let rows = dims.first().copied().unwrap_or(1);
    (0..rows).step_by(step as usize).map(move |lo| {
        let (mut from, mut to) = (vec![0; dims.len()], dims.clone());
        if !dims.is_empty() {
            (from[0], to[0]) = (lo, (lo + step).min(rows));
        }
        Region::new(&from, &to)
    })
}
