//! Who writes what: every rank derives the same plan from the placements and the process groups.

use crate::encode::CHUNK_BYTES_MAX;
use mesh::{
    GroupTable, Indivisible, LocalShard, Placement, Rank, Region, Shape, StateTable, TensorKey, TilingFault,
    prove_tiling,
};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fmt;
use std::sync::Arc;

/// The chunks of a state and their writers. Every element of every tensor is in exactly one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavePlan {
    /// Sorted by (entry, first corner).
    pub chunks: Vec<PlannedChunk>,
}

/// One chunk to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// Index of the tensor in the state table.
    pub entry: usize,
    /// In elements of the whole tensor.
    pub region: Region,
    /// Raw size.
    pub raw_bytes: u64,
    /// Who writes it.
    pub writer: Rank,
    /// In elements of the writer's buffer; the same shape as `region`.
    pub local: Region,
}

/// Identifies a plan and the table it was made for; ranks compare it before anything is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanDigest([u8; 32]);

impl fmt::Display for PlanDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Why a state cannot be saved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SavePlanError {
    #[error("`{key}` cannot be divided as its placement says")]
    Indivisible { key: TensorKey, source: Indivisible },
    #[error("`{key}`: ranks {first} and {second} both hold the main replica of {overlap}")]
    TwoOwners { key: TensorKey, first: Rank, second: Rank, overlap: Box<Region> },
    #[error("`{key}`: no rank holds the main replica of {missing} of its {total} elements")]
    NoOwner { key: TensorKey, missing: u64, total: u64 },
    #[error("`{key}`: rank {rank} holds {region}, which lies outside the tensor of shape {shape}")]
    Outside { key: TensorKey, rank: Rank, region: Box<Region>, shape: Shape },
}

impl SavePlanError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            SavePlanError::Indivisible { .. } => "RM2003",
            _ => "RM4030",
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            SavePlanError::Indivisible { .. } => "pick degrees that divide the tensor's parts".to_owned(),
            _ => "the placement and the process groups do not describe one division of the tensor; every group that \
                  holds copies must be in the collection"
                .to_owned(),
        }
    }
}

/// A distinct shard, and every rank that holds it with its place in the rank's buffer.
struct Owned {
    region: Region,
    /// Ascending by rank.
    holders: Vec<(Rank, Region)>,
    /// Number of the set of its holders.
    set: usize,
}

/// The chunks of `table` on the ranks of `groups`, each given to one of the ranks that hold it.
///
/// Shards are cut first along dim 0, then the next dim, into at most 16 MiB. Chunks with fewer holders come first, then
/// larger ones, then by (key, first corner); each goes to the holder with the fewest bytes so far, then the lowest rank.
///
/// # Errors
/// A placement that the groups do not divide, or main replicas that do not tile a tensor exactly.
pub fn plan_save(table: &StateTable, groups: &Arc<GroupTable>) -> Result<SavePlan, SavePlanError> {
    let mut by_placement: HashMap<Placement, usize> = HashMap::new();
    let mut divisions: Vec<Vec<Owned>> = Vec::new();
    let mut sets = HolderSets::default();
    let mut drafts: Vec<Draft> = Vec::new();
    for (entry, state) in table.entries().iter().enumerate() {
        let placement = state.placement.representative(groups);
        let division = match by_placement.get(&placement) {
            Some(division) => *division,
            None => {
                divisions.push(divide(&state.key, &placement, groups, &mut sets)?);
                by_placement.insert(placement, divisions.len() - 1);
                divisions.len() - 1
            }
        };
        let element_bytes = state.dtype.size_bytes() as u64;
        for (shard, owned) in divisions[division].iter().enumerate() {
            let draft = |region: Region| Draft {
                entry,
                raw_bytes: region.numel() * element_bytes,
                region,
                division,
                shard,
                set: owned.set,
            };
            drafts.extend(owned.region.split(CHUNK_BYTES_MAX / element_bytes).into_iter().map(draft));
        }
    }
    drafts.sort_by(|a, b| (a.entry, a.region.lo()).cmp(&(b.entry, b.region.lo())));
    let writers = choose_writers(&drafts, &sets.members);
    let planned = |(draft, writer): (Draft, Rank)| {
        let owned = &divisions[draft.division][draft.shard];
        let at = owned.holders.binary_search_by_key(&writer, |(rank, _)| *rank);
        let (_, held) = &owned.holders[at.expect("the writer is one of the holders")];
        let local = draft.region.relative_to(&owned.region).shifted_by(held.lo());
        PlannedChunk { entry: draft.entry, region: draft.region, raw_bytes: draft.raw_bytes, writer, local }
    };
    Ok(SavePlan { chunks: drafts.into_iter().zip(writers).map(planned).collect() })
}

/// A chunk that has no writer yet.
struct Draft {
    entry: usize,
    region: Region,
    raw_bytes: u64,
    /// Which division it is cut from, and which shard of that.
    division: usize,
    shard: usize,
    /// Number of the set of its holders.
    set: usize,
}

/// Distinct sets of holders, numbered; chunks of one set compete for the same writers.
#[derive(Default)]
struct HolderSets {
    numbers: HashMap<Vec<Rank>, usize>,
    /// By number.
    members: Vec<Vec<Rank>>,
}

