//! Boxes of elements inside a global tensor: intersection, contiguous runs, and the proof that boxes tile a tensor.

use crate::shape::Shape;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::fmt;
use std::iter;
use std::ops::Range;

/// A box `[lo, hi)` of elements in the coordinates of a whole tensor. A scalar's box has no dims and one element.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Corners")]
pub struct Region {
    lo: SmallVec<[u64; 4]>,
    hi: SmallVec<[u64; 4]>,
}

/// A box as it is read.
#[derive(Deserialize)]
struct Corners {
    lo: SmallVec<[u64; 4]>,
    hi: SmallVec<[u64; 4]>,
}

impl TryFrom<Corners> for Region {
    type Error = String;

    fn try_from(Corners { lo, hi }: Corners) -> Result<Self, String> {
        if lo.len() != hi.len() || lo.iter().zip(&hi).any(|(lo, hi)| lo > hi) {
            return Err(format!("{lo:?} and {hi:?} are not the corners of a box"));
        }
        Ok(Region { lo, hi })
    }
}

impl Region {
    /// The box from `lo` to `hi`.
    ///
    /// # Panics
    /// If the two have different numbers of dims or `lo` exceeds `hi` somewhere; readers of files check before.
    pub fn new(lo: &[u64], hi: &[u64]) -> Self {
        assert_eq!(lo.len(), hi.len(), "corners with different numbers of dims");
        assert!(lo.iter().zip(hi).all(|(lo, hi)| lo <= hi), "box from {lo:?} to {hi:?} is inside out");
        Region { lo: SmallVec::from_slice(lo), hi: SmallVec::from_slice(hi) }
    }

    /// The whole tensor.
    pub fn whole(shape: &Shape) -> Self {
        Region { lo: SmallVec::from_elem(0, shape.dims().len()), hi: SmallVec::from_slice(shape.dims()) }
    }

    /// First corner, in elements per dim: the global offset.
    pub fn lo(&self) -> &[u64] {
        &self.lo
    }

    /// Corner after the last, in elements per dim.
    pub fn hi(&self) -> &[u64] {
        &self.hi
    }

    /// Number of dims.
    pub fn num_dims(&self) -> usize {
        self.lo.len()
    }

    /// Elements along `dim`.
    pub fn extent(&self, dim: usize) -> u64 {
        self.hi[dim] - self.lo[dim]
    }

    /// The range of indices along `dim`.
    pub fn range(&self, dim: usize) -> Range<u64> {
        self.lo[dim]..self.hi[dim]
    }

    /// The box's own shape.
    pub fn shape(&self) -> Shape {
        Shape((0..self.num_dims()).map(|dim| self.extent(dim)).collect())
    }

    /// Number of elements.
    pub fn numel(&self) -> u64 {
        (0..self.num_dims()).map(|dim| self.extent(dim)).product()
    }

    /// Whether it holds no element.
    pub fn is_empty(&self) -> bool {
        self.numel() == 0
    }

    /// Whether every element of `other` lies in `self`.
    pub fn contains(&self, other: &Region) -> bool {
        other.is_empty()
            || (0..self.num_dims()).all(|dim| self.lo[dim] <= other.lo[dim] && other.hi[dim] <= self.hi[dim])
    }

    /// The elements of both, if there are any.
    pub fn intersect(&self, other: &Region) -> Option<Region> {
        debug_assert_eq!(self.num_dims(), other.num_dims(), "boxes of different tensors");
        let mut both = self.clone();
        for dim in 0..self.num_dims() {
            both.lo[dim] = self.lo[dim].max(other.lo[dim]);
            both.hi[dim] = self.hi[dim].min(other.hi[dim]);
            if both.lo[dim] >= both.hi[dim] {
                return None;
            }
        }
        Some(both)
    }

    /// This box, which lies in `outer`, in coordinates that start at `outer`'s first corner.
    pub fn relative_to(&self, outer: &Region) -> Region {
        debug_assert!(outer.contains(self), "{self} does not lie in {outer}");
        let shift = |corner: &[u64]| corner.iter().zip(outer.lo()).map(|(at, lo)| at - lo).collect();
        Region { lo: shift(&self.lo), hi: shift(&self.hi) }
    }

