//! What a change of layout really does to a checkpoint: from the placements that its catalog holds and two layouts, which
//! bytes each rank wants that it did not hold before. Pure; no data is read.

use ckpt::{Catalog, StoredTensor, Strictness, own_shards, plan_load};
use mesh::{
    Cut, DimPlacement, ExpertSizes, Fold, FoldMemory, GroupKind, GroupRank, GroupTable, Indivisible,
    LocalShard, ModelPart, ParallelLayout, Pipeline, PipelineError, PipelineSplit, Placement, ProcessGroups,
    Rank, StateEntry, StateKind, StateTable, TensorKey,
};
use serde::Serialize;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;

/// What becomes of a checkpoint when its run goes on under another layout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayoutChange {
    /// The layout of the run that saved it.
    pub saved: ParallelLayout,
    /// The layout that loads it.
    pub target: ParallelLayout,
    /// Degrees and what follows from them, in the order in which people read them.
    pub numbers: Vec<NumberChange>,
    /// Whether every target rank wants exactly what the rank of the same number held: nothing moves, nothing is cut again.
    pub resume_in_place: bool,
    /// Of all target ranks and tensors.
    pub bytes: Bytes,
    /// What becomes of per-rank random streams. They are in none of the byte counts.
    pub random_streams: RandomStreams,
    /// Every target rank, ascending.
    pub ranks: Vec<RankChange>,
    /// Every tensor but those of random streams, sorted by key.
    pub tensors: Vec<TensorChange>,
    /// The target with its CP folded into the weight group, another way to cut the same; `None` if that cannot be.
    pub fold: Option<FoldChange>,
    /// What the counts cannot say, for people.
    pub notes: Vec<String>,
    /// The target's process groups, with its pipeline.
    #[serde(skip)]
    target_groups: Arc<GroupTable>,
}

/// The folded form of a layout, and what it would save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FoldChange {
    /// Its degrees.
    #[serde(flatten)]
    pub fold: Fold,
    /// Bytes of optimizer state that GTP does not cut, in the whole checkpoint.
    pub optimizer_bytes: u64,
    /// What of it a rank holds in both forms.
    #[serde(flatten)]
    pub memory: FoldMemory,
}

/// A number of both layouts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct NumberChange {
    pub name: &'static str,
    pub saved: u32,
    pub target: u32,
}

/// Bytes that ranks of the target layout want, each copy counted: `wanted` = `kept` + `moved`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Bytes {
    /// All of them.
    pub wanted: u64,
    /// Those that the rank of the same number held when the checkpoint was saved.
    pub kept: u64,
    /// The others.
    pub moved: u64,
}

/// What one rank of the target layout wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RankChange {
    /// Its number.
    pub rank: Rank,
    /// Of all tensors.
    #[serde(flatten)]
    pub bytes: Bytes,
}

/// What the ranks of the target layout want of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorChange {
    /// Its name.
    pub key: TensorKey,
    /// What it is for.
    pub kind: StateKind,
    /// Raw bytes of the whole tensor.
    pub tensor_bytes: u64,
    /// Target ranks that hold each of its elements; above 1 it is replicated.
    pub copies: u64,
    /// Whether it is divided otherwise.
    pub cut: CutChange,
    /// Of all target ranks.
    #[serde(flatten)]
    pub bytes: Bytes,
}

/// How the division of a tensor changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CutChange {
    /// Every target rank wants what it held.
    Unchanged,
    /// Some rank wants more, less or something else.
    Recut,
    /// The checkpoint does not say how the tensor was divided: every rank is taken to want all of it and to have held none.
    Unknown,
}

/// What becomes of random streams, of which a checkpoint holds one cell a rank. Dropout, initial values and data order
/// do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RandomStreams {
    /// All axes have the sizes they had: every rank goes on with the streams of its coordinates.
    Kept,
    /// Axes have other sizes: by default every rank derives its streams anew.
    Derived,
    /// The checkpoint holds none.
    Absent,
}

