//! Functions and sums whose bits are ours: no system `libm`, no order that depends on how work is cut.
//!
//! The compiler neither contracts `a · b + c` nor reorders, so what is written here is what every machine computes.

/// Lanes of [`sum`] and [`dot`]: wide enough for the widest vector unit, the same on all.
const LANES: usize = 16;

/// eˣ to 1 ulp in the normal range; subnormal results are within one unit of 2⁻¹⁴⁹. NaN stays NaN.
///
/// No branch, so loops over it vectorize. The polynomial is that of Cephes' `expf` on |r| ≤ ln 2 / 2.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding it leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first short enough that its product with |n| < 2⁹ is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these the result is 0 or ∞ whatever the argument. Comparisons keep NaN.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let y = p * (r * r) + r + 1.0;
    // 2ⁿ in two factors, each a normal number, so that subnormal results and those next to the largest come out right.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    y * power(half) * power(n.wrapping_sub(half))
}

/// The standard normal distribution and density at x.
#[derive(Clone, Copy, Debug)]
pub struct Normal {
    /// The integral of the density up to x: (1 + erf(x / √2)) / 2.
    pub distribution: f32,
    /// e^(−x²/2) / √(2π).
    pub density: f32,
}

/// The standard normal distribution at `x`, to 2e-7 absolutely, and its density, to 6e-8. NaN stays NaN.
///
/// No branch, as in [`exp`]. The tail beyond |x| is e^(−x²/2) · t · P(t) with t = 1 / (1 + 0.3 |x|); P is a minimax polynomial
/// of the tail's ratio to the rest, to 4e-9 relative on |x| ≤ 14, where the tail is no longer a number.
#[inline(always)]
pub fn normal(x: f32) -> Normal {
    const RECIPROCAL_ROOT_2_PI: f32 = 0.398_942_3;
    let magnitude = x.abs();
    let t = 1.0 / (1.0 + 0.3 * magnitude);
    let mut p = -0.020_612_948;
    p = p * t + 0.112_376_43;
    p = p * t - 0.228_069_05;
    p = p * t + 0.191_583_75;
    p = p * t - 0.079_249_06;
    p = p * t + 0.096_058_756;
    p = p * t + 0.078_425_26;
    p = p * t + 0.110_227_39;
    p = p * t + 0.119_572_83;
    p = p * t + 0.119_686_63;
    let e = exp(-0.5 * x * x);
    let tail = e * (t * p);
    Normal { distribution: if x > 0.0 { 1.0 - tail } else { tail }, density: e * RECIPROCAL_ROOT_2_PI }
}

/// The natural logarithm, evaluated in f64 and rounded once: within 1 ulp. 0 gives −∞, negative numbers NaN.
pub fn ln(x: f32) -> f32 {
    if x.is_nan() || x < 0.0 {
        return f32::NAN;
    }
    if x == 0.0 || x == f32::INFINITY {
        return if x == 0.0 { f32::NEG_INFINITY } else { x };
    }
    // Every f32, subnormal ones too, is a normal f64: x = m · 2ᵏ with m in [√½, √2).
    let bits = f64::from(x).to_bits();
    let mut k = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        k += 1;
    }
    // ln m = 2 artanh s with |s| < 0.172, so the first term left out is below 2⁻⁴⁰ of the result.
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut series = 0.0;
    for odd in [15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * s2 + 1.0 / odd;
    }
    (k as f64 * std::f64::consts::LN_2 + 2.0 * s * series) as f32
}

/// The nearest number that BF16 holds, of two the one with an even last bit. NaN stays NaN.
///
/// No branch, so loops over it vectorize.
#[inline(always)]
pub fn round_to_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
    f32::from_bits(if x.is_nan() { bits & 0xFFFF_0000 | 0x40_0000 } else { rounded })
}

/// Σ x in an order that depends on the length alone.
#[inline(always)]
pub fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane += x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += x;
    }
    fold(lanes)
}

/// Σ a · b in the order of [`sum`].
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "vectors of a dot product");
    let mut lanes = [0.0; LANES];
    let ((a_blocks, a_tail), (b_blocks, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_tail.iter().zip(b_tail)) {
        *lane += a * b;
    }
    fold(lanes)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The largest element; −∞ if there is none, NaNs are passed over.
#[inline(always)]
pub fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (blocks, tail) = x.as_chunks::<LANES>();
    for block in blocks {
        for (lane, x) in lanes.iter_mut().zip(block) {
            *lane = if *x > *lane { *x } else { *lane };
        }
    }
    tail.iter().chain(&lanes).copied().fold(f32::NEG_INFINITY, f32::max)
}

