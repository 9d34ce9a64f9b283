//! Operations that move or add whole rows.

use super::accumulate::Adder;
use super::gemm::widest;
use super::{Matrix, MatrixMut, scratch};
use crate::backend::{Dropout, HiddenSite};
use crate::numerics;
use crate::rng::DropoutRow;
use bytemuck::Pod;

pub(super) fn copy<T: Copy>(src: Matrix<'_, T>, mut dst: MatrixMut<'_, T>) {
    for (row, src) in src.iter().enumerate() {
        dst.row(row).copy_from_slice(src);
    }
}

pub(super) fn add(src: Matrix<'_, f32>, mut dst: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            for (row, src) in src.iter().enumerate() {
                for (dst, src) in dst.row(row).iter_mut().zip(src) {
                    *dst += src;
                }
            }
        },
    )
}

pub(super) fn add_fixed(src: Matrix<'_, i64>, mut dst: MatrixMut<'_, i64>) {
    for (row, src) in src.iter().enumerate() {
        for (dst, src) in dst.row(row).iter_mut().zip(src) {
            *dst = dst.wrapping_add(*src);
        }
    }
}

pub(super) fn gather<T: Copy + Default>(
    src: Matrix<'_, T>,
    index: Matrix<'_, i32>,
    mut dst: MatrixMut<'_, T>,
) {
    for row in 0..dst.rows {
        match usize::try_from(*index.at(row)) {
            Ok(from) => {
                assert!(from < src.rows, "row {from} of {} is gathered", src.rows);
                dst.row(row).copy_from_slice(src.row(from));
            }
            Err(_) => dst.row(row).fill(T::default()),
        }
    }
}

/// The row of a vocabulary shard that holds `token`.
fn row_of(token: i32, first_row: i32, rows: usize) -> Option<usize> {
    usize::try_from(i64::from(token) - i64::from(first_row)).ok().filter(|row| *row < rows)
}

pub(super) fn embed(
    tokens: Matrix<'_, i32>,
    table: Matrix<'_, f32>,
    first_row: i32,
    mut out: MatrixMut<'_, f32>,
    accumulate: bool,
) {
    for row in 0..out.rows {
        let out = out.row(row);
        match row_of(*tokens.at(row), first_row, table.rows) {
            Some(from) if accumulate => out.iter_mut().zip(table.row(from)).for_each(|(out, x)| *out += x),
            None if accumulate => {}
            // Adding +0 turns −0 into +0, as the sum over vocabulary shards does.
            Some(from) => out.iter_mut().zip(table.row(from)).for_each(|(out, x)| *out = x + 0.0),
            None => out.fill(0.0),
        }
    }
}

pub(super) fn embed_backward<A: Adder>(
    tokens: Matrix<'_, i32>,
    d_out: Matrix<'_, f32>,
    first_row: i32,
    mut acc: MatrixMut<'_, A::Acc>,
    adder: &mut A,
) {
    widest(
        #[inline(always)]
        || {
            for (row, d_out) in d_out.iter().enumerate() {
                if let Some(to) = row_of(*tokens.at(row), first_row, acc.rows) {
                    adder.add(acc.row(to), d_out);
                }
            }
        },
    )
}

pub(super) fn add_bias(bias: Matrix<'_, f32>, mut x: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            let bias = bias.row(0);
            for row in 0..x.rows {
                for (x, bias) in x.row(row).iter_mut().zip(bias) {
                    *x += bias;
                }
            }
        },
    )
}

pub(super) fn sum_rows<A: Adder>(
    x: Matrix<'_, f32>,
    mut acc: MatrixMut<'_, A::Acc>,
    leaf: usize,
    adder: &mut A,
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let sums = scratch(space, x.cols);
            for first in (0..x.rows).step_by(leaf) {
                sums.fill(0.0);
                for row in first..first + leaf {
                    for (sum, x) in sums.iter_mut().zip(x.row(row)) {
                        *sum += x;
                    }
                }
                adder.add(acc.row(0), sums);
            }
        },
    )
}

pub(super) fn dropout(
    mut x: MatrixMut<'_, f32>,
    samples: Matrix<'_, i64>,
    positions: Matrix<'_, i32>,
    dropout: Dropout,
    site: HiddenSite,
) {
    let Dropout { p, seed, layer } = dropout;
    for row in 0..x.rows {
        let words = DropoutRow::hidden(seed, layer, site as u32, *samples.at(row), *positions.at(row));
        words.apply(p, x.row(row));
    }
}

/// Rounds every element to BF16.
pub(super) fn round_to_bf16(mut x: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || (0..x.rows).for_each(|row| x.row(row).iter_mut().for_each(|x| *x = numerics::round_to_bf16(*x))),
    )
}

/// BF16 is the upper half of f32.
pub(super) fn upload_bf16(bytes: &[u8], mut dst: MatrixMut<'_, f32>) {
    let row_bytes = dst.cols * 2;
    for row in 0..dst.rows {
        let bytes = bytes[row * row_bytes..][..row_bytes].as_chunks().0;
        for (dst, [low, high]) in dst.row(row).iter_mut().zip(bytes) {
            *dst = f32::from_le_bytes([0, 0, *low, *high]);
        }
    }
}

pub(super) fn download_bf16(src: Matrix<'_, f32>, bytes: &mut [u8]) {
    let row_bytes = src.cols * 2;
    for (row, src) in src.iter().enumerate() {
        let bytes = bytes[row * row_bytes..][..row_bytes].as_chunks_mut().0;
        for (src, bytes) in src.iter().zip(bytes) {
            let [_, _, low, high] = src.to_le_bytes();
            *bytes = [low, high];
        }
    }
}

pub(super) fn upload<T: Pod>(bytes: &[u8], mut dst: MatrixMut<'_, T>) {
    let row_bytes = dst.cols * size_of::<T>();
    for row in 0..dst.rows {
        let dst: &mut [u8] = bytemuck::cast_slice_mut(dst.row(row));
        dst.copy_from_slice(&bytes[row * row_bytes..][..row_bytes]);
    }
}

pub(super) fn download<T: Pod>(src: Matrix<'_, T>, bytes: &mut [u8]) {
    let row_bytes = src.cols * size_of::<T>();
    for (row, src) in src.iter().enumerate() {
        bytes[row * row_bytes..][..row_bytes].copy_from_slice(bytemuck::cast_slice(src));
    }
}
