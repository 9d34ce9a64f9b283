//! Named pieces of state: keys, replica ids, shards, and the table of everything a model's checkpoint holds.

use crate::placement::Placement;
use crate::region::Region;
use crate::shape::{DType, Shape};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The name of a global tensor, such as `decoder.layers.7.mlp.linear_fc1.weight`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TensorKey(Arc<str>);

impl TensorKey {
    /// The key with this text.
    pub fn new(text: impl Into<Arc<str>>) -> Self {
        TensorKey(text.into())
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TensorKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl From<&str> for TensorKey {
    fn from(text: &str) -> Self {
        TensorKey::new(text)
    }
}

/// Which copy of a shard this is: the rank's index along each axis the tensor is *not* cut over
/// (`pp`: 1 for a tied weight's second copy). All zero is the main replica, the one that stands for the shard.
/// Built from the model's own process groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ReplicaId {
    /// 1 for a tied weight's copy on another pipeline stage; the stage where every one holds the tensor.
    pub pp: u32,
    /// Index along TP, or ETP for what experts hold.
    pub tp: u32,
    /// Position in `gtp_remat`, or `expt_gtp_remat`.
    pub gtp: u32,
    /// Position in `dp_cp`, or `expt_dp`; in `cp` where a tensor has one cell a lane of samples.
    pub dp: u32,
}

impl ReplicaId {
    /// Whether this is the main replica.
    pub fn is_main(self) -> bool {
        self == ReplicaId::default()
    }
}

/// One rank's piece of a global tensor: where it lies, not its bytes.
///
/// Over all ranks, the shards whose replica is main tile the tensor exactly once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardedTensor {
    /// The global tensor.
    pub key: TensorKey,
    /// Its element type.
    pub dtype: DType,
    /// The whole tensor, in elements per dim.
    pub global_shape: Shape,
    /// This shard, in elements of the whole tensor.
    pub region: Region,
    /// Which copy.
    pub replica: ReplicaId,
}

/// What a tensor of a checkpoint is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StateKind {
    /// A parameter or buffer of the model.
    Model,
    /// A master weight or moment.
    Optimizer,
    /// Random state, one cell a coordinate.
    Rng,
    /// Opaque bytes.
    Object,
}

impl StateKind {
    /// Every kind.
    pub const ALL: &[StateKind] =
        &[StateKind::Model, StateKind::Optimizer, StateKind::Rng, StateKind::Object];

    /// The name in files.
    pub const fn name(self) -> &'static str {
        match self {
            StateKind::Model => "model",
            StateKind::Optimizer => "optimizer",
            StateKind::Rng => "rng",
            StateKind::Object => "object",
        }
    }
}

/// One tensor of a model's state: what it is and how it is divided.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StateEntry {
    /// The global tensor.
    pub key: TensorKey,
    /// What it is for.
    pub kind: StateKind,
    /// Element type.
    pub dtype: DType,
    /// How it is divided.
    pub placement: Placement,
}

/// Everything a model's checkpoint holds, sorted by key; with the process groups it says who holds what.
/// Equal on all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct StateTable {
    entries: Vec<StateEntry>,
}

/// Two entries of one table have the same key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("two tensors of the state are called `{key}`")]
pub struct DuplicateKey {
    /// Their key.
    pub key: TensorKey,
}

impl StateTable {
    /// A table of these entries.
    ///
    /// # Errors
    /// If two have the same key.
    pub fn new(mut entries: Vec<StateEntry>) -> Result<Self, DuplicateKey> {
        entries.sort_by(|a, b| a.key.cmp(&b.key));
        match entries.windows(2).find(|pair| pair[0].key == pair[1].key) {
            Some(pair) => Err(DuplicateKey { key: pair[0].key.clone() }),
            None => Ok(StateTable { entries }),
        }
    }

    /// The entries, sorted by key.
    pub fn entries(&self) -> &[StateEntry] {
        &self.entries
    }

    /// Index of the entry with this key.
    pub fn index_of(&self, key: &TensorKey) -> Option<usize> {
        self.entries.binary_search_by(|entry| entry.key.cmp(key)).ok()
    }
}