/// A change of layout that cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutChangeError {
    /// A tensor that one of the layouts does not divide.
    #[error(transparent)]
    Undivided(#[from] UndividedTensor),
    /// Layers that do not divide over the stages.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
}

impl LayoutChangeError {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        match self {
            LayoutChangeError::Undivided(error) => error.code(),
            LayoutChangeError::Pipeline(error) => error.code(),
        }
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        match self {
            LayoutChangeError::Undivided(error) => error.help(),
            LayoutChangeError::Pipeline(error) => error.help(),
        }
    }
}

/// A tensor that one of the layouts does not divide.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` cannot be divided under {layout}")]
pub struct UndividedTensor {
    /// Which tensor.
    pub key: TensorKey,
    /// Which layout.
    pub layout: ParallelLayout,
    /// Why not.
    pub source: Indivisible,
}

impl UndividedTensor {
    /// The error's number.
    pub fn code(&self) -> &'static str {
        "RM2003"
    }

    /// How to mend it.
    pub fn help(&self) -> String {
        "pick degrees that divide the tensor's parts; `remesh inspect` shows its shape and its cuts"
            .to_owned()
    }
}

/// The layout that goes on, and how it divides the state.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    /// Its degrees.
    pub layout: &'a ParallelLayout,
    /// Chunks of layers of each pipeline stage.
    pub num_chunks: u32,
    /// How the layers are divided over the chunks.
    pub split: &'a PipelineSplit,
    /// How it divides tensors, where that is known. What is not here, or has another shape, is divided as it was saved.
    pub placements: &'a HashMap<TensorKey, Placement>,
}

impl<'a> Target<'a> {
    /// How it divides a tensor of the checkpoint.
    fn placement(&self, tensor: &'a StoredTensor) -> Option<&'a Placement> {
        let known = self.placements.get(&tensor.key).filter(|placement| placement.shape() == tensor.shape);
        known.or(tensor.placement.as_ref())
    }
}

/// What changes when the state in `catalog`, saved under `saved`, is loaded under `target`. The saved layers are taken to be
/// divided evenly.
///
/// A checkpoint that does not say what is on which stage is counted as if every stage held every tensor.
///
/// # Errors
/// A tensor that one of the layouts does not divide, or layers that do not divide over the stages of the target.
pub fn plan_layout_change(
    catalog: &Catalog,
    saved: &ParallelLayout,
    target: &Target,
) -> Result<LayoutChange, LayoutChangeError> {
    let Target { layout, num_chunks, split, .. } = *target;
    let num_layers = num_layers(catalog);
    let pipeline = |layout: &ParallelLayout, num_chunks, split| match (layout.pp(), num_layers) {
        (1, _) | (_, 0) => Ok(None),
        (num_stages, _) => Pipeline::new(num_layers, num_stages, num_chunks, split).map(Some),
    };
    let saved_pipeline = pipeline(saved, 1, &PipelineSplit::EVEN).unwrap_or_default();
    let told_apart = (saved.pp() == 1 || saved_pipeline.is_some()) && (layout.pp() == 1 || num_layers > 0);
    let sides = Sides {
        saved: Side::new(saved, saved_pipeline),
        target: Side::new(layout, pipeline(layout, num_chunks, split)?),
    };
    let no_bytes = |rank| RankChange { rank, bytes: Bytes::default() };
    let mut ranks: Vec<RankChange> = layout.grid().ranks().map(no_bytes).collect();
    let mut tensors = Vec::new();
    // Tensors share few placements, and a placement costs a division on every rank.
    let mut divisions: HashMap<[Placement; 2], Vec<Overlap>> = HashMap::new();
    for tensor in catalog.tensors().iter().filter(|tensor| tensor.kind != StateKind::Rng) {
        let element_bytes = tensor.dtype.size_bytes() as u64;
        let unplaced;
        let placements = tensor.placement.as_ref().zip(target.placement(tensor));
        let overlaps = match placements {
            Some((saved, wanted)) => match divisions.entry(sides.representatives(saved, wanted)) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => new.insert(sides.divide(&tensor.key, saved, wanted)?),
            },
            None => {
                unplaced = vec![Overlap { wanted: tensor.shape.numel(), held: 0, kept: 0 }; ranks.len()];
                &unplaced
            }
        };
        let mut all = Bytes::default();
        for (rank, overlap) in ranks.iter_mut().zip(overlaps) {
            let bytes = overlap.bytes(element_bytes);
            rank.bytes += bytes;
            all += bytes;
        }
        tensors.push(TensorChange {
            key: tensor.key.clone(),
            kind: tensor.kind,
            tensor_bytes: tensor.raw_bytes(),
            copies: all.wanted.checked_div(tensor.raw_bytes()).unwrap_or(0),
            cut: match placements {
                None => CutChange::Unknown,
                Some(_) if overlaps.iter().all(Overlap::is_unchanged) => CutChange::Unchanged,
                Some(_) => CutChange::Recut,
            },
            bytes: all,
        });
    }
    let mut bytes = Bytes::default();
    tensors.iter().for_each(|tensor| bytes += tensor.bytes);
    Ok(LayoutChange {
        saved: *saved,
        target: *layout,
        numbers: numbers(saved, layout),
        resume_in_place: tensors.iter().all(|tensor| tensor.cut == CutChange::Unchanged),
        bytes,
        random_streams: random_streams(catalog, saved, layout),
        ranks,
        fold: fold(catalog, layout),
        notes: notes(&tensors, told_apart),
        target_groups: sides.target.groups,
        tensors,
    })
}

