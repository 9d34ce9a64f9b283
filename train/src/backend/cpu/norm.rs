//! RMSNorm.

use super::fixed::FixedPoint;
use super::gemm::widest;
use super::{Matrix, MatrixMut, scratch};
use crate::numerics::dot;

/// `rstd = 1 / sqrt(mean(x²) + eps)`, `out = x · rstd · gamma`.
pub(super) fn norm(
    x: Matrix<'_, f32>,
    gamma: Matrix<'_, f32>,
    eps: f32,
    mut rstd: MatrixMut<'_, f32>,
    mut out: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            let gamma = gamma.row(0);
            for (row, x) in x.iter().enumerate() {
                let mean = dot(x, x) / x.len() as f32;
                let scale = 1.0 / (mean + eps).sqrt();
                *rstd.at(row) = scale;
                scale_row(x, scale, gamma, out.row(row));
            }
        },
    )
}

pub(super) fn apply(
    x: Matrix<'_, f32>,
    rstd: Matrix<'_, f32>,
    gamma: Matrix<'_, f32>,
    mut out: MatrixMut<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            for (row, x) in x.iter().enumerate() {
                scale_row(x, *rstd.at(row), gamma.row(0), out.row(row));
            }
        },
    )
}

#[inline(always)]
fn scale_row(x: &[f32], scale: f32, gamma: &[f32], out: &mut [f32]) {
    for ((out, x), gamma) in out.iter_mut().zip(x).zip(gamma) {
        *out = x * scale * gamma;
    }
}

/// With x̂ = x · rstd and g = d_out · gamma: `d_x (+)= rstd · (g − x̂ · mean(g · x̂))`.
pub(super) fn backward_sum(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    rstd: Matrix<'_, f32>,
    gamma: Matrix<'_, f32>,
    mut d_x: MatrixMut<'_, f32>,
    accumulate: bool,
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let g = scratch(space, x.cols);
            for (row, x) in x.iter().enumerate() {
                let rstd = *rstd.at(row);
                for ((g, d_out), gamma) in g.iter_mut().zip(d_out.row(row)).zip(gamma.row(0)) {
                    *g = d_out * gamma;
                }
                // rstd · x̂ · mean(g · x̂) = x · this
                let along_x = rstd * rstd * rstd * (dot(g, x) / x.len() as f32);
                let d_x = d_x.row(row).iter_mut().zip(&*g).zip(x);
                if accumulate {
                    d_x.for_each(|((d_x, g), x)| *d_x += rstd * g - x * along_x);
                } else {
                    d_x.for_each(|((d_x, g), x)| *d_x = rstd * g - x * along_x);
                }
            }
        },
    )
}

/// `d_gamma += Σ d_out · x · rstd`.
pub(super) fn backward_gamma(
    d_out: Matrix<'_, f32>,
    x: Matrix<'_, f32>,
    rstd: Matrix<'_, f32>,
    mut d_gamma: MatrixMut<'_, i64>,
    leaf: usize,
    fixed: &mut FixedPoint,
    space: &mut Vec<f32>,
) {
    widest(
        #[inline(always)]
        || {
            let sums = scratch(space, x.cols);
            for first in (0..x.rows).step_by(leaf) {
                sums.fill(0.0);
                for row in first..first + leaf {
                    let rstd = *rstd.at(row);
                    for ((sum, d_out), x) in sums.iter_mut().zip(d_out.row(row)).zip(x.row(row)) {
                        *sum += d_out * (x * rstd);
                    }
                }
                fixed.add(d_gamma.row(0), sums);
            }
        },
    )
}
