//! The exact global norm, and AdamW.

use super::{Matrix, MatrixMut};

/// Elements of this magnitude and above are left out of the square norm, and the peak is above 1.
const MAX_SQUARED: f32 = (1u64 << 40) as f32;

/// `limbs += Σ x²`; gives the largest |x| in units of 2⁴⁰.
///
/// The square of an f32 is exact in f64. In units of 2⁻¹⁰⁰, cut to an integer, it has at most 180 bits.
pub(super) fn square_norm(x: Matrix<'_, f32>, mut limbs: MatrixMut<'_, i64>) -> f32 {
    let limbs = limbs.row(0);
    let mut peak = 0;
    for row in x.iter() {
        // Each element adds less than 2³² to a limb.
        for run in row.chunks(1 << 30) {
            for x in run {
                peak = peak.max(x.abs().to_bits());
                if x.abs() < MAX_SQUARED {
                    add_square(*x, limbs);
                }
            }
            carry(limbs);
        }
    }
    f32::from_bits(peak) / MAX_SQUARED
}

#[inline(always)]
fn add_square(x: f32, limbs: &mut [i64]) {
    let square = f64::from(x) * f64::from(x);
    let bits = square.to_bits();
    let mantissa = u128::from(bits & ((1 << 52) - 1) | 1 << 52);
    // square = mantissa · 2^(exponent − 1075), in units of 2⁻¹⁰⁰.
    let shift = (bits >> 52) as i32 - 1075 + 100;
    if shift <= -53 {
        return;
    }
    let (limb, pieces) = match u32::try_from(shift) {
        Ok(shift) => (shift as usize / 32, mantissa << (shift % 32)),
        Err(_) => (0, mantissa >> shift.unsigned_abs()),
    };
    for (limb, piece) in limbs[limb..].iter_mut().zip([pieces, pieces >> 32, pieces >> 64]) {
        *limb += i64::from(piece as u32);
    }
}

/// Brings each limb but the last below 2³².
fn carry(limbs: &mut [i64]) {
    for limb in 1..limbs.len() {
        limbs[limb] += limbs[limb - 1] >> 32;
        limbs[limb - 1] &= 0xFFFF_FFFF;
    }
}

/// The numbers of one AdamW step.
pub(super) struct AdamW {
    pub(super) grad_scale: f32,
    pub(super) lr: f32,
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) eps: f32,
    pub(super) weight_decay: f32,
    pub(super) correction1: f32,
    pub(super) correction2: f32,
}

impl AdamW {
    /// Updates contiguous weights and moments.
    pub(super) fn apply(
        &self,
        mut w: MatrixMut<'_, f32>,
        mut m: MatrixMut<'_, f32>,
        mut v: MatrixMut<'_, f32>,
        g: Matrix<'_, f32>,
    ) {
        let AdamW { grad_scale, lr, beta1, beta2, eps, weight_decay, correction1, correction2 } = *self;
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
    }
}
