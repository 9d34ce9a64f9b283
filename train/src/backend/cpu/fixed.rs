//! Sums that no order can change: values × 2^bits, cut to 64-bit integers and added with wrap-around.

use super::gemm::{truncate, widest};
use super::{Matrix, MatrixMut};
use crate::numerics;

/// Adds to accumulators of one scale and remembers the largest magnitude.
#[derive(Debug)]
pub(super) struct FixedPoint {
    bits: u32,
    scale: f32,
    /// Bits of the largest |value| so far: magnitudes order like their bits, NaN above ∞ above all numbers.
    peak: u32,
}

impl FixedPoint {
    pub(super) fn new(bits: u32) -> Self {
        assert!(bits <= 62, "a fixed point of {bits} bits leaves no range");
        FixedPoint { bits, scale: numerics::power_of_two(bits as i32), peak: 0 }
    }

    /// `acc += values`. A value out of range, or NaN, is clamped; the peak tells.
    #[inline(always)]
    pub(super) fn add(&mut self, acc: &mut [i64], values: &[f32]) {
        for (acc, value) in acc.iter_mut().zip(values) {
            self.add_one(acc, *value);
        }
    }

    /// `acc += values`, as many contiguous values in a row.
    pub(super) fn add_rows(&mut self, mut acc: MatrixMut<'_, i64>, values: &[f32]) {
        widest(
            #[inline(always)]
            || {
                for (row, values) in values.chunks_exact(acc.cols).enumerate() {
                    self.add(acc.row(row), values);
                }
            },
        );
    }

    /// `acc += value`.
    #[inline(always)]
    pub(super) fn add_one(&mut self, acc: &mut i64, value: f32) {
        self.peak = self.peak.max(value.abs().to_bits());
        // The product is exact: the scale is a power of two.
        *acc = acc.wrapping_add(truncate(value * self.scale));
    }

    /// The largest |value| ÷ 2^(62 − bits), ∞ if there was NaN.
    pub(super) fn peak(&self) -> f32 {
        let peak = f32::from_bits(self.peak) * numerics::power_of_two(self.bits as i32 - 62);
        if peak.is_nan() { f32::INFINITY } else { peak }
    }
}

/// `out = acc · 2^-bits`, rounded once.
pub(super) fn take(acc: Matrix<'_, i64>, bits: u32, mut out: MatrixMut<'_, f32>) {
    let unit = numerics::power_of_two(-(bits as i32));
    widest(
        #[inline(always)]
        || {
            for (row, acc) in acc.iter().enumerate() {
                for (out, acc) in out.row(row).iter_mut().zip(acc) {
                    *out = *acc as f32 * unit;
                }
            }
        },
    );
}
