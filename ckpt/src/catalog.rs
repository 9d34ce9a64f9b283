//! `Catalog`: what a checkpoint holds — tensors, the boxes they are stored in, and where each box's bytes are.

use crate::encode::{ChunkChecksums, Codec, FRAME_BYTES};
use crate::fingerprint::Fingerprint;
use crate::statistics::Statistics;
use mesh::{DType, Placement, Region, Shape, StateKind, TensorKey, TilingFault, prove_tiling};

/// The proved content of a checkpoint: every element of every tensor lies in exactly one chunk, and every chunk in its
/// object. Holding one is holding that proof.
#[derive(Clone, Debug, PartialEq)]
pub struct Catalog {
    tensors: Vec<StoredTensor>,
    objects: Vec<StoredObject>,
}

/// One global tensor as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredTensor {
    /// Its name.
    pub key: TensorKey,
    /// What it is for.
    pub kind: StateKind,
    /// Element type.
    pub dtype: DType,
    /// Logical elements per dim.
    pub shape: Shape,
    /// How the model that saved it divided it; none if that is not known.
    pub placement: Option<Placement>,
    /// Over all its elements.
    pub fingerprint: Fingerprint,
    /// Of a floating-point tensor.
    pub statistics: Option<Statistics>,
    /// Where it is stored, sorted by first corner.
    pub chunks: Vec<StoredChunk>,
}

/// One stored box of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredChunk {
    /// In elements of the whole tensor.
    pub region: Region,
    /// Index of the object that holds it.
    pub object: usize,
    /// First byte in the object.
    pub offset: u64,
    /// Bytes in the object.
    pub stored_bytes: u64,
    /// How they are stored.
    pub codec: Codec,
    /// Of the stored bytes.
    pub checksums: ChunkChecksums,
}

/// An object that holds chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject {
    /// Its path in the checkpoint's folder.
    pub path: String,
    /// Its length.
    pub bytes: u64,
}

/// Why tables describe no checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CatalogFault {
    #[error("two tensors are called `{key}`")]
    DuplicateKey { key: TensorKey },
    #[error("`{key}` has shape {shape}, which has more elements than can be counted")]
    TooLarge { key: TensorKey, shape: Shape },
    #[error("`{key}`: its placement is not one of a tensor of shape {shape}")]
    Placement { key: TensorKey, shape: Shape },
    #[error("`{key}`: chunk {region} lies outside the tensor of shape {shape}")]
    Outside { key: TensorKey, region: Box<Region>, shape: Shape },
    #[error("`{key}`: chunks {first} and {second} share {overlap}")]
    Overlap { key: TensorKey, first: Box<Region>, second: Box<Region>, overlap: Box<Region> },
    #[error("`{key}`: {missing} elements are in no chunk")]
    Uncovered { key: TensorKey, missing: u64 },
    #[error("`{key}`: chunk {region} is {stored} bytes in the table, {expected} by its shape")]
    Size { key: TensorKey, region: Box<Region>, stored: u64, expected: u64 },
    #[error("`{key}`: chunk {region} has frames that do not add up to its {stored} bytes")]
    Frames { key: TensorKey, region: Box<Region>, stored: u64 },
    #[error(
        "`{key}`: chunk {region} is said to be at bytes {offset} to {offset} + {stored} of {object}, which does not hold them"
    )]
    Bounds { key: TensorKey, region: Box<Region>, object: String, offset: u64, stored: u64 },
    #[error("`{key}` and `{other}`: two chunks share bytes of {object}, the second at {offset}")]
    SharedBytes { key: TensorKey, other: TensorKey, object: String, offset: u64 },
}

impl StoredTensor {
    /// Raw bytes of the whole tensor.
    pub fn raw_bytes(&self) -> u64 {
        self.shape.numel() * self.dtype.size_bytes() as u64
    }

    /// Raw bytes of one of its chunks.
    pub fn chunk_raw_bytes(&self, chunk: &StoredChunk) -> u64 {
        chunk.region.numel() * self.dtype.size_bytes() as u64
    }
}

