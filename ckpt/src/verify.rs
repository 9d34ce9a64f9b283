//! Re-reads a whole checkpoint and names every fault, down to tensor and slice.

use crate::catalog::{StoredChunk, StoredTensor};
use crate::encode::CHUNK_BYTES_MAX;
use crate::fingerprint::Fingerprint;
use crate::open::Checkpoint;
use crate::read::Window;
use crate::source::LoadError;
use crate::store::StoreError;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use mesh::TensorKey;
use std::collections::BTreeMap;
use std::ops::Range;

/// What a verification found.
#[derive(Debug)]
pub struct VerifyReport {
    /// Tensors that were read.
    pub num_tensors: usize,
    /// Chunks that were read.
    pub num_chunks: usize,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Every fault; none if the checkpoint is as it was written.
    pub faults: Vec<Fault>,
}

/// One thing that is wrong.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A part of a tensor is lost.
    #[error(transparent)]
    Chunk(LoadError),
    /// A pack is not as it was written, though none of its chunks is damaged.
    #[error("`{object}` has checksum {found:016x}, not {expected:016x}, between its chunks")]
    Pack {
        /// With the store's name.
        object: String,
        /// Checksum when it was written.
        expected: u64,
        /// Checksum now.
        found: u64,
    },
    /// The chunks of a tensor are as they were written, but they are not the tensor.
    #[error("`{key}` has the fingerprint {found}, not {expected}")]
    Tensor {
        /// Which tensor.
        key: TensorKey,
        /// When it was saved.
        expected: Fingerprint,
        /// Of what is stored.
        found: Fingerprint,
    },
}

/// Bytes of a pack: a chunk, or a gap between chunks.
struct Piece<'a> {
    pack: usize,
    bytes: Range<u64>,
    chunk: Option<(&'a StoredTensor, &'a StoredChunk)>,
}

impl Checkpoint {
    /// Reads every byte of every pack once: checksums of frames, chunks and packs, fingerprints of tensors.
    ///
    /// # Errors
    /// If the store fails; what is wrong with the checkpoint is in the report.
    pub fn verify(&self) -> Result<VerifyReport, StoreError> {
        self.verify_telling(&mut |_| ())
    }

    /// The same; `told` gets the bytes that were read each time that some were. All packs together are what is read.
    ///
    /// # Errors
    /// See [`verify`](Self::verify).
    pub fn verify_telling(&self, told: &mut dyn FnMut(u64)) -> Result<VerifyReport, StoreError> {
        let pieces = self.pieces();
        let packs: Vec<_> = self.commit().packs().collect();
        let mut faults = Vec::new();
        let mut damaged_packs = vec![false; packs.len()];
        let mut crcs: Vec<Digest> = packs.iter().map(|_| Digest::new(CrcAlgorithm::Crc64Nvme)).collect();
        // None: a chunk is damaged, which says more than the fingerprint would.
        let mut found: BTreeMap<&TensorKey, Option<Fingerprint>> = self
            .catalog()
            .tensors()
            .iter()
            .map(|tensor| (&tensor.key, Some(Fingerprint::default())))
            .collect();
        let mut bytes_read = 0;
        let ranges = pieces.iter().map(|piece| (self.path(&packs[piece.pack].path), piece.bytes.clone()));
        self.store().get_ranges(ranges, |at, bytes: Bytes| {
            let piece = &pieces[at];
            bytes_read += bytes.len() as u64;
            told(bytes.len() as u64);
            crcs[piece.pack].update(&bytes);
            if let Some((tensor, chunk)) = piece.chunk {
                let sum = found.get_mut(&tensor.key).expect("every tensor has its sum");
                let window = Window {
                    tensor,
                    chunk,
                    frames: 0..chunk.checksums.frames.len(),
                    bytes: piece.bytes.clone(),
                    items: &[],
                };
                match self.check(&window, &bytes) {
                    Ok(()) => {
                        let (key, shape) = (&tensor.key, &tensor.shape);
                        let part = Fingerprint::of_region(key, tensor.dtype, shape, &chunk.region, &bytes);
                        *sum = sum.map(|sum| sum + part);
                    }
                    Err(fault) => {
                        *sum = None;
                        damaged_packs[piece.pack] = true;
                        faults.push(Fault::Chunk(fault));
                    }
                }
            }
            Ok::<(), StoreError>(())
        })?;
        for ((pack, crc), is_damaged) in packs.iter().zip(crcs).zip(damaged_packs) {
            let (expected, found) = (pack.crc64, crc.finalize());
            if found != expected && !is_damaged {
                let object = self.store().full_name(&self.path(&pack.path));
                faults.push(Fault::Pack { object, expected, found });
            }
        }
        for tensor in self.catalog().tensors() {
            let expected = tensor.fingerprint;
            if let Some(found) = found[&tensor.key].filter(|found| *found != expected) {
                faults.push(Fault::Tensor { key: tensor.key.clone(), expected, found });
            }
        }
        let num_tensors = self.catalog().tensors().len();
        let num_chunks = pieces.iter().filter(|piece| piece.chunk.is_some()).count();
        Ok(VerifyReport { num_tensors, num_chunks, bytes_read, faults })
    }

    /// Every byte of every pack once, in order. The catalog guarantees that chunks share no bytes.
    fn pieces(&self) -> Vec<Piece<'_>> {
        let mut pieces = Vec::new();
        let mut chunks = self.catalog().chunks_by_place().into_iter().peekable();
        for (pack, object) in self.catalog().objects().iter().enumerate() {
            let mut at = 0;
            let gap = |from: u64, to: u64, pieces: &mut Vec<Piece<'_>>| {
                let starts = (from..to).step_by(CHUNK_BYTES_MAX as usize);
                pieces.extend(starts.map(|start| Piece {
                    pack,
                    bytes: start..(start + CHUNK_BYTES_MAX).min(to),
                    chunk: None,
                }));
            };
            while let Some((tensor, chunk)) = chunks.next_if(|(_, chunk)| chunk.object == pack) {
                gap(at, chunk.offset, &mut pieces);
                at = chunk.offset + chunk.stored_bytes;
                pieces.push(Piece { pack, bytes: chunk.offset..at, chunk: Some((tensor, chunk)) });
            }
            gap(at, object.bytes, &mut pieces);
        }
        pieces
    }
}
