//! Elements that are one type in host memory, and disjoint borrows of them.

use super::matrix::{Matrix, MatrixMut};
#[cfg(debug_assertions)]
use crate::backend::BufId;
use crate::backend::{MemoryPlan, Slot, View};
use mesh::DType;
use std::ops::Range;
use std::sync::Arc;

/// All buffers of some element types, one type after another.
#[derive(Debug)]
pub(super) struct Arena<T> {
    elements: Vec<T>,
    /// Where the buffers of each type begin.
    starts: Vec<(DType, usize)>,
    plan: Arc<MemoryPlan>,
}

impl<T: Copy + Default> Arena<T> {
    /// An arena of zeros for the buffers of `plan` of these types.
    pub(super) fn new(plan: &Arc<MemoryPlan>, dtypes: &[DType]) -> Self {
        let mut len = 0;
        let mut start = |dtype| {
            let start = len;
            len += plan.arena_len(dtype);
            (dtype, start)
        };
        let starts = dtypes.iter().map(|dtype| start(*dtype)).collect();
        Arena { elements: vec![T::default(); len], starts, plan: Arc::clone(plan) }
    }

    /// Borrows what an operation writes and what it reads. Reads may overlap each other.
    ///
    /// # Panics
    /// If a written range overlaps another operand: an operation that works in place has one operand for both.
    pub(super) fn borrow<const W: usize, const R: usize>(
        &mut self,
        writes: [View; W],
        reads: [View; R],
    ) -> ([MatrixMut<'_, T>; W], [Matrix<'_, T>; R]) {
        let write_ranges = writes.map(|view| self.range(view));
        let read_ranges = reads.map(|view| self.range(view));
        let plan = &self.plan;
        let name = |view: View| &plan.slot(view.buf).name;

        let mut by_start: [usize; W] = std::array::from_fn(|index| index);
        by_start.sort_unstable_by_key(|index| (write_ranges[*index].start, write_ranges[*index].end));
        let mut written = [const { None }; W];
        let mut gaps: [(usize, &[T]); W] = [(0, &[]); W];
        let mut rest = self.elements.as_mut_slice();
        let mut at = 0;
        for (order, index) in by_start.into_iter().enumerate() {
            let range = &write_ranges[index];
            assert!(range.start >= at, "`{}` is written twice by one operation", name(writes[index]));
            let (gap, tail) = rest.split_at_mut(range.start - at);
            let (own, tail) = tail.split_at_mut(range.len());
            gaps[order] = (at, gap);
            written[index] = Some(MatrixMut::new(own, writes[index]));
            (rest, at) = (tail, range.end);
        }
        let last_gap = (at, &*rest);

        let written = written.map(|matrix| matrix.expect("every written range was split off"));
        let mut index = 0;
        let read = reads.map(|view| {
            let range = &read_ranges[index];
            index += 1;
            let (start, gap) = gaps
                .iter()
                .chain([&last_gap])
                .find(|(start, gap)| *start <= range.start && range.end <= start + gap.len())
                .unwrap_or_else(|| panic!("`{}` is read and written by one operation", name(view)));
            Matrix::new(&gap[range.start - start..range.end - start], view)
        });
        (written, read)
    }

    /// Sets a whole buffer to `value`.
    #[cfg(debug_assertions)]
    pub(super) fn fill(&mut self, buf: BufId, value: T) {
        let slot = self.plan.slot(buf);
        let start = self.start(slot);
        self.elements[start..][..slot.len].fill(value);
    }

    /// Where a buffer begins.
    fn start(&self, slot: &Slot) -> usize {
        let of_type = self.starts.iter().find(|(dtype, _)| *dtype == slot.dtype);
        of_type.expect("a buffer of a type of this arena").1 + slot.start
    }

    /// The elements between the view's first and last, counted in the arena.
    fn range(&self, view: View) -> Range<usize> {
        let slot = self.plan.slot(view.buf);
        let (start, end) = view.extent();
        assert!(
            view.dtype == slot.dtype && end <= slot.len,
            "`{}` has {} elements of {}, its view wants {} up to {end}",
            slot.name,
            slot.len,
            slot.dtype,
            view.dtype
        );
        let first = self.start(slot);
        if start == end { 0..0 } else { first + start..first + end }
    }
}
