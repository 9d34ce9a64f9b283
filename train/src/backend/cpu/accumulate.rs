//! The two ways of adding to accumulators: in fixed point (values × 2^bits, cut to 64-bit integers and added with
//! wrap-around), whose sums no order can change, and plainly in f32.

use super::gemm::{Factor, gemm, truncate, widest};
use super::{Matrix, MatrixMut, scratch};
use crate::numerics;

/// Adds f32 values to accumulators.
pub(super) trait Adder {
    /// An accumulator.
    type Acc;

    /// `acc += values`.
    fn add(&mut self, acc: &mut [Self::Acc], values: &[f32]);

    /// `acc += a · b`.
    fn add_product(
        &mut self,
        acc: MatrixMut<'_, Self::Acc>,
        a: Factor<'_>,
        b: Factor<'_>,
        space: &mut Vec<f32>,
    );
}

/// Adds in f32.
#[derive(Debug)]
pub(super) struct Float;

impl Adder for Float {
    type Acc = f32;

    #[inline(always)]
    fn add(&mut self, acc: &mut [f32], values: &[f32]) {
        acc.iter_mut().zip(values).for_each(|(acc, value)| *acc += value);
    }

    fn add_product(&mut self, acc: MatrixMut<'_, f32>, a: Factor<'_>, b: Factor<'_>, _: &mut Vec<f32>) {
        gemm(a, b, acc, true);
    }
}

/// Adds in fixed point of one scale and remembers the largest magnitude.
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

    /// `acc += value`. A value out of range, or NaN, is clamped; the peak tells.
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

impl Adder for FixedPoint {
    type Acc = i64;

    #[inline(always)]
    fn add(&mut self, acc: &mut [i64], values: &[f32]) {
        for (acc, value) in acc.iter_mut().zip(values) {
            self.add_one(acc, *value);
        }
    }

    fn add_product(
        &mut self,
        mut acc: MatrixMut<'_, i64>,
        a: Factor<'_>,
        b: Factor<'_>,
        space: &mut Vec<f32>,
    ) {
        let product = scratch(space, acc.rows * acc.cols);
        gemm(a, b, MatrixMut::contiguous(product, acc.cols), false);
        widest(
            #[inline(always)]
            || {
                let cols = acc.cols;
                for row in 0..acc.rows {
                    self.add(acc.row(row), &product[row * cols..][..cols]);
                }
            },
        );
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
