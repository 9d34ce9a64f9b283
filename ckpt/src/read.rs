//! Carries out a load plan on an opened checkpoint: ranged, coalesced reads; what is read is always checked.

use crate::catalog::{Catalog, StoredChunk, StoredTensor};
use crate::encode::{CHUNK_BYTES_MAX, FRAME_BYTES, crc64};
use crate::manifest::Commit;
use crate::open::Checkpoint;
use crate::plan::{LoadPlan, ReadItem};
use crate::source::{LoadError, ReadReport, Sink, StateSource};
use bytes::Bytes;
use mesh::{Region, Shape};
use std::ops::Range;

/// Ranges of one object that are closer than this are read by one request.
const GAP_BYTES_MAX: u64 = 1 << 20;

impl StateSource for Checkpoint {
    fn commit(&self) -> &Commit {
        Checkpoint::commit(self)
    }

    fn catalog(&self) -> &Catalog {
        Checkpoint::catalog(self)
    }

    fn read(&self, plan: &LoadPlan, sink: &mut Sink<'_>) -> Result<ReadReport, LoadError> {
        let catalog = self.catalog();
        let windows = windows(catalog, &plan.reads);
        let requests = requests(&windows);
        let mut report = ReadReport { bytes_wanted: plan.bytes_wanted, ..ReadReport::default() };
        let mut scratch = Vec::new();
        let ranges = requests.iter().map(|request| {
            let object = &catalog.objects()[windows[request.windows.start].chunk.object];
            (self.path(&object.path), request.bytes.clone())
        });
        self.store().get_ranges(ranges, |at, bytes: Bytes| {
            let request = &requests[at];
            report.requests += 1;
            report.bytes_read += bytes.len() as u64;
            for window in &windows[request.windows.clone()] {
                let start = (window.bytes.start - request.bytes.start) as usize;
                let bytes = &bytes[start..start + (window.bytes.end - window.bytes.start) as usize];
                self.check(window, bytes)?;
                for item in window.items {
                    deliver(window, item, bytes, &mut scratch, sink)?;
                }
            }
            Ok::<(), LoadError>(())
        })?;
        Ok(report)
    }
}

impl LoadPlan {
    /// Bytes that carrying it out reads from the store: whole frames, and small gaps between them. `catalog` is the one that
    /// it was made from.
    pub fn bytes_to_read(&self, catalog: &Catalog) -> u64 {
        let requests = requests(&windows(catalog, &self.reads));
        requests.iter().map(|request| request.bytes.end - request.bytes.start).sum()
    }
}

/// The part of one chunk that is read: whole frames, or all of a chunk that has none.
pub(crate) struct Window<'a> {
    pub(crate) tensor: &'a StoredTensor,
    pub(crate) chunk: &'a StoredChunk,
    /// Frames that are read, if the chunk has any.
    pub(crate) frames: Range<usize>,
    /// In the object.
    pub(crate) bytes: Range<u64>,
    /// What is wanted of it.
    pub(crate) items: &'a [ReadItem],
}

/// One call to the store.
struct Request {
    bytes: Range<u64>,
    windows: Range<usize>,
}

/// The windows of the chunks that `reads`, sorted by place, touch.
fn windows<'a>(catalog: &'a Catalog, reads: &'a [ReadItem]) -> Vec<Window<'a>> {
    let of_chunk = |items: &'a [ReadItem]| {
        let tensor = &catalog.tensors()[items[0].tensor];
        let chunk = &tensor.chunks[items[0].chunk];
        let (frames, raw) = touched(tensor, chunk, items);
        let bytes = chunk.offset + raw.start..chunk.offset + raw.end;
        Window { tensor, chunk, frames, bytes, items }
    };
    reads.chunk_by(|a, b| (a.tensor, a.chunk) == (b.tensor, b.chunk)).map(of_chunk).collect()
}

/// The frames that hold what `items` want, and their raw bytes in the chunk.
fn touched(tensor: &StoredTensor, chunk: &StoredChunk, items: &[ReadItem]) -> (Range<usize>, Range<u64>) {
    let chunk_bytes = chunk.stored_bytes;
    if chunk.checksums.frames.is_empty() {
        return (0..0, 0..chunk_bytes);
    }
    let width = tensor.dtype.size_bytes() as u64;
    let shape = chunk.region.shape();
    let spans = items.iter().map(|item| span(&item.overlap.relative_to(&chunk.region), &shape));
    let hull = spans.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)).expect("a window has an item");
    let frames = hull.start * width / FRAME_BYTES..(hull.end * width).div_ceil(FRAME_BYTES);
    let raw = frames.start * FRAME_BYTES..(frames.end * FRAME_BYTES).min(chunk_bytes);
    (frames.start as usize..frames.end as usize, raw)
}

