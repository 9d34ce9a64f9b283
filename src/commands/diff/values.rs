//! How far the elements of one tensor are from those of another of the same type and shape.

use crate::output::count;
use crate::slabs;
use ckpt::{Checkpoint, StoredTensor};
use half::{bf16, f16};
use mesh::{DType, Shape};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt;

/// What was found where the bits of two elements are not the same.
#[derive(Debug, Serialize)]
pub(super) struct Values {
    /// Elements of the tensor.
    elements: u64,
    /// Those that differ in a bit.
    differing: u64,
    first: Option<First>,
    /// The largest difference of two numbers.
    max_abs: f64,
    /// How many representable numbers apart they are: the powers of two that this reaches, and how many elements reach no
    /// higher one. 0: +0 and −0.
    steps: BTreeMap<u64, u64>,
    /// Elements that are no numbers on one side, or of a type that has no order here.
    unordered: u64,
}

#[derive(Debug, Serialize)]
struct First {
    index: Vec<u64>,
    a: String,
    b: String,
}

/// An element: its place among all numbers of its type, and its value.
struct Number {
    place: i128,
    value: f64,
}

impl Values {
    /// Reads both tensors.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(super) fn compare(
        (a, of_a): (&Checkpoint, &StoredTensor),
        (b, of_b): (&Checkpoint, &StoredTensor),
    ) -> anyhow::Result<Values> {
        let (dtype, width) = (of_a.dtype, of_a.dtype.size_bytes());
        let elements = of_a.shape.numel();
        let mut found = Values {
            elements,
            differing: 0,
            first: None,
            max_abs: 0.0,
            steps: BTreeMap::new(),
            unordered: 0,
        };
        let mut index = 0;
        for (one, other) in slabs::read(a, of_a).zip(slabs::read(b, of_b)) {
            let (one, other) = (one?, other?);
            for (one, other) in one.chunks_exact(width).zip(other.chunks_exact(width)) {
                if one != other {
                    found.add(dtype, &of_a.shape, index, one, other);
                }
                index += 1;
            }
        }
        Ok(found)
    }

    fn add(&mut self, dtype: DType, shape: &Shape, index: u64, a: &[u8], b: &[u8]) {
        self.differing += 1;
        if self.first.is_none() {
            self.first =
                Some(First { index: coordinates(shape, index), a: shown(dtype, a), b: shown(dtype, b) });
        }
        match (number(dtype, a), number(dtype, b)) {
            (Some(a), Some(b)) => {
                let steps = u64::try_from(a.place.abs_diff(b.place)).unwrap_or(u64::MAX);
                let bucket = if steps == 0 { 0 } else { 1 << steps.ilog2() };
                *self.steps.entry(bucket).or_default() += 1;
                // Large integers are no f64; the difference of two may be.
                let difference = match is_float(dtype) {
                    true => (a.value - b.value).abs(),
                    false => a.place.abs_diff(b.place) as f64,
                };
                self.max_abs = self.max_abs.max(difference);
            }
            _ => self.unordered += 1,
        }
    }
}

/// The element at `index` in row-major order.
fn coordinates(shape: &Shape, mut index: u64) -> Vec<u64> {
    let mut coordinates = vec![0; shape.dims().len()];
    for (at, extent) in coordinates.iter_mut().zip(shape.dims()).rev() {
        (*at, index) = (index % extent, index / extent);
    }
    coordinates
}

/// `None` for NaN, and for types that are compared bit by bit alone.
fn number(dtype: DType, bytes: &[u8]) -> Option<Number> {
    let word = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(word)
    };
    let bits = (bytes.len() <= 8).then(|| word(bytes))?;
    let value = match dtype {
        DType::F64 => f64::from_bits(bits),
        DType::F32 => f32::from_bits(bits as u32).into(),
        DType::Bf16 => bf16::from_bits(bits as u16).into(),
        DType::F16 => f16::from_bits(bits as u16).into(),
        DType::Bool | DType::U8 | DType::U16 | DType::U32 | DType::U64 => {
            return Some(Number { place: bits.into(), value: bits as f64 });
        }
        DType::I8 | DType::I16 | DType::I32 | DType::I64 => {
            let unused = 64 - 8 * bytes.len();
            let value = (bits << unused) as i64 >> unused;
            return Some(Number { place: value.into(), value: value as f64 });
        }
        _ => return None,
    };
    let sign = 1 << (8 * bytes.len() - 1);
    let magnitude = i128::from(bits & (sign - 1));
    let place = if bits & sign == 0 { magnitude } else { -magnitude };
    (!value.is_nan()).then_some(Number { place, value })
}

fn shown(dtype: DType, bytes: &[u8]) -> String {
    match number(dtype, bytes) {
        Some(Number { value, .. }) if is_float(dtype) => format!("{value:e}"),
        Some(Number { place, .. }) => place.to_string(),
        None => {
            let digits: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
            format!("0x{digits}")
        }
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64)
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Values { elements, differing, first, max_abs, steps, unordered } = self;
        write!(f, "{differing} of {} differ", count(*elements, "element"))?;
        if let Some(First { index, a, b }) = first {
            write!(f, ", first {index:?}: {a} → {b}")?;
        }
        if !steps.is_empty() {
            let bounds = [(0, 1), (1, 2), (2, 16), (16, 256), (256, 1 << 16), (1 << 16, u64::MAX)];
            let names = ["0", "1", "2–15", "16–255", "256–65535", "more"];
            let within = |(lo, hi)| steps.range(lo..hi).map(|(_, elements)| elements).sum::<u64>();
            let counts = bounds.into_iter().map(within).zip(names).filter(|(elements, _)| *elements > 0);
            let counts: Vec<String> = counts.map(|(elements, name)| format!("{name}: {elements}")).collect();
            write!(f, "; by at most {max_abs:e}; units in the last place {}", counts.join(", "))?;
        }
        if *unordered > 0 {
            write!(f, "; {unordered} without an order")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_step_apart_whatever_their_type_and_sign() {
        let steps = |dtype, a: &[u8], b: &[u8]| {
            let [a, b] = [a, b].map(|bytes| number(dtype, bytes).unwrap().place);
            a.abs_diff(b)
        };
        assert_eq!(steps(DType::F32, &1f32.to_le_bytes(), &1f32.next_up().to_le_bytes()), 1);
        assert_eq!(steps(DType::F64, &(-1f64).to_le_bytes(), &(-1f64).next_up().to_le_bytes()), 1);
        assert_eq!(steps(DType::F32, &0f32.to_le_bytes(), &(-0f32).to_le_bytes()), 0);
        assert_eq!(
            steps(DType::F32, &f32::from_bits(1).to_le_bytes(), &(-f32::from_bits(1)).to_le_bytes()),
            2
        );
        assert_eq!(steps(DType::Bf16, &bf16::ONE.to_le_bytes(), &bf16::from_bits(0x3f82).to_le_bytes()), 2);
        assert_eq!(steps(DType::I8, &[0xff], &[1]), 2);
        assert_eq!(steps(DType::U8, &[0xff], &[1]), 254);
        assert!(number(DType::F32, &f32::NAN.to_le_bytes()).is_none());
        assert!(number(DType::F8E4M3, &[1]).is_none());
    }

    #[test]
    fn an_element_is_named_by_its_coordinates() {
        assert_eq!(coordinates(&Shape::new(&[2, 3, 4]), 23), [1, 2, 3]);
        assert_eq!(coordinates(&Shape::new(&[]), 0), [0; 0]);
    }
}