/// Σ of `terms`, neighbours first, then the sums of neighbours: aligned blocks of a power of two, added the same way
/// elsewhere, give the same bits. Destroys `terms`; 0 if there is none.
pub fn sum_pairwise(terms: &mut [f32]) -> f32 {
    let mut len = terms.len();
    while len > 1 {
        for pair in 0..len / 2 {
            terms[pair] = terms[2 * pair] + terms[2 * pair + 1];
        }
        if len % 2 == 1 {
            terms[len / 2] = terms[len - 1];
        }
        len = len.div_ceil(2);
    }
    terms.first().copied().unwrap_or(0.0)
}

/// 2ⁿ, for exponents of normal numbers.
///
/// # Panics
/// If `n` is not in `-126..=127`.
pub fn power_of_two(n: i32) -> f32 {
    assert!((-126..=127).contains(&n), "2^{n} is no normal number");
    f32::from_bits(((n + 127) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Distance in representable numbers.
    fn ulps(a: f32, b: f32) -> u32 {
        let ordered = |x: f32| {
            let bits = x.to_bits() as i32;
            if bits < 0 { i32::MIN.wrapping_sub(bits) } else { bits }
        };
        ordered(a).abs_diff(ordered(b))
    }

    #[test]
    fn exp_is_within_one_ulp_everywhere() {
        let mut worst = 0;
        let mut x = -110.0f32;
        while x < 92.0 {
            worst = worst.max(ulps(exp(x), libm::exp(f64::from(x)) as f32));
            x += 3.1e-5;
        }
        assert!(worst <= 1, "{worst} ulp");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!([exp(-200.0), exp(f32::NEG_INFINITY)], [0.0, 0.0]);
        assert_eq!([exp(90.0), exp(f32::INFINITY)], [f32::INFINITY; 2]);
        assert!(exp(f32::NAN).is_nan() && exp(-f32::NAN).is_nan());
    }

    #[test]
    fn ln_is_within_one_ulp_everywhere() {
        let mut worst = 0;
        for bits in (1..f32::INFINITY.to_bits()).step_by(997) {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(ln(x), libm::log(f64::from(x)) as f32));
        }
        assert!(worst <= 1, "{worst} ulp");
        assert_eq!([ln(1.0), ln(0.0), ln(f32::INFINITY)], [0.0, f32::NEG_INFINITY, f32::INFINITY]);
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan());
    }

    #[test]
    fn the_normal_distribution_is_the_one_of_erfc() {
        let mut x = -15.0f32;
        while x < 15.0 {
            let wide = f64::from(x);
            let Normal { distribution, density } = normal(x);
            let expected = 0.5 * libm::erfc(-wide * std::f64::consts::FRAC_1_SQRT_2);
            assert!((f64::from(distribution) - expected).abs() <= 2e-7, "{distribution} at {x}: {expected}");
            let expected = libm::exp(-0.5 * wide * wide) / (2.0 * std::f64::consts::PI).sqrt();
            assert!((f64::from(density) - expected).abs() <= 6e-8, "{density} at {x}: {expected}");
            x += 1.3e-4;
        }
        assert_eq!([f32::NEG_INFINITY, f32::INFINITY].map(|x| normal(x).distribution), [0.0, 1.0]);
        assert!(normal(f32::NAN).distribution.is_nan() && normal(f32::NAN).density.is_nan());
    }

    proptest! {
        #[test]
        fn rounding_to_bf16_takes_the_nearest_and_of_two_the_even(bits: u32) {
            let x = f32::from_bits(bits);
            let expected = half::bf16::from_f32(x).to_f32();
            prop_assert_eq!(round_to_bf16(x).to_bits(), expected.to_bits());
            let middle = f32::from_bits(bits & 0xFFFF_0000 | 0x8000);
            prop_assert_eq!(round_to_bf16(middle).to_bits(), half::bf16::from_f32(middle).to_f32().to_bits());
        }

        /// Any power-of-two cut into aligned blocks adds up to the same bits.
        #[test]
        fn pairwise_sums_of_aligned_blocks_are_the_sum_of_all(
            terms in prop::collection::vec(-1e3f32..1e3, 8), log_parts in 0u32..4,
        ) {
            let parts = 1 << log_parts;
            let mut partial: Vec<f32> =
                terms.chunks(8 / parts).map(|block| sum_pairwise(&mut block.to_vec())).collect();
            prop_assert_eq!(
                sum_pairwise(&mut partial).to_bits(), sum_pairwise(&mut terms.clone()).to_bits());
        }
    }
}