impl LayoutChange {
    /// Bytes that each rank of the target layout reads from the store, ascending by rank: what it wants in whole frames.
    /// `catalog` and `target` are those that were planned.
    pub fn bytes_to_read(&self, catalog: &Catalog, target: &Target) -> Vec<u64> {
        let in_scope = |tensor: &StoredTensor| tensor.kind != StateKind::Rng;
        let entry = |tensor: &StoredTensor| StateEntry {
            key: tensor.key.clone(),
            kind: tensor.kind,
            dtype: tensor.dtype,
            placement: target
                .placement(tensor)
                .cloned()
                .unwrap_or_else(|| Placement::replicated(&tensor.shape)),
        };
        let entries = catalog.tensors().iter().filter(|tensor| in_scope(tensor)).map(entry).collect();
        let table = StateTable::new(entries).expect("a catalog has each key once");
        let groups = &self.target_groups;
        let bytes = |rank: &Rank| {
            let own = own_shards(&table, &groups.for_rank(*rank)).expect("the plan divided every tensor");
            let wanted: Vec<_> = own.into_iter().map(|own| own.shard).collect();
            let plan = plan_load(catalog, &wanted, &Strictness::exact(), &in_scope);
            plan.expect("a catalog holds its own tensors").bytes_to_read(catalog)
        };
        groups.ranks().iter().map(bytes).collect()
    }
}

fn numbers(saved: &ParallelLayout, target: &ParallelLayout) -> Vec<NumberChange> {
    let number =
        |name, of: fn(&ParallelLayout) -> u32| NumberChange { name, saved: of(saved), target: of(target) };
    let mut numbers = vec![
        number("world size", ParallelLayout::world_size),
        number("TP", ParallelLayout::tp),
        number("PP", ParallelLayout::pp),
        number("weight shards", |layout| layout.tp() * layout.gtp()),
        number("configured CP", |layout| layout.configured_cp().0),
        number("DP", ParallelLayout::dp),
        number("weight replicas", ParallelLayout::num_weight_replicas),
        number("GTP sequence shards", ParallelLayout::gtp_sequence_shards),
        number("runtime CP", |layout| layout.runtime_cp().0),
        number("batch parallel size", ParallelLayout::batch_parallel_size),
    ];
    let is_as_dense = |layout: &ParallelLayout| layout.experts() == ExpertSizes::as_dense(layout.tp());
    if !is_as_dense(saved) || !is_as_dense(target) {
        numbers.extend([
            number("ETP", |layout| layout.experts().etp),
            number("EP", |layout| layout.experts().ep),
            number("EGTP", |layout| layout.experts().egtp),
            number("expert replicas", ParallelLayout::edp),
        ]);
    }
    numbers
}

