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
        (!both.is_empty()).then_some(both)
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
/// Boxes are sorted along the dim with the most distinct starts, and only neighbours that meet there are compared,
/// so regular cuts cost little more than a sort.
///
/// # Errors
/// The first overlap, box outside, or the number of elements in no box.
pub fn prove_tiling(whole: &Shape, boxes: &[&Region]) -> Result<(), TilingFault> {
    let tensor = Region::whole(whole);
    let mut covered = 0u64;
    for (index, region) in boxes.iter().enumerate() {
        if region.num_dims() != tensor.num_dims() || !tensor.contains(region) {
            return Err(TilingFault::Outside { index });
        }
        covered = covered.saturating_add(region.numel());
    }
    if let Some(fault) = first_overlap(boxes) {
        return Err(fault);
    }
    match whole.numel() - covered {
        0 => Ok(()),
        missing => Err(TilingFault::Uncovered { missing }),
    }
}

fn first_overlap(boxes: &[&Region]) -> Option<TilingFault> {
    let num_dims = boxes.first()?.num_dims();
    let mut order: Vec<usize> = (0..boxes.len()).filter(|index| !boxes[*index].is_empty()).collect();
    if num_dims == 0 {
        return (order.len() > 1).then(|| TilingFault::Overlap {
            first: order[0],
            second: order[1],
            overlap: boxes[order[0]].clone(),
        });
    }
    let distinct_starts = |dim: usize| {
        let mut starts: Vec<u64> = order.iter().map(|index| boxes[*index].lo[dim]).collect();
        starts.sort_unstable();
        starts.dedup();
        starts.len()
    };
    let sweep = (0..num_dims).max_by_key(|dim| (distinct_starts(*dim), num_dims - dim)).unwrap_or(0);
    order.sort_unstable_by(|a, b| {
        (boxes[*a].lo[sweep], &boxes[*a].lo).cmp(&(boxes[*b].lo[sweep], &boxes[*b].lo))
    });
    // Boxes that the sweep position still crosses.
    let mut open: Vec<usize> = Vec::new();
    for index in order {
        let region = boxes[index];
        open.retain(|earlier| boxes[*earlier].hi[sweep] > region.lo[sweep]);
        for earlier in &open {
            if let Some(overlap) = boxes[*earlier].intersect(region) {
                return Some(TilingFault::Overlap {
                    first: index.min(*earlier),
                    second: index.max(*earlier),
                    overlap,
                });
            }
        }
        open.push(index);
    }
    None
}
