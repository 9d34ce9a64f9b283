//! Matrix products and wide loops: what the CPU backend needs unsafe code for.
//!
//! An element of a product depends on its row of `a`, its column of `b` and on K alone, whatever block of the product is
//! asked for: `matrixmultiply` always packs and cuts K into constant blocks. A property test below holds it to that.

#![allow(unsafe_code)]

mod widest;

pub(super) use widest::{truncate, widest};

use super::matrix::{Matrix, MatrixMut};

/// A factor: a matrix, or its transpose.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factor<'a> {
    elements: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Factor<'a> {
    pub(super) fn new(matrix: Matrix<'a, f32>) -> Self {
        let Matrix { rows, cols, stride, .. } = matrix;
        Factor { elements: matrix.elements(), rows, cols, row_stride: stride, col_stride: 1 }
    }

    pub(super) fn transposed(matrix: Matrix<'a, f32>) -> Self {
        let Matrix { rows, cols, stride, .. } = matrix;
        Factor { elements: matrix.elements(), rows: cols, cols: rows, row_stride: 1, col_stride: stride }
    }
}

/// `c (+)= a · b`, on the calling thread.
///
/// # Panics
/// If the shapes do not fit.
pub(super) fn gemm(a: Factor<'_>, b: Factor<'_>, mut c: MatrixMut<'_, f32>, accumulate: bool) {
    let (m, k, n) = (a.rows, a.cols, b.cols);
    assert!(
        b.rows == k && c.rows == m && c.cols == n,
        "({m} × {k}) · ({} × {n}) → {} × {}",
        b.rows,
        c.rows,
        c.cols
    );
    assert!(m <= 1 || c.stride >= n, "rows of a product overlap: {n} columns at a stride of {}", c.stride);
    check_extent(a.elements.len(), (m, a.row_stride), (k, a.col_stride));
    check_extent(b.elements.len(), (k, b.row_stride), (n, b.col_stride));
    check_extent(c.elements().len(), (m, c.stride), (n, 1));
    let stride = |elements: usize| isize::try_from(elements).expect("slices are shorter than isize::MAX");
    let (rsa, csa) = (stride(a.row_stride), stride(a.col_stride));
    let (rsb, csb) = (stride(b.row_stride), stride(b.col_stride));
    let rsc = stride(c.stride);
    let beta = if accumulate { 1.0 } else { 0.0 };
    let (a, b, c) = (a.elements.as_ptr(), b.elements.as_ptr(), c.elements().as_mut_ptr());
    // SAFETY: `check_extent` shows for each matrix that the element of its last row and column lies inside its slice, and
    // offsets only grow with row and column, so all do. `c` is borrowed mutably, hence apart from `a` and `b`, and its
    // elements do not alias: columns are 1 apart and rows at least `n`.
    unsafe { matrixmultiply::sgemm(m, k, n, 1.0, a, rsa, csa, b, rsb, csb, beta, c, rsc, 1) }
}

/// Checks that the last element of a matrix of (extent, stride) lies within `len` elements.
fn check_extent(len: usize, (rows, row_stride): (usize, usize), (cols, col_stride): (usize, usize)) {
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1)
        .checked_mul(row_stride)
        .zip((cols - 1).checked_mul(col_stride))
        .and_then(|(row, col)| row.checked_add(col));
    assert!(
        last.is_some_and(|last| last < len),
        "{rows} × {cols} elements, {row_stride} and {col_stride} apart, of a slice of {len}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng;
    use proptest::prelude::*;
    use std::ops::Range;

    fn random(seed: u32, name: &str, rows: usize, cols: usize) -> Vec<f32> {
        let mut values = vec![0.0; rows * cols];
        rng::init_normal(seed, name, 0..values.len() as u64, 1.0, &mut values);
        values
    }

    /// Sizes around the edges of kernels and of cache blocks, and anything else.
    fn extent() -> impl Strategy<Value = usize> {
        prop_oneof![Just(1), 1usize..20, 30usize..70, 250usize..270]
    }

    fn inner() -> impl Strategy<Value = usize> {
        prop_oneof![Just(1), 1usize..20, 250usize..270, Just(512), 1000usize..1030]
    }

    fn block(
        matrix: Matrix<'_, f32>,
        rows: Range<usize>,
        cols: Range<usize>,
        transposed: bool,
    ) -> Factor<'_> {
        match transposed {
            false => Factor::new(matrix.block(rows, cols)),
            true => Factor::transposed(matrix.block(cols, rows)),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        /// The bits of a block of rows and columns are those of the same block of the whole product.
        #[test]
        fn products_are_slice_invariant(
            seed: u32, m in extent(), n in extent(), k in inner(), accumulate: bool,
            a_transposed: bool, b_transposed: bool, cuts in prop::array::uniform4(any::<prop::sample::Index>()),
        ) {
            let factor = |values, rows, cols, transposed| match transposed {
                false => Matrix::contiguous(values, cols),
                true => Matrix::contiguous(values, rows),
            };
            let [a, b, c] = [("a", m, k), ("b", k, n), ("c", m, n)].map(|(name, r, c)| random(seed, name, r, c));
            let a = factor(&a, m, k, a_transposed);
            let b = factor(&b, k, n, b_transposed);
            let product = |rows: Range<usize>, cols: Range<usize>| {
                let mut out: Vec<f32> =
                    rows.clone().flat_map(|row| &c[row * n..][cols.clone()]).copied().collect();
                let a = block(a, rows, 0..k, a_transposed);
                let b = block(b, 0..k, cols.clone(), b_transposed);
                gemm(a, b, MatrixMut::contiguous(&mut out, cols.len()), accumulate);
                out
            };
            let whole = product(0..m, 0..n);
            let range = |from: usize, len: usize, extent: usize| {
                let lo = cuts[from].index(extent);
                lo..lo + 1 + cuts[len].index(extent - lo)
            };
            let (rows, cols) = (range(0, 1, m), range(2, 3, n));
            let part = product(rows.clone(), cols.clone());
            let expected = rows.flat_map(|row| &whole[row * n..][cols.clone()]);
            for (found, expected) in part.iter().zip(expected) {
                prop_assert_eq!(found.to_bits(), expected.to_bits());
            }
        }
    }

    #[test]
    #[should_panic(expected = "2 × 3 elements, 4 and 1 apart, of a slice of 6")]
    fn a_factor_that_reaches_past_its_slice_is_refused() {
        let (values, mut out) = ([0.0; 6], [0.0; 2]);
        let a = Factor { elements: &values, rows: 2, cols: 3, row_stride: 4, col_stride: 1 };
        let b = Factor { rows: 3, cols: 1, row_stride: 1, ..a };
        gemm(a, b, MatrixMut::contiguous(&mut out, 1), false);
    }
}
