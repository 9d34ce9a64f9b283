//! Cross-entropy over a vocabulary that may be split, in three phases: between them a maximum and sums over the shards.

use super::gemm::widest;
use super::{Matrix, MatrixMut, scratch};
use crate::numerics::{self, exp, ln};

/// A shard of the vocabulary: its columns from `valid` on are padding.
#[derive(Clone, Copy)]
pub(super) struct Shard {
    pub(super) first_col: i32,
    pub(super) valid: usize,
}

impl Shard {
    /// The column of `target`, if it is here.
    fn column_of(self, target: i32) -> Option<usize> {
        let col = i64::from(target) - i64::from(self.first_col);
        usize::try_from(col).ok().filter(|col| *col < self.valid)
    }
}

/// One value a token.
pub(super) struct Rows<'a> {
    pub(super) max: Matrix<'a, f32>,
    pub(super) sum: Matrix<'a, f32>,
    pub(super) picked: Matrix<'a, f32>,
    pub(super) target: Matrix<'a, i32>,
    pub(super) weight: Matrix<'a, f32>,
}

pub(super) fn max(logits: Matrix<'_, f32>, valid: usize, mut max: MatrixMut<'_, f32>) {
    widest(
        #[inline(always)]
        || {
            for (row, logits) in logits.iter().enumerate() {
                *max.at(row) = numerics::max(&logits[..valid]);
            }
        },
    )
}

pub(super) fn sum(
    logits: Matrix<'_, f32>,
    max: Matrix<'_, f32>,
    target: Matrix<'_, i32>,
    shard: Shard,
    block: usize,
    [mut sum, mut picked]: [MatrixMut<'_, f32>; 2],
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let num_blocks = logits.cols / block;
            let (exps, sums) = scratch(space, block + num_blocks).split_at_mut(block);
            for (row, logits) in logits.iter().enumerate() {
                let max = *max.at(row);
                for (index, sum) in sums.iter_mut().enumerate() {
                    // A block of padding has a sum too, so that the pairs are the same under every split.
                    let cols = (index * block).min(shard.valid)..((index + 1) * block).min(shard.valid);
                    let exps = &mut exps[..cols.len()];
                    for (out, logit) in exps.iter_mut().zip(&logits[cols]) {
                        *out = exp(logit - max);
                    }
                    *sum = numerics::sum(exps);
                }
                *sum.at(row) = numerics::sum_pairwise(sums);
                *picked.at(row) = shard.column_of(*target.at(row)).map_or(0.0, |col| logits[col] - max);
            }
        },
    )
}

/// Losses, and gradients in place of the logits.
pub(super) fn gradient(
    rows: Rows<'_>,
    shard: Shard,
    mut logits: MatrixMut<'_, f32>,
    mut loss: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            for row in 0..logits.rows {
                let logits = logits.row(row);
                let weight = *rows.weight.at(row);
                if weight == 0.0 {
                    logits.fill(0.0);
                    *loss.at(row) = 0.0;
                    continue;
                }
                let (max, sum) = (*rows.max.at(row), *rows.sum.at(row));
                *loss.at(row) = weight * (ln(sum) - rows.picked.at(row));
                let (valid, padding) = logits.split_at_mut(shard.valid);
                for logit in valid.iter_mut() {
                    *logit = weight * (exp(*logit - max) / sum);
                }
                padding.fill(0.0);
                if let Some(col) = shard.column_of(*rows.target.at(row)) {
                    logits[col] -= weight;
                }
            }
        },
    )
}