    /// This box moved so that its coordinates, now relative, start at `origin`.
    pub fn shifted_by(&self, origin: &[u64]) -> Region {
        let shift = |corner: &[u64]| corner.iter().zip(origin).map(|(at, lo)| at + lo).collect();
        Region { lo: shift(&self.lo), hi: shift(&self.hi) }
    }

    /// This box cut along dim 0, then the next dim, into boxes of at most `numel_max` elements, in row-major order.
    ///
    /// # Panics
    /// If `numel_max` is 0.
    pub fn split(&self, numel_max: u64) -> Vec<Region> {
        assert!(numel_max > 0, "boxes of no element");
        let mut pieces = Vec::new();
        self.split_from(0, numel_max, &mut pieces);
        pieces
    }

    fn split_from(&self, dim: usize, numel_max: u64, pieces: &mut Vec<Region>) {
        let numel = self.numel();
        if numel <= numel_max {
            pieces.push(self.clone());
            return;
        }
        let rows = (numel_max / (numel / self.extent(dim))).max(1);
        let mut at = self.lo[dim];
        while at < self.hi[dim] {
            let mut piece = self.clone();
            piece.lo[dim] = at;
            piece.hi[dim] = at.saturating_add(rows).min(self.hi[dim]);
            at = piece.hi[dim];
            piece.split_from(dim + 1, numel_max, pieces);
        }
    }

    /// This box with one more, innermost dim, along which it is `range`.
    pub(crate) fn with_dim(&self, range: Range<u64>) -> Region {
        let mut longer = self.clone();
        longer.lo.push(range.start);
        longer.hi.push(range.end);
        longer
    }

    /// The contiguous runs of this box in the row-major order of a tensor of shape `outer`, as element ranges,
    /// ascending. Neighbouring runs are joined.
    pub fn runs(&self, outer: &Shape) -> Runs {
        Runs::new(self, outer)
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for dim in 0..self.num_dims() {
            if dim > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{}..{}", self.lo[dim], self.hi[dim])?;
        }
        f.write_str("]")
    }
}

/// Runs that are contiguous both where `a` lies in a tensor of shape `a_outer` and where `b`, a box of the same shape, lies in
/// one of shape `b_outer`: pairs of element ranges of equal length, in row-major order.
///
/// # Panics
/// If the boxes hold different numbers of elements.
pub fn paired_runs(
    a: &Region,
    a_outer: &Shape,
    b: &Region,
    b_outer: &Shape,
) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
    assert_eq!(a.numel(), b.numel(), "boxes of different sizes");
    let (mut a_runs, mut b_runs) = (a.runs(a_outer), b.runs(b_outer));
    let (mut a, mut b) = (0..0, 0..0);
    iter::from_fn(move || {
        if a.is_empty() {
            a = a_runs.next()?;
        }
        if b.is_empty() {
            b = b_runs.next()?;
        }
        let len = (a.end - a.start).min(b.end - b.start);
        let pair = (a.start..a.start + len, b.start..b.start + len);
        (a.start, b.start) = (a.start + len, b.start + len);
        Some(pair)
    })
}

/// Iterator over the contiguous element runs of a box; made by [`Region::runs`].
#[derive(Debug)]
pub struct Runs {
    /// Dims before the contiguous tail: index now, box, and elements that one index step skips.
    outer: SmallVec<[(u64, Range<u64>, u64); 4]>,
    start: u64,
    run: u64,
    done: bool,
}

impl Runs {
    fn new(region: &Region, outer: &Shape) -> Self {
        let dims = outer.dims();
        assert_eq!(dims.len(), region.num_dims(), "box and tensor have different numbers of dims");
        // The tail that is contiguous: all full dims from the innermost outwards, then one more, cut or not.
        let mut inner = dims.len();
        let mut run = 1;
        while inner > 0 {
            inner -= 1;
            run *= region.extent(inner);
            if region.extent(inner) != dims[inner] {
                break;
            }
        }
        let stride = |dim: usize| dims[dim + 1..].iter().product::<u64>();
        let start = if dims.is_empty() { 0 } else { region.lo[inner] * stride(inner) };
        Runs {
            outer: (0..inner).map(|dim| (region.lo[dim], region.range(dim), stride(dim))).collect(),
            start,
            run,
            done: region.is_empty(),
        }
    }
}

