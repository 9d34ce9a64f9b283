//! RMSNorm, and LayerNorm: the same about the mean of a row, with a shift.

use super::accumulate::Adder;
use super::gemm::widest;
use super::{Matrix, MatrixMut, scratch};
use crate::numerics::{dot, sum};

/// `rstd = 1 / sqrt(mean(x²) + eps)`, `out = x · rstd · gamma`; with `center`, of x − mean, and beta is added.
pub(super) fn norm(
    x: Matrix<'_, f32>,
    gamma: Matrix<'_, f32>,
    mut center: Option<(MatrixMut<'_, f32>, Matrix<'_, f32>)>,
    eps: f32,
    mut rstd: MatrixMut<'_, f32>,
    mut out: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            let beta = center.as_ref().map(|(_, beta)| beta.row(0));
            for (row, x) in x.iter().enumerate() {
                let out = out.row(row);
                let (subtracted, squares) = match &mut center {
                    None => (0.0, dot(x, x)),
                    Some((mean, _)) => {
                        let subtracted = sum(x) / x.len() as f32;
                        *mean.at(row) = subtracted;
                        out.iter_mut().zip(x).for_each(|(out, x)| *out = x - subtracted);
                        (subtracted, dot(out, out))
                    }
                };
                let scale = 1.0 / (squares / x.len() as f32 + eps).sqrt();
                *rstd.at(row) = scale;
                scale_row(x, subtracted, scale, gamma.row(0), beta, out);
            }
        },
    )
}

pub(super) fn apply(
    x: Matrix<'_, f32>,
    rstd: Matrix<'_, f32>,
    gamma: Matrix<'_, f32>,
    center: Option<(Matrix<'_, f32>, Matrix<'_, f32>)>,
    mut out: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            let beta = center.map(|(_, beta)| beta.row(0));
            for (row, x) in x.iter().enumerate() {
                let mean = center.map_or(0.0, |(mean, _)| *mean.at(row));
                scale_row(x, mean, *rstd.at(row), gamma.row(0), beta, out.row(row));
            }
        },
    )
}

#[inline(always)]
fn scale_row(x: &[f32], mean: f32, scale: f32, gamma: &[f32], beta: Option<&[f32]>, out: &mut [f32]) {
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = (x - mean) * scale * gamma;
    }
    for (out, beta) in out.iter_mut().zip(beta.unwrap_or_default()) {
        *out += beta;
    }
}

/// What a norm was of, and its statistics.
#[derive(Clone, Copy)]
pub(super) struct Normed<'a> {
    pub(super) x: Matrix<'a, f32>,
    pub(super) mean: Option<Matrix<'a, f32>>,
    pub(super) rstd: Matrix<'a, f32>,
}

impl Normed<'_> {
    #[inline(always)]
    fn mean(&self, row: usize) -> f32 {
        self.mean.map_or(0.0, |mean| *mean.at(row))
    }
}

/// With x̂ = (x − mean) · rstd and g = d_out · gamma: `d_x (+)= rstd · (g − mean(g) − x̂ · mean(g · x̂))`, where RMSNorm has no
/// mean(g).
pub(super) fn backward_sum(
    d_out: Matrix<'_, f32>,
    normed: Normed<'_>,
    gamma: Matrix<'_, f32>,
    mut d_x: MatrixMut<'_, f32>,
    accumulate: bool,
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let cols = normed.x.cols;
            let (g, room) = scratch(space, 2 * cols).split_at_mut(cols);
            for (row, x) in normed.x.iter().enumerate() {
                let (mean, rstd) = (normed.mean(row), *normed.rstd.at(row));
                for ((g, d_out), gamma) in g.iter_mut().zip(d_out.row(row)).zip(gamma.row(0)) {
                    *g = d_out * gamma;
                }
                let centered: &[f32] = match normed.mean {
                    None => x,
                    Some(_) => {
                        room.iter_mut().zip(x).for_each(|(centered, x)| *centered = x - mean);
                        &*room
                    }
                };
                let mean_g = if normed.mean.is_some() { sum(g) / cols as f32 } else { 0.0 };
                // rstd · x̂ · mean(g · x̂) = (x − mean) · this
                let along_x = rstd * rstd * rstd * (dot(g, centered) / cols as f32);
                let d_x = d_x.row(row).iter_mut().zip(&*g).zip(centered);
                if accumulate {
                    d_x.for_each(|((d_x, g), x)| *d_x += rstd * (g - mean_g) - x * along_x);
                } else {
                    d_x.for_each(|((d_x, g), x)| *d_x = rstd * (g - mean_g) - x * along_x);
                }
            }
        },
    )
}

/// `d_gamma += Σ d_out · (x − mean) · rstd`.
pub(super) fn backward_gamma<A: Adder>(
    d_out: Matrix<'_, f32>,
    normed: Normed<'_>,
    mut d_gamma: MatrixMut<'_, A::Acc>,
    leaf: usize,
    adder: &mut A,
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let x = normed.x;
            let sums = scratch(space, x.cols);
            for first in (0..x.rows).step_by(leaf) {
                sums.fill(0.0);
                for row in first..first + leaf {
                    let (mean, rstd) = (normed.mean(row), *normed.rstd.at(row));
                    for ((sum, d_out), x) in sums.iter_mut().zip(d_out.row(row)).zip(x.row(row)) {
                        *sum += d_out * ((x - mean) * rstd);
                    }
                }
                adder.add(d_gamma.row(0), sums);
            }
        },
    )
}