impl HolderSets {
    fn number_of(&mut self, holders: &[(Rank, Region)]) -> usize {
        let ranks: Vec<Rank> = holders.iter().map(|(rank, _)| *rank).collect();
        *self.numbers.entry(ranks).or_insert_with_key(|ranks| {
            self.members.push(ranks.clone());
            self.members.len() - 1
        })
    }
}

/// The distinct shards of one placement with their holders; the main replicas are proved to tile the tensor.
fn divide(
    key: &TensorKey,
    placement: &Placement,
    groups: &Arc<GroupTable>,
    sets: &mut HolderSets,
) -> Result<Vec<Owned>, SavePlanError> {
    let mut owned: Vec<Owned> = Vec::new();
    let mut mains: Vec<(Rank, Region)> = Vec::new();
    let mut copies: Vec<(Rank, LocalShard)> = Vec::new();
    for rank in groups.ranks() {
        let held = placement.shard(&groups.for_rank(*rank));
        let held = held.map_err(|source| SavePlanError::Indivisible { key: key.clone(), source })?;
        if held.replica.is_main() {
            mains.extend(held.pieces.iter().map(|piece| (*rank, piece.region.clone())));
        }
        copies.push((*rank, held));
    }
    let shape = placement.shape();
    let regions: Vec<&Region> = mains.iter().map(|(_, region)| region).collect();
    prove_tiling(&shape, &regions).map_err(|fault| match fault {
        TilingFault::Overlap { first, second, overlap } => SavePlanError::TwoOwners {
            key: key.clone(),
            first: mains[first].0,
            second: mains[second].0,
            overlap: overlap.into(),
        },
        TilingFault::Outside { index } => SavePlanError::Outside {
            key: key.clone(),
            rank: mains[index].0,
            region: mains[index].1.clone().into(),
            shape: shape.clone(),
        },
        TilingFault::Uncovered { missing } => {
            SavePlanError::NoOwner { key: key.clone(), missing, total: shape.numel() }
        }
    })?;
    // Ascending, so that sorting what is cut from them has little to do.
    mains.sort_by(|(_, a), (_, b)| a.cmp(b));
    let mut index: HashMap<Region, usize> = HashMap::new();
    for (_, region) in mains {
        index.insert(region.clone(), owned.len());
        owned.push(Owned { region, holders: Vec::new(), set: 0 });
    }
    for (rank, held) in copies {
        for piece in held.pieces {
            if let Some(at) = index.get(&piece.region) {
                owned[*at].holders.push((rank, piece.local));
            }
        }
    }
    for owned in &mut owned {
        owned.set = sets.number_of(&owned.holders);
    }
    Ok(owned)
}

/// The writer of each of `drafts`, which are sorted by (entry, first corner).
fn choose_writers(drafts: &[Draft], sets: &[Vec<Rank>]) -> Vec<Rank> {
    let mut order: Vec<usize> = (0..drafts.len()).collect();
    order.sort_by_key(|at| (sets[drafts[*at].set].len(), Reverse(drafts[*at].raw_bytes)));
    let mut writers = vec![Rank(0); drafts.len()];
    // Loads only grow, so a heap entry is a lower bound: the top is right once it says the rank's load of now.
    let mut loads: HashMap<Rank, u64> = HashMap::new();
    let new_heap = |ranks: &Vec<Rank>| ranks.iter().map(|rank| Reverse((0u64, *rank))).collect();
    let mut least_loaded: Vec<BinaryHeap<Reverse<(u64, Rank)>>> = sets.iter().map(new_heap).collect();
    for at in order {
        let heap = &mut least_loaded[drafts[at].set];
        writers[at] = loop {
            let mut top = heap.peek_mut().expect("every shard has a holder");
            let Reverse((believed, rank)) = *top;
            let load = loads.entry(rank).or_default();
            let is_right = believed == *load;
            if is_right {
                *load += drafts[at].raw_bytes;
            }
            *top = Reverse((*load, rank));
            if is_right {
                break rank;
            }
        };
    }
    writers
}

impl SavePlan {
    /// The chunks that `rank` writes, with their indices, in the order in which they lie in its packs.
    pub fn chunks_of(&self, rank: Rank) -> impl Iterator<Item = (usize, &PlannedChunk)> {
        self.chunks.iter().enumerate().filter(move |(_, chunk)| chunk.writer == rank)
    }

    /// A digest of `table`, which the plan was made for, and of who writes what.
    pub fn digest(&self, table: &StateTable) -> PlanDigest {
        let mut hasher = blake3::Hasher::new();
        let mut text = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        for entry in table.entries() {
            text(entry.key.as_str());
            text(entry.kind.name());
            text(entry.dtype.name());
            text(&serde_json::to_string(&entry.placement).expect("a placement is plain data"));
        }
        for chunk in &self.chunks {
            let ends = [chunk.entry as u64, u64::from(chunk.writer.0), chunk.region.num_dims() as u64];
            for number in ends.iter().chain(chunk.region.lo()).chain(chunk.region.hi()) {
                hasher.update(&number.to_le_bytes());
            }
        }
        PlanDigest(*hasher.finalize().as_bytes())
    }
}
