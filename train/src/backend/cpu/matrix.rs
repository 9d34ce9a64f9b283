//! Borrowed rows: what operations compute on.

use crate::backend::View;
use std::ops::Range;

/// `rows × cols` elements that are read, `stride` apart from row to row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<'a, T> {
    elements: &'a [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// `elements` begin at the view's first and end at its last.
    pub(super) fn new(elements: &'a [T], View { rows, cols, stride, .. }: View) -> Self {
        Matrix { elements, rows, cols, stride }
    }

    /// Contiguous rows of `cols` elements.
    pub(super) fn contiguous(elements: &'a [T], cols: usize) -> Self {
        Matrix { elements, rows: elements.len() / cols, cols, stride: cols }
    }

    pub(super) fn row(self, row: usize) -> &'a [T] {
        &self.elements[row * self.stride..][..self.cols]
    }

    /// Row by row.
    pub(super) fn iter(self) -> impl Iterator<Item = &'a [T]> {
        (0..self.rows).map(move |row| self.row(row))
    }

    /// The element at `row` of a single column.
    pub(super) fn at(self, row: usize) -> &'a T {
        &self.elements[row * self.stride]
    }

    pub(super) fn block(self, rows: Range<usize>, cols: Range<usize>) -> Matrix<'a, T> {
        let (lo, hi) = block_range(self.stride, &rows, &cols);
        Matrix { elements: &self.elements[lo..hi], rows: rows.len(), cols: cols.len(), stride: self.stride }
    }

    /// All elements from the first to the last.
    pub(super) fn elements(self) -> &'a [T] {
        self.elements
    }
}

/// `rows × cols` elements that are written.
#[derive(Debug)]
pub(super) struct MatrixMut<'a, T> {
    elements: &'a mut [T],
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
}

impl<'a, T> MatrixMut<'a, T> {
    /// `elements` begin at the view's first and end at its last.
    pub(super) fn new(elements: &'a mut [T], View { rows, cols, stride, .. }: View) -> Self {
        MatrixMut { elements, rows, cols, stride }
    }

    /// Contiguous rows of `cols` elements.
    pub(super) fn contiguous(elements: &'a mut [T], cols: usize) -> Self {
        let rows = elements.len() / cols;
        MatrixMut { elements, rows, cols, stride: cols }
    }

    pub(super) fn row(&mut self, row: usize) -> &mut [T] {
        &mut self.elements[row * self.stride..][..self.cols]
    }

    /// The element at `row` of a single column.
    pub(super) fn at(&mut self, row: usize) -> &mut T {
        &mut self.elements[row * self.stride]
    }

    pub(super) fn block(&mut self, rows: Range<usize>, cols: Range<usize>) -> MatrixMut<'_, T> {
        let (lo, hi) = block_range(self.stride, &rows, &cols);
        let stride = self.stride;
        MatrixMut { elements: &mut self.elements[lo..hi], rows: rows.len(), cols: cols.len(), stride }
    }

    /// All elements from the first to the last.
    pub(super) fn elements(&mut self) -> &mut [T] {
        self.elements
    }
}

fn block_range(stride: usize, rows: &Range<usize>, cols: &Range<usize>) -> (usize, usize) {
    if rows.is_empty() || cols.is_empty() {
        return (0, 0);
    }
    (rows.start * stride + cols.start, (rows.end - 1) * stride + cols.end)
}
