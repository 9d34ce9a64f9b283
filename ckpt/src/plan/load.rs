//! What to read for what is wanted: boxes intersected with boxes. When the two divisions are equal the plan is short.

use crate::catalog::{Catalog, StoredTensor};
use globset::{Glob, GlobSet, GlobSetBuilder};
use mesh::{DType, Region, Shape, ShardedTensor, TensorKey};
use std::collections::BTreeSet;
use std::fmt;

/// The reads that fill a list of wanted shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadPlan {
    /// By place: object, then offset; all reads of one chunk follow each other.
    pub reads: Vec<ReadItem>,
    /// Wanted keys that the checkpoint lacks and an allow list let pass; what was in them stays.
    pub missing: Vec<TensorKey>,
    /// Stored keys that nobody wants and an allow list let pass.
    pub extra: Vec<TensorKey>,
    /// Bytes of all wanted boxes that are read.
    pub bytes_wanted: u64,
}

impl LoadPlan {
    /// Whether an allow list let a key pass.
    pub fn is_partial(&self) -> bool {
        !self.missing.is_empty() || !self.extra.is_empty()
    }
}

/// Part of a chunk that goes to one wanted shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadItem {
    /// Index of the tensor in the catalog.
    pub tensor: usize,
    /// Index of the chunk in the tensor.
    pub chunk: usize,
    /// What both hold, in elements of the whole tensor.
    pub overlap: Region,
    /// Index of the wanted shard.
    pub target: usize,
    /// `overlap` in elements of the wanted shard's box.
    pub within: Region,
}

/// Which differences between the keys of a model and of a checkpoint a load lets pass. Never silent: the plan lists them.
#[derive(Clone, Debug, Default)]
pub struct Strictness {
    allow_missing: GlobSet,
    allow_extra: GlobSet,
}

/// A pattern that is no glob.
#[derive(Clone, Debug, thiserror::Error)]
#[error("`{pattern}` is not a pattern")]
pub struct BadGlob {
    /// What was given.
    pub pattern: String,
    /// Why not.
    pub source: globset::Error,
}

impl Strictness {
    /// No difference passes.
    pub fn exact() -> Strictness {
        Strictness::default()
    }

    /// Keys that match a pattern of `allow_missing` may be wanted and not stored, of `allow_extra` stored and not wanted.
    ///
    /// # Errors
    /// If a pattern is no glob.
    pub fn new(allow_missing: &[String], allow_extra: &[String]) -> Result<Strictness, BadGlob> {
        Ok(Strictness { allow_missing: glob_set(allow_missing)?, allow_extra: glob_set(allow_extra)? })
    }
}

fn glob_set(patterns: &[String]) -> Result<GlobSet, BadGlob> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(Glob::new(pattern).map_err(|source| BadGlob { pattern: pattern.clone(), source })?);
    }
    let all = || patterns.join(" ");
    set.build().map_err(|source| BadGlob { pattern: all(), source })
}

/// Why a checkpoint cannot fill what is wanted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadPlanError {
    /// Keys, shapes or types differ.
    #[error("the checkpoint does not fit the model: {0}")]
    Mismatch(Box<Mismatch>),
    /// Not one wanted key is in the checkpoint.
    #[error(
        "none of the {wanted} wanted tensors is among the {stored} of the checkpoint, for example `{example}`"
    )]
    NothingMatches {
        /// Number of wanted keys.
        wanted: usize,
        /// Number of stored tensors.
        stored: usize,
        /// A wanted key.
        example: TensorKey,
    },
    /// The request is empty.
    #[error("nothing is wanted from the checkpoint")]
    NothingWanted,
}

/// Every key that stands in the way of a load.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mismatch {
    /// Wanted and not stored.
    pub missing: Vec<TensorKey>,
    /// Stored and not wanted.
    pub extra: Vec<TensorKey>,
    /// Shapes that differ.
    pub shapes: Vec<Differing<Shape>>,
    /// Element types that differ.
    pub dtypes: Vec<Differing<DType>>,
}

/// A property of a tensor that the checkpoint has otherwise than it is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing<T> {
    /// Which tensor.
    pub key: TensorKey,
    /// In the checkpoint.
    pub stored: T,
    /// In the model.
    pub wanted: T,
}

impl LoadPlanError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            LoadPlanError::Mismatch(_) => "RM4031",
            LoadPlanError::NothingMatches { .. } => "RM4032",
            LoadPlanError::NothingWanted => "RM4033",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LoadPlanError::Mismatch(mismatch) if mismatch.shapes.is_empty() && mismatch.dtypes.is_empty() => {
                "`remesh inspect` lists what the checkpoint holds; `--allow-missing GLOB` and `--allow-extra GLOB` let \
                 named keys pass"
                    .to_owned()
            }
            LoadPlanError::Mismatch(_) => {
                "`remesh inspect --json` shows the configuration it was saved with; shapes and types must be those of the model".to_owned()
            }
            LoadPlanError::NothingMatches { .. } => {
                "this is the checkpoint of another model, or of one whose keys have other names; `remesh inspect` lists them"
                    .to_owned()
            }
            LoadPlanError::NothingWanted => "name at least one tensor".to_owned(),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = |key: &TensorKey| format!("`{key}`");
        let mut parts = vec![
            list("wanted but not stored", self.missing.iter().map(key)),
            list("stored but not wanted", self.extra.iter().map(key)),
            list(
                "of another shape",
                self.shapes.iter().map(|Differing { key, stored, wanted }| {
                    format!("`{key}` ({stored} in the checkpoint, {wanted} in the model)")
                }),
            ),
            list(
                "of another type",
                self.dtypes.iter().map(|Differing { key, stored, wanted }| {
                    format!("`{key}` ({stored} in the checkpoint, {wanted} in the model)")
                }),
            ),
        ];
        parts.retain(|part| !part.is_empty());
        f.write_str(&parts.join("; "))
    }
}

