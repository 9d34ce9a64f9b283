//! Carries out one rank's part of a save: reads its chunks out of the rank's buffers and streams them into packs.

use crate::encode::{ChunkChecksums, checksums};
use crate::fingerprint::Fingerprint;
use crate::manifest::FileEntry;
use crate::plan::SavePlan;
use crate::statistics::Moments;
use crate::store::{IN_FLIGHT, Store, StoreError, Task, Upload};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use mesh::{Rank, Region, StateTable, TensorKey};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::error::Error;

/// Packs are closed before they grow beyond this.
const PACK_BYTES_MAX: u64 = 1 << 30;

/// Chunks of tensors below this many bytes share slabs.
const SLAB_TENSOR_BYTES: u64 = 1 << 20;

const PAGE_BYTES: u64 = 4096;
const SLAB_ALIGN_BYTES: u64 = 64;
static ZEROS: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

/// Fills a buffer with the elements of a box of one entry of the state table; the box is in elements of this rank's own
/// buffer, the bytes are row-major and little-endian.
pub type ReadState<'a> =
    dyn FnMut(usize, &Region, &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// What one rank wrote.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Written {
    pub(crate) packs: Vec<FileEntry>,
    pub(crate) chunks: Vec<WrittenChunk>,
}

/// One chunk in a pack.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WrittenChunk {
    /// Index in the plan.
    pub(crate) chunk: usize,
    /// Index in `packs`.
    pub(crate) pack: usize,
    pub(crate) offset: u64,
    pub(crate) checksums: ChunkChecksums,
    /// Of the chunk's elements.
    pub(crate) fingerprint: Fingerprint,
    pub(crate) moments: Option<Moments>,
}

/// Why a rank could not write its part.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("reading `{key}` {region} out of this rank's memory failed")]
    State { key: TensorKey, region: Region, source: Box<dyn Error + Send + Sync> },
}

/// Writes the chunks of `rank` under `folder`. On an error nothing of it stays.
pub(crate) fn write_packs(
    store: &Store,
    folder: &str,
    attempt: &str,
    table: &StateTable,
    plan: &SavePlan,
    rank: Rank,
    read: &mut ReadState<'_>,
) -> Result<Written, WriteError> {
    let mut packs =
        Packs { store, folder, name: format!("{attempt}-{rank}"), open: None, closed: Vec::new() };
    let written = write_chunks(&mut packs, table, plan, rank, read).and_then(|chunks| {
        packs.close()?;
        Ok(chunks)
    });
    match written {
        Ok(chunks) => Ok(Written { packs: packs.closed, chunks }),
        Err(error) => {
            packs.remove();
            Err(error)
        }
    }
}

/// Reads, on this thread, one chunk after another; sums over the last few run beside it.
fn write_chunks(
    packs: &mut Packs<'_>,
    table: &StateTable,
    plan: &SavePlan,
    rank: Rank,
    read: &mut ReadState<'_>,
) -> Result<Vec<WrittenChunk>, WriteError> {
    let mut written = Vec::new();
    let mut summing: VecDeque<Task<Summed>> = VecDeque::with_capacity(IN_FLIGHT);
    for (index, chunk) in plan.chunks_of(rank) {
        if summing.len() == IN_FLIGHT
            && let Some(first) = summing.pop_front()
        {
            written.push(packs.append(first.wait())?);
        }
        let entry = &table.entries()[chunk.entry];
        let mut raw = vec![0; chunk.raw_bytes as usize];
        read(chunk.entry, &chunk.local, &mut raw).map_err(|source| WriteError::State {
            key: entry.key.clone(),
            region: chunk.region.clone(),
            source,
        })?;
        let (key, dtype, shape, region) =
            (entry.key.clone(), entry.dtype, entry.placement.shape(), chunk.region.clone());
        summing.push_back(Task::spawn(move || Summed {
            chunk: index,
            is_slab: shape.numel() * (dtype.size_bytes() as u64) < SLAB_TENSOR_BYTES,
            checksums: checksums(&raw),
            fingerprint: Fingerprint::of_region(&key, dtype, &shape, &region, &raw),
            moments: Moments::of(dtype, &raw),
            raw: raw.into(),
        }));
    }
    for task in summing {
        written.push(packs.append(task.wait())?);
    }
    Ok(written)
}

