//! The fingerprint of a tensor: a sum over its elements, the same under every layout, order and codec. Each rank adds
//! only what it holds.

use mesh::{DType, Region, Shape, TensorKey};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};
use std::str::FromStr;

/// Two 64-bit sums, modulo 2⁶⁴, over elements of a mixing function of (key, index in the whole tensor, raw bits).
/// Of nothing it is zero; of disjoint boxes it is the sum; of a whole state the sum over its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fingerprint {
    a: u64,
    b: u64,
}

const INDEX_STEP: u64 = 0x9E37_79B9_7F4A_7C15;
const BITS_STEP: u64 = 0xD6E8_FEB8_6659_FD93;
const SECOND_SUM: u64 = 0x9FB2_1C65_1E98_DF25;

impl Fingerprint {
    /// Of the box `region` of the tensor `key`, whose elements are `bytes`: row-major, little-endian.
    ///
    /// # Panics
    /// If `bytes` has another length than the box, or the box does not lie in the tensor.
    pub fn of_region(
        key: &TensorKey,
        dtype: DType,
        global_shape: &Shape,
        region: &Region,
        bytes: &[u8],
    ) -> Fingerprint {
        let element_bytes = dtype.size_bytes();
        assert_eq!(bytes.len() as u64, region.numel() * element_bytes as u64, "`{key}`: bytes of {region}");
        let k = fmix(fnv1a(key.as_str().as_bytes()));
        // A 16-byte element counts as two of 8.
        let (width, per_element) = if element_bytes == 16 { (8, 2) } else { (element_bytes, 1) };
        let mut sum = Fingerprint::default();
        let mut at = 0;
        for run in region.runs(global_shape) {
            let len = (run.end - run.start) as usize * element_bytes;
            let first = k.wrapping_add((run.start * per_element).wrapping_mul(INDEX_STEP));
            let run_bytes = &bytes[at..at + len];
            sum += match width {
                1 => of_run(first, run_bytes.as_chunks().0, |[byte]| u64::from(byte)),
                2 => of_run(first, run_bytes.as_chunks().0, |bits| u64::from(u16::from_le_bytes(bits))),
                4 => of_run(first, run_bytes.as_chunks().0, |bits| u64::from(u32::from_le_bytes(bits))),
                _ => of_run(first, run_bytes.as_chunks().0, u64::from_le_bytes),
            };
            at += len;
        }
        sum
    }

    /// The 16 bytes that read as the hexadecimal text.
    pub fn to_bytes(self) -> [u8; 16] {
        ((u128::from(self.a) << 64) | u128::from(self.b)).to_be_bytes()
    }

    /// The inverse of [`Fingerprint::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Fingerprint {
        let both = u128::from_be_bytes(bytes);
        Fingerprint { a: (both >> 64) as u64, b: both as u64 }
    }
}

/// Elements with consecutive indices; `start` is the key's mix plus the first index's step.
fn of_run<const WIDTH: usize>(
    start: u64,
    elements: &[[u8; WIDTH]],
    bits: impl Fn([u8; WIDTH]) -> u64,
) -> Fingerprint {
    let (mut a, mut b, mut index_part) = (0u64, 0u64, start);
    for element in elements {
        let z = fmix(index_part.wrapping_add(bits(*element).wrapping_mul(BITS_STEP)));
        a = a.wrapping_add(z);
        b = b.wrapping_add((z ^ (z >> 32)).wrapping_mul(SECOND_SUM));
        index_part = index_part.wrapping_add(INDEX_STEP);
    }
    Fingerprint { a, b }
}

fn fmix(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// FNV-1a, 64 bits.
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3))
}

impl Add for Fingerprint {
    type Output = Fingerprint;

    fn add(self, other: Fingerprint) -> Fingerprint {
        Fingerprint { a: self.a.wrapping_add(other.a), b: self.b.wrapping_add(other.b) }
    }
}

impl AddAssign for Fingerprint {
    fn add_assign(&mut self, other: Fingerprint) {
        *self = *self + other;
    }
}

impl Sum for Fingerprint {
    fn sum<I: Iterator<Item = Fingerprint>>(parts: I) -> Fingerprint {
        parts.fold(Fingerprint::default(), Add::add)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.a, self.b)
    }
}