/// From the first to the last element of a box, in the row-major order of `shape`.
fn span(region: &Region, shape: &Shape) -> Range<u64> {
    let flat = |corner: &mut dyn Iterator<Item = u64>| {
        corner.zip(shape.dims()).fold(0, |flat, (at, extent)| flat * extent + at)
    };
    flat(&mut region.lo().iter().copied())..flat(&mut region.hi().iter().map(|hi| hi - 1)) + 1
}

/// Joins neighbours: no request spans a large gap, or more than a chunk's bytes unless one window does.
fn requests(windows: &[Window<'_>]) -> Vec<Request> {
    let mut requests: Vec<Request> = Vec::new();
    for (at, window) in windows.iter().enumerate() {
        let joins = |request: &Request| {
            windows[request.windows.start].chunk.object == window.chunk.object
                && window.bytes.start - request.bytes.end < GAP_BYTES_MAX
                && window.bytes.end - request.bytes.start <= CHUNK_BYTES_MAX
        };
        match requests.last_mut().filter(|request| joins(request)) {
            Some(request) => {
                request.bytes.end = window.bytes.end;
                request.windows.end = at + 1;
            }
            None => requests.push(Request { bytes: window.bytes.clone(), windows: at..at + 1 }),
        }
    }
    requests
}

impl Checkpoint {
    /// Compares the checksums of what was read with those of what was written.
    pub(crate) fn check(&self, window: &Window<'_>, bytes: &[u8]) -> Result<(), LoadError> {
        let Window { tensor, chunk, frames, .. } = window;
        let damaged = |part: Range<u64>, expected, found| LoadError::Damaged {
            key: tensor.key.clone(),
            region: lost_region(tensor, chunk, part.clone()).into(),
            object: self.store().full_name(&self.path(&self.catalog().objects()[chunk.object].path)),
            bytes: chunk.offset + part.start..chunk.offset + part.end,
            expected,
            found,
        };
        if chunk.checksums.frames.is_empty() {
            let found = crc64(bytes);
            if found != chunk.checksums.crc64 {
                return Err(damaged(0..chunk.stored_bytes, chunk.checksums.crc64, found));
            }
        }
        let mut at = 0;
        for (index, frame) in frames.clone().zip(&chunk.checksums.frames[frames.clone()]) {
            let found = crc64(&bytes[at..at + frame.bytes as usize]);
            if found != frame.crc64 {
                let start = index as u64 * FRAME_BYTES;
                return Err(damaged(start..start + u64::from(frame.bytes), frame.crc64, found));
            }
            at += frame.bytes as usize;
        }
        Ok(())
    }
}

/// The smallest box around the elements whose raw bytes are `bytes` of a chunk.
pub(crate) fn lost_region(tensor: &StoredTensor, chunk: &StoredChunk, bytes: Range<u64>) -> Region {
    let width = tensor.dtype.size_bytes() as u64;
    let (mut first, mut last) = (bytes.start / width, (bytes.end - 1) / width);
    let (mut lo, mut hi) = (chunk.region.lo().to_vec(), chunk.region.hi().to_vec());
    for dim in 0..chunk.region.num_dims() {
        let row: u64 = (dim + 1..chunk.region.num_dims()).map(|inner| chunk.region.extent(inner)).product();
        let origin = chunk.region.lo()[dim];
        (lo[dim], hi[dim]) = (origin + first / row, origin + last / row + 1);
        if first / row != last / row {
            break;
        }
        (first, last) = (first % row, last % row);
    }
    Region::new(&lo, &hi)
}

/// Hands the elements of one item to the sink, gathered if they do not lie together.
fn deliver(
    window: &Window<'_>,
    item: &ReadItem,
    bytes: &[u8],
    scratch: &mut Vec<u8>,
    sink: &mut Sink<'_>,
) -> Result<(), LoadError> {
    let width = window.tensor.dtype.size_bytes() as u64;
    let skipped = window.bytes.start - window.chunk.offset;
    let in_window = |run: Range<u64>| {
        &bytes[(run.start * width - skipped) as usize..(run.end * width - skipped) as usize]
    };
    let local = item.overlap.relative_to(&window.chunk.region);
    let mut runs = local.runs(&window.chunk.region.shape());
    let first = runs.next().expect("an overlap is not empty");
    let taken = if first.end - first.start == item.overlap.numel() {
        sink(item.target, &item.within, in_window(first))
    } else {
        scratch.clear();
        scratch.extend_from_slice(in_window(first));
        runs.for_each(|run| scratch.extend_from_slice(in_window(run)));
        sink(item.target, &item.within, scratch)
    };
    taken.map_err(|source| LoadError::Sink { key: window.tensor.key.clone(), source })
}
