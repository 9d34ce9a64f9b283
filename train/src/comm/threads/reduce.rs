//! Contributions on the host and how they are combined.

use crate::comm::Reduce;
use crate::numerics;
use bytemuck::Pod;
use mesh::DType;
use std::ops::Range;

/// Elements of one member, little-endian, aligned for any element type.
#[derive(Debug)]
pub(in crate::comm) struct Payload {
    words: Vec<u64>,
    size_bytes: usize,
}

impl Payload {
    pub(super) fn zeros(size_bytes: usize) -> Self {
        Payload { words: vec![0; size_bytes.div_ceil(8)], size_bytes }
    }

    pub(in crate::comm) fn of(bytes: &[u8]) -> Self {
        let mut payload = Payload::zeros(bytes.len());
        payload.bytes_mut().copy_from_slice(bytes);
        payload
    }

    pub(in crate::comm) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.size_bytes]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.size_bytes]
    }
}

/// The combination of the bytes `[lo, hi)` of each payload, elements of `dtype`.
pub(super) fn combine(reduce: Reduce, dtype: DType, payloads: &[Payload], bytes: Range<usize>) -> Payload {
    let mut combined = Payload::zeros(bytes.len());
    let out = combined.bytes_mut();
    match reduce {
        Reduce::Tree | Reduce::Sum if dtype == DType::Bf16 => {
            fold(payloads, bytes, bytemuck::cast_slice_mut(out), add_bf16);
        }
        Reduce::Tree | Reduce::Sum => fold(payloads, bytes, bytemuck::cast_slice_mut(out), |a: f32, b| a + b),
        Reduce::Max => fold(payloads, bytes, bytemuck::cast_slice_mut(out), maximum),
        Reduce::Fixed => fold(payloads, bytes, bytemuck::cast_slice_mut(out), i64::wrapping_add),
    }
    combined
}

/// The sum of two numbers of BF16, the upper halves of f32.
fn add_bf16(a: u16, b: u16) -> u16 {
    let widen = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    (numerics::round_to_bf16(widen(a) + widen(b)).to_bits() >> 16) as u16
}

fn maximum(a: f32, b: f32) -> f32 {
    if a.is_nan() || (!b.is_nan() && a.total_cmp(&b).is_gt()) { a } else { b }
}

/// Elements that are folded at a time: the partial results of a level stay in the first cache.
const CHUNK: usize = 512;

fn fold<T: Pod>(
    payloads: &[Payload],
    bytes: Range<usize>,
    out: &mut [T],
    combine: impl Fn(T, T) -> T + Copy,
) {
    let parts: Vec<&[T]> =
        payloads.iter().map(|payload| bytemuck::cast_slice(&payload.bytes()[bytes.clone()])).collect();
    for (at, chunk) in out.chunks_mut(CHUNK).enumerate() {
        fold_aligned(&parts, at * CHUNK, chunk, combine);
    }
}

/// `out` = elements `[lo, lo + len)` of the parts, combined as a tree: the largest power of two of them that is not all,
/// then the rest. That is pairs of neighbours, pairs of pairs and so on, with a last odd one carried up.
fn fold_aligned<T: Pod>(parts: &[&[T]], lo: usize, out: &mut [T], combine: impl Fn(T, T) -> T + Copy) {
    let hi = lo + out.len();
    if let [only] = parts {
        out.copy_from_slice(&only[lo..hi]);
        return;
    }
    let (left, right) = parts.split_at(parts.len().next_power_of_two() / 2);
    fold_aligned(left, lo, out, combine);
    let mut partial = [T::zeroed(); CHUNK];
    let partial = &mut partial[..out.len()];
    fold_aligned(right, lo, partial, combine);
    for (a, b) in out.iter_mut().zip(&*partial) {
        *a = combine(*a, *b);
    }
}
