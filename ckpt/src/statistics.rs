//! What the values of a floating-point tensor look like: computed while it is written, kept for people to read.

use half::{bf16, f16};
use mesh::DType;
use serde::{Deserialize, Serialize};

/// Of one tensor. Depends on the order of summation, so it is for people, never for comparison.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Statistics {
    /// Over the finite elements; none if there is no such element.
    pub finite: Option<Spread>,
    /// Number of elements that are NaN or infinite.
    pub nonfinite: u64,
}

/// Smallest, largest and mean value.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct Spread {
    pub min: f64,
    pub max: f64,
    pub mean: f64,
}

/// Partial sums of some elements; parts are joined in a fixed order, so equal plans give equal bits.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Moments {
    min: f64,
    max: f64,
    sum: f64,
    finite: u64,
    nonfinite: u64,
}

impl Moments {
    /// Of these elements; none if the type has no statistics.
    pub(crate) fn of(dtype: DType, bytes: &[u8]) -> Option<Moments> {
        Some(match dtype {
            DType::F32 => of_values(bytes.as_chunks().0, |bits| f64::from(f32::from_le_bytes(bits))),
            DType::F64 => of_values(bytes.as_chunks().0, f64::from_le_bytes),
            DType::Bf16 => of_values(bytes.as_chunks().0, |bits| bf16::from_le_bytes(bits).to_f64()),
            DType::F16 => of_values(bytes.as_chunks().0, |bits| f16::from_le_bytes(bits).to_f64()),
            _ => return None,
        })
    }

    /// Of both.
    pub(crate) fn join(self, other: Moments) -> Moments {
        Moments {
            min: self.min.min(other.min),
            max: self.max.max(other.max),
            sum: self.sum + other.sum,
            finite: self.finite + other.finite,
            nonfinite: self.nonfinite + other.nonfinite,
        }
    }

    /// The finished statistics.
    pub(crate) fn statistics(self) -> Statistics {
        let spread = Spread { min: self.min, max: self.max, mean: self.sum / self.finite as f64 };
        Statistics { finite: (self.finite > 0).then_some(spread), nonfinite: self.nonfinite }
    }
}

/// In eight lanes without a branch, so that the compiler can use vectors.
fn of_values<const WIDTH: usize>(elements: &[[u8; WIDTH]], value: impl Fn([u8; WIDTH]) -> f64) -> Moments {
    const LANES: usize = 8;
    let (mut min, mut max, mut sum) = ([f64::INFINITY; LANES], [f64::NEG_INFINITY; LANES], [0.0; LANES]);
    let mut finite = [0u64; LANES];
    let mut add = |lane: usize, value: f64| {
        let is_finite = value.abs() <= f64::MAX;
        let or = |other: f64| if is_finite { value } else { other };
        min[lane] = if or(f64::INFINITY) < min[lane] { value } else { min[lane] };
        max[lane] = if or(f64::NEG_INFINITY) > max[lane] { value } else { max[lane] };
        sum[lane] += or(0.0);
        finite[lane] += u64::from(is_finite);
    };
    let (groups, rest) = elements.as_chunks::<LANES>();
    for group in groups {
        group.iter().enumerate().for_each(|(lane, element)| add(lane, value(*element)));
    }
    rest.iter().enumerate().for_each(|(lane, element)| add(lane, value(*element)));
    let finite: u64 = finite.iter().sum();
    Moments {
        min: min.into_iter().fold(f64::INFINITY, f64::min),
        max: max.into_iter().fold(f64::NEG_INFINITY, f64::max),
        sum: sum.iter().sum(),
        finite,
        nonfinite: elements.len() as u64 - finite,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn not_a_number_is_counted_and_left_out() {
        let bytes: Vec<u8> =
            [1.0f32, f32::NAN, -3.0, f32::INFINITY].iter().flat_map(|v| v.to_le_bytes()).collect();
        let spread = Spread { min: -3.0, max: 1.0, mean: -1.0 };
        let parts = bytes.chunks(8).map(|part| Moments::of(DType::F32, part).unwrap());
        let joined = parts.reduce(Moments::join).unwrap().statistics();
        assert_eq!(joined, Statistics { finite: Some(spread), nonfinite: 2 });
        let none = Moments::of(DType::Bf16, &0x7FC0u16.to_le_bytes()).unwrap();
        let sent: Moments = postcard::from_bytes(&postcard::to_allocvec(&none).unwrap()).unwrap();
        assert_eq!(sent.statistics(), Statistics { finite: None, nonfinite: 1 });
        assert!(Moments::of(DType::U8, &bytes).is_none());
    }
}