fn random_streams(catalog: &Catalog, saved: &ParallelLayout, target: &ParallelLayout) -> RandomStreams {
    if catalog.tensors().iter().all(|tensor| tensor.kind != StateKind::Rng) {
        RandomStreams::Absent
    } else if saved.axis_sizes() == target.axis_sizes() && same_experts(saved, target) {
        RandomStreams::Kept
    } else {
        RandomStreams::Derived
    }
}

/// Whether ranks of the same dense coordinates have the same coordinates of experts.
fn same_experts(saved: &ParallelLayout, target: &ParallelLayout) -> bool {
    let is_one = |layout: &ParallelLayout| {
        let ExpertSizes { etp, ep, egtp } = layout.experts();
        etp * ep * egtp == 1
    };
    saved.sizes().order == target.sizes().order || is_one(target)
}

fn fold(catalog: &Catalog, target: &ParallelLayout) -> Option<FoldChange> {
    let fold = Fold::of(target)?;
    let is_cut = |placement: &Placement| placement.is_cut_over(GroupKind::GtpRemat);
    let uncut = catalog.tensors().iter().filter(|tensor| {
        tensor.kind == StateKind::Optimizer && !tensor.placement.as_ref().is_some_and(is_cut)
    });
    let optimizer_bytes = uncut.map(|tensor| tensor.raw_bytes()).fold(0, u64::saturating_add);
    Some(FoldChange { fold, optimizer_bytes, memory: fold.memory(target, optimizer_bytes) })
}

/// Layers of the saved model, as far as its placements name them.
fn num_layers(catalog: &Catalog) -> u32 {
    let layer = |placement: &Placement| match placement.part() {
        ModelPart::Layer(layer) => layer.saturating_add(1),
        _ => 0,
    };
    catalog.tensors().iter().filter_map(|tensor| tensor.placement.as_ref()).map(layer).max().unwrap_or(0)
}

fn notes(tensors: &[TensorChange], told_apart: bool) -> Vec<String> {
    let mut notes = Vec::new();
    let unknown = tensors.iter().filter(|tensor| tensor.cut == CutChange::Unknown).count();
    if unknown > 0 {
        notes.push(format!(
            "without placement: {unknown} of {} tensors, counted whole on every rank as bytes to move",
            tensors.len()
        ));
    }
    if !told_apart {
        notes.push("pipeline stages are not told apart: each is counted as holding every layer".to_owned());
    }
    notes
}

/// The same placements under two layouts.
struct Sides<'a> {
    saved: Side<'a>,
    target: Side<'a>,
}

struct Side<'a> {
    layout: &'a ParallelLayout,
    groups: Arc<GroupTable>,
}

/// What one target rank wants, what the rank of its number held, and what is in both, in elements.
#[derive(Clone, Copy)]
struct Overlap {
    wanted: u64,
    held: u64,
    kept: u64,
}

impl Sides<'_> {
    /// Equal for tensors that both sides divide alike.
    fn representatives(&self, saved: &Placement, wanted: &Placement) -> [Placement; 2] {
        [(&self.saved, saved), (&self.target, wanted)]
            .map(|(side, placement)| placement.representative(&side.groups))
    }

    /// One overlap for each target rank, ascending.
    fn divide(
        &self,
        key: &TensorKey,
        saved: &Placement,
        wanted: &Placement,
    ) -> Result<Vec<Overlap>, UndividedTensor> {
        // Ranks with the same coordinates along the cuts hold the same boxes.
        let mut known: HashMap<(Option<Vec<GroupRank>>, Vec<GroupRank>), Overlap> = HashMap::new();
        let mut overlaps = Vec::new();
        for rank in self.target.groups.ranks() {
            let (held_by, wanted_by) = (self.saved.rank(*rank), self.target.rank(*rank));
            let wanted_by = wanted_by.expect("it is one of the target's ranks");
            let place =
                (held_by.as_ref().map(|held| coordinates(saved, held)), coordinates(wanted, &wanted_by));
            let overlap = match known.entry(place) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => {
                    let held = held_by.map(|held| self.saved.shard(key, saved, &held)).transpose()?;
                    let wants = self.target.shard(key, wanted, &wanted_by)?;
                    *new.insert(Overlap::new(held.as_ref(), &wants))
                }
            };
            overlaps.push(overlap);
        }
        Ok(overlaps)
    }
}