/// A chunk and all sums over it.
struct Summed {
    /// Index in the plan.
    chunk: usize,
    is_slab: bool,
    raw: Bytes,
    checksums: ChunkChecksums,
    fingerprint: Fingerprint,
    moments: Option<Moments>,
}

/// The packs of one rank.
struct Packs<'a> {
    store: &'a Store,
    folder: &'a str,
    name: String,
    open: Option<Pack>,
    closed: Vec<FileEntry>,
}

struct Pack {
    path: String,
    upload: Upload,
    crc64: Digest,
    bytes: u64,
    ends_in_slab: bool,
}

impl Packs<'_> {
    /// Puts a chunk behind the others.
    fn append(&mut self, chunk: Summed) -> Result<WrittenChunk, StoreError> {
        let Summed { chunk, is_slab, raw, checksums, fingerprint, moments } = chunk;
        let offset_in = |pack: &Pack| {
            let align = if is_slab && pack.ends_in_slab { SLAB_ALIGN_BYTES } else { PAGE_BYTES };
            pack.bytes.next_multiple_of(align)
        };
        let len = raw.len() as u64;
        if self.open.as_ref().is_some_and(|pack| offset_in(pack) + len > PACK_BYTES_MAX) {
            self.close()?;
        }
        let pack = match &mut self.open {
            Some(pack) => pack,
            None => {
                let path = format!("data/{}-{}.pack", self.name, self.closed.len());
                let upload = self.store.upload(&format!("{}/{path}", self.folder))?;
                let crc64 = Digest::new(CrcAlgorithm::Crc64Nvme);
                self.open.insert(Pack { path, upload, crc64, bytes: 0, ends_in_slab: false })
            }
        };
        let offset = offset_in(pack);
        let gap = Bytes::from_static(&ZEROS[..(offset - pack.bytes) as usize]);
        for bytes in [gap, raw] {
            pack.crc64.update(&bytes);
            pack.bytes += bytes.len() as u64;
            pack.upload.append(bytes)?;
        }
        pack.ends_in_slab = is_slab;
        Ok(WrittenChunk { chunk, pack: self.closed.len(), offset, checksums, fingerprint, moments })
    }

    fn close(&mut self) -> Result<(), StoreError> {
        if let Some(pack) = &mut self.open {
            pack.upload.finish(pack.bytes)?;
            self.closed.push(FileEntry {
                path: std::mem::take(&mut pack.path),
                bytes: pack.bytes,
                crc64: pack.crc64.finalize(),
            });
            self.open = None;
        }
        Ok(())
    }

    fn remove(self) {
        if let Some(pack) = self.open {
            pack.upload.abort();
        }
        remove_failed(self.store, self.folder, &self.closed);
    }
}

/// Removes files of a save that failed. What cannot be removed stays, as does what a killed process wrote: no commit names
/// it, so no reader sees it, and a later save of the step has other names. Nothing here removes it afterwards: its attempt
/// may be that of another job which is still writing.
pub(crate) fn remove_failed(store: &Store, folder: &str, files: &[FileEntry]) {
    for error in remove_files(store, folder, files) {
        tracing::warn!(%error, "a file of a failed save is left over");
    }
}

/// Removes files, and says which it could not.
pub(crate) fn remove_files(store: &Store, folder: &str, files: &[FileEntry]) -> Vec<StoreError> {
    files.iter().filter_map(|file| store.delete(&format!("{folder}/{}", file.path)).err()).collect()
}