/// The count, then the first twenty.
fn list(what: &str, items: impl ExactSizeIterator<Item = String>) -> String {
    const SHOWN: usize = 20;
    let count = items.len();
    if count == 0 {
        return String::new();
    }
    let shown: Vec<String> = items.take(SHOWN).collect();
    let more = if count > SHOWN { format!(" and {} more", count - SHOWN) } else { String::new() };
    format!("{count} {what}: {}{more}", shown.join(", "))
}

/// The reads that fill `wants` from what `stored` holds. A want with an empty region reads nothing; its key counts as
/// wanted. Stored tensors that are not `in_scope` are as if they were not there: neither found nor extra.
///
/// `Catalog` guarantees that a tensor's chunks tile it, so every element of a wanted box is found once.
///
/// # Errors
/// Every key that is missing, not wanted or of another shape or type, as far as `strictness` does not let it pass; or a
/// request that matches nothing at all.
///
/// # Panics
/// If a wanted box lies outside its own tensor.
pub fn plan_load(
    stored: &Catalog,
    wants: &[ShardedTensor],
    strictness: &Strictness,
    in_scope: &dyn Fn(&StoredTensor) -> bool,
) -> Result<LoadPlan, LoadPlanError> {
    let index_of = |key: &TensorKey| stored.index_of(key).filter(|index| in_scope(&stored.tensors()[*index]));
    let wanted_keys: BTreeSet<&TensorKey> = wants.iter().map(|want| &want.key).collect();
    let Some(example) = wanted_keys.first() else { return Err(LoadPlanError::NothingWanted) };
    if wanted_keys.iter().all(|key| index_of(key).is_none()) {
        let stored = stored.tensors().iter().filter(|tensor| in_scope(tensor)).count();
        let wanted = wanted_keys.len();
        return Err(LoadPlanError::NothingMatches { wanted, stored, example: (*example).clone() });
    }
    let missing = wanted_keys.iter().filter(|key| index_of(key).is_none());
    let (missing, missing_refused): (Vec<TensorKey>, Vec<TensorKey>) =
        missing.map(|key| (*key).clone()).partition(|key| strictness.allow_missing.is_match(key.as_str()));
    let extra =
        stored.tensors().iter().filter(|tensor| in_scope(tensor) && !wanted_keys.contains(&tensor.key));
    let (extra, extra_refused): (Vec<TensorKey>, Vec<TensorKey>) =
        extra.map(|tensor| tensor.key.clone()).partition(|key| strictness.allow_extra.is_match(key.as_str()));

    let mut mismatch = Mismatch { missing: missing_refused, extra: extra_refused, ..Mismatch::default() };
    let mut reads = Vec::new();
    let mut bytes_wanted = 0;
    for (target, want) in wants.iter().enumerate() {
        let Some(index) = index_of(&want.key) else { continue };
        let tensor = &stored.tensors()[index];
        if tensor.shape != want.global_shape {
            mismatch.shapes.push(Differing {
                key: want.key.clone(),
                stored: tensor.shape.clone(),
                wanted: want.global_shape.clone(),
            });
            continue;
        }
        if tensor.dtype != want.dtype {
            mismatch.dtypes.push(Differing {
                key: want.key.clone(),
                stored: tensor.dtype,
                wanted: want.dtype,
            });
            continue;
        }
        if want.region.is_empty() {
            continue;
        }
        assert!(Region::whole(&tensor.shape).contains(&want.region), "`{}` has no {}", want.key, want.region);
        bytes_wanted += want.region.numel() * want.dtype.size_bytes() as u64;
        reads.extend(reads_of_box(tensor, index, &want.region, target));
    }
    mismatch.shapes.dedup();
    mismatch.dtypes.dedup();
    if mismatch != Mismatch::default() {
        return Err(LoadPlanError::Mismatch(Box::new(mismatch)));
    }
    sort_by_place(stored, &mut reads);
    Ok(LoadPlan { reads, missing, extra, bytes_wanted })
}

/// The reads that fill one box of the stored tensor at `index`.
pub(crate) fn plan_box(stored: &Catalog, index: usize, region: &Region) -> LoadPlan {
    let tensor = &stored.tensors()[index];
    let mut reads: Vec<ReadItem> = reads_of_box(tensor, index, region, 0).collect();
    sort_by_place(stored, &mut reads);
    let bytes_wanted = region.numel() * tensor.dtype.size_bytes() as u64;
    LoadPlan { reads, missing: Vec::new(), extra: Vec::new(), bytes_wanted }
}

fn reads_of_box(
    tensor: &StoredTensor,
    index: usize,
    wanted: &Region,
    target: usize,
) -> impl Iterator<Item = ReadItem> {
    tensor.chunks.iter().enumerate().filter_map(move |(chunk, held)| {
        let overlap = held.region.intersect(wanted)?;
        let within = overlap.relative_to(wanted);
        Some(ReadItem { tensor: index, chunk, overlap, target, within })
    })
}

fn sort_by_place(stored: &Catalog, reads: &mut [ReadItem]) {
    reads.sort_by_key(|read| {
        let chunk = &stored.tensors()[read.tensor].chunks[read.chunk];
        (chunk.object, chunk.offset, read.target)
    });
}
