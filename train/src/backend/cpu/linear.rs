//! Weight gradients in fixed point.

use super::accumulate::{Adder, FixedPoint};
use super::gemm::Factor;
use super::{Matrix, MatrixMut};

/// Rows of the gradient that one matrix product makes: its accumulators stay in the cache while all leaves pass.
const PRODUCT_ROWS: usize = 128;

/// `acc += d_outᵀ · x`, leaf by leaf.
///
/// A product for each leaf, however small: measured from 4 rows on, it is faster than loops over rows of the gradient,
/// which lack the fused multiply-add, and as fast for 2.
pub(super) fn weight_gradient(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
    space: &mut Vec<f32>,
) {
    for first_row in (0..acc.rows).step_by(PRODUCT_ROWS) {
        let rows = first_row..acc.rows.min(first_row + PRODUCT_ROWS);
        for first in (0..x.rows).step_by(leaf) {
            let tokens = first..first + leaf;
            let d_out = Factor::transposed(d_out.block(tokens.clone(), rows.clone()));
            let x_leaf = Factor::new(x.block(tokens, 0..x.cols));
            fixed.add_product(acc.block(rows.clone(), 0..x.cols), d_out, x_leaf, space);
        }
    }
}
