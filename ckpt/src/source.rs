//! `StateSource`: whatever state can be loaded from — a catalog, and bytes for what is wanted of it.

use crate::catalog::Catalog;
use crate::manifest::Commit;
use crate::plan::{LoadPlan, plan_box};
use crate::scatter::{BoxIn, copy_box};
use crate::store::StoreError;
use mesh::{Region, TensorKey};
use std::error::Error;
use std::ops::Range;

/// Takes the elements of one box of one wanted shard: the shard's index in the plan's request, the box in elements of the
/// shard, and its bytes, row-major and little-endian.
pub type Sink<'a> = dyn FnMut(usize, &Region, &[u8]) -> Result<(), Box<dyn Error + Send + Sync>> + 'a;

/// Something that holds the state of a step.
pub trait StateSource {
    /// What was said when it was saved.
    fn commit(&self) -> &Commit;

    /// The tensors that it holds.
    fn catalog(&self) -> &Catalog;

    /// Reads what `plan`, made from this source's catalog, names, checks it, and hands it to `sink` in boxes of any
    /// order that cover every wanted shard once. Blocks; needs the memory of a few chunks.
    ///
    /// # Errors
    /// See [`LoadError`]; `sink` may have got a part by then.
    fn read(&self, plan: &LoadPlan, sink: &mut Sink<'_>) -> Result<ReadReport, LoadError>;

    /// Fills `out` with one box of the stored tensor `key`; the box is in elements of the whole tensor, the bytes are
    /// row-major and little-endian, in the tensor's own type.
    ///
    /// # Errors
    /// See [`LoadError`]; `out` may hold a part by then.
    ///
    /// # Panics
    /// If the catalog has no such tensor, the box lies outside it, or `out` has another length than the box.
    fn read_box(&self, key: &TensorKey, region: &Region, out: &mut [u8]) -> Result<(), LoadError> {
        let index = self.catalog().index_of(key).expect("the caller has the key from the catalog");
        let tensor = &self.catalog().tensors()[index];
        let (element_bytes, shape) = (tensor.dtype.size_bytes(), region.shape());
        assert!(Region::whole(&tensor.shape).contains(region), "`{key}` has no {region}");
        assert_eq!(out.len() as u64, region.numel() * element_bytes as u64, "`{key}`: bytes of {region}");
        let plan = plan_box(self.catalog(), index, region);
        self.read(&plan, &mut |_, within, bytes| {
            let part = within.shape();
            let from = BoxIn { shape: &part, region: &Region::whole(&part) };
            copy_box(bytes, from, out, BoxIn { shape: &shape, region: within }, element_bytes);
            Ok(())
        })?;
        Ok(())
    }
}

/// What a read took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadReport {
    /// Bytes that went to the sink.
    pub bytes_wanted: u64,
    /// Bytes that came from the store.
    pub bytes_read: u64,
    /// Requests to the store.
    pub requests: u64,
}

/// Why a read ended.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Stored bytes are not those that were written.
    #[error(
        "`{key}` {region} is damaged: bytes {}..{} of `{object}` have checksum {found:016x}, not {expected:016x}",
        .bytes.start, .bytes.end
    )]
    Damaged {
        /// Of which tensor.
        key: TensorKey,
        /// The elements that are lost, as the smallest box around them.
        region: Box<Region>,
        /// Where they lie, with the store's name.
        object: String,
        /// The bytes that were checked together.
        bytes: Range<u64>,
        /// Checksum when it was written.
        expected: u64,
        /// Checksum now.
        found: u64,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Whoever wanted the bytes did not take them.
    #[error("`{key}` could not be put in its place")]
    Sink {
        /// Which tensor.
        key: TensorKey,
        /// Why not.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl LoadError {
    /// Whether the checkpoint is damaged, so that an older one may be taken instead.
    pub fn is_damage(&self) -> bool {
        match self {
            LoadError::Damaged { .. } => true,
            LoadError::Store(error) => error.is_not_found(),
            LoadError::Sink { .. } => false,
        }
    }

    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            LoadError::Damaged { .. } => "RM4021",
            LoadError::Store(error) => error.code(),
            LoadError::Sink { .. } => "RM4035",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LoadError::Damaged { .. } => {
                "`remesh verify` lists all that is lost; an older step may be whole".to_owned()
            }
            LoadError::Store(error) => error.help(),
            LoadError::Sink { .. } => "the cause says which memory or device failed".to_owned(),
        }
    }
}
