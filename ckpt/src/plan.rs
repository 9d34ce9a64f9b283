//! The two pure planners: who writes what ([`plan_save`]), and what to read for what is wanted ([`plan_load`]).
//! Same inputs, same plan; no store, clock or rank in sight.

mod load;
mod save;

pub(crate) use load::plan_box;
pub use load::{BadGlob, Differing, LoadPlan, LoadPlanError, Mismatch, ReadItem, Strictness, plan_load};
pub use save::{PlanDigest, PlannedChunk, SavePlan, SavePlanError, plan_save};

use mesh::{Indivisible, ProcessGroups, Region, ShardedTensor, StateTable};

/// A shard of this rank and where it lies in the rank's own buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnShard {
    /// Index of the entry in the state table.
    pub entry: usize,
    /// What and where, in elements of the whole tensor; empty if the rank holds nothing of it.
    pub shard: ShardedTensor,
    /// In elements of the rank's buffer; the same shape as the shard's region.
    pub local: Region,
}

/// Everything that the rank behind `groups` holds of `table`, in table order: what it wants from a checkpoint.
/// An entry of which it holds nothing is there with an empty region, so that its key counts as wanted.
///
/// # Errors
/// If an exact cut does not divide.
pub fn own_shards(table: &StateTable, groups: &ProcessGroups) -> Result<Vec<OwnShard>, Indivisible> {
    let mut shards = Vec::new();
    for (entry, state) in table.entries().iter().enumerate() {
        let global_shape = state.placement.shape();
        let held = state.placement.shard(groups)?;
        let own = |region, local| OwnShard {
            entry,
            shard: ShardedTensor {
                key: state.key.clone(),
                dtype: state.dtype,
                global_shape: global_shape.clone(),
                region,
                replica: held.replica,
            },
            local,
        };
        if held.pieces.is_empty() {
            let origin = vec![0; global_shape.dims().len()];
            let nothing = Region::new(&origin, &origin);
            shards.push(own(nothing.clone(), nothing));
        }
        shards.extend(held.pieces.iter().map(|piece| own(piece.region.clone(), piece.local.clone())));
    }
    Ok(shards)
}
