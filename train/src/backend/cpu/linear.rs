//! Weight gradients.

use super::fixed::FixedPoint;
use super::gemm::{Factor, gemm};
use super::{Matrix, MatrixMut, scratch};

/// Leaves up to this many rows are summed in registers; larger ones are matrix products. The leaf alone decides, so that
/// the bits do not depend on how many there are.
const MAX_FUSED_LEAF: usize = 16;

/// Rows of the gradient that one matrix product makes: its accumulators stay in the cache while all leaves pass.
const PRODUCT_ROWS: usize = 64;

/// `acc += d_outᵀ · x`, leaf by leaf.
pub(super) fn weight_gradient(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
    space: &mut Vec<f32>,
) {
    if leaf <= MAX_FUSED_LEAF {
        return fused(d_out, x, acc, leaf, fixed);
    }
    for first_row in (0..acc.rows).step_by(PRODUCT_ROWS) {
        let rows = first_row..acc.rows.min(first_row + PRODUCT_ROWS);
        let mut acc = acc.block(rows.clone(), 0..x.cols);
        let product = scratch(space, rows.len() * x.cols);
        for first in (0..x.rows).step_by(leaf) {
            let tokens = first..first + leaf;
            let d_out = Factor::transposed(d_out.block(tokens.clone(), rows.clone()));
            let x_leaf = Factor::new(x.block(tokens, 0..x.cols));
            gemm(d_out, x_leaf, MatrixMut::contiguous(product, x.cols), false);
            for (row, product) in product.chunks_exact(x.cols).enumerate() {
                fixed.add(acc.row(row), product);
            }
        }
    }
}

/// Gradient rows and columns of a register tile.
const TILE_ROWS: usize = 4;
const TILE_COLS: usize = 16;

fn fused(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
) {
    for col in (0..x.cols).step_by(TILE_COLS) {
        let cols = col..x.cols.min(col + TILE_COLS);
        for row in (0..d_out.cols).step_by(TILE_ROWS) {
            let rows = row..d_out.cols.min(row + TILE_ROWS);
            let (d_out, x) = (d_out.block(0..d_out.rows, rows.clone()), x.block(0..x.rows, cols.clone()));
            let acc = acc.block(rows.clone(), cols.clone());
            if rows.len() == TILE_ROWS && cols.len() == TILE_COLS {
                full_tile(d_out, x, acc, leaf, fixed);
            } else {
                edge_tile(d_out, x, acc, leaf, fixed);
            }
        }
    }
}

#[inline(always)]
fn full_tile(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
) {
    let mut totals = [[0; TILE_COLS]; TILE_ROWS];
    for first in (0..x.rows).step_by(leaf) {
        let mut sums = [[0.0; TILE_COLS]; TILE_ROWS];
        for token in first..first + leaf {
            let x: &[f32; TILE_COLS] = x.row(token).try_into().expect("a full tile");
            let d_out: &[f32; TILE_ROWS] = d_out.row(token).try_into().expect("a full tile");
            for (sums, d_out) in sums.iter_mut().zip(d_out) {
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum += d_out * x;
                }
            }
        }
        for (totals, sums) in totals.iter_mut().zip(&sums) {
            fixed.add(totals, sums);
        }
    }
    for (row, totals) in totals.iter().enumerate() {
        for (acc, total) in acc.row(row).iter_mut().zip(totals) {
            *acc = acc.wrapping_add(*total);
        }
    }
}

/// The same sums, element by element.
fn edge_tile(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
) {
    for row in 0..d_out.cols {
        for (col, acc) in acc.row(row).iter_mut().enumerate() {
            for first in (0..x.rows).step_by(leaf) {
                let leaf = first..first + leaf;
                let sum = leaf.fold(0.0, |sum, token| sum + d_out.row(token)[row] * x.row(token)[col]);
                fixed.add_one(acc, sum);
            }
        }
    }
}