fn cuts(placement: &Placement) -> impl Iterator<Item = &Cut> {
    placement.dims().iter().flat_map(DimPlacement::cuts)
}

fn coordinates(placement: &Placement, groups: &ProcessGroups) -> Vec<GroupRank> {
    let stage = (placement.part() != ModelPart::EveryStage).then_some(GroupKind::Pp);
    cuts(placement).map(|cut| cut.group()).chain(stage).map(|group| groups.position(group)).collect()
}

impl<'a> Side<'a> {
    fn new(layout: &'a ParallelLayout, pipeline: Option<Pipeline>) -> Self {
        let groups = GroupTable::new("model", layout);
        let groups = match pipeline {
            Some(pipeline) => groups.with_pipeline(pipeline),
            None => groups,
        };
        Side { layout, groups: Arc::new(groups) }
    }

    fn rank(&self, rank: Rank) -> Option<ProcessGroups> {
        self.groups.ranks().binary_search(&rank).is_ok().then(|| self.groups.for_rank(rank))
    }

    fn shard(
        &self,
        key: &TensorKey,
        placement: &Placement,
        groups: &ProcessGroups,
    ) -> Result<LocalShard, UndividedTensor> {
        let undivided = |source| UndividedTensor { key: key.clone(), layout: *self.layout, source };
        placement.shard(groups).map_err(undivided)
    }
}

impl Overlap {
    fn new(held: Option<&LocalShard>, wanted: &LocalShard) -> Self {
        let elements = |shard: &LocalShard| shard.pieces.iter().map(|piece| piece.region.numel()).sum();
        let pairs = held.into_iter().flat_map(|held| {
            held.pieces.iter().flat_map(|held| wanted.pieces.iter().map(move |wanted| (held, wanted)))
        });
        let shared = pairs.filter_map(|(held, wanted)| held.region.intersect(&wanted.region));
        Overlap {
            wanted: elements(wanted),
            held: held.map_or(0, elements),
            kept: shared.map(|shared| shared.numel()).sum(),
        }
    }

    fn is_unchanged(&self) -> bool {
        self.kept == self.wanted && self.kept == self.held
    }

    fn bytes(&self, element_bytes: u64) -> Bytes {
        let [wanted, kept] = [self.wanted, self.kept].map(|elements| elements * element_bytes);
        Bytes { wanted, kept, moved: wanted - kept }
    }
}

impl AddAssign for Bytes {
    /// Sums over ranks saturate: a tensor may have up to 2⁶³ bytes.
    fn add_assign(&mut self, other: Bytes) {
        self.wanted = self.wanted.saturating_add(other.wanted);
        self.kept = self.kept.saturating_add(other.kept);
        self.moved = self.moved.saturating_add(other.moved);
    }
}

/// `runtime CP 1 → 128`, `TP 1 as before`.
impl fmt::Display for NumberChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.saved == self.target {
            true => write!(f, "{} {} as before", self.name, self.target),
            false => write!(f, "{} {} → {}", self.name, self.saved, self.target),
        }
    }
}

impl fmt::Display for RandomStreams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RandomStreams::Kept => "every rank goes on with its own random streams",
            RandomStreams::Derived => {
                "axes have other sizes: every rank derives its random streams anew; dropout and data order do not use them"
            }
            RandomStreams::Absent => "the checkpoint holds no random streams: every rank derives its own",
        })
    }
}
