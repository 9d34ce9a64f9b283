//! Copying a box of elements between two row-major buffers.

use mesh::{Region, Shape, paired_runs};
use std::ops::Range;

/// One side of a copy: a row-major buffer of a shape, and a box in the buffer's own coordinates.
#[derive(Clone, Copy, Debug)]
pub struct BoxIn<'a> {
    /// Shape of the buffer.
    pub shape: &'a Shape,
    /// The box in it.
    pub region: &'a Region,
}

/// Copies the elements of the box `from` of `source` to the box `to` of `target`; `element_bytes` each.
///
/// # Panics
/// If the boxes differ in shape, or a buffer is shorter than its shape says.
pub fn copy_box(source: &[u8], from: BoxIn<'_>, target: &mut [u8], to: BoxIn<'_>, element_bytes: usize) {
    assert_eq!(from.region.shape(), to.region.shape(), "a box is copied to one of its own shape");
    let bytes = |run: Range<u64>| run.start as usize * element_bytes..run.end as usize * element_bytes;
    for (read, write) in paired_runs(from.region, from.shape, to.region, to.shape) {
        target[bytes(write)].copy_from_slice(&source[bytes(read)]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Element by element, and nothing outside the box is touched.
        #[test]
        fn each_element_lands_where_its_index_says(
            from_lo in prop::array::uniform3(0..3u64), to_lo in prop::array::uniform3(0..3u64),
            extent in prop::array::uniform3(0..4u64), spare in prop::array::uniform3(0..3u64),
        ) {
            let add = |a: [u64; 3], b: [u64; 3]| std::array::from_fn::<u64, 3, _>(|dim| a[dim] + b[dim]);
            let (from_hi, to_hi) = (add(from_lo, extent), add(to_lo, extent));
            let (from_shape, to_shape) = (Shape::new(&add(from_hi, spare)), Shape::new(&add(to_hi, [1; 3])));
            let (from, to) = (Region::new(&from_lo, &from_hi), Region::new(&to_lo, &to_hi));
            let source: Vec<u8> = (0..from_shape.numel()).flat_map(|at| (at as u16 + 1).to_le_bytes()).collect();
            let mut target = vec![0; to_shape.numel() as usize * 2];
            copy_box(
                &source,
                BoxIn { shape: &from_shape, region: &from },
                &mut target,
                BoxIn { shape: &to_shape, region: &to },
                2,
            );
            let mut expected = vec![0u8; target.len()];
            let flat = |shape: &Shape, at: [u64; 3]| {
                (at[0] * shape.dims()[1] + at[1]) * shape.dims()[2] + at[2]
            };
            for i in 0..extent[0] { for j in 0..extent[1] { for k in 0..extent[2] {
                let value = flat(&from_shape, add(from_lo, [i, j, k])) as u16 + 1;
                let at = flat(&to_shape, add(to_lo, [i, j, k])) as usize * 2;
                expected[at..at + 2].copy_from_slice(&value.to_le_bytes());
            } } }
            prop_assert_eq!(target, expected);
        }
    }
}