impl Catalog {
    /// Checks that the chunks tile their tensors and lie in their objects without sharing bytes.
    ///
    /// # Errors
    /// The first fault found. Nothing that a table claims is trusted.
    pub fn new(mut tensors: Vec<StoredTensor>, objects: Vec<StoredObject>) -> Result<Catalog, CatalogFault> {
        tensors.sort_by(|a, b| a.key.cmp(&b.key));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].key == pair[1].key) {
            return Err(CatalogFault::DuplicateKey { key: pair[0].key.clone() });
        }
        for tensor in &mut tensors {
            tensor.chunks.sort_by(|a, b| a.region.lo().cmp(b.region.lo()));
            check_tensor(tensor, &objects)?;
        }
        let catalog = Catalog { tensors, objects };
        catalog.check_bytes_apart()?;
        Ok(catalog)
    }

    /// The tensors, sorted by key.
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The objects that hold chunks.
    pub fn objects(&self) -> &[StoredObject] {
        &self.objects
    }

    /// Index of the tensor with this key.
    pub fn index_of(&self, key: &TensorKey) -> Option<usize> {
        self.tensors.binary_search_by(|tensor| tensor.key.cmp(key)).ok()
    }

    /// The tensor with this key.
    pub fn tensor(&self, key: &TensorKey) -> Option<&StoredTensor> {
        self.index_of(key).map(|index| &self.tensors[index])
    }

    /// Of the whole state: the sum over its tensors.
    pub fn fingerprint(&self) -> Fingerprint {
        self.tensors.iter().map(|tensor| tensor.fingerprint).sum()
    }

    /// All chunks by place: object, then offset.
    pub fn chunks_by_place(&self) -> Vec<(&StoredTensor, &StoredChunk)> {
        let chunks =
            self.tensors.iter().flat_map(|tensor| tensor.chunks.iter().map(move |chunk| (tensor, chunk)));
        let mut chunks: Vec<_> = chunks.collect();
        chunks.sort_by_key(|(_, chunk)| (chunk.object, chunk.offset));
        chunks
    }

    fn check_bytes_apart(&self) -> Result<(), CatalogFault> {
        for pair in self.chunks_by_place().windows(2) {
            let [(tensor, chunk), (other, next)] = [pair[0], pair[1]];
            if chunk.object == next.object && chunk.offset + chunk.stored_bytes > next.offset {
                return Err(CatalogFault::SharedBytes {
                    key: tensor.key.clone(),
                    other: other.key.clone(),
                    object: self.objects[chunk.object].path.clone(),
                    offset: next.offset,
                });
            }
        }
        Ok(())
    }
}

fn check_tensor(tensor: &StoredTensor, objects: &[StoredObject]) -> Result<(), CatalogFault> {
    let (key, shape) = (&tensor.key, &tensor.shape);
    // Every product of some of the extents is below this one, zero extents apart.
    let nonzero = shape.dims().iter().filter(|extent| **extent > 0);
    let bytes = nonzero.copied().chain([tensor.dtype.size_bytes() as u64]).try_fold(1u64, u64::checked_mul);
    if bytes.is_none_or(|bytes| bytes > i64::MAX as u64) {
        return Err(CatalogFault::TooLarge { key: key.clone(), shape: shape.clone() });
    }
    if tensor.placement.as_ref().is_some_and(|placement| placement.shape() != *shape) {
        return Err(CatalogFault::Placement { key: key.clone(), shape: shape.clone() });
    }
    for chunk in &tensor.chunks {
        let region = &chunk.region;
        let inside = region.num_dims() == shape.dims().len()
            && region.hi().iter().zip(shape.dims()).all(|(hi, extent)| hi <= extent)
            && !region.is_empty();
        if !inside {
            return Err(CatalogFault::Outside {
                key: key.clone(),
                region: region.clone().into(),
                shape: shape.clone(),
            });
        }
        check_chunk(tensor, chunk, objects)?;
    }
    let regions: Vec<&Region> = tensor.chunks.iter().map(|chunk| &chunk.region).collect();
    prove_tiling(shape, &regions).map_err(|fault| match fault {
        TilingFault::Overlap { first, second, overlap } => CatalogFault::Overlap {
            key: key.clone(),
            first: regions[first].clone().into(),
            second: regions[second].clone().into(),
            overlap: overlap.into(),
        },
        TilingFault::Outside { index } => CatalogFault::Outside {
            key: key.clone(),
            region: regions[index].clone().into(),
            shape: shape.clone(),
        },
        TilingFault::Uncovered { missing } => CatalogFault::Uncovered { key: key.clone(), missing },
    })
}

fn check_chunk(
    tensor: &StoredTensor,
    chunk: &StoredChunk,
    objects: &[StoredObject],
) -> Result<(), CatalogFault> {
    let (key, region, stored) = (tensor.key.clone(), Box::new(chunk.region.clone()), chunk.stored_bytes);
    let raw = tensor.chunk_raw_bytes(chunk);
    match chunk.codec {
        Codec::Raw if stored != raw => {
            return Err(CatalogFault::Size { key, region, stored, expected: raw });
        }
        Codec::Raw => {}
    }
    let frames = &chunk.checksums.frames;
    let num_frames = if raw > FRAME_BYTES { raw.div_ceil(FRAME_BYTES) } else { 0 };
    // Raw frames have the size that their number says.
    let sizes_fit = (frames.iter().enumerate())
        .all(|(at, frame)| u64::from(frame.bytes) == FRAME_BYTES.min(raw - at as u64 * FRAME_BYTES));
    if frames.len() as u64 != num_frames || !sizes_fit {
        return Err(CatalogFault::Frames { key, region, stored });
    }
    let end = chunk.offset.checked_add(stored);
    match objects.get(chunk.object) {
        Some(object) if end.is_some_and(|end| end <= object.bytes) => Ok(()),
        object => {
            let object =
                object.map_or_else(|| format!("object {}", chunk.object), |object| object.path.clone());
            Err(CatalogFault::Bounds { key, region, object, offset: chunk.offset, stored })
        }
    }
}
