//! Causal attention by query tiles, rotary positions, and the packing of keys and values.
//!
//! A tile is computed over the keys from position 0 to its last; keys that one of its rows does not see, of later positions or of other
//! documents, have weight +0. So a tile is computed in the same way wherever its rows lie and however many heads are local.

use super::accumulate::Adder;
use super::gemm::{Factor, gemm, widest};
use super::{Matrix, MatrixMut, scratch};
use crate::backend::{AttentionInputs, Dropout, Heads};
use crate::numerics::{dot, exp, ln, max, sum};
use crate::rng::DropoutRow;
use std::ops::Range;

pub(super) fn rope(
    mut qkv: MatrixMut<'_, f32>,
    positions: Matrix<'_, i32>,
    table: Matrix<'_, f32>,
    heads: Heads,
    inverse: bool,
) {
    widest(
        #[inline(always)]
        || {
            for row in 0..qkv.rows {
                let position = usize::try_from(*positions.at(row)).expect("positions count from 0");
                let (cosines, sines) = table.row(position).split_at(heads.head_dim / 2);
                let qkv = qkv.row(row);
                for group in 0..heads.groups {
                    // The query heads of a group and its key head lie side by side.
                    let rotated = &mut qkv[heads.query(group, 0)..heads.value(group)];
                    for head in rotated.chunks_exact_mut(heads.head_dim) {
                        let (first, second) = head.split_at_mut(heads.head_dim / 2);
                        for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(cosines).zip(sines) {
                            let sin = if inverse { -sin } else { *sin };
                            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                        }
                    }
                }
            }
        },
    )
}

pub(super) fn pack_kv(qkv: Matrix<'_, f32>, mut kv: MatrixMut<'_, f32>, heads: Heads) {
    for (row, qkv) in qkv.iter().enumerate() {
        for (group, kv) in kv.row(row).chunks_exact_mut(2 * heads.head_dim).enumerate() {
            kv.copy_from_slice(&qkv[heads.key(group)..][..2 * heads.head_dim]);
        }
    }
}

pub(super) fn unpack_kv(d_kv: Matrix<'_, f32>, mut d_qkv: MatrixMut<'_, f32>, heads: Heads) {
    for (row, d_kv) in d_kv.iter().enumerate() {
        let d_qkv = d_qkv.row(row);
        for (group, d_kv) in d_kv.chunks_exact(2 * heads.head_dim).enumerate() {
            d_qkv[heads.key(group)..][..2 * heads.head_dim].copy_from_slice(d_kv);
        }
    }
}

/// One call of attention: its inputs, and what lies in their views.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) inputs: AttentionInputs,
    pub(super) qkv: Matrix<'a, f32>,
    pub(super) kv: Matrix<'a, f32>,
    pub(super) positions: Matrix<'a, i32>,
    pub(super) first_keys: Option<Matrix<'a, i32>>,
    pub(super) samples: Matrix<'a, i64>,
}

/// The results of attention.
#[derive(Clone, Copy)]
pub(super) struct Forward<'a> {
    pub(super) out: Matrix<'a, f32>,
    pub(super) lse: Matrix<'a, f32>,
}

/// The queries of one tile and one head, and the keys they see.
#[derive(Clone)]
struct Block {
    queries: Range<usize>,
    /// Position of the first query.
    position: usize,
    /// Rows of `kv`.
    keys: Range<usize>,
    /// Columns of the queries in `qkv`, of keys and of values in `kv`.
    query_cols: Range<usize>,
    key_cols: Range<usize>,
    value_cols: Range<usize>,
    /// Columns of the head in `out`.
    out_cols: Range<usize>,
    /// Local number of the head.
    head: usize,
}

impl Block {
    /// Each row of scores with its query's row and the positions of the keys that it sees.
    fn rows<'s>(
        &self,
        first_keys: Option<Matrix<'s, i32>>,
        scores: &'s mut [f32],
    ) -> impl Iterator<Item = (usize, Range<usize>, &'s mut [f32])> + use<'s> {
        let (first, position) = (self.queries.start, self.position);
        let rows = scores.chunks_exact_mut(self.keys.len()).enumerate();
        rows.map(move |(row, scores)| {
            let (at, own) = (first + row, position + row);
            let first_key = first_keys.map_or(0, |first_keys| *first_keys.at(at) as usize);
            assert!(first_key <= own, "a query at position {own} that sees keys from {first_key} on");
            (at, first_key..own + 1, scores)
        })
    }
}

impl<'a> Call<'a> {
    pub(super) fn forward(
        &self,
        mut out: MatrixMut<'_, f32>,
        mut lse: MatrixMut<'_, f32>,
        space: &mut Vec<f32>,
    ) {
        let scale = self.scale();
        self.for_each_block(|block| {
            let scores = scratch(space, block.queries.len() * block.keys.len());
            self.scores(&block, scores);
            for (row, seen, scores) in block.rows(self.first_keys, scores) {
                lse.row(row)[block.head] = softmax(&mut scores[seen.clone()], scale);
                hide_others(scores, &seen);
                self.drop(&block, row, &mut scores[..seen.end]);
            }
            let weights = Factor::new(Matrix::contiguous(scores, block.keys.len()));
            let values = self.kv.block(block.keys, block.value_cols);
            gemm(weights, Factor::new(values), out.block(block.queries, block.out_cols), false);
        });
    }

