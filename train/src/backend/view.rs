//! Views: a matrix of elements in a planned buffer.

use mesh::DType;

/// A planned buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufId(pub u32);

/// `rows × cols` elements of a buffer, row-major, `stride` elements from one row to the next.
/// Element types: F32, BF16, I64 (fixed point and counters), I32 (tokens, positions, row indices).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// The buffer.
    pub buf: BufId,
    /// First element, counted from the buffer's start.
    pub offset: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Elements from one row's start to the next.
    pub stride: usize,
    /// Element type.
    pub dtype: DType,
}

impl View {
    /// A whole buffer as `rows × cols`.
    pub fn whole(buf: BufId, dtype: DType, rows: usize, cols: usize) -> Self {
        View { buf, offset: 0, rows, cols, stride: cols, dtype }
    }

    /// Rows `[lo, hi)`.
    ///
    /// # Panics
    /// If there are no such rows.
    pub fn row_range(self, lo: usize, hi: usize) -> Self {
        assert!(lo <= hi && hi <= self.rows, "rows {lo}..{hi} of {}", self.rows);
        View { offset: self.offset + lo * self.stride, rows: hi - lo, ..self }
    }

    /// Columns `[lo, hi)`.
    ///
    /// # Panics
    /// If there are no such columns.
    pub fn col_range(self, lo: usize, hi: usize) -> Self {
        assert!(lo <= hi && hi <= self.cols, "columns {lo}..{hi} of {}", self.cols);
        View { offset: self.offset + lo, cols: hi - lo, ..self }
    }

    /// The same contiguous elements under another shape.
    ///
    /// # Panics
    /// If rows have gaps, or the shape has another number of elements.
    pub fn reshaped(self, rows: usize, cols: usize) -> Self {
        assert!(self.is_contiguous(), "a strided view cannot be reshaped");
        assert_eq!(self.numel(), rows * cols, "{rows} × {cols} from {} × {}", self.rows, self.cols);
        View { rows, cols, stride: cols, ..self }
    }

    /// Number of elements.
    pub fn numel(self) -> usize {
        self.rows * self.cols
    }

    /// Bytes of the elements.
    pub fn size_bytes(self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }

    /// Whether the elements follow one another without gaps.
    pub fn is_contiguous(self) -> bool {
        self.stride == self.cols || self.rows <= 1
    }

    /// First and one-past-last element that the view touches, counted from the buffer's start.
    pub fn extent(self) -> (usize, usize) {
        let len = if self.numel() == 0 { 0 } else { (self.rows - 1) * self.stride + self.cols };
        (self.offset, self.offset + len)
    }
}