/// A text that is no fingerprint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a fingerprint: 32 lower-case hexadecimal digits")]
pub struct NotAFingerprint {
    /// The text.
    pub text: String,
}

impl FromStr for Fingerprint {
    type Err = NotAFingerprint;

    fn from_str(text: &str) -> Result<Fingerprint, NotAFingerprint> {
        let hex = text.len() == 32 && text.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        let both = u128::from_str_radix(text, 16).ok().filter(|_| hex);
        let both = both.ok_or_else(|| NotAFingerprint { text: text.to_owned() })?;
        Ok(Fingerprint::from_bytes(both.to_be_bytes()))
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = NotAFingerprint;

    fn try_from(text: String) -> Result<Fingerprint, NotAFingerprint> {
        text.parse()
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> String {
        fingerprint.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn whole(key: &str, dtype: DType, shape: &[u64], bytes: &[u8]) -> String {
        let shape = Shape::new(shape);
        Fingerprint::of_region(&key.into(), dtype, &shape, &Region::whole(&shape), bytes).to_string()
    }

    #[test]
    fn the_published_vectors_hold() {
        let floats: Vec<u8> = (0..6u8).flat_map(|value| f32::from(value).to_le_bytes()).collect();
        assert_eq!(whole("w", DType::F32, &[6], &floats), "9ec78c47840b5319a2219615578b8b60");
        assert_eq!(whole("w", DType::F32, &[2, 3], &floats), "9ec78c47840b5319a2219615578b8b60");
        let halves: Vec<u8> = [0x3F80u16, 0xBF80].iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let norm = whole("decoder.final_layernorm.weight", DType::Bf16, &[2], &halves);
        assert_eq!(norm, "7907fe9646de846cd4c2748d98f38413");
        assert_eq!(whole("w", DType::F32, &[0, 4], &[]), "0".repeat(32));
        assert_eq!(fnv1a(b"a"), 0xAF63_DC4C_8601_EC8C);
    }

    #[test]
    fn a_wide_complex_number_counts_as_two_elements() {
        let bytes: Vec<u8> = (0..64).collect();
        assert_eq!(whole("z", DType::C128, &[4], &bytes), whole("z", DType::U64, &[8], &bytes));
    }

    proptest! {
        /// Cutting a tensor anywhere, in any dim, leaves the sum of its boxes alone.
        #[test]
        fn boxes_add_up(
            rows in 1..9u64, cols in 1..9u64, cut in 0..9u64, by_rows: bool, seed: u8,
            dtype in prop::sample::select(DType::ALL),
        ) {
            let shape = Shape::new(&[rows, cols]);
            let width = dtype.size_bytes();
            let bytes: Vec<u8> = (0..rows * cols * width as u64).map(|at| (at as u8).wrapping_mul(seed)).collect();
            let cut = cut.min(if by_rows { rows } else { cols });
            let (first, second) = if by_rows {
                (Region::new(&[0, 0], &[cut, cols]), Region::new(&[cut, 0], &[rows, cols]))
            } else {
                (Region::new(&[0, 0], &[rows, cut]), Region::new(&[0, cut], &[rows, cols]))
            };
            let of = |region: &Region| {
                let mut own = Vec::new();
                for run in region.runs(&shape) {
                    own.extend_from_slice(&bytes[run.start as usize * width..run.end as usize * width]);
                }
                Fingerprint::of_region(&"t".into(), dtype, &shape, region, &own)
            };
            prop_assert_eq!(of(&first) + of(&second), of(&Region::whole(&shape)));
        }
    }

    #[test]
    fn text_and_bytes_come_back() {
        let print: Fingerprint = "9ec78c47840b5319a2219615578b8b60".parse().unwrap();
        assert_eq!(Fingerprint::from_bytes(print.to_bytes()), print);
        for wrong in ["", "9EC78C47840B5319A2219615578B8B60", "+ec78c47840b5319a2219615578b8b60"] {
            assert!(wrong.parse::<Fingerprint>().is_err(), "{wrong}");
        }
    }
}