    pub(super) fn backward<A: Adder>(
        &self,
        Forward { out, lse }: Forward<'_>,
        d_out: Matrix<'_, f32>,
        mut d_qkv: MatrixMut<'_, f32>,
        mut d_kv: MatrixMut<'_, A::Acc>,
        adder: &mut A,
        [space, product]: [&mut Vec<f32>; 2],
    ) {
        let scale = self.scale();
        self.for_each_block(|block| {
            let num_keys = block.keys.len();
            let num_scores = block.queries.len() * num_keys;
            let (weights, d_scores) = scratch(space, 2 * num_scores).split_at_mut(num_scores);
            let d_out_head = d_out.block(block.queries.clone(), block.out_cols.clone());
            let keys = self.kv.block(block.keys.clone(), block.key_cols.clone());
            let values = self.kv.block(block.keys.clone(), block.value_cols.clone());
            let queries = self.qkv.block(block.queries.clone(), block.query_cols.clone());

            self.scores(&block, weights);
            let d_weights = MatrixMut::contiguous(d_scores, num_keys);
            gemm(Factor::new(d_out_head), Factor::transposed(values), d_weights, false);
            for ((row, seen, weights), d_scores) in
                block.rows(self.first_keys, weights).zip(d_scores.chunks_exact_mut(num_keys))
            {
                let lse = lse.row(row)[block.head];
                let cols = block.out_cols.clone();
                let delta = dot(&d_out.row(row)[cols.clone()], &out.row(row)[cols]);
                self.drop(&block, row, &mut d_scores[..seen.end]);
                softmax_backward(&mut weights[seen.clone()], &mut d_scores[seen.clone()], scale, lse, delta);
                hide_others(weights, &seen);
                hide_others(d_scores, &seen);
                self.drop(&block, row, &mut weights[..seen.end]);
            }
            let weights = Matrix::contiguous(weights, num_keys);
            let d_scores = Matrix::contiguous(d_scores, num_keys);
            let d_queries = d_qkv.block(block.queries.clone(), block.query_cols.clone());
            gemm(Factor::new(d_scores), Factor::new(keys), d_queries, false);
            let mut add = |weights, factor, cols: Range<usize>| {
                let d_kv = d_kv.block(block.keys.clone(), cols);
                adder.add_product(d_kv, Factor::transposed(weights), Factor::new(factor), product);
            };
            add(d_scores, queries, block.key_cols.clone());
            add(weights, d_out_head, block.value_cols.clone());
        });
    }

    fn scale(&self) -> f32 {
        1.0 / (self.inputs.heads.head_dim as f32).sqrt()
    }

    /// Queries times keys, unscaled.
    fn scores(&self, block: &Block, scores: &mut [f32]) {
        let queries = self.qkv.block(block.queries.clone(), block.query_cols.clone());
        let keys = self.kv.block(block.keys.clone(), block.key_cols.clone());
        let scores = MatrixMut::contiguous(scores, keys.rows);
        gemm(Factor::new(queries), Factor::transposed(keys), scores, false);
    }

    /// Applies dropout, if any, to the weights (or their gradients) of the query at `row`, from the key at position 0 on.
    fn drop(&self, block: &Block, row: usize, weights: &mut [f32]) {
        if let Some(Dropout { p, seed, layer }) = self.inputs.dropout {
            let head = self.inputs.first_head + block.head as u32;
            let (sample, position) = (*self.samples.at(row), *self.positions.at(row));
            DropoutRow::attention(seed, layer, head, sample, position).apply(p, weights);
        }
    }

    fn for_each_block(&self, mut run: impl FnMut(Block)) {
        let AttentionInputs { heads, batch, tile, .. } = self.inputs;
        let positions = self.positions;
        let (local, keys) = (self.qkv.rows / batch, self.kv.rows / batch);
        let width = heads.head_dim;
        for first in (0..self.qkv.rows).step_by(tile) {
            let position = usize::try_from(*positions.at(first)).expect("positions count from 0");
            let consecutive = (0..tile).all(|row| *positions.at(first + row) as usize == position + row);
            assert!(consecutive, "positions of a tile follow one another, from row {first} on they do not");
            assert!(position + tile <= keys, "a query at position {} of {keys}", position + tile - 1);
            let first_key = first / local * keys;
            for group in 0..heads.groups {
                let (key_col, value_col) = (2 * group * width, (2 * group + 1) * width);
                for query in 0..heads.queries_per_group {
                    let head = group * heads.queries_per_group + query;
                    let query_col = heads.query(group, query);
                    run(Block {
                        queries: first..first + tile,
                        position,
                        keys: first_key..first_key + position + tile,
                        query_cols: query_col..query_col + width,
                        key_cols: key_col..key_col + width,
                        value_cols: value_col..value_col + width,
                        out_cols: head * width..(head + 1) * width,
                        head,
                    });
                }
            }
        }
    }
}

/// Makes the weights of keys that are not seen +0.
fn hide_others(weights: &mut [f32], seen: &Range<usize>) {
    weights[..seen.start].fill(0.0);
    weights[seen.end..].fill(0.0);
}

/// Turns scores into weights that add up to 1, and gives the log-sum-exp of the scaled scores.
fn softmax(scores: &mut [f32], scale: f32) -> f32 {
    widest(
        #[inline(always)]
        || {
            let max = max(scores) * scale;
            for score in scores.iter_mut() {
                *score = exp(*score * scale - max);
            }
            let total = sum(scores);
            for score in scores.iter_mut() {
                *score /= total;
            }
            max + ln(total)
        },
    )
}

/// Turns scores into weights, and gradients of the weights into gradients of the scores.
fn softmax_backward(scores: &mut [f32], d_weights: &mut [f32], scale: f32, lse: f32, delta: f32) {
    widest(
        #[inline(always)]
        || {
            for (score, d_weight) in scores.iter_mut().zip(d_weights) {
                *score = exp(*score * scale - lse);
                *d_weight = *score * (*d_weight - delta) * scale;
            }
        },
    )
}