impl Iterator for Runs {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.done {
            return None;
        }
        let start = self.start + self.outer.iter().map(|(at, _, stride)| at * stride).sum::<u64>();
        self.done = true;
        for (at, range, _) in self.outer.iter_mut().rev() {
            *at += 1;
            if *at < range.end {
                self.done = false;
                break;
            }
            *at = range.start;
        }
        Some(start..start + self.run)
    }
}

/// Why boxes do not tile a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TilingFault {
    /// The two boxes with these indices share `overlap`.
    Overlap {
        /// Index of the first box.
        first: usize,
        /// Index of the second box.
        second: usize,
        /// What they share.
        overlap: Region,
    },
    /// A box reaches out of the tensor.
    Outside {
        /// Index of the box.
        index: usize,
    },
    /// Elements that are in no box.
    Uncovered {
        /// How many.
        missing: u64,
    },
}

/// Proves that `boxes` cover a tensor of shape `whole` exactly once, irregular cuts included.
///
/// Boxes are told apart along one dim after the other, so that what was cut straight through, again and again, costs
/// little more than a sort a dim; only what remains entangled is compared box by box.
///
/// # Errors
/// A box outside, an overlap, or the number of elements in no box.
pub fn prove_tiling(whole: &Shape, boxes: &[&Region]) -> Result<(), TilingFault> {
    let tensor = Region::whole(whole);
    let mut covered = 0u64;
    for (index, region) in boxes.iter().enumerate() {
        if region.num_dims() != tensor.num_dims() || !tensor.contains(region) {
            return Err(TilingFault::Outside { index });
        }
        covered = covered.saturating_add(region.numel());
    }
    if let Some(fault) = overlap(boxes, tensor.num_dims()) {
        return Err(fault);
    }
    match whole.numel() - covered {
        0 => Ok(()),
        missing => Err(TilingFault::Uncovered { missing }),
    }
}

fn overlap(boxes: &[&Region], num_dims: usize) -> Option<TilingFault> {
    let mut order: Vec<usize> = (0..boxes.len()).filter(|index| !boxes[*index].is_empty()).collect();
    // Parts of `order` whose boxes touch no other part's, the dim to look along, and the dims along which no gap was found.
    let mut parts = vec![(0..order.len(), 0, 0)];
    while let Some((range, dim, num_closed)) = parts.pop() {
        let part = &mut order[range.clone()];
        if part.len() < 2 {
            continue;
        }
        if num_closed == num_dims {
            if let Some(fault) = overlap_by_pairs(boxes, part) {
                return Some(fault);
            }
            continue;
        }
        part.sort_unstable_by_key(|index| boxes[*index].lo[dim]);
        let next_dim = (dim + 1) % num_dims;
        let mut start = 0;
        let mut reach = 0;
        for (at, index) in part.iter().enumerate() {
            if at > start && boxes[*index].lo[dim] >= reach {
                parts.push((range.start + start..range.start + at, next_dim, 1));
                start = at;
            }
            reach = reach.max(boxes[*index].hi[dim]);
        }
        let num_closed = if start == 0 { num_closed + 1 } else { 1 };
        parts.push((range.start + start..range.end, next_dim, num_closed));
    }
    None
}

fn overlap_by_pairs(boxes: &[&Region], part: &[usize]) -> Option<TilingFault> {
    for (at, a) in part.iter().enumerate() {
        for b in &part[at + 1..] {
            if let Some(overlap) = boxes[*a].intersect(boxes[*b]) {
                return Some(TilingFault::Overlap { first: *a.min(b), second: *a.max(b), overlap });
            }
        }
    }
    None
}
