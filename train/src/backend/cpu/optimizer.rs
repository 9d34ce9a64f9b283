//! The exact global norm, and AdamW.

use super::gemm::widest;
use super::{Matrix, MatrixMut};
use crate::backend::AdamWStep;

/// Magnitudes up to here can be squared and 2³⁶ of the squares added; larger ones are left out.
const MAX_SQUARED: f32 = (1u64 << 27) as f32;

/// `limbs += Σ x²`; false if elements were left out.
///
/// x = mantissa · 2^(exponent − 150), so x² in units of 2⁻¹⁰⁰ is mantissa² · 2^(2·exponent − 200). What lies below the unit
/// is cut off element by element; then squares of one exponent are added as they are.
pub(super) fn square_norm(x: Matrix<'_, f32>, mut limbs: MatrixMut<'_, i64>) -> bool {
    let limbs = limbs.row(0);
    let mut peak = 0;
    for row in x.iter() {
        // 2¹⁶ squares of 24 bits fit 64.
        for run in row.chunks(1 << 16) {
            // Neighbours tend to have one exponent: four tables in turn, so that no sum waits for the one before.
            let mut squares = [[0u64; 256]; 4];
            for group in run.chunks(4) {
                for (x, squares) in group.iter().zip(&mut squares) {
                    let bits = x.abs().to_bits();
                    peak = peak.max(bits);
                    let exponent = bits >> 23;
                    let mantissa = u64::from(bits & 0x7F_FFFF | 0x80_0000);
                    squares[exponent as usize & 0xFF] +=
                        (mantissa * mantissa) >> 200u32.saturating_sub(2 * exponent).min(63);
                }
            }
            let max_exponent = (MAX_SQUARED.to_bits() >> 23) as usize;
            for exponent in 0..max_exponent {
                let sum: u64 = squares.iter().map(|squares| squares[exponent]).sum();
                let shift = (2 * exponent).saturating_sub(200);
                let pieces = u128::from(sum) << (shift % 32);
                for (limb, piece) in limbs[shift / 32..].iter_mut().zip([pieces, pieces >> 32, pieces >> 64])
                {
                    *limb += i64::from(piece as u32);
                }
            }
            carry(limbs);
        }
    }
    peak < MAX_SQUARED.to_bits()
}

/// Brings each limb but the last below 2³².
fn carry(limbs: &mut [i64]) {
    for limb in 1..limbs.len() {
        limbs[limb] += limbs[limb - 1] >> 32;
        limbs[limb - 1] &= 0xFFFF_FFFF;
    }
}

/// Updates contiguous weights and moments.
pub(super) fn adamw(
    step: AdamWStep,
    mut w: MatrixMut<'_, f32>,
    mut m: MatrixMut<'_, f32>,
    mut v: MatrixMut<'_, f32>,
    g: Matrix<'_, f32>,
) {
    widest(
        #[inline(always)]
        || {
            let AdamWStep { grad_scale, lr, beta1, beta2, eps, weight_decay, correction1, correction2 } =
                step;
            let keep = 1.0 - lr * weight_decay;
            let weights = w.elements().iter_mut().zip(g.elements());
            let moments = m.elements().iter_mut().zip(v.elements());
            for ((w, g), (m, v)) in weights.zip(moments) {
                let g = g * grad_scale;
                *m = beta1 * *m + (1.0 - beta1) * g;
                *v = beta2 * *v + (1.0 - beta2) * (g * g);
                let denominator = (*v / correction2).sqrt() + eps;
                *w = *w * keep - lr * (*m / correction1 / denominator);
            }
        },
    )
}
