//! Loops compiled for the widest vectors that the machine has. Wider vectors change no bit: without contraction of
//! a · b + c, which Rust does not do, each element sees the same operations in the same order.

/// Runs `kernel`, compiled once for each vector width. For this to have an effect the closure, and the functions it
/// calls, are `#[inline(always)]`.
#[inline]
pub(in super::super) fn widest<R>(kernel: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
        {
            // SAFETY: the machine has the features.
            return unsafe { with_avx512(kernel) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has the feature.
            return unsafe { with_avx2(kernel) };
        }
    }
    kernel()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
fn with_avx512<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(kernel: impl FnOnce() -> R) -> R {
    kernel()
}

/// `x` without its fraction, clamped to ±2⁶². NaN gives 2⁶².
///
/// The plain conversion, other than `as`, is one vector instruction.
#[inline(always)]
pub(in super::super) fn truncate(x: f32) -> i64 {
    const LIMIT: f32 = (1u64 << 62) as f32;
    let x = if x < LIMIT { x } else { LIMIT };
    let x = if x > -LIMIT { x } else { -LIMIT };
    // SAFETY: `x` is a number, NaN compared as false above, and within the range of i64.
    unsafe { x.to_int_unchecked() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::{dot, exp, sum};
    use proptest::prelude::*;

    #[inline(always)]
    fn kernel(x: &[f32]) -> (Vec<u32>, [u32; 2], Vec<i64>) {
        let exps: Vec<f32> = x.iter().map(|x| exp(*x)).collect();
        let sums = [sum(&exps), dot(&exps, x)].map(f32::to_bits);
        (exps.iter().map(|x| x.to_bits()).collect(), sums, exps.iter().map(|x| truncate(*x)).collect())
    }

    proptest! {
        #[test]
        fn wide_loops_give_the_bits_of_plain_ones(x in prop::collection::vec(-90f32..90.0, 0..100)) {
            let wide = widest(#[inline(always)] || kernel(&x));
            prop_assert_eq!(wide, kernel(&x));
        }
    }

    #[test]
    fn truncation_drops_the_fraction_and_clamps() {
        assert_eq!([0.0, -0.9, 1.9, -1.9, 3e9].map(truncate), [0, 0, 1, -1, 3_000_000_000]);
        let limit = 1i64 << 62;
        assert_eq!([1e30, f32::INFINITY, f32::NAN].map(truncate), [limit; 3]);
        assert_eq!([-1e30, f32::NEG_INFINITY].map(truncate), [-limit; 2]);
    }
}
